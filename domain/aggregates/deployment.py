"""One deployment: what is declared of it, and what it was measured to take (semantics.md 3)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, TypeAlias, assert_never

from ..events import (
    ArtifactCorrupt,
    ArtifactVerified,
    DeploymentRegistered,
    DeploymentRetired,
    DeploymentRevised,
    DeploymentSpec,
    EnvelopeAccepted,
    EnvelopeMeasured,
    EnvelopeSuspected,
    ResidencyPolicyChanged,
)
from ..state import Backoff, Deployment, Envelope, Sleep

DeploymentEvent: TypeAlias = (
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

#: Of the envelopes of one deployment only the newest are kept in the state; the ledger keeps all. Enough for every
#: class of accelerator in one node, the configurations an operator goes back and forth between, and a measured grid.
MAX_ENVELOPES: Final = 128


@dataclass(frozen=True, slots=True)
class MeasuredEnvelope:
    """An envelope and the durations that were measured with it."""

    envelope: Envelope
    load_ms: int
    unload_ms: int
    sleep: Sleep | None = None


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """What is declared, and what was measured, newest first.

    `artifact_sha256`: what its model file was last verified to be; `corrupt` says why it is not that any more.
    `suspicion`: why the newest envelope that became suspect did. `accepted_bytes`: what an operator knew it to hold
    when it answered for it.
    """

    spec: DeploymentSpec
    measured: tuple[MeasuredEnvelope, ...] = ()
    retired: bool = False
    artifact_sha256: str | None = None
    corrupt: str | None = None
    suspicion: EnvelopeSuspected | None = None
    accepted_bytes: int = 0

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
        case ResidencyPolicyChanged():
            return replace(state, spec=replace(state.spec, residency=event.residency))
        case ArtifactVerified():
            return replace(state, artifact_sha256=event.artifact_sha256, corrupt=None)
        case ArtifactCorrupt():
            return replace(state, corrupt=event.detail)
        case EnvelopeSuspected():
            suspected = _with_suspicion(state, event.config_hash, event.gpu_class, suspect=True)
            return replace(suspected, suspicion=event)
        case EnvelopeAccepted():
            known_bytes = 0 if state.suspicion is None else state.suspicion.observed_bytes
            accepted = _with_suspicion(state, event.config_hash, None, suspect=False)
            return replace(accepted, suspicion=None, accepted_bytes=max(state.accepted_bytes, known_bytes))
        case DeploymentRetired():
            return replace(state, retired=True)
        case EnvelopeMeasured():
            newest = MeasuredEnvelope(event.envelope, event.load_ms, event.unload_ms, event.sleep)
            key = (event.envelope.config_hash, event.envelope.gpu_class)
            suspicion = state.suspicion
            if suspicion is not None and (suspicion.config_hash, suspicion.gpu_class) == key:
                suspicion = None
            # The one measured last is what counts: older ones of the same are history, and stay in the ledger.
            others = tuple(m for m in state.measured if (m.envelope.config_hash, m.envelope.gpu_class) != key)
            measured = (newest, *others)[:MAX_ENVELOPES]
            return replace(state, measured=measured, suspicion=suspicion, accepted_bytes=0)
        case _:
            assert_never(event)


def _with_suspicion(
    state: DeploymentState, config_hash: str, gpu_class: str | None, *, suspect: bool
) -> DeploymentState:
    """With the envelopes of one configuration, on one class or on all, marked so."""
    measured = tuple(
        replace(one, envelope=replace(one.envelope, suspect=suspect))
        if one.envelope.config_hash == config_hash and gpu_class in (None, one.envelope.gpu_class)
        else one
        for one in state.measured
    )
    return replace(state, measured=measured)


def planned(state: DeploymentState, backoff: tuple[Backoff, ...]) -> Deployment:
    """The deployment as the planner sees it: durations are the measured ones where there are any."""
    spec = state.spec
    measured = next((m for m in state.measured if m.envelope.config_hash == spec.config_hash), None)
    return Deployment(
        deployment_id=spec.deployment_id,
        capability=spec.capability,
        kind=spec.kind,
        config_hash=spec.config_hash,
        envelopes=tuple(_usable(state, m.envelope) for m in state.measured),
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
        sleep=spec.sleep if spec.sleep is None or measured is None or measured.sleep is None else measured.sleep,
        backoff=backoff,
    )


def _usable(state: DeploymentState, envelope: Envelope) -> Envelope:
    """What was measured says nothing of a model file that is another one now: no further load (semantics.md 8)."""
    return envelope if state.corrupt is None else replace(envelope, suspect=True)
