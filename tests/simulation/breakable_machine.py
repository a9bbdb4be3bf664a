"""A machine that breaks: cards that others take room on, and processes that stall, die and leave their memory behind.

It outlives the schedulers that run on it, and it knows who is to blame when a card has no room left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from gpuledger.domain.ports import AcceleratorReading, ManagedReading, NodeReading, RuntimeFigures, TelemetryFault
from gpuledger.domain.state import Health, Kind, ResidentState
from gpuledger.domain.world import World

from .virtual_shell import Card, FakeProcess

#: Of `stalled_until`: until somebody lets it go on.
FOREVER = 2**62


class Sight(Enum):
    """What the devices let themselves be seen of."""

    CLEAR = auto()
    #: Nothing is answered: no sample comes.
    HUNG = auto()
    #: The driver fails for every card.
    DRIVER_ERROR = auto()
    #: The cards have fallen off the bus, says the driver.
    LOST = auto()
    #: More is used than there is.
    INVALID = auto()


@dataclass
class Body(FakeProcess):
    """A process in flesh and blood. `checking`: it works on its functional check. `noticed`: its end was reported.

    What it does while it is stalled is done afterwards, in order: `parked`.
    """

    stalled_until: int = 0
    checking: bool = False
    keeps_memory: bool = False
    unkillable: bool = False
    noticed: bool = False
    last_words: str = "killed"
    parked: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])

    @property
    def held_bytes(self) -> int:
        if self.gone or not self.loaded:
            return 0
        if self.asleep and self.model.sleep is not None:
            return self.model.sleep.asleep_bytes
        return self.model.peak_bytes if self.working or self.checking else self.model.idle_bytes


@dataclass
class Slab(Card):
    """A card. `kept_bytes`: of processes that are no more. `disturbed`: when somebody else took room here last.

    Without `tells_bytes` the driver does not say which process holds how much. Moments are those of
    `BreakableMachine.moment`: they order what happens in one instant.
    """

    tells_bytes: bool = True
    kept_bytes: int = 0
    disturbed: int = 0
    sampled: int = 0


@dataclass
class BreakableMachine:
    """`shown`: of each resident the moment of the sample that showed room for what it does now."""

    cards: tuple[Slab, ...]
    bodies: dict[str, Body] = field(default_factory=dict[str, Body])
    sight: Sight = Sight.CLEAR
    fail_spawns: bool = False
    lies_ready: bool = False
    keeps_memory: bool = False
    shown: dict[str, int] = field(default_factory=dict[str, int])
    moment: int = 0
    pid: int = 1000

    def tick(self) -> int:
        self.moment += 1
        return self.moment

    def card(self, accelerator_id: str) -> Slab:
        return next(card for card in self.cards if card.accelerator_id == accelerator_id)

    def on(self, accelerator_id: str) -> list[Body]:
        return [body for body in self.bodies.values() if body.accelerator_id == accelerator_id and not body.gone]

    def asked_of(self, card: Slab) -> int:
        """What all together want of a card; more than it has is an allocation that fails."""
        return card.external_bytes + card.kept_bytes + sum(body.held_bytes for body in self.on(card.accelerator_id))

    # ---- memory --------------------------------------------------------------------------------------------------

    def note_sample(self) -> None:
        for card in self.cards:
            card.sampled = self.tick()

    def note_room(self, resident_id: str, accelerator_id: str) -> None:
        """Its start, or its work, was let go on by the newest sample."""
        self.shown[resident_id] = self.card(accelerator_id).sampled

    def take_room(self, card: Slab, left_bytes: int = 0) -> None:
        """Another program takes all but so much of what is free."""
        card.external_bytes += max(0, card.total_bytes - self.asked_of(card) - left_bytes)
        card.disturbed = self.tick()

    def is_excused(self, resident_id: str, card: Slab) -> bool:
        """Whether room was taken by others after it was shown: no scheduler can prevent what comes of that."""
        return card.disturbed > self.shown.get(resident_id, 0)

    def finds_room(self, body: Body) -> bool:
        """Whether a card has what a process just took. When it has not, others are to blame, or the scheduler is."""
        card = self.card(body.accelerator_id)
        if self.asked_of(card) <= card.total_bytes:
            return True
        assert self.is_excused(body.resident_id, card), f"{body.resident_id} is out of memory by our doing"
        return False

    def check_promises(self, world: World) -> None:
        """What was let go on must fit together when all of it takes what it may: no card is promised twice."""
        for card in self.cards:
            state = world.accelerators.get(card.accelerator_id)
            if state is None:
                continue
            asked, excused = card.external_bytes + card.kept_bytes, False
            bodies = {body.resident_id: body for body in self.on(card.accelerator_id)}
            for resident_id, record in state.residents.items():
                body = bodies.pop(resident_id, None)
                if body is None and resident_id in self.bodies:
                    continue  # it is dead, and nobody has noticed yet
                loads = record.resident.state is ResidentState.LOADING and record.load_started
                works = record.resident.state is ResidentState.READY and any(
                    lease.room_confirmed for lease in state.leases_on(resident_id)
                )
                if (loads or works) and record.eviction is None:
                    deployment = world.deployments[record.resident.deployment_id]
                    asked += max(one.envelope.peak_bytes for one in deployment.measured)
                    excused = excused or self.is_excused(resident_id, card)
                elif body is not None:
                    asked += body.held_bytes
            asked += sum(body.held_bytes for body in bodies.values())
            assert excused or asked <= card.total_bytes, f"{card.accelerator_id} is promised twice: {asked} bytes"

    def bury(self, body: Body) -> None:
        """It is no more; what it held is free, or it stays, and is nobody's."""
        if not body.gone:
            if body.keeps_memory:
                self.card(body.accelerator_id).kept_bytes += body.held_bytes
            body.gone = True

    # ---- what is seen of it --------------------------------------------------------------------------------------

    def reading(self, world: World) -> NodeReading:
        if self.sight in (Sight.DRIVER_ERROR, Sight.LOST):
            code, health = ("NVML_GPU_LOST", Health.LOST) if self.sight is Sight.LOST else ("NVML_UNKNOWN", None)
            faults = tuple(TelemetryFault(card.accelerator_id, code, health) for card in self.cards)
            return NodeReading((), faults, None, 0)
        cards = tuple(self._read(index, card, world) for index, card in enumerate(self.cards))
        return NodeReading(cards, (), None, 0)

    def _read(self, index: int, card: Slab, world: World) -> AcceleratorReading:
        managed = self._managed(card, world)
        used_bytes = min(card.total_bytes, self.asked_of(card))
        return AcceleratorReading(
            accelerator_id=card.accelerator_id,
            index=index,
            kind=Kind.GPU,
            gpu_class="virtual",
            device_name="Virtual",
            driver_version="1",
            total_bytes=card.total_bytes,
            used_bytes=card.total_bytes + 1 if self.sight is Sight.INVALID else used_bytes,
            managed=managed,
            foreign_processes=1 if card.external_bytes else 0,
            blind="NO_PROCESS_BYTES" if any(one.used_bytes is None for one in managed) else None,
        )

    def _managed(self, card: Slab, world: World) -> tuple[ManagedReading, ...]:
        """Of what the scheduler knows a process of, as telemetry is asked for."""
        state = world.accelerators.get(card.accelerator_id)
        found: list[ManagedReading] = []
        for resident_id, record in sorted({} if state is None else state.residents.items()):
            body = self.bodies.get(resident_id)
            if record.process is not None and body is not None and not body.gone:
                held = body.held_bytes
                found.append(ManagedReading(resident_id, True, held if card.tells_bytes or not held else None))
            elif record.process is not None:
                found.append(ManagedReading(resident_id, False, 0))
        return tuple(found)

    def figures(self, world: World, now: int) -> dict[str, RuntimeFigures]:
        """What runtimes say of themselves that are asked and not stalled."""
        asked = (ResidentState.READY, ResidentState.DRAINING)
        return {
            record.resident.resident_id: RuntimeFigures(body.working)
            for _, record in world.residents()
            if record.resident.state in asked
            and (body := self.bodies.get(record.resident.resident_id)) is not None
            and not body.gone
            and body.stalled_until <= now
        }
