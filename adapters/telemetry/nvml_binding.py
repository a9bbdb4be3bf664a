"""The part of NVML that gpuledger calls, typed. `pynvml` (PyPI nvidia-ml-py) has no types; none of it leaves this file.

Its state is one per process (a global library handle), so there is one NvmlBinding in use at a time, in one thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NewType, TypeVar

import pynvml  # pyright: ignore[reportMissingTypeStubs]

_pynvml: Final[Any] = pynvml

#: A handle is good until the library is closed, that of a MIG instance until the layout changes: it is found anew in
#: each sample. What it stands for is known by its UUID.
Device = NewType("Device", object)
#: Where a driver puts the events of one card; good until the library is closed.
EventSet = NewType("EventSet", object)

# Return codes of nvml.h that callers tell apart.
UNINITIALIZED: Final = 1
INVALID_ARGUMENT: Final = 2
NOT_SUPPORTED: Final = 3
NO_PERMISSION: Final = 4
NOT_FOUND: Final = 6
DRIVER_NOT_LOADED: Final = 9
TIMEOUT: Final = 10
LIBRARY_NOT_FOUND: Final = 12
FUNCTION_NOT_FOUND: Final = 13
GPU_IS_LOST: Final = 15
RESET_REQUIRED: Final = 16
LIB_RM_VERSION_MISMATCH: Final = 18
UNKNOWN: Final = 999

#: "This card, driver or container does not offer that": an answer, not a failure of the card.
NOT_OFFERED: Final = frozenset({NOT_SUPPORTED, FUNCTION_NOT_FOUND, NO_PERMISSION})
#: What stands for no instance where an instance could be named.
_NO_INSTANCE: Final = 0xFFFFFFFF

_T = TypeVar("_T")


class NvmlError(Exception):
    """NVML answered `code` (nvmlReturn_t)."""

    def __init__(self, code: int, call: str) -> None:
        super().__init__(f"{call} answered {code}")
        self.code = code


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """nvmlDeviceGetMemoryInfo (v1), as answered. `used_bytes` includes what the driver keeps for itself."""

    total_bytes: int
    free_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """One line of a process list. `used_bytes` is None under WDDM, for managed memory, and where it is withheld."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class RemappedRows:
    """nvmlDeviceGetRemappedRows: how many were, whether some wait for a reset for it, and whether it failed for one."""

    remapped: int
    pending: bool
    failed: bool


@dataclass(frozen=True, slots=True)
class XidEvent:
    """An Xid that the driver calls critical. `gpu_instance`: of a partitioned card, where it hit no more than that."""

    xid: int
    gpu_instance: int | None


class NvmlBinding:
    """NVML as typed calls; each raises NvmlError. `library`: a path instead of the loader's `libnvidia-ml.so.1`."""

    def __init__(self, library: str | None = None) -> None:
        self._library = library
        self._event_sets: list[EventSet] = []

    def open(self) -> None:
        """Load the library and initialise it. A card that cannot be reached does not fail this call."""
        if self._library is not None:
            try:
                _pynvml.nvmlLib = ctypes.CDLL(self._library)
            except OSError as error:
                raise NvmlError(LIBRARY_NOT_FOUND, "dlopen") from error
        _call("nvmlInit")

    def close(self) -> None:
        """Shut down what was initialised and unload the library; safe in every state."""
        for events in tuple(self._event_sets):
            self.unwatch(events)
        try:
            _call("nvmlShutdown")
        except NvmlError:
            pass  # not initialised, or the driver is gone: there is nothing to shut down
        finally:
            _unload()

    def driver_version(self) -> str:
        return str(_call("nvmlSystemGetDriverVersion"))

    def device_count(self) -> int:
        return int(_call("nvmlDeviceGetCount"))

    def device(self, index: int) -> Device:
        """Indices follow the bus and move when a card disappears."""
        return Device(_call("nvmlDeviceGetHandleByIndex", index))

    def uuid(self, device: Device) -> str:
        """`GPU-8-4-4-4-12`, the same in every boot and slot."""
        return str(_call("nvmlDeviceGetUUID", device))

    def name(self, device: Device) -> str:
        return str(_call("nvmlDeviceGetName", device))

    def memory(self, device: Device) -> DeviceMemory:
        info = _call("nvmlDeviceGetMemoryInfo", device)
        return DeviceMemory(int(info.total), int(info.free), int(info.used))

    def compute_processes(self, device: Device) -> tuple[DeviceProcess, ...]:
        return _processes("nvmlDeviceGetComputeRunningProcesses", device)

    def mps_processes(self, device: Device) -> tuple[DeviceProcess, ...]:
        """Clients of the Multi-Process Service."""
        return _processes("nvmlDeviceGetMPSComputeRunningProcesses", device)

    def graphics_processes(self, device: Device) -> tuple[DeviceProcess, ...]:
        return _processes("nvmlDeviceGetGraphicsRunningProcesses", device)

    def mig_enabled(self, device: Device) -> bool:
        current, _pending = _call("nvmlDeviceGetMigMode", device)
        return bool(current)

    def max_instances(self, device: Device) -> int:
        """How many MIG instances can be there at once; 0 for a card that is not partitioned."""
        return int(_call("nvmlDeviceGetMaxMigDeviceCount", device))

    def instance(self, device: Device, slot: int) -> Device | None:
        """The MIG instance in a slot of a card; None where there is none."""
        try:
            return Device(_call("nvmlDeviceGetMigDeviceHandleByIndex", device, slot))
        except NvmlError as error:
            if error.code == NOT_FOUND:
                return None
            raise

    def gpu_instance(self, instance: Device) -> int:
        """Which part of its card's memory a MIG instance has; several compute instances may share one."""
        return int(_call("nvmlDeviceGetGpuInstanceId", instance))

    def compute_instance(self, instance: Device) -> int:
        return int(_call("nvmlDeviceGetComputeInstanceId", instance))

    def persistent(self, device: Device) -> bool:
        """Persistence mode: whether the driver keeps a card ready that nobody uses."""
        return bool(_call("nvmlDeviceGetPersistenceMode", device))

    # ---- health ----

    def uncorrected_errors(self, device: Device) -> int:
        """ECC errors that were not corrected, since the driver was loaded."""
        return _ecc_errors(device, _pynvml.NVML_VOLATILE_ECC)

    def lifetime_uncorrected_errors(self, device: Device) -> int:
        """The same over the life of the card."""
        return _ecc_errors(device, _pynvml.NVML_AGGREGATE_ECC)

    def remapped_rows(self, device: Device) -> RemappedRows:
        corrected, uncorrected, pending, failed = _call("nvmlDeviceGetRemappedRows", device)
        return RemappedRows(int(corrected) + int(uncorrected), bool(pending), bool(failed))

    def watch_xids(self, device: Device) -> EventSet:
        """Let the driver collect the critical Xids of a card from now on. Not of a MIG instance: its card reports them.

        One set a card: a wait on a set that has a lost card in it answers that card's error for all.
        """
        events = EventSet(_call("nvmlEventSetCreate"))
        self._event_sets.append(events)
        try:
            _call("nvmlDeviceRegisterEvents", device, _pynvml.nvmlEventTypeXidCriticalError, events)
        except NvmlError:
            self.unwatch(events)
            raise
        return events

    def next_xid(self, events: EventSet) -> XidEvent | None:
        """The oldest event that has not been taken yet; None when there is none. Does not wait."""
        try:
            event = _call("nvmlEventSetWait_v2", events, 0)
        except NvmlError as error:
            if error.code == TIMEOUT:
                return None
            raise
        instance = int(event.gpuInstanceId)
        return XidEvent(int(event.eventData), None if instance == _NO_INSTANCE else instance)

    def unwatch(self, events: EventSet) -> None:
        """Let a set go; safe in every state."""
        if events in self._event_sets:
            self._event_sets.remove(events)
            with suppress(NvmlError):  # the driver is gone, and the set with it
                _call("nvmlEventSetFree", events)


def offered(call: Callable[[Device], _T], device: Device) -> _T | None:
    """The answer, or None where this is not offered. Raises NvmlError for everything else."""
    try:
        return call(device)
    except NvmlError as error:
        if error.code in NOT_OFFERED:
            return None
        raise


def _ecc_errors(device: Device, counter: int) -> int:
    kind = _pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    return int(_call("nvmlDeviceGetTotalEccErrors", device, kind, counter))


def _call(name: str, *arguments: object) -> Any:
    try:
        return getattr(_pynvml, name)(*arguments)
    except _pynvml.NVMLError as error:
        raise NvmlError(int(error.value), name) from error


def _processes(name: str, device: Device) -> tuple[DeviceProcess, ...]:
    """One list in its versioned form: the unversioned one of the module hides an old driver behind another error.

    v2 (driver 470) and v3 (driver 510) have the same layout; older ones are not read.
    """
    try:
        found = _call(f"{name}_v3", device)
    except NvmlError as error:
        if error.code != FUNCTION_NOT_FOUND:
            raise
        found = _call(f"{name}_v2", device)
    return tuple(
        DeviceProcess(int(one.pid), None if one.usedGpuMemory is None else int(one.usedGpuMemory)) for one in found
    )


def _unload() -> None:
    """Let the library itself go, so that the next `open` finds the one of an upgraded driver.

    The module keeps function pointers; unless they are forgotten too, the library stays as it is.
    """
    pointers = getattr(_pynvml, "_nvmlGetFunctionPointer_cache", None)
    library = _pynvml.nvmlLib
    if library is None or not isinstance(pointers, dict):
        return
    pointers.clear()
    _pynvml.nvmlLib = None
    ctypes.CDLL(None).dlclose(ctypes.c_void_p(library._handle))
