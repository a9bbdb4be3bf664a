"""The embedded ledger: one SQLite file in WAL mode, by eventsourcing's datastore, recorder and mapper.

What of the library is replaced, and why (ledger.md, Known hazards): its mapper imports what a topic names; its
recorder numbers events by row and appends without conditions; its transactions are deferred, and stay open after a
failed commit.

Any number of threads and processes may use one file. Writers wait for each other, for a bounded time: threads at the
pool, processes at SQLite's lock. Readers wait for no writer, and writers for no reader.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

from eventsourcing.persistence import StoredEvent
from eventsourcing.sqlite import SQLiteApplicationRecorder, SQLiteCursor

from gpuledger.domain.events import Recorded
from gpuledger.domain.ports import Batch, Leaf, LedgerConflict, LedgerCorrupt, LedgerUnavailable, Snapshot

from .batches import Drafts, Placed, drafts_of
from .mapper import LeafMapper, StoredLeaf
from .sqlite_file import LedgerDatastore, LedgerDisturbed, check, ensure, translated

_P = ParamSpec("_P")
_T = TypeVar("_T")

_SNAPSHOTS_KEPT: Final = 2
#: Leaves in memory at once while all are streamed.
_LEAVES_PER_PAGE: Final = 256

_SELECT: Final = "SELECT originator_id, originator_version, topic, state, seq, leaf_hash FROM stored_events "


class SqliteLedger:
    """Contract: tests/contract/test_ledger.py.

    `read_only` works beside a scheduler that writes and creates nothing; appending to it raises LedgerUnavailable.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False) -> None:
        """Raises LedgerUnavailable, and LedgerCorrupt for a file that is no whole ledger of this release."""
        self.path = Path(path).absolute()
        self._open_file(read_only)
        self._datastore = LedgerDatastore(self.path, read_only=read_only)
        self._recorder = LedgerRecorder(self._datastore)
        self._mapper = LeafMapper()
        try:
            self._reading(self._recorder.check, self.path)
        except BaseException:
            self.close()
            raise

    def head(self) -> int:
        return self._reading(self._recorder.max_notification_id) or 0

    def append(self, batch: Batch, at: int) -> tuple[Recorded, ...]:
        drafts = drafts_of(batch, at)
        if not drafts.events:
            return ()
        return tuple(placed.recorded for placed in self._recorder.append(drafts, self._mapper))

    def stream_version(self, stream: str) -> int:
        return self._reading(self._recorder.stream_version, stream)

    def read(self, after: int = 0, limit: int = 1000) -> tuple[Recorded, ...]:
        return self._events(self._reading(self._page, max(0, after), max(0, limit)))

    def read_stream(self, stream: str) -> tuple[Recorded, ...]:
        return self._events(self._reading(self._recorder.select_stream, stream))

    def read_backward(self, types: frozenset[str], limit: int) -> tuple[Recorded, ...]:
        return self._events(self._reading(self._recorder.select_newest, types, max(0, limit)))

    def leaves(self, after: int = 0) -> Iterator[Leaf]:
        head = self.head()
        for start in range(max(0, after), head, _LEAVES_PER_PAGE):
            for stored in self._reading(self._page, start, min(_LEAVES_PER_PAGE, head - start)):
                yield Leaf(stored.id, stored.state, stored.leaf_hash)

    def save_snapshot(self, snapshot: Snapshot) -> None:
        self._recorder.insert_snapshot(snapshot)

    def load_snapshot(self) -> Snapshot | None:
        return self._reading(self._recorder.select_snapshot)

    def close(self) -> None:
        self._datastore.close()

    def _open_file(self, read_only: bool) -> None:
        if not read_only:
            ensure(self.path)
        with translated(self.path):
            if self.path.is_dir():
                raise LedgerUnavailable(f"{self.path}: is a directory, and no ledger")
            if self.path.stat().st_size == 0:
                raise LedgerCorrupt(f"{self.path}: the file is empty")

    def _reading(self, read: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return read(*args, **kwargs)
        except LedgerDisturbed:
            return read(*args, **kwargs)

    def _page(self, after: int, limit: int) -> Sequence[StoredLeaf]:
        head, page = self._recorder.select_page(after, limit)
        for seq, stored in enumerate(page, after + 1):
            if stored.id != seq:
                raise LedgerCorrupt("is missing", seq)
        if len(page) < limit and after + len(page) < head:
            raise LedgerCorrupt("is missing", after + len(page) + 1)
        return page

    def _events(self, stored: Sequence[StoredLeaf]) -> tuple[Recorded, ...]:
        return tuple(self._mapper.to_domain_event(one).recorded for one in stored)


class LedgerRecorder(SQLiteApplicationRecorder):
    """eventsourcing's recorder with conditional appends, dense numbers, and the hash of each leaf beside it."""

    datastore: LedgerDatastore

    def check(self, path: Path) -> None:
        """Raises LedgerCorrupt."""
        with self.datastore.transaction(commit=False) as c:
            check(path, c)

    def append(self, drafts: Drafts, mapper: LeafMapper) -> tuple[Placed, ...]:
        """In one transaction: take the next places, check the conditions, insert. Raises LedgerConflict."""
        with self.datastore.transaction(commit=True) as c:
            first_seq, at = self._advance_head(c, len(drafts.events), drafts.at)
            for stream, version in drafts.expect.items():
                if self._stream_version(c, stream) != version:
                    raise LedgerConflict(stream)
            placed = drafts.place(first_seq, at)
            self._insert_events(c, [mapper.to_stored_event(one) for one in placed])
        return placed

    def insert_events(self, stored_events: Sequence[StoredEvent], **kwargs: Any) -> Sequence[int] | None:
        """Nothing is appended without conditions: `append`."""
        raise NotImplementedError

    def stream_version(self, stream: str) -> int:
        with self.datastore.transaction(commit=False) as c:
            return self._stream_version(c, stream)

    def select_page(self, after: int, limit: int) -> tuple[int, Sequence[StoredLeaf]]:
        """The head, and at most `limit` leaves after `after`."""
        with self.datastore.transaction(commit=False) as c:
            c.execute("SELECT seq FROM head")
            (head,) = c.fetchone()
            return head, self._select(c, "WHERE seq > ? ORDER BY seq LIMIT ?", after, limit)

    def select_stream(self, stream: str) -> Sequence[StoredLeaf]:
        with self.datastore.transaction(commit=False) as c:
            return self._select(c, "WHERE originator_id = ? ORDER BY originator_version", stream)

    def select_newest(self, types: frozenset[str], limit: int) -> Sequence[StoredLeaf]:
        """Newest first. Each type is asked for its own newest: asked for all, SQLite would sort every one of them."""
        with self.datastore.transaction(commit=False) as c:
            newest: list[int] = []
            for name in types:
                c.execute("SELECT seq FROM stored_events WHERE topic = ? ORDER BY seq DESC LIMIT ?", (name, limit))
                newest += [seq for (seq,) in c.fetchall()]
            return [self._select(c, "WHERE seq = ?", seq)[0] for seq in heapq.nlargest(limit, newest)]

    def insert_snapshot(self, snapshot: Snapshot) -> None:
        digest = sha256(snapshot.body).digest()
        with self.datastore.transaction(commit=True) as c:
            c.execute(
                "INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?, ?)",
                (snapshot.seq, snapshot.schema, snapshot.leaf_hash, snapshot.body, digest),
            )
            c.execute(
                "DELETE FROM snapshots WHERE seq NOT IN (SELECT seq FROM snapshots"
                " JOIN stored_events USING (seq, leaf_hash) ORDER BY seq DESC LIMIT ?)",
                (_SNAPSHOTS_KEPT,),
            )

    def select_snapshot(self) -> Snapshot | None:
        with self.datastore.transaction(commit=False) as c:
            c.execute(
                "SELECT seq, schema, leaf_hash, body, body_sha256 FROM snapshots"
                " JOIN stored_events USING (seq, leaf_hash) ORDER BY seq DESC"
            )
            for seq, schema, leaf, body, digest in c.fetchall():
                if sha256(body).digest() == digest:
                    return Snapshot(seq, schema, leaf, body)
        return None

    def _select(self, c: SQLiteCursor, which: str, *params: str | int) -> Sequence[StoredLeaf]:
        c.execute(_SELECT + which, params)
        return [StoredLeaf(*row) for row in c.fetchall()]

    def _advance_head(self, c: SQLiteCursor, count: int, at: int) -> tuple[int, int]:
        """The first of `count` places, and `at` raised to the newest event's."""
        c.execute("UPDATE head SET seq = seq + ?, at = max(at, ?) RETURNING seq, at", (count, at))
        ((newest, at),) = c.fetchall()
        return newest - count + 1, at

    def _stream_version(self, c: SQLiteCursor, stream: str) -> int:
        c.execute("SELECT coalesce(max(originator_version), 0) FROM stored_events WHERE originator_id = ?", (stream,))
        (version,) = c.fetchone()
        return int(version)

    def _insert_events(self, c: SQLiteCursor, stored_events: Sequence[StoredEvent], **_: Any) -> Sequence[int] | None:
        leaves = [one for one in stored_events if isinstance(one, StoredLeaf)]
        c.executemany(
            "INSERT INTO stored_events VALUES (?, ?, ?, ?, ?, ?)",
            [
                (one.id, one.originator_id, one.originator_version, one.topic, one.state, one.leaf_hash)
                for one in leaves
            ],
        )
        return [one.id for one in leaves]
