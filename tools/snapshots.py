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
    if world.seq != snapshot.seq or not _agrees_with_itself(world):
        _logger.warning("the snapshot at event %d contradicts itself: folding without it", snapshot.seq)
        return None
    return world


def _agrees_with_itself(world: World) -> bool:
    """Whether everything in it that names something else finds it. (What it says is judged by `gpuledger replay`.)"""
    if any(node.node_id != node_id for node_id, node in world.nodes.items()):
        return False
    if any(known.spec.deployment_id != deployment_id for deployment_id, known in world.deployments.items()):
        return False
    for accelerator_id, state in world.accelerators.items():
        if state.accelerator.accelerator_id != accelerator_id or state.node_id not in world.nodes:
            return False
        for resident_id, record in state.residents.items():
            resident = record.resident
            if (resident.resident_id, resident.accelerator_id) != (resident_id, accelerator_id):
                return False
            if resident.deployment_id not in world.deployments:
                return False
        if any(lease.resident_id not in state.residents for lease in state.leases.values()):
            return False
    granted = {r.accelerator_id for r in world.requests.values() if r.accelerator_id is not None}
    return granted <= world.accelerators.keys()


def save_world(ledger: Ledger, world: World) -> None:
    """Keep the state beside the events. Raises LedgerUnavailable, LedgerCorrupt."""
    if world.seq == 0:
        return
    leaf = next(iter(ledger.leaves(world.seq - 1)))
    ledger.save_snapshot(Snapshot(world.seq, WORLD_SCHEMA, leaf.leaf_hash, _WORLD.dump_json(world)))
