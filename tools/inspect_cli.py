"""`gpuledger status`, `leases`, `plans` and `explain`: what operators ask of a ledger, while a server writes it too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields
from functools import reduce
from typing import Annotated, Any, Final, TypeAlias

import orjson
import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpuledger.domain.explain import duration, size
from gpuledger.domain.ports import LedgerReader
from gpuledger.domain.reasons import Reason, Verdict
from gpuledger.domain.units import format_instant
from gpuledger.projections import plan_history
from gpuledger.projections.leases import ENDED_LIMIT, Leases, LeaseView
from gpuledger.projections.plan_history import PlanHistory, PlanRecord

from .ages import ago
from .lease_history import lease_history
from .ledger_target import ConfigOption, TargetArgument, opened
from .plan_report import console, printable, table_of
from .recent import newest_failures, newest_onsets
from .status import lease_document, live_leases, status_document
from .status_report import header, leases_table, status_report
from .story import story_document
from .story_report import story_report

LEASES_SCHEMA: Final = "gpuledger.leases/1"
PLANS_SCHEMA: Final = "gpuledger.plans/1"
_FAILURES_SHOWN: Final = 5

Document: TypeAlias = dict[str, Any]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document with exact bytes and instants.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the command line."""
    app.command("status")(status)
    app.command("leases")(leases)
    app.command("plans")(plans)
    app.command("explain")(explain)


def status(target: TargetArgument = None, as_json: AsJson = False, config: ConfigOption = None) -> None:
    """Show what needs a look, then memory, residents, leases, queue and deployments as they are now.

    Exit status: 0 shown, whether or not a scheduler runs; 2 bad input.
    """
    with opened(target, config) as found:
        # Who drives it is asked first: a scheduler that leaves meanwhile has ended its leases in what is read then.
        source = found.source()
        newest, onsets = newest_failures(found.reader, _FAILURES_SHOWN), newest_onsets(found.reader)
        document = status_document(found.world(), found.now(), source, newest, onsets)
        show(document, as_json, status_report)


def leases(
    target: TargetArgument = None,
    ended: Annotated[
        int,
        typer.Option("--all", metavar="N", min=0, max=ENDED_LIMIT, help="Also the last N that have ended, with why."),
    ] = 0,
    as_json: AsJson = False,
    config: ConfigOption = None,
) -> None:
    """Show the leases that are live now. One that has run out is not, nor is any without a scheduler.

    Exit status: 0 shown, 2 bad input.
    """
    with opened(target, config) as found:
        source = found.source()
        world = found.world()
        now = max(found.now(), world.at)
        live = live_leases(world, now, source)
        history = lease_history(found.reader, [lease.lease_id for lease, _ in live], ended)
        shown = status_document(world, now, source)
        document: Document = {
            "schema": LEASES_SCHEMA,
            **{key: shown[key] for key in ("now", "ledger", "scheduler", "policy_revision", "lab_paused", "nodes")},
            "leases": [
                lease_document(lease, record, now) | _renewals(history, lease.lease_id) for lease, record in live
            ],
            "not_live": sum(1 for _ in world.leases()) - len(live),
            "ended": [_ended_document(lease) for lease in history.last_ended(ended)],
        }
        show(document, as_json, _leases_report)


def plans(
    target: TargetArgument = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="At most so many.")] = 20,
    capability: Annotated[str | None, typer.Option(metavar="C", help="Of this capability.", show_default=False)] = None,
    verdict: Annotated[Verdict | None, typer.Option(help="With this verdict.", show_default=False)] = None,
    reason: Annotated[
        Reason | None, typer.Option(metavar="REASON", help="With this reason among its reasons.", show_default=False)
    ] = None,
    accelerator: Annotated[
        str | None, typer.Option(metavar="A", help="Whose best candidate was there.", show_default=False)
    ] = None,
    as_json: AsJson = False,
    config: ConfigOption = None,
) -> None:
    """Show the newest plans, newest first. The policy says how many are kept in reach (`plan_history_limit`).

    Exit status: 0 shown, 2 bad input.
    """
    with opened(target, config) as found:
        history = _plan_history(found.reader)
        newest = history.newest(capability=capability, verdict=verdict, reason=reason, accelerator_id=accelerator)
        document: Document = {
            "schema": PLANS_SCHEMA,
            "now": format_instant(found.now()),
            "history_limit": history.limit,
            "plans": [_plan_document(record) for record in newest[:limit]],
            "left_out": max(0, len(newest) - limit),
        }
        show(document, as_json, _plans_report)


def explain(
    subject: Annotated[str, typer.Argument(metavar="PLAN|REQUEST|LEASE", help="An id, or the beginning of one.")],
    target: TargetArgument = None,
    recorded: Annotated[
        bool, typer.Option("--recorded", help="Show what the ledger kept; decide nothing again.")
    ] = False,
    as_json: AsJson = False,
    config: ConfigOption = None,
) -> None:
    """Tell the whole story of one request: its question, plans, waiting, lease, load, work and end.

    Exit status: 0 shown, 2 bad input, an unknown id or an ambiguous one.
    """
    with opened(target, config) as found:
        document = story_document(found, subject, recorded_only=recorded)
        show(document, as_json, lambda story: story_report(story, found.now()))


# ---- documents --------------------------------------------------------------------------------------------------


def _plan_history(reader: LedgerReader) -> PlanHistory:
    """The projection over as much of the newest end of the ledger as it keeps."""
    policies = reader.read_backward(frozenset({"PolicyRevised"}), 1)
    history = reduce(plan_history.evolve, policies, PlanHistory())
    newest_first = reader.read_backward(frozenset({"PlanDecided"}), history.limit)
    return reduce(plan_history.evolve, reversed(newest_first), history)


def _plan_document(record: PlanRecord) -> Document:
    return _plain(record) | {"decided_at": format_instant(record.decided_at), "at": format_instant(record.at)}


def _ended_document(lease: LeaseView) -> Document:
    instants = ("granted_at", "expires_at", "renewed_at", "ended_at")
    given = {name: getattr(lease, name) for name in instants}
    return _plain(lease) | {name: None if at is None else format_instant(at) for name, at in given.items()}


def _renewals(history: Leases, lease_id: str) -> Document:
    lease = history.held.get(lease_id)
    renewed_at = None if lease is None else lease.renewed_at
    return {
        "start": None if lease is None else lease.start.value,
        "renewals": 0 if lease is None else lease.renewals,
        "renewed_at": None if renewed_at is None else format_instant(renewed_at),
    }


def _plain(record: PlanRecord | LeaseView) -> Document:
    return {one.name: getattr(record, one.name) for one in fields(record)}


# ---- for people -------------------------------------------------------------------------------------------------


def show(document: Document, as_json: bool, report: Callable[[Document], RenderableType]) -> None:
    """A document, as JSON or for people."""
    if as_json:
        options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
        sys.stdout.buffer.write(orjson.dumps(document, option=options))
        sys.stdout.buffer.flush()
    else:
        console().print(report(document))


def _leases_report(document: Document) -> RenderableType:
    parts: list[RenderableType] = [header(document)]
    parts.append(leases_table(document["leases"]) if document["leases"] else Text("\nno lease is live"))
    if document["not_live"]:
        parts.append(Text(f"{document['not_live']} more have no recorded end, and give no right to memory"))
    if document["ended"]:
        parts.append(_ended_table(document))
    return Group(*parts)


def _ended_table(document: Document) -> Table:
    table = table_of(
        "Ended, newest first", "lease", "resident", "class", "start", "#reserved", "ended", "by", "#renewals"
    )
    for lease in document["ended"]:
        table.add_row(
            printable(lease["lease_id"]),
            lease["resident_id"],
            lease["priority"],
            lease["start"],
            size(lease["reserved_bytes"]),
            ago(lease["ended_at"], document["now"]),
            lease["ended_by"],
            str(lease["renewals"]),
        )
    return table


def _plans_report(document: Document) -> RenderableType:
    if not document["plans"]:
        return Text("no such plan")
    table = table_of("Plans, newest first", "#event", "when", "plan", "capability", "class", "verdict", "where", "why")
    for plan in document["plans"]:
        where = "-" if plan["accelerator_id"] is None else f"{plan['deployment_id']} on {plan['accelerator_id']}"
        if plan["fallback_rank"]:
            where += f", rank {plan['fallback_rank']}"
        table.add_row(
            str(plan["seq"]),
            ago(plan["decided_at"], document["now"]),
            printable(plan["plan_id"]),
            plan["capability"],
            plan["priority"],
            plan["verdict"],
            where,
            _why(plan),
        )
    left_out = document["left_out"]
    return Group(table, Text(f"and {left_out} more, of the {document['history_limit']} newest")) if left_out else table


def _why(plan: Document) -> str:
    if plan["reasons"]:
        return "\n".join(plan["reasons"])
    if plan["start"] is None or plan["estimate_ms"] is None:
        return "-"
    evictions = f", {plan['evictions']} evictions" if plan["evictions"] else ""
    return f"{plan['start']} start in {duration(plan['estimate_ms'])}{evictions}"
