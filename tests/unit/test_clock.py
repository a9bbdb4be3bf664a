"""The ledger's clock: anchored once, never backwards, and honest about how far the wall clock has gone."""

from __future__ import annotations

import time

import pytest

from gpuledger.adapters.clock import LedgerClock
from gpuledger.domain.ports import Clock
from gpuledger.domain.units import MICROS_PER_SECOND, seconds

NOON = 1_796_040_000 * MICROS_PER_SECOND
"""2026-11-30T12:00:00Z."""


class Machine:
    """A wall clock that anybody can set and a monotonic one that nobody can."""

    def __init__(self, wall: int = NOON) -> None:
        self.wall = wall
        self.uptime = seconds(1_000)

    def passes(self, micros: int) -> None:
        self.wall += micros
        self.uptime += micros

    def clock(self, newest_at: int = 0) -> LedgerClock:
        return LedgerClock(newest_at, wall_ns=lambda: self.wall * 1_000, monotonic_ns=lambda: self.uptime * 1_000)


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_an_empty_ledger_starts_at_the_wall_clock(machine: Machine) -> None:
    assert machine.clock().now() == NOON


def test_time_passes_as_the_monotonic_clock_does(machine: Machine) -> None:
    clock = machine.clock()
    machine.passes(seconds(5) + 1)
    assert clock.now() == NOON + seconds(5) + 1


@pytest.mark.parametrize("step", [seconds(3_600), -seconds(3_600)])
def test_a_step_of_the_wall_clock_moves_no_instant(machine: Machine, step: int) -> None:
    clock = machine.clock()
    machine.wall += step
    machine.passes(seconds(1))
    assert clock.now() == NOON + seconds(1)


@pytest.mark.parametrize("step", [seconds(20), -seconds(20)])
def test_a_step_is_made_up_slowly_and_never_backwards(machine: Machine, step: int) -> None:
    clock = machine.clock()
    machine.wall += step
    before = clock.now()
    for _ in range(5_000):
        machine.passes(seconds(1) // 10 + 7)
        now = clock.now()
        assert 95_000 <= now - before <= 106_000, "a tenth of a second, a twentieth more or less of it"
        before = now
    assert clock.skew_ms() == 0
    assert abs(machine.wall - clock.now()) < 1000


def test_how_far_the_wall_clock_is_ahead(machine: Machine) -> None:
    clock = machine.clock()
    machine.wall += seconds(18)
    assert clock.skew_ms() == 18_000
    machine.wall -= seconds(20)
    assert clock.skew_ms() == -2_000


def test_a_ledger_from_the_future_is_gone_on_with(machine: Machine) -> None:
    """The wall clock was ahead when its newest event was written, and is right now."""
    clock = machine.clock(newest_at=NOON + seconds(60))
    assert clock.now() == NOON + seconds(60)
    machine.passes(seconds(1))
    assert clock.now() == NOON + seconds(61)


def test_an_older_ledger_does_not_hold_the_clock_back(machine: Machine) -> None:
    assert machine.clock(newest_at=NOON - seconds(60)).now() == NOON


def test_the_real_clock_is_the_wall_clock_and_does_not_run_backwards() -> None:
    before = time.time_ns() // 1_000
    clock: Clock = LedgerClock()
    instants = [clock.now() for _ in range(1_000)]
    assert instants == sorted(instants)
    assert instants[0] >= before - 1_000


def test_time_passes_while_the_machine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def clock_gettime_ns(clock: int) -> int:
        asked.append(clock)
        return 0

    monkeypatch.setattr(time, "clock_gettime_ns", clock_gettime_ns)
    LedgerClock().now()
    assert set(asked) == {time.CLOCK_BOOTTIME}
