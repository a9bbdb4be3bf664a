"""llama.cpp for real: real embeddings, damaged models, another build of the server, and what its log does not say."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gpuledger.adapters import procfs
from gpuledger.adapters.runtimes import llama_server
from gpuledger.adapters.runtimes.config import LlamaCppConfig, Task
from gpuledger.adapters.runtimes.manager import RuntimeManager
from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import RuntimeFault

pytestmark = pytest.mark.anyio

PATIENCE_SECONDS = 60
HOST = "host:node-1"
GPU = "GPU-01234567-89ab-cdef-0123-456789abcdef"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def opened(folder: Path, **config: Any) -> AsyncGenerator[RuntimeManager]:
    known = {"type": "llama_cpp", "threads": 1, **config}
    runtimes = RuntimeManager({"d": LlamaCppConfig.model_validate(known)}, folder)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            yield runtimes
    finally:
        await runtimes.close()


@asynccontextmanager
async def serving(folder: Path, **config: Any) -> AsyncGenerator[openai.AsyncOpenAI]:
    """A client of a loaded deployment."""
    async with opened(folder, **config) as runtimes:
        await runtimes.spawn("r", "d", HOST)
        await runtimes.load("r")
        endpoint = runtimes.endpoint("r")
        async with openai.AsyncOpenAI(
            base_url=f"{endpoint.base_url}/v1", api_key=endpoint.api_key, max_retries=0
        ) as client:
            yield client


async def fault_of(awaitable: Any) -> tuple[Failure, str]:
    with pytest.raises(RuntimeFault) as raised:
        await awaitable
    return raised.value.failure, raised.value.detail


# ---- it serves --------------------------------------------------------------------------------------------------


async def test_what_is_alike_is_near(minilm_gguf: Path, tmp_path: Path) -> None:
    texts = ["The cat sleeps on the sofa.", "A kitten naps on the couch.", "Interest rates were raised again."]
    async with serving(tmp_path, task="embedding", model=minilm_gguf, dimensions=384) as client:
        answer = await client.embeddings.create(model="any", input=texts)
    cat, kitten, rates = (one.embedding for one in answer.data)

    def alike(first: list[float], second: list[float]) -> float:
        return sum(one * other for one, other in zip(first, second, strict=True))

    assert alike(cat, kitten) > 0.5 > 0.2 > alike(cat, rates)


async def test_every_token_of_the_context_can_be_embedded(minilm_gguf: Path, tmp_path: Path) -> None:
    async with serving(tmp_path, task="embedding", model=minilm_gguf, context_length=512) as client:
        answer = await client.embeddings.create(model="any", input="word " * 510)
    assert answer.usage.prompt_tokens == 512


async def test_a_chat_is_streamed(tiny_chat_gguf: Path, tmp_path: Path) -> None:
    async with serving(tmp_path, task="chat", model=tiny_chat_gguf, context_length=1024, parallel=2) as client:
        stream = await client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "go on"}], max_tokens=20, stream=True
        )
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert len(parts) > 5
    assert "".join(parts).strip()


async def test_prompts_are_in_no_log(tiny_chat_gguf: Path, tmp_path: Path) -> None:
    """Neither one that is answered nor one that is refused for its length."""
    secret = "xyzzyplugh"
    async with serving(tmp_path, task="chat", model=tiny_chat_gguf) as client:
        question: Any = [{"role": "user", "content": secret}]
        await client.chat.completions.create(model="any", messages=question, max_tokens=2)
        question[0]["content"] = f"{secret} " * 10_000
        with pytest.raises(openai.APIStatusError):
            await client.chat.completions.create(model="any", messages=question, max_tokens=2)
    logs = [path.read_text() for path in tmp_path.rglob("*.log*")]
    assert logs
    assert not any(secret in log for log in logs)


async def test_texts_are_ranked(minilm_gguf: Path, tmp_path: Path) -> None:
    """By a model that was not made for it: each document gets one score, the same each time."""
    async with opened(tmp_path, task="rerank", model=minilm_gguf) as runtimes:
        await runtimes.spawn("r", "d", HOST)
        await runtimes.load("r")
        endpoint = runtimes.endpoint("r")
        question = {"query": "cats", "documents": ["The cat sleeps.", "Rates were raised.", "A kitten naps."]}
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_SECONDS) as http:
            answers = [await http.post(f"{endpoint.base_url}/v1/rerank", json=question, headers=headers) for _ in "ab"]
            open_door = await http.post(f"{endpoint.base_url}/v1/rerank", json=question)
    first, second = (answer.json()["results"] for answer in answers)
    assert sorted(one["index"] for one in first) == [0, 1, 2]
    assert first == second
    assert open_door.status_code == 401


async def test_a_projector_that_is_none_is_a_failed_load(tiny_chat_gguf: Path, tmp_path: Path) -> None:
    """A model is not served blind in the place of one that sees."""
    projector = tmp_path / "mmproj.gguf"
    projector.write_bytes(b"GGUF, and nothing to see by")
    async with opened(tmp_path, task="chat", model=tiny_chat_gguf, projector=projector, max_images=1) as runtimes:
        await runtimes.spawn("r", "d", HOST)
        failure, _ = await fault_of(runtimes.load("r"))
        assert failure is Failure.MODEL_LOAD_FAILED


# ---- damaged models ---------------------------------------------------------------------------------------------


async def test_damaged_models_are_told_apart(tiny_chat_gguf: Path, tmp_path: Path) -> None:
    whole = tiny_chat_gguf.read_bytes()
    damaged = {"cut": whole[: len(whole) // 2], "other": b"PK" + whole[2:], "empty": b""}
    for name, content in damaged.items():
        model = tmp_path / f"{name}.gguf"
        model.write_bytes(content)
        async with opened(tmp_path, task="chat", model=model) as runtimes:
            await runtimes.spawn("r", "d", HOST)
            failure, detail = await fault_of(runtimes.load("r"))
            assert failure is Failure.MODEL_LOAD_FAILED
            assert detail in {"model_corrupt", "exit_status_1"}
            assert (await runtimes.exited("r")).failure is Failure.MODEL_LOAD_FAILED


async def test_flipped_weights_are_found_before_they_serve_garbage(tiny_chat_gguf: Path, tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(tiny_chat_gguf.read_bytes())
    async with opened(tmp_path, task="chat", model=model) as runtimes:
        told = runtimes.facts("d").config_hash
        with model.open("r+b") as file:
            file.seek(-1000, 2)
            file.write(bytes(500))
        for _ in range(2):
            assert await fault_of(runtimes.spawn("r", "d", HOST)) == (
                Failure.ARTIFACT_CORRUPT,
                "changed_since_registered",
            )
        # Whoever registers it anew takes it as it now is.
        assert runtimes.facts("d").config_hash != told
        await runtimes.spawn("r", "d", HOST)


async def test_a_model_that_is_gone_is_a_failed_load(tmp_path: Path) -> None:
    async with opened(tmp_path, task="chat", model=tmp_path / "absent.gguf") as runtimes:
        missing = (Failure.MODEL_LOAD_FAILED, "artifact_missing")
        assert await fault_of(runtimes.spawn("r", "d", HOST)) == missing
        assert await fault_of(runtimes.spawn("r", "d", HOST)) == missing


# ---- kinds of accelerator ---------------------------------------------------------------------------------------


async def test_layers_for_a_card_are_not_served_from_the_host(tiny_chat_gguf: Path, tmp_path: Path) -> None:
    async with opened(tmp_path, task="chat", model=tiny_chat_gguf, gpu_layers="all") as runtimes:
        mismatch = (Failure.MODEL_LOAD_FAILED, "accelerator_kind_mismatch")
        assert await fault_of(runtimes.spawn("r", "d", HOST)) == mismatch


async def test_a_build_that_knows_no_card_does_not_pretend(tiny_chat_gguf: Path, tmp_path: Path) -> None:
    async with opened(tmp_path, task="chat", model=tiny_chat_gguf, gpu_layers="all") as runtimes:
        await runtimes.spawn("r", "d", GPU)
        assert await fault_of(runtimes.load("r")) == (Failure.MODEL_LOAD_FAILED, "device_missing")


# ---- another build of the server --------------------------------------------------------------------------------


async def test_a_llama_server_is_run_with_the_same_options(tiny_chat_gguf: Path, tmp_path: Path) -> None:
    """A stand-in with its command line: what it is given must be what ours understands, and it is what runs."""
    server = tmp_path / "llama-server"
    server.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo "version: 7123 (0123abcd)" >&2; exit 0; fi\n'
        f'exec {shlex.quote(sys.executable)} -I {shlex.quote(llama_server.__file__)} "$@"\n'
    )
    server.chmod(0o755)
    async with opened(tmp_path, task="chat", model=tiny_chat_gguf, server=server) as runtimes:
        assert runtimes.facts("d").runtime_version == "llama-server-7123-0123abcd"
        process = await runtimes.spawn("r", "d", HOST)
        await runtimes.load("r")
        settings = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        assert b"LLAMA_ARG_CACHE_RAM=0" in settings
        figures = await runtimes.figures("r")
        assert figures is not None
        assert (figures.running, figures.waiting) == (0, 0)


async def test_deployments_are_loaded_side_by_side(minilm_gguf: Path, tiny_chat_gguf: Path, tmp_path: Path) -> None:
    configs = {
        "chat": LlamaCppConfig(type="llama_cpp", task=Task.CHAT, model=tiny_chat_gguf, threads=1),
        "embedding": LlamaCppConfig(type="llama_cpp", task=Task.EMBEDDING, model=minilm_gguf, threads=1),
    }
    runtimes = RuntimeManager(configs, tmp_path)
    try:
        residents = {"a": "chat", "b": "embedding", "c": "chat", "d": "embedding"}
        processes = await asyncio.gather(*(runtimes.spawn(name, of, HOST) for name, of in residents.items()))
        await asyncio.gather(*(runtimes.load(name) for name in residents))
        assert len({runtimes.endpoint(name).base_url for name in residents}) == 4
        await asyncio.gather(*(runtimes.stop(name, 30) for name in residents))
        assert not any(procfs.is_alive(process) for process in processes)
    finally:
        await runtimes.close()
