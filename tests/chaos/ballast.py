"""Memory pressure that comes and goes: hogs that hold what others would have to hold for the level that is drawn.

The bound is hard: before each step the machine is looked at, and what would leave less than `SPARED_BYTES` free is not
taken; when others took it, ballast goes. Hogs end with this process, however that ends.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Final

from gpuledger.domain.units import MIB

from .hog import CHUNK_MIB
from .scene import BALLAST_BYTES, ROOM_BYTES, SPARED_BYTES, memory

#: How often the machine is looked at. Spikes last as long as a few of these.
STEP_SECONDS: Final = 0.5
HOGS: Final = 3
_CHUNK_BYTES: Final = CHUNK_MIB * MIB
#: Hundredths of the room that others take, and for how long at least and at most, in seconds; drawn by weight.
_LEVELS: Final = ((0, 8, 25, 6), (25, 5, 12, 2), (45, 5, 15, 2), (65, 4, 12, 2), (90, 3, 8, 1), (100, 1, 3, 1))


class Hog:
    """One child."""

    def __init__(self) -> None:
        self._child = subprocess.Popen(
            (sys.executable, "-m", "tests.chaos.hog"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.held_bytes = 0

    @property
    def pid(self) -> int:
        return self._child.pid

    def hold(self, wanted_bytes: int) -> None:
        """As much as it is told, when this returns. Raises OSError where it is gone."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        print(wanted_bytes // MIB, file=self._child.stdin, flush=True)
        told = self._child.stdout.readline()
        if not told:
            raise ProcessLookupError("a hog is gone")
        self.held_bytes = int(told) * MIB

    def end(self) -> None:
        """At once; all that it holds is free when this returns."""
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()
        self.held_bytes = 0


@dataclass
class Ballast:
    """Keeps what others use of the machine at a level. `ours`: what our models hold now, in bytes."""

    base_bytes: int
    draw: Random
    ours: Callable[[], int]
    stormy: bool = False
    most_bytes: int = 0
    deaths: int = 0
    _hogs: list[Hog] = field(default_factory=list[Hog])
    _stop: threading.Event = field(default_factory=threading.Event)
    _level: int = 0
    _until: float = 0.0

    def run(self) -> None:
        """Until it is stopped; nothing is held when it returns."""
        try:
            while not self._stop.wait(STEP_SECONDS):
                self._choose_level()
                self._weigh(self.base_bytes + ROOM_BYTES * self._level // 100)
        finally:
            for hog in self._hogs:
                hog.end()
            self._hogs.clear()

    def stop(self) -> None:
        self._stop.set()

    @property
    def held_bytes(self) -> int:
        return sum(hog.held_bytes for hog in self._hogs)

    def _choose_level(self) -> None:
        now = time.monotonic()
        if not self.stormy:
            self._level = 0
        elif now >= self._until:
            level, least, most, _ = self.draw.choices(_LEVELS, [weight for *_, weight in _LEVELS])[0]
            self._level, self._until = level, now + self.draw.uniform(least, most)
            if self._hogs and self.draw.randrange(6) == 0:
                self._lose(self.draw.choice(self._hogs))  # all of its memory at once

    def _weigh(self, target_bytes: int) -> None:
        total_bytes, available_bytes = memory()
        held_bytes = self.held_bytes
        others_bytes = total_bytes - available_bytes - held_bytes - self.ours()
        spare_bytes = available_bytes + held_bytes - SPARED_BYTES
        wanted_bytes = max(0, min(target_bytes - others_bytes, BALLAST_BYTES + ROOM_BYTES, spare_bytes))
        if abs(wanted_bytes - held_bytes) >= _CHUNK_BYTES * HOGS:
            self._share(wanted_bytes)
        self.most_bytes = max(self.most_bytes, self.held_bytes)

    def _share(self, wanted_bytes: int) -> None:
        while len(self._hogs) < HOGS:
            self._hogs.append(Hog())
        for hog in tuple(self._hogs):
            try:
                hog.hold(wanted_bytes // HOGS)
            except OSError:
                self._lose(hog)

    def _lose(self, hog: Hog) -> None:
        hog.end()
        self._hogs.remove(hog)
        self.deaths += 1
