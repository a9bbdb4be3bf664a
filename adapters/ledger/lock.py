"""One scheduler per ledger: an advisory lock beside its file, held while the scheduler lives and gone when it dies.

Appends are right without it (they are conditional); it keeps two schedulers from driving the same cards.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from gpuledger.domain.ports import LedgerUnavailable

from .sqlite_file import make_folder, translated

# `holder` takes the lock for some microseconds to see that nobody has it, and whoever has just taken it has not yet
# written its pid: in both cases another look helps.
_LOOKS: Final = 20
_PAUSE_SECONDS: Final = 0.005


class LedgerInUse(Exception):
    """Another process drives this ledger."""

    def __init__(self, path: Path, pid: int | None) -> None:
        super().__init__(f"{path} is in use by {'another process' if pid is None else f'process {pid}'}")
        self.pid = pid


class LedgerLock:
    """The lock of the ledger at `path`, which need not exist yet, nor need its folder."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Raises LedgerInUse, LedgerUnavailable."""
        with translated(self.path):
            make_folder(self.path)
        descriptor = _open(self.path, os.O_RDWR | os.O_CREAT)
        try:
            if not any(_take(descriptor, fcntl.LOCK_EX) for _ in _looks()):
                raise LedgerInUse(self.path, _pid(descriptor))
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def release(self) -> None:
        """The file stays: removing it would let two processes hold locks on two files of one name."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


def holder(path: str | Path) -> int | None:
    """The process that drives the ledger at `path`, None when none does. Raises LedgerUnavailable."""
    ledger = Path(path).absolute()
    if not _lock_file(ledger).exists():
        return None
    descriptor = _open(ledger, os.O_RDONLY)
    try:
        for _ in _looks():
            if _take(descriptor, fcntl.LOCK_SH):
                return None
            if (pid := _pid(descriptor)) is not None:
                return pid
    finally:
        os.close(descriptor)
    raise LedgerUnavailable(f"{ledger} is in use, but its lock does not say by whom")


def taken_at(path: str | Path) -> int | None:
    """When the lock was last taken or released, in microseconds of the wall clock. Raises LedgerUnavailable."""
    with translated(_lock_file(Path(path).absolute())), suppress(FileNotFoundError):
        return _lock_file(Path(path).absolute()).stat().st_mtime_ns // 1000
    return None


def _lock_file(ledger: Path) -> Path:
    return ledger.with_name(ledger.name + ".lock")


def _open(ledger: Path, flags: int) -> int:
    with translated(_lock_file(ledger)):
        return os.open(_lock_file(ledger), flags | os.O_CLOEXEC, 0o600)


def _take(descriptor: int, mode: int) -> bool:
    try:
        fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _looks() -> Iterator[None]:
    yield
    for _ in range(_LOOKS - 1):
        time.sleep(_PAUSE_SECONDS)
        yield


def _pid(descriptor: int) -> int | None:
    text = os.pread(descriptor, 32, 0)
    return int(text) if text.strip().isdigit() else None
