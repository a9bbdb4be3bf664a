"""What an operator does, what a changed file does, and what a device's faults do: recorded once, and standing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuledger.domain.configuration import difference
from gpuledger.domain.events import (
    AcceleratorHealthChanged,
    AcceleratorRetired,
    AcceleratorRevised,
    ClockStepped,
    ConfigurationApplied,
    DeploymentRevised,
    EvictionStarted,
    LabPaused,
    LabResumed,
    NodeCordoned,
    NodeDrainCompleted,
    NodeUncordoned,
    PolicyRevised,
    ResidencyPolicyChanged,
)
from gpuledger.domain.messages import (
    AcceptEnvelope,
    ClearAccelerator,
    CordonNode,
    DrainNode,
    Operation,
    PauseLab,
    ResumeLab,
    RevisePolicy,
    SetResidency,
    Started,
    UncordonNode,
    UnloadIdle,
)
from gpuledger.domain.operations import problem_of
from gpuledger.domain.policy import Policy
from gpuledger.domain.ports import HealthFault, NodeReading
from gpuledger.domain.reasons import Reason
from gpuledger.domain.sampling import SampleTaken
from gpuledger.domain.state import Health, Kind, Residency, ResidencyPolicy
from gpuledger.domain.units import GIB
from tests.simulation.virtual_shell import NODE, Model, VirtualShell, configuration
from tests.unit.test_scheduler import LARGE, SMALL, completed, events_of, failed, started

BY = "olga"
PINNED = Residency(ResidencyPolicy.ALWAYS_WARM, 0)


# ---- policy and LAB ---------------------------------------------------------------------------------------------


def test_a_policy_revision_is_one_event_and_none_when_nothing_changes() -> None:
    shell = started(SMALL)
    revised = replace(shell.world.policy, revision="ours", max_queue_seconds=5)
    for _ in range(2):
        shell.feed(RevisePolicy(BY, revised))
    recorded = [e for e in events_of(shell, PolicyRevised) if e.source == "operator"]
    assert [(e.by, e.policy) for e in recorded] == [(BY, revised)]
    assert shell.world.policy == revised


def test_a_policy_that_breaks_a_rule_has_a_problem_and_changes_nothing() -> None:
    shell = started(SMALL)
    broken = RevisePolicy(BY, replace(Policy(), telemetry_max_age_seconds=1))
    problem = problem_of(shell.world, broken)
    assert problem is not None
    assert "telemetry_max_age_seconds" in problem
    shell.feed(broken)
    assert shell.world.policy == Policy()


def test_a_paused_lab_refuses_lab_requests_until_it_is_resumed() -> None:
    shell = started(SMALL)
    shell.feed(PauseLab(BY))
    refused = shell.ask("r1", "small@1", lab=True)
    assert failed(refused).reason is Reason.LAB_PAUSED
    shell.feed(ResumeLab(BY))
    served = shell.ask("r2", "small@1", lab=True)
    shell.run_for(20)
    assert completed(served)
    assert [e.by for e in events_of(shell, LabPaused)] == [BY]
    assert [e.by for e in events_of(shell, LabResumed)] == [BY]


# ---- residency --------------------------------------------------------------------------------------------------


def test_a_residency_that_was_set_counts_at_once() -> None:
    shell = started(SMALL)
    shell.ask("r1", "small@1")
    shell.run_for(10)
    shell.feed(SetResidency(BY, "small", Residency(ResidencyPolicy.LOAD_ON_DEMAND, 0)))
    shell.run_for(10)
    assert not list(shell.world.residents())
    assert [e.by for e in events_of(shell, ResidencyPolicyChanged)] == [BY]


def test_always_warm_is_only_for_the_one_deployment_of_its_rank() -> None:
    shell = started(LARGE, replace(SMALL, deployment_id="backup", fallback_of="large"))
    assert problem_of(shell.world, SetResidency(BY, "backup", PINNED)) is not None
    assert problem_of(shell.world, SetResidency(BY, "large", PINNED)) is None


@pytest.mark.parametrize("policy", [ResidencyPolicy.EXCLUSIVE, ResidencyPolicy.LAB_ONLY])
def test_exclusive_and_lab_only_hold_live(policy: ResidencyPolicy) -> None:
    special = replace(SMALL, deployment_id="special", residency=Residency(policy, 60))
    shell = started(SMALL, special)
    shell.ask("r1", "small@1")
    shell.run_for(30)
    if policy is ResidencyPolicy.LAB_ONLY:
        assert failed(shell.ask("r2", "special@1")).reason is Reason.LAB_ONLY
    served = shell.ask("r3", "special@1", lab=policy is ResidencyPolicy.LAB_ONLY)
    shell.run_for(30)
    assert completed(served)
    there = {record.resident.deployment_id for _, record in shell.world.residents()}
    assert there == ({"special"} if policy is ResidencyPolicy.EXCLUSIVE else {"small", "special"})


# ---- nodes and unloading ----------------------------------------------------------------------------------------


def test_a_cordoned_node_loads_nothing_and_goes_on_with_what_it_has() -> None:
    shell = started(SMALL, LARGE)
    shell.ask("r1", "small@1")
    shell.run_for(10)
    shell.feed(CordonNode(BY, NODE))
    assert failed(shell.ask("r2", "large@1")).reason is Reason.NODE_CORDONED
    served = shell.ask("r3", "small@1")
    shell.run_for(10)
    assert completed(served)
    shell.feed(UncordonNode(BY, NODE))
    loaded = shell.ask("r4", "large@1")
    shell.run_for(30)
    assert completed(loaded)
    assert len(events_of(shell, NodeCordoned)) == len(events_of(shell, NodeUncordoned)) == 1


def test_a_drained_node_ends_what_runs_then_is_empty_and_says_so() -> None:
    shell = started(SMALL)
    shell.work_ms = lambda _: 15_000
    running = shell.ask("r1", "small@1")
    shell.run_for(5)
    shell.feed(DrainNode(BY, NODE))
    assert failed(shell.ask("r2", "small@1")).reason is Reason.NODE_DRAINING
    shell.run_for(5)
    assert not events_of(shell, NodeDrainCompleted)
    shell.run_for(30)
    assert completed(running)
    assert not list(shell.world.residents())
    assert len(events_of(shell, NodeDrainCompleted)) == 1


def test_what_an_operator_did_to_a_node_stands_after_a_restart() -> None:
    shell = started(SMALL)
    shell.feed(CordonNode(BY, NODE))
    shell.crash()
    again = VirtualShell(shell.ledger, shell.models, shell.cards, now=shell.now + 1)
    again.start()
    assert failed(again.ask("r1", "small@1")).reason is Reason.NODE_CORDONED


def test_unload_ends_what_is_idle_and_nothing_else() -> None:
    shell = started(SMALL, LARGE)
    shell.work_ms = lambda request_id: 30_000 if request_id == "busy" else 200
    shell.ask("busy", "large@1")
    shell.ask("r1", "small@1")
    shell.run_for(20)
    shell.feed(UnloadIdle(BY, None))
    shell.run_for(5)
    assert [record.resident.deployment_id for _, record in shell.world.residents()] == ["large"]
    assert [(e.cause.value, e.by) for e in events_of(shell, EvictionStarted)] == [("operator", BY)]


def test_what_is_always_warm_is_unloaded_when_it_is_named() -> None:
    shell = started(replace(SMALL, residency=PINNED))
    shell.run_for(20)
    shell.feed(UnloadIdle(BY, None))
    assert not events_of(shell, EvictionStarted)
    shell.feed(UnloadIdle(BY, "small"))
    assert len(events_of(shell, EvictionStarted)) == 1


@pytest.mark.parametrize(
    "operation",
    [
        SetResidency(BY, "nobody", PINNED),
        CordonNode(BY, "nowhere"),
        DrainNode(BY, "nowhere"),
        UnloadIdle(BY, "nobody"),
        ClearAccelerator(BY, "GPU-9"),
        ClearAccelerator(BY, "GPU-0"),
        AcceptEnvelope(BY, "small"),
        AcceptEnvelope(BY, "nobody"),
    ],
)
def test_what_cannot_be_done_has_a_problem_and_records_nothing(operation: Operation) -> None:
    shell = started(SMALL)
    problem, recorded = problem_of(shell.world, operation), len(shell.recorded)
    assert problem
    shell.feed(operation)
    assert len(shell.recorded) == recorded


# ---- the configuration file -------------------------------------------------------------------------------------


def restarted(shell: VirtualShell, *models: Model, policy: Policy | None = None) -> VirtualShell:
    shell.crash()
    again = VirtualShell(shell.ledger, models or shell.models, shell.cards, policy or shell.policy, now=shell.now + 1)
    again.start(measure=False)
    return again


def test_what_an_operator_changed_stands_until_that_item_of_the_file_changes() -> None:
    shell = started(SMALL)
    shell.feed(SetResidency(BY, "small", PINNED))
    shell.feed(RevisePolicy(BY, replace(Policy(), revision="ours", fair_wait_seconds=7)))
    shell.feed(PauseLab(BY))
    again = restarted(shell, replace(SMALL, queue_limit=3))
    spec = again.world.deployments["small"].spec
    assert (spec.queue_limit, spec.residency) == (3, PINNED), "another item of the same deployment changed"
    assert (again.world.policy.revision, again.world.policy.lab_paused) == ("ours", True)
    third = restarted(again, replace(SMALL, residency=Residency(ResidencyPolicy.KEEP_WARM, 77)), policy=Policy())
    assert third.world.deployments["small"].spec.residency.ttl_seconds == 77
    assert third.world.policy.revision == "ours", "the file's policy did not change"
    fourth = restarted(third, policy=replace(Policy(), revision="file", max_queue_seconds=9))
    assert (fourth.world.policy.revision, fourth.world.policy.lab_paused) == ("file", True)


def test_a_file_that_did_not_change_records_nothing_and_its_difference_is_empty() -> None:
    shell = started(SMALL)
    applied = len(events_of(shell, ConfigurationApplied))
    assert difference(shell.world, configuration((SMALL,)), shell.now) == ()
    shell.feed(Started(configuration((SMALL,))))
    assert len(events_of(shell, ConfigurationApplied)) == applied


def test_the_difference_is_what_a_start_records() -> None:
    shell = started(SMALL)
    changed = configuration((replace(SMALL, queue_limit=3), LARGE), replace(Policy(), max_queue_seconds=9))
    told = [event.data for event in difference(shell.world, changed, shell.now)]
    before = len(shell.recorded)
    shell.feed(Started(changed))
    recorded = [event.data for event in shell.recorded[before:]]
    assert told
    assert [event for event in recorded if event in told] == told
    assert DeploymentRevised in {type(event) for event in told}


# ---- devices ----------------------------------------------------------------------------------------------------


def seen(shell: VirtualShell, **changes: object) -> None:
    """A sample in which the card says something else of itself."""
    reading = shell.reading()
    first, *others = reading.accelerators
    altered = replace(first, **changes)  # type: ignore[arg-type]
    shell.feed(SampleTaken(NODE, replace(reading, accelerators=(altered, *others)), {}))


def health(shell: VirtualShell) -> Health:
    return shell.world.accelerators["GPU-0"].accelerator.health


def test_a_fault_of_the_device_stands_until_it_is_cleared_and_a_further_one_counts_again() -> None:
    shell = started(SMALL)
    fault = HealthFault(Health.FAILED, "XID_79", 5)
    seen(shell, faults=(fault,))
    assert failed(shell.ask("r1", "small@1")).reason is Reason.ACCELERATOR_UNHEALTHY
    shell.sample()
    assert health(shell) is Health.FAILED, "a sample that shows nothing does not mend it"
    shell.feed(ClearAccelerator(BY, "GPU-0"))
    seen(shell, faults=(fault,))
    assert health(shell) is Health.HEALTHY, "that one was looked at"
    seen(shell, faults=(replace(fault, mark=6),))
    assert health(shell) is Health.FAILED
    assert [e.by for e in events_of(shell, AcceleratorHealthChanged)] == [None, BY, None]


def test_a_fault_outlives_a_card_that_is_lost_and_comes_back() -> None:
    shell = started(SMALL)
    seen(shell, faults=(HealthFault(Health.DEGRADED, "ECC_UNCORRECTED", 1),))
    seen(shell, faults=(HealthFault(Health.LOST, "GPU_VANISHED", 0),))
    assert health(shell) is Health.LOST
    shell.sample()
    assert health(shell) is Health.DEGRADED
    assert shell.world.accelerators["GPU-0"].health_cause == "ECC_UNCORRECTED"


def test_a_fault_that_was_cleared_hides_no_other_one() -> None:
    shell = started(SMALL)
    faults = (HealthFault(Health.FAILED, "XID_79", 5), HealthFault(Health.DEGRADED, "ECC_UNCORRECTED", 2))
    seen(shell, faults=faults)
    shell.feed(ClearAccelerator(BY, "GPU-0"))
    seen(shell, faults=faults)
    assert (health(shell), shell.world.accelerators["GPU-0"].health_cause) == (Health.DEGRADED, "ECC_UNCORRECTED")


def test_what_goes_away_by_itself_needs_no_operator() -> None:
    shell = started(SMALL)
    seen(shell, faults=(HealthFault(Health.DEGRADED, "ROW_REMAP_PENDING", 1),))
    assert health(shell) is Health.DEGRADED
    shell.sample()
    assert health(shell) is Health.HEALTHY


def test_clocks_that_come_apart_are_told_once_and_when_they_are_together_again() -> None:
    shell = started(SMALL)
    for skew_ms in (0, 1_500, 18_000, 17_000, 9_000, 1_000, 0, -5_000, -9_000, -3_000):
        shell.feed(SampleTaken(NODE, shell.reading(), {}, skew_ms))
    assert [e.skew_ms for e in events_of(shell, ClockStepped)] == [18_000, 0, -5_000, -9_000]


def test_an_accelerator_that_is_no_more_is_retired_and_what_is_on_it_ended() -> None:
    shell = started(SMALL)
    shell.work_ms = lambda _: 60_000
    lost = shell.ask("r1", "small@1")
    shell.run_for(10)
    process = next(iter(shell.processes.values()))
    shell.cards[0].silent = True
    shell.feed(SampleTaken(NODE, NodeReading((), (), None, 0, gone=("GPU-0",)), {}))
    shell.run_for(10)
    assert len(events_of(shell, AcceleratorRetired)) == 1
    assert process.gone
    assert not list(shell.world.residents())
    assert not list(shell.world.leases())
    assert failed(lost).reason is Reason.NO_ACCELERATOR


def test_another_size_of_a_host_is_taken_up_at_the_first_look_of_a_run() -> None:
    shell = started(SMALL)
    seen(shell, kind=Kind.HOST)
    shell.crash()
    again = VirtualShell(shell.ledger, shell.models, shell.cards, now=shell.now + 1)
    again.sample = lambda: seen(again, kind=Kind.HOST, total_bytes=20 * GIB)  # type: ignore[method-assign]
    again.start()
    (revised,) = events_of(again, AcceleratorRevised)
    assert revised.total_bytes == 20 * GIB
    assert again.world.accelerators["GPU-0"].sample is not None


def test_what_a_device_says_it_is_now_is_taken_up() -> None:
    shell = started(SMALL)
    seen(shell, driver_version="2")
    (revised,) = events_of(shell, AcceleratorRevised)
    assert (revised.driver_version, revised.total_bytes) == ("2", 24 * GIB)
