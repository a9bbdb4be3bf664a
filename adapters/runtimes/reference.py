"""The reference runtime: no model, exact memory, answers that can be predicted (reference_server.py)."""

from __future__ import annotations

import sys
from typing import Final

from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import RuntimeFacts, RuntimeFigures
from gpuledger.domain.state import Kind

from . import reference_main
from .config import ReferenceConfig
from .engine import config_hash
from .metrics import count, ratio_bp
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
    "max_images",
    "max_audio_bytes",
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
        """Times, faults and what it holds asleep shape no memory that it works in."""
        shape = self._config.model_dump(mode="json", include=SHAPES_MEMORY)
        return RuntimeFacts("reference", VERSION, config_hash({**shape, "version": VERSION}), None, 0)

    def command(self, port: int, api_key: str) -> Command:
        program = (sys.executable, "-I", "-S", reference_main.__file__)
        return Command((*program, str(port), self._config.model_dump_json()), {"GPULEDGER_API_KEY": api_key})

    def figures(self, metrics: str) -> RuntimeFigures:
        """Of its slots, which are its cache, it fills as many as it works on requests."""
        return RuntimeFigures(
            count(metrics, ("reference:requests_processing",)),
            count(metrics, ("reference:requests_deferred",)),
            ratio_bp(metrics, ("reference:cache_usage_ratio",)),
        )

    def complaint(self, output: bytes) -> tuple[Failure, str] | None:
        """Of itself it says no more than its exit status; asyncio says why it cannot listen."""
        return (Failure.MODEL_LOAD_FAILED, "port_in_use") if b"ddress already in use" in output else None
