"""The lowest memory limit of the cgroups this process is in (cgroups(7); kernel docs cgroup-v2, cgroup-v1/memory)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpuledger.adapters.procfs import PROC


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit and the use of the cgroup that has it, page cache included; `*_file_bytes` are the cache's two lists."""

    limit_bytes: int
    current_bytes: int
    active_file_bytes: int
    inactive_file_bytes: int


@dataclass(frozen=True, slots=True)
class _Files:
    """How one version of the memory controller names what is read here."""

    limit: str
    current: str
    active_file: str
    inactive_file: str


_V2 = _Files("memory.max", "memory.current", "active_file", "inactive_file")
#: `total_`: with the groups below, as the limit counts.
_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file", "total_inactive_file")


def tightest_limit(below_bytes: int, proc: Path = PROC) -> MemoryLimit | None:
    """The lowest limit under `below_bytes` of this process's memory cgroup and of those above it, as far as mounted.

    None without one; what stands for "no limit" (`max`, nearly 2^63) is never below. Raises OSError, ValueError, and
    KeyError for a memory.stat without its file lists.
    """
    limits = [
        (limit_bytes, folder, files)
        for folder, files in _groups(proc)
        if (limit_bytes := _limit(folder / files.limit)) is not None and limit_bytes < below_bytes
    ]
    if not limits:
        return None
    limit_bytes, folder, files = min(limits, key=lambda one: one[0])
    stat = dict(line.split() for line in (folder / "memory.stat").read_text("ascii").splitlines())
    return MemoryLimit(
        limit_bytes=limit_bytes,
        current_bytes=int((folder / files.current).read_text("ascii")),
        active_file_bytes=int(stat[files.active_file]),
        inactive_file_bytes=int(stat[files.inactive_file]),
    )


def _limit(path: Path) -> int | None:
    """None where there is none: the file says `max`, or is absent (a root, or a hierarchy without the controller)."""
    try:
        text = path.read_text("ascii").strip()
    except FileNotFoundError:
        return None
    return None if text == "max" else int(text)


def _groups(proc: Path) -> Iterator[tuple[Path, _Files]]:
    """This process's memory cgroup and its ancestors, innermost first, in every hierarchy that is mounted."""
    memberships = _memberships(proc)
    for mount_root, mount_point, files in _mounts(proc):
        if files in memberships:
            inside = _inside(memberships[files], mount_root)
            for depth in range(len(inside), -1, -1):
                yield mount_point.joinpath(*inside[:depth]), files


def _memberships(proc: Path) -> dict[_Files, str]:
    """`0::/path` is version 2; `4:memory:/path` is version 1."""
    found: dict[_Files, str] = {}
    for line in (proc / "self/cgroup").read_text("utf-8", "surrogateescape").splitlines():
        _hierarchy, controllers, path = line.split(":", 2)
        if not controllers:
            found[_V2] = path
        elif "memory" in controllers.split(","):
            found[_V1] = path
    return found


def _mounts(proc: Path) -> Iterator[tuple[str, Path, _Files]]:
    """(which cgroup is mounted, where, version) of each hierarchy that may bear the memory controller."""
    for line in (proc / "self/mountinfo").read_text("utf-8", "surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        root, point = (_unescaped(field) for field in before.split()[3:5])
        filesystem, _source, options = after.split()[:3]
        if filesystem == "cgroup2":
            yield root, Path(point), _V2
        elif filesystem == "cgroup" and "memory" in options.split(","):
            yield root, Path(point), _V1


def _inside(group: str, mount_root: str) -> tuple[str, ...]:
    """The group's path below a mount that may show a part of the hierarchy only, as in a container.

    A group outside that part (seen from a namespace as `/../..`) is under no limit that can be read here but the
    mount's own.
    """
    parts = tuple(part for part in group.split("/") if part)
    top = tuple(part for part in mount_root.split("/") if part)
    if ".." in parts or parts[: len(top)] != top:
        return ()
    return parts[len(top) :]


def _unescaped(field: str) -> str:
    """mountinfo writes blanks in octal, as `\\040`."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
