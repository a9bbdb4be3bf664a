"""What comes into memory and what leaves it: loads, room, evictions, keep-warm (semantics.md 7).

Each function looks at the folded state of a draft and emits what follows from it; none knows why it is called.
"""

from __future__ import annotations

from typing import Final, Literal

from . import faults
from .accounting import account
from .aggregates.accelerator import AcceleratorState, Eviction, LeaseRecord, ResidentRecord
from .aggregates.deployment import planned
from .draft import Draft
from .envelopes import requirement_of, with_margin
from .events import (
    ArtifactCorrupt,
    EnvelopeSuspected,
    EvictionCause,
    EvictionStarted,
    LeaseRoomConfirmed,
    MemoryNotReclaimed,
    ReleaseCause,
    ResidentDrainStarted,
    ResidentEvicted,
    ResidentFailed,
    ResidentLoadStarted,
    ResidentSlept,
    StreamKind,
    stream_name,
)
from .eviction import Action
from .failures import EMPTY_SHA256, Failure
from .faults import try_again_or_fail
from .leases import active_on, release
from .policy import MAX_LOAD_BACKOFF_SECONDS, Policy
from .sampling import fresh_enough
from .state import Attribution, ResidencyPolicy, ResidentState
from .units import DeploymentId, seconds
from .view import View, view_of

#: Evidence that memory is back: so many samples that agree (semantics.md 7).
AGREEING_SAMPLES: Final = 2

#: Failures of a load: they set the back-off of the deployment on that accelerator (semantics.md 8).
LOAD_FAILURES: Final = frozenset(
    {
        Failure.MODEL_LOAD_FAILED,
        Failure.HEALTHCHECK_FAILED,
        Failure.INVALID_OUTPUT,
        Failure.TIMEOUT,
        Failure.GPU_OOM,
        Failure.RUNTIME_CRASH,
        Failure.ARTIFACT_CORRUPT,
    }
)

#: Details of a process that ended without saying why: only the device tells whether it was for want of memory.
ENDED_WITHOUT_A_WORD: Final = frozenset({"killed", "signal_9", "signal_6"})


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
        if not record.awaits and (record.waits_to_load or _unconfirmed(state, record))
    )


def _check_resident(draft: Draft, accelerator_id: str, resident_id: str) -> None:
    state = draft.world.accelerators[accelerator_id]
    record = state.residents.get(resident_id)
    if record is None or record.awaits:
        return
    loads = record.waits_to_load
    unconfirmed = _unconfirmed(state, record)
    if not loads and not unconfirmed:
        return
    if loads and _must_wait_for_others(state, record):
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


def _must_wait_for_others(state: AcceleratorState, record: ResidentRecord) -> bool:
    """One start or stop at a time, where a runtime bills what others take or free as its own (runtimes.md, vLLM)."""
    for other in state.residents.values():
        if other is record or not (record.starts_alone or other.starts_alone):
            continue
        starts = other.resident.state is ResidentState.LOADING and other.load_started
        if starts or other.eviction is not None:
            return True
    return False


def _unconfirmed(state: AcceleratorState, record: ResidentRecord) -> tuple[LeaseRecord, ...]:
    return tuple(lease for lease in state.leases_on(record.resident.resident_id) if not lease.room_confirmed)


def _room(draft: Draft, state: AcceleratorState, record: ResidentRecord) -> tuple[int, int]:
    """What it needs and what is schedulable, without its own reservation and those of grants not yet begun (7)."""
    view = view_of(draft.world.state(draft.now))
    own = record.resident.deployment_id
    unbegun = {
        other.resident.deployment_id for other in state.residents.values() if other.awaits or other.waits_to_load
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
    _undo(draft, accelerator_id, record, unconfirmed, ReleaseCause.NO_ROOM)


def _undo(
    draft: Draft,
    accelerator_id: str,
    record: ResidentRecord,
    unconfirmed: tuple[LeaseRecord, ...],
    cause: ReleaseCause,
) -> None:
    """Take grants back before their work began: a load that has not begun is none, a wake leaves it asleep."""
    resident_id = record.resident.resident_id
    if record.waits_to_load and not record.asleep:
        begin_eviction(draft, accelerator_id, resident_id, EvictionCause.NO_ROOM, leases_end=cause)
        return
    all_of_it = draft.world.accelerators[accelerator_id].leases_on(resident_id)
    for lease in all_of_it if record.waits_to_load else unconfirmed:
        release(draft, accelerator_id, lease, cause, used=False)


# ---- evictions --------------------------------------------------------------------------------------------------


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


def finish_evictions(draft: Draft) -> None:
    """Evictions that the device has confirmed, and those it has not confirmed in time (semantics.md 7)."""
    for accelerator_id in sorted(draft.world.accelerators):
        state = draft.world.accelerators[accelerator_id]
        for _, record in sorted(state.residents.items()):
            if record.eviction is None:
                continue
            if record.eviction.gone_samples >= AGREEING_SAMPLES:
                _finish(draft, accelerator_id, record, record.eviction)
            elif draft.now >= reclaim_deadline(draft.world.policy, record.eviction.started_at):
                _not_reclaimed(draft, accelerator_id, record)


def _finish(draft: Draft, accelerator_id: str, record: ResidentRecord, eviction: Eviction) -> None:
    resident, left = record.resident, record.resident.attributed_bytes if eviction.sleeps else 0
    freed = max(0, eviction.attributed_bytes - left)
    if eviction.sleeps:
        draft.on_accelerator(accelerator_id, ResidentSlept(resident.resident_id, draft.now, freed, left))
    else:
        draft.on_accelerator(
            accelerator_id, ResidentEvicted(resident.resident_id, resident.deployment_id, draft.now, freed)
        )


def reclaim_deadline(policy: Policy, started_at: int) -> int:
    """When an eviction that the device has not confirmed counts as GPU_MEMORY_NOT_RECLAIMED.

    TERM, grace, TERM, grace, KILL come first; the time to give memory back counts from then.
    """
    return started_at + seconds(2 * policy.stop_grace_seconds + policy.reclaim_timeout_seconds)


def leave_retired(draft: Draft) -> None:
    """What is on an accelerator that is no more has nothing to run on: it has failed, and its process is ended."""
    for state, record in tuple(draft.world.residents()):
        if state.retired and record.eviction is None:
            resident_failed(draft, record.resident.resident_id, Failure.RUNTIME_CRASH, "accelerator_retired", "")


def process_ended(draft: Draft, resident_id: str) -> None:
    """A resident whose process was never recorded has none any more: it never began, so it held nothing.

    On an accelerator that was retired no sample will show more than that its process has ended.
    """
    found = draft.world.find_resident(resident_id)
    if found is None:
        return
    state, record = found
    if record.eviction is not None and (record.process is None or state.retired):
        draft.on_accelerator(
            state.accelerator.accelerator_id,
            ResidentEvicted(resident_id, record.resident.deployment_id, draft.now, freed_bytes=0),
        )


def _not_reclaimed(draft: Draft, accelerator_id: str, record: ResidentRecord) -> None:
    """What stays is booked as external; who waited for it is not served by it, and is planned again."""
    resident = record.resident
    state = draft.world.accelerators[accelerator_id]
    sleeps = record.eviction is not None and record.eviction.sleeps
    for _, waiting in sorted(state.residents.items()):
        if resident.resident_id in waiting.awaits:
            _undo(draft, accelerator_id, waiting, _unconfirmed(state, waiting), ReleaseCause.NOT_RECLAIMED)
    if sleeps:
        # It has said that it sleeps, or not even that, and holds what it held: it is still ours, so it is unloaded.
        _record_failure(draft, accelerator_id, record, Failure.GPU_MEMORY_NOT_RECLAIMED, "sleep_freed_too_little", "")
        begin_eviction(draft, accelerator_id, resident.resident_id, EvictionCause.SLEEP_FAILED)
        return
    draft.on_accelerator(
        accelerator_id,
        MemoryNotReclaimed(resident.resident_id, resident.deployment_id, draft.now, resident.attributed_bytes),
    )
    _record_failure(draft, accelerator_id, record, Failure.GPU_MEMORY_NOT_RECLAIMED, "not_reclaimed_in_time", "")


# ---- failures ---------------------------------------------------------------------------------------------------


def resident_failed(draft: Draft, resident_id: str, failure: Failure, detail: str, evidence_sha256: str) -> None:
    """A failure ends the leases on a resident, and what is left of it is unloaded (semantics.md 2, 8)."""
    found = draft.world.find_resident(resident_id)
    if found is None:
        return
    state, record = found
    accelerator_id = state.accelerator.accelerator_id
    if record.eviction is not None:
        if record.eviction.sleeps:  # it could not be put to sleep, or died of it: who waits for its memory still does
            _record_failure(draft, accelerator_id, record, failure, detail, evidence_sha256)
            begin_eviction(draft, accelerator_id, resident_id, EvictionCause.SLEEP_FAILED)
        return  # otherwise it is on its way out: its process was ended by us
    failure, detail = _judged_by_device(draft, state, record, failure, detail)
    deployment_id = record.resident.deployment_id
    of_load = record.resident.state is ResidentState.LOADING and failure in LOAD_FAILURES
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
    _record_failure(draft, accelerator_id, record, failure, detail, evidence_sha256, attempt if of_load else 1)
    _doubt(draft, state, record, failure, detail, evidence_sha256)
    for request_id in requests:
        try_again_or_fail(draft, request_id, failure, detail, resident_id=resident_id)
    begin_eviction(draft, accelerator_id, resident_id, EvictionCause.FAILED)


def _judged_by_device(
    draft: Draft, state: AcceleratorState, record: ResidentRecord, failure: Failure, detail: str
) -> tuple[Failure, str]:
    """A process that ended without a word, where the device had no room left for it: GPU_OOM (semantics.md 8)."""
    if failure not in (Failure.MODEL_LOAD_FAILED, Failure.RUNTIME_CRASH) or state.sample is None:
        return failure, detail
    if detail not in ENDED_WITHOUT_A_WORD or not _takes_memory(state, record, draft.now):
        return failure, detail
    view = view_of(draft.world.state(draft.now))
    missing = _requirement(view, state, record.resident.deployment_id) - record.resident.attributed_bytes
    left = state.accelerator.total_bytes - state.sample.used_bytes
    return (Failure.GPU_OOM, "no_room_left_on_device") if left < missing else (failure, detail)


def _takes_memory(state: AcceleratorState, record: ResidentRecord, now: int) -> bool:
    """Whether it was loading or at work: one that is idle or asleep asks for no more than it has."""
    resident = record.resident
    if resident.state is ResidentState.LOADING:
        return record.load_started
    return resident.running_requests > 0 or active_on(state, resident.resident_id, now)


def _doubt(
    draft: Draft,
    state: AcceleratorState,
    record: ResidentRecord,
    failure: Failure,
    detail: str,
    evidence_sha256: str,
) -> None:
    """What a failure says of the deployment itself: no further load until somebody has looked (semantics.md 8)."""
    deployment_id = record.resident.deployment_id
    deployment = draft.world.deployments.get(deployment_id)
    if deployment is None:
        return
    if failure is Failure.ARTIFACT_CORRUPT and deployment.corrupt is None:
        stream = stream_name(StreamKind.DEPLOYMENT, deployment_id)
        draft.emit(stream, ArtifactCorrupt(deployment_id, detail, evidence_sha256 or EMPTY_SHA256))
    if failure is Failure.GPU_OOM:
        suspect(draft, state, record, "gpu_oom", record.resident.attributed_bytes)


def suspect(
    draft: Draft,
    state: AcceleratorState,
    record: ResidentRecord,
    cause: Literal["gpu_oom", "exceeded"],
    observed_bytes: int,
) -> None:
    """Hold the envelope of a resident as suspect, once."""
    deployment_id = record.resident.deployment_id
    deployment = draft.world.deployments.get(deployment_id)
    measured = None if deployment is None else deployment.measured_on(state.accelerator.gpu_class)
    if measured is None or measured.envelope.suspect:
        return
    draft.emit(
        stream_name(StreamKind.DEPLOYMENT, deployment_id),
        EnvelopeSuspected(
            deployment_id=deployment_id,
            accelerator_id=state.accelerator.accelerator_id,
            resident_id=record.resident.resident_id,
            config_hash=measured.envelope.config_hash,
            gpu_class=measured.envelope.gpu_class,
            cause=cause,
            observed_bytes=observed_bytes,
            peak_bytes=measured.envelope.peak_bytes,
        ),
    )


def suspect_exceeded(draft: Draft) -> None:
    """A resident that is seen to hold more than its envelope and the margin for its variation (semantics.md 3, 8)."""
    for state, record in tuple(draft.world.residents()):
        resident = record.resident
        deployment = draft.world.deployments.get(resident.deployment_id)
        measured = None if deployment is None else deployment.measured_on(state.accelerator.gpu_class)
        if measured is None or resident.attribution is not Attribution.KNOWN:
            continue
        if resident.attributed_bytes > with_margin(draft.world.policy, measured.envelope.peak_bytes):
            suspect(draft, state, record, "exceeded", resident.attributed_bytes)


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
    faults.record(
        draft,
        deployment.spec.capability,
        failure,
        detail,
        deployment_id=record.resident.deployment_id,
        accelerator_id=accelerator_id,
        resident_id=record.resident.resident_id,
        attempt=attempt,
        limit=draft.world.policy.degraded_after_failures,
        evidence_sha256=evidence_sha256 or EMPTY_SHA256,
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
        abandoned = not record.load_started or _node_drains(draft, state) is not None
        return (_node_drains(draft, state) or EvictionCause.ABANDONED) if abandoned else None
    if resident.state not in (ResidentState.READY, ResidentState.SLEEPING):
        return None
    if (drains := _node_drains(draft, state)) is EvictionCause.SHUTDOWN:
        return drains
    if resident.running_requests > 0:
        return None
    if drains is not None:
        return drains
    until = kept_until(draft, record)
    if until is None or draft.now < until:
        return None
    return EvictionCause.ON_DEMAND if until <= resident.last_used_at else EvictionCause.TTL


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


def _node_drains(draft: Draft, state: AcceleratorState) -> EvictionCause | None:
    """Why what is idle leaves, when its node drains: for a shutdown, or because an operator said so."""
    node = draft.world.nodes.get(state.node_id)
    if node is None or not node.leaves:
        return None
    return EvictionCause.SHUTDOWN if node.draining_for_shutdown else EvictionCause.NODE_DRAINED
