"""The part of NVML that gpuledger calls, typed. `pynvml` (PyPI nvidia-ml-py) has no types; none of it leaves this file.

Its state is one per process (a global library handle), so there is one NvmlBinding in use at a time, in one thread.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Final, NewType

import pynvml  # pyright: ignore[reportMissingTypeStubs]

_pynvml: Final[Any] = pynvml

#: A handle is good until the library is closed; what it stands for is known by its UUID.
Device = NewType("Device", object)

# Return codes of nvml.h that callers tell apart.
UNINITIALIZED: Final = 1
NOT_SUPPORTED: Final = 3
NO_PERMISSION: Final = 4
DRIVER_NOT_LOADED: Final = 9
TIMEOUT: Final = 10
LIBRARY_NOT_FOUND: Final = 12
FUNCTION_NOT_FOUND: Final = 13
GPU_IS_LOST: Final = 15
RESET_REQUIRED: Final = 16
LIB_RM_VERSION_MISMATCH: Final = 18
UNKNOWN: Final = 999


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
    """nvmlDeviceGetRemappedRows: whether rows wait for a reset to be remapped, and whether remapping failed."""

    pending: bool
    failed: bool


class NvmlBinding:
    """NVML as typed calls; each raises NvmlError. `library`: a path instead of the loader's `libnvidia-ml.so.1`."""

    def __init__(self, library: str | None = None) -> None:
        self._library = library

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

    def uncorrected_errors(self, device: Device) -> int:
        """ECC errors since the driver was loaded that were not corrected."""
        return int(
            _call(
                "nvmlDeviceGetTotalEccErrors",
                device,
                _pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                _pynvml.NVML_VOLATILE_ECC,
            )
        )

    def persistent(self, device: Device) -> bool:
        """Persistence mode: whether the driver keeps a card ready that nobody uses."""
        return bool(_call("nvmlDeviceGetPersistenceMode", device))

    def remapped_rows(self, device: Device) -> RemappedRows:
        _corrected, _uncorrected, pending, failed = _call("nvmlDeviceGetRemappedRows", device)
        return RemappedRows(bool(pending), bool(failed))


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
