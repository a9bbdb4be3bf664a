"""A day of the scheduler in virtual time: twice the same bytes, and nothing that must not happen."""

from __future__ import annotations

import pytest

from gpuledger.adapters.ledger.memory import MemoryLedger
from gpuledger.domain.events import LeaseGranted, RequestCompleted
from gpuledger.domain.world import World, fold
from tests.simulation.virtual_shell import VirtualShell, busy_day


def invariants(shell: VirtualShell) -> None:
    for card in shell.cards:
        assert card.external_bytes + shell.held_on(card.accelerator_id) <= card.total_bytes, (
            "out of memory by our doing"
        )
    for state in shell.world.accelerators.values():
        pairs = [record.resident.deployment_id for record in state.residents.values()]
        assert len(pairs) == len(set(pairs)), "two residents of one deployment on one accelerator"
        for lease in state.leases.values():
            assert lease.resident_id in state.residents, "a lease on nothing"


def test_a_day_twice_gives_the_same_bytes() -> None:
    first, second = MemoryLedger(), MemoryLedger()
    shell = busy_day(first, seed=7, check=invariants)
    busy_day(second, seed=7)
    assert [leaf.body for leaf in first.leaves()] == [leaf.body for leaf in second.leaves()]
    assert shell.stopped
    assert not list(shell.world.residents())
    assert not list(shell.world.leases())
    assert not shell.world.requests
    completed = sum(isinstance(event.data, RequestCompleted) for event in shell.recorded)
    granted = sum(isinstance(event.data, LeaseGranted) for event in shell.recorded)
    assert completed > 1000
    assert granted >= completed


def test_the_fold_of_the_ledger_is_the_live_state() -> None:
    ledger = MemoryLedger()
    shell = busy_day(ledger, seed=11, hours=2)
    assert fold(World(), ledger.read(0, ledger.head())) == shell.world


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_other_days_keep_the_invariants(seed: int) -> None:
    shell = busy_day(MemoryLedger(), seed=seed, hours=6, check=invariants)
    assert shell.stopped
    assert all(outcome.ended_at is not None for outcome in shell.outcomes.values())
