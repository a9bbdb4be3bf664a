"""How the runtime of a deployment is launched: what an operator writes in the local configuration.

None of it enters the ledger and none of it comes from the network. What shapes memory enters `config_hash`
(semantics.md 3) through the runtime's command line, which is made from these values alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from gpuledger.domain.units import Sha256Hex

from .command_config import CommandConfig, SleepPaths
from .metrics import MetricsMapping
from .options import BASE_FOLDER, Positive, RuntimeOptions, Task, resolve
from .reference_config import ReferenceConfig, ReferenceFaults
from .vllm_config import VllmConfig

__all__ = [
    "BASE_FOLDER",
    "CommandConfig",
    "LlamaCppConfig",
    "MetricsMapping",
    "ReferenceConfig",
    "ReferenceFaults",
    "RuntimeConfig",
    "SleepPaths",
    "Task",
    "VllmConfig",
]

CacheType: TypeAlias = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]


class LlamaCppConfig(RuntimeOptions):
    """llama.cpp's server: a `llama-server` where there is one, otherwise the one in the PyPI package xllamacpp.

    llama.cpp's own `--ctx-size` is the total of all slots: `context_length * parallel`. It caps the context of a
    slot at what the model was trained with. An embedding is computed in one piece, so `ubatch_size` must hold it.
    """

    type: Literal["llama_cpp"]
    model: Path = Field(description="A GGUF file; of a split one the first part.")
    sha256: Sha256Hex | None = Field(default=None, description="What the model's SHA-256 must be; any when absent.")
    projector: Path | None = Field(
        default=None, description="The GGUF file (mmproj) by which the model sees; needed for `max_images`."
    )
    server: Path | None = Field(default=None, description="The llama-server to run; searched for when absent.")
    ubatch_size: Positive | None = Field(default=None, description="Tokens computed at once; batch_size when absent.")
    threads: int = Field(default=2, ge=1, le=1024, description="llama.cpp spins: no more than there are idle cores.")
    gpu_layers: Annotated[int, Field(ge=0, le=100_000)] | Literal["all"] = 0
    mmap: bool = Field(
        default=False, description="Map the weights. On a host they are then page cache (semantics.md 1)."
    )
    flash_attention: Literal["on", "off", "auto"] = "auto"
    cache_type_k: CacheType = "f16"
    cache_type_v: CacheType = "f16"
    pooling: Literal["mean", "cls", "last"] | None = Field(default=None, description="The model's own when absent.")

    _paths = field_validator("model", "projector", "server", mode="before")(resolve)

    @property
    def micro_batch(self) -> int:
        return self.batch_size if self.ubatch_size is None else self.ubatch_size

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.micro_batch > self.batch_size:
            raise ValueError("ubatch_size: must not be greater than batch_size")
        # What was not written is no place to look for a mistake.
        key = "batch_size" if self.ubatch_size is None else "ubatch_size"
        at_least = f"so it must not be less than context_length ({self.context_length})"
        if self.task is Task.EMBEDDING and self.micro_batch < self.context_length:
            raise ValueError(f"{key}: an embedding is computed in one piece, {at_least}")
        if self.task is Task.RERANK and self.micro_batch < self.context_length:
            raise ValueError(f"{key}: a text is ranked in one piece, {at_least}")
        if self.pooling is not None and self.task is not Task.EMBEDDING:
            raise ValueError("pooling: only a deployment that serves embeddings has it")
        return self

    @model_validator(mode="after")
    def _can_do_its_task(self) -> Self:
        if self.task is Task.TRANSCRIPTION:
            raise ValueError("task: llama.cpp is started here for text and images: use a runtime of type command")
        if (self.projector is None) != (self.max_images == 0):
            raise ValueError("projector: goes with max_images, and max_images with it")
        return self


RuntimeConfig: TypeAlias = Annotated[
    LlamaCppConfig | VllmConfig | CommandConfig | ReferenceConfig, Field(discriminator="type")
]
