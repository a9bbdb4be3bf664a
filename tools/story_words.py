"""What each event of a request's story says, in words for people: of every type there is."""

from __future__ import annotations

from typing import TypeAlias, assert_never

from gpuledger.domain.events import (
    CapabilityDegraded,
    CapabilityRecovered,
    Event,
    EvictionCause,
    EvictionStarted,
    FailureRecorded,
    LeaseExpired,
    LeaseGranted,
    LeasePreempted,
    LeaseReleased,
    LeaseRenewed,
    LeaseRoomConfirmed,
    MemoryNotReclaimed,
    PlanDecided,
    ProfilingEnded,
    ProfilingStarted,
    RequestCancelled,
    RequestCompleted,
    RequestFailed,
    RequestFellBack,
    RequestQueued,
    RequestReceived,
    RequestRetried,
    ResidencyMaterialized,
    ResidentDrainStarted,
    ResidentEvicted,
    ResidentFailed,
    ResidentLoadStarted,
    ResidentProcessStarted,
    ResidentReady,
    ResidentSlept,
    ResidentWoken,
    ThrashingDetected,
)
from gpuledger.domain.explain import duration, size
from gpuledger.domain.units import MICROS_PER_MS, format_instant

from .declared_words import (
    OfDevice,
    OfNode,
    OfScheduler,
    told_of_deployment,
    told_of_device,
    told_of_node,
    told_of_scheduler,
)

_OfQuestion: TypeAlias = RequestReceived | PlanDecided | RequestQueued | RequestRetried | RequestFellBack
_OfEnd: TypeAlias = RequestCompleted | RequestFailed | RequestCancelled
_OfLease: TypeAlias = LeaseGranted | LeaseRenewed | LeaseRoomConfirmed | LeaseReleased | LeaseExpired | LeasePreempted
_OfResident: TypeAlias = (
    ResidentLoadStarted
    | ResidentProcessStarted
    | ResidencyMaterialized
    | ResidentReady
    | ResidentSlept
    | ResidentWoken
    | ResidentDrainStarted
    | ResidentFailed
    | EvictionStarted
    | ResidentEvicted
    | MemoryNotReclaimed
)
_OfFailure: TypeAlias = (
    FailureRecorded | CapabilityDegraded | CapabilityRecovered | ThrashingDetected | ProfilingStarted | ProfilingEnded
)


def told(data: Event) -> str:
    """One event in a line."""
    if isinstance(data, _OfQuestion):
        return _of_question(data)
    if isinstance(data, _OfEnd):
        return _of_end(data)
    if isinstance(data, _OfLease):
        return _of_lease(data)
    if isinstance(data, _OfResident):
        return _of_resident(data)
    if isinstance(data, _OfFailure):
        return _of_failure(data)
    if isinstance(data, OfScheduler):
        return told_of_scheduler(data)
    if isinstance(data, OfNode):
        return told_of_node(data)
    if isinstance(data, OfDevice):
        return told_of_device(data)
    return told_of_deployment(data)


def _of_question(data: _OfQuestion) -> str:
    match data:
        case RequestReceived():
            waits = "until its deadline" if data.deadline is not None else "in the queue"
            longest = duration(max(0, data.queue_until - data.requested_at) // MICROS_PER_MS)
            return f"{data.client_id} asks for {data.capability} ({data.priority}), waits {waits} up to {longest}"
        case PlanDecided():
            rank = f", rank {data.fallback_rank}" if data.fallback_rank else ""
            reasons = f": {', '.join(data.reasons)}" if data.reasons else ""
            return f"{data.plan_id} on the state at event {data.as_of}{rank}: {data.verdict}{reasons}"
        case RequestQueued():
            waiting = data.waiting_for
            gone = f", until gone: {', '.join(waiting.resident_ids)}" if waiting.resident_ids else ""
            early = "" if waiting.not_before is None else f", not before {format_instant(waiting.not_before)}"
            return f"waits on {waiting.accelerator_id} for {waiting.reason}{gone}{early}"
        case RequestRetried():
            after = "" if data.after_resident_id is None else f", when the memory of {data.after_resident_id} is back"
            lost = f"{data.failure} ({data.detail}) before anything was answered"
            return f"tried again after {lost}: retry {data.attempt} of {data.limit}{after}"
        case RequestFellBack():
            cause = data.reason if data.failure is None else data.failure
            return f"falls back: planned for rank {data.fallback_rank} from now on, after {cause} ({data.detail})"
        case _:
            assert_never(data)


def _of_end(data: _OfEnd) -> str:
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
        case _:
            assert_never(data)


def _of_lease(data: _OfLease) -> str:
    match data:
        case LeaseGranted():
            after = f", after {', '.join(data.awaits)}" if data.awaits else ""
            reserved = size(data.reserved_bytes)
            return f"{data.lease_id}: {data.start} start of {data.resident_id}, reserves {reserved}{after}"
        case LeaseRenewed():
            return f"{data.lease_id} is renewed until {format_instant(data.expires_at)}"
        case LeaseRoomConfirmed():
            return f"a fresh sample shows room: needs {size(data.needed_bytes)} of {size(data.schedulable_bytes)}"
        case LeaseReleased():
            return f"{data.lease_id} released: {data.cause}"
        case LeaseExpired():
            return f"{data.lease_id} expired: nobody renewed it"
        case LeasePreempted():
            then = "put back to its old place" if data.requeued else "not put back, it is over"
            return f"{data.lease_id} of {data.request_id} is preempted by {data.by_request_id}: {then}"
        case _:
            assert_never(data)


def _of_resident(data: _OfResident) -> str:
    match data:
        case ResidentLoadStarted():
            return f"{data.resident_id} begins to load, {size(data.used_bytes)} in use"
        case ResidentProcessStarted():
            return f"{data.resident_id} is process {data.pid}"
        case ResidencyMaterialized():
            return f"{data.resident_id} shows {size(data.materialized_bytes)} on the device"
        case ResidentReady():
            return f"{data.resident_id} is ready after {duration(data.load_ms)}"
        case ResidentSlept():
            freed = f"{size(data.freed_bytes)} are free, {size(data.left_bytes)} stay"
            return f"{data.resident_id} sleeps: {freed}"
        case ResidentWoken():
            return f"{data.resident_id} is awake after {duration(data.wake_ms)}"
        case ResidentDrainStarted():
            return f"{data.resident_id} takes no new work: {data.cause}"
        case ResidentFailed():
            until = "" if data.backoff_until is None else f", no load before {format_instant(data.backoff_until)}"
            return f"{data.resident_id} failed: {data.failure} ({data.detail}), attempt {data.attempt}{until}"
        case EvictionStarted():
            return _eviction(data)
        case ResidentEvicted():
            return f"{data.resident_id} is gone, {size(data.freed_bytes)} are free"
        case MemoryNotReclaimed():
            return f"{data.resident_id} is gone, but {size(data.residual_bytes)} did not come back"
        case _:
            assert_never(data)


def _eviction(data: EvictionStarted) -> str:
    what = "is put to sleep" if data.action == "sleep" else "is unloaded"
    whose = ""
    if data.by is not None:
        whose = f" {data.by}" if data.cause is EvictionCause.OPERATOR else f" for {data.by}"
    return f"{data.resident_id} {what}: {data.cause}{whose}, holds {size(data.attributed_bytes)}"


def _of_failure(data: _OfFailure) -> str:
    match data:
        case FailureRecorded():
            return f"{data.failure} of {data.owner}: {data.detail}, attempt {data.attempt} of {data.limit}"
        case CapabilityDegraded():
            last = f"{data.failure} ({data.detail})"
            return f"{data.capability} is degraded: {data.failures} failures in a row, last {last}"
        case CapabilityRecovered():
            return f"{data.capability} answers again: it is degraded no more"
        case ThrashingDetected():
            times = f"{data.evictions} times in {data.window_seconds} s"
            return f"{data.evictor} made {data.victim} leave {data.accelerator_id} {times}: they thrash"
        case ProfilingStarted():
            return f"{data.deployment_id} is measured on {data.accelerator_id}: whoever comes waits for its end"
        case ProfilingEnded():
            detail = f" ({data.detail})" if data.detail else ""
            return f"the measurement of {data.deployment_id} on {data.accelerator_id} is over: {data.outcome}{detail}"
        case _:
            assert_never(data)
