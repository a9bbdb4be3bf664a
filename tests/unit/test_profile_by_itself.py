"""Measuring while nothing is wanted: when it begins, what ends it, and that nothing of it is without a bound."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from gpuledger.adapters.http.ports import Refused
from gpuledger.domain.documents import Json
from gpuledger.domain.events import (
    ArtifactCorrupt,
    EnvelopeMeasured,
    EnvelopeSuspected,
    Event,
    NewEvent,
    ProfilingEnded,
    ProfilingStarted,
    StreamKind,
    TelemetrySampled,
    stream_name,
)
from gpuledger.domain.failures import Failure
from gpuledger.domain.messages import CordonNode, DrainNode, UncordonNode
from gpuledger.domain.ports import Batch, RuntimeFault
from gpuledger.domain.reasons import Reason
from gpuledger.tools import measure, measure_meter, profiling
from gpuledger.tools.envelopes import places
from tests.unit.shells import HOST, MODEL_BYTES, Machine, Shell, WatchedLedger, embedding, shell

pytestmark = pytest.mark.anyio

SUSPECTED = EnvelopeSuspected("emb", HOST, "r", "hash-emb", "host", "gpu_oom", MODEL_BYTES, MODEL_BYTES)
CORRUPT = ArtifactCorrupt("emb", "changed", "ab" * 32)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that is waited for comes in milliseconds, and what drives a runtime has nothing to ask."""
    monkeypatch.setattr(measure_meter, "SETTLE_INTERVAL_SECONDS", 0.005)
    monkeypatch.setattr(measure, "CRASH_SHOWS_SECONDS", 0.01)
    monkeypatch.setattr(profiling, "FIRST_PREEMPTED_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(profiling, "FIRST_FAILED_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(profiling, "RETRY_SECONDS", 0.01)
    _drive_with(monkeypatch, lambda: None)


def _drive_with(monkeypatch: pytest.MonkeyPatch, at_work: Callable[[], None]) -> None:
    async def drive(*_: Any) -> int:
        at_work()
        return 500

    monkeypatch.setattr(measure, "drive", drive)


def begin(it: Shell) -> None:
    it.running.background(it.running.profiling.run(), "profiling")


def write(ledger: WatchedLedger, event: Event) -> None:
    """As another writer of the ledger."""
    stream = stream_name(StreamKind.DEPLOYMENT, "emb")
    ledger.append(Batch((NewEvent(stream, event),), {stream: ledger.stream_version(stream)}), 2 * 10**15)


def outcomes(it: Shell) -> list[str]:
    return [one.outcome for one in it.of(ProfilingEnded)]


async def some_samples(it: Shell) -> None:
    """Long enough for whatever would happen to happen: everything that can set it off happens a few times."""
    known = len(it.of(TelemetrySampled))
    while (seen := len(it.of(TelemetrySampled))) < known + 3:
        it.running.sampler.hurry()
        await it.until(partial(_has_more_samples, it, seen))


def _has_more_samples(it: Shell, seen: int) -> bool:
    return len(it.of(TelemetrySampled)) > seen


async def is_loading(it: Shell) -> None:
    await it.until(lambda: bool(it.of(ProfilingStarted)) and bool(it.machine.spawned))


async def test_what_has_no_envelope_is_measured_and_what_has_one_is_not() -> None:
    async with shell(embedding(), measured=False) as it:
        begin(it)
        await it.until(lambda: outcomes(it) == ["measured"])
        (measured,) = it.of(EnvelopeMeasured)
        assert measured.envelope.config_hash == "hash-emb"
        await some_samples(it)
        assert len(it.of(ProfilingStarted)) == 1
        assert not it.machine.held


async def test_one_that_became_suspect_is_measured_again() -> None:
    async with shell(embedding()) as it:
        begin(it)
        await some_samples(it)
        assert not it.of(ProfilingStarted)
        write(it.ledger, SUSPECTED)
        await it.until(lambda: outcomes(it) == ["measured"])
        state = it.running.world.deployments["emb"]
        assert state.suspicion is None
        known = state.measured_on("host")
        assert known is not None
        assert not known.envelope.suspect


class TestPlaces:
    async def test_at_a_start_too(self) -> None:
        async with shell(embedding()) as it:
            assert places(it.running.world) == ()
            write(it.ledger, SUSPECTED)
            await some_samples(it)
            assert [place.deployment_id for place in places(it.running.world)] == ["emb"]

    async def test_a_model_file_that_is_another_one_is_not_measured(self) -> None:
        async with shell(embedding(), measured=False) as it:
            write(it.ledger, CORRUPT)
            await some_samples(it)
            assert places(it.running.world) == ()
            begin(it)
            await some_samples(it)
            assert not it.of(ProfilingStarted)

    async def test_it_says_what_was_declared_of_the_sleep(self) -> None:
        sleep: Json = {"asleep_bytes": 7, "sleep_ms": 8, "wake_ms": 9}
        runtime: Json = {"type": "reference", "task": "embedding", "sleep": {}}
        async with shell({**embedding(), "runtime": runtime, "sleep": sleep}, measured=False) as it:
            (place,) = places(it.running.world)
        assert place.sleep is not None
        assert (place.sleep.asleep_bytes, place.sleep.sleep_ms, place.sleep.wake_ms) == (7, 8, 9)


async def test_a_request_ends_it_and_it_begins_again_later() -> None:
    async with shell(embedding(), embedding("other"), measured=False) as it:
        it.machine.may_load.clear()
        begin(it)
        await is_loading(it)
        refused = await it.running.desk.submit(it.question(capability="other@1"))
        assert isinstance(refused, Refused)
        assert refused.reason is Reason.NO_MEASURED_ENVELOPE
        assert outcomes(it) == ["preempted"]
        assert not it.machine.held
        it.machine.may_load.set()
        await it.until(lambda: outcomes(it) == ["preempted", "measured", "measured"])
        (first, *_) = it.of(ProfilingEnded)
        assert first.detail == "request"


async def test_a_drain_of_the_node_ends_it_and_a_cordon_lets_none_begin() -> None:
    async with shell(embedding(), measured=False) as it:
        await it.running.engine.ask(CordonNode("op", "local"))
        begin(it)
        await some_samples(it)
        assert not it.of(ProfilingStarted)
        it.machine.may_load.clear()
        await it.running.engine.ask(UncordonNode("op", "local"))
        await is_loading(it)
        await it.running.engine.ask(DrainNode("op", "local"))
        await it.until(lambda: outcomes(it) == ["preempted"])
        assert not it.machine.held
        await some_samples(it)
        assert len(it.of(ProfilingStarted)) == 1


async def test_a_stop_waits_for_its_end() -> None:
    async with shell(embedding(), measured=False) as it:
        it.machine.may_load.clear()
        begin(it)
        await is_loading(it)
        assert await it.stop()
        names = [name for name in it.names() if name != "TelemetrySampled"]
        assert names[-3:] == ["ProfilingEnded", "NodeDrainStarted", "SchedulerStopped"]
        assert not it.machine.held


async def test_one_that_fails_is_tried_a_few_times_and_again_when_something_has_changed() -> None:
    machine = Machine()
    machine.load_fault = RuntimeFault(Failure.GPU_OOM, "out_of_memory")
    async with shell(embedding(), machine=machine, measured=False) as it:
        begin(it)
        await it.until(lambda: len(outcomes(it)) == profiling.MAX_FAILURES)
        await some_samples(it)
        assert outcomes(it) == ["failed"] * profiling.MAX_FAILURES
        assert {one.detail for one in it.of(ProfilingEnded)} == {"GPU_OOM: out_of_memory"}
        machine.load_fault = None
        write(it.ledger, SUSPECTED)
        await it.until(lambda: outcomes(it) == [*["failed"] * profiling.MAX_FAILURES, "measured"])


async def test_an_end_that_cannot_be_recorded_is_recorded_as_soon_as_the_ledger_can_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until it is, whoever comes would wait for ever."""
    ledger = WatchedLedger()

    def fill_the_disk() -> None:
        ledger.broken = "the disk is full"

    _drive_with(monkeypatch, fill_the_disk)
    async with shell(embedding(), ledger=ledger, measured=False) as it:
        begin(it)
        await it.until(lambda: it.running.engine.trouble is not None)
        _drive_with(monkeypatch, lambda: None)
        ledger.broken = None
        await it.until(lambda: bool(it.of(ProfilingEnded)))
        assert it.running.world.accelerators[HOST].profiling is None or len(it.of(ProfilingStarted)) == 2
        await it.until(lambda: outcomes(it)[-1] == "measured")


async def test_a_defect_of_ours_ends_one_measurement_and_not_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    def divide() -> None:
        raise ZeroDivisionError

    _drive_with(monkeypatch, divide)
    async with shell(embedding(), measured=False) as it:
        begin(it)
        await it.until(lambda: len(outcomes(it)) == profiling.MAX_FAILURES)
        assert {one.detail for one in it.of(ProfilingEnded)} == {"internal_error"}
        assert await it.stop()
