"""The documents of this repository as tests see them: their blocks, and whether an output is the documented one.

What varies from run to run is compared by kind, everything else to the letter. The kinds, in the order in which they
are looked for (`_KINDS`):

- instants and dates; sizes (`23.5 GiB`), durations (`2.2 s`, `1 min 0 s`) and percentages;
- ids of requests and ledgers, and SHA-256: one documented stands for one real one throughout a document, so a
  command may name an id that an earlier output showed;
- numbers of embeddings (three decimals or more): within 0.02 of the documented one;
- integers where they count or name something that grows: events, plans, bytes, processes, milliseconds in headers,
  numbers in the leaf of an event, and the first cell of a row.

Runs of blanks are one blank, rules of a table are one character, and blank lines do not count. A documented line `...`
stands for any number of lines. A figure that is none of these has to be exact: `MISMATCH 0` is not `MISMATCH 1`.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

ROOT: Final = Path(__file__).resolve().parents[2]
#: What the documents call the folder that they are in, and the address that the example serves at.
DOCUMENTED_FOLDER: Final = "/srv/gpuledger"
DOCUMENTED_ADDRESS: Final = "127.0.0.1:8910"

ANY_LINES: Final = "..."
COMMAND_SECONDS: Final = 120.0
FLOAT_TOLERANCE: Final = 0.02

_FENCE: Final = re.compile(r"^```([a-z]*)$")


def pages() -> tuple[Path, ...]:
    """Every document that people read, README first."""
    top = [ROOT / "README.md", ROOT / "CHANGELOG.md"]
    return (*top, *sorted((ROOT / "docs").rglob("*.md")))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. `after`: the line number of its end."""

    language: str
    text: str
    line: int
    after: int


def blocks_of(page: Path) -> tuple[Block, ...]:
    """The fenced blocks of a document; one that is not closed, or has no language, is an error."""
    found: list[Block] = []
    opened: tuple[str, int] | None = None
    inner: list[str] = []
    for number, line in enumerate(page.read_text("utf-8").splitlines(), start=1):
        fence = _FENCE.match(line)
        if fence is None:
            inner += [line] if opened is not None else []
        elif opened is None:
            assert fence[1], f"{name_of(page)}:{number}: say what language this block is in"
            opened, inner = (fence[1], number), []
        else:
            assert not fence[1], f"{name_of(page)}:{number}: a block is opened inside a block"
            found.append(Block(opened[0], "\n".join(inner), opened[1], number))
            opened = None
    assert opened is None, f"{name_of(page)}: the block of line {opened} is not closed"
    return tuple(found)


def prose_of(page: Path) -> str:
    """A document without its blocks, line for line."""
    lines = page.read_text("utf-8").splitlines()
    for block in blocks_of(page):
        lines[block.line - 1 : block.after] = [""] * (block.after - block.line + 1)
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Step:
    """A command of a `console` block and what it is documented to print."""

    command: str
    output: tuple[str, ...]
    line: int


def steps_of(block: Block) -> Iterator[Step]:
    """A command begins with `$ ` and goes on while its lines end with a backslash; what follows is its output."""
    lines = block.text.splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("$ ")]
    assert starts, f"line {block.line}: a console block without a command"
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        last = start
        while lines[last].endswith("\\"):
            last += 1
        command = "\n".join(line.removeprefix("$ ") for line in lines[start : last + 1])
        yield Step(command, tuple(lines[last + 1 : end]), block.line + 1 + start)


# ---- comparing --------------------------------------------------------------------------------------------------

_MONTHS: Final = "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
_KINDS: Final[Mapping[str, str]] = {
    "instant": r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z",
    "date": rf"[A-Z][a-z][a-z], \d\d (?:{_MONTHS}) \d{{4}} \d\d:\d\d:\d\d GMT",
    "id": r"(?:req|key)-[0-9a-f]{24,40}|ledger-[0-9a-f]{16}|\b[0-9a-f]{64}\b",
    "size": r"-?\b\d+(?:\.\d)? (?:B|KiB|MiB|GiB|TiB)(?![A-Za-z])",
    "duration": r"\b\d+ (?:d \d+ h|h \d+ min|min \d+ s)\b|\b\d+(?:\.\d+)? m?s\b",
    "percentage": r"\b\d+\.\d\d %",
    "float": r"-?\b\d+\.\d{3,}(?:e-\d+)?",
    "count": (
        r"(?<=event )\d+|(?<=process )\d+|\b\d[\d,]*(?= (?:events|plans|bytes|more)\b)|\b[\d,]+(?= events/s)"
        r'|(?<="seq":)\d+|(?<="version":)\d+|(?<="pressure_bp":)\d+'
        r"|(?<!MISMATCH )(?<=MATCH )\d+|(?<=-ms: )\d+|(?<=content-length: )\d+|^\d+(?= )"
    ),
}
_TOKEN: Final = re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in _KINDS.items()))


@dataclass(slots=True)
class Bindings:
    """Which real id each documented one stands for, one to one."""

    _real: dict[str, str] = field(default_factory=dict[str, str])

    def fits(self, documented: str, real: str) -> bool:
        if documented not in self._real and real in self._real.values():
            return False
        return self._real.setdefault(documented, real) == real

    def in_words(self, command: str) -> str:
        """A documented command with real ids."""
        for documented, real in self._real.items():
            command = command.replace(documented, real)
        return command

    def copy(self) -> Bindings:
        return Bindings(dict(self._real))

    def take(self, other: Bindings) -> None:
        """Know what the other one knows."""
        self._real |= other._real


def tidy(lines: Sequence[str]) -> list[str]:
    """The lines that count, without what only lays them out."""
    found = (re.sub(r"─+", "─", re.sub(r"\s+", " ", line)).strip() for line in lines)
    return [line for line in found if line]


def difference(documented: Sequence[str], real: Sequence[str], bindings: Bindings) -> str | None:
    """The first line that is not as documented, and why; None when all are. Binds the ids of both to each other."""
    found, runs = tidy(real), list(_runs(tidy(documented)))
    at, after_any = 0, False
    for number, run in enumerate(runs, start=1):
        if run == [ANY_LINES]:
            after_any = True
            continue
        last = len(found) - len(run) if after_any else at
        first = last if after_any and number == len(runs) else at
        places = range(max(at, first), last + 1)
        place = next((one for one in places if _run_fits(run, found[one : one + len(run)], bindings)), None)
        if place is None:
            return _told(run, found[at:], bindings)
        at, after_any = place + len(run), False
    if at < len(found) and not after_any:
        return f"documented: (nothing)\n     found: {found[at]}"
    return None


def _told(documented: Sequence[str], real: Sequence[str], bindings: Bindings) -> str:
    """The first line that differs when the two begin together."""
    for one, other in itertools.zip_longest(documented, real, fillvalue="(nothing)"):
        if not _line_fits(one, other, bindings.copy()):
            return f"documented: {one}\n     found: {other}"
    return f"documented: {documented[0]}\n     found: not in its place"


def _runs(documented: Sequence[str]) -> Iterator[list[str]]:
    """Lines that follow each other, and `...` between them."""
    for _, run in itertools.groupby(documented, key=lambda line: line == ANY_LINES):
        lines = list(run)
        yield [ANY_LINES] if lines[0] == ANY_LINES else lines


def _run_fits(documented: Sequence[str], real: Sequence[str], bindings: Bindings) -> bool:
    trial = bindings.copy()
    if len(documented) != len(real):
        return False
    if not all(_line_fits(one, other, trial) for one, other in zip(documented, real, strict=True)):
        return False
    bindings.take(trial)
    return True


def _line_fits(documented: str, real: str, bindings: Bindings) -> bool:
    wanted, found = list(_parts(documented)), list(_parts(real))
    if [kind for kind, _ in wanted] != [kind for kind, _ in found]:
        return False
    return all(_fits(kind, one, other, bindings) for (kind, one), (_, other) in zip(wanted, found, strict=True))


def _fits(kind: str, documented: str, real: str, bindings: Bindings) -> bool:
    match kind:
        case "text":
            return documented == real
        case "id":
            return bindings.fits(documented, real)
        case "float":
            return abs(float(documented) - float(real)) <= FLOAT_TOLERANCE
        case _:
            return True


def _parts(line: str) -> Iterator[tuple[str, str]]:
    """(kind, text) of everything in a line, `text` among them."""
    end = 0
    for token in _TOKEN.finditer(line):
        if token.start() > end:
            yield "text", line[end : token.start()]
        assert token.lastgroup is not None
        yield token.lastgroup, token[0]
        end = token.end()
    if end < len(line):
        yield "text", line[end:]


# ---- running ----------------------------------------------------------------------------------------------------


class Terminal:
    """One bash in which the commands of a document are typed, one after the other."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )

    def run(self, command: str) -> tuple[list[str], int]:
        """What a command printed, on both of its outputs, and its exit status."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        mark = f"end-{os.urandom(8).hex()}"
        watch = threading.Timer(COMMAND_SECONDS, self._process.kill)
        watch.start()
        try:
            self._process.stdin.write(f"{command}\nprintf '\\n%s %s\\n' {mark} $?\n")
            self._process.stdin.flush()
            lines: list[str] = []
            for line in self._process.stdout:
                if line.startswith(mark):
                    return lines, int(line.split()[1])
                lines.append(line)
        finally:
            watch.cancel()
        raise AssertionError(f"the terminal ended during: {command}\n{''.join(lines)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
