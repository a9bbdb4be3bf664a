"""Small states for tests of single rules: one card of 24 GiB, models of 4 GiB, everything at rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gpuledger.domain.planner import PlacementPlan, plan
from gpuledger.domain.policy import Policy, Priority
from gpuledger.domain.reasons import Reason
from gpuledger.domain.state import (
    Accelerator,
    Deployment,
    Envelope,
    Kind,
    Lease,
    Node,
    PlanRequest,
    QueuedRequest,
    Resident,
    ResidentState,
    Sample,
    State,
    WaitingFor,
)
from gpuledger.domain.units import GIB, parse_instant, seconds

NOW = parse_instant("2026-11-30T12:00:00.000000Z")
GPU = "GPU-0"


def ago(duration_seconds: int) -> int:
    return NOW - seconds(duration_seconds)


def card(name: str = GPU, *, total_bytes: int = 24 * GIB, **changes: Any) -> Accelerator:
    base = Accelerator(accelerator_id=name, index=0, kind=Kind.GPU, gpu_class="rtx", total_bytes=total_bytes)
    return replace(base, **changes)


def model(name: str, *, peak_bytes: int = 4 * GIB, **changes: Any) -> Deployment:
    """Serves the capability of its own name; needs a tenth more than its peak."""
    envelope = Envelope(
        config_hash=f"cfg-{name}",
        gpu_class="rtx",
        idle_bytes=peak_bytes,
        peak_bytes=peak_bytes,
        measured_at=ago(86_400),
        context_length=4096,
        batch_size=8,
        concurrency=1,
    )
    base = Deployment(
        deployment_id=name,
        capability=f"{name}@1",
        kind=Kind.GPU,
        config_hash=f"cfg-{name}",
        envelopes=(envelope,),
        context_length=4096,
        batch_size=8,
        load_ms=8_000,
        unload_ms=500,
    )
    return replace(base, **changes)


def resident(
    deployment: str,
    state: ResidentState = ResidentState.READY,
    *,
    accelerator_id: str = GPU,
    attributed_bytes: int = 4 * GIB,
    **changes: Any,
) -> Resident:
    """Idle, unprotected, and seen whole by the device."""
    base = Resident(
        resident_id=f"res-{deployment}",
        deployment_id=deployment,
        accelerator_id=accelerator_id,
        state=state,
        attributed_bytes=attributed_bytes,
        reserved_bytes=attributed_bytes,
        loaded_at=ago(3_600),
        last_used_at=ago(600),
        start_ms=8_000,
    )
    return replace(base, **changes)


def lease(deployment: str, *, name: str = "", accelerator_id: str = GPU, **changes: Any) -> Lease:
    base = Lease(
        lease_id=name or f"lease-{deployment}",
        request_id=f"running-{deployment}{name}",
        deployment_id=deployment,
        accelerator_id=accelerator_id,
        priority=Priority.INTERACTIVE,
        reserved_bytes=4 * GIB,
        materialized_bytes=4 * GIB,
        granted_at=ago(10),
        expires_at=NOW + seconds(50),
    )
    return replace(base, **changes)


def queued(
    name: str, deployment: str, reason: Reason, *resident_ids: str, needed_bytes: int = 4 * GIB, **changes: Any
) -> QueuedRequest:
    """One that has waited for 40 seconds."""
    place: dict[str, Any] = {key: changes.pop(key) for key in ("not_before",) if key in changes}
    base = QueuedRequest(
        request_id=name,
        capability=f"{deployment}@1",
        priority=Priority.INTERACTIVE,
        enqueued_at=ago(40),
        waiting_for=WaitingFor(GPU, deployment, reason, needed_bytes, resident_ids, **place),
    )
    return replace(base, **changes)


def state_of(
    deployments: Sequence[Deployment],
    residents: Sequence[Resident] = (),
    *,
    external_bytes: int = 0,
    cards: Sequence[Accelerator] = (card(),),
    policy: Policy | None = None,
    leases: Sequence[Lease] = (),
    queue: Sequence[QueuedRequest] = (),
    **node: Any,
) -> State:
    """One node; each card's sample, a second old, shows its residents and `external_bytes`."""
    samples = [
        Sample(
            accelerator_id=one.accelerator_id,
            used_bytes=external_bytes
            + sum(r.attributed_bytes for r in residents if r.accelerator_id == one.accelerator_id),
            observed_at=ago(1),
            received_at=ago(1),
        )
        for one in cards
    ]
    return State(
        now=NOW,
        policy=policy if policy is not None else Policy(),
        nodes=(Node(node_id="node-0", accelerators=tuple(cards), **node),),
        deployments=tuple(deployments),
        residents=tuple(residents),
        leases=tuple(leases),
        queue=tuple(queue),
        telemetry=tuple(samples),
    )


def ask(deployment: str, **changes: Any) -> PlanRequest:
    base = PlanRequest(
        request_id="req-1",
        client_id="client-1",
        capability=f"{deployment}@1",
        priority=Priority.INTERACTIVE,
        requested_at=NOW,
    )
    return replace(base, **changes)


def decide(state: State, deployment: str, **changes: Any) -> PlacementPlan:
    return plan(state, ask(deployment, **changes))


def said(plan: PlacementPlan) -> tuple[str, ...]:
    """Verdict and reasons, as one value to compare."""
    return (plan.verdict.value, *(reason.value for reason in plan.reasons))
