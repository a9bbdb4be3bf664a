"""`gpuledger.explain/1` for people: how it ended, what happened when, and the plan with its evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpuledger.domain.explain import duration
from gpuledger.domain.units import format_instant

from .ages import age, ago
from .plan_report import printable, report_of, table_of

Document: TypeAlias = Mapping[str, Any]

_STYLES: Final[Mapping[str, str]] = {
    "completed": "bold green",
    "refused": "bold red",
    "failed": "bold red",
    "cancelled": "bold yellow",
    "open": "bold yellow",
}
#: What a plan document that was edited by hand does to the code that shows it.
_NO_PLAN: Final = (KeyError, TypeError, ValueError, AttributeError)


def story_report(story: Document, now: int) -> RenderableType:
    """Everything of an explain document."""
    parts: list[RenderableType] = [_headline(story, now), _timeline(story)]
    for plan in _shown_in_full(story):
        parts += [Text(), *_plan(plan)]
    others = len(story["plans"]) - len(_shown_in_full(story))
    if others:
        parts.append(Text(f"other plans of this request: {others}; `explain` them by their ids", style="dim"))
    return Group(*parts)


def _headline(story: Document, now: int) -> Text:
    request, outcome = story["request"], story["outcome"]
    line = Text(outcome["state"].upper(), style=_STYLES[outcome["state"]])
    line.append(f"  {request['capability']} for {printable(request['client_id'])} ({request['priority']})", "")
    line.append(f", request {printable(request['request_id'])}", "")
    if story["subject"]["kind"] != "request":
        line.append(f", asked by way of {story['subject']['kind']} {story['subject']['id']}", "")
    asked = f"\nasked {ago(request['requested_at'], format_instant(now))}, at {request['requested_at']}"
    if request["deadline"] is not None:
        asked += f", deadline {request['deadline']}"
    return line.append(f"{asked}\n{_ended(outcome)}{_passed(story['passage'])}", "")


def _passed(passage: Document) -> str:
    """What happened on its way, for the headline; empty where it went straight."""
    told = f", attempt {passage['attempts']}" if passage["attempts"] > 1 else ""
    fallback = passage["fallback"]
    if fallback is None:
        return told
    return f"{told}, by the fallback (rank {fallback['rank']}) after {fallback['failure'] or fallback['reason']}"


def _ended(outcome: Document) -> str:
    match outcome["state"]:
        case "completed":
            spent = f"{duration(outcome['queued_ms'])} until its work began, {duration(outcome['served_ms'])} of work"
            return f"status {outcome['status']}: {spent}"
        case "refused":
            return f"refused with {outcome['reason']} ({outcome['detail']})"
        case "failed":
            return f"failed with {outcome['failure']} ({outcome['detail']})"
        case "cancelled":
            return f"cancelled: {outcome['cause']}"
        case _:
            return "its end is not in the ledger"


def _timeline(story: Document) -> Table:
    table = table_of("What happened", "#event", "#after", "type", "what")
    for entry in story["timeline"]:
        table.add_row(str(entry["seq"]), age(entry["after_ms"]), entry["type"], printable(entry["told"]))
    return table


def _shown_in_full(story: Document) -> Sequence[Document]:
    """The plan that was asked for; else the one that decided how it went: the newest."""
    plans, subject = story["plans"], story["subject"]
    named = [plan for plan in plans if subject["kind"] == "plan" and plan["plan_id"] == subject["id"]]
    return named or plans[-1:]


def _plan(plan: Document) -> Sequence[RenderableType]:
    title = Text(f"Plan {printable(plan['plan_id'])}, event {plan['seq']}", style="bold")
    evidence = Text(_evidence(plan), style="dim")
    try:
        return (title, evidence, report_of(plan["document"]))
    except _NO_PLAN as error:
        return (title, Text(f"what was recorded is no document of a plan ({type(error).__name__})", style="bold red"))


def _evidence(plan: Document) -> str:
    replay = plan["replay"]
    if plan["evidence"] == "recomputed":
        as_of = plan["document"]["as_of"]
        return (
            "The ledger keeps the evidence of the chosen candidate only; "
            f"the rest was decided again on the state at event {as_of} ({replay['result']})."
        )
    if replay is not None:
        return f"As recorded. Deciding it again gave {replay['result']}: {replay['why']}."
    return "As recorded."
