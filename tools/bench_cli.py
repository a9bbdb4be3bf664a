"""`gpuledger bench`: how fast this release is on this machine, as ratios to what could not be faster."""

from __future__ import annotations

import signal
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import orjson
import typer
from rich.console import Console

from .bench import Bench, Result, run
from .bench_append import append_bench
from .bench_cases import decode_bench, encode_bench, fold_bench, plan_bench, replay_bench
from .bench_gateway import gateway_bench
from .bench_ledger import virtual_day
from .bench_report import Document, document_of, machine, report_of
from .ledger_target import end
from .plan_report import console

FAILED: Final = 1
STDOUT: Final = "-"
#: As a shell tells it.
_TERMINATED: Final = 128 + signal.SIGTERM


class Name(StrEnum):
    APPEND = "append"
    ENCODE = "encode"
    DECODE = "decode"
    FOLD = "fold"
    PLAN = "plan"
    REPLAY = "replay"
    GATEWAY = "gateway"


BENCHES: Final[Mapping[Name, Bench]] = {
    Name.APPEND: append_bench,
    Name.ENCODE: partial(encode_bench, virtual_day),
    Name.DECODE: partial(decode_bench, virtual_day),
    Name.FOLD: partial(fold_bench, virtual_day),
    Name.PLAN: partial(plan_bench, virtual_day),
    Name.REPLAY: partial(replay_bench, virtual_day),
    Name.GATEWAY: gateway_bench,
}


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the command line."""
    app.command("bench")(bench)


def bench(
    only: Annotated[
        list[Name] | None, typer.Option("--only", help="Measure this one; may be given again.", show_default=False)
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.01, max=600, help="For each bench, about; preparing comes on top.")
    ] = 3,
    json: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write the figures here; - prints them instead of the table."),
    ] = None,
) -> None:
    """Measure this release on this machine: how many times as long as the least that could do the same work.

    Exit status: 0 everything was measured, 1 something could not be, 2 bad input.
    """
    before = machine()
    with _cleaning_up():
        found = document_of(_results(only or list(Name), seconds), seconds, before)
    if json != STDOUT:
        console().print(report_of(found))
    if json is not None:
        _write(json, found)
    if any(one["error"] is not None for one in found["benches"]):
        raise typer.Exit(FAILED)


def _results(names: list[Name], seconds: float) -> list[Result]:
    err = Console(stderr=True)
    results: list[Result] = []
    for name in dict.fromkeys(names):
        with err.status(f"measuring {name}"):
            results.append(run(name.value, BENCHES[name], seconds))
    return results


@contextmanager
def _cleaning_up() -> Generator[None]:
    """SIGTERM ends the bench as Ctrl-C does: temporary files and child processes go with it."""

    def leave(*_: object) -> None:
        sys.exit(_TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _write(path: str, document: Document) -> None:
    body = orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    if path == STDOUT:
        sys.stdout.buffer.write(body)
        sys.stdout.buffer.flush()
        return
    try:
        Path(path).write_bytes(body)
    except OSError as error:
        end(f"{path}: {(error.strerror or str(error)).lower()}")
