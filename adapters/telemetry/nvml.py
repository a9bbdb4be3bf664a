"""GPUs by NVML (semantics.md 1): memory and processes of every card, read together, each card failing for itself.

Order of one reading: session (initialised at most every `retry_ms`), enumeration by UUID, then card by card
partition mode, memory, process lists, health. Whatever NVML answers becomes a reading or a fault; nothing is carried
over from an earlier sample but which cards and which processes there were.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from gpuledger.domain.ports import AcceleratorReading, ManagedReading, TelemetryFault
from gpuledger.domain.state import Health, Kind
from gpuledger.domain.units import MAX_INTEGER

from . import nvml_binding as nvml
from .faults import FaultCode, fault, faults_of
from .nvml_binding import Device, DeviceMemory, DeviceProcess, NvmlBinding, NvmlError
from .nvml_session import NvmlSession
from .processes import Forest, Owned, Tree
from .source import SourceReading

#: PID_MAX_LIMIT of a 64-bit kernel. A mismatch of driver and binding once handed bytes over as pids.
_MAX_PID: Final = 2**22

#: The vendor's and the line's names say nothing that the model's does not; drivers have dropped and added them.
_BRAND_WORDS: Final = frozenset({"nvidia", "tesla", "geforce"})

_CODES: Final[Mapping[int, FaultCode]] = {
    nvml.UNINITIALIZED: FaultCode.NVML_UNINITIALIZED,
    nvml.NOT_SUPPORTED: FaultCode.NOT_SUPPORTED,
    nvml.NO_PERMISSION: FaultCode.NVML_NO_PERMISSION,
    nvml.DRIVER_NOT_LOADED: FaultCode.NVML_DRIVER_NOT_LOADED,
    nvml.TIMEOUT: FaultCode.NVML_TIMEOUT,
    nvml.LIBRARY_NOT_FOUND: FaultCode.NVML_LIBRARY_NOT_FOUND,
    nvml.FUNCTION_NOT_FOUND: FaultCode.NVML_FUNCTION_NOT_FOUND,
    nvml.GPU_IS_LOST: FaultCode.NVML_GPU_LOST,
    nvml.RESET_REQUIRED: FaultCode.NVML_RESET_REQUIRED,
    nvml.LIB_RM_VERSION_MISMATCH: FaultCode.NVML_VERSION_MISMATCH,
    nvml.UNKNOWN: FaultCode.NVML_UNKNOWN,
}
#: What an error says of the card's health; the others say only that it could not be read.
_HEALTH: Final[Mapping[int, Health]] = {nvml.GPU_IS_LOST: Health.LOST, nvml.RESET_REQUIRED: Health.FAILED}
#: "This card, driver or container does not offer that": an answer, not a failure of the card.
_NOT_OFFERED: Final = frozenset({nvml.NOT_SUPPORTED, nvml.FUNCTION_NOT_FOUND, nvml.NO_PERMISSION})

_T = TypeVar("_T")


def gpu_class(device_name: str) -> str:
    """The class that envelopes are measured for, from a device's name: lower case, brand dropped, joined by dashes.

    >>> gpu_class("NVIDIA GeForce RTX 3090"), gpu_class("NVIDIA H200"), gpu_class("Tesla T4")
    ('rtx-3090', 'h200', 't4')
    >>> gpu_class("NVIDIA A100-SXM4-40GB"), gpu_class("NVIDIA RTX 6000 Ada Generation")
    ('a100-sxm4-40gb', 'rtx-6000-ada-generation')
    """
    words = re.findall(r"[a-z0-9]+", device_name.lower())
    return "-".join(word for word in words if word not in _BRAND_WORDS) or "unknown-gpu"


def probe(library: str | None = None, sys_root: Path = Path("/sys")) -> bool:
    """Whether this machine has an NVIDIA driver, or a card that lacks one: whether to watch NVML when set to `auto`.

    A library without a loaded driver (many images carry one) counts only where the bus shows a card. To be called
    before there is an NvmlSource, whose session it would end (nvml_binding).
    """
    binding = NvmlBinding(library)
    try:
        binding.open()
    except NvmlError as error:
        if error.code not in (nvml.LIBRARY_NOT_FOUND, nvml.DRIVER_NOT_LOADED):
            return True
        return error.code == nvml.DRIVER_NOT_LOADED and _card_on_bus(sys_root)
    finally:
        binding.close()
    return True


def _card_on_bus(sys_root: Path) -> bool:
    """A PCI function of vendor 10de and of the display class (03)."""
    for function in sys_root.glob("bus/pci/devices/*"):
        try:
            vendor = (function / "vendor").read_text("ascii").strip()
            device_class = (function / "class").read_text("ascii").strip()
        except OSError:
            continue
        if vendor == "0x10de" and device_class.startswith("0x03"):
            return True
    return False


class _Unusable(Exception):
    """A card answered, and what it said cannot be used."""

    def __init__(self, code: FaultCode) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True, slots=True)
class _Card:
    """A card as it was found in this sample."""

    uuid: str
    index: int
    name: str
    device: Device


@dataclass(frozen=True, slots=True)
class _Listing:
    """The process lists of a card merged by pid. `compute` are those that run kernels, MPS clients among them."""

    used_bytes: Mapping[int, int | None]
    compute: frozenset[int]


class NvmlSource:
    """Every GPU that NVML shows. Blocking; for one thread, and one instance per process (nvml_binding)."""

    def __init__(
        self,
        library: str | None = None,
        *,
        retry_ms: int = 5_000,
        refresh_ms: int = 60_000,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`library`: configuration key `nvml_library`, a path instead of what the loader finds.

        A session is begun at most every `retry_ms`. While a card is gone and others answer, it is begun anew only
        every `refresh_ms`: without persistence mode that re-initialises the healthy cards, for seconds.
        """
        self._session = NvmlSession(NvmlBinding(library), retry_ms, refresh_ms, monotonic_ns)
        self._binding = self._session.binding
        #: uuid -> index at which it was last found.
        self._known: dict[str, int] = {}
        #: uuid -> pid -> whose it was in the sample before.
        self._owned: dict[str, dict[int, Owned]] = {}

    def read(self, forest: Forest) -> SourceReading:
        """Every card, each as a reading or as a fault; cards that were seen once and are missing are faults too."""
        try:
            driver_version = self._session.begin()
            cards, faults = self._enumerate()
        except NvmlError as error:
            self._session.abandon(error)
            return SourceReading(faults=faults_of(sorted(self._known), _code(error), _HEALTH.get(error.code)))
        readings: list[AcceleratorReading] = []
        failing = bool(faults)
        for card in cards:
            try:
                readings.append(self._read_card(card, driver_version, forest))
            except NvmlError as error:
                faults.append(_fault(card.uuid, error))
                failing = failing or error.code not in _NOT_OFFERED
            except _Unusable as error:
                faults.append(fault(card.uuid, error.code))
        self._session.judge(failing=failing, others_answer=bool(readings))
        return SourceReading(tuple(readings), tuple(faults))

    def close(self) -> None:
        self._session.binding.close()

    # ---- which cards ----

    def _enumerate(self) -> tuple[list[_Card], list[TelemetryFault]]:
        """The cards that answer, and a fault for each that does not: an index that errs is the card last seen there."""
        cards: list[_Card] = []
        silent: dict[int, NvmlError] = {}
        for index in range(self._binding.device_count()):
            try:
                device = self._binding.device(index)
                cards.append(_Card(self._binding.uuid(device), index, self._binding.name(device), device))
            except NvmlError as error:
                silent[index] = error
        found = {card.uuid: card.index for card in cards}
        faults = [
            _fault(uuid, silent.pop(index)) if index in silent else fault(uuid, FaultCode.GPU_VANISHED, Health.LOST)
            for uuid, index in sorted(self._known.items())
            if uuid not in found
        ]
        faults += [_fault(None, error) for error in silent.values()]
        self._known.update(found)
        return cards, faults

    # ---- one card ----

    def _read_card(self, card: _Card, driver_version: str, forest: Forest) -> AcceleratorReading:
        """Raises NvmlError, _Unusable."""
        if self._partitioned(card.device):
            raise _Unusable(FaultCode.MIG_NOT_SUPPORTED_YET)
        memory = self._binding.memory(card.device)
        if _impossible(memory):
            raise _Unusable(FaultCode.IMPOSSIBLE_FIGURES)
        listing = self._processes(card.device, memory.total_bytes)
        owned = self._attribute(card.uuid, listing, forest)
        health, cause = self._health(card.device)
        return AcceleratorReading(
            accelerator_id=card.uuid,
            index=card.index,
            kind=Kind.GPU,
            gpu_class=gpu_class(card.name),
            device_name=card.name,
            driver_version=driver_version,
            total_bytes=memory.total_bytes,
            used_bytes=memory.total_bytes - memory.free_bytes,
            health=health,
            managed=tuple(_managed_reading(tree, listing, owned, forest.host_pids) for tree in forest.on(card.uuid)),
            foreign_processes=0 if listing is None else len(listing.compute - owned.keys()),
            health_cause=cause,
        )

    def _partitioned(self, device: Device) -> bool:
        """A card that may not say whether it is partitioned is not taken for whole: NO_PERMISSION is raised on."""
        try:
            return self._binding.mig_enabled(device)
        except NvmlError as error:
            if error.code in (nvml.NOT_SUPPORTED, nvml.FUNCTION_NOT_FOUND):
                return False
            raise

    def _processes(self, device: Device, total_bytes: int) -> _Listing | None:
        """The lists of a card, or None where it does not tell. Lists it does not keep are empty.

        A pid that cannot be one makes the whole list unreadable, bytes beyond the card make that figure unreadable.
        """
        compute = _offered(self._binding.compute_processes, device)
        if compute is None:
            return None
        mps = _offered(self._binding.mps_processes, device) or ()
        graphics = _offered(self._binding.graphics_processes, device) or ()
        merged: dict[int, int | None] = {}
        for process in (*compute, *mps, *graphics):
            if not 0 < process.pid <= _MAX_PID:
                return None
            merged[process.pid] = _greater(merged.get(process.pid), _plausible(process, total_bytes))
        return _Listing(merged, frozenset(process.pid for process in (*compute, *mps)))

    def _attribute(self, uuid: str, listing: _Listing | None, forest: Forest) -> dict[int, Owned]:
        """pid -> whose it is, of what the card lists.

        A member that has ended is still listed while the driver takes its memory back; until then it stays whose it
        was, unless somebody else has its pid.
        """
        if listing is None:
            return {}
        residents = {tree.resident_id for tree in forest.trees}
        owners = {
            pid: owned
            for pid, owned in self._owned.get(uuid, {}).items()
            if owned.resident_id in residents and forest.may_still_hold(owned.process)
        }
        owners.update(forest.owners())
        self._owned[uuid] = {pid: owners[pid] for pid in listing.used_bytes if pid in owners}
        return self._owned[uuid]

    def _health(self, device: Device) -> tuple[Health, str]:
        """Health with its cause, from what the card counts itself; cards that do not count are taken for healthy."""
        rows = _offered(self._binding.remapped_rows, device)
        if rows is not None and rows.failed:
            return Health.FAILED, "ROW_REMAP_FAILED"
        if rows is not None and rows.pending:
            return Health.DEGRADED, "ROW_REMAP_PENDING"
        if _offered(self._binding.uncorrected_errors, device):
            return Health.DEGRADED, "ECC_UNCORRECTED"
        return Health.HEALTHY, ""


def _offered(call: Callable[[Device], _T], device: Device) -> _T | None:
    """The answer, or None where this is not offered. Raises NvmlError for everything else."""
    try:
        return call(device)
    except NvmlError as error:
        if error.code in _NOT_OFFERED:
            return None
        raise


def _managed_reading(
    tree: Tree, listing: _Listing | None, owned: Mapping[int, Owned], host_pids: bool
) -> ManagedReading:
    """What the card books under the tree's members: their sum, None where any of it cannot be read."""
    if listing is None:
        return ManagedReading(tree.resident_id, tree.alive, None)
    figures = [
        used for pid, used in listing.used_bytes.items() if pid in owned and owned[pid].resident_id == tree.resident_id
    ]
    if not figures and tree.alive and not host_pids:
        # In a container most drivers list ids of the machine, which are not ours: unknown is not 0.
        return ManagedReading(tree.resident_id, tree.alive, None)
    known = [figure for figure in figures if figure is not None]
    return ManagedReading(tree.resident_id, tree.alive, sum(known) if len(known) == len(figures) else None)


def _impossible(memory: DeviceMemory) -> bool:
    """Some driver returned success with such figures (runtimes.md)."""
    within = 0 < memory.total_bytes <= MAX_INTEGER
    return not within or memory.free_bytes > memory.total_bytes or memory.used_bytes > memory.total_bytes


def _plausible(process: DeviceProcess, total_bytes: int) -> int | None:
    used = process.used_bytes
    return used if used is not None and used <= total_bytes else None


def _greater(one: int | None, other: int | None) -> int | None:
    """A process in two lists has the same memory in both; one of them may not tell."""
    known = [figure for figure in (one, other) if figure is not None]
    return max(known, default=None)


def _code(error: NvmlError) -> str:
    return _CODES.get(error.code, f"NVML_ERROR_{error.code}")


def _fault(uuid: str | None, error: NvmlError) -> TelemetryFault:
    return fault(uuid, _code(error), _HEALTH.get(error.code))
