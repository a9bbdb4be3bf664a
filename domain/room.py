"""The last look before work begins: a fresh sample must still show room (semantics.md 7)."""

from __future__ import annotations

from .accounting import account
from .aggregates.accelerator import AcceleratorState, LeaseRecord, ResidentRecord
from .draft import Draft
from .envelopes import requirement_of
from .events import EvictionCause, LeaseRoomConfirmed, ReleaseCause, ResidentLoadStarted
from .evictions import begin_eviction
from .leases import release
from .policy import Policy
from .sampling import fresh_enough
from .state import ResidentState
from .units import DeploymentId, seconds
from .view import View, view_of


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
        if not record.awaits and (record.waits_to_load or unconfirmed_on(state, record))
    )


def _check_resident(draft: Draft, accelerator_id: str, resident_id: str) -> None:
    state = draft.world.accelerators[accelerator_id]
    record = state.residents.get(resident_id)
    if record is None or record.awaits:
        return
    loads = record.waits_to_load
    unconfirmed = unconfirmed_on(state, record)
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


def unconfirmed_on(state: AcceleratorState, record: ResidentRecord) -> tuple[LeaseRecord, ...]:
    """Warm grants on a resident for which room was not shown yet."""
    return tuple(lease for lease in state.leases_on(record.resident.resident_id) if not lease.room_confirmed)


def _room(draft: Draft, state: AcceleratorState, record: ResidentRecord) -> tuple[int, int]:
    """What it needs and what is schedulable, without its own reservation and those of grants not yet begun (7)."""
    view = view_of(draft.world.state(draft.now))
    own = record.resident.deployment_id
    unbegun = {
        other.resident.deployment_id for other in state.residents.values() if other.awaits or other.waits_to_load
    }
    accounting = account(view, state.accelerator.accelerator_id, without_reservations_of=unbegun | {own})
    needed = max(0, required_here(view, state, own) - record.resident.attributed_bytes)
    return needed, accounting.schedulable_bytes


def required_here(view: View, state: AcceleratorState, deployment_id: DeploymentId) -> int:
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
    undo(draft, accelerator_id, record, unconfirmed, ReleaseCause.NO_ROOM)


def undo(
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
