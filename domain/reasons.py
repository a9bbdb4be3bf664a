"""The closed list of verdicts and reasons, and what each reason means for who asks again.

A refusal is a value of `Reason` with figures beside it; text is rendered at the edge (`explain.py`). A value is
never renamed and never reused: it is in ledgers (style.md, habits 2 and 3).
"""

from __future__ import annotations

from enum import StrEnum
from typing import assert_never


class Verdict(StrEnum):
    """What a plan says, best first (semantics.md 6.5)."""

    ADMIT = "ADMIT"
    ADMIT_AFTER_EVICTION = "ADMIT_AFTER_EVICTION"
    QUEUE = "QUEUE"
    REJECT_CAPACITY = "REJECT_CAPACITY"
    REJECT_HEALTH = "REJECT_HEALTH"
    REJECT_POLICY = "REJECT_POLICY"

    @property
    def admits(self) -> bool:
        return self in (Verdict.ADMIT, Verdict.ADMIT_AFTER_EVICTION)


class Reason(StrEnum):
    """Why a candidate is not admitted, in the order of the stages of semantics.md 6."""

    # 6.1, policy
    ACCELERATOR_KIND_MISMATCH = "ACCELERATOR_KIND_MISMATCH"
    NODE_NOT_PRODUCTION_ELIGIBLE = "NODE_NOT_PRODUCTION_ELIGIBLE"
    DEPLOYMENT_NOT_PRODUCTION_ELIGIBLE = "DEPLOYMENT_NOT_PRODUCTION_ELIGIBLE"
    LAB_ONLY = "LAB_ONLY"
    LAB_PAUSED = "LAB_PAUSED"
    NODE_CORDONED = "NODE_CORDONED"
    NODE_DRAINING = "NODE_DRAINING"
    LABEL_MISMATCH = "LABEL_MISMATCH"
    NODE_MEMORY_INSUFFICIENT = "NODE_MEMORY_INSUFFICIENT"
    NO_MEASURED_ENVELOPE = "NO_MEASURED_ENVELOPE"
    REPLICA_LIMIT = "REPLICA_LIMIT"
    # 6.2, health
    NODE_NOT_READY = "NODE_NOT_READY"
    ACCELERATOR_UNHEALTHY = "ACCELERATOR_UNHEALTHY"
    ACCELERATOR_ALLOCATED = "ACCELERATOR_ALLOCATED"
    SCHEDULER_STATE_STALE = "SCHEDULER_STATE_STALE"
    # 6.3, capacity
    DEADLINE_CANNOT_BE_MET = "DEADLINE_CANNOT_BE_MET"
    EXTERNAL_GPU_PRESSURE = "EXTERNAL_GPU_PRESSURE"
    RESIDENT_DRAINING = "RESIDENT_DRAINING"
    CONCURRENCY_LIMIT = "CONCURRENCY_LIMIT"
    DRAINING_FOR_WAITER = "DRAINING_FOR_WAITER"
    LOAD_BACKOFF = "LOAD_BACKOFF"
    GPU_PRESSURE_HOLD = "GPU_PRESSURE_HOLD"
    LOAD_IN_PROGRESS = "LOAD_IN_PROGRESS"
    QUEUED_BEHIND = "QUEUED_BEHIND"
    RESIDENCY_CONFLICT = "RESIDENCY_CONFLICT"
    RESIDENCY_PROTECTED = "RESIDENCY_PROTECTED"
    WAITING_FOR_DRAIN = "WAITING_FOR_DRAIN"
    INSUFFICIENT_SCHEDULABLE_VRAM = "INSUFFICIENT_SCHEDULABLE_VRAM"
    EVICTION_NOT_ALLOWED = "EVICTION_NOT_ALLOWED"
    QUEUE_FULL = "QUEUE_FULL"
    # 6.5, no candidate at all
    CAPABILITY_UNAVAILABLE = "CAPABILITY_UNAVAILABLE"
    NO_ACCELERATOR = "NO_ACCELERATOR"
    # 7, outside the plan: the grant could not be committed; the command id stands for another question; the lease
    # was preempted after its answer had begun
    LEASE_CONFLICT = "LEASE_CONFLICT"
    COMMAND_ID_REUSED = "COMMAND_ID_REUSED"
    PREEMPTED = "PREEMPTED"


def waiting_helps(reason: Reason) -> bool:
    """Whether the same question may be answered otherwise later, with nobody changing a configuration.

    Clients get `Retry-After` exactly when it does.
    """
    match reason:
        case (
            Reason.LAB_PAUSED
            | Reason.NODE_CORDONED
            | Reason.NODE_DRAINING
            | Reason.NODE_MEMORY_INSUFFICIENT
            | Reason.REPLICA_LIMIT
            | Reason.NODE_NOT_READY
            | Reason.ACCELERATOR_UNHEALTHY
            | Reason.ACCELERATOR_ALLOCATED
            | Reason.SCHEDULER_STATE_STALE
            | Reason.DEADLINE_CANNOT_BE_MET
            | Reason.EXTERNAL_GPU_PRESSURE
            | Reason.RESIDENT_DRAINING
            | Reason.CONCURRENCY_LIMIT
            | Reason.DRAINING_FOR_WAITER
            | Reason.LOAD_BACKOFF
            | Reason.GPU_PRESSURE_HOLD
            | Reason.LOAD_IN_PROGRESS
            | Reason.QUEUED_BEHIND
            | Reason.RESIDENCY_CONFLICT
            | Reason.RESIDENCY_PROTECTED
            | Reason.WAITING_FOR_DRAIN
            | Reason.EVICTION_NOT_ALLOWED
            | Reason.QUEUE_FULL
            | Reason.LEASE_CONFLICT
            | Reason.PREEMPTED
        ):
            return True
        case (
            Reason.ACCELERATOR_KIND_MISMATCH
            | Reason.NODE_NOT_PRODUCTION_ELIGIBLE
            | Reason.DEPLOYMENT_NOT_PRODUCTION_ELIGIBLE
            | Reason.LAB_ONLY
            | Reason.LABEL_MISMATCH
            | Reason.NO_MEASURED_ENVELOPE
            | Reason.INSUFFICIENT_SCHEDULABLE_VRAM
            | Reason.CAPABILITY_UNAVAILABLE
            | Reason.NO_ACCELERATOR
            | Reason.COMMAND_ID_REUSED
        ):
            return False
        case _:
            assert_never(reason)


def eviction_helps(reason: Reason) -> bool:
    """Whether less managed residency on the accelerator could turn this reason into an admission."""
    match reason:
        case (
            Reason.QUEUED_BEHIND
            | Reason.RESIDENCY_CONFLICT
            | Reason.RESIDENCY_PROTECTED
            | Reason.WAITING_FOR_DRAIN
            | Reason.EVICTION_NOT_ALLOWED
        ):
            return True
        case (
            Reason.ACCELERATOR_KIND_MISMATCH
            | Reason.NODE_NOT_PRODUCTION_ELIGIBLE
            | Reason.DEPLOYMENT_NOT_PRODUCTION_ELIGIBLE
            | Reason.LAB_ONLY
            | Reason.LAB_PAUSED
            | Reason.NODE_CORDONED
            | Reason.NODE_DRAINING
            | Reason.LABEL_MISMATCH
            | Reason.NODE_MEMORY_INSUFFICIENT
            | Reason.NO_MEASURED_ENVELOPE
            | Reason.REPLICA_LIMIT
            | Reason.NODE_NOT_READY
            | Reason.ACCELERATOR_UNHEALTHY
            | Reason.ACCELERATOR_ALLOCATED
            | Reason.SCHEDULER_STATE_STALE
            | Reason.DEADLINE_CANNOT_BE_MET
            | Reason.EXTERNAL_GPU_PRESSURE
            | Reason.RESIDENT_DRAINING
            | Reason.CONCURRENCY_LIMIT
            | Reason.DRAINING_FOR_WAITER
            | Reason.LOAD_BACKOFF
            | Reason.GPU_PRESSURE_HOLD
            | Reason.LOAD_IN_PROGRESS
            | Reason.INSUFFICIENT_SCHEDULABLE_VRAM
            | Reason.QUEUE_FULL
            | Reason.CAPABILITY_UNAVAILABLE
            | Reason.NO_ACCELERATOR
            | Reason.LEASE_CONFLICT
            | Reason.COMMAND_ID_REUSED
            | Reason.PREEMPTED
        ):
            return False
        case _:
            assert_never(reason)
