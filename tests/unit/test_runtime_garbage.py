"""Runtimes that are broken in what they say over HTTP: no answer of theirs is felt beyond the request that got it."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

import pytest

from gpuledger.adapters.runtimes import checks, sleeping
from gpuledger.adapters.runtimes.asking import client
from gpuledger.adapters.runtimes.config import ReferenceConfig
from gpuledger.adapters.runtimes.options import Call, SleepCalls
from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import Endpoint, RuntimeFault
from gpuledger.domain.units import MIB
from gpuledger.tools.measure_drive import drive

pytestmark = pytest.mark.anyio

HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=%s\r\n"
CHUNKED: Final = HEAD % b"utf-8" + b"Transfer-Encoding: chunked\r\n\r\n"
NO_GZIP: Final = b"is not what it says it is"
#: 64 MiB in 64 KiB.
BOMB: Final = gzip.compress(bytes(64 * MIB))
#: Of an answer without an end, so much is given: more than any bound here, and far less than for ever.
ENDLESS_BYTES: Final = 640 * MIB
EMBEDDING: Final = ReferenceConfig.model_validate({"type": "reference", "task": "embedding"})
CALLS: Final = SleepCalls((Call("/sleep"),), (Call("/wake"),), "/is_sleeping")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def whole(body: bytes, *headers: bytes, charset: bytes = b"utf-8") -> bytes:
    lines = [*headers, b"Content-Length: %d" % len(body)]
    return HEAD % charset + b"\r\n".join(lines) + b"\r\n\r\n" + body


class Liar:
    """Answers every request with the same bytes, and then perhaps without end."""

    def __init__(self, answer: bytes, endless: bool) -> None:
        self._answer = answer
        self._endless = endless
        self.sent_bytes = 0
        self.endpoint = Endpoint("", "key")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            for line in lengths:
                await reader.readexactly(int(line.partition(b":")[2]))
            writer.write(self._answer)
            while self._endless and self.sent_bytes < ENDLESS_BYTES:
                writer.write(b"100000\r\n" + bytes(MIB) + b"\r\n")
                self.sent_bytes += MIB
                await writer.drain()
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            return  # it was not listened to any more, which is what this is about
        finally:
            writer.close()


@asynccontextmanager
async def lying(answer: bytes, endless: bool = False) -> AsyncGenerator[Liar]:
    liar = Liar(answer, endless)
    server = await asyncio.start_server(liar.serve, "127.0.0.1", 0)
    liar.endpoint = Endpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "key")
    async with server, asyncio.timeout(60):
        yield liar


PACKED: Final = (
    pytest.param(whole(NO_GZIP, b"Content-Encoding: gzip"), id="no-gzip"),
    pytest.param(whole(BOMB, b"Content-Encoding: gzip"), id="bomb"),
)


class TestMetrics:
    @pytest.mark.parametrize("answer", PACKED)
    async def test_what_is_packed_is_not_unpacked(self, answer: bytes) -> None:
        async with lying(answer) as liar, client() as http:
            page = await checks.metrics(http, liar.endpoint)
            assert page is not None
            assert len(page) < MIB

    @pytest.mark.parametrize("charset", [b"hex", b"zip", b"rot13", b"\xe2\x82\xac"])
    async def test_an_encoding_that_is_none_is_not_asked_about(self, charset: bytes) -> None:
        async with lying(whole(b"a 1\n", charset=charset)) as liar, client() as http:
            assert await checks.metrics(http, liar.endpoint) == "a 1\n"

    async def test_a_page_without_an_end_is_none(self) -> None:
        async with lying(CHUNKED, endless=True) as liar, client() as http:
            assert await checks.metrics(http, liar.endpoint) is None
            assert liar.sent_bytes < ENDLESS_BYTES

    async def test_a_page_that_does_not_come_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The head is there and each byte comes soon: only the whole never does."""
        monkeypatch.setattr(checks, "METRICS_TIMEOUT_SECONDS", 0.1)
        async with lying(whole(b"")[:-2]) as liar, client() as http:
            assert await checks.metrics(http, liar.endpoint) is None


class TestReadiness:
    @pytest.mark.parametrize(
        ("answer", "endless"),
        [(whole(NO_GZIP, b"Content-Encoding: gzip"), False), (CHUNKED, True)],
        ids=["no-gzip", "endless"],
    )
    async def test_the_status_alone_counts(self, answer: bytes, endless: bool) -> None:
        async with lying(answer, endless) as liar, client() as http:
            await checks.until_ready(http, liar.endpoint)
            assert liar.sent_bytes < ENDLESS_BYTES


class TestFunctionalCheck:
    @pytest.mark.parametrize("answer", PACKED)
    async def test_what_is_packed_is_no_answer(self, answer: bytes) -> None:
        async with lying(answer) as liar, client() as http:
            with pytest.raises(RuntimeFault) as raised:
                await checks.check(http, liar.endpoint, EMBEDDING)
        assert (raised.value.failure, raised.value.detail) == (Failure.INVALID_OUTPUT, "embedding_malformed")

    async def test_an_answer_without_an_end_is_too_long(self) -> None:
        async with lying(CHUNKED, endless=True) as liar, client() as http:
            with pytest.raises(RuntimeFault) as raised:
                await checks.check(http, liar.endpoint, EMBEDDING)
            assert liar.sent_bytes < ENDLESS_BYTES
        assert raised.value.detail == "answer_too_long"
        assert len(raised.value.evidence) == checks.MAX_ANSWER_BYTES

    @pytest.mark.parametrize("number", [b"1" + b"0" * 400, b"NaN", b"Infinity"])
    async def test_a_number_that_no_schema_can_judge_is_invalid(self, number: bytes) -> None:
        options = ReferenceConfig.model_validate(
            {"type": "reference", "task": "embedding", "check_schema": {"multipleOf": 0.01}}
        )
        async with lying(whole(number)) as liar, client() as http:
            with pytest.raises(RuntimeFault) as raised:
                await checks.check(http, liar.endpoint, options)
        assert raised.value.failure is Failure.INVALID_OUTPUT


class TestSleep:
    async def test_what_is_packed_says_nothing(self) -> None:
        async with lying(whole(NO_GZIP, b"Content-Encoding: gzip")) as liar, client() as http:
            with pytest.raises(RuntimeFault) as raised:
                await sleeping.put_to_sleep(http, liar.endpoint, CALLS)
        assert raised.value.detail == "sleep_state_malformed"

    async def test_an_answer_without_an_end_is_not_read_to_it(self) -> None:
        async with lying(CHUNKED, endless=True) as liar, client() as http:
            with pytest.raises(RuntimeFault):
                await sleeping.wake_up(http, liar.endpoint, CALLS)
            assert liar.sent_bytes < ENDLESS_BYTES


class TestMeasuring:
    @pytest.mark.parametrize(
        ("body", "detail"),
        [
            (b"[" * 100_000, "answer_malformed"),
            (b'{"usage": 1' + b"0" * 5_000 + b"}", "answer_malformed"),
            (b"[]", "answer_malformed"),
        ],
        ids=["deep", "digits", "list"],
    )
    async def test_what_is_no_answer_is_invalid(self, body: bytes, detail: str) -> None:
        async with lying(whole(body)) as liar:
            with pytest.raises(RuntimeFault) as raised:
                await drive(liar.endpoint, EMBEDDING, _silent)
        assert (raised.value.failure, raised.value.detail) == (Failure.INVALID_OUTPUT, detail)

    @pytest.mark.parametrize("count", [b"9" * 400, b"9" * 30, b"-1", b"1e999", b"true"])
    async def test_tokens_that_cannot_be_are_not_believed(self, count: bytes) -> None:
        """The words of the prompt stand for them."""
        async with lying(whole(b'{"data": [], "usage": {"prompt_tokens": %s}}' % count)) as liar:
            tokens = await drive(liar.endpoint, EMBEDDING, _silent)
        assert 1 <= tokens <= EMBEDDING.context_length


def _silent(_: str) -> None:
    """Nobody looks on."""
