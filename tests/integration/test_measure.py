"""Measuring an envelope with real processes: on the host as it is, and on a GPU that is made up around them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from gpuledger.adapters import procfs
from gpuledger.adapters.runtimes.config import LlamaCppConfig, ReferenceConfig, RuntimeConfig
from gpuledger.adapters.runtimes.manager import RuntimeManager
from gpuledger.adapters.telemetry.host import HostSource
from gpuledger.adapters.telemetry.node import NodeTelemetry
from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import AcceleratorReading, ManagedProcess, ManagedReading, NodeReading, RuntimeFault
from gpuledger.domain.state import Kind, Sleep
from gpuledger.domain.units import GIB, MIB
from gpuledger.tools import measure as measure_module
from gpuledger.tools import measure_meter
from gpuledger.tools.measure import Measurement, Place, measure

pytestmark = pytest.mark.anyio

PATIENCE_SECONDS = 120
GPU = "GPU-01234567-89ab-cdef-0123-456789abcdef"
NOW = 1_796_000_000_000_000
ON_HOST = Place("d", "host:node-1", 0)
ON_CARD = Place("d", GPU, 256 * MIB)
SIZES = {"idle_bytes": 64 * MIB, "peak_bytes": 128 * MIB}
#: What a request costs the reference server besides what it is told to hold.
OVERHEAD_BYTES = 24 * MIB


class Clock:
    def now(self) -> int:
        return NOW


@dataclass
class Card:
    """A GPU whose memory is what the processes really hold, and what a driver adds to it."""

    total_bytes: int = 8 * GIB
    used_by_others_bytes: int = 1 * GIB
    context_bytes: int = 300 * MIB
    kept_bytes: int = 0
    attributes: bool = True
    visible: bool = True
    restless: Iterator[int] = field(default_factory=lambda: iter(()))
    touched: bool = False

    def sample(self, managed: Sequence[ManagedProcess]) -> NodeReading:
        used = self.used_by_others_bytes + next(self.restless, 0)
        readings: list[ManagedReading] = []
        for one in managed:
            held = _resident_bytes(one.process.pid)
            self.touched |= held > 32 * MIB
            used += held + (self.context_bytes if held else 0)
            readings.append(ManagedReading(one.resident_id, held > 0, held if self.attributes else None))
        if self.touched and not managed:
            used += self.kept_bytes
        reading = AcceleratorReading(
            accelerator_id=GPU,
            index=0,
            kind=Kind.GPU,
            gpu_class="card",
            device_name="A Card",
            driver_version="1.2.3",
            total_bytes=self.total_bytes,
            used_bytes=used,
            managed=tuple(readings),
            foreign_processes=0,
        )
        return NodeReading((reading,) if self.visible else (), (), None, 0)


def _resident_bytes(pid: int) -> int:
    status = (procfs.read_process_file(pid, "status") or b"").decode()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024 if "VmRSS:" in status else 0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def card() -> Card:
    return Card()


def reference(**config: Any) -> ReferenceConfig:
    return ReferenceConfig.model_validate({"type": "reference", "task": "chat", "load_ms": 100, **SIZES, **config})


async def measured(config: RuntimeConfig, place: Place, sample: Any, folder: Path, **options: Any) -> Measurement:
    """One measurement, after which nothing runs."""
    runtimes = RuntimeManager({"d": config}, folder)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await measure(runtimes, sample, Clock(), config, place, **options)
    finally:
        assert not _children()
        await runtimes.close()


def _children() -> list[int]:
    """Processes of ours."""
    return [one.pid for one in procfs.scan().entries.values() if one.parent == os.getpid()]


async def fault_of(awaitable: Any) -> tuple[Failure, str]:
    with pytest.raises(RuntimeFault) as raised:
        await awaitable
    return raised.value.failure, raised.value.detail


# ---- on a host --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config", [reference(parallel=2), reference(task="embedding", max_inputs=8)], ids=["chat", "embedding"]
)
async def test_it_finds_what_the_reference_holds(config: ReferenceConfig, tmp_path: Path) -> None:
    telemetry = NodeTelemetry([HostSource("node-1")])
    steps: list[str] = []
    result = await measured(config, ON_HOST, telemetry.sample, tmp_path, progress=steps.append)
    event, envelope = result.event, result.event.envelope
    assert envelope.idle_bytes == pytest.approx(64 * MIB, abs=OVERHEAD_BYTES)
    assert envelope.peak_bytes == pytest.approx(128 * MIB, abs=OVERHEAD_BYTES)
    assert envelope.peak_bytes == max(event.load_peak_bytes, event.busy_peak_bytes)
    assert (envelope.gpu_class, envelope.measured_at) == ("host", NOW)
    assert (envelope.context_length, envelope.batch_size) == (config.context_length, config.batch_size)
    assert envelope.concurrency == config.parallel
    assert 480 <= result.full_context_tokens <= 512
    assert event.load_ms >= 100
    assert (event.residual_bytes, event.release_ms) == (0, 0)
    assert [step.partition(":")[0] for step in steps if ":" not in step] == [
        "baseline", "load", "idle", "work", "release"
    ]  # fmt: skip
    telemetry.close()


async def test_two_measurements_agree(tiny_chat_gguf: Path, tmp_path: Path) -> None:
    config = LlamaCppConfig.model_validate(
        {"type": "llama_cpp", "task": "chat", "model": tiny_chat_gguf, "context_length": 512, "threads": 1}
    )
    telemetry = NodeTelemetry([HostSource("node-1")])
    first, second = [await measured(config, ON_HOST, telemetry.sample, tmp_path) for _ in range(2)]
    assert first.event.envelope.config_hash == second.event.envelope.config_hash
    assert first.event.envelope.peak_bytes == pytest.approx(second.event.envelope.peak_bytes, rel=0.05)
    assert first.event.envelope.idle_bytes == pytest.approx(second.event.envelope.idle_bytes, rel=0.05)
    assert first.full_context_tokens > 480
    assert first.event.artifact_sha256 is not None
    telemetry.close()


@pytest.mark.parametrize("task", ["rerank", "transcription"])
async def test_a_runtime_is_driven_with_what_its_task_takes(task: str, tmp_path: Path) -> None:
    limits = {"max_inputs": 8} if task == "rerank" else {"max_audio_bytes": MIB}
    telemetry = NodeTelemetry([HostSource("node-1")])
    # So long that those that are asked at once overlap.
    config = reference(task=task, parallel=2, service_ms=200, **limits)
    result = await measured(config, ON_HOST, telemetry.sample, tmp_path)
    assert result.event.envelope.peak_bytes == pytest.approx(128 * MIB, abs=OVERHEAD_BYTES)
    assert (result.full_context_tokens > 480) is (task == "rerank")
    telemetry.close()


async def test_a_chat_is_driven_with_as_many_pictures_as_it_takes(tmp_path: Path) -> None:
    telemetry = NodeTelemetry([HostSource("node-1")])
    steps: list[str] = []
    config = reference(max_images=2, parallel=2)
    await measured(config, ON_HOST, telemetry.sample, tmp_path, progress=steps.append)
    assert steps[-2] == "work: 2 pictures in one request, every slot at once"
    telemetry.close()


# ---- asleep -----------------------------------------------------------------------------------------------------

DECLARED = Sleep(asleep_bytes=40 * MIB, sleep_ms=1, wake_ms=1)


@pytest.mark.parametrize("place", [ON_HOST, ON_CARD], ids=["host", "card"])
async def test_what_a_runtime_keeps_asleep_is_measured(place: Place, card: Card, tmp_path: Path) -> None:
    """On the card the context of the driver stays."""
    telemetry = NodeTelemetry([HostSource("node-1")])
    config = reference(sleep={"asleep_bytes": 24 * MIB, "sleep_ms": 150, "wake_ms": 250})
    stays = 24 * MIB + (0 if place is ON_HOST else card.context_bytes)
    declared = replace(place, sleep=replace(DECLARED, asleep_bytes=stays + OVERHEAD_BYTES))
    sample = telemetry.sample if place is ON_HOST else card.sample
    event = (await measured(config, declared, sample, tmp_path)).event
    assert event.sleep is not None
    assert event.sleep.asleep_bytes == pytest.approx(stays, abs=OVERHEAD_BYTES)
    assert event.sleep.sleep_ms >= 150
    assert event.sleep.wake_ms >= 250
    assert event.envelope.idle_bytes > event.sleep.asleep_bytes
    telemetry.close()


async def test_a_sleep_that_frees_nothing_is_measured_as_one(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says counts for nothing: the device shows what it keeps."""
    monkeypatch.setattr(measure_module, "ASLEEP_SHOWS_SECONDS", 0.5)
    config = reference(sleep={"asleep_bytes": 24 * MIB}, faults={"sleep_keeps_memory": True})
    event = (await measured(config, replace(ON_CARD, sleep=DECLARED), card.sample, tmp_path)).event
    assert event.sleep is not None
    assert event.sleep.asleep_bytes == pytest.approx(event.envelope.idle_bytes, abs=OVERHEAD_BYTES)


async def test_a_runtime_that_cannot_sleep_is_measured_without(card: Card, tmp_path: Path) -> None:
    event = (await measured(reference(), replace(ON_CARD, sleep=DECLARED), card.sample, tmp_path)).event
    assert event.sleep is None
    assert event.envelope.peak_bytes > event.envelope.idle_bytes


# ---- on a card --------------------------------------------------------------------------------------------------


async def test_the_greater_of_processes_and_device_counts(card: Card, tmp_path: Path) -> None:
    """The context of the driver is in no process's figure, and the device shows it."""
    result = await measured(reference(), ON_CARD, card.sample, tmp_path)
    event = result.event
    assert result.baseline_bytes == card.used_by_others_bytes
    assert event.envelope.idle_bytes == pytest.approx(364 * MIB, abs=OVERHEAD_BYTES)
    assert event.envelope.idle_bytes == event.device_idle_bytes
    assert result.process_idle_bytes == pytest.approx(64 * MIB, abs=OVERHEAD_BYTES)
    assert event.device_peak_bytes >= event.device_idle_bytes
    assert (event.device_name, event.driver_version) == ("A Card", "1.2.3")
    assert event.residual_bytes == 0


async def test_a_device_that_attributes_nothing_can_be_measured(card: Card, tmp_path: Path) -> None:
    card.attributes = False
    result = await measured(reference(), ON_CARD, card.sample, tmp_path)
    assert result.process_idle_bytes is None
    assert result.event.envelope.idle_bytes == pytest.approx(364 * MIB, abs=OVERHEAD_BYTES)


async def test_what_does_not_come_back_is_told(card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_meter, "SETTLE_LIMIT_SECONDS", 1.0)
    card.kept_bytes = 77 * MIB
    result = await measured(reference(), ON_CARD, card.sample, tmp_path)
    assert result.event.residual_bytes == 77 * MIB
    assert result.event.release_ms >= 1000


async def test_the_reserve_is_never_touched(card: Card, tmp_path: Path) -> None:
    """It would need 364 MiB; 256 MiB of the reserve and 200 more are free."""
    card.used_by_others_bytes = card.total_bytes - 456 * MIB
    reached = (Failure.INSUFFICIENT_SCHEDULABLE_VRAM, "reserve_reached")
    assert await fault_of(measured(reference(load_ms=10**9), ON_CARD, card.sample, tmp_path)) == reached


async def test_weights_that_do_not_fit_are_not_tried(card: Card, minilm_gguf: Path, tmp_path: Path) -> None:
    config = LlamaCppConfig.model_validate(
        {"type": "llama_cpp", "task": "embedding", "model": minilm_gguf, "gpu_layers": "all"}
    )
    card.used_by_others_bytes = card.total_bytes - 256 * MIB - 40 * MIB
    refused = (Failure.INSUFFICIENT_SCHEDULABLE_VRAM, "artifact_does_not_fit")
    assert await fault_of(measured(config, ON_CARD, card.sample, tmp_path)) == refused


async def test_an_accelerator_that_is_not_seen_is_not_filled(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure_meter, "BLIND_LIMIT_SECONDS", 0.2)
    card.visible = False
    blind = (Failure.SCHEDULER_STATE_STALE, "accelerator_not_seen")
    assert await fault_of(measured(reference(), ON_CARD, card.sample, tmp_path)) == blind


async def test_a_card_that_does_not_rest_has_no_baseline(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure_meter, "SETTLE_LIMIT_SECONDS", 0.5)
    card.restless = (GIB * (number % 2) for number in range(10**6))
    unsettled = (Failure.SCHEDULER_STATE_STALE, "unsettled")
    assert await fault_of(measured(reference(), ON_CARD, card.sample, tmp_path)) == unsettled


@pytest.mark.parametrize(
    ("faults", "fault"),
    [
        ({"fail_load": "oom"}, (Failure.GPU_OOM, "out_of_memory")),
        ({"crash_after_requests": 3, "exit_status": 9}, (Failure.RUNTIME_CRASH, "exit_status_9")),
    ],
    ids=["loading", "working"],
)
async def test_a_runtime_that_fails_says_how(
    card: Card, tmp_path: Path, faults: dict[str, Any], fault: tuple[Failure, str]
) -> None:
    assert await fault_of(measured(reference(faults=faults), ON_CARD, card.sample, tmp_path)) == fault


async def test_one_that_is_given_up_leaves_nothing(card: Card, tmp_path: Path) -> None:
    """Its process is gone and its memory is back when the measurement has ended."""
    loading = asyncio.Event()
    runtimes = RuntimeManager({"d": reference(load_ms=10**8)}, tmp_path)

    def progress(step: str) -> None:
        if step == "load":
            loading.set()

    try:
        measuring = asyncio.create_task(
            measure(runtimes, card.sample, Clock(), reference(), ON_CARD, progress=progress)
        )
        async with asyncio.timeout(PATIENCE_SECONDS):
            await loading.wait()
            while not _children():
                await asyncio.sleep(0.01)
            measuring.cancel()
            with pytest.raises(asyncio.CancelledError):
                await measuring
        assert not _children()
    finally:
        await runtimes.close()


async def test_a_context_that_is_smaller_than_declared_is_found(card: Card, tmp_path: Path) -> None:
    """As with a model that was trained with less than its deployment says."""
    runtimes = RuntimeManager({"d": reference(context_length=300)}, tmp_path)
    try:
        result = await measure(runtimes, card.sample, Clock(), reference(context_length=700), ON_CARD)
    finally:
        await runtimes.close()
    assert 290 <= result.full_context_tokens <= 300
