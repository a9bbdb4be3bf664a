"""Snapshots of the folded state: what is read back is what was folded, and what is of no use is not used."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuledger.adapters.ledger.memory import MemoryLedger
from gpuledger.domain.ports import Snapshot
from gpuledger.domain.world import WORLD_SCHEMA, World, evolve, fold
from gpuledger.tools.snapshots import load_world, read_snapshot, save_world
from tests.simulation.virtual_shell import busy_day


@pytest.fixture(scope="module")
def ledger() -> MemoryLedger:
    """Some busy hours: loads, evictions, queues, preemptions, a program that comes and goes."""
    ledger = MemoryLedger()
    busy_day(ledger, seed=5, hours=2)
    return ledger


def test_a_snapshot_is_the_fold_wherever_it_is_taken(ledger: MemoryLedger) -> None:
    world = World()
    for event in ledger.read(0, 4000):
        world = evolve(world, event)
        if event.seq % 37 == 0:
            save_world(ledger, world)
            snapshot = ledger.load_snapshot()
            assert snapshot is not None
            assert read_snapshot(snapshot) == world


def test_a_snapshot_and_the_tail_are_the_fold(ledger: MemoryLedger) -> None:
    whole = fold(World(), ledger.read(0, ledger.head()))
    save_world(ledger, fold(World(), ledger.read(0, ledger.head() // 2)))
    assert load_world(ledger, ledger.load_snapshot()) == whole
    assert load_world(ledger) == whole


@pytest.mark.parametrize("change", ["schema", "body", "cut", "place"])
def test_one_that_is_of_no_use_is_not_used(ledger: MemoryLedger, change: str) -> None:
    world = fold(World(), ledger.read(0, 500))
    save_world(ledger, world)
    good = ledger.load_snapshot()
    assert good is not None
    bad = {
        "schema": replace(good, schema="gpuledger.world/0"),
        "body": replace(good, body=b'{"seq": "many"}'),
        "cut": replace(good, body=good.body[: len(good.body) // 2]),
        "place": replace(good, seq=good.seq + 1),
    }[change]
    assert read_snapshot(bad) is None
    assert load_world(ledger, bad) == load_world(ledger)


def test_an_empty_ledger_has_none() -> None:
    ledger = MemoryLedger()
    save_world(ledger, World())
    assert ledger.load_snapshot() is None
    assert read_snapshot(Snapshot(0, WORLD_SCHEMA, b"", b"{}")) == World()
