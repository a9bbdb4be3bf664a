"""One scheduler per ledger (adapters/ledger/lock.py)."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuledger.adapters.ledger.lock import LedgerInUse, LedgerLock, holder
from gpuledger.adapters.ledger.sqlite import SqliteLedger
from gpuledger.domain.ports import LedgerUnavailable

HOLDER = """
import sys
from gpuledger.adapters.ledger.lock import LedgerLock
LedgerLock(sys.argv[1]).acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@contextmanager
def held_by_another(path: Path) -> Generator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_one_at_a_time(path: Path) -> None:
    lock = LedgerLock(path)
    with lock:
        assert holder(path) == os.getpid()
        with pytest.raises(LedgerInUse, match=f"ledger.db is in use by process {os.getpid()}") as caught:
            LedgerLock(path).acquire()
        assert caught.value.pid == os.getpid()
    assert holder(path) is None
    with LedgerLock(path):
        assert holder(path) == os.getpid()


def test_another_process_is_named(path: Path) -> None:
    with held_by_another(path) as process:
        assert holder(path) == process.pid
        with pytest.raises(LedgerInUse) as caught:
            LedgerLock(path).acquire()
        assert caught.value.pid == process.pid


def test_who_dies_lets_go(path: Path) -> None:
    with held_by_another(path) as process:
        process.kill()
        process.wait()
        assert holder(path) is None, "though its pid still stands in the file"
        with LedgerLock(path):
            assert holder(path) == os.getpid()


def test_asking_creates_nothing(path: Path) -> None:
    assert holder(path) is None
    assert os.listdir(path.parent) == []


def test_asking_keeps_nobody_from_taking_it(path: Path) -> None:
    with LedgerLock(path):
        pass
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            holder(path)

    asking = [threading.Thread(target=ask) for _ in range(2)]
    for thread in asking:
        thread.start()
    try:
        for _ in range(100):
            with LedgerLock(path):
                pass
    finally:
        stop.set()
        for thread in asking:
            thread.join()


def test_a_process_started_while_it_is_held_does_not_hold_it(path: Path) -> None:
    """A runtime outlives the scheduler that started it; it must not keep the next one out."""
    lock = LedgerLock(path)
    lock.acquire()
    with subprocess.Popen(["sleep", "60"]) as process:
        lock.release()
        with LedgerLock(path):
            pass
        process.kill()


def test_releasing_twice_is_nothing(path: Path) -> None:
    lock = LedgerLock(path)
    lock.acquire()
    lock.release()
    with LedgerLock(path):
        lock.release()
        assert holder(path) == os.getpid()


def test_only_its_owner_reads_it(path: Path) -> None:
    with LedgerLock(path):
        assert (path.parent / "ledger.db.lock").stat().st_mode & 0o777 == 0o600


def test_its_folder_is_made(tmp_path: Path) -> None:
    with LedgerLock(tmp_path / "state" / "ledger.db"):
        assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_made(path: Path) -> None:
    path.touch()
    with pytest.raises(LedgerUnavailable):
        LedgerLock(path / "ledger.db").acquire()


def test_it_does_not_touch_the_ledger(path: Path) -> None:
    """Who opens and closes SQLite's file takes away its own process's locks (sqlite.org/howtocorrupt.html)."""
    with LedgerLock(path):
        assert not path.exists()
        SqliteLedger(path).close()
