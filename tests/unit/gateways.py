"""A gateway in front of a made-up desk and a made-up runtime, driven as ASGI."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from gpuledger.adapters.http.app import application
from gpuledger.adapters.http.auth import Client, Clients
from gpuledger.adapters.http.gateway import Gateway, Service, Settings
from gpuledger.adapters.http.metrics import Metrics
from gpuledger.adapters.http.ports import (
    STRAIGHT,
    Condition,
    Ending,
    Granted,
    Lost,
    Outcome,
    Passage,
    PlanFacts,
    Question,
    ServerFacts,
)
from gpuledger.domain.policy import Priority
from gpuledger.domain.ports import Endpoint
from gpuledger.domain.world import World

MAX_BODY_BYTES = 100_000
MAX_INPUTS = 4
MAX_IMAGES = 2
MAX_AUDIO_BYTES = 3 * 1024 * 1024
RUNTIME = Endpoint("http://runtime", "key", ("is too large to process",))
TOKEN = "token-of-the-app"
SERVICES = {
    "emb@1": Service(frozenset({"embeddings"}), MAX_INPUTS),
    "chat@1": Service(frozenset({"chat", "completion"}), MAX_INPUTS),
    "eyes@1": Service(frozenset({"chat", "completion"}), MAX_INPUTS, max_images=MAX_IMAGES),
    "ears@1": Service(frozenset({"transcription"}), MAX_INPUTS, max_audio_bytes=MAX_AUDIO_BYTES),
    "order@1": Service(frozenset({"rerank"}), MAX_INPUTS),
}
NOW = 1_796_000_000_000_000


class FakeDesk:
    """Answers what it is told to, and remembers what it was asked. It is its own Insight."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome | Callable[[Question], Awaitable[Outcome]]] = []
        self.asked: list[Question] = []
        self.ended: list[Ending] = []
        self.cut: list[Lost] = []
        self.resumed: list[str] = []
        self.world = World()
        self._granted: Granted | None = None

    async def submit(self, question: Question) -> Outcome:
        self.asked.append(question)
        return await self._next(question)

    async def resume(self, request_id: str, again: asyncio.Future[Outcome]) -> Outcome:
        self.resumed.append(request_id)
        return await self._next(self.asked[-1])

    async def _next(self, question: Question) -> Outcome:
        outcome = self.outcomes.pop(0) if self.outcomes else granted()
        if isinstance(outcome, Granted):
            self._granted = outcome
        return await outcome(question) if callable(outcome) else outcome

    def lose(self, lost: Lost) -> None:
        """The lease that was granted last is lost."""
        assert self._granted is not None
        self._granted.lost.set_result(lost)

    def end(self, request_id: str, ending: Ending) -> asyncio.Future[Outcome] | None:
        self.ended.append(ending)
        return asyncio.get_running_loop().create_future() if ending.unsent else None

    def cut_off(self, request_id: str, lost: Lost) -> None:
        self.cut.append(lost)

    def conditions(self) -> tuple[Condition, ...]:
        return (Condition("ledger", True, "writable"),)

    def facts(self) -> ServerFacts:
        return ServerFacts(NOW, 0, True)


def granted(number: int = 1, passage: Passage = STRAIGHT) -> Granted:
    plan = PlanFacts("ab" * 32, {"verdict": "ADMIT"})
    lost: asyncio.Future[Lost] = asyncio.get_running_loop().create_future()
    return Granted(
        "req-1",
        f"lease-{number}",
        RUNTIME,
        "warm",
        3,
        plan,
        lost,
        passage,
    )


class Upstream(httpx.AsyncByteStream):
    """The body of a runtime's answer, piece by piece; closed when nobody wants more of it."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._pieces:
            yield piece

    async def aclose(self) -> None:
        self.closed = True


@dataclass
class Door:
    """A gateway, with a client to ask it."""

    desk: FakeDesk
    http: httpx.AsyncClient
    app: Any
    #: Where it keeps uploads.
    folder: Path
    sent: list[httpx.Request] = field(default_factory=list[httpx.Request])


Runtime = Callable[[httpx.Request], Awaitable[httpx.Response]]


def answer_of(status: int, document: object) -> httpx.Response:
    """A whole answer of a runtime."""
    return content_of(status, "application/json", json.dumps(document).encode())


def content_of(status: int, kind: str, content: bytes) -> httpx.Response:
    """One of any kind."""

    async def pieces() -> AsyncIterator[bytes]:
        yield content

    return httpx.Response(status, headers={"content-type": kind}, stream=Upstream(pieces()))


async def echo(request: httpx.Request) -> httpx.Response:
    """A runtime that answers at once."""
    return answer_of(200, {"object": "list", "model": "a-file-name.gguf", "usage": {"prompt_tokens": 7}})


@asynccontextmanager
async def door(
    runtime: Runtime = echo, *, open_metrics: bool = True, services: Mapping[str, Service] = SERVICES
) -> AsyncGenerator[Door]:
    desk = FakeDesk()
    sent: list[httpx.Request] = []

    async def handle(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return await runtime(request)

    clients = Clients([Client("app", sha256(TOKEN.encode()).hexdigest(), Priority.INTERACTIVE, False, None)])
    metrics = Metrics(desk)
    async with httpx.AsyncClient(transport=httpx.MockTransport(handle)) as upstream:
        with TemporaryDirectory() as folder:
            settings = Settings(services, MAX_BODY_BYTES, Path(folder), b"k" * 32)
            gateway = Gateway(desk, desk, clients, settings, upstream, metrics)
            app = application(gateway, desk, metrics, open_metrics=open_metrics)
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            headers = {"Authorization": f"Bearer {TOKEN}"}
            async with httpx.AsyncClient(transport=transport, base_url="http://door", headers=headers) as http:
                yield Door(desk, http, app, Path(folder), sent)


Message = MutableMapping[str, Any]


class Visitor:
    """One client on a raw ASGI connection: it can read slowly, and go away."""

    def __init__(self, body: bytes, path: str = "/v1/chat/completions") -> None:
        self.messages: list[Message] = []
        self.gone = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        #: Whether more of the body is to come than there ever will be.
        self.breaks_off = False
        self._body: list[bytes] = [body]
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "server": ("door", 80),
            "client": ("127.0.0.1", 1),
            "headers": [(b"authorization", f"Bearer {TOKEN}".encode()), (b"content-type", b"application/json")],
        }

    async def visit(self, app: Any) -> None:
        await app(self._scope, self._receive, self._send)

    async def _receive(self) -> Message:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": self.breaks_off}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.reads.wait()
        self.messages.append(message)

    @property
    def status(self) -> int | None:
        return self.messages[0]["status"] if self.messages else None

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.messages).decode()

    @property
    def complete(self) -> bool:
        return bool(self.messages) and self.messages[-1].get("more_body") is False
