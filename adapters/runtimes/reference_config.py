"""The configuration of the reference runtime, and what it can be told to do wrong."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gpuledger.domain.units import Count, Milliseconds, PositiveBytes

from .options import Positive, RuntimeOptions


class ReferenceFaults(BaseModel):
    """What a reference runtime does wrong, for tests and soaks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fail_load: Literal["exit", "oom", "hang"] | None = Field(
        default=None,
        description="exit: ends with exit_status; oom: the same, complaining of memory; hang: never is ready.",
    )
    exit_status: Annotated[int, Field(ge=1, le=125)] = 1
    crash_after_requests: Count | None = Field(
        default=None,
        description="Answers this many, the functional check among them, and dies in the midst of the next.",
    )
    invalid_output: bool = Field(default=False, description="Embeddings are all zeros, texts are empty.")
    hang_requests: bool = Field(default=False, description="Requests get no answer.")
    ignore_term: bool = Field(default=False, description="Only SIGKILL ends it.")


class ReferenceConfig(RuntimeOptions):
    """Our own server without a model: holds the bytes it is told and answers deterministically after a set time."""

    type: Literal["reference"]
    idle_bytes: PositiveBytes = Field(default=32 * 2**20, description="What the whole process holds once loaded.")
    peak_bytes: PositiveBytes = Field(default=48 * 2**20, description="What it holds while `parallel` requests run.")
    load_ms: Milliseconds = Field(default=0, description="How long loading takes.")
    service_ms: Milliseconds = Field(default=0, description="How long an embedding takes, or an answer's first token.")
    token_ms: Milliseconds = Field(default=0, description="How long each further token takes.")
    tokens: Positive = Field(default=16, description="Tokens of an answer that is not cut by max_tokens.")
    faults: ReferenceFaults = ReferenceFaults()

    @model_validator(mode="after")
    def _peak_is_the_greater(self) -> Self:
        if self.peak_bytes < self.idle_bytes:
            raise ValueError("peak_bytes: must not be less than idle_bytes")
        return self

    @property
    def vector_length(self) -> int:
        return self.dimensions or 384
