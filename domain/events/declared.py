"""What is declared and who changes it: the ledger itself, policy, nodes, deployments, clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..policy import Policy, Pressure, Priority
from ..state import DOCUMENT, Envelope, Health, Kind, Residency, Sleep
from ..units import (
    AcceleratorId,
    BasisPoints,
    Bytes,
    CapabilityId,
    ClientId,
    Count,
    DeploymentId,
    Identifier,
    Milliseconds,
    NodeId,
    PositiveBytes,
    ResidentId,
    Sha256Hex,
    SignedMilliseconds,
)
from .registry import Source, StreamKind, register

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
class ClockStepped:
    """The wall clock of a node and the ledger's came apart by more than the policy allows, or together again.

    `skew_ms`: how far the wall clock was ahead then. It is a warning: instants go on by a clock that nobody can set,
    which makes up for the difference slowly.
    """

    __pydantic_config__ = DOCUMENT

    node_id: NodeId
    skew_ms: SignedMilliseconds


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
