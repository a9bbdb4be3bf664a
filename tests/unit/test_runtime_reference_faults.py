"""The reference runtime asleep, and the faults by which tests provoke each failure of a runtime with a real process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from gpuledger.adapters import procfs
from gpuledger.adapters.runtimes.config import BASE_FOLDER, ReferenceConfig, ReferenceFaults
from gpuledger.adapters.runtimes.reference import Reference
from gpuledger.domain.failures import Failure
from gpuledger.domain.units import MIB
from tests.unit.references import ENDLESS, FOR_EVER_MS, HOST, Loaded, fault_of, loaded, opened

pytestmark = pytest.mark.anyio

#: What a figure of /proc may differ from what was asked for.
NEAR_BYTES = 6 * MIB
SIZES: dict[str, Any] = {"idle_bytes": 96 * MIB, "peak_bytes": 96 * MIB}
CONFIG: dict[str, Any] = {"type": "reference", "task": "chat"}
SLEEP: dict[str, Any] = {"asleep_bytes": 30 * MIB}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def complete(runtime: Loaded, **document: Any) -> httpx.Response:
    return await runtime.ask("/v1/completions", prompt="x", **document)


async def status_of(runtime: Loaded, path: str) -> int:
    return (await runtime.http.post(path)).status_code


async def sleeps(runtime: Loaded) -> bool:
    says: bool = (await runtime.http.get("/is_sleeping")).json()["is_sleeping"]
    return says


# ---- asleep -----------------------------------------------------------------------------------------------------


async def test_asleep_it_holds_little_and_serves_nothing(tmp_path: Path) -> None:
    async with loaded(tmp_path, task="chat", sleep=SLEEP, **SIZES) as runtime:
        awake = (await complete(runtime)).json()["choices"]
        assert not await sleeps(runtime)
        for _ in range(2):
            assert await status_of(runtime, "/sleep") == 200
            assert await sleeps(runtime)
            assert runtime.resident_bytes() == pytest.approx(30 * MIB, abs=NEAR_BYTES)
        assert (await complete(runtime)).status_code == 503
        assert (await runtime.http.get("/health")).status_code == 200
        for _ in range(2):
            assert await status_of(runtime, "/wake_up") == 200
            assert not await sleeps(runtime)
            assert runtime.resident_bytes() == pytest.approx(96 * MIB, abs=NEAR_BYTES)
        assert (await complete(runtime)).json()["choices"] == awake


async def test_its_manager_puts_it_to_sleep_and_wakes_it(tmp_path: Path) -> None:
    async with loaded(tmp_path, task="chat", sleep=SLEEP, **SIZES) as runtime:
        await runtime.runtimes.sleep("r")
        assert await sleeps(runtime)
        await runtime.runtimes.wake("r")
        assert not await sleeps(runtime)
        assert (await complete(runtime)).status_code == 200


async def test_it_runs_out_of_memory_when_it_wakes(tmp_path: Path) -> None:
    """Nothing but its exit tells: what it asked for was there when it loaded."""
    marker = tmp_path / "marker"
    faults = {"fail_load": "killed", "while_file": marker}
    async with loaded(tmp_path, task="chat", sleep=SLEEP, faults=faults, **SIZES) as runtime:
        await runtime.runtimes.sleep("r")
        marker.touch()
        assert await fault_of(runtime.runtimes.wake("r")) == (Failure.RUNTIME_CRASH, "killed")


async def test_it_does_not_sleep_while_it_works(tmp_path: Path) -> None:
    async with loaded(tmp_path, task="chat", sleep=SLEEP, **ENDLESS, **SIZES) as runtime:
        async with runtime.stream() as parts:
            assert await status_of(runtime, "/sleep") == 409
            assert (await anext(parts))["choices"]
        await runtime.until_running(0)
        assert await status_of(runtime, "/sleep") == 200


async def test_on_the_way_to_sleep_it_serves_nothing(tmp_path: Path) -> None:
    """Whoever sent it there and goes away has changed nothing."""
    async with loaded(tmp_path, task="chat", sleep={**SLEEP, "sleep_ms": FOR_EVER_MS}, **SIZES) as runtime:
        going = asyncio.create_task(status_of(runtime, "/sleep"))
        while not await sleeps(runtime):
            await asyncio.sleep(0.01)
        assert (await complete(runtime)).status_code == 503
        assert not going.done()
        going.cancel()
        while await sleeps(runtime):
            await asyncio.sleep(0.01)
        assert (await complete(runtime)).status_code == 200


async def test_who_cannot_sleep_has_no_such_doors(tmp_path: Path) -> None:
    async with loaded(tmp_path, task="chat") as runtime:
        assert await status_of(runtime, "/sleep") == 404
        assert await status_of(runtime, "/wake_up") == 404
        assert (await runtime.http.get("/is_sleeping")).status_code == 404


async def test_it_can_say_that_it_sleeps_and_keep_everything(tmp_path: Path) -> None:
    """And once it no longer has that fault, it wakes up to what it has."""
    faults = {"sleep_keeps_memory": True}
    async with loaded(tmp_path, task="chat", sleep=SLEEP, faults=faults, **SIZES) as runtime:
        assert await status_of(runtime, "/sleep") == 200
        assert (await runtime.http.get("/is_sleeping")).json() == {"is_sleeping": True}
        assert runtime.resident_bytes() == pytest.approx(96 * MIB, abs=NEAR_BYTES)
        assert await status_of(runtime, "/wake_up") == 200
        assert runtime.resident_bytes() == pytest.approx(96 * MIB, abs=NEAR_BYTES)


async def test_a_kill_by_the_kernel_for_want_of_memory_is_told_from_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No test can have the kernel do it: what it counts is stood in for."""
    counts = iter((5, 6))
    monkeypatch.setattr(procfs, "oom_kills", lambda: next(counts))
    async with opened(tmp_path, task="chat", faults={"fail_load": "killed"}) as runtimes:
        await runtimes.spawn("r", "d", HOST)
        assert await fault_of(runtimes.load("r")) == (Failure.GPU_OOM, "killed_for_memory")
        await runtimes.stop("r", 30)


# ---- loads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("faults", "fault"),
    [
        ({"fail_load": "killed"}, (Failure.MODEL_LOAD_FAILED, "killed")),
        ({"fail_load": "unhealthy"}, (Failure.HEALTHCHECK_FAILED, "http_status_500")),
        ({"lie_ready": True}, (Failure.HEALTHCHECK_FAILED, "http_status_500")),
        ({"oom_requests": True}, (Failure.GPU_OOM, "out_of_memory")),
        ({"crash_after_tokens": 1}, (Failure.MODEL_LOAD_FAILED, "exit_status_1")),
    ],
    ids=str,
)
async def test_a_load_fails_as_it_is_told(tmp_path: Path, faults: Any, fault: tuple[Failure, str]) -> None:
    """While the marker is there; without it the same deployment loads."""
    marker = tmp_path / "marker"
    marker.touch()
    async with opened(tmp_path, task="chat", faults={**faults, "while_file": marker}) as runtimes:
        process = await runtimes.spawn("r", "d", HOST)
        assert await fault_of(runtimes.load("r")) == fault
        await runtimes.stop("r", 30)
        assert not procfs.is_alive(process)
        marker.unlink()
        await runtimes.spawn("r", "d", HOST)
        await runtimes.load("r")


async def test_a_liar_says_that_it_is_ready_while_it_loads(tmp_path: Path) -> None:
    async with opened(tmp_path, task="chat", load_ms=FOR_EVER_MS, faults={"lie_ready": True}) as runtimes:
        await runtimes.spawn("r", "d", HOST)
        assert await fault_of(runtimes.load("r")) == (Failure.HEALTHCHECK_FAILED, "http_status_500")


@pytest.mark.parametrize(
    ("task", "detail"), [("transcription", "transcription_malformed"), ("rerank", "rerank_degenerate")]
)
async def test_invalid_output_is_found_out(tmp_path: Path, task: str, detail: str) -> None:
    async with opened(tmp_path, task=task, faults={"invalid_output": True}) as runtimes:
        await runtimes.spawn("r", "d", HOST)
        assert await fault_of(runtimes.load("r")) == (Failure.INVALID_OUTPUT, detail)


@pytest.mark.parametrize("task", ["embedding", "chat", "transcription", "rerank"])
async def test_every_task_is_checked_and_found_well(tmp_path: Path, task: str) -> None:
    async with loaded(tmp_path, task=task) as runtime:
        assert await runtime.is_listening()


# ---- requests ---------------------------------------------------------------------------------------------------


async def test_it_dies_after_so_many_tokens_of_a_stream(tmp_path: Path) -> None:
    faults = {"healthy_requests": 2, "crash_after_tokens": 3, "exit_status": 9}
    async with loaded(tmp_path, task="chat", tokens=8, faults=faults) as runtime:
        assert (await complete(runtime)).status_code == 200
        async with runtime.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            lines: list[str] = []
            with pytest.raises(httpx.RemoteProtocolError):
                lines.extend([line async for line in answer.aiter_lines()])
        fault = await runtime.runtimes.exited("r")
    assert (fault.failure, fault.detail) == (Failure.RUNTIME_CRASH, "exit_status_9")


async def test_it_runs_out_of_memory_under_a_request(tmp_path: Path) -> None:
    faults = {"healthy_requests": 1, "oom_requests": True}
    async with loaded(tmp_path, task="chat", faults=faults) as runtime:
        answer = await complete(runtime)
        assert (answer.status_code, "CUDA out of memory" in answer.text) == (500, True)
        fault = await runtime.runtimes.exited("r")
    assert b"CUDA out of memory" in fault.evidence


async def test_it_outgrows_what_was_measured(tmp_path: Path) -> None:
    """Not at once: measuring asks a known number of requests. Once, and for good."""
    faults = {"healthy_requests": 2, "grow_bytes": 64 * MIB}
    async with loaded(tmp_path, task="chat", faults=faults, **SIZES) as runtime:
        seen: list[int] = []
        for _ in range(3):
            assert (await complete(runtime)).status_code == 200
            seen.append(runtime.resident_bytes())
    assert seen == [pytest.approx(size * MIB, abs=NEAR_BYTES) for size in (96, 160, 160)]


async def test_faults_come_and_go_with_a_file(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    async with loaded(tmp_path, task="chat", faults={"lie_ready": True, "while_file": marker}) as runtime:
        for _ in range(2):
            assert (await complete(runtime)).status_code == 200
            marker.touch()
            assert (await complete(runtime)).status_code == 500
            marker.unlink()


# ---- configuration ----------------------------------------------------------------------------------------------


def test_a_marker_is_beside_the_file_that_names_it(tmp_path: Path) -> None:
    faults = ReferenceFaults.model_validate({"while_file": "marker"}, context={BASE_FOLDER: tmp_path})
    assert faults.while_file == tmp_path / "marker"


def test_a_sleeper_gives_something_back() -> None:
    with pytest.raises(ValidationError, match=r"sleep\.asleep_bytes: must not be more than idle_bytes"):
        ReferenceConfig.model_validate(CONFIG | SIZES | {"sleep": {"asleep_bytes": 97 * MIB}})


def test_faults_and_sleep_shape_no_memory_that_it_works_in() -> None:
    def config_hash(**changes: Any) -> str:
        return Reference(ReferenceConfig.model_validate(CONFIG | changes)).facts().config_hash

    same: list[dict[str, Any]] = [{"faults": {"grow_bytes": MIB}}, {"sleep": SLEEP}, {"load_ms": 5}, {"tokens": 3}]
    other: list[dict[str, Any]] = [
        {"idle_bytes": 33 * MIB},
        {"max_images": 1},
        {"task": "transcription", "max_audio_bytes": MIB},
    ]
    assert {config_hash(**changes) for changes in same} == {config_hash()}
    assert len({config_hash(), *(config_hash(**changes) for changes in other)}) == 1 + len(other)
