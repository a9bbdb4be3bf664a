"""`gpuledger doctor`: whether gpuledger can work here, and what to do where it cannot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Final

import orjson
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpuledger.domain.document_problems import DocumentError

from .config import Config, load_config
from .doctor import Asked, configuration_findings, document_of, examined
from .doctor_findings import Finding, Result, ok
from .ledger_target import BAD_INPUT, TargetError, bad_input_ends, usual_config
from .machine import Machine
from .plan_report import console, printable

SOMETHING_FAILS: Final = 1

Configuration = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="The configuration; without it ./gpuledger.yaml, then var/gpuledger.yaml, else the machine alone.",
        show_default=False,
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="Read no model through, and ask no runtime for its version.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

#: Of `programs on card 0`; longer names are folded.
_NAME_WIDTH: Final = 20
_STYLES: Final[Mapping[Result, str]] = {Result.OK: "green", Result.WARN: "bold yellow", Result.FAIL: "bold red"}


def register(app: typer.Typer) -> None:
    """Add the command of this module to the command line."""
    app.command("doctor")(doctor)


def doctor(config: Configuration = None, quick: Quick = False, as_json: AsJson = False) -> None:
    """Look for what keeps gpuledger from working here, and say how to mend it. Nothing is changed.

    Exit status: 0 nothing fails, 1 something does, 2 the configuration cannot be used.
    """
    with bad_input_ends():
        path = _path(config)
        status = 0
        loaded: Config | None = None
        about: list[Finding] = []
        try:
            loaded = None if path is None else load_config(path)
        except DocumentError as error:
            about, status = list(configuration_findings(error)), BAD_INPUT
        else:
            about.append(_found(path))
        machine = Machine(library=None if loaded is None else loaded.nvml_library)
        found = _chained(about, examined(machine, Asked(loaded, quick, _reading)))
        findings = list(found) if as_json else _shown(found)
        if as_json:
            document = document_of(findings, None if path is None else str(path))
            typer.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2))
    if status == 0 and any(one.result is Result.FAIL for one in findings):
        status = SOMETHING_FAILS
    if status:
        raise typer.Exit(status)


def _path(config: Path | None) -> Path | None:
    if config is not None:
        return config
    try:
        return usual_config("no --config was named")
    except TargetError:
        return None


def _found(path: Path | None) -> Finding:
    if path is None:
        return ok("configuration", "none is here: the machine alone is looked at (gpuledger init writes one)")
    return ok("configuration", f"{path} can be used")


def _chained(first: Iterable[Finding], others: Iterable[Finding]) -> Iterator[Finding]:
    yield from first
    yield from others


def _reading(deployment_id: str) -> None:
    """Reading a large model takes a while: say so, to people only."""
    terminal = Console(stderr=True, highlight=False, markup=False)
    if terminal.is_terminal:
        terminal.print(f"reading the model of {printable(deployment_id)} ...", style="dim")


def _shown(findings: Iterable[Finding]) -> list[Finding]:
    """Each finding as soon as it is made, and at the end how many of them want something."""
    output = console()
    shown: list[Finding] = []
    for finding in findings:
        output.print(_line(finding))
        shown.append(finding)
    counts = {result: sum(one.result is result for one in shown) for result in Result}
    output.print(
        f"\n{counts[Result.FAIL]} of {len(shown)} checks fail, {counts[Result.WARN]} warn",
        style=_STYLES[max(Result, key=lambda result: (counts[result] > 0, list(Result).index(result)))],
    )
    return shown


def _line(finding: Finding) -> Table:
    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_column(width=4)
    line.add_column(width=_NAME_WIDTH, overflow="fold")
    line.add_column(overflow="fold")
    found = Text(printable(finding.found))
    if finding.mend:
        found.append(f"\n-> {printable(finding.mend)}", style="bold")
    line.add_row(Text(finding.result.value, style=_STYLES[finding.result]), Text(printable(finding.name)), found)
    return line
