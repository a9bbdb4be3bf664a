"""failures: what went wrong, by class, and what was refused for capacity, counted apart (semantics.md 8).

Two things are counted, and never added up. *Failures* are of the nineteen classes, each once, as it was recorded: a
FailureRecorded, or the TelemetryMissed that says DRIVER_ERROR. *Refusals* are requests that were told a reason. A
refusal that is one of the classes is recorded as such too; it is the same one, seen from the other side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from gpuledger.domain.events import (
    CapabilityDegraded,
    CapabilityRecovered,
    FailureRecorded,
    LeasePreempted,
    Recorded,
    RequestFailed,
    RequestFellBack,
    RequestRetried,
    TelemetryMissed,
)
from gpuledger.domain.failures import CAPACITY_FAILURES, EMPTY_SHA256, Failure, owner_of
from gpuledger.domain.reasons import Reason

_K = TypeVar("_K")

#: Failures that are kept in full, the newest ones.
RECENT_LIMIT: Final = 200

#: The types that say that something failed; a reader that wants the newest failures needs no others.
FAILURE_TYPES: Final = frozenset({"FailureRecorded", "TelemetryMissed"})
TYPES: Final = FAILURE_TYPES | {
    "RequestFailed",
    "RequestRetried",
    "RequestFellBack",
    "LeasePreempted",
    "CapabilityDegraded",
    "CapabilityRecovered",
}

#: Reasons of a refusal that say that there was no room, at once or for as long as the request could wait: correct
#: outcomes. They are those of the capacity stage (6.3), and of the policy stage the two that are about room.
CAPACITY_REASONS: Final = frozenset(
    {
        Reason.NODE_MEMORY_INSUFFICIENT,
        Reason.REPLICA_LIMIT,
        Reason.DEADLINE_CANNOT_BE_MET,
        Reason.EXTERNAL_GPU_PRESSURE,
        Reason.RESIDENT_DRAINING,
        Reason.CONCURRENCY_LIMIT,
        Reason.DRAINING_FOR_WAITER,
        Reason.LOAD_BACKOFF,
        Reason.GPU_PRESSURE_HOLD,
        Reason.LOAD_IN_PROGRESS,
        Reason.QUEUED_BEHIND,
        Reason.RESIDENCY_CONFLICT,
        Reason.RESIDENCY_PROTECTED,
        Reason.WAITING_FOR_DRAIN,
        Reason.INSUFFICIENT_SCHEDULABLE_VRAM,
        Reason.EVICTION_NOT_ALLOWED,
        Reason.QUEUE_FULL,
    }
)


@dataclass(frozen=True, slots=True)
class FailureView:
    """One failure, with whom it hit. `capability` is None for one of telemetry, which hits whatever is there.

    `accelerator_ids` are all that it hit; `accelerator_id` is the one where there is only one.
    """

    seq: int
    at: int
    capability: str | None
    failure: Failure
    owner: str
    detail: str
    deployment_id: str | None
    accelerator_id: str | None
    resident_id: str | None
    request_id: str | None
    attempt: int
    limit: int
    accelerator_ids: tuple[str, ...] = ()
    evidence_sha256: str = EMPTY_SHA256


@dataclass(frozen=True, slots=True)
class Failures:
    """Counts are over the events that were folded; their keys are closed lists, so they are bounded.

    `internal` and `capacity` count failures by class, those of CAPACITY_FAILURES apart from the rest.
    `capacity_refusals` and `other_refusals` count refused requests by reason. `retries` and `degradations` are by the
    failure that led to them, `fallbacks` by that or by the reason of the refusal. `preemptions` are leases.
    """

    seq: int = 0
    internal: Mapping[Failure, int] = field(default_factory=dict[Failure, int])
    capacity: Mapping[Failure, int] = field(default_factory=dict[Failure, int])
    capacity_refusals: Mapping[Reason, int] = field(default_factory=dict[Reason, int])
    other_refusals: Mapping[Reason, int] = field(default_factory=dict[Reason, int])
    retries: Mapping[Failure, int] = field(default_factory=dict[Failure, int])
    fallbacks: Mapping[str, int] = field(default_factory=dict[str, int])
    degradations: Mapping[Failure, int] = field(default_factory=dict[Failure, int])
    recoveries: int = 0
    preemptions: int = 0
    recent: tuple[FailureView, ...] = ()

    def newest(self, limit: int) -> tuple[FailureView, ...]:
        """The newest `limit`, newest first."""
        return tuple(reversed(self.recent))[: max(0, limit)]

    def count(self, failure: Failure) -> int:
        """How often a class was recorded."""
        return (self.capacity if failure in CAPACITY_FAILURES else self.internal).get(failure, 0)


def evolve(failures: Failures, event: Recorded) -> Failures:
    """The failures after one event of the ledger."""
    failures = replace(failures, seq=event.seq)
    match event.data:
        case FailureRecorded() | TelemetryMissed():
            return _failed(failures, view_of(event, event.data))
        case RequestFailed(reason=Reason() as reason) if reason in CAPACITY_REASONS:
            return replace(failures, capacity_refusals=_one_more(failures.capacity_refusals, reason))
        case RequestFailed(reason=Reason() as reason):
            return replace(failures, other_refusals=_one_more(failures.other_refusals, reason))
        case RequestRetried(failure=failure):
            return replace(failures, retries=_one_more(failures.retries, failure))
        case RequestFellBack(failure=failure, reason=reason):
            cause = str(reason if failure is None else failure)
            return replace(failures, fallbacks=_one_more(failures.fallbacks, cause))
        case CapabilityDegraded(failure=failure):
            return replace(failures, degradations=_one_more(failures.degradations, failure))
        case CapabilityRecovered():
            return replace(failures, recoveries=failures.recoveries + 1)
        case LeasePreempted():
            return replace(failures, preemptions=failures.preemptions + 1)
        case _:
            return failures


def view_of(event: Recorded, failed: FailureRecorded | TelemetryMissed) -> FailureView:
    """One failure as it was recorded."""
    if isinstance(failed, TelemetryMissed):
        return _missed(event, failed)
    hit = failed.accelerator_id
    return FailureView(
        seq=event.seq,
        at=event.at,
        capability=failed.capability,
        failure=failed.failure,
        owner=failed.owner.value,
        detail=failed.detail,
        deployment_id=failed.deployment_id,
        accelerator_id=hit,
        resident_id=failed.resident_id,
        request_id=failed.request_id,
        attempt=failed.attempt,
        limit=failed.limit,
        accelerator_ids=() if hit is None else (hit,),
        evidence_sha256=failed.evidence_sha256,
    )


def _missed(event: Recorded, missed: TelemetryMissed) -> FailureView:
    """DRIVER_ERROR is recorded once when it begins, and again when its code changes (semantics.md 8)."""
    hit = missed.accelerator_ids
    return FailureView(
        seq=event.seq,
        at=event.at,
        capability=None,
        failure=Failure.DRIVER_ERROR,
        owner=owner_of(Failure.DRIVER_ERROR).value,
        detail=missed.code,
        deployment_id=None,
        accelerator_id=hit[0] if len(hit) == 1 else None,
        resident_id=None,
        request_id=None,
        attempt=1,
        limit=1,
        accelerator_ids=hit,
    )


def _failed(failures: Failures, view: FailureView) -> Failures:
    failures = replace(failures, recent=(*failures.recent, view)[-RECENT_LIMIT:])
    if view.failure in CAPACITY_FAILURES:
        return replace(failures, capacity=_one_more(failures.capacity, view.failure))
    return replace(failures, internal=_one_more(failures.internal, view.failure))


def _one_more(counts: Mapping[_K, int], key: _K) -> Mapping[_K, int]:
    return {**counts, key: counts.get(key, 0) + 1}
