"""A ledger that a scheduler is at work on, for tests of what shows its state: a test adds what happens next."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import Any, Literal

from gpuledger.domain.events import EnvelopeSuspected, Recorded, SampledAccelerator, TelemetrySampled
from gpuledger.domain.policy import Pressure
from gpuledger.domain.units import GIB, seconds
from gpuledger.domain.world import World
from gpuledger.domain.world import evolve as evolve_world
from gpuledger.projections import alerts
from gpuledger.projections.alerts import Alert, AlertKind, Onsets, alerts_of
from tests.simulation.ledgers import crowded_and_killed
from tests.simulation.virtual_shell import NODE

CARD = "GPU-0"


class DrivenLedger:
    """`crowded_and_killed`, as if its scheduler lived on. What is added happens a second apart."""

    def __init__(self) -> None:
        killed = crowded_and_killed()
        self.events = list(killed.events)
        self.world: World = killed.world

    @property
    def now(self) -> int:
        return self.world.at

    def add(self, stream: str, data: Any) -> int:
        """Returns when it happened."""
        version = self.world.versions.get(stream, 0) + 1
        event = Recorded(self.world.seq + 1, self.now + seconds(1), stream, version, data)
        self.events.append(event)
        self.world = evolve_world(self.world, event)
        return event.at

    def sample(self, **changes: Any) -> int:
        """Its card as it is, read anew."""
        shown = SampledAccelerator(
            accelerator_id=CARD,
            total_bytes=16 * GIB,
            used_bytes=1 * GIB,
            pressure_bp=0,
            pressure=Pressure.NORMAL,
            recovering_since=None,
            foreign_processes=0,
            residents=(),
        )
        at = self.now + seconds(1)
        reading = TelemetrySampled(NODE, at, at, None, None, (replace(shown, **changes),))
        return self.add(f"telemetry:{NODE}", reading)

    def alerts(self, now: int | None = None) -> tuple[Alert, ...]:
        onsets = reduce(alerts.evolve, self.events, Onsets())
        return alerts_of(self.world, self.now if now is None else now, onsets)

    def one(self) -> Alert:
        (alert,) = self.alerts()
        return alert

    def kinds(self) -> list[AlertKind]:
        return [alert.kind for alert in self.alerts()]


def suspected(cause: Literal["gpu_oom", "exceeded"], deployment_id: str = "chat") -> EnvelopeSuspected:
    return EnvelopeSuspected(
        deployment_id=deployment_id,
        accelerator_id=CARD,
        resident_id=f"{deployment_id}@GPU-0#1",
        config_hash=f"cfg-{deployment_id}",
        gpu_class="virtual",
        cause=cause,
        observed_bytes=13 * GIB,
        peak_bytes=11 * GIB,
    )
