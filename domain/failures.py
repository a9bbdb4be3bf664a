"""The nineteen classes of failure and who owns each (semantics.md 8)."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, assert_never


class Failure(StrEnum):
    """What went wrong. Capacity refusals are among them and are counted apart (`CAPACITY_FAILURES`)."""

    MODEL_LOAD_FAILED = "MODEL_LOAD_FAILED"
    RUNTIME_CRASH = "RUNTIME_CRASH"
    HEALTHCHECK_FAILED = "HEALTHCHECK_FAILED"
    INVALID_OUTPUT = "INVALID_OUTPUT"
    TIMEOUT = "TIMEOUT"
    GPU_OOM = "GPU_OOM"
    SCHEDULER_STATE_STALE = "SCHEDULER_STATE_STALE"
    INSUFFICIENT_SCHEDULABLE_VRAM = "INSUFFICIENT_SCHEDULABLE_VRAM"
    EXTERNAL_GPU_PRESSURE = "EXTERNAL_GPU_PRESSURE"
    RESIDENCY_CONFLICT = "RESIDENCY_CONFLICT"
    EVICTION_NOT_ALLOWED = "EVICTION_NOT_ALLOWED"
    DEADLINE_CANNOT_BE_MET = "DEADLINE_CANNOT_BE_MET"
    LEASE_CONFLICT = "LEASE_CONFLICT"
    GPU_MEMORY_NOT_RECLAIMED = "GPU_MEMORY_NOT_RECLAIMED"
    QUEUE_FULL = "QUEUE_FULL"
    LEASE_TIMEOUT = "LEASE_TIMEOUT"
    CAPABILITY_UNAVAILABLE = "CAPABILITY_UNAVAILABLE"
    ARTIFACT_CORRUPT = "ARTIFACT_CORRUPT"
    DRIVER_ERROR = "DRIVER_ERROR"


class Owner(StrEnum):
    """The part of the system that detects a failure and answers for it."""

    RUNTIME_ADAPTER = "runtime adapter"
    SCHEDULER = "scheduler"
    GATEWAY = "gateway"
    CONTROL_PLANE = "control plane"
    TELEMETRY = "telemetry"


def owner_of(failure: Failure) -> Owner:
    """The part that answers for a class of failure."""
    match failure:
        case (
            Failure.MODEL_LOAD_FAILED
            | Failure.RUNTIME_CRASH
            | Failure.HEALTHCHECK_FAILED
            | Failure.INVALID_OUTPUT
            | Failure.TIMEOUT
        ):
            return Owner.RUNTIME_ADAPTER
        case (
            Failure.GPU_OOM
            | Failure.SCHEDULER_STATE_STALE
            | Failure.INSUFFICIENT_SCHEDULABLE_VRAM
            | Failure.EXTERNAL_GPU_PRESSURE
            | Failure.RESIDENCY_CONFLICT
            | Failure.EVICTION_NOT_ALLOWED
            | Failure.DEADLINE_CANNOT_BE_MET
            | Failure.LEASE_CONFLICT
            | Failure.GPU_MEMORY_NOT_RECLAIMED
            | Failure.QUEUE_FULL
            | Failure.LEASE_TIMEOUT
        ):
            return Owner.SCHEDULER
        case Failure.CAPABILITY_UNAVAILABLE:
            return Owner.GATEWAY
        case Failure.ARTIFACT_CORRUPT:
            return Owner.CONTROL_PLANE
        case Failure.DRIVER_ERROR:
            return Owner.TELEMETRY
        case _:
            assert_never(failure)


#: Verdicts on capacity are correct outcomes; everything else here is a fault of somebody (semantics.md 8).
CAPACITY_FAILURES = frozenset(
    {
        Failure.INSUFFICIENT_SCHEDULABLE_VRAM,
        Failure.EXTERNAL_GPU_PRESSURE,
        Failure.RESIDENCY_CONFLICT,
        Failure.EVICTION_NOT_ALLOWED,
        Failure.DEADLINE_CANNOT_BE_MET,
        Failure.QUEUE_FULL,
    }
)

#: Failures of serving. In a row they make a capability degraded, of a load they set a back-off, and another attempt may
#: be spared them: a runtime that crashed is started anew, a model that fails to load once may load the next time (8).
SERVING_FAILURES: Final = frozenset(
    {
        Failure.MODEL_LOAD_FAILED,
        Failure.RUNTIME_CRASH,
        Failure.HEALTHCHECK_FAILED,
        Failure.INVALID_OUTPUT,
        Failure.TIMEOUT,
        Failure.GPU_OOM,
        Failure.ARTIFACT_CORRUPT,
    }
)

#: SHA-256 of nothing: the evidence of a failure that shows only in the events before it.
EMPTY_SHA256: Final = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
