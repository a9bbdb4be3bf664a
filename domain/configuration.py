"""What is declared, and how a start makes it true in the ledger (ledger.md, Configuration and ledger)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from hashlib import sha256

from .aggregates.deployment import DeploymentState
from .draft import Draft
from .events import (
    AcceleratorRetired,
    ArtifactVerified,
    ClientRegistered,
    ClientRevised,
    ClientRevoked,
    ConfigurationApplied,
    DeploymentRegistered,
    DeploymentRetired,
    DeploymentRevised,
    DeploymentSpec,
    EvictionCause,
    LedgerOpened,
    NewEvent,
    NodeRegistered,
    PolicyRevised,
    ReleaseCause,
    ResidencyPolicyChanged,
    SchedulerStarted,
    StreamKind,
    stream_name,
)
from .evictions import begin_eviction
from .leases import cancel_request
from .planner import PLANNER_VERSION
from .policy import Policy, Priority
from .state import Residency
from .units import CapabilityId, ClientId
from .world import World


@dataclass(frozen=True, slots=True)
class ClientSpec:
    """A client as the operator bound it; None for `capabilities` means all of them."""

    client_id: ClientId
    priority: Priority
    lab: bool
    capabilities: tuple[CapabilityId, ...] | None


@dataclass(frozen=True, slots=True)
class Configuration:
    """What the file declares. `accelerator_ids` are those in use; None where only the devices can tell.

    `artifacts`: the SHA-256 that the model file of a deployment has now, by deployment, where it has one.
    """

    ledger_id: str
    node_id: str
    production_eligible: bool
    labels: Mapping[str, str]
    policy: Policy
    deployments: tuple[DeploymentSpec, ...]
    clients: tuple[ClientSpec, ...]
    accelerator_ids: frozenset[str] | None
    product_version: str
    pid: int
    artifacts: Mapping[str, str] = field(default_factory=dict[str, str])

    def items(self) -> Mapping[str, str]:
        """The hash of each thing that is declared and that an operator may change for itself."""
        declared: dict[str, object] = {
            "policy": replace(self.policy, lab_paused=False),
            "lab_paused": self.policy.lab_paused,
            "node": (self.production_eligible, self.labels),
        }
        for spec in self.deployments:
            declared[f"deployment:{spec.deployment_id}"] = replace(spec, residency=Residency())
            declared[f"residency:{spec.deployment_id}"] = spec.residency
        declared.update({f"client:{client.client_id}": client for client in self.clients})
        return {name: _hash(value) for name, value in declared.items()}


def _hash(value: object) -> str:
    tree = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    return sha256(json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def end_earlier_run(draft: Draft, node_id: str) -> None:
    """Whatever an earlier run left of work on this node is over: its requests have nobody, its processes are ended.

    Evictions begin anew: the time between the runs is no evidence that a process does not end.
    """
    for request_id in sorted(draft.world.requests):
        cancel_request(draft, request_id, "scheduler_restarted")
    for state, record in tuple(draft.world.residents()):
        if state.node_id == node_id:
            begin_eviction(
                draft,
                state.accelerator.accelerator_id,
                record.resident.resident_id,
                EvictionCause.SCHEDULER_RESTARTED,
                leases_end=ReleaseCause.SCHEDULER_RESTARTED,
            )


def difference(world: World, configuration: Configuration, now: int) -> tuple[NewEvent, ...]:
    """What a start with this configuration would record of it, without recording anything."""
    draft = Draft(world, now)
    _apply_declared(draft, configuration)
    batch = draft.batch()
    return () if batch is None else batch.events


def apply_configuration(draft: Draft, configuration: Configuration) -> None:
    """Take the ledger over, and emit what changed in what is declared (ledger.md, Configuration and ledger)."""
    if draft.world.ledger_id is None:
        opened = LedgerOpened(configuration.ledger_id, configuration.product_version, PLANNER_VERSION)
        draft.emit(stream_name(StreamKind.LEDGER), opened)
    draft.emit(
        stream_name(StreamKind.LEDGER),
        SchedulerStarted(configuration.node_id, configuration.product_version, PLANNER_VERSION, configuration.pid),
    )
    _apply_declared(draft, configuration)


def _apply_declared(draft: Draft, configuration: Configuration) -> None:
    """Only what changed in the file since it was applied last; what an operator changed meanwhile stands otherwise."""
    node_id, items = configuration.node_id, configuration.items()
    node = draft.world.nodes.get(node_id)
    applied: Mapping[str, str] = {} if node is None else node.applied
    changed = frozenset(name for name, digest in items.items() if applied.get(name) != digest)
    _apply_policy(draft, configuration, changed)
    _apply_node(draft, configuration, changed)
    _apply_deployments(draft, configuration, changed)
    _apply_artifacts(draft, configuration)
    _apply_clients(draft, configuration)
    if items != applied:
        draft.emit(stream_name(StreamKind.NODE, node_id), ConfigurationApplied(node_id, items))


def _apply_policy(draft: Draft, configuration: Configuration, changed: Set[str]) -> None:
    stream, present = stream_name(StreamKind.POLICY), draft.world.policy
    lab_paused = configuration.policy.lab_paused if "lab_paused" in changed else present.lab_paused
    declared = replace(configuration.policy if "policy" in changed else present, lab_paused=lab_paused)
    if stream not in draft.world.versions or declared != present:
        draft.emit(stream, PolicyRevised(declared, "configuration"))


def _apply_node(draft: Draft, configuration: Configuration, changed: Set[str]) -> None:
    node = draft.world.nodes.get(configuration.node_id)
    stream = stream_name(StreamKind.NODE, configuration.node_id)
    declared = (configuration.production_eligible, configuration.labels)
    known = node is not None and stream in draft.world.versions
    differs = node is None or (node.production_eligible, node.labels) != declared
    if not known or ("node" in changed and differs):
        draft.emit(stream, NodeRegistered(configuration.node_id, *declared, "configuration"))
    if configuration.accelerator_ids is None:
        return
    for accelerator_id, state in sorted(draft.world.accelerators.items()):
        here = state.node_id == configuration.node_id and not state.retired
        if here and accelerator_id not in configuration.accelerator_ids:
            draft.on_accelerator(accelerator_id, AcceleratorRetired(accelerator_id))


def _apply_deployments(draft: Draft, configuration: Configuration, changed: Set[str]) -> None:
    declared = {spec.deployment_id: spec for spec in configuration.deployments}
    for deployment_id, spec in sorted(declared.items()):
        known = draft.world.deployments.get(deployment_id)
        event = _deployment_event(known, spec, changed)
        if event is not None:
            draft.emit(stream_name(StreamKind.DEPLOYMENT, deployment_id), event)
    for deployment_id, known in sorted(draft.world.deployments.items()):
        if deployment_id not in declared and not known.retired:
            stream = stream_name(StreamKind.DEPLOYMENT, deployment_id)
            draft.emit(stream, DeploymentRetired(deployment_id, "configuration"))


def _deployment_event(
    known: DeploymentState | None, spec: DeploymentSpec, changed: Set[str]
) -> DeploymentRegistered | DeploymentRevised | ResidencyPolicyChanged | None:
    if known is None:
        return DeploymentRegistered(spec, "configuration")
    if known.retired:
        return DeploymentRevised(spec, "configuration")
    residency = spec.residency if f"residency:{spec.deployment_id}" in changed else known.spec.residency
    base = spec if f"deployment:{spec.deployment_id}" in changed else known.spec
    wanted = replace(base, residency=residency)
    if wanted == known.spec:
        return None
    if replace(wanted, residency=known.spec.residency) == known.spec:
        return ResidencyPolicyChanged(spec.deployment_id, residency, "configuration", None)
    return DeploymentRevised(wanted, "configuration")


def _apply_artifacts(draft: Draft, configuration: Configuration) -> None:
    """Each model file was hashed at this start: it is what it is registered as now."""
    for deployment_id, digest in sorted(configuration.artifacts.items()):
        known = draft.world.deployments[deployment_id]
        if known.artifact_sha256 != digest or known.corrupt is not None:
            verified = ArtifactVerified(deployment_id, digest)
            draft.emit(stream_name(StreamKind.DEPLOYMENT, deployment_id), verified)


def _apply_clients(draft: Draft, configuration: Configuration) -> None:
    declared = {client.client_id: client for client in configuration.clients}
    for client_id, client in sorted(declared.items()):
        stream = stream_name(StreamKind.CLIENT, client_id)
        known = draft.world.clients.get(client_id)
        facts = (client_id, client.priority, client.lab, client.capabilities)
        if known is None:
            draft.emit(stream, ClientRegistered(*facts, source="configuration"))
        elif (known.client_id, known.priority, known.lab, known.capabilities) != facts:
            draft.emit(stream, ClientRevised(*facts, source="configuration"))
    for client_id in sorted(draft.world.clients):
        if client_id not in declared:
            draft.emit(stream_name(StreamKind.CLIENT, client_id), ClientRevoked(client_id, "configuration"))
