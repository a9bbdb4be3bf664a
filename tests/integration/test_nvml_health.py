"""Health with its causes: what a card counts, which Xids it reported, and the marks that clearing is compared with."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import pytest

from gpuledger.adapters.telemetry.faults import HealthCause
from gpuledger.adapters.telemetry.node import NodeTelemetry
from gpuledger.adapters.telemetry.nvml import NvmlSource
from gpuledger.adapters.telemetry.nvml_xids import MAX_EVENTS_PER_SAMPLE
from gpuledger.adapters.telemetry.xids import FATAL_XIDS, cause_of
from gpuledger.domain.aggregates.accelerator import is_of_device
from gpuledger.domain.ports import AcceleratorReading
from gpuledger.domain.state import Health
from gpuledger.domain.units import MAX_INTEGER
from tests.integration.nvml_bench import ONE, OTHER, A, B, Bench, faults, uuids
from tests.shim import NvmlShim, ShimCard, ShimXid

#: So often something is done again that event sets which were not freed would have run out (nvml_shim.c).
MANY = 12


def shown(reading: AcceleratorReading) -> tuple[Health, str, int]:
    return reading.worst.health, reading.worst.cause, reading.worst.mark


def happened(*codes: int) -> ShimCard:
    return replace(ONE, xids=tuple(ShimXid(code) for code in codes))


# ---- what a card counts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        (replace(ONE, ecc_errors=0, remap=(False, False), remapped_rows=3), (Health.HEALTHY, "", 0)),
        (replace(ONE, ecc_errors=1), (Health.DEGRADED, "ECC_UNCORRECTED", 1)),
        (replace(ONE, ecc_errors=1, ecc_lifetime=9), (Health.DEGRADED, "ECC_UNCORRECTED", 9)),
        # Beyond what can be written down.
        (replace(ONE, ecc_errors=2**63 - 1), (Health.DEGRADED, "ECC_UNCORRECTED", MAX_INTEGER)),
        (replace(ONE, ecc_errors=1, ecc_lifetime=2**63 - 1), (Health.DEGRADED, "ECC_UNCORRECTED", MAX_INTEGER)),
        (replace(ONE, ecc_errors=0, ecc_lifetime=9), (Health.HEALTHY, "", 0)),
        (replace(ONE, remap=(True, False), remapped_rows=2), (Health.DEGRADED, "ROW_REMAP_PENDING", 3)),
        (replace(ONE, remap=(False, True)), (Health.FAILED, "ROW_REMAP_FAILED", 1)),
    ],
)
def test_health_is_what_the_card_counts(bench: Bench, card: ShimCard, expected: tuple[Health, str, int]) -> None:
    bench.shim.set([card])
    assert shown(bench.reading()) == expected


def test_a_mark_grows_with_each_further_error_and_across_a_reboot(bench: Bench) -> None:
    """The count since the driver was loaded starts anew, that of the card's life does not."""
    marks: list[int] = []
    for since_load, lifetime in ((1, 4), (2, 5), (1, 6)):
        bench.shim.set([replace(ONE, ecc_errors=since_load, ecc_lifetime=lifetime)])
        marks.append(bench.reading().worst.mark)
    assert marks == [4, 5, 6]


def test_the_worst_comes_first_and_all_are_told(bench: Bench) -> None:
    card = replace(ONE, ecc_errors=2, remap=(True, True))
    bench.shim.set([card])
    bench.sample()
    bench.shim.set([replace(card, xids=(ShimXid(48), ShimXid(64)))])

    reading = bench.reading()

    assert (reading.worst.health, reading.worst.cause) == (Health.FAILED, "ROW_REMAP_FAILED")
    assert [(one.health, one.cause) for one in reading.faults[1:]] == [
        (Health.FAILED, "XID_64"),
        (Health.FAILED, "XID_48"),
        (Health.DEGRADED, "ECC_UNCORRECTED"),
        (Health.DEGRADED, "ROW_REMAP_PENDING"),
    ]
    assert bench.reading() == reading


def test_a_count_that_cannot_be_had_is_no_fault_and_a_card_that_fails_is(bench: Bench) -> None:
    bench.shim.set([replace(ONE, error=15), replace(OTHER, ecc_errors=0)])
    sample = bench.sample()
    assert faults(sample) == {(None, "NVML_GPU_LOST", Health.LOST)}
    assert [shown(one) for one in sample.accelerators] == [(Health.HEALTHY, "", 0)]


# ---- Xids -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", sorted(FATAL_XIDS))
def test_an_xid_that_ends_the_work_of_a_card_fails_it(
    bench: Bench, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    bench.shim.set([ONE, OTHER])
    bench.sample()
    bench.shim.set([happened(code), OTHER])

    first, second = bench.sample().accelerators

    assert shown(first) == (Health.FAILED, f"XID_{code}", bench.wall.now_us)
    assert shown(second) == (Health.HEALTHY, "", 0)
    assert f"{A}: Xid {code}: {FATAL_XIDS[code]}" in caplog.text


@pytest.mark.parametrize("code", [13, 31, 43, 45, 63, 68, 69, 92, 94, 109, 154])
def test_an_xid_of_an_application_is_no_fault_of_the_card(bench: Bench, code: int) -> None:
    bench.shim.set([ONE])
    bench.sample()
    bench.shim.set([happened(code)])
    assert shown(bench.reading()) == (Health.HEALTHY, "", 0)


def test_every_cause_but_one_stands_until_an_operator_clears_it() -> None:
    """A pending remap goes away by itself."""
    causes = {*HealthCause, *(cause_of(code) for code in FATAL_XIDS)}
    assert {cause for cause in causes if not is_of_device(cause)} == {HealthCause.ROW_REMAP_PENDING}


def test_an_xid_is_told_as_long_as_the_scheduler_runs_and_its_mark_grows_with_the_next(bench: Bench) -> None:
    bench.shim.set([ONE])
    bench.sample()
    bench.shim.set([happened(79)])
    first = bench.reading()
    assert [shown(bench.reading()) for _ in range(3)] == [shown(first)] * 3

    bench.shim.set([happened(79, 13, 79)])
    second = bench.reading()

    assert second.worst.cause == "XID_79"
    assert second.worst.mark > first.worst.mark


def test_the_newest_of_several_is_told_first(bench: Bench) -> None:
    """One that an operator has cleared must not hide one that came after it."""
    bench.shim.set([ONE])
    bench.sample()
    bench.shim.set([happened(79, 48, 62, 48)])
    reading = bench.reading()
    told = [(reading.worst.cause, reading.worst.mark), *((one.cause, one.mark) for one in reading.faults[1:])]
    assert [cause for cause, _ in told] == ["XID_48", "XID_62", "XID_79"]
    assert [mark for _, mark in told] == sorted((mark for _, mark in told), reverse=True)


def test_marks_grow_though_the_clock_is_set_back(bench: Bench) -> None:
    bench.shim.set([ONE])
    bench.sample()
    bench.shim.set([happened(48)])
    first = bench.reading().worst.mark
    bench.wall.now_us -= 3_600_000_000
    bench.shim.set([happened(48, 48)])
    assert bench.reading().worst.mark == first + 1


def test_a_mark_is_the_wall_clock_so_that_it_grows_over_restarts(shim: NvmlShim) -> None:
    first, second = Bench(shim), Bench(shim)
    second.wall.now_us = first.wall.now_us + 60_000_000
    marks: list[int] = []
    for bench in (first, second):
        shim.set([ONE])
        bench.sample()
        shim.set([happened(48)])
        marks.append(bench.reading().worst.mark)
        bench.telemetry.close()
    assert marks[1] > marks[0]


def test_marks_grow_over_a_restart_though_the_clock_was_ahead_before(shim: NvmlShim) -> None:
    """What an operator cleared then would else hide what happens from now on, for years."""
    ahead = 4_000_000_000_000_000
    bench = Bench(shim, known=[A], newest_mark=ahead)
    try:
        shim.set([ONE])
        bench.sample()
        shim.set([happened(48)])
        assert bench.reading().worst.mark == ahead + 1
    finally:
        bench.telemetry.close()


def test_what_happened_before_we_watched_is_not_known(bench: Bench) -> None:
    bench.shim.set([happened(79)])
    bench.sample()
    assert shown(bench.reading()) == (Health.HEALTHY, "", 0)


def test_a_storm_does_not_hold_up_the_sample(bench: Bench) -> None:
    bench.shim.set([ONE])
    bench.sample()
    bench.shim.set([happened(*[13] * MAX_EVENTS_PER_SAMPLE, 79)])
    assert bench.reading().worst.health is Health.HEALTHY
    assert bench.reading().worst.cause == "XID_79"


@pytest.mark.parametrize("error", [2, 3, 4, 13])
def test_a_card_without_events_is_scheduled_all_the_same(bench: Bench, error: int) -> None:
    """vGPU, and old cards; it is not asked again."""
    bench.shim.set([replace(ONE, event_error=error), OTHER])
    assert uuids(bench.sample()) == [A, B]
    bench.shim.set([ONE, OTHER])
    bench.sample()
    bench.shim.set([happened(79), replace(OTHER, xids=(ShimXid(62),))])
    sample = bench.sample()
    assert [one.worst.cause for one in sample.accelerators] == ["", "XID_62"]
    assert sample.faults == ()


def test_a_card_that_could_not_be_watched_at_once_is_watched_later(bench: Bench) -> None:
    bench.shim.set([replace(ONE, event_error=999)])
    for _ in range(MANY):
        assert bench.reading().worst.health is Health.HEALTHY
    bench.shim.set([ONE])
    bench.sample()
    bench.shim.set([happened(79)])
    assert bench.reading().worst.cause == "XID_79"


def test_a_card_whose_set_failed_gets_a_new_one(bench: Bench) -> None:
    bench.shim.set([ONE])
    bench.sample()
    bench.shim.set([replace(ONE, wait_error=999)])
    bench.sample()
    bench.shim.set([happened(79)])
    assert bench.reading().worst.cause == "XID_79"


def test_a_session_leaves_no_event_set_behind(bench: Bench) -> None:
    bench.shim.set([ONE, OTHER])
    bench.sample()
    bench.telemetry.close()
    assert not bench.shim.leaked


def test_waiting_on_a_lost_card_does_not_hide_the_xids_of_another(bench: Bench) -> None:
    bench.shim.set([ONE, OTHER])
    bench.sample()
    bench.shim.set([replace(ONE, error=15, wait_error=15), replace(OTHER, xids=(ShimXid(48),))])
    sample = bench.sample()
    assert faults(sample) == {(A, "NVML_GPU_LOST", Health.LOST)}
    assert [(one.accelerator_id, one.worst.cause) for one in sample.accelerators] == [(B, "XID_48")]


def test_a_card_that_fell_off_the_bus_says_so_when_it_is_back(bench: Bench) -> None:
    bench.shim.set([ONE, OTHER])
    bench.sample()
    bench.shim.set([happened(79), OTHER])
    bench.sample()
    bench.shim.set([OTHER])
    assert faults(bench.sample()) == {(A, "GPU_VANISHED", Health.LOST)}

    bench.shim.set([ONE, OTHER])
    assert [one.worst.cause for one in bench.sample().accelerators] == ["XID_79", ""]
    bench.shim.set([happened(48), OTHER])
    assert [one.worst.cause for one in bench.sample().accelerators] == ["XID_48", ""]


def test_a_new_session_watches_anew_and_forgets_nothing(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bench.shim.set([ONE])
    bench.sample()
    bench.shim.set([happened(62)])
    before = bench.reading()
    for load in range(2, MANY):
        bench.shim.set([happened(62)], load=load)
        bench.sample()  # the session at hand stumbles
        assert shown(bench.reading()) == shown(before)
    bench.shim.set([happened(62, 79)], load=MANY - 1)
    reading = bench.reading()
    assert [reading.worst.cause, *(one.cause for one in reading.faults[1:])] == ["XID_79", "XID_62"]
    assert "cannot be watched" not in caplog.text


def test_event_sets_of_cards_that_come_and_go_are_freed(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(MANY):
        bench.shim.set([ONE, OTHER])
        bench.sample()
        bench.shim.set([OTHER])
        bench.sample(after_ms=0)
    bench.shim.set([ONE, OTHER])
    bench.sample()
    bench.shim.set([happened(79), OTHER])
    assert [one.worst.cause for one in bench.sample().accelerators] == ["XID_79", ""]
    assert "cannot be watched" not in caplog.text


def test_marks_are_microseconds_since_1970(shim: NvmlShim) -> None:
    shim.set([ONE])
    telemetry = NodeTelemetry([NvmlSource(str(shim.library))])
    telemetry.sample(())
    before_us = time.time_ns() // 1_000
    shim.set([happened(48)])
    (reading,) = telemetry.sample(()).accelerators
    assert before_us <= reading.worst.mark <= time.time_ns() // 1_000
    telemetry.close()
