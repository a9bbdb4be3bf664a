"""`gpuledger replay`: does this ledger's every decision follow from what is before it in the ledger?"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final, TypeAlias

import orjson
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from gpuledger.domain.events import PlanDecided
from gpuledger.domain.planner import PLANNER_VERSION
from gpuledger.domain.ports import LedgerCorrupt, LedgerReader
from gpuledger.domain.world import World

from .ledger_target import BAD_INPUT, ConfigOption, Target, TargetArgument, TargetError, end, opened
from .plan_report import console, printable, table_of
from .replay import Absent, Outcome, PlanResult, Replay, StateResult
from .snapshots import read_snapshot

SCHEMA: Final = "gpuledger.replay/1"
MISMATCHED: Final = 3
UNREPLAYABLE: Final = 4
#: Of findings, so many are told to people; `--json` has all.
_TOLD: Final = 20
_STYLES: Final = {Outcome.MATCH: "green", Outcome.MISMATCH: "bold red", Outcome.UNREPLAYABLE: "bold yellow"}

Document: TypeAlias = dict[str, Any]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the command line."""
    app.command("replay")(replay)


def replay(
    target: TargetArgument = None,
    plan_id: Annotated[
        str | None, typer.Option("--plan", metavar="ID", help="Decide this plan only.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document with every plan.")] = False,
    config: ConfigOption = None,
) -> None:
    """Fold a ledger from its first event and decide every plan in it again. Nothing is carried out.

    Exit status: 0 every plan is a MATCH, 3 some MISMATCH, 4 some UNREPLAYABLE and no mismatch, 2 bad input.
    """
    with opened(target, config) as found:
        only = None if plan_id is None else frozenset({_seq_of(found.reader, plan_id)})
        run = Replay(found.reader, only=only, kept=_kept_by(found))
        tell = _tell_json if as_json else _tell_people
        tell(run, found)
    raise typer.Exit(status_of(run))


def status_of(run: Replay) -> int:
    """The exit status of a replay that has ended."""
    state_differs = run.state is not None and run.state.outcome is Outcome.MISMATCH
    if run.counts[Outcome.MISMATCH] or state_differs:
        return MISMATCHED
    return UNREPLAYABLE if run.counts[Outcome.UNREPLAYABLE] else 0


def _kept_by(found: Target) -> World | None:
    snapshot = found.snapshot()
    return None if snapshot is None else read_snapshot(snapshot)


def _seq_of(reader: LedgerReader, plan_id: str) -> int:
    """The event of a plan. Only leaves that speak of it are read."""
    # Bytes of the command line that are no text are text nowhere in a ledger.
    needle = os.fsencode(plan_id)
    candidates = (leaf.seq for leaf in reader.leaves() if needle in leaf.body)
    for seq in candidates:
        (event,) = reader.read(seq - 1, 1)
        if isinstance(event.data, PlanDecided) and event.data.plan_id == plan_id:
            return seq
    raise TargetError(f"there is no plan {plan_id} in this ledger")


# ---- JSON -------------------------------------------------------------------------------------------------------


def _tell_json(run: Replay, _: Target) -> None:
    """One document, written as it is found: memory does not grow with the ledger, on which alone the bytes depend."""
    out = sys.stdout.buffer
    head = {"schema": SCHEMA, "planner_version": PLANNER_VERSION}
    out.write(orjson.dumps(head)[:-1] + b',"plans":[')
    error: LedgerCorrupt | None = None
    separator = b"\n"
    try:
        for result in _with_progress(run):
            out.write(separator + orjson.dumps(document_of(result)))
            separator = b",\n"
    except LedgerCorrupt as found:
        error = found
    tail = summary_of(run) | ({} if error is None else {"error": {"seq": error.seq, "message": str(error)}})
    out.write(b"\n]," + orjson.dumps(tail)[1:] + b"\n")
    out.flush()
    if error is not None:
        end(str(error), BAD_INPUT)


def document_of(result: PlanResult) -> Document:
    """One plan of `gpuledger.replay/1`. A field that a plan does not have is left out of the difference."""
    found: Document = {
        "seq": result.seq,
        "plan_id": result.plan_id,
        "request_id": result.request_id,
        "as_of": result.as_of,
        "verdict": result.verdict.value,
        "result": result.outcome.value,
    }
    if result.difference is not None:
        sides = {"recorded": result.difference.recorded, "recomputed": result.difference.recomputed}
        present = {side: value for side, value in sides.items() if not isinstance(value, Absent)}
        found["difference"] = {"field": result.difference.path, **present}
    if result.why is not None:
        found["why"] = result.why
    return found


def summary_of(run: Replay) -> Document:
    """What a replay that has ended found, in numbers."""
    return {
        "summary": {
            "events": run.events,
            "plans": run.counts.total(),
            **{outcome.value: run.counts[outcome] for outcome in Outcome},
        },
        "invariants": run.invariants,
        "kept_state": None if run.state is None else _state_document(run.state),
        "as_of_not_before_plan": run.as_of_broken,
    }


def _state_document(state: StateResult) -> Document:
    differs = {} if state.field is None else {"field": state.field}
    return {"seq": state.seq, "result": state.outcome.value, **differs}


# ---- people -----------------------------------------------------------------------------------------------------


def _tell_people(run: Replay, found: Target) -> None:
    started = time.monotonic()
    findings: list[PlanResult] = []
    for result in _with_progress(run):
        if result.outcome is not Outcome.MATCH or run.is_partial:
            findings += [result] if len(findings) < _TOLD else []
    seconds = max(time.monotonic() - started, 1e-6)
    out = console()
    if findings:
        out.print(_findings("Plans" if run.is_partial else "Plans that are no match", findings))
        more = 0 if run.is_partial else run.counts.total() - run.counts[Outcome.MATCH] - len(findings)
        if more:
            out.print(f"and {more} more; --json has all of them")
    counts = Text("   ").join(
        Text(f"{outcome} {run.counts[outcome]}", style=_STYLES[outcome] if run.counts[outcome] else "")
        for outcome in Outcome
    )
    out.print(f"{found.path}: {run.events} events folded, {run.counts.total()} plans decided again ({PLANNER_VERSION})")
    out.print(counts)
    out.print(_invariants(run))
    if run.state is not None:
        out.print(_state_line(run.state))
    again = f", of {run.folded_again} a second time" if run.folded_again else ""
    out.print(Text(f"{seconds:.1f} s, {run.events / seconds:,.0f} events/s{again}", style="dim"))


def _invariants(run: Replay) -> str:
    broken = run.as_of_broken
    said = "seq dense, versions of every stream dense"
    if not broken:
        return f"{said}, every plan made on a state from before it"
    told = ", ".join(map(str, broken[:_TOLD]))
    return f"{said}; BROKEN: {len(broken)} plans name a state that is not before them (events {told})"


def _state_line(state: StateResult) -> Text:
    said = "is that of the fold" if state.field is None else f"differs from the fold in {state.field}"
    return Text(f"the state that the scheduler kept at event {state.seq} {said}", style=_STYLES[state.outcome])


def _findings(title: str, findings: list[PlanResult]) -> Table:
    table = table_of(title, "#event", "plan", "result", "field", "recorded", "recomputed")
    for result in findings:
        difference = result.difference
        if difference is None:
            told = (printable(result.why or "-"), "-", "-")
        else:
            told = (printable(difference.path), _short(difference.recorded), _short(difference.recomputed))
        table.add_row(
            str(result.seq), printable(result.plan_id), Text(result.outcome, style=_STYLES[result.outcome]), *told
        )
    return table


def _short(value: object) -> str:
    text = repr(value) if isinstance(value, Absent) else orjson.dumps(value).decode()
    return printable(text if len(text) <= 200 else f"{text[:199]}…")


# ---- progress ---------------------------------------------------------------------------------------------------


def _with_progress(run: Replay) -> Iterator[PlanResult]:
    with _bar(run.last) as done:
        yield from run.results(done)


@contextmanager
def _bar(events: int) -> Generator[Callable[[int], None]]:
    """A bar on standard error when that is a terminal; the result alone is on standard output."""
    err = Console(stderr=True)
    if not err.is_terminal:
        yield lambda _: None
        return
    columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task("", total=events)
        yield lambda done: progress.update(task, completed=done, total=max(events, done))
