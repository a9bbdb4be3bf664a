"""Between what eventsourcing's recorders store and what a ledger hands out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from eventsourcing.domain import DomainEventProtocol
from eventsourcing.persistence import JSONTranscoder, Mapper, Notification, StoredEvent

from gpuledger.domain.ports import LedgerCorrupt

from .batches import Placed
from .codec import decode, leaf_hash


@dataclass(frozen=True)
class StoredLeaf(Notification):
    """A stored event with the hash that was stored beside its leaf; `id` is its `seq`, `state` its leaf."""

    leaf_hash: bytes


class LeafMapper(Mapper[str]):
    """Reads and writes leaves by the codec's closed list. The library's own imports whatever a topic names."""

    def __init__(self) -> None:
        super().__init__(JSONTranscoder())

    def to_stored_event(self, domain_event: DomainEventProtocol[str]) -> StoredLeaf:
        placed = cast("Placed", domain_event)
        event = placed.recorded
        return StoredLeaf(
            originator_id=event.stream,
            originator_version=event.version,
            topic=type(event.data).__name__,
            state=placed.leaf,
            id=event.seq,
            leaf_hash=leaf_hash(placed.leaf),
        )

    def to_domain_event(self, stored_event: StoredEvent) -> Placed:
        """Raises LedgerCorrupt when the hash beside a leaf is not its hash, or its row says other than the leaf."""
        stored = cast("StoredLeaf", stored_event)
        seq = stored.id
        if leaf_hash(stored.state) != stored.leaf_hash:
            raise LedgerCorrupt("its bytes are not those that were appended (another hash)", seq)
        event = decode(stored.state, seq)
        place = (event.stream, event.version, type(event.data).__name__)
        if place != (stored.originator_id, stored.originator_version, stored.topic):
            raise LedgerCorrupt("its row says another stream, version or type than its leaf", seq)
        return Placed(event, stored.state)
