"""`gpuledger plan`, `pressure` and `schema`, as a person and as a pipe meet them. No input shows a traceback."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from gpuledger.domain import documents
from gpuledger.domain.policy import Policy, Priority
from gpuledger.domain.reasons import Reason
from gpuledger.domain.state import Sleep
from gpuledger.domain.units import GIB, MIB
from gpuledger.tools import cli, reading
from gpuledger.tools.plan_report import console, table_of
from tests.unit.situations import NOW, ago, ask, lease, model, queued, resident, state_of

VECTORS = Path(__file__).parents[1] / "vectors"


@dataclass(frozen=True, slots=True)
class Ran:
    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


Run: TypeAlias = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """The command line in this process: arguments, and standard input as bytes."""

    def run(*arguments: str | Path, stdin: bytes = b"") -> Ran:
        monkeypatch.setattr(sys, "argv", ["gpuledger", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as caught:
            cli.main()
        sys.stdout.flush()
        found = capfd.readouterr()
        assert "Traceback" not in found.err
        status = caught.value.code
        return Ran(status if isinstance(status, int) else 0, found.out, found.err)

    return run


@dataclass(frozen=True, slots=True)
class Files:
    """A state in which `m` has to evict `x`, and the question for `m`."""

    folder: Path

    @property
    def state(self) -> Path:
        return self.folder / "s.json"

    @property
    def request(self) -> Path:
        return self.folder / "r.json"

    def write(self, name: str, content: bytes | object) -> Path:
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return path


@pytest.fixture
def files(tmp_path: Path) -> Files:
    found = Files(tmp_path)
    nap = Sleep(asleep_bytes=64 * MIB, sleep_ms=100, wake_ms=700)
    models = [model("m"), model("x", sleep=nap, priority=Priority.MAINTENANCE), model("y", interruptible=True)]
    state = state_of(
        models,
        [resident("x", attributed_bytes=11 * GIB), resident("y", attributed_bytes=10 * GIB, loaded_at=NOW)],
        leases=[lease("y", priority=Priority.BENCHMARK)],
        queue=[queued("w", "y", Reason.CONCURRENCY_LIMIT)],
    )
    found.write("s.json", documents.state_document(state))
    found.write("r.json", documents.request_document(ask("m")))
    return found


class TestPlan:
    def test_for_a_person(self, run: Run, files: Files) -> None:
        ran = run("plan", "--state", files.state, "--request", files.request)
        assert (ran.status, ran.err) == (0, "")
        for words in (
            "ADMIT_AFTER_EVICTION  m@1 for req-1 (interactive): m on GPU-0 of node-0, cold start in about 8.1 s",
            "res-x      x            sleep    10.9 GiB   100 ms   700 ms   -",
            "schedulable                  1.8 GiB",
            "fingerprint ",
        ):
            assert words in ran.out

    def test_for_a_program(self, run: Run, files: Files) -> None:
        ran = run("plan", "--state", files.state, "--request", files.request, "--json")
        document = json.loads(ran.out)
        assert (ran.status, document["verdict"]) == (0, "ADMIT_AFTER_EVICTION")
        assert document["evictions"][0]["freed_bytes"] == 11 * GIB - 64 * MIB

    def test_a_refusal_is_a_plan(self, run: Run, files: Files) -> None:
        request = files.write("late.json", documents.request_document(ask("m", deadline=ago(1))))
        ran = run("plan", "--state", files.state, "--request", request)
        assert ran.status == 0
        assert "DEADLINE_CANNOT_BE_MET: its deadline has passed" in ran.out

    @pytest.mark.parametrize("which", ["state", "request"])
    def test_one_of_them_from_standard_input(self, run: Run, files: Files, which: str) -> None:
        paths = {"state": str(files.state), "request": str(files.request)}
        stdin = Path(paths[which]).read_bytes()
        paths[which] = "-"
        ran = run("plan", "--state", paths["state"], "--request", paths["request"], "--json", stdin=stdin)
        assert json.loads(ran.out)["verdict"] == "ADMIT_AFTER_EVICTION"

    def test_yaml_by_its_name_and_by_its_look(self, run: Run, files: Files) -> None:
        text = "\n".join(f"{key}: {json.dumps(value)}" for key, value in documents.request_document(ask("m")).items())
        named = files.write("r.yaml", text.encode())
        ran = run("plan", "--state", files.state, "--request", named, "--json")
        piped = run("plan", "--state", files.state, "--request", "-", "--json", stdin=text.encode())
        assert json.loads(ran.out)["verdict"] == "ADMIT_AFTER_EVICTION"
        assert piped.out == ran.out

    @pytest.mark.parametrize(
        "arguments",
        [
            (),
            ("--state", "s.json"),
            ("--state", "-", "--request", "-"),
            ("--batch", "x", "--state", "s.json"),
            ("--what",),
        ],
    )
    def test_arguments_that_do_not_go_together(self, run: Run, arguments: tuple[str, ...]) -> None:
        ran = run("plan", *arguments)
        assert ran.status == 2
        assert ran.err
        assert ran.out == ""

    @pytest.mark.parametrize(
        ("content", "told"),
        [
            (b"", "state: is empty\n"),
            (b"\xff\x00\x01", "state: is not UTF-8 text (byte 0)\n"),
            (b"null", "state: must be an object, not null\n"),
            (b"[" * 100_000, "state: is nested deeper than 32 levels\n"),
            (b'{"now": 1', "state: is not JSON: expecting ',' delimiter at line 1, column 10\n"),
        ],
    )
    def test_a_file_that_is_no_state(self, run: Run, files: Files, content: bytes, told: str) -> None:
        bad = files.write("bad.json", content)
        ran = run("plan", "--state", bad, "--request", files.request)
        assert (ran.status, ran.out, ran.err) == (2, "", told)

    def test_files_that_cannot_be_read(self, run: Run, files: Files) -> None:
        missing = run("plan", "--state", files.folder / "none", "--request", files.request)
        assert (missing.status, missing.err) == (
            2,
            f"state: cannot read {files.folder / 'none'}: no such file or directory\n",
        )
        folder = run("plan", "--state", files.folder, "--request", files.request)
        assert folder.err == f"state: cannot read {files.folder}: is a directory\n"
        odd = run("plan", "--state", "a\0b", "--request", files.request)
        assert odd.status == 2

    def test_every_problem_of_both_files(self, run: Run, files: Files) -> None:
        bad_state = files.write("bad.json", json.loads(files.state.read_bytes()) | {"now": 1, "extra": 2})
        bad_request = files.write("worse.json", b'{"lab": 3}')
        ran = run("plan", "--state", bad_state, "--request", bad_request)
        assert ran.status == 2
        assert ran.err.splitlines()[:2] == [
            "state.now: must be a string with an instant in UTC, as 2026-11-30T12:00:00.000000Z",
            "state.extra: unknown key",
        ]
        assert "request.lab: must be true or false, not 3" in ran.err

    def test_control_characters_of_a_document_do_not_reach_the_terminal(self, run: Run, files: Files) -> None:
        wanted = {"la\x1b[31mbel": "\x1b]0;title\x07"}
        state = state_of([model("m", node_selector=wanted)])
        path = files.write("odd.json", documents.state_document(state))
        ran = run("plan", "--state", path, "--request", files.request)
        assert "LABEL_MISMATCH" in ran.out
        assert "\x1b" not in ran.out
        assert "\x07" not in ran.out


class TestBatch:
    def test_a_bad_line_is_answered_and_the_others_too(self, run: Run, files: Files) -> None:
        case = {"state": json.loads(files.state.read_bytes()), "request": json.loads(files.request.read_bytes())}
        worse = json.loads(json.dumps(case))
        worse["state"]["policy"]["lab_paused"] = 3
        worse["request"]["lab"] = 3
        lines = [json.dumps(case), "", "{", json.dumps(worse), json.dumps(case | {"expect": 1}), "\xff"]
        batch = files.write("cases.jsonl", "\n".join(lines).encode("latin-1"))
        ran = run("plan", "--batch", batch)
        assert ran.status == 2
        answers = ran.lines
        assert [answer.get("verdict") for answer in answers] == [
            "ADMIT_AFTER_EVICTION",
            *[None] * 3,
            "ADMIT_AFTER_EVICTION",
            None,
        ]
        assert answers[1]["error"] == {"line": 2, "where": "", "message": "is empty"}
        assert answers[2]["error"]["line"] == 3
        assert answers[3]["error"] == {
            "line": 4,
            "where": "state.policy.lab_paused",
            "message": "must be true or false, not 3",
            "others": [{"where": "request.lab", "message": "must be true or false, not 3"}],
        }
        assert answers[5]["error"] == {"line": 6, "where": "", "message": "is not UTF-8 text (byte 0)"}

    def test_from_standard_input(self, run: Run) -> None:
        cases = json.loads((VECTORS / "pressure.json").read_bytes())[:3]
        ran = run("pressure", "--batch", "-", stdin="\n".join(map(json.dumps, cases)).encode())
        assert ran.status == 0
        assert ran.lines == [{"levels": case["expect"]} for case in cases]

    def test_a_line_too_long_is_passed_over(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(documents, "MAX_JSON_BYTES", 100)
        monkeypatch.setattr(reading, "MAX_JSON_BYTES", 100)
        ran = run("plan", "--batch", "-", stdin=b"[" * 1000 + b"\n{}\n")
        assert [answer["error"]["line"] for answer in ran.lines] == [1, 2]
        assert ran.lines[1]["error"]["message"] == "is required"

    def test_a_file_that_is_not_there(self, run: Run) -> None:
        ran = run("plan", "--batch", "/nonexistent/cases")
        assert (ran.status, ran.out) == (2, "")
        assert ran.err == "cannot read /nonexistent/cases: no such file or directory\n"

    def test_an_answer_is_there_before_the_next_question(self) -> None:
        case = json.dumps(json.loads((VECTORS / "pressure.json").read_bytes())[0]).encode() + b"\n"
        command = [sys.executable, "-m", "gpuledger.tools.cli", "pressure", "--batch", "-"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            for _ in range(2):
                process.stdin.write(case)
                process.stdin.flush()
                assert b"levels" in process.stdout.readline()
            process.stdin.close()
            assert process.wait() == 0

    def test_who_stops_reading_gets_no_traceback(self) -> None:
        command = [sys.executable, "-m", "gpuledger.tools.cli", "plan", "--batch", str(VECTORS / "none")]
        cases = json.loads((VECTORS / "reported.json").read_bytes())
        lines = "\n".join(json.dumps(case) for case in cases * 3).encode()
        command[-1] = "-"
        reader, writer = os.pipe()
        os.close(reader)
        try:
            ran = subprocess.run(command, input=lines, stdout=writer, stderr=subprocess.PIPE)
        finally:
            os.close(writer)
        assert b"Traceback" not in ran.stderr


class TestPressure:
    def test_for_a_person_and_for_a_program(self, run: Run, files: Files) -> None:
        case = json.loads((VECTORS / "pressure.json").read_bytes())[0]
        path = files.write("p.json", case)
        assert json.loads(run("pressure", path, "--json").out) == {"levels": case["expect"]}
        ran = run("pressure", path)
        assert "13.8 GiB    60.41 %   ELEVATED" in ran.out

    def test_bad_input(self, run: Run, files: Files) -> None:
        assert run("pressure").status == 2
        policy = documents.policy_document(Policy())
        path = files.write("p.json", {"policy": policy, "total_bytes": 0, "samples": []})
        ran = run("pressure", path)
        assert (ran.status, ran.err) == (2, "total_bytes: must be at least 1\n")


class TestSchema:
    @pytest.mark.parametrize("name", ["state", "request", "plan"])
    def test_it_is_printed(self, run: Run, name: str) -> None:
        ran = run("schema", name)
        assert json.loads(ran.out)["$schema"] == documents.JSON_SCHEMA

    def test_of_nothing_else(self, run: Run) -> None:
        assert run("schema", "cat").status == 2


def test_a_title_is_one_line_however_narrow_its_table_is(capsys: pytest.CaptureFixture[str]) -> None:
    table = table_of("Policy m10-v1 to m10-v1+36252b33", "key")
    table.add_row("a")
    console().print(table)
    assert capsys.readouterr().out.splitlines()[0] == "Policy m10-v1 to m10-v1+36252b33"
