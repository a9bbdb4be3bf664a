"""The asyncio shell on a made-up machine: what is durable and what waits for it, races, a full disk, crashes."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise

import pytest

from gpuledger.adapters.http.ports import Cause, Ending, Granted, Refused, Repeated, Unavailable
from gpuledger.adapters.ledger.memory import MemoryLedger
from gpuledger.domain.events import (
    AcceleratorHealthChanged,
    FailureRecorded,
    LeaseReleased,
    NewEvent,
    PlanDecided,
    ReleaseCause,
    RequestCancelled,
    StreamKind,
    TelemetrySampled,
    stream_name,
)
from gpuledger.domain.failures import Failure
from gpuledger.domain.messages import RevisePolicy
from gpuledger.domain.ports import Batch, RuntimeFault, RuntimeFigures
from gpuledger.domain.reasons import Reason
from gpuledger.domain.sampling import SampleTaken
from gpuledger.domain.scheduler import Scheduler
from gpuledger.domain.state import Health, ResidentState
from gpuledger.domain.units import GIB
from gpuledger.tools import effects as effects_module
from gpuledger.tools import shell as engine_module
from gpuledger.tools.running import Haste, PartEnded
from gpuledger.tools.snapshots import load_world, read_snapshot
from tests.unit.shells import HOST, Machine, Sensors, Shell, WatchedLedger, embedding, envelope, shell

pytestmark = pytest.mark.anyio

DONE = Ending(200, 5, 100)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def serve_one(served: Shell) -> Granted:
    """A request from its arrival to its recorded end."""
    outcome = await served.running.desk.submit(served.question())
    assert isinstance(outcome, Granted)
    served.running.desk.end(outcome.request_id, DONE)
    await served.until(lambda: outcome.request_id not in served.running.world.requests)
    return outcome


class TestRequests:
    async def test_a_cold_request_loads_its_model_and_goes(self) -> None:
        async with shell() as served:
            granted = await serve_one(served)
            assert granted.start == "cold"
            assert granted.plan is not None
            assert served.machine.spawned == ["emb@host:local#1"]
            names = served.names()
            order = ["LeaseGranted", "ResidentLoadStarted", "ResidentProcessStarted", "ResidentReady", "LeaseReleased"]
            assert [names.index(name) for name in order] == sorted(names.index(name) for name in order)

    async def test_a_warm_request_costs_one_commit_before_it_is_forwarded(self) -> None:
        async with shell() as served:
            await serve_one(served)
            before = served.ledger.appends
            samples = served.names().count("TelemetrySampled")
            outcome = await served.running.desk.submit(served.question())
            assert isinstance(outcome, Granted)
            assert outcome.start == "warm"
            # Samples come by the clock; of the request itself there is one commit.
            sampled = served.names().count("TelemetrySampled") - samples
            assert served.ledger.appends - before - sampled == 1
            assert [type(e.data).__name__ for e in served.ledger.read_stream(f"request:{outcome.request_id}")] == [
                "RequestReceived",
                "PlanDecided",
            ]

    async def test_nobody_waits_for_the_record_of_an_end(self) -> None:
        async with shell() as served:
            outcome = await served.running.desk.submit(served.question())
            before = served.ledger.appends
            served.running.desk.end(outcome.request_id, DONE)
            assert served.ledger.appends == before
            await served.until(lambda: "RequestCompleted" in served.names())

    async def test_one_who_waits_in_the_queue_goes_when_the_one_before_has_ended(self) -> None:
        async with shell() as served:
            first = await served.running.desk.submit(served.question())
            second = asyncio.create_task(served.running.desk.submit(served.question()))
            await served.until(lambda: "RequestQueued" in served.names())
            assert not second.done()
            served.running.desk.end(first.request_id, DONE)
            granted = await second
            assert isinstance(granted, Granted)
            assert granted.start == "warm"

    async def test_a_refusal_comes_with_its_plan(self) -> None:
        machine = Machine()
        machine.external_bytes = 7 * GIB + GIB // 2
        async with shell(machine=machine) as served:
            refused = await served.running.desk.submit(served.question())
            assert isinstance(refused, Refused)
            assert refused.reason is Reason.EXTERNAL_GPU_PRESSURE
            assert refused.plan is not None
            assert refused.plan.document["verdict"] == "REJECT_CAPACITY"

    async def test_a_client_that_goes_while_it_waits_gives_its_lease_back(self) -> None:
        machine = Machine()
        machine.may_load.clear()
        async with shell(machine=machine) as served:
            waiting = asyncio.create_task(served.running.desk.submit(served.question()))
            await served.until(lambda: "ResidentProcessStarted" in served.names())
            waiting.cancel()
            await served.until(lambda: "RequestCancelled" in served.names())
            assert [record for _, record in served.running.world.leases()] == []
            machine.may_load.set()
            await served.until(lambda: "ResidentReady" in served.names())

    async def test_leases_of_who_is_there_are_renewed(self) -> None:
        async with shell(policy={"lease_ttl_seconds": 1}) as served:
            outcome = await served.running.desk.submit(served.question())
            await served.until(lambda: served.names().count("LeaseRenewed") >= 3)
            assert "LeaseExpired" not in served.names()
            assert isinstance(outcome, Granted)
            assert not outcome.lost.done()


class TestRepetitions:
    async def test_the_second_of_two_at_once_is_told_that_the_first_is_in_progress(self) -> None:
        async with shell() as served:
            first = asyncio.create_task(served.running.desk.submit(served.question("key-1", mac="aa" * 32)))
            await asyncio.sleep(0)
            second = await served.running.desk.submit(served.question("key-1", mac="aa" * 32))
            other = await served.running.desk.submit(served.question("key-1", mac="bb" * 32))
            assert second == Repeated("key-1", True, "in_progress")
            assert other == Repeated("key-1", False, "in_progress")
            assert isinstance(await first, Granted)

    async def test_a_completed_one_is_not_served_again(self) -> None:
        async with shell() as served:
            await served.running.desk.submit(served.question("key-1", mac="aa" * 32))
            served.running.desk.end("key-1", DONE)
            await served.until(lambda: "RequestCompleted" in served.names())
            before = len(served.names())
            again = await served.running.desk.submit(served.question("key-1", mac="aa" * 32))
            assert again == Repeated("key-1", True, "completed")
            assert served.names()[before:].count("RequestReceived") == 0

    async def test_a_refused_one_gets_the_same_refusal(self) -> None:
        machine = Machine()
        machine.external_bytes = 7 * GIB + GIB // 2
        async with shell(machine=machine) as served:
            first = await served.running.desk.submit(served.question("key-1", mac="aa" * 32))
            again = await served.running.desk.submit(served.question("key-1", mac="aa" * 32))
            assert isinstance(again, Repeated)
            assert again.state == "refused"
            assert again.refused == first

    async def test_one_whose_commit_was_taken_for_failed_is_found(self) -> None:
        """A COMMIT that was durable and yet reported as failed: the request stands, and nobody waits for it."""
        async with shell() as served:
            served.ledger.lose_next_answer = True
            question = served.question("key-1", mac="aa" * 32)
            assert await served.running.desk.submit(question) == Unavailable("key-1", Cause.LEDGER_UNAVAILABLE)
            await served.until(lambda: "RequestCancelled" in served.names())
            await served.until(lambda: served.running.engine.trouble is None)
            assert await served.running.desk.submit(question) == Repeated("key-1", True, "cancelled")
            assert [record for _, record in served.running.world.leases()] == []


class TestOtherWriters:
    async def test_what_another_wrote_before_is_folded_first(self) -> None:
        async with shell() as served:
            append_envelope(served)
            await serve_one(served)
            assert served.running.world.deployments["emb"].measured[0].envelope.measured_at == 1
            assert served.running.world == load_world(served.ledger)

    async def test_a_race_is_decided_again_on_what_the_other_wrote(self) -> None:
        async with shell() as served:
            await serve_one(served)
            raced: list[Batch] = []

            def race(batch: Batch) -> None:
                if any(isinstance(event.data, PlanDecided) for event in batch.events) and not raced:
                    raced.append(batch)
                    touch_accelerator(served)

            served.ledger.before = race
            granted = await serve_one(served)
            assert len(raced) == 1
            ((seq, plan),) = [one for one in served.placed(PlanDecided) if one[1].request_id == granted.request_id]
            assert plan.as_of == seq - 2  # RequestReceived lies between
            assert served.running.world == load_world(served.ledger)

    async def test_one_that_loses_every_race_is_refused(self) -> None:
        async with shell() as served:
            await serve_one(served)

            def race(batch: Batch) -> None:
                if any(event.stream == "accelerator:host:local" for event in batch.events):
                    touch_accelerator(served)

            served.ledger.before = race
            outcome = await served.running.desk.submit(served.question())
            assert isinstance(outcome, Refused)
            assert outcome.reason is Reason.LEASE_CONFLICT
            served.ledger.before = lambda _: None


def append_envelope(served: Shell) -> None:
    stream = stream_name(StreamKind.DEPLOYMENT, "emb")
    batch = Batch((NewEvent(stream, envelope("emb", 1, 1)),), {stream: served.ledger.stream_version(stream)})
    MemoryLedger.append(served.ledger, batch, 1)  # not through our shell: another process


def touch_accelerator(served: Shell) -> None:
    stream = "accelerator:host:local"
    event = NewEvent(stream, AcceleratorHealthChanged("host:local", Health.HEALTHY, "other"))
    batch = Batch((event,), {stream: served.ledger.stream_version(stream)})
    MemoryLedger.append(served.ledger, batch, 1)


class TestFullDisk:
    async def test_nothing_is_admitted_and_ends_are_kept_until_it_is_writable_again(self) -> None:
        async with shell() as served:
            desk = served.running.desk
            granted = await desk.submit(served.question())
            served.ledger.broken = "the disk is full"
            desk.end(granted.request_id, DONE)
            await served.until(lambda: served.running.engine.trouble is not None)
            refused = await desk.submit(served.question("late"))
            assert refused == Unavailable("late", Cause.LEDGER_UNAVAILABLE)
            ledger = next(condition for condition in desk.conditions() if condition.name == "ledger")
            assert not ledger.holds
            assert "full" in ledger.detail
            served.ledger.broken = None
            await served.until(lambda: "RequestCompleted" in served.names())
            assert served.running.engine.trouble is None
            assert (await serve_one(served)).start == "warm"

    async def test_one_who_waits_in_the_queue_is_served_when_it_is_writable_again(self) -> None:
        async with shell() as served:
            first = await served.running.desk.submit(served.question())
            second = asyncio.create_task(served.running.desk.submit(served.question()))
            await served.until(lambda: "RequestQueued" in served.names())
            served.ledger.broken = "the disk is full"
            served.running.desk.end(first.request_id, DONE)
            await served.until(lambda: served.running.engine.trouble is not None)
            served.ledger.broken = None
            assert isinstance(await second, Granted)

    async def test_the_answer_of_a_runtime_is_kept(self) -> None:
        machine = Machine()
        machine.may_load.clear()
        async with shell(machine=machine) as served:
            waiting = asyncio.create_task(served.running.desk.submit(served.question()))
            await served.until(lambda: "ResidentProcessStarted" in served.names())
            served.ledger.broken = "the disk is full"
            machine.may_load.set()
            await served.until(lambda: served.running.engine.trouble is not None)
            served.ledger.broken = None
            assert isinstance(await waiting, Granted)
            assert machine.spawned == ["emb@host:local#1"]


class TestDefects:
    async def test_a_defect_ends_one_request_and_not_the_scheduler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with shell() as served:
            await serve_one(served)

            def broken(*arguments: object, **options: object) -> object:
                raise AssertionError("a defect")

            monkeypatch.setattr(Scheduler, "handle", broken)
            outcome = await served.running.desk.submit(served.question("unlucky"))
            assert outcome == Unavailable("unlucky", Cause.INTERNAL_ERROR)
            monkeypatch.undo()
            assert (await serve_one(served)).start == "warm"

    async def test_what_one_runtime_says_never_ends_the_samples(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with shell() as served:
            await serve_one(served)

            async def broken(_: str) -> RuntimeFigures | None:
                raise ValueError("a page that no reader expects")

            monkeypatch.setattr(served.machine, "figures", broken)
            taken = served.machine.samples
            await served.until(lambda: served.machine.samples > taken + 1)
            assert (await serve_one(served)).start == "warm"

    async def test_an_effect_that_breaks_is_a_failure_of_its_resident(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with shell(policy={"gateway_retries": 0}) as served:

            async def broken(_: str) -> None:
                raise ValueError("an answer that no reader expects")

            monkeypatch.setattr(served.machine, "load", broken)
            outcome = await asyncio.wait_for(served.running.desk.submit(served.question()), 10)
            assert isinstance(outcome, Refused)
            assert (outcome.failure, outcome.detail) == (Failure.MODEL_LOAD_FAILED, "unexpected_error")
            await served.until(lambda: served.machine.stopped == ["emb@host:local#1"])

    async def test_a_stop_that_breaks_is_tried_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(effects_module, "LAST_PAUSE_SECONDS", 0.01)
        async with shell() as served:
            await serve_one(served)
            attempts, stop = 0, served.machine.stop

            async def broken(resident_id: str, grace_seconds: int) -> None:
                nonlocal attempts
                attempts += 1
                if attempts < 3:
                    raise ValueError("a process that no reader expects")
                await stop(resident_id, grace_seconds)

            monkeypatch.setattr(served.machine, "stop", broken)
            assert await asyncio.wait_for(served.stop(), 10)


class TestCrashes:
    async def test_a_crash_at_work_lets_the_request_wait_for_a_new_process(self) -> None:
        async with shell() as served:
            granted = await served.running.desk.submit(served.question())
            assert isinstance(granted, Granted)
            served.machine.crash("emb@host:local#1")
            lost = await asyncio.wait_for(granted.lost, 10)
            assert (lost.reason, lost.failure, lost.detail) == (None, Failure.RUNTIME_CRASH, "signal_9")
            assert lost.again is not None
            outcome = await served.running.desk.resume(granted.request_id, lost.again)
            assert isinstance(outcome, Granted)
            assert (outcome.start, outcome.passage.attempt) == ("cold", 2)
            assert served.machine.spawned == ["emb@host:local#1", "emb@host:local#2"]

    async def test_a_load_that_fails_is_told_and_holds_the_next_one_back(self) -> None:
        machine = Machine()
        machine.load_fault = RuntimeFault(Failure.MODEL_LOAD_FAILED, "exit_status_1", b"no such file")
        async with shell(machine=machine, policy={"gateway_retries": 0}) as served:
            outcome = await served.running.desk.submit(served.question())
            assert isinstance(outcome, Refused)
            assert (outcome.failure, outcome.detail) == (Failure.MODEL_LOAD_FAILED, "exit_status_1")
            recorded = [e.data for e in served.ledger.read_stream("capability:emb@1")]
            assert isinstance(recorded[0], FailureRecorded)
            assert recorded[0].evidence_sha256 == sha256(b"no such file").hexdigest()
            await served.until(lambda: machine.stopped == ["emb@host:local#1"])
            late = await served.running.desk.submit(served.question(deadline_ms=100))
            assert isinstance(late, Refused)
            assert late.reason is Reason.DEADLINE_CANNOT_BE_MET


class TestShutdown:
    async def test_it_leaves_residency_and_leases_at_zero(self) -> None:
        async with shell() as served:
            await serve_one(served)
            assert await served.stop()
            assert served.names()[-1] == "SchedulerStopped"
            world = load_world(served.ledger)
            assert list(world.residents()) == []
            assert list(world.leases()) == []
            assert served.machine.held == {}

    async def test_what_runs_may_end_first(self) -> None:
        async with shell() as served:
            granted = await served.running.desk.submit(served.question())
            stopping = asyncio.create_task(served.stop(drain_seconds=20))
            await served.until(lambda: "NodeDrainStarted" in served.names())
            await asyncio.sleep(0.2)
            assert served.machine.stopped == []
            served.running.desk.end(granted.request_id, DONE)
            assert await stopping
            assert "RequestCompleted" in served.names()

    async def test_what_takes_too_long_is_cancelled(self) -> None:
        async with shell() as served:
            granted = await served.running.desk.submit(served.question())
            assert isinstance(granted, Granted)
            assert await served.stop(drain_seconds=0)
            assert granted.lost.done()
            assert [event.cause for event in served.of(RequestCancelled)] == ["shutdown"]

    async def test_who_waits_in_the_queue_is_refused_for_the_drain(self) -> None:
        async with shell() as served:
            first = await served.running.desk.submit(served.question())
            second = asyncio.create_task(served.running.desk.submit(served.question()))
            await served.until(lambda: "RequestQueued" in served.names())
            stopping = asyncio.create_task(served.stop(drain_seconds=20))
            outcome = await second
            assert isinstance(outcome, Refused)
            assert outcome.reason is Reason.NODE_DRAINING
            served.running.desk.end(first.request_id, DONE)
            assert await stopping

    async def test_a_load_under_way_is_broken_off(self) -> None:
        machine = Machine()
        machine.may_load.clear()
        async with shell(machine=machine) as served:
            waiting = asyncio.create_task(served.running.desk.submit(served.question()))
            await served.until(lambda: "ResidentProcessStarted" in served.names())
            assert await served.stop(drain_seconds=0)
            assert await waiting == Unavailable(waiting.result().request_id, Cause.DRAINING)
        assert machine.stopped == machine.spawned
        assert "ResidentReady" not in served.names()

    async def test_a_start_under_way_is_waited_for_and_ended(self) -> None:
        machine = Machine()
        machine.may_spawn.clear()
        async with shell(machine=machine) as served:
            waiting = asyncio.create_task(served.running.desk.submit(served.question()))
            await served.until(lambda: "ResidentLoadStarted" in served.names())
            stopping = asyncio.create_task(served.stop(drain_seconds=0))
            await served.until(lambda: "EvictionStarted" in served.names())
            await asyncio.sleep(0.05)
            assert machine.stopped == []
            machine.may_spawn.set()
            assert await stopping
            await waiting
        assert machine.stopped == machine.spawned == ["emb@host:local#1"]


class TestTime:
    async def test_one_that_waited_as_long_as_it_may_is_refused_for_what_it_waits_for(self) -> None:
        async with shell(policy={"max_queue_seconds": 1}) as served:
            await served.running.desk.submit(served.question())
            refused = await served.running.desk.submit(served.question())
            assert isinstance(refused, Refused)
            assert (refused.reason, refused.detail) == (Reason.CONCURRENCY_LIMIT, "max_queue_seconds")
            assert refused.plan is not None
            assert refused.plan.document["verdict"] == "QUEUE"

    async def test_one_with_a_deadline_is_refused_when_it_has_passed(self) -> None:
        async with shell() as served:
            await served.running.desk.submit(served.question())
            refused = await served.running.desk.submit(served.question(deadline_ms=300))
            assert isinstance(refused, Refused)
            assert refused.reason is Reason.DEADLINE_CANNOT_BE_MET

    async def test_a_model_that_nobody_uses_goes_in_its_time(self) -> None:
        async with shell(embedding(residency={"policy": "keep_warm", "ttl_seconds": 1})) as served:
            await serve_one(served)
            await served.until(lambda: "ResidentEvicted" in served.names())
            assert served.machine.held == {}


class TestEarlierRun:
    async def test_its_requests_leases_and_processes_are_ended(self) -> None:
        ledger = WatchedLedger()
        async with shell(ledger=ledger) as served:
            granted = await served.running.desk.submit(served.question())
            assert isinstance(granted, Granted)
        machine = Machine()
        async with shell(ledger=ledger, machine=machine) as served:
            assert [process.pid for process in machine.orphans] == [1001]
            assert list(served.running.world.residents()) == []
            assert list(served.running.world.leases()) == []
            assert [event.cause for event in served.of(LeaseReleased)] == [ReleaseCause.SCHEDULER_RESTARTED]
            assert (await serve_one(served)).start == "cold"

    async def test_a_snapshot_and_the_tail_are_the_fold(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engine_module, "SNAPSHOT_EVERY", 10)
        ledger = WatchedLedger()
        async with shell(ledger=ledger) as served:
            for _ in range(5):
                await serve_one(served)
        snapshot = ledger.load_snapshot()
        assert snapshot is not None
        assert snapshot.seq == ledger.head()  # the last one is of the shutdown
        assert read_snapshot(snapshot) == load_world(ledger)
        async with shell(ledger=ledger) as served:
            assert (await serve_one(served)).start == "cold"
        assert load_world(ledger, snapshot) == load_world(ledger)

    async def test_a_snapshot_that_contradicts_itself_is_of_no_use(self) -> None:
        ledger = WatchedLedger()
        async with shell(ledger=ledger) as served:
            await serve_one(served)
        snapshot = ledger.load_snapshot()
        assert snapshot is not None
        accelerators = json.loads(snapshot.body)["accelerators"]
        for told, instead in (('"node_id":"', '"node_id":"no-'), (f'"{next(iter(accelerators))}":{{', '"GPU-9":{')):
            forged = replace(snapshot, body=snapshot.body.replace(told.encode(), instead.encode(), 1))
            assert forged.body != snapshot.body
            assert read_snapshot(forged) is None
            assert load_world(ledger, forged) == load_world(ledger)


class TestBlindness:
    async def test_what_was_granted_just_before_is_not_held_for_ever(self) -> None:
        """The grant waits for a sample that shows its room, and no sample comes."""
        async with shell(policy={"telemetry_max_age_seconds": 3}) as served:
            waiting = asyncio.create_task(served.running.desk.submit(served.question()))
            served.machine.blind = True
            refused = await waiting
            assert isinstance(refused, Refused)
            assert refused.reason is Reason.SCHEDULER_STATE_STALE
            assert list(served.running.world.leases()) == []
            assert [one.holds for one in served.running.desk.conditions() if one.name == "telemetry"] == [False]
            served.machine.blind = False
            await served.until(lambda: all(one.holds for one in served.running.desk.conditions()[1:]))
            assert (await serve_one(served)).start == "cold"


class TestNoAccelerator:
    async def test_a_server_that_sees_none_says_so(self) -> None:
        machine = Machine()
        machine.blind = True
        async with shell(machine=machine, measured=False) as served:
            refused = await served.running.desk.submit(served.question())
            assert isinstance(refused, Refused)
            assert refused.reason is Reason.NO_ACCELERATOR
            sight = served.running.desk.conditions()
            assert [one.detail for one in sight if not one.holds] == ["no accelerator was found"]


class TestSamples:
    async def test_a_sample_is_as_old_as_it_is_when_it_is_decided_on(self) -> None:
        """One that waited in the line must not show what happened meanwhile as if it had seen it."""
        async with shell() as served:
            engine = served.running.engine
            began = engine.now()
            taking = asyncio.create_task(served.running.sampler.take())
            await asyncio.sleep(0)
            # The event loop is held up between the reading and the decision.
            await served.until(lambda: served.machine.samples > 0)
            await taking
            assert served.of(TelemetrySampled)[-1].observed_at <= began + 1_000

    async def test_a_sample_goes_before_requests_that_stand_in_the_line(self) -> None:
        """Behind them it would be old when it is decided on, and each of them refused for want of a fresh one."""
        async with shell() as served:
            engine = served.running.engine
            for number in range(5):
                engine.tell(RevisePolicy("olga", replace(engine.world.policy, revision=f"p{number}")))
            seen = len(served.of(TelemetrySampled))
            taken = SampleTaken(engine.world.accelerators[HOST].node_id, Sensors(served.machine).sample(()), {})
            await engine.ask(taken, first=True)
            assert len(served.of(TelemetrySampled)) == seen + 1
            assert engine.world.policy.revision != "p4", "what stood in the line is still to come"

    async def test_samples_are_never_closer_than_their_distance(self) -> None:
        async with shell() as served:
            for _ in range(20):
                served.running.sampler.hurry()
                await asyncio.sleep(0.005)
            instants = [sampled.received_at for sampled in served.of(TelemetrySampled)]
            assert min(b - a for a, b in pairwise(instants)) > 25_000


class TestAlwaysWarm:
    async def test_it_is_loaded_at_the_start_and_at_every_later_one(self) -> None:
        ledger = WatchedLedger()
        for _ in range(2):
            async with shell(embedding(residency={"policy": "always_warm"}), ledger=ledger) as served:
                await served.until(lambda: is_ready(served))
                assert (await serve_one(served)).start == "warm"
                assert await served.stop()


def is_ready(served: Shell) -> bool:
    return [record.resident.state for _, record in served.running.world.residents()] == [ResidentState.READY]


class TestLeavingInADifficultPlace:
    async def test_with_a_full_disk_it_leaves_when_it_is_told_to_and_says_that_it_was_not_in_order(self) -> None:
        async with shell() as served:
            await serve_one(served)
            served.ledger.broken = "the disk is full"
            haste = Haste(asyncio.Event(), asyncio.Event())
            haste.drain_over.set()
            haste.at_once.set()
            assert not await served.running.stop(60, haste)
        assert served.machine.held == {}

    async def test_a_part_that_ends_is_noticed(self) -> None:
        async with shell() as served:
            noticed = asyncio.create_task(served.running.part_ended())
            (engine,) = [task for task in asyncio.all_tasks() if task.get_name() == "engine"]
            engine.cancel()
            with pytest.raises(PartEnded, match="engine"):
                await noticed
