"""GPUs by NVML (semantics.md 1): memory and processes of every accelerator, read together, each failing for itself.

Order of one reading: session (initialised at most every `retry_ms`), Xids that came since, layout by UUID (cards, and
the instances of partitioned ones), then for each accelerator memory, process lists, health. Whatever NVML answers
becomes a reading or a fault; nothing is carried over from an earlier sample but which accelerators and processes there
were, and which Xids a card has reported.

A whole GPU that answers "not supported" to its memory has none but the host's, and is measured by the host's figures.
A resident there holds what its processes hold of the host's memory and what NVML books under them, added up: what CUDA
allocates is the driver's and in no process's resident set, and NVML books exactly that; what CUDA manages or the
program allocates itself is in the resident set, and NVML does not book it. Where NVML keeps no list (Jetson) the former
would be missing, so the sum is unknown.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpuledger.domain.ports import AcceleratorReading, ManagedReading, TelemetryFault
from gpuledger.domain.state import Kind
from gpuledger.domain.units import MAX_INTEGER

from . import nvml_binding as nvml
from .faults import FaultCode, fault, faults_of
from .host_memory import HostMeter, HostUnreadable
from .nvml_binding import DeviceMemory, NvmlBinding, NvmlError
from .nvml_faults import code_of, fault_of, health_of
from .nvml_health import HealthReader
from .nvml_layout import LayoutReader, Place
from .nvml_processes import Attribution, ProcessBook, read_lists
from .nvml_session import NvmlSession
from .nvml_xids import XidWatch, wall_us
from .processes import Forest
from .source import SourceReading

#: The vendor's and the line's names say nothing that the model's does not (drivers have dropped and added them), nor
#: does the word before a MIG profile.
_EMPTY_WORDS: Final = frozenset({"nvidia", "tesla", "geforce", "mig"})


def gpu_class(device_name: str) -> str:
    """The class that envelopes are measured for, from a device's name: lower case, brand dropped, joined by dashes.

    The name of a MIG instance is that of its card and of its profile.

    >>> gpu_class("NVIDIA GeForce RTX 3090"), gpu_class("NVIDIA H200"), gpu_class("Tesla T4")
    ('rtx-3090', 'h200', 't4')
    >>> gpu_class("NVIDIA A100-SXM4-40GB"), gpu_class("NVIDIA RTX 6000 Ada Generation")
    ('a100-sxm4-40gb', 'rtx-6000-ada-generation')
    >>> gpu_class("NVIDIA A100-SXM4-40GB MIG 1g.5gb"), gpu_class("NVIDIA GB10")
    ('a100-sxm4-40gb-1g-5gb', 'gb10')
    """
    words = re.findall(r"[a-z0-9]+", device_name.lower())
    return "-".join(word for word in words if word not in _EMPTY_WORDS) or "unknown-gpu"


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
    """An accelerator answered, and what it said cannot be used."""

    def __init__(self, code: FaultCode) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True, slots=True)
class _Measured:
    """The memory of one accelerator in this sample, and whose it is."""

    total_bytes: int
    used_bytes: int
    managed: tuple[ManagedReading, ...]
    attribution: Attribution
    unified: bool = False


class NvmlSource:
    """Every GPU that NVML shows. Blocking; for one thread, and one instance per process (nvml_binding)."""

    def __init__(
        self,
        library: str | None = None,
        *,
        host: HostMeter | None = None,
        known: Iterable[str] = (),
        newest_mark: int = 0,
        retry_ms: int = 5_000,
        refresh_ms: int = 60_000,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        clock_us: Callable[[], int] = wall_us,
    ) -> None:
        """`library`: configuration key `nvml_library`, a path instead of what the loader finds.

        `host` measures a GPU that has no memory but the host's. `known`: GPUs and instances that earlier runs had, so
        that one which is missing is told as gone or vanished; `newest_mark`: of the Xids of earlier runs. A session is
        begun at most every `retry_ms`. While a card is gone and others answer, it is begun anew only every
        `refresh_ms`: without persistence mode that re-initialises the healthy cards, for seconds. `clock_us`: marks of
        Xids.
        """
        self._session = NvmlSession(NvmlBinding(library), retry_ms, refresh_ms, monotonic_ns)
        self._binding = self._session.binding
        self._host = HostMeter() if host is None else host
        self._layouts = LayoutReader(self._binding, known)
        self._xids = XidWatch(self._binding, clock_us, newest_mark)
        self._health = HealthReader(self._binding, self._xids)
        self._book = ProcessBook()
        #: The one accelerator that stands for the host's memory.
        self._unified: str | None = None

    def read(self, forest: Forest) -> SourceReading:
        """Every accelerator, each as a reading or as a fault; those that were seen once and are missing are faults too.

        `memory_bytes` of the node where a GPU stands for its memory.
        """
        try:
            driver_version = self._session.begin()
            self._xids.drain(self._session.number)
            layout = self._layouts.read()
        except NvmlError as error:
            self._session.abandon(error)
            return SourceReading(faults=faults_of(self._layouts.known(), code_of(error), health_of(error)))
        self._xids.follow(layout)
        self._health.begin()
        self._book.forget(layout.gone)
        readings: list[AcceleratorReading] = []
        faults: list[TelemetryFault] = list(layout.faults)
        failing = layout.failing
        for place in layout.places:
            try:
                readings.append(self._read(place, driver_version, forest))
            except NvmlError as error:
                faults.append(fault_of(place.accelerator_id, error))
                failing = failing or error.code not in nvml.NOT_OFFERED
            except _Unusable as error:
                faults.append(fault(place.accelerator_id, error.code))
        self._session.judge(failing=failing, others_answer=bool(readings))
        return SourceReading(
            accelerators=tuple(readings),
            faults=tuple(faults),
            memory_bytes=next((one.total_bytes for one in readings if one.unified), None),
            gone=layout.gone,
        )

    def close(self) -> None:
        self._session.binding.close()

    # ---- one accelerator ----

    def _read(self, place: Place, driver_version: str, forest: Forest) -> AcceleratorReading:
        """Raises NvmlError, _Unusable."""
        measured = self._measure(place, forest)
        faults = self._health.faults(place)
        blind = measured.attribution.blind
        return AcceleratorReading(
            accelerator_id=place.accelerator_id,
            index=place.index,
            kind=Kind.GPU,
            gpu_class=gpu_class(place.name),
            device_name=place.name,
            driver_version=driver_version,
            total_bytes=measured.total_bytes,
            used_bytes=measured.used_bytes,
            managed=measured.managed,
            foreign_processes=measured.attribution.foreign,
            faults=faults,
            unified=measured.unified,
            blind=None if blind is None else str(blind),
        )

    def _measure(self, place: Place, forest: Forest) -> _Measured:
        try:
            memory = self._binding.memory(place.device)
        except NvmlError as error:
            if error.code == nvml.NOT_SUPPORTED and place.instance is None:
                return self._measure_unified(place, forest)
            raise
        if _impossible(memory):
            raise _Unusable(FaultCode.IMPOSSIBLE_FIGURES)
        attribution = self._attribute(place, memory.total_bytes, forest)
        managed = (ManagedReading(one.tree.resident_id, one.tree.alive, one.used_bytes) for one in attribution.held)
        return _Measured(memory.total_bytes, memory.total_bytes - memory.free_bytes, tuple(managed), attribution)

    def _measure_unified(self, place: Place, forest: Forest) -> _Measured:
        """By the host's figures, and for one card only: two would offer the same memory twice. Raises _Unusable."""
        if self._unified not in (None, place.accelerator_id):
            raise _Unusable(FaultCode.UNIFIED_MEMORY_SHARED)
        self._unified = place.accelerator_id
        try:
            memory = self._host.read(forest.on(place.accelerator_id), with_device=True)
        except HostUnreadable:
            raise _Unusable(FaultCode.HOST_UNREADABLE) from None
        attribution = self._attribute(place, memory.total_bytes, forest)
        managed = (
            ManagedReading(
                one.tree.resident_id,
                one.tree.alive,
                None if one.used_bytes is None else one.used_bytes + memory.held_bytes[one.tree.resident_id],
            )
            for one in attribution.held
        )
        return _Measured(memory.total_bytes, memory.used_bytes, tuple(managed), attribution, unified=True)

    def _attribute(self, place: Place, total_bytes: int, forest: Forest) -> Attribution:
        listing = read_lists(self._binding, place.device, total_bytes)
        return self._book.attribute(place.accelerator_id, listing, forest)


def _impossible(memory: DeviceMemory) -> bool:
    """Some driver returned success with such figures (runtimes.md)."""
    within = 0 < memory.total_bytes <= MAX_INTEGER
    return not within or memory.free_bytes > memory.total_bytes or memory.used_bytes > memory.total_bytes
