"""One deployment: what is declared of it, and what it was measured to take (semantics.md 3)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, TypeAlias, assert_never

from ..events import DeploymentRegistered, DeploymentRetired, DeploymentRevised, DeploymentSpec, EnvelopeMeasured
from ..state import Backoff, Deployment, Envelope

DeploymentEvent: TypeAlias = DeploymentRegistered | DeploymentRevised | DeploymentRetired | EnvelopeMeasured

#: Of the envelopes of one deployment only the newest few are kept in the state; the ledger keeps all. Enough for every
#: class of accelerator in one node and the configurations an operator goes back and forth between.
MAX_ENVELOPES: Final = 16


@dataclass(frozen=True, slots=True)
class MeasuredEnvelope:
    """An envelope and the durations that were measured with it."""

    envelope: Envelope
    load_ms: int
    unload_ms: int


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """What is declared, and what was measured, newest first."""

    spec: DeploymentSpec
    measured: tuple[MeasuredEnvelope, ...] = ()
    retired: bool = False

    def measured_on(self, gpu_class: str) -> MeasuredEnvelope | None:
        """The newest measurement of its present configuration on a class of accelerator."""
        for measured in self.measured:
            envelope = measured.envelope
            if envelope.config_hash == self.spec.config_hash and envelope.gpu_class == gpu_class:
                return measured
        return None


def register(event: DeploymentRegistered) -> DeploymentState:
    """A deployment as it was first declared."""
    return DeploymentState(spec=event.spec)


def evolve(state: DeploymentState, event: DeploymentEvent) -> DeploymentState:
    """The state after one event of its stream."""
    match event:
        case DeploymentRegistered() | DeploymentRevised():
            return replace(state, spec=event.spec, retired=False)
        case DeploymentRetired():
            return replace(state, retired=True)
        case EnvelopeMeasured():
            newest = MeasuredEnvelope(event.envelope, event.load_ms, event.unload_ms)
            return replace(state, measured=(newest, *state.measured)[:MAX_ENVELOPES])
        case _:
            assert_never(event)


def planned(state: DeploymentState, backoff: tuple[Backoff, ...]) -> Deployment:
    """The deployment as the planner sees it: durations are the measured ones where there are any."""
    spec = state.spec
    measured = next((m for m in state.measured if m.envelope.config_hash == spec.config_hash), None)
    return Deployment(
        deployment_id=spec.deployment_id,
        capability=spec.capability,
        kind=spec.kind,
        config_hash=spec.config_hash,
        envelopes=tuple(m.envelope for m in state.measured),
        context_length=spec.context_length,
        batch_size=spec.batch_size,
        load_ms=spec.load_ms if measured is None else measured.load_ms,
        unload_ms=spec.unload_ms if measured is None else measured.unload_ms,
        concurrency=spec.concurrency,
        fallback_rank=spec.fallback_rank,
        interruptible=spec.interruptible,
        max_replicas=spec.max_replicas,
        min_memory_bytes=spec.min_memory_bytes,
        node_selector=spec.node_selector,
        priority=spec.priority,
        production_eligible=spec.production_eligible,
        queue_limit=spec.queue_limit,
        residency=spec.residency,
        sleep=spec.sleep,
        backoff=backoff,
    )
