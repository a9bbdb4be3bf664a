"""What needs a look, who waits, and what went wrong, as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from rich.table import Table
from rich.text import Text

from gpuledger.domain.candidates import Refusal
from gpuledger.domain.explain import describe, size
from gpuledger.domain.reasons import Reason

from .ages import age, ago
from .plan_report import printable, table_of

Document: TypeAlias = Mapping[str, Any]


def alerts_table(alerts: Sequence[Document], now: str) -> Table:
    """What to look at, and what to do about each."""
    table = table_of("Needs a look", "alert", "since", "what", "what to do")
    for one in alerts:
        kind = Text(one["kind"], style="bold yellow")
        table.add_row(kind, ago(one["since"], now), printable(one["told"]), printable(one["what_to_do"]))
    return table


def queue_table(status: Document) -> Table:
    """Who waits. Instants and figures of the plan are shown where they were looked up."""
    columns = ("##", "request", "capability", "class", "#waited", "waits for", "#expected", "until", "notes")
    table = table_of("Queue, in claim order", *columns)
    now = status["now"]
    for one in status["queue"]:
        estimate = one["estimated_wait_ms"]
        table.add_row(
            str(one["place"]),
            printable(one["request_id"]),
            one["capability"],
            one["priority"],
            age(one["waited_ms"]),
            _waits_for(one, now),
            "-" if estimate is None else age(estimate),
            ago(one["deadline"] or one["queue_until"], now),
            "\n".join(_notes(one)) or "-",
        )
    return table


def _notes(one: Document) -> Sequence[str]:
    """What has happened to it before."""
    notes = ["LAB"] if one["lab"] else []
    if one["attempt"] > 1:
        notes.append(f"attempt {one['attempt']}")
    if one["preemptions"]:
        notes.append(f"preempted {one['preemptions']} times")
    return [*notes, f"rank {one['fallback_rank']}"] if one["fallback_rank"] else notes


def _waits_for(one: Document, now: str) -> str:
    waiting = one["waiting_for"]
    if waiting is None:
        return "to be planned" if one["held_by"] is None else f"to be planned when {one['held_by']} is gone"
    line = f"{waiting['reason']}\non {waiting['accelerator_id']}"
    if waiting["needed_bytes"]:
        line += f", needs {size(waiting['needed_bytes'])}"
    if waiting["resident_ids"]:
        line += f", until gone: {', '.join(waiting['resident_ids'])}"
    if waiting["not_before"] is not None:
        line += f", not before {ago(waiting['not_before'], now)}"
    return line if one.get("waiting_since") is None else f"{line}\n{_came_to_wait(one, now)}"


def _came_to_wait(one: Document, now: str) -> str:
    """When it came to wait there, and the figures of that instant."""
    line = f"since {ago(one['waiting_since'], now)}"
    if not one["figures"]:
        return line
    refusal = Refusal(Reason(one["waiting_for"]["reason"]), one["figures"])
    return f"{line}: {printable(describe(refusal))}"


def capabilities_table(failing: Sequence[Document], now: str) -> Table:
    """Those that failed since they last answered."""
    table = table_of("Capabilities that fail", "capability", "degraded", "#failures in a row", "last failure")
    for one in failing:
        degraded = one["degraded_since"]
        table.add_row(
            one["capability"],
            Text("no" if degraded is None else ago(degraded, now), style="" if degraded is None else "bold red"),
            str(one["failures_in_a_row"]),
            printable(f"{one['last_failure']} ({one['last_detail'] or '-'})"),
        )
    return table


def failures_table(failures: Sequence[Document], now: str) -> Table:
    """Failures, newest first, with whom each hit."""
    table = table_of("Newest failures", "when", "failure", "owner", "capability", "hit", "attempt", "detail")
    for one in failures:
        hit = one["resident_id"] or one["deployment_id"] or ", ".join(one["accelerator_ids"])
        table.add_row(
            ago(one["at"], now),
            one["failure"],
            one["owner"],
            one["capability"] or "-",
            "\n".join(filter(None, (hit, printable(one["request_id"] or "")))) or "-",
            f"{one['attempt']} of {one['limit']}",
            printable(one["detail"]),
        )
    return table
