"""A scheduler that runs: the engine with everything that listens to it, from its start to residency and leases at zero.

`serve` puts a door in front of it; `profile` runs it just long enough to measure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

import structlog

from gpuledger.domain.events import Recorded
from gpuledger.domain.messages import Agenda, DrainTimedOut, ShutdownRequested, Started
from gpuledger.domain.policy import Policy
from gpuledger.domain.ports import RuntimeFault
from gpuledger.domain.scheduler import Scheduler
from gpuledger.domain.state import ResidentState
from gpuledger.domain.world import World

from .bootstrap import Parts, configuration_of
from .config import Config
from .desk import Binding, RequestDesk
from .effects import Effects
from .envelopes import Measuring
from .profiling import SelfProfiling
from .sampler import Sampler
from .shell import Engine

#: Beyond what the rules give a stop (two graces, and the time to give memory back).
STOP_SLACK_SECONDS: Final = 15

_log = structlog.get_logger(__name__)


class PartEnded(Exception):
    """A part of the scheduler that must not end has ended."""


class Watch:
    """A listener for who waits until the world is in some state."""

    def __init__(self) -> None:
        self._waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    def recorded(self, events: tuple[Recorded, ...]) -> None:
        """The agenda follows."""

    def wanted(self, agenda: Agenda) -> None:  # noqa: ARG002
        for holds, waiter in self._waiters:
            if not waiter.done() and holds():
                waiter.set_result(None)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until it holds after some event."""
        if holds():
            return
        entry = (holds, asyncio.get_running_loop().create_future())
        self._waiters.append(entry)
        try:
            await entry[1]
        finally:
            self._waiters.remove(entry)


@dataclass(slots=True)
class Haste:
    """How patient a shutdown is. Each further signal takes some of it away."""

    drain_over: asyncio.Event
    at_once: asyncio.Event


class Running:
    """The parts of a scheduler, wired. `start`, then whatever is wanted of it, then `stop` and `close`."""

    def __init__(self, config: Config, parts: Parts) -> None:
        self._config = config
        self._parts = parts
        self._tasks: list[asyncio.Task[None]] = []
        self._ended: asyncio.Queue[asyncio.Task[None]] = asyncio.Queue()
        node_id = config.document.node.id
        self.engine = Engine(Scheduler(node_id), parts.ledger, parts.clock, parts.world)
        self.sampler = Sampler(self.engine, parts.telemetry, parts.runtimes, node_id, parts.clock.skew_ms)
        self.effects = Effects(self.engine, parts.runtimes, self.sampler.hurry)
        self.watch = Watch()
        bindings = {client.id: Binding(client.priority, client.lab) for client in config.document.clients}
        self.desk = RequestDesk(
            self.engine, parts.runtimes, parts.ledger, bindings.__getitem__, config.document.max_open_requests
        )
        self.measuring = Measuring(config, self.engine, self.sampler, parts.telemetry, parts.runtimes, parts.clock)
        self.profiling = SelfProfiling(self.engine, self.measuring, self.sampler, node_id)
        for listener in (self.desk, self.effects, self.sampler, self.watch, self.profiling):
            self.engine.subscribe(listener)

    @property
    def world(self) -> World:
        return self.engine.world

    async def start(self) -> None:
        """Take the ledger over, end what an earlier run left, and see the devices.

        Raises DocumentError for models that are not there, LedgerUnavailable, LedgerCorrupt.
        """
        gate = self.desk.gate
        gate.detail = "hashing models"  # minutes, where they are large
        configuration = await asyncio.to_thread(configuration_of, self._config, self._parts)
        self.background(self.engine.run(), "engine")
        await self.engine.ask(Started(configuration))
        self.background(self.sampler.run(), "sampler")
        self.background(self.desk.renew(), "renewals")
        gate.detail = "taking the first sample, and ending what an earlier run left"
        await self.sampler.looked.wait()
        await self.watch.until(lambda: not self._leftovers())

    def background(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """A task that lives as long as the scheduler."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._ended.put_nowait)
        self._tasks.append(task)

    async def part_ended(self) -> None:
        """Wait for what must not happen. Raises PartEnded."""
        task = await self._ended.get()
        raise PartEnded(task.get_name()) from (None if task.cancelled() else task.exception())

    async def stop(self, drain_seconds: int, haste: Haste) -> bool:
        """Drain, stop every runtime, and say whether residency and leases are zero in the ledger."""
        if not self._tasks:
            return True  # nothing had begun
        node_id = self._config.document.node.id
        # What is measured by itself is in no ledger: it is ended first.
        await _first(self.profiling.halt(), haste.drain_over.wait(), timeout_seconds=drain_seconds)
        self.engine.tell(ShutdownRequested(node_id))
        await _first(self.engine.stopped.wait(), haste.drain_over.wait(), timeout_seconds=drain_seconds)
        if not self.engine.stopped.is_set():
            self.engine.tell(DrainTimedOut(node_id))
            patience = _stop_patience_seconds(self.world.policy)
            await _first(self.engine.stopped.wait(), haste.at_once.wait(), timeout_seconds=patience)
        if not self.engine.stopped.is_set():
            _log.error("not everything could be stopped in order: what is left of our processes is killed")
        return self.engine.stopped.is_set()

    async def close(self) -> bool:
        """End every task, process and thread; False when a driver still holds the telemetry's thread."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.effects.close()
        try:
            await self._parts.runtimes.close()
        except RuntimeFault as fault:
            _log.error("a process of ours does not end", fault=str(fault))
        await self.engine.close()
        free = self.sampler.close()
        if free:
            self._parts.telemetry.close()
        self._parts.ledger.close()
        return free

    def _leftovers(self) -> bool:
        """Residents that come or go: those of an earlier run, and those that are loaded at the start."""
        settled = (ResidentState.READY, ResidentState.SLEEPING)
        node_id = self._config.document.node.id
        return any(
            state.node_id == node_id and record.resident.state not in settled
            for state, record in self.world.residents()
        )


def _stop_patience_seconds(policy: Policy) -> int:
    return 2 * policy.stop_grace_seconds + policy.reclaim_timeout_seconds + STOP_SLACK_SECONDS


async def _first(*waits: Coroutine[Any, Any, object], timeout_seconds: float) -> None:
    """Wait for the first of them, or until the time is over."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
