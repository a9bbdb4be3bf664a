"""MIG: a partitioned GPU is its instances, and the layout may change between any two samples (semantics.md 1)."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest

from gpuledger.adapters.telemetry import nvml_layout
from gpuledger.domain.ports import AcceleratorReading, ManagedReading
from gpuledger.domain.state import Health, Kind
from tests.integration.nvml_bench import NOBODY, ONE, A, Bench, faults, managed, uuids
from tests.shim import GIB, NvmlShim, ShimCard, ShimInstance, ShimProcess, ShimXid

SMALL = ShimInstance("MIG-00000000-0000-0000-0000-0000000000a1", gpu_instance=7, slot=0, used_bytes=GIB)
LARGE = ShimInstance(
    "MIG-00000000-0000-0000-0000-0000000000a2",
    gpu_instance=1,
    slot=3,
    name="NVIDIA A100-SXM4-40GB MIG 3g.20gb",
    total_bytes=20 * GIB,
)
CARD = ShimCard(
    "GPU-00000000-0000-0000-0000-0000000000a0",
    name="NVIDIA A100-SXM4-40GB",
    total_bytes=40 * GIB,
    used_bytes=GIB,
    mig=1,
    instances=(SMALL, LARGE),
)
WHOLE = replace(CARD, mig=0, instances=())


def test_a_partitioned_card_is_its_instances_and_not_itself(bench: Bench) -> None:
    bench.shim.set([CARD])

    sample = bench.sample()

    assert sample.faults == ()
    assert sample.gone == (CARD.uuid,)
    first, second = sample.accelerators
    assert first == AcceleratorReading(
        accelerator_id=SMALL.uuid,
        index=107,
        kind=Kind.GPU,
        gpu_class="a100-sxm4-40gb-1g-5gb",
        device_name="NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        driver_version="550.54.15",
        total_bytes=5 * GIB,
        used_bytes=GIB,
        managed=(),
        foreign_processes=0,
    )
    assert (second.accelerator_id, second.gpu_class, second.total_bytes) == (
        LARGE.uuid,
        "a100-sxm4-40gb-3g-20gb",
        20 * GIB,
    )


def test_indices_are_distinct_and_stay(bench: Bench) -> None:
    twin = replace(CARD, uuid="GPU-b", instances=(replace(SMALL, uuid="MIG-b1"), replace(LARGE, uuid="MIG-b2")))
    bench.shim.set([CARD, ONE, twin])
    before = {one.accelerator_id: one.index for one in bench.sample().accelerators}
    assert before == {SMALL.uuid: 107, LARGE.uuid: 101, A: 1, "MIG-b1": 307, "MIG-b2": 301}

    bench.shim.set([replace(CARD, instances=(replace(LARGE, slot=0),)), ONE, twin])
    after = {one.accelerator_id: one.index for one in bench.sample().accelerators}
    assert after == {key: index for key, index in before.items() if key != SMALL.uuid}


def test_memory_and_processes_are_those_of_the_instance(bench: Bench, child: subprocess.Popen[str]) -> None:
    busy = replace(SMALL, used_bytes=3 * GIB, processes=(ShimProcess(child.pid, 2 * GIB),))
    other = replace(LARGE, used_bytes=4 * GIB, processes=(ShimProcess(NOBODY, 4 * GIB),))
    bench.shim.set([replace(CARD, instances=(busy, other))])

    first, second = bench.sample([managed(child.pid, SMALL.uuid)]).accelerators

    assert first.managed == (ManagedReading("res-1", alive=True, used_bytes=2 * GIB),)
    assert (first.used_bytes, first.foreign_processes) == (3 * GIB, 0)
    assert second.managed == ()
    assert (second.used_bytes, second.foreign_processes) == (4 * GIB, 1)


def test_in_a_container_the_card_says_nothing_and_its_instances_are_tried(bench: Bench) -> None:
    bench.shim.set([replace(CARD, mig=4, memory_error=4, process_error=4, event_error=4)])
    sample = bench.sample()
    assert uuids(sample) == [SMALL.uuid, LARGE.uuid]
    assert (sample.faults, sample.gone) == ((), (CARD.uuid,))


# ---- one that fails ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "code", "health"),
    [
        (replace(SMALL, memory_error=999), "NVML_UNKNOWN", None),
        (replace(SMALL, memory_error=3), "NOT_SUPPORTED", None),
        (replace(SMALL, process_error=16), "NVML_RESET_REQUIRED", Health.FAILED),
        (replace(SMALL, total_bytes=0, used_bytes=0), "IMPOSSIBLE_FIGURES", None),
        (replace(SMALL, error=15), "NVML_GPU_LOST", Health.LOST),
    ],
)
def test_a_bad_instance_does_not_blind_the_others(
    bench: Bench, broken: ShimInstance, code: str, health: Health | None
) -> None:
    bench.shim.set([CARD, ONE])
    bench.sample()
    bench.shim.set([replace(CARD, instances=(broken, LARGE)), ONE])

    sample = bench.sample()

    assert faults(sample) == {(SMALL.uuid, code, health)}
    assert uuids(sample) == [LARGE.uuid, A]
    assert sample.gone == (CARD.uuid,)


def test_an_instance_that_never_had_a_name_is_a_fault_of_its_card(bench: Bench) -> None:
    bench.shim.set([replace(CARD, instances=(replace(SMALL, error=15), LARGE))])
    sample = bench.sample()
    assert faults(sample) == {(CARD.uuid, "NVML_GPU_LOST", None)}
    assert uuids(sample) == [LARGE.uuid]


@pytest.mark.parametrize(("error", "code"), [(15, "NVML_GPU_LOST"), (None, "GPU_VANISHED")])
def test_instances_of_a_lost_card_are_lost_and_not_gone(bench: Bench, error: int | None, code: str) -> None:
    bench.shim.set([CARD, ONE])
    bench.sample()
    bench.shim.set([ONE] if error is None else [replace(CARD, error=error), ONE])

    sample = bench.sample()

    assert faults(sample) == {(SMALL.uuid, code, Health.LOST), (LARGE.uuid, code, Health.LOST)}
    assert uuids(sample) == [A]
    assert sample.gone == (CARD.uuid,)

    bench.shim.set([CARD, ONE])
    assert uuids(bench.sample()) == [SMALL.uuid, LARGE.uuid, A]


def test_a_card_that_does_not_say_how_it_is_divided_is_a_fault_of_what_it_was(bench: Bench) -> None:
    bench.shim.set([CARD, ONE])
    bench.sample()
    bench.shim.set([replace(CARD, mig=999), replace(ONE, mig=999)])
    sample = bench.sample()
    assert faults(sample) == {(one, "NVML_UNKNOWN", None) for one in (SMALL.uuid, LARGE.uuid, A)}
    assert sample.accelerators == ()


def test_a_driver_that_does_not_answer_is_a_fault_of_every_instance(bench: Bench) -> None:
    bench.shim.set([CARD])
    bench.sample()
    bench.shim.set([], init=9)
    assert faults(bench.sample()) == {(one.uuid, "NVML_DRIVER_NOT_LOADED", None) for one in (SMALL, LARGE)}


# ---- layouts that change ----------------------------------------------------------------------------------------


def test_an_instance_that_is_no_more_is_gone_and_not_lost(bench: Bench) -> None:
    bench.shim.set([CARD])
    bench.sample()
    fresh = replace(SMALL, uuid="MIG-fresh", gpu_instance=2, slot=0)
    bench.shim.set([replace(CARD, instances=(fresh, LARGE))])

    sample = bench.sample()

    assert uuids(sample) == ["MIG-fresh", LARGE.uuid]
    assert sample.faults == ()
    assert set(sample.gone) == {SMALL.uuid, CARD.uuid}
    assert set(bench.sample().gone) == {SMALL.uuid, CARD.uuid}  # the sample that told it first may be lost

    bench.shim.set([CARD])
    assert set(bench.sample().gone) == {"MIG-fresh", CARD.uuid}


def test_what_a_layout_that_could_not_be_read_lacks_is_not_gone(bench: Bench) -> None:
    bench.shim.set([CARD])
    bench.sample()
    bench.shim.set([replace(CARD, instances=(replace(LARGE, error=999),))])

    sample = bench.sample()

    assert faults(sample) == {(SMALL.uuid, "NVML_UNKNOWN", None), (LARGE.uuid, "NVML_UNKNOWN", None)}
    assert sample.gone == (CARD.uuid,)

    bench.shim.set([replace(CARD, instances=(LARGE,))])
    sample = bench.sample()
    assert (uuids(sample), sample.faults) == ([LARGE.uuid], ())
    assert set(sample.gone) == {SMALL.uuid, CARD.uuid}


def test_a_card_that_is_partitioned_is_gone_and_comes_back_when_it_is_whole(bench: Bench) -> None:
    bench.shim.set([WHOLE, ONE])
    assert bench.sample().gone == ()

    bench.shim.set([CARD, ONE])
    sample = bench.sample()
    assert uuids(sample) == [SMALL.uuid, LARGE.uuid, A]
    assert (sample.faults, sample.gone) == ((), (CARD.uuid,))

    bench.shim.set([WHOLE, ONE])
    sample = bench.sample()
    assert uuids(sample) == [CARD.uuid, A]
    assert (sample.faults, set(sample.gone)) == ((), {SMALL.uuid, LARGE.uuid})


def test_a_partitioned_card_without_instances_is_nothing(bench: Bench) -> None:
    bench.shim.set([replace(CARD, instances=())])
    sample = bench.sample()
    assert (sample.accelerators, sample.faults, sample.gone) == ((), (), (CARD.uuid,))


def test_what_is_gone_is_told_for_a_bounded_number(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml_layout, "MAX_GONE", 3)
    for number in range(8):
        bench.shim.set([replace(CARD, instances=(replace(SMALL, uuid=f"MIG-{number}"),))])
        bench.sample()
    assert set(bench.sample().gone) == {CARD.uuid, "MIG-6", "MIG-5"}


# ---- what became of it while no scheduler ran -------------------------------------------------------------------


def test_an_instance_of_an_earlier_run_that_is_no_more_is_gone(shim: NvmlShim) -> None:
    """MIG is set up while nothing runs."""
    bench = Bench(shim, known=[SMALL.uuid, "MIG-earlier", CARD.uuid, A])
    shim.set([CARD, ONE])
    sample = bench.sample()
    assert (uuids(sample), sample.faults) == ([SMALL.uuid, LARGE.uuid, A], ())
    assert set(sample.gone) == {"MIG-earlier", CARD.uuid}
    bench.telemetry.close()


@pytest.mark.parametrize(
    ("cards", "code"),
    [
        pytest.param([replace(CARD, error=4), ONE], "NVML_NO_PERMISSION", id="its card may be the one that is silent"),
        pytest.param([replace(CARD, mig=999), ONE], "NVML_UNKNOWN", id="or one that does not tell"),
    ],
)
def test_as_long_as_something_errs_it_may_be_there(shim: NvmlShim, cards: list[ShimCard], code: str) -> None:
    bench = Bench(shim, known=["MIG-earlier"])
    shim.set(cards)
    sample = bench.sample()
    assert ("MIG-earlier", code, None) in faults(sample)
    assert sample.gone == ()
    shim.set([CARD, ONE])
    assert set(bench.sample().gone) == {"MIG-earlier", CARD.uuid}
    bench.telemetry.close()


def test_a_card_of_an_earlier_run_that_is_missing_has_vanished(shim: NvmlShim) -> None:
    bench = Bench(shim, known=[A, "GPU-earlier"])
    shim.set([ONE])
    sample = bench.sample()
    assert (faults(sample), sample.gone) == ({("GPU-earlier", "GPU_VANISHED", Health.LOST)}, ())
    shim.set([ONE, replace(ONE, uuid="GPU-other", error=4)])
    assert faults(bench.sample()) == {("GPU-earlier", "NVML_NO_PERMISSION", None), (None, "NVML_NO_PERMISSION", None)}
    bench.telemetry.close()


def test_a_driver_that_does_not_answer_hides_what_an_earlier_run_had(shim: NvmlShim) -> None:
    bench = Bench(shim, known=[A, "MIG-earlier"])
    shim.set([], init=9)
    assert faults(bench.sample()) == {(one, "NVML_DRIVER_NOT_LOADED", None) for one in (A, "MIG-earlier")}
    bench.telemetry.close()


# ---- instances that share their memory --------------------------------------------------------------------------

LEFT = replace(LARGE, uuid="MIG-left", compute_instance=0, slot=0, name="NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb")
RIGHT = replace(LEFT, uuid="MIG-right", compute_instance=1, slot=1)


def test_one_memory_is_offered_once(bench: Bench) -> None:
    """Compute instances of one GPU instance have its memory in common."""
    bench.shim.set([replace(CARD, instances=(LEFT, RIGHT))])
    sample = bench.sample()
    assert [(one.accelerator_id, one.gpu_class) for one in sample.accelerators] == [
        ("MIG-left", "a100-sxm4-40gb-1c-3g-20gb")
    ]
    assert faults(sample) == {("MIG-right", "MIG_MEMORY_SHARED", None)}


def test_who_was_offered_stays_and_the_other_takes_over_when_it_is_gone(bench: Bench) -> None:
    bench.shim.set([replace(CARD, instances=(RIGHT,))])
    assert uuids(bench.sample()) == ["MIG-right"]
    bench.shim.set([replace(CARD, instances=(LEFT, RIGHT))])
    assert uuids(bench.sample()) == ["MIG-right"]

    bench.shim.set([replace(CARD, instances=(LEFT,))])
    sample = bench.sample()
    assert (uuids(sample), sample.faults) == (["MIG-left"], ())
    assert set(sample.gone) == {"MIG-right", CARD.uuid}


# ---- health -----------------------------------------------------------------------------------------------------


def causes(bench: Bench) -> dict[str, str]:
    return {one.accelerator_id: one.worst.cause for one in bench.sample().accelerators}


def test_instances_have_the_health_of_their_card(bench: Bench) -> None:
    bench.shim.set([replace(CARD, ecc_errors=2)])
    assert causes(bench) == {SMALL.uuid: "ECC_UNCORRECTED", LARGE.uuid: "ECC_UNCORRECTED"}


def test_an_xid_hits_the_instance_that_it_names_or_all(bench: Bench) -> None:
    bench.shim.set([CARD, ONE])
    bench.sample()
    of_one = ShimXid(48, gpu_instance=SMALL.gpu_instance)
    bench.shim.set([replace(CARD, xids=(of_one,)), ONE])
    assert causes(bench) == {SMALL.uuid: "XID_48", LARGE.uuid: "", A: ""}
    bench.shim.set([replace(CARD, xids=(of_one, ShimXid(119))), ONE])
    assert causes(bench) == {SMALL.uuid: "XID_119", LARGE.uuid: "XID_119", A: ""}


def test_an_xid_of_an_instance_that_nobody_knows_hits_its_card(bench: Bench) -> None:
    bench.shim.set([CARD])
    bench.sample()
    bench.shim.set([replace(CARD, xids=(ShimXid(48, gpu_instance=5),))])
    assert causes(bench) == {SMALL.uuid: "XID_48", LARGE.uuid: "XID_48"}


def test_a_new_instance_does_not_inherit_the_xid_of_the_one_before(bench: Bench) -> None:
    bench.shim.set([CARD])
    bench.sample()
    happened = (ShimXid(48, gpu_instance=SMALL.gpu_instance),)
    bench.shim.set([replace(CARD, xids=happened, instances=(replace(SMALL, uuid="MIG-fresh"), LARGE))])
    assert causes(bench) == {"MIG-fresh": "", LARGE.uuid: ""}


def test_an_instance_that_was_made_again_starts_without_the_xid(bench: Bench) -> None:
    """Its UUID may be the same."""
    bench.shim.set([CARD])
    bench.sample()
    happened = (ShimXid(48, gpu_instance=SMALL.gpu_instance),)
    bench.shim.set([replace(CARD, xids=happened)])
    assert causes(bench) == {SMALL.uuid: "XID_48", LARGE.uuid: ""}
    bench.shim.set([replace(CARD, xids=happened, instances=(LARGE,))])
    bench.sample()
    bench.shim.set([replace(CARD, xids=happened)])
    assert causes(bench) == {SMALL.uuid: "", LARGE.uuid: ""}


def test_the_card_s_xids_are_there_when_it_is_whole_again(bench: Bench) -> None:
    bench.shim.set([CARD])
    bench.sample()
    bench.shim.set([replace(CARD, xids=(ShimXid(95),))])
    bench.sample()
    bench.shim.set([replace(WHOLE, xids=(ShimXid(95),))])
    assert causes(bench) == {CARD.uuid: "XID_95"}


def test_a_restart_finds_the_card_gone_that_it_never_saw_whole(shim: NvmlShim) -> None:
    """The ledger has it from the run before."""
    shim.set([CARD])
    bench = Bench(shim)
    assert bench.sample().gone == (CARD.uuid,)
    bench.telemetry.close()
