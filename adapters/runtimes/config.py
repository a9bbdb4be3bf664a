"""How the runtime of a deployment is launched: what an operator writes in the local configuration.

None of it enters the ledger and none of it comes from the network. What shapes memory enters `config_hash`
(semantics.md 3) through the runtime's command line, which is made from these values alone.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from gpuledger.adapters.paths import written_path
from gpuledger.domain.units import Count, Milliseconds, PositiveBytes, Sha256Hex

#: Context key of `model_validate`: the folder that relative paths are relative to.
BASE_FOLDER = "base_folder"

Positive: TypeAlias = Annotated[int, Field(ge=1, le=2**31 - 1)]
CacheType: TypeAlias = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]


class Task(StrEnum):
    """What a deployment answers, and so how it is checked."""

    EMBEDDING = "embedding"
    CHAT = "chat"


def _resolve(path: object, info: ValidationInfo) -> object:
    # What is no text is left for the type to refuse.
    if not isinstance(path, str):
        return path
    context: dict[str, Path] = info.context or {}
    return str(written_path(path, context.get(BASE_FOLDER, Path())))


class _Config(BaseModel):
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


class LlamaCppConfig(_Config):
    """llama.cpp's server: a `llama-server` where there is one, otherwise the one in the PyPI package xllamacpp.

    llama.cpp's own `--ctx-size` is the total of all slots: `context_length * parallel`. It caps the context of a
    slot at what the model was trained with. An embedding is computed in one piece, so `ubatch_size` must hold it.
    """

    type: Literal["llama_cpp"]
    model: Path = Field(description="A GGUF file; of a split one the first part.")
    sha256: Sha256Hex | None = Field(default=None, description="What the model's SHA-256 must be; any when absent.")
    server: Path | None = Field(default=None, description="The llama-server to run; searched for when absent.")
    ubatch_size: Positive | None = Field(default=None, description="Tokens computed at once; batch_size when absent.")
    threads: Positive = Field(default=2, le=1024, description="llama.cpp spins: no more than there are idle cores.")
    gpu_layers: Annotated[int, Field(ge=0, le=100_000)] | Literal["all"] = 0
    mmap: bool = Field(
        default=False, description="Map the weights. On a host they are then page cache (semantics.md 1)."
    )
    flash_attention: Literal["on", "off", "auto"] = "auto"
    cache_type_k: CacheType = "f16"
    cache_type_v: CacheType = "f16"
    pooling: Literal["mean", "cls", "last"] | None = Field(default=None, description="The model's own when absent.")

    _paths = field_validator("model", "server", mode="before")(_resolve)

    @property
    def micro_batch(self) -> int:
        return self.batch_size if self.ubatch_size is None else self.ubatch_size

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.micro_batch > self.batch_size:
            raise ValueError("ubatch_size: must not be greater than batch_size")
        if self.task is Task.EMBEDDING and self.micro_batch < self.context_length:
            raise ValueError(
                "ubatch_size: an embedding is computed in one piece, so it must not be less than context_length"
            )
        if self.pooling is not None and self.task is not Task.EMBEDDING:
            raise ValueError("pooling: only a deployment that serves embeddings has it")
        return self


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


class ReferenceConfig(_Config):
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


RuntimeConfig: TypeAlias = Annotated[LlamaCppConfig | ReferenceConfig, Field(discriminator="type")]
