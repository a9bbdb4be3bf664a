"""The meter of a measurement: samples one accelerator, keeps the peaks of a phase, and guards the reserve."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

from gpuledger.adapters import procfs
from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import AcceleratorReading, ManagedProcess, NodeReading, ProcessIdentity, RuntimeFault
from gpuledger.domain.state import Kind
from gpuledger.domain.units import KIB, MIB, ratio_of

TakeSample: TypeAlias = Callable[[Sequence[ManagedProcess]], NodeReading]
#: What a reading must show before the accelerator has settled.
Wanted: TypeAlias = Callable[[AcceleratorReading], bool]
_T = TypeVar("_T")

SAMPLE_INTERVAL_SECONDS: Final = 0.03
SETTLE_INTERVAL_SECONDS: Final = 0.2
SETTLE_LIMIT_SECONDS: Final = 30.0
#: A source that shows nothing for so long leaves the guard blind: better to end than to fill a card unseen.
BLIND_LIMIT_SECONDS: Final = 5.0
#: Samples agree within the greater of the two.
AGREE_BYTES: Final = 16 * MIB
AGREE_RATIO_BP: Final = 20


@dataclass(frozen=True, slots=True)
class Peaks:
    """The greatest figures of a phase: all that the device showed as used, and what was its processes'.

    `process_bytes` is None where the device does not attribute memory to processes.
    """

    device_bytes: int
    process_bytes: int | None

    @classmethod
    def of(cls, reading: AcceleratorReading) -> Peaks:
        figures = [one.used_bytes for one in reading.managed]
        known = [figure for figure in figures if figure is not None]
        return cls(reading.used_bytes, sum(known) if known and len(known) == len(figures) else None)

    def or_greater(self, other: Peaks) -> Peaks:
        known = [figure for figure in (self.process_bytes, other.process_bytes) if figure is not None]
        return Peaks(max(self.device_bytes, other.device_bytes), max(known, default=None))


def anything(reading: AcceleratorReading) -> bool:  # noqa: ARG001
    """Whatever a reading shows will do."""
    return True


def no_more_than(used_bytes: int) -> Wanted:
    """The device shows no more than that as used, as far as it can be told."""
    return lambda reading: reading.used_bytes <= used_bytes + _tolerance(reading)


class Meter:
    """One accelerator under measurement. Every reading raises RuntimeFault when the reserve is touched."""

    def __init__(self, take_sample: TakeSample, accelerator_id: str, reserve_bytes: int) -> None:
        self._take_sample = take_sample
        self._accelerator_id = accelerator_id
        self._reserve_bytes = reserve_bytes
        self._followed: ManagedProcess | None = None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gpuledger-meter")
        self.samples = 0

    def follow(self, process: ManagedProcess | None) -> None:
        """Whose memory is told apart from now on."""
        self._followed = process

    async def read(self) -> AcceleratorReading:
        """One reading. Raises RuntimeFault: INSUFFICIENT_SCHEDULABLE_VRAM `reserve_reached`, SCHEDULER_STATE_STALE."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + BLIND_LIMIT_SECONDS
        while True:
            managed = () if self._followed is None else (self._followed,)
            sample = await loop.run_in_executor(self._executor, self._take_sample, managed)
            self.samples += 1
            for reading in sample.accelerators:
                if reading.accelerator_id == self._accelerator_id:
                    self._guard(reading)
                    return reading
            if loop.time() > deadline:
                raise RuntimeFault(Failure.SCHEDULER_STATE_STALE, "accelerator_not_seen")
            await asyncio.sleep(SETTLE_INTERVAL_SECONDS)

    async def settle(self, wanted: Wanted = anything, limit_seconds: float | None = None) -> AcceleratorReading:
        """The newer of two readings that agree, and are as `wanted`, as long as one may wait for that.

        Raises RuntimeFault (SCHEDULER_STATE_STALE `unsettled`) when none agree within the limit.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (SETTLE_LIMIT_SECONDS if limit_seconds is None else limit_seconds)
        before = await self.read()
        while True:
            await asyncio.sleep(SETTLE_INTERVAL_SECONDS)
            reading = await self.read()
            late = loop.time() > deadline
            if _agree(before, reading) and (late or wanted(reading)):
                return reading
            if late:
                raise RuntimeFault(Failure.SCHEDULER_STATE_STALE, "unsettled")
            before = reading

    async def during(self, work: Coroutine[Any, Any, _T]) -> tuple[_T, Peaks]:
        """Do `work` and say what it came to at most. A reading that raises ends the work."""
        self._reset_high_water()
        task = asyncio.create_task(work)
        try:
            reading = await self.read()
            peaks = Peaks.of(reading)
            while not task.done():
                await asyncio.wait((task,), timeout=SAMPLE_INTERVAL_SECONDS)
                reading = await self.read()
                peaks = peaks.or_greater(Peaks.of(reading))
            result = await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if reading.kind is Kind.HOST:
            peaks = peaks.or_greater(Peaks(reading.used_bytes, self._high_water_bytes()))
        return result, peaks

    async def close(self) -> None:
        """Let the thread go, when the reading that it may be taking is done: others take samples again then."""
        await asyncio.to_thread(self._executor.shutdown)

    def _guard(self, reading: AcceleratorReading) -> None:
        if self._followed is not None and reading.total_bytes - reading.used_bytes < self._reserve_bytes:
            raise RuntimeFault(Failure.INSUFFICIENT_SCHEDULABLE_VRAM, "reserve_reached")

    # ---- the kernel's own memory of the peak: no sample is fast enough for every allocation ------------------------

    def _reset_high_water(self) -> None:
        for process in self._processes():
            with suppress(OSError), open(f"/proc/{process.pid}/clear_refs", "wb", buffering=0) as file:
                file.write(b"5")

    def _high_water_bytes(self) -> int:
        """The sum of the high-water marks of all processes: at least what they held together at any moment."""
        status = (procfs.read_process_file(process.pid, "status") or b"" for process in self._processes())
        marks = (re.search(rb"^VmHWM:\s+(\d+) kB$", text, re.MULTILINE) for text in status)
        return sum(int(mark[1]) * KIB for mark in marks if mark is not None)

    def _processes(self) -> tuple[ProcessIdentity, ...]:
        return () if self._followed is None else procfs.tree(self._followed.process)


def _tolerance(reading: AcceleratorReading) -> int:
    return max(AGREE_BYTES, ratio_of(reading.total_bytes, AGREE_RATIO_BP))


def _agree(before: AcceleratorReading, after: AcceleratorReading) -> bool:
    """On a host the processes alone are looked at: the rest of the machine never rests."""
    first, second = Peaks.of(before), Peaks.of(after)
    if after.kind is Kind.HOST:
        return abs((first.process_bytes or 0) - (second.process_bytes or 0)) <= AGREE_BYTES
    return abs(first.device_bytes - second.device_bytes) <= _tolerance(after)
