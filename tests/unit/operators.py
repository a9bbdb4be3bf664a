"""The operator API in front of a scheduler that runs: its real desk and engine, on a made-up machine."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from gpuledger.adapters.http.app import application
from gpuledger.adapters.http.auth import Client, Clients, Operators
from gpuledger.adapters.http.gateway import Gateway, Settings
from gpuledger.adapters.http.metrics import Metrics
from gpuledger.adapters.http.operator import PREFIX, OperatorApi
from gpuledger.adapters.tokens import Scope, Token, TokenKind, digest_of
from gpuledger.domain.events import NewEvent
from gpuledger.domain.policy import Priority
from gpuledger.domain.ports import Batch
from gpuledger.tools.operations_desk import OperationsDesk
from tests.unit.shells import Shell, shell

CLIENT_TOKEN = "token-of-the-app"


def token_of(scope: Scope) -> str:
    """What an operator with this scope sends."""
    return f"token-to-{scope.value}"


@dataclass
class Control:
    """A scheduler that runs, and operators who may ask it. Each scope has an operator of its own, named `SCOPE-er`."""

    shell: Shell
    app: Any
    http: httpx.AsyncClient
    #: Of the monotonic clock that calls are counted by.
    clock: list[float] = field(default_factory=lambda: [0.0])

    async def get(self, path: str, token: str | None = None, **query: Any) -> httpx.Response:
        return await self.http.get(PREFIX + path, params=query, headers=bearer(token or token_of(Scope.OPERATE)))

    async def post(self, path: str, body: Any = None, token: str | None = None, **query: Any) -> httpx.Response:
        headers = bearer(token or token_of(Scope.OPERATE))
        return await self.http.post(PREFIX + path, json=body, params=query, headers=headers)

    async def put(self, path: str, body: Any, token: str | None = None) -> httpx.Response:
        return await self.http.put(PREFIX + path, json=body, headers=bearer(token or token_of(Scope.OPERATE)))

    def happens(self, stream: str, data: Any) -> None:
        """Somebody else writes this into the ledger. The engine sees it with its next commit, at the next sample."""
        versions = self.shell.ledger.stream_version(stream)
        self.shell.ledger.append(Batch((NewEvent(stream, data),), {stream: versions}), self.shell.running.engine.now())


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@asynccontextmanager
async def control(*deployments: Any, **options: Any) -> AsyncGenerator[Control]:
    async with shell(*deployments, **options) as running_shell, httpx.AsyncClient() as upstream:
        running = running_shell.running
        tokens = [_operator(number, scope) for number, scope in enumerate(Scope)]
        clients = Clients([Client("app", digest_of(CLIENT_TOKEN), Priority.INTERACTIVE, False, None)])
        metrics = Metrics(running.desk)
        gateway = Gateway(
            running.desk, running.desk, clients, Settings({}, 1000, Path("/nowhere"), b""), upstream, metrics
        )
        clock = [0.0]
        desk = OperationsDesk(running.engine, running_shell.ledger, running.desk.gate, Path("ledger.db"))
        api = OperatorApi(desk, Operators(lambda: tokens), clients, lambda: clock[0])
        app = application(gateway, running.desk, metrics, api, open_metrics=False)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            yield Control(running_shell, app, http, clock)


def _operator(number: int, scope: Scope) -> Token:
    name = f"{scope.value}-er"
    return Token(f"tok-0000000{number}", TokenKind.OPERATOR, name, scope, digest_of(token_of(scope)), 0, None)
