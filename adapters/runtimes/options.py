"""What the configuration of every runtime has: what it answers, and how much of it at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Self, TypeAlias, cast

import jsonschema
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from gpuledger.adapters.paths import written_path
from gpuledger.domain.units import GIB, MIB

Json: TypeAlias = str | int | bool | Sequence["Json"] | Mapping[str, "Json"] | None

#: Context key of `model_validate`: the folder that relative paths are relative to.
BASE_FOLDER: Final = "base_folder"

#: Not to be narrowed by a `Field` beside it: pydantic keeps this bound, and forgets the other.
Positive: TypeAlias = Annotated[int, Field(ge=1, le=2**31 - 1)]
#: A path of a server of ours, with a query where need be: what follows the port in a URL.
URL_PATH_PATTERN: Final = r"^/[A-Za-z0-9/._~!$&'()*+,;=:@%?-]*$"
UrlPath: TypeAlias = Annotated[str, Field(pattern=URL_PATH_PATTERN, max_length=500)]
#: Of what is wrong with a schema: its words may quote the whole of it.
_SHOWN_CHARACTERS: Final = 200


class Task(StrEnum):
    """What a deployment answers, and so how it is checked."""

    EMBEDDING = "embedding"
    CHAT = "chat"
    TRANSCRIPTION = "transcription"
    RERANK = "rerank"


@dataclass(frozen=True, slots=True)
class Call:
    """A POST to a runtime, with a JSON document where it takes one."""

    path: str
    document: Mapping[str, Json] | None = None


@dataclass(frozen=True, slots=True)
class SleepCalls:
    """What makes a runtime give its memory back and take it again, one call after the other.

    `state_path`: where it says `{"is_sleeping": true}`; None where its answers to the calls are all it says.
    """

    sleep: tuple[Call, ...]
    wake: tuple[Call, ...]
    state_path: str | None = None


@dataclass(frozen=True, slots=True)
class Manners:
    """How a runtime is spoken to, where that differs from one to the next.

    `paths`: by operation, where it is not OpenAI's. `check_path` and `check_fields`: of the functional check.
    """

    ready_path: str = "/health"
    metrics_path: str = "/metrics"
    paths: Mapping[str, str] = field(default_factory=dict[str, str])
    check_path: str | None = None
    check_fields: Mapping[str, Json] = field(default_factory=dict[str, Json])
    sleep: SleepCalls | None = None


def resolve(path: object, info: ValidationInfo) -> object:
    """A path as it is written in the file, relative to its folder: a `before` validator of fields that are paths."""
    # What is no text is left for the type to refuse.
    if not isinstance(path, str):
        return path
    context: dict[str, Path] = info.context or {}
    return str(written_path(path, context.get(BASE_FOLDER, Path())))


class RuntimeOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    task: Task
    context_length: Positive = Field(
        default=512, description="Tokens that one request may use, prompt and answer together."
    )
    batch_size: Positive = Field(default=512, description="Tokens that are processed in one go.")
    parallel: int = Field(
        default=1, ge=1, le=256, description="Requests served at the same time: the concurrency of the deployment."
    )
    max_inputs: int = Field(
        default=256, ge=1, le=2048, description="Texts that one embeddings request may bring; each costs memory."
    )
    max_images: int = Field(default=0, ge=0, le=64, description="Images that one chat request may bring.")
    max_audio_bytes: int = Field(
        default=25 * MIB, ge=1, le=GIB, description="The longest recording that one transcription request may bring."
    )
    dimensions: Positive | None = Field(default=None, description="Length of an embedding, checked at load when given.")
    load_timeout_seconds: int = Field(default=120, ge=1, le=86_400, description="From its first instruction to ready.")
    check_schema: Mapping[str, Any] | None = Field(
        default=None, description="A JSON schema that the answer of the functional check must satisfy."
    )

    @property
    def manners(self) -> Manners:
        """How it is spoken to."""
        return Manners()

    @property
    def sleeps(self) -> bool:
        """Whether it can give its memory back and keep its process."""
        return self.manners.sleep is not None

    @field_validator("check_schema")
    @classmethod
    def _is_a_schema(cls, schema: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        if schema is not None:
            kind: type[Validator] = validator_for(schema, default=jsonschema.Draft202012Validator)
            try:
                kind.check_schema(dict(schema))
            except jsonschema.SchemaError as error:
                raise ValueError(f"is no JSON schema: {error.message[:_SHOWN_CHARACTERS]}") from None
            # A reference to elsewhere would be fetched, by whoever judges an answer.
            if not all(reference.startswith("#") for reference in _references(schema)):
                raise ValueError("must refer to nothing outside itself: each $ref begins with #")
        return schema

    @model_validator(mode="after")
    def _limits_are_of_their_task(self) -> Self:
        if self.dimensions is not None and self.task is not Task.EMBEDDING:
            raise ValueError("dimensions: only a deployment that serves embeddings has them")
        if self.max_images and self.task is not Task.CHAT:
            raise ValueError("max_images: only a deployment that chats takes images")
        if "max_audio_bytes" in self.model_fields_set and self.task is not Task.TRANSCRIPTION:
            raise ValueError("max_audio_bytes: only a deployment that transcribes takes recordings")
        return self


def _references(schema: object) -> Iterator[str]:
    if isinstance(schema, Mapping):
        entries = cast("Mapping[str, object]", schema)
        yield from (str(entries[key]) for key in ("$ref", "$dynamicRef") if isinstance(entries.get(key), str))
        parts: Iterable[object] = entries.values()
    else:
        parts = cast("list[object]", schema) if isinstance(schema, list) else ()
    for part in parts:
        yield from _references(part)
