"""The embedded ledger on a real disk: several processes, kills, full disks, forged rows, files that are no ledger."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from gpuledger.adapters.ledger import sqlite_file
from gpuledger.adapters.ledger.codec import decode, draft, leaf_hash
from gpuledger.adapters.ledger.sqlite import SqliteLedger
from gpuledger.domain.events import LeaseRenewed, NewEvent, Recorded
from gpuledger.domain.ports import Batch, Ledger, LedgerConflict, LedgerCorrupt, LedgerUnavailable, Snapshot
from gpuledger.domain.units import parse_instant

ROOT = Path(__file__).resolve().parents[2]
AT = parse_instant("2026-11-30T12:00:00.000000Z")
STREAM = "accelerator:GPU-0"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
def ledger(path: Path) -> Iterator[SqliteLedger]:
    with closing(SqliteLedger(path)) as opened:
        yield opened


def append(ledger: Ledger, count: int = 1, stream: str = STREAM) -> tuple[Recorded, ...]:
    event = NewEvent(stream, LeaseRenewed("lease-1", AT))
    return ledger.append(Batch((event,) * count, {stream: ledger.stream_version(stream)}), AT)


def append_for_ever(ledger: Ledger) -> NoReturn:
    while True:
        append(ledger, 3)


def foreign(path: Path, *statements: str) -> None:
    """What somebody does to the file with a plain SQLite."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def writers(path: Path, *streams: str, count: int) -> list[subprocess.Popen[str]]:
    """Processes that all begin to append when the last of them is ready."""
    command = [sys.executable, "-m", "tests.integration.ledger_writer", str(path)]
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen([*command, stream, str(count)], cwd=ROOT, text=True, stdin=pipe, stdout=pipe, stderr=pipe)
        for stream in streams
    ]
    for process in processes:
        assert said(process) == "ready"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return processes


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def check_whole(path: Path) -> int:
    """Dense over all and per stream, hashes right, canonical: what a verifier would ask. Answers the head."""
    with closing(SqliteLedger(path, read_only=True)) as ledger:
        versions: dict[str, int] = {}
        count = 0
        for count, leaf in enumerate(ledger.leaves(), 1):
            event = decode(leaf.body, count, exact=True)
            assert leaf_hash(leaf.body) == leaf.leaf_hash
            assert event.version == versions.get(event.stream, 0) + 1
            versions[event.stream] = event.version
        assert count == ledger.head()
        return count


class TestFile:
    def test_only_its_owner_reads_it(self, tmp_path: Path) -> None:
        path = tmp_path / "state" / "gpuledger" / "ledger.db"
        with closing(SqliteLedger(path)) as ledger:
            append(ledger)
            modes = {name.name: name.stat().st_mode & 0o777 for name in path.parent.iterdir()}
        assert modes == {"ledger.db": 0o600, "ledger.db-wal": 0o600, "ledger.db-shm": 0o600}
        assert [folder.stat().st_mode & 0o777 for folder in (path.parent, path.parent.parent)] == [0o700, 0o700]

    @pytest.mark.parametrize("name", ["a b.db", "?mode=memory", "100%41#x.db", "ключ.db", ":memory:", "x&immutable=1"])
    def test_its_name_is_only_a_name(self, tmp_path: Path, name: str) -> None:
        with closing(SqliteLedger(tmp_path / name)) as ledger:
            append(ledger)
        assert os.listdir(tmp_path) == [name]
        assert check_whole(tmp_path / name) == 1

    def test_every_setting_is_given_here(self, ledger: SqliteLedger, monkeypatch: pytest.MonkeyPatch) -> None:
        """eventsourcing's factories take settings from the environment; a ledger must not."""
        for name, value in {"COMPRESSOR_TOPIC": "zlib", "CIPHER_KEY": "x", "SQLITE_DBNAME": "/nowhere"}.items():
            monkeypatch.setenv(name, value)
        append(ledger)
        assert ledger.read()[0].data == LeaseRenewed("lease-1", AT)
        with closing(sqlite_file.connect(f"{ledger.path.as_uri()}?mode=rw")) as connection:
            settings = ("journal_mode", "synchronous", "recursive_triggers", "trusted_schema")
            found = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in settings]
        assert found == ["wal", 2, 1, 0]

    def test_processes_that_make_it_at_once_make_one(self, path: Path) -> None:
        made = writers(path, *(f"accelerator:GPU-{number}" for number in range(4)), count=3)
        assert [(process.communicate(timeout=60)[1], process.returncode) for process in made] == [("", 0)] * 4
        assert check_whole(path) == 24
        assert os.listdir(path.parent) == [path.name]

    def test_a_restored_copy_is_taken_up(self, ledger: SqliteLedger, tmp_path: Path) -> None:
        """`VACUUM INTO`, the backup of SQLite itself, leaves the mode of the journal behind."""
        append(ledger, 5)
        foreign(ledger.path, f"VACUUM INTO '{tmp_path / 'copy.db'}'")
        with closing(SqliteLedger(tmp_path / "copy.db")) as copy:
            assert copy.read() == ledger.read()
            assert append(copy)[0].seq == 6
            assert (tmp_path / "copy.db-wal").exists()

    @pytest.mark.parametrize("replaced", [False, True])
    def test_a_file_that_is_gone_is_not_written_on(self, ledger: SqliteLedger, replaced: bool) -> None:
        append(ledger)
        if replaced:
            foreign(ledger.path, f"VACUUM INTO '{ledger.path}.copy'")
            ledger.path.with_name("ledger.db.copy").replace(ledger.path)
        else:
            ledger.path.unlink()
        with pytest.raises(LedgerUnavailable, match="is gone or was replaced"):
            append(ledger)
        with pytest.raises(LedgerUnavailable, match="is gone or was replaced"):
            ledger.read()

    @pytest.mark.parametrize("length", [0, 4096])
    def test_a_file_that_was_cut_is_not_written_on(self, ledger: SqliteLedger, length: int) -> None:
        for _ in range(50):
            append(ledger)
        foreign(ledger.path, "PRAGMA wal_checkpoint(PASSIVE)")
        append(ledger)
        cut = ledger.path.stat().st_size
        assert cut > 4096
        os.truncate(ledger.path, length)
        with pytest.raises(LedgerUnavailable, match="was cut short"):
            append(ledger)
        with pytest.raises(LedgerUnavailable, match="was cut short"):
            ledger.read()
        assert ledger.path.stat().st_size == length

    def test_a_log_that_lost_its_file_is_not_played_into_a_new_one(self, ledger: SqliteLedger) -> None:
        append(ledger)
        ledger.path.unlink()
        with pytest.raises(LedgerCorrupt, match=r"the file is gone, .* still in ledger\.db-wal"):
            SqliteLedger(ledger.path)
        assert not ledger.path.exists()

    def test_after_its_end(self, path: Path) -> None:
        ledger = SqliteLedger(path)
        ledger.close()
        ledger.close()
        with pytest.raises(LedgerUnavailable, match="the ledger was closed"):
            ledger.head()


class TestNoLedger:
    def test_nothing_there_to_read(self, path: Path) -> None:
        with pytest.raises(LedgerUnavailable, match="No such file"):
            SqliteLedger(path, read_only=True)
        assert os.listdir(path.parent) == []

    @pytest.mark.parametrize("read_only", [False, True])
    @pytest.mark.parametrize(
        ("content", "message"),
        [(b"", "the file is empty"), (b"x" * 5000, "it is no ledger"), (b'{"at":\n', "it is no ledger")],
    )
    def test_another_file(self, path: Path, content: bytes, message: str, read_only: bool) -> None:
        path.write_bytes(content)
        with pytest.raises(LedgerCorrupt, match=message):
            SqliteLedger(path, read_only=read_only)
        assert path.read_bytes() == content
        assert os.listdir(path.parent) == [path.name]

    def test_another_database(self, path: Path) -> None:
        foreign(path, "CREATE TABLE stored_events (x)")
        with pytest.raises(LedgerCorrupt, match="a SQLite database, but not a ledger"):
            SqliteLedger(path)

    def test_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(LedgerUnavailable, match="is a directory"):
            SqliteLedger(tmp_path)

    def test_an_old_sqlite(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sqlite_file, "OLDEST_SQLITE", (99, 0, 0))
        with pytest.raises(LedgerUnavailable, match="or newer is needed"):
            SqliteLedger(path)

    def test_one_of_a_newer_release(self, ledger: SqliteLedger) -> None:
        foreign(ledger.path, "PRAGMA user_version = 2")
        with pytest.raises(LedgerCorrupt, match="it has ledger schema 2; this release knows 1"):
            SqliteLedger(ledger.path)

    @pytest.mark.parametrize(
        "damage",
        [
            "DROP TRIGGER stored_events_no_delete",
            "DROP INDEX stored_events_topic",
            "DROP TABLE snapshots",
            "ALTER TABLE head ADD COLUMN more ANY",
        ],
    )
    def test_one_whose_schema_was_changed(self, ledger: SqliteLedger, damage: str) -> None:
        foreign(ledger.path, damage)
        with pytest.raises(LedgerCorrupt, match="of its schema is missing or was changed"):
            SqliteLedger(ledger.path)

    def test_others_may_keep_tables_in_the_file(self, ledger: SqliteLedger) -> None:
        foreign(ledger.path, "CREATE TABLE checkpoints (note TEXT)")
        SqliteLedger(ledger.path).close()

    def test_a_damaged_page_is_told_apart_from_a_failing_disk(self, ledger: SqliteLedger) -> None:
        append(ledger, 400)
        ledger.close()
        content = bytearray(ledger.path.read_bytes())
        content[4096 * 4 : 4096 * 30] = b"\xa5" * (4096 * 26)
        ledger.path.write_bytes(content)
        with pytest.raises(LedgerCorrupt, match="it is damaged"), closing(SqliteLedger(ledger.path)) as damaged:
            damaged.read()


class TestAccidents:
    """Rows are refused by the database itself, to whatever connection asks (ledger.md, Tamper evidence)."""

    VALUES = f"'{STREAM}', 3, 'LeaseRenewed', x'00', x'00'"

    @pytest.mark.parametrize(
        "statement",
        [
            "UPDATE stored_events SET state = x'00' WHERE seq = 1",
            "UPDATE OR REPLACE stored_events SET seq = 2 WHERE seq = 1",
            "UPDATE OR IGNORE stored_events SET topic = 'x'",
            "DELETE FROM stored_events",
            "DELETE FROM stored_events WHERE seq = 2",
            f"INSERT OR REPLACE INTO stored_events VALUES (1, {VALUES})",
            f"INSERT OR REPLACE INTO stored_events VALUES (3, {VALUES.replace('3', '2')})",
            f"INSERT OR IGNORE INTO stored_events VALUES (1, {VALUES})",
            f"INSERT INTO stored_events VALUES (1, {VALUES}) ON CONFLICT DO UPDATE SET state = x'01'",
            f"REPLACE INTO stored_events VALUES (2, {VALUES})",
            f"INSERT INTO stored_events VALUES (4, {VALUES})",
            f"INSERT INTO stored_events VALUES (NULL, {VALUES})",
            f"INSERT INTO stored_events VALUES (3, {VALUES.replace('3', '4')})",
            "UPDATE head SET seq = 1",
            "UPDATE head SET at = 0",
            "UPDATE OR REPLACE head SET one = 2",
            "REPLACE INTO head VALUES (1, 0, 0)",
            "DELETE FROM head",
        ],
    )
    def test_nothing_but_an_append_is_taken(self, ledger: SqliteLedger, statement: str) -> None:
        append(ledger, 2)
        before = list(ledger.leaves())
        for setting in ("PRAGMA recursive_triggers = OFF", "PRAGMA recursive_triggers = ON"):
            with pytest.raises(sqlite3.IntegrityError):
                foreign(ledger.path, setting, statement)
        assert list(ledger.leaves()) == before
        assert append(ledger)[0].seq == 3


class TestForged:
    """With the triggers dropped. What the tree of hashes would show, a reader of one event can show already."""

    @pytest.fixture
    def forge(self, ledger: SqliteLedger) -> Callable[[str], None]:
        append(ledger, 3)

        def forge(statement: str) -> None:
            triggers = ("no_update", "no_delete", "seq_is_dense", "version_is_dense")
            foreign(ledger.path, *(f"DROP TRIGGER stored_events_{name}" for name in triggers), statement)

        return forge

    def test_other_bytes(self, ledger: SqliteLedger, forge: Callable[[str], None]) -> None:
        forge("UPDATE stored_events SET state = CAST(replace(state, 'lease-1', 'lease-2') AS BLOB) WHERE seq = 2")
        with pytest.raises(LedgerCorrupt, match="event 2: its bytes are not those that were appended"):
            ledger.read()
        assert len(ledger.read(2)) == 1
        assert len(list(ledger.leaves())) == 3, "unjudged, for the verifier"

    def test_other_bytes_with_their_hash(self, ledger: SqliteLedger, forge: Callable[[str], None]) -> None:
        body = [*ledger.leaves()][1].body.replace(b'"seq":2', b'"seq":9')
        forge(f"UPDATE stored_events SET state = x'{body.hex()}', leaf_hash = x'{leaf_hash(body).hex()}' WHERE seq = 2")
        with pytest.raises(LedgerCorrupt, match="event 2: says that it is event 9"):
            ledger.read()

    @pytest.mark.parametrize(
        "change", ["originator_version = 9", "topic = 'LeaseExpired'", "originator_id = 'accelerator:GPU-1'"]
    )
    def test_another_row_around_the_bytes(
        self, ledger: SqliteLedger, forge: Callable[[str], None], change: str
    ) -> None:
        forge(f"UPDATE stored_events SET {change} WHERE seq = 2")
        with pytest.raises(LedgerCorrupt, match="event 2: its row says another stream, version or type"):
            ledger.read()

    def test_a_topic_is_never_imported(self, ledger: SqliteLedger, forge: Callable[[str], None]) -> None:
        """eventsourcing's own mapper would import `antigravity`."""
        body = [*ledger.leaves()][1].body.replace(b"LeaseRenewed", b"antigravity")
        forge(
            f"UPDATE stored_events SET topic = 'antigravity:fly', state = x'{body.hex()}',"
            f" leaf_hash = x'{leaf_hash(body).hex()}' WHERE seq = 2"
        )
        with pytest.raises(LedgerCorrupt, match="event 2: its type antigravity is not one this release knows"):
            ledger.read()
        assert "antigravity" not in sys.modules

    def test_a_row_that_is_missing(self, ledger: SqliteLedger, forge: Callable[[str], None]) -> None:
        forge("DELETE FROM stored_events WHERE seq = 2")
        with pytest.raises(LedgerCorrupt, match="event 2: is missing"):
            ledger.read()
        with pytest.raises(LedgerCorrupt, match="event 2: is missing"):
            list(ledger.leaves())
        assert len(ledger.read(2)) == 1

    def test_rows_that_are_missing_at_the_end(self, ledger: SqliteLedger, forge: Callable[[str], None]) -> None:
        forge("DELETE FROM stored_events WHERE seq > 1")
        with pytest.raises(LedgerCorrupt, match="event 2: is missing"):
            ledger.read()

    def test_an_end_that_is_missing_is_seen_at_the_start(self, ledger: SqliteLedger) -> None:
        append(ledger, 3)
        with closing(sqlite3.connect(ledger.path, isolation_level=None)) as connection:
            (sql,) = connection.execute(
                "SELECT sql FROM sqlite_schema WHERE name = 'stored_events_no_delete'"
            ).fetchone()
            connection.execute("DROP TRIGGER stored_events_no_delete")
            connection.execute("DELETE FROM stored_events WHERE seq = 3")
            connection.execute(sql)
        with pytest.raises(LedgerCorrupt, match="its head is event 3, but its newest is 2"):
            SqliteLedger(ledger.path)


class TestProcesses:
    def test_two_append_at_once(self, path: Path) -> None:
        """Who waits is never told "database is locked" (ledger.md: 153 of 200 were, when reading before writing)."""
        seqs: list[list[int]] = []
        for process in writers(path, STREAM, STREAM, count=200):
            out, err = process.communicate(timeout=120)
            assert (err, process.returncode) == ("", 0)
            seqs.append([int(seq) for seq in out.split()])
        assert min(seqs[0]) < max(seqs[1])
        assert min(seqs[1]) < max(seqs[0]), "they met"
        assert sorted(seqs[0] + seqs[1]) == list(range(2, 802, 2)), "pairs that were appended together stay together"
        assert check_whole(path) == 800

    @pytest.mark.parametrize("after", [1, 40])
    def test_a_killed_one_leaves_what_it_was_promised(self, path: Path, after: int) -> None:
        (process,) = writers(path, STREAM, count=100_000)
        seqs = [int(said(process)) for _ in range(after)]
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate(timeout=60)
        promised = [*seqs, *map(int, rest.splitlines())][-1]
        with closing(SqliteLedger(path)) as ledger:
            assert ledger.head() >= promised
            assert ledger.head() % 2 == 0, "a batch is whole or not there"
            append(ledger)
        assert check_whole(path) >= promised + 1

    def test_another_that_holds_it_is_waited_for(self, ledger: SqliteLedger) -> None:
        held = threading.Event()

        def hold() -> None:
            with closing(sqlite3.connect(ledger.path, isolation_level=None)) as connection:
                connection.execute("BEGIN IMMEDIATE")
                held.set()
                time.sleep(0.3)
                connection.execute("ROLLBACK")

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        assert append(ledger)[0].seq == 1
        thread.join()

    def test_one_that_never_lets_go_is_not_waited_for_forever(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sqlite_file, "BUSY_SECONDS", 0.2)
        with closing(SqliteLedger(path)) as ledger, closing(sqlite3.connect(path, isolation_level=None)) as other:
            append(ledger)
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(LedgerUnavailable, match="another process has held it"):
                append(ledger)
            assert len(ledger.read()) == 1, "readers wait for no writer"
            other.execute("ROLLBACK")
            assert append(ledger)[0].seq == 2

    def test_readers_of_one_process_wait_for_no_writer_that_waits(self, path: Path) -> None:
        with closing(SqliteLedger(path)) as ledger, closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            waiting = [threading.Thread(target=append, args=(ledger, 1, f"accelerator:{n}")) for n in range(3)]
            for thread in waiting:
                thread.start()
            time.sleep(0.1)
            began = time.monotonic()
            assert ledger.read() == ()
            assert time.monotonic() - began < 1
            other.execute("ROLLBACK")
            for thread in waiting:
                thread.join()
            assert ledger.head() == 3


class TestFullDisk:
    """Admissions stop, nothing is lost, and all goes on when there is room (ledger.md, Projections)."""

    def test_a_full_disk(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        connect = sqlite_file.connect
        pages = 40

        def limited(uri: str) -> sqlite3.Connection:
            connection = connect(uri)
            connection.execute(f"PRAGMA max_page_count = {pages}")
            return connection

        SqliteLedger(path).close()
        monkeypatch.setattr(sqlite_file, "connect", limited)
        with closing(SqliteLedger(path)) as ledger:
            with pytest.raises(LedgerUnavailable, match="the disk is full"):
                append_for_ever(ledger)
            head = ledger.head()
            assert head % 3 == 0
            assert len(ledger.read()) == head
            with pytest.raises(LedgerUnavailable, match="the disk is full"):
                append(ledger, 3)
        pages = 4000
        with closing(SqliteLedger(path)) as ledger:
            assert append(ledger, 3)[0].seq == head + 1
        assert check_whole(path) == head + 3

    def test_a_file_that_may_not_grow(self, path: Path) -> None:
        """The write of a page fails half-way, in a process of its own."""
        program = f"""
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from tests.integration.test_ledger_sqlite import *
ledger = SqliteLedger({str(path)!r})
append(ledger, 3)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
try:
    append_for_ever(ledger)
except LedgerUnavailable as error:
    print(error)
assert len(ledger.read()) == ledger.head()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
append(ledger, 3)
ledger.close()
"""
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert "ledger.db: " in done.stdout
        assert check_whole(path) % 3 == 0

    def test_a_small_file_system(self, tmp_path: Path) -> None:
        folder = tmp_path / "small"
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
        if subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("file systems cannot be mounted here")
        try:
            with closing(SqliteLedger(folder / "ledger.db")) as ledger:
                with pytest.raises(LedgerUnavailable, match=r"full|failed"):
                    append_for_ever(ledger)
                head = ledger.head()
                assert len(ledger.read(0, 100_000)) == head
                subprocess.run(["mount", "-o", "remount,size=4m", str(folder)], check=True)
                assert append(ledger, 3)[0].seq == head + 1
            assert check_whole(folder / "ledger.db") == head + 3
        finally:
            subprocess.run(["umount", str(folder)], check=True)


class TestReadOnly:
    def test_it_creates_nothing(self, ledger: SqliteLedger) -> None:
        append(ledger, 5)
        events = ledger.read()
        ledger.close()
        before = ledger.path.read_bytes()
        with closing(SqliteLedger(ledger.path, read_only=True)) as reader:
            assert reader.read() == events
            assert os.listdir(ledger.path.parent) == [ledger.path.name]
        assert os.listdir(ledger.path.parent) == [ledger.path.name]
        assert ledger.path.read_bytes() == before

    def test_it_appends_nothing(self, ledger: SqliteLedger) -> None:
        append(ledger)
        with closing(SqliteLedger(ledger.path, read_only=True)) as reader:
            with pytest.raises(LedgerUnavailable, match="it was opened for reading"):
                append(reader)
            with pytest.raises(LedgerUnavailable, match="it was opened for reading"):
                reader.save_snapshot(Snapshot(1, "state/1", b"", b""))

    def test_it_reads_beside_a_writer(self, ledger: SqliteLedger) -> None:
        with closing(SqliteLedger(ledger.path, read_only=True)) as reader:
            for count in range(1, 5):
                append(ledger)
                assert reader.head() == count
                assert reader.read() == ledger.read()

    def test_it_notices_a_writer_that_comes_and_goes(self, path: Path) -> None:
        SqliteLedger(path).close()
        with closing(SqliteLedger(path, read_only=True)) as reader:
            for head in range(0, 12, 3):
                assert reader.head() == head
                with closing(SqliteLedger(path)) as ledger:
                    assert len(reader.read()) == head
                    append(ledger, 3)
                    assert len(reader.read()) == head + 3
                assert len(reader.read()) == head + 3

    def test_what_a_writer_disturbed_is_read_again(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It comes between the start and the end of a reader's transaction on a ledger at rest."""
        with closing(SqliteLedger(path)) as ledger:
            append(ledger, 3)
        with closing(SqliteLedger(path, read_only=True)) as reader:
            recorder = reader._recorder  # pyright: ignore[reportPrivateUsage]
            select, writers = recorder._select, [SqliteLedger]  # pyright: ignore[reportPrivateUsage]

            def disturbed(*args: object) -> object:
                for make in writers:
                    writers.clear()
                    with closing(make(path)) as ledger:
                        append(ledger, 2)
                return select(*args)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

            monkeypatch.setattr(recorder, "_select", disturbed)
            assert len(reader.read()) == 5

    def test_it_reads_what_a_killed_writer_left(self, path: Path) -> None:
        (process,) = writers(path, STREAM, count=100_000)
        promised = int(said(process))
        process.kill()
        process.communicate(timeout=60)
        assert (path.with_name(path.name + "-wal")).exists()
        assert check_whole(path) >= promised


class TestSnapshots:
    def test_two_are_kept_and_a_damaged_one_is_passed_over(self, ledger: SqliteLedger) -> None:
        append(ledger, 6)
        leaves = list(ledger.leaves())
        snapshots = [Snapshot(leaf.seq, "state/1", leaf.leaf_hash, b"state %d" % leaf.seq) for leaf in leaves[:4]]
        for snapshot in snapshots:
            ledger.save_snapshot(snapshot)
        with closing(sqlite3.connect(ledger.path)) as connection:
            assert connection.execute("SELECT seq FROM snapshots ORDER BY seq").fetchall() == [(3,), (4,)]
        foreign(ledger.path, "UPDATE snapshots SET body = x'00' WHERE seq = 4")
        assert ledger.load_snapshot() == snapshots[2]
        foreign(ledger.path, "UPDATE snapshots SET body = x'00' WHERE seq = 3")
        assert ledger.load_snapshot() is None
        ledger.save_snapshot(replace(snapshots[3], body=b"again"))
        assert ledger.load_snapshot() == replace(snapshots[3], body=b"again")


def test_a_commit_that_failed_leaves_its_connection_usable(
    ledger: SqliteLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's transaction would stay open: "cannot start a transaction within a transaction", for ever."""
    append(ledger)
    recorder = ledger._recorder  # pyright: ignore[reportPrivateUsage]
    insert = recorder._insert_events  # pyright: ignore[reportPrivateUsage]

    def failing(*args: object) -> object:
        insert(*args)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(recorder, "_insert_events", failing)
    with pytest.raises(LedgerUnavailable, match="disk I/O error"):
        append(ledger)
    monkeypatch.undo()
    assert append(ledger)[0].seq == 2


def test_a_conflict_between_two_ledgers_of_one_file(ledger: SqliteLedger) -> None:
    event = NewEvent(STREAM, LeaseRenewed("lease-1", AT))
    with closing(SqliteLedger(ledger.path)) as other:
        append(other)
        with pytest.raises(LedgerConflict):
            ledger.append(Batch((event,), {STREAM: 0}), AT)
        assert [leaf.body for leaf in ledger.leaves()] == [draft(event).leaf(1, 1, AT)]
