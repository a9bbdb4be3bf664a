"""What every ledger checks of a batch before it touches its store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpuledger.domain.events import Recorded
from gpuledger.domain.ports import Batch
from gpuledger.domain.units import format_instant, parse_instant

from .codec import Draft, draft


@dataclass(frozen=True, slots=True)
class Placed:
    """An event at its place with its leaf, under the names by which eventsourcing knows an event."""

    recorded: Recorded
    leaf: bytes

    @property
    def originator_id(self) -> str:
        return self.recorded.stream

    @property
    def originator_version(self) -> int:
        return self.recorded.version


@dataclass(frozen=True, slots=True)
class Drafts:
    """A batch in bytes. `expect` being what it says, the versions of its events are known before the store is asked."""

    expect: Mapping[str, int]
    at: int
    events: tuple[tuple[Draft, int], ...]

    def place(self, first_seq: int, at: int) -> tuple[Placed, ...]:
        """The events from `first_seq` on."""
        return tuple(
            Placed(draft.recorded(seq, version, at), draft.leaf(seq, version, at))
            for seq, (draft, version) in enumerate(self.events, first_seq)
        )


def drafts_of(batch: Batch, at: int) -> Drafts:
    """Raises ValueError for what no ledger may take: a stream not in `expect`, a value or an instant out of bounds."""
    _check_instant(at)
    versions = dict(batch.expect)
    for stream, version in versions.items():
        if version < 0:
            raise ValueError(f"stream {stream} is expected at version {version}")
    events: list[tuple[Draft, int]] = []
    for event in batch.events:
        if event.stream not in versions:
            raise ValueError(f"stream {event.stream} is written but not in expect")
        versions[event.stream] += 1
        events.append((draft(event), versions[event.stream]))
    return Drafts(batch.expect, at, tuple(events))


def _check_instant(at: int) -> None:
    try:
        parse_instant(format_instant(at))
    except (ValueError, OverflowError):
        raise ValueError(f"{at} microseconds are no instant of a ledger") from None
