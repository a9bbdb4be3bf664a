"""The clock of the ledger (semantics.md, preamble): anchored once to the world, then driven by what nobody can set."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

_NANOS_PER_MICRO: Final = 1_000


def _boot_time_ns() -> int:
    """Monotonic, and unlike CLOCK_MONOTONIC it goes on while the machine sleeps: leases age through a suspend."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class LedgerClock:
    """Instants that start at the later of the wall clock and the ledger's newest event, and never run backwards.

    After the start a step of the wall clock moves no instant: leases neither expire at once nor live on because of an
    NTP correction. Any thread may call; there is nothing to lock.
    """

    def __init__(
        self,
        newest_at: int = 0,
        *,
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = _boot_time_ns,
    ) -> None:
        """`newest_at`: `at` of the newest event in microseconds, 0 for an empty ledger."""
        self._monotonic_ns = monotonic_ns
        self._start_ns = monotonic_ns()
        self._anchor = max(wall_ns() // _NANOS_PER_MICRO, newest_at)

    def now(self) -> int:
        """An instant in microseconds; never less than the one before."""
        return self._anchor + (self._monotonic_ns() - self._start_ns) // _NANOS_PER_MICRO
