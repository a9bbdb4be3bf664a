"""What operators see of the running scheduler, and what they tell it: one operation at a time, each in the ledger.

The desk implements `adapters.http.operator_ports.OperatorDesk`. It decides nothing: `domain/operations.py` says what
cannot be done and records what is, and plans are the planner's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

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
from gpuledger.domain.explain import duration
from gpuledger.domain.faults import FALLBACK_RANK, has_fallback
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
from gpuledger.domain.reasons import Verdict
from gpuledger.domain.state import PlanRequest, Residency
from gpuledger.domain.units import milliseconds
from gpuledger.domain.world import World

from .desk import Gate
from .operator_views import OperatorViews, recorded_document
from .policy_document import changes_of, revised
from .shell import DecisionFailed, Engine

#: Of questions that nobody asks: they are in no ledger.
TRIAL_ID: Final = "dry-run"


class OperationsDesk(OperatorViews):
    """On one engine, with all that is shown of it."""

    def __init__(self, engine: Engine, ledger: LedgerReader, gate: Gate, path: Path) -> None:
        super().__init__(engine, ledger, gate, path)
        #: What is checked before an operation still holds when it is recorded: there is no other operator's between.
        self._turn = asyncio.Lock()

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
        state = world.state(now)
        decided = plan(state, asked, as_of=world.seq)
        # As a request that is refused is planned for the fallback of its contract, at once (semantics.md 5).
        spare: Document | None = None
        refused = not decided.admits and decided.verdict is not Verdict.QUEUE
        if refused and has_fallback(world, trial.capability, trial.fallback_rank):
            second = plan(state, replace(asked, fallback_rank=FALLBACK_RANK), as_of=world.seq)
            spare = {"explanation": explanation_of(second), "plan": second.document()}
        allowed = client is None or client.capabilities is None or trial.capability in client.capabilities
        return {
            "schema": "gpuledger.dry-run/1",
            "client_may_ask": allowed,
            "explanation": explanation_of(decided),
            "plan": decided.document(),
            "fallback": spare,
        }

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
        return {"recorded": [recorded_document(event) for event in recorded]}


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
