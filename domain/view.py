"""A state, indexed once for one decision.

Every lookup that sections 2 to 6 of semantics.md make is a dictionary access here, and every sequence has an
order of its own, so that nothing after this module can depend on the order of the input lists (6.6).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .policy import Policy
from .state import (
    Accelerator,
    Deployment,
    Lease,
    Node,
    QueuedRequest,
    Resident,
    ResidentState,
    Sample,
    State,
)
from .units import AcceleratorId, DeploymentId, ResidentId


@dataclass(frozen=True, slots=True)
class View:
    """What a decision looks up. `leases` holds active ones only (semantics.md 2)."""

    now: int
    policy: Policy
    accelerators: Mapping[AcceleratorId, tuple[Node, Accelerator]]
    deployments: Mapping[DeploymentId, Deployment]
    samples: Mapping[AcceleratorId, Sample]
    residents: Mapping[ResidentId, Resident]
    #: In order of `resident_id`.
    residents_at: Mapping[AcceleratorId, tuple[Resident, ...]]
    #: In order of `resident_id`.
    residents_of: Mapping[DeploymentId, tuple[Resident, ...]]
    #: In order of `lease_id`, by accelerator, then by deployment.
    leases: Mapping[AcceleratorId, Mapping[DeploymentId, tuple[Lease, ...]]]
    #: In claim order.
    queue: tuple[QueuedRequest, ...]

    def resident(self, accelerator_id: AcceleratorId, deployment_id: DeploymentId) -> Resident | None:
        """The resident of a deployment on an accelerator: there is at most one (semantics.md 2)."""
        for resident in self.residents_of.get(deployment_id, ()):
            if resident.accelerator_id == accelerator_id:
                return resident
        return None

    def active_leases(self, accelerator_id: AcceleratorId, deployment_id: DeploymentId) -> tuple[Lease, ...]:
        """The leases of a deployment on an accelerator that have not expired and whose resident has not FAILED."""
        leases = self.leases.get(accelerator_id)
        return leases.get(deployment_id, ()) if leases is not None else ()


def view_of(state: State) -> View:
    """Index a state: one pass over each of its lists."""
    residents = sorted(state.residents, key=_resident_id)
    return View(
        now=state.now,
        policy=state.policy,
        accelerators={
            accelerator.accelerator_id: (node, accelerator) for node in state.nodes for accelerator in node.accelerators
        },
        deployments={deployment.deployment_id: deployment for deployment in state.deployments},
        samples={sample.accelerator_id: sample for sample in state.telemetry},
        residents={resident.resident_id: resident for resident in residents},
        residents_at=_residents_at(residents),
        residents_of=_residents_of(residents),
        leases=_active_leases(state),
        queue=tuple(sorted(state.queue, key=_claim)),
    )


def _resident_id(resident: Resident) -> str:
    return resident.resident_id


def _lease_id(lease: Lease) -> str:
    return lease.lease_id


def _claim(queued: QueuedRequest) -> tuple[int, int, str]:
    return queued.claim


def _residents_at(residents: list[Resident]) -> dict[AcceleratorId, tuple[Resident, ...]]:
    found: dict[AcceleratorId, list[Resident]] = {}
    for resident in residents:
        found.setdefault(resident.accelerator_id, []).append(resident)
    return {accelerator_id: tuple(here) for accelerator_id, here in found.items()}


def _residents_of(residents: list[Resident]) -> dict[DeploymentId, tuple[Resident, ...]]:
    found: dict[DeploymentId, list[Resident]] = {}
    for resident in residents:
        found.setdefault(resident.deployment_id, []).append(resident)
    return {deployment_id: tuple(replicas) for deployment_id, replicas in found.items()}


def _active_leases(state: State) -> dict[AcceleratorId, dict[DeploymentId, tuple[Lease, ...]]]:
    """Section 2: an expired lease is not active, nor is one whose resident has FAILED."""
    failed = {
        (resident.accelerator_id, resident.deployment_id)
        for resident in state.residents
        if resident.state is ResidentState.FAILED
    }
    found: dict[AcceleratorId, dict[DeploymentId, tuple[Lease, ...]]] = {}
    for lease in sorted(state.leases, key=_lease_id):
        if lease.expires_at > state.now and (lease.accelerator_id, lease.deployment_id) not in failed:
            here = found.setdefault(lease.accelerator_id, {})
            here[lease.deployment_id] = (*here.get(lease.deployment_id, ()), lease)
    return found
