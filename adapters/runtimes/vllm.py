"""vLLM: `vllm serve` on one GPU.

Options are those of docs.vllm.ai, "vllm serve"; what its key does not protect is in "Security" there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import RuntimeFacts, RuntimeFigures
from gpuledger.domain.state import Kind

from .artifacts import Artifacts
from .engine import Json, config_hash
from .guard import gpuledger_guard
from .options import Task
from .process import LOOPBACK, Command
from .programs import Versions, found
from .vllm_config import VllmConfig

NO_VLLM: Final = "no_vllm"
#: Only the listed part of the network, and nobody's: no downloads, no statistics to its makers.
SETTINGS: Final = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": LOOPBACK,
    # Requests are logged at the level "info", whatever else is said about them.
    "VLLM_LOGGING_LEVEL": "WARNING",
}
_QUIET: Final = ("--disable-uvicorn-access-log", "--max-log-len", "0", "--no-log-error-stack")
_POOLS: Final = frozenset({Task.EMBEDDING, Task.RERANK})

_COMPLAINTS: Final = (
    # Until pull request 45026 (June 2026) it took numbers of devices alone.
    (re.compile(rb"invalid literal for int\(\) with base 10: '(?:GPU|MIG)-"), "device_id_not_taken"),
    (re.compile(rb"[Aa]ddress already in use"), "port_in_use"),
    (re.compile(rb"[Nn]o module named '?gpuledger_guard"), "guard_not_loaded"),
    (re.compile(rb"unrecognized arguments?:"), "argument_not_known"),
    (re.compile(rb"Model architectures \[.*\] are not supported"), "model_not_supported"),
    (re.compile(rb"SafetensorError|InvalidHeaderDeserialization|MetadataIncompleteBuffer"), "model_corrupt"),
    (re.compile(rb"No CUDA GPUs are available|Failed to infer device type"), "device_missing"),
)


class Vllm:
    """`environment`: what it will inherit. `source`: where more is taken from, by the names in its configuration."""

    def __init__(
        self, config: VllmConfig, artifacts: Artifacts, environment: Mapping[str, str], source: Mapping[str, str]
    ) -> None:
        self._config = config
        self._artifacts = artifacts
        self._variables = config.variables(source)
        self._environment = {**environment, **self._variables}
        self._versions = Versions()

    @property
    def kinds(self) -> frozenset[Kind]:
        return frozenset((Kind.GPU,))

    @property
    def blames_request(self) -> tuple[str, ...]:
        """It answers 4xx to what it does not take."""
        return ()

    def facts(self) -> RuntimeFacts:
        artifact = self._artifacts.inspect_pinned(self._config.model, self._config.sha256)
        asked = (*self._program(), "--version")
        told = self._versions.ask(asked, self._environment, _read_version, NO_VLLM, self._config.folder)
        version = f"vllm-{told}"
        shape: dict[str, Json] = {
            **self._config.own_shape(),
            "type": self._config.type,
            "version": version,
            "artifact_sha256": artifact.sha256,
            "options": self._options(),
        }
        return RuntimeFacts(
            "vllm", version, config_hash(shape), artifact.sha256, artifact.size_bytes, starts_alone=True
        )

    def command(self, port: int, api_key: str) -> Command:
        place = ("--host", LOOPBACK, "--port", str(port), "--served-model-name", self._config.served_name)
        guard = ("--middleware", f"{gpuledger_guard.__name__.rpartition('.')[2]}.Guard") if self._config.guard else ()
        argv = (*self._program(), "serve", str(self._config.model.absolute()), *place, *guard, *_QUIET)
        variables = {**SETTINGS, **self._variables, **self._own_variables(api_key)}
        return Command((*argv, *self._options()), variables, folder=self._config.folder)

    def figures(self, metrics: str) -> RuntimeFigures:
        return self._config.metrics.figures(metrics)

    def complaint(self, output: bytes) -> tuple[Failure, str] | None:
        details = (detail for pattern, detail in _COMPLAINTS if pattern.search(output))
        return next(((Failure.MODEL_LOAD_FAILED, detail) for detail in details), None)

    def _program(self) -> tuple[str, ...]:
        first, *others = self._config.command
        return found(first, self._environment), *others

    def _own_variables(self, api_key: str) -> dict[str, str]:
        variables = {"VLLM_API_KEY": api_key}
        if self._config.guard:
            variables["PYTHONPATH"] = str(Path(gpuledger_guard.__file__).parent)
        if self._config.sleep_level is not None:
            variables["VLLM_SERVER_DEV_MODE"] = "1"
        return variables

    def _options(self) -> tuple[str, ...]:
        """All that follows from the configuration and is no place: this is what shapes memory."""
        config = self._config
        options = ["--max-model-len", str(config.context_length), "--max-num-seqs", str(config.parallel)]
        options += ["--max-num-batched-tokens", str(config.batch_size)]
        options += ["--gpu-memory-utilization", ratio_text(config.gpu_memory_utilization_bp)]
        options += ["--dtype", config.dtype, "--kv-cache-dtype", config.kv_cache_dtype]
        options += ["--kv-cache-memory-bytes", str(config.kv_cache_bytes)] if config.kv_cache_bytes is not None else []
        options += ["--quantization", config.quantization] if config.quantization is not None else []
        options += ["--enforce-eager"] if config.enforce_eager else []
        options += ["--runner", "pooling"] if config.task in _POOLS else []
        options += ["--limit-mm-per-prompt", f'{{"image":{config.max_images}}}'] if config.task is Task.CHAT else []
        options += ["--enable-sleep-mode"] if config.sleep_level is not None else []
        return (*options, *config.arguments)


def ratio_text(ratio_bp: int) -> str:
    """Basis points as a decimal ratio, exactly.

    >>> ratio_text(9200), ratio_text(10000), ratio_text(5)
    ('0.9200', '1.0000', '0.0005')
    """
    return f"{ratio_bp // 10_000}.{ratio_bp % 10_000:04}"


def _read_version(output: bytes, _: bytes) -> str | None:
    """`vllm --version` says `0.24.0`, perhaps after lines of its log."""
    match = re.search(rb"^\s*v?(\d+\.\d+[0-9A-Za-z.+-]*)\s*\Z", output.splitlines()[-1] if output.strip() else b"")
    return None if match is None else match[1].decode()
