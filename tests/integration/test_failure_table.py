"""Every class of failure, provoked for real: what is recorded, told and shown, that it is bounded, and what it leaves.

The table itself is `failure_rows.py`, and docs/failures.md has it word for word; `failure_cases.py` says how each class
is provoked, on the servers of `failure_stages.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import httpx
import pytest
from typer.testing import CliRunner

from gpuledger.domain.events import (
    CapabilityDegraded,
    FailureRecorded,
    LeaseGranted,
    Recorded,
    RequestFailed,
    RequestFellBack,
    RequestRetried,
    ResidentFailed,
    TelemetryMissed,
)
from gpuledger.domain.failures import CAPACITY_FAILURES, Failure, owner_of
from gpuledger.domain.units import seconds
from gpuledger.projections.failures import FailureView, view_of
from gpuledger.tools.cli import app
from tests.docs.documents import ROOT
from tests.integration.failure_cases import CASES
from tests.integration.failure_rows import HEAD, ROWS, Row, table_lines
from tests.integration.failure_stages import POLICY, SECRET, STAGES, Stage
from tests.integration.serving import Serving

Test: TypeAlias = Callable[[Stage, Failure], None]

#: Short and typed: a word, or a word with a number or a reason in it. No path, no sentence, nothing of a request.
DETAIL: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
EVIDENCE: Final = re.compile(r"[0-9a-f]{64}")
#: What `status` shows of failures: the newest.
SHOWN_BY_STATUS: Final = 5


@pytest.fixture(scope="module")
def stage(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_chat_gguf: Path
) -> Generator[Stage]:
    """One server after the other; of each it is seen that it leaves nothing when it has stopped."""
    name: str = request.param
    with STAGES[name](tmp_path_factory.mktemp(name), tiny_chat_gguf) as running:
        yield running
    assert_replayed(running.server)


def each_on(name: str) -> Callable[[Test], Test]:
    """Every class of failure that is provoked on one server."""
    found = [failure for failure in Failure if CASES[failure].stage == name]
    on_stage = pytest.mark.parametrize("stage", [name], indirect=True, scope="module")
    of_class = pytest.mark.parametrize("failure", found, ids=[failure.value for failure in found])
    return lambda test: on_stage(of_class(test))


def test_no_class_is_missing() -> None:
    assert set(ROWS) == set(CASES) == set(Failure)


def test_the_page_has_this_table() -> None:
    lines = (ROOT / "docs" / "failures.md").read_text("utf-8").splitlines()
    first = lines.index(HEAD)
    table = lines[first : lines.index("", first)]
    assert table == list(table_lines()), "print it: python -m tests.integration.failure_rows"


@each_on("host")
def test_of_runtimes_and_queues(stage: Stage, failure: Failure) -> None:
    assert_as_in_the_table(stage, failure)


@each_on("lease")
def test_of_leases(stage: Stage, failure: Failure) -> None:
    assert_as_in_the_table(stage, failure)


@each_on("crowded")
def test_of_a_crowded_card(stage: Stage, failure: Failure) -> None:
    assert_as_in_the_table(stage, failure)


@each_on("faulty")
def test_of_a_card_that_fails(stage: Stage, failure: Failure) -> None:
    assert_as_in_the_table(stage, failure)


def assert_as_in_the_table(stage: Stage, failure: Failure) -> None:
    row, case, server = ROWS[failure], CASES[failure], stage.server
    stage.server.until(stage.is_at_rest)
    seq, before = server.world().seq, failures_of(server)
    with case.provoke(stage) as answer:
        # Nobody who is answered waits for the record of it.
        server.until(lambda: _has_ended(server.events()[seq:], request_of(answer)))
        events = server.events()[seq:]
        assert_answered(row, answer)
        views = assert_recorded(failure, row, case.capability, events)
        assert_told(row, answer, events)
        assert_shown(failure, row, server, views)
        assert_counted(failure, row, before, failures_of(server), events)
    server.until(stage.is_at_rest)
    assert_bounded(row, answer, server.events()[seq:])
    assert_nothing_was_written_down(stage)
    assert_replayed(server)


# ---- what the client got ----------------------------------------------------------------------------------------


def assert_answered(row: Row, answer: httpx.Response) -> None:
    """An error in the shape of OpenAI's, with `Retry-After` exactly where asking again helps."""
    assert answer.status_code == row.status, answer.text
    error = answer.json()["error"]
    assert {"message", "type", "code", "param", "request_id"} <= error.keys()
    assert (error["code"], error["request_id"]) == (row.code, answer.headers["x-request-id"])
    assert ("retry-after" in answer.headers) is row.retry_after
    if row.retry_after:
        assert 1 <= int(answer.headers["retry-after"]) <= 300
    else:
        assert answer.headers["x-should-retry"] == "false"


def assert_told(row: Row, answer: httpx.Response, events: Sequence[Recorded]) -> None:
    """The ledger has the end of that request, for what its client was told."""
    request_id = request_of(answer)
    ends = [one.data for one in events if isinstance(one.data, RequestFailed) and one.data.request_id == request_id]
    assert [end.reason or end.failure for end in ends] == [row.code]


def _has_ended(events: Sequence[Recorded], request_id: str) -> bool:
    return any(isinstance(one.data, RequestFailed) and one.data.request_id == request_id for one in events)


def request_of(answer: httpx.Response) -> str:
    request_id: str = answer.json()["error"]["request_id"]
    return request_id


# ---- what was recorded ------------------------------------------------------------------------------------------


def assert_recorded(failure: Failure, row: Row, capability: str, events: Sequence[Recorded]) -> Sequence[FailureView]:
    """As events of their class: owner, whom it hit, which attempt of how many, the hash of what shows it, a word."""
    found = [
        view_of(event, event.data) for event in events if isinstance(event.data, FailureRecorded | TelemetryMissed)
    ]
    views = [view for view in found if view.failure is failure]
    assert views, found
    for view in views:
        assert view.owner == owner_of(failure).value
        assert view.capability == (None if failure is Failure.DRIVER_ERROR else capability)
        assert 1 <= view.attempt <= view.limit
        assert EVIDENCE.fullmatch(view.evidence_sha256)
        assert DETAIL.fullmatch(view.detail), view.detail
        assert [name for name in row.subjects if getattr(view, name) is None] == []
    return views


# ---- what is shown ----------------------------------------------------------------------------------------------


def shown(*words: str) -> Any:
    """What a command prints for programs."""
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def failures_of(server: Serving) -> Any:
    return shown("failures", str(server.ledger))


def assert_shown(failure: Failure, row: Row, server: Serving, views: Sequence[FailureView]) -> None:
    """`status` while it lasts: the failure itself, and what needs a look because of it."""
    status = shown("status", str(server.ledger))
    assert len(status["failures"]) <= SHOWN_BY_STATUS
    assert {view.seq for view in views} & {one["seq"] for one in status["failures"]}
    assert set(row.alerts) <= {alert["kind"] for alert in status["alerts"]}
    listed = shown("failures", str(server.ledger), "--class", failure.value)["failures"]
    assert [view.seq for view in reversed(views)] == [one["seq"] for one in listed[: len(views)]]
    assert {(one["failure"], one["owner"]) for one in listed} == {(failure.value, owner_of(failure).value)}


def assert_counted(failure: Failure, row: Row, before: Any, after: Any, events: Sequence[Recorded]) -> None:
    """Refusals for want of room are counted apart from what is somebody's fault, and neither among the other."""
    recorded = [
        view_of(event, event.data).failure
        for event in events
        if isinstance(event.data, FailureRecorded | TelemetryMissed)
    ]
    assert count_of(after, failure) - count_of(before, failure) == recorded.count(failure) > 0
    internal = [one for one in recorded if one not in CAPACITY_FAILURES]
    assert after["internal_errors"] - before["internal_errors"] == len(internal)
    refused = row.code in {one.value for one in CAPACITY_FAILURES}
    assert after["capacity_rejections"] - before["capacity_rejections"] == int(refused)
    if failure in CAPACITY_FAILURES:
        assert internal == []


def count_of(document: Any, failure: Failure) -> int:
    (found,) = (one for one in document["classes"] if one["failure"] == failure.value)
    assert found["capacity"] is (failure in CAPACITY_FAILURES)
    count: int = found["count"]
    return count


# ---- that it is bounded -----------------------------------------------------------------------------------------


def assert_bounded(row: Row, answer: httpx.Response, events: Sequence[Recorded]) -> None:
    """By the end: so many leases and no more, each further attempt an event within its limit, loads backed off."""
    request_id = request_of(answer)
    of_request = [event.data for event in events if getattr(event.data, "request_id", None) == request_id]
    assert sum(isinstance(one, LeaseGranted) for one in of_request) == row.grants
    retries = [one for one in of_request if isinstance(one, RequestRetried)]
    assert [one.attempt for one in retries] == list(range(1, len(retries) + 1))
    assert all(one.attempt <= one.limit == 1 for one in retries)
    assert sum(isinstance(one, RequestFellBack) for one in of_request) <= 1
    assert sum(isinstance(event.data, CapabilityDegraded) for event in events) <= 1
    assert_backed_off(row, events)


def assert_backed_off(row: Row, events: Sequence[Recorded]) -> None:
    """After a failed load the next one of that deployment waits for twice as long as the one before."""
    until: dict[str, int] = {}
    pauses: dict[str, int] = {}
    for event in events:
        match event.data:
            case ResidentFailed(deployment_id=name, failed_at=failed_at, backoff_until=int() as backoff_until):
                until[name] = backoff_until
                assert backoff_until - failed_at == pauses.get(name, seconds(POLICY["load_backoff_seconds"]))
                pauses[name] = 2 * (backoff_until - failed_at)
            case LeaseGranted(deployment_id=name, granted_at=granted_at):
                assert granted_at >= until.get(name, 0)
            case _:
                pass  # it says nothing of loads
    assert bool(until) is row.backs_off


# ---- what it leaves ---------------------------------------------------------------------------------------------


def assert_nothing_was_written_down(stage: Stage) -> None:
    """Of a request, or of where things lie: not in the ledger, nor in what the server says."""
    files = [path for path in stage.server.folder.rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    ledger = [path for path in files if path.name.startswith(stage.server.ledger.name)]
    assert [path for path in ledger if str(stage.folder).encode() in path.read_bytes()] == []


def assert_replayed(server: Serving) -> None:
    """Every decision follows from what is before it in the ledger, those of the failure among them."""
    document = shown("replay", str(server.ledger))
    results = {plan["result"] for plan in document["plans"]}
    kept = document["kept_state"]
    assert results | ({kept["result"]} if kept else set()) == {"MATCH"}
