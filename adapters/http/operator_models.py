"""What the operator API takes: ids, words of closed lists, numbers and keys of the policy.

Nothing here could name a program, a place in a file system, an address or a process, and what is not here is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias, cast

from pydantic import Field, TypeAdapter, WithJsonSchema

from gpuledger.domain.documents import Json
from gpuledger.domain.policy import Policy, Priority
from gpuledger.domain.state import DOCUMENT, ResidencyPolicy
from gpuledger.domain.units import Identifier

#: As many as a policy keeps in reach by default; each is some KiB.
MAX_LIMIT: Final = 500
MAX_DEADLINE_MS: Final = 86_400_000
#: Contracts have two ranks or three.
MAX_RANK: Final = 100


def _inlined(schema: Json, types: Mapping[str, Json]) -> Json:
    """A schema that stands for itself, to be put into another one."""
    if isinstance(schema, list):
        return [_inlined(one, types) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(types[str(schema["$ref"]).rpartition("/")[2]], types)
    return {key: _inlined(value, types) for key, value in schema.items() if key != "$defs"}


_POLICY: Final[dict[str, Any]] = TypeAdapter(Policy).json_schema()

PolicyKeys: TypeAlias = Annotated[
    Mapping[str, Any], WithJsonSchema(cast("dict[str, Any]", _inlined(_POLICY, _POLICY["$defs"])))
]
"""Some or all keys of a policy. What they lead to is checked as a whole, so that every problem is told at once."""


@dataclass(frozen=True, slots=True)
class Nothing:
    """An action that needs no words, or a path without a query."""

    __pydantic_config__ = DOCUMENT


@dataclass(frozen=True, slots=True)
class PlanTrial:
    """What a request would be told now: in the name of a client, or of a class and of LAB or not."""

    __pydantic_config__ = DOCUMENT

    capability: Identifier
    client: Identifier | None = None
    priority: Priority | None = None
    lab: bool | None = None
    fallback_rank: Annotated[int, Field(ge=0, le=MAX_RANK)] = 0
    deadline_ms: Annotated[int, Field(ge=1, le=MAX_DEADLINE_MS)] | None = None


@dataclass(frozen=True, slots=True)
class PolicyRevision:
    """Keys that change; the others stay. `if_revision`: refuse when the policy is called otherwise by now."""

    __pydantic_config__ = DOCUMENT

    policy: PolicyKeys
    if_revision: Identifier | None = None


@dataclass(frozen=True, slots=True)
class ResidencyChange:
    """How long a model stays. Without `ttl_seconds` its keep-warm time stays as it is."""

    __pydantic_config__ = DOCUMENT

    policy: ResidencyPolicy
    ttl_seconds: Annotated[int, Field(ge=0, le=10**9)] | None = None


@dataclass(frozen=True, slots=True)
class Unload:
    """What nothing uses: of one deployment, or of all."""

    __pydantic_config__ = DOCUMENT

    deployment: Identifier | None = None


@dataclass(frozen=True, slots=True)
class Newest:
    """A query: how many."""

    __pydantic_config__ = DOCUMENT

    limit: Annotated[int, Field(ge=1, le=MAX_LIMIT)] = 20


@dataclass(frozen=True, slots=True)
class Trying:
    """A query: show what would change, and change nothing."""

    __pydantic_config__ = DOCUMENT

    dry_run: bool = False
