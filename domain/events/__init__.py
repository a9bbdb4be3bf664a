"""The vocabulary of the ledger: a closed list of event types, past tense (ledger.md, Streams and their events).

Every event is a frozen value. `register` gives it its stream; the codec (`adapters/ledger/codec.py`) reads and
writes the values by these annotations and refuses every type that is not here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .declared import (
    AcceleratorHealthChanged,
    AcceleratorRegistered,
    AcceleratorRetired,
    AcceleratorRevised,
    ArtifactCorrupt,
    ArtifactVerified,
    ClientRegistered,
    ClientRevised,
    ClientRevoked,
    ClockStepped,
    ConfigurationApplied,
    DeploymentRegistered,
    DeploymentRetired,
    DeploymentRevised,
    DeploymentSpec,
    EnvelopeAccepted,
    EnvelopeMeasured,
    EnvelopeSuspected,
    LabPaused,
    LabResumed,
    LedgerOpened,
    NodeCordoned,
    NodeDrainCompleted,
    NodeDrainStarted,
    NodeRegistered,
    NodeUncordoned,
    PolicyRevised,
    PressureChanged,
    ResidencyPolicyChanged,
    SchedulerStarted,
    SchedulerStopped,
)
from .memory import (
    EvictionCause,
    EvictionStarted,
    LeaseExpired,
    LeaseGranted,
    LeasePreempted,
    LeaseReleased,
    LeaseRenewed,
    LeaseRoomConfirmed,
    MemoryNotReclaimed,
    ProfilingEnded,
    ProfilingStarted,
    ReleaseCause,
    ResidencyMaterialized,
    ResidentDrainStarted,
    ResidentEvicted,
    ResidentFailed,
    ResidentLoadStarted,
    ResidentProcessStarted,
    ResidentReady,
    ResidentSlept,
    ResidentWoken,
    ThrashingDetected,
)
from .registry import EVENT_TYPES, EventType, Source, StreamKind, register, stream_name
from .seen import SampledAccelerator, SampledResident, TelemetryMissed, TelemetrySampled
from .work import (
    CapabilityDegraded,
    CapabilityRecovered,
    FailureRecorded,
    PlanDecided,
    RequestCancelled,
    RequestCompleted,
    RequestFailed,
    RequestFellBack,
    RequestQueued,
    RequestReceived,
    RequestRetried,
)

__all__ = [
    "EVENT_TYPES",
    "AcceleratorHealthChanged",
    "AcceleratorRegistered",
    "AcceleratorRetired",
    "AcceleratorRevised",
    "ArtifactCorrupt",
    "ArtifactVerified",
    "CapabilityDegraded",
    "CapabilityRecovered",
    "ClientRegistered",
    "ClientRevised",
    "ClientRevoked",
    "ClockStepped",
    "ConfigurationApplied",
    "DeploymentRegistered",
    "DeploymentRetired",
    "DeploymentRevised",
    "DeploymentSpec",
    "EnvelopeAccepted",
    "EnvelopeMeasured",
    "EnvelopeSuspected",
    "Event",
    "EventType",
    "EvictionCause",
    "EvictionStarted",
    "FailureRecorded",
    "LabPaused",
    "LabResumed",
    "LeaseExpired",
    "LeaseGranted",
    "LeasePreempted",
    "LeaseReleased",
    "LeaseRenewed",
    "LeaseRoomConfirmed",
    "LedgerOpened",
    "MemoryNotReclaimed",
    "NewEvent",
    "NodeCordoned",
    "NodeDrainCompleted",
    "NodeDrainStarted",
    "NodeRegistered",
    "NodeUncordoned",
    "PlanDecided",
    "PolicyRevised",
    "PressureChanged",
    "ProfilingEnded",
    "ProfilingStarted",
    "Recorded",
    "ReleaseCause",
    "RequestCancelled",
    "RequestCompleted",
    "RequestFailed",
    "RequestFellBack",
    "RequestQueued",
    "RequestReceived",
    "RequestRetried",
    "ResidencyMaterialized",
    "ResidencyPolicyChanged",
    "ResidentDrainStarted",
    "ResidentEvicted",
    "ResidentFailed",
    "ResidentLoadStarted",
    "ResidentProcessStarted",
    "ResidentReady",
    "ResidentSlept",
    "ResidentWoken",
    "SampledAccelerator",
    "SampledResident",
    "SchedulerStarted",
    "SchedulerStopped",
    "Source",
    "StreamKind",
    "TelemetryMissed",
    "TelemetrySampled",
    "ThrashingDetected",
    "register",
    "stream_name",
]

Event: TypeAlias = (
    LedgerOpened
    | SchedulerStarted
    | SchedulerStopped
    | PolicyRevised
    | LabPaused
    | LabResumed
    | NodeRegistered
    | ConfigurationApplied
    | NodeCordoned
    | NodeUncordoned
    | NodeDrainStarted
    | NodeDrainCompleted
    | ClockStepped
    | AcceleratorRegistered
    | AcceleratorRevised
    | AcceleratorRetired
    | AcceleratorHealthChanged
    | PressureChanged
    | LeaseGranted
    | LeaseRenewed
    | LeaseRoomConfirmed
    | ResidencyMaterialized
    | LeaseReleased
    | LeaseExpired
    | LeasePreempted
    | ResidentLoadStarted
    | ResidentProcessStarted
    | ResidentReady
    | ResidentSlept
    | ResidentWoken
    | ResidentDrainStarted
    | EvictionStarted
    | ThrashingDetected
    | ProfilingStarted
    | ProfilingEnded
    | ResidentEvicted
    | MemoryNotReclaimed
    | ResidentFailed
    | TelemetrySampled
    | TelemetryMissed
    | DeploymentRegistered
    | DeploymentRevised
    | DeploymentRetired
    | ResidencyPolicyChanged
    | ArtifactVerified
    | ArtifactCorrupt
    | EnvelopeSuspected
    | EnvelopeAccepted
    | EnvelopeMeasured
    | ClientRegistered
    | ClientRevised
    | ClientRevoked
    | RequestReceived
    | PlanDecided
    | RequestQueued
    | RequestRetried
    | RequestFellBack
    | RequestCompleted
    | RequestFailed
    | RequestCancelled
    | FailureRecorded
    | CapabilityDegraded
    | CapabilityRecovered
)
"""The closed list as a type, for exhaustive matches."""


@dataclass(frozen=True, slots=True)
class NewEvent:
    """An event that was decided and is not yet in the ledger."""

    stream: str
    data: Event


@dataclass(frozen=True, slots=True)
class Recorded:
    """An event of the ledger: `seq` is dense over all streams from 1, `version` over its own (ledger.md, Bytes)."""

    seq: int
    at: int
    stream: str
    version: int
    data: Event
