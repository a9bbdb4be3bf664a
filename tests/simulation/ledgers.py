"""Ledgers for tests of what asks a ledger: lived in virtual time, written to files, and forged."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import orjson

from gpuledger.adapters.ledger.export import export
from gpuledger.adapters.ledger.memory import MemoryLedger
from gpuledger.adapters.ledger.sqlite import SqliteLedger
from gpuledger.domain.events import EVENT_TYPES, NewEvent, Recorded
from gpuledger.domain.policy import Policy, Priority
from gpuledger.domain.ports import Batch, Ledger
from gpuledger.domain.state import Residency, ResidencyPolicy
from gpuledger.domain.units import GIB, seconds
from gpuledger.domain.world import World, fold

from .virtual_shell import Card, Model, VirtualShell

MODELS = (
    Model("embed", 1 * GIB, 1 * GIB + GIB // 4, load_ms=2000, priority=Priority.PRODUCTION, concurrency=2),
    Model("chat", 9 * GIB, 11 * GIB, load_ms=9000),
    Model("vision", 7 * GIB, 8 * GIB, load_ms=7000, residency=Residency(ResidencyPolicy.LOAD_ON_DEMAND, 0)),
    Model("batch", 6 * GIB, 7 * GIB, load_ms=5000, priority=Priority.BACKGROUND, interruptible=True),
)


@dataclass(frozen=True)
class Lived:
    """A ledger that a scheduler lived, and the state it ended in."""

    events: tuple[Recorded, ...]
    world: World
    lines: tuple[bytes, ...]

    def until(self, seq: int) -> Lived:
        """The same, cut after an event."""
        events = self.events[:seq]
        return Lived(events, fold(World(), events), self.lines[:seq])

    def newest(self, *types: type[Any]) -> Recorded:
        return next(event for event in reversed(self.events) if isinstance(event.data, types))


def lived(shell: VirtualShell) -> Lived:
    lines = tuple(leaf.body for leaf in shell.ledger.leaves())
    return Lived(tuple(shell.recorded), shell.world, lines)


def crowded(ledger: Ledger) -> VirtualShell:
    """One card and more than fits: admissions, evictions, a queue, refusals, a preemption, a failure, a drain."""
    shell = VirtualShell(ledger, MODELS, (Card("GPU-0", 16 * GIB),), policy=replace(Policy(), fair_wait_seconds=5))
    shell.work_ms = lambda request_id: 300 + 70 * (sum(request_id.encode()) % 40)
    shell.start()
    begin = shell.now
    classes = (Priority.INTERACTIVE, Priority.BACKGROUND, Priority.PRODUCTION, Priority.BENCHMARK)
    for number in range(60):
        model = MODELS[number * 7 % 4]
        moment = begin + seconds(2) + number * 1_700_000 + number % 3 * 250_000
        shell.ask_at(moment, f"r{number}", model.capability, classes[number % 4])
    shell.at(begin + seconds(20), lambda: _external(shell, 3 * GIB))
    shell.at(begin + seconds(60), lambda: _external(shell, 0))
    shell.at(begin + seconds(61), lambda: shell.ask("late", "chat@1", deadline=shell.now + seconds(1)))
    shell.at(begin + seconds(70), lambda: shell.fail_loads.add("batch"))
    shell.run_for(180)
    return shell


def _external(shell: VirtualShell, held_bytes: int) -> None:
    shell.cards[0].external_bytes = held_bytes


@cache
def crowded_minutes() -> Lived:
    """Three minutes of `crowded`, ended in order."""
    shell = crowded(MemoryLedger())
    shell.shut_down()
    return lived(shell)


@cache
def crowded_and_killed() -> Lived:
    """`crowded` cut in the middle of its work: leases held, requests in the queue, a resident on its way out."""
    whole = crowded_minutes()
    worlds, world = list[World](), World()
    for event in whole.events:
        world = fold(world, (event,))
        worlds.append(world)
    fullest = max(worlds, key=lambda world: (min(2, len(world.queue())) + 2 * len(list(world.leases())), world.seq))
    return whole.until(fullest.seq)


# ---- files ------------------------------------------------------------------------------------------------------


def write_export(events: Lived | Iterable[bytes], path: Path) -> Path:
    lines = events.lines if isinstance(events, Lived) else events
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def write_sqlite(story: Lived, path: Path) -> Path:
    """A SQLite ledger with these events. Those of one instant are appended together."""
    ledger = SqliteLedger(path)
    versions: dict[str, int] = {}
    for at, together in groupby(story.events, key=lambda event: event.at):
        events = tuple(together)
        expect = {event.stream: versions.get(event.stream, 0) for event in events}
        ledger.append(Batch(tuple(NewEvent(event.stream, event.data) for event in events), expect), at)
        versions |= {event.stream: event.version for event in events}
    ledger.close()
    return path


def exported(ledger: Ledger, path: Path) -> Path:
    with path.open("wb") as out:
        export(ledger, out)
    return path


def forge(line: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """A leaf whose data was changed, in canonical bytes again: only what follows from other events can tell."""
    leaf = orjson.loads(line)
    change(leaf["data"])
    assert leaf["type"] in EVENT_TYPES
    return orjson.dumps(leaf, option=orjson.OPT_SORT_KEYS)


def forged(story: Lived, seq: int, change: Callable[[dict[str, Any]], None]) -> list[bytes]:
    """The lines of a ledger, that of event `seq` forged."""
    return [forge(line, change) if index == seq else line for index, line in enumerate(story.lines, start=1)]
