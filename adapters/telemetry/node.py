"""One sample of one node: every source read once, over one look at the processes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from gpuledger.adapters.procfs import PROC
from gpuledger.domain.ports import ManagedProcess, NodeReading
from gpuledger.domain.state import Kind

from .faults import FaultCode, faults_of
from .processes import Forest, look
from .source import Source, SourceReading

_NANOS_PER_MS: Final = 1_000_000

_logger = logging.getLogger(__name__)


class NodeTelemetry:
    """The Telemetry of a node (semantics.md 1). What one source cannot tell does not blind the others.

    One memory is offered once: where a GPU shares the host's (`unified`), the host's own domain is left out and told as
    gone. That stays so while the GPU cannot be read, for it does not leave the machine: no GPU, no memory to schedule.

    Blocking: a sample takes milliseconds, and seconds where a driver has to wake a card. Both methods are for the one
    thread that the caller keeps for them.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        proc: Path = PROC,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._sources = tuple(sources)
        self._proc = proc
        self._monotonic_ns = monotonic_ns
        #: Accelerators that each source has shown so far: those that are not known when it fails.
        self._seen: tuple[set[str], ...] = tuple(set() for _ in self._sources)
        self._unified = False

    def sample(self, managed: Sequence[ManagedProcess]) -> NodeReading:
        """Read every accelerator once. Never raises for a device's sake: faults are values.

        `age_ms` counts from before the first figure was read.
        """
        started_ns = self._monotonic_ns()
        try:
            forest = look(managed, self._proc)
        except OSError:
            _logger.exception("/proc cannot be read")
            readings = [SourceReading(faults=faults_of(seen, FaultCode.PROCESSES_UNREADABLE)) for seen in self._seen]
        else:
            readings = [
                self._read(source, seen, forest) for source, seen in zip(self._sources, self._seen, strict=True)
            ]
        age_ns = self._monotonic_ns() - started_ns
        accelerators = tuple(one for reading in readings for one in reading.accelerators)
        self._unified = self._unified or any(one.unified for one in accelerators)
        doubled = {one.accelerator_id for one in accelerators if self._unified and one.kind is Kind.HOST}
        gone = (*(one for reading in readings for one in reading.gone), *sorted(doubled))
        for seen in self._seen:
            seen.difference_update(gone)
        return NodeReading(
            accelerators=tuple(one for one in accelerators if one.accelerator_id not in doubled),
            faults=tuple(one for reading in readings for one in reading.faults),
            memory_bytes=next((one.memory_bytes for one in readings if one.memory_bytes is not None), None),
            age_ms=-(-age_ns // _NANOS_PER_MS),
            gone=gone,
        )

    def close(self) -> None:
        """Let every source go, also when one of them raises."""
        with ExitStack() as stack:
            for source in self._sources:
                stack.callback(source.close)

    def _read(self, source: Source, seen: set[str], forest: Forest) -> SourceReading:
        try:
            reading = source.read(forest)
        except Exception:
            _logger.exception("%s failed", type(source).__name__)
            return SourceReading(faults=faults_of(sorted(seen), FaultCode.UNEXPECTED_ERROR))
        seen.update(one.accelerator_id for one in reading.accelerators)
        return reading
