"""How much memory this machine has, what of it is used, and what the trees of our residents hold (semantics.md 1).

    used = MemTotal - MemAvailable + file-backed pages of the residents that are measured here

The kernel calls mapped model files available, since it could drop them; the model would then crawl, so they are in use
to us. The term is the sum of exactly those shares that are attributed to the residents, so that a mapped model moves
`used` and `attributed` alike. Two things are measured by this: the host itself, and a GPU that has no memory but the
host's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuledger.adapters.procfs import PROC
from gpuledger.domain.units import KIB

from . import process_memory
from .cgroups import MemoryLimit, tightest_limit
from .process_memory import ProcessMemory
from .processes import Tree

_logger = logging.getLogger(__name__)


class HostUnreadable(Exception):
    """The operating system did not tell; the log has why."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The memory that can be had here, what of it is used, and what of that each resident's tree holds, by its id."""

    total_bytes: int
    used_bytes: int
    held_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Domain:
    total_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes


class HostMeter:
    """Measures this machine's RAM, or the part of it that a cgroup or the operator leaves us. Blocking."""

    def __init__(self, *, limit_bytes: int | None = None, proc: Path = PROC) -> None:
        """`limit_bytes`: configuration key `memory_limit_bytes`, the most that is scheduled of this memory."""
        self._limit_bytes = limit_bytes
        self._proc = proc

    def read(self, trees: Iterable[Tree], *, with_device: bool = False) -> HostMemory:
        """One reading. `trees`: of the residents whose memory is accounted here. Raises HostUnreadable.

        `with_device`: a GPU allocates from this memory too. What its driver takes need not be charged to any cgroup,
        so under a limit there is never more left than the machine itself has left.
        """
        try:
            members = {tree.resident_id: self._members(tree) for tree in trees}
            held = [memory for tree in members.values() for memory in tree]
            domain = self._domain(sum(memory.reclaimable_file_bytes for memory in held), with_device)
        except (OSError, ValueError, KeyError) as error:
            _logger.exception("the memory of this node cannot be read")
            raise HostUnreadable from error
        return HostMemory(
            total_bytes=domain.total_bytes,
            used_bytes=domain.used_bytes,
            held_bytes={key: sum(memory.total_bytes for memory in tree) for key, tree in members.items()},
        )

    def _members(self, tree: Tree) -> list[ProcessMemory]:
        return [process_memory.read(member.pid, self._proc) for member in tree.members]

    def _domain(self, file_bytes: int, with_device: bool) -> _Domain:
        """`file_bytes`: what the residents have mapped and the kernel takes for available.

        Raises OSError, ValueError, KeyError.
        """
        total_bytes, available_bytes = _meminfo(self._proc)
        machine = _Domain(total_bytes, total_bytes - available_bytes + file_bytes)
        limit = tightest_limit(total_bytes, self._proc)
        domain = machine if limit is None else _limited(limit, file_bytes)
        used_bytes = domain.used_bytes
        if with_device:
            used_bytes = max(used_bytes, domain.total_bytes - max(0, machine.free_bytes))
        total_bytes = domain.total_bytes if self._limit_bytes is None else min(domain.total_bytes, self._limit_bytes)
        # The counters are read one after the other; more than there is cannot be used.
        return _Domain(total_bytes, min(used_bytes, total_bytes))


def _limited(limit: MemoryLimit, file_bytes: int) -> _Domain:
    """A cgroup's limit and its own use in place of the machine's.

    The use is without inactive file cache. What the residents have mapped is in the active list first, which is
    counted; what does not fit there must be in the inactive one, and is put back.
    """
    mapped_inactive_bytes = min(max(0, file_bytes - limit.active_file_bytes), limit.inactive_file_bytes)
    used_bytes = max(0, limit.current_bytes - limit.inactive_file_bytes) + mapped_inactive_bytes
    return _Domain(limit.limit_bytes, used_bytes)


def _meminfo(proc: Path) -> tuple[int, int]:
    """(MemTotal, MemAvailable). Raises OSError, ValueError, KeyError."""
    lines = (proc / "meminfo").read_text("ascii").splitlines()
    fields = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    return int(fields["MemTotal"][0]) * KIB, int(fields["MemAvailable"][0]) * KIB
