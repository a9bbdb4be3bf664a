"""What somebody who waits is told: its place, and about how long it will be. No decision depends on these.

Durations are those that were measured (loads, unloads), and of work what requests of that capability took lately.
"""

from __future__ import annotations

from .aggregates.accelerator import AcceleratorState
from .aggregates.deployment import DeploymentState, planned
from .aggregates.request import RequestState
from .queue import waiting
from .reasons import Reason
from .state import ResidentState, WaitingFor
from .units import MICROS_PER_MS, ceil_div
from .world import World


def place_of(world: World, request_id: str) -> int | None:
    """Its place in the claim order among all who wait, from 1; None for one that does not wait (semantics.md 5)."""
    ids = [request.question.request_id for request in waiting(world)]
    return ids.index(request_id) + 1 if request_id in ids else None


def estimated_wait_ms(world: World, request_id: str, now: int) -> int | None:
    """About how long until its work may begin; None where nothing is known of what it waits for.

    What it waits for itself, then everybody before it at the same place, then its own start.
    """
    request = world.requests.get(request_id)
    if request is None or request.waiting_for is None:
        return None
    waits_for = request.waiting_for
    state = world.accelerators.get(waits_for.accelerator_id)
    deployment = world.deployments.get(waits_for.deployment_id)
    if state is None or deployment is None:
        return None
    turns = ceil_div(_before(world, request, waits_for), deployment.spec.concurrency)
    if waits_for.reason in (Reason.CONCURRENCY_LIMIT, Reason.DRAINING_FOR_WAITER):
        turns += 1
    work_ms = _work_ms(world, waits_for.deployment_id)
    left_ms = _until_gone_ms(world, state, waits_for, now)
    if left_ms is None or (turns > 0 and work_ms is None):
        return None
    patience_ms = 0 if waits_for.not_before is None else max(0, waits_for.not_before - now) // MICROS_PER_MS
    start_ms = _start_ms(state, deployment, now)
    return max(patience_ms, left_ms) + turns * (work_ms or 0) + start_ms


def _start_ms(state: AcceleratorState, deployment: DeploymentState, now: int) -> int:
    """What its start still takes: nothing where it is there, what is left of a load, a wake, or a load."""
    record, model = state.resident_of(deployment.spec.deployment_id), planned(deployment, ())
    if record is None:
        return model.load_ms
    match record.resident.state:
        case ResidentState.READY:
            return 0
        case ResidentState.LOADING:
            gone_ms = max(0, now - record.resident.loaded_at) // MICROS_PER_MS
            return max(0, record.resident.start_ms - gone_ms)
        case ResidentState.SLEEPING:
            return model.load_ms if model.sleep is None else model.sleep.wake_ms
        case _:
            return model.load_ms


def _before(world: World, request: RequestState, waits_for: WaitingFor) -> int:
    """How many who wait for the same place come first."""
    place = (waits_for.accelerator_id, waits_for.deployment_id)
    return sum(
        1
        for other in waiting(world)
        if other.question.claim < request.question.claim
        and other.waiting_for is not None
        and (other.waiting_for.accelerator_id, other.waiting_for.deployment_id) == place
    )


def _until_gone_ms(world: World, state: AcceleratorState, waits_for: WaitingFor, now: int) -> int | None:
    """How long until the residents that it waits for are gone, one after the other."""
    total_ms = 0
    for resident_id in waits_for.resident_ids:
        record = state.residents.get(resident_id)
        if record is None or record.resident.deployment_id == waits_for.deployment_id:
            continue
        deployment_id = record.resident.deployment_id
        deployment = world.deployments.get(deployment_id)
        unload_ms = 0 if deployment is None else planned(deployment, ()).unload_ms
        if record.eviction is not None:
            gone_ms = max(0, now - record.eviction.started_at) // MICROS_PER_MS
            total_ms += max(0, unload_ms - gone_ms)
            continue
        work_ms = _work_ms(world, deployment_id) if state.leases_on(resident_id) else 0
        if work_ms is None:
            return None
        total_ms += work_ms + unload_ms
    return total_ms


def _work_ms(world: World, deployment_id: str) -> int | None:
    deployment = world.deployments.get(deployment_id)
    return None if deployment is None else world.work_ms.get(deployment.spec.capability)
