"""From a grant to its end: the request is sent to the resident, its answer to the client, and somebody always stops.

An attempt ends in one of four ways: its answer is complete, the client goes away, the lease is lost, the runtime fails.
In each the upstream request is ended first, so that no runtime works for nobody, and the desk is told exactly once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final, Protocol, TypeAlias

import httpx
import orjson
from fastapi import Response

from gpuledger.domain.failures import Failure
from gpuledger.domain.policy import Priority

from .answers import EventStream, Usage, complaint, named
from .openai_errors import CLIENT_CLOSED, ApiError, failure_error, lost_error, refusal_error, unavailable_error
from .ports import Desk, Ending, Granted, Operation, Outcome, Refused, Repeated, Unavailable

_logger = logging.getLogger(__name__)

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

#: Of an error only so much is looked at: a message.
MAX_COMPLAINT_BYTES: Final = 64 * 1024
#: What a runtime may answer at once. A batch of 2,048 embeddings of 4,096 floats is about 180 MB of text.
MAX_ANSWER_BYTES: Final = 512 * 1024 * 1024
CONNECT_TIMEOUT_SECONDS: Final = 5.0
#: A client that takes nothing for so long is taken for gone: the lease is not its alone to hold.
CLIENT_STALL_SECONDS: Final = 60.0
#: Answers that are about the gateway's own request: its key, its path, its framing.
NOT_FOR_CLIENTS: Final = frozenset({401, 403, 404, 405, 407, 411, 431})

#: Of the gateway, and of every runtime.
PATHS: Final[dict[Operation, str]] = {
    "embeddings": "/v1/embeddings",
    "chat": "/v1/chat/completions",
    "completion": "/v1/completions",
}


def http_client(timeout_seconds: float) -> httpx.AsyncClient:
    """To runtimes on the loopback: no proxy, no redirect, and a connection for each request.

    A connection that is kept may be closed by the runtime at the moment it is used, and nobody could tell that from a
    crash; a new one costs a tenth of a millisecond. `timeout_seconds` bounds every silence.
    """
    return httpx.AsyncClient(
        trust_env=False,
        follow_redirects=False,
        verify=False,  # noqa: S501 - the loopback, without TLS: reading all authorities of the world takes 0.1 s
        timeout=httpx.Timeout(timeout_seconds, connect=CONNECT_TIMEOUT_SECONDS),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
    )


@dataclass(frozen=True, slots=True)
class Work:
    """What a client asked for, ready to be sent."""

    capability: str
    priority: Priority
    operation: Operation
    body: bytes
    stream: bool


class Tally(Protocol):
    """Told how each request that was granted ended."""

    def ended(self, work: Work, granted: Granted, ending: Ending) -> None: ...


class Presence:
    """Whether the client is still there, from the moment its body was read."""

    def __init__(self, receive: Receive) -> None:
        self.gone = asyncio.create_task(self._wait(receive), name="client-presence")

    async def or_gone(self, work: Coroutine[Any, Any, Outcome]) -> Outcome | None:
        """The result of `work`; None when the client went away first, and then `work` was cancelled."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait((task, self.gone), return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def forget(self) -> None:
        self.gone.cancel()

    @staticmethod
    async def _wait(receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass  # an empty rest of the body


class Served(Response):
    """The answer to a granted request, as an ASGI application."""

    def __init__(
        self, desk: Desk, http: httpx.AsyncClient, work: Work, granted: Granted, presence: Presence, tally: Tally
    ) -> None:
        super().__init__()
        self._desk = desk
        self._http = http
        self._work = work
        self._granted = granted
        self._presence = presence
        self._tally = tally

    async def __call__(self, _scope: Message, _receive: Receive, send: Send) -> None:
        """Does not return before the request has ended at the desk."""
        granted: Granted | None = self._granted
        try:
            while granted is not None:
                granted = await self._serve(granted, send)
        finally:
            self._presence.forget()

    async def _serve(self, granted: Granted, send: Send) -> Granted | None:
        """Serve under one lease. Another one is returned when it was preempted before anything was sent."""
        attempt = Attempt(self._http, self._work, granted, send)
        stop = Stop.GONE
        try:
            stop = await attempt.run(self._presence.gone)
        finally:
            again = granted.lost.result().again if stop is Stop.LOST and not attempt.started else None
            if again is None:
                ending = attempt.ending(stop)
                self._desk.end(granted.request_id, ending)
                self._tally.ended(self._work, granted, ending)
        if again is not None:
            return await self._wait_again(granted.request_id, again, send)
        if stop is Stop.COMPLETE:
            await attempt.deliver()
        elif (error := attempt.error(stop)) is not None:
            await attempt.break_off(error)
        return None

    async def _wait_again(self, request_id: str, again: asyncio.Future[Outcome], send: Send) -> Granted | None:
        outcome = await self._presence.or_gone(self._desk.resume(request_id, again))
        match outcome:
            case Granted():
                return outcome
            case Refused():
                await answer_error(refusal_error(outcome, self._work.capability, None), send)
            case Unavailable():
                await answer_error(unavailable_error(outcome.request_id, outcome.cause), send)
            case Repeated() | None:
                pass  # the client has gone; a request that was granted is never told that it is a repetition
        return None


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
        if gone.done() or isinstance(error, _ClientWentAway):
            return Stop.GONE
        if self._granted.lost.done():
            return Stop.LOST
        assert error is not None
        self._progress.failure, self._progress.detail = _classified(error)
        return Stop.FAILED

    def ending(self, stop: Stop) -> Ending:
        """What the ledger is told."""
        progress = self._progress
        gone = stop in (Stop.GONE, Stop.LOST)
        return Ending(
            status=CLIENT_CLOSED if gone else progress.status,
            served_ms=round((time.monotonic() - self._began) * 1000),
            response_bytes=progress.sent_bytes,
            prompt_tokens=progress.usage.prompt_tokens,
            completion_tokens=progress.usage.completion_tokens,
            failure=progress.failure,
            detail=progress.detail,
            client_gone=gone,
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
            await answer_error(error, self._send)

    # ---- upstream ------------------------------------------------------------------------------------------------

    async def _forward(self) -> None:
        endpoint = self._granted.endpoint
        headers = {
            "Authorization": f"Bearer {endpoint.api_key}",
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
            "Connection": "close",
        }
        url = endpoint.base_url + PATHS[self._work.operation]
        async with self._http.stream("POST", url, content=self._work.body, headers=headers) as answer:
            if answer.status_code >= 500:
                await self._relay_fault(answer)
                return
            if answer.status_code in NOT_FOR_CLIENTS:
                raise UpstreamError(answer.status_code)
            kind = answer.headers.get("content-type", "application/json")
            if self._work.stream and kind.startswith("text/event-stream"):
                await self._relay_events(answer, kind)
            else:
                await self._take_whole(answer, kind)

    async def _relay_fault(self, answer: httpx.Response) -> None:
        """A 5xx is the runtime's fault, unless it says in its own words that the request is to blame."""
        body = await _at_most(answer, MAX_COMPLAINT_BYTES)
        told = complaint(body)
        if not any(words in told for words in self._granted.endpoint.blames_request):
            raise UpstreamError(answer.status_code)
        self._take_complaint(400, told)

    def _take_complaint(self, status: int, told: str) -> None:
        """The request is to blame, in the words of the runtime."""
        error = ApiError(status, "invalid_request", told, request_id=self._granted.request_id)
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
                raise UpstreamError(answer.status_code)
            chunks.append(chunk)
        body = b"".join(chunks)
        if answer.status_code >= 400:
            self._take_complaint(answer.status_code, complaint(body))
        else:
            self._take(answer.status_code, kind, named(body, self._work.capability, self._progress.usage))

    # ---- downstream ----------------------------------------------------------------------------------------------

    async def _start(self, status: int, kind: str, length: int | None) -> None:
        granted = self._granted
        headers = {
            "content-type": kind,
            "x-request-id": granted.request_id,
            "x-gpuledger-lease": granted.lease_id,
            "x-gpuledger-start": granted.start,
            "x-gpuledger-queued-ms": str(granted.queued_ms),
        }
        if granted.plan is not None:
            headers["x-gpuledger-plan"] = granted.plan.fingerprint
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
    """The runtime answered what cannot be passed on."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


def _classified(error: BaseException) -> tuple[Failure, str]:
    """Class and detail, for the ledger."""
    match error:
        case UpstreamError():
            return Failure.INVALID_OUTPUT, f"http_status_{error.status}"
        case httpx.TimeoutException():
            return Failure.TIMEOUT, "no_answer_in_time"
        case httpx.TransportError():
            return Failure.RUNTIME_CRASH, "connection_lost"
        case _:
            _logger.error("a request could not be relayed", exc_info=error)
            return Failure.CAPABILITY_UNAVAILABLE, "internal_error"


async def answer_error(error: ApiError, send: Send) -> None:
    """A whole answer that is an error."""
    response = error.response()
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": False})
