"""What stays and what is let go: residency policies, drains (semantics.md 7).

Each function looks at the folded state of a draft and emits what follows from it; none knows why it is called.
"""

from __future__ import annotations

from collections.abc import Set

from .aggregates.accelerator import AcceleratorState, ResidentRecord
from .draft import Draft
from .events import EvictionCause, ResidentDrainStarted
from .evictions import begin_eviction
from .leases import active_on
from .policy import Policy
from .state import ResidencyPolicy, ResidentState
from .units import seconds


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
    if until is None or draft.now < until or draft.now <= _shown_by(draft.world.policy, state, record):
        return None
    return EvictionCause.ON_DEMAND if until <= resident.last_used_at else EvictionCause.TTL


def wants_to_be_seen(state: AcceleratorState, record: ResidentRecord) -> int | None:
    """The instant after which a sample is wanted before it may leave: the device has not shown its last use, or None.

    What an eviction waits for is what the device attributed before: nothing, of a model that no sample has seen.
    """
    if state.retired or state.missed is not None or record.resident.state is not ResidentState.READY:
        return None
    unseen = state.sample is None or state.sample.observed_at <= record.resident.last_used_at
    return record.resident.last_used_at if unseen else None


def _shown_by(policy: Policy, state: AcceleratorState, record: ResidentRecord) -> int:
    """Until when it is waited for: a device that shows nothing keeps nobody."""
    used_at = wants_to_be_seen(state, record)
    return -1 if used_at is None else used_at + seconds(policy.telemetry_max_age_seconds)


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


def drain_silent(draft: Draft, told: Set[str]) -> None:
    """Drain what was at work when it was heard of last, and has neither a lease nor said anything for a lease's life.

    A runtime that hangs never reports idle: it would be taken for busy for ever. `told`: residents that said now how
    many requests they work on.
    """
    for state, record in tuple(draft.world.residents()):
        resident = record.resident
        if resident.resident_id in told or resident.running_requests == 0:
            continue
        leased = active_on(state, resident.resident_id, draft.now)
        if not leased and draft.now >= drain_deadline(draft.world.policy, resident.last_used_at):
            drain(draft, state.accelerator.accelerator_id, resident.resident_id, "silent")


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
