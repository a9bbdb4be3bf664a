"""Processes that nothing in the state wants the end of any more, and evictions that a run of the scheduler left."""

from __future__ import annotations

import pytest

from gpuledger.domain.events import EvictionStarted, FailureRecorded, MemoryNotReclaimed, NewEvent, ResidentEvicted
from gpuledger.domain.messages import RequestsHeld, UnloadIdle
from gpuledger.domain.ports import Batch
from gpuledger.domain.units import seconds
from tests.simulation.virtual_shell import VirtualShell
from tests.unit.shells import HOST, shell
from tests.unit.test_scheduler import SMALL, events_of, started
from tests.unit.test_shell import serve_one

RESIDENT = "emb@host:local#1"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
async def test_a_process_whose_resident_is_no_more_is_ended() -> None:
    """As after a suspension: the time of its eviction is over before it was told to go."""
    async with shell() as served:
        await serve_one(served)
        stream = f"accelerator:{HOST}"
        gone = MemoryNotReclaimed(RESIDENT, "emb", served.running.engine.now(), 0)
        version = served.ledger.stream_version(stream)
        served.ledger.append(Batch((NewEvent(stream, gone),), {stream: version}), served.running.engine.now())
        await served.running.engine.ask(RequestsHeld(frozenset()))
        await served.until(lambda: served.machine.stopped == [RESIDENT])
        await serve_one(served)
        assert served.machine.stopped == [RESIDENT]


def test_the_time_between_two_runs_is_no_evidence_that_a_process_does_not_end() -> None:
    first = started(SMALL)
    first.ask("r1", "small@1")
    first.run_for(20)
    first.feed(UnloadIdle("olga", None))
    first.crash()
    second = VirtualShell(first.ledger, first.models, first.cards, now=first.now + seconds(3600))
    second.start()
    assert [e.cause.value for e in events_of(second, EvictionStarted)] == ["scheduler_restarted"]
    assert len(list(second.world.residents())) == 1, "it is ended, and then looked at"
    second.run_for(10)
    assert len(events_of(second, ResidentEvicted)) == 1
    assert not events_of(second, FailureRecorded)
