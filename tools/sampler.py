"""When a sample is taken, and how: in a thread of its own, never in the path of a decision (semantics.md 1, 7)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

import structlog

from gpuledger.domain.events import Recorded
from gpuledger.domain.messages import Agenda
from gpuledger.domain.ports import (
    LedgerCorrupt,
    LedgerUnavailable,
    ManagedProcess,
    NodeReading,
    RuntimeFigures,
    Runtimes,
    Telemetry,
    TelemetryFault,
)
from gpuledger.domain.sampling import SampleTaken
from gpuledger.domain.state import ResidentState
from gpuledger.domain.units import MICROS_PER_SECOND, milliseconds

from .shell import DecisionFailed, Engine

#: Two samples are never closer: the process list of a GPU takes a driver-wide lock (runtimes.md, NVML).
CLOSEST_MS: Final = 50
#: Ages are told in whole milliseconds, rounded up: a sample that begins so much later is surely not older.
ROUNDING_MS: Final = 2
#: A runtime that is too busy to say what it works on is left as it was.
FIGURES_TIMEOUT_SECONDS: Final = 0.5
_NANOS_PER_MS: Final = 1_000_000

_log = structlog.get_logger(__name__)


class Sampler:
    """A listener of the engine, and the task that takes samples: as soon as one is wanted, else at an interval."""

    def __init__(
        self, engine: Engine, telemetry: Telemetry, runtimes: Runtimes, node_id: str, skew_ms: Callable[[], int]
    ) -> None:
        """`skew_ms`: how far the wall clock is ahead of the ledger's."""
        self._engine = engine
        self._telemetry = telemetry
        self._runtimes = runtimes
        self._node_id = node_id
        self._skew_ms = skew_ms
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gpuledger-telemetry")
        self._alone = asyncio.Lock()
        self._wake = asyncio.Event()
        self._after: int | None = None
        self._interval_ms = 0
        self._hurried = False
        self._began: int | None = None
        #: What was wanted when the newest sample began: one that did not satisfy it is not repeated at once.
        self._tried: int | None = None
        self._reading = False
        #: A sample was taken in this run: what is not seen by then is not there.
        self.looked = asyncio.Event()

    def recorded(self, events: tuple[Recorded, ...]) -> None:
        """Nothing to do: when a sample is wanted is in the agenda."""

    def wanted(self, agenda: Agenda) -> None:
        if (agenda.sample_after, agenda.sample_interval_ms) != (self._after, self._interval_ms):
            self._after, self._interval_ms = agenda.sample_after, agenda.sample_interval_ms
            self._wake.set()

    def hurry(self) -> None:
        """Something has changed that only the device can show."""
        self._hurried = True
        self._wake.set()

    async def run(self) -> None:
        """Take samples until cancelled."""
        while True:
            await self._until_due()
            await self.take()

    @asynccontextmanager
    async def paused(self) -> AsyncGenerator[None]:
        """No sample meanwhile: the device is under measurement."""
        async with self._alone:
            yield

    def close(self) -> bool:
        """Let the thread go; False when it still waits for a driver, which nothing can hurry."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        return not self._reading

    # ---- when ----------------------------------------------------------------------------------------------------

    async def _until_due(self) -> None:
        while (wait := self._due() - self._engine.now()) > 0:
            self._wake.clear()
            try:
                async with asyncio.timeout(wait / MICROS_PER_SECOND):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _due(self) -> int:
        if self._began is None:
            return 0
        closest = self._began + milliseconds(CLOSEST_MS)
        if self._hurried:
            return closest
        if self._after is not None and (self._tried is None or self._after > self._tried):
            return max(closest, self._after + milliseconds(ROUNDING_MS))
        return max(closest, self._began + milliseconds(self._interval_ms))

    # ---- how -----------------------------------------------------------------------------------------------------

    async def take(self) -> None:
        """One sample, recorded as far as the ledger lets us."""
        async with self._alone:
            await self._take()
        self.looked.set()

    async def _take(self) -> None:
        self._hurried = False
        self._began = self._engine.now()
        self._tried = self._after
        started_ns = time.monotonic_ns()
        asked = asyncio.create_task(self._figures())
        reading = await self._read()
        figures = await asked

        def taken() -> SampleTaken:
            """Made when it is decided on: its age is what it is then."""
            age_ms = -(-(time.monotonic_ns() - started_ns) // _NANOS_PER_MS)
            return SampleTaken(
                self._node_id, replace(reading, age_ms=max(age_ms, reading.age_ms)), figures, self._skew_ms()
            )

        try:
            await self._engine.ask(taken, first=True)
        except (LedgerUnavailable, LedgerCorrupt, DecisionFailed):
            return  # the engine has said why; the next one comes

    async def _read(self) -> NodeReading:
        managed = tuple(
            ManagedProcess(record.resident.resident_id, state.accelerator.accelerator_id, record.process)
            for state, record in self._engine.world.residents()
            if record.process is not None
        )
        self._reading = True
        try:
            loop = asyncio.get_running_loop()
            reading = await loop.run_in_executor(self._thread, self._telemetry.sample, managed)
        except Exception:  # noqa: BLE001 - a defect of a source is not that of the scheduler: nothing is known then
            _log.exception("a sample could not be taken")
            reading = NodeReading((), (TelemetryFault(None, "UNEXPECTED_ERROR", None),), None, 0)
        self._reading = False
        return reading

    async def _figures(self) -> Mapping[str, RuntimeFigures]:
        """What each runtime says of itself, of those that say it in time."""
        ready = [
            record.resident.resident_id
            for _, record in self._engine.world.residents()
            if record.resident.state in (ResidentState.READY, ResidentState.DRAINING)
        ]
        told = await asyncio.gather(*(self._figures_of(resident_id) for resident_id in ready))
        return {resident_id: one for resident_id, one in zip(ready, told, strict=True) if one is not None}

    async def _figures_of(self, resident_id: str) -> RuntimeFigures | None:
        try:
            async with asyncio.timeout(FIGURES_TIMEOUT_SECONDS):
                return await self._runtimes.figures(resident_id)
        except TimeoutError:
            return None
        except Exception:  # noqa: BLE001 - as of a source: what one runtime answers never ends the samples
            _log.exception("what a runtime says of itself could not be read", resident=resident_id)
            return None
