"""`gpuledger profile DEPLOYMENT`: measure envelopes and record them (runtimes.md, Measuring an envelope).

No scheduler runs meanwhile, so nothing of ours is on the accelerator; the next one starts with what is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import orjson
import typer
from rich.console import Console

from gpuledger.domain.ports import RuntimeFault

from .bootstrap import Parts
from .config import Config
from .driving import FAILED, ConfigOption, driving, named_config, opened_parts, run
from .ledger_target import TargetError, bad_input_ends, end
from .plan_report import console
from .profile_grid import Axes, Grid, Impossible, grid_of, runtimes_of
from .profile_plot import plotter
from .profile_report import document_of, report_of, watching
from .profile_survey import Outcome, Row, Survey
from .reading import reason_of

#: What a shell says of a command that SIGINT ended.
INTERRUPTED: Final = 130
#: What each axis may go up to, as in the configuration.
_AXES: Final = {"--context": 2**31 - 1, "--concurrency": 256, "--batch": 2**31 - 1}

Deployment = Annotated[str, typer.Argument(metavar="DEPLOYMENT", help="The id of a deployment of the configuration.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document with exact bytes.")]
Context = Annotated[
    str | None,
    typer.Option(metavar="N,N,...", help="Context lengths to measure, in tokens.", show_default="the deployment's"),
]
Concurrency = Annotated[
    str | None,
    typer.Option(metavar="N,N,...", help="Concurrencies to measure.", show_default="the deployment's"),
]
Batch = Annotated[
    str | None,
    typer.Option(metavar="N,N,...", help="Batch sizes to measure, in tokens.", show_default="the deployment's"),
]
Again = Annotated[bool, typer.Option("--again", help="Measure also what the ledger has a measurement of.")]
Plot = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Draw the requirements to a .png, .svg or .pdf; needs matplotlib."),
]


def register(app: typer.Typer) -> None:
    """Add the command of this module to the command line."""
    app.command("profile")(profile)


def profile(
    deployment: Deployment,
    context: Context = None,
    concurrency: Concurrency = None,
    batch: Batch = None,
    again: Again = False,
    plot: Plot = None,
    config: ConfigOption = None,
    as_json: AsJson = False,
) -> None:
    """Measure what a deployment takes at work, on each class of accelerator that is here, and record it.

    With lists of values every combination is measured, each recorded at once. What is measured already is skipped, so
    after Ctrl-C the same command goes on with the rest. No scheduler may drive the ledger meanwhile.

    Exit status: 0 all is measured that can be, 1 something could not be, 2 bad input, or a scheduler that drives this
    ledger, 130 Ctrl-C.
    """
    with bad_input_ends():
        loaded = named_config(config)
        grid = _grid(loaded, deployment, Axes(*map(values_of, _AXES, (context, concurrency, batch))))
        draw = None if plot is None else plotter(plot)
        with driving(loaded):
            rows, interrupted = _surveyed(loaded, deployment, grid, again=again)
        _tell(loaded, deployment, rows, as_json=as_json)
        if draw is not None and any(row.measured is not None for row in rows):
            try:
                draw(deployment, rows, loaded.policy)
            except OSError as error:
                end(f"--plot: {plot}: {reason_of(error)}", FAILED)
    left = sum(row.outcome is Outcome.LEFT for row in rows)
    if interrupted:
        end(f"interrupted: what was measured is recorded, {left} left for the next time", INTERRUPTED)
    if left or any(row.outcome is Outcome.FAILED for row in rows):
        raise typer.Exit(FAILED)


def values_of(option: str, text: str | None) -> tuple[int, ...]:
    """The numbers of a list as it is typed. Raises TargetError."""
    values: list[int] = []
    greatest = _AXES[option]
    for word in () if text is None else text.split(","):
        number = word.strip()
        if not (number.isascii() and number.isdecimal() and len(number) <= 10 and 1 <= int(number) <= greatest):
            raise TargetError(f'{option}: must be whole numbers from 1 to {greatest}, as 1,2,8, not "{word}"')
        values.append(int(number))
    return tuple(values)


def _grid(config: Config, deployment_id: str, axes: Axes) -> Grid:
    """Raises TargetError for a deployment that is not there, and for a grid of which nothing is possible."""
    if deployment_id not in config.runtimes:
        known = ", ".join(sorted(config.runtimes)) or "none"
        raise TargetError(f"{config.path} has no deployment {deployment_id}; it has {known}")
    grid = grid_of(deployment_id, config.runtimes[deployment_id], axes)
    impossible = [point for point in grid if isinstance(point, Impossible)]
    if len(impossible) == len(grid):
        told = "\n".join(f"  {point.shape}: {point.reason}" for point in impossible)
        raise TargetError(f"{deployment_id} can have none of these shapes:\n{told}")
    return grid


def _surveyed(config: Config, deployment_id: str, grid: Grid, *, again: bool) -> tuple[Sequence[Row], bool]:
    """The rows, and whether Ctrl-C ended it: what runs was stopped then, and what was measured is recorded."""
    known = replace(config, runtimes={**config.runtimes, **runtimes_of(grid)})
    parts = opened_parts(known)
    survey = Survey(config, parts, deployment_id, grid, again=again)
    try:
        run(_survey(survey, parts, deployment_id))
    except RuntimeFault as fault:
        end(f"{deployment_id} could not be measured: {fault}", FAILED)
    except KeyboardInterrupt:
        return survey.rows, True
    return survey.rows, False


async def _survey(survey: Survey, parts: Parts, deployment_id: str) -> None:
    try:
        with watching(Console(stderr=True, highlight=False), deployment_id) as watcher:
            await survey.run(watcher)
    finally:
        await parts.runtimes.close()
        parts.telemetry.close()
        parts.ledger.close()


def _tell(config: Config, deployment_id: str, rows: Sequence[Row], *, as_json: bool) -> None:
    if as_json:
        document = document_of(deployment_id, rows, config.policy)
        typer.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2))
    elif rows:
        console().print(report_of(deployment_id, rows, config.policy))
