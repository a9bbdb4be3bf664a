"""What an answer of NVML that is an error means: the code of a fault, and what it says of the card's health."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpuledger.domain.ports import TelemetryFault
from gpuledger.domain.state import Health

from . import nvml_binding as nvml
from .faults import FaultCode, fault
from .nvml_binding import NvmlError

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


def code_of(error: NvmlError) -> str:
    """A FaultCode, or `NVML_ERROR_<number>`."""
    return _CODES.get(error.code, f"NVML_ERROR_{error.code}")


def health_of(error: NvmlError) -> Health | None:
    """None where the error says nothing of it."""
    return _HEALTH.get(error.code)


def fault_of(accelerator_id: str | None, error: NvmlError) -> TelemetryFault:
    """The fault of one accelerator, or of none that was ever seen."""
    return fault(accelerator_id, code_of(error), health_of(error))
