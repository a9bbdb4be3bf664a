"""What may be evicted for a request, and the optimal set of evictions (semantics.md 6.4)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from .accounting import reservations
from .covering import Choice, cheapest
from .policy import Policy, Priority
from .state import Deployment, Lease, ResidencyPolicy, Resident, ResidentState
from .units import AcceleratorId, DeploymentId, LeaseId, ResidentId, milliseconds
from .view import View


class Standing(StrEnum):
    """What a resident is to a request, the easiest to remove first."""

    EVICTABLE = "evictable"
    DRAINABLE = "drainable"
    PROTECTED = "protected"
    NEVER = "never"


class Action(StrEnum):
    """How memory is freed. `sleep` comes before `unload` in the order of item 5, as it does in the alphabet."""

    SLEEP = "sleep"
    UNLOAD = "unload"


@dataclass(frozen=True, slots=True)
class Occupant:
    """A resident as a request finds it: what it holds here and what it is to this request."""

    resident: Resident
    deployment: Deployment
    leases: tuple[Lease, ...]
    future_bytes: int
    standing: Standing
    #: The instant at which the last of its protections ends; only for one that is PROTECTED.
    protected_until: int | None


@dataclass(frozen=True, slots=True)
class Eviction:
    """One resident unloaded, or put to sleep."""

    resident_id: ResidentId
    deployment_id: DeploymentId
    action: Action
    freed_bytes: int
    #: The part of its reservation that ends with it, on top of what it frees.
    released_bytes: int
    price_ms: int
    duration_ms: int
    preempts: tuple[LeaseId, ...]
    #: What the order among sets looks at: classes of the preempted leases, class of the deployment, last use.
    preempted: tuple[Priority, ...]
    priority: Priority
    last_used_at: int

    @property
    def gain_bytes(self) -> int:
        """By how much `schedulable` grows (before it is cut off at 0)."""
        return self.freed_bytes + self.released_bytes


@dataclass(frozen=True, slots=True)
class EvictionSet:
    """Evictions in order of `resident_id`, with their place in the order of 6.4, items 1 to 4."""

    evictions: tuple[Eviction, ...]
    order: tuple[int, ...]

    @property
    def gain_bytes(self) -> int:
        return sum(eviction.gain_bytes for eviction in self.evictions)

    @property
    def duration_ms(self) -> int:
        """One after the other."""
        return sum(eviction.duration_ms for eviction in self.evictions)


def occupants_of(
    view: View, accelerator_id: AcceleratorId, deployment_id: DeploymentId, priority: Priority
) -> tuple[Occupant, ...]:
    """Every resident here of another deployment, and the deployment's own FAILED one, by `resident_id`."""
    held = reservations(view, accelerator_id)
    found: list[Occupant] = []
    for resident in view.residents_at.get(accelerator_id, ()):
        if resident.deployment_id == deployment_id and resident.state is not ResidentState.FAILED:
            continue
        deployment = view.deployments[resident.deployment_id]
        leases = view.active_leases(accelerator_id, resident.deployment_id)
        reservation = held.get(resident.deployment_id)
        standing, until = standing_of(view, priority, resident, deployment, leases)
        future = reservation.future_bytes if reservation is not None else 0
        found.append(Occupant(resident, deployment, leases, future, standing, until))
    return tuple(found)


def standing_of(
    view: View, priority: Priority, resident: Resident, deployment: Deployment, leases: tuple[Lease, ...]
) -> tuple[Standing, int | None]:
    """The first of the eight cases of 6.4 that applies, and for a protected one the end of its protection."""
    # 1
    if resident.state is ResidentState.FAILED:
        return Standing.EVICTABLE, None
    # 2
    if deployment.residency.policy is ResidencyPolicy.ALWAYS_WARM:
        return Standing.NEVER, None
    # 3, 4
    until = protected_until(view.policy, priority, resident, deployment)
    if view.now < until:
        return Standing.PROTECTED, until
    # 5
    if resident.state in _MOVING or (not leases and resident.running_requests > 0):
        return Standing.DRAINABLE, None
    # 6, 7, 8
    if not leases or (deployment.interruptible and _may_preempt(view.policy, priority, leases)):
        return Standing.EVICTABLE, None
    return Standing.DRAINABLE, None


_MOVING: Final = frozenset((ResidentState.LOADING, ResidentState.DRAINING, ResidentState.UNLOADING))


def protected_until(policy: Policy, priority: Priority, resident: Resident, deployment: Deployment) -> int:
    """The instant before which a resident is protected from a class, by rules 3 and 4; 0 for not at all."""
    until = 0
    # 3: its deployment is more important, and was used not long ago.
    if resident.protected_until is not None and deployment.priority.outranks(priority):
        until = resident.protected_until
    # 4: its load has not paid off yet. Without this, two models would evict each other for ever.
    served = resident.leased_priority if resident.leased_priority is not None else deployment.priority
    if not priority.outranks(served):
        until = max(until, resident.loaded_at + milliseconds(minimal_residency_ms(policy, resident.start_ms)))
    return until


def minimal_residency_ms(policy: Policy, start_ms: int) -> int:
    """How long a resident may stay whose last start took `start_ms` (6.4, rule 4)."""
    paid_off = min(policy.min_residency_loads * start_ms, start_ms + policy.min_residency_cap_seconds * 1000)
    return max(policy.min_residency_seconds * 1000, paid_off)


def _may_preempt(policy: Policy, priority: Priority, leases: tuple[Lease, ...]) -> bool:
    return all(priority.outranks(lease.priority) and lease.preemptions < policy.max_preemptions for lease in leases)


def unload(occupant: Occupant) -> Eviction:
    """Unload an evictable resident, preempting its leases."""
    return _unload(occupant, occupant.leases)


def unload_when_drained(occupant: Occupant) -> Eviction:
    """Unload a resident that is waited for, preempting nothing (6.5, `waiting_for`)."""
    return _unload(occupant, ())


def _unload(occupant: Occupant, preempted: tuple[Lease, ...]) -> Eviction:
    return Eviction(
        resident_id=occupant.resident.resident_id,
        deployment_id=occupant.resident.deployment_id,
        action=Action.UNLOAD,
        freed_bytes=occupant.resident.attributed_bytes,
        released_bytes=occupant.future_bytes,
        price_ms=_price_of_unload_ms(occupant),
        duration_ms=occupant.deployment.unload_ms,
        preempts=tuple(lease.lease_id for lease in preempted),
        preempted=tuple(lease.priority for lease in preempted),
        priority=occupant.deployment.priority,
        last_used_at=occupant.resident.last_used_at,
    )


def _price_of_unload_ms(occupant: Occupant) -> int:
    """What an unload adds to the time of serving that model again."""
    load_ms = occupant.deployment.load_ms
    match occupant.resident.state:
        case ResidentState.READY | ResidentState.LOADING:
            return load_ms
        case ResidentState.SLEEPING:
            return max(0, load_ms - wake_ms_of(occupant.deployment))
        case ResidentState.DRAINING | ResidentState.UNLOADING | ResidentState.FAILED:
            # It is leaving, or of no use, whatever is decided here.
            return 0


def wake_ms_of(deployment: Deployment) -> int:
    """What a wake takes. One that sleeps although its deployment no longer can is as good as not there."""
    return deployment.sleep.wake_ms if deployment.sleep is not None else deployment.load_ms


def put_to_sleep(occupant: Occupant) -> Eviction | None:
    """Put a resident to sleep, where that is possible and frees anything."""
    sleep = occupant.deployment.sleep
    resident = occupant.resident
    if sleep is None or occupant.leases or resident.state is not ResidentState.READY:
        return None
    if sleep.asleep_bytes >= resident.attributed_bytes:
        return None
    return Eviction(
        resident_id=resident.resident_id,
        deployment_id=resident.deployment_id,
        action=Action.SLEEP,
        freed_bytes=resident.attributed_bytes - sleep.asleep_bytes,
        released_bytes=occupant.future_bytes,
        price_ms=sleep.wake_ms,
        duration_ms=sleep.sleep_ms,
        preempts=(),
        preempted=(),
        priority=occupant.deployment.priority,
        last_used_at=resident.last_used_at,
    )


def best_set(
    forced: Sequence[Eviction],
    optional: Sequence[Sequence[Eviction]],
    missing_bytes: int,
    budget_ms: int | None = None,
    *,
    with_unload: bool = False,
) -> EvictionSet | None:
    """The optimal set that gains `missing_bytes` within `budget_ms`, all of `forced` in it; None if there is none.

    Each element of `optional` holds the ways to evict one resident, in order of `resident_id`. `with_unload`: only
    sets with at least one unload count.
    """
    if with_unload and all(eviction.action is not Action.UNLOAD for eviction in forced):
        return _best_set_with_unload(forced, optional, missing_bytes, budget_ms)
    missing_bytes -= sum(eviction.gain_bytes for eviction in forced)
    if budget_ms is not None:
        budget_ms -= sum(eviction.duration_ms for eviction in forced)
        if budget_ms < 0:
            return None
    chosen: Sequence[Eviction] | None = ()
    if missing_bytes > 0:
        oldest = max((eviction.last_used_at for eviction in forced), default=0)
        chosen = _best_choice(optional, missing_bytes, budget_ms, oldest)
    return set_of((*forced, *chosen)) if chosen is not None else None


def _best_set_with_unload(
    forced: Sequence[Eviction],
    optional: Sequence[Sequence[Eviction]],
    missing_bytes: int,
    budget_ms: int | None,
) -> EvictionSet | None:
    """As `best_set`, where nothing that is forced is an unload."""
    # Mostly the best set has an unload anyway: then it is the best of those that do.
    unbound = best_set(forced, optional, missing_bytes, budget_ms)
    if unbound is None or any(eviction.action is Action.UNLOAD for eviction in unbound.evictions):
        return unbound
    found: list[EvictionSet] = []
    for at, ways in enumerate(optional):
        others = [*optional[:at], *optional[at + 1 :]]
        for way in ways:
            if way.action is Action.UNLOAD:
                best = best_set((*forced, way), others, missing_bytes, budget_ms)
                found += [best] if best is not None else []
    return min(found, key=_whole_order, default=None)


def _whole_order(evictions: EvictionSet) -> tuple[tuple[int, ...], list[tuple[str, str]]]:
    """Items 1 to 5 of the order of 6.4."""
    listed = [(eviction.resident_id, eviction.action.value) for eviction in evictions.evictions]
    return (evictions.order, listed)


def set_of(evictions: Sequence[Eviction]) -> EvictionSet:
    """A set of evictions and its place in the order of 6.4."""
    by_class = [0] * (2 * len(Priority))
    for eviction in evictions:
        for priority in eviction.preempted:
            by_class[2 * priority.rank] += 1
        by_class[2 * eviction.priority.rank + 1] += eviction.price_ms
    newest = max((eviction.last_used_at for eviction in evictions), default=0)
    freed = sum(eviction.freed_bytes for eviction in evictions)
    ordered = sorted(evictions, key=lambda eviction: eviction.resident_id)
    return EvictionSet(tuple(ordered), (*by_class, newest, freed, len(ordered)))


#: Every figure of the order gets a field of this many bits of one integer, so that integers compare as the order
#: does and add up field by field. Wide enough for the sum of any number of bytes or milliseconds in a document.
_FIELD_BITS: Final = 96


def _best_choice(
    optional: Sequence[Sequence[Eviction]], missing_bytes: int, budget_ms: int | None, oldest: int
) -> list[Eviction] | None:
    """The optimal choice among the ways to evict, for a gain that is positive; item by item of the order of 6.4.

    Items 1, 3, 4 and 5 are sums and are minimised as such. Item 2 is a maximum: the sets that use nothing newer
    than some instant are those of fewer residents, so that instant is found by bisection.
    """
    # 1: class by class, the leases preempted and the prices.
    costs = [[_class_cost(way) for way in ways] for ways in optional]
    least = cheapest(_choices(optional, costs), missing_bytes, budget_ms)
    if least is None:
        return None

    # 2: the newest last use, where it is newer than what is forced.
    def suffices(newest: int) -> bool:
        kept = [at for at, ways in enumerate(optional) if ways[0].last_used_at <= newest]
        choices = _choices([optional[at] for at in kept], [costs[at] for at in kept])
        return cheapest(choices, missing_bytes, budget_ms, least) == least

    instants = sorted({max(oldest, way.last_used_at) for ways in optional for way in ways})
    # The last instant excludes nothing, so it suffices without asking.
    newest = instants[bisect_left(instants, True, hi=len(instants) - 1, key=suffices)]
    # 3, 4, 5: the bytes freed, the number, the list.
    kept = [ways for ways in optional if ways[0].last_used_at <= newest]
    costs = [[_whole_cost(way, at, len(kept)) for way in ways] for at, ways in enumerate(kept)]
    ceiling = (least + 1) << (2 * _FIELD_BITS + 2 * len(kept))
    total = cheapest(_choices(kept, costs), missing_bytes, budget_ms, ceiling)
    return _decode(kept, total) if total is not None else None


def _choices(optional: Sequence[Sequence[Eviction]], costs: Sequence[Sequence[int]]) -> list[list[Choice]]:
    return [
        [(cost, way.gain_bytes, way.duration_ms) for way, cost in zip(ways, row, strict=True)]
        for ways, row in zip(optional, costs, strict=True)
    ]


def _class_cost(way: Eviction) -> int:
    """Item 1 as one integer: of each class, the most important first, leases, then price."""
    last = 2 * len(Priority) - 1
    cost = way.price_ms << (_FIELD_BITS * (last - 2 * way.priority.rank - 1))
    for priority in way.preempted:
        cost += 1 << (_FIELD_BITS * (last - 2 * priority.rank))
    return cost


def _whole_cost(way: Eviction, at: int, count: int) -> int:
    """Items 1, 3, 4 and 5 as one integer; the resident is the one at `at` of `count`.

    Of lists of one length the least is the one that takes the first resident possible, and takes it by `sleep`: a
    digit to the base of 4 for each resident, the first in the highest place, the greater the better.
    """
    additive = ((_class_cost(way) << _FIELD_BITS | way.freed_bytes) << _FIELD_BITS | 1) << (2 * count)
    return additive - (_DIGITS[way.action] << _place(at, count))


_DIGITS: Final = {Action.SLEEP: 2, Action.UNLOAD: 1}


def _place(at: int, count: int) -> int:
    return 2 * (count - 1 - at)


def _decode(optional: Sequence[Sequence[Eviction]], total: int) -> list[Eviction]:
    """The ways whose whole costs add up to `total`: its lowest digits say which."""
    digits = -total
    return [
        way
        for at, ways in enumerate(optional)
        for way in ways
        if digits >> _place(at, len(optional)) & 3 == _DIGITS[way.action]
    ]
