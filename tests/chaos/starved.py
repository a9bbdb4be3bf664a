"""How much of the processor the scheduler got of what it wanted: on a machine that others keep busy, it falls behind.

A state that is too old to decide on is then told, and not guessed at (SCHEDULER_STATE_STALE): the right answer. While
the scheduler had the processor to itself, it is a defect.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final

from gpuledger.adapters.procfs import read_process_file
from gpuledger.domain.units import MICROS_PER_SECOND

#: A sample counts for 15 seconds; what delayed it is to be found in those before, and some more.
_WINDOW_SECONDS: Final = 25.0
#: Waited for the processor for so many hundredths of the window.
_STARVED_HUNDREDTHS: Final = 30


@dataclass(frozen=True, slots=True)
class _Stretch:
    until: int
    seconds: float
    ran_seconds: float
    waited_seconds: float


@dataclass
class Starvation:
    """Times of the scheduler's main thread, in stretches between two looks (/proc/PID/schedstat, in nanoseconds)."""

    ran_seconds: float = 0.0
    waited_seconds: float = 0.0
    _stretches: list[_Stretch] = field(default_factory=list[_Stretch])
    _before: tuple[int, float, int, int] | None = None

    def look(self, pid: int) -> None:
        """Once a second or so."""
        told = (read_process_file(pid, "schedstat") or b"").split()
        if len(told) < 2:
            self._before = None
            return
        now = (pid, time.monotonic(), int(told[0]), int(told[1]))
        if self._before is not None and self._before[0] == pid:
            _, at, ran, waited = self._before
            stretch = _Stretch(time.time_ns() // 1000, now[1] - at, (now[2] - ran) / 1e9, (now[3] - waited) / 1e9)
            self._stretches.append(stretch)
            self.ran_seconds += stretch.ran_seconds
            self.waited_seconds += stretch.waited_seconds
        self._before = now

    def explains(self, at: int) -> bool:
        """Whether it waited for the processor for much of the time before an instant of the ledger."""
        begin = at - int(_WINDOW_SECONDS * MICROS_PER_SECOND)
        # The stretch in which the instant is counts as well.
        window = [one for one in self._stretches if begin <= one.until <= at + 2 * MICROS_PER_SECOND]
        seconds = sum(one.seconds for one in window)
        return seconds > 0 and sum(one.waited_seconds for one in window) * 100 >= seconds * _STARVED_HUNDREDTHS
