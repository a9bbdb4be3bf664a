"""The clock of the ledger (semantics.md, preamble): driven by what nobody can set, drawn towards the wall clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

_NANOS_PER_MICRO: Final = 1_000
_MICROS_PER_MS: Final = 1_000
#: How often the wall clock is looked at, and by how much of that time at most an instant is drawn towards it: as NTP
#: slews, so that leases and samples never age at once by a step, and an hour's step is caught up with within a day.
SEGMENT_MICROS: Final = 1_000_000
MAX_CORRECTION_MICROS: Final = SEGMENT_MICROS // 20


def _boot_time_ns() -> int:
    """Monotonic, and unlike CLOCK_MONOTONIC it goes on while the machine sleeps: leases age through a suspend."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class LedgerClock:
    """Instants that start at the later of the wall clock and the ledger's newest event, and never run backwards.

    After the start a step of the wall clock moves no instant: leases neither expire at once nor live on because of an
    NTP correction. What they differ by is made up by a twentieth of the time that passes. Any thread may call.
    """

    def __init__(
        self,
        newest_at: int = 0,
        *,
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = _boot_time_ns,
    ) -> None:
        """`newest_at`: `at` of the newest event in microseconds, 0 for an empty ledger."""
        self._wall_ns = wall_ns
        self._monotonic_ns = monotonic_ns
        self._lock = threading.Lock()
        self._began = monotonic_ns() // _NANOS_PER_MICRO
        self._anchor = max(wall_ns() // _NANOS_PER_MICRO, newest_at)
        self._correction = 0

    def now(self) -> int:
        """An instant in microseconds; never less than the one before."""
        with self._lock:
            return self._now()

    def skew_ms(self) -> int:
        """How far the wall clock is ahead of this one; negative where it is behind."""
        with self._lock:
            return (self._wall_ns() // _NANOS_PER_MICRO - self._now()) // _MICROS_PER_MS

    def _now(self) -> int:
        monotonic = self._monotonic_ns() // _NANOS_PER_MICRO
        elapsed = monotonic - self._began
        now = self._anchor + elapsed + self._correction * min(elapsed, SEGMENT_MICROS) // SEGMENT_MICROS
        if elapsed >= SEGMENT_MICROS:
            # The next segment begins where this one has led, and is bent towards what the wall clock says by then.
            ahead = self._wall_ns() // _NANOS_PER_MICRO - now
            self._began, self._anchor = monotonic, now
            self._correction = max(-MAX_CORRECTION_MICROS, min(MAX_CORRECTION_MICROS, ahead))
        return now
