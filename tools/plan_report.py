"""A plan for people: the verdict with its figures, the candidates and why each was refused, what is evicted."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpuledger.domain.accounting import Accounting
from gpuledger.domain.candidates import Candidate, Refusal
from gpuledger.domain.documents import PressureCase, judged
from gpuledger.domain.explain import describe, duration, size
from gpuledger.domain.planner import EVIDENCE_LIMIT, PlacementPlan
from gpuledger.domain.reasons import Verdict, waiting_helps
from gpuledger.domain.state import Resident, WaitingFor
from gpuledger.domain.units import format_instant

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


def report_of(plan: PlacementPlan) -> RenderableType:
    """Everything that a plan says, the most important first."""
    parts: list[RenderableType] = [_headline(plan)]
    parts += [_reason_line(refusal) for refusal in plan.refusals]
    if plan.waiting_for is not None:
        parts.append(_waiting_line(plan.waiting_for))
    if plan.evictions:
        parts.append(_evictions(plan))
    if plan.candidates:
        parts.append(_candidates(plan.candidates))
    if plan.accounting is not None:
        parts.append(_accounting(f"Accounting of {plan.accelerator_id}", plan.accounting))
    if plan.residents:
        parts.append(_residents(plan.residents))
    parts.append(Text(f"policy {plan.policy_revision}, fingerprint {plan.fingerprint}", style="dim"))
    return Group(*parts)


def pressure_report(case: PressureCase) -> RenderableType:
    """The samples of a case with the level that each left."""
    table = _table(f"Pressure under policy {case.policy.revision}", "observed at", "#external", "#pressure", "level")
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


def _headline(plan: PlacementPlan) -> Text:
    line = Text(plan.verdict.value, style=_STYLES[plan.verdict])
    line.append(f"  {plan.request.capability} for {plan.request.request_id} ({plan.request.priority.value})", "")
    best = plan.best
    if best is not None:
        line.append(f": {best.deployment_id} on {best.accelerator_id} of {best.node_id}")
        if best.start is not None and plan.admits and best.estimate_ms is not None:
            line.append(f", {best.start.value} start in about {duration(best.estimate_ms)}")
        if plan.admits:
            line.append(f", {size(best.headroom_after_bytes)} left after it")
    return line


def _reason_line(refusal: Refusal) -> Text:
    advice = "" if waiting_helps(refusal.reason) else " (waiting does not help)"
    return Text(f"  {refusal.reason.value}: {printable(describe(refusal))}{advice}")


def _waiting_line(waiting: WaitingFor) -> Text:
    line = f"  waits on {waiting.accelerator_id} with {waiting.deployment_id}, needs {size(waiting.needed_bytes)}"
    if waiting.resident_ids:
        line += f"; until gone: {', '.join(waiting.resident_ids)}"
    if waiting.not_before is not None:
        line += f"; not before {format_instant(waiting.not_before)}"
    return Text(line)


def _table(title: str, *columns: str) -> Table:
    """A table; a column whose name begins with `#` is of numbers."""
    table = Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        number = column.startswith("#")
        table.add_column(column.removeprefix("#"), justify="right" if number else "left", overflow="fold")
    return table


def _evictions(plan: PlacementPlan) -> Table:
    table = _table(
        "Evictions, one after the other",
        "resident",
        "deployment",
        "action",
        "#frees",
        "#takes",
        "#price",
        "preempts",
    )
    for eviction in plan.evictions:
        table.add_row(
            eviction.resident_id,
            eviction.deployment_id,
            eviction.action.value,
            size(eviction.freed_bytes),
            duration(eviction.duration_ms),
            duration(eviction.price_ms),
            ", ".join(eviction.preempts) or "-",
        )
    return table


def _candidates(candidates: Sequence[Candidate]) -> RenderableType:
    table = _table(
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
    for candidate in candidates[:EVIDENCE_LIMIT]:
        why = [f"{r.reason.value}: {printable(describe(r))}" for r in candidate.refusals]
        table.add_row(
            candidate.deployment_id,
            candidate.accelerator_id,
            candidate.node_id,
            Text(candidate.verdict.value, style=_STYLES[candidate.verdict]),
            candidate.start.value if candidate.start is not None else "-",
            _size_or_dash(_needs(candidate)),
            size(candidate.headroom_before_bytes),
            "\n".join(why) or "-",
        )
    more = len(candidates) - EVIDENCE_LIMIT
    return Group(table, Text(f"and {more} more candidates")) if more > 0 else table


def _needs(candidate: Candidate) -> int | None:
    return candidate.needed_bytes if candidate.needed_bytes is not None else candidate.requirement_bytes


def _size_or_dash(amount_bytes: int | None) -> str:
    return size(amount_bytes) if amount_bytes is not None else "-"


def _accounting(title: str, accounting: Accounting) -> Table:
    table = _table(title, "figure", "#size")
    known = accounting.observed_used_bytes is not None
    for name, amount in (
        ("total", accounting.total_bytes),
        ("observed used", accounting.observed_used_bytes),
        ("attributed to residents", accounting.attributed_managed_bytes),
        ("physical used", accounting.physical_used_bytes),
        ("external (not ours)", accounting.unmanaged_external_bytes if known else None),
        ("reserved and not yet used", accounting.future_lease_bytes),
        ("reserve of the policy", accounting.reserve_bytes),
        ("schedulable", accounting.schedulable_bytes),
    ):
        table.add_row(name, _size_or_dash(amount))
    table.add_row("attribution", accounting.attribution.value)
    return table


def _residents(residents: Sequence[Resident]) -> RenderableType:
    table = _table("Residents there", "resident", "deployment", "state", "#size")
    for resident in residents[:EVIDENCE_LIMIT]:
        table.add_row(
            resident.resident_id,
            resident.deployment_id,
            resident.state.value,
            size(resident.attributed_bytes),
        )
    more = len(residents) - EVIDENCE_LIMIT
    return Group(table, Text(f"and {more} more residents")) if more > 0 else table
