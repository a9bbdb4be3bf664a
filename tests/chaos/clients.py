"""All clients at once: each order begins at its instant, however long others take."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import httpx

from .asking import Answer, ask, connections
from .traffic import Order

#: More at once than the queues take; beyond it an order is dropped and counted, so that this process stays bounded.
MAX_OPEN: Final = 200
#: A client waits a little before it asks a server again that was not there.
_PAUSE_SECONDS: Final = 0.5


@dataclass
class Clients:
    """Carries out orders. `where`: the address to ask at, which changes when the scheduler is started again."""

    where: Callable[[], str]
    stopped: Callable[[], bool]
    answers: list[Answer] = field(default_factory=list[Answer])
    dropped: int = 0
    _open: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    async def run(self, orders: Iterator[Order]) -> None:
        """All of them, until the last is answered."""
        began = time.monotonic()
        async with connections() as http:
            for order in orders:
                await self._until(began + order.at)
                if self.stopped():
                    break
                if len(self._open) >= MAX_OPEN:
                    self.dropped += 1
                    continue
                task = asyncio.create_task(self._ask(http, order))
                self._open.add(task)
                task.add_done_callback(self._open.discard)
            await asyncio.gather(*self._open)

    async def persist(self, order: Order, seconds: float) -> Answer:
        """The same order again and again until it is answered well, or the time is over: its last answer."""
        deadline = time.monotonic() + seconds
        async with connections() as http:
            while True:
                answer = await ask(http, self.where(), order)
                self.answers.append(answer)
                if answer.whole or time.monotonic() >= deadline:
                    return answer
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _ask(self, http: httpx.AsyncClient, order: Order) -> None:
        self.answers.append(await ask(http, self.where(), order))

    async def _until(self, at: float) -> None:
        """Sleeps in pieces, so that a run that was stopped ends."""
        while (left := at - time.monotonic()) > 0 and not self.stopped():
            await asyncio.sleep(min(left, _PAUSE_SECONDS))
