"""What the operator API needs of the scheduler's shell: documents to show, and operations to carry out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

from gpuledger.domain.document_problems import Problem
from gpuledger.domain.documents import Json
from gpuledger.domain.messages import Operation
from gpuledger.domain.policy import Priority
from gpuledger.domain.state import ResidencyPolicy

from .ports import Cause

Document: TypeAlias = Mapping[str, Any]


class Denial(StrEnum):
    """Why an operation is not carried out. The values are codes of the API."""

    #: What it names is not there.
    NOT_FOUND = "not_found"
    #: It is there, and this cannot be done with it.
    REFUSED = "operation_refused"
    #: Somebody else was there first.
    REVISION_CHANGED = "revision_changed"
    #: A value that the document carries cannot be used; `problems` have their places.
    INVALID = "invalid_document"


@dataclass(frozen=True, slots=True)
class Denied:
    """Nothing was recorded."""

    denial: Denial
    message: str
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class Shut:
    """Nothing can be recorded now."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class Trial:
    """A question of which only the plan is wanted. In the name of `client`, or of a class, and of LAB or not."""

    capability: str
    client: str | None
    priority: Priority
    lab: bool
    fallback_rank: int
    deadline_ms: int | None


@dataclass(frozen=True, slots=True)
class Revision:
    """Keys of a policy that an operator wants otherwise. `if_revision`: what the policy must be called until then."""

    by: str
    keys: Mapping[str, Json]
    if_revision: str | None
    dry_run: bool


@dataclass(frozen=True, slots=True)
class Residing:
    """How long a model shall stay. `ttl_seconds`: None to leave its keep-warm time as it is."""

    by: str
    deployment_id: str
    policy: ResidencyPolicy
    ttl_seconds: int | None


Answer: TypeAlias = "Document | Denied | Shut"


class OperatorDesk(Protocol):
    """Where the operator API hands in what it is asked. One event loop; documents are ready for JSON."""

    async def status(self) -> Document:
        """`gpuledger.status/1` as it is now."""
        ...

    async def alerts(self) -> Document:
        """What needs a look, and what to do about it."""
        ...

    async def queue(self) -> Document:
        """Who waits, in claim order."""
        ...

    def nodes(self) -> Document:
        """Nodes, what is on them, and what operators said of them."""
        ...

    def policy(self) -> Document:
        """The policy as a whole."""
        ...

    async def plans(self, limit: int) -> Answer:
        """The newest decisions, newest first."""
        ...

    async def operations(self, limit: int) -> Answer:
        """What operators did last, newest first."""
        ...

    def try_plan(self, trial: Trial) -> Answer:
        """The plan that this question would get now. Nothing of it is recorded."""
        ...

    async def revise_policy(self, revision: Revision) -> Answer:
        """What differs, and what was recorded of it; of a dry run nothing is."""
        ...

    async def set_residency(self, residing: Residing) -> Answer:
        """What was recorded: nothing where it stood so already."""
        ...

    async def carry_out(self, operation: Operation) -> Answer:
        """What was recorded: nothing where it stood so already."""
        ...
