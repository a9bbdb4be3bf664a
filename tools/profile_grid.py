"""The grid of `gpuledger profile`: a deployment in every combination of context, concurrency and batch.

A point is the deployment's own runtime configuration with the three replaced. What its runtime cannot be in such a
shape (llama.cpp computes an embedding in one piece, so its micro-batch must hold the context) is told, not tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from pydantic import ValidationError

from gpuledger.adapters.runtimes.config import RuntimeConfig
from gpuledger.domain.aggregates.deployment import MAX_ENVELOPES

#: Of one run, and over all classes of accelerators: half of the envelopes that the scheduler keeps of a deployment, so
#: that a grid never drives out what it itself measured, and leaves room for what was measured before.
MAX_POINTS: Final = MAX_ENVELOPES // 2


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """What of a configuration the grid varies."""

    context_length: int
    concurrency: int
    batch_size: int

    def __str__(self) -> str:
        return f"context {self.context_length}, concurrency {self.concurrency}, batch {self.batch_size}"

    @classmethod
    def of(cls, runtime: RuntimeConfig) -> Shape:
        return cls(runtime.context_length, runtime.parallel, runtime.batch_size)


@dataclass(frozen=True, slots=True)
class Point:
    """One configuration to measure. `runtime_id`: what the runtimes know it by, no id that a deployment can have."""

    shape: Shape
    runtime_id: str
    runtime: RuntimeConfig


@dataclass(frozen=True, slots=True)
class Impossible:
    """A combination that the runtime cannot be configured with, and why."""

    shape: Shape
    reason: str


Grid: TypeAlias = Sequence[Point | Impossible]


@dataclass(frozen=True, slots=True)
class Axes:
    """The values of each axis; none where the deployment's own counts."""

    contexts: tuple[int, ...] = ()
    concurrencies: tuple[int, ...] = ()
    batches: tuple[int, ...] = ()

    def shapes(self, own: Shape) -> tuple[Shape, ...]:
        """Every combination once, in order.

        >>> [str(shape) for shape in Axes(contexts=(2048, 512)).shapes(Shape(512, 1, 256))]
        ['context 512, concurrency 1, batch 256', 'context 2048, concurrency 1, batch 256']
        """
        axes = (
            self.contexts or (own.context_length,),
            self.concurrencies or (own.concurrency,),
            self.batches or (own.batch_size,),
        )
        return tuple(sorted({Shape(*values) for values in itertools.product(*axes)}))


def grid_of(deployment_id: str, runtime: RuntimeConfig, axes: Axes) -> Grid:
    """The grid of a deployment, smallest first."""
    own = Shape.of(runtime)
    return tuple(
        _point(f"{deployment_id} #{number}", runtime, shape) for number, shape in enumerate(axes.shapes(own), 1)
    )


def runtimes_of(grid: Grid) -> Mapping[str, RuntimeConfig]:
    """The configurations of a grid, by the names that its points have for them."""
    return {point.runtime_id: point.runtime for point in grid if isinstance(point, Point)}


def _point(runtime_id: str, runtime: RuntimeConfig, shape: Shape) -> Point | Impossible:
    varied = {
        "context_length": shape.context_length,
        "parallel": shape.concurrency,
        "batch_size": shape.batch_size,
    }
    # Only what was written: what follows from other keys must follow from the new ones.
    written = {name: getattr(runtime, name) for name in runtime.model_fields_set}
    try:
        return Point(shape, runtime_id, type(runtime).model_validate({**written, **varied}))
    except ValidationError as error:
        return Impossible(shape, "; ".join(_told(detail["loc"], detail["msg"]) for detail in error.errors()))


def _told(where: tuple[int | str, ...], message: str) -> str:
    """A rule that joins two keys names the one that is wrong itself."""
    return ": ".join([*(str(step) for step in where), message.removeprefix("Value error, ")])
