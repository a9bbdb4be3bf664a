"""What comes into memory and what leaves it: loads, room, evictions, keep-warm (semantics.md 7).

Each function looks at the folded state of a draft and emits what follows from it; none knows why it is called.
"""

from __future__ import annotations

from typing import Final

from .accounting import account
from .aggregates.accelerator import AcceleratorState, LeaseRecord, ResidentRecord
from .draft import Draft
from .envelopes import requirement_of
from .events import (
    EvictionCause,
    EvictionStarted,
    FailureRecorded,
    LeaseRoomConfirmed,
    MemoryNotReclaimed,
    ReleaseCause,
    ResidentDrainStarted,
    ResidentEvicted,
    ResidentFailed,
    ResidentLoadStarted,
    StreamKind,
    stream_name,
)
from .failures import EMPTY_SHA256, Failure, owner_of
from .leases import active_on, end_request_of, release
from .policy import MAX_LOAD_BACKOFF_SECONDS, Policy
from .sampling import fresh_enough
from .state import ResidencyPolicy, ResidentState
from .units import DeploymentId, seconds
from .view import View, view_of

#: Evidence that memory is back: so many samples that agree (semantics.md 7).
AGREEING_SAMPLES: Final = 2

#: Failures of a load: they set the back-off of the deployment on that accelerator (semantics.md 8).
LOAD_FAILURES: Final = frozenset(
    {Failure.MODEL_LOAD_FAILED, Failure.HEALTHCHECK_FAILED, Failure.INVALID_OUTPUT, Failure.TIMEOUT, Failure.GPU_OOM}
)


# ---- room: the last look before work begins ---------------------------------------------------------------------


def use_fresh_sample(draft: Draft) -> None:
    """Start every load, and clear every warm grant, for which a sample from after its evictions shows room."""
    for accelerator_id in sorted(draft.world.accelerators):
        for resident_id in sorted(draft.world.accelerators[accelerator_id].residents):
            _check_resident(draft, accelerator_id, resident_id)


def wants_fresh_sample(state: AcceleratorState) -> int | None:
    """The instant after which a sample is wanted for some grant, or None (semantics.md 7)."""
    return max((record.clear_at for record in _waiting_for_room(state)), default=None)


def room_given_up_at(policy: Policy, state: AcceleratorState) -> int | None:
    """When the first of the grants that wait for a sample has waited in vain, or None.

    A device that cannot be read shows no room; what was granted before that was known is planned again.
    """
    patience = seconds(policy.telemetry_max_age_seconds) + 1
    return min((record.clear_at + patience for record in _waiting_for_room(state)), default=None)


def _waiting_for_room(state: AcceleratorState) -> tuple[ResidentRecord, ...]:
    return tuple(
        record
        for record in state.residents.values()
        if not record.awaits and (_waits_to_load(record) or _unconfirmed(state, record))
    )


def _check_resident(draft: Draft, accelerator_id: str, resident_id: str) -> None:
    state = draft.world.accelerators[accelerator_id]
    record = state.residents.get(resident_id)
    if record is None or record.awaits:
        return
    loads = _waits_to_load(record)
    unconfirmed = _unconfirmed(state, record)
    if not loads and not unconfirmed:
        return
    if not fresh_enough(draft.world.policy, state, record.clear_at, draft.now):
        if draft.now > record.clear_at + seconds(draft.world.policy.telemetry_max_age_seconds):
            _give_back(draft, accelerator_id, record, unconfirmed)
        return
    needed, schedulable = _room(draft, state, record)
    if needed > schedulable:
        _give_back(draft, accelerator_id, record, unconfirmed)
    elif loads and state.sample is not None:
        draft.on_accelerator(accelerator_id, ResidentLoadStarted(resident_id, draft.now, state.sample.used_bytes))
    else:
        for lease in unconfirmed:
            draft.on_accelerator(
                accelerator_id, LeaseRoomConfirmed(lease.lease.lease_id, resident_id, needed, schedulable)
            )


def _waits_to_load(record: ResidentRecord) -> bool:
    return record.resident.state is ResidentState.LOADING and not record.load_started


def _unconfirmed(state: AcceleratorState, record: ResidentRecord) -> tuple[LeaseRecord, ...]:
    return tuple(lease for lease in state.leases_on(record.resident.resident_id) if not lease.room_confirmed)


def _room(draft: Draft, state: AcceleratorState, record: ResidentRecord) -> tuple[int, int]:
    """What it needs and what is schedulable, without its own reservation and those of grants not yet begun (7)."""
    view = view_of(draft.world.state(draft.now))
    own = record.resident.deployment_id
    unbegun = {
        other.resident.deployment_id for other in state.residents.values() if other.awaits or _waits_to_load(other)
    }
    accounting = account(view, state.accelerator.accelerator_id, without_reservations_of=unbegun | {own})
    needed = max(0, _requirement(view, state, own) - record.resident.attributed_bytes)
    return needed, accounting.schedulable_bytes


def _requirement(view: View, state: AcceleratorState, deployment_id: DeploymentId) -> int:
    """Of a grant that was made: what it reserved, should its envelope have gone since."""
    deployment = view.deployments.get(deployment_id)
    required = None
    if deployment is not None:
        required = requirement_of(deployment, state.accelerator, active=True, policy=view.policy)
    record = state.resident_of(deployment_id)
    reserved = 0 if record is None else record.resident.reserved_bytes
    return reserved if required is None else required


def _give_back(draft: Draft, accelerator_id: str, record: ResidentRecord, unconfirmed: tuple[LeaseRecord, ...]) -> None:
    """No room after all: the grants are released and their requests planned again (semantics.md 7)."""
    resident_id = record.resident.resident_id
    if _waits_to_load(record):
        begin_eviction(draft, accelerator_id, resident_id, EvictionCause.NO_ROOM, leases_end=ReleaseCause.NO_ROOM)
        return
    for lease in unconfirmed:
        release(draft, accelerator_id, lease, ReleaseCause.NO_ROOM, used=False)


# ---- evictions --------------------------------------------------------------------------------------------------


def begin_eviction(
    draft: Draft,
    accelerator_id: str,
    resident_id: str,
    cause: EvictionCause,
    *,
    by_lease_id: str | None = None,
    leases_end: ReleaseCause | None = None,
) -> None:
    """Unload a resident. One whose process was never begun is gone at once: it holds nothing.

    `leases_end`: leases that are still on it are released with this cause; callers that passed None know of none.
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
            action="unload",
            cause=cause,
            started_at=draft.now,
            attributed_bytes=resident.attributed_bytes,
            used_bytes=None if state.sample is None else state.sample.used_bytes,
            by_lease_id=by_lease_id,
        ),
    )
    if not record.load_started:
        draft.on_accelerator(
            accelerator_id, ResidentEvicted(resident_id, resident.deployment_id, draft.now, freed_bytes=0)
        )


def finish_evictions(draft: Draft) -> None:
    """Evictions that the device has confirmed, and those it has not confirmed in time (semantics.md 7)."""
    for accelerator_id in sorted(draft.world.accelerators):
        state = draft.world.accelerators[accelerator_id]
        for resident_id, record in sorted(state.residents.items()):
            if record.eviction is None:
                continue
            if record.eviction.gone_samples >= AGREEING_SAMPLES:
                resident = record.resident
                freed = record.eviction.attributed_bytes
                draft.on_accelerator(
                    accelerator_id, ResidentEvicted(resident_id, resident.deployment_id, draft.now, freed)
                )
            elif draft.now >= reclaim_deadline(draft.world.policy, record.eviction.started_at):
                _not_reclaimed(draft, accelerator_id, record)


def reclaim_deadline(policy: Policy, started_at: int) -> int:
    """When an eviction that the device has not confirmed counts as GPU_MEMORY_NOT_RECLAIMED.

    TERM, grace, TERM, grace, KILL come first; the time to give memory back counts from then.
    """
    return started_at + seconds(2 * policy.stop_grace_seconds + policy.reclaim_timeout_seconds)


def process_ended(draft: Draft, resident_id: str) -> None:
    """A resident whose process was never recorded has none any more: it never began, so it held nothing."""
    found = draft.world.find_resident(resident_id)
    if found is None:
        return
    state, record = found
    if record.eviction is not None and record.process is None:
        draft.on_accelerator(
            state.accelerator.accelerator_id,
            ResidentEvicted(resident_id, record.resident.deployment_id, draft.now, freed_bytes=0),
        )


def _not_reclaimed(draft: Draft, accelerator_id: str, record: ResidentRecord) -> None:
    """What stays is booked as external; who waited for it is not served by it, and is planned again."""
    resident = record.resident
    state = draft.world.accelerators[accelerator_id]
    for waiting_id, waiting in sorted(state.residents.items()):
        if resident.resident_id not in waiting.awaits:
            continue
        if _waits_to_load(waiting):
            begin_eviction(
                draft, accelerator_id, waiting_id, EvictionCause.NO_ROOM, leases_end=ReleaseCause.NOT_RECLAIMED
            )
        else:
            for lease in _unconfirmed(state, waiting):
                release(draft, accelerator_id, lease, ReleaseCause.NOT_RECLAIMED, used=False)
    draft.on_accelerator(
        accelerator_id,
        MemoryNotReclaimed(resident.resident_id, resident.deployment_id, draft.now, resident.attributed_bytes),
    )
    _record_failure(draft, accelerator_id, record, Failure.GPU_MEMORY_NOT_RECLAIMED, "not_reclaimed_in_time", "")


# ---- failures ---------------------------------------------------------------------------------------------------


def resident_failed(draft: Draft, resident_id: str, failure: Failure, detail: str, evidence_sha256: str) -> None:
    """A failure ends the leases on a resident, and what is left of it is unloaded (semantics.md 2, 8)."""
    found = draft.world.find_resident(resident_id)
    if found is None or found[1].eviction is not None:
        return  # gone, or on its way out: its process was ended by us
    state, record = found
    accelerator_id = state.accelerator.accelerator_id
    deployment_id = record.resident.deployment_id
    of_load = record.resident.state is ResidentState.LOADING and failure in LOAD_FAILURES | {Failure.RUNTIME_CRASH}
    attempt = state.failures.get(deployment_id, 0) + 1
    backoff = load_backoff_seconds(draft.world.policy, attempt)
    requests = [lease.lease.request_id for lease in state.leases_on(resident_id)]
    for lease in state.leases_on(resident_id):
        began = record.resident.state is not ResidentState.LOADING
        release(draft, accelerator_id, lease, ReleaseCause.FAILED, used=began)
    draft.on_accelerator(
        accelerator_id,
        ResidentFailed(
            resident_id=resident_id,
            deployment_id=deployment_id,
            failure=failure,
            detail=detail,
            failed_at=draft.now,
            attempt=attempt if of_load else 1,
            backoff_until=draft.now + seconds(backoff) if of_load else None,
        ),
    )
    _record_failure(draft, accelerator_id, record, failure, detail, evidence_sha256, attempt)
    for request_id in requests:
        end_request_of(draft, request_id, failure, detail)
    begin_eviction(draft, accelerator_id, resident_id, EvictionCause.FAILED)


def load_backoff_seconds(policy: Policy, attempt: int) -> int:
    """Doubling from `load_backoff_seconds`, bounded (semantics.md 8, 10).

    >>> [load_backoff_seconds(Policy(), attempt) for attempt in (1, 2, 3, 9)]
    [5, 10, 20, 300]
    """
    doublings = min(attempt - 1, MAX_LOAD_BACKOFF_SECONDS.bit_length())
    return min(policy.load_backoff_seconds << doublings, MAX_LOAD_BACKOFF_SECONDS)


def _record_failure(
    draft: Draft,
    accelerator_id: str,
    record: ResidentRecord,
    failure: Failure,
    detail: str,
    evidence_sha256: str,
    attempt: int = 1,
) -> None:
    deployment = draft.world.deployments.get(record.resident.deployment_id)
    if deployment is None:
        return
    draft.emit(
        stream_name(StreamKind.CAPABILITY, deployment.spec.capability),
        FailureRecorded(
            capability=deployment.spec.capability,
            failure=failure,
            owner=owner_of(failure),
            deployment_id=record.resident.deployment_id,
            accelerator_id=accelerator_id,
            resident_id=record.resident.resident_id,
            request_id=None,
            recorded_at=draft.now,
            attempt=attempt,
            limit=draft.world.policy.degraded_after_failures,
            evidence_sha256=evidence_sha256 or EMPTY_SHA256,
            detail=detail,
        ),
    )


# ---- keeping and letting go -------------------------------------------------------------------------------------


def let_go(draft: Draft) -> None:
    """Drain what a lease was lost on, and unload what its residency policy no longer keeps (semantics.md 7)."""
    for accelerator_id in sorted(draft.world.accelerators):
        for resident_id in sorted(draft.world.accelerators[accelerator_id].residents):
            state = draft.world.accelerators[accelerator_id]
            cause = _unload_cause(draft, state, state.residents[resident_id])
            if cause is not None:
                begin_eviction(draft, accelerator_id, resident_id, cause)


def _unload_cause(draft: Draft, state: AcceleratorState, record: ResidentRecord) -> EvictionCause | None:
    resident = record.resident
    if record.eviction is not None or active_on(state, resident.resident_id, draft.now):
        return None
    if resident.state is ResidentState.DRAINING:
        return EvictionCause.DRAINED if _drained(draft, state, record) else None
    if resident.state is ResidentState.LOADING:
        abandoned = not record.load_started or _node_drains(draft, state)
        return _abandoned_cause(draft, state) if abandoned else None
    if resident.state is not ResidentState.READY:
        return None
    if _node_drains(draft, state):
        return EvictionCause.SHUTDOWN
    if resident.running_requests > 0:
        return None
    until = kept_until(draft, record)
    if until is None or draft.now < until:
        return None
    return EvictionCause.ON_DEMAND if until <= resident.last_used_at else EvictionCause.TTL


def _abandoned_cause(draft: Draft, state: AcceleratorState) -> EvictionCause:
    """A load that nobody waits for any more: before it began it is undone; a drain ends it even after."""
    return EvictionCause.SHUTDOWN if _node_drains(draft, state) else EvictionCause.ABANDONED


def kept_until(draft: Draft, record: ResidentRecord) -> int | None:
    """When its residency policy lets it go if nothing uses it; None for ever."""
    deployment = draft.world.deployments.get(record.resident.deployment_id)
    if deployment is None or deployment.retired:
        return draft.now
    residency = deployment.spec.residency
    last_used_at = record.resident.last_used_at
    if residency.policy is ResidencyPolicy.ALWAYS_WARM:
        return None
    if residency.policy is ResidencyPolicy.LOAD_ON_DEMAND:
        return last_used_at
    return last_used_at + seconds(residency.ttl_seconds)


def drain(draft: Draft, accelerator_id: str, resident_id: str, cause: str) -> None:
    """No new work on a resident; it is unloaded when its runtime reports idle (semantics.md 7)."""
    record = draft.world.accelerators[accelerator_id].residents.get(resident_id)
    if record is not None and record.resident.state is ResidentState.READY:
        draft.on_accelerator(accelerator_id, ResidentDrainStarted(resident_id, draft.now, cause))


def _drained(draft: Draft, state: AcceleratorState, record: ResidentRecord) -> bool:
    """The runtime reported idle after the drain began, or it had as long as a lease lives and is stopped."""
    started_at = record.drain_started_at or draft.now
    if draft.now >= drain_deadline(draft.world.policy, started_at):
        return True
    reported = state.sample is not None and state.sample.observed_at > started_at
    return reported and record.resident.running_requests == 0


def drain_deadline(policy: Policy, started_at: int) -> int:
    """When a runtime that never reports idle is stopped all the same."""
    return started_at + seconds(policy.lease_ttl_seconds)


def _node_drains(draft: Draft, state: AcceleratorState) -> bool:
    node = draft.world.nodes.get(state.node_id)
    return node is not None and node.draining_for_shutdown
