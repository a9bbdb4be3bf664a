"""Section 6.4: what a resident is to a request, and the optimum among sets, against brute force and against time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuledger.domain.covering import Choice, cheapest
from gpuledger.domain.eviction import (
    Action,
    Eviction,
    EvictionSet,
    Standing,
    best_set,
    minimal_residency_ms,
    occupants_of,
    set_of,
)
from gpuledger.domain.policy import Policy, Priority
from gpuledger.domain.state import Lease, Residency, ResidencyPolicy, Resident, ResidentState, Sleep
from gpuledger.domain.units import GIB, MIB, milliseconds, seconds
from gpuledger.domain.view import view_of
from tests.unit.situations import GPU, NOW, ago, card, decide, lease, model, resident, state_of


def standing(
    found: Resident, *, leases: Sequence[Lease] = (), asking: Priority = Priority.INTERACTIVE, **deployment: Any
) -> Standing:
    state = state_of([model("m"), replace(model("x"), **deployment)], [found], leases=leases)
    (occupant,) = occupants_of(view_of(state), GPU, "m", asking)
    return occupant.standing


class TestStanding:
    def test_1_a_failed_one_is_evictable_whatever_its_policy(self) -> None:
        failed = resident("x", ResidentState.FAILED, loaded_at=NOW)
        pinned = Residency(policy=ResidencyPolicy.ALWAYS_WARM)
        assert standing(failed, residency=pinned) is Standing.EVICTABLE

    def test_2_always_warm_never_goes(self) -> None:
        assert standing(resident("x"), residency=Residency(policy=ResidencyPolicy.ALWAYS_WARM)) is Standing.NEVER

    def test_3_protected_only_from_less_important_work(self) -> None:
        used = resident("x", protected_until=NOW + 1)
        assert standing(used, priority=Priority.PRODUCTION) is Standing.PROTECTED
        assert standing(used, priority=Priority.INTERACTIVE) is Standing.EVICTABLE
        over = replace(used, protected_until=NOW)
        assert standing(over, priority=Priority.PRODUCTION) is Standing.EVICTABLE

    def test_4_a_young_one_is_protected_from_its_own_class(self) -> None:
        young = resident("x", loaded_at=NOW - milliseconds(16_000) + 1)
        assert standing(young) is Standing.PROTECTED
        assert standing(young, asking=Priority.PRODUCTION) is Standing.EVICTABLE
        assert standing(replace(young, loaded_at=young.loaded_at - 1)) is Standing.EVICTABLE

    def test_4_goes_by_who_leased_it(self) -> None:
        young = resident("x", loaded_at=NOW, leased_priority=Priority.PRODUCTION)
        assert standing(young, asking=Priority.PRODUCTION, priority=Priority.BACKGROUND) is Standing.PROTECTED
        unleased = replace(young, leased_priority=None)
        assert standing(unleased, priority=Priority.BACKGROUND) is Standing.EVICTABLE

    def test_5_what_moves_or_runs_is_drained(self) -> None:
        for state in (ResidentState.LOADING, ResidentState.DRAINING, ResidentState.UNLOADING):
            assert standing(resident("x", state)) is Standing.DRAINABLE
        assert standing(resident("x", running_requests=1)) is Standing.DRAINABLE

    def test_7_leases_are_preempted_so_often_and_no_more(self) -> None:
        weak = [lease("x", priority=Priority.BACKGROUND, preemptions=1)]
        assert standing(resident("x"), leases=weak, interruptible=True) is Standing.EVICTABLE
        assert standing(resident("x"), leases=weak) is Standing.DRAINABLE
        worn = [replace(weak[0], preemptions=2)]
        assert standing(resident("x"), leases=worn, interruptible=True) is Standing.DRAINABLE
        equal = [*weak, lease("x", name="other")]
        assert standing(resident("x"), leases=equal, interruptible=True) is Standing.DRAINABLE

    def test_an_expired_lease_holds_nothing(self) -> None:
        assert standing(resident("x"), leases=[lease("x", expires_at=NOW)]) is Standing.EVICTABLE

    @pytest.mark.parametrize(
        ("start_ms", "stays_ms"),
        [(1_000, 2_000), (15_000, 30_000), (40_000, 55_000), (0, 0)],
    )
    def test_the_least_a_resident_stays(self, start_ms: int, stays_ms: int) -> None:
        assert minimal_residency_ms(Policy(), start_ms) == stays_ms
        assert minimal_residency_ms(Policy(min_residency_seconds=60), start_ms) == 60_000


class TestOrder:
    def test_a_sleep_is_preferred_where_it_frees_enough(self) -> None:
        nap = Sleep(asleep_bytes=256 * MIB, sleep_ms=300, wake_ms=900)
        state = state_of([model("m"), model("x", sleep=nap)], [resident("x", attributed_bytes=20 * GIB)])
        (eviction,) = decide(state, "m").evictions
        assert (eviction.action, eviction.price_ms, eviction.duration_ms) == (Action.SLEEP, 900, 300)
        assert eviction.freed_bytes == 20 * GIB - 256 * MIB

    def test_leases_of_a_more_important_class_count_before_everything(self) -> None:
        models = [model("m"), model("x", interruptible=True, load_ms=100), model("y", load_ms=900_000)]
        state = state_of(
            models,
            [resident("x", attributed_bytes=10 * GIB), resident("y", attributed_bytes=10 * GIB)],
            leases=[lease("x", priority=Priority.INTERACTIVE)],
        )
        made = decide(state, "m", priority=Priority.PRODUCTION)
        assert [e.resident_id for e in made.evictions] == ["res-y"]

    def test_the_oldest_use_then_the_least_bytes_then_the_first_id(self) -> None:
        models = [model("m"), *(model(name) for name in "abcd")]

        def evicted(**bytes_and_age: tuple[int, int]) -> list[str]:
            residents = [
                resident(name, attributed_bytes=size, last_used_at=ago(age))
                for name, (size, age) in bytes_and_age.items()
            ]
            return [e.deployment_id for e in decide(state_of(models, residents), "m").evictions]

        assert evicted(a=(11 * GIB, 100), b=(11 * GIB, 200)) == ["b"]
        assert evicted(a=(12 * GIB, 200), b=(10 * GIB, 200)) == ["b"]
        assert evicted(a=(11 * GIB, 200), b=(11 * GIB, 200)) == ["a"]


def way(
    index: int,
    action: Action,
    freed: int,
    price: int,
    *,
    takes: int = 1,
    used: int = 0,
    priority: Priority = Priority.INTERACTIVE,
    preempted: tuple[Priority, ...] = (),
) -> Eviction:
    return Eviction(
        resident_id=f"r{index:02}",
        deployment_id=f"d{index:02}",
        action=action,
        freed_bytes=freed,
        released_bytes=0,
        price_ms=price,
        duration_ms=takes,
        preempts=tuple(f"lease-{index}-{at}" for at in range(len(preempted))),
        preempted=preempted,
        priority=priority,
        last_used_at=used,
    )


@st.composite
def ways(draw: st.DrawFn, index: int) -> list[Eviction]:
    """An unload, and often a sleep that frees less, of figures so small that there are ties."""
    small = st.integers(0, 3)
    freed, used = draw(st.integers(0, 6)), draw(small)
    priority = draw(st.sampled_from((Priority.PRODUCTION, Priority.BACKGROUND)))
    preempted = draw(st.sampled_from(((), (), (Priority.BACKGROUND,), (Priority.MAINTENANCE,) * 2)))
    unloaded = way(
        index, Action.UNLOAD, freed, draw(small), takes=draw(small), used=used, priority=priority, preempted=preempted
    )
    stays_awake = draw(st.booleans())
    if preempted or stays_awake:
        return [unloaded]
    asleep = way(
        index,
        Action.SLEEP,
        draw(st.integers(0, freed)),
        draw(small),
        takes=draw(small),
        used=used,
        priority=priority,
    )
    return [asleep, unloaded]


def all_sets(
    forced: Sequence[Eviction], optional: Sequence[Sequence[Eviction]], missing: int, budget: int | None, unload: bool
) -> Iterator[EvictionSet]:
    for choice in product(*([None, *one] for one in optional)):
        found = set_of([*forced, *(one for one in choice if one is not None)])
        if (
            found.gain_bytes >= missing
            and (budget is None or found.duration_ms <= budget)
            and (not unload or any(e.action is Action.UNLOAD for e in found.evictions))
        ):
            yield found


def whole_order(found: EvictionSet) -> tuple[tuple[int, ...], list[tuple[str, str]]]:
    return found.order, [(e.resident_id, e.action.value) for e in found.evictions]


class TestOptimum:
    @settings(max_examples=300, deadline=None)
    @given(st.data())
    def test_it_is_the_least_of_all_sets(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, 6))
        optional = [data.draw(ways(index)) for index in range(number)]
        forced = [data.draw(ways(number + index))[-1] for index in range(data.draw(st.integers(0, 2)))]
        missing = data.draw(st.integers(-1, 16))
        budget = data.draw(st.none() | st.integers(0, 8))
        unload = data.draw(st.booleans())
        found = best_set(forced, optional, missing, budget, with_unload=unload)
        sets = list(all_sets(forced, optional, missing, budget, unload))
        assert found == min(sets, key=whole_order, default=None)

    @settings(max_examples=200, deadline=None)
    @given(
        st.lists(st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=1, max_size=2), max_size=6),
        st.integers(0, 30),
        st.none() | st.integers(0, 20),
    )
    def test_the_cheapest_cover(self, items: list[list[Choice]], target: int, limit: int | None) -> None:
        costs: list[int] = []
        for choice in product(*([(0, 0, 0), *item] for item in items)):
            cost, gain, taken = (sum(column) for column in zip(*choice, strict=True)) if choice else (0, 0, 0)
            if gain >= target and (limit is None or taken <= limit):
                costs.append(cost)
        assert cheapest(items, target, limit) == min(costs, default=None)


class TestTime:
    """Where a branch and bound is at its worst: sizes nearly equal, prices as the sizes. Limits are generous."""

    def test_sixteen_residents_of_which_each_could_sleep(self) -> None:
        sizes = [GIB + 7_919 * index for index in range(16)]
        optional = [
            [way(i, Action.SLEEP, size // 2, size // 2, used=i), way(i, Action.UNLOAD, size, size, used=i)]
            for i, size in enumerate(sizes)
        ]
        began = time.perf_counter()
        assert best_set((), optional, sum(sizes) // 2) is not None
        assert time.perf_counter() - began < 2

    def test_a_hundred_crowded_cards(self) -> None:
        models = [model("m", peak_bytes=11 * GIB), *(model(f"x{i:02}", load_ms=8_000 + i) for i in range(16))]
        cards = [card(f"GPU-{n:03}", index=n) for n in range(100)]
        residents = [
            resident(
                f"x{i:02}",
                resident_id=f"res-{one.index}-{i}",
                accelerator_id=one.accelerator_id,
                attributed_bytes=1_400 * MIB + i * 4_099,
                last_used_at=NOW - seconds(600 + i),
            )
            for one in cards
            for i in range(16)
        ]
        state = state_of(models, residents, cards=cards)
        began = time.perf_counter()
        made = decide(state, "m")
        assert time.perf_counter() - began < 10
        assert made.verdict == "ADMIT_AFTER_EVICTION"
        assert len(made.candidates) == 100
