"""A runtime that hangs at work: it holds its memory and says nothing, and nobody but the scheduler can end it."""

from __future__ import annotations

from gpuledger.domain.events import FailureRecorded, RequestCompleted, RequestFailed, ResidentDrainStarted
from gpuledger.domain.failures import Failure
from gpuledger.domain.units import GIB
from tests.simulation.breakable_ledger import BreakableLedger
from tests.simulation.breakable_machine import FOREVER, BreakableMachine, Slab
from tests.simulation.breakable_scenarios import CARD, LARGE, OTHER, POLICY
from tests.simulation.breakable_shell import ANSWER_TIMEOUT_MS, BreakableShell


def hung_at_work() -> BreakableShell:
    """LARGE hangs at the only request there is; OTHER does not fit beside it."""
    machine = BreakableMachine((Slab(CARD, 24 * GIB),))
    shell = BreakableShell(BreakableLedger(), (LARGE, OTHER), machine.cards, POLICY, machine=machine)
    shell.work_ms = lambda _: 8000
    shell.start()
    shell.ask("r1", LARGE.capability)
    shell.run_for(10)
    (body,) = machine.bodies.values()
    assert body.working == 1
    shell.sample()
    shell.stall(body, FOREVER)
    return shell


def drains(shell: BreakableShell) -> list[str]:
    return [event.data.cause for event in shell.recorded if isinstance(event.data, ResidentDrainStarted)]


def test_one_that_gives_no_answer_in_time_is_drained_and_stopped() -> None:
    """What is asked next would wait as long, and in vain."""
    shell = hung_at_work()
    shell.run_for(ANSWER_TIMEOUT_MS // 1000)
    told = shell.outcomes["r1"].event
    assert isinstance(told, RequestFailed)
    assert told.failure is Failure.TIMEOUT
    assert drains(shell) == ["no_answer_in_time"]
    again = shell.ask("r2", LARGE.capability, deadline=shell.now + 300_000_000)
    shell.run_for(POLICY.lease_ttl_seconds + 2 * POLICY.stop_grace_seconds + 30)
    assert isinstance(again.event, RequestCompleted)
    assert len(shell.machine.bodies) == 1


def test_one_whose_client_went_away_does_not_hold_its_card_for_ever() -> None:
    """It was busy when it was heard of last; neither its time to be kept nor who waits for its room ends that."""
    shell = hung_at_work()
    shell.leave("r1")
    waiting = shell.ask("r2", OTHER.capability, deadline=shell.now + 300_000_000)
    shell.run_for(POLICY.lease_ttl_seconds - 10)
    assert drains(shell) == [], "it may yet say something"
    shell.run_for(POLICY.lease_ttl_seconds + 2 * POLICY.stop_grace_seconds + 40)
    assert drains(shell) == ["silent"]
    assert isinstance(waiting.event, RequestCompleted)
    assert not [event for event in shell.recorded if isinstance(event.data, FailureRecorded)]
