"""The leases projection over as much of the newest end of a ledger as is needed."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Final

from gpuledger.domain.events import LeaseExpired, LeaseGranted, LeasePreempted, LeaseReleased, Recorded
from gpuledger.domain.ports import LedgerReader
from gpuledger.projections.leases import TYPES, Leases, evolve

#: Events that are read at first; four times as many while a grant that is needed lies further back.
_WINDOW: Final = 1024


def lease_history(reader: LedgerReader, held: Iterable[str], ended: int) -> Leases:
    """Every lease of `held`, and the newest `ended` that have ended, each from its grant on."""
    window = max(_WINDOW, 4 * ended)
    while True:
        newest_first = reader.read_backward(TYPES, window)
        granted = {event.data.lease_id for event in newest_first if isinstance(event.data, LeaseGranted)}
        needed = {*held, *_newest_ended(newest_first, ended)}
        if needed <= granted or len(newest_first) < window:
            return reduce(evolve, reversed(newest_first), Leases())
        window *= 4


def _newest_ended(newest_first: Iterable[Recorded], limit: int) -> list[str]:
    ended = [
        event.data.lease_id
        for event in newest_first
        if isinstance(event.data, LeaseReleased | LeaseExpired | LeasePreempted)
    ]
    return ended[:limit]
