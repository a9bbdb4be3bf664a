"""alerts: what an operator should look at now, typed, with its subjects, its figures and since when.

`alerts_of(world, now)` is a function of the folded state, which does not tell of every kind since when. `Onsets` is the
fold that does. Whoever has none gets the same alerts, without those instants.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, TypeAlias

from gpuledger.domain.accounting import is_fresh
from gpuledger.domain.aggregates.accelerator import AcceleratorState
from gpuledger.domain.aggregates.deployment import DeploymentState
from gpuledger.domain.aggregates.node import NodeState
from gpuledger.domain.events import (
    AcceleratorHealthChanged,
    AcceleratorRetired,
    ArtifactCorrupt,
    DeploymentRegistered,
    DeploymentRevised,
    EnvelopeSuspected,
    LabPaused,
    LabResumed,
    NodeCordoned,
    NodeDrainStarted,
    PolicyRevised,
    PressureChanged,
    Recorded,
    TelemetryMissed,
)
from gpuledger.domain.policy import Policy, Pressure
from gpuledger.domain.state import Envelope, Health
from gpuledger.domain.units import seconds
from gpuledger.domain.world import World

Figures: TypeAlias = Mapping[str, str | int | bool | None]
#: The kind of an alert, then ids of its subjects.
Key: TypeAlias = tuple[str, ...]

#: The types that move `Onsets`.
TYPES: Final = frozenset(
    {
        "PressureChanged",
        "AcceleratorHealthChanged",
        "AcceleratorRetired",
        "TelemetryMissed",
        "EnvelopeSuspected",
        "ArtifactCorrupt",
        "DeploymentRegistered",
        "DeploymentRevised",
        "NodeCordoned",
        "NodeDrainStarted",
        "LabPaused",
        "LabResumed",
        "PolicyRevised",
    }
)


class AlertKind(StrEnum):
    """A closed list, in the order in which they are shown. A value is never renamed and never reused."""

    ACCELERATOR_UNHEALTHY = "ACCELERATOR_UNHEALTHY"
    STALE_TELEMETRY = "STALE_TELEMETRY"
    ARTIFACT_CORRUPT = "ARTIFACT_CORRUPT"
    CAPABILITY_DEGRADED = "CAPABILITY_DEGRADED"
    ENVELOPE_EXCEEDED = "ENVELOPE_EXCEEDED"
    ENVELOPE_SUSPECT = "ENVELOPE_SUSPECT"
    NO_MEASURED_ENVELOPE = "NO_MEASURED_ENVELOPE"
    GPU_PRESSURE = "GPU_PRESSURE"
    THRASHING = "THRASHING"
    ATTRIBUTION_ESTIMATED = "ATTRIBUTION_ESTIMATED"
    NODE_DRAINING = "NODE_DRAINING"
    NODE_CORDONED = "NODE_CORDONED"
    LAB_PAUSED = "LAB_PAUSED"


@dataclass(frozen=True, slots=True)
class Alert:
    """One thing to look at. `subjects`: ids by what they are of (`accelerator_id`, `capability`, ...).

    `since`: None where what was read does not say.
    """

    kind: AlertKind
    subjects: Mapping[str, str]
    since: int | None
    figures: Figures = field(default_factory=dict[str, "str | int | bool | None"])

    @property
    def key(self) -> Key:
        """What stays the same from one look to the next, while it is the same alert."""
        return (self.kind.value, *(value for _, value in sorted(self.subjects.items())))


# ---- since when -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Onsets:
    """Since when, for what the state keeps no instant of. Keys are ids of what is declared, so it is bounded."""

    seq: int = 0
    at: Mapping[Key, int] = field(default_factory=dict[Key, int])

    def of(self, kind: AlertKind, *ids: str) -> int | None:
        return self.at.get((kind.value, *ids))


def evolve(onsets: Onsets, event: Recorded) -> Onsets:
    """The onsets after one event of the ledger. One that is over may stay: no alert asks for it."""
    onsets = replace(onsets, seq=event.seq)
    at = event.at
    match event.data:
        case PressureChanged(accelerator_id=subject, previous=Pressure.NORMAL):
            return _began(onsets, at, AlertKind.GPU_PRESSURE, subject)
        case PressureChanged(accelerator_id=subject, level=Pressure.NORMAL):
            return _over(onsets, AlertKind.GPU_PRESSURE, subject)
        case AcceleratorHealthChanged(accelerator_id=subject, health=Health.HEALTHY):
            return _over(onsets, AlertKind.ACCELERATOR_UNHEALTHY, subject)
        case AcceleratorHealthChanged(accelerator_id=subject):
            known = onsets.of(AlertKind.ACCELERATOR_UNHEALTHY, subject)
            return onsets if known is not None else _began(onsets, at, AlertKind.ACCELERATOR_UNHEALTHY, subject)
        case AcceleratorRetired(accelerator_id=subject):
            return replace(onsets, at={key: since for key, since in onsets.at.items() if subject not in key[1:2]})
        case TelemetryMissed(accelerator_ids=subjects, observed_at=observed_at):
            for subject in subjects:
                onsets = _began(onsets, observed_at, AlertKind.STALE_TELEMETRY, subject)
            return onsets
        case EnvelopeSuspected() as suspected:
            return _began(onsets, at, _kind_of(suspected), suspected.deployment_id, suspected.gpu_class)
        case ArtifactCorrupt(deployment_id=subject):
            return _began(onsets, at, AlertKind.ARTIFACT_CORRUPT, subject)
        case DeploymentRegistered(spec=spec) | DeploymentRevised(spec=spec):
            return _began(onsets, at, AlertKind.NO_MEASURED_ENVELOPE, spec.deployment_id)
        case NodeCordoned(node_id=subject):
            return _began(onsets, at, AlertKind.NODE_CORDONED, subject)
        case NodeDrainStarted(node_id=subject):
            return _began(onsets, at, AlertKind.NODE_DRAINING, subject)
        case LabPaused() | PolicyRevised(policy=Policy(lab_paused=True)):
            return onsets if onsets.of(AlertKind.LAB_PAUSED) is not None else _began(onsets, at, AlertKind.LAB_PAUSED)
        case LabResumed() | PolicyRevised():
            return _over(onsets, AlertKind.LAB_PAUSED)
        case _:
            return onsets


def _began(onsets: Onsets, since: int, kind: AlertKind, *ids: str) -> Onsets:
    return replace(onsets, at={**onsets.at, (kind.value, *ids): since})


def _over(onsets: Onsets, kind: AlertKind, *ids: str) -> Onsets:
    ended = (kind.value, *ids)
    return replace(onsets, at={key: since for key, since in onsets.at.items() if key != ended})


# ---- what there is ----------------------------------------------------------------------------------------------


def alerts_of(world: World, now: int, onsets: Onsets | None = None) -> tuple[Alert, ...]:
    """Everything to look at, at an instant: by kind in the order of the list, then by subject."""
    known = Onsets() if onsets is None else onsets
    found = [
        *(alert for _, node in sorted(world.nodes.items()) for alert in _of_node(node, known)),
        *(alert for state in _live(world) for alert in _of_accelerator(world, state, now, known)),
        *(
            alert
            for _, deployment in sorted(world.deployments.items())
            if not deployment.retired
            for alert in _of_deployment(world, deployment, known)
        ),
        *_of_capabilities(world),
        *_of_lab(world, known),
    ]
    order = list(AlertKind)
    return tuple(sorted(found, key=lambda alert: (order.index(alert.kind), alert.key)))


def _live(world: World) -> Iterator[AcceleratorState]:
    return (state for _, state in sorted(world.accelerators.items()) if not state.retired)


def _of_node(node: NodeState, onsets: Onsets) -> Iterator[Alert]:
    subjects = {"node_id": node.node_id}
    if node.cordoned:
        yield Alert(AlertKind.NODE_CORDONED, subjects, onsets.of(AlertKind.NODE_CORDONED, node.node_id))
    if node.draining or (node.draining_for_shutdown and node.running):
        figures: Figures = {"cause": "operator" if node.draining else "shutdown", "drained": node.drained}
        yield Alert(AlertKind.NODE_DRAINING, subjects, onsets.of(AlertKind.NODE_DRAINING, node.node_id), figures)


def _of_accelerator(world: World, state: AcceleratorState, now: int, onsets: Onsets) -> Iterator[Alert]:
    accelerator_id, health = state.accelerator.accelerator_id, state.accelerator.health
    subjects = {"accelerator_id": accelerator_id, "node_id": state.node_id}
    if health is not Health.HEALTHY:
        figures: Figures = {"health": health.value, "cause": state.health_cause, "stands": state.fault is not None}
        since = onsets.of(AlertKind.ACCELERATOR_UNHEALTHY, accelerator_id)
        yield Alert(AlertKind.ACCELERATOR_UNHEALTHY, subjects, since, figures)
    stale = _stale(world, state, now, onsets)
    if stale is not None:
        yield replace(stale, subjects=subjects)
    if state.sample is not None and state.sample.pressure is not Pressure.NORMAL:
        level: Figures = {"level": state.sample.pressure.value, "pressure_bp": state.pressure_bp}
        since = onsets.of(AlertKind.GPU_PRESSURE, accelerator_id)
        yield Alert(AlertKind.GPU_PRESSURE, subjects, since, level)
    if state.blind is not None:
        yield Alert(AlertKind.ATTRIBUTION_ESTIMATED, subjects, None, {"cause": state.blind})
    for one in state.thrashing:
        if now - one.detected_at < seconds(one.window_seconds):
            pair = {**subjects, "evictor": one.evictor, "victim": one.victim}
            pace: Figures = {"evictions": one.evictions, "window_seconds": one.window_seconds}
            yield Alert(AlertKind.THRASHING, pair, one.detected_at, pace)


def _stale(world: World, state: AcceleratorState, now: int, onsets: Onsets) -> Alert | None:
    """Nothing usable is known: a device that cannot be read, figures that are INVALID, or no sample for too long."""
    sample = state.sample
    why: Figures = {"fault": state.missed, "invalid": state.invalid}
    if sample is None:
        since = None if state.missed is None else onsets.of(AlertKind.STALE_TELEMETRY, state.accelerator.accelerator_id)
        return Alert(AlertKind.STALE_TELEMETRY, {}, since, why)
    if is_fresh(world.policy, sample.observed_at, sample.received_at, now):
        return None
    ends = min(sample.observed_at, sample.received_at) + seconds(world.policy.telemetry_max_age_seconds)
    # One that lies in the future has not aged: how long that has been so nobody knows.
    return Alert(AlertKind.STALE_TELEMETRY, {}, ends if ends < now else None, why)


def _of_deployment(world: World, deployment: DeploymentState, onsets: Onsets) -> Iterator[Alert]:
    spec = deployment.spec
    subjects = {"deployment_id": spec.deployment_id, "capability": spec.capability}
    if deployment.corrupt is not None:
        since = onsets.of(AlertKind.ARTIFACT_CORRUPT, spec.deployment_id)
        yield Alert(AlertKind.ARTIFACT_CORRUPT, subjects, since, {"cause": deployment.corrupt})
    classes = {state.accelerator.gpu_class for state in _live(world) if state.accelerator.kind is spec.kind}
    measured = {gpu_class: one.envelope for gpu_class in classes if (one := deployment.measured_on(gpu_class))}
    if not measured:
        since = onsets.of(AlertKind.NO_MEASURED_ENVELOPE, spec.deployment_id)
        figures: Figures = {"config_hash": spec.config_hash, "gpu_classes": ", ".join(sorted(classes))}
        yield Alert(AlertKind.NO_MEASURED_ENVELOPE, subjects, since, figures)
    for gpu_class, envelope in sorted(measured.items()):
        if envelope.suspect:
            yield _suspect(deployment, envelope, subjects | {"gpu_class": gpu_class}, onsets)


def _suspect(deployment: DeploymentState, envelope: Envelope, subjects: Mapping[str, str], onsets: Onsets) -> Alert:
    """Why is kept for the newest suspicion of a deployment; one on another class may be suspect as well."""
    ids = (deployment.spec.deployment_id, envelope.gpu_class)
    figures: Figures = {"cause": None, "peak_bytes": envelope.peak_bytes}
    why = deployment.suspicion
    if why is None or (why.config_hash, why.gpu_class) != (envelope.config_hash, envelope.gpu_class):
        return Alert(AlertKind.ENVELOPE_SUSPECT, subjects, onsets.of(AlertKind.ENVELOPE_SUSPECT, *ids), figures)
    figures = {**figures, "cause": why.cause, "observed_bytes": why.observed_bytes}
    hit = {"accelerator_id": why.accelerator_id, "resident_id": why.resident_id}
    return Alert(_kind_of(why), {**subjects, **hit}, onsets.of(_kind_of(why), *ids), figures)


def _kind_of(suspected: EnvelopeSuspected) -> AlertKind:
    return AlertKind.ENVELOPE_EXCEEDED if suspected.cause == "exceeded" else AlertKind.ENVELOPE_SUSPECT


def _of_capabilities(world: World) -> Iterator[Alert]:
    for capability, state in sorted(world.capabilities.items()):
        if state.degraded_at is not None:
            failure = None if state.failure is None else state.failure.value
            figures: Figures = {"failures": state.failures, "failure": failure, "detail": state.detail}
            yield Alert(AlertKind.CAPABILITY_DEGRADED, {"capability": capability}, state.degraded_at, figures)


def _of_lab(world: World, onsets: Onsets) -> Iterator[Alert]:
    if world.policy.lab_paused:
        yield Alert(AlertKind.LAB_PAUSED, {}, onsets.of(AlertKind.LAB_PAUSED))
