"""Which deployments have no envelope for what they are and where they could run, and measuring them one by one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeAlias

import structlog

from gpuledger.domain.accounting import reserve_of
from gpuledger.domain.messages import EnvelopeTaken
from gpuledger.domain.ports import Clock, RuntimeFault, Runtimes, Telemetry
from gpuledger.domain.state import ResidencyPolicy
from gpuledger.domain.world import World

from .config import Config
from .measure import Measurement, Place, measure
from .sampler import Sampler
from .shell import Engine

#: (deployment id, step of the measurement).
Progress: TypeAlias = Callable[[str, str], None]

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """A deployment that could not be measured, and why."""

    place: Place
    fault: RuntimeFault


def places(world: World, deployments: Collection[str] | None = None, *, again: bool = False) -> tuple[Place, ...]:
    """One accelerator of each class on which a deployment could run and was not measured as it is now.

    `again`: also where it was. What is `always_warm` comes last: it is loaded as soon as it is measured.
    """
    found: list[tuple[bool, Place]] = []
    for deployment_id, deployment in sorted(world.deployments.items()):
        if deployment.retired or (deployments is not None and deployment_id not in deployments):
            continue
        classes: set[str] = set()
        for accelerator_id, state in sorted(world.accelerators.items()):
            accelerator = state.accelerator
            if state.retired or accelerator.kind is not deployment.spec.kind or accelerator.gpu_class in classes:
                continue
            classes.add(accelerator.gpu_class)
            if again or deployment.measured_on(accelerator.gpu_class) is None:
                reserve = reserve_of(world.policy, accelerator.total_bytes)
                always = deployment.spec.residency.policy is ResidencyPolicy.ALWAYS_WARM
                found.append((always, Place(deployment_id, accelerator_id, reserve)))
    return tuple(place for _, place in sorted(found, key=lambda entry: entry[0]))


class Measuring:
    """Measures with nothing else going on: no samples, and no load that an envelope would set off."""

    def __init__(
        self, config: Config, engine: Engine, sampler: Sampler, telemetry: Telemetry, runtimes: Runtimes, clock: Clock
    ) -> None:
        self._config = config
        self._engine = engine
        self._sampler = sampler
        self._telemetry = telemetry
        self._runtimes = runtimes
        self._clock = clock

    async def run(self, wanted: Collection[Place], progress: Progress) -> tuple[list[Measurement], list[Unmeasured]]:
        """Measure and record. Raises LedgerUnavailable, LedgerCorrupt."""
        measured: list[Measurement] = []
        unmeasured: list[Unmeasured] = []
        held_back: list[EnvelopeTaken] = []
        for place in wanted:
            try:
                measurement = await self._one(place, progress)
            except RuntimeFault as fault:
                _log.error("could not be measured", deployment=place.deployment_id, fault=str(fault))
                unmeasured.append(Unmeasured(place, fault))
                continue
            measured.append(measurement)
            taken = EnvelopeTaken(measurement.event)
            if self._loads_at_once(place):
                held_back.append(taken)
            else:
                await self._engine.ask(taken)
        for taken in held_back:
            await self._engine.ask(taken)
        return measured, unmeasured

    async def _one(self, place: Place, progress: Progress) -> Measurement:
        async with self._sampler.paused():
            return await measure(
                self._runtimes,
                self._telemetry.sample,
                self._clock,
                self._config.runtimes[place.deployment_id],
                place,
                progress=lambda step: progress(place.deployment_id, step),
            )

    def _loads_at_once(self, place: Place) -> bool:
        spec = self._engine.world.deployments[place.deployment_id].spec
        return spec.residency.policy is ResidencyPolicy.ALWAYS_WARM
