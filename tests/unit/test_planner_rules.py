"""Section 6.3, rule by rule, where the conformance vectors say little: figures, edges, what is waited for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuledger.domain.policy import Policy, Pressure, Priority
from gpuledger.domain.reasons import Reason
from gpuledger.domain.state import (
    Attribution,
    Backoff,
    Residency,
    ResidencyPolicy,
    ResidentState,
    Sleep,
    State,
    WaitingFor,
)
from gpuledger.domain.units import GIB, MIB, seconds
from tests.unit.situations import GPU, NOW, ago, ask, card, decide, lease, model, queued, resident, said, state_of

EXCLUSIVE = Residency(policy=ResidencyPolicy.EXCLUSIVE)
ALWAYS_WARM = Residency(policy=ResidencyPolicy.ALWAYS_WARM)
#: 24 GiB less the reserve of 5 %.
FULL = 24 * GIB - 1_288_490_189


def pressed(state: State, pressure: Pressure) -> State:
    return replace(state, telemetry=tuple(replace(sample, pressure=pressure) for sample in state.telemetry))


def waiting(state: State, deployment: str) -> WaitingFor:
    found = decide(state, deployment).waiting_for
    assert found is not None
    return found


class TestRules1To3:
    def test_1_a_deadline_of_this_very_moment_has_not_passed(self) -> None:
        state = state_of([model("m")], [resident("m")])
        assert said(decide(state, "m", deadline=NOW)) == ("ADMIT",)
        assert said(decide(state, "m", deadline=NOW - 1)) == ("REJECT_CAPACITY", "DEADLINE_CANNOT_BE_MET")

    def test_2_critical_pressure_admits_a_warm_start_that_needs_nothing_only_by_policy(self) -> None:
        ready = [resident("m", attributed_bytes=5 * GIB)]
        refused = pressed(state_of([model("m")], ready), Pressure.CRITICAL)
        assert said(decide(refused, "m")) == ("REJECT_CAPACITY", "EXTERNAL_GPU_PRESSURE")
        lenient = replace(refused, policy=Policy(critical_admits_warm=True))
        assert said(decide(lenient, "m")) == ("ADMIT",)
        smaller = replace(lenient, residents=(resident("m", attributed_bytes=4 * GIB),))
        assert said(decide(smaller, "m")) == ("REJECT_CAPACITY", "EXTERNAL_GPU_PRESSURE")

    @pytest.mark.parametrize("leaving", [ResidentState.DRAINING, ResidentState.UNLOADING])
    def test_3_waits_for_its_own_resident_to_go_with_its_whole_requirement(self, leaving: ResidentState) -> None:
        state = state_of([model("m")], [resident("m", leaving)])
        found = waiting(state, "m")
        assert (found.reason, found.resident_ids) == (Reason.RESIDENT_DRAINING, ("res-m",))
        assert found.needed_bytes == decide(state, "m").requirement_bytes
        assert decide(state, "m").start is None


class TestRule4:
    def test_a_failed_resident_counts_for_nothing_and_has_to_go(self) -> None:
        made = decide(state_of([model("m")], [resident("m", ResidentState.FAILED)]), "m")
        assert said(made) == ("ADMIT_AFTER_EVICTION",)
        assert made.needed_bytes == made.requirement_bytes
        assert [(e.resident_id, e.price_ms) for e in made.evictions] == [("res-m", 0)]

    def test_the_future_part_of_its_own_reservation_is_its_own(self) -> None:
        loading = resident("m", ResidentState.LOADING, attributed_bytes=GIB, reserved_bytes=3 * GIB)
        made = decide(state_of([model("m")], [loading]), "m")
        assert made.requirement_bytes is not None
        assert made.needed_bytes == made.requirement_bytes - 3 * GIB

    def test_a_sleeper_whose_deployment_can_no_longer_sleep_takes_as_long_as_a_load(self) -> None:
        made = decide(state_of([model("m")], [resident("m", ResidentState.SLEEPING)]), "m")
        assert (made.start, made.estimate_ms) == ("wake", 8_000)


class TestRule5:
    def test_the_door_is_closed_for_who_is_more_important_and_waits_for_this_resident(self) -> None:
        state = state_of([model("m", concurrency=2), model("big")], [resident("m")])
        waiter = queued("w", "big", Reason.WAITING_FOR_DRAIN, "res-m", priority=Priority.PRODUCTION)
        found = decide(replace(state, queue=(waiter,)), "m")
        assert said(found) == ("QUEUE", "DRAINING_FOR_WAITER")
        assert found.waiting_for is not None
        assert found.waiting_for.resident_ids == ()

    def test_it_stays_open_while_a_long_job_holds_another_that_is_waited_for(self) -> None:
        waiter = queued("w", "big", Reason.WAITING_FOR_DRAIN, "res-m", "res-x", priority=Priority.PRODUCTION)
        state = state_of(
            [model("m"), model("x"), model("big")],
            [resident("m"), resident("x")],
            leases=[lease("x", granted_at=ago(41))],
            queue=[waiter],
        )
        assert said(decide(state, "m")) == ("ADMIT",)
        recent = replace(state, leases=(lease("x", granted_at=ago(40)),))
        assert said(decide(recent, "m")) == ("QUEUE", "DRAINING_FOR_WAITER")

    def test_one_of_the_same_class_must_have_waited_long_enough(self) -> None:
        state = state_of([model("m"), model("big")], [resident("m")])
        waiter = queued("w", "big", Reason.RESIDENCY_CONFLICT, "res-m", enqueued_at=ago(30))
        assert said(decide(replace(state, queue=(waiter,)), "m")) == ("QUEUE", "DRAINING_FOR_WAITER")
        newer = replace(waiter, enqueued_at=ago(29))
        assert said(decide(replace(state, queue=(newer,)), "m")) == ("ADMIT",)

    def test_who_waits_for_a_protection_to_end_closes_nothing(self) -> None:
        waiter = queued("w", "big", Reason.RESIDENCY_PROTECTED, "res-m", priority=Priority.PRODUCTION)
        state = state_of([model("m"), model("big")], [resident("m")], queue=[waiter])
        assert said(decide(state, "m")) == ("ADMIT",)

    def test_a_request_is_not_behind_itself(self) -> None:
        itself = queued("req-1", "m", Reason.WAITING_FOR_DRAIN, "res-m", priority=Priority.PRODUCTION)
        state = state_of([model("m", queue_limit=0)], [resident("m")], queue=[itself])
        assert said(decide(state, "m")) == ("ADMIT",)


class TestRule6:
    def test_a_backoff_that_ends_now_is_over(self) -> None:
        over = model("m", backoff=(Backoff(GPU, NOW),))
        assert said(decide(state_of([over]), "m")) == ("ADMIT",)
        lasts = state_of([model("m", backoff=(Backoff(GPU, NOW + 1),))])
        assert said(decide(lasts, "m")) == ("QUEUE", "LOAD_BACKOFF")
        assert waiting(lasts, "m").not_before == NOW + 1

    def test_a_warm_start_is_never_held(self) -> None:
        state = pressed(state_of([model("m")], [resident("m")]), Pressure.HIGH)
        assert said(decide(state, "m", priority=Priority.MAINTENANCE)) == ("ADMIT",)

    def test_one_estimated_load_at_a_time(self) -> None:
        loading = resident("x", ResidentState.LOADING, attribution=Attribution.ESTIMATED)
        state = state_of([model("m"), model("x")], [loading])
        assert said(decide(state, "m")) == ("QUEUE", "LOAD_IN_PROGRESS")
        measured = replace(state, residents=(replace(loading, attribution=Attribution.KNOWN),))
        assert said(decide(measured, "m")) == ("ADMIT",)


class TestRule7:
    def test_what_the_waiter_waits_for_is_counted_as_gone(self) -> None:
        state = state_of([model("m"), model("x"), model("big")], [resident("x", attributed_bytes=16 * GIB)])
        waiter = queued("w", "big", Reason.WAITING_FOR_DRAIN, "res-x", needed_bytes=17 * GIB)
        assert said(decide(replace(state, queue=(waiter,)), "m")) == ("ADMIT",)
        larger = queued("w", "big", Reason.WAITING_FOR_DRAIN, "res-x", needed_bytes=19 * GIB)
        assert said(decide(replace(state, queue=(larger,)), "m")) == ("QUEUE", "QUEUED_BEHIND")

    def test_a_waiter_for_a_protection_counts_when_it_ends_soon(self) -> None:
        state = state_of([model("m"), model("x"), model("big")], [resident("x")])

        def with_waiter(not_before: int | None) -> tuple[str, ...]:
            waiter = queued(
                "w", "big", Reason.RESIDENCY_PROTECTED, "res-x", needed_bytes=22 * GIB, not_before=not_before
            )
            return said(decide(replace(state, queue=(waiter,)), "m"))

        start = seconds(8)
        assert with_waiter(None) == ("ADMIT",)
        assert with_waiter(NOW + seconds(30) + start) == ("QUEUE", "QUEUED_BEHIND")
        assert with_waiter(NOW + seconds(30) + start + 1) == ("ADMIT",)

    def test_every_cold_start_delays_an_exclusive_waiter_and_a_warm_one_only_by_its_bytes(self) -> None:
        waiter = queued("w", "alone", Reason.WAITING_FOR_DRAIN, "res-x", needed_bytes=GIB)
        alone = model("alone", residency=EXCLUSIVE)
        cold = state_of([model("m"), model("x"), alone], [resident("x")], queue=[waiter])
        assert said(decide(cold, "m")) == ("QUEUE", "QUEUED_BEHIND")
        warm = replace(cold, residents=(resident("x"), resident("m")))
        assert said(decide(warm, "m")) == ("ADMIT",)

    def test_who_comes_later_in_the_claim_order_delays_nobody(self) -> None:
        waiter = queued("w", "big", Reason.WAITING_FOR_DRAIN, needed_bytes=30 * GIB, enqueued_at=NOW + 1)
        state = state_of([model("m"), model("big")], queue=[waiter])
        assert said(decide(state, "m")) == ("ADMIT",)


class TestRule8:
    def test_an_exclusive_model_drives_everything_out_and_sleeps_nobody(self) -> None:
        sleeper = model("x", sleep=Sleep(asleep_bytes=64 * MIB, sleep_ms=100, wake_ms=100))
        state = state_of([model("m", residency=EXCLUSIVE), sleeper], [resident("x")])
        made = decide(state, "m")
        assert said(made) == ("ADMIT_AFTER_EVICTION",)
        assert [e.action.value for e in made.evictions] == ["unload"]

    def test_a_conflict_waits_for_the_forced_set(self) -> None:
        state = state_of(
            [model("m"), model("x", residency=EXCLUSIVE), model("y")],
            [resident("x"), resident("y")],
            leases=[lease("x")],
        )
        found = waiting(state, "m")
        assert (found.reason, found.resident_ids) == (Reason.RESIDENCY_CONFLICT, ("res-x",))

    def test_what_never_goes_refuses_before_what_is_protected(self) -> None:
        young = resident("y", loaded_at=NOW)
        state = state_of(
            [model("m", residency=EXCLUSIVE), model("x", residency=ALWAYS_WARM), model("y")],
            [resident("x"), young],
        )
        assert said(decide(state, "m")) == ("REJECT_CAPACITY", "RESIDENCY_CONFLICT")
        without = replace(state, residents=(young,))
        found = decide(without, "m")
        assert said(found) == ("QUEUE", "RESIDENCY_PROTECTED")
        assert found.waiting_for is not None
        assert found.waiting_for.resident_ids == ("res-y",)
        assert found.waiting_for.not_before == NOW + seconds(16)


class TestRules9To11:
    def test_9_exactly_what_is_there_fits(self) -> None:
        room = FULL - 4 * GIB - 429_496_730
        assert said(decide(state_of([model("m")], external_bytes=room), "m")) == ("ADMIT",)
        # One byte less there: nothing is ours to evict.
        assert said(decide(state_of([model("m")], external_bytes=room + 1), "m")) == (
            "REJECT_CAPACITY",
            "EXTERNAL_GPU_PRESSURE",
        )

    def test_10_what_unloads_already_is_waited_for_rather_than_evicting_more(self) -> None:
        leaving = resident("x", ResidentState.UNLOADING, attributed_bytes=6 * GIB)
        idle = resident("y", attributed_bytes=16 * GIB)
        state = state_of([model("m"), model("x", unload_ms=900), model("y")], [leaving, idle])
        found = decide(state, "m")
        assert said(found) == ("QUEUE", "WAITING_FOR_DRAIN")
        assert found.waiting_for is not None
        assert found.waiting_for.resident_ids == ("res-x",)
        # It would be too late then; the other is quicker to unload.
        hurried = decide(state, "m", deadline=NOW + seconds(8) + 600_000)
        assert [eviction.resident_id for eviction in hurried.evictions] == ["res-y"]

    def test_10_a_further_replica_never_evicts(self) -> None:
        other = card("GPU-1", index=1)
        serving = resident("m", accelerator_id="GPU-1", resident_id="res-m-1")
        full = resident("x", attributed_bytes=20 * GIB)
        state = state_of(
            [model("m", max_replicas=2), model("x")],
            [serving, full],
            cards=[card(), other],
            leases=[lease("m", accelerator_id="GPU-1")],
        )
        made = decide(state, "m")
        assert said(made) == ("QUEUE", "CONCURRENCY_LIMIT")
        verdicts = {c.accelerator_id: c.reasons for c in made.candidates}
        assert verdicts[GPU] == (Reason.WAITING_FOR_DRAIN,)

    def test_11_the_cheapest_set_that_meets_the_deadline(self) -> None:
        slow = model("slow", unload_ms=5_000, load_ms=1_000)
        state = state_of(
            [model("m"), slow, model("quick")],
            [resident("slow", attributed_bytes=10 * GIB), resident("quick", attributed_bytes=10 * GIB)],
        )
        unhurried = decide(state, "m")
        assert [e.resident_id for e in unhurried.evictions] == ["res-slow"]
        hurried = decide(state, "m", deadline=NOW + seconds(9))
        assert [e.resident_id for e in hurried.evictions] == ["res-quick"]
        assert hurried.estimate_ms == 8_500
        late = decide(state, "m", deadline=NOW + seconds(8) + 499_999)
        assert said(late) == ("REJECT_CAPACITY", "DEADLINE_CANNOT_BE_MET")


class TestRule12:
    def test_waits_for_the_best_set_of_what_drains(self) -> None:
        state = state_of(
            [model("m"), model("x", load_ms=9_000), model("y", load_ms=1_000)],
            [resident("x", attributed_bytes=11 * GIB), resident("y", attributed_bytes=10 * GIB)],
            leases=[lease("x"), lease("y")],
        )
        found = waiting(state, "m")
        assert (found.reason, found.resident_ids) == (Reason.WAITING_FOR_DRAIN, ("res-y",))
        assert found.not_before is None

    def test_what_others_could_still_take_ends_too(self) -> None:
        """A reservation of one that never goes leaves no set feasible; it is waited for all the same."""
        state = state_of(
            [model("m"), model("x"), model("pin", residency=ALWAYS_WARM)],
            [
                resident("x", attributed_bytes=4 * GIB),
                resident("pin", attributed_bytes=14 * GIB, reserved_bytes=18 * GIB, running_requests=1),
            ],
            leases=[lease("x")],
        )
        found = waiting(state, "m")
        assert (found.reason, found.resident_ids) == (Reason.WAITING_FOR_DRAIN, ("res-x",))

    def test_waits_until_the_last_protection_ends(self) -> None:
        protected = resident("x", attributed_bytes=20 * GIB, protected_until=NOW + seconds(77))
        state = state_of([model("m"), model("x", priority=Priority.PRODUCTION)], [protected])
        found = waiting(state, "m")
        assert (found.reason, found.not_before) == (Reason.RESIDENCY_PROTECTED, NOW + seconds(77))
        assert found.resident_ids == ("res-x",)

    def test_what_may_never_be_evicted(self) -> None:
        state = state_of([model("m"), model("x", residency=ALWAYS_WARM)], [resident("x", attributed_bytes=20 * GIB)])
        assert said(decide(state, "m")) == ("REJECT_CAPACITY", "EVICTION_NOT_ALLOWED")

    def test_a_full_house_needs_somebody_to_go(self) -> None:
        two = Policy(max_residents=2)
        models = [model("m"), model("x"), model("y")]
        state = state_of(models, [resident("x"), resident("y", last_used_at=ago(700))], policy=two)
        made = decide(state, "m")
        assert said(made) == ("ADMIT_AFTER_EVICTION",)
        assert [e.resident_id for e in made.evictions] == ["res-y"]
        busy = replace(state, leases=(lease("x"), lease("y")))
        assert said(decide(busy, "m")) == ("QUEUE", "WAITING_FOR_DRAIN")
        pinned = replace(state, deployments=(models[0], *(replace(d, residency=ALWAYS_WARM) for d in models[1:])))
        assert said(decide(pinned, "m")) == ("REJECT_CAPACITY", "EVICTION_NOT_ALLOWED")


class TestQueueing:
    def test_late_even_if_it_began_at_once(self) -> None:
        state = state_of([model("m", backoff=(Backoff(GPU, NOW + 1),))])
        assert said(decide(state, "m", deadline=NOW + seconds(8))) == ("QUEUE", "LOAD_BACKOFF")
        late = decide(state, "m", deadline=NOW + seconds(8) - 1)
        assert said(late) == ("REJECT_CAPACITY", "DEADLINE_CANNOT_BE_MET")

    def test_a_more_important_newcomer_is_queued_though_the_queue_is_long(self) -> None:
        state = state_of(
            [model("m", queue_limit=1)],
            [resident("m")],
            leases=[lease("m")],
            queue=[queued("w", "m", Reason.CONCURRENCY_LIMIT)],
        )
        assert said(decide(state, "m")) == ("REJECT_CAPACITY", "QUEUE_FULL")
        assert said(decide(state, "m", priority=Priority.PRODUCTION)) == ("QUEUE", "CONCURRENCY_LIMIT")

    def test_the_plan_does_not_depend_on_who_asks(self) -> None:
        state = state_of([model("m")])
        first, second = decide(state, "m"), decide(state, "m", request_id="req-2", client_id="other")
        assert first.fingerprint == second.fingerprint
        assert ask("m").claim < ask("m", request_id="req-2").claim
