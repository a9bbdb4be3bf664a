"""Evictions begin: a resident is told to leave, or to sleep (semantics.md 6.4, 7)."""

from __future__ import annotations

from . import faults
from .aggregates.accelerator import AcceleratorState, ResidentRecord
from .aggregates.deployment import planned
from .draft import Draft
from .events import EvictionCause, EvictionStarted, ReleaseCause, ResidentEvicted
from .eviction import Action
from .failures import EMPTY_SHA256, Failure
from .leases import release
from .policy import Policy
from .state import ResidentState
from .units import seconds
from .world import World


def begin_eviction(
    draft: Draft,
    accelerator_id: str,
    resident_id: str,
    cause: EvictionCause,
    *,
    action: Action = Action.UNLOAD,
    by_lease_id: str | None = None,
    by: str | None = None,
    leases_end: ReleaseCause | None = None,
) -> None:
    """Unload a resident, or put it to sleep. One whose process was never begun is gone at once: it holds nothing.

    `leases_end`: leases that are still on it are released with this cause; callers that passed None know of none.
    `by`: the deployment that it makes room for, or the operator.
    """
    state = draft.world.accelerators[accelerator_id]
    record = state.residents[resident_id]
    if leases_end is not None:
        for lease in state.leases_on(resident_id):
            release(draft, accelerator_id, lease, leases_end, used=False)
    resident = record.resident
    draft.on_accelerator(
        accelerator_id,
        EvictionStarted(
            resident_id=resident_id,
            deployment_id=resident.deployment_id,
            action=action.value,
            cause=cause,
            started_at=draft.now,
            attributed_bytes=resident.attributed_bytes,
            used_bytes=None if state.sample is None else state.sample.used_bytes,
            by_lease_id=by_lease_id,
            left_bytes=_left_asleep(draft, record) if action is Action.SLEEP else 0,
            by=by,
        ),
    )
    if not record.load_started and record.process is None:
        draft.on_accelerator(
            accelerator_id, ResidentEvicted(resident_id, resident.deployment_id, draft.now, freed_bytes=0)
        )


def _left_asleep(draft: Draft, record: ResidentRecord) -> int:
    """What the device may still show of it when it sleeps: what was measured, and some tolerance.

    Never so much that the sleep would have freed less than half of what it promised.
    """
    resident = record.resident
    deployment = draft.world.deployments[resident.deployment_id]
    sleep = planned(deployment, ()).sleep
    asleep_bytes = 0 if sleep is None else sleep.asleep_bytes
    promised = max(0, resident.attributed_bytes - asleep_bytes)
    return asleep_bytes + min(draft.world.policy.reclaim_tolerance_bytes, promised // 2)


def must_not_stop_yet(world: World, state: AcceleratorState, record: ResidentRecord) -> bool:
    """A start that would take freed memory for its own doing goes first; its end is bounded (runtimes.md, vLLM)."""
    if any(node.draining_for_shutdown for node in world.nodes.values()) or state.retired:
        return False
    return any(
        other.starts_alone and other.resident.state is ResidentState.LOADING and other.load_started and other.alive
        for other in state.residents.values()
        if other is not record
    )


def reclaim_deadline(policy: Policy, started_at: int) -> int:
    """When an eviction that the device has not confirmed counts as GPU_MEMORY_NOT_RECLAIMED.

    TERM, grace, TERM, grace, KILL come first; the time to give memory back counts from then.
    """
    return started_at + seconds(2 * policy.stop_grace_seconds + policy.reclaim_timeout_seconds)


def record_failure_of(
    draft: Draft,
    accelerator_id: str,
    record: ResidentRecord,
    failure: Failure,
    detail: str,
    evidence_sha256: str,
    attempt: int = 1,
    limit: int = 1,
) -> None:
    """A failure of a resident, on the account of the capability that it serves."""
    deployment = draft.world.deployments.get(record.resident.deployment_id)
    if deployment is None:
        return
    faults.record(
        draft,
        deployment.spec.capability,
        failure,
        detail,
        deployment_id=record.resident.deployment_id,
        accelerator_id=accelerator_id,
        resident_id=record.resident.resident_id,
        attempt=attempt,
        limit=limit,
        evidence_sha256=evidence_sha256 or EMPTY_SHA256,
    )
