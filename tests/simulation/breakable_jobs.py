"""What the scheduler wants of runtimes, carried out on a machine that breaks (tools/effects.py, adapters/runtimes)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias, assert_never

from gpuledger.domain.failures import Failure
from gpuledger.domain.messages import (
    Effect,
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
from gpuledger.domain.ports import ProcessIdentity
from gpuledger.domain.state import ResidentState

from .breakable_engine import AGAIN_MS, BreakableEngine
from .breakable_machine import FOREVER, Body
from .virtual_shell import BOOT

RuntimeEffect: TypeAlias = SpawnRuntime | LoadRuntime | SleepRuntime | WakeRuntime | StopRuntime

SPAWN_MS: Final = 5
#: A runtime that lies says that it is ready before it has begun.
LIE_MS: Final = 10
#: `load_timeout_seconds` of a small model.
LOAD_TIMEOUT_MS: Final = 60_000
#: Until the end of a process is noticed, and between two looks at one that not even SIGKILL ends.
NOTICE_MS: Final = 20
NOT_GONE_MS: Final = 5000
EVIDENCE: Final = "0" * 64
_WATCHED: Final = (ResidentState.LOADING, ResidentState.READY, ResidentState.SLEEPING, ResidentState.DRAINING)


@dataclass
class Job:
    """What is being done with a resident. `ended`: its answer was recorded, or nobody waits for it any more."""

    effect: RuntimeEffect
    ended: bool = False

    @property
    def resident_id(self) -> str:
        return self.effect.resident_id


class BreakableJobs(BreakableEngine):
    """One job per resident, and a watch for crashes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.jobs: dict[str, Job] = {}
        self._ours: set[str] = set()
        self._stopped_ones: set[str] = set()
        self._asleep_ones: set[str] = set()

    def work_of(self, body: Body) -> list[Callable[[], None]]:
        """For each work on a process: what breaks its connection."""
        raise NotImplementedError

    # ---- one job per resident ------------------------------------------------------------------------------------

    def want(self, effect: Effect) -> None:
        assert not isinstance(effect, Forward)
        resident_id = effect.resident_id
        job = self.jobs.get(resident_id)
        if job is not None:
            if not isinstance(effect, StopRuntime) or isinstance(job.effect, SpawnRuntime | StopRuntime):
                return
            job.ended = True
        elif self._is_done(effect):
            return
        self.jobs[resident_id] = job = Job(effect)
        self._begin_job(job)

    def _is_done(self, effect: RuntimeEffect) -> bool:
        """Carried out and answered, but for what the device has to show."""
        if isinstance(effect, SleepRuntime):
            return effect.resident_id in self._asleep_ones
        return isinstance(effect, StopRuntime) and effect.resident_id in self._stopped_ones

    def _begin_job(self, job: Job) -> None:
        effect = job.effect
        match effect:
            case SpawnRuntime():
                self.after_ms(SPAWN_MS, lambda: self._spawn(job, effect))
            case LoadRuntime():
                self._load(job)
            case SleepRuntime():
                self._sleep(job)
            case WakeRuntime():
                self._rouse(job)
            case StopRuntime():
                self._stop(job, effect)
            case _:
                assert_never(effect)

    def _end_job(self, job: Job) -> None:
        job.ended = True
        if self.jobs.get(job.resident_id) is job:
            del self.jobs[job.resident_id]

    def _say(self, job: Job, happened: Input, then: Callable[[], None] = lambda: None) -> None:
        """The answer of a job, until it is recorded."""
        if job.ended:
            return
        if self.tell(happened):
            self._end_job(job)
            then()
            self.poke()
        else:
            self.after_ms(AGAIN_MS, lambda: self._say(job, happened, then))

    def _fail(self, job: Job, failure: Failure, detail: str) -> None:
        self._say(job, RuntimeFailed(job.resident_id, failure, detail, EVIDENCE))

    def look_after(self) -> None:
        """A process that ended on its own is news, once; one whose resident is no more is ended (Effects._watch)."""
        present: set[str] = set()
        for _, record in self.world.residents():
            resident_id = record.resident.resident_id
            present.add(resident_id)
            body = self.machine.bodies.get(resident_id)
            watched = record.process is not None and record.resident.state in _WATCHED
            if watched and body is not None and body.gone and not body.noticed:
                body.noticed = True
                self.after_ms(1, lambda body=body: self._notice(body))  # type: ignore[misc]
        left_behind = self._ours - present - self._stopped_ones - self.jobs.keys()
        for resident_id in sorted(left_behind):
            self.want(StopRuntime(resident_id, None, 0))
        self._ours &= present | self.jobs.keys()
        self._stopped_ones &= present
        self._asleep_ones &= present

    def _notice(self, body: Body) -> None:
        job = self.jobs.get(body.resident_id)
        if job is not None and isinstance(job.effect, LoadRuntime | WakeRuntime | SleepRuntime):
            loads = isinstance(job.effect, LoadRuntime)
            self._fail(job, Failure.MODEL_LOAD_FAILED if loads else Failure.RUNTIME_CRASH, body.last_words)
        found = self.world.find_resident(body.resident_id)
        if found is not None and (found[1].eviction is None or found[1].eviction.sleeps):
            self.until_told(RuntimeFailed(body.resident_id, Failure.RUNTIME_CRASH, body.last_words, EVIDENCE))

    # ---- what a process does -------------------------------------------------------------------------------------

    def _step(self, body: Body, duration_ms: int, happen: Callable[[], None]) -> None:
        """It takes its time, more of it while the process is stalled, and is never done by one that is gone."""

        def due() -> None:
            if body.gone:
                return
            if body.stalled_until > self.now:
                body.parked.append(due)
            else:
                happen()

        self.after_ms(duration_ms, due)

    def stall(self, body: Body, until: int) -> None:
        """It stops in its tracks, for a time or FOREVER."""
        body.stalled_until = until
        if until < FOREVER:
            self.at(until, lambda: self.let_go_on(body))

    def let_go_on(self, body: Body) -> None:
        body.stalled_until, parked = 0, body.parked
        body.parked = []
        for happen in parked:
            self.after_ms(1, happen)

    def kill(self, body: Body, last_words: str = "killed") -> None:
        """It ends on its own; whoever watches it or talks to it learns of it."""
        body.last_words = last_words
        self._bury(body)
        self.after_ms(NOTICE_MS, self.poke)

    def _bury(self, body: Body) -> None:
        self.machine.bury(body)
        for break_connection in self.work_of(body):
            break_connection()

    def _remove(self, body: Body) -> None:
        """It was ended by us."""
        body.noticed = True
        self._bury(body)
        self.machine.bodies.pop(body.resident_id, None)

    def run_out(self, body: Body) -> None:
        """An allocation failed: it says so, and ends."""
        self._bury(body)
        body.noticed = True
        job = self.jobs.get(body.resident_id)
        if job is not None and isinstance(job.effect, LoadRuntime | WakeRuntime):
            self._fail(job, Failure.GPU_OOM, "out_of_memory")
        else:
            failed = RuntimeFailed(body.resident_id, Failure.GPU_OOM, "out_of_memory", EVIDENCE)
            self.after_ms(NOTICE_MS, lambda: self.until_told(failed))

    def _spawn(self, job: Job, effect: SpawnRuntime) -> None:
        self._ours.add(effect.resident_id)
        if self.machine.fail_spawns:
            self._fail(job, Failure.MODEL_LOAD_FAILED, "cannot_start")
            return
        model = next(m for m in self.models if m.deployment_id == effect.deployment_id)
        self.machine.pid += 1
        identity = ProcessIdentity(self.machine.pid, self.machine.pid * 7, BOOT)
        body = Body(effect.resident_id, model, effect.accelerator_id, identity)
        body.keeps_memory = self.machine.keeps_memory
        self.machine.bodies[effect.resident_id] = body
        self._say(job, RuntimeSpawned(effect.resident_id, identity))

    def _load(self, job: Job) -> None:
        body = self.machine.bodies[job.resident_id]
        if self.machine.lies_ready:
            self.after_ms(LIE_MS, lambda: self._say(job, RuntimeReady(body.resident_id)))
        self._take_up(job, body, body.model.load_ms, "load_timeout")

    def _rouse(self, job: Job) -> None:
        self._asleep_ones.discard(job.resident_id)
        body = self.machine.bodies.get(job.resident_id)
        if body is None or body.model.sleep is None:
            self.after_ms(1, lambda: self._fail(job, Failure.RUNTIME_CRASH, "no_process"))
        else:
            self._take_up(job, body, body.model.sleep.wake_ms, "wake_timeout")

    def _take_up(self, job: Job, body: Body, duration_ms: int, timeout_detail: str) -> None:
        """Half of the time until it has taken its memory, half for its functional check."""
        self._step(body, duration_ms // 2, lambda: self._take_memory(job, body))
        self._step(body, duration_ms, lambda: self._taken_up(job, body))
        self.after_ms(LOAD_TIMEOUT_MS, lambda: self._fail(job, Failure.TIMEOUT, timeout_detail))

    def _take_memory(self, job: Job, body: Body) -> None:
        body.loaded, body.asleep, body.checking = True, False, not job.ended
        if job.ended:  # it said that it was ready, or was to be stopped: nobody holds room for it
            self.machine.card(body.accelerator_id).disturbed = self.machine.tick()
        if not self.machine.finds_room(body):
            self.run_out(body)

    def _taken_up(self, job: Job, body: Body) -> None:
        body.checking = False
        if job.ended:
            return
        if body.model.deployment_id in self.fail_loads:
            body.noticed = True
            self._bury(body)
            self._fail(job, self.load_failure, "exit_status_1")
        else:
            self._say(job, RuntimeReady(body.resident_id))

    def _sleep(self, job: Job) -> None:
        body = self.machine.bodies.get(job.resident_id)
        if body is None or body.model.sleep is None:
            self.after_ms(1, lambda: self._fail(job, Failure.RUNTIME_CRASH, "no_process"))
            return

        def slept() -> None:
            body.asleep = body.model.deployment_id not in self.stubborn
            if not job.ended:
                self._end_job(job)
                self._asleep_ones.add(job.resident_id)
                self.sample()

        self._step(body, body.model.sleep.sleep_ms, slept)
        self.after_ms(LOAD_TIMEOUT_MS, lambda: self._fail(job, Failure.TIMEOUT, "sleep_timeout"))

    def _stop(self, job: Job, effect: StopRuntime) -> None:
        """TERM, grace, TERM, grace, KILL: one that is stalled hears only the last."""
        body = self.machine.bodies.get(effect.resident_id)
        if body is None or body.gone:
            duration_ms = 1
        elif body.stalled_until > self.now or body.unkillable:
            duration_ms = 2000 * effect.grace_seconds + 100
        else:
            duration_ms = body.model.unload_ms
        self.after_ms(duration_ms, lambda: self._ended(job))

    def _ended(self, job: Job) -> None:
        body = self.machine.bodies.get(job.resident_id)
        if body is not None and body.unkillable:
            self.after_ms(NOT_GONE_MS, lambda: self._ended(job))
            return
        if body is not None:
            self._remove(body)

        def stopped() -> None:
            self._stopped_ones.add(job.resident_id)
            self.sample()

        self._say(job, RuntimeStopped(job.resident_id), stopped)
