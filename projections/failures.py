"""failures: what went wrong, by class, and what was refused for capacity, counted apart (semantics.md 8)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from gpuledger.domain.events import FailureRecorded, Recorded, RequestFailed
from gpuledger.domain.failures import Failure
from gpuledger.domain.reasons import Reason

_K = TypeVar("_K")

#: Failures that are kept in full, the newest ones.
RECENT_LIMIT: Final = 200

TYPES: Final = frozenset({"FailureRecorded", "RequestFailed"})

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
    """One failure, with whom it hit."""

    seq: int
    at: int
    capability: str
    failure: Failure
    owner: str
    detail: str
    deployment_id: str | None
    accelerator_id: str | None
    resident_id: str | None
    request_id: str | None
    attempt: int
    limit: int


@dataclass(frozen=True, slots=True)
class Failures:
    """Counts are over the whole ledger; their keys are closed lists, so they are bounded.

    `capacity_refusals` and `other_refusals` count refused requests by reason, `internal` failures by class.
    """

    seq: int = 0
    internal: Mapping[Failure, int] = field(default_factory=dict[Failure, int])
    capacity_refusals: Mapping[Reason, int] = field(default_factory=dict[Reason, int])
    other_refusals: Mapping[Reason, int] = field(default_factory=dict[Reason, int])
    recent: tuple[FailureView, ...] = ()

    def newest(self, limit: int) -> tuple[FailureView, ...]:
        """The newest `limit`, newest first."""
        return tuple(reversed(self.recent))[: max(0, limit)]


def evolve(failures: Failures, event: Recorded) -> Failures:
    """The failures after one event of the ledger."""
    failures = replace(failures, seq=event.seq)
    match event.data:
        case FailureRecorded():
            return _recorded(failures, event, event.data)
        case RequestFailed(reason=Reason() as reason) if reason in CAPACITY_REASONS:
            return replace(failures, capacity_refusals=_one_more(failures.capacity_refusals, reason))
        case RequestFailed(reason=Reason() as reason):
            return replace(failures, other_refusals=_one_more(failures.other_refusals, reason))
        case _:
            return failures


def _recorded(failures: Failures, event: Recorded, recorded: FailureRecorded) -> Failures:
    view = FailureView(
        seq=event.seq,
        at=event.at,
        capability=recorded.capability,
        failure=recorded.failure,
        owner=recorded.owner.value,
        detail=recorded.detail,
        deployment_id=recorded.deployment_id,
        accelerator_id=recorded.accelerator_id,
        resident_id=recorded.resident_id,
        request_id=recorded.request_id,
        attempt=recorded.attempt,
        limit=recorded.limit,
    )
    return replace(
        failures,
        internal=_one_more(failures.internal, recorded.failure),
        recent=(*failures.recent, view)[-RECENT_LIMIT:],
    )


def _one_more(counts: Mapping[_K, int], key: _K) -> Mapping[_K, int]:
    return {**counts, key: counts.get(key, 0) + 1}
