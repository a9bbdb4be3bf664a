"""What the application wants of runtimes, carried out: one job per resident at a time, and a watch for crashes.

Whatever is wanted is wanted until the ledger says that it was done, so a job lasts until its answer is recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, TypeAlias, assert_never

import structlog

from gpuledger.domain.events import Recorded
from gpuledger.domain.failures import Failure
from gpuledger.domain.messages import (
    Agenda,
    Forward,
    Input,
    LoadRuntime,
    RuntimeFailed,
    RuntimeReady,
    RuntimeSpawned,
    RuntimeStopped,
    SleepRuntime,
    SpawnRuntime,
    StopRuntime,
    WakeRuntime,
)
from gpuledger.domain.ports import LedgerCorrupt, LedgerUnavailable, RuntimeFault, Runtimes
from gpuledger.domain.state import ResidentState

from .shell import DecisionFailed, Engine

RuntimeEffect: TypeAlias = SpawnRuntime | LoadRuntime | SleepRuntime | WakeRuntime | StopRuntime

#: Of an answer that the ledger did not take, and of a process that did not go.
FIRST_PAUSE_SECONDS: Final = 0.25
LAST_PAUSE_SECONDS: Final = 5.0
#: States in which the end of the process is news.
_WATCHED: Final = (ResidentState.LOADING, ResidentState.READY, ResidentState.SLEEPING, ResidentState.DRAINING)

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Job:
    effect: RuntimeEffect
    task: asyncio.Task[None]


class Effects:
    """A listener of the engine. `memory_freed` is called when a process ended or sleeps: a sample is worth taking."""

    def __init__(self, engine: Engine, runtimes: Runtimes, memory_freed: Callable[[], None]) -> None:
        self._engine = engine
        self._runtimes = runtimes
        self._memory_freed = memory_freed
        self._jobs: dict[str, _Job] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        #: Residents whose process this run started: all others are of an earlier one.
        self._ours: set[str] = set()
        #: Residents whose process is gone, and that is recorded; the device may still have to show it.
        self._stopped: set[str] = set()
        #: Residents that were put to sleep; again, the device may still have to show it.
        self._asleep: set[str] = set()

    def recorded(self, events: tuple[Recorded, ...]) -> None:
        """Nothing to do: what follows from events is in the agenda."""

    def wanted(self, agenda: Agenda) -> None:
        for effect in agenda.effects:
            if not isinstance(effect, Forward):
                self._begin(effect)
        self._watch()

    async def close(self) -> None:
        """Carry out nothing any more. Processes are left to `Runtimes.close`."""
        tasks = [*(job.task for job in self._jobs.values()), *self._watches.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- one job per resident ------------------------------------------------------------------------------------

    def _begin(self, effect: RuntimeEffect) -> None:
        resident_id = effect.resident_id
        job = self._jobs.get(resident_id)
        if job is None:
            if not self._is_done(effect):
                self._start(effect)
        elif isinstance(effect, StopRuntime) and isinstance(job.effect, LoadRuntime | WakeRuntime | SleepRuntime):
            job.task.cancel()  # nobody waits for it any more; its end lets the stop begin

    def _is_done(self, effect: RuntimeEffect) -> bool:
        """Carried out and answered, but for what the device has to show."""
        if isinstance(effect, SleepRuntime):
            return effect.resident_id in self._asleep
        return isinstance(effect, StopRuntime) and effect.resident_id in self._stopped

    def _start(self, effect: RuntimeEffect) -> None:
        task = asyncio.create_task(self._attempt(effect), name=f"{type(effect).__name__} {effect.resident_id}")
        self._jobs[effect.resident_id] = _Job(effect, task)
        task.add_done_callback(lambda _: self._ended(effect))

    def _ended(self, effect: RuntimeEffect) -> None:
        del self._jobs[effect.resident_id]
        self._engine.poke()

    async def _attempt(self, effect: RuntimeEffect) -> None:
        """Carry it out. A defect of ours is a failure of this resident, which bounds how often it is tried again."""
        try:
            await self._carry_out(effect)
        except Exception as error:  # noqa: BLE001 - it ends one attempt, and neither the others nor the scheduler
            _log.exception("an effect failed unexpectedly", effect=type(effect).__name__, resident=effect.resident_id)
            if isinstance(effect, StopRuntime):
                await asyncio.sleep(LAST_PAUSE_SECONDS)  # it has to go, and so it is tried for ever
            else:
                fault = RuntimeFault(Failure.MODEL_LOAD_FAILED, "unexpected_error", repr(error).encode())
                await self._fail(effect.resident_id, fault)

    async def _carry_out(self, effect: RuntimeEffect) -> None:
        match effect:
            case SpawnRuntime():
                await self._spawn(effect)
            case LoadRuntime():
                await self._begin_serving(effect.resident_id, self._runtimes.load)
            case SleepRuntime():
                await self._sleep(effect)
            case WakeRuntime():
                self._asleep.discard(effect.resident_id)
                await self._begin_serving(effect.resident_id, self._runtimes.wake)
            case StopRuntime():
                await self._stop(effect)
            case _:
                assert_never(effect)

    async def _spawn(self, effect: SpawnRuntime) -> None:
        resident_id = effect.resident_id
        _log.info("starting", resident=resident_id)
        self._ours.add(resident_id)
        try:
            process = await self._runtimes.spawn(resident_id, effect.deployment_id, effect.accelerator_id)
        except RuntimeFault as fault:
            await self._fail(resident_id, fault)
            return
        await self._say(RuntimeSpawned(resident_id, process))

    async def _begin_serving(self, resident_id: str, begin: Callable[[str], Awaitable[None]]) -> None:
        """Load it, or wake it."""
        try:
            await begin(resident_id)
        except RuntimeFault as fault:
            await self._fail(resident_id, fault)
        except KeyError:
            await self._fail(resident_id, RuntimeFault(Failure.RUNTIME_CRASH, "no_process"))
        else:
            _log.info("ready", resident=resident_id)
            await self._say(RuntimeReady(resident_id))

    async def _sleep(self, effect: SleepRuntime) -> None:
        resident_id = effect.resident_id
        try:
            await self._runtimes.sleep(resident_id)
        except RuntimeFault as fault:
            await self._fail(resident_id, fault)
        except KeyError:
            await self._fail(resident_id, RuntimeFault(Failure.RUNTIME_CRASH, "no_process"))
        else:
            _log.info("asleep", resident=resident_id)
            self._asleep.add(resident_id)
            self._memory_freed()

    async def _stop(self, effect: StopRuntime) -> None:
        """Until it is gone: it is ours to end, however long that takes."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                await self._end_process(effect)
                break
            except RuntimeFault as fault:
                _log.warning("a process does not end", resident=effect.resident_id, fault=str(fault))
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE_SECONDS)
        _log.info("stopped", resident=effect.resident_id)
        await self._say(RuntimeStopped(effect.resident_id))
        self._stopped.add(effect.resident_id)
        self._memory_freed()

    async def _end_process(self, effect: StopRuntime) -> None:
        if effect.resident_id in self._ours:
            await self._runtimes.stop(effect.resident_id, effect.grace_seconds)
        elif effect.process is not None:
            await self._runtimes.end_orphan(effect.process, effect.grace_seconds)

    # ---- answers -------------------------------------------------------------------------------------------------

    async def _say(self, happened: Input) -> None:
        """Until it is recorded."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                await self._engine.ask(happened)
                return
            except (LedgerUnavailable, LedgerCorrupt, DecisionFailed):
                await asyncio.sleep(pause)  # the engine has said why
                pause = min(2 * pause, LAST_PAUSE_SECONDS)

    async def _fail(self, resident_id: str, fault: RuntimeFault) -> None:
        _log.warning("a runtime failed", resident=resident_id, failure=fault.failure.value, detail=fault.detail)
        evidence = sha256(fault.evidence).hexdigest()
        await self._say(RuntimeFailed(resident_id, fault.failure, fault.detail, evidence))

    # ---- crashes -------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """One watch for each resident of ours that has a process, as long as it is there; no process beyond that."""
        present: set[str] = set()
        for _, record in self._engine.world.residents():
            resident_id = record.resident.resident_id
            present.add(resident_id)
            watched = record.process is not None and record.resident.state in _WATCHED and resident_id in self._ours
            if watched and resident_id not in self._watches:
                name = f"watch {resident_id}"
                self._watches[resident_id] = asyncio.create_task(self._await_exit(resident_id), name=name)
        for resident_id in self._watches.keys() - present:
            self._watches.pop(resident_id).cancel()
        # Given up while it was being started, or while we slept: nothing in the state wants its end, so we do.
        for resident_id in sorted(self._ours - present - self._stopped - self._jobs.keys()):
            self._start(StopRuntime(resident_id, None, 0))
        self._stopped &= present
        self._asleep &= present
        self._ours &= present | self._jobs.keys()

    async def _await_exit(self, resident_id: str) -> None:
        try:
            fault = await self._runtimes.exited(resident_id)
        except KeyError:
            fault = RuntimeFault(Failure.RUNTIME_CRASH, "no_process")
        found = self._engine.world.find_resident(resident_id)
        if found is not None and (found[1].eviction is None or found[1].eviction.sleeps):
            await self._fail(resident_id, fault)
