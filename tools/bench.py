"""The measuring part of `gpuledger bench`: every figure is a ratio to a floor measured in the same run.

A machine that others use as well has no speed of its own, so a number of seconds says little. Here every round does a
piece of work twice, one right after the other: as gpuledger does it, and as the least that anybody could do with the
same bytes (the floor), as often as takes about as long. What slows the machine down slows both, and the median of the
rounds' ratios stays. What waits for nothing is timed in seconds of the processor, which others cannot take away.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

#: Seconds that only grow.
Clock: TypeAlias = Callable[[], float]
Work: TypeAlias = Callable[[], object]
#: Which seconds: those of the wall where a disk or a socket is waited for, those of the processor where nothing is.
Time: TypeAlias = Literal["wall", "cpu"]

#: Also of a bench whose rounds take longer than its time: fewer have no median worth telling.
MIN_ROUNDS: Final = 3
MAX_FLOOR_TIMES: Final = 1_000


@dataclass(frozen=True, slots=True)
class Round:
    """The same work done twice. `units` says how much of it there was; both durations are for all of them, once."""

    units: int
    ours_seconds: float
    floor_seconds: float


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to measure. `round` is called with 0, 1, 2...; `details` once, after the last round."""

    name: str
    unit: str
    floor: str
    time: Time
    round: Callable[[int], Round]
    details: Callable[[], Mapping[str, float]] = dict


#: Prepares its cases, and cleans up after them.
Bench: TypeAlias = Callable[[], AbstractContextManager[Sequence[Case]]]


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle of some values, and the quarters at whose ends half of them lie."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(median, low, high)


@dataclass(frozen=True, slots=True)
class Figures:
    """What the rounds of one case came to. `ours` and `floor` are seconds for one unit of work."""

    case: str
    unit: str
    floor_name: str
    time: Time
    rounds: int
    units: int
    ours: Spread
    floor: Spread
    ratio: Spread
    details: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Result:
    """One bench. `error` says why the rest of its cases was not measured."""

    bench: str
    figures: tuple[Figures, ...] = ()
    error: str | None = None
    prepare_seconds: float = field(default=0.0, compare=False)


class Turns:
    """Times both sides of a case whose work is a call each."""

    def __init__(self, clock: Clock = time.thread_time) -> None:
        self._clock = clock
        self._floor_times = 1

    def round(self, number: int, units: int, ours: Work, floor: Work) -> Round:
        """The floor goes first in every second round: neither always finds the caches that the other left."""
        if number % 2:
            floor_seconds = self._floor(floor)
            ours_seconds = self._timed(ours)
        else:
            ours_seconds = self._timed(ours)
            floor_seconds = self._floor(floor)
        # Of two pieces of work the longer one is disturbed more often: the next round's take about as long.
        self._floor_times = min(max(1, round(ours_seconds / max(floor_seconds, 1e-9))), MAX_FLOOR_TIMES)
        return Round(units, ours_seconds, floor_seconds)

    def _floor(self, floor: Work) -> float:
        times = self._floor_times
        return self._timed(lambda: [floor() for _ in range(times)]) / times

    def _timed(self, work: Work) -> float:
        started = self._clock()
        work()
        return self._clock() - started


def measure(case: Case, seconds: float, clock: Clock = time.perf_counter) -> Figures:
    """Rounds for about so many seconds. The first is not counted: it imports, compiles and fills caches."""
    case.round(0)
    rounds: list[Round] = []
    with _quiet_heap():
        end = clock() + seconds
        while len(rounds) < MIN_ROUNDS or clock() < end:
            rounds.append(case.round(len(rounds) + 1))
    return Figures(
        case=case.name,
        unit=case.unit,
        floor_name=case.floor,
        time=case.time,
        rounds=len(rounds),
        units=sum(one.units for one in rounds),
        ours=Spread.of([one.ours_seconds / one.units for one in rounds]),
        floor=Spread.of([one.floor_seconds / one.units for one in rounds]),
        ratio=Spread.of([one.ours_seconds / one.floor_seconds for one in rounds]),
        details=dict(case.details()),
    )


@contextmanager
def _quiet_heap() -> Generator[None]:
    """The collector stays on, as it is in a server, but does not walk what the bench itself prepared."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def run(name: str, bench: Bench, seconds: float, clock: Clock = time.perf_counter) -> Result:
    """Measure every case of a bench, in equal shares of its time. What fails is told, and what was measured stays."""
    figures: list[Figures] = []
    prepared: float | None = None
    started = clock()
    error: str | None = None
    try:
        with bench() as cases:
            prepared = clock() - started
            figures.extend(measure(case, seconds / len(cases), clock) for case in cases)
    except Exception as failure:  # noqa: BLE001 - a bench that fails must not take the others with it
        error = f"{type(failure).__name__}: {failure}"
    return Result(name, tuple(figures), error, clock() - started if prepared is None else prepared)
