"""The shell in virtual time once more, with an engine that lives through a store that fails (tools/shell.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from gpuledger.domain.events import Recorded
from gpuledger.domain.messages import (
    AnswerCutOff,
    ClientGone,
    DrainTimedOut,
    Effect,
    Forward,
    Input,
    Operation,
    ProfilingOver,
    RequestArrived,
    ShutdownRequested,
    WorkEnded,
)
from gpuledger.domain.ports import Batch, LedgerConflict, LedgerUnavailable
from gpuledger.domain.sampling import SampleTaken
from gpuledger.domain.world import evolve

from .breakable_ledger import BreakableLedger
from .breakable_machine import BreakableMachine, Sight
from .virtual_shell import NODE, VirtualShell

#: Until something that was not recorded is told again.
AGAIN_MS: Final = 250
MAX_ATTEMPTS: Final = 50
#: Told again until they are recorded: the first five by the engine itself, the others by whoever said them.
KEPT: Final = (WorkEnded, AnswerCutOff, ClientGone, ShutdownRequested, DrainTimedOut, ProfilingOver, Operation)


class SchedulerKilled(Exception):
    """It did not get any further. The next one is started `after_seconds`."""

    def __init__(self, after_seconds: int) -> None:
        super().__init__("killed")
        self.after_seconds = after_seconds


@dataclass
class BreakableEngine(VirtualShell):
    """`strike` is called once, when batch `position` is durable and folded, before anything follows from it.

    What is wanted of runtimes and of the gateway is carried out by the classes that build on this one.
    """

    machine: BreakableMachine = field(default_factory=lambda: BreakableMachine(()))
    position: int = -1
    strike: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.ledger, BreakableLedger)
        self.store = self.ledger
        self.in_trouble = False

    def feed(self, happened: Input) -> None:
        self.tell(happened)

    def tell(self, happened: Input) -> bool:
        """One input and what is due; whether it is recorded. What must not be lost is told again later."""
        self.steps += 1
        if self.in_trouble and isinstance(happened, RequestArrived):
            return False
        recorded = self._commit(lambda attempt: self.scheduler.handle(self.world, happened, self.now, attempt=attempt))
        if not recorded and isinstance(happened, KEPT):
            self.after_ms(AGAIN_MS, lambda: self.feed(happened))
        while not self.in_trouble and self._commit(self._due, until_nothing=True):
            pass
        self.poke()
        if self.check is not None:
            self.check(self)
        return recorded

    def until_told(self, happened: Input) -> None:
        """Of what its own teller repeats."""
        if not self.tell(happened):
            self.after_ms(AGAIN_MS, lambda: self.until_told(happened))

    def poke(self) -> None:
        """Look at what is wanted, and begin it."""
        agenda = self.scheduler.agenda(self.world, self.now)
        for effect in agenda.effects:
            if isinstance(effect, Forward):
                self.serve(effect)
            else:
                self.want(effect)
        self.look_after()
        self._look_ahead(agenda)

    def serve(self, effect: Forward) -> None:
        """Work may begin."""
        raise NotImplementedError

    def want(self, effect: Effect) -> None:
        """Something is wanted of a runtime."""
        raise NotImplementedError

    def look_after(self) -> None:
        """What follows from the state alone."""
        raise NotImplementedError

    # ---- the ledger ----------------------------------------------------------------------------------------------

    def _due(self, attempt: int) -> Batch | None:
        return self.scheduler.settle(self.world, self.now, attempt=attempt)

    def _commit(self, decide: Callable[[int], Batch | None], *, until_nothing: bool = False) -> bool:
        """Whether it is recorded; with `until_nothing` whether there was anything."""
        for attempt in range(MAX_ATTEMPTS):
            batch = decide(attempt)
            if batch is None:
                return not until_nothing
            try:
                recorded = self.store.append(batch, self.now)
            except LedgerConflict:
                self._catch_up(self.store.head())
                continue
            except LedgerUnavailable:
                break
            self._catch_up(recorded[0].seq - 1)
            self.in_trouble = False
            self._append(recorded)
            self._struck()
            return True
        self.in_trouble = True
        return False

    def _catch_up(self, until: int) -> None:
        if self.world.seq < until:
            self._append(self.store.read(self.world.seq, until - self.world.seq))

    def _append(self, recorded: tuple[Recorded, ...]) -> None:
        for event in recorded:
            self.world = evolve(self.world, event)
            self._tell(event.data)
        self.recorded.extend(recorded)

    def _struck(self) -> None:
        if self.strike is not None and self.store.appends >= self.position:
            strike, self.strike = self.strike, None
            strike()

    # ---- samples -------------------------------------------------------------------------------------------------

    def sample(self) -> None:
        """Read every card, now. A driver that hangs lets nobody read, and nobody else do it meanwhile."""
        self._sampled_at = self.now
        if self.machine.sight is Sight.HUNG:
            self._next_sample = self.now
            self.after_ms(1000, self.sample)
            return
        self._next_sample = None
        taken = SampleTaken(NODE, self.machine.reading(self.world), self.machine.figures(self.world, self.now))
        self.machine.note_sample()
        self.feed(taken)
