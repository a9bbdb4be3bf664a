"""The functional check: what is an answer, what is none, and by what word. Asked of a real server on the loopback."""

from __future__ import annotations

import base64
import io
import itertools
import json
import re
import struct
import wave
import zlib
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from email.message import EmailMessage
from email.parser import BytesParser
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from pydantic import TypeAdapter

from gpuledger.adapters.runtimes import checks, samples
from gpuledger.adapters.runtimes.asking import client
from gpuledger.adapters.runtimes.checks import Probe
from gpuledger.adapters.runtimes.config import ReferenceConfig
from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import Endpoint, RuntimeFault

pytestmark = pytest.mark.anyio

KEY = "key-of-the-runtime"
NAN = float("nan")
TEXT = {"choices": [{"message": {"content": "words"}}]}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Asked:
    """A request as it came."""

    def __init__(self, handler: BaseHTTPRequestHandler) -> None:
        self.path = handler.path
        self.key = handler.headers["Authorization"]
        self.kind = handler.headers.get("Content-Type", "")
        self.body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))

    @property
    def document(self) -> Any:
        return json.loads(self.body)

    def form(self) -> dict[str, tuple[str | None, bytes]]:
        """File name and content of each field, read by the standard library's parser of MIME."""
        message: EmailMessage = BytesParser(EmailMessage).parsebytes(
            b"Content-Type: " + self.kind.encode() + b"\r\n\r\n" + self.body
        )
        fields: dict[str, tuple[str | None, bytes]] = {}
        for part in message.walk():
            if not part.is_multipart():
                name = part.get_param("name", header="content-disposition")
                content = part.get_payload(decode=True)
                assert isinstance(content, bytes)
                fields[str(name)] = (part.get_filename(), content)
        return fields


class Runtime:
    """A server that answers all alike, and remembers what it was asked."""

    def __init__(self, answer: Callable[[Asked], bytes], status: int) -> None:
        asked: list[Asked] = []

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                asked.append(Asked(self))
                body = answer(asked[-1])
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
                """Not to the output of the tests."""

        for method in ("do_GET", "do_POST"):
            setattr(Handler, method, Handler.answer)
        self.asked = asked
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = Endpoint(f"http://127.0.0.1:{self.server.server_port}", KEY)

    async def check(self, probe: Probe = checks.OPENAI, **config: Any) -> None:
        options = ReferenceConfig.model_validate({"type": "reference", **config})
        async with client() as http:
            await checks.check(http, self.endpoint, options, probe)


@asynccontextmanager
async def answering(answer: Any, status: int = 200) -> AsyncGenerator[Runtime]:
    """`answer`: a document, bytes, or what makes bytes of a request."""
    runtime = Runtime(partial(_written, answer), status)
    thread = Thread(target=runtime.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield runtime
    finally:
        runtime.server.shutdown()
        thread.join()
        runtime.server.server_close()


def _written(answer: Any, asked: Asked) -> bytes:
    if callable(answer):
        made: Any = answer(asked)
        return bytes(made)
    return answer if isinstance(answer, bytes) else json.dumps(answer).encode()


async def fault(answer: object, status: int = 200, **config: Any) -> tuple[Failure, str]:
    async with answering(answer, status) as runtime:
        with pytest.raises(RuntimeFault) as raised:
            await runtime.check(**config)
    return raised.value.failure, raised.value.detail


def embeddings(*vectors: list[float]) -> dict[str, Any]:
    return {"data": [{"index": index, "embedding": vector} for index, vector in enumerate(vectors)]}


def ranking(*scores: float) -> dict[str, Any]:
    return {"results": [{"index": index, "relevance_score": score} for index, score in enumerate(scores)]}


# ---- what is an answer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "answer"),
    [
        ({"task": "embedding"}, embeddings([1, 0], [0, 1])),
        ({"task": "embedding", "dimensions": 2}, embeddings([1, 0], [0, 1])),
        ({"task": "embedding", "dimensions": 1}, embeddings([1], [2])),
        ({"task": "chat"}, TEXT),
        ({"task": "chat"}, {"choices": [{"message": {"content": None, "reasoning_content": "hm"}}]}),
        ({"task": "chat"}, {"choices": [{"message": {"reasoning": "hm"}}]}),
        ({"task": "transcription"}, {"text": "hello", "usage": {"type": "duration", "seconds": 1}}),
        ({"task": "transcription"}, {"text": ""}),
        ({"task": "rerank"}, ranking(0.5, -3)),
        ({"task": "rerank"}, {"results": list(reversed(ranking(0.1, 0.2)["results"]))}),
    ],
    ids=str,
)
async def test_an_answer_passes(config: dict[str, Any], answer: object) -> None:
    async with answering(answer) as runtime:
        await runtime.check(**config)
    assert [asked.key for asked in runtime.asked] == [f"Bearer {KEY}"]


NO_ANSWERS: list[tuple[str, Any, str]] = [
    ("embedding", b"<html>", "embedding_malformed"),
    ("embedding", {"data": [{"index": 0, "embedding": []}, {"index": 1, "embedding": [1]}]}, "embedding_malformed"),
    ("embedding", {"data": [{"index": 0, "embedding": "AAAA"}]}, "embedding_malformed"),
    ("embedding", embeddings([1, 0]), "embedding_count"),
    ("embedding", embeddings([1, 0], [0, 1, 2]), "embedding_length"),
    ("embedding", embeddings([0, 0], [0, 0]), "embedding_degenerate"),
    ("embedding", embeddings([1, 0], [1, 0]), "embedding_degenerate"),
    ("embedding", embeddings([1, NAN], [0, 1]), "embedding_degenerate"),
    ("chat", {"choices": []}, "completion_malformed"),
    ("chat", {"error": "no"}, "completion_malformed"),
    ("chat", {"choices": [{"message": {"content": ""}}]}, "completion_empty"),
    ("transcription", {"text": None}, "transcription_malformed"),
    ("transcription", b"hello", "transcription_malformed"),
    ("rerank", {"results": [{"index": 0}]}, "rerank_malformed"),
    ("rerank", [{"index": 0, "score": 1}], "rerank_malformed"),
    ("rerank", ranking(0.5), "rerank_count"),
    ("rerank", {"results": [ranking(1)["results"][0], ranking(2)["results"][0]]}, "rerank_count"),
    ("rerank", ranking(0.5, 0.5), "rerank_degenerate"),
    ("rerank", ranking(0.5, NAN), "rerank_degenerate"),
    ("chat", b" " * (checks.MAX_ANSWER_BYTES + 1), "answer_too_long"),
]


@pytest.mark.parametrize(("task", "answer", "detail"), NO_ANSWERS, ids=lambda value: str(value)[:60])
async def test_what_is_no_answer_says_why(task: str, answer: object, detail: str) -> None:
    assert await fault(answer, task=task) == (Failure.INVALID_OUTPUT, detail)


async def test_the_length_of_an_embedding_is_held_to_what_is_configured() -> None:
    answer = embeddings([1, 0], [0, 1])
    assert await fault(answer, task="embedding", dimensions=3) == (Failure.INVALID_OUTPUT, "embedding_length")


@pytest.mark.parametrize("task", ["embedding", "chat", "transcription", "rerank"])
async def test_a_refusal_is_no_health(task: str) -> None:
    assert await fault(TEXT, 500, task=task) == (Failure.HEALTHCHECK_FAILED, "http_status_500")


async def test_who_does_not_listen_does_not_answer() -> None:
    async with answering(TEXT) as runtime:
        pass
    with pytest.raises(RuntimeFault) as raised:
        await runtime.check(task="chat")
    assert (raised.value.failure, raised.value.detail) == (Failure.HEALTHCHECK_FAILED, checks.NO_ANSWER)


# ---- images and recordings --------------------------------------------------------------------------------------


def image_of(asked: Asked) -> bytes | None:
    content = asked.document["messages"][0]["content"]
    if isinstance(content, str):
        return None
    (url,) = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    return base64.b64decode(url.removeprefix("data:image/png;base64,"), validate=True)


async def test_a_chat_that_takes_images_is_shown_one() -> None:
    async with answering(TEXT) as runtime:
        await runtime.check(task="chat", max_images=2)
    first, second = map(image_of, runtime.asked)
    assert first is None
    assert second == samples.picture()


async def test_a_model_that_reads_and_is_blind_fails() -> None:
    def answer(asked: Asked) -> bytes:
        words = "words" if image_of(asked) is None else ""
        return json.dumps({"choices": [{"message": {"content": words}}]}).encode()

    assert await fault(answer, task="chat", max_images=1) == (Failure.INVALID_OUTPUT, "completion_empty")


async def test_speech_is_sent_as_a_form_with_a_recording() -> None:
    async with answering({"text": ""}) as runtime:
        await runtime.check(Probe(fields={"model": "tiny"}), task="transcription")
    (asked,) = runtime.asked
    assert asked.path == "/v1/audio/transcriptions"
    form = asked.form()
    assert form["model"] == (None, b"tiny")
    assert form["response_format"] == (None, b"json")
    assert form["file"] == ("probe.wav", samples.tone())


def test_the_recording_is_a_quiet_tone() -> None:
    with wave.open(io.BytesIO(samples.tone(200))) as wav:
        assert (wav.getframerate(), wav.getnchannels(), wav.getsampwidth(), wav.getnframes()) == (16_000, 1, 2, 3_200)
        values = struct.unpack("<3200h", wav.readframes(3_200))
    assert 0 < max(values) < 1_000
    assert sum(1 for one, two in itertools.pairwise(values) if one < 0 <= two) in (87, 88)  # 440 Hz in 0.2 s


@pytest.mark.parametrize("side", [1, 7, 64])
def test_the_picture_is_a_png(side: int) -> None:
    """Read by its specification: chunks with their checksums, and rows that each begin with a filter."""
    png = samples.picture(side)
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    place, chunks = 8, dict[bytes, bytes]()
    while place < len(png):
        length, kind = struct.unpack_from(">I4s", png, place)
        content = png[place + 8 : place + 8 + length]
        assert struct.unpack_from(">I", png, place + 8 + length) == (zlib.crc32(kind + content),)
        chunks[kind] = content
        place += 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    assert struct.unpack(">IIBBBBB", chunks[b"IHDR"]) == (side, side, 8, 2, 0, 0, 0)
    assert len(zlib.decompress(chunks[b"IDAT"])) == side * (1 + 3 * side)


# ---- servers of another make ------------------------------------------------------------------------------------


async def test_a_server_may_have_other_paths_and_insist_on_fields() -> None:
    async with answering(ranking(1, 2)) as runtime:
        await runtime.check(Probe("/rank", {"model": "bge", "documents": ["a", "b"]}), task="rerank")
    (asked,) = runtime.asked
    assert asked.path == "/rank"
    assert asked.document == {"query": "memory", "documents": ["a", "b"], "model": "bge"}


async def test_readiness_and_metrics_may_have_other_paths() -> None:
    def answer(asked: Asked) -> bytes:
        return asked.path.encode()

    async with answering(answer) as runtime, client() as http:
        await checks.until_ready(http, runtime.endpoint, "/v2/health/ready")
        assert await checks.metrics(http, runtime.endpoint, "/m") == "/m"
        assert await checks.metrics(http, runtime.endpoint) == "/metrics"
    assert [asked.path for asked in runtime.asked] == ["/v2/health/ready", "/m", "/metrics"]


async def test_no_metrics_are_none() -> None:
    async with answering(b"", 404) as runtime, client() as http:
        assert await checks.metrics(http, runtime.endpoint) is None


# ---- by a schema ------------------------------------------------------------------------------------------------

DRAFT_4 = "http://json-schema.org/draft-04/schema#"
UNUSABLE = "schema_unusable"
VECTORS: dict[str, Any] = {
    "$defs": {"vector": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}},
    "type": "array",
    "items": {"$ref": "#/$defs/vector"},
}


async def test_an_answer_that_satisfies_the_schema_passes() -> None:
    """In the place of the check by kind, which would find no `data` in it."""
    async with answering([[1, 0], [0, 1]]) as runtime:
        await runtime.check(Probe("/embed"), task="embedding", check_schema=VECTORS)
    assert [asked.path for asked in runtime.asked] == ["/embed"]


@pytest.mark.parametrize(
    ("schema", "answer", "detail"),
    [
        (VECTORS, [[1, 0, 0]], "schema_violated"),
        (VECTORS, embeddings([1, 0], [0, 1]), "schema_violated"),
        (VECTORS, b"[[1, 0]", "schema_violated"),
        (VECTORS, b"[" * 100_000, "schema_violated"),
        (
            {"$schema": DRAFT_4, "minimum": 1, "exclusiveMinimum": True},
            1,
            "schema_violated",
        ),
        ({"$ref": "#/$defs/missing"}, [], UNUSABLE),
        ({"$ref": "#"}, [], UNUSABLE),
        ({"$schema": DRAFT_4, "patternProperties": {"(": {}}}, {"a": 1}, UNUSABLE),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_a_violated_schema_is_invalid_output(schema: dict[str, Any], answer: object, detail: str) -> None:
    """The draft is the one that the schema names: in the fourth, 1 is not above an exclusive minimum of 1."""
    assert await fault(answer, task="chat", check_schema=schema) == (Failure.INVALID_OUTPUT, detail)


def test_a_schema_of_a_deployment_is_judged_where_it_is_read() -> None:
    kind = TypeAdapter(ReferenceConfig)
    with pytest.raises(ValueError, match=re.escape("is no JSON schema")):
        kind.validate_python({"type": "reference", "task": "chat", "check_schema": {"type": "nonsense"}})
