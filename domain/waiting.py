"""What a queued candidate waits for: which residents have to go, and until when they cannot (semantics.md 6.5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .candidates import Pair
from .capacity import Case, backoff_until, case_of, not_required, unloading_suffices, ways_of
from .eviction import Eviction, Standing, best_set, unload, unload_when_drained
from .reasons import Reason
from .state import Resident, ResidentState, WaitingFor
from .units import ResidentId


def waiting_for(pair: Pair, requirement_bytes: int, reason: Reason) -> WaitingFor:
    """The place that is held for a candidate that was queued for `reason`, and what has to go there first."""
    before_4 = reason is Reason.RESIDENT_DRAINING
    case = case_of(pair, requirement_bytes)
    resident_ids, not_before = _waited_for(case, reason)
    return WaitingFor(
        accelerator_id=pair.accelerator.accelerator_id,
        deployment_id=pair.deployment.deployment_id,
        reason=reason,
        needed_bytes=requirement_bytes if before_4 else case.needed_bytes,
        resident_ids=resident_ids,
        not_before=not_before,
    )


def _waited_for(case: Case, reason: Reason) -> tuple[tuple[ResidentId, ...], int | None]:
    """Which residents, and until when a protection or a back-off lasts in any case."""
    match reason:
        case Reason.LOAD_BACKOFF:
            return (), backoff_until(case.pair)
        case Reason.RESIDENT_DRAINING:
            return _ids([case.pair.own] if case.pair.own is not None else []), None
        case Reason.RESIDENCY_CONFLICT:
            return _ids([occupant.resident for occupant in case.forced]), None
        case Reason.WAITING_FOR_DRAIN:
            if unloading_suffices(case):
                leaving = [occupant.resident for occupant in case.occupants]
                return _ids([r for r in leaving if r.state is ResidentState.UNLOADING]), None
            return _best_to_wait_for(case, (Standing.DRAINABLE,)), None
        case Reason.RESIDENCY_PROTECTED:
            found = _best_to_wait_for(case, (Standing.DRAINABLE, Standing.PROTECTED))
            ends = [o.protected_until or 0 for o in case.occupants if o.resident.resident_id in found]
            return found, max(ends, default=0) or None
        case _:
            return (), None


def _ids(residents: Sequence[Resident]) -> tuple[ResidentId, ...]:
    return tuple(sorted(resident.resident_id for resident in residents))


def _best_to_wait_for(case: Case, standings: tuple[Standing, ...]) -> tuple[ResidentId, ...]:
    """The best set of 6.4 if residents of these standings counted as evictable too, unloaded when they are idle.

    Where other reservations leave no room for any set, they are disregarded as in rule 12: they end.
    """
    required = [
        unload(occupant) if occupant.standing is Standing.EVICTABLE else unload_when_drained(occupant)
        for occupant in case.required
    ]
    waits = [[unload_when_drained(occupant)] for occupant in not_required(case, standings)]
    optional = sorted(ways_of(case) + waits, key=lambda ways: ways[0].resident_id)
    best = best_set(required, optional, case.missing_bytes(), with_unload=case.full_house)
    if best is None:
        bare = [[_without_release(way) for way in ways] for ways in optional]
        best = best_set(
            [_without_release(way) for way in required],
            bare,
            case.missing_bytes_without_reservations(),
            with_unload=case.full_house,
        )
    evictions = best.evictions if best is not None else tuple(required)
    return tuple(sorted(eviction.resident_id for eviction in evictions))


def _without_release(way: Eviction) -> Eviction:
    return replace(way, released_bytes=0)
