"""From a grant to its end: what the client gets, what the runtime is spared, what the desk is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from gpuledger.adapters.http import attempt
from gpuledger.adapters.http.answers import EventStream, Usage, named
from gpuledger.adapters.http.openai_errors import CLIENT_CLOSED
from gpuledger.adapters.http.ports import STRAIGHT, Lost, Outcome, Passage, Question, Refused
from gpuledger.domain.failures import Failure
from gpuledger.domain.reasons import Reason
from tests.unit.gateways import Door, Upstream, Visitor, answer_of, door, granted

pytestmark = pytest.mark.anyio

EMBED = {"model": "emb@1", "input": "text"}
CHAT = {"model": "chat@1", "stream": True, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.001)


def event(text: str, **more: object) -> bytes:
    return b"data: " + json.dumps({"model": "file.gguf", "text": text, **more}).encode() + b"\n\n"


def preempted() -> Lost:
    return Lost(Reason.PREEMPTED, None, "before_it_began", asyncio.get_running_loop().create_future())


class Talk:
    """A runtime that streams what it is given, when it is given it."""

    def __init__(self) -> None:
        self.pieces: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.body = Upstream(self._iterate())

    async def answer(self, request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=self.body)

    async def _iterate(self) -> AsyncIterator[bytes]:
        while (piece := await self.pieces.get()) is not None:
            if isinstance(piece, Exception):
                raise piece
            yield piece


Runtime = Talk | Callable[[httpx.Request], Awaitable[httpx.Response]]


@asynccontextmanager
async def visiting(runtime: Runtime) -> AsyncGenerator[tuple[Door, Visitor, asyncio.Task[None]]]:
    """A client that listens to a stream."""
    async with door(runtime.answer if isinstance(runtime, Talk) else runtime) as gate:
        visitor = Visitor(json.dumps(CHAT).encode())
        visit = asyncio.create_task(visitor.visit(gate.app))
        try:
            yield gate, visitor, visit
        finally:
            visit.cancel()
            await asyncio.gather(visit, return_exceptions=True)


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body


async def _endless(part: bytes) -> AsyncIterator[bytes]:
    while True:
        yield part


class TestWhole:
    async def test_it_is_named_by_its_capability_and_carries_the_facts(self) -> None:
        async with door() as gate:
            answer = await gate.http.post("/v1/embeddings", json=EMBED)
        assert answer.status_code == 200
        assert answer.json()["model"] == "emb@1"
        assert answer.headers["x-request-id"] == "req-1"
        assert answer.headers["x-gpuledger-lease"] == "lease-1"
        assert answer.headers["x-gpuledger-plan"] == "ab" * 32
        (ending,) = gate.desk.ended
        assert (ending.status, ending.prompt_tokens, ending.response_bytes) == (200, 7, len(answer.content))

    async def test_the_runtime_gets_its_own_key_and_not_the_clients(self) -> None:
        async with door() as gate:
            await gate.http.post("/v1/embeddings", json=EMBED)
        (sent,) = gate.sent
        assert sent.headers["authorization"] == "Bearer key"
        assert json.loads(sent.content) == EMBED

    async def test_a_complaint_of_the_runtime_keeps_its_status_and_words(self) -> None:
        async def complain(_: httpx.Request) -> httpx.Response:
            return answer_of(400, {"error": {"code": 400, "message": "too many tokens", "type": "x"}})

        async with door(complain) as gate:
            answer = await gate.http.post("/v1/embeddings", json=EMBED)
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "too many tokens")
        (ending,) = gate.desk.ended
        assert (ending.status, ending.failure) == (400, None)

    async def test_a_500_by_which_the_runtime_blames_the_request_is_the_clients(self) -> None:
        """llama.cpp says so of a text that is longer than its micro-batch, with advice that no client can follow."""
        advice = "increase the physical batch size (current batch size: 512)"
        told = f"input (3002 tokens) is too large to process. {advice}"

        async def complain(_: httpx.Request) -> httpx.Response:
            return answer_of(500, {"error": {"code": 500, "message": told, "type": "server_error"}})

        async with door(complain) as gate:
            answer = await gate.http.post("/v1/embeddings", json=EMBED)
        words = "the text has 3002 tokens, and emb@1 takes 512 at once"
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, words)
        (ending,) = gate.desk.ended
        assert (ending.status, ending.failure) == (400, None)

    @pytest.mark.parametrize("status", [401, 404, 500, 503])
    async def test_what_is_between_us_and_the_runtime_is_its_failure(self, status: int) -> None:
        async def fail(_: httpx.Request) -> httpx.Response:
            return answer_of(status, {"error": {"message": "secret of the runtime"}})

        async with door(fail) as gate:
            gate.desk.outcomes = [granted(), failed(Failure.INVALID_OUTPUT, f"http_status_{status}")]
            answer = await gate.http.post("/v1/embeddings", json=EMBED)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "INVALID_OUTPUT"
        assert "secret" not in answer.text
        (ending,) = gate.desk.ended
        assert (ending.failure, ending.detail) == (Failure.INVALID_OUTPUT, f"http_status_{status}")
        assert ending.unsent

    @pytest.mark.parametrize(
        ("error", "failure", "status"),
        [
            (httpx.ReadTimeout("silence"), Failure.TIMEOUT, 504),
            (httpx.ConnectTimeout("silence"), Failure.TIMEOUT, 504),
            (ZeroDivisionError("a defect of ours"), Failure.CAPABILITY_UNAVAILABLE, 503),
        ],
    )
    async def test_what_is_not_tried_again_ends_at_once(self, error: Exception, failure: Failure, status: int) -> None:
        async def fail(_: httpx.Request) -> httpx.Response:
            raise error

        async with door(fail) as gate:
            answer = await gate.http.post("/v1/embeddings", json=EMBED)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, failure.value)
        assert answer.headers["x-gpuledger-lease"] == "lease-1"
        (ending,) = gate.desk.ended
        assert (ending.failure, ending.unsent) == (failure, False)
        assert gate.desk.resumed == []

    @pytest.mark.parametrize("status", [201, 204, 206, 301, 302, 304, 307])
    async def test_a_status_that_is_no_answer_is_a_failure_of_the_runtime(self, status: int) -> None:
        async def elsewhere(_: httpx.Request) -> httpx.Response:
            return httpx.Response(status, headers={"location": "http://elsewhere/"})

        async with door(elsewhere) as gate:
            gate.desk.outcomes = [granted(), failed(Failure.INVALID_OUTPUT, f"http_status_{status}")]
            answer = await gate.http.post("/v1/embeddings", json=EMBED)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "INVALID_OUTPUT")
        (ending,) = gate.desk.ended
        assert (ending.failure, ending.detail) == (Failure.INVALID_OUTPUT, f"http_status_{status}")

    async def test_what_is_packed_is_no_answer(self) -> None:
        """Nobody asked for it, and its client would not be told."""

        async def packed(_: httpx.Request) -> httpx.Response:
            return httpx.Response(200, headers={"content-encoding": "gzip"}, stream=Upstream(_once(b"packed")))

        async with door(packed) as gate:
            gate.desk.outcomes = [granted(), failed(Failure.INVALID_OUTPUT, "content_encoding")]
            answer = await gate.http.post("/v1/embeddings", json=EMBED)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "INVALID_OUTPUT")
        (ending,) = gate.desk.ended
        assert (ending.failure, ending.detail) == (Failure.INVALID_OUTPUT, "content_encoding")

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_type_that_no_header_can_have_is_not_passed_on(self, stream: bool) -> None:
        async def strange(_: httpx.Request) -> httpx.Response:
            kind = "text/event-stream; charset=\u20ac".encode()
            return httpx.Response(200, headers=[(b"content-type", kind)], stream=Upstream(_once(b"data: {}\n\n")))

        async with door(strange) as gate:
            answer = await gate.http.post("/v1/chat/completions", json={**CHAT, "stream": stream})
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/octet-stream")
        assert answer.content == b"data: {}\n\n"

    async def test_of_a_complaint_no_more_is_read_than_a_message(self) -> None:
        body = Upstream(_endless(b" " * 1024))

        async def complain(_: httpx.Request) -> httpx.Response:
            return httpx.Response(400, stream=body)

        async with door(complain) as gate:
            answer = await asyncio.wait_for(gate.http.post("/v1/embeddings", json=EMBED), 30)
        assert (answer.status_code, len(answer.content) < 1000) == (400, True)

    async def test_a_slow_client_holds_no_lease(self) -> None:
        async with door() as gate:
            visitor = Visitor(json.dumps(EMBED).encode(), "/v1/embeddings")
            visitor.reads.clear()
            visit = asyncio.create_task(visitor.visit(gate.app))
            await until(lambda: gate.desk.ended)
            assert visitor.messages == []
            visitor.reads.set()
            await visit
            assert visitor.complete


class TestStream:
    async def test_each_event_passes_when_it_comes(self) -> None:
        talk = Talk()
        async with visiting(talk) as (gate, visitor, visit):
            for number in range(3):
                talk.pieces.put_nowait(event(str(number)))
                await until(lambda: visitor.text.count("data: ") == number + 1)  # noqa: B023 - awaited here
            talk.pieces.put_nowait(b"data: " + json.dumps({"usage": {"completion_tokens": 3}}).encode() + b"\n\n")
            talk.pieces.put_nowait(b"data: [DONE]\n\n")
            talk.pieces.put_nowait(None)
            await visit
            assert visitor.text.count('"chat@1"') == 3
            assert visitor.text.endswith("data: [DONE]\n\n")
            (ending,) = gate.desk.ended
            assert (ending.completion_tokens, ending.response_bytes) == (3, len(visitor.text))

    async def test_a_client_that_goes_ends_the_upstream_request(self) -> None:
        talk = Talk()
        async with visiting(talk) as (gate, visitor, visit):
            talk.pieces.put_nowait(event("one"))
            await until(lambda: "one" in visitor.text)
            visitor.gone.set()
            await visit
            assert talk.body.closed
            (ending,) = gate.desk.ended
            assert (ending.client_gone, ending.status) == (True, CLIENT_CLOSED)

    async def test_a_client_that_takes_nothing_is_taken_for_gone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(attempt, "CLIENT_STALL_SECONDS", 0.05)
        talk = Talk()
        async with visiting(talk) as (gate, visitor, visit):
            talk.pieces.put_nowait(event("one"))
            await until(lambda: "one" in visitor.text)
            visitor.reads.clear()
            talk.pieces.put_nowait(event("two"))
            await visit
            assert talk.body.closed
            assert gate.desk.ended[0].client_gone

    async def test_what_a_slow_client_has_not_taken_is_not_asked_for(self) -> None:
        talk = Talk()
        async with visiting(talk) as (_, visitor, visit):
            visitor.reads.clear()
            for number in range(50):
                talk.pieces.put_nowait(event(str(number)))
            talk.pieces.put_nowait(None)
            await asyncio.sleep(0.05)
            assert talk.pieces.qsize() >= 49
            visitor.reads.set()
            await visit
            assert visitor.text.count("data: ") == 50

    async def test_a_runtime_that_dies_ends_it_with_an_event(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(attempt, "EXIT_NOTICE_SECONDS", 0.01)
        talk = Talk()
        async with visiting(talk) as (gate, visitor, visit):
            talk.pieces.put_nowait(event("one"))
            talk.pieces.put_nowait(httpx.ReadError("gone"))
            await visit
            assert visitor.complete
            last = json.loads(visitor.text.strip().rpartition("data: ")[2])
            assert last["error"]["code"] == "RUNTIME_CRASH"
            (ending,) = gate.desk.ended
            assert (ending.failure, ending.unsent) == (Failure.RUNTIME_CRASH, False)

    async def test_a_lease_that_is_lost_ends_it_with_an_event(self) -> None:
        talk = Talk()
        async with visiting(talk) as (gate, visitor, visit):
            talk.pieces.put_nowait(event("one"))
            await until(lambda: "one" in visitor.text)
            gate.desk.lose(Lost(None, Failure.LEASE_TIMEOUT, "lease_not_renewed"))
            await visit
            assert talk.body.closed
            assert "LEASE_TIMEOUT" in visitor.text
            assert gate.desk.cut == []
            assert 'outcome="failed"' in (await gate.http.get("/metrics")).text

    async def test_one_that_was_preempted_before_anything_was_sent_goes_again(self) -> None:
        talk = Talk()
        again = Talk()
        talks = iter((talk, again))

        async def runtime(request: httpx.Request) -> httpx.Response:
            return await next(talks).answer(request)

        async with visiting(runtime) as (gate, visitor, visit):
            await until(lambda: len(gate.sent) == 1)
            gate.desk.lose(preempted())
            await until(lambda: len(gate.sent) == 2)
            again.pieces.put_nowait(event("one"))
            again.pieces.put_nowait(None)
            await visit
            assert gate.desk.resumed == ["req-1"]
            assert visitor.text.count("one") == 1
            assert talk.body.closed
            assert len(gate.desk.ended) == 1

    async def test_one_that_was_preempted_and_then_refused_is_told_so(self) -> None:
        talk = Talk()
        async with visiting(talk) as (gate, visitor, visit):
            await until(lambda: len(gate.sent) == 1)
            gate.desk.outcomes = [Refused("req-1", Reason.NODE_DRAINING, None, "", None)]
            gate.desk.lose(preempted())
            await visit
            assert (visitor.status, gate.desk.ended) == (503, [])
            assert "NODE_DRAINING" in visitor.text

    async def test_one_that_was_preempted_later_is_not_begun_again(self) -> None:
        talk = Talk()
        async with visiting(talk) as (gate, visitor, visit):
            talk.pieces.put_nowait(event("one"))
            await until(lambda: "one" in visitor.text)
            gate.desk.lose(preempted())
            await visit
            last = json.loads(visitor.text.strip().rpartition("data: ")[2])
            assert (last["error"]["code"], last["error"]["type"]) == ("PREEMPTED", "server_error")
            assert (gate.desk.resumed, gate.desk.ended) == ([], [])
            assert [lost.reason for lost in gate.desk.cut] == [Reason.PREEMPTED]


class TestAgain:
    """A request whose client has seen nothing yet is served again, if the scheduler says so."""

    async def test_a_failure_is_served_under_the_next_lease(self) -> None:
        answers = [answer_of(500, {"error": {"message": "a bug"}}), answer_of(200, {"object": "list"})]

        async def runtime(_: httpx.Request) -> httpx.Response:
            return answers.pop(0)

        async with door(runtime) as gate:
            gate.desk.outcomes = [granted(), granted(2, Passage(attempt=2))]
            answer = await gate.http.post("/v1/embeddings", json=EMBED)
        assert answer.status_code == 200
        assert answer.headers["x-gpuledger-lease"] == "lease-2"
        assert answer.headers["x-gpuledger-attempt"] == "2"
        assert [json.loads(sent.content) for sent in gate.sent] == [EMBED, EMBED]
        assert [ending.unsent for ending in gate.desk.ended] == [True, False]

    async def test_a_fallback_is_told(self) -> None:
        async with door() as gate:
            gate.desk.outcomes = [granted(1, Passage(fallback_rank=1, fallback="EXTERNAL_GPU_PRESSURE"))]
            answer = await gate.http.post("/v1/embeddings", json=EMBED)
        assert answer.headers["x-gpuledger-rank"] == "1"
        assert answer.headers["x-gpuledger-fallback"] == "EXTERNAL_GPU_PRESSURE"

    async def test_what_did_not_happen_is_not_told(self) -> None:
        async with door() as gate:
            answer = await gate.http.post("/v1/embeddings", json=EMBED)
        assert answer.headers["x-gpuledger-rank"] == "0"
        told = {name for name in answer.headers if name.startswith("x-gpuledger-")}
        assert told == {f"x-gpuledger-{name}" for name in ("lease", "start", "queued-ms", "rank", "plan")}

    async def test_a_refusal_after_it_is_the_answer_and_counted_once(self) -> None:
        async def fail(_: httpx.Request) -> httpx.Response:
            return answer_of(500, {})

        async with door(fail) as gate:
            refusal = failed(Failure.INVALID_OUTPUT, "http_status_500", Passage(attempt=2, queue_place=3))
            gate.desk.outcomes = [granted(), refusal]
            answer = await gate.http.post("/v1/embeddings", json=EMBED)
            page = (await gate.http.get("/metrics")).text
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "INVALID_OUTPUT")
        assert (answer.headers["x-gpuledger-attempt"], answer.headers["x-gpuledger-queue-place"]) == ("2", "3")
        assert 'gpuledger_internal_errors_total{capability="emb@1",failure="INVALID_OUTPUT"} 1.0' in page
        assert 'gpuledger_requests_total{capability="emb@1",outcome="failed",priority="interactive"} 1.0' in page

    async def test_a_crash_is_told_by_whoever_watches_for_exits(self) -> None:
        """The connection breaks first; the exit, which comes a little later, knows more."""

        async def break_off(_: httpx.Request) -> httpx.Response:
            asyncio.get_running_loop().call_later(0.05, lose)
            raise httpx.RemoteProtocolError("closed")

        def lose() -> None:
            gate.desk.lose(Lost(None, Failure.RUNTIME_CRASH, "signal_9"))

        async with door(break_off) as gate:
            answer = await gate.http.post("/v1/embeddings", json=EMBED)
        assert answer.status_code == 503
        assert "signal_9" in answer.json()["error"]["message"]
        assert gate.desk.ended == []

    @pytest.mark.parametrize("error", [httpx.ConnectError("refused"), httpx.ReadError("reset")])
    async def test_a_connection_that_breaks_by_itself(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(attempt, "EXIT_NOTICE_SECONDS", 0.01)

        async def break_off(_: httpx.Request) -> httpx.Response:
            raise error

        async with door(break_off) as gate:
            gate.desk.outcomes = [granted(), failed(Failure.RUNTIME_CRASH, "connection_lost")]
            answer = await gate.http.post("/v1/embeddings", json=EMBED)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "RUNTIME_CRASH")
        (ending,) = gate.desk.ended
        assert (ending.failure, ending.detail, ending.unsent) == (Failure.RUNTIME_CRASH, "connection_lost", True)

    async def test_a_client_that_goes_while_it_waits_again_is_given_up(self) -> None:
        talk = Talk()
        async with visiting(talk) as (gate, visitor, visit):
            given_up = asyncio.Event()

            async def wait(_: Question) -> Outcome:
                try:
                    await asyncio.Event().wait()
                finally:
                    given_up.set()
                raise AssertionError

            await until(lambda: len(gate.sent) == 1)
            gate.desk.outcomes = [wait]
            gate.desk.lose(preempted())
            await until(lambda: gate.desk.resumed)
            visitor.gone.set()
            await visit
            assert given_up.is_set()
            assert visitor.messages == []


class TestMemory:
    """A 5xx that complains of memory is a GPU_OOM: the scheduler doubts the envelope then."""

    @pytest.mark.parametrize(
        "document",
        [
            {"error": {"message": "CUDA error: out of memory"}},
            {
                "error": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
                "error_type": "Backend",
            },
            {"object": "error", "message": "CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"},
            {"detail": "failed to allocate CUDA0 buffer of size 1073741824"},
        ],
    )
    async def test_it_is_known_by_its_words(self, document: object) -> None:
        async def fail(_: httpx.Request) -> httpx.Response:
            return answer_of(500, document)

        async with door(fail) as gate:
            gate.desk.outcomes = [granted(), failed(Failure.GPU_OOM, "answered_out_of_memory")]
            answer = await gate.http.post("/v1/embeddings", json=EMBED)
        assert answer.json()["error"]["code"] == "GPU_OOM"
        (ending,) = gate.desk.ended
        assert (ending.failure, ending.detail, ending.unsent) == (Failure.GPU_OOM, "answered_out_of_memory", True)

    async def test_no_client_can_make_an_envelope_doubted(self) -> None:
        """By writing the words into a prompt that a runtime repeats in its complaint."""

        async def repeat(request: httpx.Request) -> httpx.Response:
            return answer_of(500, {"error": {"message": f"cannot embed {json.loads(request.content)['input']}"}})

        async with door(repeat) as gate:
            gate.desk.outcomes = [granted(), failed(Failure.INVALID_OUTPUT, "http_status_500")]
            await gate.http.post("/v1/embeddings", json={**EMBED, "input": "CUDA out of memory"})
        (ending,) = gate.desk.ended
        assert ending.failure is Failure.INVALID_OUTPUT

    async def test_a_4xx_is_the_clients_whatever_it_says(self) -> None:
        async def refuse(_: httpx.Request) -> httpx.Response:
            return answer_of(400, {"error": {"message": "the image would be out of memory"}})

        async with door(refuse) as gate:
            answer = await gate.http.post("/v1/embeddings", json=EMBED)
        assert answer.status_code == 400
        assert gate.desk.ended[0].failure is None


def failed(failure: Failure, detail: str, passage: Passage = STRAIGHT) -> Refused:
    return Refused("req-1", None, failure, detail, None, passage)


class TestEventStream:
    def test_it_is_the_same_however_it_is_cut(self) -> None:
        whole = event("a") + b": a comment\n\n" + event("b", usage={"prompt_tokens": 1}) + b"data: [DONE]\n\n"
        expected = fed(whole, len(whole))
        assert b"file.gguf" not in expected
        for size in range(1, 60):
            assert fed(whole, size) == expected

    def test_what_is_no_event_passes_as_it_is(self) -> None:
        odd = b"data: not json\r\ndata:{}\r\nid: 1\r\n\r\nevent: x\n\nrest without an end"
        assert fed(odd, 7) == odd

    def test_a_line_without_end_is_not_kept(self) -> None:
        stream = EventStream("chat@1", Usage())
        endless = b"data: " + b"x" * (2 * 2**20)
        assert stream.feed(endless) == endless

    def test_strange_usage_is_no_usage(self) -> None:
        usage = Usage()
        for odd in ('{"usage": null}', '{"usage": {"prompt_tokens": -1}}', '{"usage": {"prompt_tokens": "7"}}', "[1]"):
            named(odd.encode(), "chat@1", usage)
        assert usage == Usage()


def fed(whole: bytes, size: int) -> bytes:
    stream = EventStream("chat@1", Usage())
    pieces = [stream.feed(whole[start : start + size]) for start in range(0, len(whole), size)]
    return b"".join([*pieces, stream.finish()])
