"""What the configuration of every runtime has: what it answers, and how much of it at once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from gpuledger.adapters.paths import written_path

#: Context key of `model_validate`: the folder that relative paths are relative to.
BASE_FOLDER: Final = "base_folder"

Positive: TypeAlias = Annotated[int, Field(ge=1, le=2**31 - 1)]


class Task(StrEnum):
    """What a deployment answers, and so how it is checked."""

    EMBEDDING = "embedding"
    CHAT = "chat"


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
    parallel: Positive = Field(
        default=1, le=256, description="Requests served at the same time: the concurrency of the deployment."
    )
    max_inputs: Positive = Field(
        default=256, le=2048, description="Texts that one embeddings request may bring; each costs memory."
    )
    dimensions: Positive | None = Field(default=None, description="Length of an embedding, checked at load when given.")
    load_timeout_seconds: Positive = Field(default=120, le=86_400, description="From its first instruction to ready.")

    @model_validator(mode="after")
    def _dimensions_are_of_embeddings(self) -> Self:
        if self.dimensions is not None and self.task is not Task.EMBEDDING:
            raise ValueError("dimensions: only a deployment that serves embeddings has them")
        return self
