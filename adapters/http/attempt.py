"""One request to one resident: sent, its answer relayed, and ended upstream before anything else follows.

It ends in one of four ways: its answer is complete, the client goes away, the lease is lost, the runtime fails.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final, TypeAlias

import httpx
import orjson

from gpuledger.adapters.complaints import out_of_memory
from gpuledger.domain.failures import Failure
from gpuledger.domain.policy import Priority

from .answers import EventStream, Usage, complaint, for_clients, named
from .auth import Client
from .headers import of_granted
from .openai_errors import CLIENT_CLOSED, ApiError, failure_error, lost_error
from .payloads import Payload
from .ports import Ending, Granted, Operation

_logger = logging.getLogger(__name__)

Message: TypeAlias = MutableMapping[str, Any]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

#: Of an error only so much is looked at: a message.
MAX_COMPLAINT_BYTES: Final = 64 * 1024
#: What a runtime may answer at once. A batch of 2,048 embeddings of 4,096 floats is about 180 MB of text.
MAX_ANSWER_BYTES: Final = 512 * 1024 * 1024
#: The one status of an answer: nothing here is moved, made or left out.
_OK: Final = 200
#: A client that takes nothing for so long is taken for gone: the lease is not its alone to hold.
CLIENT_STALL_SECONDS: Final = 60.0
#: A crash closes the connection before the watch for exits has said how the process ended: so long its word is waited
#: for, since it knows more. A process that lives on has broken the connection itself.
EXIT_NOTICE_SECONDS: Final = 1.0
#: Answers that are about the gateway's own request: its key, its path, its framing.
NOT_FOR_CLIENTS: Final = frozenset({401, 403, 404, 405, 407, 411, 431})
#: Failures of the runtime that the next attempt may be spared. Who got no answer in time has waited long enough.
MAY_GO_BETTER: Final = frozenset({Failure.RUNTIME_CRASH, Failure.INVALID_OUTPUT, Failure.GPU_OOM})

#: Of the gateway, and of every runtime that does not say otherwise.
PATHS: Final[dict[Operation, str]] = {
    "embeddings": "/v1/embeddings",
    "chat": "/v1/chat/completions",
    "completion": "/v1/completions",
    "transcription": "/v1/audio/transcriptions",
    "rerank": "/v1/rerank",
}


@dataclass(frozen=True, slots=True)
class Work:
    """What a client asked for, ready to be sent."""

    client: Client
    capability: str
    operation: Operation
    payload: Payload
    stream: bool

    @property
    def priority(self) -> Priority:
        return self.client.priority


class Stop(Enum):
    """How an attempt ended."""

    COMPLETE = auto()
    GONE = auto()
    LOST = auto()
    FAILED = auto()


@dataclass(frozen=True, slots=True)
class _Whole:
    """An answer that is complete before any of it is sent."""

    status: int
    kind: str
    body: bytes


@dataclass(slots=True)
class _Progress:
    """How far an answer is."""

    started: bool = False
    status: int = 503
    sent_bytes: int = 0
    usage: Usage = field(default_factory=Usage)
    failure: Failure | None = None
    detail: str = ""
    whole: _Whole | None = None


class Attempt:
    """One request to one resident."""

    def __init__(self, http: httpx.AsyncClient, work: Work, granted: Granted, send: Send) -> None:
        self._http = http
        self._work = work
        self._granted = granted
        self._send = send
        self._progress = _Progress()
        self._began = time.monotonic()

    @property
    def started(self) -> bool:
        """Whether the client has seen any of the answer."""
        return self._progress.started

    async def run(self, gone: asyncio.Task[None]) -> Stop:
        """Until it is complete or has to stop; the upstream request is over when it returns."""
        forward = asyncio.create_task(self._forward(), name="forward")
        try:
            await asyncio.wait((forward, gone, self._granted.lost), return_when=asyncio.FIRST_COMPLETED)
            complete = forward.done()
        finally:
            forward.cancel()
            await asyncio.gather(forward, return_exceptions=True)
        error = forward.exception() if complete else None
        if complete and error is None:
            return Stop.COMPLETE
        if _is_lost_connection(error):
            await self._hear_of_exit(gone)
        if gone.done() or isinstance(error, _ClientWentAway):
            return Stop.GONE
        if self._granted.lost.done():
            return Stop.LOST
        assert error is not None
        self._progress.failure, self._progress.detail = _classified(error)
        return Stop.FAILED

    async def _hear_of_exit(self, gone: asyncio.Task[None]) -> None:
        waited_for = (gone, self._granted.lost)
        await asyncio.wait(waited_for, timeout=EXIT_NOTICE_SECONDS, return_when=asyncio.FIRST_COMPLETED)

    def ending(self, stop: Stop) -> Ending:
        """What the desk is told."""
        progress = self._progress
        gone = stop is Stop.GONE
        if stop is Stop.LOST:
            lost = self._granted.lost.result()
            progress.status, progress.failure, progress.detail = 503, lost.failure, lost.detail
        return Ending(
            status=CLIENT_CLOSED if gone else progress.status,
            served_ms=round((time.monotonic() - self._began) * 1000),
            response_bytes=progress.sent_bytes,
            prompt_tokens=progress.usage.prompt_tokens,
            completion_tokens=progress.usage.completion_tokens,
            failure=progress.failure,
            detail=progress.detail,
            client_gone=gone,
            unsent=stop is Stop.FAILED and not progress.started and progress.failure in MAY_GO_BETTER,
        )

    def error(self, stop: Stop) -> ApiError | None:
        """What the client is told; None where there is nothing to tell, or nobody."""
        request_id, capability = self._granted.request_id, self._work.capability
        match stop:
            case Stop.COMPLETE | Stop.GONE:
                return None
            case Stop.LOST:
                return lost_error(request_id, self._granted.lost.result(), capability)
            case Stop.FAILED:
                return failure_error(request_id, self._progress.failure, self._progress.detail, capability)

    async def deliver(self) -> None:
        """Send an answer that was taken whole: however slow its client is, it holds no lease meanwhile."""
        if (whole := self._progress.whole) is not None:
            with suppress(_ClientWentAway):
                await self._start(whole.status, whole.kind, len(whole.body))
                await self._put({"type": "http.response.body", "body": whole.body, "more_body": False})

    async def break_off(self, error: ApiError) -> None:
        """Say that it ends here: as an answer, or as the last event of a stream that has begun."""
        if self.started:
            with suppress(_ClientWentAway):
                await self._body(b"data: " + orjson.dumps(error.document()) + b"\n\n", more=False)
        else:
            await answer_error(error.telling(of_granted(self._granted)), self._send)

    # ---- upstream ------------------------------------------------------------------------------------------------

    async def _forward(self) -> None:
        endpoint, payload = self._granted.endpoint, self._work.payload
        headers = {
            "Authorization": f"Bearer {endpoint.api_key}",
            "Content-Type": payload.content_type,
            "Content-Length": str(payload.length_bytes),
            "Accept-Encoding": "identity",
            "Connection": "close",
        }
        operation = self._work.operation
        url = endpoint.base_url + endpoint.paths.get(operation, PATHS[operation])
        async with self._http.stream("POST", url, content=payload.content(), headers=headers) as answer:
            if answer.status_code >= 500:
                await self._relay_fault(answer)
                return
            if answer.status_code in NOT_FOR_CLIENTS:
                raise _unfit(answer)
            if answer.status_code >= 400:
                told = complaint(await _at_most(answer, MAX_COMPLAINT_BYTES))
                self._take_complaint(answer.status_code, told)
                return
            kind = _kind_of(answer)
            if self._work.stream and kind.startswith("text/event-stream"):
                await self._relay_events(answer, kind)
            else:
                await self._take_whole(answer, kind)

    async def _relay_fault(self, answer: httpx.Response) -> None:
        """A 5xx is the runtime's fault, unless it says in its own words that the request is to blame."""
        told = complaint(await _at_most(answer, MAX_COMPLAINT_BYTES))
        if any(words in told for words in self._granted.endpoint.blames_request):
            self._take_complaint(400, told)
            return
        # Where the client wrote such words itself, the runtime may only repeat them; and an OOM has consequences.
        if out_of_memory(told.encode("utf-8", "replace")) and not out_of_memory(self._work.payload.text()):
            raise UpstreamError(Failure.GPU_OOM, "answered_out_of_memory")
        raise _unfit(answer)

    def _take_complaint(self, status: int, told: str) -> None:
        """The request is to blame, in the words of the runtime where they say something to who sent it."""
        message = for_clients(told, self._work.capability)
        error = ApiError(status, "invalid_request", message, request_id=self._granted.request_id)
        self._take(status, "application/json", orjson.dumps(error.document()))

    def _take(self, status: int, kind: str, body: bytes) -> None:
        self._progress.status, self._progress.sent_bytes = status, len(body)
        self._progress.whole = _Whole(status, kind, body)

    async def _relay_events(self, answer: httpx.Response, kind: str) -> None:
        """The client's answer begins with the first event: until then it can still be refused, or served elsewhere."""
        events = EventStream(self._work.capability, self._progress.usage)
        async for chunk in answer.aiter_raw():
            if ready := events.feed(chunk):
                if not self.started:
                    await self._start(answer.status_code, kind, None)
                await self._body(ready, more=True)
        if not self.started:
            await self._start(answer.status_code, kind, None)
        await self._body(events.finish(), more=False)

    async def _take_whole(self, answer: httpx.Response, kind: str) -> None:
        chunks: list[bytes] = []
        length = 0
        async for chunk in answer.aiter_raw():
            length += len(chunk)
            if length > MAX_ANSWER_BYTES:
                raise _unfit(answer)
            chunks.append(chunk)
        body = b"".join(chunks)
        if kind.startswith("application/json"):
            body = named(body, self._work.capability, self._progress.usage)
        self._take(answer.status_code, kind, body)

    # ---- downstream ----------------------------------------------------------------------------------------------

    async def _start(self, status: int, kind: str, length: int | None) -> None:
        headers = {"content-type": kind, **of_granted(self._granted)}
        if length is None:
            headers["cache-control"] = "no-cache"
        else:
            headers["content-length"] = str(length)
        self._progress.started = True
        self._progress.status = status
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._put({"type": "http.response.start", "status": status, "headers": raw})

    async def _body(self, body: bytes, *, more: bool) -> None:
        """Waits while the client does not take what was sent before."""
        self._progress.sent_bytes += len(body)
        await self._put({"type": "http.response.body", "body": body, "more_body": more})

    async def _put(self, message: Message) -> None:
        try:
            async with asyncio.timeout(CLIENT_STALL_SECONDS):
                await self._send(message)
        except (OSError, TimeoutError) as error:
            raise _ClientWentAway from error


async def _at_most(answer: httpx.Response, limit_bytes: int) -> bytes:
    """The first bytes of an answer."""
    body = b""
    async for chunk in answer.aiter_raw():
        body += chunk
        if len(body) >= limit_bytes:
            break
    return body[:limit_bytes]


class _ClientWentAway(Exception):
    """Nobody takes the answer any more."""


class UpstreamError(Exception):
    """The runtime answered what cannot be passed on. `failure` and `detail` are for the ledger."""

    def __init__(self, failure: Failure, detail: str) -> None:
        super().__init__(detail)
        self.failure = failure
        self.detail = detail


def _kind_of(answer: httpx.Response) -> str:
    """The type of an answer that can be passed on: whole, as it is, and not of another place. Raises UpstreamError."""
    if answer.status_code != _OK:
        raise _unfit(answer)
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise UpstreamError(Failure.INVALID_OUTPUT, "content_encoding")  # nobody asked for it, and nobody would be told
    kind: str = answer.headers.get("content-type", "application/json")
    return kind if kind.isascii() else "application/octet-stream"


def _unfit(answer: httpx.Response) -> UpstreamError:
    return UpstreamError(Failure.INVALID_OUTPUT, f"http_status_{answer.status_code}")


def _is_lost_connection(error: BaseException | None) -> bool:
    return isinstance(error, httpx.TransportError) and not isinstance(error, httpx.TimeoutException)


def _classified(error: BaseException) -> tuple[Failure, str]:
    """Class and detail, for the ledger."""
    match error:
        case UpstreamError():
            return error.failure, error.detail
        case httpx.TimeoutException():
            return Failure.TIMEOUT, "no_answer_in_time"
        case _ if _is_lost_connection(error):
            return Failure.RUNTIME_CRASH, "connection_lost"
        case _:
            _logger.error("a request could not be relayed", exc_info=error)
            return Failure.CAPABILITY_UNAVAILABLE, "internal_error"


async def answer_error(error: ApiError, send: Send) -> None:
    """A whole answer that is an error."""
    response = error.response()
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": False})
