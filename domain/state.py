"""The frozen snapshot a decision is made on: the state document `gpuledger.state/1`, and the question.

Read and written by `documents.py`; in order of input lists nothing here depends (semantics.md 6.6).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from .policy import Policy, Pressure, Priority
from .reasons import Reason
from .units import (
    AcceleratorId,
    Bytes,
    CapabilityId,
    ClientId,
    Count,
    DeploymentId,
    Identifier,
    Instant,
    LeaseId,
    Milliseconds,
    NodeId,
    PositiveBytes,
    RequestId,
    ResidentId,
    Seconds,
)

DOCUMENT = ConfigDict(extra="forbid", strict=True)


class Kind(StrEnum):
    """What a memory domain is (semantics.md 1)."""

    GPU = "gpu"
    HOST = "host"


class Health(StrEnum):
    """What the device says of itself; anything but HEALTHY takes no work."""

    HEALTHY = "HEALTHY"
    DEGRADED = "DEGRADED"
    FAILED = "FAILED"
    LOST = "LOST"


class Attribution(StrEnum):
    """How well the figures of an accelerator are known (semantics.md 2)."""

    KNOWN = "KNOWN"
    ESTIMATED = "ESTIMATED"
    UNKNOWN = "UNKNOWN"


class ResidencyPolicy(StrEnum):
    """How long a model stays when nothing uses it (semantics.md 7)."""

    ALWAYS_WARM = "always_warm"
    KEEP_WARM = "keep_warm"
    LOAD_ON_DEMAND = "load_on_demand"
    EXCLUSIVE = "exclusive"
    LAB_ONLY = "lab_only"


class ResidentState(StrEnum):
    """Where a resident is between its load and its end; every state is attributed (semantics.md 2)."""

    LOADING = "LOADING"
    READY = "READY"
    SLEEPING = "SLEEPING"
    DRAINING = "DRAINING"
    UNLOADING = "UNLOADING"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One memory domain with one finite size (semantics.md 1)."""

    __pydantic_config__ = DOCUMENT

    accelerator_id: AcceleratorId
    index: Count
    kind: Kind
    gpu_class: Identifier
    total_bytes: PositiveBytes
    health: Health = Health.HEALTHY
    allocated_to: Identifier | None = None
    foreign_process: bool = False
    nvlink_domain: Identifier | None = None


@dataclass(frozen=True, slots=True)
class Fabric:
    """A network between nodes and the host adapters of this node on it (semantics.md 9)."""

    __pydantic_config__ = DOCUMENT

    fabric_id: Identifier
    hcas: tuple[Identifier, ...] = ()


@dataclass(frozen=True, slots=True)
class Node:
    """A machine with accelerators, and whether it takes work."""

    __pydantic_config__ = DOCUMENT

    node_id: NodeId
    accelerators: tuple[Accelerator, ...]
    ready: bool = True
    production_eligible: bool = True
    cordoned: bool = False
    draining: bool = False
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    memory_bytes: Bytes | None = None
    external_bytes: Bytes | None = None
    fabrics: tuple[Fabric, ...] = ()


@dataclass(frozen=True, slots=True)
class Envelope:
    """What one configuration was measured to take on one class of accelerator (semantics.md 3)."""

    __pydantic_config__ = DOCUMENT

    config_hash: Identifier
    gpu_class: Identifier
    idle_bytes: Bytes
    peak_bytes: PositiveBytes
    measured_at: Instant
    context_length: Count
    batch_size: Count
    concurrency: Count
    suspect: bool = False


@dataclass(frozen=True, slots=True)
class Residency:
    """A residency policy and the keep-warm time that goes with it."""

    __pydantic_config__ = DOCUMENT

    policy: ResidencyPolicy = ResidencyPolicy.KEEP_WARM
    ttl_seconds: Seconds = 901


@dataclass(frozen=True, slots=True)
class Sleep:
    """A runtime that can give back memory without losing its process."""

    __pydantic_config__ = DOCUMENT

    asleep_bytes: Bytes
    sleep_ms: Milliseconds
    wake_ms: Milliseconds


@dataclass(frozen=True, slots=True)
class Backoff:
    """No load of the deployment on this accelerator before `until` (semantics.md 8)."""

    __pydantic_config__ = DOCUMENT

    accelerator_id: AcceleratorId
    until: Instant


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model in one configuration of one runtime, serving one capability at one rank."""

    __pydantic_config__ = DOCUMENT

    deployment_id: DeploymentId
    capability: CapabilityId
    kind: Kind
    config_hash: Identifier
    envelopes: tuple[Envelope, ...]
    context_length: Count
    batch_size: Count
    load_ms: Milliseconds
    unload_ms: Milliseconds
    concurrency: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    fallback_rank: Count = 0
    interruptible: bool = False
    max_replicas: Count = 1
    min_memory_bytes: Bytes | None = None
    node_selector: Mapping[str, str] = field(default_factory=dict[str, str])
    priority: Priority = Priority.INTERACTIVE
    production_eligible: bool = True
    queue_limit: Count = 16
    residency: Residency = Residency()
    sleep: Sleep | None = None
    backoff: tuple[Backoff, ...] = ()


@dataclass(frozen=True, slots=True)
class Resident:
    """A deployment on an accelerator: at most one per such pair (semantics.md 2)."""

    __pydantic_config__ = DOCUMENT

    resident_id: ResidentId
    deployment_id: DeploymentId
    accelerator_id: AcceleratorId
    state: ResidentState
    attributed_bytes: Bytes
    reserved_bytes: Bytes
    loaded_at: Instant
    last_used_at: Instant
    start_ms: Milliseconds
    attribution: Annotated[Attribution, Field(description="KNOWN or ESTIMATED")] = Attribution.KNOWN
    available_at: Instant | None = None
    leased_priority: Priority | None = None
    protected_until: Instant | None = None
    running_requests: Count = 0


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to use memory until `expires_at` (semantics.md 7)."""

    __pydantic_config__ = DOCUMENT

    lease_id: LeaseId
    request_id: RequestId
    deployment_id: DeploymentId
    accelerator_id: AcceleratorId
    priority: Priority
    reserved_bytes: Bytes
    materialized_bytes: Bytes
    granted_at: Instant
    expires_at: Instant
    preemptions: Count = 0


@dataclass(frozen=True, slots=True)
class WaitingFor:
    """The one place that is held for a queued request (semantics.md 6.5)."""

    __pydantic_config__ = DOCUMENT

    accelerator_id: AcceleratorId
    deployment_id: DeploymentId
    reason: Reason
    needed_bytes: Bytes
    resident_ids: tuple[ResidentId, ...] = ()
    not_before: Instant | None = None


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request that waits, and the one place that is held for it."""

    __pydantic_config__ = DOCUMENT

    request_id: RequestId
    capability: CapabilityId
    priority: Priority
    enqueued_at: Instant
    waiting_for: WaitingFor

    @property
    def claim(self) -> tuple[int, int, str]:
        """Its place in the claim order: class, `enqueued_at`, `request_id` (semantics.md 5)."""
        return (self.priority.rank, self.enqueued_at, self.request_id)


@dataclass(frozen=True, slots=True)
class Sample:
    """The newest usable reading of one accelerator, and the level of pressure it left (semantics.md 4)."""

    __pydantic_config__ = DOCUMENT

    accelerator_id: AcceleratorId
    used_bytes: Bytes
    observed_at: Instant
    received_at: Instant
    pressure: Pressure = Pressure.NORMAL


@dataclass(frozen=True, slots=True)
class State:
    """All that a decision may depend on, at one instant of the ledger's clock."""

    __pydantic_config__ = DOCUMENT

    now: Instant
    policy: Policy
    nodes: tuple[Node, ...] = ()
    deployments: tuple[Deployment, ...] = ()
    residents: tuple[Resident, ...] = ()
    leases: tuple[Lease, ...] = ()
    queue: tuple[QueuedRequest, ...] = ()
    telemetry: tuple[Sample, ...] = ()
    schema: Literal["gpuledger.state/1"] = "gpuledger.state/1"


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The question: a capability at one rank, for a client bound to a class (semantics.md 5)."""

    __pydantic_config__ = DOCUMENT

    request_id: RequestId
    client_id: ClientId
    capability: CapabilityId
    priority: Priority
    requested_at: Instant
    deadline: Instant | None = None
    lab: bool = False
    fallback_rank: Count = 0

    @property
    def claim(self) -> tuple[int, int, str]:
        """Its place in the claim order, were it queued (semantics.md 5, 6.3)."""
        return (self.priority.rank, self.requested_at, self.request_id)
