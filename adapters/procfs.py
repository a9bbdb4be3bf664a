"""Processes by /proc: who is who beyond the reuse of ids, who is alive, and whose child is whose (proc_pid_stat(5)).

Shared by the telemetry (whose memory is this?) and the runtimes (is this still ours to end?). Blocking, a few
microseconds a process; every function may be called from any thread. `root` is for a /proc mounted elsewhere.

A process that ends while it is read is simply absent. Any other error (no file descriptors left) is raised: not
having looked is not the same as nobody there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpuledger.domain.ports import ProcessIdentity

PROC: Final = Path("/proc")

#: Zombie, dead, dead (Linux 2.6): what is left of a process that holds nothing any more.
_ENDED_STATES: Final = frozenset("ZXx")
#: How the initial pid namespace is known from inside (PROC_PID_INIT_INO in the kernel's proc_ns.h).
_HOST_PID_NAMESPACE: Final = "pid:[4026531836]"


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """What one line of /proc/PID/stat says that is of use here. `running`: not a zombie."""

    pid: int
    start_ticks: int
    parent: int
    group: int
    session: int
    running: bool


@dataclass(frozen=True, slots=True)
class ProcessTable:
    """Every process of one pass over /proc, by pid. All answers of one table are of one moment."""

    boot_id: str
    entries: Mapping[int, ProcessEntry]

    def identity(self, pid: int) -> ProcessIdentity | None:
        """Who has this pid now; None when nobody runs under it."""
        entry = self.entries.get(pid)
        if entry is None or not entry.running:
            return None
        return ProcessIdentity(entry.pid, entry.start_ticks, self.boot_id)

    def is_alive(self, process: ProcessIdentity) -> bool:
        """Whether exactly this process runs: same pid, same start, same boot, and no zombie."""
        return self.identity(process.pid) == process

    def tree(self, process: ProcessIdentity) -> tuple[ProcessIdentity, ...]:
        """The running members of a process's tree, the root first where it runs, then by pid.

        Members are the root, who is in the process group or session that it leads (a grandchild whose parent died
        is init's child, and still in the group), and every descendant of these. A root that is gone may leave
        members. They end with the pid's reuse: the kernel gives no pid away while a group or session bears it.
        """
        holder = self.entries.get(process.pid)
        if process.boot_id != self.boot_id or (holder is not None and holder.start_ticks != process.start_ticks):
            return ()
        children: dict[int, list[int]] = {}
        for entry in self.entries.values():
            children.setdefault(entry.parent, []).append(entry.pid)
        members: set[int] = set()
        frontier = [
            entry.pid for entry in self.entries.values() if process.pid in (entry.pid, entry.group, entry.session)
        ]
        while frontier:
            pid = frontier.pop()
            if pid not in members:
                members.add(pid)
                frontier.extend(children.get(pid, ()))
        ordered = sorted(members, key=lambda pid: (pid != process.pid, pid))
        return tuple(member for pid in ordered if (member := self.identity(pid)) is not None)


def boot_id(root: Path = PROC) -> str:
    """The id of this boot: start times compare within one only. Raises OSError."""
    return (root / "sys/kernel/random/boot_id").read_text("ascii").strip()


def identity(pid: int, root: Path = PROC) -> ProcessIdentity | None:
    """Who has this pid now; None when nobody runs under it (a zombie does not run). Raises OSError."""
    entry = _read_entry(pid, root)
    if entry is None or not entry.running:
        return None
    return ProcessIdentity(pid, entry.start_ticks, boot_id(root))


def is_alive(process: ProcessIdentity, root: Path = PROC) -> bool:
    """Whether exactly this process runs: same pid, same start, same boot, and no zombie. Raises OSError."""
    return identity(process.pid, root) == process


def tree(process: ProcessIdentity, root: Path = PROC) -> tuple[ProcessIdentity, ...]:
    """The running members of its tree now (`ProcessTable.tree`). Raises OSError."""
    return scan(root).tree(process)


def scan(root: Path = PROC) -> ProcessTable:
    """One pass over /proc. Raises OSError."""
    entries = (_read_entry(pid, root) for pid in _pids(root))
    return ProcessTable(boot_id(root), {entry.pid: entry for entry in entries if entry is not None})


def oom_kills(root: Path = PROC) -> int:
    """How many processes the kernel has ended for want of memory since it booted; 0 where it does not count them."""
    try:
        counters = (root / "vmstat").read_text("ascii")
    except OSError:
        return 0
    found = re.search(r"^oom_kill (\d+)$", counters, re.MULTILINE)
    return 0 if found is None else int(found[1])


def sees_host_pids(root: Path = PROC) -> bool:
    """Whether our pids are the machine's own; in a container they are not, and NVML's mean nothing to us."""
    try:
        return os.readlink(root / "self/ns/pid") == _HOST_PID_NAMESPACE
    except OSError:
        return False


def read_process_file(pid: int, name: str, root: Path = PROC) -> bytes | None:
    """/proc/PID/name as bytes; None when the process is gone or will not let us look. Raises other OSErrors."""
    try:
        return (root / str(pid) / name).read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def _pids(root: Path) -> Iterator[int]:
    with os.scandir(root) as folder:
        for item in folder:
            if item.name.isdecimal():
                yield int(item.name)


def _read_entry(pid: int, root: Path) -> ProcessEntry | None:
    line = read_process_file(pid, "stat", root)
    return None if line is None else _parse_stat(pid, line)


def _parse_stat(pid: int, line: bytes) -> ProcessEntry | None:
    """`pid (comm) state ppid pgrp session ...`; comm may hold spaces and parentheses, so it is cut at the last one."""
    fields = line.rpartition(b")")[2].split()
    if len(fields) < 20:
        return None
    # A main thread that has ended leaves its process running under a line that says Z; its other threads tell.
    running = fields[0].decode("ascii") not in _ENDED_STATES or int(fields[17]) > 1
    return ProcessEntry(
        pid=pid,
        start_ticks=int(fields[19]),
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        running=running,
    )
