"""The reference runtime: exact memory, predictable answers, and every fault that it can be told to have."""

from __future__ import annotations

import asyncio
import base64
import struct
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpuledger.adapters import procfs
from gpuledger.adapters.runtimes.manager import MARK, SCHEDULER_MARK
from gpuledger.adapters.runtimes.process import AT_ONCE, end_tree
from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import RuntimeFigures
from gpuledger.domain.units import MIB
from tests.unit.references import ENDLESS, FOR_EVER_MS, HOST, PATIENCE_SECONDS, events, fault_of, loaded, opened

pytestmark = pytest.mark.anyio

GPU = "GPU-01234567-89ab-cdef-0123-456789abcdef"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


# ---- answers ----------------------------------------------------------------------------------------------------


async def test_embeddings_are_unit_vectors_of_the_text(tmp_path: Path) -> None:
    async with loaded(tmp_path, task="embedding", dimensions=5) as runtime:
        one = (await runtime.ask("/v1/embeddings", input="a", model="m")).json()
        many = (await runtime.ask("/v1/embeddings", input=["b", "a"])).json()
        packed = (await runtime.ask("/v1/embeddings", input="a", encoding_format="base64")).json()
    vector = one["data"][0]["embedding"]
    assert len(vector) == 5
    assert sum(value * value for value in vector) == pytest.approx(1.0)
    assert many["data"][1] == {"object": "embedding", "index": 1, "embedding": vector}
    assert many["data"][0]["embedding"] != vector
    floats = struct.unpack("<5f", base64.b64decode(packed["data"][0]["embedding"]))
    assert floats == pytest.approx(vector, abs=1e-6)
    assert one["usage"] == {"prompt_tokens": 1, "total_tokens": 1}
    assert one["model"] == "m"


@pytest.mark.parametrize(
    ("path", "question"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "to be or not"}]}),
        ("/v1/completions", {"prompt": "to be or not"}),
    ],
)
async def test_a_stream_says_what_the_whole_says(tmp_path: Path, path: str, question: dict[str, Any]) -> None:
    async with loaded(tmp_path, task="chat", tokens=5) as runtime:
        whole = (await runtime.ask(path, **question)).json()
        streamed = {**question, "stream": True, "stream_options": {"include_usage": True}}
        async with runtime.http.stream("POST", path, json=streamed) as answer:
            assert answer.headers["content-type"] == "text/event-stream"
            chunks = [event async for event in events(answer)]
    choice = whole["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert "".join(part["delta"].get("content", "") if "delta" in part else part["text"] for part in parts) == text
    assert len(text.split()) == 5
    assert parts[-1]["finish_reason"] == choice["finish_reason"] == "stop"
    assert chunks[-1]["usage"] == whole["usage"]
    assert whole["usage"] == {"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9}


async def test_an_answer_is_cut_where_the_client_says(tmp_path: Path) -> None:
    async with loaded(tmp_path, task="chat", tokens=5) as runtime:
        answer = (await runtime.ask("/v1/completions", prompt="x", max_tokens=2)).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("path", "document", "status"),
    [
        ("/v1/embeddings", {"input": []}, 400),
        ("/v1/embeddings", {"input": [1]}, 400),
        ("/v1/embeddings", {}, 400),
        ("/v1/embeddings", {"input": "w " * 10}, 400),
        ("/v1/embeddings", [], 400),
        ("/v1/chat/completions", {}, 404),
        ("/elsewhere", {}, 404),
    ],
)
async def test_what_is_no_question_is_refused(tmp_path: Path, path: str, document: Any, status: int) -> None:
    async with loaded(tmp_path, task="embedding", context_length=9) as runtime:
        answer = await runtime.http.post(path, json=document)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
        assert await runtime.runtimes.figures("r") == RuntimeFigures(0, 0, 0)


async def test_it_is_unavailable_while_it_loads(tmp_path: Path) -> None:
    async with opened(tmp_path, task="embedding", load_ms=FOR_EVER_MS) as runtimes:
        await runtimes.spawn("r", "d", HOST)
        loading = asyncio.create_task(runtimes.load("r"))
        endpoint = runtimes.endpoint("r")
        async with httpx.AsyncClient(trust_env=False) as http:
            while True:
                try:
                    health = await http.get(f"{endpoint.base_url}/health")
                    break
                except httpx.ConnectError:
                    await asyncio.sleep(0.01)
        assert health.status_code == 503
        assert await runtimes.figures("r") is None
        await runtimes.stop("r", 30)
        assert await fault_of(loading) == (Failure.MODEL_LOAD_FAILED, "stopped")


# ---- memory and slots -------------------------------------------------------------------------------------------


async def test_it_holds_what_it_is_told(tmp_path: Path) -> None:
    """Idle bytes when loaded, a share for each slot that is taken, idle bytes again."""
    near, sizes = 6 * MIB, {"idle_bytes": 64 * MIB, "peak_bytes": 128 * MIB}
    async with loaded(tmp_path, task="chat", parallel=2, **ENDLESS, **sizes) as runtime:
        assert runtime.resident_bytes() == pytest.approx(64 * MIB, abs=near)
        async with runtime.stream():
            assert runtime.resident_bytes() == pytest.approx(96 * MIB, abs=near)
            async with runtime.stream():
                assert runtime.resident_bytes() == pytest.approx(128 * MIB, abs=near)
        await runtime.until_running(0)
        assert runtime.resident_bytes() == pytest.approx(64 * MIB, abs=near)


async def test_requests_beyond_its_slots_wait(tmp_path: Path) -> None:
    async with loaded(tmp_path, task="chat", **ENDLESS) as runtime:
        async with runtime.stream():
            await runtime.until_running(1)
            waiting = asyncio.create_task(runtime.ask("/v1/completions", prompt="x", max_tokens=1))
            await runtime.until_running(2)
            assert await runtime.runtimes.figures("r") == RuntimeFigures(running=1, waiting=1, cache_use_bp=10_000)
            assert not waiting.done()
        assert (await waiting).status_code == 200
        await runtime.until_running(0)


# ---- faults -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({"faults": {"fail_load": "exit", "exit_status": 7}}, (Failure.MODEL_LOAD_FAILED, "exit_status_7")),
        ({"faults": {"fail_load": "oom"}}, (Failure.GPU_OOM, "out_of_memory")),
        ({"idle_bytes": 2**50, "peak_bytes": 2**50}, (Failure.GPU_OOM, "out_of_memory")),
        ({"peak_bytes": 2**50}, (Failure.GPU_OOM, "out_of_memory")),
        ({"faults": {"fail_load": "hang"}, "load_timeout_seconds": 1}, (Failure.TIMEOUT, "load_timeout")),
        ({"faults": {"hang_requests": True}, "load_timeout_seconds": 1}, (Failure.TIMEOUT, "load_timeout")),
        ({"faults": {"invalid_output": True}}, (Failure.INVALID_OUTPUT, "completion_empty")),
        ({"faults": {"crash_after_requests": 0}}, (Failure.MODEL_LOAD_FAILED, "exit_status_1")),
        ({"faults": {"invalid_output": True}, "task": "embedding"}, (Failure.INVALID_OUTPUT, "embedding_degenerate")),
        ({"context_length": 1, "task": "embedding"}, (Failure.HEALTHCHECK_FAILED, "http_status_400")),
    ],
    ids=str,
)
async def test_a_load_fails_as_it_is_told(tmp_path: Path, config: dict[str, Any], fault: tuple[Failure, str]) -> None:
    async with opened(tmp_path, **{"task": "chat", **config}) as runtimes:
        process = await runtimes.spawn("r", "d", HOST)
        assert await fault_of(runtimes.load("r")) == fault
        assert await fault_of(runtimes.load("r")) == fault
        await runtimes.stop("r", 30)
        assert not procfs.is_alive(process)


async def test_it_crashes_in_the_midst_of_an_answer(tmp_path: Path) -> None:
    """The functional check is the first request that counts."""
    faults = {"crash_after_requests": 2, "exit_status": 9}
    async with loaded(tmp_path, task="chat", tokens=8, faults=faults) as runtime:
        question = {"prompt": "x", "stream": True}
        assert (await runtime.ask("/v1/completions", **question)).status_code == 200
        with pytest.raises(httpx.RemoteProtocolError):
            await runtime.ask("/v1/completions", **question)
        fault = await runtime.runtimes.exited("r")
    assert (fault.failure, fault.detail) == (Failure.RUNTIME_CRASH, "exit_status_9")
    assert b"crashed" in fault.evidence


async def test_it_can_ignore_all_but_sigkill(tmp_path: Path) -> None:
    async with loaded(tmp_path, task="chat", faults={"ignore_term": True}) as runtime:
        await runtime.runtimes.stop("r", 0)
        assert not procfs.is_alive(runtime.process)


# ---- clients that go, and schedulers that stop ------------------------------------------------------------------


async def test_a_client_that_goes_away_frees_its_slot(tmp_path: Path) -> None:
    async with loaded(tmp_path, task="chat", **ENDLESS) as runtime:
        whole = asyncio.create_task(runtime.ask("/v1/completions", prompt="x"))
        await runtime.until_running(1)
        whole.cancel()
        await runtime.until_running(0)
        async with runtime.stream():
            await runtime.until_running(1)
        await runtime.until_running(0)


async def test_the_first_sigterm_lets_requests_end(tmp_path: Path) -> None:
    async with loaded(tmp_path, task="chat", **ENDLESS) as runtime:
        async with runtime.stream() as parts:
            stopping = asyncio.create_task(runtime.runtimes.stop("r", PATIENCE_SECONDS))
            while await runtime.is_listening():
                await asyncio.sleep(0.01)
            for _ in range(50):
                assert (await anext(parts))["choices"]
            assert not stopping.done()
        await stopping
        assert not procfs.is_alive(runtime.process)


async def test_a_card_is_named_to_its_runtime(tmp_path: Path) -> None:
    async with opened(tmp_path, task="chat") as runtimes:
        process = await runtimes.spawn("r", "d", GPU)
        await runtimes.load("r")
        assert f"CUDA_VISIBLE_DEVICES={GPU}\0".encode() in Path(f"/proc/{process.pid}/environ").read_bytes()


# ---- orphans ----------------------------------------------------------------------------------------------------


async def test_an_orphan_of_an_earlier_run_is_ended(tmp_path: Path) -> None:
    async with loaded(tmp_path, task="chat") as earlier, opened(tmp_path / "later", task="chat") as runtimes:
        await runtimes.end_orphan(earlier.process, 30)
        assert not procfs.is_alive(earlier.process)
        await runtimes.end_orphan(earlier.process, 30)


async def test_what_another_living_scheduler_drives_is_left_alone(tmp_path: Path) -> None:
    """A copy of a ledger names the processes of the original, which runs."""
    scheduler = await asyncio.create_subprocess_exec("sleep", "600")
    original = procfs.identity(scheduler.pid)
    assert original is not None
    mark = f"{original.pid}:{original.start_ticks}:{original.boot_id}"
    runtime = await asyncio.create_subprocess_exec(
        "sleep", "600", env={MARK: "r", SCHEDULER_MARK: mark}, start_new_session=True
    )
    driven = procfs.identity(runtime.pid)
    assert driven is not None
    async with opened(tmp_path, task="chat") as runtimes:
        await runtimes.end_orphan(driven, 30)
        assert procfs.is_alive(driven)
        scheduler.kill()
        await scheduler.wait()
        await runtimes.end_orphan(driven, 30)
        await runtime.wait()
        assert not procfs.is_alive(driven)


@pytest.mark.parametrize("marked", [True, False])
async def test_of_an_orphan_that_is_gone_only_what_is_marked_is_ours(tmp_path: Path, marked: bool) -> None:
    """The root has ended and left a child in its group. Without our mark it could be anybody's."""
    environment = {MARK: "r"} if marked else {}
    root = await asyncio.create_subprocess_exec(
        *("/bin/sh", "-c", "read go; sleep 600 >/dev/null & echo $!"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    assert root.stdout is not None
    identity = procfs.identity(root.pid)
    assert identity is not None
    assert root.stdin is not None
    root.stdin.write(b"go\n")
    left = procfs.identity(int(await root.stdout.readline()))
    assert left is not None
    await root.wait()
    async with opened(tmp_path, task="chat") as runtimes:
        await runtimes.end_orphan(identity, 30)
    assert procfs.is_alive(left) is not marked
    await end_tree(left, AT_ONCE, 0)
