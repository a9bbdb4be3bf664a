"""What each event of a request's story says, in words for people."""

from __future__ import annotations

from gpuledger.domain.events import (
    Event,
    EvictionStarted,
    FailureRecorded,
    LeaseExpired,
    LeaseGranted,
    LeasePreempted,
    LeaseReleased,
    LeaseRoomConfirmed,
    MemoryNotReclaimed,
    PlanDecided,
    RequestCancelled,
    RequestCompleted,
    RequestFailed,
    RequestQueued,
    RequestReceived,
    ResidencyMaterialized,
    ResidentDrainStarted,
    ResidentEvicted,
    ResidentFailed,
    ResidentLoadStarted,
    ResidentProcessStarted,
    ResidentReady,
)
from gpuledger.domain.explain import duration, size
from gpuledger.domain.units import MICROS_PER_MS, format_instant


def told(data: Event) -> str:
    """One event in a line."""
    match data:
        case RequestReceived() | PlanDecided() | RequestQueued():
            return _of_question(data)
        case RequestCompleted() | RequestFailed() | RequestCancelled():
            return _of_end(data)
        case LeaseGranted() | LeaseRoomConfirmed() | LeaseReleased() | LeaseExpired() | LeasePreempted():
            return _of_lease(data)
        case _:
            return _of_resident(data)


def _of_question(data: RequestReceived | PlanDecided | RequestQueued) -> str:
    match data:
        case RequestReceived():
            waits = "until its deadline" if data.deadline is not None else "in the queue"
            longest = duration(max(0, data.queue_until - data.requested_at) // MICROS_PER_MS)
            return f"{data.client_id} asks for {data.capability} ({data.priority}), waits {waits} up to {longest}"
        case PlanDecided():
            reasons = f": {', '.join(data.reasons)}" if data.reasons else ""
            return f"{data.plan_id} on the state at event {data.as_of}: {data.verdict}{reasons}"
        case RequestQueued():
            waiting = data.waiting_for
            gone = f", until gone: {', '.join(waiting.resident_ids)}" if waiting.resident_ids else ""
            early = "" if waiting.not_before is None else f", not before {format_instant(waiting.not_before)}"
            return f"waits on {waiting.accelerator_id} for {waiting.reason}{gone}{early}"


def _of_end(data: RequestCompleted | RequestFailed | RequestCancelled) -> str:
    match data:
        case RequestCompleted():
            spent = f"queued and started {duration(data.queued_ms)}, served {duration(data.served_ms)}"
            return f"status {data.status}, {spent}, {size(data.response_bytes)} answered"
        case RequestFailed():
            kind = "refused" if data.failure is None else "failed"
            detail = f" ({data.detail})" if data.detail else ""
            return f"{kind}: {data.reason or data.failure}{detail}"
        case RequestCancelled():
            return f"cancelled: {data.cause}"


def _of_lease(
    data: LeaseGranted | LeaseRoomConfirmed | LeaseReleased | LeaseExpired | LeasePreempted,
) -> str:
    match data:
        case LeaseGranted():
            after = f", after {', '.join(data.awaits)}" if data.awaits else ""
            reserved = size(data.reserved_bytes)
            return f"{data.lease_id}: {data.start} start of {data.resident_id}, reserves {reserved}{after}"
        case LeaseRoomConfirmed():
            return f"a fresh sample shows room: needs {size(data.needed_bytes)} of {size(data.schedulable_bytes)}"
        case LeaseReleased():
            return f"{data.lease_id} released: {data.cause}"
        case LeaseExpired():
            return f"{data.lease_id} expired: nobody renewed it"
        case LeasePreempted():
            then = "queued again at its old place" if data.requeued else "refused"
            return f"{data.lease_id} of {data.request_id} is preempted by {data.by_request_id}: {then}"


def _of_resident(data: Event) -> str:
    match data:
        case ResidentLoadStarted():
            return f"{data.resident_id} begins to load, {size(data.used_bytes)} in use"
        case ResidentProcessStarted():
            return f"{data.resident_id} is process {data.pid}"
        case ResidencyMaterialized():
            return f"{data.resident_id} shows {size(data.materialized_bytes)} on the device"
        case ResidentReady():
            return f"{data.resident_id} is ready after {duration(data.load_ms)}"
        case ResidentDrainStarted():
            return f"{data.resident_id} takes no new work: {data.cause}"
        case ResidentFailed():
            return f"{data.resident_id} failed: {data.failure} ({data.detail}), attempt {data.attempt}"
        case EvictionStarted():
            return f"{data.resident_id} is unloaded: {data.cause}, holds {size(data.attributed_bytes)}"
        case ResidentEvicted():
            return f"{data.resident_id} is gone, {size(data.freed_bytes)} are free"
        case MemoryNotReclaimed():
            return f"{data.resident_id} is gone, but {size(data.residual_bytes)} did not come back"
        case FailureRecorded():
            return f"{data.failure} of {data.owner}: {data.detail}, attempt {data.attempt} of {data.limit}"
        case _:
            return ""
