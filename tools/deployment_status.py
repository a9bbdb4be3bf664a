"""What is declared of deployments, what they were measured to take, and how their capabilities fare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from gpuledger.domain.aggregates.accelerator import AcceleratorState
from gpuledger.domain.aggregates.deployment import DeploymentState
from gpuledger.domain.envelopes import with_margin
from gpuledger.domain.policy import Policy
from gpuledger.domain.reasons import Reason
from gpuledger.domain.state import Deployment, Sleep
from gpuledger.domain.units import format_instant
from gpuledger.domain.world import CapabilityState, World

Document: TypeAlias = dict[str, Any]


def deployment_document(
    deployment: DeploymentState,
    planned: Deployment,
    accelerators: Sequence[AcceleratorState],
    policy: Policy,
    now: int,
) -> Document:
    """A deployment as it is declared now, operators' changes among it, and as the planner sees it (`planned`)."""
    spec, suspicion = deployment.spec, deployment.suspicion
    measured = _measured(deployment, accelerators, policy)
    return {
        "deployment_id": spec.deployment_id,
        "capability": spec.capability,
        "kind": spec.kind.value,
        "runtime": spec.runtime,
        "config_hash": spec.config_hash,
        "priority": spec.priority.value,
        "concurrency": spec.concurrency,
        "queue_limit": spec.queue_limit,
        "fallback_rank": spec.fallback_rank,
        "interruptible": spec.interruptible,
        "residency": {"policy": spec.residency.policy.value, "ttl_seconds": spec.residency.ttl_seconds},
        "load_ms": planned.load_ms,
        "unload_ms": planned.unload_ms,
        "sleep": None if planned.sleep is None else _sleep(planned.sleep),
        "measured": measured,
        "problem": None if measured else Reason.NO_MEASURED_ENVELOPE.value,
        "suspicion": None
        if suspicion is None or suspicion.config_hash != spec.config_hash
        else {
            "cause": suspicion.cause,
            "accelerator_id": suspicion.accelerator_id,
            "resident_id": suspicion.resident_id,
            "gpu_class": suspicion.gpu_class,
            "observed_bytes": suspicion.observed_bytes,
            "peak_bytes": suspicion.peak_bytes,
        },
        "artifact": {"sha256": deployment.artifact_sha256, "corrupt": deployment.corrupt},
        "backoff": [
            {"accelerator_id": backoff.accelerator_id, "until": format_instant(backoff.until)}
            for backoff in sorted(planned.backoff, key=lambda one: one.accelerator_id)
            if backoff.until > now
        ],
    }


def _measured(deployment: DeploymentState, accelerators: Sequence[AcceleratorState], policy: Policy) -> list[Document]:
    """What its present configuration was measured to take on each class of accelerator that is here."""
    found: dict[str, Document] = {}
    for state in accelerators:
        accelerator = state.accelerator
        measured = deployment.measured_on(accelerator.gpu_class)
        if accelerator.kind is deployment.spec.kind and measured is not None:
            envelope = measured.envelope
            found[accelerator.gpu_class] = {
                "gpu_class": accelerator.gpu_class,
                "idle_bytes": envelope.idle_bytes,
                "peak_bytes": envelope.peak_bytes,
                "requirement_bytes": with_margin(policy, envelope.peak_bytes),
                "measured_at": format_instant(envelope.measured_at),
                "suspect": envelope.suspect,
            }
    return [measured for _, measured in sorted(found.items())]


def _sleep(sleep: Sleep) -> Document:
    return {"asleep_bytes": sleep.asleep_bytes, "sleep_ms": sleep.sleep_ms, "wake_ms": sleep.wake_ms}


def capability_documents(world: World) -> list[Document]:
    """Every capability that a deployment is declared for, and those that failed last (semantics.md 8)."""
    declared = {one.spec.capability for one in world.deployments.values() if not one.retired}
    return [
        _capability(name, world.capabilities.get(name, CapabilityState()), world.work_ms.get(name))
        for name in sorted(declared | world.capabilities.keys())
    ]


def _capability(name: str, state: CapabilityState, work_ms: int | None) -> Document:
    return {
        "capability": name,
        "degraded_since": None if state.degraded_at is None else format_instant(state.degraded_at),
        "failures_in_a_row": state.failures,
        "last_failure": None if state.failure is None else state.failure.value,
        "last_detail": state.detail or None,
        "work_ms": work_ms,
    }


def doubt_of(deployment: DeploymentState, gpu_class: str) -> str | None:
    """Why its envelope on a class of accelerator does not count; None where there is none, or it does."""
    measured = deployment.measured_on(gpu_class)
    if measured is None:
        return None
    if deployment.corrupt is not None:
        return "its model file is not the one that was registered"
    if not measured.envelope.suspect:
        return None
    why = deployment.suspicion
    if why is None or (why.config_hash, why.gpu_class) != (deployment.spec.config_hash, gpu_class):
        return "a runtime did not keep to it"
    return "a runtime ran out of memory with it" if why.cause == "gpu_oom" else "a runtime held more than it says"
