"""The file of an embedded ledger: made whole or not at all, opened with explicit settings, its errors put in words.

No setting is read from the environment (eventsourcing's factories merge it), so there is no factory.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Final

from eventsourcing.persistence import ConnectionPoolClosedError, ConnectionUnavailableError
from eventsourcing.sqlite import SQLiteConnection, SQLiteConnectionPool, SQLiteCursor, SQLiteDatastore

from gpuledger.domain.ports import LedgerCorrupt, LedgerUnavailable

#: How long a writer waits for another one, of this process or of another, before the ledger counts as unavailable.
BUSY_SECONDS: Final = 10

APPLICATION_ID: Final = int.from_bytes(b"gpul")
SCHEMA_VERSION: Final = 1
#: The first with STRICT tables.
OLDEST_SQLITE: Final = (3, 37, 0)

_SETTINGS: Final = (
    # A commit is on the disk before it is answered. (NORMAL would lose the newest ones with the power.)
    "PRAGMA synchronous = FULL",
    # REPLACE then asks the triggers about what it deletes.
    "PRAGMA recursive_triggers = ON",
    # A forged schema runs no functions of ours.
    "PRAGMA trusted_schema = OFF",
    "PRAGMA journal_size_limit = 67108864",
)

_DAMAGE: Final = frozenset(
    {
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_CONSTRAINT,
        sqlite3.SQLITE_MISMATCH,
        sqlite3.SQLITE_ERROR,
    }
)
_WORDS: Final = {
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_BUSY: f"another process has held it for {BUSY_SECONDS} seconds",
    sqlite3.SQLITE_LOCKED: f"another process has held it for {BUSY_SECONDS} seconds",
    sqlite3.SQLITE_READONLY: "it cannot be written",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened",
    sqlite3.SQLITE_PERM: "it cannot be opened",
    sqlite3.SQLITE_IOERR: "reading or writing failed",
}


class LedgerDatastore(SQLiteDatastore):
    """Connections to one ledger. Whatever its transactions raise of SQLite is LedgerUnavailable or LedgerCorrupt.

    There are two pools, since in one of the library's a writer that waits for its turn keeps readers waiting.

    `read_only` creates nothing, not even the files that SQLite puts beside a database for its readers: while no
    scheduler has the ledger open, all is in the one file, and it is read as it lies there. A scheduler that opens it
    meanwhile is noticed: the transaction that met it raises LedgerDisturbed, the next one reads beside the scheduler.
    """

    def __init__(self, path: Path, *, read_only: bool) -> None:
        super().__init__(str(path), originator_id_type="text")
        self.path = path
        self.read_only = read_only
        self._writers = _Pool(path, "rw", pool_size=1)
        with translated(path):
            self._file = _identity(path)
            self._seen = _Seen.of(path) if read_only else None
        self._least_bytes = 0
        self.pool = self._readers()

    @contextmanager
    def transaction(self, *, commit: bool) -> Generator[SQLiteCursor]:
        if commit and self.read_only:
            raise LedgerUnavailable(f"{self.path}: it was opened for reading")
        with translated(self.path):
            seen = self._look()
            pool = self._writers if commit else self.pool
            connection = pool.get_connection()
            try:
                with connection.transaction(commit=commit) as cursor:
                    yield cursor
            finally:
                pool.put_connection(connection)
            if seen is not None and seen != _Seen.of(self.path):
                raise LedgerDisturbed(f"{self.path}: a scheduler opened it while it was being read")

    def close(self) -> None:
        self._writers.close()
        super().close()

    def _look(self) -> _Seen | None:
        """What lies there, when it is to be read as it lies there."""
        # SQLite goes on with a file that was removed or replaced, and whatever it then commits is lost.
        if _identity(self.path) != self._file:
            raise LedgerUnavailable(f"{self.path}: the file is gone or was replaced")
        if not self.read_only:
            self._check_length()
        if self._seen is not None and self._seen != (now := _Seen.of(self.path)):
            # Transactions under way keep the pool that they began with.
            self._seen = now
            self.pool = self._readers()
        return None if self._seen is None or self._seen.has_wal else self._seen

    def _check_length(self) -> None:
        """Nothing is taken out of a ledger. SQLite goes on with one that was cut, and spoils what is left of it."""
        least_bytes = self._least_bytes  # before the look: another thread may see a longer one meanwhile
        try:
            size_bytes = self.path.stat().st_size
        except OSError as error:
            raise LedgerUnavailable(f"{self.path}: {error.strerror}") from None
        if size_bytes < least_bytes:
            raise LedgerUnavailable(f"{self.path}: the file was cut short: stop the scheduler, and restore a copy")
        self._least_bytes = max(self._least_bytes, size_bytes)

    def _readers(self) -> _Pool:
        as_it_lies = self._seen is not None and not self._seen.has_wal
        mode = "ro&immutable=1" if as_it_lies else "ro" if self.read_only else "rw"
        return _Pool(self.path, mode, pool_size=4)


class LedgerDisturbed(LedgerUnavailable):
    """What was read is void; reading it again will do."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What differs once somebody has written, or may be about to."""

    has_wal: bool
    mtime_ns: int
    size: int

    @staticmethod
    def of(path: Path) -> _Seen:
        # While there is a write-ahead log SQLite itself keeps readers right: then nothing needs to be compared.
        if _wal(path).exists():
            return _Seen(has_wal=True, mtime_ns=0, size=0)
        found = path.stat()
        return _Seen(has_wal=False, mtime_ns=found.st_mtime_ns, size=found.st_size)


class _Pool(SQLiteConnectionPool):
    def __init__(self, path: Path, mode: str, *, pool_size: int) -> None:
        super().__init__(
            db_name=f"{path.as_uri()}?mode={mode}", pool_size=pool_size, max_overflow=0, pool_timeout=BUSY_SECONDS
        )

    def _create_connection(self) -> SQLiteConnection:
        return _Connection(connect(self.db_name), max_age=None)


class _Connection(SQLiteConnection):
    @contextmanager
    def transaction(self, *, commit: bool) -> Generator[SQLiteCursor]:
        """As the library's, with the write lock from the start, and never left open by a commit that failed."""
        cursor = self.cursor()
        try:
            cursor.execute("BEGIN IMMEDIATE" if commit else "BEGIN")
            yield cursor
            cursor.execute("COMMIT" if commit else "ROLLBACK")
        except BaseException:
            self._give_up()
            raise
        finally:
            with suppress(sqlite3.Error):
                cursor.sqlite_cursor.close()

    def _give_up(self) -> None:
        try:
            self._sqlite_conn.rollback()
        except sqlite3.Error:
            # It is in no known state: the pool forgets connections that are closed.
            self.close()


def connect(uri: str) -> sqlite3.Connection:
    """A connection with every setting that a ledger depends on."""
    connection = sqlite3.connect(
        uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=128
    )
    try:
        if uri.endswith("mode=rw"):
            # A property of the file, which a restored copy may have lost.
            connection.execute("PRAGMA journal_mode = WAL").close()
        for setting in _SETTINGS:
            connection.execute(setting).close()
    except sqlite3.Error:
        connection.close()
        raise
    return connection


@contextmanager
def translated(path: Path) -> Generator[None]:
    """Errors of SQLite, of eventsourcing's pool and of the operating system, as those of the port."""
    try:
        yield
    except sqlite3.Error as error:
        raise _translation(path, error) from error
    except ConnectionPoolClosedError as error:
        raise LedgerUnavailable(f"{path}: the ledger was closed") from error
    except ConnectionUnavailableError as error:
        raise LedgerUnavailable(f"{path}: other threads have held it for {BUSY_SECONDS} seconds") from error
    except OSError as error:
        raise LedgerUnavailable(f"{path}: {error.strerror or error}") from error


def _translation(path: Path, error: sqlite3.Error) -> LedgerCorrupt | LedgerUnavailable:
    # Errors of the module itself have no code.
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_MISUSE) & 0xFF
    if code in _DAMAGE:
        return LedgerCorrupt(f"{path}: it is no ledger, or it is damaged ({error})")
    return LedgerUnavailable(f"{path}: {_WORDS.get(code, 'SQLite failed')} ({error})")


# ---- the file ---------------------------------------------------------------------------------------------------


def ensure(path: Path) -> None:
    """Make an empty ledger at `path` if nothing is there. Raises LedgerUnavailable, LedgerCorrupt.

    It is made under another name and linked into place: there is never half a ledger, and of two processes that make
    one at the same time, one finds the other's.
    """
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        raise LedgerUnavailable(f"{path}: SQLite 3.37 or newer is needed; this Python has {sqlite3.sqlite_version}")
    with translated(path):
        if path.exists():
            return
        if _wal(path).exists():
            # SQLite would play it into whatever file comes to lie beside it.
            raise LedgerCorrupt(f"{path}: the file is gone, but its newest events are still in {_wal(path).name}")
        make_folder(path)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        try:
            _write_schema(draft)
            with suppress(FileExistsError):
                os.link(draft, path)
        finally:
            draft.unlink()
        _sync_directory(path.parent)


def make_folder(path: Path) -> None:
    """The folders that `path` lies in, each for their owner only. Raises OSError."""
    for parent in reversed([parent for parent in path.parents if not parent.exists()]):
        # `parents=True` would give the mode to the last one alone.
        parent.mkdir(mode=0o700, exist_ok=True)


def _write_schema(path: Path) -> None:
    with closing(connect(f"{path.as_uri()}?mode=rw")) as connection:
        connection.executescript(
            f"BEGIN; PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION};"
            f"{_schema_sql()} COMMIT;"
        )


def check(path: Path, cursor: SQLiteCursor) -> None:
    """Raises LedgerCorrupt unless the file is a whole ledger of this release's schema."""
    application_id, version = _pragma(cursor, "application_id"), _pragma(cursor, "user_version")
    if application_id != APPLICATION_ID:
        raise LedgerCorrupt(f"{path}: it is a SQLite database, but not a ledger of gpuledger")
    if version != SCHEMA_VERSION:
        raise LedgerCorrupt(f"{path}: it has ledger schema {version}; this release knows {SCHEMA_VERSION}")
    cursor.execute("SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL")
    found = dict(cursor.fetchall())
    for name, sql in _schema_objects().items():
        if found.get(name) != sql:
            raise LedgerCorrupt(f"{path}: {name} of its schema is missing or was changed")
    cursor.execute("SELECT (SELECT seq FROM head), (SELECT coalesce(max(seq), 0) FROM stored_events)")
    head, newest = cursor.fetchone()
    if head != newest:
        raise LedgerCorrupt(f"{path}: its head is event {head}, but its newest is {newest}")


def _pragma(cursor: SQLiteCursor, name: str) -> int:
    cursor.execute(f"PRAGMA {name}")
    (value,) = cursor.fetchone()
    return int(value)


def _schema_sql() -> str:
    return resources.files("gpuledger.adapters.ledger").joinpath("schema.sql").read_text(encoding="utf-8")


@cache
def _schema_objects() -> dict[str, str]:
    """Name -> SQL of what a ledger consists of, as SQLite writes it down."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(_schema_sql())
        return dict(connection.execute("SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL"))


def _wal(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
