"""What goes wrong with a model on a card, one scenario a test, in virtual time (semantics.md 5, 7, 8)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuledger.adapters.ledger.memory import MemoryLedger
from gpuledger.domain.events import (
    ArtifactCorrupt,
    CapabilityDegraded,
    CapabilityRecovered,
    EnvelopeSuspected,
    EvictionStarted,
    FailureRecorded,
    LeaseGranted,
    LeaseReleased,
    PlanDecided,
    PressureChanged,
    RequestFellBack,
    RequestRetried,
    ResidentEvicted,
    ResidentLoadStarted,
    ResidentReady,
    ResidentSlept,
    ResidentWoken,
    ThrashingDetected,
)
from gpuledger.domain.failures import Failure
from gpuledger.domain.messages import (
    AcceptEnvelope,
    EnvelopeTaken,
    ProfilingBegins,
    ProfilingOver,
    RequestArrived,
    UnloadIdle,
    WorkEnded,
)
from gpuledger.domain.operations import problem_of
from gpuledger.domain.policy import Policy, Priority
from gpuledger.domain.reasons import Reason
from gpuledger.domain.state import Residency, ResidencyPolicy, ResidentState, Sleep
from gpuledger.domain.units import GIB, MIB, seconds
from tests.simulation.virtual_shell import Card, Model, VirtualShell
from tests.unit.test_scheduler import LARGE, SMALL, completed, events_of, failed, other, started

SLEEPER = replace(LARGE, deployment_id="sleeper", sleep=Sleep(1 * GIB, 500, 1000))


def states(shell: VirtualShell) -> dict[str, ResidentState]:
    return {record.resident.deployment_id: record.resident.state for _, record in shell.world.residents()}


# ---- sleep and wake ---------------------------------------------------------------------------------------------


def sleeping() -> VirtualShell:
    """The sleeper sleeps, and what it made room for is idle."""
    shell = started(SLEEPER, LARGE)
    shell.ask("r1", "sleeper@1")
    shell.run_for(60)
    made_room_for = shell.ask("r2", "large@1")
    shell.run_for(30)
    assert completed(made_room_for)
    return shell


def test_a_model_that_can_sleep_makes_room_by_sleeping_and_wakes_up() -> None:
    shell = sleeping()
    (slept,) = events_of(shell, ResidentSlept)
    assert (slept.freed_bytes, slept.left_bytes) == (11 * GIB, 1 * GIB)
    assert states(shell) == {"sleeper": ResidentState.SLEEPING, "large": ResidentState.READY}
    shell.run_for(60)
    again = shell.ask("r3", "sleeper@1")
    shell.run_for(30)
    assert completed(again)
    assert len(events_of(shell, ResidentWoken)) == 1
    assert len([e for e in events_of(shell, ResidentReady) if e.resident_id.startswith("sleeper")]) == 1, "not loaded"


def test_what_waits_for_a_sleep_does_not_load_before_the_device_shows_it() -> None:
    shell = started(SLEEPER, LARGE)
    shell.ask("r1", "sleeper@1")
    shell.run_for(60)
    shell.ask("r2", "large@1")
    shell.run_for(30)
    order = [type(e.data).__name__ for e in shell.recorded if isinstance(e.data, ResidentSlept | ResidentLoadStarted)]
    assert order == ["ResidentLoadStarted", "ResidentSlept", "ResidentLoadStarted"]


def test_a_sleep_that_frees_nothing_is_a_failure_and_becomes_an_unload() -> None:
    shell = started(SLEEPER, LARGE)
    shell.stubborn.add("sleeper")
    shell.ask("r1", "sleeper@1")
    shell.run_for(60)
    waiting = shell.ask("r2", "large@1")
    shell.run_for(120)
    assert not events_of(shell, ResidentSlept)
    assert [e.failure for e in events_of(shell, FailureRecorded)] == [Failure.GPU_MEMORY_NOT_RECLAIMED]
    of_sleeper = [e for e in events_of(shell, EvictionStarted) if e.deployment_id == "sleeper"]
    assert [(e.action, e.cause.value) for e in of_sleeper] == [
        ("sleep", "plan"),
        ("unload", "sleep_failed"),
    ]
    assert completed(waiting)


def test_a_wake_without_room_leaves_it_asleep() -> None:
    shell = sleeping()
    shell.run_for(60)
    (card,) = shell.cards
    waiting = shell.ask("r3", "sleeper@1")
    card.external_bytes = card.total_bytes - shell.held_on(card.accelerator_id)  # others are faster
    shell.run_for(5)
    assert not events_of(shell, ResidentWoken)
    assert waiting.event is None or failed(waiting).reason is not None
    assert states(shell)["sleeper"] is ResidentState.SLEEPING
    assert "no_room" in {e.cause.value for e in events_of(shell, LeaseReleased)}


def test_what_sleeps_is_unloaded_when_its_keep_warm_time_is_over() -> None:
    shell = started(replace(SLEEPER, residency=Residency(ResidencyPolicy.KEEP_WARM, 100)), LARGE)
    shell.ask("r1", "sleeper@1")
    shell.run_for(60)
    shell.ask("r2", "large@1")
    shell.run_for(20)
    assert states(shell)["sleeper"] is ResidentState.SLEEPING
    shell.run_for(100)
    assert "sleeper" not in states(shell)


def test_a_process_that_dies_asleep_is_gone_and_loaded_anew() -> None:
    shell = sleeping()
    victim = next(r.resident.resident_id for _, r in shell.world.residents() if r.resident.deployment_id == "sleeper")
    shell.crash_runtime(victim)
    shell.run_for(60)
    assert "sleeper" not in states(shell)
    again = shell.ask("r3", "sleeper@1")
    shell.run_for(60)
    assert completed(again)


def test_a_sleep_that_a_crash_of_the_scheduler_broke_off_is_an_unload_for_the_next_one() -> None:
    shell = started(replace(SLEEPER, sleep=Sleep(1 * GIB, 5000, 1000)), LARGE)
    shell.ask("r1", "sleeper@1")
    shell.run_for(60)
    shell.ask("r2", "large@1")
    shell.run_for(1)
    assert [e.action for e in events_of(shell, EvictionStarted)] == ["sleep"]
    shell.crash()
    again = VirtualShell(shell.ledger, shell.models, shell.cards, now=shell.now + 1)
    again.start()
    again.run_for(30)
    assert not list(again.world.residents())


# ---- starts that bear no neighbour ------------------------------------------------------------------------------


def test_a_runtime_that_starts_alone_waits_for_others_and_lets_nobody_stop_meanwhile() -> None:
    alone = replace(SMALL, deployment_id="alone", starts_alone=True, load_ms=8000)
    shell = started(alone, replace(SMALL, load_ms=6000), card=48 * GIB)
    shell.ask("r1", "small@1")
    shell.run_for(1)
    shell.ask("r2", "alone@1")
    shell.run_for(2)
    assert [e.resident_id.partition("@")[0] for e in events_of(shell, ResidentLoadStarted)] == ["small"]
    shell.run_for(30)
    ready = [e.ready_at for e in events_of(shell, ResidentReady)]
    loads = [e.loaded_at for e in events_of(shell, ResidentLoadStarted)]
    assert loads[1] >= ready[0], "one start after the other"


def test_an_eviction_that_waits_for_such_a_start_has_its_time_afterwards() -> None:
    alone = replace(SMALL, deployment_id="alone", starts_alone=True, load_ms=90_000)
    shell = started(alone, SMALL)
    shell.ask("r1", "small@1")
    shell.run_for(20)
    shell.ask("r2", "alone@1")
    shell.run_for(5)
    shell.feed(UnloadIdle("olga", "small"))
    shell.run_for(70)
    assert states(shell) == {"small": ResidentState.UNLOADING, "alone": ResidentState.LOADING}
    assert not events_of(shell, FailureRecorded)
    shell.run_for(30)
    assert states(shell) == {"alone": ResidentState.READY}
    assert not events_of(shell, FailureRecorded)


# ---- retries, fallback, degradation -----------------------------------------------------------------------------


def test_a_request_falls_back_to_the_next_rank_and_both_plans_are_recorded() -> None:
    backup = replace(SMALL, deployment_id="backup", fallback_of="large")
    shell = started(LARGE, backup)
    shell.cards[0].external_bytes = 15 * GIB
    shell.sample()
    outcome = shell.ask("r1", "large@1")
    shell.run_for(20)
    assert completed(outcome)
    assert [(e.fallback_rank, e.verdict.value) for e in events_of(shell, PlanDecided)][:2] == [
        (0, "REJECT_CAPACITY"),
        (1, "ADMIT"),
    ]
    (fell,) = events_of(shell, RequestFellBack)
    assert (fell.fallback_rank, fell.reason) == (1, Reason.EXTERNAL_GPU_PRESSURE)


def test_a_request_that_only_waits_does_not_fall_back() -> None:
    backup = replace(SMALL, deployment_id="backup", fallback_of="large")
    shell = started(LARGE, backup, replace(LARGE, deployment_id="busy"))
    shell.work_ms = lambda _: 30_000
    shell.ask("r1", "busy@1")
    shell.run_for(12)
    shell.ask("r2", "large@1")
    shell.run_for(5)
    assert not events_of(shell, RequestFellBack)
    assert [q.request_id for q in shell.world.queue()] == ["r2"]


def test_failed_loads_fall_back_when_their_retries_are_used_up() -> None:
    backup = replace(SMALL, deployment_id="backup", fallback_of="large")
    shell = started(LARGE, backup)
    shell.fail_loads.add("large")
    outcome = shell.ask("r1", "large@1")
    shell.run_for(60)
    assert completed(outcome)
    assert len(events_of(shell, RequestRetried)) == 1
    assert [e.failure for e in events_of(shell, RequestFellBack)] == [Failure.MODEL_LOAD_FAILED]


def test_who_would_wait_for_a_back_off_in_vain_falls_back_at_once() -> None:
    backup = replace(SMALL, deployment_id="backup", fallback_of="large")
    shell = started(LARGE, backup)
    shell.fail_loads.add("large")
    number = 0
    while shell.world.accelerators["GPU-0"].backoff.get("large", 0) - shell.now < seconds(100):
        number += 1
        shell.ask(f"r{number}", "large@1")
        shell.run_for(20)
    assert number < 40
    late = shell.ask("late", "large@1")
    shell.run_for(10)
    assert completed(late)
    assert events_of(shell, RequestFellBack)[-1].reason is Reason.LOAD_BACKOFF


def test_who_has_waited_as_long_as_it_may_falls_back() -> None:
    backup = replace(SMALL, deployment_id="backup", fallback_of="large")
    shell = started(LARGE, backup, other(LARGE))
    shell.work_ms = lambda request_id: 200_000 if request_id == "busy" else 200
    shell.ask("busy", "other@1")
    shell.run_for(20)
    waiting = shell.ask("r1", "large@1")
    shell.run_for(80)
    assert completed(waiting)
    assert [e.detail for e in events_of(shell, RequestFellBack)] == ["max_queue_seconds"]


def test_a_capability_is_degraded_after_failures_in_a_row_until_it_answers() -> None:
    shell = started(SMALL)
    shell.fail_loads.add("small")
    for number in range(2):
        shell.ask(f"r{number}", "small@1")
        shell.run_for(60)
    (degraded,) = events_of(shell, CapabilityDegraded)
    assert (degraded.capability, degraded.failures) == ("small@1", 3)
    assert shell.world.capabilities["small@1"].degraded_at is not None
    shell.fail_loads.clear()
    shell.run_for(60)
    outcome = shell.ask("last", "small@1")
    shell.run_for(30)
    assert completed(outcome)
    assert len(events_of(shell, CapabilityRecovered)) == 1
    assert not shell.world.capabilities


def test_a_failure_that_its_client_saw_nothing_of_is_tried_again_and_another_is_not() -> None:
    shell = started(replace(SMALL, concurrency=2))
    shell.work_ms = lambda _: 50_000
    unseen, seen = shell.ask("unseen", "small@1"), shell.ask("seen", "small@1")
    shell.run_for(10)
    for request_id, unsent in (("unseen", True), ("seen", False)):
        broken = WorkEnded(
            request_id, 500, 10, 0, None, None, Failure.INVALID_OUTPUT, "http_status_500", client_gone=False
        )
        shell.feed(replace(broken, unsent=unsent))
    assert failed(seen).failure is Failure.INVALID_OUTPUT
    shell.run_for(60)
    assert completed(unseen)
    assert [e.request_id for e in events_of(shell, RequestRetried)] == ["unseen"]


def test_refusals_that_are_failures_are_recorded_with_the_plan_as_evidence() -> None:
    shell = started(LARGE, card=8 * GIB)
    outcome = shell.ask("r1", "large@1")
    assert failed(outcome).reason is Reason.INSUFFICIENT_SCHEDULABLE_VRAM
    (recorded,) = events_of(shell, FailureRecorded)
    (decided,) = events_of(shell, PlanDecided)
    assert recorded.failure is Failure.INSUFFICIENT_SCHEDULABLE_VRAM
    assert recorded.evidence_sha256 == decided.fingerprint
    assert (recorded.attempt, recorded.limit) == (1, 1)


def test_a_lost_race_is_recorded_with_how_often_it_was_planned() -> None:
    shell = started(SMALL)
    shell.ask("r1", "small@1")
    arrived = RequestArrived("r2", "client", "small@1", Priority.INTERACTIVE, False, shell.now, None, "embeddings", 100)
    batch = shell.scheduler.handle(shell.world, arrived, shell.now, attempt=shell.world.policy.max_replans + 1)
    assert batch is not None
    (recorded,) = (event.data for event in batch.events if isinstance(event.data, FailureRecorded))
    assert (recorded.failure, recorded.request_id) == (Failure.LEASE_CONFLICT, "r2")
    assert (recorded.attempt, recorded.limit) == (6, 6)


# ---- doubt ------------------------------------------------------------------------------------------------------


def out_of_memory(*models: Model) -> VirtualShell:
    shell = started(*models)
    shell.fail_loads.add("small")
    shell.load_failure = Failure.GPU_OOM
    return shell


def test_after_an_oom_the_envelope_is_suspect_and_nothing_loads_until_it_is_accepted() -> None:
    shell = out_of_memory(SMALL)
    outcome = shell.ask("r1", "small@1")
    shell.run_for(60)
    (suspected,) = events_of(shell, EnvelopeSuspected)
    assert (suspected.cause, suspected.peak_bytes) == ("gpu_oom", 2 * GIB)
    assert failed(outcome).failure is Failure.GPU_OOM, "planned again once, and no further load"
    assert failed(shell.ask("r0", "small@1")).reason is Reason.NO_MEASURED_ENVELOPE
    (retried,) = events_of(shell, RequestRetried)
    gone = next(e.at for e in shell.recorded if isinstance(e.data, ResidentEvicted))
    planned = [e.at for e in shell.recorded if isinstance(e.data, PlanDecided)]
    assert retried.retried_at <= gone <= planned[1], "only after its memory was confirmed back"
    shell.fail_loads.clear()
    operation = AcceptEnvelope("olga", "small")
    assert problem_of(shell.world, operation) is None
    shell.feed(operation)
    shell.run_for(30)
    again = shell.ask("r2", "small@1")
    shell.run_for(30)
    assert completed(again)


@pytest.mark.parametrize("unsent", [True, False])
def test_a_runtime_that_answers_that_it_is_out_of_memory_is_ended_and_its_envelope_suspect(unsent: bool) -> None:
    shell = started(replace(SMALL, concurrency=2))
    shell.work_ms = lambda _: 50_000
    told, beside = shell.ask("told", "small@1"), shell.ask("beside", "small@1")
    shell.run_for(10)
    detail = "answered_out_of_memory"
    answer = WorkEnded("told", 500, 10, 0, None, None, Failure.GPU_OOM, detail, client_gone=False, unsent=unsent)
    shell.feed(answer)
    assert [e.cause for e in events_of(shell, EnvelopeSuspected)] == ["gpu_oom"]
    shell.run_for(30)
    assert not list(shell.world.residents())
    assert not shell.world.requests
    assert [failed(one).failure for one in (told, beside)] == [Failure.GPU_OOM] * 2
    assert {e.request_id for e in events_of(shell, RequestRetried)} == ({"told", "beside"} if unsent else {"beside"})


def test_an_envelope_that_was_measured_again_is_suspect_no_more() -> None:
    shell = out_of_memory(SMALL)
    shell.ask("r1", "small@1")
    shell.run_for(60)
    shell.fail_loads.clear()
    shell.feed(EnvelopeTaken(SMALL.measured("GPU-0", shell.now)))
    again = shell.ask("r2", "small@1")
    shell.run_for(30)
    assert completed(again)
    assert shell.world.deployments["small"].suspicion is None


@pytest.mark.parametrize(("detail", "taken_for"), [("signal_6", Failure.GPU_OOM), ("killed", Failure.RUNTIME_CRASH)])
def test_a_process_that_gives_up_where_no_room_is_left_ran_out_of_memory_and_a_kill_is_a_kill(
    detail: str, taken_for: Failure
) -> None:
    shell = started(LARGE)
    shell.ask("r1", "large@1")
    shell.run_for(2)
    ((_, record),) = shell.world.residents()
    (card,) = shell.cards
    card.external_bytes = card.total_bytes - 1 * GIB  # others took it while it loads
    shell.sample()
    shell.crash_runtime(record.resident.resident_id, detail)
    first = events_of(shell, FailureRecorded)[0]
    assert first.failure is taken_for
    assert bool(events_of(shell, EnvelopeSuspected)) is (taken_for is Failure.GPU_OOM)


def test_a_resident_that_holds_more_than_its_envelope_makes_it_suspect_and_serves_on() -> None:
    shell = started(SMALL)
    shell.ask("r1", "small@1")
    shell.run_for(20)
    ((_, record),) = shell.world.residents()
    process = shell.processes[record.resident.resident_id]
    process.model = replace(process.model, idle_bytes=2 * GIB + 300 * MIB, peak_bytes=2 * GIB + 300 * MIB)
    shell.run_for(20)
    (suspected,) = events_of(shell, EnvelopeSuspected)
    assert (suspected.cause, suspected.observed_bytes) == ("exceeded", 2 * GIB + 300 * MIB)
    still = shell.ask("r2", "small@1")
    shell.run_for(20)
    assert completed(still), "what is there goes on; only a further load is not allowed"


def test_accepting_what_a_resident_holds_covers_what_it_held_then() -> None:
    shell = started(SMALL)
    shell.ask("r1", "small@1")
    shell.run_for(20)
    ((_, record),) = shell.world.residents()
    process = shell.processes[record.resident.resident_id]
    for held, suspected in ((2 * GIB + 300 * MIB, 1), (2 * GIB + 300 * MIB, 1), (2 * GIB + 400 * MIB, 2)):
        process.model = replace(process.model, idle_bytes=held, peak_bytes=held)
        shell.run_for(20)
        assert len(events_of(shell, EnvelopeSuspected)) == suspected
        shell.feed(AcceptEnvelope("olga", "small"))
        shell.run_for(20)
        assert shell.world.deployments["small"].suspicion is None


def test_a_corrupt_model_is_not_loaded_again_until_a_start_finds_it_whole() -> None:
    shell = started(SMALL)
    shell.fail_loads.add("small")
    shell.load_failure = Failure.ARTIFACT_CORRUPT
    outcome = shell.ask("r1", "small@1")
    shell.run_for(30)
    assert len(events_of(shell, ArtifactCorrupt)) == 1
    assert failed(outcome).failure is Failure.ARTIFACT_CORRUPT
    assert len(events_of(shell, ResidentLoadStarted)) == 1


def test_memory_that_an_unseen_use_leaves_is_noticed() -> None:
    fleeting = replace(SMALL, residency=Residency(ResidencyPolicy.LOAD_ON_DEMAND, 0), unload_ms=10_000_000, load_ms=10)
    shell = started(fleeting)
    shell.work_ms = lambda _: 1
    shell.ask("r1", "small@1")
    shell.run_for(120)
    (started_at,) = events_of(shell, EvictionStarted)
    assert started_at.attributed_bytes == 1 * GIB, "it was seen before it was told to leave"
    assert Failure.GPU_MEMORY_NOT_RECLAIMED in {e.failure for e in events_of(shell, FailureRecorded)}


def test_a_card_whose_figures_contradict_each_other_does_not_hold_the_queue() -> None:
    """A sample was taken when the work ended. It is of no use, and waiting for it would not make it so."""
    shell = started(SMALL)
    shell.work_ms = lambda _: 5000
    shell.ask("running", "small@1")
    waiting = shell.ask("waiting", "small@1")
    shell.run_for(5)
    shell.cards[0].external_bytes = -4 * GIB
    shell.run_for(9)
    released_at = events_of(shell, LeaseReleased)[0].released_at
    granted = next(e for e in events_of(shell, LeaseGranted) if e.request_id == "waiting")
    assert granted.granted_at - released_at < seconds(1)
    assert completed(waiting)


@pytest.mark.parametrize("linger_ms", [50, 400])
def test_what_an_ended_process_leaves_for_a_moment_is_no_pressure(linger_ms: int) -> None:
    """Memory comes back some time after a process has gone: until the device shows it free, it is ours (2)."""
    shell = started(LARGE, replace(other(LARGE), load_ms=1000))
    shell.linger_ms = linger_ms
    shell.ask("r1", "large@1")
    shell.run_for(60)
    outcome = shell.ask("r2", "other@1")
    shell.run_for(30)
    assert completed(outcome)
    assert len(events_of(shell, ResidentEvicted)) == 1
    assert not events_of(shell, PressureChanged)
    assert not events_of(shell, FailureRecorded)


# ---- thrashing --------------------------------------------------------------------------------------------------


def test_two_models_that_evict_each_other_again_and_again_are_told() -> None:
    policy = replace(Policy(), min_residency_loads=0)
    shell = started(LARGE, other(LARGE), policy=policy)
    for number in range(12):
        shell.ask(f"r{number}", ("large@1", "other@1")[number % 2], Priority.PRODUCTION)
        shell.run_for(30)
    told = [(e.evictor, e.victim, e.evictions) for e in events_of(shell, ThrashingDetected)]
    assert ("large", "other", 3) in told
    assert ("other", "large", 3) in told
    assert len(told) <= 12 // 3


# ---- measuring by itself ----------------------------------------------------------------------------------------


def test_whoever_comes_while_an_envelope_is_measured_waits_for_its_end_and_no_longer() -> None:
    shell = started(SMALL)
    shell.feed(ProfilingBegins("GPU-0", "small"))
    assert shell.world.accelerators["GPU-0"].profiling == "small"
    outcome = shell.ask("r1", "small@1")
    shell.run_for(3)
    assert not events_of(shell, PlanDecided)
    shell.feed(ProfilingOver("GPU-0", "small", "preempted", "a request came"))
    shell.run_for(30)
    assert completed(outcome)


@pytest.mark.parametrize("busy", [True, False])
def test_nothing_is_measured_where_something_is(busy: bool) -> None:
    shell = started(SMALL)
    if busy:
        shell.ask("r1", "small@1")
        shell.run_for(10)
    shell.feed(ProfilingBegins("GPU-0", "small"))
    assert (shell.world.accelerators["GPU-0"].profiling is None) is busy


def test_a_scheduler_that_starts_measures_nothing_yet() -> None:
    ledger = MemoryLedger()
    first = VirtualShell(ledger, (SMALL,), (Card("GPU-0", 24 * GIB),))
    first.start()
    first.feed(ProfilingBegins("GPU-0", "small"))
    first.crash()
    second = VirtualShell(ledger, (SMALL,), (Card("GPU-0", 24 * GIB),), now=first.now + seconds(1))
    second.start()
    outcome = second.ask("r1", "small@1")
    second.run_for(30)
    assert completed(outcome)
