"""A GPU that shares the host's memory (GB10, Jetson): measured as the host is, and offered once (semantics.md 1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpuledger.adapters.telemetry.host import HostSource
from gpuledger.adapters.telemetry.host_memory import HostMeter
from gpuledger.adapters.telemetry.node import NodeTelemetry
from gpuledger.adapters.telemetry.nvml import NvmlSource
from gpuledger.domain.ports import AcceleratorReading, ManagedProcess, ManagedReading, NodeReading, ProcessIdentity
from gpuledger.domain.state import Health, Kind
from gpuledger.domain.units import GIB
from tests.fake_host import BOOT, HOST, MOUNT_V2, FakeHost
from tests.integration.nvml_bench import ONE, faults, uuids
from tests.shim import NvmlShim, ShimCard, ShimInstance, ShimProcess, ShimXid

GB10 = ShimCard("GPU-00000000-0000-0000-0000-00000000001b", name="NVIDIA GB10", memory_error=3)
U = GB10.uuid
STRANGER = 4711


class Bench(FakeHost):
    """A machine of 64 GiB with 60 available, and the telemetry of its RAM and of its cards."""

    def __init__(self, tmp_path: Path, shim: NvmlShim) -> None:
        super().__init__(tmp_path)
        self.shim = shim
        self.start()

    def start(self, *, with_host: bool = True, limit_bytes: int | None = None) -> None:
        host = HostSource("node-1", limit_bytes=limit_bytes, proc=self.proc)
        cards = NvmlSource(str(self.shim.library), host=HostMeter(limit_bytes=limit_bytes, proc=self.proc), retry_ms=0)
        self.telemetry = NodeTelemetry([host, cards] if with_host else [cards], proc=self.proc)

    def sample(self, *managed: ManagedProcess) -> NodeReading:
        return self.telemetry.sample(managed)

    def reading(self, *managed: ManagedProcess) -> AcceleratorReading:
        sample = self.sample(*managed)
        assert sample.faults == ()
        (reading,) = sample.accelerators
        return reading

    def lists(self, *processes: ShimProcess) -> None:
        self.shim.set([replace(GB10, processes=processes)])


@pytest.fixture
def bench(tmp_path: Path, shim: NvmlShim) -> Iterator[Bench]:
    shim.set([GB10])
    bench = Bench(tmp_path, shim)
    yield bench
    bench.telemetry.close()


def test_it_is_measured_by_the_host_s_figures_under_its_own_class(bench: Bench) -> None:
    sample = bench.sample()
    assert sample.accelerators == (
        AcceleratorReading(
            accelerator_id=U,
            index=0,
            kind=Kind.GPU,
            gpu_class="gb10",
            device_name="NVIDIA GB10",
            driver_version="550.54.15",
            total_bytes=64 * GIB,
            used_bytes=4 * GIB,
            managed=(),
            foreign_processes=0,
            unified=True,
        ),
    )
    assert sample.faults == ()
    assert sample.memory_bytes == 64 * GIB


# ---- one memory, offered once -----------------------------------------------------------------------------------


def test_the_host_s_domain_is_not_offered_beside_it(bench: Bench) -> None:
    sample = bench.sample()
    assert uuids(sample) == [U]
    assert sample.gone == (HOST,)


def test_a_host_that_was_shown_before_the_driver_came_is_gone(bench: Bench) -> None:
    bench.shim.set([], init=9)
    assert uuids(bench.sample()) == [HOST]
    bench.shim.set([GB10])
    sample = bench.sample()
    assert (uuids(sample), sample.gone) == ([U], (HOST,))


@pytest.mark.parametrize("error", [4, 15, 999])
def test_it_stays_so_while_the_card_cannot_be_read(bench: Bench, error: int) -> None:
    bench.sample()
    bench.shim.set([replace(GB10, memory_error=error)])
    sample = bench.sample()
    assert (uuids(sample), sample.gone) == ([], (HOST,))
    assert [one.accelerator_id for one in sample.faults] == [U]
    assert sample.memory_bytes == 64 * GIB

    bench.shim.set([], init=9)
    assert uuids(bench.sample()) == []


def test_a_card_with_memory_of_its_own_leaves_the_host_as_it_is(bench: Bench) -> None:
    bench.shim.set([ONE])
    sample = bench.sample()
    assert (uuids(sample), sample.gone) == ([HOST, ONE.uuid], ())


def test_of_two_such_cards_the_first_has_the_memory(bench: Bench) -> None:
    second = replace(GB10, uuid="GPU-second")
    bench.shim.set([GB10, second, ONE])
    sample = bench.sample()
    assert uuids(sample) == [U, ONE.uuid]
    assert faults(sample) == {("GPU-second", "UNIFIED_MEMORY_SHARED", None)}

    bench.shim.set([replace(GB10, memory_error=999), second, ONE])
    assert uuids(bench.sample()) == [ONE.uuid]  # not the other one's turn: residents of the first may be there


def test_a_node_that_offers_no_host_still_knows_its_memory(bench: Bench) -> None:
    bench.start(with_host=False)
    sample = bench.sample()
    assert (uuids(sample), sample.gone, sample.memory_bytes) == ([U], (), 64 * GIB)


def test_an_instance_that_does_not_tell_its_memory_is_not_taken_for_one(bench: Bench) -> None:
    bench.shim.set([replace(ONE, mig=1, instances=(ShimInstance("MIG-a", gpu_instance=1, memory_error=3),))])
    sample = bench.sample()
    assert faults(sample) == {("MIG-a", "NOT_SUPPORTED", None)}
    assert uuids(sample) == [HOST]


# ---- whose memory it is -----------------------------------------------------------------------------------------


def test_a_resident_holds_memory_of_the_host_and_what_the_driver_books(bench: Bench) -> None:
    """CUDA's allocations are the driver's: in no resident set, and exactly what NVML tells."""
    resident = bench.process(10, anon=2 * GIB, shmem=GIB, on=U)
    bench.lists(ShimProcess(10, 16 * GIB), ShimProcess(STRANGER, GIB))
    bench.memory(total=64 * GIB, available=40 * GIB)

    reading = bench.reading(resident)

    assert reading.managed == (ManagedReading("res-10", alive=True, used_bytes=19 * GIB),)
    assert (reading.used_bytes, reading.foreign_processes, reading.blind) == (24 * GIB, 1, None)


def test_a_mapped_model_is_in_use_and_its_resident_s(bench: Bench) -> None:
    resident = bench.process(10, anon=GIB, file=8 * GIB, on=U)
    bench.shares(10, anon=GIB, file=8 * GIB)
    bench.lists(ShimProcess(10, 2 * GIB))
    reading = bench.reading(resident)
    assert reading.managed[0].used_bytes == 11 * GIB
    assert reading.used_bytes == 4 * GIB + 8 * GIB


def test_a_resident_that_the_driver_does_not_list_holds_memory_of_the_host_only(bench: Bench) -> None:
    assert bench.reading(bench.process(10, anon=GIB, on=U)).managed[0].used_bytes == GIB


def test_members_add_up(bench: Bench) -> None:
    resident = bench.process(10, anon=GIB, on=U)
    bench.process(11, anon=2 * GIB, parent=10)
    bench.lists(ShimProcess(10, 4 * GIB), ShimProcess(11, 8 * GIB))
    assert bench.reading(resident).managed[0].used_bytes == 15 * GIB


def test_what_a_dead_resident_still_has_on_the_card_is_told(bench: Bench) -> None:
    ended = ManagedProcess("res-9", U, ProcessIdentity(9, 100, BOOT))
    bench.lists(ShimProcess(9, 4 * GIB))
    assert bench.reading(ended).managed == (ManagedReading("res-9", alive=False, used_bytes=4 * GIB),)
    bench.lists()
    assert bench.reading(ended).managed == (ManagedReading("res-9", alive=False, used_bytes=0),)


@pytest.mark.parametrize(
    ("card", "blind"),
    [
        pytest.param(replace(GB10, process_error=3), "PROCESS_LIST_UNREADABLE", id="Jetson keeps no list"),
        pytest.param(replace(GB10, processes=(ShimProcess(10, None),)), "NO_PROCESS_BYTES", id="managed memory"),
        pytest.param(
            replace(GB10, processes=(ShimProcess(10, 65 * GIB),)), "NO_PROCESS_BYTES", id="more than there is"
        ),
    ],
)
def test_without_the_driver_s_part_the_sum_is_unknown(bench: Bench, card: ShimCard, blind: str) -> None:
    """The resident set alone would be a number, and too small by the whole model."""
    bench.shim.set([card])
    reading = bench.reading(bench.process(10, anon=GIB, on=U))
    assert reading.managed == (ManagedReading("res-10", alive=True, used_bytes=None),)
    assert reading.blind == blind


def test_in_a_container_the_sum_is_unknown_too(bench: Bench) -> None:
    (bench.proc / "self/ns/pid").unlink()
    (bench.proc / "self/ns/pid").symlink_to("pid:[4026532177]")
    bench.lists(ShimProcess(STRANGER, GIB))
    reading = bench.reading(bench.process(10, anon=GIB, on=U))
    assert (reading.managed[0].used_bytes, reading.blind) == (None, "PID_NAMESPACE")


# ---- limits, and what fails -------------------------------------------------------------------------------------


def limited(bench: Bench, limit_bytes: int, current_bytes: int) -> None:
    bench.mount(MOUNT_V2)
    bench.group_v2("", limit_bytes, current=current_bytes)


def test_a_cgroup_s_limit_takes_the_machine_s_place(bench: Bench) -> None:
    limited(bench, 16 * GIB, 6 * GIB)
    sample = bench.sample()
    (reading,) = sample.accelerators
    assert (reading.total_bytes, reading.used_bytes, sample.memory_bytes) == (16 * GIB, 6 * GIB, 16 * GIB)


def test_under_a_limit_no_more_is_left_than_the_machine_has(bench: Bench) -> None:
    """What the driver of the card takes need be in no cgroup's use."""
    limited(bench, 32 * GIB, 6 * GIB)
    bench.memory(total=64 * GIB, available=10 * GIB)
    reading = bench.reading()
    assert (reading.total_bytes, reading.used_bytes) == (32 * GIB, 22 * GIB)


def test_the_operator_s_limit_holds_for_the_card(bench: Bench) -> None:
    bench.start(limit_bytes=16 * GIB)
    reading = bench.reading()
    assert (reading.total_bytes, reading.used_bytes) == (16 * GIB, 4 * GIB)


def test_a_host_that_cannot_be_read_is_a_fault_of_the_card_alone(bench: Bench) -> None:
    bench.shim.set([GB10, ONE])
    bench.sample()
    bench.write("meminfo", "")
    sample = bench.sample()
    assert uuids(sample) == [ONE.uuid]
    assert (U, "HOST_UNREADABLE", None) in faults(sample)


def test_its_health_is_that_of_a_card(bench: Bench) -> None:
    bench.sample()
    bench.shim.set([replace(GB10, xids=(ShimXid(79),))])
    reading = bench.reading()
    assert (reading.worst.health, reading.worst.cause, reading.unified) == (Health.FAILED, "XID_79", True)


def test_processes_that_cannot_be_walked_are_no_fault_of_the_host_that_is_gone(bench: Bench) -> None:
    bench.sample()
    (bench.proc / "sys/kernel/random/boot_id").unlink()
    sample = bench.sample()
    assert faults(sample) == {(U, "PROCESSES_UNREADABLE", None), (None, "PROCESSES_UNREADABLE", None)}
