"""What ails a card: what it counts itself, and the Xids that it reported (semantics.md 6.2, ACCELERATOR_UNHEALTHY).

An uncorrectable ECC error is DEGRADED, not FAILED: since Ampere the damage is contained to the process that hit it and
the page is not used again, and what is not contained comes as an Xid of its own (48, 95, 140), which is FAILED.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from gpuledger.domain.ports import HealthFault
from gpuledger.domain.state import Health
from gpuledger.domain.units import MAX_INTEGER

from .faults import HealthCause
from .nvml_binding import Device, NvmlBinding, offered
from .nvml_layout import Place
from .nvml_xids import XidWatch

_WORST_FIRST: Final = (Health.LOST, Health.FAILED, Health.DEGRADED)


class HealthReader:
    """Reads the counters of a card once in a sample, whatever the number of its instances. For one thread."""

    def __init__(self, binding: NvmlBinding, xids: XidWatch) -> None:
        self._binding = binding
        self._xids = xids
        self._counted: dict[str, tuple[HealthFault, ...]] = {}

    def begin(self) -> None:
        """A new sample."""
        self._counted.clear()

    def faults(self, place: Place) -> tuple[HealthFault, ...]:
        """Every fault that holds, the worst first and in a fixed order. An instance has those of its card.

        Raises NvmlError. Counters that a card does not keep or a container does not show are taken for 0.
        """
        card = place.card
        if card.uuid not in self._counted:
            self._counted[card.uuid] = tuple(self._count(card.device))
        found = (*self._counted[card.uuid], *self._xids.faults(place))
        return tuple(sorted(found, key=lambda one: _WORST_FIRST.index(one.health)))

    def _count(self, device: Device) -> Iterable[HealthFault]:
        """Counts that a card keeps for life are the marks, where it has them: they grow across reboots too."""
        rows = offered(self._binding.remapped_rows, device)
        if rows is not None and rows.failed:
            yield HealthFault(Health.FAILED, str(HealthCause.ROW_REMAP_FAILED), rows.remapped + 1)
        errors = offered(self._binding.uncorrected_errors, device) or 0
        if errors:
            lifetime = offered(self._binding.lifetime_uncorrected_errors, device) or 0
            # Some driver counts beyond all that can be written down: such a count is as great as any.
            mark = min(max(errors, lifetime), MAX_INTEGER)
            yield HealthFault(Health.DEGRADED, str(HealthCause.ECC_UNCORRECTED), mark)
        if rows is not None and rows.pending:
            yield HealthFault(Health.DEGRADED, str(HealthCause.ROW_REMAP_PENDING), rows.remapped + 1)
