"""leases: who may use memory now, and how the last ones ended (semantics.md 7).

`no_stale_gpu_lease`: whether a lease is live depends on the instant, so it is a question to the projection and never a
field of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from gpuledger.domain.candidates import Start
from gpuledger.domain.events import (
    LeaseExpired,
    LeaseGranted,
    LeasePreempted,
    LeaseReleased,
    LeaseRenewed,
    Recorded,
    ResidencyMaterialized,
    ResidentFailed,
)
from gpuledger.domain.policy import Priority

#: Ended leases that are kept, the newest ones.
ENDED_LIMIT: Final = 500

TYPES: Final = frozenset(
    {
        "LeaseGranted",
        "LeaseRenewed",
        "LeaseReleased",
        "LeaseExpired",
        "LeasePreempted",
        "ResidencyMaterialized",
        "ResidentFailed",
    }
)


@dataclass(frozen=True, slots=True)
class LeaseView:
    """One lease from its grant to its end. `ended_by`: a ReleaseCause, `expired`, `preempted` or `resident_failed`."""

    lease_id: str
    request_id: str
    deployment_id: str
    accelerator_id: str
    resident_id: str
    priority: Priority
    start: Start
    reserved_bytes: int
    materialized_bytes: int
    needed_bytes: int
    granted_at: int
    expires_at: int
    preemptions: int
    granted_seq: int
    renewals: int = 0
    renewed_at: int | None = None
    ended_at: int | None = None
    ended_by: str | None = None
    ended_seq: int | None = None

    def is_live(self, now: int) -> bool:
        """Semantics.md 2: an expired lease is not active, whether or not its end is recorded."""
        return self.ended_at is None and self.expires_at > now


@dataclass(frozen=True, slots=True)
class Leases:
    """`held`: those whose end is not recorded. `ended`: the newest ones, in the order in which they ended."""

    seq: int = 0
    held: Mapping[str, LeaseView] = field(default_factory=dict[str, LeaseView])
    ended: tuple[LeaseView, ...] = ()

    def live(self, now: int) -> tuple[LeaseView, ...]:
        """Leases that give a right to memory at an instant, the oldest first."""
        live = (lease for lease in self.held.values() if lease.is_live(now))
        return tuple(sorted(live, key=lambda lease: (lease.granted_at, lease.lease_id)))

    def last_ended(self, limit: int) -> tuple[LeaseView, ...]:
        """The newest `limit` that have ended, newest first."""
        return tuple(reversed(self.ended))[: max(0, limit)]


def evolve(leases: Leases, event: Recorded) -> Leases:
    """The leases after one event of the ledger."""
    leases = replace(leases, seq=event.seq)
    match event.data:
        case LeaseGranted():
            lease = _granted(event, event.data)
            return replace(leases, held={**leases.held, lease.lease_id: lease})
        case LeaseRenewed(lease_id=lease_id, expires_at=expires_at):
            return _renewed(leases, lease_id, expires_at, event.at)
        case ResidencyMaterialized(resident_id=resident_id, materialized_bytes=materialized_bytes):
            return replace(leases, held=_materialized(leases.held, resident_id, materialized_bytes))
        case LeaseReleased(lease_id=lease_id, released_at=released_at, cause=cause):
            return _ended(leases, lease_id, released_at, cause.value, event.seq)
        case LeaseExpired(lease_id=lease_id, expired_at=expired_at):
            return _ended(leases, lease_id, expired_at, "expired", event.seq)
        case LeasePreempted(lease_id=lease_id, preempted_at=preempted_at):
            return _ended(leases, lease_id, preempted_at, "preempted", event.seq)
        case ResidentFailed(resident_id=resident_id, failed_at=failed_at):
            on_it = [lease.lease_id for lease in leases.held.values() if lease.resident_id == resident_id]
            for lease_id in sorted(on_it):
                leases = _ended(leases, lease_id, failed_at, "resident_failed", event.seq)
            return leases
        case _:
            return leases


def _granted(event: Recorded, granted: LeaseGranted) -> LeaseView:
    return LeaseView(
        lease_id=granted.lease_id,
        request_id=granted.request_id,
        deployment_id=granted.deployment_id,
        accelerator_id=granted.accelerator_id,
        resident_id=granted.resident_id,
        priority=granted.priority,
        start=granted.start,
        reserved_bytes=granted.reserved_bytes,
        materialized_bytes=granted.materialized_bytes,
        needed_bytes=granted.needed_bytes,
        granted_at=granted.granted_at,
        expires_at=granted.expires_at,
        preemptions=granted.preemptions,
        granted_seq=event.seq,
    )


def _renewed(leases: Leases, lease_id: str, expires_at: int, at: int) -> Leases:
    lease = leases.held.get(lease_id)
    if lease is None:
        return leases
    renewed = replace(lease, expires_at=expires_at, renewals=lease.renewals + 1, renewed_at=at)
    return replace(leases, held={**leases.held, lease_id: renewed})


def _materialized(held: Mapping[str, LeaseView], resident_id: str, shown_bytes: int) -> Mapping[str, LeaseView]:
    return {
        lease_id: replace(lease, materialized_bytes=min(lease.reserved_bytes, shown_bytes))
        if lease.resident_id == resident_id
        else lease
        for lease_id, lease in held.items()
    }


def _ended(leases: Leases, lease_id: str, ended_at: int, cause: str, seq: int) -> Leases:
    lease = leases.held.get(lease_id)
    if lease is None:
        return leases
    lease = replace(lease, ended_at=ended_at, ended_by=cause, ended_seq=seq)
    held = {other: one for other, one in leases.held.items() if other != lease_id}
    return replace(leases, held=held, ended=(*leases.ended, lease)[-ENDED_LIMIT:])
