"""Who is planned next: the claim order, and when one who waits is worth planning again (semantics.md 5, 6.5, 7)."""

from __future__ import annotations

from dataclasses import dataclass

from .aggregates.accelerator import AcceleratorState
from .aggregates.request import Phase, RequestState
from .units import seconds
from .world import World


@dataclass(frozen=True, slots=True)
class Planned:
    """When a request was last planned in vain: at which revision of the queue, and when time alone may help it."""

    queue_revision: int
    next_at: int | None


def waiting(world: World) -> tuple[RequestState, ...]:
    """Requests without a lease, in claim order."""
    open_requests = [r for r in world.requests.values() if r.phase is not Phase.GRANTED]
    return tuple(sorted(open_requests, key=lambda request: request.question.claim))


def is_due(world: World, request: RequestState, planned: Planned | None, now: int) -> bool:
    """Whether planning it again could say something new."""
    if request.phase is Phase.PENDING or planned is None:
        return True
    if planned.queue_revision != world.queue_revision:
        return True
    return planned.next_at is not None and planned.next_at <= now


def next_change(request: RequestState) -> int | None:
    """The instant at which time alone may help it: the end of a protection or back-off, or its own deadline."""
    deadline = request.question.deadline
    not_before = None if request.waiting_for is None else request.waiting_for.not_before
    # A deadline has passed when it lies before `now` (6.3, rule 1).
    instants = [instant for instant in (not_before, None if deadline is None else deadline + 1) if instant is not None]
    return min(instants, default=None)


def is_profiling(world: World) -> bool:
    """Whether an envelope is being measured: whoever comes waits until that has made way."""
    return any(state.profiling is not None for state in world.accelerators.values())


def is_held(world: World, now: int) -> bool:
    """Whether the queue waits for a sample: work has ended and no sample since shows what it left (semantics.md 7).

    Bounded: telemetry that does not come is UNKNOWN soon, and the planner says so. It waits for a measurement, too.
    """
    return is_profiling(world) or any(_owes_sample(world, state, now) for state in world.accelerators.values())


def wants_sample(world: World) -> int | None:
    """The instant after which somebody who waits wants a sample, or None."""
    if all(request.phase is Phase.GRANTED for request in world.requests.values()):
        return None
    owed = [s.released_at for s in world.accelerators.values() if s.released_at is not None and _is_behind(s)]
    return max(owed, default=None)


def _owes_sample(world: World, state: AcceleratorState, now: int) -> bool:
    if state.released_at is None or not _is_behind(state):
        return False
    return now <= state.released_at + seconds(world.policy.telemetry_max_age_seconds)


def _is_behind(state: AcceleratorState) -> bool:
    # A sample that could not be taken, or used, is not waited for: one bad card must not hold the work of the others.
    if state.retired or state.missed is not None or state.invalid is not None or state.released_at is None:
        return False
    return state.sample is None or state.sample.observed_at <= state.released_at
