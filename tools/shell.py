"""The engine of the asyncio shell: one task that owns the world and takes one input after the other (architecture.md).

For each input: decide, append durably in a thread of the ledger's own, fold what was recorded, then everything that is
due, then hand on what is wanted of the world now. What is in the world is in the ledger; nothing is kept beside it.

A ledger that cannot be written (disk full) fails closed: requests are turned away at once, what must not be lost (work
that ended) is kept and tried again with growing pauses, and nothing is carried out that is not durable.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import structlog

from gpuledger.domain.events import Recorded, StreamKind, stream_name
from gpuledger.domain.messages import (
    Agenda,
    AnswerCutOff,
    ClientGone,
    DrainTimedOut,
    Input,
    RequestArrived,
    ShutdownRequested,
    WorkEnded,
)
from gpuledger.domain.ports import Batch, Clock, Ledger, LedgerConflict, LedgerCorrupt, LedgerUnavailable
from gpuledger.domain.scheduler import Scheduler
from gpuledger.domain.units import MICROS_PER_SECOND
from gpuledger.domain.world import World, fold

from .snapshots import save_world

#: An input, or what makes it at the moment at which it is decided on: a sample ages while it waits in the line.
Told: TypeAlias = Input | Callable[[], Input]
Decide: TypeAlias = Callable[[World, int, int], Batch | None]

#: Inputs that nothing else repeats: kept until they are in the ledger. The others are said again by whoever said them:
#: samples by the next one, answers of runtimes because their effect is still wanted, requests by their clients.
KEPT: Final = (WorkEnded, AnswerCutOff, ClientGone, ShutdownRequested, DrainTimedOut)
#: Another writer that wins so many times in a row is taken for a ledger that cannot be used.
MAX_ATTEMPTS: Final = 50
SNAPSHOT_EVERY: Final = 1_000
FIRST_PAUSE_SECONDS: Final = 0.25
LAST_PAUSE_SECONDS: Final = 5.0
_PAGE: Final = 1_000

_log = structlog.get_logger(__name__)


class RequestKnown(Exception):
    """The ledger has a request of this id already."""


class DecisionFailed(Exception):
    """A defect of ours: the input was dropped, and the log has the traceback."""


class Listener(Protocol):
    """Told of what was recorded, and of what is wanted. Called in the engine's task: it must not block or raise."""

    def recorded(self, events: tuple[Recorded, ...]) -> None: ...

    def wanted(self, agenda: Agenda) -> None: ...


class Gauge(Protocol):
    """Told how long commits take."""

    def committed(self, seconds: float) -> None: ...


@dataclass(slots=True)
class _Entry:
    told: Told
    answer: asyncio.Future[tuple[Recorded, ...]] | None

    def input(self) -> Input:
        return self.told() if callable(self.told) else self.told


@dataclass(slots=True)
class _Trouble:
    """Why the ledger cannot be written, and when it is tried again."""

    detail: str
    pause_seconds: float
    retry_at: float


class Engine:
    """`run` is the task. Everything else may be called from its event loop at any time, `run` or not."""

    def __init__(self, scheduler: Scheduler, ledger: Ledger, clock: Clock, world: World) -> None:
        self._scheduler = scheduler
        self._ledger = ledger
        self._clock = clock
        self._world = world
        self._listeners: list[Listener] = []
        self._gauges: list[Gauge] = []
        self._inbox: deque[_Entry] = deque()
        self._deferred: deque[_Entry] = deque()
        self._wake = asyncio.Event()
        self._trouble: _Trouble | None = None
        self._snapshot_seq = world.seq
        self._agenda: Agenda | None = None
        # sqlite waits for the disk with synchronous=FULL: never in the event loop.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gpuledger-ledger")
        self.stopped = asyncio.Event()

    @property
    def world(self) -> World:
        """The folded state: immutable, and another one after each commit."""
        return self._world

    @property
    def trouble(self) -> str | None:
        """Why nothing can be recorded now; None when it can."""
        return None if self._trouble is None else self._trouble.detail

    def now(self) -> int:
        """An instant of the ledger's clock."""
        return self._clock.now()

    def subscribe(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def measure(self, gauge: Gauge) -> None:
        self._gauges.append(gauge)

    def tell(self, told: Told) -> None:
        """Something happened; nobody waits for the record of it."""
        self._put(_Entry(told, None))

    async def ask(self, told: Told, *, first: bool = False) -> tuple[Recorded, ...]:
        """What was recorded, when it was. Raises LedgerUnavailable, LedgerCorrupt, RequestKnown, DecisionFailed."""
        answer: asyncio.Future[tuple[Recorded, ...]] = asyncio.get_running_loop().create_future()
        entry = _Entry(told, answer)
        if first:
            self._inbox.appendleft(entry)
            self._wake.set()
        else:
            self._put(entry)
        return await answer

    def poke(self) -> None:
        """Look again at what is wanted: an effect ended without anything to record."""
        self._wake.set()

    def _put(self, entry: _Entry) -> None:
        self._inbox.append(entry)
        self._wake.set()

    # ---- the task ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take inputs until cancelled."""
        while True:
            self._wake.clear()
            self._retry_when_due()
            if self._inbox:
                await self._take(self._inbox.popleft())
            await self._settle()
            self._hand_on()
            if not self._inbox:
                await self._sleep()

    async def close(self) -> None:
        """Save a snapshot, as far as the ledger lets us, and end the ledger's thread."""
        if self._world.seq > self._snapshot_seq:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._save, self._world)
        self._thread.shutdown(wait=True)

    async def _take(self, entry: _Entry) -> None:
        failure: Exception | None = None
        recorded: tuple[Recorded, ...] = ()
        try:
            recorded = await self._handle(entry)
        except (LedgerUnavailable, LedgerCorrupt) as error:
            self._note_trouble(error)
            if isinstance(entry.told, KEPT):
                self._deferred.append(entry)
                return
            failure = error
        except RequestKnown as error:
            failure = error
        except Exception as error:  # noqa: BLE001 - a defect of ours ends one input, never the scheduler
            _log.exception("an input could not be decided on", input=type(entry.told).__name__)
            failure = DecisionFailed(repr(error))
        if entry.answer is not None and not entry.answer.done():
            if failure is None:
                entry.answer.set_result(recorded)
            else:
                entry.answer.set_exception(failure)

    async def _handle(self, entry: _Entry) -> tuple[Recorded, ...]:
        asked = entry.told
        stream = None
        if isinstance(asked, RequestArrived):
            if self._trouble is not None:
                raise LedgerUnavailable(self._trouble.detail)
            stream = stream_name(StreamKind.REQUEST, asked.request_id)

        def decide(world: World, now: int, attempt: int) -> Batch | None:
            return self._scheduler.handle(world, entry.input(), now, attempt=attempt)

        return await self._commit(decide, stream)

    async def _settle(self) -> None:
        """Everything that is due. In trouble it waits for something to get through."""
        if self._trouble is not None:
            return

        def decide(world: World, now: int, attempt: int) -> Batch | None:
            return self._scheduler.settle(world, now, attempt=attempt)

        try:
            while await self._commit(decide):
                pass  # until nothing is due any more
        except (LedgerUnavailable, LedgerCorrupt) as error:
            self._note_trouble(error)
        except Exception:  # noqa: BLE001 - as above
            _log.exception("what is due could not be decided on")

    def _hand_on(self) -> None:
        try:
            agenda = self._scheduler.agenda(self._world, self._clock.now())
        except Exception:  # noqa: BLE001 - as above
            _log.exception("what is wanted could not be worked out")
            return
        self._agenda = agenda
        for listener in self._listeners:
            listener.wanted(agenda)
        if agenda.stopped:
            self.stopped.set()

    async def _sleep(self) -> None:
        loop = asyncio.get_running_loop()
        delays: list[float] = []
        if self._trouble is not None:
            delays.append(self._trouble.retry_at - loop.time())
        elif self._agenda is not None and self._agenda.wake_at is not None:
            # A millisecond later than due, so that it is due and not nearly due.
            delays.append((self._agenda.wake_at - self._clock.now()) / MICROS_PER_SECOND + 0.001)
        if not delays:
            await self._wake.wait()
            return
        timer = loop.call_later(max(0.0, min(delays)), self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()

    # ---- the ledger ----------------------------------------------------------------------------------------------

    async def _commit(self, decide: Decide, own_stream: str | None = None) -> tuple[Recorded, ...]:
        """Decide and append until no other writer is in the way: what was recorded, nothing when nothing was decided.

        Raises RequestKnown when `own_stream`, which should be new, is not.
        """
        for attempt in range(MAX_ATTEMPTS):
            now = self._clock.now()
            batch = decide(self._world, now, attempt)
            if batch is None:
                return ()
            try:
                recorded = await self._append(batch, now)
            except LedgerConflict as conflict:
                await self._catch_up()
                if conflict.stream == own_stream:
                    raise RequestKnown(conflict.stream) from None
                continue
            if recorded and recorded[0].seq != self._world.seq + 1:
                await self._catch_up(recorded[0].seq - 1)
            self._fold(recorded)
            self._out_of_trouble()
            self._snapshot_when_due()
            return recorded
        raise LedgerUnavailable(f"another writer was faster {MAX_ATTEMPTS} times in a row")

    async def _append(self, batch: Batch, now: int) -> tuple[Recorded, ...]:
        started = time.perf_counter()
        recorded = await asyncio.get_running_loop().run_in_executor(self._thread, self._ledger.append, batch, now)
        seconds = time.perf_counter() - started
        for gauge in self._gauges:
            gauge.committed(seconds)
        return recorded

    async def _catch_up(self, until: int | None = None) -> None:
        """Fold what others wrote."""
        loop = asyncio.get_running_loop()
        while until is None or self._world.seq < until:
            limit = _PAGE if until is None else min(_PAGE, until - self._world.seq)
            page = await loop.run_in_executor(self._thread, self._ledger.read, self._world.seq, limit)
            if not page:
                return
            self._fold(page)

    def _fold(self, recorded: tuple[Recorded, ...]) -> None:
        self._world = fold(self._world, recorded)
        for listener in self._listeners:
            listener.recorded(recorded)

    def _snapshot_when_due(self) -> None:
        if self._world.seq - self._snapshot_seq >= SNAPSHOT_EVERY:
            self._snapshot_seq = self._world.seq
            self._thread.submit(self._save, self._world)

    def _save(self, world: World) -> None:
        """In the ledger's thread. It is a cache: what goes wrong is said, and no more."""
        try:
            save_world(self._ledger, world)
        except (LedgerUnavailable, LedgerCorrupt) as error:
            _log.warning("no snapshot was saved", error=str(error))

    # ---- trouble -------------------------------------------------------------------------------------------------

    def _note_trouble(self, error: Exception) -> None:
        pause = FIRST_PAUSE_SECONDS
        if self._trouble is None:
            _log.error("the ledger cannot be written: nothing is admitted", error=str(error))
        else:
            pause = min(2 * self._trouble.pause_seconds, LAST_PAUSE_SECONDS)
        retry_at = asyncio.get_running_loop().time() + pause
        self._trouble = _Trouble(str(error), pause, retry_at)

    def _out_of_trouble(self) -> None:
        if self._trouble is not None:
            _log.info("the ledger can be written again")
            self._trouble = None
            self._inbox.extend(self._deferred)
            self._deferred.clear()

    def _retry_when_due(self) -> None:
        """The pause is over: what was kept for longest goes first, and the rest as soon as anything gets through."""
        trouble, now = self._trouble, asyncio.get_running_loop().time()
        if trouble is None or now < trouble.retry_at:
            return
        trouble.retry_at = now + trouble.pause_seconds
        if self._deferred:
            self._inbox.append(self._deferred.popleft())
