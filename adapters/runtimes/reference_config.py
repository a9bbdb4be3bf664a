"""The configuration of the reference runtime, and what it can be told to do wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from gpuledger.domain.units import Bytes, Count, Milliseconds, PositiveBytes

from .options import Call, Manners, Positive, RuntimeOptions, SleepCalls, resolve

_SLEEP_CALLS: Final = SleepCalls((Call("/sleep"),), (Call("/wake_up"),), "/is_sleeping")


class ReferenceFaults(BaseModel):
    """What a reference runtime does wrong, for tests and soaks.

    Those of requests act beyond the first `healthy_requests`; the functional check of a load makes the first (of a
    chat that takes images the first two), and that of a wake further ones.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    while_file: Path | None = Field(
        default=None, description="The faults act only while this file exists; always when absent."
    )
    fail_load: Literal["exit", "oom", "hang", "unhealthy", "killed"] | None = Field(
        default=None,
        description="exit: ends with exit_status; oom: the same, complaining of memory; hang: never is ready; "
        "unhealthy: is ready and answers 500; killed: ends by SIGKILL in the midst of loading.",
    )
    exit_status: Annotated[int, Field(ge=1, le=125)] = 1
    healthy_requests: Count = Field(
        default=0, description="So many requests are answered well before the faults of requests act."
    )
    crash_after_requests: Count | None = Field(
        default=None,
        description="Answers this many, the functional check among them, and dies in the midst of the next.",
    )
    crash_after_tokens: Count | None = Field(
        default=None, description="Requests: dies after so many tokens of an answer, or in place of another answer."
    )
    invalid_output: bool = Field(
        default=False,
        description="Requests: embeddings and scores are all zeros, texts are empty, of recordings there is none.",
    )
    hang_requests: bool = Field(default=False, description="Requests get no answer.")
    oom_requests: bool = Field(
        default=False, description="Requests: answers 500, complaining of memory, and ends with exit_status."
    )
    lie_ready: bool = Field(default=False, description="Says at once that it is ready; requests get 500.")
    grow_bytes: Bytes = Field(default=0, description="Requests: takes so much more with the first, and keeps it.")
    ignore_term: bool = Field(default=False, description="Only SIGKILL ends it.")
    sleep_keeps_memory: bool = Field(default=False, description="Says that it sleeps, and holds what it held.")
    keep_memory: bool = Field(
        default=False, description="Only on a card that is a stand-in of the tests: what it held there stays used."
    )

    _path = field_validator("while_file", mode="before")(resolve)


class ReferenceSleep(BaseModel):
    """How a reference runtime sleeps: it answers, gives its memory back and serves nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    asleep_bytes: PositiveBytes = Field(default=20 * 2**20, description="What the whole process holds asleep.")
    sleep_ms: Milliseconds = Field(default=0, description="How long going to sleep takes.")
    wake_ms: Milliseconds = Field(default=0, description="How long waking up takes.")


class ReferenceConfig(RuntimeOptions):
    """Our own server without a model: holds the bytes it is told and answers deterministically after a set time."""

    type: Literal["reference"]
    idle_bytes: PositiveBytes = Field(default=32 * 2**20, description="What the whole process holds once loaded.")
    peak_bytes: PositiveBytes = Field(default=48 * 2**20, description="What it holds while `parallel` requests run.")
    load_ms: Milliseconds = Field(default=0, description="How long loading takes.")
    service_ms: Milliseconds = Field(default=0, description="How long an embedding takes, or an answer's first token.")
    token_ms: Milliseconds = Field(default=0, description="How long each further token takes.")
    tokens: Positive = Field(default=16, description="Tokens of an answer that is not cut by max_tokens.")
    sleep: ReferenceSleep | None = Field(default=None, description="That it can sleep, and how; it cannot when absent.")
    faults: ReferenceFaults = ReferenceFaults()

    @property
    def manners(self) -> Manners:
        return Manners(sleep=None if self.sleep is None else _SLEEP_CALLS)

    @model_validator(mode="after")
    def _sizes_fit_together(self) -> Self:
        if self.peak_bytes < self.idle_bytes:
            raise ValueError("peak_bytes: must not be less than idle_bytes")
        if self.sleep is not None and self.sleep.asleep_bytes > self.idle_bytes:
            raise ValueError("sleep.asleep_bytes: must not be more than idle_bytes")
        return self
