"""What is seen of devices."""

from __future__ import annotations

from dataclasses import dataclass

from ..policy import Pressure
from ..state import DOCUMENT, Attribution
from ..units import AcceleratorId, BasisPoints, Bytes, Count, Instant, NodeId, ResidentId
from .registry import StreamKind, register


@dataclass(frozen=True, slots=True)
class SampledResident:
    """What one sample says of one resident. `alive`: some process of its tree is there.

    `running_requests` are those the runtime works on or keeps waiting; of these `waiting_requests`, and how full its
    cache is, where it says so.
    """

    __pydantic_config__ = DOCUMENT

    resident_id: ResidentId
    attributed_bytes: Bytes
    attribution: Attribution
    running_requests: Count
    alive: bool
    waiting_requests: Count | None = None
    cache_use_bp: BasisPoints | None = None


@dataclass(frozen=True, slots=True)
class SampledAccelerator:
    """One accelerator in a sample. `invalid` says why its figures are recorded but not used (semantics.md 1).

    `blind` says why memory cannot be attributed by process here: figures are ESTIMATED then.
    """

    __pydantic_config__ = DOCUMENT

    accelerator_id: AcceleratorId
    total_bytes: Bytes
    used_bytes: Bytes
    pressure_bp: BasisPoints
    pressure: Pressure
    recovering_since: Instant | None
    foreign_processes: Count
    residents: tuple[SampledResident, ...]
    invalid: str | None = None
    blind: str | None = None


@register(StreamKind.TELEMETRY)
@dataclass(frozen=True, slots=True)
class TelemetrySampled:
    """One reading of one node: memory and processes of every accelerator, taken together (semantics.md 1)."""

    __pydantic_config__ = DOCUMENT

    node_id: NodeId
    observed_at: Instant
    received_at: Instant
    memory_bytes: Bytes | None
    external_bytes: Bytes | None
    accelerators: tuple[SampledAccelerator, ...]


@register(StreamKind.TELEMETRY)
@dataclass(frozen=True, slots=True)
class TelemetryMissed:
    """DRIVER_ERROR: nothing is known of these accelerators until the next sample; no old value stands in."""

    __pydantic_config__ = DOCUMENT

    node_id: NodeId
    observed_at: Instant
    accelerator_ids: tuple[AcceleratorId, ...]
    code: str
