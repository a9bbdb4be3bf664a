"""Files that clients upload, while their request waits and is served: small ones in memory, the rest without a name.

The file of a large one is unlinked before anything is in it: nobody else opens it, and a crash leaves nothing behind.
All uploads together have a bound, so that a disk of the scheduler's is never filled by clients.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO, Final

from .openai_errors import ApiError, unavailable_error
from .ports import Cause

#: Most spoken questions: a minute of Opus, half a minute of 16 kHz PCM.
MEMORY_BYTES: Final = 1024 * 1024
#: Of all uploads at the same time: 80 of the largest that OpenAI takes (25 MB).
TOTAL_BYTES: Final = 2 * 1024**3

_logger = logging.getLogger(__name__)


class Spool:
    """Where uploads are kept, and how much of them."""

    def __init__(self, folder: Path, total_bytes: int = TOTAL_BYTES) -> None:
        self._folder = folder
        self._total_bytes = total_bytes
        self.held_bytes = 0

    def open(self) -> Spooled:
        """A new one, empty."""
        return Spooled(self)

    def reserve(self, count_bytes: int) -> None:
        """Raises ApiError when all uploads together would be too much."""
        if self.held_bytes + count_bytes > self._total_bytes:
            raise unavailable_error(None, Cause.TOO_MANY_OPEN)
        self.held_bytes += count_bytes

    def release(self, count_bytes: int) -> None:
        self.held_bytes -= count_bytes

    def file(self) -> IO[bytes]:
        """Without a name, for its owner only (mode 0600). Raises OSError."""
        return tempfile.TemporaryFile(dir=self._folder, prefix=".upload-", buffering=0)


class Spooled:
    """One upload. Disk is touched in threads: a slow one never holds up the event loop."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._memory = bytearray()
        self._file: IO[bytes] | None = None
        self._closed = False
        # A thread may still be at the file when its task was cancelled and the upload given up.
        self._lock = threading.Lock()
        self.length_bytes = 0

    async def write(self, chunk: bytes) -> None:
        """Append. Raises ApiError when there is no room for it."""
        self._spool.reserve(len(chunk))
        self.length_bytes += len(chunk)
        if self._file is None and self.length_bytes <= MEMORY_BYTES:
            self._memory += chunk
            return
        try:
            await asyncio.to_thread(self._append, chunk)
        except OSError as error:
            _logger.error("an upload could not be kept: %s", error)
            raise ApiError(503, "upload_not_kept", "the server has no room for the file", retry_after=5) from None

    async def chunks(self, chunk_bytes: int) -> AsyncIterator[bytes]:
        """All of it, from its beginning. Raises OSError."""
        for offset in range(0, self.length_bytes, chunk_bytes):
            if self._file is None:
                yield bytes(self._memory[offset : offset + chunk_bytes])
            else:
                yield await asyncio.to_thread(self._read, offset, chunk_bytes)

    def close(self) -> None:
        """Give it up. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._spool.release(self.length_bytes)
            self._memory.clear()
            if self._file is not None:
                self._file.close()

    # ---- in a thread -----------------------------------------------------------------------------------------------

    def _append(self, chunk: bytes) -> None:
        with self._lock:
            if self._closed:
                return
            if self._file is None:
                self._file = self._spool.file()
                _write_all(self._file, bytes(self._memory))
                self._memory.clear()
            _write_all(self._file, chunk)

    def _read(self, offset: int, chunk_bytes: int) -> bytes:
        with self._lock:
            if self._closed or self._file is None:
                raise OSError("the upload was given up")
            self._file.seek(offset)
            return self._file.read(chunk_bytes)


def _write_all(file: IO[bytes], data: bytes) -> None:
    """An unbuffered file may take less than it is given."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
