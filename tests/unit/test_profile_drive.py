"""How a runtime is driven to what it takes at most, by the answers of a server that is made up."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, TypeAlias

import pytest

from gpuledger.adapters.runtimes.config import CommandConfig, ReferenceConfig, RuntimeConfig, VllmConfig
from gpuledger.adapters.runtimes.options import Manners
from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import Endpoint, RuntimeFault
from gpuledger.tools.measure_drive import drive

pytestmark = pytest.mark.anyio

#: Of a request (its path and its body) the status and the body of the answer.
Answer: TypeAlias = Callable[[str, bytes], tuple[int, bytes]]


class Renamed(ReferenceConfig):
    """One that answers elsewhere, and wants to be told the name of its model."""

    @property
    def manners(self) -> Manners:
        return Manners(check_fields={"model": "m", "input": "of the check"})


@dataclass
class Runtime:
    answer: Answer
    asked: list[tuple[str, bytes]] = field(default_factory=list[tuple[str, bytes]])
    base_url: str = ""

    async def driven(self, config: RuntimeConfig, **paths: str) -> int:
        return await drive(Endpoint(self.base_url, "key", paths=paths), config, lambda _: None)

    async def fault(self, config: RuntimeConfig) -> tuple[Failure, str]:
        with pytest.raises(RuntimeFault) as raised:
            await self.driven(config)
        return raised.value.failure, raised.value.detail


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@contextmanager
def runtime(answer: Answer) -> Generator[Runtime]:
    known = Runtime(answer)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            known.asked.append((self.path, body))
            status, said = known.answer(self.path, body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            known.base_url = f"http://127.0.0.1:{server.server_port}"
            yield known
        finally:
            server.shutdown()
            thread.join()


def config(task: str, **options: Any) -> ReferenceConfig:
    return ReferenceConfig.model_validate({"type": "reference", "task": task, "context_length": 64, **options})


def counted(context: int) -> Answer:
    """It counts two tokens a word, and refuses what is longer than its context."""

    def answer(path: str, body: bytes) -> tuple[int, bytes]:
        tokens = 2 * len(_prompt(json.loads(body)).split())
        return (200, json.dumps({"usage": {"prompt_tokens": tokens}}).encode()) if tokens <= context else (400, b"{}")

    return answer


def _prompt(document: dict[str, Any]) -> str:
    if "messages" in document:
        return str(document["messages"][0]["content"])
    texts: str | list[str] = document["documents"] if "documents" in document else document["input"]
    return texts if isinstance(texts, str) else texts[0]


@pytest.mark.parametrize("task", ["chat", "embedding", "rerank"])
@pytest.mark.parametrize("context", [64, 40])
async def test_the_longest_prompt_is_found(task: str, context: int) -> None:
    """Also where the model was made for less than its deployment says."""
    with runtime(counted(context)) as it:
        tokens = await it.driven(config(task))
    reached = context if task != "chat" or context < 64 else 64 - 8
    assert reached - 6 <= tokens <= reached


async def test_who_counts_nothing_is_given_a_word_for_a_token() -> None:
    with runtime(lambda path, body: (200, b'{"results": []}')) as it:
        tokens = await it.driven(config("rerank"))
    assert 56 <= tokens <= 64


@pytest.mark.parametrize("said", [b"", b"not JSON", b"[]", b'"text"'])
async def test_an_answer_that_is_none_is_told(said: bytes) -> None:
    with runtime(lambda path, body: (200, said)) as it:
        assert await it.fault(config("chat")) == (Failure.INVALID_OUTPUT, "answer_malformed")


async def test_who_refuses_everything_is_told() -> None:
    with runtime(lambda path, body: (500, b"")) as it:
        assert await it.fault(config("chat")) == (Failure.HEALTHCHECK_FAILED, "prompt_refused")


async def test_many_inputs_are_asked_for_in_one_request() -> None:
    with runtime(counted(64)) as it:
        await it.driven(config("embedding", max_inputs=7))
    path, body = it.asked[-1]
    assert (path, len(json.loads(body)["input"])) == ("/v1/embeddings", 7)


async def test_it_is_asked_where_and_how_it_wants_to_be_asked() -> None:
    renamed = Renamed.model_validate(config("embedding").model_dump(exclude_unset=True))
    with runtime(counted(64)) as it:
        await it.driven(renamed, embeddings="/embed")
    assert {path for path, _ in it.asked} == {"/embed"}
    assert {json.loads(body)["model"] for _, body in it.asked} == {"m"}
    assert not any(json.loads(body)["input"] == "of the check" for _, body in it.asked)


@pytest.mark.parametrize("task", ["embedding", "rerank", "chat", "transcription"])
async def test_every_request_names_the_model_as_clients_do(task: str) -> None:
    """OpenAI's API requires it, and some servers insist."""
    asked = {"task": task, "served_name": "a.name@1", "context_length": 64}
    of_any = {"type": "command", "command": ["server", "{port}"], "version": "1", **asked}
    of_vllm = {"type": "vllm", "model": "/models/m", **asked}
    for runtime_config in (CommandConfig.model_validate(of_any), VllmConfig.model_validate(of_vllm)):
        with runtime(lambda path, body: (200, b'{"usage": {"prompt_tokens": 8}}')) as it:
            await it.driven(runtime_config)
        assert it.asked
        for path, body in it.asked:
            sent = b'name="model"\r\n\r\na.name@1\r\n' if "audio" in path else b'"model":"a.name@1"'
            assert sent in body


async def test_pictures_are_as_many_as_are_taken() -> None:
    def no_more_than_one(path: str, body: bytes) -> tuple[int, bytes]:
        pictures = body.count(b"image_url") // 2
        return (400, b"{}") if pictures > 1 else (200, b'{"usage": {"prompt_tokens": 8}}')

    with runtime(no_more_than_one) as it:
        await it.driven(config("chat", max_images=4))
    assert [body.count(b"image_url") // 2 for _, body in it.asked if b"image_url" in body] == [4, 2, 1]


async def test_a_recording_is_as_long_as_is_taken() -> None:
    with runtime(lambda path, body: (413, b"") if len(body) > 300_000 else (200, b'{"text": ""}')) as it:
        assert await it.driven(config("transcription", max_audio_bytes=1_000_000, parallel=2)) == 0
    lengths = [len(body) for _, body in it.asked]
    assert {path for path, _ in it.asked} == {"/v1/audio/transcriptions"}
    assert [round(length, -5) for length in lengths] == [1_000_000, 500_000, 300_000, 300_000, 300_000]


async def test_a_runtime_that_takes_no_recording_is_told() -> None:
    with runtime(lambda path, body: (400, b"")) as it:
        assert await it.fault(config("transcription")) == (Failure.HEALTHCHECK_FAILED, "recording_refused")
