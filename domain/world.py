"""The state of the scheduler: the fold of the ledger and nothing else (ledger.md, Replay).

`evolve(world, event)` applies one event; `World.state(now)` is the snapshot that a decision is made on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar, assert_never

from .aggregates import accelerator as accelerators
from .aggregates import deployment as deployments
from .aggregates import node as nodes
from .aggregates import request as requests
from .aggregates.accelerator import AcceleratorState, LeaseRecord, ResidentRecord
from .aggregates.deployment import DeploymentState
from .aggregates.node import NodeState
from .aggregates.request import RequestState
from .events import (
    AcceleratorRegistered,
    ArtifactCorrupt,
    ArtifactVerified,
    CapabilityDegraded,
    CapabilityRecovered,
    ClientRegistered,
    ClientRevised,
    ClientRevoked,
    ClockStepped,
    ConfigurationApplied,
    DeploymentRegistered,
    DeploymentRetired,
    DeploymentRevised,
    EnvelopeAccepted,
    EnvelopeMeasured,
    EnvelopeSuspected,
    Event,
    FailureRecorded,
    LabPaused,
    LabResumed,
    LeaseGranted,
    LeasePreempted,
    LeaseReleased,
    LeaseRenewed,
    LeaseRoomConfirmed,
    LedgerOpened,
    NodeCordoned,
    NodeDrainCompleted,
    NodeDrainStarted,
    NodeRegistered,
    NodeUncordoned,
    PlanDecided,
    PolicyRevised,
    Recorded,
    ReleaseCause,
    RequestCancelled,
    RequestCompleted,
    RequestFailed,
    RequestFellBack,
    RequestQueued,
    RequestReceived,
    RequestRetried,
    ResidencyMaterialized,
    ResidencyPolicyChanged,
    ResidentLoadStarted,
    ResidentProcessStarted,
    SchedulerStarted,
    SchedulerStopped,
    StreamKind,
    TelemetryMissed,
    TelemetrySampled,
    ThrashingDetected,
)
from .failures import SERVING_FAILURES, Failure
from .policy import Policy
from .state import Backoff, Node, QueuedRequest, State
from .units import CapabilityId, ClientId

_V = TypeVar("_V")

#: Raised whenever the fold or what it holds changes: a snapshot of another schema is discarded (ledger.md).
WORLD_SCHEMA: Final = "gpuledger.world/2"


#: The moving average of how long work takes follows a change within about so many requests.
WORK_AVERAGED_OVER: Final = 8


@dataclass(frozen=True, slots=True)
class ClientState:
    """What the operator bound a client to."""

    client_id: ClientId
    priority: str
    lab: bool
    capabilities: tuple[CapabilityId, ...] | None


@dataclass(frozen=True, slots=True)
class CapabilityState:
    """How a capability fares: `failures` in a row, and since when it is degraded, if it is (semantics.md 8)."""

    failures: int = 0
    degraded_at: int | None = None
    failure: Failure | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class World:
    """Every aggregate that lives, by id; `versions` are those of their streams.

    `queue_revision` moves with every event that can help a queued request: it is planned again when it has moved.
    """

    seq: int = 0
    at: int = 0
    ledger_id: str | None = None
    policy: Policy = field(default_factory=Policy)
    nodes: Mapping[str, NodeState] = field(default_factory=dict[str, NodeState])
    accelerators: Mapping[str, AcceleratorState] = field(default_factory=dict[str, AcceleratorState])
    deployments: Mapping[str, DeploymentState] = field(default_factory=dict[str, DeploymentState])
    clients: Mapping[str, ClientState] = field(default_factory=dict[str, ClientState])
    capabilities: Mapping[str, CapabilityState] = field(default_factory=dict[str, CapabilityState])
    requests: Mapping[str, RequestState] = field(default_factory=dict[str, RequestState])
    versions: Mapping[str, int] = field(default_factory=dict[str, int])
    queue_revision: int = 0
    #: When this run of the scheduler last asked for a capability to be loaded in its own name (`always_warm`).
    warmed_at: Mapping[str, int] = field(default_factory=dict[str, int])
    #: How long the work of a request took lately, per capability: for estimates, and for nothing that is decided.
    work_ms: Mapping[str, int] = field(default_factory=dict[str, int])

    def state(self, now: int) -> State:
        """The state document a decision is made on, at an instant."""
        live = [a for a in self.accelerators.values() if not a.retired]
        return State(
            now=now,
            policy=self.policy,
            nodes=tuple(self._node(node, live) for node in self.nodes.values()),
            deployments=tuple(
                deployments.planned(deployment, self._backoff(deployment_id))
                for deployment_id, deployment in self.deployments.items()
                if not deployment.retired or self._is_resident(deployment_id)
            ),
            residents=tuple(record.resident for a in live for record in a.residents.values()),
            leases=tuple(record.lease for a in live for record in a.leases.values()),
            queue=self.queue(),
            telemetry=tuple(a.sample for a in live if a.sample is not None),
        )

    def queue(self) -> tuple[QueuedRequest, ...]:
        """Who waits, in claim order (semantics.md 5)."""
        waiting = [q for request in self.requests.values() if (q := request.queued()) is not None]
        return tuple(sorted(waiting, key=lambda queued: queued.claim))

    def residents(self) -> Iterable[tuple[AcceleratorState, ResidentRecord]]:
        """Every resident with its accelerator, in order of ids: nothing may depend on how a dict was filled."""
        for _, accelerator in sorted(self.accelerators.items()):
            for _, record in sorted(accelerator.residents.items()):
                yield accelerator, record

    def leases(self) -> Iterable[tuple[AcceleratorState, LeaseRecord]]:
        """Every lease that has not ended, with its accelerator. One that has run out may be among them."""
        for _, accelerator in sorted(self.accelerators.items()):
            for _, record in sorted(accelerator.leases.items()):
                yield accelerator, record

    def find_resident(self, resident_id: str) -> tuple[AcceleratorState, ResidentRecord] | None:
        for accelerator in self.accelerators.values():
            record = accelerator.residents.get(resident_id)
            if record is not None:
                return accelerator, record
        return None

    def _node(self, node: NodeState, live: list[AcceleratorState]) -> Node:
        return Node(
            node_id=node.node_id,
            accelerators=tuple(a.accelerator for a in live if a.node_id == node.node_id),
            ready=node.running,
            production_eligible=node.production_eligible,
            cordoned=node.cordoned,
            draining=node.leaves,
            labels=node.labels,
            memory_bytes=node.memory_bytes,
            external_bytes=node.external_bytes,
        )

    def _backoff(self, deployment_id: str) -> tuple[Backoff, ...]:
        return tuple(
            Backoff(accelerator_id, until)
            for accelerator_id, accelerator in self.accelerators.items()
            if (until := accelerator.backoff.get(deployment_id)) is not None and not accelerator.retired
        )

    def _is_resident(self, deployment_id: str) -> bool:
        return any(record.resident.deployment_id == deployment_id for _, record in self.residents())


def fold(world: World, events: Iterable[Recorded]) -> World:
    """Apply events in order."""
    for event in events:
        world = evolve(world, event)
    return world


def evolve(world: World, event: Recorded) -> World:
    """The world after one event of the ledger."""
    moved = _apply(world, event.stream, event.data)
    helped = _helps_queue(world, moved, event.data)
    return replace(
        moved,
        seq=event.seq,
        at=event.at,
        versions=_versions(moved, event),
        queue_revision=world.queue_revision + (1 if helped else 0),
    )


def _apply(world: World, stream: str, data: Event) -> World:
    match data:
        case LedgerOpened():
            return replace(world, ledger_id=data.ledger_id)
        case SchedulerStarted():
            return replace(_apply_to_node(world, data), warmed_at={})
        case (
            SchedulerStopped()
            | NodeRegistered()
            | ConfigurationApplied()
            | NodeCordoned()
            | NodeUncordoned()
            | NodeDrainStarted()
            | NodeDrainCompleted()
            | ClockStepped()
        ):
            return _apply_to_node(world, data)
        case PolicyRevised():
            return replace(world, policy=data.policy)
        case LabPaused() | LabResumed():
            return replace(world, policy=replace(world.policy, lab_paused=isinstance(data, LabPaused)))
        case AcceleratorRegistered():
            return _put_accelerator(world, _register_accelerator(world, data))
        case TelemetrySampled():
            return _sampled(world, data)
        case TelemetryMissed():
            return _missed(world, data)
        case (
            DeploymentRegistered()
            | DeploymentRevised()
            | DeploymentRetired()
            | ResidencyPolicyChanged()
            | ArtifactVerified()
            | ArtifactCorrupt()
            | EnvelopeSuspected()
            | EnvelopeAccepted()
            | EnvelopeMeasured()
        ):
            return _apply_to_deployment(world, stream, data)
        case ClientRegistered() | ClientRevised():
            client = ClientState(data.client_id, data.priority, data.lab, data.capabilities)
            return replace(world, clients={**world.clients, data.client_id: client})
        case ClientRevoked():
            return replace(world, clients=without(world.clients, data.client_id))
        case RequestReceived() | PlanDecided() | RequestQueued() | RequestRetried() | RequestFellBack():
            return _apply_to_request(world, data)
        case RequestCompleted():
            return _succeeded(replace(world, requests=without(world.requests, data.request_id)), world, data)
        case RequestFailed() | RequestCancelled():
            return replace(world, requests=without(world.requests, data.request_id))
        case FailureRecorded() | CapabilityDegraded() | CapabilityRecovered():
            return _apply_to_capability(world, data)
        case _:
            return _apply_to_accelerator(world, stream, data)


def _apply_to_node(world: World, data: nodes.NodeEvent) -> World:
    node = nodes.evolve(world.nodes.get(data.node_id) or NodeState(data.node_id), data)
    world = replace(world, nodes={**world.nodes, data.node_id: node})
    return _unseen(world, data.node_id) if isinstance(data, SchedulerStarted) else world


def _unseen(world: World, node_id: str) -> World:
    """A scheduler that starts has seen nothing yet: not how much there is now, nor what others took meanwhile."""
    changed = {
        key: accelerators.forget_sample(state) if state.node_id == node_id else state
        for key, state in world.accelerators.items()
    }
    return replace(world, accelerators=changed)


def _apply_to_deployment(world: World, stream: str, data: deployments.DeploymentEvent) -> World:
    deployment_id = stream.partition(":")[2]
    known = world.deployments.get(deployment_id)
    if known is None and isinstance(data, DeploymentRegistered):
        known = deployments.register(data)
    if known is None:
        return world
    return replace(world, deployments={**world.deployments, deployment_id: deployments.evolve(known, data)})


def _apply_to_capability(world: World, data: FailureRecorded | CapabilityDegraded | CapabilityRecovered) -> World:
    known = world.capabilities.get(data.capability, CapabilityState())
    match data:
        case FailureRecorded():
            if data.failure not in SERVING_FAILURES:
                return world
            state = replace(known, failures=known.failures + 1, failure=data.failure, detail=data.detail)
        case CapabilityDegraded():
            state = replace(known, degraded_at=data.degraded_at)
        case CapabilityRecovered():
            return replace(world, capabilities=without(world.capabilities, data.capability))
        case _:
            assert_never(data)
    return replace(world, capabilities={**world.capabilities, data.capability: state})


def _succeeded(world: World, before: World, data: RequestCompleted) -> World:
    """A capability that answers has failed no more in a row; while it is degraded, CapabilityRecovered says so."""
    request = before.requests.get(data.request_id)
    if request is None:
        return world
    capability = request.question.capability
    if request.operation != "warm":
        lately_ms = world.work_ms.get(capability, data.served_ms)
        averaged_ms = lately_ms + (data.served_ms - lately_ms) // WORK_AVERAGED_OVER
        world = replace(world, work_ms={**world.work_ms, capability: averaged_ms})
    known = world.capabilities.get(capability)
    if known is None or known.degraded_at is not None:
        return world
    return replace(world, capabilities=without(world.capabilities, capability))


def _apply_to_request(world: World, data: requests.RequestEvent) -> World:
    known = world.requests.get(data.request_id)
    if known is None and isinstance(data, RequestReceived):
        known = requests.receive(data)
    if known is None:
        return world
    if isinstance(data, RequestReceived) and data.operation == "warm":
        world = replace(world, warmed_at={**world.warmed_at, data.capability: data.requested_at})
    return _put_request(world, requests.evolve(known, data))


def _register_accelerator(world: World, data: AcceleratorRegistered) -> AcceleratorState:
    known = world.accelerators.get(data.accelerator_id)
    return accelerators.register(data) if known is None else accelerators.evolve(known, data)


def _apply_to_accelerator(world: World, stream: str, data: accelerators.AcceleratorEvent) -> World:
    known = world.accelerators.get(stream.partition(":")[2])
    if known is None:
        return world
    world = _put_accelerator(world, accelerators.evolve(known, data))
    match data:
        case LeaseGranted():
            return _request_granted(world, data)
        case LeaseReleased(lease_id=lease_id, cause=ReleaseCause.NO_ROOM | ReleaseCause.NOT_RECLAIMED):
            return _with_request_of(world, lease_id, requests.ungranted)
        case LeasePreempted(lease_id=lease_id, requeued=True):
            return _with_request_of(world, lease_id, lambda request: requests.preempted(request, data.preempted_at))
        case _:
            return world


def _request_granted(world: World, data: LeaseGranted) -> World:
    request = world.requests.get(data.request_id)
    if request is None:
        return world
    return _put_request(
        world,
        requests.granted(request, data.lease_id, data.accelerator_id, data.resident_id, data.granted_at),
    )


def _with_request_of(world: World, lease_id: str, change: Callable[[RequestState], RequestState]) -> World:
    for request in world.requests.values():
        if request.lease_id == lease_id:
            return _put_request(world, change(request))
    return world


def _sampled(world: World, data: TelemetrySampled) -> World:
    changed = dict(world.accelerators)
    for sampled in data.accelerators:
        known = changed.get(sampled.accelerator_id)
        if known is not None:
            changed[sampled.accelerator_id] = accelerators.observe(known, sampled, data.observed_at, data.received_at)
    nodes = dict(world.nodes)
    if data.node_id in nodes:
        nodes[data.node_id] = replace(
            nodes[data.node_id], memory_bytes=data.memory_bytes, external_bytes=data.external_bytes
        )
    return replace(world, accelerators=changed, nodes=nodes)


def _missed(world: World, data: TelemetryMissed) -> World:
    changed = dict(world.accelerators)
    for accelerator_id in data.accelerator_ids:
        known = changed.get(accelerator_id)
        if known is not None:
            changed[accelerator_id] = accelerators.miss(known, data.code)
    return replace(world, accelerators=changed)


def _put_accelerator(world: World, state: AcceleratorState) -> World:
    return replace(world, accelerators={**world.accelerators, state.accelerator.accelerator_id: state})


def _put_request(world: World, state: RequestState) -> World:
    return replace(world, requests={**world.requests, state.question.request_id: state})


def _versions(world: World, event: Recorded) -> Mapping[str, int]:
    """Versions of the streams that can still be written: a request that has ended has none, so the state is bounded."""
    kind, _, subject = event.stream.partition(":")
    if kind == StreamKind.REQUEST and subject not in world.requests:
        return without(world.versions, event.stream)
    return {**world.versions, event.stream: event.version}


def _helps_queue(before: World, after: World, data: Event) -> bool:
    """Whether what happened can help somebody who waits (semantics.md 6.5: planned again whenever anything changes)."""
    match data:
        case TelemetrySampled():
            return any(
                _figures(before, s.accelerator_id) != _figures(after, s.accelerator_id) for s in data.accelerators
            )
        case (
            RequestReceived()
            | PlanDecided()
            | LeaseGranted()
            | LeaseRenewed()
            | LeaseRoomConfirmed()
            | ResidentLoadStarted()
        ):
            return False
        case ResidentProcessStarted() | ResidencyMaterialized() | FailureRecorded() | LedgerOpened():
            return False
        case CapabilityDegraded() | CapabilityRecovered() | ThrashingDetected() | ConfigurationApplied():
            return False
        case ClockStepped():
            return False
        case ClientRegistered() | ClientRevised() | ClientRevoked():
            return False
        case _:
            return True


def _figures(world: World, accelerator_id: str) -> tuple[object, ...]:
    """What of an accelerator a plan depends on, but for the instants of its sample."""
    state = world.accelerators.get(accelerator_id)
    if state is None or state.sample is None:
        return ()
    residents = tuple((r.resident.attributed_bytes, r.resident.running_requests) for r in state.residents.values())
    return (state.sample.used_bytes, state.sample.pressure, residents)


def without(mapping: Mapping[str, _V], key: str) -> Mapping[str, _V]:
    """The mapping less one key."""
    if key not in mapping:
        return mapping
    return {other: value for other, value in mapping.items() if other != key}
