"""Leases: granted by a plan, renewed by their holders, ended once (semantics.md 7)."""

from __future__ import annotations

from collections.abc import Set
from typing import Literal

from . import faults
from .aggregates.accelerator import AcceleratorState, LeaseRecord
from .aggregates.request import RequestState
from .draft import Draft
from .events import (
    LeaseExpired,
    LeaseReleased,
    LeaseRenewed,
    ReleaseCause,
    RequestCancelled,
    RequestFailed,
)
from .failures import Failure
from .policy import RENEWALS_PER_TTL
from .state import Lease, ResidencyPolicy
from .units import seconds
from .world import World


def active_on(state: AcceleratorState, resident_id: str, now: int) -> bool:
    """Whether a lease that has not run out is on a resident."""
    return any(record.lease.expires_at > now for record in state.leases_on(resident_id))


def lease_of(world: World, request: RequestState) -> LeaseRecord | None:
    """The lease that a request holds, if it holds one."""
    if request.accelerator_id is None or request.lease_id is None:
        return None
    return world.accelerators[request.accelerator_id].leases.get(request.lease_id)


def release(draft: Draft, accelerator_id: str, record: LeaseRecord, cause: ReleaseCause, *, used: bool) -> None:
    """End a lease before it expires."""
    draft.on_accelerator(
        accelerator_id,
        LeaseReleased(
            lease_id=record.lease.lease_id,
            resident_id=record.resident_id,
            released_at=draft.now,
            cause=cause,
            used=used,
            protected_until=_protected_until(draft, record) if used else None,
        ),
    )


def _protected_until(draft: Draft, record: LeaseRecord) -> int | None:
    """The end of this use plus the keep-warm time, when the use was at least as important as the model is."""
    deployment = draft.world.deployments.get(record.lease.deployment_id)
    if deployment is None or deployment.spec.residency.policy is ResidencyPolicy.LOAD_ON_DEMAND:
        return None
    if deployment.spec.priority.outranks(record.lease.priority):
        return None
    return draft.now + seconds(deployment.spec.residency.ttl_seconds)


def renew(draft: Draft, held: Set[str]) -> None:
    """Renew the leases of the requests that are still held, once a third of their life has passed."""
    ttl = seconds(draft.world.policy.lease_ttl_seconds)
    for state, record in tuple(draft.world.leases()):
        lease = record.lease
        due = lease.expires_at - draft.now <= ttl - ttl // RENEWALS_PER_TTL
        if lease.request_id in held and due and lease.expires_at > draft.now:
            renewed = LeaseRenewed(lease.lease_id, draft.now + ttl)
            draft.on_accelerator(state.accelerator.accelerator_id, renewed)


def expire_due(draft: Draft) -> tuple[tuple[str, str], ...]:
    """Record every lease that has run out; returns (accelerator id, resident id) of what has to be drained."""
    drained: list[tuple[str, str]] = []
    for state, record in tuple(draft.world.leases()):
        lease = record.lease
        if lease.expires_at > draft.now:
            continue
        accelerator_id = state.accelerator.accelerator_id
        draft.on_accelerator(accelerator_id, LeaseExpired(lease.lease_id, record.resident_id, draft.now))
        record_failure(draft, lease, record.resident_id, Failure.LEASE_TIMEOUT, "lease_not_renewed")
        end_request_of(draft, lease.request_id, Failure.LEASE_TIMEOUT, "lease_not_renewed")
        drained.append((accelerator_id, record.resident_id))
    return tuple(drained)


def record_failure(draft: Draft, lease: Lease, resident_id: str, failure: Failure, detail: str) -> None:
    """A failure of the work under a lease; its evidence is the events before it (semantics.md 8)."""
    deployment = draft.world.deployments.get(lease.deployment_id)
    if deployment is None:
        return
    attempt, limit = faults.attempt_of(draft, (lease.request_id,), failure)
    faults.record(
        draft,
        deployment.spec.capability,
        failure,
        detail,
        deployment_id=lease.deployment_id,
        accelerator_id=lease.accelerator_id,
        resident_id=resident_id,
        request_id=lease.request_id,
        attempt=attempt,
        limit=limit,
    )


def end_request_of(draft: Draft, request_id: str, failure: Failure, detail: str) -> None:
    """A request whose lease was lost to a failure has failed with it."""
    if request_id in draft.world.requests:
        draft.on_request(request_id, RequestFailed(request_id, draft.now, None, failure, detail))


def cancel_request(
    draft: Draft, request_id: str, cause: Literal["client_gone", "scheduler_restarted", "shutdown"]
) -> None:
    """Nobody waits for its answer any more; a lease it holds without having begun is given back."""
    request = draft.world.requests.get(request_id)
    if request is None:
        return
    ended = {
        "client_gone": ReleaseCause.CLIENT_GONE,
        "scheduler_restarted": ReleaseCause.SCHEDULER_RESTARTED,
        "shutdown": ReleaseCause.SHUTDOWN,
    }[cause]
    if (record := lease_of(draft.world, request)) is not None:
        release(draft, record.lease.accelerator_id, record, ended, used=False)
    draft.on_request(request_id, RequestCancelled(request_id, draft.now, cause))
