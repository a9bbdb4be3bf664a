"""The story of a request: words for every type of event, and what belongs to it when it does not go straight."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from gpuledger.domain.events import EVENT_TYPES
from gpuledger.domain.failures import Failure
from gpuledger.domain.messages import (
    AcceptEnvelope,
    ClearAccelerator,
    CordonNode,
    PauseLab,
    ProfilingBegins,
    ProfilingOver,
    SetResidency,
    UncordonNode,
    WorkEnded,
)
from gpuledger.domain.policy import Policy, Priority
from gpuledger.domain.state import Residency, ResidencyPolicy, Sleep
from gpuledger.domain.units import GIB
from gpuledger.tools.cli import app
from gpuledger.tools.ledger_target import Target
from gpuledger.tools.story import story_document
from gpuledger.tools.story_report import story_report
from gpuledger.tools.story_words import told
from tests.golden.examples import Full, Least, example
from tests.simulation.ledgers import exported
from tests.simulation.virtual_shell import NODE, VirtualShell
from tests.unit.test_scheduler import LARGE, SMALL, completed, other, started

#: The work of one request ends in a failure, when part of its answer was sent.
BROKEN = WorkEnded("theirs", 500, 10, 0, None, None, Failure.TIMEOUT, "silent", client_gone=False)
BACKUP = replace(SMALL, deployment_id="backup", fallback_of="large")


def story_of(shell: VirtualShell, request_id: str) -> dict[str, Any]:
    return story_document(Target(Path("memory"), shell.ledger), request_id)


def lines_of(shell: VirtualShell, request_id: str, kind: str) -> list[str]:
    """What is told of one type of event."""
    return [one["told"] for one in story_of(shell, request_id)["timeline"] if one["type"] == kind]


def headline_of(shell: VirtualShell, request_id: str) -> str:
    console = Console(width=150, file=None, force_terminal=False, markup=False)
    with console.capture() as captured:
        console.print(story_report(story_of(shell, request_id), shell.now))
    return "\n".join(captured.get().splitlines()[:3])


def _fields(data: type[Any]) -> tuple[str, ...]:
    return tuple(data.__dataclass_fields__)


class TestWords:
    @pytest.mark.parametrize("name", EVENT_TYPES)
    def test_every_type_of_event_has_some(self, name: str) -> None:
        assert len(told(example(name, Full()))) > 10
        assert "None" not in told(example(name, Full()))
        assert len(told(example(name, Least()))) > 10

    @pytest.mark.parametrize("name", [name for name, entry in EVENT_TYPES.items() if "by" in _fields(entry.data)])
    def test_whoever_did_it_is_named(self, name: str) -> None:
        whole: Any = example(name, Full())
        event = replace(whole, by="olga")
        if name == "AcceleratorHealthChanged":
            event = replace(event, health="HEALTHY")
        assert "olga" in told(event)


class TestOnItsWay:
    def test_tried_again_then_by_the_fallback(self) -> None:
        shell = started(LARGE, BACKUP)
        shell.fail_loads.add("large")
        outcome = shell.ask("r1", "large@1")
        shell.run_for(60)
        assert completed(outcome)
        story = story_of(shell, "r1")
        assert story["passage"] == {
            "attempts": 2,
            "fallback": {"rank": 1, "reason": None, "failure": "MODEL_LOAD_FAILED"},
        }
        (retried,) = lines_of(shell, "r1", "RequestRetried")
        assert retried == (
            "tried again after MODEL_LOAD_FAILED (exit_status_1) before anything was answered: retry 1 of 1"
        )
        (fell,) = lines_of(shell, "r1", "RequestFellBack")
        assert "planned for rank 1 from now on, after MODEL_LOAD_FAILED" in fell
        assert any(", rank 1: ADMIT" in line for line in lines_of(shell, "r1", "PlanDecided"))
        assert [plan["replay"]["result"] for plan in story["plans"] if plan["replay"]] == ["MATCH"] * 3
        assert "attempt 2, by the fallback (rank 1) after MODEL_LOAD_FAILED" in headline_of(shell, "r1")

    def test_the_rank_of_a_plan_is_shown_in_the_list(self, tmp_path: Path) -> None:
        shell = started(LARGE, BACKUP)
        shell.fail_loads.add("large")
        shell.ask("r1", "large@1")
        shell.run_for(60)
        result = CliRunner().invoke(app, ["plans", str(exported(shell.ledger, tmp_path / "export"))])
        assert "backup on GPU-0, rank 1" in result.stdout
        assert "large on GPU-0, rank" not in result.stdout

    def test_one_that_went_straight_says_nothing_of_it(self) -> None:
        shell = started(SMALL)
        shell.ask("r1", "small@1")
        shell.run_for(20)
        assert story_of(shell, "r1")["passage"] == {"attempts": 1, "fallback": None}
        assert "attempt" not in headline_of(shell, "r1")

    def test_preempted_and_put_back(self) -> None:
        shell = started(replace(LARGE, interruptible=True, priority=Priority.BACKGROUND), other(LARGE))
        shell.work_ms = lambda request_id: 40_000 if request_id == "slow" else 200
        shell.ask("slow", "large@1", Priority.BACKGROUND)
        shell.run_for(30)
        shell.ask("urgent", "other@1", Priority.PRODUCTION)
        shell.run_for(120)
        (line,) = lines_of(shell, "slow", "LeasePreempted")
        assert line == "lease-slow-1 of slow is preempted by urgent: put back to its old place"
        assert story_of(shell, "slow")["leases"][0]["ended_by"] == "preempted"
        assert lines_of(shell, "urgent", "LeasePreempted") == [line]

    def test_a_failure_of_another_request_on_the_same_model_is_not_told(self) -> None:
        shell = started(replace(SMALL, concurrency=2))
        shell.work_ms = lambda _: 5_000
        shell.ask("mine", "small@1")
        shell.ask("theirs", "small@1")
        shell.run_for(4)
        shell.feed(BROKEN)
        shell.run_for(60)
        assert lines_of(shell, "theirs", "FailureRecorded")
        assert not lines_of(shell, "mine", "FailureRecorded")

    def test_the_answer_by_which_a_capability_recovered(self) -> None:
        shell = started(SMALL)
        shell.fail_loads.add("small")
        for number in range(2):
            shell.ask(f"r{number}", "small@1")
            shell.run_for(60)
        assert lines_of(shell, "r1", "CapabilityDegraded") == [
            "small@1 is degraded: 3 failures in a row, last MODEL_LOAD_FAILED (exit_status_1)"
        ]
        shell.fail_loads.clear()
        shell.run_for(60)
        shell.ask("last", "small@1")
        shell.run_for(30)
        assert story_of(shell, "last")["timeline"][-1]["type"] == "CapabilityRecovered"
        shell.ask("next", "small@1")
        shell.run_for(30)
        assert story_of(shell, "next")["timeline"][-1]["type"] == "RequestCompleted"

    def test_an_envelope_that_became_suspect(self) -> None:
        shell = started(SMALL)
        shell.fail_loads.add("small")
        shell.load_failure = Failure.GPU_OOM
        shell.ask("r1", "small@1")
        shell.run_for(60)
        (line,) = lines_of(shell, "r1", "EnvelopeSuspected")
        assert line.startswith("small@GPU-0#1 ran out of memory with 2.0 GiB measured")
        (retried,) = lines_of(shell, "r1", "RequestRetried")
        assert retried.endswith("when the memory of small@GPU-0#1 is back")


class TestResidents:
    def test_put_to_sleep_for_it_and_woken(self) -> None:
        shell = started(replace(LARGE, deployment_id="sleeper", sleep=Sleep(1 * GIB, 500, 1000)), LARGE)
        shell.ask("r1", "sleeper@1")
        shell.run_for(60)
        shell.ask("r2", "large@1")
        shell.run_for(90)
        assert lines_of(shell, "r2", "EvictionStarted")[0].startswith(
            "sleeper@GPU-0#1 is put to sleep: plan for large, holds 12.0 GiB"
        )
        assert lines_of(shell, "r2", "ResidentSlept") == ["sleeper@GPU-0#1 sleeps: 11.0 GiB are free, 1.0 GiB stay"]
        shell.ask("r3", "sleeper@1")
        shell.run_for(60)
        assert lines_of(shell, "r3", "ResidentWoken") == ["sleeper@GPU-0#1 is awake after 1.0 s"]

    def test_thrashing_is_told_to_the_one_whose_evictions_were_too_many(self) -> None:
        shell = started(LARGE, other(LARGE), policy=replace(Policy(), min_residency_loads=0))
        for number in range(7):
            shell.ask(f"r{number}", ("large@1", "other@1")[number % 2], Priority.PRODUCTION)
            shell.run_for(30)
        told_to = {number for number in range(7) if lines_of(shell, f"r{number}", "ThrashingDetected")}
        assert told_to == {5, 6}
        (line,) = lines_of(shell, "r6", "ThrashingDetected")
        assert line == "large made other leave GPU-0 3 times in 600 s: they thrash"


class TestMeanwhile:
    def test_what_operators_did_while_it_waited(self) -> None:
        shell = started(LARGE, other(LARGE), replace(SMALL, deployment_id="embed"))
        shell.work_ms = lambda _: 30_000
        shell.ask("before", "other@1")
        shell.run_for(12)
        shell.ask("waits", "large@1")
        for operation in (
            PauseLab("olga"),
            SetResidency("olga", "large", Residency(ResidencyPolicy.KEEP_WARM, 60)),
            SetResidency("olga", "embed", Residency(ResidencyPolicy.KEEP_WARM, 70)),
            CordonNode("olga", NODE),
            UncordonNode("olga", NODE),
        ):
            shell.feed(operation)
        story = story_of(shell, "waits")
        by_olga = [one["type"] for one in story["timeline"] if "olga" in one["told"]]
        assert by_olga == ["LabPaused", "ResidencyPolicyChanged", "NodeCordoned"]
        assert story["outcome"]["reason"] == "NODE_CORDONED", "so the rest came after its end"
        assert lines_of(shell, "waits", "ResidencyPolicyChanged") == [
            "large stays as keep_warm 60 s from now on, from the operator by olga"
        ]

    def test_a_measurement_that_held_it_up(self) -> None:
        shell = started(SMALL)
        shell.feed(ProfilingBegins("GPU-0", "small"))
        shell.ask("r1", "small@1")
        shell.run_for(2)
        shell.feed(ProfilingOver("GPU-0", "small", "preempted", "a request came"))
        shell.run_for(30)
        assert lines_of(shell, "r1", "ProfilingEnded") == [
            "the measurement of small on GPU-0 is over: preempted (a request came)"
        ]

    def test_operations_that_change_nothing_are_in_no_story(self) -> None:
        shell = started(LARGE, other(LARGE))
        shell.work_ms = lambda _: 30_000
        shell.ask("before", "other@1")
        shell.run_for(12)
        shell.ask("waits", "large@1")
        shell.feed(AcceptEnvelope("olga", "large"))
        shell.feed(ClearAccelerator("olga", "GPU-0"))
        shell.run_for(120)
        assert not [one for one in story_of(shell, "waits")["timeline"] if "olga" in one["told"]]
