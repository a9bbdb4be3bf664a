"""One request between its arrival and its end. What has ended is in the ledger, not in the state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias, assert_never

from ..events import PlanDecided, RequestFellBack, RequestQueued, RequestReceived, RequestRetried
from ..failures import Failure
from ..reasons import Reason
from ..state import PlanRequest, QueuedRequest, WaitingFor

RequestEvent: TypeAlias = RequestReceived | PlanDecided | RequestQueued | RequestRetried | RequestFellBack


class Phase(StrEnum):
    """PENDING: to be planned (again) in its turn. QUEUED: it waits at a place. GRANTED: it holds a lease."""

    PENDING = "PENDING"
    QUEUED = "QUEUED"
    GRANTED = "GRANTED"


@dataclass(frozen=True, slots=True)
class RequestState:
    """`replans`: how often a grant of it was taken back before work began. `plans`: how many plans it has had.

    `patience`: how long it may wait at a time. `retries`: how often it was lost to a failure and tried again;
    `held_by`: a resident that has to be gone first; `last_failure`: what it was tried again for.
    """

    question: PlanRequest
    operation: str
    queue_until: int
    patience: int
    phase: Phase = Phase.PENDING
    waiting_for: WaitingFor | None = None
    lease_id: str | None = None
    accelerator_id: str | None = None
    resident_id: str | None = None
    granted_at: int | None = None
    replans: int = 0
    plans: int = 0
    preemptions: int = 0
    content_mac: str | None = None
    retries: int = 0
    held_by: str | None = None
    last_failure: Failure | None = None

    @property
    def last_reason(self) -> Reason:
        """What it waits for, as the reason it is refused with when it has waited long enough."""
        return Reason.DEADLINE_CANNOT_BE_MET if self.waiting_for is None else self.waiting_for.reason

    def queued(self) -> QueuedRequest | None:
        """Its place in the planner's queue, if it has one. Its claim is as old as the request itself."""
        if self.phase is not Phase.QUEUED or self.waiting_for is None:
            return None
        return QueuedRequest(
            request_id=self.question.request_id,
            capability=self.question.capability,
            priority=self.question.priority,
            enqueued_at=self.question.requested_at,
            waiting_for=self.waiting_for,
        )


def receive(event: RequestReceived) -> RequestState:
    """A request as it arrived: to be planned."""
    return RequestState(
        question=PlanRequest(
            request_id=event.request_id,
            client_id=event.client_id,
            capability=event.capability,
            priority=event.priority,
            requested_at=event.requested_at,
            deadline=event.deadline,
            lab=event.lab,
        ),
        operation=event.operation,
        queue_until=event.queue_until,
        patience=event.queue_until - event.requested_at,
        content_mac=event.content_mac,
    )


def evolve(state: RequestState, event: RequestEvent) -> RequestState:
    """The state after one event of its stream."""
    match event:
        case RequestReceived():
            return receive(event)
        case PlanDecided():
            return replace(state, plans=state.plans + 1)
        case RequestQueued():
            return replace(state, phase=Phase.QUEUED, waiting_for=event.waiting_for, held_by=None)
        case RequestRetried():
            again = _wait_anew(_to_be_planned(state), event.retried_at)
            held_by, failure = event.after_resident_id, event.failure
            return replace(again, retries=state.retries + 1, held_by=held_by, last_failure=failure)
        case RequestFellBack():
            question = replace(state.question, fallback_rank=event.fallback_rank)
            return replace(_wait_anew(_to_be_planned(state), event.fell_back_at), question=question)
        case _:
            assert_never(event)


def granted(state: RequestState, lease_id: str, accelerator_id: str, resident_id: str, granted_at: int) -> RequestState:
    """It holds a lease now."""
    return replace(
        state,
        phase=Phase.GRANTED,
        waiting_for=None,
        lease_id=lease_id,
        accelerator_id=accelerator_id,
        resident_id=resident_id,
        granted_at=granted_at,
        held_by=None,
    )


def ungranted(state: RequestState) -> RequestState:
    """Its grant was taken back before work began: to be planned again at its old place (semantics.md 7)."""
    return replace(_to_be_planned(state), replans=state.replans + 1)


def preempted(state: RequestState, at: int) -> RequestState:
    """It made way for one that is more important: to be planned again at its old place (semantics.md 6.4, rule 7)."""
    return replace(_wait_anew(_to_be_planned(state), at), preemptions=state.preemptions + 1)


def _wait_anew(state: RequestState, at: int) -> RequestState:
    """Time in which it was served was no waiting: it may wait as long again. A deadline of its own stands."""
    if state.question.deadline is not None:
        return state
    return replace(state, queue_until=at + state.patience)


def _to_be_planned(state: RequestState) -> RequestState:
    return replace(
        state,
        phase=Phase.PENDING,
        waiting_for=None,
        lease_id=None,
        accelerator_id=None,
        resident_id=None,
        granted_at=None,
    )
