"""What operators see of the running scheduler: the documents of the commands that ask a ledger, from its own state."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import fields
from functools import reduce
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog
from pydantic import TypeAdapter

from gpuledger.adapters.http.operator_ports import Answer, Document, Shut
from gpuledger.adapters.http.ports import Cause
from gpuledger.domain.documents import policy_document
from gpuledger.domain.events import EvictionCause, EvictionStarted, Recorded
from gpuledger.domain.ports import LedgerCorrupt, LedgerReader, LedgerUnavailable
from gpuledger.domain.units import format_instant
from gpuledger.domain.world import World
from gpuledger.projections import plan_history
from gpuledger.projections.plan_history import PlanHistory

from .desk import Gate
from .queue_status import examine
from .recent import newest_failures, newest_onsets
from .shell import Engine
from .status import Driver, Source, status_document

_FAILURES_SHOWN: Final = 5
#: Events that an operator may have caused. Evictions and changes of health mostly have other causes.
_OF_OPERATORS: Final = frozenset(
    {
        "PolicyRevised",
        "LabPaused",
        "LabResumed",
        "NodeCordoned",
        "NodeUncordoned",
        "NodeDrainStarted",
        "ResidencyPolicyChanged",
        "EnvelopeAccepted",
        "AcceleratorHealthChanged",
        "EvictionStarted",
    }
)
#: So far back among those: some milliseconds of reading.
_LOOKED_AT: Final = 2_000
#: Of a status, in each document that shows a part of it.
_HEAD: Final = ("now", "ledger", "scheduler", "policy_revision", "lab_paused", "nodes")

_T = TypeVar("_T")

_log = structlog.get_logger(__name__)


class OperatorViews:
    """On one engine. `path` is that of its ledger."""

    def __init__(self, engine: Engine, ledger: LedgerReader, gate: Gate, path: Path) -> None:
        self._engine = engine
        self._ledger = ledger
        self._gate = gate
        self._path = path

    async def status(self) -> Document:
        """Also while the ledger cannot be read: then without what is not in the folded state."""
        read = await self._read(lambda ledger: (newest_failures(ledger, _FAILURES_SHOWN), newest_onsets(ledger)))
        failures, onsets = ((), None) if read is None else read
        return status_document(self._engine.world, self._engine.now(), self._source(), failures, onsets)

    async def alerts(self) -> Document:
        shown = await self.status()
        head = {key: shown[key] for key in ("now", "ledger", "scheduler")}
        return {"schema": "gpuledger.alerts/1", **head, "alerts": shown["alerts"]}

    async def queue(self) -> Document:
        """Also while the ledger cannot be read, as the status."""
        shown = status_document(self._engine.world, self._engine.now(), self._source())
        examined = await self._read(lambda ledger: examine(ledger, shown["queue"]))
        head = {key: shown[key] for key in _HEAD}
        return {"schema": "gpuledger.queue/1", **head, "queue": shown["queue"] if examined is None else examined}

    def nodes(self) -> Document:
        world = self._engine.world
        return {
            "schema": "gpuledger.nodes/1",
            "now": format_instant(self._engine.now()),
            "nodes": [_node(world, node_id) for node_id in sorted(world.nodes)],
        }

    def policy(self) -> Document:
        policy = self._engine.world.policy
        return {"schema": "gpuledger.policy/1", "revision": policy.revision, "policy": policy_document(policy)}

    async def plans(self, limit: int) -> Answer:
        kept = self._engine.world.policy.plan_history_limit
        events = await self._read(lambda ledger: ledger.read_backward(frozenset({"PlanDecided"}), kept))
        if events is None:
            return Shut(Cause.LEDGER_UNAVAILABLE)
        newest = reduce(plan_history.evolve, reversed(events[:limit]), PlanHistory(limit=limit)).newest()
        return {
            "schema": "gpuledger.plans/1",
            "now": format_instant(self._engine.now()),
            "history_limit": kept,
            "plans": [
                {one.name: getattr(record, one.name) for one in fields(record)}
                | {"decided_at": format_instant(record.decided_at), "at": format_instant(record.at)}
                for record in newest
            ],
            "left_out": max(0, len(events) - limit),
        }

    async def operations(self, limit: int) -> Answer:
        events = await self._read(lambda ledger: ledger.read_backward(_OF_OPERATORS, _LOOKED_AT))
        if events is None:
            return Shut(Cause.LEDGER_UNAVAILABLE)
        done = [event for event in events if _is_of_an_operator(event)]
        return {
            "schema": "gpuledger.operations/1",
            "now": format_instant(self._engine.now()),
            "operations": [recorded_document(event) for event in done[:limit]],
        }

    async def _read(self, read: Callable[[LedgerReader], _T]) -> _T | None:
        """What the ledger has; None where it cannot be read, which the log says why."""
        try:
            return await asyncio.to_thread(read, self._ledger)
        except (LedgerUnavailable, LedgerCorrupt) as error:
            _log.warning("the ledger could not be read for an operator", error=str(error))
            return None

    def _source(self) -> Source:
        starting = self._gate.cause is Cause.STARTING
        return Source(str(self._path), Driver.STARTING if starting else Driver.RUNNING, os.getpid())


def recorded_document(event: Recorded) -> dict[str, Any]:
    """An event for who caused it: its place in the ledger, and what it says."""
    kind = type(event.data)
    return {
        "seq": event.seq,
        "at": format_instant(event.at),
        "type": kind.__name__,
        "stream": event.stream,
        "data": TypeAdapter[Any](kind).dump_python(event.data, mode="json"),
    }


def _is_of_an_operator(event: Recorded) -> bool:
    """Of an eviction `by` may also be the deployment that it makes room for."""
    if isinstance(event.data, EvictionStarted):
        return event.data.cause is EvictionCause.OPERATOR
    return getattr(event.data, "by", None) is not None


def _node(world: World, node_id: str) -> dict[str, Any]:
    node = world.nodes[node_id]
    here = [state for state in world.accelerators.values() if state.node_id == node_id and not state.retired]
    return {
        "node_id": node_id,
        "running": node.running,
        "production_eligible": node.production_eligible,
        "cordoned": node.cordoned,
        "draining": node.draining,
        "drained": node.drained,
        "shutting_down": node.draining_for_shutdown,
        "labels": dict(node.labels),
        "memory_bytes": node.memory_bytes,
        "external_bytes": node.external_bytes,
        "accelerators": sorted(state.accelerator.accelerator_id for state in here),
        "residents": sum(len(state.residents) for state in here),
        "leases": sum(len(state.leases) for state in here),
    }
