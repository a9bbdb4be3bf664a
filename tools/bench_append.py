"""The bench of the embedded ledger: the two transactions of a warm request, against inserting the same bytes.

Both sides write files in one folder with the same settings, and both wait for the disk.
"""

from __future__ import annotations

import sqlite3
import statistics
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from gpuledger.adapters.ledger.codec import encode
from gpuledger.adapters.ledger.sqlite import SqliteLedger
from gpuledger.domain.events import LeaseGranted, LeaseReleased, Recorded
from gpuledger.domain.ports import Batch, Ledger

from .bench import Case, Round
from .bench_ledger import EMBED, warm_node

FOLDER_PREFIX: Final = "gpuledger-bench-"
_FLOOR: Final = "bare insert, same bytes"
#: As those of the ledger's own connections.
_PRAGMAS: Final = ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = FULL", "PRAGMA journal_size_limit = 67108864")


@contextmanager
def append_bench() -> Generator[Sequence[Case]]:
    """A ledger with a scheduler before it, and a bare table beside it."""
    with TemporaryDirectory(prefix=FOLDER_PREFIX) as name:
        folder = Path(name)
        with closing(SqliteLedger(folder / "ledger.db")) as ledger, closing(_bare(folder / "bare.db")) as bare:
            requests = _Requests(ledger, bare)
            yield (
                _Transactions(requests, LeaseGranted).case("admission (3 events)"),
                _Transactions(requests, LeaseReleased).case("end (2 events)"),
            )


@dataclass(frozen=True, slots=True)
class _Written:
    """A transaction, and what it took."""

    events: tuple[Recorded, ...]
    wall_seconds: float
    cpu_seconds: float


class _Transactions:
    """The case of one of the two transactions of a request: the one with an event of this type."""

    def __init__(self, requests: _Requests, kind: type[LeaseGranted | LeaseReleased]) -> None:
        self._requests = requests
        self._kind = kind
        self._ours: list[float] = []
        self._floor: list[float] = []
        self._before: tuple[Recorded, ...] = ()

    def case(self, name: str) -> Case:
        return Case(name, "batch", _FLOOR, "wall", self._round, self._details)

    def _round(self, number: int) -> Round:
        """One request. In every second round the floor comes before it, with the bytes of the request before."""
        floor = self._requests.insert(self._before) if number % 2 else None
        ours = next(one for one in self._requests.one() if any(isinstance(e.data, self._kind) for e in one.events))
        self._before = ours.events
        floor = floor or self._requests.insert(ours.events)
        self._ours.append(ours.cpu_seconds)
        self._floor.append(floor.cpu_seconds)
        return Round(1, ours.wall_seconds, floor.wall_seconds)

    def _details(self) -> Mapping[str, float]:
        """Medians of the processor's time, in which no disk is waited for."""
        sides = {"cpu_us": self._ours, "floor_cpu_us": self._floor}
        return {name: round(1e6 * statistics.median(seconds), 1) for name, seconds in sides.items()}


class _Requests:
    """Warm requests, one after the other."""

    def __init__(self, ledger: Ledger, bare: sqlite3.Connection) -> None:
        self._ledger = ledger
        self._bare = bare
        self._written: list[_Written] = []
        self._asked = 0
        self._node = warm_node(self._append)

    def one(self) -> Sequence[_Written]:
        """The transactions of one more request."""
        self._asked += 1
        self._written = []
        self._node.ask(f"req-{self._asked:024d}", EMBED)
        self._node.run_for_ms(500)
        return self._written

    def insert(self, events: tuple[Recorded, ...]) -> _Written:
        """The leaves of these events, written without more ado."""
        leaves = [(encode(event),) for event in events]
        started, cpu_started = time.perf_counter(), time.thread_time()
        self._bare.execute("BEGIN IMMEDIATE")
        self._bare.executemany("INSERT INTO leaves (body) VALUES (?)", leaves)
        self._bare.execute("COMMIT")
        return _Written(events, time.perf_counter() - started, time.thread_time() - cpu_started)

    def _append(self, batch: Batch, at: int) -> tuple[Recorded, ...]:
        started, cpu_started = time.perf_counter(), time.thread_time()
        recorded = self._ledger.append(batch, at)
        written = _Written(recorded, time.perf_counter() - started, time.thread_time() - cpu_started)
        self._written.append(written)
        return recorded


def _bare(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    for pragma in _PRAGMAS:
        connection.execute(pragma).close()
    connection.execute("CREATE TABLE leaves (seq INTEGER PRIMARY KEY, body BLOB NOT NULL) STRICT")
    return connection
