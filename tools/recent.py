"""Projections over as much of the newest end of a ledger as somebody who asks for now needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Final

from gpuledger.domain.events import FailureRecorded, Recorded, TelemetryMissed
from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import LedgerReader
from gpuledger.projections import alerts, failures
from gpuledger.projections.alerts import Onsets
from gpuledger.projections.failures import Failures, FailureView

#: Events that say when something began that alerts are about. They are rare; reading so many takes some 50 ms.
ONSETS_READ: Final = 1_000
#: Failures, refusals and what was done about them that are counted: about a second of reading, 20 MiB of memory.
COUNTED: Final = 20_000


def newest_onsets(reader: LedgerReader) -> Onsets:
    """Since when there is what alerts are about, as far back as is read. Raises LedgerUnavailable, LedgerCorrupt."""
    newest_first = reader.read_backward(alerts.TYPES, ONSETS_READ)
    return reduce(alerts.evolve, reversed(newest_first), Onsets())


def newest_failures(reader: LedgerReader, limit: int) -> Sequence[FailureView]:
    """The newest failures of all classes, newest first. Raises LedgerUnavailable, LedgerCorrupt."""
    return _views(reader.read_backward(failures.FAILURE_TYPES, limit))


@dataclass(frozen=True, slots=True)
class Tally:
    """What was counted: `events` of them, back to the instant `since`, or from the beginning of the ledger (None)."""

    failures: Failures
    events: int
    since: int | None
    newest: Sequence[FailureView]


def tally(reader: LedgerReader, limit: int, failure: Failure | None) -> Tally:
    """Counts, and the newest `limit` failures of one class or of all, newest first. Raises as the above."""
    newest_first = reader.read_backward(failures.TYPES, COUNTED)
    views = [view for view in _views(newest_first) if failure in (None, view.failure)]
    return Tally(
        failures=reduce(failures.evolve, reversed(newest_first), Failures()),
        events=len(newest_first),
        since=newest_first[-1].at if len(newest_first) == COUNTED else None,
        newest=views[:limit],
    )


def _views(newest_first: Sequence[Recorded]) -> Sequence[FailureView]:
    return [
        failures.view_of(event, event.data)
        for event in newest_first
        if isinstance(event.data, FailureRecorded | TelemetryMissed)
    ]
