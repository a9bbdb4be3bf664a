"""What each event about what is declared, and about devices, says, in words for people. `by` names an operator."""

from __future__ import annotations

from typing import TypeAlias, assert_never

from gpuledger.domain.events import (
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
    TelemetryMissed,
    TelemetrySampled,
)
from gpuledger.domain.explain import duration, size
from gpuledger.domain.state import Health

OfScheduler: TypeAlias = (
    LedgerOpened
    | SchedulerStarted
    | SchedulerStopped
    | PolicyRevised
    | LabPaused
    | LabResumed
    | ClientRegistered
    | ClientRevised
    | ClientRevoked
)
OfNode: TypeAlias = (
    NodeRegistered
    | ConfigurationApplied
    | ClockStepped
    | NodeCordoned
    | NodeUncordoned
    | NodeDrainStarted
    | NodeDrainCompleted
)
OfDevice: TypeAlias = (
    AcceleratorRegistered
    | AcceleratorRevised
    | AcceleratorRetired
    | AcceleratorHealthChanged
    | PressureChanged
    | TelemetrySampled
    | TelemetryMissed
)
OfDeployment: TypeAlias = (
    DeploymentRegistered
    | DeploymentRevised
    | DeploymentRetired
    | ResidencyPolicyChanged
    | ArtifactVerified
    | ArtifactCorrupt
    | EnvelopeSuspected
    | EnvelopeAccepted
    | EnvelopeMeasured
)


def by_whom(by: str | None) -> str:
    """` by NAME`, or nothing where no operator did it."""
    return "" if by is None else f" by {by}"


def told_of_scheduler(data: OfScheduler) -> str:
    """The ledger, the policy and clients."""
    match data:
        case LedgerOpened():
            return f"the ledger {data.ledger_id} was opened by gpuledger {data.product_version}"
        case SchedulerStarted():
            return f"a scheduler took the ledger over on {data.node_id}, as process {data.pid}"
        case SchedulerStopped():
            return f"the scheduler on {data.node_id} left in order"
        case PolicyRevised():
            return f"the policy {data.policy.revision} is in force, from the {data.source}{by_whom(data.by)}"
        case LabPaused():
            return f"LAB was paused by {data.by}"
        case LabResumed():
            return f"LAB was resumed by {data.by}"
        case ClientRegistered() | ClientRevised():
            lab = ", LAB" if data.lab else ""
            return f"the client {data.client_id} is bound to {data.priority}{lab}"
        case ClientRevoked():
            return f"the client {data.client_id} is declared no more"
        case _:
            assert_never(data)


def told_of_node(data: OfNode) -> str:
    """A node, and what operators said of it."""
    match data:
        case NodeRegistered():
            eligible = "" if data.production_eligible else ", not production-eligible"
            return f"the node {data.node_id} joined{eligible}"
        case ConfigurationApplied():
            return f"the configuration of {data.node_id} was applied, {len(data.items)} items of it"
        case NodeCordoned():
            return f"the node {data.node_id} was cordoned by {data.by}: nothing new is loaded there"
        case NodeUncordoned():
            return f"the node {data.node_id} was uncordoned by {data.by}: it takes work again"
        case NodeDrainStarted():
            why = f"by {data.by}" if data.by is not None else f"for {data.cause}"
            return f"the node {data.node_id} is drained {why}: no work begins there"
        case ClockStepped(skew_ms=0):
            return f"the clock of {data.node_id} and that of the ledger agree again"
        case ClockStepped():
            where = "ahead of" if data.skew_ms > 0 else "behind"
            return f"the clock of {data.node_id} is {abs(data.skew_ms)} ms {where} that of the ledger"
        case NodeDrainCompleted():
            return f"nothing is left on {data.node_id}"
        case _:
            assert_never(data)


def told_of_device(data: OfDevice) -> str:
    """An accelerator as it was seen."""
    match data:
        case AcceleratorRegistered() | AcceleratorRevised():
            return f"{data.accelerator_id} is {data.device_name} with {size(data.total_bytes)} ({data.gpu_class})"
        case AcceleratorRetired():
            return f"{data.accelerator_id} is no more"
        case AcceleratorHealthChanged(health=Health.HEALTHY):
            cleared = "" if data.by is None else f": its fault was cleared by {data.by}"
            return f"{data.accelerator_id} is HEALTHY again{cleared}"
        case AcceleratorHealthChanged():
            return f"{data.accelerator_id} is {data.health}: {data.cause}"
        case PressureChanged():
            percent = f"{data.pressure_bp // 100}.{data.pressure_bp % 100:02d} %"
            return f"pressure on {data.accelerator_id} is {data.level} ({percent}), it was {data.previous}"
        case TelemetrySampled():
            return f"{data.node_id} was read: {', '.join(one.accelerator_id for one in data.accelerators)}"
        case TelemetryMissed():
            return f"nothing is known of {', '.join(data.accelerator_ids)}: {data.code}"
        case _:
            assert_never(data)


def told_of_deployment(data: OfDeployment) -> str:
    """A deployment, its model file, and what it was measured to take."""
    match data:
        case DeploymentRegistered() | DeploymentRevised():
            how = "declared" if isinstance(data, DeploymentRegistered) else "declared otherwise"
            return f"{data.spec.deployment_id} was {how} in the {data.source}, for {data.spec.capability}"
        case DeploymentRetired():
            return f"{data.deployment_id} is declared no more"
        case ResidencyPolicyChanged():
            residency = f"{data.residency.policy} {data.residency.ttl_seconds} s"
            return f"{data.deployment_id} stays as {residency} from now on, from the {data.source}{by_whom(data.by)}"
        case ArtifactVerified():
            return f"the model file of {data.deployment_id} is the one that was registered"
        case ArtifactCorrupt():
            return f"the model file of {data.deployment_id} is not what was registered ({data.detail}): no further load"
        case EnvelopeSuspected(cause="exceeded"):
            held = f"{data.resident_id} holds {size(data.observed_bytes)}, measured were {size(data.peak_bytes)}"
            return f"{held}: the envelope of {data.deployment_id} on {data.gpu_class} is suspect, no further load"
        case EnvelopeSuspected():
            ran_out = f"{data.resident_id} ran out of memory with {size(data.peak_bytes)} measured"
            return f"{ran_out}: the envelope of {data.deployment_id} on {data.gpu_class} is suspect, no further load"
        case EnvelopeAccepted():
            return f"the suspect envelope of {data.deployment_id} was accepted by {data.by}"
        case EnvelopeMeasured():
            peak = f"{size(data.envelope.peak_bytes)} at most on {data.envelope.gpu_class}"
            return f"{data.deployment_id} was measured to take {peak}, loads in {duration(data.load_ms)}"
        case _:
            assert_never(data)
