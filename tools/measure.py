"""Measure what a deployment takes on an accelerator: its envelope (semantics.md 3; runtimes.md, Measuring an envelope).

    1. alone on the accelerator: a baseline of two agreeing samples
    2. start and load, sampling every few tens of milliseconds: the peak of loading
    3. settle: idle; where it can sleep, let it, settle, and wake it: what it keeps, and how long that takes
    4. drive it: full context and full batch, then every slot at once, then many inputs in one request: the peak of work
    5. stop, settle: what stays, and how long the release took

On a GPU a figure is the greater of what the driver attributes to the processes and of what the device shows beyond the
baseline: contexts and kernels are not always in both. On a host everything else that runs moves the memory of the
machine as well, and the kernel counts processes exactly: there they alone count. Both are kept raw.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

from gpuledger.adapters.runtimes.config import RuntimeConfig
from gpuledger.domain.events import EnvelopeMeasured
from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import AcceleratorReading, Clock, ManagedProcess, RuntimeFacts, RuntimeFault, Runtimes
from gpuledger.domain.state import Envelope, Kind, Sleep

from .measure_drive import drive
from .measure_meter import Meter, Peaks, TakeSample, no_more_than

Progress: TypeAlias = Callable[[str], None]
_T = TypeVar("_T")

STOP_GRACE_SECONDS: Final = 10
#: A runtime that takes longer to fall asleep or to say that it cannot is not worth evicting by sleep.
SLEEP_LIMIT_SECONDS: Final = 120.0
#: How much longer the device may take to show what a sleep was declared to free.
ASLEEP_SHOWS_SECONDS: Final = 5.0
#: How long whoever wants the accelerator waits for the memory of a measurement that was given up.
GIVEN_BACK_LIMIT_SECONDS: Final = 5.0
#: How long after a failed request the end of its process is waited for: it explains more.
CRASH_SHOWS_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Place:
    """What is measured, and where. `reserve_bytes` of the accelerator stay free at any moment.

    `sleep`: what the runtime was declared to keep asleep; None where it is not to sleep. `variant`: the name of its
    runtime's configuration, where that is not the deployment's own (a point of a grid).
    """

    deployment_id: str
    accelerator_id: str
    reserve_bytes: int
    sleep: Sleep | None = None
    variant: str | None = None

    @property
    def runtime_id(self) -> str:
        """What the runtimes know it by."""
        return self.variant or self.deployment_id


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
    facts = await asyncio.to_thread(runtimes.facts, place.runtime_id)
    meter = Meter(take_sample, place.accelerator_id, place.reserve_bytes)
    session = _Session(runtimes, meter, config, place, progress)
    try:
        baseline = await session.baseline(facts)
        loading = await session.load()
        idle = await session.idle()
        nap = await session.nap(baseline)
        working = await session.work()
        release = await session.release(baseline)
    except BaseException:
        await session.abandon()
        raise
    finally:
        await meter.close()
    run = _Run(baseline, loading, idle, nap, working, release)
    return Measurement(
        event=run.event(facts, config, place, clock.now()),
        baseline_bytes=baseline.used_bytes,
        process_idle_bytes=idle.process_bytes,
        process_peak_bytes=run.peaks.process_bytes,
        full_context_tokens=working.full_context_tokens,
        samples=meter.samples,
    )


# ---- the five steps ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Loading:
    peaks: Peaks
    load_ms: int


@dataclass(frozen=True, slots=True)
class _Nap:
    """`peaks` are those of waking up."""

    sleep: Sleep
    peaks: Peaks


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
        # Of its own each time: one that could not be ended must not be taken for the next.
        self._resident_id = f"measurement-{secrets.token_hex(4)}"
        self._baseline: AcceleratorReading | None = None

    async def baseline(self, facts: RuntimeFacts) -> AcceleratorReading:
        """Step 1. Raises RuntimeFault (INSUFFICIENT_SCHEDULABLE_VRAM) when not even the weights fit."""
        self._progress("baseline")
        self._baseline = reading = await self._meter.settle()
        if reading.total_bytes - reading.used_bytes - self._place.reserve_bytes < facts.artifact_bytes:
            raise RuntimeFault(Failure.INSUFFICIENT_SCHEDULABLE_VRAM, "artifact_does_not_fit")
        return reading

    async def load(self) -> _Loading:
        """Step 2."""
        self._progress("load")
        process = await self._runtimes.spawn(self._resident_id, self._place.runtime_id, self._place.accelerator_id)
        self._meter.follow(ManagedProcess(self._resident_id, self._place.accelerator_id, process))
        started = time.monotonic()

        async def load() -> int:
            await self._runtimes.load(self._resident_id)
            return _milliseconds_since(started)

        load_ms, peaks = await self._meter.during(load())
        return _Loading(peaks, load_ms)

    async def idle(self) -> Peaks:
        """Step 3."""
        self._progress("idle")
        return Peaks.of(await self._meter.settle())

    async def nap(self, baseline: AcceleratorReading) -> _Nap | None:
        """Step 3, of a runtime that sleeps. None where it is not to sleep, or says that it cannot.

        It has slept when the device shows what was declared; where that never happens, what is shown then counts.
        """
        declared = self._place.sleep
        if declared is None:
            return None
        self._progress("sleep")
        started = time.monotonic()
        try:
            async with asyncio.timeout(SLEEP_LIMIT_SECONDS):
                await self._runtimes.sleep(self._resident_id)
        except RuntimeFault:
            self._progress("sleep: it cannot")
            return None
        except TimeoutError as error:
            raise RuntimeFault(Failure.TIMEOUT, "sleep_timeout") from error
        asked_ms = _milliseconds_since(started)

        def sleeps(reading: AcceleratorReading) -> bool:
            return _figure(baseline, Peaks.of(reading)) <= declared.asleep_bytes

        reading = await self._meter.settle(sleeps, ASLEEP_SHOWS_SECONDS)
        sleep_ms = _milliseconds_since(started) if sleeps(reading) else asked_ms
        self._progress("wake")
        started = time.monotonic()

        async def wake() -> int:
            await self._runtimes.wake(self._resident_id)
            return _milliseconds_since(started)

        wake_ms, peaks = await self._meter.during(wake())
        return _Nap(Sleep(_figure(baseline, Peaks.of(reading)), sleep_ms, wake_ms), peaks)

    async def work(self) -> _Working:
        """Step 4."""
        self._progress("work")
        endpoint = self._runtimes.endpoint(self._resident_id)
        driving = drive(endpoint, self._config, self._progress)
        full_context_tokens, peaks = await self._meter.during(self._unless_it_ends(driving))
        return _Working(peaks, full_context_tokens)

    async def release(self, baseline: AcceleratorReading) -> _Release:
        """Step 5. On a host a process that is gone has left nothing."""
        self._progress("release")
        started = time.monotonic()
        await self._runtimes.stop(self._resident_id, STOP_GRACE_SECONDS)
        stop_ms = _milliseconds_since(started)
        self._meter.follow(None)
        if baseline.kind is Kind.HOST:
            return _Release(stop_ms, 0, 0)
        stopped = time.monotonic()
        reading = await self._meter.settle(no_more_than(baseline.used_bytes))
        residual_bytes = max(0, reading.used_bytes - baseline.used_bytes)
        return _Release(stop_ms, _milliseconds_since(stopped), residual_bytes)

    async def abandon(self) -> None:
        """Give up: end it at once, and let the memory come back, as far as waiting helps. Others may want it now."""
        await self._runtimes.stop(self._resident_id, 0)
        self._meter.follow(None)
        if self._baseline is not None and self._baseline.kind is not Kind.HOST:
            # Why it was given up is the better explanation of a device that does not come to rest after it.
            with suppress(RuntimeFault):
                await self._meter.settle(no_more_than(self._baseline.used_bytes), GIVEN_BACK_LIMIT_SECONDS)

    async def _unless_it_ends(self, work: Coroutine[None, None, _T]) -> _T:
        """Do `work` while the process lives; its end is the better explanation of what failed."""
        working = asyncio.create_task(work)
        ended = asyncio.create_task(self._runtimes.exited(self._resident_id))
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
    nap: _Nap | None
    working: _Working
    release: _Release

    @property
    def peaks(self) -> Peaks:
        """Over loading, waking and working."""
        peaks = self.loading.peaks.or_greater(self.working.peaks)
        return peaks if self.nap is None else peaks.or_greater(self.nap.peaks)

    def event(self, facts: RuntimeFacts, config: RuntimeConfig, place: Place, measured_at: int) -> EnvelopeMeasured:
        return EnvelopeMeasured(
            deployment_id=place.deployment_id,
            accelerator_id=place.accelerator_id,
            envelope=self._envelope(facts, config, measured_at),
            load_ms=self.loading.load_ms,
            unload_ms=self.release.stop_ms + self.release.release_ms,
            load_peak_bytes=self._figure(self.loading.peaks),
            busy_peak_bytes=self._figure(self.working.peaks),
            device_idle_bytes=_beyond(self.baseline, self.idle),
            device_peak_bytes=_beyond(self.baseline, self.peaks),
            residual_bytes=self.release.residual_bytes,
            release_ms=self.release.release_ms,
            artifact_sha256=facts.artifact_sha256,
            runtime_version=facts.runtime_version,
            device_name=self.baseline.device_name,
            driver_version=self.baseline.driver_version,
            sleep=None if self.nap is None else self.nap.sleep,
        )

    def _envelope(self, facts: RuntimeFacts, config: RuntimeConfig, measured_at: int) -> Envelope:
        idle_bytes = self._figure(self.idle)
        peak_bytes = max(idle_bytes, self._figure(self.peaks))
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
        return _figure(self.baseline, peaks)


def _figure(baseline: AcceleratorReading, peaks: Peaks) -> int:
    """What counts of a device's and its processes' figures (see above)."""
    beyond = _beyond(baseline, peaks)
    if peaks.process_bytes is None:
        return beyond
    return peaks.process_bytes if baseline.kind is Kind.HOST else max(peaks.process_bytes, beyond)


def _beyond(baseline: AcceleratorReading, peaks: Peaks) -> int:
    return max(0, peaks.device_bytes - baseline.used_bytes)
