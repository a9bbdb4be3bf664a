"""Measure what a deployment takes on an accelerator: its envelope (semantics.md 3; runtimes.md, Measuring an envelope).

    1. alone on the accelerator: a baseline of two agreeing samples
    2. start and load, sampling every few tens of milliseconds: the peak of loading
    3. settle: idle
    4. drive it: full context and full batch, then every slot at once, then many inputs in one request: the peak of work
    5. stop, settle: what stays, and how long the release took

On a GPU a figure is the greater of what the driver attributes to the processes and of what the device shows beyond the
baseline: contexts and kernels are not always in both. On a host everything else that runs moves the memory of the
machine as well, and the kernel counts processes exactly: there they alone count. Both are kept raw.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

from gpuledger.adapters.runtimes.config import RuntimeConfig
from gpuledger.domain.events import EnvelopeMeasured
from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import AcceleratorReading, Clock, ManagedProcess, RuntimeFacts, RuntimeFault, Runtimes
from gpuledger.domain.state import Envelope, Kind

from .measure_drive import drive
from .measure_meter import Meter, Peaks, TakeSample

Progress: TypeAlias = Callable[[str], None]
_T = TypeVar("_T")

RESIDENT_ID: Final = "measurement"
STOP_GRACE_SECONDS: Final = 10
#: How long after a failed request the end of its process is waited for: it explains more.
CRASH_SHOWS_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Place:
    """What is measured, and where. `reserve_bytes` of the accelerator stay free at any moment."""

    deployment_id: str
    accelerator_id: str
    reserve_bytes: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """An envelope as the ledger takes it, and the raw figures that it does not keep."""

    event: EnvelopeMeasured
    baseline_bytes: int
    process_idle_bytes: int | None
    process_peak_bytes: int | None
    full_context_tokens: int
    samples: int


def silent(step: str) -> None:
    """Progress that nobody watches."""


async def measure(
    runtimes: Runtimes,
    take_sample: TakeSample,
    clock: Clock,
    config: RuntimeConfig,
    place: Place,
    *,
    progress: Progress = silent,
) -> Measurement:
    """Measure one deployment: seconds, for a large model minutes. Nothing else may be managed there meanwhile.

    `take_sample` is `Telemetry.sample`; it is called in one thread of the measurement's own. Raises RuntimeFault, the
    process ended: INSUFFICIENT_SCHEDULABLE_VRAM when it does not fit (`artifact_does_not_fit`, `reserve_reached`),
    SCHEDULER_STATE_STALE when the accelerator cannot be seen or does not come to rest, and whatever the runtime did
    wrong.
    """
    facts = await asyncio.to_thread(runtimes.facts, place.deployment_id)
    meter = Meter(take_sample, place.accelerator_id, place.reserve_bytes)
    session = _Session(runtimes, meter, config, place, progress)
    try:
        baseline = await session.baseline(facts)
        loading = await session.load()
        idle = await session.idle()
        working = await session.work()
        release = await session.release(baseline)
    finally:
        await runtimes.stop(RESIDENT_ID, 0)
        meter.close()
    run = _Run(baseline, loading, idle, working, release)
    return Measurement(
        event=run.event(facts, config, place, clock.now()),
        baseline_bytes=baseline.used_bytes,
        process_idle_bytes=idle.process_bytes,
        process_peak_bytes=loading.peaks.or_greater(working.peaks).process_bytes,
        full_context_tokens=working.full_context_tokens,
        samples=meter.samples,
    )


# ---- the five steps ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Loading:
    peaks: Peaks
    load_ms: int


@dataclass(frozen=True, slots=True)
class _Working:
    peaks: Peaks
    full_context_tokens: int


@dataclass(frozen=True, slots=True)
class _Release:
    stop_ms: int
    release_ms: int
    residual_bytes: int


class _Session:
    """The steps in their order, each bounded, each under the guard of the meter."""

    def __init__(
        self, runtimes: Runtimes, meter: Meter, config: RuntimeConfig, place: Place, progress: Progress
    ) -> None:
        self._runtimes = runtimes
        self._meter = meter
        self._config = config
        self._place = place
        self._progress = progress

    async def baseline(self, facts: RuntimeFacts) -> AcceleratorReading:
        """Step 1. Raises RuntimeFault (INSUFFICIENT_SCHEDULABLE_VRAM) when not even the weights fit."""
        self._progress("baseline")
        reading = await self._meter.settle()
        if reading.total_bytes - reading.used_bytes - self._place.reserve_bytes < facts.artifact_bytes:
            raise RuntimeFault(Failure.INSUFFICIENT_SCHEDULABLE_VRAM, "artifact_does_not_fit")
        return reading

    async def load(self) -> _Loading:
        """Step 2."""
        self._progress("load")
        process = await self._runtimes.spawn(RESIDENT_ID, self._place.deployment_id, self._place.accelerator_id)
        self._meter.follow(ManagedProcess(RESIDENT_ID, self._place.accelerator_id, process))
        started = time.monotonic()

        async def load() -> int:
            await self._runtimes.load(RESIDENT_ID)
            return _milliseconds_since(started)

        load_ms, peaks = await self._meter.during(load())
        return _Loading(peaks, load_ms)

    async def idle(self) -> Peaks:
        """Step 3."""
        self._progress("idle")
        return Peaks.of(await self._meter.settle())

    async def work(self) -> _Working:
        """Step 4."""
        self._progress("work")
        endpoint = self._runtimes.endpoint(RESIDENT_ID)
        driving = drive(endpoint, self._config, self._progress)
        full_context_tokens, peaks = await self._meter.during(self._unless_it_ends(driving))
        return _Working(peaks, full_context_tokens)

    async def release(self, baseline: AcceleratorReading) -> _Release:
        """Step 5. On a host a process that is gone has left nothing."""
        self._progress("release")
        started = time.monotonic()
        await self._runtimes.stop(RESIDENT_ID, STOP_GRACE_SECONDS)
        stop_ms = _milliseconds_since(started)
        self._meter.follow(None)
        if baseline.kind is Kind.HOST:
            return _Release(stop_ms, 0, 0)
        stopped = time.monotonic()
        reading = await self._meter.settle(down_to_bytes=baseline.used_bytes)
        residual_bytes = max(0, reading.used_bytes - baseline.used_bytes)
        return _Release(stop_ms, _milliseconds_since(stopped), residual_bytes)

    async def _unless_it_ends(self, work: Coroutine[None, None, _T]) -> _T:
        """Do `work` while the process lives; its end is the better explanation of what failed."""
        working = asyncio.create_task(work)
        ended = asyncio.create_task(self._runtimes.exited(RESIDENT_ID))
        try:
            await asyncio.wait((working, ended), return_when=asyncio.FIRST_COMPLETED)
            if working.done() and working.exception() is not None:
                await asyncio.wait((ended,), timeout=CRASH_SHOWS_SECONDS)
            if ended.done():
                raise ended.result()
            return await working
        finally:
            for task in (working, ended):
                task.cancel()
            await asyncio.gather(working, ended, return_exceptions=True)


def _milliseconds_since(started_seconds: float) -> int:
    return round((time.monotonic() - started_seconds) * 1000)


# ---- what they come to ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Run:
    baseline: AcceleratorReading
    loading: _Loading
    idle: Peaks
    working: _Working
    release: _Release

    def event(self, facts: RuntimeFacts, config: RuntimeConfig, place: Place, measured_at: int) -> EnvelopeMeasured:
        device_peaks = self.loading.peaks.or_greater(self.working.peaks)
        return EnvelopeMeasured(
            deployment_id=place.deployment_id,
            accelerator_id=place.accelerator_id,
            envelope=self._envelope(facts, config, measured_at),
            load_ms=self.loading.load_ms,
            unload_ms=self.release.stop_ms + self.release.release_ms,
            load_peak_bytes=self._figure(self.loading.peaks),
            busy_peak_bytes=self._figure(self.working.peaks),
            device_idle_bytes=self._beyond_baseline(self.idle),
            device_peak_bytes=self._beyond_baseline(device_peaks),
            residual_bytes=self.release.residual_bytes,
            release_ms=self.release.release_ms,
            artifact_sha256=facts.artifact_sha256,
            runtime_version=facts.runtime_version,
            device_name=self.baseline.device_name,
            driver_version=self.baseline.driver_version,
        )

    def _envelope(self, facts: RuntimeFacts, config: RuntimeConfig, measured_at: int) -> Envelope:
        idle_bytes = self._figure(self.idle)
        peak_bytes = max(idle_bytes, self._figure(self.loading.peaks), self._figure(self.working.peaks))
        return Envelope(
            config_hash=facts.config_hash,
            gpu_class=self.baseline.gpu_class,
            idle_bytes=idle_bytes,
            peak_bytes=max(1, peak_bytes),
            measured_at=measured_at,
            context_length=config.context_length,
            batch_size=config.batch_size,
            concurrency=config.parallel,
        )

    def _figure(self, peaks: Peaks) -> int:
        """What counts of a device's and its processes' figures (see above)."""
        beyond_baseline = self._beyond_baseline(peaks)
        if peaks.process_bytes is None:
            return beyond_baseline
        return peaks.process_bytes if self.baseline.kind is Kind.HOST else max(peaks.process_bytes, beyond_baseline)

    def _beyond_baseline(self, peaks: Peaks) -> int:
        return max(0, peaks.device_bytes - self.baseline.used_bytes)
