"""A machine whose kernel's files are written by the test: /proc and the memory cgroups, below a folder of its own."""

from __future__ import annotations

from pathlib import Path

from gpuledger.domain.ports import ManagedProcess, ProcessIdentity
from gpuledger.domain.units import GIB, KIB

BOOT = "c14f007e-7b10-4c3c-a6fe-bec2177b518b"
HOST = "host:node-1"
MOUNT_V2 = "30 1 0:26 / CGROUPS rw - cgroup2 cgroup2 rw,nsdelegate"
MOUNT_V1 = "35 31 0:32 / CGROUPS rw - cgroup cgroup rw,memory"


class FakeHost:
    """A machine of 64 GiB with 60 available, as its kernel would tell it; pids are 10 and up."""

    def __init__(self, tmp_path: Path) -> None:
        self.proc = tmp_path / "proc"
        self.cgroups = tmp_path / "cgroup fs"
        self.write("sys/kernel/random/boot_id", f"{BOOT}\n")
        self.write("sys/kernel/osrelease", "6.8.0-49-generic\n")
        self.write("cpuinfo", "processor\t: 0\nmodel name\t: AMD EPYC 7302P 16-Core Processor\n")
        (self.proc / "self/ns").mkdir(parents=True)
        (self.proc / "self/ns/pid").symlink_to("pid:[4026531836]")
        self.write("self/cgroup", "0::/\n")
        self.write("self/mountinfo", "22 1 0:20 / /proc rw,relatime - proc proc rw\n")
        self.memory(total=64 * GIB, available=60 * GIB)

    def write(self, path: str, text: str) -> None:
        (self.proc / path).parent.mkdir(parents=True, exist_ok=True)
        (self.proc / path).write_text(text)

    def memory(self, total: int, available: int) -> None:
        self.write("meminfo", f"MemTotal: {total // KIB} kB\nMemFree: 1 kB\nMemAvailable: {available // KIB} kB\n")

    def process(
        self, pid: int, *, anon: int = 0, shmem: int = 0, file: int = 0, parent: int = 1, on: str = HOST
    ) -> ManagedProcess:
        """A running process, and the resident it is the root of: `res-PID`, on this host if not said otherwise."""
        self.write(f"{pid}/stat", f"{pid} (llama-server) S {parent} {pid} {pid} {'0 ' * 13}1 0 100 0\n")
        fields = {"VmRSS": anon + shmem + file, "RssAnon": anon, "RssFile": file, "RssShmem": shmem}
        lines = [f"{name}:\t{value // KIB:8} kB" for name, value in fields.items()]
        self.write(f"{pid}/status", "\n".join(["Name:\tllama-server", *lines, "Threads:\t1"]) + "\n")
        return ManagedProcess(f"res-{pid}", on, ProcessIdentity(pid, 100, BOOT))

    def shares(self, pid: int, *, file: int, anon: int = 0, shmem: int = 0, locked: int = 0) -> None:
        fields = {"Pss_Anon": anon, "Pss_File": file, "Pss_Shmem": shmem, "Locked": locked}
        lines = [f"{name}: {value // KIB:8} kB" for name, value in fields.items()]
        self.write(f"{pid}/smaps_rollup", "\n".join(["55d0-7ffc ---p 00000000 00:00 0    [rollup]", *lines]) + "\n")

    def mount(self, *lines: str) -> None:
        """Lines of mountinfo; `CGROUPS` in them is the folder of the test's cgroup files."""
        folder = str(self.cgroups).replace(" ", r"\040")
        self.write("self/mountinfo", "".join(f"{line.replace('CGROUPS', folder)}\n" for line in lines))

    def group_v2(self, path: str, limit: int | str, *, current: int = 0, active: int = 0, inactive: int = 0) -> None:
        folder = self.cgroups / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{current}\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\nactive_file {active}\n")

    def group_v1(self, path: str, limit: int, *, current: int = 0, active: int = 0, inactive: int = 0) -> None:
        folder = self.cgroups / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{current}\n")
        lines = [f"inactive_file 1\ntotal_inactive_file {inactive}\ntotal_active_file {active}\n"]
        (folder / "memory.stat").write_text("".join(lines))
