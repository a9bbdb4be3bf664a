"""Sections 2, 3 and 4: the figures that decisions rest on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuledger.domain.accounting import Accounting, account, reservations
from gpuledger.domain.candidates import Refusal
from gpuledger.domain.envelopes import envelope_of, requirement_of
from gpuledger.domain.explain import describe
from gpuledger.domain.policy import Policy, Pressure
from gpuledger.domain.pressure import PressureTrack, judge, pressure_bp
from gpuledger.domain.reasons import Reason
from gpuledger.domain.state import Attribution, ResidentState, State
from gpuledger.domain.units import GIB, MIB, seconds
from gpuledger.domain.view import view_of
from tests.unit.situations import GPU, NOW, ago, card, lease, model, resident, state_of


def accounting(state: State) -> Accounting:
    return account(view_of(state), GPU)


def reserved(state: State, deployment: str) -> tuple[int, int] | None:
    found = reservations(view_of(state), GPU).get(deployment)
    return (found.reserved_bytes, found.materialized_bytes) if found is not None else None


class TestAccounting:
    def test_residency_is_never_subtracted_twice(self) -> None:
        found = accounting(state_of([model("m")], [resident("m")], external_bytes=2 * GIB))
        assert found.observed_used_bytes == found.physical_used_bytes == 6 * GIB
        assert found.unmanaged_external_bytes == found.attribution_delta_bytes == 2 * GIB
        assert found.schedulable_bytes == 18 * GIB - found.reserve_bytes

    def test_what_is_attributed_but_not_observed_counts_as_used(self) -> None:
        state = state_of([model("m")], [resident("m")], external_bytes=-GIB)
        found = accounting(state)
        assert (found.physical_used_bytes, found.attribution_delta_bytes) == (4 * GIB, -GIB)
        assert found.unmanaged_external_bytes == 0

    def test_without_a_sample_nothing_is_known_and_missing_is_not_0(self) -> None:
        state = replace(state_of([model("m")], [resident("m")]), telemetry=())
        found = accounting(state)
        assert (found.observed_used_bytes, found.attribution_delta_bytes) == (None, None)
        assert (found.attribution, found.schedulable_bytes) == (Attribution.UNKNOWN, 0)

    @pytest.mark.parametrize(
        ("observed", "received", "known"),
        [
            (ago(15), ago(1), True),
            (ago(15) - 1, ago(1), False),
            (ago(1), ago(15) - 1, False),
            (NOW + seconds(2), NOW, True),
            (NOW + seconds(2) + 1, NOW, False),
        ],
    )
    def test_the_ages_at_which_a_sample_counts(self, observed: int, received: int, known: bool) -> None:
        state = state_of([model("m")])
        (sample,) = state.telemetry
        aged = replace(state, telemetry=(replace(sample, observed_at=observed, received_at=received),))
        assert (accounting(aged).attribution is Attribution.KNOWN) == known

    def test_one_estimate_makes_an_estimate(self) -> None:
        guessed = resident("m", attribution=Attribution.ESTIMATED)
        assert accounting(state_of([model("m")], [guessed])).attribution is Attribution.ESTIMATED

    def test_the_reserve_is_the_greatest_of_three(self) -> None:
        assert accounting(state_of([])).reserve_bytes == 1_288_490_189
        assert accounting(state_of([], cards=[card(total_bytes=8 * GIB)])).reserve_bytes == GIB
        policy = Policy(reserve_floor_bytes=0, reserve_ratio_bp=0)
        assert accounting(state_of([], policy=policy)).reserve_bytes == 256 * MIB

    def test_before_a_load_the_grants_own_reservation_does_not_count(self) -> None:
        """Section 7: the fresh sample must show room without it, and without those whose load has not begun."""
        loading = resident("m", ResidentState.LOADING, attributed_bytes=0, reserved_bytes=5 * GIB)
        view = view_of(state_of([model("m"), model("x")], [loading, resident("x")]))
        free = 20 * GIB - 1_288_490_189
        assert account(view, GPU).schedulable_bytes == free - 5 * GIB
        assert account(view, GPU, without_reservations_of={"m"}).schedulable_bytes == free
        freed = account(view, GPU, without_reservations_of={"m"}, freed_bytes=4 * GIB)
        assert (freed.schedulable_bytes, freed.attributed_managed_bytes) == (free + 4 * GIB, 0)


class TestReservations:
    def test_one_that_rests_has_none(self) -> None:
        assert reserved(state_of([model("m")], [resident("m", reserved_bytes=9 * GIB)]), "m") is None

    @pytest.mark.parametrize(
        "change",
        [{"running_requests": 1}, {"last_used_at": ago(1) + 1}, {"state": ResidentState.LOADING}],
    )
    def test_it_lives_without_a_lease(self, change: dict[str, object]) -> None:
        busy = replace(resident("m", reserved_bytes=9 * GIB), **change)  # type: ignore[arg-type]
        assert reserved(state_of([model("m")], [busy]), "m") == (9 * GIB, 4 * GIB)

    def test_what_was_seen_since_its_last_use_is_over(self) -> None:
        used = resident("m", reserved_bytes=9 * GIB, last_used_at=ago(1))
        assert reserved(state_of([model("m")], [used]), "m") is None

    def test_it_is_held_once_for_many_leases_and_the_resident(self) -> None:
        leases = [lease("m", name=f"lease-{gib}", reserved_bytes=gib * GIB) for gib in (5, 7, 6)]
        state = state_of([model("m")], [resident("m", reserved_bytes=9 * GIB)], leases=leases)
        assert reserved(state, "m") == (7 * GIB, 4 * GIB)
        running = replace(state, residents=(resident("m", reserved_bytes=9 * GIB, running_requests=1),))
        assert reserved(running, "m") == (9 * GIB, 4 * GIB)

    def test_leases_without_a_resident_say_what_they_have(self) -> None:
        leases = [
            lease("m", name="a", reserved_bytes=5 * GIB, materialized_bytes=GIB),
            lease("m", name="b", reserved_bytes=4 * GIB, materialized_bytes=2 * GIB),
        ]
        assert reserved(state_of([model("m")], leases=leases), "m") == (5 * GIB, 2 * GIB)

    def test_a_failure_ends_the_leases_on_it(self) -> None:
        failed = resident("m", ResidentState.FAILED, running_requests=1)
        state = state_of([model("m")], [failed], leases=[lease("m", reserved_bytes=9 * GIB)])
        assert reserved(state, "m") is None
        assert view_of(state).active_leases(GPU, "m") == ()


class TestEnvelopes:
    def test_the_newest_then_the_largest_of_this_very_configuration(self) -> None:
        (measured,) = model("m").envelopes
        larger = replace(measured, peak_bytes=5 * GIB)
        older = replace(measured, peak_bytes=9 * GIB, measured_at=measured.measured_at - 1)
        other = replace(measured, peak_bytes=9 * GIB, config_hash="other")
        deployment = model("m", envelopes=(measured, larger, older, other))
        assert envelope_of(deployment, card(), active=False) is larger
        assert envelope_of(deployment, card(gpu_class="l4"), active=True) is None

    def test_a_suspect_one_counts_where_the_model_runs(self) -> None:
        (measured,) = model("m").envelopes
        suspect = replace(measured, peak_bytes=6 * GIB, measured_at=measured.measured_at + 1, suspect=True)
        deployment = model("m", envelopes=(measured, suspect))
        assert envelope_of(deployment, card(), active=True) is suspect
        assert envelope_of(deployment, card(), active=False) is measured

    def test_the_example_of_the_text(self) -> None:
        deployment = model("m", peak_bytes=1_216_348_160)
        assert requirement_of(deployment, card(), False, Policy()) == 1_350_565_888


class TestPressure:
    def test_it_may_be_more_than_everything(self) -> None:
        assert pressure_bp(Policy(), 8 * GIB, 8 * GIB, 0) == 11_429
        assert pressure_bp(Policy(), GIB, GIB, 0) == GIB * 10_000
        assert pressure_bp(Policy(), 8 * GIB, 4 * GIB, 5 * GIB) == 0

    def test_recovery_needs_time_that_was_observed(self) -> None:
        policy, track = Policy(), PressureTrack(Pressure.CRITICAL)
        for at in range(0, 31, 10):
            assert track.level is Pressure.CRITICAL
            track = judge(policy, track, 5_000, NOW + seconds(at))
        # To the level whose exit it is not below: 5,000 is over that of ELEVATED.
        assert track == PressureTrack(Pressure.ELEVATED, None, NOW + seconds(30))

    def test_a_gap_clears_the_evidence_before_the_sample_is_judged(self) -> None:
        policy = Policy()
        track = judge(policy, PressureTrack(Pressure.HIGH), 0, NOW)
        gone = judge(policy, track, 0, NOW + seconds(30))
        assert gone == PressureTrack(Pressure.HIGH, NOW + seconds(30), NOW + seconds(30))

    def test_a_rise_counts_at_once(self) -> None:
        track = judge(Policy(), PressureTrack(Pressure.ELEVATED, NOW, NOW), 8_500, NOW + 1)
        assert track == PressureTrack(Pressure.CRITICAL, None, NOW + 1)

    def test_what_was_stale_when_it_came_changes_nothing(self) -> None:
        track = PressureTrack(Pressure.ELEVATED, NOW, NOW)
        assert judge(Policy(), track, 9_000, NOW, NOW + seconds(15) + 1) is track
        assert judge(Policy(), track, 9_000, NOW, NOW + seconds(15)).level is Pressure.CRITICAL


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_words_with_figures_and_without(reason: Reason) -> None:
    assert describe(Refusal(reason, {}))
    told = describe(Refusal(reason, {"needed_bytes": GIB, "schedulable_bytes": 0}))
    assert "None" not in told
