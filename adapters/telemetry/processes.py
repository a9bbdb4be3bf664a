"""Whose process is this? The trees of the residents in one pass over /proc, by (pid, start time)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuledger.adapters.procfs import PROC, ProcessTable, scan, sees_host_pids
from gpuledger.domain.ports import ManagedProcess, ProcessIdentity


@dataclass(frozen=True, slots=True)
class Tree:
    """A resident and the running members of its process tree (`ProcessTable.tree`)."""

    managed: ManagedProcess
    members: tuple[ProcessIdentity, ...]

    @property
    def resident_id(self) -> str:
        return self.managed.resident_id

    @property
    def alive(self) -> bool:
        """Whether any member runs; zombies hold nothing and do not count."""
        return bool(self.members)


@dataclass(frozen=True, slots=True)
class Owned:
    """A process and the resident whose tree it is in."""

    resident_id: str
    process: ProcessIdentity


@dataclass(frozen=True, slots=True)
class Forest:
    """The trees of all residents of a node at one moment. None is within another: residents are siblings.

    `host_pids`: whether ids that a driver reports and ids of this table mean the same (`procfs.sees_host_pids`).
    """

    table: ProcessTable
    trees: tuple[Tree, ...]
    host_pids: bool

    def on(self, accelerator_id: str) -> Iterator[Tree]:
        """The trees of the residents of one accelerator."""
        return (tree for tree in self.trees if tree.managed.accelerator_id == accelerator_id)

    def owners(self) -> Mapping[int, Owned]:
        """pid -> whose it is.

        A root that has ended stays its resident's as long as nobody else has its pid: a device may still be giving
        its memory back, and that is nobody else's.
        """
        owners = {
            tree.managed.process.pid: Owned(tree.resident_id, tree.managed.process)
            for tree in self.trees
            if self.may_still_hold(tree.managed.process)
        }
        for tree in self.trees:
            owners.update((member.pid, Owned(tree.resident_id, member)) for member in tree.members)
        return owners

    def may_still_hold(self, process: ProcessIdentity) -> bool:
        """Whether what a device books under its pid can be this process's: it runs, or nobody has its pid since."""
        holder = self.table.entries.get(process.pid)
        same_boot = process.boot_id == self.table.boot_id
        return same_boot and (holder is None or holder.start_ticks == process.start_ticks)


def look(managed: Sequence[ManagedProcess], root: Path = PROC) -> Forest:
    """One pass over /proc. Raises OSError."""
    table = scan(root)
    trees = tuple(Tree(one, table.tree(one.process)) for one in managed)
    return Forest(table, trees, sees_host_pids(root))
