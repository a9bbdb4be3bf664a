"""Where requests of clients wait: what the ledger says of each becomes the answer to whoever waits for it.

The desk implements `adapters.http.ports.Desk`. It decides nothing: it hands requests to the engine, looks at what was
recorded, and at the `Forward` effects that say that work may begin.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import structlog

from gpuledger.adapters.http.ports import (
    STRAIGHT,
    Cause,
    Condition,
    Ending,
    Granted,
    Lost,
    Outcome,
    Passage,
    PlanFacts,
    Question,
    Refused,
    Repeated,
    ServerFacts,
    Unavailable,
)
from gpuledger.domain.accounting import is_fresh
from gpuledger.domain.estimates import estimated_wait_ms, place_of
from gpuledger.domain.events import (
    LeaseGranted,
    LeasePreempted,
    PlanDecided,
    Recorded,
    RequestCancelled,
    RequestCompleted,
    RequestFailed,
    RequestFellBack,
    RequestQueued,
    RequestReceived,
    RequestRetried,
    StreamKind,
    stream_name,
)
from gpuledger.domain.failures import Failure
from gpuledger.domain.messages import (
    Agenda,
    AnswerCutOff,
    ClientGone,
    Forward,
    RequestArrived,
    RequestsHeld,
    WorkEnded,
)
from gpuledger.domain.policy import Priority
from gpuledger.domain.ports import LedgerCorrupt, LedgerReader, LedgerUnavailable, Runtimes
from gpuledger.domain.reasons import Reason
from gpuledger.domain.scheduler import renewal_interval_ms
from gpuledger.domain.state import ResidentState
from gpuledger.domain.units import MICROS_PER_MS, milliseconds
from gpuledger.domain.world import World

from .deployment_status import doubt_of
from .shell import DecisionFailed, Engine, RequestKnown

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Binding:
    """What an operator bound a client to (semantics.md 5)."""

    priority: Priority
    lab: bool


@dataclass(slots=True)
class _Held:
    """A request that somebody waits for, until the ledger has seen its end.

    `over_lease_id`: the lease that its work ended under, while what becomes of it is not recorded.
    """

    question: Question
    requested_at: int
    outcome: asyncio.Future[Outcome]
    plan: PlanFacts | None = None
    start: str = ""
    granted: Granted | None = None
    over_lease_id: str | None = None
    passage: Passage = STRAIGHT


@dataclass(slots=True)
class Gate:
    """Whether the door is open, and why not."""

    cause: Cause | None = Cause.STARTING
    detail: str = "starting"


class RequestDesk:
    """A listener of the engine."""

    def __init__(
        self,
        engine: Engine,
        runtimes: Runtimes,
        ledger: LedgerReader,
        bindings: Callable[[str], Binding],
        max_open: int,
    ) -> None:
        self._engine = engine
        self._runtimes = runtimes
        self._ledger = ledger
        self._bindings = bindings
        self._max_open = max_open
        self._held: dict[str, _Held] = {}
        self._leaving: set[str] = set()
        self.gate = Gate()

    # ---- for the gateway -----------------------------------------------------------------------------------------

    async def submit(self, question: Question) -> Outcome:
        request_id = question.request_id
        if question.content_mac is not None and (known := self._held.get(request_id)) is not None:
            return Repeated(request_id, known.question.content_mac == question.content_mac, "in_progress")
        if (cause := self._closed()) is not None:
            return Unavailable(request_id, cause)
        held = self._hold(question)
        try:
            if question.content_mac is not None and (repeated := await self._look_up(question)) is not None:
                self._held.pop(request_id, None)
                return repeated
            return await self._hand_in(held)
        except asyncio.CancelledError:
            self._give_up(request_id)
            raise

    async def resume(self, request_id: str, again: asyncio.Future[Outcome]) -> Outcome:
        try:
            return await again
        except asyncio.CancelledError:
            self._give_up(request_id)
            raise

    def end(self, request_id: str, ending: Ending) -> asyncio.Future[Outcome] | None:
        held = self._held.get(request_id)
        if held is None:
            return None  # the ledger has seen its end already
        lease_id = None if held.granted is None else held.granted.lease_id
        # Nothing can be granted while the ledger cannot be written: then it ends here, as it is.
        unsent = ending.unsent and lease_id is not None and self._engine.trouble is None
        if unsent:
            held.over_lease_id, held.granted = lease_id, None
            held.outcome = asyncio.get_running_loop().create_future()
        else:
            del self._held[request_id]
            self._leaving.add(request_id)
        self._engine.tell(_work_ended(request_id, lease_id, ending, unsent))
        return held.outcome if unsent else None

    def cut_off(self, request_id: str, lost: Lost) -> None:
        if self._held.pop(request_id, None) is not None:
            self._leaving.add(request_id)
            self._engine.tell(AnswerCutOff(request_id, lost.reason, lost.failure, lost.detail))

    def conditions(self) -> tuple[Condition, ...]:
        trouble = self._engine.trouble
        return (
            Condition("admitting", self.gate.cause is None, self.gate.detail),
            Condition("ledger", trouble is None, trouble or "writable"),
            _sight(self._engine.world, self._engine.now()),
            _welcome(self._engine.world),
            _fare(self._engine.world),
        )

    # ---- for metrics ---------------------------------------------------------------------------------------------

    @property
    def world(self) -> World:
        return self._engine.world

    def facts(self) -> ServerFacts:
        return ServerFacts(self._engine.now(), len(self._held), self._engine.trouble is None)

    # ---- one request ---------------------------------------------------------------------------------------------

    def _closed(self) -> Cause | None:
        if self.gate.cause is not None:
            return self.gate.cause
        if self._engine.trouble is not None:
            return Cause.LEDGER_UNAVAILABLE
        return Cause.TOO_MANY_OPEN if len(self._held) >= self._max_open else None

    def _hold(self, question: Question) -> _Held:
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        held = _Held(question, self._engine.now(), outcome)
        self._held[question.request_id] = held
        return held

    async def _hand_in(self, held: _Held) -> Outcome:
        question = held.question
        try:
            await self._engine.ask(self._arrived(held))
        except RequestKnown:
            self._held.pop(question.request_id, None)
            repeated = await self._look_up(question)
            return repeated or Unavailable(question.request_id, Cause.INTERNAL_ERROR)
        except (LedgerUnavailable, LedgerCorrupt):
            self._held.pop(question.request_id, None)
            return Unavailable(question.request_id, Cause.LEDGER_UNAVAILABLE)
        except DecisionFailed:
            self._held.pop(question.request_id, None)
            return Unavailable(question.request_id, Cause.INTERNAL_ERROR)
        return await held.outcome

    def _arrived(self, held: _Held) -> RequestArrived:
        question = held.question
        binding = self._bindings(question.client_id)
        deadline = None if question.deadline_ms is None else held.requested_at + milliseconds(question.deadline_ms)
        return RequestArrived(
            request_id=question.request_id,
            client_id=question.client_id,
            capability=question.capability,
            priority=binding.priority,
            lab=binding.lab,
            requested_at=held.requested_at,
            deadline=deadline,
            operation=question.operation,
            body_bytes=question.body_bytes,
            content_mac=question.content_mac,
        )

    def _give_up(self, request_id: str) -> None:
        """Its client has gone before its work began, or before it knew that it may."""
        held = self._held.pop(request_id, None)
        if held is not None:
            self._leaving.add(request_id)
            self._engine.tell(ClientGone(request_id))

    async def _look_up(self, question: Question) -> Repeated | None:
        """What became of a request that the ledger knows."""
        stream = stream_name(StreamKind.REQUEST, question.request_id)
        try:
            events = await asyncio.to_thread(self._ledger.read_stream, stream)
        except (LedgerUnavailable, LedgerCorrupt) as error:
            _log.warning("a request could not be looked up", error=str(error))
            return None
        return repeated_of(question, events)

    # ---- as a listener of the engine -----------------------------------------------------------------------------

    def recorded(self, events: tuple[Recorded, ...]) -> None:
        for event in events:
            match event.data:
                case PlanDecided() as decided:
                    self._planned(decided)
                case LeaseGranted(request_id=request_id, start=start):
                    if (held := self._held.get(request_id)) is not None:
                        held.start = start.value
                case LeasePreempted(request_id=request_id, requeued=True):
                    self._put_back(request_id, Reason.PREEMPTED, None, "preempted")
                case RequestRetried() | RequestFellBack() as changed:
                    self._planned_again(changed)
                case RequestQueued(request_id=request_id):
                    self._queued(request_id)
                case RequestFailed() as failed:
                    self._failed(failed)
                case RequestCancelled(request_id=request_id, cause=cause):
                    self._cancelled(request_id, cause)
                case _:
                    pass  # nobody at the desk waits for it

    def wanted(self, agenda: Agenda) -> None:
        for effect in agenda.effects:
            if isinstance(effect, Forward):
                self._forward(effect)
        self._leave_none_behind()

    def _planned(self, decided: PlanDecided) -> None:
        if (held := self._held.get(decided.request_id)) is not None:
            held.plan = PlanFacts(decided.fingerprint, decided.plan)

    def _forward(self, effect: Forward) -> None:
        held = self._held.get(effect.request_id)
        if held is None or effect.lease_id == held.over_lease_id:
            return
        if held.granted is not None and held.granted.lease_id == effect.lease_id:
            return
        try:
            endpoint = self._runtimes.endpoint(effect.resident_id)
        except KeyError:
            return  # its process has just gone: the watch for crashes says so
        held.granted = Granted(
            request_id=effect.request_id,
            lease_id=effect.lease_id,
            endpoint=endpoint,
            start=held.start,
            queued_ms=max(0, self._engine.now() - held.requested_at) // MICROS_PER_MS,
            plan=held.plan,
            lost=asyncio.get_running_loop().create_future(),
            passage=held.passage,
        )
        if not held.outcome.done():
            held.outcome.set_result(held.granted)

    def _put_back(self, request_id: str, reason: Reason | None, failure: Failure | None, detail: str) -> None:
        """Its lease is lost, and it waits for another one."""
        held = self._held.get(request_id)
        if held is not None and held.granted is not None:
            lost, held.granted = held.granted.lost, None
            held.outcome = asyncio.get_running_loop().create_future()
            lost.set_result(Lost(reason, failure, detail, held.outcome))

    def _planned_again(self, changed: RequestRetried | RequestFellBack) -> None:
        if (held := self._held.get(changed.request_id)) is None:
            return
        held.over_lease_id = None
        match changed:
            case RequestRetried():
                held.passage = replace(held.passage, attempt=changed.attempt + 1)
                self._put_back(changed.request_id, None, changed.failure, changed.detail)
            case RequestFellBack():
                cause = changed.reason or changed.failure
                fallback = None if cause is None else cause.value
                held.passage = replace(held.passage, fallback_rank=changed.fallback_rank, fallback=fallback)
                self._put_back(changed.request_id, changed.reason, changed.failure, changed.detail)

    def _queued(self, request_id: str) -> None:
        """What is told of the queue is what was known when it first came into it."""
        held, world = self._held.get(request_id), self._engine.world
        if held is None or held.passage.queue_place is not None:
            return
        place = place_of(world, request_id)
        estimate = estimated_wait_ms(world, request_id, self._engine.now())
        held.passage = replace(held.passage, queue_place=place, estimated_wait_ms=estimate)

    def _failed(self, failed: RequestFailed) -> None:
        if (held := self._over(failed.request_id)) is None:
            return
        if held.granted is not None:
            held.granted.lost.set_result(Lost(failed.reason, failed.failure, failed.detail))
        elif not held.outcome.done():
            told = failed.reason, failed.failure, failed.detail
            doubt = _doubt(self._engine.world, held.plan) if failed.reason is Reason.NO_MEASURED_ENVELOPE else None
            held.outcome.set_result(Refused(failed.request_id, *told, held.plan, held.passage, doubt))

    def _cancelled(self, request_id: str, cause: str) -> None:
        if (held := self._over(request_id)) is None:
            return
        if held.granted is not None:
            held.granted.lost.set_result(Lost(None, None, cause))
        elif not held.outcome.done():
            held.outcome.set_result(Unavailable(request_id, Cause.DRAINING))

    def _over(self, request_id: str) -> _Held | None:
        self._leaving.discard(request_id)
        return self._held.pop(request_id, None)

    def _leave_none_behind(self) -> None:
        """A request in the ledger that nobody waits for any more (its commit was taken for failed) is given up."""
        requests = self._engine.world.requests
        for request_id, request in requests.items():
            if request.operation != "warm" and request_id not in self._held and request_id not in self._leaving:
                self._leaving.add(request_id)
                self._engine.tell(ClientGone(request_id))
        self._leaving &= requests.keys()

    # ---- renewals ------------------------------------------------------------------------------------------------

    async def renew(self) -> None:
        """Say who is still waited for, until cancelled."""
        while True:
            await asyncio.sleep(renewal_interval_ms(self._engine.world.policy.lease_ttl_seconds) / 1000)
            # A lease whose work has ended is not renewed: should the record of that be lost, it runs out.
            held = frozenset(name for name, one in self._held.items() if one.over_lease_id is None)
            if held:
                self._engine.tell(RequestsHeld(held))


def _work_ended(request_id: str, lease_id: str | None, ending: Ending, unsent: bool) -> WorkEnded:
    return WorkEnded(
        request_id=request_id,
        status=ending.status,
        served_ms=ending.served_ms,
        response_bytes=ending.response_bytes,
        prompt_tokens=ending.prompt_tokens,
        completion_tokens=ending.completion_tokens,
        failure=ending.failure,
        detail=ending.detail,
        client_gone=ending.client_gone,
        unsent=unsent,
        lease_id=lease_id,
    )


def _doubt(world: World, plan: PlanFacts | None) -> str | None:
    """Why the envelope that a plan did not count is suspect."""
    document: Mapping[str, Any] = {} if plan is None else plan.document
    deployment = world.deployments.get(str(document.get("deployment_id")))
    figures = document.get("figures", {}).get(Reason.NO_MEASURED_ENVELOPE.value, {})
    return None if deployment is None else doubt_of(deployment, str(figures.get("gpu_class")))


def repeated_of(question: Question, events: tuple[Recorded, ...]) -> Repeated | None:
    """What the stream of a request says to one who submits it again; None when there is none."""
    received = [event.data for event in events if isinstance(event.data, RequestReceived)]
    if not received:
        return None
    same = received[0].content_mac == question.content_mac
    plan: PlanFacts | None = None
    for event in events:
        match event.data:
            case PlanDecided() as decided:
                plan = PlanFacts(decided.fingerprint, decided.plan)
            case RequestCompleted():
                return Repeated(question.request_id, same, "completed")
            case RequestCancelled():
                return Repeated(question.request_id, same, "cancelled")
            case RequestFailed() as failed:
                refused = Refused(question.request_id, failed.reason, failed.failure, failed.detail, plan)
                return Repeated(question.request_id, same, "refused", refused)
            case _:
                pass  # on its way to one of these
    return Repeated(question.request_id, same, "in_progress")


def _sight(world: World, now: int) -> Condition:
    """Telemetry. One accelerator that is seen is enough: what is on the others is refused by name."""
    live = [state for state in world.accelerators.values() if not state.retired]
    unseen = [
        f"{state.accelerator.accelerator_id}: {state.missed or state.invalid or 'no fresh sample'}"
        for state in live
        if state.sample is None or not is_fresh(world.policy, state.sample.observed_at, state.sample.received_at, now)
    ]
    detail = "; ".join(unseen) or ("fresh" if live else "no accelerator was found")
    return Condition("telemetry", len(unseen) < len(live), detail)


def _welcome(world: World) -> Condition:
    """Nodes that take work. One is enough; one that drains takes none, and a cordoned one only on what it has."""
    told: list[str] = []
    here = {state.node_id for state in world.accelerators.values() if not state.retired}
    for node_id, node in sorted(world.nodes.items()):
        if node_id not in here:
            continue
        if node.leaves:
            told.append(f"{node_id} drains")
        elif node.cordoned and not _has_active(world, node_id):
            told.append(f"{node_id} is cordoned, and nothing is loaded there")
        else:
            return Condition("nodes", True, "open")
    # Without any accelerator it is telemetry that says so.
    return Condition("nodes", not told, "; ".join(told) or "open")


def _has_active(world: World, node_id: str) -> bool:
    """Whether a model is loaded there, or about to be: a cordon lets work begin on those only."""
    return any(
        record.resident.state in (ResidentState.LOADING, ResidentState.READY)
        for state in world.accelerators.values()
        if state.node_id == node_id and not state.retired
        for record in state.residents.values()
    )


def _fare(world: World) -> Condition:
    """Degraded capabilities, named. They never make a server unready: what is sent no requests cannot recover."""
    degraded = [
        f"{name} (failed {state.failures} times in a row, last with {state.failure})"
        for name, state in sorted(world.capabilities.items())
        if state.degraded_at is not None
    ]
    return Condition("capabilities", True, f"degraded: {'; '.join(degraded)}" if degraded else "none is degraded")
