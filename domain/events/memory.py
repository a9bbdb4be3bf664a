"""What happens in the memory of an accelerator: leases, residents, evictions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from ..candidates import Start
from ..failures import Failure
from ..policy import Priority
from ..state import DOCUMENT
from ..units import (
    AcceleratorId,
    Bytes,
    Count,
    DeploymentId,
    Identifier,
    Instant,
    LeaseId,
    Milliseconds,
    RequestId,
    ResidentId,
)
from .registry import StreamKind, register

# ---- leases -----------------------------------------------------------------------------------------------------


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """A lease, and with start `cold` the resident it is granted on: LOADING, 0 bytes (semantics.md 2).

    `awaits` are the residents whose evictions this reservation waits for; no work starts before they are finished.
    """

    __pydantic_config__ = DOCUMENT

    lease_id: LeaseId
    request_id: RequestId
    deployment_id: DeploymentId
    accelerator_id: AcceleratorId
    resident_id: ResidentId
    priority: Priority
    start: Start
    reserved_bytes: Bytes
    materialized_bytes: Bytes
    needed_bytes: Bytes
    granted_at: Instant
    expires_at: Instant
    preemptions: Count
    start_ms: Milliseconds
    loaded_at: Instant
    available_at: Instant | None
    awaits: tuple[ResidentId, ...]
    #: Its runtime starts and stops alone on an accelerator: it would bill others' memory as its own (runtimes.md).
    starts_alone: bool = False


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    """Its holder is still there."""

    __pydantic_config__ = DOCUMENT

    lease_id: LeaseId
    expires_at: Instant


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class ResidencyMaterialized:
    """The device shows more of a reservation: what moves from reserved to observed is counted once (semantics.md 7)."""

    __pydantic_config__ = DOCUMENT

    resident_id: ResidentId
    materialized_bytes: Bytes


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class LeaseRoomConfirmed:
    """A fresh sample showed room for a warm grant that needs some: work may start (semantics.md 7)."""

    __pydantic_config__ = DOCUMENT

    lease_id: LeaseId
    resident_id: ResidentId
    needed_bytes: Bytes
    schedulable_bytes: Bytes


class ReleaseCause(StrEnum):
    """Why a lease ended before it expired."""

    COMPLETED = "completed"
    CLIENT_GONE = "client_gone"
    FAILED = "failed"
    NO_ROOM = "no_room"
    NOT_RECLAIMED = "not_reclaimed"
    SCHEDULER_RESTARTED = "scheduler_restarted"
    SHUTDOWN = "shutdown"


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class LeaseReleased:
    """`used`: work ran under it, so `last_used_at` of its resident moves; a null `protected_until` moves nothing."""

    __pydantic_config__ = DOCUMENT

    lease_id: LeaseId
    resident_id: ResidentId
    released_at: Instant
    cause: ReleaseCause
    used: bool
    protected_until: Instant | None


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class LeaseExpired:
    """LEASE_TIMEOUT: its holder was not heard of for as long as a lease lives."""

    __pydantic_config__ = DOCUMENT

    lease_id: LeaseId
    resident_id: ResidentId
    expired_at: Instant


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class LeasePreempted:
    """Its request goes back to its old place (`requeued`), unless it is over already (semantics.md 6.4, rule 7).

    One whose answer had begun cannot be begun again: RequestFailed with PREEMPTED follows.
    """

    __pydantic_config__ = DOCUMENT

    lease_id: LeaseId
    resident_id: ResidentId
    request_id: RequestId
    preempted_at: Instant
    by_request_id: RequestId
    requeued: bool


# ---- residents --------------------------------------------------------------------------------------------------


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class ResidentLoadStarted:
    """A fresh sample showed room; the process may be started (semantics.md 7)."""

    __pydantic_config__ = DOCUMENT

    resident_id: ResidentId
    loaded_at: Instant
    used_bytes: Bytes


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class ResidentProcessStarted:
    """The process of a resident, held before its first instruction until this is durable.

    (pid, start time) in one boot is how a later run knows it for ours (semantics.md 7).
    """

    __pydantic_config__ = DOCUMENT

    resident_id: ResidentId
    pid: Count
    start_ticks: Count
    boot_id: Identifier


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class ResidentReady:
    """It answered its functional check."""

    __pydantic_config__ = DOCUMENT

    resident_id: ResidentId
    ready_at: Instant
    load_ms: Milliseconds


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class ResidentSlept:
    """It gave its memory back without losing its process: two agreeing samples show what is left."""

    __pydantic_config__ = DOCUMENT

    resident_id: ResidentId
    slept_at: Instant
    freed_bytes: Bytes
    left_bytes: Bytes


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class ResidentWoken:
    """It is awake and answered its functional check."""

    __pydantic_config__ = DOCUMENT

    resident_id: ResidentId
    woken_at: Instant
    wake_ms: Milliseconds


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class ResidentDrainStarted:
    """No new work; what runs may end (an expired lease, semantics.md 7)."""

    __pydantic_config__ = DOCUMENT

    resident_id: ResidentId
    started_at: Instant
    cause: str


class EvictionCause(StrEnum):
    """Why a resident is unloaded."""

    PLAN = "plan"
    TTL = "ttl"
    ON_DEMAND = "on_demand"
    FAILED = "failed"
    DRAINED = "drained"
    NO_ROOM = "no_room"
    ABANDONED = "abandoned"
    SHUTDOWN = "shutdown"
    SCHEDULER_RESTARTED = "scheduler_restarted"
    OPERATOR = "operator"
    NODE_DRAINED = "node_drained"
    SLEEP_FAILED = "sleep_failed"


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class EvictionStarted:
    """A resident is leaving or going to sleep; what it holds stays attributed until the device shows it free.

    `left_bytes`: a sleep is finished when the device shows no more than this. `by`: the deployment that it makes room
    for, or the operator.
    """

    __pydantic_config__ = DOCUMENT

    resident_id: ResidentId
    deployment_id: DeploymentId
    action: Literal["unload", "sleep"]
    cause: EvictionCause
    started_at: Instant
    attributed_bytes: Bytes
    used_bytes: Bytes | None
    by_lease_id: LeaseId | None
    left_bytes: Bytes = 0
    by: Identifier | None = None


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class ThrashingDetected:
    """One deployment was evicted for the same other one again and again within a short time."""

    __pydantic_config__ = DOCUMENT

    accelerator_id: AcceleratorId
    evictor: DeploymentId
    victim: DeploymentId
    evictions: Count
    window_seconds: Count
    detected_at: Instant


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class ProfilingStarted:
    """An envelope is being measured here with nothing else going on: whoever asks meanwhile waits for its end."""

    __pydantic_config__ = DOCUMENT

    accelerator_id: AcceleratorId
    deployment_id: DeploymentId
    started_at: Instant


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class ProfilingEnded:
    """The measurement is over: it gave an envelope, made way for a request, or failed."""

    __pydantic_config__ = DOCUMENT

    accelerator_id: AcceleratorId
    deployment_id: DeploymentId
    ended_at: Instant
    outcome: Literal["measured", "preempted", "failed"]
    detail: str


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class ResidentEvicted:
    """The process is gone and two agreeing samples show the memory back (semantics.md 7)."""

    __pydantic_config__ = DOCUMENT

    resident_id: ResidentId
    deployment_id: DeploymentId
    finished_at: Instant
    freed_bytes: Bytes


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class MemoryNotReclaimed:
    """GPU_MEMORY_NOT_RECLAIMED: what stays is booked as external (semantics.md 7)."""

    __pydantic_config__ = DOCUMENT

    resident_id: ResidentId
    deployment_id: DeploymentId
    finished_at: Instant
    residual_bytes: Bytes


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class ResidentFailed:
    """A failure ends the leases on it. `backoff_until` is null when the failure was not one of loading."""

    __pydantic_config__ = DOCUMENT

    resident_id: ResidentId
    deployment_id: DeploymentId
    failure: Failure
    detail: str
    failed_at: Instant
    attempt: Count
    backoff_until: Instant | None
