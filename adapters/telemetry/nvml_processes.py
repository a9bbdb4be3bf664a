"""Whose memory a device's process lists show (semantics.md 1; runtimes.md, NVML)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from .faults import Blindness
from .nvml_binding import Device, DeviceProcess, NvmlBinding, offered
from .processes import Forest, Owned, Tree

#: PID_MAX_LIMIT of a 64-bit kernel. A mismatch of driver and binding once handed bytes over as pids.
_MAX_PID: Final = 2**22


@dataclass(frozen=True, slots=True)
class Listing:
    """The process lists of a device merged by pid. `compute` are those that run kernels, MPS clients among them."""

    used_bytes: Mapping[int, int | None]
    compute: frozenset[int]


@dataclass(frozen=True, slots=True)
class Held:
    """What a device books under the members of a resident's tree; None where any of it cannot be read."""

    tree: Tree
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class Attribution:
    """The residents of one accelerator, `foreign` compute processes of nobody's, and what cannot be read, and why."""

    held: tuple[Held, ...]
    foreign: int
    blind: Blindness | None


def read_lists(binding: NvmlBinding, device: Device, total_bytes: int) -> Listing | None:
    """The lists of a device, or None where it does not tell. Lists it does not keep are empty. Raises NvmlError.

    A pid that cannot be one makes the whole list unreadable, bytes beyond the device make that figure unreadable.
    """
    compute = offered(binding.compute_processes, device)
    if compute is None:
        return None
    mps = offered(binding.mps_processes, device) or ()
    graphics = offered(binding.graphics_processes, device) or ()
    merged: dict[int, int | None] = {}
    for process in (*compute, *mps, *graphics):
        if not 0 < process.pid <= _MAX_PID:
            return None
        merged[process.pid] = _greater(merged.get(process.pid), _plausible(process, total_bytes))
    return Listing(merged, frozenset(process.pid for process in (*compute, *mps)))


class ProcessBook:
    """Which process was whose, from one sample to the next. For one thread."""

    def __init__(self) -> None:
        #: accelerator -> pid -> whose it was in the sample before.
        self._owned: dict[str, dict[int, Owned]] = {}

    def attribute(self, accelerator_id: str, listing: Listing | None, forest: Forest) -> Attribution:
        """`listing` None: nothing can be attributed."""
        trees = tuple(forest.on(accelerator_id))
        if listing is None:
            return Attribution(tuple(Held(tree, None) for tree in trees), 0, Blindness.PROCESS_LIST_UNREADABLE)
        owned = self._owners(accelerator_id, listing, forest)
        figures = {
            tree.resident_id: [used for pid, used in listing.used_bytes.items() if _owns(tree, owned.get(pid))]
            for tree in trees
        }
        hidden = {
            tree.resident_id for tree in trees if tree.alive and not forest.host_pids and not figures[tree.resident_id]
        }
        return Attribution(
            held=tuple(
                Held(tree, None if tree.resident_id in hidden else _sum(figures[tree.resident_id])) for tree in trees
            ),
            foreign=len(listing.compute - owned.keys()),
            blind=_blindness(bool(hidden), figures.values()),
        )

    def forget(self, accelerator_ids: Iterable[str]) -> None:
        """They are no more."""
        for one in accelerator_ids:
            self._owned.pop(one, None)

    def _owners(self, accelerator_id: str, listing: Listing, forest: Forest) -> Mapping[int, Owned]:
        """pid -> whose it is, of what the device lists.

        A member that has ended is still listed while the driver takes its memory back; until then it stays whose it
        was, unless somebody else has its pid.
        """
        residents = {tree.resident_id for tree in forest.trees}
        owners = {
            pid: owned
            for pid, owned in self._owned.get(accelerator_id, {}).items()
            if owned.resident_id in residents and forest.may_still_hold(owned.process)
        }
        owners.update(forest.owners())
        self._owned[accelerator_id] = {pid: owners[pid] for pid in listing.used_bytes if pid in owners}
        return self._owned[accelerator_id]


def _owns(tree: Tree, owned: Owned | None) -> bool:
    return owned is not None and owned.resident_id == tree.resident_id


def _blindness(hidden: bool, figures: Iterable[list[int | None]]) -> Blindness | None:
    """In a container most drivers list ids of the machine, which are not ours: unknown is not 0."""
    if hidden:
        return Blindness.PID_NAMESPACE
    return Blindness.NO_PROCESS_BYTES if any(None in one for one in figures) else None


def _sum(figures: list[int | None]) -> int | None:
    known = [figure for figure in figures if figure is not None]
    return sum(known) if len(known) == len(figures) else None


def _plausible(process: DeviceProcess, total_bytes: int) -> int | None:
    used = process.used_bytes
    return used if used is not None and used <= total_bytes else None


def _greater(one: int | None, other: int | None) -> int | None:
    """A process in two lists has the same memory in both; one of them may not tell."""
    known = [figure for figure in (one, other) if figure is not None]
    return max(known, default=None)
