"""The file of an embedded ledger: made whole or not at all, opened with explicit settings, its errors put in words.

No setting is read from the environment (eventsourcing's factories merge it), so there is no factory.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
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
# STRICT tables.
_OLDEST_SQLITE: Final = (3, 37, 0)

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

    `read_only` creates nothing, not even the files beside it that SQLite makes for readers: while no scheduler has the
    ledger open, all is in the one file, and it is read as it lies there. A scheduler that opens it meanwhile is
    noticed: the transaction that met it raises LedgerDisturbed, the next one reads beside the scheduler.
    """

    def __init__(self, path: Path, *, read_only: bool) -> None:
        super().__init__(str(path), originator_id_type="text")
        self.path = path
        self.read_only = read_only
        self._file = _identity(path)
        self._open_pool()

    @contextmanager
    def transaction(self, *, commit: bool) -> Generator[SQLiteCursor]:
        self._check_file()
        with translated(self.path), super().transaction(commit=commit) as cursor:
            yield cursor
        if self._quiet is not None and self._quiet != _signature(self.path):
            raise LedgerDisturbed(f"{self.path}: a scheduler opened it while it was being read")

    def _check_file(self) -> None:
        # SQLite goes on with a file that was removed or replaced, and whatever it then commits is lost.
        if _identity(self.path) != self._file:
            raise LedgerUnavailable(f"{self.path}: the file is gone or was replaced")
        if self._quiet is not None and self._quiet != _signature(self.path):
            self.pool.close()
            self._open_pool()

    def _open_pool(self) -> None:
        self._quiet = _signature(self.path) if self.read_only and not _wal(self.path).exists() else None
        mode = "rw" if not self.read_only else "ro" if self._quiet is None else "ro&immutable=1"
        self.pool = _Pool(f"{self.path.as_uri()}?mode={mode}", read_only=self.read_only)


class LedgerDisturbed(LedgerUnavailable):
    """What was read is void; reading it again will do."""


class _Pool(SQLiteConnectionPool):
    def __init__(self, uri: str, *, read_only: bool) -> None:
        super().__init__(db_name=uri, pool_timeout=BUSY_SECONDS)
        self._read_only = read_only

    def _create_connection(self) -> SQLiteConnection:
        connection = connect(self.db_name)
        try:
            connection.execute(f"PRAGMA query_only = {'ON' if self._read_only else 'OFF'}")
        except sqlite3.Error:
            connection.close()
            raise
        return _Connection(connection, max_age=None)


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
            # What state it is in is unknown, as after a failed fsync: the pool forgets closed connections.
            self.close()


def connect(uri: str) -> sqlite3.Connection:
    """A connection with every setting that a ledger depends on."""
    connection = sqlite3.connect(
        uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=128
    )
    try:
        connection.executescript("""
            PRAGMA synchronous = FULL;
            PRAGMA recursive_triggers = ON;
            PRAGMA trusted_schema = OFF;
            PRAGMA journal_size_limit = 67108864;
        """)
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
        code = getattr(error, "sqlite_errorcode", None)
        kind = None if code is None else code & 0xFF
        if kind in _DAMAGE:
            raise LedgerCorrupt(f"{path}: it is no ledger, or it is damaged ({error})") from error
        raise LedgerUnavailable(f"{path}: {_WORDS.get(kind or -1, 'SQLite failed')} ({error})") from error
    except ConnectionPoolClosedError as error:
        raise LedgerUnavailable(f"{path}: the ledger was closed") from error
    except ConnectionUnavailableError as error:
        raise LedgerUnavailable(f"{path}: other threads have held it for {BUSY_SECONDS} seconds") from error
    except OSError as error:
        raise LedgerUnavailable(f"{path}: {error.strerror or error}") from error


# ---- the file ---------------------------------------------------------------------------------------------------


def ensure(path: Path) -> None:
    """Make an empty ledger at `path` if nothing is there. Raises LedgerUnavailable.

    It is made under another name and linked into place: there is never half a ledger, and of two processes that make
    one at the same time, one finds the other's.
    """
    with translated(path):
        if path.exists():
            return
        for parent in reversed([parent for parent in path.parents if not parent.exists()]):
            parent.mkdir(mode=0o700, exist_ok=True)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        try:
            with closing(connect(f"{draft.as_uri()}?mode=rw")) as connection:
                connection.executescript(
                    f"PRAGMA journal_mode = WAL; BEGIN; PRAGMA application_id = {APPLICATION_ID};"
                    f"PRAGMA user_version = {SCHEMA_VERSION}; {_schema_sql()} COMMIT;"
                )
            with suppress(FileExistsError):
                os.link(draft, path)
        finally:
            draft.unlink()
        _sync_directory(path.parent)


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


def use_wal(path: Path) -> None:
    """A restored copy may have lost the mode. Raises LedgerUnavailable."""
    with translated(path), closing(connect(f"{path.as_uri()}?mode=rw")) as connection:
        connection.execute("PRAGMA journal_mode = WAL")


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


def _signature(path: Path) -> tuple[int, int, bool]:
    """What differs once somebody has written, or may be about to."""
    found = path.stat()
    return found.st_mtime_ns, found.st_size, _wal(path).exists()


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
