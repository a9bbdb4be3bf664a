"""vLLM, by a stand-in that speaks its endpoints: command line and key, sleep and wake, metrics, and how it fails."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpuledger.adapters.runtimes.config import VllmConfig
from gpuledger.adapters.runtimes.manager import RuntimeManager
from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import ProcessIdentity, RuntimeFault, RuntimeFigures
from gpuledger.domain.units import MIB

pytestmark = pytest.mark.anyio

PATIENCE_SECONDS = 60
GPU = "GPU-01234567-89ab-cdef-0123-456789abcdef"
MIG = "MIG-377e0049-554c-540b-93c6-d0976f8426cb"
STAND_IN = Path(__file__).with_name("vllm_stand_in.py")
#: Enough to tell the memory of the model from that of the process.
HELD_BYTES = 256 * MIB


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(1000))
    (folder / "config.json").write_text("{}")
    return folder


def config_of(model: Path, orders: dict[str, Any] | None = None, **config: Any) -> VllmConfig:
    known = {
        "type": "vllm",
        "task": "chat",
        "model": model,
        "command": [sys.executable, str(STAND_IN)],
        "set": {"VLLM_STAND_IN": json.dumps(orders or {})},
    }
    return VllmConfig.model_validate({**known, **config})


@asynccontextmanager
async def opened(folder: Path, config: VllmConfig) -> AsyncGenerator[RuntimeManager]:
    runtimes = RuntimeManager({"d": config}, folder)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            yield runtimes
    finally:
        await runtimes.close()


@asynccontextmanager
async def loaded(
    folder: Path, config: VllmConfig, accelerator_id: str = GPU
) -> AsyncGenerator[tuple[RuntimeManager, ProcessIdentity]]:
    async with opened(folder, config) as runtimes:
        process = await runtimes.spawn("r", "d", accelerator_id)
        await runtimes.load("r")
        yield runtimes, process


async def fault_of(awaitable: Any) -> tuple[Failure, str]:
    with pytest.raises(RuntimeFault) as raised:
        await awaitable
    return raised.value.failure, raised.value.detail


async def asked(runtimes: RuntimeManager, method: str, path: str, key: str | None, **content: Any) -> httpx.Response:
    endpoint = runtimes.endpoint("r")
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_SECONDS) as http:
        return await http.request(method, endpoint.base_url + path, headers=headers, **content)


def resident_bytes(process: ProcessIdentity) -> int:
    text = Path(f"/proc/{process.pid}/statm").read_text()
    return int(text.split()[1]) * 4096


def environment(process: ProcessIdentity) -> dict[str, str]:
    text = Path(f"/proc/{process.pid}/environ").read_bytes().decode()
    return dict(entry.split("=", 1) for entry in text.split("\0") if entry)


# ---- command line -----------------------------------------------------------------------------------------------


async def test_its_version_is_asked_and_it_starts_alone(model: Path, tmp_path: Path) -> None:
    async with opened(tmp_path, config_of(model)) as runtimes:
        facts = await asyncio.to_thread(runtimes.facts, "d")
    assert (facts.runtime, facts.runtime_version, facts.starts_alone) == ("vllm", "vllm-0.24.0", True)
    assert facts.artifact_bytes == 1002


@pytest.mark.parametrize("accelerator_id", [GPU, MIG])
async def test_it_sees_its_device_alone_and_reaches_nobody(model: Path, tmp_path: Path, accelerator_id: str) -> None:
    async with loaded(tmp_path, config_of(model), accelerator_id) as (_, process):
        variables = environment(process)
    assert variables["CUDA_VISIBLE_DEVICES"] == accelerator_id
    assert (variables["HF_HUB_OFFLINE"], variables["VLLM_NO_USAGE_STATS"]) == ("1", "1")
    assert "VLLM_SERVER_DEV_MODE" not in variables


async def test_it_does_not_serve_from_a_host(model: Path, tmp_path: Path) -> None:
    async with opened(tmp_path, config_of(model)) as runtimes:
        mismatch = (Failure.MODEL_LOAD_FAILED, "accelerator_kind_mismatch")
        assert await fault_of(runtimes.spawn("r", "d", "host:node-1")) == mismatch


async def test_it_is_asked_by_its_served_name(model: Path, tmp_path: Path) -> None:
    async with loaded(tmp_path, config_of(model, served_name="vision.chat@1")) as (runtimes, _):
        key = runtimes.endpoint("r").api_key
        question = {"messages": [{"role": "user", "content": "?"}]}
        known = await asked(runtimes, "POST", "/v1/chat/completions", key, json={**question, "model": "vision.chat@1"})
        other = await asked(runtimes, "POST", "/v1/chat/completions", key, json={**question, "model": "gpt-5"})
    assert (known.status_code, other.status_code) == (200, 404)


async def test_more_options_reach_it_and_one_it_does_not_know_is_told(model: Path, tmp_path: Path) -> None:
    async with loaded(tmp_path, config_of(model, arguments=["--seed", "3"])) as (_, process):
        assert b"--seed\x003\0" in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    async with opened(tmp_path, config_of(model, arguments=["--sneed", "3"])) as runtimes:
        await runtimes.spawn("r", "d", GPU)
        assert await fault_of(runtimes.load("r")) == (Failure.MODEL_LOAD_FAILED, "argument_not_known")


@pytest.mark.parametrize("task", ["embedding", "rerank"])
async def test_it_pools(model: Path, tmp_path: Path, task: str) -> None:
    async with loaded(tmp_path, config_of(model, task=task)) as (runtimes, _):
        assert await runtimes.figures("r") == RuntimeFigures(0, 0, 0)


# ---- the key ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, "wrong", "two words"])
async def test_no_path_answers_without_the_key(model: Path, tmp_path: Path, key: str | None) -> None:
    """vLLM itself would: its key is asked for below /v1 alone."""
    async with loaded(tmp_path, config_of(model, sleep_level=1)) as (runtimes, _):
        for path in ("/metrics", "/is_sleeping", "/v1/models"):
            assert (await asked(runtimes, "GET", path, key)).status_code == 401, path
        for path in ("/invocations", "/sleep?level=1", "/collective_rpc", "/v1/chat/completions"):
            assert (await asked(runtimes, "POST", path, key, json={"messages": []})).status_code == 401, path
        right = runtimes.endpoint("r").api_key
        assert (await asked(runtimes, "GET", "/is_sleeping", right)).json() == {"is_sleeping": False}


async def test_without_the_guard_vllm_is_as_open_as_it_is(model: Path, tmp_path: Path) -> None:
    """So the test above shows the guard, and not the stand-in."""
    async with loaded(tmp_path, config_of(model, guard=False)) as (runtimes, process):
        assert (await asked(runtimes, "GET", "/metrics", None)).status_code == 200
        assert (await asked(runtimes, "GET", "/v1/models", None)).status_code == 401
        assert "PYTHONPATH" not in environment(process)


# ---- metrics ----------------------------------------------------------------------------------------------------


async def test_its_figures_are_read_with_their_labels(model: Path, tmp_path: Path) -> None:
    config = config_of(model, {"token_seconds": 0.01}, served_name="odd/name@1")
    async with loaded(tmp_path, config) as (runtimes, _):
        endpoint = runtimes.endpoint("r")
        question = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 100_000, "stream": True}
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        async with (
            httpx.AsyncClient(trust_env=False, timeout=PATIENCE_SECONDS) as http,
            http.stream("POST", f"{endpoint.base_url}/v1/chat/completions", json=question, headers=headers) as answer,
        ):
            await anext(answer.aiter_lines())
            assert await runtimes.figures("r") == RuntimeFigures(1, 0, 1250)


async def test_names_of_the_configuration_replace_vllms(model: Path, tmp_path: Path) -> None:
    config = config_of(model, metrics={"running": "vllm:num_requests_waiting"})
    async with loaded(tmp_path, config) as (runtimes, _):
        assert await runtimes.figures("r") == RuntimeFigures(0, None, None)


# ---- sleep ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
async def test_it_sleeps_and_wakes(model: Path, tmp_path: Path, level: int) -> None:
    """After level 2 it serves garbage until its weights are read again: waking does that, and checks it."""
    config = config_of(model, {"hold_bytes": HELD_BYTES}, sleep_level=level)
    assert config.sleeps
    async with loaded(tmp_path, config) as (runtimes, process):
        awake_bytes = resident_bytes(process)
        await asyncio.gather(runtimes.sleep("r"), runtimes.sleep("r"))
        await runtimes.sleep("r")
        assert resident_bytes(process) < awake_bytes - HELD_BYTES // 2
        assert await runtimes.figures("r") == RuntimeFigures(0, 0, 0)
        await asyncio.gather(runtimes.wake("r"), runtimes.wake("r"))
        await runtimes.wake("r")
        assert resident_bytes(process) > awake_bytes - HELD_BYTES // 2
        question = {"messages": [{"role": "user", "content": "?"}]}
        answer = await asked(runtimes, "POST", "/v1/chat/completions", runtimes.endpoint("r").api_key, json=question)
        assert answer.json()["choices"][0]["message"]["content"]


async def test_who_stops_waiting_for_sleep_leaves_it_asleep(model: Path, tmp_path: Path) -> None:
    async with loaded(tmp_path, config_of(model, sleep_level=1)) as (runtimes, _):
        sleeping = asyncio.create_task(runtimes.sleep("r"))
        await asyncio.sleep(0)
        sleeping.cancel()
        await runtimes.sleep("r")
        answer = await asked(runtimes, "GET", "/is_sleeping", runtimes.endpoint("r").api_key)
        assert answer.json() == {"is_sleeping": True}
        await runtimes.stop("r", 30)


async def test_what_a_sleep_frees_it_is_not_believed(model: Path, tmp_path: Path) -> None:
    """It says 200 and keeps its memory. To the adapter that is a sleep: only the device shows what it freed."""
    config = config_of(model, {"hold_bytes": HELD_BYTES, "lie": True}, sleep_level=1)
    async with loaded(tmp_path, config) as (runtimes, process):
        awake_bytes = resident_bytes(process)
        await runtimes.sleep("r")
        assert resident_bytes(process) > awake_bytes - HELD_BYTES // 2


async def test_a_sleep_that_never_comes_has_an_end(model: Path, tmp_path: Path) -> None:
    """It may be told again, and it may be woken."""
    config = config_of(model, {"deaf": True}, sleep_level=1)
    async with loaded(tmp_path, config) as (runtimes, _):
        # Only now, since its start may take as long as it takes.
        vars(config)["load_timeout_seconds"] = 1
        assert await fault_of(runtimes.sleep("r")) == (Failure.TIMEOUT, "sleep_timeout")
        assert await fault_of(runtimes.sleep("r")) == (Failure.TIMEOUT, "sleep_timeout")
        vars(config)["load_timeout_seconds"] = PATIENCE_SECONDS
        await runtimes.wake("r")


async def test_a_wake_without_memory_is_told_as_that(model: Path, tmp_path: Path) -> None:
    async with loaded(tmp_path, config_of(model, {"wake_fails": True}, sleep_level=1)) as (runtimes, _):
        await runtimes.sleep("r")
        assert await fault_of(runtimes.wake("r")) == (Failure.GPU_OOM, "out_of_memory")


async def test_a_process_that_ends_in_its_sleep_cannot_be_woken(model: Path, tmp_path: Path) -> None:
    async with loaded(tmp_path, config_of(model, sleep_level=1)) as (runtimes, process):
        await runtimes.sleep("r")
        os.kill(process.pid, signal.SIGKILL)
        assert await fault_of(runtimes.wake("r")) == (Failure.RUNTIME_CRASH, "killed")


async def test_who_cannot_sleep_says_so(model: Path, tmp_path: Path) -> None:
    config = config_of(model)
    assert not config.sleeps
    async with opened(tmp_path, config) as runtimes:
        await runtimes.spawn("r", "d", GPU)
        assert await fault_of(runtimes.sleep("r")) == (Failure.HEALTHCHECK_FAILED, "cannot_sleep")
        with pytest.raises(KeyError):
            await runtimes.sleep("nobody")


async def test_who_is_not_ready_does_not_sleep(model: Path, tmp_path: Path) -> None:
    async with opened(tmp_path, config_of(model, sleep_level=1)) as runtimes:
        await runtimes.spawn("r", "d", GPU)
        assert await fault_of(runtimes.sleep("r")) == (Failure.HEALTHCHECK_FAILED, "not_ready")


# ---- failures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fail", "expected"),
    [
        ("free_memory", (Failure.GPU_OOM, "out_of_memory")),
        ("no_cache", (Failure.GPU_OOM, "out_of_memory")),
        ("torch", (Failure.GPU_OOM, "out_of_memory")),
        ("device", (Failure.MODEL_LOAD_FAILED, "device_id_not_taken")),
        ("bug", (Failure.MODEL_LOAD_FAILED, "exit_status_1")),
    ],
)
async def test_a_start_that_fails_says_why(
    model: Path, tmp_path: Path, fail: str, expected: tuple[Failure, str]
) -> None:
    """The cause stands kilobytes before the end of what it prints."""
    async with opened(tmp_path, config_of(model, {"fail": fail})) as runtimes:
        await runtimes.spawn("r", "d", GPU)
        assert await fault_of(runtimes.load("r")) == expected
        fault = await runtimes.exited("r")
        assert (fault.failure, fault.detail) == expected
        assert 0 < len(fault.evidence) <= 4096


async def test_a_crash_for_want_of_memory_is_told_as_that(model: Path, tmp_path: Path) -> None:
    """Long after its load, in the midst of a request."""
    async with loaded(tmp_path, config_of(model, {"dies_after": 1})) as (runtimes, _):
        question = {"messages": [{"role": "user", "content": "?"}]}
        with pytest.raises(httpx.TransportError):
            await asked(runtimes, "POST", "/v1/chat/completions", runtimes.endpoint("r").api_key, json=question)
        fault = await runtimes.exited("r")
    assert (fault.failure, fault.detail) == (Failure.GPU_OOM, "out_of_memory")


async def test_changed_weights_are_found_before_a_start(model: Path, tmp_path: Path) -> None:
    async with opened(tmp_path, config_of(model)) as runtimes:
        await asyncio.to_thread(runtimes.facts, "d")
        (model / "model.safetensors").write_bytes(bytes(999) + b"\1")
        corrupt = (Failure.ARTIFACT_CORRUPT, "changed_since_registered")
        assert await fault_of(runtimes.spawn("r", "d", GPU)) == corrupt
