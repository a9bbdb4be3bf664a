"""The folded state as a cache beside the ledger: a start folds the newest snapshot plus the tail (ledger.md).

A snapshot is written by the types of the state and read back by them. One of another schema, or that does not parse,
is discarded: folding from the beginning gives the same.
"""

from __future__ import annotations

import logging
from typing import Final

from pydantic import TypeAdapter, ValidationError

from gpuledger.domain.ports import Ledger, LedgerReader, Snapshot
from gpuledger.domain.world import WORLD_SCHEMA, World, fold

_WORLD: Final = TypeAdapter(World)
_PAGE: Final = 1000

_logger = logging.getLogger(__name__)


def load_world(ledger: LedgerReader, snapshot: Snapshot | None = None) -> World:
    """The state at the head of a ledger. Raises LedgerUnavailable, LedgerCorrupt."""
    world = (None if snapshot is None else read_snapshot(snapshot)) or World()
    while page := ledger.read(world.seq, _PAGE):
        world = fold(world, page)
    return world


def read_snapshot(snapshot: Snapshot) -> World | None:
    """The state in a snapshot; None when it is of no use."""
    if snapshot.schema != WORLD_SCHEMA:
        return None
    try:
        world = _WORLD.validate_json(snapshot.body)
    except ValidationError:
        _logger.warning("the snapshot at event %d does not parse: folding without it", snapshot.seq)
        return None
    return world if world.seq == snapshot.seq else None


def save_world(ledger: Ledger, world: World) -> None:
    """Keep the state beside the events. Raises LedgerUnavailable, LedgerCorrupt."""
    if world.seq == 0:
        return
    leaf = next(iter(ledger.leaves(world.seq - 1)))
    ledger.save_snapshot(Snapshot(world.seq, WORLD_SCHEMA, leaf.leaf_hash, _WORLD.dump_json(world)))
