"""`make chaos`: half a minute of it, and that what it looks for would be found."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gpuledger.adapters import procfs
from gpuledger.domain.events import FailureRecorded
from gpuledger.domain.failures import Failure, owner_of
from gpuledger.domain.units import MIB
from tests.chaos.arena import Arena, Outage
from tests.chaos.asking import Answer
from tests.chaos.ballast import Hog
from tests.chaos.faults import KILLED, Hit
from tests.chaos.follower import Follower
from tests.chaos.judge import Judge, Tally, log_trouble
from tests.chaos.scene import CLIENTS, OFFERS, Scene
from tests.chaos.starved import Starvation
from tests.chaos.traffic import Order, Traffic
from tests.chaos.watch import Watch
from tests.children import identity_of

STORM_MINUTES = "0.3"
RUN_SECONDS = 600


@pytest.mark.alone
def test_half_a_minute_of_chaos(tmp_path: Path) -> None:
    words = ("--minutes", STORM_MINUTES, "--seed", "4", "--few", "--rate", "4", "--folder", str(tmp_path))
    done = subprocess.run(
        (sys.executable, "-m", "tests.chaos", *words), capture_output=True, text=True, timeout=RUN_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "seed-4.json").read_text())
    assert told["passed"]
    assert {found["count"] for found in told["checks"].values()} == {0}
    assert sum(told["completed"].values()) > 0
    assert told["faults"]["runtime killed"] > 0
    assert told["schedulers"] > told["faults"]["scheduler killed"] > 0
    assert not (tmp_path / "seed-4").exists()


# ---- what is drawn ----------------------------------------------------------------------------------------------


def test_a_seed_draws_the_same_orders() -> None:
    def drawn(seed: int) -> list[Order]:
        return list(Traffic(Random(seed), OFFERS, 5.0).orders(120.0))

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    orders = drawn(1)
    assert {order.who for order in orders} == set(CLIENTS)
    assert {order.offer for order in orders} == set(OFFERS)
    for sort in ("leaves_after", "resets_after", "deadline_ms", "key"):
        assert any(getattr(order, sort) is not None for order in orders), sort
    first = {order.key: order.body for order in orders if order.key is not None and order.key_use == "first"}
    again = [order for order in orders if order.key_use == "again"]
    assert again
    assert all(order.key is not None and first[order.key] == order.body for order in again)


def test_a_hog_holds_what_it_is_told() -> None:
    hog = Hog()
    try:
        for wanted in (64 * MIB, 16 * MIB):
            hog.hold(wanted)
            assert hog.held_bytes == wanted
            assert wanted <= _anonymous_bytes(hog.pid) < wanted + 32 * MIB
    finally:
        hog.end()
    with pytest.raises(ValueError, match="closed file"):
        hog.hold(MIB)


def _anonymous_bytes(pid: int) -> int:
    lines = (procfs.read_process_file(pid, "status") or b"").decode().splitlines()
    (line,) = [one for one in lines if one.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


# ---- what would be found ----------------------------------------------------------------------------------------


class Court:
    """A judge of one answer: the request had a lease on `emb#1`, of which more may be told."""

    def __init__(self, tmp_path: Path) -> None:
        self.arena = Arena(tmp_path, {})
        self.follower = Follower(tmp_path / "ledger.db")
        self.follower.granted["req-1"] = ["emb#1"]
        self.follower.deployment_of["emb#1"] = "emb"
        self.starvation = Starvation()
        self.judge = Judge(self.arena, self.follower, [], self.starvation)

    def hit(self, what: str = KILLED, **subject: str) -> None:
        self.judge = Judge(self.arena, self.follower, [Hit(0.0, what, **subject)], self.starvation)

    def of(self, **seen: Any) -> Tally:
        return self.judge.tally([answer(**seen)])

    def of_code(self, status: int, code: str, **headers: str) -> Tally:
        return self.of(status=status, error={"code": code, "message": "so"}, headers=headers)


def answer(**seen: Any) -> Answer:
    headers = {"x-request-id": "req-1", **seen.pop("headers", {})}
    order = Order(1, 0.0, CLIENTS[0], OFFERS[0], {}, key=seen.pop("key", None))
    return Answer(order, 10.0, 11.0, headers=headers, **seen)


@pytest.fixture
def court(tmp_path: Path) -> Court:
    return Court(tmp_path)


class TestJudge:
    def test_refusals_for_want_of_room_are_no_defects(self, court: Court) -> None:
        found = court.of_code(429, "QUEUE_FULL", **{"retry-after": "5"})
        assert (found.capacity, found.defects) == ({"QUEUE_FULL": 1}, 0)

    @pytest.mark.parametrize(
        ("status", "code"), [(500, "internal_error"), (503, "CAPABILITY_UNAVAILABLE"), (500, "RUNTIME_CRASH")]
    )
    def test_internal_errors(self, court: Court, status: int, code: str) -> None:
        assert court.of_code(status, code).internal.count == 1

    @pytest.mark.parametrize(
        ("status", "code"), [(418, "teapot"), (503, "QUEUE_FULL"), (429, "QUEUE_FULL"), (503, "starting"), (400, "bad")]
    )
    def test_answers_that_are_not_typed(self, court: Court, status: int, code: str) -> None:
        """No such word, another status than the word's, no Retry-After, and a start when nothing was killed."""
        assert court.of_code(status, code).untyped.count == 1

    def test_a_cut_connection_is_ours_only_in_an_outage(self, court: Court) -> None:
        assert court.of(fault="ReadError").untyped.count == 1
        court.arena.outages.append(Outage(since=10.5, over=12.0))
        assert court.of(fault="ReadError").injected == {"scheduler killed": 1}
        court.arena.outages[:] = [Outage(since=1.0, over=9.0)]
        assert court.of(fault="ReadError").untyped.count == 1

    def test_a_failure_is_explained_by_what_was_done(self, court: Court) -> None:
        assert court.of_code(503, "RUNTIME_CRASH").unexplained.count == 1
        court.hit(resident_id="emb#1")
        assert court.of_code(503, "RUNTIME_CRASH").injected == {"RUNTIME_CRASH": 1}
        court.hit(deployment_id="emb")
        assert court.of_code(503, "RUNTIME_CRASH").injected == {"RUNTIME_CRASH": 1}
        court.hit(resident_id="emb#2")
        assert court.of_code(503, "RUNTIME_CRASH").unexplained.count == 1

    def test_no_end_of_memory_is_excused(self, court: Court) -> None:
        court.follower.failures.append(failure(Failure.GPU_OOM, resident_id="emb#1", detail="killed_for_memory"))
        court.hit(what=KILLED, resident_id="emb#1")
        assert court.of_code(503, "GPU_OOM").unexplained.count == 1
        assert court.judge.out_of_memory().count == 1

    def test_work_that_is_done_twice(self, court: Court) -> None:
        served = [answer(whole=True, status=200, key="k") for _ in range(2)]
        assert court.judge.tally(served).repeated_work.count == 1
        assert court.judge.tally(served[:1]).repeated_work.count == 0

    def test_failures_of_the_ledger(self, court: Court) -> None:
        court.follower.failures += [
            failure(Failure.QUEUE_FULL),
            failure(Failure.RUNTIME_CRASH, resident_id="emb#1"),
            failure(Failure.CAPABILITY_UNAVAILABLE),
            failure(Failure.SCHEDULER_STATE_STALE),
        ]
        counts, unexplained = court.judge.failures()
        assert (counts.total(), unexplained.count) == (4, 3)
        court.hit(resident_id="emb#1")
        _, unexplained = court.judge.failures()
        assert ["SCHEDULER_STATE_STALE" in one for one in unexplained.words] == [True]


def failure(what: Failure, resident_id: str | None = None, detail: str = "") -> FailureRecorded:
    return FailureRecorded(
        capability="emb@1",
        failure=what,
        owner=owner_of(what),
        deployment_id=None,
        accelerator_id=None,
        resident_id=resident_id,
        request_id="req-1",
        recorded_at=time.time_ns() // 1000,
        attempt=1,
        limit=1,
        evidence_sha256="0" * 64,
        detail=detail,
    )


def test_errors_in_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text('{"level": "info", "event": "ready"}\n{"level": "warning", "event": "hm"}\n')
    assert log_trouble(log).count == 0
    with log.open("a") as more:
        more.write('{"level": "error", "event": "no"}\n{"level": "warning", "exception": "x"}\nTraceback (most ...\n')
    assert log_trouble(log).count == 3
    assert log_trouble(log, begin_bytes=log.stat().st_size).count == 0


def test_a_process_that_is_left_is_seen(tmp_path: Path) -> None:
    """It holds what nothing allows it, and outlives its resident."""
    scene, arena, follower = Scene(tmp_path, {}, (), 2**40, 0), Arena(tmp_path, {}), Follower(tmp_path / "ledger.db")
    watch = Watch(scene, arena, follower, grace_seconds=0.0)
    hog = Hog()
    try:
        hog.hold(64 * MIB)
        follower.processes["emb#1"] = identity_of(hog.pid)
        held = watch.held_bytes(procfs.scan())
        assert 64 * MIB <= held["emb#1"] < 96 * MIB
        watch.compare(held, {"emb#1": 96 * MIB})
        assert watch.overcommitted.count == 0
        watch.compare(held, {"emb#1": 32 * MIB})
        watch.compare(held, {})
        assert watch.overcommitted.count == 2
        watch.look_for_ghosts(procfs.scan())
        watch.look_for_ghosts(procfs.scan())
        assert watch.ghosts.count == 1
    finally:
        hog.end()
    watch.look_for_ghosts(procfs.scan())
    assert follower.processes == {}
