"""A machine that a test makes: the files of another /proc, /sys and /dev, and clocks that say what they are told."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpuledger.domain.units import GIB, KIB
from gpuledger.tools.machine import ClockState, Machine

HOST_PIDS = "pid:[4026531836]"
BOOT_ID = "8f5b2a5e-0d6c-4f0e-9d6e-6a5f1f0f4a11"
NANOS_PER_MS = 1_000_000
SYNCHRONISED = ClockState(True, 1500)


@dataclass
class Clocks:
    """`steps_ms`: how far the wall clock jumps in each pause; `ticks_ms`: how much passes with each look."""

    steps_ms: int = 0
    ticks_ms: int = 0
    elapsed_ns: int = 0
    stepped_ns: int = 0

    def wall_ns(self) -> int:
        return 1_764_500_000_000_000_000 + self.elapsed_ns + self.stepped_ns

    def monotonic_ns(self) -> int:
        self.elapsed_ns += self.ticks_ms * NANOS_PER_MS
        return self.elapsed_ns

    def pause(self, seconds: float) -> None:
        self.elapsed_ns += int(seconds * 1000) * NANOS_PER_MS
        self.stepped_ns += self.steps_ms * NANOS_PER_MS


@dataclass
class Made:
    """A root folder with what every Linux has, 32 GiB of memory and no card."""

    root: Path
    clocks: Clocks = field(default_factory=Clocks)

    def __post_init__(self) -> None:
        self.meminfo()
        self.write("proc/self/cgroup", "0::/box\n")
        self.mounts((("/", "ext4"),))
        self.limits()
        self.write("proc/sys/vm/overcommit_memory", "0\n")
        self.write("proc/sys/kernel/random/boot_id", BOOT_ID + "\n")
        self.pid_namespace(HOST_PIDS)
        (self.root / "dev").mkdir()

    def machine(
        self,
        library: str | None = None,
        environment: Mapping[str, str] | None = None,
        clock_state: ClockState = SYNCHRONISED,
        usable: Callable[[Path], bool] | None = None,
        free_bytes: int = 100 * GIB,
    ) -> Machine:
        plain = Machine()
        return Machine(
            root=self.root,
            environment=plain.environment if environment is None else environment,
            library=library,
            wall_ns=self.clocks.wall_ns,
            monotonic_ns=self.clocks.monotonic_ns,
            pause=self.clocks.pause,
            clock_state=lambda: clock_state,
            usable=plain.usable if usable is None else usable,
            free_bytes=lambda _: free_bytes,
        )

    def write(self, path: str, text: str | bytes) -> Path:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text.encode() if isinstance(text, str) else text)
        return place

    def meminfo(self, **figures: int) -> None:
        """In bytes, as /proc/meminfo in kB; HugePages_Total is a number."""
        known = {"MemTotal": 32 * GIB, "MemAvailable": 20 * GIB, "Hugepagesize": 2048 * KIB, "HugePages_Total": 0}
        known |= {"CommitLimit": 16 * GIB, "Committed_AS": 15 * GIB, **figures}
        lines = [
            f"{name}: {value}" if name == "HugePages_Total" else f"{name}: {value // KIB} kB"
            for name, value in known.items()
        ]
        self.write("proc/meminfo", "\n".join(lines) + "\n")

    def mounts(self, mounts: Iterable[tuple[str, str]]) -> None:
        """(where, what file system). The cgroups of this machine are in its own folder."""
        lines = [f"{number} 0 8:1 / {point} rw - {kind} /dev/sda1 rw" for number, (point, kind) in enumerate(mounts)]
        lines.append(f"99 0 0:9 / {self.root}/cgroup rw - cgroup2 cgroup2 rw")
        self.write("proc/self/mountinfo", "\n".join(lines) + "\n")

    def memory_limit(self, limit_bytes: int) -> None:
        self.write("cgroup/box/memory.max", f"{limit_bytes}\n")
        self.write("cgroup/box/memory.current", f"{limit_bytes // 2}\n")
        self.write("cgroup/box/memory.stat", "active_file 0\ninactive_file 0\n")

    def limits(self, files: str = "1024", locked: str = "8388608") -> None:
        head = "Limit                     Soft Limit           Hard Limit           Units\n"
        rows = f"Max open files            {files}    524288    files\n"
        rows += f"Max locked memory         {locked}    {locked}   bytes\n"
        self.write("proc/self/limits", head + rows)

    def pid_namespace(self, name: str) -> None:
        link = self.root / "proc/self/ns/pid"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(name)

    def card_on_bus(self) -> None:
        self.write("sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n")
        self.write("sys/bus/pci/devices/0000:01:00.0/class", "0x030200\n")

    def devices(self, *names: str) -> None:
        for name in names:
            self.write(f"dev/{name}", "")

    def process(self, pid: int, *arguments: str, comm: str = "", sockets: Iterable[int] = ()) -> None:
        self.write(f"proc/{pid}/cmdline", "".join(f"{one}\0" for one in arguments))
        self.write(f"proc/{pid}/comm", comm + "\n")
        stat = f"{pid} (x) S 1 {pid} {pid} " + "0 " * 13 + "1 0 100 0"
        self.write(f"proc/{pid}/stat", stat)
        folder = self.root / f"proc/{pid}/fd"
        folder.mkdir(exist_ok=True)
        for number, inode in enumerate(sockets):
            os.symlink(f"socket:[{inode}]", folder / str(number))
