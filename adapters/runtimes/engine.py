"""What the manager needs of each kind of runtime: its command line, what it is, and how it speaks of itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Final, Protocol

from gpuledger.adapters.complaints import out_of_memory
from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import RuntimeFacts, RuntimeFault, RuntimeFigures
from gpuledger.domain.state import Kind

from .options import Json
from .process import Command

__all__ = ["OUT_OF_MEMORY", "Engine", "Json", "config_hash", "fault_of"]

OUT_OF_MEMORY: Final = "out_of_memory"
#: Of the last output, that is hashed as evidence.
EVIDENCE_BYTES: Final = 4096


class Engine(Protocol):
    """One deployment's runtime: made from its configuration alone."""

    def facts(self) -> RuntimeFacts:
        """Blocking: hashes the model when it has changed. Raises RuntimeFault."""
        ...

    @property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of accelerator it runs on in this configuration: nothing falls back to another."""
        ...

    @property
    def blames_request(self) -> tuple[str, ...]:
        """Words in the message of a 5xx by which it means the request (`Endpoint`)."""
        ...

    def command(self, port: int, api_key: str) -> Command:
        """How to start it. The key is in the environment, never in the arguments. Raises RuntimeFault."""
        ...

    def figures(self, metrics: str) -> RuntimeFigures:
        """Requests that run and wait, and how full its cache is, by what it answers at /metrics."""
        ...

    def complaint(self, output: bytes) -> tuple[Failure, str] | None:
        """Class and detail of a failed load, where the last output says more than the exit status.

        Of memory every runtime complains in the same words; those are looked for before this is asked.
        """
        ...


def config_hash(shape: Mapping[str, Json]) -> str:
    """SHA-256 of the canonical JSON of everything that shapes a deployment's memory (semantics.md 3)."""
    return hashlib.sha256(json.dumps(shape, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def fault_of(engine: Engine, failure: Failure, detail: str, output: bytes) -> RuntimeFault:
    """A fault in the words of the runtime where it said any, with its last output as evidence.

    What it said of its load explains a load that failed, and no crash hours later.
    """
    found = (Failure.GPU_OOM, OUT_OF_MEMORY) if out_of_memory(output) else None
    if found is None and failure is not Failure.RUNTIME_CRASH:
        found = engine.complaint(output)
    return RuntimeFault(*(found or (failure, detail)), output[-EVIDENCE_BYTES:])
