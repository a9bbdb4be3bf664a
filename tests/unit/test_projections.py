"""Projections: folds of a lived ledger, held against the state and against the events themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any

import pytest

from gpuledger.adapters.http.openai_errors import status_of
from gpuledger.domain.events import (
    EVENT_TYPES,
    CapabilityDegraded,
    CapabilityRecovered,
    FailureRecorded,
    LeaseExpired,
    LeaseGranted,
    LeasePreempted,
    LeaseReleased,
    LeaseRenewed,
    PlanDecided,
    PolicyRevised,
    Recorded,
    RequestFailed,
    RequestFellBack,
    RequestRetried,
    ResidentFailed,
    TelemetryMissed,
)
from gpuledger.domain.failures import CAPACITY_FAILURES, Failure, owner_of
from gpuledger.domain.policy import Policy
from gpuledger.domain.reasons import Reason, Verdict
from gpuledger.domain.world import World, evolve
from gpuledger.projections import alerts, failures, leases, plan_history
from tests.simulation.ledgers import Lived, crowded_and_killed, crowded_minutes

PROJECTIONS: list[tuple[Any, Any]] = [
    (plan_history, plan_history.PlanHistory()),
    (leases, leases.Leases()),
    (failures, failures.Failures()),
    (alerts, alerts.Onsets()),
]


@pytest.fixture(scope="module")
def story() -> Lived:
    return crowded_minutes()


@pytest.mark.parametrize(("projection", "empty"), PROJECTIONS)
class TestEveryProjection:
    def test_its_types_are_in_the_closed_list(self, projection: Any, empty: Any) -> None:
        assert set(EVENT_TYPES) >= projection.TYPES

    def test_only_its_types_move_it(self, projection: Any, empty: Any, story: Lived) -> None:
        whole = reduce(projection.evolve, story.events, empty)
        own = [event for event in story.events if type(event.data).__name__ in projection.TYPES]
        assert replace(reduce(projection.evolve, own, empty), seq=whole.seq) == whole

    def test_it_knows_its_position(self, projection: Any, empty: Any, story: Lived) -> None:
        assert empty.seq == 0
        assert reduce(projection.evolve, story.events, empty).seq == len(story.events)

    def test_pages_make_no_difference(self, projection: Any, empty: Any, story: Lived) -> None:
        half = reduce(projection.evolve, story.events[:300], empty)
        assert reduce(projection.evolve, story.events[300:], half) == reduce(projection.evolve, story.events, empty)

    def test_an_end_without_a_beginning_changes_nothing(self, projection: Any, empty: Any, story: Lived) -> None:
        """A window of the newest events may begin anywhere: what it ends may not be in it."""
        window = [event for event in story.events if not isinstance(event.data, LeaseGranted | PolicyRevised)]
        state = reduce(projection.evolve, window, empty)
        for held in ("held", "present"):
            assert not getattr(state, held, None)


class TestPlanHistory:
    def test_newest_first(self, story: Lived) -> None:
        history = reduce(plan_history.evolve, story.events, plan_history.PlanHistory())
        plans = [event for event in story.events if isinstance(event.data, PlanDecided)]
        assert [record.seq for record in history.newest()] == [event.seq for event in reversed(plans)]
        assert [record.seq for record in history.newest(3)] == [event.seq for event in reversed(plans)][:3]
        assert history.newest(0) == ()

    def test_it_is_bounded_by_the_policy(self, story: Lived) -> None:
        revised = Recorded(1, 0, "policy", 1, PolicyRevised(Policy(plan_history_limit=7), "operator"))
        short = plan_history.evolve(plan_history.PlanHistory(), revised)
        plans = [event for event in story.events if isinstance(event.data, PlanDecided)]
        history = reduce(plan_history.evolve, plans, short)
        assert history.limit == len(history.records) == 7
        lower = replace(revised, data=PolicyRevised(Policy(plan_history_limit=2), "operator"))
        assert [one.seq for one in plan_history.evolve(history, lower).records] == [one.seq for one in plans[-2:]]

    def test_a_record_says_what_was_decided(self, story: Lived) -> None:
        history = reduce(plan_history.evolve, story.events, plan_history.PlanHistory())
        record = history.newest(1, verdict=Verdict.ADMIT_AFTER_EVICTION)[0]
        decided = story.events[record.seq - 1].data
        assert isinstance(decided, PlanDecided)
        assert (record.plan_id, record.request_id, record.fingerprint) == (
            decided.plan_id,
            decided.request_id,
            decided.fingerprint,
        )
        assert record.accelerator_id == "GPU-0"
        assert record.evictions == len(decided.plan["evictions"]) > 0
        assert record.estimate_ms == decided.plan["estimate_ms"]

    @pytest.mark.parametrize(
        "chosen",
        [
            {"capability": "chat@1"},
            {"verdict": Verdict.QUEUE},
            {"reason": Reason.WAITING_FOR_DRAIN},
            {"accelerator_id": "GPU-0"},
            {"capability": "chat@1", "verdict": Verdict.QUEUE, "reason": Reason.QUEUED_BEHIND},
        ],
    )
    def test_filters(self, story: Lived, chosen: dict[str, Any]) -> None:
        history = reduce(plan_history.evolve, story.events, plan_history.PlanHistory())
        found = history.newest(**chosen)
        fields = {"capability": "capability", "verdict": "verdict", "accelerator_id": "accelerator_id"}
        assert found
        for record in history.records:
            fits = all(getattr(record, fields[key]) == value for key, value in chosen.items() if key in fields)
            fits = fits and ("reason" not in chosen or chosen["reason"] in record.reasons)
            assert (record in found) == fits
        assert history.newest(accelerator_id="GPU-7") == ()

    def test_a_plan_document_that_is_none(self, story: Lived) -> None:
        event = story.newest(PlanDecided)
        assert isinstance(event.data, PlanDecided)
        nonsense: dict[str, Any] = {"capability": 7, "evictions": "all", "waiting_for": ["GPU-0"], "estimate_ms": "1"}
        forged = replace(event, data=replace(event.data, plan=nonsense))
        (record,) = plan_history.evolve(plan_history.PlanHistory(), forged).records
        assert (record.capability, record.evictions, record.waiting_reason, record.estimate_ms) == (None, 0, None, None)


class TestLeases:
    def test_after_every_event_they_are_those_of_the_state(self, story: Lived) -> None:
        world, state = World(), leases.Leases()
        for event in story.events:
            world, state = evolve(world, event), leases.evolve(state, event)
            lived = {record.lease.lease_id: record.lease for _, record in world.leases()}
            assert set(state.held) == set(lived)
            for lease_id, lease in lived.items():
                view = state.held[lease_id]
                assert (view.expires_at, view.materialized_bytes) == (lease.expires_at, lease.materialized_bytes)

    def test_no_expired_lease_is_live(self) -> None:
        killed = crowded_and_killed()
        state = reduce(leases.evolve, killed.events, leases.Leases())
        assert state.held
        for lease in state.held.values():
            assert lease in state.live(lease.expires_at - 1)
            assert lease not in state.live(lease.expires_at)
            assert lease not in state.live(lease.expires_at + 1)

    def test_ends_and_their_causes(self, story: Lived) -> None:
        state = reduce(leases.evolve, story.events, leases.Leases())
        assert not state.held
        ended = {lease.lease_id: lease.ended_by for lease in state.ended}
        for event in story.events:
            match event.data:
                case LeaseReleased(lease_id=lease_id, cause=cause):
                    assert ended[lease_id] == cause
                case LeasePreempted(lease_id=lease_id):
                    assert ended[lease_id] == "preempted"
                case _:
                    continue
        assert set(ended.values()) >= {"completed", "failed", "preempted"}
        newest = state.last_ended(2)
        assert [lease.ended_seq for lease in newest] == sorted((one.ended_seq or 0 for one in newest), reverse=True)

    def test_renewals_expiry_and_failure(self, story: Lived) -> None:
        granted = story.newest(LeaseGranted)
        assert isinstance(granted.data, LeaseGranted)
        lease_id, resident_id = granted.data.lease_id, granted.data.resident_id
        held = leases.evolve(leases.Leases(), granted)
        renewed = leases.evolve(held, _next(granted, LeaseRenewed(lease_id, granted.data.expires_at + 5)))
        (view,) = renewed.live(granted.data.expires_at)
        assert (view.renewals, view.renewed_at) == (1, granted.at + 1)
        expired = leases.evolve(renewed, _next(granted, LeaseExpired(lease_id, resident_id, 99)))
        assert [(one.ended_by, one.ended_at) for one in expired.ended] == [("expired", 99)]
        failed = ResidentFailed(resident_id, "chat", Failure.RUNTIME_CRASH, "signal_11", 98, 1, None)
        crashed = leases.evolve(renewed, _next(granted, failed))
        assert [(one.ended_by, one.ended_at) for one in crashed.ended] == [("resident_failed", 98)]
        assert not crashed.held

    def test_what_has_ended_is_bounded(self, story: Lived) -> None:
        granted, released = story.newest(LeaseGranted), story.newest(LeaseReleased)
        assert isinstance(granted.data, LeaseGranted)
        assert isinstance(released.data, LeaseReleased)
        state = leases.Leases()
        for number in range(leases.ENDED_LIMIT + 3):
            state = leases.evolve(state, replace(granted, data=replace(granted.data, lease_id=f"l{number}")))
            state = leases.evolve(state, replace(released, data=replace(released.data, lease_id=f"l{number}")))
        assert len(state.ended) == leases.ENDED_LIMIT
        assert state.last_ended(1)[0].lease_id == f"l{leases.ENDED_LIMIT + 2}"


class TestFailures:
    def test_capacity_is_counted_apart(self, story: Lived) -> None:
        state = reduce(failures.evolve, story.events, failures.Failures())
        refused = [
            event.data.reason
            for event in story.events
            if isinstance(event.data, RequestFailed) and event.data.reason is not None
        ]
        assert sum(state.capacity_refusals.values()) + sum(state.other_refusals.values()) == len(refused)
        assert state.capacity_refusals[Reason.DEADLINE_CANNOT_BE_MET] == 1
        assert state.capacity_refusals[Reason.QUEUED_BEHIND] > 1
        assert not state.internal.keys() & CAPACITY_FAILURES
        assert state.internal == _counted(story, lambda one: one not in CAPACITY_FAILURES)
        assert state.internal[Failure.MODEL_LOAD_FAILED] >= 1

    def test_a_refusal_that_is_a_class_of_failure_is_one_failure(self, story: Lived) -> None:
        """It stands in the ledger twice: as the end of the request, and as a failure of the capability."""
        state = reduce(failures.evolve, story.events, failures.Failures())
        late = [event for event in story.events if getattr(event.data, "request_id", None) == "late"]
        named = [type(event.data).__name__ for event in late]
        assert {"FailureRecorded", "RequestFailed"} <= set(named)
        assert state.capacity[Failure.DEADLINE_CANNOT_BE_MET] == named.count("FailureRecorded") == 1
        assert state.count(Failure.DEADLINE_CANNOT_BE_MET) == 1
        assert Failure.DEADLINE_CANNOT_BE_MET not in state.internal

    @pytest.mark.parametrize("failure", Failure)
    def test_each_class_is_counted_where_it_belongs(self, story: Lived, failure: Failure) -> None:
        event = story.newest(FailureRecorded)
        assert isinstance(event.data, FailureRecorded)
        forged = replace(event, data=replace(event.data, failure=failure, owner=owner_of(failure)))
        state = failures.evolve(failures.evolve(failures.Failures(), forged), forged)
        assert state.count(failure) == 2
        assert sum(state.internal.values()) == (0 if failure in CAPACITY_FAILURES else 2)
        assert [view.failure for view in state.newest(5)] == [failure, failure]
        assert not any(state.count(one) for one in Failure if one is not failure)

    def test_a_driver_that_fails_is_a_failure_of_telemetry(self) -> None:
        missed = TelemetryMissed("local", 5, ("GPU-0", "GPU-1"), "NVML_TIMEOUT")
        state = failures.evolve(failures.Failures(), Recorded(9, 6, "telemetry:local", 4, missed))
        assert state.internal == {Failure.DRIVER_ERROR: 1}
        (view,) = state.newest(5)
        assert (view.owner, view.capability, view.detail) == ("telemetry", None, "NVML_TIMEOUT")
        assert (view.accelerator_ids, view.accelerator_id) == (("GPU-0", "GPU-1"), None)
        alone = replace(missed, accelerator_ids=("GPU-0",))
        (view,) = failures.evolve(failures.Failures(), Recorded(9, 6, "telemetry:local", 4, alone)).recent
        assert view.accelerator_id == "GPU-0"

    def test_what_was_done_about_them_is_counted_too(self) -> None:
        done: list[Any] = [
            RequestRetried("r", 1, Failure.TIMEOUT, "load", 1, 1, None),
            RequestFellBack("r", 2, 1, None, Failure.TIMEOUT, "load"),
            RequestFellBack("s", 2, 1, Reason.QUEUE_FULL, None, "REJECT_CAPACITY"),
            CapabilityDegraded("chat@1", 3, 3, Failure.TIMEOUT, "load"),
            CapabilityRecovered("chat@1", 4),
            LeasePreempted("l", "chat@GPU-0#1", "r", 5, "s", True),
        ]
        events = [Recorded(seq, seq, "x", seq, data) for seq, data in enumerate(done, start=1)]
        state = reduce(failures.evolve, events, failures.Failures())
        assert state.retries == state.degradations == {Failure.TIMEOUT: 1}
        assert state.fallbacks == {"TIMEOUT": 1, "QUEUE_FULL": 1}
        assert (state.recoveries, state.preemptions) == (1, 1)
        assert not state.internal
        assert not state.recent

    @pytest.mark.parametrize("reason", Reason)
    def test_capacity_is_what_clients_are_told_is_capacity(self, reason: Reason) -> None:
        assert (reason in failures.CAPACITY_REASONS) == (status_of(reason) == 429)

    def test_the_newest_are_kept_in_full(self, story: Lived) -> None:
        event = next(one for one in story.events if _is_of(one, Failure.MODEL_LOAD_FAILED))
        state = failures.Failures()
        for number in range(failures.RECENT_LIMIT + 3):
            state = failures.evolve(state, replace(event, seq=number + 1))
        assert len(state.recent) == failures.RECENT_LIMIT
        assert state.internal[Failure.MODEL_LOAD_FAILED] == failures.RECENT_LIMIT + 3
        assert [view.seq for view in state.newest(2)] == [failures.RECENT_LIMIT + 3, failures.RECENT_LIMIT + 2]
        (view,) = state.newest(1)
        assert (view.capability, view.detail, view.owner) == ("batch@1", "exit_status_1", "runtime adapter")


def _is_of(event: Recorded, failure: Failure) -> bool:
    return isinstance(event.data, FailureRecorded) and event.data.failure is failure


def _counted(story: Lived, wanted: Callable[[Failure], bool]) -> dict[Failure, int]:
    """How often each class that is wanted was recorded."""
    found = [event.data.failure for event in story.events if isinstance(event.data, FailureRecorded)]
    return dict(Counter(failure for failure in found if wanted(failure)))


def _next(event: Recorded, data: Any) -> Recorded:
    return Recorded(event.seq + 1, event.at + 1, event.stream, event.version + 1, data)
