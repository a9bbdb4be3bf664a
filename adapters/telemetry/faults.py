"""The closed words of this package: why an accelerator could not be read, why its memory is nobody's, what ails it.

The first are codes of a TelemetryFault (DRIVER_ERROR, semantics.md 8), the others fields of an AcceleratorReading.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from gpuledger.domain.ports import TelemetryFault
from gpuledger.domain.state import Health


class FaultCode(StrEnum):
    """Codes of this package. NVML's own errors without a name here are `NVML_ERROR_<number>`."""

    #: Figures contradict each other or cannot be: total 0, more used than there is (semantics.md 1).
    IMPOSSIBLE_FIGURES = "IMPOSSIBLE_FIGURES"
    #: The driver does not tell the memory of a MIG instance. (A whole GPU that answers so has none of its own.)
    NOT_SUPPORTED = "NOT_SUPPORTED"
    #: A compute instance beside another one in the same GPU instance: one memory, which is offered by the other.
    MIG_MEMORY_SHARED = "MIG_MEMORY_SHARED"
    #: A second GPU without memory of its own: one memory, which is offered by the first.
    UNIFIED_MEMORY_SHARED = "UNIFIED_MEMORY_SHARED"
    #: A card whose UUID is that of another one, or no name at all: nobody could be sent to it.
    UUID_UNUSABLE = "UUID_UNUSABLE"
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


class Blindness(StrEnum):
    """Why what a process holds cannot be read on an accelerator: figures are ESTIMATED there (semantics.md 1)."""

    #: The driver does not show its process lists, or shows one that cannot be.
    PROCESS_LIST_UNREADABLE = "PROCESS_LIST_UNREADABLE"
    #: In a container: the driver lists ids of the machine, and no process of ours is among them.
    PID_NAMESPACE = "PID_NAMESPACE"
    #: Our process is listed and its bytes are not: under WDDM, for managed memory, or figures that cannot be.
    NO_PROCESS_BYTES = "NO_PROCESS_BYTES"


class HealthCause(StrEnum):
    """What a card itself counts as a fault. Beside these there is `XID_<n>` (xids.py)."""

    #: A row of memory is broken and no spare one is left for it.
    ROW_REMAP_FAILED = "ROW_REMAP_FAILED"
    #: ECC errors that could not be corrected, since the driver was loaded.
    ECC_UNCORRECTED = "ECC_UNCORRECTED"
    #: A broken row will be replaced at the next reset of the card; the fault goes away by itself then.
    ROW_REMAP_PENDING = "ROW_REMAP_PENDING"


def fault(accelerator_id: str | None, code: str, health: Health | None = None) -> TelemetryFault:
    """The value of the port; its code is plain text, as it stands in the ledger."""
    return TelemetryFault(accelerator_id, str(code), health)


def faults_of(accelerator_ids: Iterable[str], code: str, health: Health | None = None) -> tuple[TelemetryFault, ...]:
    """The same fault for each of them; one fault of no accelerator when there are none."""
    return tuple(fault(one, code, health) for one in accelerator_ids) or (fault(None, code, health),)
