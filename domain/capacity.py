"""Whether there is room, can be made, or is worth waiting for (semantics.md 6.3).

`capacity_stage` is the list of rules 1 to 12; each has a function below that answers with a `Ruling` when it
decides and with None when the next rule is to be asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from .accounting import account, reservations
from .candidates import Candidate, Figures, Pair, Refusal, Start
from .eviction import (
    Eviction,
    EvictionSet,
    Occupant,
    Standing,
    best_set,
    occupants_of,
    put_to_sleep,
    unload,
)
from .policy import Pressure, Priority
from .reasons import Reason, Verdict
from .state import Attribution, QueuedRequest, ResidencyPolicy, Resident, ResidentState
from .units import MICROS_PER_MS, ResidentId, format_instant, milliseconds, seconds
from .view import View


@dataclass(frozen=True, slots=True)
class Ruling:
    """What the rule that applied decides."""

    verdict: Verdict
    refusal: Refusal | None = None
    eviction_set: EvictionSet | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """A candidate for which rule 4 is settled: how it would start, and what it still needs."""

    pair: Pair
    start: Start
    needed_bytes: int
    #: Whom it could evict, or would have to wait for; its own FAILED resident among them.
    occupants: tuple[Occupant, ...]
    #: The residents that must be unloaded whatever is free (rule 8).
    forced: tuple[Occupant, ...]
    #: What belongs to every eviction set: those, and its own FAILED resident.
    required: tuple[Occupant, ...]

    @property
    def full_house(self) -> bool:
        """A cold start where there are `max_residents` already: some resident must go first (6.4, end)."""
        here = self.pair.view.residents_at.get(self.pair.accelerator.accelerator_id, ())
        return self.start is Start.COLD and len(here) >= self.pair.policy.max_residents

    def missing_bytes(self) -> int:
        """What evictions must gain for `needed <= schedulable'`. Not positive when that holds already."""
        return self.needed_bytes - self.pair.accounting.room_bytes if self.needed_bytes > 0 else 0

    def missing_bytes_without_reservations(self) -> int:
        """The same where what other reservations could still take is disregarded (rule 12)."""
        accounting = self.pair.accounting
        free = accounting.full_bytes - accounting.physical_used_bytes
        return self.needed_bytes - free if self.needed_bytes > 0 else 0


def capacity_stage(pair: Pair, requirement_bytes: int) -> Candidate:
    """6.3: the first rule that applies decides."""
    ruling = (
        _deadline_has_passed(pair)  # 1
        or _pressure_is_critical(pair, requirement_bytes)  # 2
        or _own_resident_is_leaving(pair)  # 3
    )
    if ruling is not None:
        return candidate_of(pair, ruling, None)
    case = case_of(pair, requirement_bytes)  # 4
    ruling = (
        _door_is_closed(case)  # 5
        or _start_is_held(case)  # 6
        or _waiter_would_be_delayed(case)  # 7
        or _exclusive_conflict(case)  # 8
        or _fits_as_it_is(case)  # 9
        or _fits_after_evictions(case)  # 10, 11
        or _does_not_fit(case)  # 12
    )
    return candidate_of(pair, ruling, case)


def candidate_of(pair: Pair, ruling: Ruling, case: Case | None) -> Candidate:
    """The outcome of the stage; `case` is None when a rule before 4 decided."""
    headroom = pair.accounting.schedulable_bytes
    if ruling.verdict.admits and case is not None:
        gain = ruling.eviction_set.gain_bytes if ruling.eviction_set is not None else 0
        headroom = max(0, pair.accounting.room_bytes + gain) - case.needed_bytes
    serves = pair.own is not None and case is not None and case.start is not Start.COLD
    return Candidate(
        deployment_id=pair.deployment.deployment_id,
        accelerator_id=pair.accelerator.accelerator_id,
        node_id=pair.node.node_id,
        verdict=ruling.verdict,
        refusals=(ruling.refusal,) if ruling.refusal is not None else (),
        eligible=True,
        requirement_bytes=pair.requirement_bytes,
        needed_bytes=case.needed_bytes if case is not None else None,
        start=case.start if case is not None else None,
        start_micros=pair.start_micros,
        resident_id=pair.own.resident_id if serves and pair.own is not None else None,
        active_leases=len(pair.own_leases),
        pressure=pair.pressure,
        accounting=pair.accounting,
        eviction_set=ruling.eviction_set,
        headroom_after_bytes=headroom,
    )


def case_of(pair: Pair, requirement_bytes: int) -> Case:
    """4. How it would start, what it needs then, and who else is here."""
    occupants = occupants_of(
        pair.view,
        pair.accelerator.accelerator_id,
        pair.deployment.deployment_id,
        pair.question.request.priority,
    )
    forced = tuple(_forced(pair, occupants))
    own_failed = [o for o in occupants if o.resident.deployment_id == pair.deployment.deployment_id]
    return Case(
        pair=pair,
        start=start_of(pair.own),
        needed_bytes=needed_of(pair, requirement_bytes),
        occupants=occupants,
        forced=forced,
        required=(*forced, *own_failed),
    )


def start_of(own: Resident | None) -> Start:
    """Warm on a resident that is READY or LOADING, a wake of one that is SLEEPING, otherwise cold."""
    if own is None:
        return Start.COLD
    if own.state in (ResidentState.READY, ResidentState.LOADING):
        return Start.WARM
    return Start.WAKE if own.state is ResidentState.SLEEPING else Start.COLD


def needed_of(pair: Pair, requirement_bytes: int) -> int:
    """What must be found beyond what the deployment has, and has reserved, here."""
    held = reservations(pair.view, pair.accelerator.accelerator_id).get(pair.deployment.deployment_id)
    future = held.future_bytes if held is not None else 0
    own = pair.own
    attributed = own.attributed_bytes if own is not None and own.state is not ResidentState.FAILED else 0
    return max(0, requirement_bytes - attributed - future)


def _forced(pair: Pair, occupants: Sequence[Occupant]) -> Iterator[Occupant]:
    """8. Whom exclusivity, its own or another's, drives out: residents of other deployments."""
    own_is_exclusive = pair.deployment.residency.policy is ResidencyPolicy.EXCLUSIVE
    for occupant in occupants:
        exclusive = own_is_exclusive or occupant.deployment.residency.policy is ResidencyPolicy.EXCLUSIVE
        if exclusive and occupant.resident.deployment_id != pair.deployment.deployment_id:
            yield occupant


# Rules 1 to 3: before it is asked how it would start.


def _deadline_has_passed(pair: Pair) -> Ruling | None:
    """1."""
    deadline = pair.question.request.deadline
    return _too_late(pair, 0) if deadline is not None and deadline < pair.view.now else None


def _pressure_is_critical(pair: Pair, requirement_bytes: int) -> Ruling | None:
    """2."""
    if pair.pressure is not Pressure.CRITICAL:
        return None
    warm = start_of(pair.own) is Start.WARM
    if pair.policy.critical_admits_warm and warm and needed_of(pair, requirement_bytes) == 0:
        return None
    figures = {**_pressure_figures(pair), "requirement_bytes": requirement_bytes}
    return _reject(Reason.EXTERNAL_GPU_PRESSURE, figures)


def _own_resident_is_leaving(pair: Pair) -> Ruling | None:
    """3."""
    own = pair.own
    if own is None or own.state not in (ResidentState.DRAINING, ResidentState.UNLOADING):
        return None
    return _queue(pair, Reason.RESIDENT_DRAINING, {"resident_id": own.resident_id, "state": own.state.value})


# Rules 5 to 7: reasons to wait though there may be room.


def _door_is_closed(case: Case) -> Ruling | None:
    """5. Warm only: it is full, or closed for one who has waited for it."""
    pair = case.pair
    if case.start is not Start.WARM:
        return None
    if len(pair.own_leases) >= pair.deployment.concurrency:
        figures = {"active_leases": len(pair.own_leases), "concurrency": pair.deployment.concurrency}
        return _queue(pair, Reason.CONCURRENCY_LIMIT, figures)
    for waiter in pair.question.others_queued:
        if pair.own is not None and _closes_door_of(pair, pair.own, waiter):
            return _queue(pair, Reason.DRAINING_FOR_WAITER, {"waiter": waiter.request_id})
    return None


def _closes_door_of(pair: Pair, own: Resident, waiter: QueuedRequest) -> bool:
    waits_for = waiter.waiting_for
    return (
        own.resident_id in waits_for.resident_ids
        and waits_for.reason is not Reason.RESIDENCY_PROTECTED
        and _comes_first(pair, waiter)
        and not any(
            _is_held_by_a_long_job(pair.view, resident_id, waiter)
            for resident_id in waits_for.resident_ids
            if resident_id != own.resident_id
        )
    )


def _comes_first(pair: Pair, waiter: QueuedRequest) -> bool:
    """It is strictly more important, or of the same class, earlier, and has waited long enough."""
    request = pair.question.request
    if waiter.priority.outranks(request.priority):
        return True
    return (
        waiter.priority is request.priority
        and waiter.claim < request.claim
        and pair.view.now - waiter.enqueued_at >= seconds(pair.policy.fair_wait_seconds)
    )


def _is_held_by_a_long_job(view: View, resident_id: ResidentId, waiter: QueuedRequest) -> bool:
    resident = view.residents.get(resident_id)
    if resident is None:
        return False
    long_ago = view.now - seconds(view.policy.fair_wait_seconds)
    return any(
        lease.granted_at < waiter.enqueued_at and lease.granted_at <= long_ago
        for lease in view.active_leases(resident.accelerator_id, resident.deployment_id)
    )


#: Classes whose starts wait while others press on the card (rule 6).
_HELD_CLASSES: Final = frozenset((Priority.BACKGROUND, Priority.BENCHMARK, Priority.MAINTENANCE))


def _start_is_held(case: Case) -> Ruling | None:
    """6. Wake and cold only: nothing is started here now."""
    pair, request = case.pair, case.pair.question.request
    if case.start is Start.WARM:
        return None
    until = backoff_until(pair)
    if until is not None:
        return _queue(pair, Reason.LOAD_BACKOFF, {"until": format_instant(until)})
    pressed = pair.pressure in (Pressure.ELEVATED, Pressure.HIGH)
    if pressed and (request.priority in _HELD_CLASSES or request.lab):
        return _queue(pair, Reason.GPU_PRESSURE_HOLD, _pressure_figures(pair))
    for occupant in case.occupants:
        resident = occupant.resident
        if resident.state is ResidentState.LOADING and resident.attribution is Attribution.ESTIMATED:
            return _queue(pair, Reason.LOAD_IN_PROGRESS, {"resident_id": resident.resident_id})
    return None


def backoff_until(pair: Pair) -> int | None:
    """The end of the deployment's back-off on this accelerator, while it lasts."""
    for backoff in pair.deployment.backoff:
        if backoff.accelerator_id == pair.accelerator.accelerator_id and backoff.until > pair.view.now:
            return backoff.until
    return None


def _waiter_would_be_delayed(case: Case) -> Ruling | None:
    """7. What is free is being saved up for one who came first."""
    if case.needed_bytes == 0:
        return None
    for waiter in case.pair.question.others_queued:
        if _waits_for_memory_here(case.pair, waiter) and _is_delayed(case, waiter):
            figures: Figures = {
                "waiter": waiter.request_id,
                "waiter_needed_bytes": waiter.waiting_for.needed_bytes,
                "needed_bytes": case.needed_bytes,
            }
            return _queue(case.pair, Reason.QUEUED_BEHIND, figures)
    return None


_WAITS_FOR_MEMORY: Final = frozenset(
    (Reason.WAITING_FOR_DRAIN, Reason.RESIDENCY_CONFLICT, Reason.RESIDENT_DRAINING, Reason.QUEUED_BEHIND)
)


def _waits_for_memory_here(pair: Pair, waiter: QueuedRequest) -> bool:
    """Whether it is a *memory waiter* of this accelerator, before this request in the claim order."""
    waits_for = waiter.waiting_for
    if waits_for.accelerator_id != pair.accelerator.accelerator_id:
        return False
    if waiter.claim >= pair.question.request.claim:
        return False
    if waits_for.reason is Reason.RESIDENCY_PROTECTED:
        soon = pair.view.now + seconds(pair.policy.fair_wait_seconds) + pair.start_micros
        return waits_for.not_before is not None and waits_for.not_before <= soon and _comes_first(pair, waiter)
    return waits_for.reason in _WAITS_FOR_MEMORY


def _is_delayed(case: Case, waiter: QueuedRequest) -> bool:
    pair, waits_for = case.pair, waiter.waiting_for
    if case.start is not Start.WARM:
        other = pair.view.deployments.get(waits_for.deployment_id)
        if (
            waits_for.reason is Reason.RESIDENCY_CONFLICT
            or (other is not None and other.residency.policy is ResidencyPolicy.EXCLUSIVE)
            or pair.deployment.residency.policy is ResidencyPolicy.EXCLUSIVE
        ):
            return True
    here = pair.view.residents_at.get(pair.accelerator.accelerator_id, ())
    gone = [resident for resident in here if resident.resident_id in waits_for.resident_ids]
    after = _schedulable_without(pair, gone)
    return after < case.needed_bytes + waits_for.needed_bytes


def _schedulable_without(pair: Pair, gone: Sequence[Resident]) -> int:
    """`schedulable'` of 6.4 with these residents, and their reservations, gone."""
    return account(
        pair.view,
        pair.accelerator.accelerator_id,
        without_reservations_of={resident.deployment_id for resident in gone},
        freed_bytes=sum(resident.attributed_bytes for resident in gone),
    ).schedulable_bytes


# Rules 8 to 12: room.


def _exclusive_conflict(case: Case) -> Ruling | None:
    """8. One of those that must go cannot be evicted."""
    never = [occupant for occupant in case.forced if occupant.standing is Standing.NEVER]
    if never:
        return _reject(Reason.RESIDENCY_CONFLICT, _occupant_figures(never[0]))
    protected = [occupant for occupant in case.forced if occupant.standing is Standing.PROTECTED]
    if protected:
        figures = {**_room_figures(case), **_protection_figures(protected)}
        return _queue(case.pair, Reason.RESIDENCY_PROTECTED, figures)
    busy = [occupant for occupant in case.forced if occupant.standing is Standing.DRAINABLE]
    if busy:
        return _queue(case.pair, Reason.RESIDENCY_CONFLICT, _occupant_figures(busy[0]))
    return None


def _fits_as_it_is(case: Case) -> Ruling | None:
    """9, and 11 for it: nothing has to go."""
    if case.required or case.full_house or case.missing_bytes() > 0:
        return None
    return _too_late_after(case.pair, 0) or Ruling(Verdict.ADMIT)


def _fits_after_evictions(case: Case) -> Ruling | None:
    """10, and 11 for it: room is on its way, or can be made."""
    pair = case.pair
    if unloading_suffices(case):
        return _queue(pair, Reason.WAITING_FOR_DRAIN, _room_figures(case))
    if pair.serving_elsewhere:
        return None  # A further replica never evicts.
    required = [unload(occupant) for occupant in case.required]
    optional = ways_of(case)
    ceiling = sum(ways[-1].gain_bytes for ways in optional) + sum(way.gain_bytes for way in required)
    if ceiling < case.missing_bytes() or (case.full_house and not optional and not required):
        return None
    best = best_set(required, optional, case.missing_bytes(), _eviction_budget_ms(pair), with_unload=case.full_house)
    if best is None:
        return _too_late(pair, pair.start_micros)
    return Ruling(Verdict.ADMIT_AFTER_EVICTION, eviction_set=best)


def unloading_suffices(case: Case) -> bool:
    """10, its first half: those that are UNLOADING make room enough, and in time."""
    pair = case.pair
    leaving = [o for o in case.occupants if o.resident.state is ResidentState.UNLOADING]
    if not leaving or case.required or case.full_house:
        return False
    gain = sum(occupant.resident.attributed_bytes + occupant.future_bytes for occupant in leaving)
    takes_ms = sum(occupant.deployment.unload_ms for occupant in leaving)
    return case.missing_bytes() <= gain and _too_late_after(pair, takes_ms) is None


def ways_of(case: Case) -> list[list[Eviction]]:
    """The ways to evict each evictable resident that is not required anyway; the one that gains most last."""
    found: list[list[Eviction]] = []
    for occupant in not_required(case, (Standing.EVICTABLE,)):
        sleep = put_to_sleep(occupant)
        found.append([unload(occupant)] if sleep is None else [sleep, unload(occupant)])
    return found


def not_required(case: Case, standings: tuple[Standing, ...]) -> list[Occupant]:
    """Occupants of these standings that do not have to go anyway."""
    required = {occupant.resident.resident_id for occupant in case.required}
    return [o for o in case.occupants if o.standing in standings and o.resident.resident_id not in required]


def _does_not_fit(case: Case) -> Ruling:
    """12."""
    pair, accounting = case.pair, case.pair.accounting
    requirement = pair.requirement_bytes or 0
    figures = _room_figures(case)
    if requirement > accounting.full_bytes:
        return _reject(Reason.INSUFFICIENT_SCHEDULABLE_VRAM, figures)
    if requirement > accounting.full_bytes - accounting.unmanaged_external_bytes:
        return _reject(Reason.EXTERNAL_GPU_PRESSURE, {**figures, **_pressure_figures(pair)})
    if _would_fit_without(case, (Standing.EVICTABLE, Standing.DRAINABLE)):
        return _queue(pair, Reason.WAITING_FOR_DRAIN, figures)
    if _would_fit_without(case, (Standing.EVICTABLE, Standing.DRAINABLE, Standing.PROTECTED)):
        protected = [occupant for occupant in case.occupants if occupant.standing is Standing.PROTECTED]
        return _queue(pair, Reason.RESIDENCY_PROTECTED, {**figures, **_protection_figures(protected)})
    return _reject(Reason.EVICTION_NOT_ALLOWED, figures)


def _would_fit_without(case: Case, standings: tuple[Standing, ...]) -> bool:
    gone = [occupant for occupant in case.occupants if occupant.standing in standings]
    if case.full_house and not gone:
        return False
    freed = sum(occupant.resident.attributed_bytes for occupant in gone)
    return case.missing_bytes_without_reservations() <= freed


# Rulings.


def _reject(reason: Reason, figures: Figures) -> Ruling:
    return Ruling(Verdict.REJECT_CAPACITY, Refusal(reason, figures))


def _queue(pair: Pair, reason: Reason, figures: Figures) -> Ruling:
    """To queue, unless it would be late even if it began at once, or too many come first."""
    ahead, limit = pair.question.queued_ahead, pair.deployment.queue_limit
    late = _too_late_after(pair, 0)
    if late is not None:
        return late
    if ahead >= limit:
        return _reject(Reason.QUEUE_FULL, {"queued_ahead": ahead, "queue_limit": limit})
    return Ruling(Verdict.QUEUE, Refusal(reason, figures))


def _too_late_after(pair: Pair, evicting_ms: int) -> Ruling | None:
    """11. A refusal when evictions and start end after the deadline."""
    deadline = pair.question.request.deadline
    takes = pair.start_micros + milliseconds(evicting_ms)
    return _too_late(pair, takes) if deadline is not None and pair.view.now + takes > deadline else None


def _too_late(pair: Pair, takes_micros: int) -> Ruling:
    deadline = pair.question.request.deadline or 0
    figures = {
        "takes_ms": -(-takes_micros // MICROS_PER_MS),
        "left_ms": max(0, (deadline - pair.view.now) // MICROS_PER_MS),
    }
    return _reject(Reason.DEADLINE_CANNOT_BE_MET, figures)


def _eviction_budget_ms(pair: Pair) -> int | None:
    """What evictions may take in all, so that the start still meets the deadline. May be negative."""
    deadline = pair.question.request.deadline
    if deadline is None:
        return None
    return (deadline - pair.view.now - pair.start_micros) // MICROS_PER_MS


def _pressure_figures(pair: Pair) -> Figures:
    return {
        "pressure": pair.pressure.value,
        "unmanaged_external_bytes": pair.accounting.unmanaged_external_bytes,
    }


def _room_figures(case: Case) -> Figures:
    accounting = case.pair.accounting
    return {
        "requirement_bytes": case.pair.requirement_bytes,
        "needed_bytes": case.needed_bytes,
        "schedulable_bytes": accounting.schedulable_bytes,
        "full_bytes": max(0, accounting.full_bytes),
    }


def _occupant_figures(occupant: Occupant) -> Figures:
    return {
        "resident_id": occupant.resident.resident_id,
        "deployment_id": occupant.deployment.deployment_id,
    }


def _protection_figures(occupants: Sequence[Occupant]) -> Figures:
    """How many are protected, and until when the last of them is."""
    until = max(occupant.protected_until or 0 for occupant in occupants)
    return {"protected": len(occupants), "until": format_instant(until)}
