"""What an operator may do, each thing one event: policy, LAB, residency, nodes, unloading, clearing (architecture.md).

An operation that would change nothing records nothing; one that cannot be done has a problem, for whoever asks to show.
"""

from __future__ import annotations

from typing import assert_never

from .aggregates.accelerator import AcceleratorState, ResidentRecord
from .document_rules import broken_policy_rules
from .draft import Draft
from .events import (
    AcceleratorHealthChanged,
    EnvelopeAccepted,
    EvictionCause,
    LabPaused,
    LabResumed,
    NodeCordoned,
    NodeDrainCompleted,
    NodeDrainStarted,
    NodeUncordoned,
    PolicyRevised,
    ResidencyPolicyChanged,
    StreamKind,
    stream_name,
)
from .evictions import begin_eviction
from .leases import active_on
from .messages import (
    AcceptEnvelope,
    ClearAccelerator,
    CordonNode,
    DrainNode,
    Operation,
    PauseLab,
    ResumeLab,
    RevisePolicy,
    SetResidency,
    UncordonNode,
    UnloadIdle,
)
from .state import Health, ResidencyPolicy, ResidentState
from .world import World


def problem_of(world: World, operation: Operation) -> str | None:
    """Why it cannot be done, or None. Names the thing that is missing, and what there is."""
    match operation:
        case RevisePolicy(policy=policy):
            broken = list(broken_policy_rules(policy, "policy"))
            return None if not broken else "; ".join(f"{one.where}: {one.message}" for one in broken)
        case PauseLab() | ResumeLab():
            return None
        case SetResidency():
            return _unknown_deployment(world, operation.deployment_id) or _always_warm_problem(world, operation)
        case CordonNode(node_id=node_id) | UncordonNode(node_id=node_id) | DrainNode(node_id=node_id):
            return None if node_id in world.nodes else f"no node {node_id}: there are {', '.join(sorted(world.nodes))}"
        case UnloadIdle(deployment_id=deployment_id):
            return None if deployment_id is None else _unknown_deployment(world, deployment_id)
        case ClearAccelerator():
            return _nothing_to_clear(world, operation.accelerator_id)
        case AcceptEnvelope(deployment_id=deployment_id):
            return _unknown_deployment(world, deployment_id) or _nothing_to_accept(world, deployment_id)
        case _:
            assert_never(operation)


def apply_operation(draft: Draft, operation: Operation) -> None:
    """Record what it changes. Nothing when it cannot be done: the state may have moved since it was asked for."""
    if problem_of(draft.world, operation) is not None:
        return
    match operation:
        case RevisePolicy(by=by, policy=policy):
            if draft.world.policy != policy:
                draft.emit(stream_name(StreamKind.POLICY), PolicyRevised(policy, "operator", by))
        case PauseLab(by=by):
            if not draft.world.policy.lab_paused:
                draft.emit(stream_name(StreamKind.POLICY), LabPaused(by))
        case ResumeLab(by=by):
            if draft.world.policy.lab_paused:
                draft.emit(stream_name(StreamKind.POLICY), LabResumed(by))
        case SetResidency():
            _set_residency(draft, operation)
        case CordonNode() | UncordonNode() | DrainNode():
            _change_node(draft, operation)
        case UnloadIdle():
            _unload_idle(draft, operation)
        case ClearAccelerator(by=by, accelerator_id=accelerator_id):
            changed = AcceleratorHealthChanged(accelerator_id, Health.HEALTHY, "cleared", 0, by)
            draft.on_accelerator(accelerator_id, changed)
        case AcceptEnvelope(by=by, deployment_id=deployment_id):
            config_hash = draft.world.deployments[deployment_id].spec.config_hash
            accepted = EnvelopeAccepted(deployment_id, config_hash, by)
            draft.emit(stream_name(StreamKind.DEPLOYMENT, deployment_id), accepted)
        case _:
            assert_never(operation)


def finish_node_drains(draft: Draft) -> None:
    """Say so when nothing is left on a node that an operator drains."""
    for node_id, node in sorted(draft.world.nodes.items()):
        if not node.draining or node.drained:
            continue
        here = [state for state in draft.world.accelerators.values() if state.node_id == node_id]
        if not any(state.residents or state.leases for state in here):
            draft.emit(stream_name(StreamKind.NODE, node_id), NodeDrainCompleted(node_id))


# ---- each of them -----------------------------------------------------------------------------------------------


def _set_residency(draft: Draft, operation: SetResidency) -> None:
    deployment_id = operation.deployment_id
    if draft.world.deployments[deployment_id].spec.residency != operation.residency:
        changed = ResidencyPolicyChanged(deployment_id, operation.residency, "operator", operation.by)
        draft.emit(stream_name(StreamKind.DEPLOYMENT, deployment_id), changed)


def _change_node(draft: Draft, operation: CordonNode | UncordonNode | DrainNode) -> None:
    node_id, by = operation.node_id, operation.by
    node, stream = draft.world.nodes[node_id], stream_name(StreamKind.NODE, node_id)
    match operation:
        case CordonNode():
            if not node.cordoned:
                draft.emit(stream, NodeCordoned(node_id, by))
        case UncordonNode():
            if node.cordoned or node.draining:
                draft.emit(stream, NodeUncordoned(node_id, by))
        case DrainNode():
            if not node.draining:
                draft.emit(stream, NodeDrainStarted(node_id, "operator", by))


def _unload_idle(draft: Draft, operation: UnloadIdle) -> None:
    for state, record in tuple(draft.world.residents()):
        deployment_id = record.resident.deployment_id
        wanted = operation.deployment_id == deployment_id
        if operation.deployment_id is None:
            # What is always warm would be loaded again at once: whoever means it names it, or sets its residency.
            wanted = draft.world.deployments[deployment_id].spec.residency.policy is not ResidencyPolicy.ALWAYS_WARM
        if wanted and is_idle(state, record, draft.now):
            accelerator_id, resident_id = state.accelerator.accelerator_id, record.resident.resident_id
            begin_eviction(draft, accelerator_id, resident_id, EvictionCause.OPERATOR, by=operation.by)


def is_idle(state: AcceleratorState, record: ResidentRecord, now: int) -> bool:
    """Whether nothing uses a resident: no lease, no request that its runtime reports, nothing that goes on with it."""
    resident = record.resident
    settled = resident.state in (ResidentState.READY, ResidentState.SLEEPING) and record.eviction is None
    return settled and resident.running_requests == 0 and not active_on(state, resident.resident_id, now)


# ---- problems ---------------------------------------------------------------------------------------------------


def _unknown_deployment(world: World, deployment_id: str) -> str | None:
    known = sorted(key for key, one in world.deployments.items() if not one.retired)
    return None if deployment_id in known else f"no deployment {deployment_id}: there are {', '.join(known) or 'none'}"


def _always_warm_problem(world: World, operation: SetResidency) -> str | None:
    """What is always warm is loaded by asking for its capability, so no other may answer in its place."""
    if operation.residency.policy is not ResidencyPolicy.ALWAYS_WARM:
        return None
    spec = world.deployments[operation.deployment_id].spec
    if spec.fallback_rank != 0:
        return "always_warm is for deployments of rank 0: only these are asked for"
    others = [
        key
        for key, one in sorted(world.deployments.items())
        if key != operation.deployment_id
        and not one.retired
        and (one.spec.capability, one.spec.fallback_rank) == (spec.capability, 0)
    ]
    return f"always_warm must be the only deployment of {spec.capability} at its rank" if others else None


def _nothing_to_clear(world: World, accelerator_id: str) -> str | None:
    state = world.accelerators.get(accelerator_id)
    if state is None or state.retired:
        known = sorted(key for key, one in world.accelerators.items() if not one.retired)
        return f"no accelerator {accelerator_id}: there are {', '.join(known) or 'none'}"
    if state.fault is None:
        return f"{accelerator_id} has no fault to clear: its health is {state.accelerator.health.value}"
    return None


def _nothing_to_accept(world: World, deployment_id: str) -> str | None:
    deployment = world.deployments[deployment_id]
    suspect = [
        one
        for one in deployment.measured
        if one.envelope.suspect and one.envelope.config_hash == deployment.spec.config_hash
    ]
    return None if suspect else f"no envelope of {deployment_id} as it is configured now is suspect"
