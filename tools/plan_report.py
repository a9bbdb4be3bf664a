"""A plan for people: the verdict with its figures, the candidates and why each was refused, what is evicted.

Rendered from the document `gpuledger.plan/1`: one that was just made and one that a ledger kept look alike. What a kept
one does not have (an admission is kept without the evidence about others) is not shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpuledger.domain.candidates import Refusal
from gpuledger.domain.documents import PressureCase, judged
from gpuledger.domain.explain import describe, duration, size
from gpuledger.domain.reasons import Reason, Verdict, waiting_helps
from gpuledger.domain.units import format_instant

Document: TypeAlias = Mapping[str, Any]

#: Of output that is no terminal: wide enough for the table of candidates.
PIPE_WIDTH = 150

_STYLES = {
    Verdict.ADMIT: "bold green",
    Verdict.ADMIT_AFTER_EVICTION: "bold green",
    Verdict.QUEUE: "bold yellow",
    Verdict.REJECT_CAPACITY: "bold red",
    Verdict.REJECT_HEALTH: "bold red",
    Verdict.REJECT_POLICY: "bold red",
}


def console() -> Console:
    """Standard output, as tables need it: no markup, no guesses about what a word is."""
    found = Console(markup=False, highlight=False, emoji=False)
    if not found.is_terminal:
        found.width = PIPE_WIDTH
    return found


def report_of(plan: Document) -> RenderableType:
    """Everything that a plan document says, the most important first."""
    parts: list[RenderableType] = [_headline(plan)]
    parts += [_reason_line(refusal) for refusal in _refusals(plan)]
    if plan["waiting_for"] is not None:
        parts.append(_waiting_line(plan["waiting_for"]))
    if plan["evictions"]:
        parts.append(_evictions(plan["evictions"]))
    if plan.get("candidates"):
        parts.append(_candidates(plan["candidates"], plan["candidates_left_out"]))
    if plan["accounting"] is not None:
        parts.append(_accounting(f"Accounting of {plan['accelerator_id']}", plan["accounting"]))
    if plan.get("residents"):
        parts.append(_residents(plan["residents"], plan["residents_left_out"]))
    parts.append(Text(f"policy {plan['policy_revision']}, fingerprint {plan['fingerprint']}", style="dim"))
    return Group(*parts)


def pressure_report(case: PressureCase) -> RenderableType:
    """The samples of a case with the level that each left."""
    table = table_of(f"Pressure under policy {case.policy.revision}", "observed at", "#external", "#pressure", "level")
    for sample, (pressure, track) in zip(case.samples, judged(case), strict=True):
        table.add_row(
            format_instant(sample.observed_at),
            size(max(0, sample.used_bytes - sample.attributed_managed_bytes)),
            f"{pressure // 100}.{pressure % 100:02d} %",
            track.level.value,
        )
    return table


def printable(text: str) -> str:
    """Text of a document, safe for a terminal: control characters are replaced."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def _headline(plan: Document) -> Text:
    verdict = Verdict(plan["verdict"])
    line = Text(verdict.value, style=_STYLES[verdict])
    line.append(f"  {plan['capability']} for {plan['request_id']} ({plan['priority']})", "")
    if plan["accelerator_id"] is not None:
        line.append(f": {plan['deployment_id']} on {plan['accelerator_id']} of {plan['node_id']}")
        if plan["start"] is not None and verdict.admits and plan["estimate_ms"] is not None:
            line.append(f", {plan['start']} start in about {duration(plan['estimate_ms'])}")
        if verdict.admits:
            line.append(f", {size(plan['headroom_after_bytes'])} left after it")
    return line


def _refusals(entry: Document) -> Sequence[Refusal]:
    """Of a plan, or of one of its candidates."""
    return [Refusal(Reason(reason), entry["figures"][reason]) for reason in entry["reasons"]]


def _reason_line(refusal: Refusal) -> Text:
    advice = "" if waiting_helps(refusal.reason) else " (waiting does not help)"
    return Text(f"  {refusal.reason.value}: {printable(describe(refusal))}{advice}")


def _waiting_line(waiting: Document) -> Text:
    needed = size(waiting["needed_bytes"])
    line = f"  waits on {waiting['accelerator_id']} with {waiting['deployment_id']}, needs {needed}"
    if waiting["resident_ids"]:
        line += f"; until gone: {', '.join(waiting['resident_ids'])}"
    if waiting["not_before"] is not None:
        line += f"; not before {waiting['not_before']}"
    return Text(line)


#: Columns of ids that are asked about next, by `explain` or `replay --plan`.
COPIED: Final = frozenset({"plan", "request", "lease"})


def table_of(title: str, *columns: str) -> Table:
    """A table; a column whose name begins with `#` is of numbers. Ids that people copy are the last to be folded."""
    # A title may be longer than its table is wide.
    told = Text(title, style="bold", no_wrap=True, overflow="ignore")
    table = Table(title=told, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        number = column.startswith("#")
        copied = column in COPIED
        table.add_column(
            column.removeprefix("#"), justify="right" if number else "left", overflow="fold", no_wrap=copied
        )
    return table


def _evictions(evictions: Sequence[Document]) -> Table:
    table = table_of(
        "Evictions, one after the other",
        "resident",
        "deployment",
        "action",
        "#frees",
        "#takes",
        "#price",
        "preempts",
    )
    for eviction in evictions:
        table.add_row(
            eviction["resident_id"],
            eviction["deployment_id"],
            eviction["action"],
            size(eviction["freed_bytes"]),
            duration(eviction["duration_ms"]),
            duration(eviction["price_ms"]),
            ", ".join(eviction["preempts"]) or "-",
        )
    return table


def _candidates(candidates: Sequence[Document], left_out: int) -> RenderableType:
    table = table_of(
        "Candidates, best first",
        "deployment",
        "accelerator",
        "node",
        "verdict",
        "start",
        "#needs",
        "#schedulable",
        "why",
    )
    for candidate in candidates:
        verdict = Verdict(candidate["verdict"])
        needed = candidate["needed_bytes"]
        table.add_row(
            candidate["deployment_id"],
            candidate["accelerator_id"],
            candidate["node_id"],
            Text(verdict.value, style=_STYLES[verdict]),
            candidate["start"] if candidate["start"] is not None else "-",
            size_or_dash(needed if needed is not None else candidate["requirement_bytes"]),
            size(candidate["schedulable_bytes"]),
            "\n".join(f"{r.reason.value}: {printable(describe(r))}" for r in _refusals(candidate)) or "-",
        )
    return Group(table, Text(f"and {left_out} more candidates")) if left_out > 0 else table


def size_or_dash(amount_bytes: int | None) -> str:
    """A size for people; `-` for one that is not known, which is not 0."""
    return size(amount_bytes) if amount_bytes is not None else "-"


def _accounting(title: str, accounting: Document) -> Table:
    table = table_of(title, "figure", "#size")
    known = accounting["observed_used_bytes"] is not None
    for name, amount in (
        ("total", accounting["total_bytes"]),
        ("observed used", accounting["observed_used_bytes"]),
        ("attributed to residents", accounting["attributed_managed_bytes"]),
        ("physical used", accounting["physical_used_bytes"]),
        ("external (not ours)", accounting["unmanaged_external_bytes"] if known else None),
        ("reserved and not yet used", accounting["future_lease_bytes"]),
        ("reserve of the policy", accounting["reserve_bytes"]),
        ("schedulable", accounting["schedulable_bytes"]),
    ):
        table.add_row(name, size_or_dash(amount))
    table.add_row("attribution", accounting["attribution"])
    return table


def _residents(residents: Sequence[Document], left_out: int) -> RenderableType:
    table = table_of("Residents there", "resident", "deployment", "state", "#size")
    for resident in residents:
        table.add_row(
            resident["resident_id"],
            resident["deployment_id"],
            resident["state"],
            size(resident["attributed_bytes"]),
        )
    return Group(table, Text(f"and {left_out} more residents")) if left_out > 0 else table
