"""The end of work, told late: of a lease that is lost already, or a request that was put back (semantics.md 7, 8)."""

from __future__ import annotations

from typing import TypeVar

from gpuledger.adapters.ledger.memory import MemoryLedger
from gpuledger.domain.events import LeaseGranted, RequestCompleted, RequestFailed, RequestRetried
from gpuledger.domain.failures import Failure
from gpuledger.domain.messages import WorkEnded
from gpuledger.domain.policy import Policy
from gpuledger.domain.units import GIB
from tests.simulation.virtual_shell import Card, Model, VirtualShell

_T = TypeVar("_T")
MODEL = Model("small", 1 * GIB, 2 * GIB, load_ms=2000)


def at_work() -> VirtualShell:
    """A request that is being served, and whose gateway says nothing by itself."""
    shell = VirtualShell(MemoryLedger(), (MODEL,), (Card("GPU-0", 24 * GIB),), policy=Policy())
    shell.start()
    shell.work_ms = lambda _: 1_000_000
    shell.ask("r1", "small@1")
    shell.run_for(10)
    return shell


def events_of(shell: VirtualShell, kind: type[_T]) -> list[_T]:
    return [event.data for event in shell.recorded if isinstance(event.data, kind)]


def broken(lease_id: str | None, *, unsent: bool) -> WorkEnded:
    failed = (Failure.RUNTIME_CRASH, "connection_lost")
    return WorkEnded("r1", 503, 10, 0, None, None, *failed, client_gone=False, unsent=unsent, lease_id=lease_id)


def crashed_and_granted_again(shell: VirtualShell) -> str:
    """The lease that was lost; the watch for exits was faster than the gateway."""
    (lost,) = events_of(shell, LeaseGranted)
    shell.crash_runtime(lost.resident_id)
    shell.run_for(10)
    assert len(events_of(shell, LeaseGranted)) == 2
    return lost.lease_id


def test_a_failure_under_a_lost_lease_costs_no_further_attempt() -> None:
    shell = at_work()
    lease_id = crashed_and_granted_again(shell)
    shell.feed(broken(lease_id, unsent=True))
    assert [event.attempt for event in events_of(shell, RequestRetried)] == [1]
    assert events_of(shell, RequestFailed) == []
    assert [record.lease.request_id for _, record in shell.world.leases()] == ["r1"]


def test_a_failure_under_its_own_lease_does() -> None:
    shell = at_work()
    crashed_and_granted_again(shell)
    shell.feed(broken(events_of(shell, LeaseGranted)[1].lease_id, unsent=True))
    assert [event.failure for event in events_of(shell, RequestFailed)] == [Failure.RUNTIME_CRASH]


def test_one_whose_answer_had_begun_is_over_whatever_lease_it_has_now() -> None:
    shell = at_work()
    lease_id = crashed_and_granted_again(shell)
    shell.feed(broken(lease_id, unsent=False))
    assert len(events_of(shell, RequestFailed)) == 1
    assert list(shell.world.leases()) == []


def test_an_answer_that_was_whole_when_its_lease_was_lost_is_complete() -> None:
    shell = at_work()
    (granted,) = events_of(shell, LeaseGranted)
    shell.crash_runtime(granted.resident_id)
    assert "r1" in shell.world.requests
    done = WorkEnded("r1", 200, 10, 100, None, None, None, "", client_gone=False, lease_id=granted.lease_id)
    shell.feed(done)
    assert len(events_of(shell, RequestCompleted)) == 1
    assert "r1" not in shell.world.requests
