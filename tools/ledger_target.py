"""TARGET of a command that asks a ledger: a configuration, a ledger, or an export of one, opened for reading.

Whatever is wrong with it is one line on standard error and exit status 2.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, NoReturn

import orjson
import typer

from gpuledger.adapters.ledger.export import open_target
from gpuledger.adapters.ledger.lock import holder, taken_at
from gpuledger.adapters.ledger.sqlite import SqliteLedger
from gpuledger.adapters.ledger.sqlite_file import translated
from gpuledger.adapters.paths import written_path
from gpuledger.domain.document_problems import DocumentError
from gpuledger.domain.events import SchedulerStarted
from gpuledger.domain.ports import LedgerCorrupt, LedgerReader, LedgerUnavailable, Snapshot
from gpuledger.domain.world import World

from .plan_report import printable
from .reading import read_document
from .snapshots import load_world
from .status import Driver, Source

BAD_INPUT: Final = 2
#: Whoever read our output has gone, as `head` does.
READER_GONE: Final = 1

#: Where a configuration is looked for when none is named.
#: Beyond this the wall clock is not the scheduler's any more; below it the difference is the time that a write takes.
CLOCKS_APART_MICROS: Final = 2_000_000
USUAL_CONFIGS: Final = (Path("gpuledger.yaml"), Path("var/gpuledger.yaml"))
_CONFIG_SUFFIXES: Final = frozenset({".yaml", ".yml"})

TargetArgument = Annotated[
    str | None,
    typer.Argument(metavar="[TARGET]", help="A gpuledger.yaml, a ledger file, or an export.", show_default=False),
]
ConfigOption = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="The configuration whose ledger is meant; without it ./gpuledger.yaml, then var/gpuledger.yaml.",
        show_default=False,
    ),
]


class TargetError(Exception):
    """TARGET, or what is asked of it, cannot be used."""


@dataclass(frozen=True, slots=True)
class Target:
    """A ledger that was found and opened."""

    path: Path
    reader: LedgerReader

    @property
    def is_export(self) -> bool:
        """An export is nobody's live ledger."""
        return not isinstance(self.reader, SqliteLedger)

    def source(self) -> Source:
        """Who drives this ledger now. Raises LedgerUnavailable, LedgerCorrupt."""
        if self.is_export:
            return Source(str(self.path), Driver.EXPORT)
        pid = holder(self.path)
        if pid is None:
            return Source(str(self.path), Driver.NONE)
        return Source(str(self.path), Driver.RUNNING if self._has_taken_over(pid) else Driver.STARTING, pid)

    def _has_taken_over(self, pid: int) -> bool:
        """Whether the process that holds the ledger has ended what an earlier run left. In a container every run may
        have the same pid, so the start must also be younger than the hold.
        """
        newest = self.reader.read_backward(frozenset({"SchedulerStarted"}), 1)
        held_since = taken_at(self.path) or 0
        return any(
            isinstance(event.data, SchedulerStarted) and event.data.pid == pid and event.at >= held_since
            for event in newest
        )

    def now(self) -> int:
        """The instant that ages are told for: the wall clock's, or the newest event's where that is ahead of it.

        The wall clock may have been set since the scheduler started: its own is then as far from it as the newest
        event is from the time at which its file was written.
        """
        head = self.reader.head()
        newest_at = max((event.at for event in (self.reader.read(head - 1, 1) if head else ())), default=0)
        skew = 0 if self.is_export or holder(self.path) is None else _written_at(self.path) - newest_at
        return max(wall_now() - (skew if abs(skew) > CLOCKS_APART_MICROS else 0), newest_at)

    def world(self) -> World:
        """The state at the head, by way of a snapshot where there is one. Raises LedgerUnavailable, LedgerCorrupt."""
        return load_world(self.reader, self.snapshot())

    def snapshot(self) -> Snapshot | None:
        """A state that a scheduler folded and kept beside its ledger. Raises LedgerUnavailable, LedgerCorrupt."""
        return self.reader.load_snapshot() if isinstance(self.reader, SqliteLedger) else None


def _written_at(path: Path) -> int:
    """When a ledger was written to last, by the wall clock, in microseconds."""
    files = (path, path.with_name(f"{path.name}-wal"))
    return max(file.stat().st_mtime_ns for file in files if file.exists()) // 1000


def wall_now() -> int:
    """The wall clock, in microseconds."""
    return time.time_ns() // 1000


@contextmanager
def opened(target: str | None, config: str | None = None) -> Generator[Target]:
    """The ledger that is meant, for as long as the block runs; what is wrong with it ends the command."""
    with bad_input_ends():
        path = ledger_path(target, config)
        with closing(_open(path)) as reader:
            yield Target(path, reader)


def _open(path: Path) -> LedgerReader:
    try:
        return open_target(path)
    except LedgerCorrupt as error:
        if error.seq == 1:
            raise TargetError(f"{path}: is neither a ledger nor an export of one ({error.reason})") from None
        raise


@contextmanager
def bad_input_ends() -> Generator[None]:
    """What cannot be used is told in a line, and is exit status 2."""
    try:
        yield
    except (DocumentError, LedgerCorrupt, LedgerUnavailable, TargetError) as error:
        told = error.reason if isinstance(error, LedgerCorrupt) and error.seq is None else str(error)
        end(told)
    except orjson.JSONEncodeError as error:
        end(f"what the ledger holds cannot be written as JSON: {error}")
    except BrokenPipeError:
        abandon_output()
        raise typer.Exit(READER_GONE) from None


def abandon_output() -> None:
    """What is still to be written goes nowhere: the interpreter would try to flush what nobody takes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def end(message: str, status: int = BAD_INPUT) -> NoReturn:
    """Say why in a line, and leave."""
    typer.echo("\n".join(printable(line) for line in message.splitlines()), err=True)
    raise typer.Exit(status)


def ledger_path(target: str | None, config: str | None = None) -> Path:
    """The file of the ledger that is meant. Raises TargetError, LedgerUnavailable, DocumentError.

    A target that was named and is empty, as a variable of a shell may be, is not one that was left out.
    """
    named = config if target is None else target
    path = usual_config("no TARGET was named") if named is None else Path(named)
    if named == "":
        raise TargetError("TARGET is empty: it names neither a ledger nor a configuration")
    with translated(path):
        if path.is_dir():
            raise TargetError(f"{path}: is a directory, and neither a ledger nor a configuration")
    if path.suffix in _CONFIG_SUFFIXES or target is None:
        return _ledger_of(path)
    return path


def usual_config(why: str) -> Path:
    """The configuration of this folder, where none was named. Raises TargetError, LedgerUnavailable."""
    for path in USUAL_CONFIGS:
        with translated(path):
            if path.exists():
                return path
    looked = " or ".join(str(path) for path in USUAL_CONFIGS)
    raise TargetError(f"{why}, and there is no {looked} here")


def _ledger_of(config: Path) -> Path:
    """The ledger that a configuration names. The rest of it may be wrong: the ledger can be asked all the same."""
    document = read_document(str(config), "config")
    named = document.get("ledger") if isinstance(document, dict) else None
    if not isinstance(named, str) or not named:
        raise DocumentError.of("config.ledger", f"{config} does not name a ledger")
    try:
        ledger = written_path(named, config.absolute().parent)
    except ValueError as error:
        raise DocumentError.of("config.ledger", str(error)) from None
    with translated(ledger):
        if not ledger.exists():
            raise TargetError(f"{ledger}: there is no ledger yet; {config} names it, and `gpuledger serve` makes it")
    return ledger
