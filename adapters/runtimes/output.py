"""What a runtime prints: copied from its pipe to a file of bounded size that only its owner can read.

Prompts can appear in the output of a runtime (runtimes.md), and a runtime that nobody reads from must not stand still
for a full pipe or fill a disk.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

#: Of the state folder: where the logs are.
LOG_FOLDER: Final = "runtimes"
_CHUNK_BYTES: Final = 64 * 1024


def log_path(folder: Path, deployment_id: str, accelerator_id: str) -> Path:
    """One for each pair, so that their number is bounded too. Ids may hold slashes, the name holds none."""
    digest = hashlib.sha256(f"{deployment_id}\n{accelerator_id}".encode()).hexdigest()[:12]
    readable = re.sub(r"[^A-Za-z0-9._-]", "_", deployment_id)[:80]
    return folder / f"{readable}-{digest}.log"


class BoundedLog:
    """A file of at most `limit_bytes`. When it would grow beyond, its newer half stays. Thread-safe.

    The log of the run before is kept beside it as `NAME.1`.
    """

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self._limit_bytes = max(2 * _CHUNK_BYTES, limit_bytes)
        self._lock = threading.Lock()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            path.replace(path.with_name(path.name + ".1"))
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor: int | None = os.open(path, flags, 0o600)

    def write(self, chunk: bytes) -> None:
        """Append at most 64 KiB. What cannot be written (disk full) is dropped: the runtime goes on."""
        with self._lock, suppress(OSError):
            if self._descriptor is not None:
                if os.fstat(self._descriptor).st_size + len(chunk) > self._limit_bytes:
                    self._keep_newer_half(self._descriptor)
                os.write(self._descriptor, chunk)

    def tail(self, count_bytes: int = 4096) -> bytes:
        """The newest bytes; empty once closed."""
        with self._lock, suppress(OSError):
            if self._descriptor is not None:
                return _tail(self._descriptor, count_bytes)
        return b""

    def close(self) -> None:
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _keep_newer_half(self, descriptor: int) -> None:
        kept = _tail(descriptor, self._limit_bytes // 2 - _CHUNK_BYTES // 2)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, kept)


def _tail(descriptor: int, count_bytes: int) -> bytes:
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, count_bytes, max(0, size - count_bytes))


def pump(source: IO[bytes], log: BoundedLog) -> None:
    """Copy `source` to `log` until every writer has closed it. Runs in a thread of its own and never waits for us."""
    with source:
        while chunk := os.read(source.fileno(), _CHUNK_BYTES):
            log.write(chunk)
