"""Gauges of the folded state, read when somebody asks for the metrics."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gpuledger.domain.accounting import account
from gpuledger.domain.aggregates.deployment import DeploymentState
from gpuledger.domain.policy import Pressure
from gpuledger.domain.state import Health
from gpuledger.domain.units import MICROS_PER_SECOND
from gpuledger.domain.view import view_of
from gpuledger.domain.world import World
from gpuledger.projections.alerts import AlertKind, alerts_of

from .ports import Insight, ServerFacts

_WHOLE_BP: Final = 10_000


class StateCollector(Collector):
    """Gauges of the folded state."""

    def __init__(self, insight: Insight) -> None:
        self._insight = insight

    def collect(self) -> Iterator[Metric]:
        facts, world = self._insight.facts(), self._insight.world
        yield from _server(facts, world)
        yield from _queue_and_residents(world)
        yield from _accelerators(world, facts.now)
        yield from _of_runtimes(world)
        yield from _health(world)
        yield from _alerts(world, facts.now)


def _server(facts: ServerFacts, world: World) -> Iterator[Metric]:
    yield GaugeMetricFamily("gpuledger_open_requests", "Requests that somebody waits for.", facts.open_requests)
    writable = int(facts.ledger_writable)
    yield GaugeMetricFamily("gpuledger_ledger_writable", "1 when the ledger can be written.", writable)
    events = CounterMetricFamily("gpuledger_events", "Events in the ledger.")
    events.add_metric((), world.seq)
    yield events


def _queue_and_residents(world: World) -> Iterator[Metric]:
    queue = GaugeMetricFamily("gpuledger_queue_length", "Requests in the queue.", labels=("capability", "priority"))
    waiting = Tally((queued.capability, queued.priority.value) for queued in world.queue())
    for labels, count in sorted(waiting.items()):
        queue.add_metric(labels, count)
    yield queue
    residents = GaugeMetricFamily("gpuledger_residents", "Models in memory, by state.", labels=("accelerator", "state"))
    states = Tally(
        (state.accelerator.accelerator_id, record.resident.state.value) for state, record in world.residents()
    )
    for labels, count in sorted(states.items()):
        residents.add_metric(labels, count)
    yield residents


def _accelerators(world: World, now: int) -> Iterator[Metric]:
    view = view_of(world.state(now))
    figures = GaugeMetricFamily(
        "gpuledger_accelerator_bytes",
        "Memory of an accelerator (semantics.md 2).",
        labels=("accelerator", "figure"),
    )
    leases = GaugeMetricFamily("gpuledger_leases", "Active leases.", labels=("accelerator",))
    levels = GaugeMetricFamily("gpuledger_pressure_level", "0 NORMAL to 3 CRITICAL.", labels=("accelerator",))
    ages = GaugeMetricFamily(
        "gpuledger_sample_age_seconds", "Age of the newest usable sample.", labels=("accelerator",)
    )
    for accelerator_id in sorted(view.accelerators):
        accounting = account(view, accelerator_id)
        known = {
            "total": accounting.total_bytes,
            "observed": accounting.observed_used_bytes,
            "managed": accounting.attributed_managed_bytes,
            "external": accounting.unmanaged_external_bytes,
            "leased": accounting.future_lease_bytes,
            "reserve": accounting.reserve_bytes,
            "schedulable": accounting.schedulable_bytes,
        }
        for name, value in known.items():
            if value is not None:
                figures.add_metric((accelerator_id, name), value)
        active = sum(len(some) for some in view.leases.get(accelerator_id, {}).values())
        leases.add_metric((accelerator_id,), active)
        sample = view.samples.get(accelerator_id)
        levels.add_metric((accelerator_id,), (sample.pressure if sample else Pressure.NORMAL).rank)
        if sample is not None:
            ages.add_metric((accelerator_id,), max(0, now - sample.observed_at) / MICROS_PER_SECOND)
    yield from (figures, leases, levels, ages)


def _of_runtimes(world: World) -> Iterator[Metric]:
    """What each runtime says of itself, where it says so."""
    labels = ("deployment", "accelerator")
    running = GaugeMetricFamily(
        "gpuledger_resident_requests_running", "Requests that a runtime reports, waiting or not.", labels=labels
    )
    queued = GaugeMetricFamily(
        "gpuledger_resident_requests_waiting", "Of these, those that wait inside the runtime.", labels=labels
    )
    cache = GaugeMetricFamily("gpuledger_resident_cache_use_ratio", "How full its cache is, 0 to 1.", labels=labels)
    for state, record in world.residents():
        names = (record.resident.deployment_id, state.accelerator.accelerator_id)
        running.add_metric(names, record.resident.running_requests)
        if record.waiting_requests is not None:
            queued.add_metric(names, record.waiting_requests)
        if record.cache_use_bp is not None:
            cache.add_metric(names, record.cache_use_bp / _WHOLE_BP)
    yield from (running, queued, cache)


def _health(world: World) -> Iterator[Metric]:
    """What keeps work away: 1 or 0 for everything that is declared."""
    declared = [one for _, one in sorted(world.deployments.items()) if not one.retired]
    degraded = {name for name, state in world.capabilities.items() if state.degraded_at is not None}
    yield _flags(
        "gpuledger_capability_degraded",
        "1 while a capability fails again and again.",
        "capability",
        {one.spec.capability: one.spec.capability in degraded for one in declared},
    )
    yield _flags(
        "gpuledger_envelope_suspect",
        "1 while an envelope of a deployment as it is configured now is suspect.",
        "deployment",
        {one.spec.deployment_id: _is_suspect(one) for one in declared},
    )
    yield _flags(
        "gpuledger_accelerator_healthy",
        "1 while it is HEALTHY.",
        "accelerator",
        {key: one.accelerator.health is Health.HEALTHY for key, one in world.accelerators.items() if not one.retired},
    )
    yield _flags(
        "gpuledger_node_schedulable",
        "1 while a scheduler runs on a node that is neither cordoned nor draining.",
        "node",
        {key: node.running and not node.cordoned and not node.leaves for key, node in world.nodes.items()},
    )


def _is_suspect(deployment: DeploymentState) -> bool:
    present = deployment.spec.config_hash
    return any(one.envelope.suspect for one in deployment.measured if one.envelope.config_hash == present)


def _flags(name: str, documentation: str, label: str, flags: Mapping[str, bool]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, documentation, labels=(label,))
    for subject, flag in sorted(flags.items()):
        family.add_metric((subject,), int(flag))
    return family


def _alerts(world: World, now: int) -> Iterator[Metric]:
    family = GaugeMetricFamily("gpuledger_alerts", "Alerts that there are now, by kind.", labels=("kind",))
    counts = Tally(alert.kind for alert in alerts_of(world, now))
    for kind in AlertKind:
        family.add_metric((kind.value,), counts[kind])
    yield family
