"""Why an accelerator could not be read: short typed codes for TelemetryFault (DRIVER_ERROR, semantics.md 8)."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from gpuledger.domain.ports import TelemetryFault
from gpuledger.domain.state import Health


class FaultCode(StrEnum):
    """Codes of this package. NVML's own errors without a name here are `NVML_ERROR_<number>`."""

    #: Figures contradict each other or cannot be: total 0, more used than there is (semantics.md 1).
    IMPOSSIBLE_FIGURES = "IMPOSSIBLE_FIGURES"
    #: An integrated GPU answers so: it has no memory of its own to measure.
    NOT_SUPPORTED = "NOT_SUPPORTED"
    #: A partitioned GPU is its instances, which are not read yet; its parent must not be scheduled instead.
    MIG_NOT_SUPPORTED_YET = "MIG_NOT_SUPPORTED_YET"
    #: The driver counts fewer cards than before, and this one is not among them.
    GPU_VANISHED = "GPU_VANISHED"

    NVML_UNINITIALIZED = "NVML_UNINITIALIZED"
    NVML_NO_PERMISSION = "NVML_NO_PERMISSION"
    NVML_DRIVER_NOT_LOADED = "NVML_DRIVER_NOT_LOADED"
    NVML_TIMEOUT = "NVML_TIMEOUT"
    NVML_LIBRARY_NOT_FOUND = "NVML_LIBRARY_NOT_FOUND"
    NVML_FUNCTION_NOT_FOUND = "NVML_FUNCTION_NOT_FOUND"
    NVML_GPU_LOST = "NVML_GPU_LOST"
    NVML_RESET_REQUIRED = "NVML_RESET_REQUIRED"
    #: The library is of another version than the loaded driver: after an upgrade, until the driver is reloaded.
    NVML_VERSION_MISMATCH = "NVML_VERSION_MISMATCH"
    NVML_UNKNOWN = "NVML_UNKNOWN"

    #: The operating system did not tell the memory of this node.
    HOST_UNREADABLE = "HOST_UNREADABLE"
    #: /proc could not be walked, so nothing can be attributed.
    PROCESSES_UNREADABLE = "PROCESSES_UNREADABLE"
    #: A defect of gpuledger; the log has the traceback.
    UNEXPECTED_ERROR = "UNEXPECTED_ERROR"


def fault(accelerator_id: str | None, code: str, health: Health | None = None) -> TelemetryFault:
    """The value of the port; its code is plain text, as it stands in the ledger."""
    return TelemetryFault(accelerator_id, str(code), health)


def faults_of(accelerator_ids: Iterable[str], code: str, health: Health | None = None) -> tuple[TelemetryFault, ...]:
    """The same fault for each of them; one fault of no accelerator when there are none."""
    return tuple(fault(one, code, health) for one in accelerator_ids) or (fault(None, code, health),)
