"""Whether a candidate may serve at all, and whether its place is well (semantics.md 6.1 and 6.2).

All failing checks of a stage become reasons, in the order of the tables there. The third stage is `capacity.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .accounting import Accounting
from .candidates import Pair, Question, Refusal
from .envelopes import requirement_of
from .policy import Pressure
from .reasons import Reason
from .state import Accelerator, Attribution, Deployment, Health, Node, ResidencyPolicy, ResidentState
from .units import AcceleratorId, DeploymentId, format_instant
from .view import View

_ACTIVE = (ResidentState.LOADING, ResidentState.READY)


def pair_of(question: Question, deployment: Deployment, accelerator_id: AcceleratorId) -> Pair:
    """What is found at one candidate."""
    view = question.view
    node, accelerator = view.accelerators[accelerator_id]
    own = view.resident(accelerator_id, deployment.deployment_id)
    active = own is not None and own.state in _ACTIVE
    return Pair(
        question=question,
        deployment=deployment,
        node=node,
        accelerator=accelerator,
        accounting=question.accounts[accelerator_id],
        pressure=pressure_at(view, accelerator_id),
        own=own,
        own_leases=view.active_leases(accelerator_id, deployment.deployment_id),
        active=active,
        requirement_bytes=requirement_of(deployment, accelerator, active, view.policy),
    )


def pressure_at(view: View, accelerator_id: AcceleratorId) -> Pressure:
    """The level that the newest sample left; NORMAL without one (semantics.md 4)."""
    sample = view.samples.get(accelerator_id)
    return sample.pressure if sample is not None else Pressure.NORMAL


def serving_at(
    view: View, accounts: Mapping[AcceleratorId, Accounting], deployment_id: DeploymentId
) -> frozenset[AcceleratorId]:
    """The accelerators where a deployment has a replica that could take requests (6.1, *serving replica*)."""
    return frozenset(
        resident.accelerator_id
        for resident in view.residents_of.get(deployment_id, ())
        if resident.state in _ACTIVE
        and resident.accelerator_id in view.accelerators
        and _could_serve(view, accounts, *view.accelerators[resident.accelerator_id])
    )


def _could_serve(
    view: View, accounts: Mapping[AcceleratorId, Accounting], node: Node, accelerator: Accelerator
) -> bool:
    return (
        node.production_eligible
        and node.ready
        and not node.draining
        and accelerator.health is Health.HEALTHY
        and accounts[accelerator.accelerator_id].attribution is not Attribution.UNKNOWN
        and pressure_at(view, accelerator.accelerator_id) is not Pressure.CRITICAL
    )


def policy_stage(pair: Pair) -> tuple[Refusal, ...]:
    """6.1: every failing check, in order."""
    return tuple(_policy_checks(pair))


def _policy_checks(pair: Pair) -> Iterator[Refusal]:
    deployment, node, lab = pair.deployment, pair.node, pair.question.request.lab
    lab_only = deployment.residency.policy is ResidencyPolicy.LAB_ONLY
    if deployment.kind is not pair.accelerator.kind:
        kinds = {"deployment_kind": deployment.kind.value, "accelerator_kind": pair.accelerator.kind.value}
        yield Refusal(Reason.ACCELERATOR_KIND_MISMATCH, kinds)
    if not node.production_eligible:
        yield Refusal(Reason.NODE_NOT_PRODUCTION_ELIGIBLE, {"node_id": node.node_id})
    if not deployment.production_eligible and not lab:
        ids = {"deployment_id": deployment.deployment_id}
        yield Refusal(Reason.DEPLOYMENT_NOT_PRODUCTION_ELIGIBLE, ids)
    if lab_only and not lab:
        yield Refusal(Reason.LAB_ONLY, {"deployment_id": deployment.deployment_id})
    if pair.policy.lab_paused and (lab or lab_only):
        yield Refusal(Reason.LAB_PAUSED, {})
    if node.cordoned and not pair.active:
        yield Refusal(Reason.NODE_CORDONED, {"node_id": node.node_id})
    if node.draining:
        yield Refusal(Reason.NODE_DRAINING, {"node_id": node.node_id})
    yield from _label_check(pair)
    yield from _node_memory_check(pair)
    if pair.requirement_bytes is None:
        figures = {"config_hash": deployment.config_hash, "gpu_class": pair.accelerator.gpu_class}
        yield Refusal(Reason.NO_MEASURED_ENVELOPE, figures)
    if not pair.active and pair.serving_elsewhere >= deployment.max_replicas:
        replicas = {"serving": pair.serving_elsewhere, "max_replicas": deployment.max_replicas}
        yield Refusal(Reason.REPLICA_LIMIT, replicas)


def _label_check(pair: Pair) -> Iterator[Refusal]:
    labels = pair.node.labels
    wanted = pair.deployment.node_selector
    missing = sorted(key for key, value in wanted.items() if labels.get(key) != value)
    if missing:
        first = missing[0]
        yield Refusal(
            Reason.LABEL_MISMATCH,
            {"label": first, "wanted": wanted[first], "found": labels.get(first), "failing": len(missing)},
        )


def _node_memory_check(pair: Pair) -> Iterator[Refusal]:
    memory, needed = pair.node.memory_bytes, pair.deployment.min_memory_bytes
    if pair.active or memory is None or needed is None:
        return
    left = memory - (pair.node.external_bytes or 0)
    for deployment_id in _deployments_on(pair.view, pair.node) - {pair.deployment.deployment_id}:
        left -= pair.view.deployments[deployment_id].min_memory_bytes or 0
    if left < needed:
        figures = {"memory_bytes": memory, "left_bytes": max(0, left), "needed_bytes": needed}
        yield Refusal(Reason.NODE_MEMORY_INSUFFICIENT, figures)


def _deployments_on(view: View, node: Node) -> set[DeploymentId]:
    """Every deployment with a resident on the node that is not FAILED, once each."""
    return {
        resident.deployment_id
        for accelerator in node.accelerators
        for resident in view.residents_at.get(accelerator.accelerator_id, ())
        if resident.state is not ResidentState.FAILED
    }


def health_stage(pair: Pair) -> tuple[Refusal, ...]:
    """6.2: every failing check, in order."""
    return tuple(_health_checks(pair))


def _health_checks(pair: Pair) -> Iterator[Refusal]:
    accelerator = pair.accelerator
    if not pair.node.ready:
        yield Refusal(Reason.NODE_NOT_READY, {"node_id": pair.node.node_id})
    if accelerator.health is not Health.HEALTHY:
        yield Refusal(Reason.ACCELERATOR_UNHEALTHY, {"health": accelerator.health.value})
    if accelerator.allocated_to not in (None, pair.deployment.deployment_id):
        yield Refusal(Reason.ACCELERATOR_ALLOCATED, {"allocated_to": accelerator.allocated_to})
    if pair.accounting.attribution is Attribution.UNKNOWN:
        sample = pair.view.samples.get(accelerator.accelerator_id)
        figures = {
            "observed_at": format_instant(sample.observed_at) if sample is not None else None,
            "telemetry_max_age_seconds": pair.policy.telemetry_max_age_seconds,
        }
        yield Refusal(Reason.SCHEDULER_STATE_STALE, figures)
