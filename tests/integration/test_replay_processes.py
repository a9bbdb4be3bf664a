"""Replay and the commands beside it as processes: the same bytes everywhere, and beside a scheduler that writes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gpuledger.domain.events import PlanDecided
from gpuledger.tools.cli import app
from tests.simulation.ledgers import crowded_minutes, forged, write_export, write_sqlite

ROOT = Path(__file__).resolve().parents[2]


def gpuledger(*arguments: object, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "gpuledger.tools.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, env={**os.environ, **environment}, check=False)


def run(*arguments: object) -> Result:
    """In this process, which is another one than the scheduler's all the same."""
    return CliRunner().invoke(app, [*map(str, arguments)])


def asked(*arguments: object) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


class TestTheSameEverywhere:
    def test_replay_of_a_file_under_another_hash_seed(self, tmp_path: Path) -> None:
        """As "Shown by" 6 of the issue. A mismatch is among them, so that what is shown of it is the same too."""
        story = crowded_minutes()
        lines = forged(story, story.newest(PlanDecided).seq, lambda data: data["plan"].update(eligible=False))
        path = write_export(lines, tmp_path / "export")
        runs = [gpuledger("replay", path, "--json", PYTHONHASHSEED=seed) for seed in ("0", "1", "random")]
        assert [run.returncode for run in runs] == [3, 3, 3]
        assert runs[0].stdout == runs[1].stdout == runs[2].stdout
        assert json.loads(runs[0].stdout)["summary"]["MISMATCH"] == 1

    def test_a_ledger_and_its_export_say_the_same(self, tmp_path: Path) -> None:
        ledger = write_sqlite(crowded_minutes(), tmp_path / "ledger.sqlite")
        for name in ("first", "second"):
            assert run("ledger", "export", ledger, "-o", tmp_path / name).exit_code == 0
        assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
        of_ledger, of_export = run("replay", ledger, "--json"), run("replay", tmp_path / "first", "--json")
        assert (of_ledger.exit_code, of_export.exit_code) == (0, 0)
        assert of_ledger.stdout == of_export.stdout

    def test_replay_writes_nothing(self, tmp_path: Path) -> None:
        ledger = write_sqlite(crowded_minutes(), tmp_path / "ledger.sqlite")
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        for command in (("replay",), ("status",), ("leases", "--all", "9"), ("plans",), ("explain", "r1")):
            assert run(*command, ledger).exit_code == 0
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

    def test_a_reader_that_goes_away(self, tmp_path: Path) -> None:
        """`gpuledger ledger export | head -1`: no traceback."""
        path = write_export(crowded_minutes(), tmp_path / "export")
        command = [sys.executable, "-m", "gpuledger.tools.cli", "ledger", "export", str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == crowded_minutes().lines[0] + b"\n"
            process.stdout.close()
            assert process.wait(30) == 1
            assert process.stderr.read() == b""

    @pytest.mark.parametrize(
        "command", [("status",), ("status", "--json"), ("replay", "--json"), ("ledger", "export")], ids=" ".join
    )
    def test_output_that_no_disk_takes(self, tmp_path: Path, command: tuple[str, ...]) -> None:
        """Or nobody: a stream that was closed before we began is as good as /dev/null."""
        path = write_export(crowded_minutes(), tmp_path / "export")
        line = shlex.join([sys.executable, "-m", "gpuledger.tools.cli", *command, str(path)])
        full = subprocess.run(["sh", "-c", f"exec {line} >/dev/full"], capture_output=True, check=False)
        assert (full.returncode, full.stderr) == (1, b"the output could not be written: no space left on device\n")
        closed = subprocess.run(["sh", "-c", f"exec {line} <&- >&-"], capture_output=True, check=False)
        assert (closed.returncode, closed.stderr) == (0, b"")


@contextmanager
def scheduler(ledger: Path, prefix: str) -> Generator[subprocess.Popen[str]]:
    """A process that drives a ledger (replay_scheduler.py); it goes on at each line it is told."""
    command = [sys.executable, "-m", "tests.integration.replay_scheduler", str(ledger), prefix]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def told(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


class TestBesideAScheduler:
    def test_its_leases_are_live_until_it_is_killed(self, tmp_path: Path) -> None:
        """As "Shown by" 5 of the issue, as far as it is about what is shown."""
        ledger = tmp_path / "ledger.sqlite"
        with scheduler(ledger, "first") as process:
            assert heard(process) == "held"
            told(process)
            assert heard(process) == "working"
            status = asked("status", ledger)
            assert status["scheduler"] == {"state": "running", "pid": process.pid}
            live = [one["lease_id"] for one in status["leases"]]
            assert len(live) == 2
            assert [one["lease_id"] for one in asked("leases", ledger)["leases"]] == live
            assert asked("plans", ledger)["plans"][0]["request_id"] == "first-two"
            assert asked("explain", "first-one", ledger)["outcome"]["state"] == "open"
            assert asked("replay", ledger)["summary"]["MATCH"] == 2
            process.send_signal(signal.SIGKILL)
            process.wait(30)
        status = asked("status", ledger)
        assert status["scheduler"] == {"state": "none", "pid": None}
        assert status["leases"] == asked("leases", ledger)["leases"] == []
        assert asked("leases", ledger)["not_live"] == 2
        with scheduler(ledger, "second") as process:
            assert heard(process) == "held"
            status = asked("status", ledger)
            assert status["scheduler"] == {"state": "starting", "pid": process.pid}
            assert status["leases"] == []
            told(process)
            assert heard(process) == "working"
            shown = asked("leases", ledger, "--all", "5")
            assert shown["scheduler"] == {"state": "running", "pid": process.pid}
            assert {one["request_id"] for one in shown["leases"]} <= {"second-one", "second-two"}
            assert shown["not_live"] == 0
            assert {one["ended_by"] for one in shown["ended"]} == {"scheduler_restarted"}
            assert asked("replay", ledger)["summary"]["MISMATCH"] == 0

    @pytest.mark.parametrize("command", [("replay", "--json"), ("ledger", "export")], ids=" ".join)
    def test_what_it_appends_meanwhile_disturbs_nobody(self, tmp_path: Path, command: tuple[str, ...]) -> None:
        ledger = tmp_path / "ledger.sqlite"
        with scheduler(ledger, "r") as process:
            assert heard(process) == "held"
            told(process)
            results = [run(*command, ledger) for _ in range(10)]
            assert heard(process) == "working"
        assert {result.exit_code for result in results} == {0}
        whole = run(*command, ledger)
        assert whole.exit_code == 0
        if command == ("ledger", "export"):
            assert all(whole.stdout.startswith(result.stdout) for result in results)
