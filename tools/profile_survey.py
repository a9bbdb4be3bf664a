"""Measuring a grid, point by point, each recorded as soon as it is measured.

A point that the ledger has for exactly this configuration and class of accelerator is not measured again, so a survey
that was interrupted goes on where it was. A point that fails is told, and the others are measured all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from gpuledger.domain.accounting import reserve_of
from gpuledger.domain.aggregates.deployment import MeasuredEnvelope
from gpuledger.domain.draft import Draft
from gpuledger.domain.envelopes import with_margin
from gpuledger.domain.events import (
    DeploymentRegistered,
    DeploymentRevised,
    DeploymentSpec,
    EnvelopeMeasured,
    StreamKind,
    stream_name,
)
from gpuledger.domain.policy import Policy
from gpuledger.domain.ports import AcceleratorReading, RuntimeFault
from gpuledger.domain.world import fold

from .bootstrap import Parts, configuration_of
from .config import Config
from .ledger_target import TargetError
from .measure import Measurement, Place, measure
from .profile_grid import MAX_POINTS, Grid, Impossible, Point, Shape


class Outcome(StrEnum):
    """What became of a point on one class of accelerator."""

    MEASURED = "measured"
    KNOWN = "known"
    FAILED = "failed"
    IMPOSSIBLE = "impossible"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class Row:
    """A point on one class of accelerator. `measured` is set when it is MEASURED or KNOWN, `reason` otherwise."""

    shape: Shape
    accelerator: AcceleratorReading
    outcome: Outcome = Outcome.LEFT
    config_hash: str | None = None
    measured: MeasuredEnvelope | None = None
    measurement: Measurement | None = None
    reason: str = ""

    def requirement_bytes(self, policy: Policy) -> int | None:
        return None if self.measured is None else with_margin(policy, self.measured.envelope.peak_bytes)

    def fits(self, policy: Policy) -> int | None:
        """How many of it the accelerator holds when nothing else is on it."""
        needed, total = self.requirement_bytes(policy), self.accelerator.total_bytes
        return None if needed is None else max(0, total - reserve_of(policy, total)) // needed


class Watcher(Protocol):
    """Who tells people how it goes."""

    def begins(self, row: Row, number: int, count: int) -> None: ...

    def step(self, row: Row, step: str) -> None: ...

    def ended(self, row: Row, number: int, count: int) -> None: ...


class Survey:
    """`run` is all of it; `rows` are whole at any moment, so that one that was interrupted can be shown."""

    def __init__(self, config: Config, parts: Parts, deployment_id: str, grid: Grid, *, again: bool) -> None:
        """`parts` know the points of the grid as runtimes."""
        self._config = config
        self._parts = parts
        self._deployment_id = deployment_id
        self._grid = grid
        self._again = again
        self._world = parts.world
        self.rows: list[Row] = []

    @property
    def left(self) -> int:
        """Points that are still to be measured."""
        return sum(row.outcome is Outcome.LEFT for row in self.rows)

    async def run(self, watcher: Watcher) -> None:
        """Measure what is to be measured. Raises RuntimeFault for a model or a program that is not there.

        Raises TargetError when there is no accelerator for it, LedgerUnavailable, LedgerCorrupt.
        """
        spec = await asyncio.to_thread(self._spec)
        self.rows = list(await asyncio.to_thread(self._looked_up, await self._accelerators(spec)))
        count = self.left
        for number, (index, row) in enumerate(self._to_measure(), 1):
            watcher.begins(row, number, count)
            self.rows[index] = done = await self._measured(spec, row, watcher)
            watcher.ended(done, number, count)

    def _to_measure(self) -> Iterator[tuple[int, Row]]:
        return ((index, row) for index, row in enumerate(tuple(self.rows)) if row.outcome is Outcome.LEFT)

    # ---- what there is to measure --------------------------------------------------------------------------------

    def _spec(self) -> DeploymentSpec:
        """Blocking: hashes the model. Raises RuntimeFault."""
        self._parts.runtimes.facts(self._deployment_id)
        document = self._config.document
        entries = tuple(entry for entry in document.deployments if entry.id == self._deployment_id)
        alone = replace(self._config, document=replace(document, deployments=entries))
        (spec,) = configuration_of(alone, self._parts).deployments
        return spec

    async def _accelerators(self, spec: DeploymentSpec) -> list[AcceleratorReading]:
        """Of each class of its kind the healthiest and emptiest. Raises TargetError when there is none."""
        reading = await asyncio.to_thread(self._parts.telemetry.sample, ())
        of_kind = [one for one in reading.accelerators if one.kind is spec.kind]
        if not of_kind:
            told = "; ".join(sorted({fault.code for fault in reading.faults}))
            raise TargetError(f"no accelerator of kind {spec.kind.value} can be seen" + (f" ({told})" if told else ""))
        classes: dict[str, AcceleratorReading] = {}
        for one in sorted(of_kind, key=lambda one: (bool(one.faults), one.used_bytes, one.index)):
            classes.setdefault(one.gpu_class, one)
        if len(self._grid) * len(classes) > MAX_POINTS:
            told = f"{len(self._grid)} points on {len(classes)} classes of accelerators"
            raise TargetError(f"{told} are more than the {MAX_POINTS} of one run: measure a part of the grid")
        return sorted(classes.values(), key=lambda one: one.accelerator_id)

    def _looked_up(self, accelerators: list[AcceleratorReading]) -> Iterator[Row]:
        """Every row as it stands before anything is measured. Blocking, as `facts` is."""
        for accelerator in accelerators:
            for point in self._grid:
                if isinstance(point, Impossible):
                    yield Row(point.shape, accelerator, Outcome.IMPOSSIBLE, reason=point.reason)
                else:
                    yield self._row(point, accelerator)

    def _row(self, point: Point, accelerator: AcceleratorReading) -> Row:
        try:
            config_hash = self._parts.runtimes.facts(point.runtime_id).config_hash
        except RuntimeFault as fault:
            return Row(point.shape, accelerator, Outcome.FAILED, reason=str(fault))
        known = None if self._again else self._known(config_hash, accelerator.gpu_class)
        outcome = Outcome.LEFT if known is None else Outcome.KNOWN
        return Row(point.shape, accelerator, outcome, config_hash, measured=known)

    def _known(self, config_hash: str, gpu_class: str) -> MeasuredEnvelope | None:
        """What the ledger has of this very configuration there; a suspect one is to be measured again."""
        deployment = self._world.deployments.get(self._deployment_id)
        for measured in () if deployment is None else deployment.measured:
            envelope = measured.envelope
            if (envelope.config_hash, envelope.gpu_class) == (config_hash, gpu_class) and not envelope.suspect:
                return measured
        return None

    # ---- one point -----------------------------------------------------------------------------------------------

    async def _measured(self, spec: DeploymentSpec, row: Row, watcher: Watcher) -> Row:
        (point,) = (one for one in self._grid if isinstance(one, Point) and one.shape == row.shape)
        accelerator = row.accelerator
        reserve = reserve_of(self._config.policy, accelerator.total_bytes)
        place = Place(self._deployment_id, accelerator.accelerator_id, reserve, spec.sleep, point.runtime_id)
        try:
            measurement = await measure(
                self._parts.runtimes,
                self._parts.telemetry.sample,
                self._parts.clock,
                point.runtime,
                place,
                progress=lambda step: watcher.step(row, step),
            )
        except RuntimeFault as fault:
            return replace(row, outcome=Outcome.FAILED, reason=str(fault))
        event = measurement.event
        # In the event loop's thread, where nothing can interrupt it: what was measured is recorded, or it was not.
        self._record(spec, event)
        measured = MeasuredEnvelope(event.envelope, event.load_ms, event.unload_ms, event.sleep)
        return replace(row, outcome=Outcome.MEASURED, measured=measured, measurement=measurement)

    def _record(self, spec: DeploymentSpec, event: EnvelopeMeasured) -> None:
        """The deployment as it is now, if the ledger does not have it so, and its envelope. Raises LedgerUnavailable.

        How long it stays may be an operator's word, which stands until the file says something else: it is left.
        """
        draft = Draft(self._world, self._parts.clock.now())
        stream = stream_name(StreamKind.DEPLOYMENT, spec.deployment_id)
        known = draft.world.deployments.get(spec.deployment_id)
        if known is None:
            draft.emit(stream, DeploymentRegistered(spec, "configuration"))
        elif known.retired or known.spec != replace(spec, residency=known.spec.residency):
            draft.emit(stream, DeploymentRevised(replace(spec, residency=known.spec.residency), "configuration"))
        draft.emit(stream, event)
        batch = draft.batch()
        assert batch is not None
        self._world = fold(self._world, self._parts.ledger.append(batch, draft.now))
