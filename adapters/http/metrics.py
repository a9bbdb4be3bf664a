"""What operators watch, in Prometheus' format. Refusals for want of memory are correct outcomes, and counted apart.

Gauges are read from the folded state when they are asked for. Labels are ids of the configuration and members of closed
lists: nothing that a client sends becomes one.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gpuledger.domain.accounting import account
from gpuledger.domain.failures import Failure
from gpuledger.domain.policy import Pressure
from gpuledger.domain.reasons import Reason
from gpuledger.domain.units import MICROS_PER_SECOND
from gpuledger.domain.view import view_of

from .auth import Client
from .openai_errors import ApiError, status_of
from .ports import Ending, Granted, Insight, Outcome, Refused, Repeated, Unavailable
from .relay import Work

_COMMIT_BUCKETS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_WAIT_BUCKETS: Final = (0.005, 0.02, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_NONE: Final = ""


class Metrics:
    """Everything at `/metrics`. Implements `Tally`, and the engine's gauge of commits."""

    CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, insight: Insight) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(StateCollector(insight))
        self._requests = Counter(
            "gpuledger_requests",
            "Requests by what became of them.",
            ("capability", "priority", "outcome"),
            registry=self._registry,
        )
        self._rejections = Counter(
            "gpuledger_capacity_rejections",
            "Requests refused for want of room: a correct outcome.",
            ("capability", "reason"),
            registry=self._registry,
        )
        self._errors = Counter(
            "gpuledger_internal_errors",
            "Requests that failed by somebody's fault, by class of failure.",
            ("capability", "failure"),
            registry=self._registry,
        )
        self._queued = Histogram(
            "gpuledger_request_queued_seconds",
            "From arrival to being forwarded, of requests that were.",
            ("capability", "start"),
            buckets=_WAIT_BUCKETS,
            registry=self._registry,
        )
        self._served = Histogram(
            "gpuledger_request_served_seconds",
            "From being forwarded to the end.",
            ("capability",),
            buckets=_WAIT_BUCKETS,
            registry=self._registry,
        )
        self._commits = Histogram(
            "gpuledger_commit_seconds",
            "Durable commits to the ledger.",
            buckets=_COMMIT_BUCKETS,
            registry=self._registry,
        )

    def render(self) -> bytes:
        """The page."""
        return generate_latest(self._registry)

    def committed(self, seconds: float) -> None:
        self._commits.observe(seconds)

    def ended(self, work: Work, granted: Granted, ending: Ending) -> None:
        capability = work.capability
        self._queued.labels(capability, granted.start).observe(granted.queued_ms / 1000)
        self._served.labels(capability).observe(ending.served_ms / 1000)
        if ending.client_gone:
            outcome = "client_gone"
        elif ending.failure is not None:
            outcome = "failed"
            self._errors.labels(capability, ending.failure.value).inc()
        elif ending.status >= 500:
            outcome = "cut_off"  # its lease was preempted, or the server shut down
        else:
            outcome = "completed" if ending.status < 400 else "client_error"
        self._requests.labels(capability, work.priority.value, outcome).inc()

    def answered(self, client: Client | None, capability: str | None, outcome: Outcome | ApiError) -> None:
        served = capability or _NONE
        self._requests.labels(served, client.priority.value if client else _NONE, _word(outcome)).inc()
        match outcome:
            case Refused(reason=Reason() as reason):
                if status_of(reason) == 429:
                    self._rejections.labels(served, reason.value).inc()
            case Refused(failure=Failure() as failure):
                self._errors.labels(served, failure.value).inc()
            case _:
                pass  # neither room nor anybody's fault


def _word(outcome: Outcome | ApiError) -> str:
    match outcome:
        case ApiError():
            return "client_error"
        case Refused(reason=None):
            return "failed"
        case Refused():
            return "refused"
        case Unavailable():
            return "unavailable"
        case Repeated():
            return "repeated"
        case Granted():
            return "granted"


class StateCollector(Collector):
    """Gauges of the folded state."""

    def __init__(self, insight: Insight) -> None:
        self._insight = insight

    def collect(self) -> Iterator[Metric]:
        yield from self._server()
        yield from self._residents_and_queue()
        yield from self._accelerators()

    def _server(self) -> Iterator[Metric]:
        facts, world = self._insight.facts(), self._insight.world
        yield _gauge("gpuledger_open_requests", "Requests that somebody waits for.", facts.open_requests)
        yield _gauge("gpuledger_ledger_writable", "1 when the ledger can be written.", int(facts.ledger_writable))
        events = CounterMetricFamily("gpuledger_events", "Events in the ledger.")
        events.add_metric((), world.seq)
        yield events

    def _residents_and_queue(self) -> Iterator[Metric]:
        world = self._insight.world
        queue = GaugeMetricFamily("gpuledger_queue_length", "Requests in the queue.", labels=("capability", "priority"))
        waiting = Tally((queued.capability, queued.priority.value) for queued in world.queue())
        for labels, count in sorted(waiting.items()):
            queue.add_metric(labels, count)
        yield queue
        residents = GaugeMetricFamily(
            "gpuledger_residents", "Models in memory, by state.", labels=("accelerator", "state")
        )
        states = Tally(
            (state.accelerator.accelerator_id, record.resident.state.value) for state, record in world.residents()
        )
        for labels, count in sorted(states.items()):
            residents.add_metric(labels, count)
        yield residents

    def _accelerators(self) -> Iterator[Metric]:
        world, now = self._insight.world, self._insight.facts().now
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


def _gauge(name: str, documentation: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, documentation, value)
