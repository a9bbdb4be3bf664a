"""The contract of `domain.ports.Runtimes`, held against every runtime: one class, one subclass per runtime and task."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from pydantic import TypeAdapter

from gpuledger.adapters import procfs
from gpuledger.adapters.runtimes.config import ReferenceConfig, RuntimeConfig
from gpuledger.adapters.runtimes.manager import RuntimeManager
from gpuledger.adapters.runtimes.reference import Reference
from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import Endpoint, ProcessIdentity, RuntimeFault, Runtimes

pytestmark = pytest.mark.anyio

CONFIG: TypeAdapter[RuntimeConfig] = TypeAdapter(RuntimeConfig)
HOST = "host:node-1"
GPU = "GPU-01234567-89ab-cdef-0123-456789abcdef"
#: What a test waits for at most; nothing takes nearly as long unless it is broken.
PATIENCE_SECONDS = 60


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def opened(configs: Mapping[str, dict[str, Any]], folder: Path) -> AsyncGenerator[RuntimeManager]:
    runtimes = RuntimeManager({name: CONFIG.validate_python(config) for name, config in configs.items()}, folder)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            yield runtimes
    finally:
        await runtimes.close()


async def ask(endpoint: Endpoint, path: str, document: object, key: str | None = None) -> httpx.Response:
    key = endpoint.api_key if key is None else key
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_SECONDS) as http:
        return await http.post(endpoint.base_url + path, json=document, headers=headers)


def answers(endpoint: Endpoint) -> bool:
    """Whether anybody listens at the endpoint."""
    url = httpx.URL(endpoint.base_url)
    with socket.socket() as probe:
        return probe.connect_ex((url.host, url.port)) == 0


def process_file(process: ProcessIdentity, name: str) -> bytes:
    """In the midst of an execve the kernel shows nothing for a moment."""
    while not (content := Path(f"/proc/{process.pid}/{name}").read_bytes()):
        time.sleep(0.001)
    return content


async def gone(process: ProcessIdentity) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while procfs.is_alive(process):
            await asyncio.sleep(0.02)


class RuntimesContract:
    """`config` is a deployment of the runtime; `question` is a request that it answers."""

    path: ClassVar[str]
    question: ClassVar[dict[str, Any]]
    #: What it runs on, and what it then sees as CUDA_VISIBLE_DEVICES: on a host no card.
    accelerator_id: ClassVar[str] = HOST
    visible: ClassVar[str] = ""

    @pytest.fixture
    def config(self) -> dict[str, Any]:
        raise NotImplementedError

    @pytest.fixture
    async def runtimes(self, config: dict[str, Any], tmp_path: Path) -> AsyncIterator[Runtimes]:
        async with opened({"d": config}, tmp_path) as runtimes:
            yield runtimes

    # ---- facts --------------------------------------------------------------------------------------------------

    async def test_facts_are_of_the_configuration(self, config: dict[str, Any], tmp_path: Path) -> None:
        wider, patient = {**config, "parallel": 3}, {**config, "load_timeout_seconds": 7}
        async with opened({"a": config, "b": dict(config), "c": wider, "d": patient}, tmp_path) as runtimes:
            facts = runtimes.facts("a")
            assert runtimes.facts("b") == facts
            assert runtimes.facts("d").config_hash == facts.config_hash, "patience shapes no memory"
            assert runtimes.facts("c").config_hash != facts.config_hash
            assert facts.runtime == config["type"]
            assert facts.runtime_version

    async def test_an_unknown_deployment_is_nobodys(self, runtimes: Runtimes) -> None:
        with pytest.raises(KeyError):
            runtimes.facts("other")
        with pytest.raises(KeyError):
            await runtimes.spawn("r", "other", self.accelerator_id)

    # ---- held ---------------------------------------------------------------------------------------------------

    async def test_a_spawned_process_is_held(self, runtimes: Runtimes) -> None:
        """Its identity is known before the runtime's first instruction, and it stays the same through it."""
        process = await runtimes.spawn("r", "d", self.accelerator_id)
        assert procfs.is_alive(process)
        assert b"launcher.py" in process_file(process, "cmdline")
        assert not answers(runtimes.endpoint("r"))
        assert await runtimes.figures("r") is None
        await runtimes.load("r")
        assert procfs.is_alive(process)
        assert b"launcher.py" not in process_file(process, "cmdline")

    async def test_it_leads_a_session_of_its_own(self, runtimes: Runtimes) -> None:
        process = await runtimes.spawn("r", "d", self.accelerator_id)
        entry = procfs.scan().entries[process.pid]
        assert (entry.session, entry.group, entry.parent) == (process.pid, process.pid, os.getpid())

    async def test_a_held_process_can_be_stopped(self, runtimes: Runtimes) -> None:
        process = await runtimes.spawn("r", "d", self.accelerator_id)
        await runtimes.stop("r", 30)
        assert not Path(f"/proc/{process.pid}").exists()

    # ---- loaded -------------------------------------------------------------------------------------------------

    async def test_a_loaded_runtime_answers_who_has_its_key(self, runtimes: Runtimes) -> None:
        await runtimes.spawn("r", "d", self.accelerator_id)
        await runtimes.load("r")
        endpoint = runtimes.endpoint("r")
        assert endpoint.base_url.startswith("http://127.0.0.1:")
        answer = await ask(endpoint, self.path, self.question)
        assert answer.status_code == 200
        self.check(answer.json())

    @pytest.mark.parametrize("key", ["", "wrong"])
    async def test_a_loaded_runtime_answers_nobody_else(self, runtimes: Runtimes, key: str) -> None:
        await runtimes.spawn("r", "d", self.accelerator_id)
        await runtimes.load("r")
        answer = await ask(runtimes.endpoint("r"), self.path, self.question, key)
        assert answer.status_code == 401

    async def test_the_same_question_gets_the_same_answer(self, runtimes: Runtimes) -> None:
        await runtimes.spawn("r", "d", self.accelerator_id)
        await runtimes.load("r")
        first, second = [(await ask(runtimes.endpoint("r"), self.path, self.question)).json() for _ in range(2)]
        assert self.essence(first) == self.essence(second)

    async def test_an_idle_runtime_says_so(self, runtimes: Runtimes) -> None:
        await runtimes.spawn("r", "d", self.accelerator_id)
        await runtimes.load("r")
        figures = await runtimes.figures("r")
        assert figures is not None
        assert (figures.running, figures.waiting, figures.cache_use_bp or 0) == (0, 0, 0)

    async def test_keys_differ_and_are_in_no_argument(self, runtimes: Runtimes) -> None:
        processes = [await runtimes.spawn(resident, "d", self.accelerator_id) for resident in ("r", "s")]
        keys = [runtimes.endpoint(resident).api_key for resident in ("r", "s")]
        assert keys[0] != keys[1]
        for resident in ("r", "s"):
            await runtimes.load(resident)
        for process, key in zip(processes, keys, strict=True):
            assert len(key) >= 32
            assert key.encode() not in process_file(process, "cmdline")
            assert key.encode() in process_file(process, "environ")

    async def test_nothing_of_our_environment_is_inherited(
        self, config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DATABASE_PASSWORD", "hunter2")
        monkeypatch.setenv("LLAMA_ARG_HOST", "0.0.0.0")
        async with opened({"d": config}, tmp_path) as runtimes:
            process = await runtimes.spawn("r", "d", self.accelerator_id)
            await runtimes.load("r")
            environment = process_file(process, "environ")
        assert b"hunter2" not in environment
        assert b"0.0.0.0" not in environment
        assert f"CUDA_VISIBLE_DEVICES={self.visible}\0".encode() in environment

    async def test_logs_are_their_owners(self, runtimes: Runtimes, tmp_path: Path) -> None:
        await runtimes.spawn("models/../r", "d", self.accelerator_id)
        logs = list(tmp_path.rglob("*.log"))
        assert len(logs) == 1
        assert stat.S_IMODE(logs[0].stat().st_mode) == 0o600
        assert stat.S_IMODE(logs[0].parent.stat().st_mode) == 0o700

    # ---- twice --------------------------------------------------------------------------------------------------

    async def test_every_call_is_safe_to_make_twice(self, runtimes: Runtimes) -> None:
        first, second = await asyncio.gather(
            runtimes.spawn("r", "d", self.accelerator_id), runtimes.spawn("r", "d", self.accelerator_id)
        )
        assert first == second == await runtimes.spawn("r", "d", self.accelerator_id)
        await asyncio.gather(runtimes.load("r"), runtimes.load("r"))
        await runtimes.load("r")
        await asyncio.gather(runtimes.stop("r", 30), runtimes.stop("r", 30))
        await runtimes.stop("r", 30)
        assert not procfs.is_alive(first)

    async def test_what_is_unknown_is_gone(self, runtimes: Runtimes) -> None:
        await runtimes.stop("nobody", 30)
        assert await runtimes.figures("nobody") is None
        with pytest.raises(KeyError):
            runtimes.endpoint("nobody")

    async def test_a_resident_can_come_back(self, runtimes: Runtimes) -> None:
        first = await runtimes.spawn("r", "d", self.accelerator_id)
        await runtimes.stop("r", 30)
        second = await runtimes.spawn("r", "d", self.accelerator_id)
        assert first != second
        await runtimes.load("r")

    # ---- ends ---------------------------------------------------------------------------------------------------

    async def test_stopped_means_gone(self, runtimes: Runtimes) -> None:
        process = await runtimes.spawn("r", "d", self.accelerator_id)
        await runtimes.load("r")
        endpoint = runtimes.endpoint("r")
        await runtimes.stop("r", 30)
        assert not Path(f"/proc/{process.pid}").exists(), "reaped, not only dead"
        assert not answers(endpoint)
        with pytest.raises(KeyError):
            runtimes.endpoint("r")

    async def test_a_crash_is_noticed(self, runtimes: Runtimes) -> None:
        process = await runtimes.spawn("r", "d", self.accelerator_id)
        await runtimes.load("r")
        exited = asyncio.create_task(runtimes.exited("r"))
        await asyncio.sleep(0)
        os.kill(process.pid, signal.SIGKILL)
        fault = await exited
        assert (fault.failure, fault.detail) == (Failure.RUNTIME_CRASH, "killed")
        assert (await runtimes.exited("r")).detail == "killed"
        await runtimes.stop("r", 30)

    async def test_an_end_before_ready_is_a_failed_load(self, runtimes: Runtimes) -> None:
        process = await runtimes.spawn("r", "d", self.accelerator_id)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(RuntimeFault) as raised:
            await runtimes.load("r")
        assert (raised.value.failure, raised.value.detail) == (Failure.MODEL_LOAD_FAILED, "killed")

    async def test_an_end_that_was_asked_for_is_no_crash(self, runtimes: Runtimes) -> None:
        await runtimes.spawn("r", "d", self.accelerator_id)
        await runtimes.load("r")
        exited = asyncio.create_task(runtimes.exited("r"))
        await asyncio.sleep(0)
        await runtimes.stop("r", 30)
        assert (await exited).detail == "stopped"

    async def test_a_crash_stays_one_when_it_is_cleared_away(self, runtimes: Runtimes) -> None:
        process = await runtimes.spawn("r", "d", self.accelerator_id)
        await runtimes.load("r")
        exited = asyncio.create_task(runtimes.exited("r"))
        os.kill(process.pid, signal.SIGKILL)
        await gone(process)
        await runtimes.stop("r", 30)
        assert (await exited).detail == "killed"

    async def test_who_stops_waiting_leaves_nothing_behind(self, runtimes: Runtimes) -> None:
        """Whatever a caller waits for, its cancellation loses no process."""
        spawning = asyncio.create_task(runtimes.spawn("r", "d", self.accelerator_id))
        await asyncio.sleep(0)
        spawning.cancel()
        process = await runtimes.spawn("r", "d", self.accelerator_id)
        loading = asyncio.create_task(runtimes.load("r"))
        await asyncio.sleep(0)
        loading.cancel()
        await runtimes.load("r")
        stopping = asyncio.create_task(runtimes.stop("r", 30))
        await asyncio.sleep(0)
        stopping.cancel()
        await runtimes.stop("r", 30)
        assert not Path(f"/proc/{process.pid}").exists()

    async def test_close_ends_everything(self, runtimes: Runtimes) -> None:
        held = await runtimes.spawn("held", "d", self.accelerator_id)
        loaded = await runtimes.spawn("loaded", "d", self.accelerator_id)
        await runtimes.load("loaded")
        await runtimes.close()
        assert not Path(f"/proc/{held.pid}").exists()
        assert not Path(f"/proc/{loaded.pid}").exists()

    @pytest.mark.parametrize("loaded", [False, True], ids=["held", "loaded"])
    async def test_no_runtime_outlives_its_scheduler(
        self, config: dict[str, Any], tmp_path: Path, loaded: bool
    ) -> None:
        """SIGKILL of the scheduler, which can do nothing more about it."""
        scheduler = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", SCHEDULER, json.dumps(config, default=str)),
            *(str(tmp_path), str(int(loaded)), self.accelerator_id),
            stdout=subprocess.PIPE,
        )
        assert scheduler.stdout is not None
        pid, ticks, boot_id = (await scheduler.stdout.readline()).decode().split()
        process = ProcessIdentity(int(pid), int(ticks), boot_id)
        assert procfs.is_alive(process)
        scheduler.kill()
        await scheduler.wait()
        await gone(process)

    # ---- by task ------------------------------------------------------------------------------------------------

    def check(self, answer: dict[str, Any]) -> None:
        raise NotImplementedError

    def essence(self, answer: dict[str, Any]) -> object:
        raise NotImplementedError


#: A scheduler that starts one process, says which, and does no more.
SCHEDULER = textwrap.dedent(
    """
    import asyncio, json, sys
    from pathlib import Path
    from pydantic import TypeAdapter
    from gpuledger.adapters.runtimes.config import RuntimeConfig
    from gpuledger.adapters.runtimes.manager import RuntimeManager

    async def main(config, folder, loaded, accelerator_id):
        runtimes = RuntimeManager({"d": TypeAdapter(RuntimeConfig).validate_json(config)}, Path(folder))
        process = await runtimes.spawn("r", "d", accelerator_id)
        if int(loaded):
            await runtimes.load("r")
        print(process.pid, process.start_ticks, process.boot_id, flush=True)
        await asyncio.sleep(600)

    asyncio.run(main(*sys.argv[1:]))
    """
)


class Embeds:
    path: ClassVar[str] = "/v1/embeddings"
    question: ClassVar[dict[str, Any]] = {"input": ["a ledger", "of memory"]}

    def check(self, answer: dict[str, Any]) -> None:
        vectors = self.essence(answer)
        assert [len(vector) for vector in vectors] == [384, 384]
        assert sum(value * value for value in vectors[0]) == pytest.approx(1.0, abs=1e-3)

    def essence(self, answer: dict[str, Any]) -> list[list[float]]:
        return [one["embedding"] for one in answer["data"]]


class Chats:
    accelerator_id: ClassVar[str]
    path: ClassVar[str] = "/v1/chat/completions"
    question: ClassVar[dict[str, Any]] = {
        "messages": [{"role": "user", "content": "say something"}],
        "max_tokens": 6,
        "temperature": 0,
    }

    def check(self, answer: dict[str, Any]) -> None:
        assert answer["choices"][0]["message"]["role"] == "assistant"
        assert answer["usage"]["completion_tokens"] == 6
        assert self.essence(answer)

    def essence(self, answer: dict[str, Any]) -> str:
        text: str = answer["choices"][0]["message"]["content"]
        return text

    async def test_stopping_does_not_wait_for_an_answer(self, runtimes: Runtimes) -> None:
        process = await runtimes.spawn("r", "d", self.accelerator_id)
        await runtimes.load("r")
        endpoint = runtimes.endpoint("r")
        question = {**self.question, "max_tokens": 100_000, "stream": True}
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        async with (
            httpx.AsyncClient(trust_env=False, timeout=PATIENCE_SECONDS) as http,
            http.stream("POST", endpoint.base_url + self.path, json=question, headers=headers) as answer,
        ):
            await anext(answer.aiter_lines())
            await runtimes.stop("r", 1)
            assert not Path(f"/proc/{process.pid}").exists()


class TestReferenceEmbedding(Embeds, RuntimesContract):
    @pytest.fixture
    def config(self) -> dict[str, Any]:
        return {"type": "reference", "task": "embedding"}


class TestReferenceChat(Chats, RuntimesContract):
    @pytest.fixture
    def config(self) -> dict[str, Any]:
        return {"type": "reference", "task": "chat", "tokens": 100_000, "token_ms": 1}


class TestLlamaCppEmbedding(Embeds, RuntimesContract):
    @pytest.fixture
    def config(self, minilm_gguf: Path) -> dict[str, Any]:
        return {"type": "llama_cpp", "task": "embedding", "model": minilm_gguf, "dimensions": 384, "threads": 1}


class TestLlamaCppChat(Chats, RuntimesContract):
    @pytest.fixture
    def config(self, tiny_chat_gguf: Path) -> dict[str, Any]:
        return {"type": "llama_cpp", "task": "chat", "model": tiny_chat_gguf, "context_length": 2048, "threads": 1}


class OnACard:
    """vLLM serves from nothing else. The stand-in of tests/integration takes memory of the host all the same."""

    accelerator_id: ClassVar[str] = GPU
    visible: ClassVar[str] = GPU

    @pytest.fixture
    def vllm(self, tmp_path: Path) -> dict[str, Any]:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "model.safetensors").write_bytes(bytes(1000))
        stand_in = Path(__file__).parents[1] / "integration" / "vllm_stand_in.py"
        # Not `sys.executable -I`: what it is given on PYTHONPATH it has to find.
        orders = {"VLLM_STAND_IN": json.dumps({"token_seconds": 0.001})}
        return {
            "type": "vllm",
            "model": tmp_path / "model",
            "command": [sys.executable, str(stand_in)],
            "parallel": 1,
            "set": orders,
        }


class TestVllmEmbedding(OnACard, Embeds, RuntimesContract):
    @pytest.fixture
    def config(self, vllm: dict[str, Any]) -> dict[str, Any]:
        return {**vllm, "task": "embedding"}


class TestVllmChat(OnACard, Chats, RuntimesContract):
    @pytest.fixture
    def config(self, vllm: dict[str, Any]) -> dict[str, Any]:
        return {**vllm, "task": "chat", "sleep_level": 1}


def command_of(server: dict[str, Any]) -> dict[str, Any]:
    """The reference server as any other: by its command line."""
    config = ReferenceConfig.model_validate(server)
    command = Reference(config).command(0, "key")
    # Its port stands before its configuration, which is full of braces that stand for nothing.
    program, configuration = command.argv[:-2], command.argv[-1]
    return {
        "type": "command",
        "task": server["task"],
        "command": [*program, "{port}", configuration],
        "version": "1",
        "api_key_variable": "GPULEDGER_API_KEY",
        "metrics": {"running": "reference:requests_processing", "waiting": "reference:requests_deferred"},
    }


class TestCommandEmbedding(Embeds, RuntimesContract):
    @pytest.fixture
    def config(self) -> dict[str, Any]:
        return command_of({"type": "reference", "task": "embedding"})


class TestCommandChat(Chats, RuntimesContract):
    @pytest.fixture
    def config(self) -> dict[str, Any]:
        return command_of({"type": "reference", "task": "chat", "tokens": 100_000, "token_ms": 1})
