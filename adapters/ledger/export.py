"""A ledger as one file of lines: the exact bytes of every leaf, in order, each ended by a newline."""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import BinaryIO, Final

from gpuledger.domain.events import Recorded
from gpuledger.domain.ports import Leaf, LedgerCorrupt, LedgerReader

from .codec import MAX_LEAF_BYTES, Envelope, decode, leaf_hash, parse_envelope
from .sqlite import SqliteLedger
from .sqlite_file import translated

#: The place of every so many lines is kept, so that a page is found without reading the file from its start.
_LINES_PER_MARK: Final = 256


def export(ledger: LedgerReader, out: BinaryIO) -> int:
    """Write every leaf of `ledger` and return how many. Raises LedgerCorrupt at the first that is not whole."""
    count = 0
    for count, leaf in enumerate(ledger.leaves(), 1):
        parse_envelope(leaf.body, count)
        if leaf_hash(leaf.body) != leaf.leaf_hash:
            raise LedgerCorrupt("its bytes are not those that were appended (another hash)", count)
        out.write(leaf.body)
        out.write(b"\n")
    return count


def open_target(path: str | Path) -> LedgerReader:
    """The ledger at `path`, for reading: a SQLite file, or an export. Raises LedgerUnavailable, LedgerCorrupt."""
    target = Path(path).absolute()
    with translated(target):
        if target.stat().st_size == 0:
            raise LedgerCorrupt(f"{target}: the file is empty")
    return SqliteLedger(target, read_only=True) if _is_sqlite(target) else ExportedLedger(target)


def _is_sqlite(path: Path) -> bool:
    # Asked of SQLite: a file that is opened and closed beside it takes the locks of this process's connections away.
    with translated(path):
        try:
            with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
                connection.execute("PRAGMA schema_version")
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_NOTADB:
                return False
            raise
    return True


class ExportedLedger:
    """An export, read as a ledger (contract: tests/contract/test_ledger.py).

    Opening it is one pass over its lines that checks their order; what a line says is checked when it is read, to the
    byte. Memory is one number per stream.
    """

    def __init__(self, path: str | Path) -> None:
        """Raises LedgerCorrupt, which names the line, and LedgerUnavailable."""
        self.path = Path(path).absolute()
        self._marks: list[int] = []
        self._versions: dict[str, int] = {}
        self._head = 0
        self._scan()

    def head(self) -> int:
        return self._head

    def stream_version(self, stream: str) -> int:
        return self._versions.get(stream, 0)

    def read(self, after: int = 0, limit: int = 1000) -> tuple[Recorded, ...]:
        return tuple(self._decode(seq, body) for seq, body in self._lines(after, limit))

    def read_stream(self, stream: str) -> tuple[Recorded, ...]:
        return tuple(
            self._decode(seq, body) for seq, body in self._lines() if self._envelope(seq, body).stream == stream
        )

    def read_backward(self, types: frozenset[str], limit: int) -> tuple[Recorded, ...]:
        wanted = ((seq, body) for seq, body in self._lines() if self._envelope(seq, body).type in types)
        return tuple(self._decode(seq, body) for seq, body in reversed(deque(wanted, maxlen=max(0, limit))))

    def leaves(self, after: int = 0) -> Iterator[Leaf]:
        for seq, body in self._lines(after):
            yield Leaf(seq, body, leaf_hash(body))

    def close(self) -> None:
        """Nothing is held between two calls."""

    def _scan(self) -> None:
        at = 0
        for number, offset, body in self._raw_lines(0, 0):
            envelope = self._envelope(number, body)
            if envelope.version != self.stream_version(envelope.stream) + 1:
                raise self._damaged(number, f"is version {envelope.version} of {envelope.stream}, out of its order")
            if envelope.at < at:
                raise self._damaged(number, "happened before the event before it")
            if number % _LINES_PER_MARK == 1:
                self._marks.append(offset)
            at = envelope.at
            self._versions[envelope.stream] = envelope.version
            self._head = number
        if self._head == 0:
            raise LedgerCorrupt(f"{self.path}: the file is empty")

    def _lines(self, after: int = 0, limit: int | None = None) -> Iterator[tuple[int, bytes]]:
        """(seq, leaf) of what was there when the file was opened."""
        after = max(0, after)
        last = self._head if limit is None else min(self._head, after + max(0, limit))
        if after >= last:
            return
        mark = after // _LINES_PER_MARK
        for number, _, body in self._raw_lines(mark * _LINES_PER_MARK, self._marks[mark]):
            if number > after:
                yield number, body
            if number == last:
                return
        raise self._damaged(last, "is gone")

    def _raw_lines(self, number: int, offset: int) -> Iterator[tuple[int, int, bytes]]:
        """(number, offset, leaf) of each line from `offset` on, where the line after line `number` starts."""
        with translated(self.path), self.path.open("rb") as lines:
            lines.seek(offset)
            while line := lines.readline(MAX_LEAF_BYTES + 1):
                number += 1
                if not line.endswith(b"\n"):
                    raise self._damaged(number, "is longer than a leaf" if len(line) > MAX_LEAF_BYTES else "is cut off")
                yield number, offset, line[:-1]
                offset += len(line)

    def _envelope(self, number: int, body: bytes) -> Envelope:
        try:
            return parse_envelope(body, number)
        except LedgerCorrupt as error:
            raise self._damaged(number, error.reason) from None

    def _decode(self, number: int, body: bytes) -> Recorded:
        try:
            return decode(body, number, exact=True)
        except LedgerCorrupt as error:
            raise self._damaged(number, error.reason) from None

    def _damaged(self, number: int, reason: str) -> LedgerCorrupt:
        error = LedgerCorrupt(f"line {number} of {self.path}: {reason}")
        error.seq = number
        return error
