"""Which deployments have no envelope for what they are and where they could run, and measuring them one by one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeAlias

import structlog

from gpuledger.domain.accounting import reserve_of
from gpuledger.domain.aggregates.accelerator import AcceleratorState
from gpuledger.domain.aggregates.deployment import DeploymentState
from gpuledger.domain.failures import CAPACITY_FAILURES
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
#: Whether something can be measured on an accelerator now.
Usable: TypeAlias = Callable[[AcceleratorState], bool]

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """A deployment that could not be measured, and why."""

    place: Place
    fault: RuntimeFault


def there(state: AcceleratorState) -> bool:
    """It has not been retired."""
    return not state.retired


def places(
    world: World, deployments: Collection[str] | None = None, *, again: bool = False, usable: Usable = there
) -> tuple[Place, ...]:
    """One accelerator of each class on which a deployment could run and has no envelope to trust as it is now.

    `again`: also where it has. None where its model file is not what it should be: what is measured of another one says
    nothing. What is `always_warm` comes last: it is loaded as soon as it is measured.
    """
    found: list[tuple[bool, Place]] = []
    for deployment_id, deployment in sorted(world.deployments.items()):
        left_out = deployments is not None and deployment_id not in deployments
        if deployment.retired or deployment.corrupt is not None or left_out:
            continue
        classes: set[str] = set()
        for accelerator_id, state in sorted(world.accelerators.items()):
            accelerator = state.accelerator
            if accelerator.kind is not deployment.spec.kind or accelerator.gpu_class in classes or not usable(state):
                continue
            classes.add(accelerator.gpu_class)
            if again or is_unmeasured(deployment, accelerator.gpu_class):
                reserve = reserve_of(world.policy, accelerator.total_bytes)
                always = deployment.spec.residency.policy is ResidencyPolicy.ALWAYS_WARM
                found.append((always, Place(deployment_id, accelerator_id, reserve, deployment.spec.sleep)))
    return tuple(place for _, place in sorted(found, key=lambda entry: entry[0]))


def is_unmeasured(deployment: DeploymentState, gpu_class: str) -> bool:
    """Whether there is no envelope of its present configuration there, or only a suspect one (semantics.md 3, 8)."""
    measured = deployment.measured_on(gpu_class)
    return measured is None or measured.envelope.suspect


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
                measurement = await self.one(place, progress)
            except RuntimeFault as fault:
                tell = _log.warning if fault.failure in CAPACITY_FAILURES else _log.error
                tell("could not be measured", deployment=place.deployment_id, fault=str(fault))
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

    async def one(self, place: Place, progress: Progress) -> Measurement:
        """Measure, and record nothing. Raises RuntimeFault; no sample is taken meanwhile."""
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
