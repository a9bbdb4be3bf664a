"""plan_history: the newest plans, as many as the policy keeps (semantics.md 10, `plan_history_limit`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from gpuledger.domain.events import PlanDecided, PolicyRevised, Recorded
from gpuledger.domain.policy import Policy
from gpuledger.domain.reasons import Reason, Verdict

#: The types that move this projection; a reader need not fetch others.
TYPES: Final = frozenset({"PlanDecided", "PolicyRevised"})


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """One plan in a line: what was asked, what was decided, where, and how it can be recomputed."""

    seq: int
    at: int
    plan_id: str
    request_id: str
    client_id: str | None
    capability: str | None
    priority: str | None
    verdict: Verdict
    reasons: tuple[Reason, ...]
    node_id: str | None
    accelerator_id: str | None
    deployment_id: str | None
    start: str | None
    estimate_ms: int | None
    evictions: int
    waiting_reason: str | None
    fallback_rank: int
    fingerprint: str
    planner_version: str
    policy_revision: str
    as_of: int
    decided_at: int


@dataclass(frozen=True, slots=True)
class PlanHistory:
    """`records` are in the order of the ledger, the oldest first."""

    seq: int = 0
    limit: int = Policy().plan_history_limit
    records: tuple[PlanRecord, ...] = ()

    def newest(
        self,
        limit: int | None = None,
        *,
        capability: str | None = None,
        verdict: Verdict | None = None,
        reason: Reason | None = None,
        accelerator_id: str | None = None,
    ) -> tuple[PlanRecord, ...]:
        """Those that fit every filter that is given, newest first, at most `limit` of them."""
        fitting = [
            record
            for record in reversed(self.records)
            if (capability is None or record.capability == capability)
            and (verdict is None or record.verdict is verdict)
            and (reason is None or reason in record.reasons)
            and (accelerator_id is None or record.accelerator_id == accelerator_id)
        ]
        return tuple(fitting if limit is None else fitting[: max(0, limit)])


def evolve(history: PlanHistory, event: Recorded) -> PlanHistory:
    """The history after one event of the ledger."""
    match event.data:
        case PlanDecided():
            records = (*history.records, _record(event, event.data))
            return replace(history, seq=event.seq, records=records[-history.limit :])
        case PolicyRevised(policy=policy):
            limit = policy.plan_history_limit
            return replace(history, seq=event.seq, limit=limit, records=history.records[-limit:])
        case _:
            return replace(history, seq=event.seq)


def _record(event: Recorded, decided: PlanDecided) -> PlanRecord:
    plan = decided.plan
    estimate_ms, evictions = plan.get("estimate_ms"), _objects(plan.get("evictions"))
    (waiting,) = _objects([plan.get("waiting_for")]) or ({},)
    return PlanRecord(
        seq=event.seq,
        at=event.at,
        plan_id=decided.plan_id,
        request_id=decided.request_id,
        client_id=_text(plan, "client_id"),
        capability=_text(plan, "capability"),
        priority=_text(plan, "priority"),
        verdict=decided.verdict,
        reasons=decided.reasons,
        node_id=_text(plan, "node_id"),
        accelerator_id=_text(plan, "accelerator_id"),
        deployment_id=_text(plan, "deployment_id"),
        start=_text(plan, "start"),
        estimate_ms=estimate_ms if isinstance(estimate_ms, int) else None,
        evictions=len(evictions),
        waiting_reason=_text(waiting, "reason"),
        fallback_rank=decided.fallback_rank,
        fingerprint=decided.fingerprint,
        planner_version=decided.planner_version,
        policy_revision=decided.policy_revision,
        as_of=decided.as_of,
        decided_at=decided.decided_at,
    )


def _text(document: Mapping[str, Any], key: str) -> str | None:
    """A field of a plan document, which is data here: an auditor's ledger may hold anything."""
    value = document.get(key)
    return value if isinstance(value, str) else None


def _objects(value: object) -> list[dict[str, Any]]:
    entries = cast("list[object]", value) if isinstance(value, list) else []
    return [cast("dict[str, Any]", entry) for entry in entries if isinstance(entry, dict)]
