"""`gpuledger.status/1` and the lists beside it, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpuledger.domain.explain import duration, size
from gpuledger.domain.units import MICROS_PER_MS, parse_instant

from .plan_report import printable, size_or_dash, table_of
from .status import Driver

Document: TypeAlias = Mapping[str, Any]

#: Up to so many accelerators are columns of a table that fits a narrow terminal; more are its rows.
_COLUMNS: Final = 4
_DAY_MS: Final = 86_400_000
_HOUR_MS: Final = 3_600_000

_HEADERS: Final[Mapping[str, tuple[str, str]]] = {
    Driver.RUNNING: ("scheduler running", "bold green"),
    Driver.STARTING: ("a scheduler is starting; this is the ledger's last state", "bold yellow"),
    Driver.NONE: ("no scheduler is running; this is the ledger's last state", "bold yellow"),
    Driver.EXPORT: ("an export of a ledger; this is its last state", "bold yellow"),
}
_STYLES: Final[Mapping[str, str]] = {
    "NORMAL": "green",
    "ELEVATED": "yellow",
    "HIGH": "bold yellow",
    "CRITICAL": "bold red",
    "KNOWN": "green",
    "ESTIMATED": "yellow",
    "UNKNOWN": "bold red",
    "HEALTHY": "green",
    "DEGRADED": "yellow",
    "FAILED": "bold red",
    "LOST": "bold red",
}


def status_report(status: Document) -> RenderableType:
    """Everything of a status document, what matters most first."""
    parts: list[RenderableType] = [header(status), _accelerators(status)]
    parts.append(_residents(status) if status["residents"] else Text("\nnothing is resident"))
    if status["leases"]:
        parts.append(leases_table(status["leases"]))
    if status["queue"]:
        parts.append(_queue(status))
    parts.append(_deployments(status))
    if status["failures"]:
        parts.append(_failures(status))
    return Group(*parts)


def header(status: Document) -> Text:
    """Whether anything drives the ledger, and how old its last event is."""
    scheduler, ledger = status["scheduler"], status["ledger"]
    said, style = _HEADERS[scheduler["state"]]
    line = Text(said, style=style)
    if scheduler["pid"] is not None:
        line.append(f" (process {scheduler['pid']})", "")
    line.append(f"\n{printable(ledger['path'])}: ", "")
    if ledger["at"] is None:
        return line.append("no event yet", "")
    line.append(f"event {ledger['seq']}, {ago(ledger['at'], status['now'])}, policy {status['policy_revision']}", "")
    draining = [node["node_id"] for node in status["nodes"] if node["draining"] and node["running"]]
    return line.append(f", draining: {', '.join(draining)}" if draining else "", "bold yellow")


def age(milliseconds: int) -> str:
    """A duration of any length for people.

    >>> age(1_500), age(3_700_000), age(200_000_000)
    ('1.5 s', '1 h 1 min', '2 d 7 h')
    """
    if milliseconds < _HOUR_MS:
        return duration(milliseconds)
    if milliseconds < _DAY_MS:
        return f"{milliseconds // _HOUR_MS} h {milliseconds % _HOUR_MS // 60_000} min"
    return f"{milliseconds // _DAY_MS} d {milliseconds % _DAY_MS // _HOUR_MS} h"


def ago(instant: str | None, now: str) -> str:
    """How long before `now` an instant was, or how far it lies after it."""
    if instant is None:
        return "-"
    apart_ms = (parse_instant(now) - parse_instant(instant)) // MICROS_PER_MS
    return f"{age(apart_ms)} ago" if apart_ms >= 0 else f"in {age(-apart_ms)}"


def _styled(word: str) -> Text:
    return Text(word, style=_STYLES.get(word, ""))


# ---- memory -----------------------------------------------------------------------------------------------------


def _accelerators(status: Document) -> RenderableType:
    if not status["accelerators"]:
        return Text("\nno accelerator was ever seen")
    names = ("accelerator", *(name for name, _ in _figures(status["accelerators"][0])))
    rows = [(one["accelerator_id"], *(cell for _, cell in _figures(one))) for one in status["accelerators"]]
    if len(rows) > _COLUMNS:
        table = table_of("Accelerators", *names)
        for row in rows:
            table.add_row(*row)
        return table
    table = table_of("Accelerators", "", *(f"#{row[0]}" for row in rows))
    for index, name in enumerate(names[1:], start=1):
        table.add_row(name, *(row[index] for row in rows))
    return table


def _figures(one: Document) -> Sequence[tuple[str, Text]]:
    pressure = _styled(one["pressure"])
    if one["pressure_bp"] is not None:
        pressure.append(f" {one['pressure_bp'] // 100}.{one['pressure_bp'] % 100:02d} %")
    return (
        ("total", Text(size(one["total_bytes"]))),
        ("observed", Text(size_or_dash(one["observed_used_bytes"]))),
        ("managed", Text(size(one["attributed_managed_bytes"]))),
        ("external", Text(size_or_dash(one["unmanaged_external_bytes"]))),
        ("leased, not yet used", Text(size(one["future_lease_bytes"]))),
        ("reserve", Text(size(one["reserve_bytes"]))),
        ("schedulable", Text(size(one["schedulable_bytes"]), style="bold")),
        ("pressure", pressure),
        ("attribution", _styled(one["attribution"])),
        ("sample", _sample(one)),
        ("health", _styled(one["health"])),
        ("foreign processes", Text("-" if one["foreign_processes"] is None else str(one["foreign_processes"]))),
        ("device", Text(printable(f"{one['device_name']} ({one['gpu_class']}, {one['node_id']})"))),
    )


def _sample(one: Document) -> Text:
    fault = one["telemetry_fault"] or one["sample_invalid"]
    text = Text("none" if one["sample"] is None else f"{age(one['sample']['age_ms'])} old")
    return text.append(f", {printable(fault)}", "bold red") if fault else text


def _residents(status: Document) -> Table:
    table = table_of("Residents", "resident", "state", "since", "#size", "last used", "kept", "#reported", "process")
    now = status["now"]
    for one in status["residents"]:
        table.add_row(
            one["resident_id"],
            _state(one),
            ago(one["since"], now),
            Text(size(one["attributed_bytes"])) + _attribution(one),
            ago(one["last_used_at"], now),
            _kept(one, now) if status["scheduler"]["state"] == Driver.RUNNING else "-",
            str(one["running_requests"]),
            _process(one),
        )
    return table


def _attribution(one: Document) -> Text:
    """What is known needs no word."""
    return Text() if one["attribution"] == "KNOWN" else Text(" ") + _styled(one["attribution"])


def _state(one: Document) -> str:
    if one["eviction"] is not None:
        return f"{one['state']} ({one['eviction']['cause']})"
    return f"{one['state']} after {', '.join(one['awaits'])}" if one["awaits"] else str(one["state"])


def _kept(one: Document, now: str) -> str:
    if one["state"] != "READY":
        return "-"
    if one["kept_until"] is None:
        return "always"
    if one["active_leases"] or one["running_requests"]:
        return "in use"
    return ago(one["kept_until"], now) if one["kept_until"] > now else "no longer"


def _process(one: Document) -> str:
    process = one["process"]
    if process is None:
        return "-"
    return str(process["pid"]) if process["alive"] else f"{process['pid']} (gone)"


# ---- leases, queue, deployments ---------------------------------------------------------------------------------


def leases_table(leases: Sequence[Document]) -> Table:
    """Live leases, with what is known of them."""
    table = table_of("Leases", "lease", "resident", "class", "#reserved", "#shown", "#expires in")
    for lease in leases:
        table.add_row(
            printable(lease["lease_id"]),
            lease["resident_id"],
            lease["priority"],
            size(lease["reserved_bytes"]),
            size(lease["materialized_bytes"]),
            duration(lease["expires_in_ms"]),
        )
    return table


def _queue(status: Document) -> Table:
    table = table_of(
        "Queue, in claim order", "##", "request", "capability", "class", "#waited", "waits for", "#expected"
    )
    for one in status["queue"]:
        estimate = one["estimated_wait_ms"]
        table.add_row(
            str(one["place"]),
            printable(one["request_id"]),
            one["capability"],
            one["priority"],
            age(one["waited_ms"]),
            _waits_for(one, status["now"]),
            "-" if estimate is None else age(estimate),
        )
    return table


def _waits_for(one: Document, now: str) -> str:
    waiting = one["waiting_for"]
    if waiting is None:
        return "to be planned"
    line = f"{waiting['reason']}\non {waiting['accelerator_id']}"
    if waiting["needed_bytes"]:
        line += f", needs {size(waiting['needed_bytes'])}"
    if waiting["resident_ids"]:
        line += f", until gone: {', '.join(waiting['resident_ids'])}"
    return line if waiting["not_before"] is None else f"{line}, not before {ago(waiting['not_before'], now)}"


def _deployments(status: Document) -> RenderableType:
    if not status["deployments"]:
        return Text("\nno deployment is declared")
    table = table_of("Deployments", "deployment", "capability", "class", "residency", "measured", "#needs", "trouble")
    for one in status["deployments"]:
        measured = one["measured"]
        policy, ttl = one["residency"]["policy"], one["residency"]["ttl_seconds"]
        table.add_row(
            one["deployment_id"],
            one["capability"],
            one["priority"],
            f"{policy} {ttl} s" if policy in ("keep_warm", "lab_only", "exclusive") else policy,
            "\n".join(f"{m['gpu_class']}, {ago(m['measured_at'], status['now'])}" for m in measured) or "-",
            "\n".join(size(m["requirement_bytes"]) for m in measured) or "-",
            Text("\n".join(_troubles(one, status["now"])), style="bold yellow"),
        )
    return table


def _troubles(one: Document, now: str) -> Sequence[str]:
    troubles = [one["problem"]] if one["problem"] else []
    troubles += [f"suspect on {m['gpu_class']}" for m in one["measured"] if m["suspect"]]
    troubles += [f"no load on {b['accelerator_id']} before {ago(b['until'], now)}" for b in one["backoff"]]
    return troubles


def _failures(status: Document) -> Table:
    table = table_of("Newest failures", "when", "failure", "owner", "capability", "resident", "attempt", "detail")
    for one in status["failures"]:
        table.add_row(
            ago(one["at"], status["now"]),
            one["failure"],
            one["owner"],
            one["capability"],
            one["resident_id"] or "-",
            f"{one['attempt']} of {one['limit']}",
            printable(one["detail"]),
        )
    return table
