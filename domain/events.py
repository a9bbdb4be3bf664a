"""The vocabulary of the ledger: a closed list of event types, past tense (ledger.md, Streams and their events).

Every event is a frozen value. `register` gives it its stream; the codec (`adapters/ledger/codec.py`) reads and
writes the values by these annotations and refuses every type that is not here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias, TypeVar

from .candidates import Start
from .failures import Failure, Owner
from .policy import Policy, Pressure, Priority
from .reasons import Reason, Verdict
from .state import (
    DOCUMENT,
    Attribution,
    Envelope,
    Health,
    Kind,
    Residency,
    Sleep,
    WaitingFor,
)
from .units import (
    AcceleratorId,
    BasisPoints,
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
    Sha256Hex,
)

Source: TypeAlias = Literal["configuration", "operator", "device"]
"""Who caused a change of what is declared (ledger.md, Configuration and ledger)."""


class StreamKind(StrEnum):
    """The prefix of a stream's name."""

    LEDGER = "ledger"
    POLICY = "policy"
    NODE = "node"
    ACCELERATOR = "accelerator"
    TELEMETRY = "telemetry"
    DEPLOYMENT = "deployment"
    CLIENT = "client"
    REQUEST = "request"
    CAPABILITY = "capability"


@dataclass(frozen=True, slots=True)
class EventType:
    """One entry of the closed list."""

    name: str
    stream: StreamKind
    schema: int
    data: type[Any]


_TYPES: dict[str, EventType] = {}
_T = TypeVar("_T")


def register(stream: StreamKind, schema: int = 1) -> Callable[[type[_T]], type[_T]]:
    """Enter a frozen dataclass in the closed list."""

    def enter(data: type[_T]) -> type[_T]:
        _TYPES[data.__name__] = EventType(data.__name__, stream, schema, data)
        return data

    return enter


#: Name of the type -> entry.
EVENT_TYPES: Final[Mapping[str, EventType]] = MappingProxyType(_TYPES)


def stream_name(kind: StreamKind, identifier: str | None = None) -> str:
    """`accelerator:GPU-0`; the streams `ledger` and `policy` are alone and carry no id."""
    return kind.value if identifier is None else f"{kind.value}:{identifier}"


# ---- ledger and policy ------------------------------------------------------------------------------------------


@register(StreamKind.LEDGER)
@dataclass(frozen=True, slots=True)
class LedgerOpened:
    """The first event of a ledger."""

    __pydantic_config__ = DOCUMENT

    ledger_id: Identifier
    product_version: str
    planner_version: str


@register(StreamKind.LEDGER)
@dataclass(frozen=True, slots=True)
class SchedulerStarted:
    """A scheduler took the ledger over. What an earlier run left is ended by the events that follow."""

    __pydantic_config__ = DOCUMENT

    node_id: NodeId
    product_version: str
    planner_version: str
    pid: Count


@register(StreamKind.LEDGER)
@dataclass(frozen=True, slots=True)
class SchedulerStopped:
    """A scheduler drained, stopped its runtimes and left: residency and leases are zero."""

    __pydantic_config__ = DOCUMENT

    node_id: NodeId


@register(StreamKind.POLICY)
@dataclass(frozen=True, slots=True)
class PolicyRevised:
    """A whole policy, from the next decision on. `by`: the operator, where one did it."""

    __pydantic_config__ = DOCUMENT

    policy: Policy
    source: Source
    by: Identifier | None = None


@register(StreamKind.POLICY)
@dataclass(frozen=True, slots=True)
class LabPaused:
    """No LAB request is admitted any more; what runs may end."""

    __pydantic_config__ = DOCUMENT

    by: Identifier


@register(StreamKind.POLICY)
@dataclass(frozen=True, slots=True)
class LabResumed:
    """LAB requests are admitted again."""

    __pydantic_config__ = DOCUMENT

    by: Identifier


# ---- node, accelerator ------------------------------------------------------------------------------------------


@register(StreamKind.NODE)
@dataclass(frozen=True, slots=True)
class NodeRegistered:
    """A node joined, or joined again with other facts about itself. What the operator set stands (semantics.md 9)."""

    __pydantic_config__ = DOCUMENT

    node_id: NodeId
    production_eligible: bool
    labels: Mapping[str, str]
    source: Source


@register(StreamKind.NODE)
@dataclass(frozen=True, slots=True)
class ConfigurationApplied:
    """The configuration file of a node, item by item, as the SHA-256 of each (ledger.md, Configuration and ledger).

    At a start only items whose hash differs from the one applied last become events; what an operator changed at run
    time stands otherwise.
    """

    __pydantic_config__ = DOCUMENT

    node_id: NodeId
    items: Mapping[str, Sha256Hex]


@register(StreamKind.NODE)
@dataclass(frozen=True, slots=True)
class NodeCordoned:
    """No new work on the node; what is there stays and is served."""

    __pydantic_config__ = DOCUMENT

    node_id: NodeId
    by: Identifier


@register(StreamKind.NODE)
@dataclass(frozen=True, slots=True)
class NodeUncordoned:
    """The node takes work again: ends a cordon, and a drain that an operator began."""

    __pydantic_config__ = DOCUMENT

    node_id: NodeId
    by: Identifier


@register(StreamKind.NODE)
@dataclass(frozen=True, slots=True)
class NodeDrainStarted:
    """No new work on the node, and what is idle is unloaded.

    A drain for a shutdown ends with the next SchedulerStarted, that of an operator with NodeUncordoned.
    """

    __pydantic_config__ = DOCUMENT

    node_id: NodeId
    cause: Literal["shutdown", "operator"]
    by: Identifier | None = None


@register(StreamKind.NODE)
@dataclass(frozen=True, slots=True)
class NodeDrainCompleted:
    """Nothing is resident on a draining node, and no lease is left there."""

    __pydantic_config__ = DOCUMENT

    node_id: NodeId


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class AcceleratorRegistered:
    """A memory domain was seen for the first time, or again after it was retired."""

    __pydantic_config__ = DOCUMENT

    accelerator_id: AcceleratorId
    node_id: NodeId
    index: Count
    kind: Kind
    gpu_class: Identifier
    total_bytes: PositiveBytes
    device_name: str
    driver_version: str


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class AcceleratorRevised:
    """What the device says of itself changed and stayed changed (semantics.md 1)."""

    __pydantic_config__ = DOCUMENT

    accelerator_id: AcceleratorId
    index: Count
    gpu_class: Identifier
    total_bytes: PositiveBytes
    device_name: str
    driver_version: str


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class AcceleratorRetired:
    """The configuration or the device no longer has it."""

    __pydantic_config__ = DOCUMENT

    accelerator_id: AcceleratorId


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class AcceleratorHealthChanged:
    """No work goes to an accelerator that is not HEALTHY (semantics.md 6.2).

    A fault of the device itself (errors of its memory, a fatal Xid) stands until an operator clears it (`by`). `mark`
    grows with each further fault of the same cause: a clear counts for faults up to its mark.
    """

    __pydantic_config__ = DOCUMENT

    accelerator_id: AcceleratorId
    health: Health
    cause: str
    mark: Count = 0
    by: Identifier | None = None


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class PressureChanged:
    """In a stream of the accelerator, so that a decision made under the old level does not commit."""

    __pydantic_config__ = DOCUMENT

    accelerator_id: AcceleratorId
    level: Pressure
    previous: Pressure
    pressure_bp: BasisPoints


# ---- leases -----------------------------------------------------------------------------------------------------


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """A lease, and with start `cold` the resident it is granted on: LOADING, 0 bytes (semantics.md 2).

    `awaits` are the residents whose evictions this reservation waits for; no work starts before they are finished.
    """

    __pydantic_config__ = DOCUMENT

    lease_id: LeaseId
    request_id: RequestId
    deployment_id: DeploymentId
    accelerator_id: AcceleratorId
    resident_id: ResidentId
    priority: Priority
    start: Start
    reserved_bytes: Bytes
    materialized_bytes: Bytes
    needed_bytes: Bytes
    granted_at: Instant
    expires_at: Instant
    preemptions: Count
    start_ms: Milliseconds
    loaded_at: Instant
    available_at: Instant | None
    awaits: tuple[ResidentId, ...]
    #: Its runtime starts and stops alone on an accelerator: it would bill others' memory as its own (runtimes.md).
    starts_alone: bool = False


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    """Its holder is still there."""

    __pydantic_config__ = DOCUMENT

    lease_id: LeaseId
    expires_at: Instant


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class ResidencyMaterialized:
    """The device shows more of a reservation: what moves from reserved to observed is counted once (semantics.md 7)."""

    __pydantic_config__ = DOCUMENT

    resident_id: ResidentId
    materialized_bytes: Bytes


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class LeaseRoomConfirmed:
    """A fresh sample showed room for a warm grant that needs some: work may start (semantics.md 7)."""

    __pydantic_config__ = DOCUMENT

    lease_id: LeaseId
    resident_id: ResidentId
    needed_bytes: Bytes
    schedulable_bytes: Bytes


class ReleaseCause(StrEnum):
    """Why a lease ended before it expired."""

    COMPLETED = "completed"
    CLIENT_GONE = "client_gone"
    FAILED = "failed"
    NO_ROOM = "no_room"
    NOT_RECLAIMED = "not_reclaimed"
    SCHEDULER_RESTARTED = "scheduler_restarted"
    SHUTDOWN = "shutdown"


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class LeaseReleased:
    """`used`: work ran under it, so `last_used_at` of its resident moves; a null `protected_until` moves nothing."""

    __pydantic_config__ = DOCUMENT

    lease_id: LeaseId
    resident_id: ResidentId
    released_at: Instant
    cause: ReleaseCause
    used: bool
    protected_until: Instant | None


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class LeaseExpired:
    """LEASE_TIMEOUT: its holder was not heard of for as long as a lease lives."""

    __pydantic_config__ = DOCUMENT

    lease_id: LeaseId
    resident_id: ResidentId
    expired_at: Instant


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class LeasePreempted:
    """Its request goes back to its old place (`requeued`), unless it is over already (semantics.md 6.4, rule 7).

    One whose answer had begun cannot be begun again: RequestFailed with PREEMPTED follows.
    """

    __pydantic_config__ = DOCUMENT

    lease_id: LeaseId
    resident_id: ResidentId
    request_id: RequestId
    preempted_at: Instant
    by_request_id: RequestId
    requeued: bool


# ---- residents --------------------------------------------------------------------------------------------------


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class ResidentLoadStarted:
    """A fresh sample showed room; the process may be started (semantics.md 7)."""

    __pydantic_config__ = DOCUMENT

    resident_id: ResidentId
    loaded_at: Instant
    used_bytes: Bytes


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class ResidentProcessStarted:
    """The process of a resident, held before its first instruction until this is durable.

    (pid, start time) in one boot is how a later run knows it for ours (semantics.md 7).
    """

    __pydantic_config__ = DOCUMENT

    resident_id: ResidentId
    pid: Count
    start_ticks: Count
    boot_id: Identifier


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class ResidentReady:
    """It answered its functional check."""

    __pydantic_config__ = DOCUMENT

    resident_id: ResidentId
    ready_at: Instant
    load_ms: Milliseconds


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class ResidentSlept:
    """It gave its memory back without losing its process: two agreeing samples show what is left."""

    __pydantic_config__ = DOCUMENT

    resident_id: ResidentId
    slept_at: Instant
    freed_bytes: Bytes
    left_bytes: Bytes


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class ResidentWoken:
    """It is awake and answered its functional check."""

    __pydantic_config__ = DOCUMENT

    resident_id: ResidentId
    woken_at: Instant
    wake_ms: Milliseconds


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class ResidentDrainStarted:
    """No new work; what runs may end (an expired lease, semantics.md 7)."""

    __pydantic_config__ = DOCUMENT

    resident_id: ResidentId
    started_at: Instant
    cause: str


class EvictionCause(StrEnum):
    """Why a resident is unloaded."""

    PLAN = "plan"
    TTL = "ttl"
    ON_DEMAND = "on_demand"
    FAILED = "failed"
    DRAINED = "drained"
    NO_ROOM = "no_room"
    ABANDONED = "abandoned"
    SHUTDOWN = "shutdown"
    SCHEDULER_RESTARTED = "scheduler_restarted"
    OPERATOR = "operator"
    NODE_DRAINED = "node_drained"
    ACCELERATOR_RETIRED = "accelerator_retired"
    SLEEP_FAILED = "sleep_failed"


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class EvictionStarted:
    """A resident is leaving or going to sleep; what it holds stays attributed until the device shows it free.

    `left_bytes`: a sleep is finished when the device shows no more than this. `by`: the deployment that it makes room
    for, or the operator.
    """

    __pydantic_config__ = DOCUMENT

    resident_id: ResidentId
    deployment_id: DeploymentId
    action: Literal["unload", "sleep"]
    cause: EvictionCause
    started_at: Instant
    attributed_bytes: Bytes
    used_bytes: Bytes | None
    by_lease_id: LeaseId | None
    left_bytes: Bytes = 0
    by: Identifier | None = None


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class ThrashingDetected:
    """One deployment was evicted for the same other one again and again within a short time."""

    __pydantic_config__ = DOCUMENT

    accelerator_id: AcceleratorId
    evictor: DeploymentId
    victim: DeploymentId
    evictions: Count
    window_seconds: Count
    detected_at: Instant


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class ProfilingStarted:
    """An envelope is being measured here with nothing else going on: whoever asks meanwhile waits for its end."""

    __pydantic_config__ = DOCUMENT

    accelerator_id: AcceleratorId
    deployment_id: DeploymentId
    started_at: Instant


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class ProfilingEnded:
    """The measurement is over: it gave an envelope, made way for a request, or failed."""

    __pydantic_config__ = DOCUMENT

    accelerator_id: AcceleratorId
    deployment_id: DeploymentId
    ended_at: Instant
    outcome: Literal["measured", "preempted", "failed"]
    detail: str


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class ResidentEvicted:
    """The process is gone and two agreeing samples show the memory back (semantics.md 7)."""

    __pydantic_config__ = DOCUMENT

    resident_id: ResidentId
    deployment_id: DeploymentId
    finished_at: Instant
    freed_bytes: Bytes


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class MemoryNotReclaimed:
    """GPU_MEMORY_NOT_RECLAIMED: what stays is booked as external (semantics.md 7)."""

    __pydantic_config__ = DOCUMENT

    resident_id: ResidentId
    deployment_id: DeploymentId
    finished_at: Instant
    residual_bytes: Bytes


@register(StreamKind.ACCELERATOR)
@dataclass(frozen=True, slots=True)
class ResidentFailed:
    """A failure ends the leases on it. `backoff_until` is null when the failure was not one of loading."""

    __pydantic_config__ = DOCUMENT

    resident_id: ResidentId
    deployment_id: DeploymentId
    failure: Failure
    detail: str
    failed_at: Instant
    attempt: Count
    backoff_until: Instant | None


# ---- telemetry --------------------------------------------------------------------------------------------------


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

    `blind` says why memory cannot be attributed by process here (`PID_NAMESPACE`, ...): figures are ESTIMATED then.
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


# ---- deployments, clients ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeploymentSpec:
    """What is declared of a deployment; what it takes is measured (EnvelopeMeasured)."""

    __pydantic_config__ = DOCUMENT

    deployment_id: DeploymentId
    capability: CapabilityId
    kind: Kind
    runtime: Identifier
    config_hash: Identifier
    context_length: Count
    batch_size: Count
    concurrency: Count
    load_ms: Milliseconds
    unload_ms: Milliseconds
    fallback_rank: Count
    interruptible: bool
    max_replicas: Count
    min_memory_bytes: Bytes | None
    node_selector: Mapping[str, str]
    priority: Priority
    production_eligible: bool
    queue_limit: Count
    residency: Residency
    sleep: Sleep | None
    #: Its runtime starts and stops alone on an accelerator (runtimes.md, vLLM).
    starts_alone: bool = False


@register(StreamKind.DEPLOYMENT)
@dataclass(frozen=True, slots=True)
class DeploymentRegistered:
    """A deployment was declared."""

    __pydantic_config__ = DOCUMENT

    spec: DeploymentSpec
    source: Source


@register(StreamKind.DEPLOYMENT)
@dataclass(frozen=True, slots=True)
class DeploymentRevised:
    """What is declared of it changed; envelopes of its old configuration count no more."""

    __pydantic_config__ = DOCUMENT

    spec: DeploymentSpec
    source: Source


@register(StreamKind.DEPLOYMENT)
@dataclass(frozen=True, slots=True)
class DeploymentRetired:
    """It is declared no more."""

    __pydantic_config__ = DOCUMENT

    deployment_id: DeploymentId
    source: Source


@register(StreamKind.DEPLOYMENT)
@dataclass(frozen=True, slots=True)
class ResidencyPolicyChanged:
    """How long a model stays, from now on; another one in the file counts again when the file's changes."""

    __pydantic_config__ = DOCUMENT

    deployment_id: DeploymentId
    residency: Residency
    source: Source
    by: Identifier | None


@register(StreamKind.DEPLOYMENT)
@dataclass(frozen=True, slots=True)
class ArtifactVerified:
    """The model file has the SHA-256 that the deployment's configuration was registered with."""

    __pydantic_config__ = DOCUMENT

    deployment_id: DeploymentId
    artifact_sha256: Sha256Hex


@register(StreamKind.DEPLOYMENT)
@dataclass(frozen=True, slots=True)
class ArtifactCorrupt:
    """ARTIFACT_CORRUPT: the model file is not what was registered. No further load until ArtifactVerified."""

    __pydantic_config__ = DOCUMENT

    deployment_id: DeploymentId
    detail: str
    evidence_sha256: Sha256Hex


@register(StreamKind.DEPLOYMENT)
@dataclass(frozen=True, slots=True)
class EnvelopeSuspected:
    """An envelope that cannot be trusted (semantics.md 8): no further load until it is measured again or accepted.

    `exceeded`: a resident was seen to hold `observed_bytes`, more than the envelope with its margin.
    """

    __pydantic_config__ = DOCUMENT

    deployment_id: DeploymentId
    accelerator_id: AcceleratorId
    resident_id: ResidentId
    config_hash: Identifier
    gpu_class: Identifier
    cause: Literal["gpu_oom", "exceeded"]
    observed_bytes: Bytes
    peak_bytes: Bytes


@register(StreamKind.DEPLOYMENT)
@dataclass(frozen=True, slots=True)
class EnvelopeAccepted:
    """An operator answers for an envelope that was suspect."""

    __pydantic_config__ = DOCUMENT

    deployment_id: DeploymentId
    config_hash: Identifier
    by: Identifier


@register(StreamKind.DEPLOYMENT)
@dataclass(frozen=True, slots=True)
class EnvelopeMeasured:
    """An envelope with its raw figures (runtimes.md, Measuring an envelope).

    `peak_bytes` of the envelope is the greater of what the processes and what the device showed, over loading and
    being fully driven. `sleep`: what a runtime that can sleep was measured to keep, and how long that takes.
    """

    __pydantic_config__ = DOCUMENT

    deployment_id: DeploymentId
    accelerator_id: AcceleratorId
    envelope: Envelope
    load_ms: Milliseconds
    unload_ms: Milliseconds
    load_peak_bytes: Bytes
    busy_peak_bytes: Bytes
    device_idle_bytes: Bytes
    device_peak_bytes: Bytes
    residual_bytes: Bytes
    release_ms: Milliseconds
    artifact_sha256: Sha256Hex | None
    runtime_version: str
    device_name: str
    driver_version: str
    sleep: Sleep | None = None


@register(StreamKind.CLIENT)
@dataclass(frozen=True, slots=True)
class ClientRegistered:
    """What the operator bound a client to (semantics.md 5). Its token is not here, nor is the hash of it."""

    __pydantic_config__ = DOCUMENT

    client_id: ClientId
    priority: Priority
    lab: bool
    capabilities: tuple[CapabilityId, ...] | None
    source: Source


@register(StreamKind.CLIENT)
@dataclass(frozen=True, slots=True)
class ClientRevised:
    """What a client is bound to changed."""

    __pydantic_config__ = DOCUMENT

    client_id: ClientId
    priority: Priority
    lab: bool
    capabilities: tuple[CapabilityId, ...] | None
    source: Source


@register(StreamKind.CLIENT)
@dataclass(frozen=True, slots=True)
class ClientRevoked:
    """A client is declared no more."""

    __pydantic_config__ = DOCUMENT

    client_id: ClientId
    source: Source


# ---- requests ---------------------------------------------------------------------------------------------------


@register(StreamKind.REQUEST)
@dataclass(frozen=True, slots=True)
class RequestReceived:
    """The question of a client in shapes and sizes; what it said is never here.

    `content_mac` (keyed, and only when the client named the request itself) tells a second submission of the same
    command from another one under the same id.
    """

    __pydantic_config__ = DOCUMENT

    request_id: RequestId
    client_id: ClientId
    capability: CapabilityId
    priority: Priority
    lab: bool
    requested_at: Instant
    deadline: Instant | None
    queue_until: Instant
    operation: Literal["embeddings", "chat", "completion", "transcription", "rerank", "warm"]
    body_bytes: Bytes
    content_mac: Sha256Hex | None


@register(StreamKind.REQUEST)
@dataclass(frozen=True, slots=True)
class PlanDecided:
    """A plan: recomputable from the state at `as_of`, the instant, the named policy and planner (ledger.md, Replay).

    `plan` is the plan document `gpuledger.plan/1`; an admission keeps the evidence of its chosen candidate only.
    """

    __pydantic_config__ = DOCUMENT

    request_id: RequestId
    plan_id: Identifier
    as_of: Count
    decided_at: Instant
    fallback_rank: Count
    planner_version: str
    policy_revision: Identifier
    verdict: Verdict
    reasons: tuple[Reason, ...]
    fingerprint: Sha256Hex
    plan: Mapping[str, Any]


@register(StreamKind.REQUEST)
@dataclass(frozen=True, slots=True)
class RequestQueued:
    """It waits at one place (semantics.md 6.5); again when that place changes."""

    __pydantic_config__ = DOCUMENT

    request_id: RequestId
    enqueued_at: Instant
    waiting_for: WaitingFor


@register(StreamKind.REQUEST)
@dataclass(frozen=True, slots=True)
class RequestRetried:
    """Its lease was lost to a failure before anything of an answer was sent: it is planned again (semantics.md 8).

    `after_resident_id`: not before this one is gone and the device has shown its memory back.
    """

    __pydantic_config__ = DOCUMENT

    request_id: RequestId
    retried_at: Instant
    failure: Failure
    detail: str
    attempt: Count
    limit: Count
    after_resident_id: ResidentId | None


@register(StreamKind.REQUEST)
@dataclass(frozen=True, slots=True)
class RequestFellBack:
    """The contract's fallback: from now on it is planned for the next rank (semantics.md 5). One cause is set."""

    __pydantic_config__ = DOCUMENT

    request_id: RequestId
    fell_back_at: Instant
    fallback_rank: Count
    reason: Reason | None
    failure: Failure | None
    detail: str


@register(StreamKind.REQUEST)
@dataclass(frozen=True, slots=True)
class RequestCompleted:
    """The runtime answered with a status below 500. Sizes and counts, never content."""

    __pydantic_config__ = DOCUMENT

    request_id: RequestId
    completed_at: Instant
    status: Count
    queued_ms: Milliseconds
    served_ms: Milliseconds
    response_bytes: Bytes
    prompt_tokens: Count | None
    completion_tokens: Count | None


@register(StreamKind.REQUEST)
@dataclass(frozen=True, slots=True)
class RequestFailed:
    """Refused (`reason`, with its plan in the event before) or failed under way (`failure`); exactly one is set."""

    __pydantic_config__ = DOCUMENT

    request_id: RequestId
    failed_at: Instant
    reason: Reason | None
    failure: Failure | None
    detail: str


@register(StreamKind.REQUEST)
@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The client went away, or the scheduler did."""

    __pydantic_config__ = DOCUMENT

    request_id: RequestId
    cancelled_at: Instant
    cause: Literal["client_gone", "scheduler_restarted", "shutdown"]


# ---- capabilities -----------------------------------------------------------------------------------------------


@register(StreamKind.CAPABILITY)
@dataclass(frozen=True, slots=True)
class FailureRecorded:
    """One failure with its class, owner, subjects, attempt, limit and the hash of its evidence (semantics.md 8)."""

    __pydantic_config__ = DOCUMENT

    capability: CapabilityId
    failure: Failure
    owner: Owner
    deployment_id: DeploymentId | None
    accelerator_id: AcceleratorId | None
    resident_id: ResidentId | None
    request_id: RequestId | None
    recorded_at: Instant
    attempt: Count
    limit: Count
    evidence_sha256: Sha256Hex
    detail: str


@register(StreamKind.CAPABILITY)
@dataclass(frozen=True, slots=True)
class CapabilityDegraded:
    """So many failures in a row (semantics.md 8): visible until the capability next answers a request."""

    __pydantic_config__ = DOCUMENT

    capability: CapabilityId
    degraded_at: Instant
    failures: Count
    failure: Failure
    detail: str


@register(StreamKind.CAPABILITY)
@dataclass(frozen=True, slots=True)
class CapabilityRecovered:
    """It answered a request again."""

    __pydantic_config__ = DOCUMENT

    capability: CapabilityId
    recovered_at: Instant


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
