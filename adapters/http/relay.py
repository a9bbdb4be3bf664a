"""From a grant to its end: one attempt after the other, until its client has an answer, or is told why it has none.

However an attempt ends, somebody stops: the upstream request is over, so that no runtime works for nobody, and the
desk is told exactly once. When the lease is lost or the runtime fails and the client has seen nothing yet, its request
may be served again: it waits for what the scheduler makes of it, and the next attempt begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Protocol, TypeAlias

import httpx
from fastapi import Response

from .attempt import Attempt, Message, Send, Stop, Work, answer_error
from .auth import Client
from .openai_errors import ApiError, refusal_error, unavailable_error
from .ports import Desk, Ending, Granted, Outcome, Refused, Repeated, Unavailable

Receive: TypeAlias = Callable[[], Awaitable[Message]]

CONNECT_TIMEOUT_SECONDS: Final = 5.0


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


class Tally(Protocol):
    """Told how each request ended: those that were served, and the others."""

    def ended(self, work: Work, granted: Granted, ending: Ending) -> None: ...

    def answered(self, client: Client | None, capability: str | None, outcome: Outcome | ApiError) -> None: ...


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
            self._work.payload.close()

    async def _serve(self, granted: Granted, send: Send) -> Granted | None:
        """Serve under one lease. Another one is returned when it is served again."""
        attempt = Attempt(self._http, self._work, granted, send)
        stop = Stop.GONE
        try:
            stop = await attempt.run(self._presence.gone)
        finally:
            again = self._tell(granted, attempt, stop)
        if again is not None:
            return await self._wait_again(granted.request_id, again, send)
        if stop is Stop.COMPLETE:
            await attempt.deliver()
        elif (error := attempt.error(stop)) is not None:
            await attempt.break_off(error)
        return None

    def _tell(self, granted: Granted, attempt: Attempt, stop: Stop) -> asyncio.Future[Outcome] | None:
        """Tell the desk how an attempt went. What becomes of its request, when that was not its end."""
        ending = attempt.ending(stop)
        if stop is Stop.LOST:
            lost = granted.lost.result()
            if lost.again is not None and not attempt.started:
                return lost.again
            if lost.again is not None:
                self._desk.cut_off(granted.request_id, lost)
        elif (again := self._desk.end(granted.request_id, ending)) is not None:
            return again
        self._tally.ended(self._work, granted, ending)
        return None

    async def _wait_again(self, request_id: str, again: asyncio.Future[Outcome], send: Send) -> Granted | None:
        capability = self._work.capability
        outcome = await self._presence.or_gone(self._desk.resume(request_id, again))
        match outcome:
            case Granted():
                return outcome
            case Refused():
                error = refusal_error(outcome, capability, None)
            case Unavailable():
                error = unavailable_error(outcome.request_id, outcome.cause)
            case Repeated() | None:
                return None  # the client has gone; one that was granted is never told that it is a repetition
        self._tally.answered(self._work.client, capability, outcome)
        await answer_error(error, send)
        return None
