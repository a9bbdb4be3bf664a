"""The bytes that the reference runtime holds: private pages, touched by the kernel when they are mapped."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import AsyncIterator, Generator
from contextlib import contextmanager

LOAD_STEP_MS = 50
#: So that there is a midst of a load, however short it is.
LEAST_STEPS = 2


class Memory:
    """Exact for the process as a whole: what the interpreter has by itself is part of every figure."""

    def __init__(self, idle_bytes: int, peak_bytes: int, parallel: int) -> None:
        self._own_bytes = _own_bytes()
        self._idle_bytes = idle_bytes
        self._request_bytes = (peak_bytes - idle_bytes) // parallel
        self._held: list[mmap.mmap] = []
        self._leaked: list[mmap.mmap] = []

    async def load(self, duration_ms: int) -> AsyncIterator[float]:
        """Take the idle bytes in equal steps over the time that loading is to take; the share taken, at each.

        Raises MemoryError when the system has not as much.
        """
        self.release()
        missing = max(0, self._idle_bytes - self._own_bytes)
        steps = max(LEAST_STEPS, duration_ms // LOAD_STEP_MS)
        for step in range(1, steps + 1):
            self._held += _take(missing * step // steps - missing * (step - 1) // steps)
            yield step / steps
            await asyncio.sleep(duration_ms / steps / 1000)

    def shrink(self, left_bytes: int) -> None:
        """Hold so much and no more; what a fault made it take stays."""
        self.release()
        self._held = _take(left_bytes - self._own_bytes)

    def release(self) -> None:
        _give_back(self._held)
        self._held = []

    def leak(self, count_bytes: int) -> None:
        """Take so much on top, once, and keep it."""
        if not self._leaked:
            self._leaked = _take(count_bytes)

    @contextmanager
    def of_a_request(self, body_bytes: int) -> Generator[None]:
        """The share of one request. The body of the request is in memory already, and part of it."""
        taken = _take(self._request_bytes - body_bytes)
        try:
            yield
        finally:
            _give_back(taken)


def _take(count_bytes: int) -> list[mmap.mmap]:
    """Raises MemoryError when the system has not as much."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    try:
        return [mmap.mmap(-1, count_bytes, flags=flags)] if count_bytes > 0 else []
    except OSError as error:
        raise MemoryError from error


def _give_back(pages: list[mmap.mmap]) -> None:
    for one in pages:
        one.close()


def _own_bytes() -> int:
    """What the interpreter holds by itself, its libraries counted whole as the telemetry counts them."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) * 1024
