"""`gpuledger alerts`, `queue` and `failures`: what to look at, who waits for what, and what went wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, TypeAlias

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpuledger.domain.failures import CAPACITY_FAILURES, Failure, owner_of
from gpuledger.domain.units import format_instant
from gpuledger.projections.failures import RECENT_LIMIT

from .ages import ago
from .alert_words import alert_documents
from .inspect_cli import AsJson, show
from .ledger_target import ConfigOption, Target, TargetArgument, opened
from .plan_report import table_of
from .queue_status import examine
from .recent import Tally, newest_onsets, tally
from .status import current_alerts, failure_document, status_document
from .status_report import header
from .trouble_report import alerts_table, failures_table, queue_table

ALERTS_SCHEMA: Final = "gpuledger.alerts/1"
QUEUE_SCHEMA: Final = "gpuledger.queue/1"
FAILURES_SCHEMA: Final = "gpuledger.failures/1"

Document: TypeAlias = dict[str, Any]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the command line."""
    app.command("alerts")(alerts)
    app.command("queue")(queue)
    app.command("failures")(failures)


def alerts(target: TargetArgument = None, as_json: AsJson = False, config: ConfigOption = None) -> None:
    """Show what needs a look, since when, and what to do about it.

    Without a scheduler: what there was when the ledger was driven last.

    Exit status: 0 shown, whether or not there is an alert; 2 bad input.
    """
    with opened(target, config) as found:
        source = found.source()
        world = found.world()
        now = max(found.now(), world.at)
        document = _head(ALERTS_SCHEMA, found, now) | {
            "alerts": alert_documents(current_alerts(world, now, source, newest_onsets(found.reader)))
        }
        show(document, as_json, _alerts_report)


def queue(target: TargetArgument = None, as_json: AsJson = False, config: ConfigOption = None) -> None:
    """Show who waits, in claim order: for what and since when, about how much longer, and until when at most.

    Exit status: 0 shown, 2 bad input.
    """
    with opened(target, config) as found:
        source = found.source()
        shown = status_document(found.world(), found.now(), source)
        document: Document = {
            "schema": QUEUE_SCHEMA,
            **{key: shown[key] for key in ("now", "ledger", "scheduler", "policy_revision", "lab_paused", "nodes")},
            "queue": examine(found.reader, shown["queue"]),
        }
        show(document, as_json, _queue_report)


def failures(
    target: TargetArgument = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=RECENT_LIMIT, help="At most so many, the newest.")] = 20,
    failure: Annotated[
        Failure | None, typer.Option("--class", metavar="CLASS", help="Of this class only.", show_default=False)
    ] = None,
    as_json: AsJson = False,
    config: ConfigOption = None,
) -> None:
    """Show what went wrong, by class, and apart from it what was refused for want of room.

    Counts are over the whole ledger, or over its newest end where it is long.

    Exit status: 0 shown, 2 bad input.
    """
    with opened(target, config) as found:
        counted = tally(found.reader, limit, failure)
        document = _head(FAILURES_SCHEMA, found, found.now()) | _failures_document(counted)
        show(document, as_json, _failures_report)


# ---- documents --------------------------------------------------------------------------------------------------


def _head(schema: str, found: Target, now: int) -> Document:
    return {"schema": schema, "now": format_instant(now), "ledger": {"path": str(found.path)}}


def _failures_document(counted: Tally) -> Document:
    found = counted.failures
    return {
        "counted": {
            "events": counted.events,
            "since": None if counted.since is None else format_instant(counted.since),
        },
        "internal_errors": sum(found.internal.values()),
        "capacity_rejections": sum(found.capacity_refusals.values()),
        "classes": [
            {
                "failure": failure.value,
                "owner": owner_of(failure).value,
                "capacity": failure in CAPACITY_FAILURES,
                "count": found.count(failure),
            }
            for failure in Failure
        ],
        "capacity_refusals": _plain(found.capacity_refusals),
        "other_refusals": _plain(found.other_refusals),
        "retries": _plain(found.retries),
        "fallbacks": _plain(found.fallbacks),
        "degradations": _plain(found.degradations),
        "recoveries": found.recoveries,
        "preemptions": found.preemptions,
        "failures": [failure_document(view) for view in counted.newest],
    }


def _plain(counts: Mapping[Any, int]) -> dict[str, int]:
    return {str(key): count for key, count in sorted(counts.items())}


# ---- for people -------------------------------------------------------------------------------------------------


def _alerts_report(document: Document) -> RenderableType:
    if not document["alerts"]:
        return Text("nothing needs a look", style="bold green")
    return alerts_table(document["alerts"], document["now"])


def _queue_report(document: Document) -> RenderableType:
    waiting = queue_table(document) if document["queue"] else Text("\nnobody waits")
    return Group(header(document), waiting)


def _failures_report(document: Document) -> RenderableType:
    parts: list[RenderableType] = [_totals(document)]
    counted = [one for one in document["classes"] if one["count"]]
    if counted:
        parts.append(_classes(counted))
    refusals = [*document["capacity_refusals"].items(), *document["other_refusals"].items()]
    if refusals:
        parts.append(_refusals(document))
    done = _done(document)
    if done:
        parts.append(Text(f"\n{done}"))
    if document["failures"]:
        parts.append(failures_table(document["failures"], document["now"]))
    elif counted:
        parts.append(Text("\nnone of the class that was asked for"))
    return Group(*parts)


def _totals(document: Document) -> Text:
    """The two are never added up: a refusal for want of room is a correct outcome."""
    internal, refused = document["internal_errors"], document["capacity_rejections"]
    line = Text(f"{internal} internal errors", style="bold red" if internal else "bold green")
    line.append(f", {refused} requests refused for want of room", "")
    since = document["counted"]["since"]
    over = "the whole ledger" if since is None else f"its newest end, from {ago(since, document['now'])} on"
    return line.append(f" (counted over {over})", "dim")


def _classes(counted: Sequence[Document]) -> Table:
    table = table_of("Failures, by class", "class", "owner", "#count", "kind")
    for one in counted:
        table.add_row(one["failure"], one["owner"], str(one["count"]), "capacity" if one["capacity"] else "internal")
    return table


def _refusals(document: Document) -> Table:
    table = table_of("Requests refused, by reason", "reason", "#count", "kind")
    for kind, key in (("capacity", "capacity_refusals"), ("other", "other_refusals")):
        for reason, count in document[key].items():
            table.add_row(reason, str(count), kind)
    return table


def _done(document: Document) -> str:
    """What was done about them, in a line; empty where nothing was."""
    told = [
        (sum(document["retries"].values()), "tried again"),
        (sum(document["fallbacks"].values()), "planned for the fallback"),
        (document["preemptions"], "leases preempted"),
        (sum(document["degradations"].values()), "times a capability was degraded"),
        (document["recoveries"], "times one recovered"),
    ]
    return ", ".join(f"{count} {what}" for count, what in told if count)
