"""Checks of the machine: its clock, and what stands between its memory and the models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpuledger.domain.explain import size
from gpuledger.domain.units import GIB, MIB

from .doctor_findings import Finding, fail, ok, warn
from .machine import Machine

_NANOS_PER_MS: Final = 1_000_000
#: How long the two clocks are watched, and how far they may part meanwhile: no slewing daemon comes near (0.05 %).
WATCHED_SECONDS: Final = 0.2
STEP_MS: Final = 50

#: A cache or a reservation that is smaller than this share of the memory is not worth a warning.
NOTICED_BP: Final = 500
#: Below this NCCL and RDMA, as vLLM uses them over several cards, cannot register their buffers.
PINNED_BYTES: Final = 64 * MIB
#: Beside the connections of requests: the ledger, the log, pipes and logs of runtimes.
SPARE_FILES: Final = 256
#: Of a request: its client's connection and that to its runtime.
FILES_OF_REQUEST: Final = 2

_BASIS: Final = 10_000


def check_clock(machine: Machine) -> Iterator[Finding]:
    """The wall clock dates the ledger once, at the start; leases and samples follow one that cannot be set."""
    wall, monotonic = machine.wall_ns(), machine.monotonic_ns()
    machine.pause(WATCHED_SECONDS)
    watched_ns = machine.monotonic_ns() - monotonic
    parted_ms = (machine.wall_ns() - wall - watched_ns) // _NANOS_PER_MS
    if abs(parted_ms) > STEP_MS:
        yield warn(
            "clock steps",
            f"the wall clock moved {parted_ms:+d} ms against the monotonic one in {watched_ns // _NANOS_PER_MS} ms",
            "let one daemon set the clock (chrony or systemd-timesyncd), and not the hypervisor too",
        )
    else:
        yield ok("clock steps", f"none in {watched_ns // _NANOS_PER_MS} ms")
    state = machine.clock_state()
    if state.synchronised:
        yield ok("clock", f"synchronised, within {state.max_error_us // 1000} ms")
    else:
        yield warn(
            "clock",
            "nothing synchronises it: instants in the ledger may not be those of other machines",
            "sudo timedatectl set-ntp true, or install chrony; in a container: on its machine",
        )


def check_memory(machine: Machine) -> Iterator[Finding]:
    """What of the machine's memory can be had here."""
    total_bytes = machine.memory_bytes("MemTotal")
    limit = machine.memory_limit()
    if limit is None:
        free = size(machine.memory_bytes("MemAvailable"))
        yield ok("memory", f"{size(total_bytes)}, {free} available, no cgroup limits it")
    elif limit.limit_bytes < GIB:
        yield warn(
            "memory",
            f"a cgroup allows {size(limit.limit_bytes)} of {size(total_bytes)}: hardly a model fits",
            "raise MemoryMax= of the unit, or --memory of the container",
        )
    else:
        used = size(limit.current_bytes - limit.inactive_file_bytes)
        yield ok("memory", f"a cgroup allows {size(limit.limit_bytes)} of {size(total_bytes)}, {used} used")


def check_overcommit(machine: Machine) -> Iterator[Finding]:
    """Under strict accounting a runtime may be refused memory that is free: CUDA reserves far more than it uses."""
    mode = int((machine.proc / "sys/vm/overcommit_memory").read_text("ascii"))
    if mode == 2:
        left = machine.memory_bytes("CommitLimit") - machine.memory_bytes("Committed_AS")
        yield warn(
            "overcommit",
            f"vm.overcommit_memory is 2: {size(max(0, left))} can be promised, however much is free",
            "sudo sysctl vm.overcommit_memory=0, or raise vm.overcommit_ratio",
        )
    else:
        yield ok("overcommit", f"vm.overcommit_memory is {mode}: what is free can be had")


def check_limits(machine: Machine, max_open_requests: int, pins_memory: bool) -> Iterator[Finding]:
    """Limits of a process that are met under load. `pins_memory`: whether a deployment locks memory (vLLM)."""
    locked_bytes = machine.limit_of("Max locked memory")
    told = "unlimited" if locked_bytes is None else size(locked_bytes)
    if pins_memory and locked_bytes is not None and locked_bytes < PINNED_BYTES:
        yield warn(
            "locked memory",
            f"{told} for each process, and NCCL wants more over several cards",
            "LimitMEMLOCK=infinity in the unit, --ulimit memlock=-1 for a container",
        )
    else:
        yield ok("locked memory", f"{told} for each process")
    files = machine.limit_of("Max open files")
    needed = max_open_requests * FILES_OF_REQUEST + SPARE_FILES
    if files is not None and files < needed:
        yield warn(
            "open files",
            f"{files} for each process; {max_open_requests} open requests (max_open_requests) may need {needed}",
            "LimitNOFILE=65536 in the unit, `ulimit -n 65536` in a shell; or lower max_open_requests",
        )
    else:
        yield ok("open files", f"{'unlimited' if files is None else files} for each process")


def check_caches(machine: Machine) -> Iterator[Finding]:
    """What the kernel does not count as available although it could be given back: it reads as external."""
    try:
        text = (machine.proc / "spl/kstat/zfs/arcstats").read_text("ascii")
    except FileNotFoundError:
        yield ok("ZFS cache", "there is no ZFS")
        return
    figures = {words[0]: words[2] for line in text.splitlines() if len(words := line.split()) == 3}
    now_bytes, most_bytes = int(figures["size"]), int(figures["c_max"])
    found = f"the ARC holds {size(now_bytes)} and may grow to {size(most_bytes)}"
    total_bytes = machine.memory_bytes("MemTotal")
    if most_bytes * _BASIS <= total_bytes * NOTICED_BP:
        yield ok("ZFS cache", found)
        return
    cap = max(GIB, total_bytes * NOTICED_BP // _BASIS)
    yield warn(
        "ZFS cache",
        f"{found}; it reads as external memory, and presses on deployments of kind host",
        f"echo {cap} | sudo tee /sys/module/zfs/parameters/zfs_arc_max, "
        f"and `options zfs zfs_arc_max={cap}` in /etc/modprobe.d/zfs.conf for the next boot",
    )


def check_huge_pages(machine: Machine) -> Iterator[Finding]:
    """Pages that are reserved can be had by nobody who does not ask for huge ones, and no runtime here does."""
    pages = machine.memory_bytes("HugePages_Total")
    page_bytes = machine.memory_bytes("Hugepagesize")
    reserved_bytes = pages * page_bytes
    total_bytes = machine.memory_bytes("MemTotal")
    if reserved_bytes * _BASIS <= total_bytes * NOTICED_BP:
        yield ok("huge pages", f"{size(reserved_bytes)} reserved")
    else:
        yield warn(
            "huge pages",
            f"{pages} of {size(page_bytes)} are reserved: {size(reserved_bytes)} that no model gets",
            "sudo sysctl vm.nr_hugepages=0, unless a program (a database, a virtual machine) needs them",
        )


def check_host_limit(machine: Machine, limit_bytes: int | None) -> Iterator[Finding]:
    """`accelerators.host.memory_limit_bytes` against what there is."""
    if limit_bytes is None:
        return
    there = machine.host_bytes()
    if limit_bytes > there:
        yield warn(
            "memory_limit_bytes",
            f"{size(limit_bytes)}, and there are {size(there)}: it limits nothing",
            "lower it, or leave it out",
        )
    elif limit_bytes < GIB:
        yield fail("memory_limit_bytes", f"{size(limit_bytes)}: the reserve alone takes 1 GiB", "raise it")
    else:
        yield ok("memory_limit_bytes", f"{size(limit_bytes)} of {size(there)} are scheduled")
