"""The bench measures what it says, tells what it could not, and leaves nothing behind. Nothing depends on speed."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from gpuledger.domain.events import LeaseReleased, PlanDecided, RequestCompleted, ResidentEvicted
from gpuledger.domain.reasons import Verdict
from gpuledger.domain.world import World, fold
from gpuledger.tools import bench_cli, bench_gateway
from gpuledger.tools.bench import MIN_ROUNDS, Bench, Case, Round, Turns, measure, run
from gpuledger.tools.bench_append import append_bench
from gpuledger.tools.bench_cases import decode_bench, encode_bench, fold_bench, plan_bench, replay_bench
from gpuledger.tools.bench_cli import Name
from gpuledger.tools.bench_gateway import CAPABILITY, gateway_bench
from gpuledger.tools.bench_ledger import Day, virtual_day
from gpuledger.tools.bench_report import cpu_name, document_of, file_system, machine, report_of

HOURS = 4


class FakeTime:
    """A clock that moves when work says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float, done: list[str] | None = None, name: str = "") -> Callable[[], None]:
        def one() -> None:
            self.now += seconds
            if done is not None:
                done.append(name)

        return one


def case_of(time: FakeTime, ours: float = 0.3, floor: float = 0.1, **more: Any) -> Case:
    """Two things a round, and all of the time that the clock knows goes by in it."""

    def one(_: int) -> Round:
        time.now += ours + floor
        return Round(2, ours, floor)

    return Case("case", "thing", "the least", "wall", one, **more)


@contextmanager
def bench_of(*cases: Case, ended: list[str] | None = None) -> Generator[Sequence[Case]]:
    try:
        yield cases
    finally:
        if ended is not None:
            ended.append("ended")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go; empty when a bench has cleaned up."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


class TestMeasuring:
    def test_rounds_go_on_until_the_time_is_over(self) -> None:
        time = FakeTime()
        figures = measure(case_of(time), 3.9, time)
        assert figures.rounds == 10
        assert figures.units == 20
        assert figures.ours.median == pytest.approx(0.15)
        assert figures.floor.median == pytest.approx(0.05)
        assert (figures.ratio.low, figures.ratio.median, figures.ratio.high) == pytest.approx((3.0, 3.0, 3.0))

    def test_rounds_that_take_longer_than_the_time_are_enough_for_a_median(self) -> None:
        time = FakeTime()
        assert measure(case_of(time, ours=60.0), 1.0, time).rounds == MIN_ROUNDS

    def test_the_first_round_does_not_count(self) -> None:
        slow_first = iter([9.0])
        time = FakeTime()

        def one(number: int) -> Round:
            time.now += 1
            return Round(1, next(slow_first, 2.0), 1.0)

        assert measure(Case("case", "thing", "the least", "wall", one), 5.0, time).ratio.high == 2.0

    def test_one_disturbed_round_moves_no_median(self) -> None:
        time = FakeTime()

        def one(number: int) -> Round:
            time.now += 1
            return Round(1, 50.0 if number == 3 else 2.0, 1.0)

        figures = measure(Case("case", "thing", "the least", "wall", one), 9.0, time)
        assert (figures.ratio.low, figures.ratio.median, figures.ratio.high) == (2.0, 2.0, 2.0)

    def test_the_floor_goes_first_in_every_second_round(self) -> None:
        time, done = FakeTime(), list[str]()
        turns = Turns(time)
        for number in range(3):
            turns.round(number, 1, time.work(1, done, "ours"), time.work(1, done, "floor"))
        assert done == ["ours", "floor", "floor", "ours", "ours", "floor"]

    def test_the_floor_is_repeated_until_both_take_about_as_long(self) -> None:
        time, done = FakeTime(), list[str]()
        turns = Turns(time)
        rounds = [turns.round(0, 1, time.work(1.0), time.work(0.25, done)) for _ in range(3)]
        assert len(done) == 1 + 4 + 4
        assert rounds == [Round(1, 1.0, 0.25)] * 3

    def test_cases_share_the_time_of_their_bench(self) -> None:
        time = FakeTime()
        result = run("both", lambda: bench_of(case_of(time), case_of(time)), 7.8, time)
        assert [figures.rounds for figures in result.figures] == [10, 10]
        assert result.error is None


class TestFailure:
    def test_what_was_measured_before_stays(self) -> None:
        def broken(_: int) -> Round:
            raise OSError("no space left")

        time, ended = FakeTime(), list[str]()
        cases = (case_of(time), Case("broken", "thing", "the least", "wall", broken))
        result = run("bench", lambda: bench_of(*cases, ended=ended), 1.0, time)
        assert [figures.case for figures in result.figures] == ["case"]
        assert result.error == "OSError: no space left"
        assert ended == ["ended"]

    def test_preparing_may_fail(self) -> None:
        def unprepared() -> AbstractContextManager[Sequence[Case]]:
            raise RuntimeError("nothing to measure")

        result = run("bench", unprepared, 1.0, FakeTime())
        assert (result.figures, result.error) == ((), "RuntimeError: nothing to measure")


class TestVirtualDay:
    def test_it_is_the_same_each_time(self) -> None:
        first = virtual_day(HOURS)
        virtual_day.cache_clear()
        assert virtual_day(HOURS).leaves == first.leaves

    def test_its_fold_is_the_state_of_its_scheduler(self) -> None:
        day = virtual_day(HOURS)
        assert fold(World(), day.events) == day.world
        assert day.ledger.head() == len(day.events) == len(day.leaves)

    def test_requests_are_served_wait_and_drive_out(self) -> None:
        kinds = [type(event.data) for event in virtual_day(HOURS).events]
        verdicts = {event.data.verdict for event in virtual_day(HOURS).events if isinstance(event.data, PlanDecided)}
        assert {Verdict.ADMIT, Verdict.ADMIT_AFTER_EVICTION, Verdict.QUEUE} <= verdicts
        assert kinds.count(RequestCompleted) == kinds.count(LeaseReleased) > 50
        assert kinds.count(ResidentEvicted) > 5


@pytest.mark.parametrize("bench", [encode_bench, decode_bench, fold_bench, plan_bench, replay_bench])
def test_every_bench_of_a_day_can_be_measured(
    bench: Callable[[Callable[[], Day]], Any],
) -> None:
    result = run("bench", partial(bench, partial(virtual_day, HOURS)), 0.01)
    assert result.error is None
    assert result.figures
    for figures in result.figures:
        assert figures.rounds >= MIN_ROUNDS
        assert min(figures.ratio.low, figures.ours.low, figures.floor.low) > 0


class TestAppend:
    def test_it_leaves_no_file_behind(self, temporary: Path) -> None:
        result = run("append", append_bench, 0.01)
        assert result.error is None
        assert all(figures.units == figures.rounds >= MIN_ROUNDS for figures in result.figures)
        assert list(temporary.iterdir()) == []

    def test_the_floor_writes_the_bytes_of_the_ledger(self, temporary: Path) -> None:
        with append_bench() as cases:
            for case in cases:
                for number in range(4):
                    case.round(number)
            (folder,) = temporary.iterdir()
            bare = column(folder / "bare.db", "SELECT body FROM leaves")
            ledger = column(folder / "ledger.db", "SELECT state FROM stored_events")
        assert len(bare) == 4 * 3 + 4 * 2
        assert set(bare) <= set(ledger)


def column(path: Path, query: str) -> list[bytes]:
    with closing(sqlite3.connect(path)) as connection:
        return [value for (value,) in connection.execute(query)]


class TestGateway:
    def test_it_measures_both_ways_and_leaves_nothing_behind(self, temporary: Path) -> None:
        result = run("gateway", gateway_bench, 0.01)
        assert result.error is None
        for figures in result.figures:
            assert figures.details["p50_ms"] <= figures.details["p99_ms"]
            assert figures.details["floor_p50_ms"] <= figures.details["floor_p99_ms"]
            assert figures.details["commits_per_request"] > 0
        assert list(temporary.iterdir()) == []

    def test_a_server_that_does_not_start_is_told(self, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bench_gateway, "CAPABILITY", "no capability")
        result = run("gateway", gateway_bench, 0.01)
        assert result.error is not None
        assert "gpuledger serve ended with status 2" in result.error
        assert list(temporary.iterdir()) == []

    def test_a_refusal_is_no_figure(self, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bench_gateway, "_BODY", orjson.dumps({"model": "nothing@1", "input": "a"}))
        result = run("gateway", gateway_bench, 0.01)
        assert result.error is not None
        assert "POST /v1/embeddings: 404" in result.error
        assert CAPABILITY not in result.error
        assert list(temporary.iterdir()) == []


class TestDocument:
    def test_it_says_what_was_measured_and_on_what(self) -> None:
        time = FakeTime()
        results = [run("one", lambda: bench_of(case_of(time, details=lambda: {"p50_ms": 1.5})), 3.9, time)]
        document = orjson.loads(orjson.dumps(document_of(results, 4.0, {"cpu": "test"})))
        assert document["schema"] == "gpuledger.bench/1"
        assert {"gpuledger", "orjson", "pydantic", "python", "sqlite"} <= document["versions"].keys()
        assert document["machine"] == {"cpu": "test"}
        (bench,) = document["benches"]
        assert (bench["bench"], bench["error"]) == ("one", None)
        (case,) = bench["cases"]
        assert case["ratio"] == {"median": 3.0, "q1": 3.0, "q3": 3.0}
        assert case["ours_us"]["median"] == 150_000
        assert case["floor_us"]["median"] == 50_000
        assert (case["case"], case["unit"], case["floor"], case["time"]) == ("case", "thing", "the least", "wall")
        assert (case["rounds"], case["units"], case["details"]) == (10, 20, {"p50_ms": 1.5})

    def test_a_person_is_told_the_same(self) -> None:
        time = FakeTime()

        def broken(_: int) -> Round:
            raise OSError("no\x1b[31m space")

        cases = (case_of(time, details=lambda: {"p50_ms": 1.5}), Case("broken", "thing", "the least", "wall", broken))
        results = [run("one", lambda: bench_of(*cases), 4.0, time)]
        out = Console(width=150, color_system=None)
        with out.capture() as capture:
            out.print(report_of(document_of(results, 4.0, machine())))
        told = capture.get()
        assert "3.0 to 3.0" in told
        assert "150.00 ms per thing" in told
        assert "one, case: p50_ms 1.5" in told
        assert "one failed: OSError: no\N{REPLACEMENT CHARACTER}[31m space" in told

    def test_the_processor_has_a_name(self, tmp_path: Path) -> None:
        (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n\nmodel name\t: Other\n")
        assert cpu_name(tmp_path / "cpuinfo") == "Some CPU @ 2 GHz"
        assert cpu_name(tmp_path / "absent") != ""

    def test_the_file_system_is_that_of_the_innermost_mount(self, tmp_path: Path) -> None:
        mounts = tmp_path / "mounts"
        inner = str(tmp_path / "with space").replace(" ", "\\040")
        mounts.write_text(f"disk / ext4 rw 0 0\nnone {inner} tmpfs rw 0 0\nold {tmp_path} xfs rw 0 0\n")
        (tmp_path / "with space").mkdir()
        assert file_system(tmp_path / "with space", mounts) == "tmpfs"
        assert file_system(tmp_path, mounts) == "xfs"
        assert file_system(Path("/"), mounts) == "ext4"
        assert file_system(tmp_path, tmp_path / "absent") == "unknown"


class TestCommand:
    @pytest.fixture(autouse=True)
    def benches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Benches that take no time, one of which fails."""

        def broken(_: int) -> Round:
            raise OSError("no space left")

        def fake(*cases: Case) -> Bench:
            return lambda: bench_of(*cases)

        fine = Case("case", "thing", "the least", "wall", lambda _: Round(1, 0.002, 0.001))
        monkeypatch.setattr(
            bench_cli,
            "BENCHES",
            {name: fake(fine) for name in Name}
            | {Name.GATEWAY: fake(Case("case", "thing", "the least", "wall", broken))},
        )

    def invoke(self, *arguments: str) -> tuple[int, str, str]:
        app = typer.Typer()
        app.callback()(lambda: None)
        bench_cli.register(app)
        done = CliRunner().invoke(app, ["bench", "--seconds", "0.01", *arguments])
        return done.exit_code, done.stdout, done.stderr

    def test_one_bench(self) -> None:
        status, out, _ = self.invoke("--only", "fold")
        assert status == 0
        assert "fold" in out
        assert "2.0" in out
        assert "append" not in out

    def test_all_of_them_though_one_fails(self) -> None:
        status, out, _ = self.invoke("--json", "-")
        assert status == 1
        benches = orjson.loads(out)["benches"]
        assert [bench["bench"] for bench in benches] == [name.value for name in Name]
        assert {bench["bench"]: bench["error"] for bench in benches if bench["error"]} == {
            "gateway": "OSError: no space left"
        }

    def test_a_file_beside_the_table(self, tmp_path: Path) -> None:
        path = tmp_path / "figures.json"
        status, out, _ = self.invoke("--only", "plan", "--only", "fold", "--json", str(path))
        assert status == 0
        assert "ratio" in out
        assert [bench["bench"] for bench in orjson.loads(path.read_bytes())["benches"]] == ["plan", "fold"]

    def test_what_cannot_be_used(self, tmp_path: Path) -> None:
        assert self.invoke("--only", "nothing")[0] == 2
        assert self.invoke("--only", "fold", "--seconds", "0")[0] == 2
        status, _, err = self.invoke("--only", "fold", "--json", str(tmp_path / "absent" / "figures.json"))
        assert status == 2
        assert "no such file or directory" in err
