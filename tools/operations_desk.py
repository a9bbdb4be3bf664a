"""What operators see of the running scheduler, and what they tell it: one operation at a time, each in the ledger.

The desk implements `adapters.http.operator_ports.OperatorDesk`. It decides nothing: `domain/operations.py` says what
cannot be done and records what is, and plans are the planner's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import fields
from functools import reduce
from pathlib import Path
from typing import Any, Final

import structlog
from pydantic import TypeAdapter

from gpuledger.adapters.http.operator_ports import (
    Answer,
    Denial,
    Denied,
    Document,
    Residing,
    Revision,
    Shut,
    Trial,
)
from gpuledger.adapters.http.ports import Cause
from gpuledger.domain.document_problems import DocumentError
from gpuledger.domain.documents import policy_document
from gpuledger.domain.events import EvictionCause, EvictionStarted, Recorded
from gpuledger.domain.explain import duration
from gpuledger.domain.messages import (
    AcceptEnvelope,
    ClearAccelerator,
    CordonNode,
    DrainNode,
    Operation,
    PauseLab,
    ResumeLab,
    RevisePolicy,
    SetResidency,
    UncordonNode,
    UnloadIdle,
)
from gpuledger.domain.operations import problem_of
from gpuledger.domain.planner import PlacementPlan, plan
from gpuledger.domain.policy import Priority
from gpuledger.domain.ports import LedgerCorrupt, LedgerReader, LedgerUnavailable
from gpuledger.domain.state import PlanRequest, Residency
from gpuledger.domain.units import format_instant, milliseconds
from gpuledger.domain.world import World
from gpuledger.projections import failures, plan_history
from gpuledger.projections.failures import Failures
from gpuledger.projections.plan_history import PlanHistory

from .desk import Gate
from .policy_document import changes_of, revised
from .shell import DecisionFailed, Engine
from .status import Driver, Source, status_document

_log = structlog.get_logger(__name__)

#: Of questions that nobody asks: they are in no ledger.
TRIAL_ID: Final = "dry-run"
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


class OperationsDesk:
    """On one engine. `path` is that of its ledger."""

    def __init__(self, engine: Engine, ledger: LedgerReader, gate: Gate, path: Path) -> None:
        self._engine = engine
        self._ledger = ledger
        self._gate = gate
        self._path = path
        #: What is checked before an operation still holds when it is recorded: there is no other operator's between.
        self._turn = asyncio.Lock()

    # ---- what is shown -------------------------------------------------------------------------------------------

    async def status(self) -> Document:
        """Also while the ledger cannot be read: then without the failures, which are not in the folded state."""
        newest = await self._newest(frozenset({"FailureRecorded"}), _FAILURES_SHOWN) or ()
        shown = reduce(failures.evolve, reversed(newest), Failures()).newest(_FAILURES_SHOWN)
        return status_document(self._engine.world, self._engine.now(), self._source(), shown)

    def queue(self) -> Document:
        shown = status_document(self._engine.world, self._engine.now(), self._source())
        return {"schema": "gpuledger.queue/1", "now": shown["now"], "queue": shown["queue"]}

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
        newest = await self._newest(frozenset({"PlanDecided"}), limit)
        if newest is None:
            return Shut(Cause.LEDGER_UNAVAILABLE)
        history = reduce(plan_history.evolve, reversed(newest), PlanHistory(limit=limit))
        return {
            "schema": "gpuledger.plans/1",
            "now": format_instant(self._engine.now()),
            "history_limit": self._engine.world.policy.plan_history_limit,
            "plans": [
                {one.name: getattr(record, one.name) for one in fields(record)}
                | {"decided_at": format_instant(record.decided_at), "at": format_instant(record.at)}
                for record in history.newest(limit)
            ],
        }

    async def operations(self, limit: int) -> Answer:
        events = await self._newest(_OF_OPERATORS, _LOOKED_AT)
        if events is None:
            return Shut(Cause.LEDGER_UNAVAILABLE)
        done = [event for event in events if _is_of_an_operator(event)]
        return {
            "schema": "gpuledger.operations/1",
            "now": format_instant(self._engine.now()),
            "operations": [_recorded(event) for event in done[:limit]],
        }

    def try_plan(self, trial: Trial) -> Answer:
        world, now = self._engine.world, self._engine.now()
        client = None if trial.client is None else world.clients.get(trial.client)
        if trial.client is not None and client is None:
            return Denied(Denial.NOT_FOUND, f"no client {trial.client}: {_there_are(world.clients)}")
        asked = PlanRequest(
            request_id=TRIAL_ID,
            client_id=TRIAL_ID if client is None else client.client_id,
            capability=trial.capability,
            priority=trial.priority if client is None else Priority(client.priority),
            requested_at=now,
            deadline=None if trial.deadline_ms is None else now + milliseconds(trial.deadline_ms),
            lab=trial.lab if client is None else client.lab,
            fallback_rank=trial.fallback_rank,
        )
        decided = plan(world.state(now), asked, as_of=world.seq)
        allowed = client is None or client.capabilities is None or trial.capability in client.capabilities
        return {
            "schema": "gpuledger.dry-run/1",
            "client_may_ask": allowed,
            "explanation": explanation_of(decided),
            "plan": decided.document(),
        }

    async def _newest(self, types: frozenset[str], limit: int) -> tuple[Recorded, ...] | None:
        """Of the ledger, newest first; None where it cannot be read, which the log says why."""
        try:
            return await asyncio.to_thread(self._ledger.read_backward, types, limit)
        except (LedgerUnavailable, LedgerCorrupt) as error:
            _log.warning("the ledger could not be read for an operator", error=str(error))
            return None

    # ---- what is done --------------------------------------------------------------------------------------------

    async def revise_policy(self, revision: Revision) -> Answer:
        async with self._turn:
            present = self._engine.world.policy
            if revision.if_revision not in (None, present.revision):
                told = f"the policy is {present.revision} by now, and not {revision.if_revision}"
                return Denied(Denial.REVISION_CHANGED, told)
            try:
                wanted = revised(present, revision.keys)
            except DocumentError as error:
                return Denied(Denial.INVALID, str(error), error.told())
            done: Answer = {"recorded": []}
            if not revision.dry_run:
                done = await self._told(RevisePolicy(revision.by, wanted))
            if not isinstance(done, Mapping):
                return done
            return {
                **done,
                "dry_run": revision.dry_run,
                "revision": {"from": present.revision, "to": wanted.revision},
                "changes": [change for change in changes_of(present, wanted) if change["key"] != "revision"],
            }

    async def set_residency(self, residing: Residing) -> Answer:
        async with self._turn:
            known = self._engine.world.deployments.get(residing.deployment_id)
            ttl_seconds = residing.ttl_seconds
            if ttl_seconds is None:
                ttl_seconds = Residency().ttl_seconds if known is None else known.spec.residency.ttl_seconds
            residency = Residency(residing.policy, ttl_seconds)
            return await self._told(SetResidency(residing.by, residing.deployment_id, residency))

    async def carry_out(self, operation: Operation) -> Answer:
        async with self._turn:
            return await self._told(operation)

    async def _told(self, operation: Operation) -> Answer:
        if self._gate.cause is not None:
            return Shut(self._gate.cause)
        if (denied := _denied(self._engine.world, operation)) is not None:
            return denied
        try:
            recorded = await self._engine.ask(operation)
        except (LedgerUnavailable, LedgerCorrupt):
            return Shut(Cause.LEDGER_UNAVAILABLE)
        except DecisionFailed:
            return Shut(Cause.INTERNAL_ERROR)
        # Other inputs were taken before it, and may have made it impossible.
        if not recorded and (denied := _denied(self._engine.world, operation)) is not None:
            return denied
        return {"recorded": [_recorded(event) for event in recorded]}

    def _source(self) -> Source:
        starting = self._gate.cause is Cause.STARTING
        return Source(str(self._path), Driver.STARTING if starting else Driver.RUNNING, os.getpid())


def explanation_of(decided: PlacementPlan) -> str:
    """A plan in a sentence: `ADMIT: emb on host:local, cold start in about 1.2 s`."""
    best, document = decided.best, decided.document()
    message = str(document["message"])
    if best is None or not decided.admits or best.start is None:
        return f"{decided.verdict.value}: {message}"
    estimate_ms = document["estimate_ms"]
    told = f"{decided.verdict.value}: {best.deployment_id} on {best.accelerator_id}, {best.start.value} start"
    if isinstance(estimate_ms, int):
        told += f" in about {duration(estimate_ms)}"
    evicted = [eviction.deployment_id for eviction in decided.evictions]
    return f"{told} after evicting {', '.join(evicted)}" if evicted else told


# ---- refusals ---------------------------------------------------------------------------------------------------


def _denied(world: World, operation: Operation) -> Denied | None:
    problem = problem_of(world, operation)
    if problem is None:
        return None
    return Denied(Denial.NOT_FOUND if _is_missing(world, operation) else Denial.REFUSED, problem)


def _is_missing(world: World, operation: Operation) -> bool:
    """Whether it is about something that is not there."""
    match operation:
        case CordonNode(node_id=node_id) | UncordonNode(node_id=node_id) | DrainNode(node_id=node_id):
            return node_id not in world.nodes
        case ClearAccelerator(accelerator_id=accelerator_id):
            accelerator = world.accelerators.get(accelerator_id)
            return accelerator is None or accelerator.retired
        case SetResidency() | AcceptEnvelope() | UnloadIdle():
            if operation.deployment_id is None:
                return False
            deployment = world.deployments.get(operation.deployment_id)
            return deployment is None or deployment.retired
        case RevisePolicy() | PauseLab() | ResumeLab():
            return False


def _there_are(known: Mapping[str, object]) -> str:
    return f"there are {', '.join(sorted(known)) or 'none'}"


# ---- documents --------------------------------------------------------------------------------------------------


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


def _is_of_an_operator(event: Recorded) -> bool:
    """Of an eviction `by` may also be the deployment that it makes room for."""
    if isinstance(event.data, EvictionStarted):
        return event.data.cause is EvictionCause.OPERATOR
    return getattr(event.data, "by", None) is not None


def _recorded(event: Recorded) -> dict[str, Any]:
    """An event for who caused it: its place in the ledger, and what it says."""
    kind = type(event.data)
    return {
        "seq": event.seq,
        "at": format_instant(event.at),
        "type": kind.__name__,
        "stream": event.stream,
        "data": TypeAdapter[Any](kind).dump_python(event.data, mode="json"),
    }
