"""`gpuledger alerts`, `queue` and `failures`, and what `status` says of trouble, as operators meet them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gpuledger.domain.estimates import estimated_wait_ms, place_of
from gpuledger.domain.events import (
    AcceleratorHealthChanged,
    ArtifactCorrupt,
    CapabilityDegraded,
    DeploymentRevised,
    EvictionCause,
    EvictionStarted,
    FailureRecorded,
    LabPaused,
    LeaseReleased,
    NodeCordoned,
    NodeDrainStarted,
    PlanDecided,
    ReleaseCause,
    RequestFailed,
    RequestFellBack,
    RequestRetried,
    ResidencyPolicyChanged,
    ResidentSlept,
    SampledResident,
    TelemetryMissed,
    ThrashingDetected,
)
from gpuledger.domain.failures import CAPACITY_FAILURES, EMPTY_SHA256, Failure
from gpuledger.domain.policy import Pressure
from gpuledger.domain.reasons import Reason
from gpuledger.domain.state import Attribution, Health, Residency, ResidencyPolicy
from gpuledger.domain.units import GIB, format_instant, seconds
from gpuledger.projections.alerts import AlertKind
from gpuledger.tools import ledger_target
from gpuledger.tools.alert_words import ABOUT
from tests.simulation.ledgers import Lived, crowded_minutes, write_export, write_sqlite
from tests.simulation.virtual_shell import NODE
from tests.unit.driven import CARD, DrivenLedger, suspected


def run(*arguments: object) -> Result:
    from gpuledger.tools.cli import app

    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert "Traceback" not in result.output
    return result


def asked(*arguments: object) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def always(answer: object) -> Callable[[object], object]:
    return lambda _: answer


class Desk:
    """What an operator types about a ledger that is driven, by this process, at the instant of its newest event."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ledger = DrivenLedger()
        self.ledger.sample()
        self._folder = folder
        monkeypatch.setattr(ledger_target, "wall_now", lambda: self.ledger.now)
        monkeypatch.setattr(ledger_target, "holder", always(1))
        monkeypatch.setattr(ledger_target, "taken_at", always(self.ledger.events[0].at))

    def path(self) -> Path:
        path = self._folder / f"ledger-{len(self.ledger.events)}.sqlite"
        return path if path.exists() else write_sqlite(Lived(tuple(self.ledger.events), self.ledger.world, ()), path)

    def asked(self, command: str, *arguments: object) -> Any:
        return asked(command, self.path(), *arguments)

    def told(self, command: str, *arguments: object) -> str:
        """What people read, without the folds of narrow columns."""
        result = run(command, self.path(), *arguments)
        assert result.exit_code == 0, result.output
        return " ".join(result.stdout.split())


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(tmp_path, monkeypatch)


class TestAlerts:
    def test_nothing(self, desk: Desk) -> None:
        assert desk.asked("alerts")["alerts"] == []
        assert desk.told("alerts") == "nothing needs a look"
        assert "Needs a look" not in desk.told("status")

    def test_what_there_is_with_what_to_do(self, desk: Desk) -> None:
        at = desk.ledger.add("deployment:chat", suspected("exceeded"))
        desk.ledger.add(f"node:{NODE}", NodeCordoned(NODE, "ann"))
        shown = desk.asked("alerts")
        assert shown["schema"] == "gpuledger.alerts/1"
        exceeded, cordoned = shown["alerts"]
        assert (exceeded["kind"], exceeded["since"]) == ("ENVELOPE_EXCEEDED", format_instant(at))
        assert exceeded["subjects"]["deployment_id"] == "chat"
        assert exceeded["figures"]["observed_bytes"] == 13 * GIB
        assert (
            exceeded["told"] == "chat@GPU-0#1 holds 13.0 GiB, measured were 11.0 GiB at most: chat is not loaded again"
        )
        assert "`gpuledger envelope accept chat`" in exceeded["what_to_do"]
        assert cordoned["what_to_do"].startswith(f"`gpuledger nodes uncordon {NODE}`")
        told = desk.told("alerts")
        assert "ENVELOPE_EXCEEDED 1.0 s ago chat@GPU-0#1 holds" in told
        assert "{" not in told

    def test_status_shows_them_first(self, desk: Desk) -> None:
        desk.ledger.add("deployment:chat", ArtifactCorrupt("chat", "sha256_differs", EMPTY_SHA256))
        assert [one["kind"] for one in desk.asked("status")["alerts"]] == ["ARTIFACT_CORRUPT"]
        told = desk.told("status")
        assert told.index("Needs a look") < told.index("Accelerators") < told.index("Residents")

    def test_of_a_ledger_that_nobody_drives(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Not that nothing was sampled since: what there was when it was driven last."""
        story = crowded_minutes()
        monkeypatch.setattr(ledger_target, "wall_now", lambda: story.world.at + seconds(86_400))
        assert asked("alerts", write_export(story, tmp_path / "export"))["alerts"] == []

    def test_every_kind_has_words_and_advice(self, desk: Desk) -> None:
        """Each provoked, so that what is told of it is told with its figures."""
        ledger, chat = desk.ledger, desk.ledger.world.deployments["chat"].spec
        ledger.add(f"accelerator:{CARD}", AcceleratorHealthChanged(CARD, Health.FAILED, "XID_79", 1))
        ledger.add(f"accelerator:{CARD}", ThrashingDetected(CARD, "chat", "vision", 3, 600, ledger.now))
        ledger.add("deployment:vision", suspected("gpu_oom", "vision"))
        ledger.add("deployment:batch", suspected("exceeded", "batch"))
        ledger.add("deployment:batch", ArtifactCorrupt("batch", "absent", EMPTY_SHA256))
        ledger.add("deployment:chat", DeploymentRevised(replace(chat, config_hash="new"), "configuration"))
        ledger.add("capability:chat@1", CapabilityDegraded("chat@1", ledger.now, 3, Failure.TIMEOUT, "load"))
        ledger.add(f"node:{NODE}", NodeCordoned(NODE, "ann"))
        ledger.add(f"node:{NODE}", NodeDrainStarted(NODE, "operator", "ann"))
        ledger.add("policy", LabPaused("ann"))
        ledger.sample(blind="PID_NAMESPACE", pressure=Pressure.HIGH, pressure_bp=7312)
        seen = {one["kind"]: one for one in desk.asked("alerts")["alerts"]}
        ledger.add(f"telemetry:{NODE}", TelemetryMissed(NODE, ledger.now, (CARD,), "NVML_TIMEOUT"))
        seen |= {one["kind"]: one for one in desk.asked("alerts")["alerts"]}
        assert set(seen) == {kind.value for kind in AlertKind} == {kind.value for kind in ABOUT}
        for one in seen.values():
            assert one["told"]
            assert one["what_to_do"]
            assert not {"{", "}"} & set(one["told"] + one["what_to_do"])
        assert seen["GPU_PRESSURE"]["told"] == "others hold 73.12 % of GPU-0: HIGH"
        assert seen["STALE_TELEMETRY"]["told"] == "nothing usable is known of GPU-0: NVML_TIMEOUT"


class TestStatus:
    def test_a_resident_that_sleeps_and_what_its_runtime_says(self, desk: Desk) -> None:
        ledger = desk.ledger
        name = "embed@GPU-0#1"
        ledger.add(
            f"accelerator:{CARD}",
            EvictionStarted(name, "embed", "sleep", EvictionCause.PLAN, ledger.now, GIB, GIB, None, 0, "chat"),
        )
        falls = next(one for one in desk.asked("status")["residents"] if one["resident_id"] == name)
        assert falls["eviction"]["action"] == "sleep"
        assert "falls asleep, plan" in desk.told("status")
        ledger.add(f"accelerator:{CARD}", ResidentSlept(name, ledger.now, GIB, 1000))
        told = SampledResident(name, 1000, Attribution.KNOWN, 3, True, waiting_requests=2, cache_use_bp=4250)
        ledger.sample(residents=(told,))
        asleep = next(one for one in desk.asked("status")["residents"] if one["resident_id"] == name)
        assert (asleep["state"], asleep["asleep"], asleep["since"]) == ("SLEEPING", True, None)
        figures = (asleep["running_requests"], asleep["waiting_requests"], asleep["cache_use_bp"])
        assert figures == (3, 2, 4250)
        assert "3, 2 wait, cache 42 %" in desk.told("status")

    def test_an_accelerator_in_trouble(self, desk: Desk) -> None:
        ledger = desk.ledger
        ledger.add(f"accelerator:{CARD}", AcceleratorHealthChanged(CARD, Health.FAILED, "XID_79", 1))
        ledger.add(f"accelerator:{CARD}", ThrashingDetected(CARD, "chat", "vision", 3, 600, ledger.now))
        ledger.sample(blind="PID_NAMESPACE")
        (card,) = desk.asked("status")["accelerators"]
        assert (card["health"], card["health_cause"], card["fault_stands"]) == ("FAILED", "XID_79", True)
        assert card["blind"] == "PID_NAMESPACE"
        assert [(one["evictor"], one["victim"]) for one in card["thrashing"]] == [("chat", "vision")]
        assert "FAILED, XID_79" in desk.told("status")

    def test_what_operators_changed(self, desk: Desk) -> None:
        ledger = desk.ledger
        residency = Residency(ResidencyPolicy.KEEP_WARM, 77)
        ledger.add("deployment:vision", ResidencyPolicyChanged("vision", residency, "operator", "ann"))
        ledger.add(f"node:{NODE}", NodeCordoned(NODE, "ann"))
        ledger.add(f"node:{NODE}", NodeDrainStarted(NODE, "operator", "ann"))
        ledger.add("policy", LabPaused("ann"))
        status = desk.asked("status")
        vision = next(one for one in status["deployments"] if one["deployment_id"] == "vision")
        assert vision["residency"] == {"policy": "keep_warm", "ttl_seconds": 77}
        (node,) = status["nodes"]
        assert (node["cordoned"], node["draining"], node["drain_cause"], node["drained"]) == (
            True,
            True,
            "operator",
            False,
        )
        assert status["lab_paused"] is True
        assert f"{NODE} is cordoned, {NODE} drains, LAB is paused" in desk.told("status")

    def test_a_deployment_in_doubt(self, desk: Desk) -> None:
        desk.ledger.add("deployment:chat", suspected("exceeded"))
        desk.ledger.add("deployment:chat", ArtifactCorrupt("chat", "sha256_differs", EMPTY_SHA256))
        chat = next(one for one in desk.asked("status")["deployments"] if one["deployment_id"] == "chat")
        assert chat["suspicion"]["cause"] == "exceeded"
        assert chat["suspicion"]["observed_bytes"] == 13 * GIB
        assert chat["artifact"]["corrupt"] == "sha256_differs"
        assert [one["suspect"] for one in chat["measured"]] == [True]
        told = desk.told("status")
        assert "ARTIFACT_CORRUPT: sha256_differs" in told
        assert "suspect on virtual: held 13.0 GiB, measured 11.0 GiB" in told

    def test_a_corrupt_file_alone_makes_no_envelope_suspect(self, desk: Desk) -> None:
        desk.ledger.add("deployment:chat", ArtifactCorrupt("chat", "sha256_differs", EMPTY_SHA256))
        chat = next(one for one in desk.asked("status")["deployments"] if one["deployment_id"] == "chat")
        assert [one["suspect"] for one in chat["measured"]] == [False]

    def test_a_capability_that_fails(self, desk: Desk) -> None:
        event = next(one for one in crowded_minutes().events if isinstance(one.data, FailureRecorded))
        assert isinstance(event.data, FailureRecorded)
        failed = replace(event.data, capability="chat@1", failure=Failure.TIMEOUT, detail="load", request_id=None)
        for _ in range(2):
            desk.ledger.add("capability:chat@1", failed)
        shown = {one["capability"]: one for one in desk.asked("status")["capabilities"]}
        assert shown["chat@1"]["failures_in_a_row"] == 2
        assert (shown["chat@1"]["last_failure"], shown["chat@1"]["last_detail"]) == ("TIMEOUT", "load")
        assert shown["chat@1"]["degraded_since"] is None
        assert shown["vision@1"]["failures_in_a_row"] == 0
        desk.ledger.add("capability:chat@1", CapabilityDegraded("chat@1", 5, 3, Failure.TIMEOUT, "load"))
        shown = {one["capability"]: one for one in desk.asked("status")["capabilities"]}
        assert shown["chat@1"]["degraded_since"] == format_instant(5)
        assert "TIMEOUT (load)" in desk.told("status")


class TestQueue:
    def test_who_waits_with_place_and_estimate(self, desk: Desk) -> None:
        world, now = desk.ledger.world, desk.ledger.now
        shown = desk.asked("queue")
        assert shown["schema"] == "gpuledger.queue/1"
        assert len(shown["queue"]) > 5
        for one in shown["queue"]:
            assert one["place"] == place_of(world, one["request_id"])
            assert one["estimated_wait_ms"] == estimated_wait_ms(world, one["request_id"], now)
            assert (one["attempt"], one["fallback_rank"], one["held_by"]) == (1, 0, None)

    def test_since_when_and_with_which_figures(self, desk: Desk) -> None:
        ledger = desk.ledger
        for one in desk.asked("queue")["queue"]:
            plans = [
                event
                for event in ledger.events
                if isinstance(event.data, PlanDecided) and event.data.request_id == one["request_id"]
            ]
            assert one["waiting_since"] == format_instant(plans[-1].at)
            assert isinstance(plans[-1].data, PlanDecided)
            assert one["figures"] == plans[-1].data.plan["figures"][one["waiting_for"]["reason"]]
        assert "as many run as it serves at once: 1 of 1" in desk.told("queue")

    def test_one_that_is_tried_again(self, desk: Desk) -> None:
        _, record = next(iter(desk.ledger.world.leases()))
        request_id = record.lease.request_id
        ledger = desk.ledger
        released = LeaseReleased(record.lease.lease_id, record.resident_id, 1, ReleaseCause.FAILED, False, None)
        ledger.add(f"accelerator:{CARD}", released)
        retried = RequestRetried(request_id, 1, Failure.GPU_OOM, "load", 1, 1, record.resident_id)
        ledger.add(f"request:{request_id}", retried)
        one = next(one for one in desk.asked("queue")["queue"] if one["request_id"] == request_id)
        assert (one["attempt"], one["held_by"], one["waiting_for"]) == (2, record.resident_id, None)
        assert f"to be planned when {record.resident_id} is gone" in desk.told("queue")

    def test_one_that_fell_back_is_only_planned_for_the_fallback(self, desk: Desk) -> None:
        request_id = next(iter(desk.ledger.world.requests))
        fell_back = RequestFellBack(request_id, 1, 1, Reason.LAB_ONLY, None, "REJECT_POLICY")
        desk.ledger.add(f"request:{request_id}", fell_back)
        assert "1 planned for the fallback" in desk.told("failures")

    def test_nobody(self, tmp_path: Path) -> None:
        path = write_export(crowded_minutes(), tmp_path / "export")
        assert asked("queue", path)["queue"] == []
        assert "nobody waits" in run("queue", path).stdout


class TestFailures:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return write_sqlite(crowded_minutes(), tmp_path / "ledger.sqlite")

    def test_every_class_has_its_count(self, path: Path) -> None:
        shown = asked("failures", path)
        assert shown["schema"] == "gpuledger.failures/1"
        assert [one["failure"] for one in shown["classes"]] == [failure.value for failure in Failure]
        recorded = [one.data for one in crowded_minutes().events if isinstance(one.data, FailureRecorded)]
        counts = Counter(one.failure for one in recorded)
        for one in shown["classes"]:
            failure = Failure(one["failure"])
            assert (one["count"], one["capacity"]) == (counts[failure], failure in CAPACITY_FAILURES)
        assert shown["internal_errors"] == sum(n for failure, n in counts.items() if failure not in CAPACITY_FAILURES)

    def test_refusals_are_counted_apart_and_once(self, path: Path) -> None:
        shown = asked("failures", path)
        refused = [
            one.data.reason
            for one in crowded_minutes().events
            if isinstance(one.data, RequestFailed) and one.data.reason is not None
        ]
        assert shown["capacity_rejections"] + sum(shown["other_refusals"].values()) == len(refused)
        apart = f"{shown['internal_errors']} internal errors, {shown['capacity_rejections']} requests refused"
        assert run("failures", path).stdout.startswith(apart)

    def test_the_newest_of_a_class(self, path: Path) -> None:
        shown = asked("failures", path, "--class", "MODEL_LOAD_FAILED", "--limit", 1)
        (one,) = shown["failures"]
        newest = crowded_minutes().newest(FailureRecorded)
        assert one["failure"] == "MODEL_LOAD_FAILED"
        assert one["seq"] <= newest.seq
        assert one["evidence_sha256"]
        assert asked("failures", path, "--class", "GPU_OOM")["failures"] == []
        assert "none of the class that was asked for" in run("failures", path, "--class", "GPU_OOM").stdout

    def test_a_driver_that_fails(self, desk: Desk) -> None:
        desk.ledger.add(f"telemetry:{NODE}", TelemetryMissed(NODE, desk.ledger.now, (CARD, "GPU-1"), "NVML_TIMEOUT"))
        (one,) = desk.asked("failures", "--class", "DRIVER_ERROR")["failures"]
        assert (one["capability"], one["accelerator_ids"]) == (None, [CARD, "GPU-1"])
        assert (one["owner"], one["detail"]) == ("telemetry", "NVML_TIMEOUT")
        assert "GPU-0, GPU-1" in desk.told("failures")
        assert "NVML_TIMEOUT" in desk.told("status"), "among the newest failures too"

    def test_only_the_newest_end_of_a_long_ledger_is_counted(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gpuledger.tools.recent.COUNTED", 10)
        shown = asked("failures", path)
        assert shown["counted"]["events"] == 10
        assert shown["counted"]["since"] is not None
        assert "counted over its newest end, from" in " ".join(run("failures", path).stdout.split())

    @pytest.mark.parametrize(("option", "value"), [("--class", "BAD_LUCK"), ("--limit", "0"), ("--limit", "201")])
    def test_what_cannot_be_asked(self, path: Path, option: str, value: str) -> None:
        result = run("failures", path, option, value)
        assert result.exit_code == 2
        assert option in result.stderr
