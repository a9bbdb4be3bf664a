"""Alerts: what the state says that somebody should look at, and since when."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import Any

import pytest

from gpuledger.domain.events import (
    AcceleratorHealthChanged,
    AcceleratorRetired,
    ArtifactCorrupt,
    ArtifactVerified,
    CapabilityDegraded,
    CapabilityRecovered,
    DeploymentRetired,
    DeploymentRevised,
    EnvelopeAccepted,
    EnvelopeMeasured,
    FailureRecorded,
    LabPaused,
    LabResumed,
    NodeCordoned,
    NodeDrainCompleted,
    NodeDrainStarted,
    NodeUncordoned,
    PolicyRevised,
    PressureChanged,
    SchedulerStarted,
    TelemetryMissed,
    ThrashingDetected,
)
from gpuledger.domain.failures import EMPTY_SHA256, Failure, Owner
from gpuledger.domain.policy import Pressure
from gpuledger.domain.state import Health
from gpuledger.domain.units import GIB, seconds
from gpuledger.projections import alerts
from gpuledger.projections.alerts import Alert, AlertKind, Onsets, alerts_of
from gpuledger.tools.alert_words import told, what_to_do
from tests.simulation.virtual_shell import NODE
from tests.unit.driven import CARD, DrivenLedger, suspected

THE_CARD = {"accelerator_id": CARD, "node_id": NODE}


@pytest.fixture
def ledger() -> DrivenLedger:
    found = DrivenLedger()
    found.sample()
    assert found.alerts() == ()
    return found


class TestAccelerators:
    def test_pressure_begins_when_it_left_normal(self, ledger: DrivenLedger) -> None:
        began = ledger.sample(pressure=Pressure.HIGH, pressure_bp=7300)
        ledger.add(f"accelerator:{CARD}", PressureChanged(CARD, Pressure.HIGH, Pressure.NORMAL, 7300))
        ledger.sample(pressure=Pressure.CRITICAL, pressure_bp=9000)
        ledger.add(f"accelerator:{CARD}", PressureChanged(CARD, Pressure.CRITICAL, Pressure.HIGH, 9000))
        alert = ledger.one()
        assert (alert.kind, alert.subjects) == (AlertKind.GPU_PRESSURE, THE_CARD)
        assert alert.figures == {"level": "CRITICAL", "pressure_bp": 9000}
        assert alert.since == began + seconds(1)

    def test_pressure_that_is_over(self, ledger: DrivenLedger) -> None:
        ledger.sample(pressure=Pressure.HIGH)
        ledger.add(f"accelerator:{CARD}", PressureChanged(CARD, Pressure.HIGH, Pressure.NORMAL, 7300))
        ledger.sample()
        ledger.add(f"accelerator:{CARD}", PressureChanged(CARD, Pressure.NORMAL, Pressure.HIGH, 10))
        assert ledger.alerts() == ()
        assert reduce(alerts.evolve, ledger.events, Onsets()).of(AlertKind.GPU_PRESSURE, CARD) is None

    def test_a_sample_that_grows_old(self, ledger: DrivenLedger) -> None:
        sample = ledger.world.accelerators[CARD].sample
        assert sample is not None
        last = sample.observed_at + seconds(ledger.world.policy.telemetry_max_age_seconds)
        assert ledger.alerts(last) == ()
        (alert,) = ledger.alerts(last + 1)
        assert (alert.kind, alert.since, alert.subjects) == (AlertKind.STALE_TELEMETRY, last, THE_CARD)

    def test_a_driver_that_fails(self, ledger: DrivenLedger) -> None:
        observed_at = ledger.now
        ledger.add(f"telemetry:{NODE}", TelemetryMissed(NODE, observed_at, (CARD,), "NVML_TIMEOUT"))
        alert = ledger.one()
        assert (alert.kind, alert.since) == (AlertKind.STALE_TELEMETRY, observed_at)
        assert alert.figures == {"fault": "NVML_TIMEOUT", "invalid": None}
        ledger.sample()
        assert ledger.alerts() == ()

    def test_a_scheduler_that_has_seen_nothing_yet(self, ledger: DrivenLedger) -> None:
        ledger.add("ledger", SchedulerStarted(NODE, "1", "p/1", 1))
        assert (ledger.one().kind, ledger.one().since) == (AlertKind.STALE_TELEMETRY, None)

    def test_a_fault_of_the_device(self, ledger: DrivenLedger) -> None:
        stream = f"accelerator:{CARD}"
        began = ledger.add(stream, AcceleratorHealthChanged(CARD, Health.FAILED, "XID_79", 1))
        ledger.add(stream, AcceleratorHealthChanged(CARD, Health.FAILED, "XID_79", 2))
        alert = ledger.one()
        assert (alert.kind, alert.since) == (AlertKind.ACCELERATOR_UNHEALTHY, began)
        assert alert.figures == {"health": "FAILED", "cause": "XID_79", "stands": True}
        ledger.add(stream, AcceleratorHealthChanged(CARD, Health.HEALTHY, "cleared", 0, "ann"))
        assert ledger.alerts() == ()
        again = ledger.add(stream, AcceleratorHealthChanged(CARD, Health.DEGRADED, "throttled"))
        assert (ledger.one().since, ledger.one().figures["stands"]) == (again, False)

    def test_attribution_that_is_a_guess(self, ledger: DrivenLedger) -> None:
        ledger.sample(blind="no_host_pids")
        assert ledger.one() == Alert(AlertKind.ATTRIBUTION_ESTIMATED, THE_CARD, None, {"cause": "no_host_pids"})

    def test_thrashing_is_shown_for_as_long_as_it_was_watched_for(self, ledger: DrivenLedger) -> None:
        at = ledger.now
        ledger.add(f"accelerator:{CARD}", ThrashingDetected(CARD, "chat", "vision", 3, 600, at))
        alert = ledger.one()
        assert (alert.kind, alert.since) == (AlertKind.THRASHING, at)
        assert alert.subjects == THE_CARD | {"evictor": "chat", "victim": "vision"}
        assert alert.key == ("THRASHING", CARD, "chat", NODE, "vision")
        shown = [one.kind for one in ledger.alerts(at + seconds(600) - 1)]
        assert AlertKind.THRASHING in shown
        assert AlertKind.THRASHING not in [one.kind for one in ledger.alerts(at + seconds(600))]

    def test_one_that_is_retired_has_none(self, ledger: DrivenLedger) -> None:
        ledger.add(f"accelerator:{CARD}", AcceleratorHealthChanged(CARD, Health.LOST, "GPU_VANISHED"))
        ledger.add(f"accelerator:{CARD}", AcceleratorRetired(CARD))
        assert not [one for one in ledger.alerts() if "accelerator_id" in one.subjects]
        assert reduce(alerts.evolve, ledger.events, Onsets()).of(AlertKind.ACCELERATOR_UNHEALTHY, CARD) is None


class TestDeployments:
    @pytest.mark.parametrize(
        ("cause", "kind"), [("exceeded", AlertKind.ENVELOPE_EXCEEDED), ("gpu_oom", AlertKind.ENVELOPE_SUSPECT)]
    )
    def test_an_envelope_that_is_suspect(self, ledger: DrivenLedger, cause: Any, kind: AlertKind) -> None:
        began = ledger.add("deployment:chat", suspected(cause))
        alert = ledger.one()
        assert (alert.kind, alert.since) == (kind, began)
        assert (alert.subjects["deployment_id"], alert.subjects["gpu_class"]) == ("chat", "virtual")
        assert alert.figures == {"cause": cause, "peak_bytes": 11 * GIB, "observed_bytes": 13 * GIB}
        ledger.add("deployment:chat", EnvelopeAccepted("chat", "cfg-chat", "ann"))
        assert ledger.alerts() == ()

    def test_or_until_it_is_measured_again(self, ledger: DrivenLedger) -> None:
        ledger.add("deployment:chat", suspected("gpu_oom"))
        measured = next(
            one.data
            for one in ledger.events
            if isinstance(one.data, EnvelopeMeasured) and one.data.deployment_id == "chat"
        )
        ledger.add("deployment:chat", measured)
        assert ledger.alerts() == ()

    def test_why_is_not_told_of_another_configuration(self, ledger: DrivenLedger) -> None:
        """The suspicion that is kept is of the newest: what it says must not be said of an older one."""
        ledger.add("deployment:chat", suspected("exceeded"))
        deployment = ledger.world.deployments["chat"]
        forgotten = replace(deployment, suspicion=None)
        ledger.world = replace(ledger.world, deployments={**ledger.world.deployments, "chat": forgotten})
        assert (ledger.one().kind, ledger.one().figures["cause"]) == (AlertKind.ENVELOPE_SUSPECT, None)

    def test_a_configuration_that_was_never_measured(self, ledger: DrivenLedger) -> None:
        spec = replace(ledger.world.deployments["chat"].spec, config_hash="other")
        began = ledger.add("deployment:chat", DeploymentRevised(spec, "configuration"))
        alert = ledger.one()
        assert (alert.kind, alert.since) == (AlertKind.NO_MEASURED_ENVELOPE, began)
        assert alert.figures == {"config_hash": "other", "gpu_classes": "virtual"}

    def test_a_model_file_that_is_another_one(self, ledger: DrivenLedger) -> None:
        began = ledger.add("deployment:chat", ArtifactCorrupt("chat", "sha256_differs", EMPTY_SHA256))
        alert = ledger.one()
        assert (alert.kind, alert.since, alert.figures) == (
            AlertKind.ARTIFACT_CORRUPT,
            began,
            {"cause": "sha256_differs"},
        )
        ledger.add("deployment:chat", ArtifactVerified("chat", EMPTY_SHA256))
        assert ledger.alerts() == ()

    def test_one_that_is_retired_has_none(self, ledger: DrivenLedger) -> None:
        ledger.add("deployment:chat", suspected("gpu_oom"))
        ledger.add("deployment:chat", DeploymentRetired("chat", "configuration"))
        assert ledger.alerts() == ()

    def test_a_capability_that_is_degraded(self, ledger: DrivenLedger) -> None:
        failed = FailureRecorded(
            "chat@1", Failure.TIMEOUT, Owner.RUNTIME_ADAPTER, "chat", CARD, None, None, 1, 1, 3, EMPTY_SHA256, "load"
        )
        ledger.add("capability:chat@1", failed)
        assert ledger.alerts() == ()
        ledger.add("capability:chat@1", CapabilityDegraded("chat@1", 77, 3, Failure.TIMEOUT, "load"))
        alert = ledger.one()
        assert (alert.kind, alert.subjects, alert.since) == (
            AlertKind.CAPABILITY_DEGRADED,
            {"capability": "chat@1"},
            77,
        )
        assert alert.figures == {"failures": 1, "failure": "TIMEOUT", "detail": "load"}
        ledger.add("capability:chat@1", CapabilityRecovered("chat@1", 78))
        assert ledger.alerts() == ()


class TestNodes:
    def test_cordoned_and_drained_by_an_operator(self, ledger: DrivenLedger) -> None:
        cordoned = ledger.add(f"node:{NODE}", NodeCordoned(NODE, "ann"))
        drained = ledger.add(f"node:{NODE}", NodeDrainStarted(NODE, "operator", "ann"))
        draining, cordon = ledger.alerts()
        assert (cordon.kind, cordon.since, cordon.subjects) == (AlertKind.NODE_CORDONED, cordoned, {"node_id": NODE})
        assert (draining.kind, draining.since) == (AlertKind.NODE_DRAINING, drained)
        assert draining.figures == {"cause": "operator", "drained": False}
        ledger.add(f"node:{NODE}", NodeDrainCompleted(NODE))
        assert ledger.alerts()[0].figures["drained"] is True
        ledger.add(f"node:{NODE}", NodeUncordoned(NODE, "ann"))
        assert ledger.alerts() == ()

    def test_a_shutdown_is_a_drain(self, ledger: DrivenLedger) -> None:
        ledger.add(f"node:{NODE}", NodeDrainStarted(NODE, "shutdown"))
        assert (ledger.one().kind, ledger.one().figures["cause"]) == (AlertKind.NODE_DRAINING, "shutdown")


class TestLab:
    def test_a_pause_that_was_forgotten(self, ledger: DrivenLedger) -> None:
        paused = ledger.add("policy", LabPaused("ann"))
        ledger.add("policy", PolicyRevised(ledger.world.policy, "configuration"))
        assert ledger.one() == Alert(AlertKind.LAB_PAUSED, {}, paused)
        assert what_to_do(ledger.one()) == "`gpuledger lab resume` when they shall be served again."
        assert "pauses LAB" in told(ledger.one())
        ledger.add("policy", LabResumed("ann"))
        assert ledger.alerts() == ()

    def test_one_of_the_configuration(self, ledger: DrivenLedger) -> None:
        open_policy = ledger.world.policy
        revised = ledger.add("policy", PolicyRevised(replace(open_policy, lab_paused=True), "configuration"))
        assert (ledger.one().kind, ledger.one().since) == (AlertKind.LAB_PAUSED, revised)
        ledger.add("policy", PolicyRevised(open_policy, "configuration"))
        again = ledger.add("policy", LabPaused("ann"))
        assert ledger.one().since == again

    def test_an_accelerator_that_is_retired_leaves_it(self, ledger: DrivenLedger) -> None:
        paused = ledger.add("policy", LabPaused("ann"))
        ledger.add(f"accelerator:{CARD}", AcceleratorRetired(CARD))
        assert [one.since for one in ledger.alerts() if one.kind is AlertKind.LAB_PAUSED] == [paused]


class TestWords:
    def test_a_hash_is_no_longer_than_people_compare(self, ledger: DrivenLedger) -> None:
        spec = replace(ledger.world.deployments["chat"].spec, config_hash="789ae17d0aae336b" * 4)
        ledger.add("deployment:chat", DeploymentRevised(spec, "configuration"))
        line = "chat was not measured as it is configured now (789ae17d0aae) on virtual: it is not loaded"
        assert told(ledger.one()) == line


class TestAll:
    def test_in_the_order_of_the_list(self, ledger: DrivenLedger) -> None:
        ledger.add(f"node:{NODE}", NodeCordoned(NODE, "ann"))
        ledger.add("deployment:vision", suspected("gpu_oom", "vision"))
        ledger.add("deployment:chat", suspected("gpu_oom"))
        ledger.add(f"accelerator:{CARD}", AcceleratorHealthChanged(CARD, Health.FAILED, "XID_79", 1))
        ledger.sample(blind="no_host_pids")
        kinds = ledger.kinds()
        assert kinds == sorted(kinds, key=list(AlertKind).index)
        named = [one.subjects.get("deployment_id") for one in ledger.alerts()]
        assert named.index("chat") < named.index("vision")

    def test_without_onsets_the_same_alerts(self, ledger: DrivenLedger) -> None:
        ledger.add(f"node:{NODE}", NodeCordoned(NODE, "ann"))
        ledger.add("capability:chat@1", CapabilityDegraded("chat@1", 77, 3, Failure.TIMEOUT, "load"))
        known, unknown = ledger.alerts(), alerts_of(ledger.world, ledger.now)
        assert [one.key for one in known] == [one.key for one in unknown]
        assert [one.since for one in unknown] == [77, None]

    def test_keys_are_of_one_alert_each(self, ledger: DrivenLedger) -> None:
        for name in ("chat", "vision", "batch"):
            ledger.add(f"deployment:{name}", suspected("exceeded", name))
            ledger.add(f"deployment:{name}", ArtifactCorrupt(name, "absent", EMPTY_SHA256))
        keys = [one.key for one in ledger.alerts()]
        assert len(keys) == len(set(keys)) == 6
