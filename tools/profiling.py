"""Measuring by itself, while a server runs and nothing is wanted of it: a job of class maintenance (semantics.md 5, 8).

    1. wait until a deployment lacks an envelope to trust, nothing is wanted, and an accelerator for it is empty
    2. ProfilingBegins: recorded when that is still so; from then on whoever comes waits for the end
    3. measure, and give up at once when somebody comes or the node drains: the process ends, the memory comes back
    4. take a sample, since none was taken meanwhile, and ProfilingOver: who waited is planned on what it shows

Each measurement that was given up is followed by a longer pause. A deployment that cannot be measured is tried a few
times, then left until its configuration or the device changes, or its envelope becomes suspect anew.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import structlog

from gpuledger.domain.accounting import is_fresh
from gpuledger.domain.aggregates.accelerator import AcceleratorState
from gpuledger.domain.events import Recorded
from gpuledger.domain.messages import Agenda, EnvelopeTaken, ProfilingBegins, ProfilingOver
from gpuledger.domain.policy import Pressure
from gpuledger.domain.ports import LedgerCorrupt, LedgerUnavailable, RuntimeFault
from gpuledger.domain.state import Health
from gpuledger.domain.world import World

from .envelopes import Measuring, places
from .measure import Measurement, Place
from .sampler import Sampler
from .shell import DecisionFailed, Engine

Outcome: TypeAlias = Literal["measured", "preempted", "failed"]

#: After a measurement that made way for somebody: doubled with each in a row, since each costs somebody a wait.
FIRST_PREEMPTED_PAUSE_SECONDS: Final = 5.0
LAST_PREEMPTED_PAUSE_SECONDS: Final = 600.0
#: After one that failed, for the same deployment: doubled with each in a row.
FIRST_FAILED_PAUSE_SECONDS: Final = 30.0
#: So many failures of one deployment in one state are enough: the next attempt waits for another state.
MAX_FAILURES: Final = 3
#: After a beginning that was refused or could not be recorded, and between attempts to record an end.
RETRY_SECONDS: Final = 1.0
#: Of what a failure says, kept in the ledger.
MAX_DETAIL_CHARACTERS: Final = 200

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Failures:
    """Of one deployment on one class of accelerator, in a row, while `state` is what it was."""

    state: tuple[Any, ...]
    count: int
    not_before: float


class SelfProfiling:
    """A listener of the engine, and the task that measures."""

    def __init__(self, engine: Engine, measuring: Measuring, sampler: Sampler, node_id: str) -> None:
        self._engine = engine
        self._measuring = measuring
        self._sampler = sampler
        self._node_id = node_id
        self._news = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._halted = False
        self._preempted = 0
        self._not_before = 0.0
        self._failures: dict[tuple[str, str], _Failures] = {}

    def recorded(self, events: tuple[Recorded, ...]) -> None:
        """The agenda follows."""

    def wanted(self, agenda: Agenda) -> None:  # noqa: ARG002
        self._news.set()

    async def run(self) -> None:
        """Measure whenever that is possible, until cancelled."""
        while True:
            await self._attempt(await self._next())

    async def halt(self) -> None:
        """Begin no measurement any more, give up the one that runs, and wait until its end is recorded."""
        self._halted = True
        self._news.set()
        await self._idle.wait()

    # ---- 1: when -------------------------------------------------------------------------------------------------

    async def _next(self) -> Place:
        while True:
            self._news.clear()
            place = self._place()
            if place is not None:
                return place
            try:
                async with asyncio.timeout(self._longest_wait()):
                    await self._news.wait()
            except TimeoutError:
                continue

    def _place(self) -> Place | None:
        if self._now() < self._not_before or self._called_off_by() is not None:
            return None
        node = self._world.nodes.get(self._node_id)
        if node is None or node.cordoned:
            return None
        found = places(self._world, usable=self._is_empty)
        return next((place for place in found if self._may_try(place)), None)

    def _is_empty(self, state: AcceleratorState) -> bool:
        """Healthy, seen, under no pressure that holds maintenance back (semantics.md 6.3), and with nothing of ours."""
        sample, world = state.sample, self._world
        return (
            not state.retired
            and state.node_id == self._node_id
            and state.accelerator.health is Health.HEALTHY
            and state.accelerator.allocated_to is None
            and not state.residents
            and not state.leases
            and sample is not None
            and sample.pressure is Pressure.NORMAL
            and is_fresh(world.policy, sample.observed_at, sample.received_at, self._engine.now())
        )

    def _called_off_by(self) -> str | None:
        """What is more important than measuring, in a word; None when nothing is."""
        node = self._world.nodes.get(self._node_id)
        if self._halted or node is None or node.leaves or not node.running:
            return "node_draining"
        if self._world.requests:
            return "request"
        return "leases" if any(True for _ in self._world.leases()) else None

    def _longest_wait(self) -> float | None:
        """Seconds until time alone may let something be measured; None when only an event can."""
        instants = [self._not_before, *(one.not_before for one in self._failures.values() if one.count < MAX_FAILURES)]
        return min((instant - self._now() for instant in instants if instant > self._now()), default=None)

    # ---- 2 to 4: one measurement ---------------------------------------------------------------------------------

    async def _attempt(self, place: Place) -> None:
        self._idle.clear()
        try:
            if not await self._begun(place):
                self._not_before = self._now() + RETRY_SECONDS
                return
            _log.info("measuring while nothing is wanted", deployment=place.deployment_id, on=place.accelerator_id)
            outcome, detail = await self._measured(place)
            await self._sampler.take()
            await self._record_end(place, outcome, detail)
            self._note(place, outcome)
        finally:
            self._idle.set()

    async def _begun(self, place: Place) -> bool:
        begins = ProfilingBegins(place.accelerator_id, place.deployment_id)
        try:
            return bool(await self._engine.ask(begins))
        except (LedgerUnavailable, LedgerCorrupt, DecisionFailed):
            return False  # the engine has said why

    async def _measured(self, place: Place) -> tuple[Outcome, str]:
        """How it ended, its envelope recorded, or its process gone."""
        measuring = asyncio.create_task(self._measuring.one(place, _step))
        called_off = asyncio.create_task(self._called_off())
        try:
            await asyncio.wait((measuring, called_off), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (measuring, called_off):
                task.cancel()
            await asyncio.gather(measuring, called_off, return_exceptions=True)
        if measuring.cancelled():
            return "preempted", called_off.result()
        error = measuring.exception()
        if isinstance(error, RuntimeFault):
            return "failed", str(error)[:MAX_DETAIL_CHARACTERS]
        if error is not None:
            _log.error("a measurement broke off", deployment=place.deployment_id, exc_info=error)
            return "failed", "internal_error"
        return await self._recorded(measuring.result())

    async def _called_off(self) -> str:
        """Wait until something is more important, and say what."""
        while (why := self._called_off_by()) is None:
            self._news.clear()
            await self._news.wait()
        return why

    async def _recorded(self, measurement: Measurement) -> tuple[Outcome, str]:
        try:
            await self._engine.ask(EnvelopeTaken(measurement.event))
        except (LedgerUnavailable, LedgerCorrupt, DecisionFailed) as error:
            return "failed", f"not recorded: {error}"[:MAX_DETAIL_CHARACTERS]
        return "measured", ""

    async def _record_end(self, place: Place, outcome: Outcome, detail: str) -> None:
        """However long the ledger cannot be written: until this is recorded, everybody waits."""
        over = ProfilingOver(place.accelerator_id, place.deployment_id, outcome, detail)
        while self._world.accelerators[place.accelerator_id].profiling == place.deployment_id:
            try:
                await self._engine.ask(over)
            except (LedgerUnavailable, LedgerCorrupt, DecisionFailed):
                await asyncio.sleep(RETRY_SECONDS)

    # ---- what is not tried again at once -------------------------------------------------------------------------

    def _note(self, place: Place, outcome: Outcome) -> None:
        key = (place.deployment_id, self._world.accelerators[place.accelerator_id].accelerator.gpu_class)
        match outcome:
            case "measured":
                self._preempted = 0
                self._failures.pop(key, None)
            case "preempted":
                self._preempted += 1
                self._not_before = self._now() + pause_after_preemptions(self._preempted)
            case "failed":
                known = self._failures.get(key)
                state = self._state_of(place)
                count = 1 if known is None or known.state != state else known.count + 1
                not_before = self._now() + FIRST_FAILED_PAUSE_SECONDS * 2.0 ** (count - 1)
                self._failures[key] = _Failures(state, count, not_before)
                _log.warning("could not be measured", deployment=place.deployment_id, attempt=count, limit=MAX_FAILURES)

    def _may_try(self, place: Place) -> bool:
        key = (place.deployment_id, self._world.accelerators[place.accelerator_id].accelerator.gpu_class)
        failures = self._failures.get(key)
        if failures is None or failures.state != self._state_of(place):
            return True
        return failures.count < MAX_FAILURES and self._now() >= failures.not_before

    def _state_of(self, place: Place) -> tuple[Any, ...]:
        """What a failure may have come from. While it is the same, so would the next attempt be."""
        deployment = self._world.deployments[place.deployment_id]
        accelerator = self._world.accelerators[place.accelerator_id]
        return (
            deployment.spec.config_hash,
            deployment.artifact_sha256,
            deployment.suspicion,
            accelerator.accelerator.total_bytes,
            accelerator.driver_version,
        )

    @property
    def _world(self) -> World:
        return self._engine.world

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def pause_after_preemptions(count: int) -> float:
    """Seconds without a measurement after so many in a row that made way.

    >>> [pause_after_preemptions(count) for count in (1, 2, 3, 7, 8, 100_000)]
    [5.0, 10.0, 20.0, 320.0, 600.0, 600.0]
    """
    # The exponent is bounded too: whoever is busy for months must not make a number without end.
    return min(FIRST_PREEMPTED_PAUSE_SECONDS * 2.0 ** min(count - 1, 16), LAST_PREEMPTED_PAUSE_SECONDS)


def _step(deployment_id: str, step: str) -> None:
    _log.debug("measuring", deployment=deployment_id, step=step)
