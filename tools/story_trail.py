"""Which events belong to the story of one request: its own, those of what it had, and what kept it waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from gpuledger.domain.events import (
    AcceleratorHealthChanged,
    AcceleratorRetired,
    AcceleratorRevised,
    ArtifactCorrupt,
    ArtifactVerified,
    CapabilityDegraded,
    CapabilityRecovered,
    ClientRevised,
    ClientRevoked,
    ClockStepped,
    ConfigurationApplied,
    DeploymentRetired,
    DeploymentRevised,
    EnvelopeAccepted,
    EnvelopeMeasured,
    EnvelopeSuspected,
    Event,
    EvictionStarted,
    FailureRecorded,
    LabPaused,
    LabResumed,
    LeaseExpired,
    LeaseGranted,
    LeasePreempted,
    LeaseReleased,
    LeaseRenewed,
    LeaseRoomConfirmed,
    MemoryNotReclaimed,
    NodeCordoned,
    NodeDrainCompleted,
    NodeDrainStarted,
    NodeUncordoned,
    PlanDecided,
    PolicyRevised,
    PressureChanged,
    ProfilingEnded,
    ProfilingStarted,
    Recorded,
    RequestCancelled,
    RequestCompleted,
    RequestFailed,
    RequestFellBack,
    RequestQueued,
    RequestReceived,
    RequestRetried,
    ResidencyMaterialized,
    ResidencyPolicyChanged,
    ResidentDrainStarted,
    ResidentEvicted,
    ResidentFailed,
    ResidentLoadStarted,
    ResidentProcessStarted,
    ResidentReady,
    ResidentSlept,
    ResidentWoken,
    SchedulerStarted,
    SchedulerStopped,
    StreamKind,
    TelemetryMissed,
    ThrashingDetected,
    stream_name,
)
from gpuledger.domain.ports import LedgerReader

from .ledger_target import TargetError
from .replay import PAGE_EVENTS

_ENDS: Final = (RequestCompleted, RequestFailed, RequestCancelled)
#: What may be recorded before the grant that it belongs to, in the same batch.
_BEFORE_GRANT: Final = (EvictionStarted, ResidentEvicted, LeasePreempted, ThrashingDetected)
#: Whatever request is open, these are about what it may do.
_FOR_ALL: Final = (
    SchedulerStarted,
    SchedulerStopped,
    PolicyRevised,
    LabPaused,
    LabResumed,
    ConfigurationApplied,
    NodeCordoned,
    NodeUncordoned,
    NodeDrainStarted,
    NodeDrainCompleted,
    ClockStepped,
    ProfilingStarted,
    ProfilingEnded,
)


def events_of(reader: LedgerReader, request_id: str) -> tuple[Recorded, ...]:
    """Every event that concerns a request, from its arrival to its end, in order. Raises TargetError.

    The one thing after its end that belongs to it is that its capability recovered by its answer.
    """
    own = reader.read_stream(stream_name(StreamKind.REQUEST, request_id))
    if not own:
        raise TargetError(f"the request {request_id} is not in this ledger")
    ended = next((event.seq for event in own if isinstance(event.data, _ENDS)), None)
    last = reader.head() if ended is None else min(ended + 1, reader.head())
    trail, found = _Trail(request_id), list[Recorded]()
    after = own[0].seq - 1
    while after < last:
        page = reader.read(after, min(PAGE_EVENTS, last - after))
        if not page:
            break
        for event in page:
            if ended is None or event.seq <= ended or isinstance(event.data, CapabilityRecovered):
                found.extend(trail.follow(event))
        after = page[-1].seq
    return tuple(found)


@dataclass
class _Trail:
    """What a request has had to do with so far: leases, residents, whose evictions it waited for, places."""

    request_id: str
    client_id: str = ""
    capability: str = ""
    leases: set[str] = field(default_factory=set[str])
    residents: set[str] = field(default_factory=set[str])
    deployments: set[str] = field(default_factory=set[str])
    accelerators: set[str] = field(default_factory=set[str])
    before_grant: list[Recorded] = field(default_factory=list[Recorded])

    def follow(self, event: Recorded) -> Sequence[Recorded]:
        """The events that concern the request, now that this one is known."""
        data = event.data
        if isinstance(data, LeaseGranted):
            return self._granted(event, data)
        if not self._concerns(data):
            if isinstance(data, _BEFORE_GRANT):
                self.before_grant.append(event)
            return ()
        if isinstance(data, RequestReceived):
            self.client_id, self.capability = data.client_id, data.capability
        if isinstance(data, RequestQueued):
            self.accelerators.add(data.waiting_for.accelerator_id)
            self.deployments.add(data.waiting_for.deployment_id)
        return (event,)

    def _granted(self, event: Recorded, granted: LeaseGranted) -> Sequence[Recorded]:
        before, self.before_grant = self.before_grant, []
        if granted.request_id != self.request_id:
            return ()
        self.leases.add(granted.lease_id)
        self.residents.add(granted.resident_id)
        self.deployments.add(granted.deployment_id)
        self.accelerators.add(granted.accelerator_id)
        self.residents |= {
            one.data.resident_id
            for one in before
            if isinstance(one.data, EvictionStarted) and one.data.by_lease_id == granted.lease_id
        }
        return (*(one for one in before if self._concerns(one.data) or _thrashed(one.data, granted)), event)

    def _concerns(self, data: Event) -> bool:
        if isinstance(data, _FOR_ALL):
            return True
        match data:
            case RequestReceived() | PlanDecided() | RequestQueued() | RequestRetried() | RequestFellBack():
                return data.request_id == self.request_id
            case RequestCompleted() | RequestFailed() | RequestCancelled():
                return data.request_id == self.request_id
            case LeasePreempted(lease_id=lease_id, by_request_id=by_request_id):
                return lease_id in self.leases or by_request_id == self.request_id
            case LeaseRenewed() | LeaseReleased() | LeaseExpired() | LeaseRoomConfirmed():
                return data.lease_id in self.leases
            case FailureRecorded(request_id=None, resident_id=resident_id):
                return resident_id in self.residents
            case FailureRecorded(request_id=request_id):
                return request_id == self.request_id
            case CapabilityDegraded() | CapabilityRecovered():
                return data.capability == self.capability
            case ClientRevised() | ClientRevoked():
                return data.client_id == self.client_id
            case _:
                return self._concerns_what_it_had(data)

    def _concerns_what_it_had(self, data: Event) -> bool:
        match data:
            case (
                ResidentLoadStarted()
                | ResidentProcessStarted()
                | ResidencyMaterialized()
                | ResidentReady()
                | ResidentSlept()
                | ResidentWoken()
                | ResidentDrainStarted()
                | ResidentFailed()
                | EvictionStarted()
                | ResidentEvicted()
                | MemoryNotReclaimed()
            ):
                return data.resident_id in self.residents
            case AcceleratorHealthChanged() | AcceleratorRevised() | AcceleratorRetired() | PressureChanged():
                return data.accelerator_id in self.accelerators
            case TelemetryMissed(accelerator_ids=missed):
                return not self.accelerators.isdisjoint(missed)
            case DeploymentRevised(spec=spec):
                return spec.deployment_id in self.deployments
            case (
                DeploymentRetired()
                | ResidencyPolicyChanged()
                | ArtifactVerified()
                | ArtifactCorrupt()
                | EnvelopeSuspected()
                | EnvelopeAccepted()
                | EnvelopeMeasured()
            ):
                return data.deployment_id in self.deployments
            case _:
                return False


def _thrashed(data: Event, granted: LeaseGranted) -> bool:
    """Whether the evictions of this very grant were some too many."""
    if not isinstance(data, ThrashingDetected):
        return False
    return (data.accelerator_id, data.evictor) == (granted.accelerator_id, granted.deployment_id)
