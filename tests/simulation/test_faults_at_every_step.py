"""Something breaks at every step between a plan and the release of what it granted, in virtual time (issue 3).

At every step of every scenario one of the breakages strikes, another one at each; `breakable_search` strikes with all
of them at each. What holds at every step and in the end is in `breakable_lives`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpuledger.domain.events import (
    EvictionStarted,
    FailureRecorded,
    LeaseGranted,
    LeasePreempted,
    LeaseRoomConfirmed,
    NodeDrainStarted,
    ProfilingStarted,
    RequestFellBack,
    RequestRetried,
    ResidentEvicted,
    ResidentLoadStarted,
    ResidentProcessStarted,
    ResidentReady,
    ResidentSlept,
    ResidentWoken,
    TelemetrySampled,
)
from gpuledger.domain.units import GIB
from tests.simulation.breakable_lives import Life, Missed, check_replay, lived, undisturbed
from tests.simulation.breakable_scenarios import SCENARIOS, Scenario
from tests.simulation.breakages import BREAKAGES, Breakage

#: Prime to the number of breakages, so that steps one after the other see them all.
STRIDE = 7
#: A replay takes as long as a life.
REPLAYED = 8


def named(name: str) -> Scenario:
    return next(scenario for scenario in SCENARIOS if scenario.name == name)


def in_turn(scenario: Scenario, position: int) -> Iterator[Breakage]:
    """The breakages, each step's in an order of its own."""
    first = SCENARIOS.index(scenario) * 11 + position * STRIDE
    for number in range(len(BREAKAGES)):
        yield BREAKAGES[(first + number) % len(BREAKAGES)]


def first_that_hits(scenario: Scenario, position: int) -> Life:
    for breakage in in_turn(scenario, position):
        try:
            return lived(scenario, breakage, position)
        except Missed:
            continue
        except AssertionError as wrong:
            wrong.add_note(f"{scenario.name}, step {position}, {breakage.name}")
            raise
    raise AssertionError("there is always something to break")


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_whatever_breaks_at_whatever_step(scenario: Scenario) -> None:
    steps = undisturbed(scenario).ledger.appends
    for position in range(1, steps + 1):
        life = first_that_hits(scenario, position)
        if position % REPLAYED == 0:
            assert check_replay(life) > 0


def test_the_scenarios_go_through_every_step() -> None:
    """As long as nothing breaks."""
    recorded = {type(event.data) for scenario in SCENARIOS for event in undisturbed(scenario).shell.recorded}
    steps = {
        EvictionStarted,
        FailureRecorded,
        LeaseGranted,
        LeasePreempted,
        LeaseRoomConfirmed,
        NodeDrainStarted,
        ProfilingStarted,
        RequestFellBack,
        RequestRetried,
        ResidentEvicted,
        ResidentLoadStarted,
        ResidentProcessStarted,
        ResidentReady,
        ResidentSlept,
        ResidentWoken,
    }
    assert steps <= recorded


def test_every_breakage_finds_something_to_break() -> None:
    places = [(one, step) for one in (named("wake"), named("preemption")) for step in range(12, 36)]
    for breakage in BREAKAGES:
        assert any(hits(scenario, breakage, step) for scenario, step in places), breakage.name


def hits(scenario: Scenario, breakage: Breakage, position: int) -> bool:
    try:
        lived(scenario, breakage, position)
    except Missed:
        return False
    return True


def test_a_wake_that_has_not_begun_is_shown_what_it_holds_asleep() -> None:
    """Where memory is estimated: what others hold was taken for its own, and woken on a card that was full."""
    recorded = undisturbed(named("wake, memory estimated")).shell.recorded
    granted = next(e.seq for e in recorded if isinstance(e.data, LeaseGranted) and e.data.start == "wake")
    begun = next(e.seq for e in recorded if isinstance(e.data, ResidentLoadStarted) and e.seq > granted)
    between = [e.data for e in recorded if granted < e.seq < begun and isinstance(e.data, TelemetrySampled)]
    residents = [one for sampled in between for one in sampled.accelerators[0].residents]
    assert {one.attributed_bytes for one in residents if "sleeper" in one.resident_id} == {1 * GIB}
