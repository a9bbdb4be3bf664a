"""`gpuledger.status/1` and the lists beside it, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpuledger.domain.explain import duration, size

from .ages import age, ago
from .plan_report import printable, size_or_dash, table_of
from .status import Driver
from .trouble_report import alerts_table, capabilities_table, failures_table, queue_table

Document: TypeAlias = Mapping[str, Any]

#: Up to so many accelerators are columns of a table that fits a narrow terminal; more are its rows.
_COLUMNS: Final = 4

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
    parts: list[RenderableType] = [header(status)]
    if status["alerts"]:
        parts.append(alerts_table(status["alerts"], status["now"]))
    parts.append(_accelerators(status))
    parts.append(_residents(status) if status["residents"] else Text("\nnothing is resident"))
    if status["leases"]:
        parts.append(leases_table(status["leases"]))
    if status["queue"]:
        parts.append(queue_table(status))
    failing = [one for one in status["capabilities"] if one["failures_in_a_row"]]
    if failing:
        parts.append(capabilities_table(failing, status["now"]))
    parts.append(_deployments(status))
    if status["failures"]:
        parts.append(failures_table(status["failures"], status["now"]))
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
    for node in status["nodes"]:
        line.append("".join(f", {node['node_id']} {word}" for word in _node_words(node)), "bold yellow")
    return line.append(", LAB is paused" if status["lab_paused"] else "", "bold yellow")


def _node_words(node: Document) -> Sequence[str]:
    """What keeps work away from a node; of a shutdown that is over nothing."""
    words = ["is cordoned"] if node["cordoned"] else []
    if node["draining"] and (node["running"] or node["drain_cause"] == "operator"):
        words.append("is drained" if node["drained"] else "drains")
    return words


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
        ("attribution", _attribution_of(one)),
        ("sample", _sample(one)),
        ("health", _health(one)),
        ("foreign processes", Text("-" if one["foreign_processes"] is None else str(one["foreign_processes"]))),
        ("device", Text(printable(f"{one['device_name']} ({one['gpu_class']}, {one['node_id']})"))),
    )


def _attribution_of(one: Document) -> Text:
    text = _styled(one["attribution"])
    return text if one["blind"] is None else text.append(f", {printable(one['blind'])}", "yellow")


def _health(one: Document) -> Text:
    text = _styled(one["health"])
    if one["profiling"] is not None:
        text.append(f", measures {one['profiling']}", "bold yellow")
    return text if one["health_cause"] is None else text.append(f", {printable(one['health_cause'])}", "bold red")


def _sample(one: Document) -> Text:
    fault = one["telemetry_fault"] or one["sample_invalid"]
    text = Text("none" if one["sample"] is None else f"{age(one['sample']['age_ms'])} old")
    return text.append(f", {printable(fault)}", "bold red") if fault else text


def _residents(status: Document) -> Table:
    table = table_of("Residents", "resident", "state", "since", "#size", "last used", "kept", "requests", "process")
    now = status["now"]
    for one in status["residents"]:
        table.add_row(
            one["resident_id"],
            _state(one),
            ago(one["since"], now),
            Text(size(one["attributed_bytes"])) + _attribution(one),
            ago(one["last_used_at"], now),
            _kept(one, now) if status["scheduler"]["state"] == Driver.RUNNING else "-",
            _requests(one),
            _process(one),
        )
    return table


def _attribution(one: Document) -> Text:
    """What is known needs no word."""
    return Text() if one["attribution"] == "KNOWN" else Text(" ") + _styled(one["attribution"])


def _requests(one: Document) -> str:
    """What its runtime says of itself: how many run, of these how many wait in it, how full its cache is."""
    told = [str(one["running_requests"])]
    if one["waiting_requests"] is not None:
        told.append(f"{one['waiting_requests']} wait")
    if one["cache_use_bp"] is not None:
        told.append(f"cache {one['cache_use_bp'] // 100} %")
    return ", ".join(told)


def _state(one: Document) -> str:
    if one["eviction"] is not None:
        falls_asleep = "falls asleep, " if one["eviction"]["action"] == "sleep" else ""
        return f"{one['state']} ({falls_asleep}{one['eviction']['cause']})"
    if one["asleep"] and one["state"] != "SLEEPING":
        return f"{one['state']} (wakes)"
    return f"{one['state']} after {', '.join(one['awaits'])}" if one["awaits"] else str(one["state"])


def _kept(one: Document, now: str) -> str:
    if one["state"] not in ("READY", "SLEEPING"):
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


# ---- leases, deployments ------------------------------------------------------------------------------------------


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
    if one["artifact"]["corrupt"] is not None:
        troubles.append(f"ARTIFACT_CORRUPT: {printable(one['artifact']['corrupt'])}")
    troubles += [
        f"suspect on {m['gpu_class']}{_why_suspect(one, m['gpu_class'])}" for m in one["measured"] if m["suspect"]
    ]
    troubles += [f"no load on {b['accelerator_id']} before {ago(b['until'], now)}" for b in one["backoff"]]
    return troubles


def _why_suspect(one: Document, gpu_class: str) -> str:
    why = one["suspicion"]
    if why is None or why["gpu_class"] != gpu_class:
        return ""
    if why["cause"] == "gpu_oom":
        return ": ran out of memory"
    return f": held {size(why['observed_bytes'])}, measured {size(why['peak_bytes'])}"
