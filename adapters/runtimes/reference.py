"""The reference runtime: no model, exact memory, answers that can be predicted (reference_server.py)."""

from __future__ import annotations

import sys
from typing import Final

from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import RuntimeFacts, RuntimeFigures
from gpuledger.domain.state import Kind

from . import reference_server
from .config import ReferenceConfig
from .engine import config_hash, gauge
from .process import Command

#: Raised when what the server holds for the same configuration changes.
VERSION: Final = "1"
SHAPES_MEMORY: Final = {
    "type",
    "idle_bytes",
    "peak_bytes",
    "context_length",
    "batch_size",
    "parallel",
    "max_inputs",
    "dimensions",
}


class Reference:
    def __init__(self, config: ReferenceConfig) -> None:
        self._config = config

    @property
    def kinds(self) -> frozenset[Kind]:
        return frozenset(Kind)

    @property
    def blames_request(self) -> tuple[str, ...]:
        """It answers 4xx itself."""
        return ()

    def facts(self) -> RuntimeFacts:
        """Times and faults shape no memory."""
        shape = self._config.model_dump(mode="json", include=SHAPES_MEMORY)
        return RuntimeFacts("reference", VERSION, config_hash({**shape, "version": VERSION}), None, 0)

    def command(self, port: int, api_key: str) -> Command:
        program = (sys.executable, "-I", "-S", reference_server.__file__)
        return Command((*program, str(port), self._config.model_dump_json()), {"GPULEDGER_API_KEY": api_key})

    def figures(self, metrics: str) -> RuntimeFigures:
        return RuntimeFigures(
            gauge(metrics, "reference:requests_processing"), gauge(metrics, "reference:requests_deferred")
        )

    def complaint(self, output: bytes) -> tuple[Failure, str] | None:
        return (Failure.GPU_OOM, "out_of_memory") if b"out of memory" in output else None
