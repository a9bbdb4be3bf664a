"""Which fatal Xids each card has reported while we watched (xids.py; nvml.h, event handling methods).

The driver collects the events of a card from when they are asked for; those from before are in the kernel's log only.
They are taken in the thread that samples, without waiting. An Xid that a partitioned card attributes to one instance is
a fault of that instance, any other a fault of the card and of all of its instances.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Final

from gpuledger.domain.ports import HealthFault
from gpuledger.domain.state import Health

from . import nvml_binding as nvml
from .nvml_binding import EventSet, NvmlBinding, NvmlError, XidEvent
from .nvml_layout import Layout, Place
from .xids import FATAL_XIDS, cause_of

#: Of one card in one sample: a storm of Xids must not hold up the sample, and the driver keeps the rest for the next.
MAX_EVENTS_PER_SAMPLE: Final = 64
_NANOS_PER_MICRO: Final = 1_000
#: This card or driver has no events to offer (vGPU, Fermi and older): it is not asked again in this session.
_NO_EVENTS: Final = nvml.NOT_OFFERED | {nvml.INVALID_ARGUMENT}

_logger = logging.getLogger(__name__)


def wall_us() -> int:
    """Microseconds since 1970: what a mark has to be to grow from one run of the scheduler to the next."""
    return time.time_ns() // _NANOS_PER_MICRO


class XidWatch:
    """The event sets of a session, one for each card, and what came out of them. For one thread."""

    def __init__(self, binding: NvmlBinding, clock_us: Callable[[], int] = wall_us, newest_mark: int = 0) -> None:
        """`newest_mark`: of earlier runs. A clock that was ahead makes nothing that happens now older."""
        self._binding = binding
        self._clock_us = clock_us
        self._session = 0
        #: card -> its set; None for a card that has no events.
        self._sets: dict[str, EventSet | None] = {}
        #: Cards that could not be watched, which the log has been told; they are asked again in each sample.
        self._refused: set[str] = set()
        #: card -> GPU instance -> the accelerator that it was in the newest sample.
        self._instances: dict[str, dict[int, str]] = {}
        #: card or instance -> Xid -> mark of the newest one.
        self._seen: dict[str, dict[int, int]] = {}
        self._mark = newest_mark

    def drain(self, session: int) -> None:
        """Take what has happened since the sample before; sets of an earlier session went with it."""
        if session != self._session:
            self._sets.clear()
            self._session = session
        for card, events in tuple(self._sets.items()):
            if events is not None:
                self._drain(card, events)

    def follow(self, layout: Layout) -> None:
        """Watch the cards that are there now, and forget instances that are no more."""
        here = {card.uuid: card for card in layout.cards}
        for uuid, card in here.items():
            if uuid not in self._sets:
                self._watch(uuid, card.device)
        self._instances = {uuid: {} for uuid in here}
        for place in layout.places:
            if place.instance is not None:
                self._instances[place.card.uuid][place.instance] = place.accelerator_id
        for accelerator_id in layout.gone:
            if accelerator_id not in here:
                self._seen.pop(accelerator_id, None)

    def faults(self, place: Place) -> Iterable[HealthFault]:
        """Every fatal Xid that an accelerator has seen, the newest first."""
        newest: dict[int, int] = {}
        for key in {place.accelerator_id, place.card.uuid}:
            for xid, mark in self._seen.get(key, {}).items():
                newest[xid] = max(mark, newest.get(xid, 0))
        ordered = sorted(newest.items(), key=lambda one: one[1], reverse=True)
        return tuple(HealthFault(Health.FAILED, cause_of(xid), mark) for xid, mark in ordered)

    def _watch(self, uuid: str, device: nvml.Device) -> None:
        try:
            self._sets[uuid] = self._binding.watch_xids(device)
            self._refused.discard(uuid)
        except NvmlError as error:
            if error.code in _NO_EVENTS:
                self._sets[uuid] = None
            if uuid not in self._refused:
                self._refused.add(uuid)
                _logger.warning("the Xids of %s cannot be watched: %s", uuid, error)

    def _drain(self, card: str, events: EventSet) -> None:
        """A set that fails, as that of a lost card does, is given up; the card gets a new one once it answers."""
        try:
            for _ in range(MAX_EVENTS_PER_SAMPLE):
                event = self._binding.next_xid(events)
                if event is None:
                    return
                self._record(card, event)
        except NvmlError:
            del self._sets[card]
            self._binding.unwatch(events)

    def _record(self, card: str, event: XidEvent) -> None:
        if event.xid not in FATAL_XIDS:
            return
        instances = self._instances.get(card, {})
        hit = card if event.gpu_instance is None else instances.get(event.gpu_instance, card)
        self._mark = max(self._mark + 1, self._clock_us())
        self._seen.setdefault(hit, {})[event.xid] = self._mark
        _logger.warning("%s: Xid %d: %s", hit, event.xid, FATAL_XIDS[event.xid])
