"""What operators watch, in Prometheus' format. Refusals for want of memory are correct outcomes, and counted apart.

Labels are ids of the configuration and members of closed lists: nothing that a client sends becomes one.
"""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from gpuledger.domain.events import (
    FailureRecorded,
    LeasePreempted,
    Recorded,
    RequestFellBack,
    RequestRetried,
    TelemetryMissed,
)
from gpuledger.domain.failures import Failure, owner_of
from gpuledger.domain.messages import Agenda
from gpuledger.domain.reasons import Reason

from .attempt import Work
from .auth import Client
from .openai_errors import ApiError, status_of
from .ports import Ending, Granted, Insight, Outcome, Refused, Repeated, Unavailable
from .state_metrics import StateCollector

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
        self._lifecycle = _LifecycleCounters(self._registry)

    def render(self) -> bytes:
        """The page."""
        return generate_latest(self._registry)

    def committed(self, seconds: float) -> None:
        self._commits.observe(seconds)

    def recorded(self, events: tuple[Recorded, ...]) -> None:
        for event in events:
            self._lifecycle.count(event)

    def wanted(self, agenda: Agenda) -> None:
        """Nothing is counted of what is only wanted."""

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


class _LifecycleCounters:
    """What the ledger records of failures and of what was done about them, since this process began."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._failures = Counter(
            "gpuledger_failures",
            "Failures as they are recorded, by class and owner. Those of capacity are correct outcomes.",
            ("failure", "owner"),
            registry=registry,
        )
        for failure in Failure:
            self._failures.labels(failure.value, owner_of(failure).value)
        self._retries = Counter(
            "gpuledger_retries", "Requests tried again after a failure, by its class.", ("failure",), registry=registry
        )
        self._fallbacks = Counter(
            "gpuledger_fallbacks",
            "Requests planned for the next rank of their contract, by the reason or failure that led to it.",
            ("cause",),
            registry=registry,
        )
        self._preemptions = Counter(
            "gpuledger_preemptions", "Leases that more important work took over.", registry=registry
        )

    def count(self, event: Recorded) -> None:
        match event.data:
            case FailureRecorded(failure=failure):
                self._failures.labels(failure.value, owner_of(failure).value).inc()
            case TelemetryMissed():
                failure = Failure.DRIVER_ERROR
                self._failures.labels(failure.value, owner_of(failure).value).inc()
            case RequestRetried(failure=failure):
                self._retries.labels(failure.value).inc()
            case RequestFellBack(reason=reason, failure=failure):
                self._fallbacks.labels(str(reason if failure is None else failure)).inc()
            case LeasePreempted():
                self._preemptions.inc()
            case _:
                pass  # nothing that failed, or was done about it
