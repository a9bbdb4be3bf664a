"""What `gpuledger profile` tells: progress while it measures, a table with bars at its end, or one JSON document."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import orjson
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.text import Text

from gpuledger.adapters.ledger.codec import draft as encoded
from gpuledger.domain.events import NewEvent, StreamKind, stream_name
from gpuledger.domain.explain import duration, short, size
from gpuledger.domain.policy import Policy

from .measure import Measurement
from .plan_report import size_or_dash, table_of
from .profile_survey import Outcome, Row

SCHEMA: Final = "gpuledger.profile/1"
Document: TypeAlias = dict[str, Any]

#: Of the bars of a table, in characters.
BAR_WIDTH: Final = 16
_STYLES: Final = {
    Outcome.MEASURED: "green",
    Outcome.KNOWN: "dim",
    Outcome.FAILED: "bold red",
    Outcome.IMPOSSIBLE: "yellow",
    Outcome.LEFT: "yellow",
}


# ---- while it measures ------------------------------------------------------------------------------------------


@contextmanager
def watching(out: Console, deployment_id: str) -> Generator[ProgressWatcher]:
    """Progress on standard error: a bar on a terminal, otherwise a line for each point that is done."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(BAR_WIDTH),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as progress:
        yield ProgressWatcher(out, progress, deployment_id)


class ProgressWatcher:
    """Implements `profile_survey.Watcher`."""

    def __init__(self, out: Console, progress: Progress, deployment_id: str) -> None:
        self._out = out
        self._progress = progress
        self._deployment_id = deployment_id
        self._task: TaskID | None = None

    def begins(self, row: Row, number: int, count: int) -> None:
        if self._task is None:
            self._task = self._progress.add_task(self._deployment_id, total=count)
        self._progress.update(self._task, description=self._named(row), completed=number - 1)

    def step(self, row: Row, step: str) -> None:
        if self._task is not None:
            self._progress.update(self._task, description=f"{self._named(row)}: {step}")

    def ended(self, row: Row, number: int, count: int) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=number)
        if not self._out.is_terminal:
            said = row.reason if row.measured is None else f"peak {size(row.measured.envelope.peak_bytes)}"
            self._out.print(Text(f"{number}/{count} {self._named(row)}: {said}"), soft_wrap=True)

    def _named(self, row: Row) -> str:
        return f"{self._deployment_id} on {row.accelerator.accelerator_id}, {row.shape}"


# ---- for people -------------------------------------------------------------------------------------------------


def report_of(deployment_id: str, rows: Sequence[Row], policy: Policy) -> RenderableType:
    """One table for each class of accelerator; of a single measurement all its figures too."""
    parts: list[RenderableType] = [
        _table(deployment_id, [row for row in rows if row.accelerator.gpu_class == gpu_class], policy)
        for gpu_class in dict.fromkeys(row.accelerator.gpu_class for row in rows)
    ]
    measurements = [row.measurement for row in rows if row.measurement is not None]
    if len(measurements) == 1:
        parts.append(_figures(measurements[0]))
    return Group(*parts)


def _table(deployment_id: str, rows: Sequence[Row], policy: Policy) -> RenderableType:
    accelerator = rows[0].accelerator
    table = table_of(
        f"{deployment_id} on {accelerator.accelerator_id} ({accelerator.device_name})",
        "#context",
        "#concurrency",
        "#batch",
        "#idle",
        "#peak",
        "#load",
        "#requirement",
        "",
        "#fits",
        "outcome",
    )
    greatest = max((row.requirement_bytes(policy) or 0 for row in rows), default=0)
    for row in rows:
        table.add_row(*_shape(row), *_measured(row), *_room(row, policy, greatest), _outcome(row))
    failures = [Text(f"{row.shape}: {row.reason}", style=_STYLES[row.outcome]) for row in rows if row.reason]
    return Group(table, *failures)


def _shape(row: Row) -> tuple[str, str, str]:
    return str(row.shape.context_length), str(row.shape.concurrency), str(row.shape.batch_size)


def _measured(row: Row) -> tuple[str, str, str]:
    if row.measured is None:
        return "-", "-", "-"
    envelope = row.measured.envelope
    return size(envelope.idle_bytes), size(envelope.peak_bytes), duration(row.measured.load_ms)


def _room(row: Row, policy: Policy, greatest_bytes: int) -> tuple[str, RenderableType, str]:
    """The requirement in figures and as a bar beside the others', and how many times it fits."""
    needed, fits = row.requirement_bytes(policy), row.fits(policy)
    if needed is None:
        return "-", "", "-"
    return size(needed), ProgressBar(total=greatest_bytes, completed=needed, width=BAR_WIDTH), str(fits)


def _outcome(row: Row) -> Text:
    return Text(row.outcome.value, style=_STYLES[row.outcome])


def _figures(measurement: Measurement) -> RenderableType:
    event = measurement.event
    table = table_of(f"{event.deployment_id} on {event.accelerator_id} ({event.device_name})", "figure", "#measured")
    sleep = event.sleep
    rows = {
        "idle": size(event.envelope.idle_bytes),
        "peak": size(event.envelope.peak_bytes),
        "peak of loading": size(event.load_peak_bytes),
        "peak at work": size(event.busy_peak_bytes),
        "device, idle": size(event.device_idle_bytes),
        "device, peak": size(event.device_peak_bytes),
        "left after its end": size(event.residual_bytes),
        "asleep": size_or_dash(None if sleep is None else sleep.asleep_bytes),
        "load": duration(event.load_ms),
        "unload": duration(event.unload_ms),
        "to sleep": "-" if sleep is None else duration(sleep.sleep_ms),
        "wake": "-" if sleep is None else duration(sleep.wake_ms),
        "tokens of a full context": str(measurement.full_context_tokens),
        "samples": str(measurement.samples),
    }
    for name, figure in rows.items():
        table.add_row(name, figure)
    recorded = (
        f"recorded for configuration {short(event.envelope.config_hash)}, runtime version {event.runtime_version}"
    )
    return Group(table, Text(recorded))


# ---- for programs -----------------------------------------------------------------------------------------------


def document_of(deployment_id: str, rows: Sequence[Row], policy: Policy) -> Document:
    """Every point with exact bytes; of those that were just measured also what the ledger has, and the raw figures."""
    measurements = [_measurement(row.measurement) for row in rows if row.measurement is not None]
    points = [_point(row, policy) for row in rows]
    return {"schema": SCHEMA, "deployment_id": deployment_id, "points": points, "measurements": measurements}


def _point(row: Row, policy: Policy) -> Document:
    measured = row.measured
    sleep = None if measured is None else measured.sleep
    return {
        "accelerator_id": row.accelerator.accelerator_id,
        "gpu_class": row.accelerator.gpu_class,
        "context_length": row.shape.context_length,
        "concurrency": row.shape.concurrency,
        "batch_size": row.shape.batch_size,
        "config_hash": row.config_hash,
        "outcome": row.outcome.value,
        "reason": row.reason,
        "idle_bytes": None if measured is None else measured.envelope.idle_bytes,
        "peak_bytes": None if measured is None else measured.envelope.peak_bytes,
        "asleep_bytes": None if sleep is None else sleep.asleep_bytes,
        "load_ms": None if measured is None else measured.load_ms,
        "unload_ms": None if measured is None else measured.unload_ms,
        "requirement_bytes": row.requirement_bytes(policy),
        "fits": row.fits(policy),
    }


def _measurement(measurement: Measurement) -> Document:
    stream = stream_name(StreamKind.DEPLOYMENT, measurement.event.deployment_id)
    return {
        **orjson.loads(encoded(NewEvent(stream, measurement.event)).data),
        "baseline_bytes": measurement.baseline_bytes,
        "process_idle_bytes": measurement.process_idle_bytes,
        "process_peak_bytes": measurement.process_peak_bytes,
        "full_context_tokens": measurement.full_context_tokens,
        "samples": measurement.samples,
    }
