"""What is declared, and how a start makes it true in the ledger (ledger.md, Configuration and ledger)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .draft import Draft
from .events import (
    AcceleratorRetired,
    ClientRegistered,
    ClientRevised,
    ClientRevoked,
    DeploymentRegistered,
    DeploymentRetired,
    DeploymentRevised,
    DeploymentSpec,
    EvictionCause,
    LedgerOpened,
    NodeRegistered,
    PolicyRevised,
    ReleaseCause,
    SchedulerStarted,
    StreamKind,
    stream_name,
)
from .leases import cancel_request
from .planner import PLANNER_VERSION
from .policy import Policy, Priority
from .residency import begin_eviction
from .units import CapabilityId, ClientId


@dataclass(frozen=True, slots=True)
class ClientSpec:
    """A client as the operator bound it; None for `capabilities` means all of them."""

    client_id: ClientId
    priority: Priority
    lab: bool
    capabilities: tuple[CapabilityId, ...] | None


@dataclass(frozen=True, slots=True)
class Configuration:
    """What the file declares. `accelerator_ids` are those in use; None where only the devices can tell."""

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


def end_earlier_run(draft: Draft, node_id: str) -> None:
    """Whatever an earlier run left of work on this node is over: its requests have nobody, its processes are ended."""
    for request_id in sorted(draft.world.requests):
        cancel_request(draft, request_id, "scheduler_restarted")
    for state, record in tuple(draft.world.residents()):
        if state.node_id == node_id and record.eviction is None:
            begin_eviction(
                draft,
                state.accelerator.accelerator_id,
                record.resident.resident_id,
                EvictionCause.SCHEDULER_RESTARTED,
                leases_end=ReleaseCause.SCHEDULER_RESTARTED,
            )


def apply_configuration(draft: Draft, configuration: Configuration) -> None:
    """Emit what changed in what is declared; nothing for what stands as it is."""
    if draft.world.ledger_id is None:
        opened = LedgerOpened(configuration.ledger_id, configuration.product_version, PLANNER_VERSION)
        draft.emit(stream_name(StreamKind.LEDGER), opened)
    draft.emit(
        stream_name(StreamKind.LEDGER),
        SchedulerStarted(configuration.node_id, configuration.product_version, PLANNER_VERSION, configuration.pid),
    )
    _apply_policy(draft, configuration)
    _apply_node(draft, configuration)
    _apply_deployments(draft, configuration)
    _apply_clients(draft, configuration)


def _apply_policy(draft: Draft, configuration: Configuration) -> None:
    never_set = stream_name(StreamKind.POLICY) not in draft.world.versions
    if never_set or draft.world.policy != configuration.policy:
        draft.emit(stream_name(StreamKind.POLICY), PolicyRevised(configuration.policy, "configuration"))


def _apply_node(draft: Draft, configuration: Configuration) -> None:
    node = draft.world.nodes.get(configuration.node_id)
    stream = stream_name(StreamKind.NODE, configuration.node_id)
    if (
        stream not in draft.world.versions
        or node is None
        or node.labels != configuration.labels
        or node.production_eligible != configuration.production_eligible
    ):
        draft.emit(
            stream,
            NodeRegistered(
                configuration.node_id, configuration.production_eligible, configuration.labels, "configuration"
            ),
        )
    if configuration.accelerator_ids is None:
        return
    for accelerator_id, state in sorted(draft.world.accelerators.items()):
        here = state.node_id == configuration.node_id and not state.retired
        if here and accelerator_id not in configuration.accelerator_ids:
            draft.on_accelerator(accelerator_id, AcceleratorRetired(accelerator_id))


def _apply_deployments(draft: Draft, configuration: Configuration) -> None:
    declared = {spec.deployment_id: spec for spec in configuration.deployments}
    for deployment_id, spec in sorted(declared.items()):
        stream = stream_name(StreamKind.DEPLOYMENT, deployment_id)
        known = draft.world.deployments.get(deployment_id)
        if known is None:
            draft.emit(stream, DeploymentRegistered(spec, "configuration"))
        elif known.spec != spec or known.retired:
            draft.emit(stream, DeploymentRevised(spec, "configuration"))
    for deployment_id, known in sorted(draft.world.deployments.items()):
        if deployment_id not in declared and not known.retired:
            stream = stream_name(StreamKind.DEPLOYMENT, deployment_id)
            draft.emit(stream, DeploymentRetired(deployment_id, "configuration"))


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
