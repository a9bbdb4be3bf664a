"""What the documents tell people to type is typed here, into a real server on the example, and prints what they say.

`console` blocks are typed into one bash per document; a `python` block is run, and a `text` block right after it is
what it prints; a `yaml` block that begins with a comment with the name of a file is put there. Others (`sh`: what
installs, starts or stops things; `yaml`, `text`) are not run; `test_documents.py` looks at them.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx
import pytest

from gpuledger.tools import examples
from tests.docs.documents import (
    ANY_LINES,
    DOCUMENTED_ADDRESS,
    DOCUMENTED_FOLDER,
    ROOT,
    Bindings,
    Block,
    Terminal,
    blocks_of,
    difference,
    steps_of,
)
from tests.integration.serving import wait_until

#: What the documents use beside gpuledger itself and what is on every Linux.
needs_programs: Final = pytest.mark.skipif(
    any(shutil.which(program) is None for program in ("bash", "curl")), reason="the documents use bash and curl"
)
#: Documents whose commands are typed, each into a server of its own.
TYPED: Final = ("README.md", "docs/clients.md", "docs/operating.md", "docs/auditing.md")
#: Where others hold nearly all of the memory.
TYPED_UNDER_PRESSURE: Final = "docs/operations/RUNBOOK_GPU_PRESSURE.md"
#: A `yaml` block that is a file of its name.
_FILE_NAME: Final = re.compile(r"# ([a-z-]+\.yaml)\n")
EXAMPLE: Final = "var"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an example as `make serve` leaves it, except for its port: prepared, measured, and stopped."""
    folder = tmp_path_factory.mktemp("measured")
    prepared = examples.prepare(folder / EXAMPLE)
    text = prepared.config.read_text("utf-8")
    prepared.config.write_text(text.replace(DOCUMENTED_ADDRESS, "127.0.0.1:0"), "utf-8")
    with served(folder):
        pass  # until everything is measured
    return folder


@pytest.fixture
def example(measured: Path, tmp_path: Path) -> Path:
    """One of its own for each document."""
    shutil.copytree(measured / EXAMPLE, tmp_path / EXAMPLE)
    return tmp_path


def end_with_parent() -> None:
    """Ask the kernel to stop this process when pytest is killed (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


@contextmanager
def served(folder: Path) -> Generator[str]:
    """The address of a server on the example in `folder`."""
    gpuledger = Path(sys.executable).with_name("gpuledger")
    output = folder / "serve.out"
    with output.open("w") as out, (folder / "serve.err").open("w") as err:
        process = subprocess.Popen(
            [gpuledger, "serve", "--config", f"{EXAMPLE}/gpuledger.yaml"],
            cwd=folder,
            stdout=out,
            stderr=err,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
    try:
        wait_until(lambda: "gpuledger is ready" in output.read_text("utf-8") or process.poll() is not None)
        assert process.poll() is None, (folder / "serve.err").read_text("utf-8")
        said = re.search(r"starting at http://(\S+)", output.read_text("utf-8"))
        assert said is not None
        yield said[1]
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()


def environment() -> dict[str, str]:
    """That of a user in the activated environment of the checkout."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "HOME": os.environ.get("HOME", "/"), "LANG": "C.UTF-8", "NO_PROXY": "*"}


def short_of_memory(folder: Path) -> None:
    """Leave the example so little of this machine that what others hold of it is nearly all of it."""
    figures = dict(re.findall(r"(\w+): +(\d+) kB", Path("/proc/meminfo").read_text("ascii")))
    used_bytes = (int(figures["MemTotal"]) - int(figures["MemAvailable"])) * 1024
    limit = used_bytes * 102 // 100
    config = folder / EXAMPLE / "gpuledger.yaml"
    text = config.read_text("utf-8")
    for old, new in (
        ("host: true, nvml: auto", f"host: {{memory_limit_bytes: {limit}}}, nvml: false"),
        ("policy: {", "policy: {reserve_floor_bytes: 16MiB, reserve_ratio_bp: 0, runtime_margin_bytes: 0"),
    ):
        assert old in text
        text = text.replace(old, new)
    config.write_text(text.replace("policy: {", "policy: {sample_interval_seconds: 1, "), "utf-8")


def is_critical(address: str) -> bool:
    page = httpx.get(f"http://{address}/metrics", trust_env=False).text
    return 'gpuledger_pressure_level{accelerator="host:local"} 3.0' in page


class Reader:
    """Somebody who does what a document says, line by line."""

    def __init__(self, folder: Path, address: str, terminal: Terminal) -> None:
        self._folder = folder
        self._address = address
        self._terminal = terminal
        self._bindings = Bindings()

    def follow(self, page: str) -> int:
        """Type everything in it, and say how much that was."""
        blocks = blocks_of(ROOT / page)
        done = 0
        for block, following in zip(blocks, [*blocks[1:], None], strict=True):
            match block.language:
                case "console":
                    done += self._type(page, block)
                case "python":
                    self._run(page, block, following)
                    done += 1
                case "yaml" if (name := _FILE_NAME.match(block.text)) is not None:
                    (self._folder / name[1]).write_text(block.text, "utf-8")
                case _:
                    pass  # not to be typed
        return done

    def _type(self, page: str, block: Block) -> int:
        steps = list(steps_of(block))
        for step in steps:
            lines, status = self._terminal.run(self._real(step.command))
            printed = [self._documented(line) for line in lines]
            place = f"{page}:{step.line}: {step.command}"
            assert status == 0, f"{place}\nexit status {status}\n{''.join(printed)}"
            differs = difference(step.output, printed, self._bindings)
            assert differs is None, f"{place}\n{differs}\nall of it:\n{''.join(printed)}"
        return len(steps)

    def _run(self, page: str, block: Block, following: Block | None) -> None:
        ran = subprocess.run(
            [sys.executable, "-c", self._real(block.text)],
            cwd=self._folder,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert ran.returncode == 0, f"{page}:{block.line}\n{ran.stderr}"
        belongs = following is not None and following.language == "text" and following.line - block.after <= 2
        expected = following.text.splitlines() if following is not None and belongs else [ANY_LINES]
        differs = difference(expected, ran.stdout.splitlines(), self._bindings)
        assert differs is None, f"{page}:{block.line}\n{differs}\nall of it:\n{ran.stdout}"

    def _real(self, command: str) -> str:
        return self._bindings.in_words(command).replace(DOCUMENTED_ADDRESS, self._address)

    def _documented(self, line: str) -> str:
        return line.replace(str(self._folder), DOCUMENTED_FOLDER).replace(self._address, DOCUMENTED_ADDRESS)


@needs_programs
@pytest.mark.parametrize("page", TYPED)
def test_what_it_says_is_so(page: str, example: Path) -> None:
    with served(example) as address, Terminal(example, environment()) as terminal:
        assert Reader(example, address, terminal).follow(page) > 0


@needs_programs
@pytest.mark.alone
def test_what_the_runbook_says_is_so(example: Path) -> None:
    short_of_memory(example)
    with served(example) as address, Terminal(example, environment()) as terminal:
        wait_until(lambda: is_critical(address))
        assert Reader(example, address, terminal).follow(TYPED_UNDER_PRESSURE) > 0


@needs_programs
def test_what_the_page_for_soaks_says_is_so() -> None:
    with Terminal(ROOT, environment()) as terminal:
        assert Reader(ROOT, "no.address", terminal).follow("docs/soak.md") > 0


# ---- the comparison itself --------------------------------------------------------------------------------------

DOCUMENTED: Final = """\
scheduler running (process 7983)
/srv/gpuledger/var/ledger.db: event 93, 2.2 s ago, policy m10-v1
...
 place   request                        waits for
 ───────────────────────────────────────────────────
     1   req-5288e83308762b4288e942f3   CONCURRENCY_LIMIT on host:local, needs 0 B
...
MATCH 72   MISMATCH 0   UNREPLAYABLE 0
lease-req-5288e83308762b4288e942f3-2 at 2026-11-30T18:12:47.011391Z, [-0.0369071, 0.00439]
"""
REAL: Final = """\
scheduler running (process 12)
/srv/gpuledger/var/ledger.db: event 1234, 812 ms ago, policy m10-v1

and what nobody foresaw
 place   request                    waits for
 ────────────────────────
     2   req-00000000762b4288e942f3ff  CONCURRENCY_LIMIT on host:local, needs 1.3 GiB
     3   req-11111111762b4288e942f3ff  CONCURRENCY_LIMIT on host:local, needs 1.3 GiB
MATCH 1   MISMATCH 0   UNREPLAYABLE 0
lease-req-00000000762b4288e942f3ff-2 at 2027-01-01T00:00:00.000001Z, [-0.0368, 0.0044001]
"""


def lines(text: str) -> list[str]:
    return text.splitlines()


def test_what_varies_by_itself_is_no_difference() -> None:
    assert difference(lines(DOCUMENTED), lines(REAL), Bindings()) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("MISMATCH 0", "MISMATCH 1"),
        ("UNREPLAYABLE 0", "UNREPLAYABLE 3"),
        ("scheduler running", "no scheduler is running"),
        ("policy m10-v1", "policy m10-v2"),
        ("host:local, needs 1.3 GiB", "host:local, needs nothing"),
        ("CONCURRENCY_LIMIT", "QUEUE_FULL"),
        ("812 ms ago", "some time ago"),
        ("812 ms ago", "812 bytes ago"),
        ("-0.0368", "0.0368"),
        ("0.0044001", "0.0744001"),
        ("lease-req-00000000762b4288e942f3ff-2", "lease-req-11111111762b4288e942f3ff-2"),
        ("lease-req-00000000762b4288e942f3ff-2", "lease-req-00000000762b4288e942f3ff-1"),
        ("2027-01-01T00:00:00.000001Z", "yesterday"),
        ("MATCH 1", "further\nMATCH 1\nfurther"),
        ("scheduler running", "a warning\nscheduler running"),
        (" place   request ", " place   lease "),
    ],
)
def test_what_is_not_as_documented_is_seen(old: str, new: str) -> None:
    changed = REAL.replace(old, new)
    assert changed != REAL
    assert difference(lines(DOCUMENTED), lines(changed), Bindings()) is not None


def test_an_output_that_is_longer_or_shorter_is_seen() -> None:
    assert difference(lines(DOCUMENTED), lines(REAL + "further"), Bindings()) is not None
    assert difference(lines(DOCUMENTED), lines(REAL)[:-1], Bindings()) is not None
    assert difference([], ["something"], Bindings()) is not None
    assert difference(["something"], [], Bindings()) is not None
    assert difference(["first", "...", "last"], ["first", "last", "between", "last"], Bindings()) is None
    assert difference(["first", "...", "last"], ["first", "last", "between"], Bindings()) is not None


def test_a_documented_id_stands_for_one_real_id() -> None:
    bindings = Bindings()
    one, other = "req-" + "0" * 24, "req-" + "1" * 24
    assert difference([f"asked {one}"], [f"asked {other}"], bindings) is None
    assert bindings.in_words(f"gpuledger explain {one}") == f"gpuledger explain {other}"
    assert difference([f"asked req-{'2' * 24}"], [f"asked {other}"], bindings) is not None
