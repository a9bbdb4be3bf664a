"""A second shell around the scheduler, in virtual time: fake devices, runtimes and clients; all else is real.

It owns what a shell owns (a clock, a timer, effects in progress) and no rule of its own. One seed gives one ledger,
byte for byte: every draw is an integer from one generator, every event of the world is in one heap.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from gpuledger.domain.configuration import ClientSpec, Configuration
from gpuledger.domain.events import (
    DeploymentSpec,
    EnvelopeMeasured,
    LeaseExpired,
    LeasePreempted,
    Recorded,
    RequestCancelled,
    RequestCompleted,
    RequestFailed,
)
from gpuledger.domain.failures import Failure
from gpuledger.domain.messages import (
    Agenda,
    AnswerCutOff,
    ClientGone,
    DrainTimedOut,
    Effect,
    EnvelopeTaken,
    Forward,
    Input,
    LoadRuntime,
    RequestArrived,
    RequestsHeld,
    RuntimeFailed,
    RuntimeReady,
    RuntimeSpawned,
    RuntimeStopped,
    ShutdownRequested,
    SleepRuntime,
    SpawnRuntime,
    Started,
    StopRuntime,
    WakeRuntime,
    WorkEnded,
)
from gpuledger.domain.policy import Policy, Priority
from gpuledger.domain.ports import (
    AcceleratorReading,
    Ledger,
    ManagedReading,
    NodeReading,
    ProcessIdentity,
    RuntimeFigures,
)
from gpuledger.domain.reasons import Reason
from gpuledger.domain.sampling import SampleTaken
from gpuledger.domain.scheduler import Scheduler, renewal_interval_ms
from gpuledger.domain.state import Envelope, Kind, Residency, ResidencyPolicy, Sleep
from gpuledger.domain.units import GIB, MIB, MICROS_PER_MS, parse_instant, seconds
from gpuledger.domain.world import World, evolve, fold

START = parse_instant("2026-11-30T00:00:00.000000Z")
NODE = "local"
BOOT = "virtual-boot"
KEEP_WARM = Residency()


@dataclass(frozen=True, slots=True)
class Model:
    """A fake deployment: what it holds, and how long it takes."""

    deployment_id: str
    idle_bytes: int
    peak_bytes: int
    load_ms: int = 4000
    unload_ms: int = 400
    priority: Priority = Priority.INTERACTIVE
    concurrency: int = 1
    queue_limit: int = 16
    interruptible: bool = False
    residency: Residency = KEEP_WARM
    sleep: Sleep | None = None
    starts_alone: bool = False
    fallback_of: str | None = None

    @property
    def capability(self) -> str:
        return f"{self.fallback_of or self.deployment_id}@1"

    def spec(self) -> DeploymentSpec:
        return DeploymentSpec(
            deployment_id=self.deployment_id,
            capability=self.capability,
            kind=Kind.GPU,
            runtime="fake",
            config_hash=f"cfg-{self.deployment_id}",
            context_length=4096,
            batch_size=8,
            concurrency=self.concurrency,
            load_ms=self.load_ms,
            unload_ms=self.unload_ms,
            fallback_rank=0 if self.fallback_of is None else 1,
            interruptible=self.interruptible,
            max_replicas=4,
            min_memory_bytes=None,
            node_selector={},
            priority=self.priority,
            production_eligible=True,
            queue_limit=self.queue_limit,
            residency=self.residency,
            sleep=self.sleep,
            starts_alone=self.starts_alone,
        )

    def measured(self, accelerator_id: str, at: int) -> EnvelopeMeasured:
        return EnvelopeMeasured(
            deployment_id=self.deployment_id,
            accelerator_id=accelerator_id,
            envelope=Envelope(
                config_hash=f"cfg-{self.deployment_id}",
                gpu_class="virtual",
                idle_bytes=self.idle_bytes,
                peak_bytes=self.peak_bytes,
                measured_at=at,
                context_length=4096,
                batch_size=8,
                concurrency=self.concurrency,
            ),
            load_ms=self.load_ms,
            unload_ms=self.unload_ms,
            load_peak_bytes=self.idle_bytes,
            busy_peak_bytes=self.peak_bytes,
            device_idle_bytes=self.idle_bytes,
            device_peak_bytes=self.peak_bytes,
            residual_bytes=0,
            release_ms=self.unload_ms,
            artifact_sha256=None,
            runtime_version="1",
            device_name="Virtual",
            driver_version="1",
        )


@dataclass
class Card:
    """A fake device: its size, and what others hold of it."""

    accelerator_id: str
    total_bytes: int
    external_bytes: int = 0
    silent: bool = False
    #: Of processes that have ended: it is used for a while longer, and nobody's (`VirtualShell.linger_ms`).
    lingering_bytes: int = 0


@dataclass
class FakeProcess:
    """What a resident's process holds now."""

    resident_id: str
    model: Model
    accelerator_id: str
    identity: ProcessIdentity
    loaded: bool = False
    working: int = 0
    gone: bool = False
    asleep: bool = False

    @property
    def held_bytes(self) -> int:
        if self.gone or not self.loaded:
            return 0
        if self.asleep and self.model.sleep is not None:
            return self.model.sleep.asleep_bytes
        return self.model.peak_bytes if self.working else self.model.idle_bytes


@dataclass
class Outcome:
    """What a client learned."""

    asked_at: int
    priority: Priority
    capability: str
    began_at: int | None = None
    ended_at: int | None = None
    event: object = None


def configuration(models: Iterable[Model], policy: Policy | None = None, pid: int = 1) -> Configuration:
    return Configuration(
        ledger_id="virtual",
        node_id=NODE,
        production_eligible=True,
        labels={},
        policy=Policy() if policy is None else policy,
        deployments=tuple(model.spec() for model in models),
        clients=(ClientSpec("client", Priority.INTERACTIVE, False, None),),
        accelerator_ids=None,
        product_version="test",
        pid=pid,
    )


@dataclass
class VirtualShell:
    """One scheduler on one ledger, driven by a heap of things that will happen."""

    ledger: Ledger
    models: tuple[Model, ...]
    cards: tuple[Card, ...]
    policy: Policy = field(default_factory=Policy)
    now: int = START
    check: Callable[[VirtualShell], None] | None = None
    fail_loads: set[str] = field(default_factory=set[str])
    load_failure: Failure = Failure.MODEL_LOAD_FAILED
    #: Deployments that say that they sleep and keep what they hold.
    stubborn: set[str] = field(default_factory=set[str])
    work_ms: Callable[[str], int] = lambda _: 200
    #: Requests whose clients see an answer as soon as work begins.
    streams: Callable[[str], bool] = lambda _: False
    #: How long cards go on showing what a process held that has ended.
    linger_ms: int = 0

    def __post_init__(self) -> None:
        self.world = World()
        self.scheduler = Scheduler(NODE)
        self.processes: dict[str, FakeProcess] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.recorded: list[Recorded] = []
        self.steps = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self._begun: set[Effect] = set()
        self._wake_at: int | None = None
        self._sampled_at = 0
        self._next_sample: int | None = None
        self._pid = 1000
        self.stopped = False

    # ---- life ----------------------------------------------------------------------------------------------------

    def start(self, *, measure: bool = True) -> None:
        """Fold what is there, take the ledger over, look at the devices, measure what has no envelope yet."""
        after = 0
        while page := self.ledger.read(after, 1000):
            self.world = fold(self.world, page)
            after = page[-1].seq
        self.now = max(self.now, self.world.at)
        self.feed(Started(configuration(self.models, self.policy)))
        self.sample()
        for model in self.models if measure else ():
            if not self.world.deployments[model.deployment_id].measured:
                self.feed(EnvelopeTaken(model.measured(self.cards[0].accelerator_id, self.now)))
        self._hold()

    def run_until(self, instant: int) -> None:
        """Let everything happen that happens up to an instant."""
        while not self.stopped and self._heap and self._heap[0][0] <= instant:
            at, _, happen = heapq.heappop(self._heap)
            self.now = max(self.now, at)
            happen()
        self.now = max(self.now, instant)

    def run_for(self, duration_seconds: int) -> None:
        self.run_until(self.now + seconds(duration_seconds))

    def shut_down(self) -> None:
        """Drain, as a signal does, and cancel what is left after a while."""
        self.feed(ShutdownRequested(NODE))
        self.at(self.now + seconds(30), lambda: self.feed(DrainTimedOut(NODE)))
        self.run_for(300)

    def crash(self) -> None:
        """The scheduler is killed: its processes die with it, nothing is recorded."""
        self.stopped = True
        self._heap.clear()
        for process in self.processes.values():
            process.gone = True

    # ---- clients -------------------------------------------------------------------------------------------------

    def ask(
        self,
        request_id: str,
        capability: str,
        priority: Priority = Priority.INTERACTIVE,
        *,
        deadline: int | None = None,
        lab: bool = False,
    ) -> Outcome:
        self.outcomes[request_id] = outcome = Outcome(self.now, priority, capability)
        self.feed(
            RequestArrived(
                request_id=request_id,
                client_id="client",
                capability=capability,
                priority=priority,
                lab=lab,
                requested_at=self.now,
                deadline=deadline,
                operation="embeddings",
                body_bytes=100,
            )
        )
        return outcome

    def ask_at(self, instant: int, request_id: str, capability: str, priority: Priority) -> None:
        self.at(instant, lambda: self.ask(request_id, capability, priority))

    def leave(self, request_id: str) -> None:
        """The client hangs up."""
        self.feed(ClientGone(request_id))

    # ---- the shell itself ----------------------------------------------------------------------------------------

    def at(self, instant: int, happen: Callable[[], object]) -> None:
        self._count += 1

        def guarded() -> None:
            if not self.stopped:
                happen()

        heapq.heappush(self._heap, (max(instant, self.now), self._count, guarded))

    def after_ms(self, duration_ms: int, happen: Callable[[], object]) -> None:
        self.at(self.now + duration_ms * MICROS_PER_MS, happen)

    def feed(self, happened: Input) -> None:
        """One input, then everything that it makes due, then what that makes wanted."""
        self.steps += 1
        batch = self.scheduler.handle(self.world, happened, self.now)
        while batch is not None:
            self._append(self.ledger.append(batch, self.now))
            batch = self.scheduler.settle(self.world, self.now)
        while (batch := self.scheduler.settle(self.world, self.now)) is not None:
            self._append(self.ledger.append(batch, self.now))
        self._carry_out(self.scheduler.agenda(self.world, self.now))
        if self.check is not None:
            self.check(self)

    def settle(self) -> None:
        """Time alone has passed."""
        self.feed(RequestsHeld(frozenset()))

    def sample(self) -> None:
        """Read every card, now."""
        self._sampled_at = self.now
        self._next_sample = None
        self.feed(SampleTaken(NODE, self.reading(), self._figures()))

    def _append(self, recorded: tuple[Recorded, ...]) -> None:
        for event in recorded:
            self.world = evolve(self.world, event)
            self._tell(event.data)
        self.recorded.extend(recorded)

    def _tell(self, data: object) -> None:
        """Clients learn how their request ended; work whose lease was lost is broken off."""
        if isinstance(data, RequestFailed | RequestCancelled | RequestCompleted):
            outcome = self.outcomes.get(data.request_id)
            if outcome is not None:
                outcome.ended_at, outcome.event = self.now, data
        if isinstance(data, LeaseExpired | LeasePreempted):
            process = self.processes.get(data.resident_id)
            if process is not None and process.working:
                process.working -= 1
        if isinstance(data, LeasePreempted):
            self._cut_off(data)

    def _cut_off(self, lost: LeasePreempted) -> None:
        """Its gateway knows whether something of an answer was sent."""
        outcome = self.outcomes.get(lost.request_id)
        if outcome is not None and outcome.began_at is not None:
            if self.streams(lost.request_id):
                cut = AnswerCutOff(lost.request_id, Reason.PREEMPTED, None, "preempted_after_it_began")
                self.after_ms(1, lambda: self.feed(cut))
            outcome.began_at = None

    def _carry_out(self, agenda: Agenda) -> None:
        self._begun &= set(agenda.effects)
        for effect in agenda.effects:
            if effect not in self._begun:
                self._begun.add(effect)
                self._begin(effect)
        self._look_ahead(agenda)

    def _look_ahead(self, agenda: Agenda) -> None:
        """Set the timer and the next sample, and see whether the scheduler has left."""
        if agenda.wake_at is not None and (self._wake_at is None or agenda.wake_at < self._wake_at):
            self._wake_at = due = agenda.wake_at
            self.at(due, lambda: self._wake() if self._wake_at == due else None)
        wanted = self._sampled_at + agenda.sample_interval_ms * MICROS_PER_MS
        if agenda.sample_after is not None:
            wanted = min(wanted, max(agenda.sample_after + MICROS_PER_MS, self._sampled_at + 50 * MICROS_PER_MS))
        if self._next_sample is None or wanted < self._next_sample:
            self._next_sample = max(wanted, self.now)
            sampled = self._next_sample
            self.at(sampled, lambda: self.sample() if self._next_sample == sampled else None)
        if agenda.stopped:
            self.stopped = True

    def _wake(self) -> None:
        self._wake_at = None
        self.settle()

    def _begin(self, effect: Effect) -> None:
        match effect:
            case SpawnRuntime():
                self.after_ms(5, lambda: self._spawned(effect))
            case LoadRuntime():
                process = self.processes[effect.resident_id]
                self.after_ms(process.model.load_ms // 2, lambda: self._half_loaded(process))
                self.after_ms(process.model.load_ms, lambda: self._loaded(process))
            case SleepRuntime():
                sleep = self.processes[effect.resident_id].model.sleep
                self.after_ms(sleep.sleep_ms if sleep else 1, lambda: self._slept(effect))
            case WakeRuntime():
                sleep = self.processes[effect.resident_id].model.sleep
                self.after_ms(sleep.wake_ms if sleep else 1, lambda: self._woken(effect))
            case StopRuntime():
                stopping = self.processes.get(effect.resident_id)
                self.after_ms(400 if stopping is None else stopping.model.unload_ms, lambda: self._stopped(effect))
            case Forward():
                self._work(effect)

    def _spawned(self, effect: SpawnRuntime) -> None:
        model = next(m for m in self.models if m.deployment_id == effect.deployment_id)
        self._pid += 1
        identity = ProcessIdentity(self._pid, self._pid * 7, BOOT)
        self.processes[effect.resident_id] = FakeProcess(effect.resident_id, model, effect.accelerator_id, identity)
        self.feed(RuntimeSpawned(effect.resident_id, identity))

    def _slept(self, effect: SleepRuntime) -> None:
        process = self.processes.get(effect.resident_id)
        if process is not None and not process.gone:
            process.asleep = process.model.deployment_id not in self.stubborn
            self.sample()

    def _woken(self, effect: WakeRuntime) -> None:
        process = self.processes.get(effect.resident_id)
        if process is not None and not process.gone:
            process.asleep = False
            self._loaded(process)

    def _half_loaded(self, process: FakeProcess) -> None:
        process.loaded = not process.gone

    def _loaded(self, process: FakeProcess) -> None:
        if process.gone:
            return
        if process.model.deployment_id in self.fail_loads:
            process.gone = True
            self.feed(RuntimeFailed(process.resident_id, self.load_failure, "exit_status_1", "0" * 64))
        else:
            self.feed(RuntimeReady(process.resident_id))

    def _stopped(self, effect: StopRuntime) -> None:
        process = self.processes.get(effect.resident_id)
        if process is not None:
            if self.linger_ms:
                self._linger(process)
            process.gone = True
            del self.processes[effect.resident_id]
        self.feed(RuntimeStopped(effect.resident_id))
        self.sample()

    def _linger(self, process: FakeProcess) -> None:
        card = next(one for one in self.cards if one.accelerator_id == process.accelerator_id)
        held_bytes = process.held_bytes
        card.lingering_bytes += held_bytes

        def back() -> None:
            card.lingering_bytes -= held_bytes

        self.after_ms(self.linger_ms, back)

    def _work(self, effect: Forward) -> None:
        process = self.processes[effect.resident_id]
        process.working += 1
        outcome = self.outcomes.get(effect.request_id)
        if outcome is not None:
            outcome.began_at = self.now
        duration = self.work_ms(effect.request_id)
        self.after_ms(duration, lambda: self._worked(process, effect, duration))

    def _worked(self, process: FakeProcess, effect: Forward, duration_ms: int) -> None:
        request = self.world.requests.get(effect.request_id)
        if request is None or request.lease_id != effect.lease_id:
            return  # broken off before
        process.working = max(0, process.working - 1)
        self.feed(WorkEnded(effect.request_id, 200, duration_ms, 1000, 5, 7, None, "", client_gone=False))

    def crash_runtime(self, resident_id: str, detail: str = "signal_11") -> None:
        """One of our processes dies on its own."""
        process = self.processes[resident_id]
        process.gone = True
        self.feed(RuntimeFailed(resident_id, Failure.RUNTIME_CRASH, detail, "0" * 64))

    def _hold(self) -> None:
        """Everybody who waits still waits: leases are renewed."""
        held = frozenset(request for request in self.world.requests if not self.stopped)
        self.feed(RequestsHeld(held))
        self.after_ms(renewal_interval_ms(self.policy.lease_ttl_seconds), self._hold)

    # ---- the devices ---------------------------------------------------------------------------------------------

    def held_on(self, accelerator_id: str) -> int:
        """What our processes physically hold on a card."""
        return sum(p.held_bytes for p in self.processes.values() if p.accelerator_id == accelerator_id)

    def reading(self) -> NodeReading:
        """What a sample of every card that speaks shows now."""
        cards = tuple(self._read(index, card) for index, card in enumerate(self.cards) if not card.silent)
        return NodeReading(accelerators=cards, faults=(), memory_bytes=None, age_ms=0)

    def _read(self, index: int, card: Card) -> AcceleratorReading:
        here = [p for p in self.processes.values() if p.accelerator_id == card.accelerator_id]
        return AcceleratorReading(
            accelerator_id=card.accelerator_id,
            index=index,
            kind=Kind.GPU,
            gpu_class="virtual",
            device_name="Virtual",
            driver_version="1",
            total_bytes=card.total_bytes,
            used_bytes=min(
                card.total_bytes, card.external_bytes + card.lingering_bytes + self.held_on(card.accelerator_id)
            ),
            managed=tuple(ManagedReading(p.resident_id, not p.gone, p.held_bytes) for p in here if not p.gone),
            foreign_processes=1 if card.external_bytes else 0,
        )

    def _figures(self) -> dict[str, RuntimeFigures]:
        return {p.resident_id: RuntimeFigures(p.working) for p in self.processes.values() if not p.gone and p.loaded}


def busy_day(
    ledger: Ledger, seed: int, *, hours: int = 24, check: Callable[[VirtualShell], None] | None = None
) -> VirtualShell:
    """Three models that do not fit together, four classes of clients, and a program that comes and goes."""
    draw = random.Random(seed)
    models = (
        Model("embed", 1 * GIB, 1 * GIB + 200 * MIB, load_ms=2000, priority=Priority.PRODUCTION, concurrency=2),
        Model("chat", 9 * GIB, 11 * GIB, load_ms=9000, concurrency=4),
        Model("vision", 7 * GIB, 8 * GIB, load_ms=7000, residency=Residency(ResidencyPolicy.LOAD_ON_DEMAND, 0)),
        Model("batch", 6 * GIB, 7 * GIB, load_ms=5000, priority=Priority.BACKGROUND, interruptible=True),
    )
    shell = VirtualShell(
        ledger,
        models,
        (Card("GPU-0", 24 * GIB), Card("GPU-1", 16 * GIB)),
        policy=replace(Policy(), fair_wait_seconds=20, sample_interval_seconds=20, telemetry_max_age_seconds=60),
        check=check,
    )
    durations = [draw.randrange(50, 4000) for _ in range(997)]
    shell.work_ms = lambda request_id: durations[sum(request_id.encode()) % 997]
    shell.start()
    end = shell.now + seconds(hours * 3600)
    moment, number = shell.now, 0
    while moment < end:
        moment += draw.randrange(500, 120_000) * MICROS_PER_MS
        for _ in range(draw.choice((1, 1, 1, 2, 5))):
            number += 1
            model = draw.choice(models)
            priority = draw.choice((Priority.PRODUCTION, Priority.INTERACTIVE, Priority.BACKGROUND, Priority.BENCHMARK))
            shell.ask_at(moment, f"r{number}", model.capability, priority)
    for _ in range(hours):
        card = draw.choice(shell.cards)
        comes = shell.now + draw.randrange(1, hours * 3600) * 1_000_000
        size = draw.randrange(1, 14) * GIB
        shell.at(comes, lambda card=card, size=size: _take(shell, card, size))  # type: ignore[misc]
    shell.run_until(end)
    shell.shut_down()
    return shell


def _take(shell: VirtualShell, card: Card, size: int) -> None:
    """Another program takes what is free and not promised of what it wants, and gives it back within the hour.

    What one takes that was promised to another is an out-of-memory that no scheduler can prevent.
    """
    promised = sum(
        max(record.resident.reserved_bytes, record.resident.attributed_bytes)
        for record in shell.world.accelerators[card.accelerator_id].residents.values()
    )
    taken = max(0, min(size, card.total_bytes - card.external_bytes - promised - GIB))
    card.external_bytes += taken

    def give_back() -> None:
        card.external_bytes -= taken

    shell.after_ms(taken // MIB * 100, give_back)
