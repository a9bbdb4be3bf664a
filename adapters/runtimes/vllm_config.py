"""The configuration of vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from gpuledger.domain.units import PositiveBytes, Sha256Hex

from .options import Call, Manners, SleepCalls, Task, resolve
from .server_config import Arguments, CommandLine, ServerOptions, resolve_program

WORD_PATTERN: Final = r"^[A-Za-z0-9_.-]{1,64}$"
Word: TypeAlias = Annotated[str, Field(pattern=WORD_PATTERN)]

#: Options that are made from other keys, or that would let others in. vLLM takes `_` for `-` in them.
_TAKEN: Final = frozenset((
    "model", "served-model-name", "host", "port", "uds", "root-path", "api-key", "middleware", "ssl-keyfile",
    "ssl-certfile", "max-model-len", "max-num-seqs", "max-num-batched-tokens", "gpu-memory-utilization",
    "kv-cache-memory-bytes", "dtype", "quantization", "kv-cache-dtype", "enforce-eager", "enable-sleep-mode",
    "limit-mm-per-prompt", "runner", "device-ids", "tensor-parallel-size", "pipeline-parallel-size",
    "data-parallel-size", "enable-log-requests", "enable-log-outputs", "log-error-stack", "max-log-len",
    "disable-uvicorn-access-log", "uvicorn-log-level", "config", "headless",
))  # fmt: skip
#: Their short forms.
_TAKEN_SHORT: Final = ("-tp", "-pp", "-dp", "-q")


class VllmConfig(ServerOptions):
    """vLLM's OpenAI-compatible server on one GPU: `vllm serve`, of a version that takes UUIDs of devices.

    vLLM takes `gpu_memory_utilization_bp` of the card's *total* memory, and refuses to start when less is free.
    `context_length`, `parallel` and `batch_size` are its `--max-model-len`, `--max-num-seqs` and
    `--max-num-batched-tokens`.
    """

    type: Literal["vllm"]
    model: Path = Field(description="A folder with a model as Hugging Face stores it, or one GGUF file.")
    sha256: Sha256Hex | None = Field(default=None, description="What the model's SHA-256 must be; any when absent.")
    command: CommandLine = Field(default=("vllm",), description="What is run, before `serve`.")
    gpu_memory_utilization_bp: int = Field(
        # vLLM's own 9,200 leaves too little: what it takes, the margin and the reserve of the policy must fit the card.
        default=8_000,
        ge=1,
        le=10_000,
        description="Of the card's total memory: what vLLM takes, in basis points.",
    )
    kv_cache_bytes: PositiveBytes | None = Field(
        default=None, description="Size of its cache; when absent, what the other two leave of its share."
    )
    dtype: Word = Field(default="auto", description="vLLM's `--dtype`.")
    quantization: Word | None = Field(default=None, description="vLLM's `--quantization`; the model's own when absent.")
    kv_cache_dtype: Word = Field(default="auto", description="vLLM's `--kv-cache-dtype`.")
    enforce_eager: bool = Field(default=False, description="No CUDA graphs: less memory, slower.")
    sleep_level: Literal[1, 2] | None = Field(
        default=None,
        description="Lets it sleep. 1: weights go to the host's memory. 2: they are dropped, and read again to wake.",
    )
    arguments: Arguments = Field(default=(), description="More options of `vllm serve`, each a word of its own.")
    guard: bool = Field(
        default=True,
        description="Load a module of gpuledger's into vLLM that asks for the key on every path, not only below /v1.",
    )

    _paths = field_validator("model", mode="before")(resolve)
    _program = field_validator("command", mode="before")(resolve_program)

    @property
    def manners(self) -> Manners:
        return Manners(
            metrics_path=self.metrics.path,
            check_fields={"model": self.served_name},
            sleep=None if self.sleep_level is None else _SLEEP[self.sleep_level],
        )

    @property
    def reserved_variables(self) -> tuple[str, ...]:
        return "VLLM_API_KEY", "VLLM_SERVER_DEV_MODE", *(("PYTHONPATH",) if self.guard else ())

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.batch_size < self.parallel:
            raise ValueError("batch_size: must not be less than parallel")
        if self.task in (Task.EMBEDDING, Task.RERANK) and self.batch_size < self.context_length:
            raise ValueError("batch_size: a text is computed in one piece, so it must not be less than context_length")
        for argument in self.arguments:
            name = argument.partition("=")[0].replace("_", "-")
            if name.removeprefix("--").removeprefix("no-") in _TAKEN or name.startswith(_TAKEN_SHORT):
                raise ValueError(f"arguments: {argument.partition('=')[0]} follows from the other keys")
        return self


#: docs.vllm.ai, "Sleep Mode". After level 2 the weights are room without content until they are read again.
_SLEEP: Final = {
    1: SleepCalls((Call("/sleep?level=1"),), (Call("/wake_up"),), "/is_sleeping"),
    2: SleepCalls(
        (Call("/sleep?level=2"),),
        (
            Call("/wake_up?tags=weights"),
            Call("/collective_rpc", {"method": "reload_weights"}),
            Call("/wake_up?tags=kv_cache"),
        ),
        "/is_sleeping",
    ),
}
