"""One order carried out over HTTP, and what its client saw: nothing is judged here."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Final

import httpx

from .scene import QUEUE_SECONDS, UPSTREAM_SECONDS
from .traffic import Order

#: The queue, two attempts, loads for both, and a machine that is busy: who has no answer by then gets none.
ANSWER_SECONDS: Final = 3.0 * (QUEUE_SECONDS + 2 * UPSTREAM_SECONDS)
#: Closing with this sends a reset in place of an orderly end (socket(7), SO_LINGER).
_RESET: Final = struct.pack("ii", 1, 0)
_DIMENSIONS: Final = {"search@1": 384, "docs@1": 384}


@dataclass(slots=True)
class Answer:
    """What became of an order. Exactly one of `gone`, `fault`, `error` and `whole` says how it ended.

    `gone`: the client went away, as it was told to. `fault`: the connection ended in some other way than HTTP's.
    `error`: the document of an error, as an answer or as the last event of a stream. `whole`: a good answer.
    """

    order: Order
    begin: float
    end: float = 0.0
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict[str, str])
    gone: bool = False
    fault: str | None = None
    error: dict[str, Any] | None = None
    whole: bool = False

    @property
    def code(self) -> str | None:
        return None if self.error is None else str(self.error.get("code"))

    @property
    def request_id(self) -> str | None:
        return self.headers.get("x-request-id")


def connections() -> httpx.AsyncClient:
    """For all orders; each gets a connection of its own: one that died with its scheduler must not meet the next."""
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.AsyncClient(trust_env=False, timeout=ANSWER_SECONDS, limits=limits)


async def ask(http: httpx.AsyncClient, base_url: str, order: Order) -> Answer:
    """Carry out one order; whatever happens is in the answer."""
    answer = Answer(order, time.monotonic())
    try:
        if order.resets_after is not None:
            await _ask_and_reset(base_url, order, answer, order.resets_after)
        else:
            await _ask_in_time(http, base_url, order, answer)
    except (httpx.TransportError, OSError, ValueError) as error:
        answer.fault = f"{type(error).__name__}: {error}"
    answer.end = time.monotonic()
    return answer


async def _ask_in_time(http: httpx.AsyncClient, base_url: str, order: Order, answer: Answer) -> None:
    try:
        async with asyncio.timeout(order.leaves_after if order.leaves_after is not None else ANSWER_SECONDS):
            await _ask_by_http(http, base_url, order, answer)
    except TimeoutError:
        if order.leaves_after is not None:
            answer.gone = True
        else:
            answer.fault = f"no answer in {ANSWER_SECONDS:.0f} s"


async def _ask_by_http(http: httpx.AsyncClient, base_url: str, order: Order, answer: Answer) -> None:
    content = json.dumps(order.body).encode()
    async with http.stream("POST", f"{base_url}{order.path}", content=content, headers=order.headers) as response:
        answer.status = response.status_code
        answer.headers = dict(response.headers)
        if response.status_code == 200 and order.stream:
            await _follow(response, answer)
        else:
            _read(await response.aread(), order, answer)


async def _follow(response: httpx.Response, answer: Answer) -> None:
    """A stream, to its last event."""
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            answer.whole = True
        elif line.startswith("data: "):
            document = json.loads(line.removeprefix("data: "))
            if "error" in document:
                answer.error = document["error"]
    if answer.whole and answer.error is not None:
        answer.fault = "a stream ended with an error and with [DONE]"
    elif not answer.whole and answer.error is None:
        answer.fault = "a stream ended without [DONE] and without an error"


def _read(body: bytes, order: Order, answer: Answer) -> None:
    """A whole answer: what was asked for, or an error in OpenAI's shape."""
    try:
        document = json.loads(body)
        if answer.status == 200:
            answer.whole = _is_good(document, order)
            answer.fault = None if answer.whole else "a 200 that is no answer to the question"
        elif isinstance(document["error"]["code"], str) and isinstance(document["error"]["message"], str):
            answer.error = document["error"]
        else:
            answer.fault = f"an error without a code: {body[:200]!r}"
    except (ValueError, KeyError, TypeError, IndexError) as error:
        answer.fault = f"{answer.status} with a body of no known shape ({error!r}): {body[:200]!r}"


def _is_good(document: Any, order: Order) -> bool:
    if document["model"] != order.offer.capability:
        return False
    if order.offer.task == "chat":
        return bool(document["choices"][0]["message"]["content"])
    asked = order.body["input"]
    vectors = [one["embedding"] for one in document["data"]]
    dimensions = _DIMENSIONS.get(order.offer.capability, len(vectors[0]))
    return len(vectors) == (1 if isinstance(asked, str) else len(asked)) and all(
        len(vector) == dimensions and len(set(vector)) > 1 and all(isfinite(value) for value in vector)
        for vector in vectors
    )


async def _ask_and_reset(base_url: str, order: Order, answer: Answer, after: float) -> None:
    """Send it, wait a while, and reset the connection: also in the midst of the request, when it is to be soon."""
    host, _, port = base_url.removeprefix("http://").rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"".join(_raw(order, host)))
    await asyncio.sleep(after)
    raw: socket.socket | None = writer.get_extra_info("socket")
    if raw is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
    answer.gone = True


def _raw(order: Order, host: str) -> Iterator[bytes]:
    content = json.dumps(order.body).encode()
    # Every second one stops in the midst of its body: the server waits for the rest, and gets a reset.
    sent = content if order.number % 2 else content[: len(content) // 2]
    headers = {"Host": host, **order.headers, "Content-Length": str(len(content))}
    yield f"POST {order.path} HTTP/1.1\r\n".encode()
    yield "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()
    yield b"\r\n" + sent
