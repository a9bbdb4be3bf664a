"""What a run found, as tables for people and as a document for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpuledger.domain.units import MIB

from .run import Chaos

SCHEMA: Final = "gpuledger.chaos/1"
#: So much of each finding goes to the terminal; the document has more.
_TOLD: Final = 5
_WIDTH: Final = 400


def document(chaos: Chaos) -> dict[str, Any]:
    """Everything that was counted, and what was wrong in words."""
    tally, faults, watch, ballast = chaos.tally, chaos.faults, chaos.watch, chaos.ballast
    return {
        "schema": SCHEMA,
        "seed": chaos.seed,
        "seconds": round(chaos.seconds),
        "requests_per_second": chaos.per_second,
        "passed": chaos.passed,
        "orders": len(chaos.clients.answers),
        "dropped": chaos.clients.dropped,
        "completed": dict(tally.completed),
        "capacity_rejections": dict(tally.capacity),
        "refused_by_policy_or_health": dict(tally.policy),
        "injected_failures": dict(tally.injected),
        "other_ends": dict(tally.other),
        "faults": dict(faults.done),
        "hogs": {"killed": ballast.deaths, "most_bytes": ballast.most_bytes},
        "schedulers": chaos.arena.starts,
        "memory": {
            "limit_bytes": chaos.scene.limit_bytes,
            "most_held_bytes": watch.most_held_bytes,
            "least_available_bytes": watch.least_available_bytes,
            "looks": watch.ticks,
        },
        "scheduler": {
            "ran_seconds": round(watch.starvation.ran_seconds),
            "waited_for_the_processor_seconds": round(watch.starvation.waited_seconds),
        },
        "retries": chaos.follower.retried,
        "events": dict(chaos.follower.counts),
        **chaos.figures,
        "checks": {name: {"count": found.count, "words": found.words} for name, found in chaos.checks.items()},
    }


def tell(chaos: Chaos, console: Console) -> None:
    """The tables."""
    told = document(chaos)
    for title, counts in _counted(told):
        console.print(_table(title, counts))
    looks = told["memory"]
    held, hogs = looks["most_held_bytes"] // MIB, told["hogs"]["most_bytes"] // MIB
    limit, free = looks["limit_bytes"] // MIB, looks["least_available_bytes"] // MIB
    console.print(f"MiB: limit {limit}, models held {held} at most, hogs {hogs}, at least {free} stayed free")
    ran, waited = told["scheduler"].values()
    console.print(f"the scheduler computed for {ran} s, and waited for the processor for {waited} s")
    checks = Table("must be none", "count", title="Checks", title_justify="left")
    for name, found in chaos.checks.items():
        checks.add_row(name, str(found.count), style="bold red" if found.count else "green")
    console.print(checks)
    for name, found in chaos.checks.items():
        for words in found.words[:_TOLD]:
            console.print(Text(f"{name}: {words[:_WIDTH]}", style="red"))


def _counted(told: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, int]]]:
    yield (
        "Requests",
        {
            "sent": told["orders"],
            "completed": sum(told["completed"].values()),
            "refused for want of room": sum(told["capacity_rejections"].values()),
            "refused by policy or health": sum(told["refused_by_policy_or_health"].values()),
            "failed by what was done here": sum(told["injected_failures"].values()),
            **told["other_ends"],
            "tried again by the gateway": told["retries"],
            "dropped before they were sent": told["dropped"],
        },
    )
    yield "Capacity rejections", told["capacity_rejections"]
    yield "Refused by policy or health", told["refused_by_policy_or_health"]
    yield "Failed by what was done here", told["injected_failures"]
    yield "What was done", {**told["faults"], "hog killed": told["hogs"]["killed"], "schedulers": told["schedulers"]}
    yield "Failures in the ledger", told.get("failures", {})
    shown = ("LeaseGranted", "ResidentReady", "ResidentSlept", "ResidentWoken", "EvictionStarted", "LeasePreempted")
    more = ("RequestQueued", "RequestFellBack", "PressureChanged", "ThrashingDetected", "PlanDecided")
    yield "Events", {name: told["events"].get(name, 0) for name in (*shown, *more)}


def _table(title: str, counts: Mapping[str, int]) -> Table:
    table = Table("what", "count", title=title, title_justify="left")
    for name, count in Counter(counts).most_common():
        table.add_row(name, str(count))
    return table
