"""What is at /metrics: gauges of the state, and counters of what the ledger records."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from gpuledger.adapters.http.metrics import Metrics
from gpuledger.adapters.http.ports import ServerFacts
from gpuledger.domain.events import (
    AcceleratorHealthChanged,
    CapabilityDegraded,
    DeploymentRetired,
    DeploymentRevised,
    FailureRecorded,
    LeasePreempted,
    NodeCordoned,
    NodeDrainStarted,
    NodeUncordoned,
    Recorded,
    RequestFellBack,
    RequestRetried,
    SampledResident,
    TelemetryMissed,
)
from gpuledger.domain.failures import EMPTY_SHA256, Failure, owner_of
from gpuledger.domain.reasons import Reason
from gpuledger.domain.state import Attribution, Health
from gpuledger.domain.world import World
from gpuledger.projections.alerts import AlertKind
from tests.simulation.virtual_shell import NODE
from tests.unit.driven import CARD, DrivenLedger, suspected


class Insight:
    """The state of a ledger, as a server shows it."""

    def __init__(self, ledger: DrivenLedger) -> None:
        self._ledger = ledger

    @property
    def world(self) -> World:
        return self._ledger.world

    def facts(self) -> ServerFacts:
        return ServerFacts(self._ledger.now, 0, True)


@pytest.fixture
def ledger() -> DrivenLedger:
    found = DrivenLedger()
    found.sample()
    return found


@pytest.fixture
def metrics(ledger: DrivenLedger) -> Metrics:
    return Metrics(Insight(ledger))


def values(metrics: Metrics, name: str) -> dict[str, float]:
    """The series of one metric: what is between the braces, without the names of labels, and the value."""
    found = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", metrics.render().decode(), re.MULTILINE)
    return {",".join(re.findall(r'"([^"]*)"', labels)): float(value) for labels, value in found}


class TestState:
    def test_a_capability_that_is_degraded(self, ledger: DrivenLedger, metrics: Metrics) -> None:
        assert set(values(metrics, "gpuledger_capability_degraded").values()) == {0.0}
        ledger.add("capability:chat@1", CapabilityDegraded("chat@1", 77, 3, Failure.TIMEOUT, "load"))
        shown = values(metrics, "gpuledger_capability_degraded")
        assert {name for name, value in shown.items() if value} == {"chat@1"}
        assert len(shown) == len(ledger.world.deployments)

    def test_an_envelope_that_is_suspect(self, ledger: DrivenLedger, metrics: Metrics) -> None:
        ledger.add("deployment:chat", suspected("gpu_oom"))
        assert values(metrics, "gpuledger_envelope_suspect")["chat"] == 1.0
        assert values(metrics, "gpuledger_envelope_suspect")["vision"] == 0.0
        spec = replace(ledger.world.deployments["chat"].spec, config_hash="other")
        ledger.add("deployment:chat", DeploymentRevised(spec, "configuration"))
        assert values(metrics, "gpuledger_envelope_suspect")["chat"] == 0.0

    def test_what_is_retired_has_no_series(self, ledger: DrivenLedger, metrics: Metrics) -> None:
        ledger.add("deployment:chat", DeploymentRetired("chat", "configuration"))
        assert "chat" not in values(metrics, "gpuledger_envelope_suspect")
        assert "chat@1" not in values(metrics, "gpuledger_capability_degraded")

    def test_health_of_cards_and_nodes(self, ledger: DrivenLedger, metrics: Metrics) -> None:
        assert values(metrics, "gpuledger_accelerator_healthy") == {CARD: 1.0}
        assert values(metrics, "gpuledger_node_schedulable") == {NODE: 1.0}
        ledger.add(f"accelerator:{CARD}", AcceleratorHealthChanged(CARD, Health.FAILED, "XID_79", 1))
        assert values(metrics, "gpuledger_accelerator_healthy") == {CARD: 0.0}
        ledger.add(f"node:{NODE}", NodeCordoned(NODE, "ann"))
        assert values(metrics, "gpuledger_node_schedulable") == {NODE: 0.0}
        ledger.add(f"node:{NODE}", NodeUncordoned(NODE, "ann"))
        assert values(metrics, "gpuledger_node_schedulable") == {NODE: 1.0}
        ledger.add(f"node:{NODE}", NodeDrainStarted(NODE, "operator", "ann"))
        assert values(metrics, "gpuledger_node_schedulable") == {NODE: 0.0}

    def test_what_runtimes_say_of_themselves(self, ledger: DrivenLedger, metrics: Metrics) -> None:
        (known,) = (record.resident for _, record in ledger.world.residents() if record.resident.state == "READY")
        told = SampledResident(known.resident_id, 1, Attribution.KNOWN, 5, True, waiting_requests=2, cache_use_bp=2575)
        ledger.sample(residents=(told,))
        series = f"{CARD},{known.deployment_id}"
        assert values(metrics, "gpuledger_resident_requests_running")[series] == 5.0
        assert values(metrics, "gpuledger_resident_requests_waiting") == {series: 2.0}
        assert values(metrics, "gpuledger_resident_cache_use_ratio") == {series: 0.2575}

    def test_what_they_do_not_say_is_not_0(self, ledger: DrivenLedger, metrics: Metrics) -> None:
        assert values(metrics, "gpuledger_resident_requests_running")
        assert values(metrics, "gpuledger_resident_requests_waiting") == {}
        assert values(metrics, "gpuledger_resident_cache_use_ratio") == {}

    def test_alerts_of_every_kind_have_a_series(self, ledger: DrivenLedger, metrics: Metrics) -> None:
        shown = values(metrics, "gpuledger_alerts")
        assert shown == dict.fromkeys((kind.value for kind in AlertKind), 0.0)
        for name in ("chat", "vision"):
            ledger.add(f"deployment:{name}", suspected("exceeded", name))
        assert values(metrics, "gpuledger_alerts") == shown | {"ENVELOPE_EXCEEDED": 2.0}


class TestCounters:
    @pytest.mark.parametrize("failure", Failure)
    def test_every_class_of_failure_is_counted_with_its_owner(self, metrics: Metrics, failure: Failure) -> None:
        before = values(metrics, "gpuledger_failures_total")
        assert before == {f"{one.value},{owner_of(one).value}": 0.0 for one in Failure}
        owner = owner_of(failure)
        recorded = FailureRecorded("c@1", failure, owner, None, None, None, None, 1, 1, 1, EMPTY_SHA256, "x")
        metrics.recorded((of(recorded), of(recorded)))
        assert values(metrics, "gpuledger_failures_total") == before | {f"{failure.value},{owner.value}": 2.0}

    def test_a_driver_that_fails_is_recorded_otherwise(self, metrics: Metrics) -> None:
        metrics.recorded((of(TelemetryMissed(NODE, 1, (CARD, "GPU-1"), "NVML_TIMEOUT")),))
        assert values(metrics, "gpuledger_failures_total")["DRIVER_ERROR,telemetry"] == 1.0

    def test_what_was_done_about_them(self, metrics: Metrics) -> None:
        assert values(metrics, "gpuledger_preemptions_total") == {"": 0.0}
        metrics.recorded(
            (
                of(RequestRetried("r", 1, Failure.TIMEOUT, "load", 1, 1, None)),
                of(RequestFellBack("r", 2, 1, None, Failure.TIMEOUT, "load")),
                of(RequestFellBack("s", 2, 1, Reason.QUEUE_FULL, None, "REJECT_CAPACITY")),
                of(LeasePreempted("l", "chat@GPU-0#1", "r", 5, "s", True)),
            )
        )
        assert values(metrics, "gpuledger_retries_total") == {"TIMEOUT": 1.0}
        assert values(metrics, "gpuledger_fallbacks_total") == {"TIMEOUT": 1.0, "QUEUE_FULL": 1.0}
        assert values(metrics, "gpuledger_preemptions_total") == {"": 1.0}


def of(data: Any) -> Recorded:
    return Recorded(1, 1, "x", 1, data)
