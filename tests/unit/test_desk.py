"""What the desk makes of leases that are lost and of work that fails, on a made-up machine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager

import pytest

from gpuledger.adapters.http.openai_errors import refusal_error
from gpuledger.adapters.http.ports import STRAIGHT, Ending, Granted, Lost, Outcome, Refused, Unavailable
from gpuledger.domain.events import LeaseReleased, RequestCancelled, RequestCompleted, RequestFailed, RequestRetried
from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import RuntimeFault
from gpuledger.domain.reasons import Reason
from gpuledger.domain.units import GIB, MIB
from gpuledger.tools.desk import RequestDesk
from tests.unit.shells import Machine, Shell, embedding, shell

pytestmark = pytest.mark.anyio

DONE = Ending(200, 5, 100)
BROKEN = Ending(503, 5, 0, failure=Failure.INVALID_OUTPUT, detail="http_status_500", unsent=True)
#: Levels of pressure that are never reached.
NO_PRESSURE = {
    "pressure_enter_bp": {"ELEVATED": 10_000, "HIGH": 10_000, "CRITICAL": 10_000},
    "pressure_exit_bp": {"ELEVATED": 9_999, "HIGH": 9_999, "CRITICAL": 9_999},
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def granted(outcome: Awaitable[Outcome]) -> Granted:
    found = await asyncio.wait_for(outcome, 30)
    assert isinstance(found, Granted)
    return found


def fail(desk: RequestDesk, one: Granted) -> asyncio.Future[Outcome]:
    """Its runtime answers badly; what becomes of it."""
    again = desk.end(one.request_id, BROKEN)
    assert again is not None
    return again


class TestUnsentFailures:
    async def test_it_is_served_under_another_lease(self) -> None:
        async with shell() as served:
            desk = served.running.desk
            first = await granted(desk.submit(served.question()))
            assert first.passage == STRAIGHT
            second = await granted(desk.resume(first.request_id, fail(desk, first)))
            assert second.lease_id != first.lease_id
            assert second.passage.attempt == 2
            desk.end(first.request_id, DONE)
            await served.until(lambda: "RequestCompleted" in served.names())
            assert [event.attempt for event in served.of(RequestRetried)] == [1]
            assert [record for _, record in served.running.world.leases()] == []

    async def test_it_fails_after_as_many_as_the_policy_allows(self) -> None:
        async with shell() as served:
            desk = served.running.desk
            first = await granted(desk.submit(served.question()))
            second = await granted(desk.resume(first.request_id, fail(desk, first)))
            refused = await desk.resume(first.request_id, fail(desk, second))
            assert isinstance(refused, Refused)
            assert (refused.failure, refused.detail) == (Failure.INVALID_OUTPUT, "http_status_500")
            assert refused.passage.attempt == 2
            assert desk.facts().open_requests == 0

    async def test_a_client_that_goes_meanwhile_is_given_up(self) -> None:
        async with shell() as served:
            desk = served.running.desk
            first = await granted(desk.submit(served.question()))
            waiting = asyncio.create_task(desk.resume(first.request_id, fail(desk, first)))
            await asyncio.sleep(0)
            waiting.cancel()
            await served.until(lambda: not served.running.world.requests)
            assert [event.cause for event in served.of(RequestCancelled)] == ["client_gone"]
            assert [record for _, record in served.running.world.leases()] == []

    async def test_nobody_waits_for_another_lease_while_none_can_be_recorded(self) -> None:
        async with shell() as served:
            desk = served.running.desk
            first = await granted(desk.submit(served.question()))
            served.ledger.broken = "the disk is full"
            assert isinstance(await desk.submit(served.question()), Unavailable)
            assert served.running.engine.trouble is not None
            assert desk.end(first.request_id, BROKEN) is None
            served.ledger.broken = None
            await served.until(lambda: "RequestFailed" in served.names())

    async def test_what_may_not_be_tried_again_ends_at_once(self) -> None:
        late = Ending(504, 5, 0, failure=Failure.TIMEOUT, detail="no_answer_in_time")
        async with shell() as served:
            first = await granted(served.running.desk.submit(served.question()))
            assert served.running.desk.end(first.request_id, late) is None
            await served.until(lambda: "RequestFailed" in served.names())
            assert "RequestRetried" not in served.names()

    async def test_a_lease_whose_end_was_not_recorded_runs_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A defect dropped the input: its lease is not renewed for ever, and whoever waits is told."""
        async with shell(policy={"lease_ttl_seconds": 1}) as served:
            desk, engine = served.running.desk, served.running.engine
            first = await granted(desk.submit(served.question()))
            with monkeypatch.context() as patch:
                patch.setattr(engine, "tell", forget)
                again = fail(desk, first)
            refused = await asyncio.wait_for(desk.resume(first.request_id, again), 30)
            assert isinstance(refused, Refused)
            assert refused.failure is Failure.LEASE_TIMEOUT


class TestLostLeases:
    async def test_an_answer_that_had_begun_ends_with_the_failure(self) -> None:
        async with shell() as served:
            first = await granted(served.running.desk.submit(served.question()))
            served.machine.crash("emb@host:local#1")
            lost = await asyncio.wait_for(first.lost, 30)
            served.running.desk.cut_off(first.request_id, lost)
            await served.until(lambda: "RequestFailed" in served.names())
            (failed,) = served.of(RequestFailed)
            assert (failed.reason, failed.failure, failed.detail) == (None, Failure.RUNTIME_CRASH, "signal_9")
            await served.until(lambda: not list(served.running.world.leases()))
            assert served.running.desk.facts().open_requests == 0

    async def test_one_that_is_over_waits_for_nothing(self) -> None:
        async with shell(policy={"gateway_retries": 0}) as served:
            first = await granted(served.running.desk.submit(served.question()))
            served.machine.crash("emb@host:local#1")
            assert await asyncio.wait_for(first.lost, 30) == Lost(None, Failure.RUNTIME_CRASH, "signal_9")

    async def test_an_answer_that_was_whole_at_that_very_moment_is_complete(self) -> None:
        async with shell() as served:
            first = await granted(served.running.desk.submit(served.question()))
            served.machine.crash("emb@host:local#1")
            await asyncio.wait_for(first.lost, 30)
            assert served.running.desk.end(first.request_id, DONE) is None
            await served.until(lambda: not served.running.world.requests)
            assert len(served.of(RequestCompleted)) == 1
            assert [record for _, record in served.running.world.leases()] == []


class TestPreemption:
    async def preempted(self, served: Shell) -> tuple[Granted, Lost, Granted]:
        """A background request that had to make way, how it learned of it, and for whom."""
        first = await granted(served.running.desk.submit(served.question(client="batch")))
        second = await granted(served.running.desk.submit(served.question(capability="other@1")))
        return first, await asyncio.wait_for(first.lost, 30), second

    async def test_it_waits_at_its_old_place_and_is_served_again(self) -> None:
        async with tight() as served:
            desk = served.running.desk
            first, lost, second = await self.preempted(served)
            assert (lost.reason, lost.failure) == (Reason.PREEMPTED, None)
            assert served.machine.stopped == ["emb@host:local#1"]
            assert lost.again is not None
            again = asyncio.create_task(desk.resume(first.request_id, lost.again))
            desk.end(second.request_id, DONE)
            assert (await granted(again)).lease_id != first.lease_id
            assert "RequestFailed" not in served.names()

    async def test_one_whose_answer_had_begun_is_refused(self) -> None:
        async with tight() as served:
            first, lost, _ = await self.preempted(served)
            served.running.desk.cut_off(first.request_id, lost)
            await served.until(lambda: "RequestFailed" in served.names())
            assert [event.reason for event in served.of(RequestFailed)] == [Reason.PREEMPTED]
            assert first.request_id not in served.running.world.requests

    async def test_one_whose_client_goes_leaves_the_queue(self) -> None:
        async with tight() as served:
            first, _, _ = await self.preempted(served)
            served.running.desk.end(first.request_id, Ending(499, 5, 10, client_gone=True))
            await served.until(lambda: first.request_id not in served.running.world.requests)
            assert [event.cause for event in served.of(RequestCancelled)] == ["client_gone"]


def forget(_: object) -> None:
    """In the place of telling."""


def tight() -> AbstractAsyncContextManager[Shell]:
    """A machine on which one model fits beside what others hold; one of the two may be interrupted."""
    machine = Machine()
    machine.external_bytes = 7 * GIB - 250 * MIB  # with the reserve of 1 GiB
    humble = embedding(interruptible=True, priority="background")
    brief = embedding("other", residency={"policy": "load_on_demand"})
    return shell(humble, brief, machine=machine, policy=NO_PRESSURE)


class Faulty(Machine):
    """One model does not load."""

    async def load(self, resident_id: str) -> None:
        if resident_id.startswith("emb@"):
            raise RuntimeFault(Failure.MODEL_LOAD_FAILED, "exit_status_1")
        await super().load(resident_id)


class TestFallback:
    async def test_its_rank_and_its_cause_are_told(self) -> None:
        spare = embedding("spare", capability="emb@1", fallback_rank=1)
        async with shell(embedding(), spare, machine=Faulty(), policy={"gateway_retries": 0}) as served:
            found = await granted(served.running.desk.submit(served.question()))
            assert (found.passage.fallback_rank, found.passage.fallback) == (1, "MODEL_LOAD_FAILED")
            assert found.passage.attempt == 1
            assert served.machine.spawned == ["emb@host:local#1", "spare@host:local#1"]

    async def test_a_failure_at_work_may_lead_to_it(self) -> None:
        spare = embedding("spare", capability="emb@1", fallback_rank=1)
        async with shell(embedding(), spare, policy={"gateway_retries": 0}) as served:
            desk = served.running.desk
            first = await granted(desk.submit(served.question()))
            second = await granted(desk.resume(first.request_id, fail(desk, first)))
            assert (second.passage.fallback_rank, second.passage.fallback) == (1, "INVALID_OUTPUT")
            released = [event.cause for event in served.of(LeaseReleased)]
            assert released == ["failed"]


class TestQueue:
    async def test_the_place_and_the_wait_are_those_of_the_first_moment(self) -> None:
        async with shell() as served:
            desk = served.running.desk
            first = await granted(desk.submit(served.question()))
            assert first.passage.queue_place is None
            waiting = [asyncio.create_task(desk.submit(served.question())) for _ in range(2)]
            await served.until(lambda: served.names().count("RequestQueued") == 2)
            desk.end(first.request_id, DONE)
            second = await granted(waiting[0])
            desk.end(second.request_id, DONE)
            third = await granted(waiting[1])
            assert [one.passage.queue_place for one in (second, third)] == [1, 2]
            desk.end(third.request_id, DONE)
            await served.until(lambda: not served.running.world.requests)
            # What requests of it took is known now, so how long a further one waits can be estimated.
            fourth = await granted(desk.submit(served.question()))
            fifth = asyncio.create_task(desk.submit(served.question()))
            await served.until(lambda: served.names().count("RequestQueued") == 3)
            desk.end(fourth.request_id, DONE)
            estimated = (await granted(fifth)).passage.estimated_wait_ms
            assert estimated is not None
            assert estimated >= 0

    async def test_they_are_told_with_a_refusal(self) -> None:
        async with shell(policy={"max_queue_seconds": 1}) as served:
            await granted(served.running.desk.submit(served.question()))
            refused = await served.running.desk.submit(served.question())
            assert isinstance(refused, Refused)
            assert refused.passage.queue_place == 1


class TestSuspectEnvelopes:
    async def test_out_of_memory_is_told_and_then_that_its_envelope_is_suspect(self) -> None:
        machine = Machine()
        machine.load_fault = RuntimeFault(Failure.GPU_OOM, "exit_status_1", b"out of memory")
        async with shell(machine=machine) as served:
            first = await asyncio.wait_for(served.running.desk.submit(served.question()), 30)
            assert isinstance(first, Refused)
            error = refusal_error(first, "emb@1", None)
            assert (error.status, error.code, error.retry_after) == (503, "GPU_OOM", None)
            assert error.message == (
                "emb@1 could not be served: its runtime ran out of memory, and planned again it found no other place; "
                "its envelope is suspect now: an operator has to accept it, or it has to be measured again"
            )
            second = await asyncio.wait_for(served.running.desk.submit(served.question()), 30)
            assert isinstance(second, Refused)
            error = refusal_error(second, "emb@1", None)
            assert (error.status, error.code) == (403, "NO_MEASURED_ENVELOPE")
            assert error.message == (
                "emb@1 is refused: its envelope is suspect (a runtime ran out of memory with it): "
                "an operator has to accept it, or it has to be measured again"
            )

    async def test_what_was_never_measured_is_told_otherwise(self) -> None:
        async with shell(measured=False, profile="never") as served:
            refused = await asyncio.wait_for(served.running.desk.submit(served.question()), 30)
            assert isinstance(refused, Refused)
            error = refusal_error(refused, "emb@1", None)
            assert (error.status, error.code) == (403, "NO_MEASURED_ENVELOPE")
            assert error.message == (
                "emb@1 is refused: what its model takes was never measured as it is configured now: "
                "an operator has to see to it"
            )
            assert refused.plan is not None
            assert "hash-emb" in str(refused.plan.document["figures"]), "the hash is among the figures"
