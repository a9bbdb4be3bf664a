"""A ledger that fails as it is told to: another writer is faster, the store cannot be written, an answer is lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import Enum, auto
from typing import assert_never

from gpuledger.adapters.ledger.memory import MemoryLedger
from gpuledger.domain.events import LabResumed, NewEvent, PressureChanged, Recorded, StreamKind
from gpuledger.domain.policy import Pressure
from gpuledger.domain.ports import Batch, LedgerConflict, LedgerUnavailable


class StoreFault(Enum):
    """What becomes of one append."""

    #: A stream has moved on, says the store; nobody else has written that can be seen yet.
    CONFLICT = auto()
    #: Another writer has written to the streams of the batch just before it.
    OTHER_WRITER = auto()
    #: Nothing was appended.
    UNAVAILABLE = auto()
    #: It was appended, and the store says that it was not.
    UNACKNOWLEDGED = auto()


class BreakableLedger(MemoryLedger):
    """`appends`: how many batches were taken, of whoever asked, less those of the other writer."""

    def __init__(self) -> None:
        super().__init__()
        self.appends = 0
        self._to_come: deque[StoreFault] = deque()

    def fail_next(self, faults: Iterable[StoreFault]) -> None:
        """One fault for each of the appends to come."""
        self._to_come.extend(faults)

    def mend(self) -> None:
        self._to_come.clear()

    def append(self, batch: Batch, at: int) -> tuple[Recorded, ...]:
        fault = self._to_come.popleft() if self._to_come else None
        match fault:
            case None:
                pass
            case StoreFault.CONFLICT:
                raise LedgerConflict(min(batch.expect))
            case StoreFault.OTHER_WRITER:
                self._write_before(batch, at)
            case StoreFault.UNAVAILABLE:
                raise LedgerUnavailable("no space left on device")
            case StoreFault.UNACKNOWLEDGED:
                self._take(batch, at)
                raise LedgerUnavailable("disk I/O error")
            case _:
                assert_never(fault)
        return self._take(batch, at)

    def _take(self, batch: Batch, at: int) -> tuple[Recorded, ...]:
        recorded = super().append(batch, at)
        self.appends += 1
        return recorded

    def _write_before(self, batch: Batch, at: int) -> None:
        """Events that change nothing, in those streams of a batch that another process writes to as well."""
        events = [event for stream in sorted(batch.expect) if (event := _harmless(stream)) is not None]
        if events:
            expect = {event.stream: self.stream_version(event.stream) for event in events}
            super().append(Batch(tuple(events), expect), at)


def _harmless(stream: str) -> NewEvent | None:
    kind, _, subject = stream.partition(":")
    match kind:
        case StreamKind.ACCELERATOR:
            return NewEvent(stream, PressureChanged(subject, Pressure.NORMAL, Pressure.NORMAL, 0))
        case StreamKind.POLICY:
            return NewEvent(stream, LabResumed("olga"))
        case _:
            return None
