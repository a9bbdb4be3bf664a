"""A ledger in memory, for tests and simulations: the same bytes as a stored one, kept by nobody."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator
from threading import Lock

from gpuledger.domain.events import Recorded
from gpuledger.domain.ports import Batch, Leaf, LedgerConflict, Snapshot

from .batches import Placed, drafts_of
from .codec import decode, leaf_hash

_SNAPSHOTS_KEPT = 2


class MemoryLedger:
    """Contract: tests/contract/test_ledger.py. Any number of threads may use it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._leaves: list[bytes] = []
        self._at = 0
        self._seqs_of_stream: defaultdict[str, list[int]] = defaultdict(list)
        self._seqs_of_type: defaultdict[str, list[int]] = defaultdict(list)
        self._snapshots: list[Snapshot] = []

    def head(self) -> int:
        return len(self._leaves)

    def append(self, batch: Batch, at: int) -> tuple[Recorded, ...]:
        drafts = drafts_of(batch, at)
        if not drafts.events:
            return ()
        with self._lock:
            for stream, version in drafts.expect.items():
                if self.stream_version(stream) != version:
                    raise LedgerConflict(stream)
            placed = drafts.place(len(self._leaves) + 1, max(drafts.at, self._at))
            for one in placed:
                self._keep(one)
        return tuple(one.recorded for one in placed)

    def stream_version(self, stream: str) -> int:
        return len(self._seqs_of_stream.get(stream, ()))

    def read(self, after: int = 0, limit: int = 1000) -> tuple[Recorded, ...]:
        return tuple(map(decode, self._leaves[max(0, after) : max(0, after) + max(0, limit)]))

    def read_stream(self, stream: str) -> tuple[Recorded, ...]:
        return tuple(map(self._event, self._seqs_of_stream.get(stream, ())))

    def read_backward(self, types: frozenset[str], limit: int) -> tuple[Recorded, ...]:
        newest = [seq for name in types for seq in self._seqs_of_type.get(name, ())[-limit:]] if limit > 0 else []
        return tuple(map(self._event, heapq.nlargest(limit, newest)))

    def leaves(self, after: int = 0) -> Iterator[Leaf]:
        for seq in range(max(0, after) + 1, self.head() + 1):
            body = self._leaves[seq - 1]
            yield Leaf(seq, body, leaf_hash(body))

    def save_snapshot(self, snapshot: Snapshot) -> None:
        with self._lock:
            fitting = [one for one in self._snapshots if one.seq != snapshot.seq and self._fits(one)]
            self._snapshots = sorted([*fitting, snapshot], key=lambda one: one.seq)[-_SNAPSHOTS_KEPT:]

    def load_snapshot(self) -> Snapshot | None:
        return next(filter(self._fits, reversed(self._snapshots)), None)

    def close(self) -> None:
        """Nothing is held."""

    def _fits(self, snapshot: Snapshot) -> bool:
        seq = snapshot.seq
        return 0 < seq <= len(self._leaves) and leaf_hash(self._leaves[seq - 1]) == snapshot.leaf_hash

    def _keep(self, one: Placed) -> None:
        event = one.recorded
        self._leaves.append(one.leaf)
        self._at = event.at
        self._seqs_of_stream[event.stream].append(event.seq)
        self._seqs_of_type[type(event.data).__name__].append(event.seq)

    def _event(self, seq: int) -> Recorded:
        return decode(self._leaves[seq - 1])
