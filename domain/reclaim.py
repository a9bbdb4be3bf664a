"""Evictions end: memory is back when the device shows it, and where it does not, that is said (semantics.md 7)."""

from __future__ import annotations

from typing import Final

from .aggregates.accelerator import Eviction, ResidentRecord
from .draft import Draft
from .events import EvictionCause, MemoryNotReclaimed, ReleaseCause, ResidentEvicted, ResidentSlept
from .evictions import begin_eviction, must_not_stop_yet, reclaim_deadline, record_failure_of
from .failures import Failure
from .room import unconfirmed_on, undo

#: Evidence that memory is back: so many samples that agree (semantics.md 7).
AGREEING_SAMPLES: Final = 2


def finish_evictions(draft: Draft) -> None:
    """Evictions that the device has confirmed, and those it has not confirmed in time (semantics.md 7)."""
    for accelerator_id in sorted(draft.world.accelerators):
        state = draft.world.accelerators[accelerator_id]
        for _, record in sorted(state.residents.items()):
            if record.eviction is None:
                continue
            if record.eviction.gone_samples >= AGREEING_SAMPLES:
                _finish(draft, accelerator_id, record, record.eviction)
            elif must_not_stop_yet(draft.world, state, record):
                continue  # it has not been told yet
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


def _not_reclaimed(draft: Draft, accelerator_id: str, record: ResidentRecord) -> None:
    """What stays is booked as external; who waited for it is not served by it, and is planned again."""
    resident = record.resident
    state = draft.world.accelerators[accelerator_id]
    sleeps = record.eviction is not None and record.eviction.sleeps
    for _, waiting in sorted(state.residents.items()):
        if resident.resident_id in waiting.awaits:
            undo(draft, accelerator_id, waiting, unconfirmed_on(state, waiting), ReleaseCause.NOT_RECLAIMED)
    if sleeps:
        # It has said that it sleeps, or not even that, and holds what it held: it is still ours, so it is unloaded.
        record_failure_of(draft, accelerator_id, record, Failure.GPU_MEMORY_NOT_RECLAIMED, "sleep_freed_too_little", "")
        begin_eviction(draft, accelerator_id, resident.resident_id, EvictionCause.SLEEP_FAILED)
        return
    draft.on_accelerator(
        accelerator_id,
        MemoryNotReclaimed(resident.resident_id, resident.deployment_id, draft.now, resident.attributed_bytes),
    )
    record_failure_of(draft, accelerator_id, record, Failure.GPU_MEMORY_NOT_RECLAIMED, "not_reclaimed_in_time", "")


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
