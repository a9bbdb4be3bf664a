"""llama.cpp: its own `llama-server`, or the same server out of the PyPI package xllamacpp (llama_server.py)."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import RuntimeFacts, RuntimeFault, RuntimeFigures
from gpuledger.domain.state import Kind

from . import llama_server
from .artifacts import Artifacts
from .config import LlamaCppConfig, Task
from .engine import Json, config_hash
from .metrics import count, ratio_bp
from .process import LOOPBACK, Command
from .programs import Versions

PACKAGE: Final = "xllamacpp"
NO_SERVER: Final = "no_llama_server"
#: Sampling is the client's; this only makes what it leaves open repeatable.
SEED: Final = 20_240_229
#: Errors only: from "warning" on, prompts can appear.
VERBOSITY: Final = 1
ALL_LAYERS: Final = 100_000

#: Settings that newer servers have and older ones refuse as options; an unknown variable is no error. A prompt cache
#: in host memory (8 GiB by default), checkpoints of contexts and a context fitted to what is free would each make
#: the memory of a deployment another one than was measured.
SETTINGS: Final = {
    "LLAMA_ARG_CACHE_RAM": "0",
    "LLAMA_ARG_CTX_CHECKPOINTS": "0",
    "LLAMA_ARG_FIT": "off",
    "LLAMA_ARG_UI": "0",
    "LLAMA_ARG_REUSE_PORT": "1",
}

_COMPLAINTS: Final = (
    (re.compile(rb"corrupted or incomplete|invalid magic"), Failure.MODEL_LOAD_FAILED, "model_corrupt"),
    (re.compile(rb"unknown model architecture"), Failure.MODEL_LOAD_FAILED, "model_not_supported"),
    (re.compile(rb"invalid device"), Failure.MODEL_LOAD_FAILED, "device_missing"),
    (re.compile(rb"couldn't bind"), Failure.MODEL_LOAD_FAILED, "port_in_use"),
)


@dataclass(frozen=True, slots=True)
class _Program:
    """What is executed, and which version it calls itself."""

    argv: tuple[str, ...]
    version: str


class LlamaCpp:
    """`environment`: what the server will inherit; it is searched and asked for its version with the same."""

    def __init__(self, config: LlamaCppConfig, artifacts: Artifacts, environment: Mapping[str, str]) -> None:
        self._config = config
        self._artifacts = artifacts
        self._environment = environment
        self._versions = Versions()

    @property
    def kinds(self) -> frozenset[Kind]:
        return frozenset((Kind.HOST if self._config.gpu_layers == 0 else Kind.GPU,))

    @property
    def blames_request(self) -> tuple[str, ...]:
        """A text longer than the micro-batch of an embedding model: llama.cpp answers 500, as if it had failed."""
        return ("is too large to process",)

    def facts(self) -> RuntimeFacts:
        artifact = self._artifacts.inspect_pinned(self._config.model, self._config.sha256)
        version = self._find_program().version
        shape: dict[str, Json] = {
            "type": self._config.type,
            "version": version,
            "artifact_sha256": artifact.sha256,
            "options": self._options(),
            "settings": SETTINGS,
            "max_inputs": self._config.max_inputs,
        }
        if self._config.projector is not None:
            shape["projector_sha256"] = self._artifacts.inspect(self._config.projector).sha256
            shape["max_images"] = self._config.max_images
        return RuntimeFacts("llama_cpp", version, config_hash(shape), artifact.sha256, artifact.size_bytes)

    def command(self, port: int, api_key: str) -> Command:
        place = ("--model", str(self._config.model.absolute()), "--host", LOOPBACK, "--port", str(port))
        projector = () if self._config.projector is None else ("--mmproj", str(self._config.projector.absolute()))
        argv = (*self._find_program().argv, *place, *projector, *self._options())
        return Command(argv, {**SETTINGS, "LLAMA_API_KEY": api_key})

    def figures(self, metrics: str) -> RuntimeFigures:
        """Newer servers do not say how full their cache is."""
        return RuntimeFigures(
            count(metrics, ("llamacpp:requests_processing",)),
            count(metrics, ("llamacpp:requests_deferred",)),
            ratio_bp(metrics, ("llamacpp:kv_cache_usage_ratio",)),
        )

    def complaint(self, output: bytes) -> tuple[Failure, str] | None:
        return next(((failure, detail) for pattern, failure, detail in _COMPLAINTS if pattern.search(output)), None)

    def _options(self) -> tuple[str, ...]:
        """All that follows from the configuration and is no place: this is what shapes memory."""
        config = self._config
        numbers = {
            "--ctx-size": config.context_length * config.parallel,
            "--parallel": config.parallel,
            "--batch-size": config.batch_size,
            "--ubatch-size": config.micro_batch,
            "--threads": config.threads,
            "--threads-batch": config.threads,
            "--n-gpu-layers": ALL_LAYERS if config.gpu_layers == "all" else config.gpu_layers,
            "--seed": SEED,
            "--verbosity": VERBOSITY,
        }
        # Named, so that a server that does not find the card ends instead of serving from the host without a word.
        device = "none" if config.gpu_layers == 0 else "CUDA0"
        options = [text for name, number in numbers.items() for text in (name, str(number))]
        options += ["--cache-type-k", config.cache_type_k, "--cache-type-v", config.cache_type_v]
        options += ["--flash-attn", config.flash_attention, "--device", device, "--metrics"]
        options += [] if config.mmap else ["--no-mmap"]
        options += ["--embeddings"] if config.task is Task.EMBEDDING else []
        options += ["--reranking"] if config.task is Task.RERANK else []
        options += ["--pooling", config.pooling] if config.pooling is not None else []
        return tuple(options)

    def _find_program(self) -> _Program:
        """The server that is named, or a llama-server on PATH, or ours. Raises RuntimeFault (MODEL_LOAD_FAILED)."""
        named = self._config.server
        found = shutil.which("llama-server", path=self._environment.get("PATH", "")) if named is None else str(named)
        if found is not None:
            path = str(Path(found).absolute())
            return _Program((path,), self._version_of(path))
        try:
            version = importlib.metadata.version(PACKAGE)
        except importlib.metadata.PackageNotFoundError as error:
            raise RuntimeFault(Failure.MODEL_LOAD_FAILED, NO_SERVER) from error
        return _Program((sys.executable, "-I", llama_server.__file__), f"{PACKAGE}-{version}")

    def _version_of(self, server: str) -> str:
        return self._versions.ask((server, "--version"), self._environment, _read_version, NO_SERVER)


def _read_version(output: bytes, errors: bytes) -> str | None:
    """`llama-server --version` says `version: 7000 (0123abc)` among lines about its devices."""
    match = re.search(rb"version: (\S+) \(([0-9a-z]+)\)", output + errors)
    return None if match is None else f"llama-server-{match[1].decode()}-{match[2].decode()}"
