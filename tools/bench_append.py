"""The bench of the embedded ledger: the two transactions of a warm request, against inserting the same bytes.

Both sides write files in one folder with the same settings, and both wait for the disk.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from functools import partial
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
                Case("admission (3 events)", "batch", _FLOOR, "wall", partial(requests.round, kind=LeaseGranted)),
                Case("end (2 events)", "batch", _FLOOR, "wall", partial(requests.round, kind=LeaseReleased)),
            )


class _Requests:
    """Warm requests, one after the other; one of their transactions is timed."""

    def __init__(self, ledger: Ledger, bare: sqlite3.Connection) -> None:
        self._ledger = ledger
        self._bare = bare
        self._appended: list[tuple[tuple[Recorded, ...], float]] = []
        self._asked = 0
        self._node = warm_node(self._append)

    def round(self, number: int, *, kind: type[LeaseGranted | LeaseReleased]) -> Round:
        """One request. In every second round the floor is timed before it, with the bytes of the request before."""
        before = self._newest(kind) if number % 2 else None
        floor_seconds = 0.0 if before is None else self._insert(before[0])
        self._appended.clear()
        self._request()
        ours = self._newest(kind)
        if ours is None:
            raise AssertionError(f"a warm request left no {kind.__name__}")
        return Round(1, ours[1], floor_seconds or self._insert(ours[0]))

    def _request(self) -> None:
        self._asked += 1
        self._node.ask(f"req-{self._asked:024d}", EMBED)
        self._node.run_for_ms(500)

    def _append(self, batch: Batch, at: int) -> tuple[Recorded, ...]:
        started = time.perf_counter()
        recorded = self._ledger.append(batch, at)
        self._appended.append((recorded, time.perf_counter() - started))
        return recorded

    def _newest(self, kind: type[LeaseGranted | LeaseReleased]) -> tuple[tuple[Recorded, ...], float] | None:
        found = (one for one in self._appended if any(isinstance(event.data, kind) for event in one[0]))
        return next(found, None)

    def _insert(self, recorded: Sequence[Recorded]) -> float:
        leaves = [(encode(event),) for event in recorded]
        started = time.perf_counter()
        self._bare.execute("BEGIN IMMEDIATE")
        self._bare.executemany("INSERT INTO leaves (body) VALUES (?)", leaves)
        self._bare.execute("COMMIT")
        return time.perf_counter() - started


def _bare(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    for pragma in _PRAGMAS:
        connection.execute(pragma).close()
    connection.execute("CREATE TABLE leaves (seq INTEGER PRIMARY KEY, body BLOB NOT NULL) STRICT")
    return connection
