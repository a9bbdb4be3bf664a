"""A server on which reported cases are driven side by side, and its ledger as it is written."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, closing
from typing import Final, TypeVar

import httpx

from gpuledger.adapters.ledger.sqlite import SqliteLedger
from gpuledger.domain.events import PlanDecided, Recorded, RequestReceived
from gpuledger.domain.world import World, fold
from tests.integration.gpu_stand_in import GpuStandIn
from tests.integration.reported_live import OPERATOR, Document, Live
from tests.integration.serving import PATIENCE_SECONDS, Serving

HOST: Final = "host:local"
INTERVAL_SECONDS: Final = 0.05
#: Cases at a time: what they hold of this machine's memory is bounded by it.
AT_A_TIME: Final = 8
#: Times that the planner computes from are this far behind before one is said to be over.
SURELY_SECONDS: Final = 0.3

_T = TypeVar("_T")


class Stage:
    """`world` is that of the ledger as it was read last."""

    def __init__(self, server: Serving, gpus: GpuStandIn, http: httpx.AsyncClient, operator_token: str) -> None:
        self.server = server
        self.gpus = gpus
        self.http = http
        self.world = World()
        #: By the capability that was asked for, in the order of the ledger.
        self.plans: dict[str, list[PlanDecided]] = defaultdict(list)
        self._capabilities: dict[str, str] = {}
        self._operator_token = operator_token
        self._news = asyncio.Condition()

    async def follow(self) -> None:
        """Read the ledger beside the server, until cancelled."""
        with closing(SqliteLedger(self.server.ledger, read_only=True)) as ledger:
            while True:
                while page := ledger.read(self.world.seq):
                    self._take(page)
                async with self._news:
                    self._news.notify_all()
                await asyncio.sleep(INTERVAL_SECONDS)

    def _take(self, page: tuple[Recorded, ...]) -> None:
        self.world = fold(self.world, page)
        for event in page:
            match event.data:
                case RequestReceived(request_id=request_id, capability=capability):
                    self._capabilities[request_id] = capability
                case PlanDecided() as plan:
                    self.plans[self._capabilities[plan.request_id]].append(plan)
                case _:
                    pass

    async def until(self, holds: Callable[[World], _T | None]) -> _T:
        """What it says of the world, as soon as that is true."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        async with self._news:
            while not (found := holds(self.world)):
                assert time.monotonic() < deadline, self.server.log()
                await self._news.wait()
        return found

    async def admits(self) -> None:
        """It has started, and takes requests."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not (await self.http.get("/readyz")).json()["conditions"]["admitting"]["holds"]:
                await asyncio.sleep(INTERVAL_SECONDS)

    async def look(self) -> None:
        """The world is at least what it is now."""
        with closing(SqliteLedger(self.server.ledger, read_only=True)) as ledger:
            head = ledger.head()
        await self.until(lambda world: world.seq >= head)

    async def operate(self, method: str, path: str, document: Document) -> Document:
        headers = {"Authorization": f"Bearer {self._operator_token}"}
        answer = await self.http.request(method, f"/operator/v1{path}", json=document, headers=headers)
        assert answer.status_code == 200, answer.text
        found: Document = answer.json()
        return found

    async def arrive(self, live: Live) -> None:
        """The cards of a case are there, and the server has seen them."""
        for card in live.cards():
            if card.uuid not in self.world.accelerators:
                self.gpus.add(card)
        await self.until(lambda world: all(_is_seen(world, card.uuid) for card in live.cards()))


@asynccontextmanager
async def staged(server: Serving, gpus: GpuStandIn) -> AsyncGenerator[Stage]:
    """A stage on a server that runs."""
    token = operator_token(server)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=server.base_url, timeout=PATIENCE_SECONDS, trust_env=False, limits=limits
    ) as http:
        stage = Stage(server, gpus, http, token)
        following = asyncio.create_task(stage.follow())
        try:
            await stage.admits()
            await stage.look()
            yield stage
            assert not following.done(), "the ledger could not be followed"
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


def operator_token(server: Serving) -> str:
    words = ("tokens", "create", "operator", OPERATOR, "--scope", "operate", "--config")
    command = (sys.executable, "-m", "gpuledger.tools.cli", *words, str(server.folder / "gpuledger.yaml"))
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _is_seen(world: World, accelerator_id: str) -> bool:
    state = world.accelerators.get(accelerator_id)
    return state is not None and state.sample is not None
