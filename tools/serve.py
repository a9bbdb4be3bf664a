"""The running server: a scheduler, the gateway in front of it, and the order in which they come and go.

Start: the door opens early and says what is missing; the configuration becomes events; what an earlier run left is
ended; the first sample is taken; missing envelopes are measured; then requests are admitted. Shutdown: no new work,
what runs may end for `drain_seconds`, the rest is cancelled, runtimes are stopped, residency and leases are zero in the
ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Generator
from dataclasses import dataclass
from typing import Final, Protocol

import httpx
import structlog
import uvicorn
from fastapi import FastAPI

from gpuledger.adapters.http.app import application
from gpuledger.adapters.http.auth import Operators
from gpuledger.adapters.http.gateway import Gateway, Settings
from gpuledger.adapters.http.metrics import Metrics
from gpuledger.adapters.http.operator import OperatorApi
from gpuledger.adapters.http.ports import Cause
from gpuledger.adapters.http.relay import http_client
from gpuledger.domain.world import World

from .bootstrap import Parts, clients_of, request_key, services_of, tokens_of
from .config import Config
from .envelopes import Unmeasured, places
from .operations_desk import OperationsDesk
from .running import Haste, PartEnded, Running

#: Request heads; bodies have a bound of their own.
MAX_HEAD_BYTES: Final = 32 * 1024
#: Connections beyond the requests that may be open: for health, metrics, and those that are told to come later.
SPARE_CONNECTIONS: Final = 256
#: After the drain, for the last connections.
HTTP_GRACE_SECONDS: Final = 5
#: An idle connection stays open for longer than OpenAI's client (5 s) keeps one, and than clients are told to wait: who
#: comes back on a connection that is being closed is answered by nobody.
KEEP_ALIVE_SECONDS: Final = 30

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Left:
    """How a server left. `thread_stuck`: a driver still holds the thread that asked it something."""

    in_order: bool
    thread_stuck: bool


class Announcer(Protocol):
    """Who tells people how the start goes."""

    def measuring(self, deployment_id: str, step: str) -> None: ...

    def ready(self, world: World, unmeasured: list[Unmeasured]) -> None: ...


class Server:
    """`run` is all of its life, on a socket that is bound already."""

    def __init__(self, config: Config, parts: Parts, announcer: Announcer) -> None:
        self._config = config
        self._ledger = parts.ledger
        self._announcer = announcer
        self._running = Running(config, parts)
        self._metrics = Metrics(self._running.desk)
        self._running.engine.measure(self._metrics)
        self._running.engine.subscribe(self._metrics)
        self._haste = Haste(asyncio.Event(), asyncio.Event())
        self._asked_to_stop = asyncio.Event()

    async def run(self, listener: socket.socket) -> Left:
        """Serve until a signal comes. Raises DocumentError, LedgerUnavailable, LedgerCorrupt, PartEnded."""
        http = http_client(self._config.document.upstream_timeout_seconds)
        server = _HttpServer(self._application(http), self._config.document.max_open_requests)
        serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        in_order = free = False
        try:
            in_order = await self._live(serving)
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
            server.should_exit = True
            await serving
            await http.aclose()
            free = await self._running.close()
        return Left(in_order, not free)

    async def _live(self, serving: asyncio.Task[None]) -> bool:
        """From the start to residency and leases at zero; a signal may come at any moment of it."""
        starting = asyncio.create_task(self._start(), name="start")
        asked = asyncio.create_task(self._asked_to_stop.wait())
        failed = asyncio.create_task(self._failed(serving))
        try:
            await asyncio.wait((asked, starting, failed), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                await starting
                await asyncio.wait((asked, failed), return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                await failed
            gate = self._running.desk.gate
            gate.cause, gate.detail = Cause.DRAINING, "shutting down"
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return await self._running.stop(self._config.document.drain_seconds, self._haste)
        finally:
            for task in (starting, asked, failed):
                task.cancel()
            await asyncio.gather(starting, asked, failed, return_exceptions=True)

    async def _start(self) -> None:
        running = self._running
        await running.start()
        unmeasured: list[Unmeasured] = []
        if self._config.document.profile == "at_start":
            running.desk.gate.detail = "measuring"
            _, unmeasured = await running.measuring.run(places(running.world), self._measuring)
            await running.sampler.take()
        running.desk.gate.cause, running.desk.gate.detail = None, "open"
        if self._config.document.profile == "when_idle":
            running.background(running.profiling.run(), "profiling")
        self._announcer.ready(running.world, unmeasured)

    def _measuring(self, deployment_id: str, step: str) -> None:
        self._running.desk.gate.detail = f"measuring {deployment_id}: {step}"
        self._announcer.measuring(deployment_id, step)

    async def _failed(self, serving: asyncio.Task[None]) -> None:
        ended = asyncio.create_task(self._running.part_ended())
        try:
            await asyncio.wait((serving, ended), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                ended.result()
            raise PartEnded("http")
        finally:
            ended.cancel()
            await asyncio.gather(ended, return_exceptions=True)

    def _on_signal(self) -> None:
        """The first drains, the second ends the drain, the third kills."""
        if not self._asked_to_stop.is_set():
            _log.info("shutting down")
            self._asked_to_stop.set()
        elif not self._haste.drain_over.is_set():
            self._haste.drain_over.set()
        else:
            self._haste.at_once.set()

    def _application(self, http: httpx.AsyncClient) -> FastAPI:
        document, running = self._config.document, self._running
        settings = Settings(
            capabilities=services_of(self._config),
            max_body_bytes=document.max_body_bytes,
            upload_folder=self._config.state_dir,
            key=request_key(self._config.state_dir),
        )
        tokens = tokens_of(self._config).current
        clients = clients_of(self._config, tokens)
        gateway = Gateway(running.desk, running.desk, clients, settings, http, self._metrics)
        operations = OperationsDesk(running.engine, self._ledger, running.desk.gate, self._config.ledger)
        operator = OperatorApi(operations, Operators(tokens), clients)
        return application(gateway, running.desk, self._metrics, operator, open_metrics=not self._config.remote)


class _HttpServer(uvicorn.Server):
    """uvicorn in a loop that is ours: signals are not its business."""

    def __init__(self, app: FastAPI, max_open_requests: int) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                limit_concurrency=max_open_requests + SPARE_CONNECTIONS,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=HTTP_GRACE_SECONDS,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """The socket of the door, bound before anything else begins. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
