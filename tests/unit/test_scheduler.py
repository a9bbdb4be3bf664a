"""The life of a request, one scenario a test, in virtual time (semantics.md 5 to 8)."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from gpuledger.adapters.ledger.memory import MemoryLedger
from gpuledger.domain.events import (
    EvictionStarted,
    FailureRecorded,
    LeaseExpired,
    LeaseGranted,
    LeasePreempted,
    LeaseReleased,
    LeaseRoomConfirmed,
    MemoryNotReclaimed,
    PlanDecided,
    RequestCancelled,
    RequestCompleted,
    RequestFailed,
    RequestQueued,
    RequestRetried,
    ResidentDrainStarted,
    ResidentEvicted,
    ResidentFailed,
    ResidentLoadStarted,
    SchedulerStarted,
    SchedulerStopped,
)
from gpuledger.domain.failures import Failure
from gpuledger.domain.messages import WorkEnded
from gpuledger.domain.policy import Policy, Priority
from gpuledger.domain.ports import NodeReading, TelemetryFault
from gpuledger.domain.reasons import Reason, Verdict
from gpuledger.domain.sampling import SampleTaken
from gpuledger.domain.state import Health, Residency, ResidencyPolicy, ResidentState
from gpuledger.domain.units import GIB, MICROS_PER_MS, seconds
from gpuledger.domain.world import World, fold
from tests.simulation.virtual_shell import NODE, Card, Model, Outcome, VirtualShell

_T = TypeVar("_T")
SMALL = Model("small", 1 * GIB, 2 * GIB, load_ms=2000)
LARGE = Model("large", 12 * GIB, 14 * GIB, load_ms=8000)


def started(*models: Model, card: int = 24 * GIB, policy: Policy | None = None) -> VirtualShell:
    shell = VirtualShell(MemoryLedger(), models, (Card("GPU-0", card),), policy=policy or Policy())
    shell.start()
    return shell


def events_of(shell: VirtualShell, kind: type[_T]) -> list[_T]:
    return [event.data for event in shell.recorded if isinstance(event.data, kind)]


def completed(outcome: Outcome) -> bool:
    return isinstance(outcome.event, RequestCompleted)


def failed(outcome: Outcome) -> RequestFailed:
    assert isinstance(outcome.event, RequestFailed)
    return outcome.event


# ---- the ordinary way -------------------------------------------------------------------------------------------


def test_a_cold_request_is_granted_checked_loaded_served_and_its_model_kept() -> None:
    shell = started(SMALL)
    outcome = shell.ask("r1", "small@1")
    shell.run_for(20)
    assert completed(outcome)
    kinds = [type(e.data).__name__ for e in shell.recorded if type(e.data).__name__ != "TelemetrySampled"]
    life = kinds[kinds.index("RequestReceived") :]
    assert life == [
        "RequestReceived",
        "PlanDecided",
        "LeaseGranted",
        "ResidentLoadStarted",
        "ResidentProcessStarted",
        "ResidencyMaterialized",
        "ResidentReady",
        "LeaseReleased",
        "RequestCompleted",
    ]
    ((_, record),) = shell.world.residents()
    assert record.resident.state is ResidentState.READY


def test_a_load_starts_only_on_a_sample_from_after_its_grant() -> None:
    shell = started(SMALL)
    before = shell.world.accelerators["GPU-0"].sample
    shell.ask("r1", "small@1")
    assert not events_of(shell, ResidentLoadStarted)
    shell.run_for(1)
    assert events_of(shell, ResidentLoadStarted)
    after = shell.world.accelerators["GPU-0"].sample
    assert before is not None
    assert after is not None
    assert after.observed_at >= events_of(shell, LeaseGranted)[0].granted_at


def test_a_warm_request_right_after_another_is_one_batch_before_it_is_forwarded() -> None:
    shell = started(SMALL)
    shell.ask("r1", "small@1")
    while not completed(shell.outcomes["r1"]):
        shell.run_until(shell.now + MICROS_PER_MS)
    seq = shell.ledger.head()
    outcome = shell.ask("r2", "small@1")
    assert outcome.began_at == outcome.asked_at
    appended = [type(event.data).__name__ for event in shell.ledger.read(seq)]
    assert appended == ["RequestReceived", "PlanDecided", "LeaseGranted"]
    assert len({event.at for event in shell.ledger.read(seq)}) == 1


def test_a_warm_request_after_a_pause_needs_room_shown_by_a_fresh_sample() -> None:
    shell = started(SMALL)
    shell.ask("r1", "small@1")
    shell.run_for(60)
    outcome = shell.ask("r2", "small@1")
    assert outcome.began_at is None
    shell.run_for(5)
    assert completed(outcome)
    assert [e.lease_id for e in events_of(shell, LeaseRoomConfirmed)] == ["lease-r2-1"]


def test_keep_warm_lets_go_after_its_time_and_not_before() -> None:
    shell = started(replace(SMALL, residency=Residency(ResidencyPolicy.KEEP_WARM, 100)))
    shell.ask("r1", "small@1")
    shell.run_for(10)
    end = events_of(shell, LeaseReleased)[0].released_at
    shell.run_until(end + seconds(99))
    assert not events_of(shell, EvictionStarted)
    shell.run_until(end + seconds(105))
    assert [e.cause for e in events_of(shell, EvictionStarted)] == ["ttl"]
    assert not list(shell.world.residents())


def test_load_on_demand_lets_go_at_once() -> None:
    shell = started(replace(SMALL, residency=Residency(ResidencyPolicy.LOAD_ON_DEMAND, 0)))
    shell.ask("r1", "small@1")
    shell.run_for(20)
    assert [e.cause for e in events_of(shell, EvictionStarted)] == ["on_demand"]
    assert not list(shell.world.residents())


def test_always_warm_is_loaded_at_the_start_and_again_after_a_crash() -> None:
    shell = started(replace(SMALL, residency=Residency(ResidencyPolicy.ALWAYS_WARM, 0)))
    shell.run_for(30)
    ((_, record),) = shell.world.residents()
    assert record.resident.state is ResidentState.READY
    assert not list(shell.world.leases())
    shell.crash_runtime(record.resident.resident_id)
    shell.run_for(120)
    ((_, again),) = shell.world.residents()
    assert again.resident.resident_id != record.resident.resident_id
    assert again.resident.state is ResidentState.READY


# ---- the queue --------------------------------------------------------------------------------------------------


def test_interactive_requests_do_not_wait_behind_queued_background_ones() -> None:
    shell = started(replace(SMALL, queue_limit=64))
    shell.work_ms = lambda _: 900
    references = [f"bg{n:02}" for n in range(40)]

    def index(n: int) -> None:
        if n < len(references):
            shell.ask(references[n], "small@1", Priority.BACKGROUND)

    for n in range(40):  # four at a time, as a client with four workers would
        shell.at(shell.now + seconds(n // 4 * 4), lambda n=n: index(n))  # type: ignore[misc]
    for n in range(10):
        shell.ask_at(shell.now + seconds(5 + 3 * n) + n, f"in{n}", "small@1", Priority.INTERACTIVE)
    shell.run_for(600)
    assert all(completed(outcome) for outcome in shell.outcomes.values())
    granted = {e.request_id: e.granted_at for e in events_of(shell, LeaseGranted)}
    for name, outcome in shell.outcomes.items():
        if outcome.priority is Priority.INTERACTIVE:
            overtaken = [
                other
                for other in references
                if shell.outcomes[other].asked_at < granted[name] and outcome.asked_at < granted[other] < granted[name]
            ]
            assert not overtaken, f"{name} waited behind {overtaken}"


def test_the_last_in_the_claim_order_is_refused_when_a_more_important_one_comes() -> None:
    shell = started(replace(SMALL, queue_limit=2))
    shell.work_ms = lambda _: 60_000
    shell.ask("running", "small@1")
    shell.run_for(5)
    first = shell.ask("first", "small@1", Priority.BACKGROUND)
    last = shell.ask("last", "small@1", Priority.BACKGROUND)
    shell.ask("important", "small@1", Priority.PRODUCTION)
    assert failed(last).reason is Reason.QUEUE_FULL
    assert first.event is None
    assert [q.request_id for q in shell.world.queue()] == ["important", "first"]


def test_a_queued_request_waits_max_queue_seconds_and_is_told_for_what() -> None:
    shell = started(SMALL)
    shell.work_ms = lambda _: 300_000
    shell.ask("running", "small@1")
    shell.run_for(5)
    outcome = shell.ask("waiting", "small@1")
    shell.run_for(59)
    assert outcome.event is None
    shell.run_for(2)
    assert failed(outcome).reason is Reason.CONCURRENCY_LIMIT
    assert failed(outcome).detail == "max_queue_seconds"


def test_a_deadline_that_passes_in_the_queue_is_a_plan_with_figures() -> None:
    shell = started(SMALL)
    shell.work_ms = lambda _: 300_000
    shell.ask("running", "small@1")
    shell.run_for(5)
    outcome = shell.ask("waiting", "small@1", deadline=shell.now + seconds(7))
    shell.run_for(8)
    assert failed(outcome).reason is Reason.DEADLINE_CANNOT_BE_MET
    assert events_of(shell, PlanDecided)[-1].verdict is Verdict.REJECT_CAPACITY


def test_who_waits_is_planned_again_only_when_something_changed() -> None:
    shell = started(SMALL)
    shell.work_ms = lambda _: 50_000
    shell.ask("running", "small@1")
    shell.run_for(5)
    shell.ask("waiting", "small@1")
    shell.run_for(40)
    assert len([e for e in events_of(shell, RequestQueued) if e.request_id == "waiting"]) == 1
    shell.run_for(60)
    assert completed(shell.outcomes["waiting"])


def test_after_work_ended_the_queue_is_planned_on_a_sample_from_after_it() -> None:
    shell = started(SMALL)
    shell.ask("running", "small@1")
    shell.ask("waiting", "small@1")
    shell.run_for(20)
    released = events_of(shell, LeaseReleased)[0].released_at
    granted = next(e for e in events_of(shell, LeaseGranted) if e.request_id == "waiting")
    plan = next(e for e in reversed(events_of(shell, PlanDecided)) if e.request_id == "waiting")
    world = fold(World(), shell.ledger.read(0, plan.as_of))
    sample = world.accelerators["GPU-0"].sample
    assert sample is not None
    assert sample.observed_at >= released
    assert granted.granted_at >= released


def test_a_client_that_leaves_the_queue_holds_nothing() -> None:
    shell = started(SMALL)
    shell.work_ms = lambda _: 30_000
    shell.ask("running", "small@1")
    shell.run_for(5)
    outcome = shell.ask("waiting", "small@1")
    shell.leave("waiting")
    assert isinstance(outcome.event, RequestCancelled)
    assert not shell.world.queue()


def test_a_client_that_leaves_before_the_load_began_undoes_it() -> None:
    shell = started(SMALL)
    shell.ask("r1", "small@1")
    shell.leave("r1")
    assert not list(shell.world.residents())
    assert not list(shell.world.leases())
    assert not shell.processes


# ---- evictions --------------------------------------------------------------------------------------------------


def other(model: Model) -> Model:
    return replace(model, deployment_id="other")


def test_a_load_waits_until_its_victim_is_shown_gone_by_two_samples() -> None:
    shell = started(LARGE, other(LARGE))
    shell.ask("r1", "large@1")
    shell.run_for(60)  # past the time that it must have been worth its load
    outcome = shell.ask("r2", "other@1")
    granted = shell.recorded[-1]
    assert any(isinstance(e.data, EvictionStarted) for e in shell.recorded)
    shell.run_for(60)
    assert completed(outcome)
    kinds = [type(e.data).__name__ for e in shell.recorded if e.seq >= granted.seq]
    evicted = kinds.index("ResidentEvicted")
    assert kinds[:evicted].count("TelemetrySampled") >= 2
    assert kinds.index("ResidentLoadStarted") > evicted


def test_memory_that_is_not_given_back_is_booked_as_external_and_the_waiter_planned_again() -> None:
    shell = started(LARGE, other(LARGE))
    shell.ask("r1", "large@1")
    shell.run_for(60)
    ((_, record),) = shell.world.residents()
    shell.processes[record.resident.resident_id].model = replace(LARGE, unload_ms=10_000_000)
    outcome = shell.ask("r2", "other@1")
    shell.run_for(80)
    assert [e.residual_bytes for e in events_of(shell, MemoryNotReclaimed)] == [12 * GIB]
    assert Failure.GPU_MEMORY_NOT_RECLAIMED in {e.failure for e in events_of(shell, FailureRecorded)}
    assert failed(outcome).reason is Reason.EXTERNAL_GPU_PRESSURE
    assert not list(shell.world.leases())


def test_room_that_was_taken_before_the_load_is_noticed_and_the_request_planned_again() -> None:
    shell = started(LARGE)
    outcome = shell.ask("r1", "large@1")
    shell.cards[0].external_bytes = 15 * GIB  # another program is faster
    shell.run_for(5)
    assert not events_of(shell, ResidentLoadStarted)
    assert [e.cause for e in events_of(shell, LeaseReleased)] == ["no_room"]
    assert failed(outcome).reason is Reason.EXTERNAL_GPU_PRESSURE


BATCH = replace(LARGE, deployment_id="batch", priority=Priority.BACKGROUND, interruptible=True)


def test_preempted_work_whose_answer_has_begun_is_refused_and_its_place_given_away() -> None:
    shell = started(BATCH, LARGE)
    shell.streams = lambda request_id: request_id == "bg"
    shell.work_ms = lambda request_id: 60_000 if request_id == "bg" else 200
    preempted = shell.ask("bg", "batch@1", Priority.BACKGROUND)
    shell.run_for(12)
    assert preempted.began_at is not None
    served = shell.ask("prod", "large@1", Priority.PRODUCTION)
    assert [e.requeued for e in events_of(shell, LeasePreempted)] == [True]
    shell.run_for(30)
    assert failed(preempted).reason is Reason.PREEMPTED
    assert completed(served)


def test_preempted_work_that_has_begun_unseen_begins_again() -> None:
    shell = started(BATCH, replace(LARGE, residency=Residency(ResidencyPolicy.KEEP_WARM, 5)))
    shell.work_ms = lambda request_id: 20_000 if request_id == "bg" else 200
    preempted = shell.ask("bg", "batch@1", Priority.BACKGROUND)
    shell.run_for(12)
    assert preempted.began_at is not None
    shell.ask("prod", "large@1", Priority.PRODUCTION)
    shell.run_for(200)
    assert len(events_of(shell, LeasePreempted)) == 1
    assert completed(preempted)


def test_preempted_work_that_has_not_begun_goes_back_to_its_place() -> None:
    shell = started(BATCH, LARGE)
    shell.ask("first", "batch@1", Priority.BACKGROUND)
    shell.run_for(60)
    waiting = shell.ask("bg", "batch@1", Priority.BACKGROUND)
    assert waiting.began_at is None, "it waits for a sample to show room"
    served = shell.ask("prod", "large@1", Priority.PRODUCTION)
    assert [e.requeued for e in events_of(shell, LeasePreempted)] == [True]
    (queued,) = shell.world.queue()
    assert (queued.request_id, queued.enqueued_at) == ("bg", waiting.asked_at)
    shell.run_for(30)
    assert completed(served)
    assert shell.world.requests["bg"].preemptions == 1


# ---- failures ---------------------------------------------------------------------------------------------------


def test_a_failed_load_backs_off_and_doubles() -> None:
    shell = started(SMALL)
    shell.fail_loads.add("small")
    first = shell.ask("r1", "small@1")
    shell.run_for(30)
    waits = [e.backoff_until - e.failed_at for e in events_of(shell, ResidentFailed) if e.backoff_until is not None]
    assert waits == [seconds(5), seconds(10)]
    assert [(e.attempt, e.limit) for e in events_of(shell, RequestRetried)] == [(1, 1)]
    assert failed(first).failure is Failure.MODEL_LOAD_FAILED
    recorded = [e.failure for e in events_of(shell, FailureRecorded)]
    assert recorded == [Failure.MODEL_LOAD_FAILED] * 2 + [Failure.CAPABILITY_UNAVAILABLE]
    shell.fail_loads.clear()
    third = shell.ask("r3", "small@1")
    shell.run_for(20)
    assert completed(third)
    assert not shell.world.accelerators["GPU-0"].backoff


def test_a_crash_ends_the_leases_on_it_and_nothing_else() -> None:
    shell = started(SMALL, other(SMALL))
    shell.work_ms = lambda _: 20_000
    crashed = shell.ask("r1", "small@1")
    unharmed = shell.ask("r2", "other@1")
    shell.run_for(10)
    victim = next(r.resident.resident_id for _, r in shell.world.residents() if r.resident.deployment_id == "small")
    shell.crash_runtime(victim)
    shell.run_for(15)
    assert [e.failure for e in events_of(shell, RequestRetried)] == [Failure.RUNTIME_CRASH]
    assert completed(unharmed)
    shell.run_for(30)
    assert completed(crashed), "it was tried again on a new process"


def test_a_lease_that_nobody_renews_runs_out_and_its_resident_is_drained() -> None:
    shell = started(SMALL)
    shell.work_ms = lambda _: 200_000
    outcome = shell.ask("r1", "small@1")
    shell.run_for(10)
    shell._hold = lambda: None  # type: ignore[method-assign]
    shell.run_for(75)
    assert failed(outcome).failure is Failure.LEASE_TIMEOUT
    assert len(events_of(shell, LeaseExpired)) == 1
    assert len(events_of(shell, ResidentDrainStarted)) == 1
    assert not [lease for _, lease in shell.world.leases() if lease.lease.expires_at <= shell.now]
    shell.run_for(120)
    assert [e.cause for e in events_of(shell, EvictionStarted)] == ["drained"]


def test_a_driver_error_leaves_nothing_known_and_recovery_is_noticed() -> None:
    shell = started(SMALL)
    fault = TelemetryFault("GPU-0", "NVML_GPU_LOST", Health.LOST)
    shell.feed(SampleTaken(NODE, NodeReading((), (fault,), None, 0), {}))
    assert shell.world.accelerators["GPU-0"].sample is None
    refused = shell.ask("r1", "small@1")
    assert failed(refused).reason is Reason.ACCELERATOR_UNHEALTHY
    shell.sample()
    assert shell.world.accelerators["GPU-0"].accelerator.health is Health.HEALTHY
    served = shell.ask("r2", "small@1")
    shell.run_for(20)
    assert completed(served)


def test_work_that_failed_is_a_failure_of_its_capability() -> None:
    shell = started(SMALL)
    shell.work_ms = lambda _: 10_000
    shell.ask("r1", "small@1")
    shell.run_for(5)
    broken = WorkEnded("r1", 503, 10, 0, None, None, Failure.INVALID_OUTPUT, "http_status_500", client_gone=False)
    shell.feed(broken)
    (recorded,) = events_of(shell, FailureRecorded)
    assert (recorded.failure, recorded.request_id) == (Failure.INVALID_OUTPUT, "r1")
    assert failed(shell.outcomes["r1"]).failure is Failure.INVALID_OUTPUT


def test_a_total_that_stays_changed_is_taken_up_within_seconds() -> None:
    shell = started(SMALL)
    shell.cards[0].total_bytes = 16 * GIB
    shell.sample()
    assert shell.world.accelerators["GPU-0"].accelerator.total_bytes == 24 * GIB
    shell.run_for(3)
    assert shell.world.accelerators["GPU-0"].accelerator.total_bytes == 16 * GIB
    served = shell.ask("r1", "small@1")
    shell.run_for(10)
    assert completed(served)


# ---- start and stop ---------------------------------------------------------------------------------------------


def test_a_shutdown_leaves_residency_and_leases_at_zero() -> None:
    shell = started(SMALL, LARGE)
    shell.work_ms = lambda _: 5_000
    shell.ask("r1", "small@1")
    shell.ask("r2", "large@1")
    shell.run_for(5)
    shell.shut_down()
    assert shell.stopped
    assert events_of(shell, SchedulerStopped)
    assert not list(shell.world.residents())
    assert not list(shell.world.leases())
    assert not shell.world.requests


def test_a_shutdown_refuses_new_work_and_cancels_what_does_not_end() -> None:
    shell = started(SMALL)
    shell.work_ms = lambda _: 10_000_000
    endless = shell.ask("r1", "small@1")
    shell.run_for(5)
    shell.at(shell.now + seconds(1), lambda: shell.ask("late", "small@1"))
    shell.shut_down()
    assert failed(shell.outcomes["late"]).reason is Reason.NODE_DRAINING
    assert isinstance(endless.event, RequestCancelled)
    assert shell.stopped


def test_after_a_crash_nothing_of_the_earlier_run_is_live() -> None:
    shell = started(SMALL)
    shell.work_ms = lambda _: 30_000
    shell.ask("r1", "small@1")
    shell.ask("r2", "small@1")
    shell.run_for(5)
    shell.crash()
    again = VirtualShell(shell.ledger, (SMALL,), (Card("GPU-0", 24 * GIB),), now=shell.now + seconds(1))
    again.start()
    assert not list(again.world.leases())
    started_at = next(n for n, e in enumerate(again.recorded) if isinstance(e.data, SchedulerStarted))
    before = fold(World(), again.ledger.read(0, again.recorded[started_at].seq))
    assert before.accelerators["GPU-0"].sample is None, "a new run has seen nothing yet"
    assert not again.world.requests
    again.run_for(10)
    assert not list(again.world.residents())
    assert len(events_of(again, ResidentEvicted)) == 1
    served = again.ask("r3", "small@1")
    again.run_for(20)
    assert completed(served)
