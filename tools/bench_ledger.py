"""A ledger for benches: the scheduler driven by hand through virtual time, on a node that consists of figures.

Nothing sleeps, no device is read and no process is started: models are sizes and durations. The same arguments give
the same events.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final, TypeAlias

from gpuledger.adapters.ledger.memory import MemoryLedger
from gpuledger.domain.configuration import ClientSpec, Configuration
from gpuledger.domain.events import DeploymentSpec, EnvelopeMeasured, Recorded
from gpuledger.domain.messages import (
    Agenda,
    Effect,
    EnvelopeTaken,
    Forward,
    Input,
    LoadRuntime,
    RequestArrived,
    RequestsHeld,
    RuntimeReady,
    RuntimeSpawned,
    RuntimeStopped,
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
    Batch,
    ManagedReading,
    NodeReading,
    ProcessIdentity,
    RuntimeFigures,
)
from gpuledger.domain.sampling import SampleTaken
from gpuledger.domain.scheduler import Scheduler
from gpuledger.domain.state import Envelope, Kind, Residency
from gpuledger.domain.units import GIB, MICROS_PER_MS, milliseconds, parse_instant, seconds
from gpuledger.domain.world import World, fold

#: As `Ledger.append`.
Append: TypeAlias = Callable[[Batch, int], tuple[Recorded, ...]]

NODE: Final = "bench"
CARD: Final = "GPU-0"
CARD_BYTES: Final = 24 * GIB
GPU_CLASS: Final = "virtual"
START: Final = parse_instant("2026-11-30T00:00:00.000000Z")
#: Between two samples that the application asks for at once; a real sampler needs some time, too.
SAMPLE_GAP_MS: Final = 50
#: A sample a minute is what a quiet node needs to keep; it keeps a virtual day short enough for a bench.
POLICY: Final = replace(Policy(), sample_interval_seconds=60, telemetry_max_age_seconds=180)


@dataclass(frozen=True, slots=True)
class Model:
    """A deployment as figures."""

    deployment_id: str
    held_bytes: int
    load_ms: int
    work_ms: int
    concurrency: int = 1

    @property
    def capability(self) -> str:
        return f"{self.deployment_id}@1"

    @property
    def _config_hash(self) -> str:
        return f"cfg-{self.deployment_id}"

    def spec(self) -> DeploymentSpec:
        """As an operator declares it."""
        return DeploymentSpec(
            deployment_id=self.deployment_id,
            capability=self.capability,
            kind=Kind.GPU,
            runtime="virtual",
            config_hash=self._config_hash,
            context_length=4096,
            batch_size=8,
            concurrency=self.concurrency,
            load_ms=self.load_ms,
            unload_ms=400,
            fallback_rank=0,
            interruptible=False,
            max_replicas=1,
            min_memory_bytes=None,
            node_selector={},
            priority=Priority.INTERACTIVE,
            production_eligible=True,
            queue_limit=16,
            residency=Residency(),
            sleep=None,
        )

    def measured(self, at: int) -> EnvelopeMeasured:
        """As `gpuledger profile` would have measured it."""
        envelope = Envelope(
            config_hash=self._config_hash,
            gpu_class=GPU_CLASS,
            idle_bytes=self.held_bytes,
            peak_bytes=self.held_bytes,
            measured_at=at,
            context_length=4096,
            batch_size=8,
            concurrency=self.concurrency,
        )
        return EnvelopeMeasured(
            deployment_id=self.deployment_id,
            accelerator_id=CARD,
            envelope=envelope,
            load_ms=self.load_ms,
            unload_ms=400,
            load_peak_bytes=self.held_bytes,
            busy_peak_bytes=self.held_bytes,
            device_idle_bytes=self.held_bytes,
            device_peak_bytes=self.held_bytes,
            residual_bytes=0,
            release_ms=400,
            artifact_sha256=None,
            runtime_version="1",
            device_name="Virtual",
            driver_version="1",
        )


EMBED: Final = Model("embed", 1 * GIB, load_ms=2_000, work_ms=30, concurrency=4)
CHAT: Final = Model("chat", 9 * GIB, load_ms=9_000, work_ms=2_500, concurrency=2)
#: Fits beside neither of the other two for long: it drives `chat` out, and is driven out by it.
VISION: Final = Model("vision", 12 * GIB, load_ms=7_000, work_ms=4_000)


@dataclass(slots=True)
class _Process:
    """What stands for the process of a resident."""

    model: Model
    held_bytes: int = 0
    working: int = 0


class VirtualNode:
    """A scheduler, its ledger, and one card. `now` moves in `run_until` only."""

    def __init__(self, append: Append, models: Sequence[Model]) -> None:
        self.world = World()
        self.now = START
        self._append = append
        self._models = {model.deployment_id: model for model in models}
        self._scheduler = Scheduler(NODE)
        self._agenda = Agenda((), None, None, 0, stopped=False)
        self._processes: dict[str, _Process] = {}
        self._begun: set[Effect] = set()
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self._sampled_at = START

    def start(self) -> None:
        """Open the ledger, look at the card, and know what every model takes."""
        self.feed(Started(self._configuration()))
        self.sample()
        for model in self._models.values():
            self.feed(EnvelopeTaken(model.measured(self.now)))

    def ask(self, request_id: str, model: Model, priority: Priority = Priority.INTERACTIVE) -> None:
        """A client asks, now."""
        self.feed(
            RequestArrived(
                request_id=request_id,
                client_id="client",
                capability=model.capability,
                priority=priority,
                lab=False,
                requested_at=self.now,
                deadline=None,
                operation="embeddings",
                body_bytes=400,
            )
        )

    def at(self, instant: int, happen: Callable[[], None]) -> None:
        """Something happens at an instant."""
        self._count += 1
        heapq.heappush(self._heap, (instant, self._count, happen))

    def run_until(self, instant: int) -> None:
        """Let everything happen that happens up to an instant."""
        while (due := self._next())[0] <= instant:
            self.now = max(self.now, due[0])
            due[1]()
        self.now = max(self.now, instant)

    def run_for_ms(self, duration_ms: int) -> None:
        self.run_until(self.now + milliseconds(duration_ms))

    def sample(self) -> None:
        """Read the card."""
        self._sampled_at = self.now
        figures = {resident_id: RuntimeFigures(process.working) for resident_id, process in self._processes.items()}
        self.feed(SampleTaken(NODE, NodeReading((self._reading(),), (), None, 0), figures))

    def feed(self, happened: Input) -> None:
        """One input, everything that it makes due, and what that makes wanted: what a shell does."""
        batch = self._scheduler.handle(self.world, happened, self.now)
        self._commit(batch)
        while self._commit(self._scheduler.settle(self.world, self.now)):
            pass  # until nothing is due any more
        self._agenda = self._scheduler.agenda(self.world, self.now)
        wanted = set(self._agenda.effects)
        for effect in self._agenda.effects:
            if effect not in self._begun:
                self._begin(effect)
        self._begun = wanted

    def _commit(self, batch: Batch | None) -> bool:
        if batch is not None:
            self.world = fold(self.world, self._append(batch, self.now))
        return batch is not None

    # ---- time ----------------------------------------------------------------------------------------------------

    def _next(self) -> tuple[int, Callable[[], None]]:
        due = [(self._sample_due(), self.sample)]
        if self._heap:
            due.append((self._heap[0][0], self._happen))
        if self._agenda.wake_at is not None:
            due.append((self._agenda.wake_at, self._wake))
        return min(due, key=lambda one: one[0])

    def _happen(self) -> None:
        heapq.heappop(self._heap)[2]()

    def _wake(self) -> None:
        self.feed(RequestsHeld(frozenset(self.world.requests)))

    def _sample_due(self) -> int:
        due = self._sampled_at + milliseconds(self._agenda.sample_interval_ms)
        if self._agenda.sample_after is None:
            return due
        soon = max(self._agenda.sample_after + MICROS_PER_MS, self._sampled_at + milliseconds(SAMPLE_GAP_MS))
        return min(due, soon)

    def _after_ms(self, duration_ms: int, happen: Callable[[], None]) -> None:
        self.at(self.now + milliseconds(duration_ms), happen)

    # ---- effects -------------------------------------------------------------------------------------------------

    def _begin(self, effect: Effect) -> None:
        match effect:
            case SpawnRuntime():
                self._after_ms(5, lambda: self._spawned(effect))
            case LoadRuntime():
                load_ms = self._processes[effect.resident_id].model.load_ms
                self._after_ms(load_ms // 2, lambda: self._filled(effect.resident_id))
                self._after_ms(load_ms, lambda: self.feed(RuntimeReady(effect.resident_id)))
            case StopRuntime():
                self._after_ms(400, lambda: self._stopped(effect))
            case Forward():
                self._processes[effect.resident_id].working += 1
                work_ms = self._models[effect.deployment_id].work_ms
                self._after_ms(work_ms, lambda: self._worked(effect, work_ms))
            case SleepRuntime() | WakeRuntime():
                raise AssertionError("no model of this day can sleep")

    def _spawned(self, effect: SpawnRuntime) -> None:
        self._processes[effect.resident_id] = _Process(self._models[effect.deployment_id])
        identity = ProcessIdentity(1_000 + self._count, 7_000 + self._count, "virtual-boot")
        self.feed(RuntimeSpawned(effect.resident_id, identity))

    def _filled(self, resident_id: str) -> None:
        if (process := self._processes.get(resident_id)) is not None:
            process.held_bytes = process.model.held_bytes

    def _stopped(self, effect: StopRuntime) -> None:
        self._processes.pop(effect.resident_id, None)
        self.feed(RuntimeStopped(effect.resident_id))

    def _worked(self, effect: Forward, work_ms: int) -> None:
        if (process := self._processes.get(effect.resident_id)) is not None:
            process.working -= 1
        ended = WorkEnded(effect.request_id, 200, work_ms, 8_000, 90, None, None, "", client_gone=False)
        self.feed(replace(ended, lease_id=effect.lease_id))

    # ---- what is declared, and what is read ------------------------------------------------------------------------

    def _configuration(self) -> Configuration:
        return Configuration(
            ledger_id="bench",
            node_id=NODE,
            production_eligible=True,
            labels={},
            policy=POLICY,
            deployments=tuple(model.spec() for model in self._models.values()),
            clients=(ClientSpec("client", Priority.INTERACTIVE, False, None),),
            accelerator_ids=None,
            product_version="bench",
            pid=1,
        )

    def _reading(self) -> AcceleratorReading:
        managed = tuple(
            ManagedReading(resident_id, True, process.held_bytes) for resident_id, process in self._processes.items()
        )
        return AcceleratorReading(
            accelerator_id=CARD,
            index=0,
            kind=Kind.GPU,
            gpu_class=GPU_CLASS,
            device_name="Virtual",
            driver_version="1",
            total_bytes=CARD_BYTES,
            used_bytes=sum(process.held_bytes for process in self._processes.values()),
            managed=managed,
            foreign_processes=0,
        )


@dataclass(frozen=True, slots=True)
class Day:
    """A ledger of some virtual hours, and the state at its end."""

    ledger: MemoryLedger
    events: tuple[Recorded, ...]
    leaves: tuple[bytes, ...]
    world: World
    now: int


@cache
def virtual_day(hours: int = 24) -> Day:
    """Hours in which clients come and go and two of three models take turns on the card. Made once."""
    draw = random.Random(7)  # noqa: S311 - not a secret: the same day each time
    ledger = MemoryLedger()
    node = VirtualNode(ledger.append, (EMBED, CHAT, VISION))
    node.start()
    end, moment, number = START + seconds(hours * 3600), START, 0
    while (moment := moment + seconds(draw.randrange(10, 300))) < end:
        number += 1
        model = draw.choice((EMBED, EMBED, EMBED, CHAT, CHAT, CHAT, CHAT, VISION))
        priority = draw.choice((Priority.PRODUCTION, Priority.INTERACTIVE, Priority.BACKGROUND))
        node.at(moment, lambda asked=(f"req-{number:024d}", model, priority): node.ask(*asked))  # type: ignore[misc]
    node.run_until(end)
    leaves = tuple(leaf.body for leaf in ledger.leaves())
    return Day(ledger, ledger.read(0, ledger.head()), leaves, node.world, node.now)


def warm_node(append: Append) -> VirtualNode:
    """A node on which `EMBED` is loaded and idle."""
    node = VirtualNode(append, (EMBED,))
    node.start()
    node.ask("req-first", EMBED)
    node.run_for_ms(10_000)
    return node
