"""Any server by its command line: its own paths and names, its environment, its checks, and how it fails."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpuledger.adapters.runtimes.config import CommandConfig
from gpuledger.adapters.runtimes.manager import RuntimeManager
from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import ProcessIdentity, RuntimeFault, RuntimeFigures
from gpuledger.domain.units import MIB
from gpuledger.tools.config import config_of
from gpuledger.tools.reading import parse_yaml

pytestmark = pytest.mark.anyio

PATIENCE_SECONDS = 60
HOST = "host:node-1"
GPU = "GPU-01234567-89ab-cdef-0123-456789abcdef"
#: Of a GPU whose id has another form: what is no host's memory is a device.
OTHER_GPU = "57d1a7a1-0000-4d5c-9f39-64ba1c5f4d2e"
SERVER = Path(__file__).with_name("other_server.py")
OPERATING = Path(__file__).parents[2] / "docs" / "operating.md"
HELD_BYTES = 256 * MIB
SOURCE = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "FLAVOUR": "vanilla", "DATABASE_PASSWORD": "hunter2"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def config_for(orders: dict[str, Any] | None = None, **config: Any) -> CommandConfig:
    known = {
        "type": "command",
        "task": "embedding",
        "command": [sys.executable, "-I", "-S", str(SERVER), "{port}", json.dumps(orders or {})],
        "version": "1.0",
        "ready_path": "/v2/ready",
        "paths": {"embeddings": "/embed"},
    }
    return CommandConfig.model_validate({**known, **config})


@asynccontextmanager
async def opened(folder: Path, config: CommandConfig) -> AsyncGenerator[RuntimeManager]:
    runtimes = RuntimeManager({"d": config}, folder, environment=SOURCE)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            yield runtimes
    finally:
        await runtimes.close()


@asynccontextmanager
async def loaded(
    folder: Path, config: CommandConfig, accelerator_id: str = HOST
) -> AsyncGenerator[tuple[RuntimeManager, ProcessIdentity]]:
    async with opened(folder, config) as runtimes:
        process = await runtimes.spawn("r", "d", accelerator_id)
        await runtimes.load("r")
        yield runtimes, process


async def failed_load(folder: Path, config: CommandConfig) -> RuntimeFault:
    async with opened(folder, config) as runtimes:
        await runtimes.spawn("r", "d", HOST)
        with pytest.raises(RuntimeFault) as raised:
            await runtimes.load("r")
    return raised.value


async def embed(runtimes: RuntimeManager, key: str | None = None) -> httpx.Response:
    endpoint = runtimes.endpoint("r")
    headers = {"Authorization": f"Bearer {endpoint.api_key if key is None else key}"}
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_SECONDS) as http:
        url = endpoint.base_url + endpoint.paths["embeddings"]
        return await http.post(url, json={"input": ["a"]}, headers=headers)


def environment(process: ProcessIdentity) -> dict[str, str]:
    text = Path(f"/proc/{process.pid}/environ").read_bytes().decode()
    return dict(entry.split("=", 1) for entry in text.split("\0") if entry)


def resident_bytes(process: ProcessIdentity) -> int:
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * 4096


# ---- it serves --------------------------------------------------------------------------------------------------


async def test_it_is_asked_where_it_answers(tmp_path: Path) -> None:
    async with loaded(tmp_path, config_for()) as (runtimes, _):
        assert (await embed(runtimes)).json()["data"] == [{"index": 0, "embedding": [1.0, 1.0]}]


async def test_its_numbers_are_read_where_and_as_it_calls_them(tmp_path: Path) -> None:
    metrics = {"path": "/numbers", "running": "busy", "cache_use": "full"}
    async with loaded(tmp_path, config_for(metrics=metrics)) as (runtimes, _):
        assert await runtimes.figures("r") == RuntimeFigures(0, None, 5000)


async def test_one_without_metrics_says_nothing(tmp_path: Path) -> None:
    async with loaded(tmp_path, config_for()) as (runtimes, _):
        assert await runtimes.figures("r") is None


async def test_it_asks_for_the_key_that_it_is_given(tmp_path: Path) -> None:
    async with loaded(tmp_path, config_for(api_key_variable="TOKEN")) as (runtimes, process):
        assert (await embed(runtimes)).status_code == 200
        assert (await embed(runtimes, "wrong")).status_code == 401
        assert environment(process)["TOKEN"] == runtimes.endpoint("r").api_key
        assert runtimes.endpoint("r").api_key not in Path(f"/proc/{process.pid}/cmdline").read_text()


@pytest.mark.parametrize(("accelerator_id", "visible"), [(HOST, ""), (GPU, GPU), (OTHER_GPU, OTHER_GPU)])
async def test_its_environment_is_what_is_named(tmp_path: Path, accelerator_id: str, visible: str) -> None:
    config = config_for(environment=["FLAVOUR", "ABSENT"], set={"URL": "http://127.0.0.1:{port}/"})
    async with loaded(tmp_path, config, accelerator_id) as (runtimes, process):
        variables = environment(process)
        port = httpx.URL(runtimes.endpoint("r").base_url).port
    ours = {name: variables.pop(name) for name in list(variables) if name.startswith("GPULEDGER_")}
    assert set(ours) == {"GPULEDGER_RESIDENT", "GPULEDGER_SCHEDULER"}
    assert variables == {
        "PATH": SOURCE["PATH"],
        "LANG": "C.UTF-8",
        "FLAVOUR": "vanilla",
        "URL": f"http://127.0.0.1:{port}/",
        "CUDA_VISIBLE_DEVICES": visible,
    }


async def test_relative_paths_are_of_the_folder_of_the_configuration(tmp_path: Path) -> None:
    """As the file that is written there, whether it asks for its version or serves."""
    folder = tmp_path / "etc"
    folder.mkdir()
    shutil.copy(SERVER, folder / "server.py")
    (folder / "version.py").write_text("print('7.1')")
    python = [sys.executable, "-I", "-S"]
    runtime = {
        "type": "command",
        "task": "embedding",
        "command": [*python, "server.py", "{port}"],
        "version_command": [*python, "version.py"],
        "ready_path": "/v2/ready",
        "paths": {"embeddings": "/embed"},
    }
    deployment: Any = {"id": "d", "capability": "c@1", "kind": "host", "runtime": runtime}
    config = config_of({"ledger": "l.db", "clients": [], "deployments": [deployment]}, folder / "gpuledger.yaml")
    read = config.runtimes["d"]
    assert isinstance(read, CommandConfig)
    async with loaded(tmp_path / "state", read) as (runtimes, process):
        assert Path(f"/proc/{process.pid}/cwd").readlink() == folder
        assert (await asyncio.to_thread(runtimes.facts, "d")).runtime_version == "7.1"
    elsewhere = read.model_copy(update={"folder": tmp_path, "version_command": None, "version": "7.1"})
    assert (await failed_load(tmp_path / "state", elsewhere)).failure is Failure.MODEL_LOAD_FAILED


# ---- it sleeps --------------------------------------------------------------------------------------------------


async def test_it_sleeps_by_its_own_paths(tmp_path: Path) -> None:
    """It does not say whether it sleeps: that it was told, and answered, is all there is."""
    sleep = {"sleep_path": "/memory/release", "wake_path": "/memory/resume"}
    config = config_for({"hold_bytes": HELD_BYTES}, sleep=sleep)
    async with loaded(tmp_path, config) as (runtimes, process):
        awake_bytes = resident_bytes(process)
        await runtimes.sleep("r")
        assert resident_bytes(process) < awake_bytes - HELD_BYTES // 2
        await runtimes.wake("r")
        assert resident_bytes(process) > awake_bytes - HELD_BYTES // 2


async def test_a_path_of_sleep_that_is_not_there_is_told(tmp_path: Path) -> None:
    config = config_for(sleep={"sleep_path": "/absent", "wake_path": "/memory/resume", "state_path": "/embed"})
    async with loaded(tmp_path, config) as (runtimes, _):
        for change in (runtimes.sleep, runtimes.wake):
            with pytest.raises(RuntimeFault) as raised:
                await change("r")
            assert (raised.value.failure, raised.value.detail) == (Failure.HEALTHCHECK_FAILED, "http_status_404")


# ---- it is checked ----------------------------------------------------------------------------------------------


async def test_its_check_can_have_fields_and_a_schema_of_its_own(tmp_path: Path) -> None:
    schema = {"type": "object", "required": ["echo"], "properties": {"echo": {"const": "cream"}}}
    async with loaded(tmp_path, config_for(check_fields={"extra": "cream"}, check_schema=schema)):
        pass
    fault = await failed_load(tmp_path, config_for(check_fields={"extra": "milk"}, check_schema=schema))
    assert (fault.failure, fault.detail) == (Failure.INVALID_OUTPUT, "schema_violated")


async def test_its_check_names_the_model_as_clients_do(tmp_path: Path) -> None:
    """OpenAI's API requires it, and some servers insist."""
    named = config_for({"model": "rag.embedding@1"}, served_name="rag.embedding@1")
    async with loaded(tmp_path, named):
        pass
    fault = await failed_load(tmp_path, config_for({"model": "rag.embedding@1"}, served_name="other"))
    assert (fault.failure, fault.detail) == (Failure.HEALTHCHECK_FAILED, "http_status_400")
    async with loaded(tmp_path, config_for({"model": "own"}, served_name="other", check_fields={"model": "own"})):
        pass


async def test_an_answer_of_another_form_is_none(tmp_path: Path) -> None:
    fault = await failed_load(tmp_path, config_for({"answer": [[1.0, 2.0]]}))
    assert (fault.failure, fault.detail) == (Failure.INVALID_OUTPUT, "embedding_malformed")
    schema = {"type": "array", "items": {"type": "array"}}
    async with loaded(tmp_path, config_for({"answer": [[1.0, 2.0]]}, check_schema=schema)):
        pass


async def test_the_check_can_be_made_elsewhere(tmp_path: Path) -> None:
    fault = await failed_load(tmp_path, config_for(check_path="/v1/embeddings"))
    assert (fault.failure, fault.detail) == (Failure.HEALTHCHECK_FAILED, "http_status_404")


# ---- it fails ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("orders", "expected"),
    [
        ({"complaint": "CUDA_ERROR_OUT_OF_MEMORY"}, (Failure.GPU_OOM, "out_of_memory")),
        ({"complaint": "OSError: [Errno 98] Address already in use"}, (Failure.MODEL_LOAD_FAILED, "port_in_use")),
        ({"complaint": "no such model"}, (Failure.MODEL_LOAD_FAILED, "exit_status_3")),
        # It listens, and its first request finds no memory: the server answers, and so has not ended.
        ({"refuse": 500, "answer": {"error": "CUDA out of memory"}}, (Failure.GPU_OOM, "out_of_memory")),
        ({"refuse": 500, "answer": {"error": "unknown"}}, (Failure.HEALTHCHECK_FAILED, "http_status_500")),
        # Ended in the midst of its check.
        ({"complain_after": 0}, (Failure.GPU_OOM, "out_of_memory")),
    ],
)
async def test_a_load_that_fails_says_why(
    tmp_path: Path, orders: dict[str, Any], expected: tuple[Failure, str]
) -> None:
    fault = await failed_load(tmp_path, config_for(orders))
    assert (fault.failure, fault.detail) == expected


async def test_a_crash_for_want_of_memory_is_told_as_that(tmp_path: Path) -> None:
    async with loaded(tmp_path, config_for({"complain_after": 1})) as (runtimes, _):
        with pytest.raises(httpx.TransportError):
            await embed(runtimes)
        fault = await runtimes.exited("r")
    assert (fault.failure, fault.detail) == (Failure.GPU_OOM, "out_of_memory")


async def test_who_is_killed_by_somebody_else_is_told_as_that(tmp_path: Path) -> None:
    """As the kernel does it for want of memory; another signal keeps its number."""
    for number, detail in ((signal.SIGKILL, "killed"), (signal.SIGABRT, "signal_6")):
        async with loaded(tmp_path, config_for()) as (runtimes, process):
            os.kill(process.pid, number)
            fault = await runtimes.exited("r")
        assert (fault.failure, fault.detail) == (Failure.RUNTIME_CRASH, detail)


async def test_a_load_that_hangs_after_its_complaint_is_told_as_that(tmp_path: Path) -> None:
    """As vLLM does whose engine has died: its door stays, and is never ready."""
    program = "echo 'torch.OutOfMemoryError: CUDA out of memory.'; exec sleep 600"
    fault = await failed_load(tmp_path, config_for(command=["sh", "-c", program, "{port}"], load_timeout_seconds=3))
    assert (fault.failure, fault.detail) == (Failure.GPU_OOM, "out_of_memory")
    silent = config_for(command=["sh", "-c", "exec sleep 600", "{port}"], load_timeout_seconds=1)
    assert (await failed_load(tmp_path, silent)).detail == "load_timeout"


async def test_a_program_that_is_not_there_is_told_before_anything_starts(tmp_path: Path) -> None:
    async with opened(tmp_path, config_for(command=["no-such-program", "{port}"])) as runtimes:
        with pytest.raises(RuntimeFault) as raised:
            await runtimes.spawn("r", "d", HOST)
    assert (raised.value.failure, raised.value.detail) == (Failure.MODEL_LOAD_FAILED, "no_program")


async def test_what_changed_since_it_was_registered_does_not_start(tmp_path: Path) -> None:
    """A model, and where that is as it was, whatever else shapes its memory."""
    model, plan = tmp_path / "m.bin", tmp_path / "engine.plan"
    model.write_bytes(b"one")
    plan.write_bytes(b"one")
    async with opened(tmp_path, config_for(model=model, files=[str(plan)])) as runtimes:
        for path, detail in ((plan, "runtime_changed"), (model, "changed_since_registered")):
            await asyncio.to_thread(runtimes.facts, "d")
            path.write_bytes(b"two")
            with pytest.raises(RuntimeFault) as raised:
                await runtimes.spawn("r", "d", HOST)
            assert (raised.value.failure, raised.value.detail) == (Failure.ARTIFACT_CORRUPT, detail)
        await asyncio.to_thread(runtimes.facts, "d")
        await runtimes.spawn("r", "d", HOST)


# ---- what is documented -----------------------------------------------------------------------------------------


def test_the_servers_of_the_documentation_can_be_configured() -> None:
    text = OPERATING.read_text("utf-8")
    section = text[text.index("## Any other server") :]
    block = re.search(r"```yaml\n(.*?)```", section, re.DOTALL)
    assert block is not None
    config = config_of(parse_yaml(block[1].encode(), "operating.md"), OPERATING)
    runtimes = {name: runtime for name, runtime in config.runtimes.items() if isinstance(runtime, CommandConfig)}
    assert list(runtimes) == list(config.runtimes) == ["bge", "qwen", "whisper", "triton"]
    assert [runtime.task.value for runtime in runtimes.values()] == ["embedding", "chat", "transcription", "chat"]
    assert runtimes["bge"].served_name == "rag.embedding@1", "by the capability requests name their model"
    assert runtimes["bge"].parallel == 8
    assert runtimes["qwen"].sleeps
    assert runtimes["qwen"].starts_alone
