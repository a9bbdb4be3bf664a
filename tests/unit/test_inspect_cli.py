"""`gpuledger status`, `leases`, `plans`, `explain`, `replay` and `ledger export` as their users meet them."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gpuledger.adapters.ledger.lock import LedgerLock
from gpuledger.adapters.ledger.sqlite import SqliteLedger
from gpuledger.domain.estimates import estimated_wait_ms
from gpuledger.domain.events import LeaseGranted, PlanDecided, RequestFailed, RequestQueued
from gpuledger.domain.queue import waiting
from gpuledger.domain.reasons import Reason, Verdict
from gpuledger.domain.units import format_instant, parse_instant, seconds
from gpuledger.tools import ledger_target
from gpuledger.tools.cli import app
from gpuledger.tools.snapshots import save_world
from gpuledger.tools.status import Driver, Source, live_leases, status_document
from tests.simulation.ledgers import (
    Lived,
    crowded_and_killed,
    crowded_minutes,
    forge,
    forged,
    write_export,
    write_sqlite,
)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def asked(*arguments: object) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def always(answer: object) -> Callable[[object], object]:
    """A function of one argument with one answer."""
    return lambda _: answer


def refused(*arguments: object) -> str:
    """What a command says on standard error when its input cannot be used."""
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.fixture(scope="module")
def story() -> Lived:
    return crowded_minutes()


@pytest.fixture(scope="module")
def killed() -> Lived:
    return crowded_and_killed()


@pytest.fixture(scope="module")
def ended_ledger(story: Lived, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger whose scheduler left in order."""
    return write_sqlite(story, tmp_path_factory.mktemp("ended") / "ledger.sqlite")


@pytest.fixture(scope="module")
def killed_ledger(killed: Lived, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger whose scheduler was killed at work."""
    return write_sqlite(killed, tmp_path_factory.mktemp("killed") / "ledger.sqlite")


@pytest.fixture
def driven_ledger(killed: Lived, killed_ledger: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same ledger while its scheduler was there: this process, at the instant of the newest event."""
    monkeypatch.setattr(ledger_target, "wall_now", lambda: killed.world.at)
    monkeypatch.setattr(ledger_target, "holder", always(1))
    monkeypatch.setattr(ledger_target, "taken_at", always(killed.events[0].at))
    return killed_ledger


class TestStatus:
    def test_of_a_ledger_at_work(self, killed: Lived, driven_ledger: Path) -> None:
        status = asked("status", driven_ledger)
        assert status["schema"] == "gpuledger.status/1"
        assert status["scheduler"] == {"state": "running", "pid": 1}
        assert status["ledger"]["seq"] == len(killed.events)
        (card,) = status["accelerators"]
        assert card["schedulable_bytes"] == max(
            0,
            card["total_bytes"] - card["physical_used_bytes"] - card["future_lease_bytes"] - card["reserve_bytes"],
        )
        assert card["sample"]["age_ms"] < 5000
        assert {lease["lease_id"] for lease in status["leases"]} == {
            record.lease.lease_id for _, record in killed.world.leases()
        }
        assert [one["resident_id"] for one in status["residents"]] == [
            record.resident.resident_id for _, record in killed.world.residents()
        ]
        assert [one["failure"] for one in status["failures"]] == ["DEADLINE_CANNOT_BE_MET"]
        assert status["alerts"] == []

    def test_the_queue_is_in_claim_order(self, killed: Lived, driven_ledger: Path) -> None:
        queue = asked("status", driven_ledger)["queue"]
        assert [one["request_id"] for one in queue] == [one.question.request_id for one in waiting(killed.world)]
        assert [one["place"] for one in queue] == list(range(1, len(queue) + 1))
        estimates = {one["request_id"]: one["estimated_wait_ms"] for one in queue}
        assert estimates == {
            request_id: estimated_wait_ms(killed.world, request_id, killed.world.at) for request_id in estimates
        }
        assert any(estimates.values())
        assert all(one["waited_ms"] >= 0 for one in queue)

    def test_without_a_scheduler_nothing_is_live(self, killed: Lived, killed_ledger: Path) -> None:
        assert list(killed.world.leases())
        status = asked("status", killed_ledger)
        assert status["scheduler"] == {"state": "none", "pid": None}
        assert status["leases"] == []
        assert all(card["future_lease_bytes"] == 0 or status["residents"] for card in status["accelerators"])
        people = run("status", killed_ledger).stdout
        assert people.startswith("no scheduler is running; this is the ledger's last state")
        assert "lease-" not in people

    def test_a_scheduler_that_has_not_taken_over_yet(self, killed: Lived, killed_ledger: Path) -> None:
        """It holds the ledger, but the leases of the run that was killed are still in it."""
        with LedgerLock(killed_ledger):
            status = asked("status", killed_ledger)
        assert status["scheduler"] == {"state": "starting", "pid": os.getpid()}
        assert status["leases"] == []

    def test_the_same_pid_again(self, killed: Lived, driven_ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """In a container every run is process 1: what tells them apart is when the ledger was taken."""
        monkeypatch.setattr(ledger_target, "taken_at", always(killed.world.at + 1))
        assert asked("status", driven_ledger)["scheduler"]["state"] == "starting"

    def test_an_export_is_nobody_s(self, killed: Lived, tmp_path: Path) -> None:
        path = write_export(killed, tmp_path / "export")
        status = asked("status", path)
        assert status["scheduler"] == {"state": "export", "pid": None}
        assert status["leases"] == []
        assert "an export of a ledger" in run("status", path).stdout

    def test_a_snapshot_gives_the_same(self, story: Lived, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ledger_target, "wall_now", lambda: story.world.at)
        path = write_sqlite(story, tmp_path / "ledger.sqlite")
        before = asked("status", path)
        with closing(SqliteLedger(path)) as ledger:
            save_world(ledger, story.until(500).world)
        assert asked("status", path) == before

    def test_for_people(self, driven_ledger: Path, story: Lived, tmp_path: Path) -> None:
        told = run("status", driven_ledger).stdout
        for word in ("scheduler running", "schedulable", "Residents", "Leases", "Queue, in claim order", "Deployments"):
            assert word in told
        assert "Newest failures" in run("status", write_export(story, tmp_path / "export")).stdout

    def test_a_deployment_that_was_never_measured(self, story: Lived, tmp_path: Path) -> None:
        before = next(event.seq for event in story.events if type(event.data).__name__ == "EnvelopeMeasured") - 1
        path = write_export(story.until(before), tmp_path / "export")
        assert {one["problem"] for one in asked("status", path)["deployments"]} == {"NO_MEASURED_ENVELOPE"}
        assert "NO_MEASURED_ENVELOPE" in run("status", path).stdout

    def test_an_empty_ledger(self, tmp_path: Path) -> None:
        path = tmp_path / "ledger.sqlite"
        SqliteLedger(path).close()
        assert asked("status", path)["accelerators"] == []
        assert "no event yet" in run("status", path).stdout

    def test_a_failed_load_holds_the_next(self, story: Lived) -> None:
        failed = next(event for event in story.events if type(event.data).__name__ == "ResidentFailed")
        world = story.until(failed.seq).world
        source = Source("x", Driver.RUNNING, 1)
        batch = next(
            one for one in status_document(world, world.at, source)["deployments"] if one["deployment_id"] == "batch"
        )
        (backoff,) = batch["backoff"]
        assert parse_instant(backoff["until"]) == world.at + seconds(5)
        later = status_document(world, world.at + seconds(6), source)
        assert all(not one["backoff"] for one in later["deployments"])


class TestLiveness:
    def test_no_expired_lease_is_ever_shown_as_live(self, killed: Lived) -> None:
        running = Source("x", Driver.RUNNING, 1)
        for _, record in killed.world.leases():
            lease = record.lease
            for now in (lease.expires_at - 1, lease.expires_at, lease.expires_at + 1):
                shown = {one.lease_id for one, _ in live_leases(killed.world, now, running)}
                assert (lease.lease_id in shown) == (now < lease.expires_at)
                document = status_document(killed.world, now, running)
                assert {one["lease_id"] for one in document["leases"]} == shown

    @pytest.mark.parametrize("driver", [Driver.NONE, Driver.STARTING, Driver.EXPORT])
    def test_nor_any_without_a_scheduler(self, killed: Lived, driver: Driver) -> None:
        assert live_leases(killed.world, killed.world.at, Source("x", driver)) == ()


class TestLeases:
    def test_live_ones(self, killed: Lived, driven_ledger: Path) -> None:
        shown = asked("leases", driven_ledger)
        assert shown["schema"] == "gpuledger.leases/1"
        lived = {record.lease.lease_id: record.lease for _, record in killed.world.leases()}
        assert {one["lease_id"] for one in shown["leases"]} == set(lived)
        for one in shown["leases"]:
            lease = lived[one["lease_id"]]
            assert one["expires_at"] == format_instant(lease.expires_at)
            assert one["expires_in_ms"] == (lease.expires_at - killed.world.at) // 1000
            assert one["request_id"] == lease.request_id
            assert one["start"] in ("cold", "warm")
        assert (shown["not_live"], shown["ended"]) == (0, [])

    def test_none_without_a_scheduler(self, killed: Lived, killed_ledger: Path) -> None:
        shown = asked("leases", killed_ledger)
        assert shown["leases"] == []
        assert shown["not_live"] == len(list(killed.world.leases()))
        told = run("leases", killed_ledger).stdout
        assert "no lease is live" in told
        assert f"{shown['not_live']} more have no recorded end" in told

    def test_the_last_that_ended(self, ended_ledger: Path, story: Lived) -> None:
        ended = asked("leases", ended_ledger, "--all", 7)["ended"]
        names = ("LeaseReleased", "LeaseExpired", "LeasePreempted")
        ends = [event for event in story.events if type(event.data).__name__ in names]
        assert [one["ended_seq"] for one in ended] == [event.seq for event in reversed(ends)][:7]
        assert all(one["ended_by"] and one["ended_at"] for one in ended)
        assert len(asked("leases", ended_ledger, "--all", 500)["ended"]) == len(ends)
        assert "Ended, newest first" in run("leases", ended_ledger, "--all", 3).stdout

    def test_more_than_are_kept(self, ended_ledger: Path) -> None:
        assert "500" in refused("leases", ended_ledger, "--all", 501)


class TestPlans:
    def test_newest_first(self, ended_ledger: Path, story: Lived) -> None:
        shown = asked("plans", ended_ledger, "--limit", 9)
        assert shown["schema"] == "gpuledger.plans/1"
        plans = [event for event in reversed(story.events) if isinstance(event.data, PlanDecided)]
        assert [one["seq"] for one in shown["plans"]] == [event.seq for event in plans][:9]
        assert shown["left_out"] == len(plans) - 9
        assert f"and {len(plans) - 9} more" in run("plans", ended_ledger, "--limit", 9).stdout

    @pytest.mark.parametrize(
        ("option", "value", "field"),
        [
            ("--capability", "chat@1", "capability"),
            ("--verdict", "QUEUE", "verdict"),
            ("--accelerator", "GPU-0", "accelerator_id"),
        ],
    )
    def test_filters(self, ended_ledger: Path, option: str, value: str, field: str) -> None:
        everything = asked("plans", ended_ledger, "--limit", 500)["plans"]
        shown = asked("plans", ended_ledger, "--limit", 500, option, value)["plans"]
        assert shown == [one for one in everything if one[field] == value] != []

    def test_by_reason(self, ended_ledger: Path) -> None:
        shown = asked("plans", ended_ledger, "--limit", 500, "--reason", "LOAD_BACKOFF")["plans"]
        assert shown
        assert all("LOAD_BACKOFF" in one["reasons"] for one in shown)
        assert run("plans", ended_ledger, "--reason", "QUEUE_FULL").stdout == "no such plan\n"

    @pytest.mark.parametrize(("option", "value"), [("--verdict", "MAYBE"), ("--reason", "BAD_LUCK"), ("--limit", "0")])
    def test_what_is_no_filter(self, ended_ledger: Path, option: str, value: str) -> None:
        assert option in refused("plans", ended_ledger, option, value)


class TestExplain:
    def test_an_admission_is_decided_again_where_little_was_kept(self, ended_ledger: Path, story: Lived) -> None:
        plan = next(e for e in story.events if isinstance(e.data, PlanDecided) and e.data.verdict is Verdict.ADMIT)
        assert isinstance(plan.data, PlanDecided)
        assert "candidates" not in plan.data.plan
        shown = asked("explain", plan.data.plan_id, ended_ledger)
        assert shown["subject"] == {"kind": "plan", "id": plan.data.plan_id}
        (one,) = [one for one in shown["plans"] if one["plan_id"] == plan.data.plan_id]
        assert (one["evidence"], one["replay"]) == ("recomputed", {"result": "MATCH"})
        assert one["document"]["fingerprint"] == plan.data.fingerprint
        assert one["document"]["candidates"]
        told = run("explain", plan.data.plan_id, ended_ledger).stdout
        assert "was decided again" in told
        assert "Candidates, best first" in told

    def test_or_shown_as_it_was_kept(self, ended_ledger: Path, story: Lived) -> None:
        plan = next(e for e in story.events if isinstance(e.data, PlanDecided) and e.data.verdict is Verdict.ADMIT)
        assert isinstance(plan.data, PlanDecided)
        shown = asked("explain", plan.data.plan_id, ended_ledger, "--recorded")
        (one,) = [one for one in shown["plans"] if one["plan_id"] == plan.data.plan_id]
        assert (one["evidence"], one["document"]) == ("recorded", plan.data.plan)
        assert "As recorded." in run("explain", plan.data.plan_id, ended_ledger, "--recorded").stdout

    def test_the_whole_story_of_a_request(self, ended_ledger: Path, story: Lived) -> None:
        queued = {event.data.request_id for event in story.events if isinstance(event.data, RequestQueued)}
        granted = next(e.data for e in story.events if isinstance(e.data, LeaseGranted) and e.data.awaits)
        assert granted.request_id in queued
        shown = asked("explain", granted.request_id, ended_ledger)
        assert shown["schema"] == "gpuledger.explain/1"
        types = [entry["type"] for entry in shown["timeline"]]
        assert types[0] == "RequestReceived"
        assert types[-1] == "RequestCompleted"
        for name in ("RequestQueued", "EvictionStarted", "LeaseGranted", "ResidentEvicted", "ResidentLoadStarted"):
            assert name in types
        assert types.index("EvictionStarted") < types.index("LeaseGranted") < types.index("ResidentReady")
        assert [entry["seq"] for entry in shown["timeline"]] == sorted(entry["seq"] for entry in shown["timeline"])
        assert all(entry["told"] for entry in shown["timeline"])
        assert shown["outcome"]["state"] == "completed"
        assert [one["lease_id"] for one in shown["leases"]][-1] == granted.lease_id
        assert shown["leases"][-1]["ended_by"] == "completed"
        told = run("explain", granted.request_id, ended_ledger).stdout
        assert told.startswith("COMPLETED")
        assert "Evictions, one after the other" in told

    def test_only_what_concerns_it(self, ended_ledger: Path, story: Lived) -> None:
        """Of every event of others in the meantime, none."""
        for request_id in ("r7", "r11", "r30"):
            shown = asked("explain", request_id, ended_ledger, "--recorded")
            lease_ids = {one["lease_id"] for one in shown["leases"]}
            for entry in shown["timeline"]:
                data: object = story.events[int(entry["seq"]) - 1].data
                owner = getattr(data, "request_id", None)
                assert owner in (None, request_id) or getattr(data, "by_request_id", None) == request_id
                assert getattr(data, "lease_id", None) in (None, *lease_ids) or hasattr(data, "by_request_id")

    @pytest.mark.parametrize("reason", [Reason.DEADLINE_CANNOT_BE_MET, Reason.LOAD_BACKOFF, Reason.QUEUED_BEHIND])
    def test_a_refusal(self, ended_ledger: Path, story: Lived, reason: Reason) -> None:
        failed = next(e.data for e in story.events if isinstance(e.data, RequestFailed) and e.data.reason is reason)
        shown = asked("explain", failed.request_id, ended_ledger)
        assert shown["outcome"]["state"] == "refused"
        assert shown["outcome"]["reason"] == reason
        assert f"refused with {reason}" in run("explain", failed.request_id, ended_ledger).stdout

    def test_a_load_that_failed(self, ended_ledger: Path, story: Lived) -> None:
        failed = next(e.data for e in story.events if isinstance(e.data, RequestFailed) and e.data.failure is not None)
        shown = asked("explain", failed.request_id, ended_ledger)
        assert shown["outcome"] == {
            "state": "failed",
            "at": format_instant(failed.failed_at),
            "reason": None,
            "failure": "MODEL_LOAD_FAILED",
            "detail": "exit_status_1",
        }
        assert "ResidentFailed" in [entry["type"] for entry in shown["timeline"]]
        assert "FAILED" in run("explain", failed.request_id, ended_ledger).stdout

    def test_one_that_has_not_ended(self, killed: Lived, killed_ledger: Path) -> None:
        waiter = waiting(killed.world)[0].question.request_id
        shown = asked("explain", waiter, killed_ledger)
        assert shown["outcome"] == {"state": "open", "at": None}
        assert "its end is not in the ledger" in run("explain", waiter, killed_ledger).stdout

    def test_a_lease_leads_to_its_request(self, ended_ledger: Path, story: Lived) -> None:
        granted = story.newest(LeaseGranted).data
        assert isinstance(granted, LeaseGranted)
        shown = asked("explain", granted.lease_id, ended_ledger)
        assert shown["subject"] == {"kind": "lease", "id": granted.lease_id}
        assert shown["request"]["request_id"] == granted.request_id

    def test_the_beginning_of_an_id(self, ended_ledger: Path) -> None:
        assert asked("explain", "lat", ended_ledger)["request"]["request_id"] == "late"
        assert asked("explain", "lease-r58-", ended_ledger)["subject"]["kind"] == "lease"

    def test_an_id_that_is_also_a_beginning(self, ended_ledger: Path) -> None:
        assert asked("explain", "r1", ended_ledger)["request"]["request_id"] == "r1"

    def test_an_ambiguous_one(self, ended_ledger: Path) -> None:
        told = refused("explain", "plan-r5", ended_ledger)
        assert told.startswith("plan-r5 may be any of plan-r5-1, ")
        assert "more" in told

    @pytest.mark.parametrize("name", ["nobody", "plan-r1-99", "lease-r1-99", '"', "r1-1"])
    def test_an_unknown_one(self, ended_ledger: Path, name: str) -> None:
        assert refused("explain", name, ended_ledger) == f"no request, plan or lease of this ledger is named {name}\n"

    @pytest.mark.parametrize("name", ["\udcff", "é"])
    def test_a_name_that_is_no_id(self, ended_ledger: Path, name: str) -> None:
        assert "ids are ASCII" in refused("explain", name, ended_ledger)
        assert "there is no plan" in refused("replay", ended_ledger, "--plan", name)

    def test_a_plan_of_another_planner_is_shown_as_it_was_kept(self, story: Lived, tmp_path: Path) -> None:
        plan = next(e for e in story.events if isinstance(e.data, PlanDecided) and e.data.verdict is Verdict.ADMIT)
        assert isinstance(plan.data, PlanDecided)
        lines = forged(story, plan.seq, lambda data: data.update(planner_version="other/1"))
        path = write_export(lines, tmp_path / "export")
        (one,) = asked("explain", plan.data.plan_id, path)["plans"]
        assert (one["evidence"], one["replay"]["result"]) == ("recorded", "UNREPLAYABLE")
        assert "gave UNREPLAYABLE: it was made by other/1" in run("explain", plan.data.plan_id, path).stdout

    def test_a_plan_that_is_no_document(self, story: Lived, tmp_path: Path) -> None:
        plan = story.newest(PlanDecided)
        assert isinstance(plan.data, PlanDecided)
        lines = forged(story, plan.seq, lambda data: data.update(plan={"verdict": "MAYBE"}))
        told = run("explain", plan.data.plan_id, write_export(lines, tmp_path / "export"), "--recorded").stdout
        assert "what was recorded is no document of a plan" in told


class TestReplay:
    def test_all_match(self, ended_ledger: Path, story: Lived) -> None:
        result = run("replay", ended_ledger, "--json")
        assert result.exit_code == 0
        found = json.loads(result.stdout)
        plans = [event for event in story.events if isinstance(event.data, PlanDecided)]
        assert [one["seq"] for one in found["plans"]] == [event.seq for event in plans]
        assert found["summary"] == {
            "events": len(story.events),
            "plans": len(plans),
            "MATCH": len(plans),
            "MISMATCH": 0,
            "UNREPLAYABLE": 0,
        }
        told = run("replay", ended_ledger)
        assert told.exit_code == 0
        assert f"MATCH {len(plans)}   MISMATCH 0   UNREPLAYABLE 0" in told.stdout

    def test_a_mismatch_is_3_and_named(self, story: Lived, tmp_path: Path) -> None:
        plan = story.newest(PlanDecided)
        lines = forged(story, plan.seq, lambda data: data.update(verdict="REJECT_HEALTH"))
        path = write_export(lines, tmp_path / "export")
        result = run("replay", path, "--json")
        assert result.exit_code == 3
        (wrong,) = [one for one in json.loads(result.stdout)["plans"] if one["result"] != "MATCH"]
        assert isinstance(plan.data, PlanDecided)
        assert wrong["difference"] == {
            "field": "verdict",
            "recorded": "REJECT_HEALTH",
            "recomputed": plan.data.verdict,
        }
        told = run("replay", path)
        assert told.exit_code == 3
        assert '"REJECT_HEALTH"' in told.stdout

    def test_an_unreplayable_one_is_4(self, story: Lived, tmp_path: Path) -> None:
        plan = story.newest(PlanDecided)
        lines = forged(story, plan.seq, lambda data: data.update(planner_version="other/1"))
        result = run("replay", write_export(lines, tmp_path / "export"))
        assert result.exit_code == 4
        assert "it was made by other/1" in result.stdout

    def test_a_mismatch_outweighs_an_unreplayable_one(self, story: Lived, tmp_path: Path) -> None:
        first = next(event for event in story.events if isinstance(event.data, PlanDecided))
        lines = forged(story, story.newest(PlanDecided).seq, lambda data: data.update(planner_version="other/1"))
        lines[first.seq - 1] = forge(lines[first.seq - 1], lambda data: data.update(fingerprint="0" * 64))
        assert run("replay", write_export(lines, tmp_path / "export")).exit_code == 3

    def test_a_dropped_line_is_2_and_named(self, story: Lived, tmp_path: Path) -> None:
        lines = [line for seq, line in enumerate(story.lines, start=1) if seq != 400]
        assert "line 400" in refused("replay", write_export(lines, tmp_path / "export"))

    def test_what_stops_it_is_in_the_document_too(self, story: Lived, tmp_path: Path) -> None:
        """A leaf is read when its turn comes: until then the document has begun."""
        lines = list(story.lines)
        lines[499] = lines[499].replace(b'"data":{', b'"data":{"forged":1,', 1)
        result = run("replay", write_export(lines, tmp_path / "export"), "--json")
        assert result.exit_code == 2
        found = json.loads(result.stdout)
        assert found["error"]["seq"] == 500
        assert "500" in result.stderr

    def test_one_plan(self, ended_ledger: Path, story: Lived) -> None:
        plan = story.newest(PlanDecided)
        assert isinstance(plan.data, PlanDecided)
        result = run("replay", ended_ledger, "--plan", plan.data.plan_id)
        assert result.exit_code == 0
        assert plan.data.plan_id in result.stdout
        assert "there is no plan plan-r1" in refused("replay", ended_ledger, "--plan", "plan-r1")

    def test_the_state_that_was_kept(self, story: Lived, tmp_path: Path) -> None:
        path = write_sqlite(story, tmp_path / "ledger.sqlite")
        with closing(SqliteLedger(path)) as ledger:
            save_world(ledger, story.until(500).world)
        assert asked("replay", path)["kept_state"] == {"seq": 500, "result": "MATCH"}
        assert "kept at event 500 is that of the fold" in run("replay", path).stdout


class TestExport:
    def test_the_bytes_that_were_stored(self, ended_ledger: Path, story: Lived, tmp_path: Path) -> None:
        first, second = tmp_path / "first", tmp_path / "second"
        for path in (first, second):
            assert run("ledger", "export", ended_ledger, "-o", path).exit_code == 0
        printed = run("ledger", "export", ended_ledger)
        assert first.read_bytes() == second.read_bytes() == printed.stdout_bytes
        assert first.read_bytes() == b"".join(line + b"\n" for line in story.lines)
        assert run("ledger", "export", first).stdout_bytes == first.read_bytes()

    def test_a_file_appears_whole(self, ended_ledger: Path, tmp_path: Path) -> None:
        path = tmp_path / "export"
        assert run("ledger", "export", ended_ledger, "-o", path).exit_code == 0
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert [one.name for one in tmp_path.iterdir()] == ["export"]

    def test_one_that_fails_leaves_the_old_file(self, story: Lived, tmp_path: Path) -> None:
        path = tmp_path / "export"
        path.write_bytes(b"older\n")
        path.chmod(0o640)
        broken = write_sqlite(story, tmp_path / "broken.sqlite")
        with closing(sqlite3.connect(broken)) as connection:
            connection.execute("DROP TRIGGER stored_events_no_update")
            connection.execute("UPDATE stored_events SET leaf_hash = zeroblob(32) WHERE seq = 300")
            connection.commit()
        assert run("ledger", "export", broken, "-o", path).exit_code == 2
        assert path.read_bytes() == b"older\n"
        good = write_export(story, tmp_path / "good")
        assert run("ledger", "export", good, "-o", path).exit_code == 0
        assert stat.S_IMODE(path.stat().st_mode) == 0o640

    def test_through_a_link(self, ended_ledger: Path, tmp_path: Path) -> None:
        link = tmp_path / "link"
        link.symlink_to(tmp_path / "real")
        assert run("ledger", "export", ended_ledger, "-o", link).exit_code == 0
        assert link.is_symlink()
        assert (tmp_path / "real").stat().st_size > 0

    def test_links_that_lead_in_a_circle(self, ended_ledger: Path, tmp_path: Path) -> None:
        (tmp_path / "loop").symlink_to("loop")
        assert "too many levels of symbolic links" in refused("ledger", "export", ended_ledger, "-o", tmp_path / "loop")
        assert (tmp_path / "loop").is_symlink()

    def test_never_over_the_ledger(self, killed: Lived, tmp_path: Path) -> None:
        path = write_sqlite(killed, tmp_path / "ledger.sqlite")
        before = path.read_bytes()
        assert "is the ledger itself" in refused("ledger", "export", path, "-o", path)
        assert path.read_bytes() == before

    @pytest.mark.parametrize("output", ["/dev/null", "/nowhere/export", "/proc/export", "."])
    def test_where_no_file_can_be(self, ended_ledger: Path, output: str) -> None:
        assert refused("ledger", "export", ended_ledger, "-o", output)


COMMANDS = (("status",), ("leases",), ("plans",), ("explain", "r1"), ("replay",), ("ledger", "export"))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
class TestTarget:
    def test_missing(self, command: tuple[str, ...], tmp_path: Path) -> None:
        assert "No such file" in refused(*command, tmp_path / "nothing")

    def test_a_directory(self, command: tuple[str, ...], tmp_path: Path) -> None:
        assert "is a directory" in refused(*command, tmp_path)

    def test_empty(self, command: tuple[str, ...], tmp_path: Path) -> None:
        (tmp_path / "empty").touch()
        assert "the file is empty" in refused(*command, tmp_path / "empty")

    def test_no_ledger(self, command: tuple[str, ...], tmp_path: Path) -> None:
        (tmp_path / "text").write_text("hello\n")
        assert "is neither a ledger nor an export of one" in refused(*command, tmp_path / "text")

    def test_another_database(self, command: tuple[str, ...], tmp_path: Path) -> None:
        with closing(sqlite3.connect(tmp_path / "other.sqlite")) as connection:
            connection.execute("CREATE TABLE t (x)")
        assert "not a ledger of gpuledger" in refused(*command, tmp_path / "other.sqlite")

    def test_a_line_that_is_cut(self, command: tuple[str, ...], tmp_path: Path) -> None:
        path = write_export(crowded_minutes(), tmp_path / "export")
        path.write_bytes(path.read_bytes()[:-20])
        assert "is cut off" in refused(*command, path)

    def test_not_ours_to_read(self, command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As another user would meet it; root, who runs tests in containers, reads everything."""

        def denied(*_: object) -> None:
            raise PermissionError(13, "Permission denied")

        path = write_export(crowded_minutes(), tmp_path / "export")
        (tmp_path / "gpuledger.yaml").write_text(f"ledger: {path}\n")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(Path, "stat", denied)
        for target in ((path,), (tmp_path / "gpuledger.yaml",), ()):
            assert "ermission denied" in refused(*command, *target)

    def test_a_name_that_no_file_can_have(self, command: tuple[str, ...], tmp_path: Path) -> None:
        assert "name too long" in refused(*command, "x" * 5000)
        assert "TARGET is empty" in refused(*command, "")
        for ledger in ("~nobody.here/x", "x" * 5000, '"a\\0b"'):
            (tmp_path / "c.yaml").write_text(f"ledger: {ledger}\n")
            assert refused(*command, tmp_path / "c.yaml")

    def test_none_named_and_none_there(
        self, command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert "no TARGET was named" in refused(*command)

    def test_by_a_configuration(
        self, command: tuple[str, ...], killed_ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "var").mkdir()
        config = tmp_path / "var" / "gpuledger.yaml"
        config.write_text(f"ledger: {killed_ledger}\nthe rest: may be wrong\n")
        monkeypatch.chdir(tmp_path)
        results = [run(*command), run(*command, config), run(*command, "--config", config)]
        assert [result.exit_code for result in results] == [0, 0, 0]
        Path("gpuledger.yaml").write_text("ledger: elsewhere.sqlite\n")
        told = refused(*command)
        assert "there is no ledger yet" in told
        assert "gpuledger.yaml names it" in told

    @pytest.mark.parametrize("text", ["", "[]", "ledger: 7", "ledger: ''", "ledger: [", "\x00"])
    def test_a_configuration_that_names_none(self, command: tuple[str, ...], tmp_path: Path, text: str) -> None:
        (tmp_path / "gpuledger.yaml").write_text(text)
        assert refused(*command, tmp_path / "gpuledger.yaml")


class TestDamage:
    @pytest.mark.parametrize("command", [("replay",), ("ledger", "export")], ids=" ".join)
    def test_a_row_that_was_changed_is_named(self, story: Lived, tmp_path: Path, command: tuple[str, ...]) -> None:
        path = write_sqlite(story, tmp_path / "ledger.sqlite")
        with closing(sqlite3.connect(path)) as connection:
            (trigger,) = connection.execute(
                "SELECT sql FROM sqlite_schema WHERE name = 'stored_events_no_update'"
            ).fetchone()
            connection.execute("DROP TRIGGER stored_events_no_update")
            connection.execute("UPDATE stored_events SET state = CAST(state || ' ' AS BLOB) WHERE seq = 321")
            connection.execute(trigger)
            connection.commit()
        result = run(*command, path)
        assert result.exit_code == 2
        assert "event 321" in result.stderr
