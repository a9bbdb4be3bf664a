"""`gpuledger.status/1`: what a ledger says of now: alerts, memory, residents, leases, queue, deployments.

Built from the folded state and an instant. Where no scheduler drives the ledger nothing is live: what it last recorded
is shown as that, and no lease at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, Final, TypeAlias

from gpuledger.domain.accounting import account
from gpuledger.domain.aggregates.accelerator import AcceleratorState, LeaseRecord, ResidentRecord
from gpuledger.domain.aggregates.deployment import DeploymentState
from gpuledger.domain.aggregates.node import NodeState
from gpuledger.domain.draft import Draft
from gpuledger.domain.events import ThrashingDetected
from gpuledger.domain.policy import Pressure
from gpuledger.domain.residency import kept_until
from gpuledger.domain.state import Health, Kind, Lease, ResidentState
from gpuledger.domain.units import MICROS_PER_MS, format_instant, milliseconds
from gpuledger.domain.view import View, view_of
from gpuledger.domain.world import World
from gpuledger.projections.alerts import Alert, Onsets, alerts_of
from gpuledger.projections.failures import FailureView

from .alert_words import alert_documents
from .deployment_status import capability_documents, deployment_document
from .queue_status import queue_documents

SCHEMA: Final = "gpuledger.status/1"

Document: TypeAlias = dict[str, Any]


class Driver(StrEnum):
    """What is known of the scheduler of a ledger."""

    RUNNING = "running"
    #: It holds the ledger and has not yet taken over what an earlier run left.
    STARTING = "starting"
    NONE = "none"
    #: An export is nobody's live ledger.
    EXPORT = "export"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a state comes from, and who drives it."""

    path: str
    driver: Driver
    pid: int | None = None

    @property
    def is_live(self) -> bool:
        return self.driver is Driver.RUNNING


def status_document(
    world: World,
    now: int,
    source: Source,
    failures: Sequence[FailureView] = (),
    onsets: Onsets | None = None,
) -> Document:
    """The document of a folded state at an instant. `failures`: the newest ones, which the state does not hold.

    `onsets`: since when there is what the alerts are about; without them some alerts do not say.
    """
    now = max(now, world.at)
    shown = _Shown(world, now, source)
    return {
        "schema": SCHEMA,
        "now": format_instant(now),
        "ledger": {
            "path": source.path,
            "ledger_id": world.ledger_id,
            "seq": world.seq,
            "at": format_instant(world.at) if world.seq else None,
        },
        "scheduler": {"state": source.driver.value, "pid": source.pid},
        "policy_revision": world.policy.revision,
        "lab_paused": world.policy.lab_paused,
        "alerts": alert_documents(current_alerts(world, now, source, onsets)),
        "nodes": [_node(node_id, world) for node_id in sorted(world.nodes)],
        "accelerators": [shown.accelerator(state) for state in shown.accelerators],
        "residents": [shown.resident(state, record) for state, record in world.residents()],
        "leases": [lease_document(lease, record, now) for lease, record in live_leases(world, now, source)],
        "queue": queue_documents(world, now),
        "capabilities": capability_documents(world),
        "deployments": [
            shown.deployment(deployment)
            for _, deployment in sorted(world.deployments.items())
            if not deployment.retired
        ],
        "failures": [failure_document(failure) for failure in failures],
    }


def failure_document(failure: FailureView) -> Document:
    """One failure, with its instant in words."""
    return {one.name: getattr(failure, one.name) for one in fields(failure)} | {"at": format_instant(failure.at)}


def current_alerts(world: World, now: int, source: Source, onsets: Onsets | None = None) -> Sequence[Alert]:
    """What there is to look at. Of a ledger that nobody drives: what there was, when it was driven last."""
    return alerts_of(world, max(now, world.at) if source.is_live else world.at, onsets)


def live_leases(world: World, now: int, source: Source) -> Sequence[tuple[Lease, LeaseRecord]]:
    """The leases that give a right to memory now: none of an expired one, none of a failed resident, none unless a
    scheduler runs (semantics.md 2). The oldest first.
    """
    if not source.is_live:
        return ()
    active = {
        lease.lease_id
        for by_deployment in view_of(world.state(now)).leases.values()
        for held in by_deployment.values()
        for lease in held
    }
    found = [(record.lease, record) for _, record in world.leases() if record.lease.lease_id in active]
    return sorted(found, key=lambda pair: (pair[0].granted_at, pair[0].lease_id))


def lease_document(lease: Lease, record: LeaseRecord, now: int) -> Document:
    """A live lease."""
    return {
        "lease_id": lease.lease_id,
        "request_id": lease.request_id,
        "deployment_id": lease.deployment_id,
        "accelerator_id": lease.accelerator_id,
        "resident_id": record.resident_id,
        "priority": lease.priority.value,
        "reserved_bytes": lease.reserved_bytes,
        "materialized_bytes": lease.materialized_bytes,
        "room_confirmed": record.room_confirmed,
        "granted_at": format_instant(lease.granted_at),
        "expires_at": format_instant(lease.expires_at),
        "expires_in_ms": (lease.expires_at - now) // MICROS_PER_MS,
        "preemptions": lease.preemptions,
    }


def _node(node_id: str, world: World) -> Document:
    node = world.nodes[node_id]
    return {
        "node_id": node_id,
        "running": node.running,
        "cordoned": node.cordoned,
        "draining": node.leaves,
        "drain_cause": _drain_cause(node),
        "drained": node.drained,
        "production_eligible": node.production_eligible,
        "labels": dict(node.labels),
        "memory_bytes": node.memory_bytes,
        "external_bytes": node.external_bytes,
    }


def _drain_cause(node: NodeState) -> str | None:
    if node.draining:
        return "operator"
    return "shutdown" if node.draining_for_shutdown else None


class _Shown:
    """The parts of one document. The planner's own view of the state gives every figure."""

    def __init__(self, world: World, now: int, source: Source) -> None:
        state = world.state(now)
        self.world = world
        self.now = now
        # Leases that nobody holds reserve nothing: the figures are those that the next start will find.
        self.view: View = view_of(state if source.is_live else replace(state, leases=()))
        self.accelerators = [state for _, state in sorted(world.accelerators.items()) if not state.retired]

    def accelerator(self, state: AcceleratorState) -> Document:
        accelerator, sample = state.accelerator, state.sample
        accounting = account(self.view, accelerator.accelerator_id)
        known = sample is not None
        return {
            "accelerator_id": accelerator.accelerator_id,
            "node_id": state.node_id,
            "kind": accelerator.kind.value,
            "gpu_class": accelerator.gpu_class,
            "index": accelerator.index,
            "device_name": state.device_name,
            "driver_version": state.driver_version,
            "health": accelerator.health.value,
            "health_cause": state.health_cause if accelerator.health is not Health.HEALTHY else None,
            "fault_stands": state.fault is not None,
            "total_bytes": accounting.total_bytes,
            "observed_used_bytes": accounting.observed_used_bytes,
            "attributed_managed_bytes": accounting.attributed_managed_bytes,
            "attribution_delta_bytes": accounting.attribution_delta_bytes,
            "physical_used_bytes": accounting.physical_used_bytes,
            "unmanaged_external_bytes": accounting.unmanaged_external_bytes if known else None,
            "future_lease_bytes": accounting.future_lease_bytes,
            "reserve_bytes": accounting.reserve_bytes,
            "schedulable_bytes": accounting.schedulable_bytes,
            "attribution": accounting.attribution.value,
            "pressure": (Pressure.NORMAL if sample is None else sample.pressure).value,
            "pressure_bp": state.pressure_bp if known else None,
            "foreign_processes": state.foreign_processes if known and accelerator.kind is Kind.GPU else None,
            "sample": None
            if sample is None
            else {
                "observed_at": format_instant(sample.observed_at),
                "received_at": format_instant(sample.received_at),
                "age_ms": self._since(min(sample.observed_at, sample.received_at)),
            },
            "telemetry_fault": state.missed,
            "sample_invalid": state.invalid,
            "blind": state.blind,
            "profiling": state.profiling,
            "thrashing": [_thrashing(one) for one in state.thrashing],
        }

    def resident(self, state: AcceleratorState, record: ResidentRecord) -> Document:
        resident, process, eviction = record.resident, record.process, record.eviction
        deployment = self.world.deployments.get(resident.deployment_id)
        rests = resident.state in (ResidentState.READY, ResidentState.SLEEPING)
        until = kept_until(Draft(self.world, self.now), record) if rests else None
        active = self.view.active_leases(resident.accelerator_id, resident.deployment_id)
        return {
            "resident_id": resident.resident_id,
            "deployment_id": resident.deployment_id,
            "capability": None if deployment is None else deployment.spec.capability,
            "accelerator_id": resident.accelerator_id,
            "node_id": state.node_id,
            "state": resident.state.value,
            "since": _instant(_state_since(record)),
            "asleep": record.asleep,
            "attributed_bytes": resident.attributed_bytes,
            "reserved_bytes": resident.reserved_bytes,
            "attribution": resident.attribution.value,
            "residency": None if deployment is None else deployment.spec.residency.policy.value,
            "last_used_at": format_instant(resident.last_used_at),
            "kept_until": _instant(until),
            "protected_until": _instant(resident.protected_until),
            "active_leases": len(active),
            "running_requests": resident.running_requests,
            "waiting_requests": record.waiting_requests,
            "cache_use_bp": record.cache_use_bp,
            "process": None
            if process is None
            else {"pid": process.pid, "start_ticks": process.start_ticks, "alive": record.alive},
            "eviction": None
            if eviction is None
            else {
                "action": "sleep" if eviction.sleeps else "unload",
                "cause": eviction.cause.value,
                "started_at": format_instant(eviction.started_at),
                "by_lease_id": eviction.by_lease_id,
            },
            "awaits": list(record.awaits),
        }

    def deployment(self, deployment: DeploymentState) -> Document:
        planned = self.view.deployments[deployment.spec.deployment_id]
        return deployment_document(deployment, planned, self.accelerators, self.world.policy, self.now)

    def _since(self, instant: int) -> int:
        return max(0, self.now - instant) // MICROS_PER_MS


def _thrashing(one: ThrashingDetected) -> Document:
    return {
        "evictor": one.evictor,
        "victim": one.victim,
        "evictions": one.evictions,
        "window_seconds": one.window_seconds,
        "detected_at": format_instant(one.detected_at),
    }


def _state_since(record: ResidentRecord) -> int | None:
    """When a resident came into its state, as far as the state tells: of one that sleeps it does not."""
    resident = record.resident
    if record.eviction is not None:
        return record.eviction.started_at
    if resident.state is ResidentState.DRAINING and record.drain_started_at is not None:
        return record.drain_started_at
    if resident.state is ResidentState.SLEEPING:
        return None
    if resident.state is ResidentState.READY:
        return resident.loaded_at + milliseconds(resident.start_ms)
    return resident.loaded_at


def _instant(instant: int | None) -> str | None:
    return None if instant is None else format_instant(instant)
