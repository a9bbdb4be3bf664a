"""The host's memory from a /proc and cgroups written by the test, and once from the real ones."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpuledger.adapters.telemetry.host import HostSource
from gpuledger.adapters.telemetry.node import NodeTelemetry
from gpuledger.adapters.telemetry.process_memory import FILE_SHARE_FROM_BYTES
from gpuledger.domain.ports import AcceleratorReading, ManagedProcess, ManagedReading, NodeReading, ProcessIdentity
from gpuledger.domain.state import Kind
from gpuledger.domain.units import GIB, MIB
from tests.children import identity_of, read_line, running
from tests.fake_host import BOOT, HOST, MOUNT_V1, MOUNT_V2, FakeHost

#: What version 1 of the controller says for "no limit".
NO_LIMIT_V1 = 9_223_372_036_854_771_712


class Bench(FakeHost):
    """The fake machine, and its telemetry."""

    def sample(self, managed: Sequence[ManagedProcess] = (), limit_bytes: int | None = None) -> NodeReading:
        return NodeTelemetry([HostSource("node-1", limit_bytes=limit_bytes, proc=self.proc)], proc=self.proc).sample(
            managed
        )

    def reading(self, managed: Sequence[ManagedProcess] = (), limit_bytes: int | None = None) -> AcceleratorReading:
        sample = self.sample(managed, limit_bytes)
        assert sample.faults == ()
        (reading,) = sample.accelerators
        return reading


@pytest.fixture
def host(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


# ---- the machine ------------------------------------------------------------------------------------------------


def test_a_host_is_one_accelerator(host: Bench) -> None:
    sample = host.sample()
    assert sample.accelerators == (
        AcceleratorReading(
            accelerator_id=HOST,
            index=0,
            kind=Kind.HOST,
            gpu_class="host",
            device_name="AMD EPYC 7302P 16-Core Processor",
            driver_version="6.8.0-49-generic",
            total_bytes=64 * GIB,
            used_bytes=4 * GIB,
            managed=(),
            foreign_processes=0,
        ),
    )
    assert sample.memory_bytes == 64 * GIB


def test_a_cpu_without_a_name_and_a_kernel_without_a_release(host: Bench) -> None:
    host.write("cpuinfo", "processor\t: 0\nBogoMIPS\t: 50.00\n")
    (host.proc / "sys/kernel/osrelease").unlink()
    reading = host.reading()
    assert (reading.device_name, reading.driver_version) == ("unknown CPU", "unknown kernel")


def test_a_part_of_the_memory_may_be_all_that_is_scheduled(host: Bench) -> None:
    part = host.reading(limit_bytes=16 * GIB)
    assert (part.total_bytes, part.used_bytes) == (16 * GIB, 4 * GIB)
    less_than_is_used = host.reading(limit_bytes=2 * GIB)
    assert (less_than_is_used.total_bytes, less_than_is_used.used_bytes) == (2 * GIB, 2 * GIB)
    more_than_there_is = host.reading(limit_bytes=128 * GIB)
    assert more_than_there_is.total_bytes == 64 * GIB


@pytest.mark.parametrize("meminfo", ["", "MemTotal: 1 kB\n", "MemTotal: many kB\nMemAvailable: 1 kB\n"])
def test_what_cannot_be_read_is_a_fault_and_not_zero(host: Bench, meminfo: str) -> None:
    host.write("meminfo", meminfo)
    sample = host.sample()
    assert sample.accelerators == ()
    assert sample.memory_bytes is None
    assert [(one.accelerator_id, one.code, one.health) for one in sample.faults] == [(HOST, "HOST_UNREADABLE", None)]


# ---- its residents ----------------------------------------------------------------------------------------------


def test_anonymous_and_shared_memory_is_used_already(host: Bench) -> None:
    resident = host.process(10, anon=2 * GIB, shmem=GIB)
    reading = host.reading([resident])
    assert reading.managed == (ManagedReading("res-10", alive=True, used_bytes=3 * GIB),)
    assert reading.used_bytes == 4 * GIB


def test_a_mapped_model_is_in_use_where_the_kernel_calls_it_available(host: Bench) -> None:
    """Half of it: another process maps the same file."""
    resident = host.process(10, anon=GIB, file=8 * GIB)
    host.shares(10, anon=GIB, file=4 * GIB)
    reading = host.reading([resident])
    assert reading.managed[0].used_bytes == 5 * GIB
    assert reading.used_bytes == 4 * GIB + 4 * GIB


def test_a_mapped_model_that_is_locked_is_used_already(host: Bench) -> None:
    """`--mlock`: the kernel does not call those pages available."""
    resident = host.process(10, anon=GIB, file=8 * GIB)
    host.shares(10, anon=GIB, file=8 * GIB, locked=GIB + 6 * GIB)
    reading = host.reading([resident])
    assert reading.managed[0].used_bytes == 9 * GIB
    assert reading.used_bytes == 4 * GIB + 2 * GIB


def test_locked_anonymous_memory_takes_nothing_from_a_mapped_model(host: Bench) -> None:
    resident = host.process(10, anon=2 * GIB, file=8 * GIB)
    host.shares(10, anon=2 * GIB, file=8 * GIB, locked=2 * GIB)
    assert host.reading([resident]).used_bytes == 4 * GIB + 8 * GIB


def test_libraries_are_counted_whole_without_a_walk_over_their_pages(host: Bench) -> None:
    resident = host.process(10, anon=GIB, file=FILE_SHARE_FROM_BYTES)
    host.shares(10, file=1 * MIB)  # not to be read
    reading = host.reading([resident])
    assert reading.managed[0].used_bytes == GIB + FILE_SHARE_FROM_BYTES
    assert reading.used_bytes == 4 * GIB + FILE_SHARE_FROM_BYTES


def test_shares_that_cannot_be_read_are_counted_whole(host: Bench) -> None:
    reading = host.reading([host.process(10, file=8 * GIB)])
    assert reading.managed[0].used_bytes == 8 * GIB
    assert reading.used_bytes == 4 * GIB + 8 * GIB


def test_a_tree_is_summed_and_an_ended_member_holds_nothing(host: Bench) -> None:
    resident = host.process(10, anon=GIB)
    host.process(11, anon=2 * GIB, parent=10)
    host.process(12, anon=4 * GIB, parent=11)
    host.write("12/status", "Name:\tllama-server\nState:\tX (dead)\n")
    host.process(13, anon=8 * GIB)
    assert host.reading([resident]).managed == (ManagedReading("res-10", alive=True, used_bytes=3 * GIB),)


def test_a_resident_that_is_gone_holds_nothing(host: Bench) -> None:
    gone = ManagedProcess("res-9", HOST, ProcessIdentity(9, 100, BOOT))
    assert host.reading([gone]).managed == (ManagedReading("res-9", alive=False, used_bytes=0),)


def test_mapped_files_of_a_resident_elsewhere_are_not_this_host_s(host: Bench) -> None:
    """The term of `used` is what is attributed here: a resident of a GPU is external to the host."""
    resident = host.process(10, anon=GIB, file=8 * GIB)
    elsewhere = ManagedProcess(resident.resident_id, "GPU-0", resident.process)
    reading = host.reading([elsewhere])
    assert reading.managed == ()
    assert reading.used_bytes == 4 * GIB


def test_no_more_is_used_than_there_is(host: Bench) -> None:
    host.memory(total=64 * GIB, available=GIB)
    reading = host.reading([host.process(10, file=8 * GIB)])
    assert reading.used_bytes == reading.total_bytes == 64 * GIB


# ---- a limit of a cgroup ----------------------------------------------------------------------------------------


def test_the_lowest_limit_above_us_is_the_memory_there_is(host: Bench) -> None:
    host.mount(MOUNT_V2)
    host.write("self/cgroup", "0::/system.slice/gpuledger.service\n")
    host.group_v2("system.slice/gpuledger.service", "max", current=GIB)
    host.group_v2("system.slice", 16 * GIB, current=6 * GIB, active=GIB, inactive=2 * GIB)

    sample = host.sample()

    (reading,) = sample.accelerators
    assert (reading.total_bytes, reading.used_bytes) == (16 * GIB, 4 * GIB)
    assert sample.memory_bytes == 16 * GIB


@pytest.mark.parametrize("limit", ["max", str(64 * GIB), str(2**63 - 4096)])
def test_a_limit_that_limits_nothing_is_none(host: Bench, limit: str) -> None:
    host.mount(MOUNT_V2)
    host.group_v2("", limit, current=GIB)
    reading = host.reading()
    assert (reading.total_bytes, reading.used_bytes) == (64 * GIB, 4 * GIB)


@pytest.mark.parametrize(
    ("active", "inactive", "expected"),
    [
        pytest.param(0, 6 * GIB, 2 * GIB + 4 * GIB, id="the model was touched once"),
        pytest.param(6 * GIB, 0, 8 * GIB, id="it is in the active list, which counts already"),
        pytest.param(3 * GIB, 3 * GIB, 5 * GIB + GIB, id="partly"),
        pytest.param(0, 3 * GIB, 5 * GIB + 3 * GIB, id="some of its pages are charged to another cgroup"),
    ],
)
def test_a_mapped_model_in_a_cgroup_is_used_once(host: Bench, active: int, inactive: int, expected: int) -> None:
    host.mount(MOUNT_V2)
    host.group_v2("", 16 * GIB, current=8 * GIB, active=active, inactive=inactive)
    resident = host.process(10, file=4 * GIB)
    host.shares(10, file=4 * GIB)
    assert host.reading([resident]).used_bytes == expected


def test_version_1(host: Bench) -> None:
    host.mount("31 1 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw", MOUNT_V1)
    host.write("self/cgroup", "5:devices:/\n4:memory:/docker/abc\n1:name=systemd:/docker/abc\n0::/\n")
    host.group_v1("docker/abc", 8 * GIB, current=3 * GIB, active=GIB, inactive=GIB)
    host.group_v1("docker", NO_LIMIT_V1, current=5 * GIB)
    reading = host.reading()
    assert (reading.total_bytes, reading.used_bytes) == (8 * GIB, 2 * GIB)


def test_version_1_without_a_limit(host: Bench) -> None:
    host.mount(MOUNT_V1)
    host.write("self/cgroup", "4:memory:/\n")
    host.group_v1("", NO_LIMIT_V1, current=5 * GIB)
    assert host.reading().total_bytes == 64 * GIB


@pytest.mark.parametrize(
    ("mounted", "group"),
    [
        pytest.param("/docker/abc", "/docker/abc", id="no namespace"),
        pytest.param("/docker/abc", "/another/one/inside", id="of another container"),
        pytest.param("/", "/../elsewhere", id="outside of its namespace"),
    ],
)
def test_a_container_sees_its_own_part_of_the_hierarchy(host: Bench, mounted: str, group: str) -> None:
    """The path of the group may be that of the machine; what is mounted is the container's, and it is its own top."""
    host.mount(f"35 31 0:32 {mounted} CGROUPS ro - cgroup cgroup rw,memory")
    host.write("self/cgroup", f"4:memory:{group}\n")
    host.group_v1("", 8 * GIB, current=GIB)
    for of_others in ("../elsewhere", "inside", "docker/abc"):
        host.group_v1(of_others, GIB)
    assert host.reading().total_bytes == 8 * GIB


def test_a_hierarchy_that_we_are_not_in_limits_nothing(host: Bench) -> None:
    host.mount(MOUNT_V1)
    host.group_v1("", 8 * GIB)
    assert host.reading().total_bytes == 64 * GIB


def test_both_versions_at_once(host: Bench) -> None:
    host.mount("38 31 0:38 / CGROUPS/unified rw - cgroup2 cgroup2 rw", MOUNT_V1.replace("CGROUPS", "CGROUPS/memory"))
    host.write("self/cgroup", "4:memory:/app\n0::/app\n")
    (host.cgroups / "unified/app").mkdir(parents=True)
    host.group_v1("memory/app", 8 * GIB, current=GIB)
    assert host.reading().total_bytes == 8 * GIB


def test_a_limit_whose_use_cannot_be_read_is_a_fault(host: Bench) -> None:
    host.mount(MOUNT_V2)
    host.group_v2("", 8 * GIB)
    (host.cgroups / "memory.stat").write_text("anon 1\n")
    assert [one.code for one in host.sample().faults] == ["HOST_UNREADABLE"]


# ---- the real machine -------------------------------------------------------------------------------------------

MAP_AND_TOUCH = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
sum(mapped[offset] for offset in range(0, len(mapped), mmap.PAGESIZE))
print("touched", flush=True)
sys.stdin.read()
"""


def test_a_real_mapped_model_is_shared_out_among_those_that_map_it(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    with model.open("wb") as file:
        file.truncate(128 * MIB)
    telemetry = NodeTelemetry([HostSource("node-1")])
    command = (sys.executable, "-c", MAP_AND_TOUCH, str(model))
    with running(*command) as one, running(*command) as other:
        for child in (one, other):
            assert read_line(child) == "touched"
        residents = [ManagedProcess(f"res-{child.pid}", HOST, identity_of(child.pid)) for child in (one, other)]
        (reading,) = telemetry.sample(residents).accelerators

    figures = [managed.used_bytes or 0 for managed in reading.managed]
    assert all(figure >= 64 * MIB for figure in figures)
    assert 128 * MIB <= sum(figures) < 2 * 128 * MIB
    assert reading.used_bytes >= 128 * MIB
