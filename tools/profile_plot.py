"""A picture of a measured grid, drawn with matplotlib where the extra `gpuledger[plot]` has brought it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from gpuledger.domain.accounting import reserve_of
from gpuledger.domain.policy import Policy
from gpuledger.domain.units import GIB

from .ledger_target import TargetError
from .profile_survey import Row

Draw: TypeAlias = Callable[[str, Sequence[Row], Policy], None]

FORMATS: Final = (".png", ".svg", ".pdf")
_WIDTH_INCHES: Final = 8
_PANEL_HEIGHT_INCHES: Final = 4.5


def plotter(path: Path) -> Draw:
    """What draws to a file. Raises TargetError at once where that cannot be: a measurement takes minutes."""
    if path.suffix.lower() not in FORMATS:
        raise TargetError(f"--plot: {path} must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    if not path.absolute().parent.is_dir():
        raise TargetError(f"--plot: {path.absolute().parent} is no folder")
    if path.is_dir():
        raise TargetError(f"--plot: {path} is a folder")
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise TargetError("--plot needs matplotlib: pip install 'gpuledger[plot]'") from None

    def draw(deployment_id: str, rows: Sequence[Row], policy: Policy) -> None:
        """Raises OSError."""
        _draw(figures.Figure, path, deployment_id, rows, policy)

    return draw


def _draw(new_figure: Any, path: Path, deployment_id: str, rows: Sequence[Row], policy: Policy) -> None:
    """A panel for each class of accelerator: the requirement over the context, a line for each of the other pairs."""
    classes = _by_class(rows)
    figure = new_figure(figsize=(_WIDTH_INCHES, _PANEL_HEIGHT_INCHES * len(classes)), layout="constrained")
    panels = figure.subplots(len(classes), squeeze=False)[:, 0]
    for panel, (gpu_class, of_class) in zip(panels, classes.items(), strict=True):
        for label, points in _lines(of_class, policy).items():
            contexts, requirements = zip(*sorted(points), strict=True)
            panel.plot(contexts, [needed / GIB for needed in requirements], marker="o", label=label)
        total = of_class[0].accelerator.total_bytes
        room = (total - reserve_of(policy, total)) / GIB
        if panel.get_ylim()[1] >= room:
            panel.axhline(room, linestyle="--", color="grey", label="all that can be handed out")
        panel.set(title=f"{deployment_id} on {gpu_class}", xlabel="context (tokens)", ylabel="requirement (GiB)")
        panel.set_ylim(bottom=0, top=1.1 * panel.get_ylim()[1])
        panel.legend(fontsize="small")
        panel.grid(visible=True, alpha=0.3)
    figure.savefig(path)


def _by_class(rows: Sequence[Row]) -> Mapping[str, Sequence[Row]]:
    """The rows that have figures, by class of accelerator."""
    classes: dict[str, list[Row]] = {}
    for row in rows:
        if row.measured is not None:
            classes.setdefault(row.accelerator.gpu_class, []).append(row)
    return classes


def _lines(rows: Sequence[Row], policy: Policy) -> Mapping[str, Sequence[tuple[int, int]]]:
    """Points (context, requirement) of each line, by its label."""
    lines: dict[str, list[tuple[int, int]]] = {}
    for row in rows:
        label = f"concurrency {row.shape.concurrency}, batch {row.shape.batch_size}"
        if (needed := row.requirement_bytes(policy)) is not None:
            lines.setdefault(label, []).append((row.shape.context_length, needed))
    return lines
