"""The RAM of a node that serves models on its CPU, as one accelerator (semantics.md 1).

    used = MemTotal - MemAvailable + file-backed pages of the residents here

The kernel calls mapped model files available, since it could drop them; the model would then crawl, so they are in use
to us. The term is the sum of exactly those shares that are attributed to the residents, so that a mapped model moves
`used` and `attributed` alike.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from gpuledger.adapters.procfs import PROC
from gpuledger.domain.ports import AcceleratorReading, ManagedReading
from gpuledger.domain.state import Health, Kind
from gpuledger.domain.units import KIB

from . import process_memory
from .cgroups import MemoryLimit, tightest_limit
from .faults import FaultCode, faults_of
from .process_memory import ProcessMemory
from .processes import Forest, Tree
from .source import SourceReading

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Domain:
    """The memory that can be had here, and what of it is used."""

    total_bytes: int
    used_bytes: int


class HostSource:
    """This machine's RAM, or the part of it that a cgroup or the operator leaves us. Blocking; for one thread."""

    def __init__(self, node_id: str, *, limit_bytes: int | None = None, proc: Path = PROC) -> None:
        """`limit_bytes`: configuration key `memory_limit_bytes`, the most that is scheduled of this memory."""
        self.accelerator_id = f"host:{node_id}"
        self._limit_bytes = limit_bytes
        self._proc = proc
        self._device_name = _device_name(proc)
        self._kernel_release = _kernel_release(proc)

    def read(self, forest: Forest) -> SourceReading:
        """One reading, or HOST_UNREADABLE. `memory_bytes` of the node is the total of this domain."""
        try:
            trees = [(tree, self._members(tree)) for tree in forest.on(self.accelerator_id)]
            held = [memory for _, members in trees for memory in members]
            domain = self._domain(sum(memory.reclaimable_file_bytes for memory in held))
        except (OSError, ValueError, KeyError):
            _logger.exception("the memory of this node cannot be read")
            return SourceReading(faults=faults_of([self.accelerator_id], FaultCode.HOST_UNREADABLE))
        reading = AcceleratorReading(
            accelerator_id=self.accelerator_id,
            index=0,
            kind=Kind.HOST,
            gpu_class="host",
            device_name=self._device_name,
            driver_version=self._kernel_release,
            total_bytes=domain.total_bytes,
            used_bytes=domain.used_bytes,
            health=Health.HEALTHY,
            managed=tuple(
                ManagedReading(tree.resident_id, tree.alive, sum(memory.total_bytes for memory in members))
                for tree, members in trees
            ),
            foreign_processes=0,
        )
        return SourceReading((reading,), memory_bytes=domain.total_bytes)

    def close(self) -> None:
        """Nothing is held between samples."""

    def _members(self, tree: Tree) -> list[ProcessMemory]:
        return [process_memory.read(member.pid, self._proc) for member in tree.members]

    def _domain(self, file_bytes: int) -> _Domain:
        """`file_bytes`: what the residents have mapped and the kernel takes for available.

        Raises OSError, ValueError, KeyError.
        """
        total_bytes, available_bytes = _meminfo(self._proc)
        limit = tightest_limit(total_bytes, self._proc)
        if limit is None:
            domain = _Domain(total_bytes, total_bytes - available_bytes + file_bytes)
        else:
            domain = _limited(limit, file_bytes)
        total_bytes = domain.total_bytes if self._limit_bytes is None else min(domain.total_bytes, self._limit_bytes)
        # The counters are read one after the other; more than there is cannot be used.
        return _Domain(total_bytes, min(domain.used_bytes, total_bytes))


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


def _device_name(proc: Path) -> str:
    """The CPU's model; some architectures do not name one."""
    try:
        lines = (proc / "cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    names = (
        value.strip() for name, _, value in (line.partition(":") for line in lines) if name.strip() == "model name"
    )
    return next(names, "") or "unknown CPU"


def _kernel_release(proc: Path) -> str:
    try:
        return (proc / "sys/kernel/osrelease").read_text("ascii").strip()
    except OSError:
        return "unknown kernel"
