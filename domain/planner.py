"""One request, one plan (semantics.md 6): a pure function of a state and a question.

The steps are those of the text: candidates, the three stages for each, the choice among them, the fingerprint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Final, TypeAlias

import orjson

from .accounting import Accounting, account
from .candidates import Candidate, Pair, Question, Refusal, Start
from .capacity import capacity_stage
from .eviction import Eviction
from .explain import explain
from .feasibility import health_stage, pair_of, policy_stage, serving_at
from .policy import Pressure
from .ranking import ranked
from .reasons import Reason, Verdict
from .state import Deployment, PlanRequest, Resident, State, WaitingFor
from .units import AcceleratorId, DeploymentId, NodeId, ResidentId, format_instant
from .view import View, view_of
from .waiting import waiting_for

#: Raised with every change of what a plan says: replay runs the version that a plan names (ledger.md, Replay).
PLANNER_VERSION: Final = "gpuledger-planner/1"
PLAN_SCHEMA: Final = "gpuledger.plan/1"

#: How many candidates, and how many residents, a plan shows in full (6.6).
EVIDENCE_LIMIT: Final = 16

Json: TypeAlias = "bool | int | str | list[Json] | dict[str, Json] | None"


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """What a request is answered, with its evidence. Verdict, ids and figures are those of the best candidate."""

    request: PlanRequest
    decided_at: int
    policy_revision: str
    verdict: Verdict
    refusals: tuple[Refusal, ...]
    #: Best first, all of them; the document shows 16. Empty where there is nothing to choose from (6.5).
    candidates: tuple[Candidate, ...]
    #: Those of the best candidate's accelerator, the largest first; the document shows 16.
    residents: tuple[Resident, ...]
    waiting_for: WaitingFor | None
    as_of: int | None
    plan_id: str | None
    #: SHA-256, in hex, of the document without ids of the question, instants and texts (6.6).
    fingerprint: str

    @property
    def best(self) -> Candidate | None:
        return self.candidates[0] if self.candidates else None

    @property
    def admits(self) -> bool:
        return self.verdict.admits

    @property
    def reasons(self) -> tuple[Reason, ...]:
        return tuple(refusal.reason for refusal in self.refusals)

    @property
    def node_id(self) -> NodeId | None:
        return self.candidates[0].node_id if self.candidates else None

    @property
    def accelerator_id(self) -> AcceleratorId | None:
        return self.candidates[0].accelerator_id if self.candidates else None

    @property
    def deployment_id(self) -> DeploymentId | None:
        return self.candidates[0].deployment_id if self.candidates else None

    @property
    def resident_id(self) -> ResidentId | None:
        """The resident that would serve; None for a cold start."""
        return self.candidates[0].resident_id if self.candidates else None

    @property
    def eligible(self) -> bool:
        return bool(self.candidates) and self.candidates[0].eligible

    @property
    def start(self) -> Start | None:
        return self.candidates[0].start if self.candidates else None

    @property
    def requirement_bytes(self) -> int | None:
        return self.candidates[0].requirement_bytes if self.candidates else None

    @property
    def needed_bytes(self) -> int | None:
        return self.candidates[0].needed_bytes if self.candidates else None

    @property
    def estimate_ms(self) -> int | None:
        return self.candidates[0].estimate_ms if self.candidates else None

    @property
    def evictions(self) -> tuple[Eviction, ...]:
        return self.candidates[0].evictions if self.candidates else ()

    @property
    def headroom_before_bytes(self) -> int | None:
        return self.candidates[0].headroom_before_bytes if self.candidates else None

    @property
    def headroom_after_bytes(self) -> int | None:
        return self.candidates[0].headroom_after_bytes if self.candidates else None

    @property
    def pressure(self) -> Pressure | None:
        return self.candidates[0].pressure if self.candidates else None

    @property
    def accounting(self) -> Accounting | None:
        return self.candidates[0].accounting if self.candidates else None

    def document(self) -> dict[str, Json]:
        """The document `gpuledger.plan/1`, ready for JSON: what is hashed, and beside it ids, instants and texts."""
        document = canonical(self)
        shown = document["candidates"]
        assert isinstance(shown, list)
        for entry, candidate in zip(shown, self.candidates, strict=False):
            assert isinstance(entry, dict)
            entry["message"] = explain(candidate.refusals)
        return document | {
            "message": explain(self.refusals),
            "fingerprint": self.fingerprint,
            "plan_id": self.plan_id,
            "request_id": self.request.request_id,
            "client_id": self.request.client_id,
            "as_of": self.as_of,
            "decided_at": format_instant(self.decided_at),
        }


def plan(state: State, request: PlanRequest, *, as_of: int | None = None, plan_id: str | None = None) -> PlacementPlan:
    """Section 6. `as_of` is the ledger position that the state was folded to, `plan_id` the plan's own id.

    Neither enters the decision or the fingerprint.
    """
    view = view_of(state)
    # 6.5: what is judged before there is any candidate.
    deployments = [
        deployment
        for deployment in state.deployments
        if deployment.capability == request.capability and deployment.fallback_rank == request.fallback_rank
    ]
    if not deployments:
        asked: dict[str, int | str | None] = {
            "capability": request.capability,
            "fallback_rank": request.fallback_rank,
        }
        refusal = Refusal(Reason.CAPABILITY_UNAVAILABLE, asked)
        return _plan_without_candidates(view, request, Verdict.REJECT_POLICY, refusal, as_of, plan_id)
    if not view.accelerators:
        refusal = Refusal(Reason.NO_ACCELERATOR, {})
        return _plan_without_candidates(view, request, Verdict.REJECT_HEALTH, refusal, as_of, plan_id)
    # 6: all pairs, each through the three stages; 6.5: the best of them.
    question = question_of(view, request, deployments)
    candidates = ranked(
        judge(question, deployment, accelerator_id)
        for deployment in deployments
        for accelerator_id in view.accelerators
    )
    best = candidates[0]
    return _finished(
        PlacementPlan(
            request=request,
            decided_at=view.now,
            policy_revision=view.policy.revision,
            verdict=best.verdict,
            refusals=best.refusals,
            candidates=candidates,
            residents=tuple(sorted(view.residents_at.get(best.accelerator_id, ()), key=_largest_first)),
            waiting_for=_waiting_for(question, best),
            as_of=as_of,
            plan_id=plan_id,
            fingerprint="",
        )
    )


def question_of(view: View, request: PlanRequest, deployments: Sequence[Deployment]) -> Question:
    """What all candidates of a request share, worked out once."""
    accounts = {accelerator_id: account(view, accelerator_id) for accelerator_id in view.accelerators}
    others = tuple(queued for queued in view.queue if queued.request_id != request.request_id)
    return Question(
        view=view,
        request=request,
        accounts=accounts,
        serving={d.deployment_id: serving_at(view, accounts, d.deployment_id) for d in deployments},
        queued_ahead=sum(
            1 for other in others if other.capability == request.capability and other.claim < request.claim
        ),
        others_queued=others,
    )


def judge(question: Question, deployment: Deployment, accelerator_id: AcceleratorId) -> Candidate:
    """One candidate through the three stages: the first that fails gives the verdict."""
    pair = pair_of(question, deployment, accelerator_id)
    # 6.1
    refusals = policy_stage(pair)
    if refusals or pair.requirement_bytes is None:
        return _refused(pair, Verdict.REJECT_POLICY, refusals)
    # 6.2
    refusals = health_stage(pair)
    if refusals:
        return _refused(pair, Verdict.REJECT_HEALTH, refusals)
    # 6.3
    return capacity_stage(pair, pair.requirement_bytes)


def _refused(pair: Pair, verdict: Verdict, refusals: tuple[Refusal, ...]) -> Candidate:
    return Candidate(
        deployment_id=pair.deployment.deployment_id,
        accelerator_id=pair.accelerator.accelerator_id,
        node_id=pair.node.node_id,
        verdict=verdict,
        refusals=refusals,
        eligible=False,
        requirement_bytes=pair.requirement_bytes,
        needed_bytes=None,
        start=None,
        start_micros=pair.start_micros,
        resident_id=None,
        active_leases=len(pair.own_leases),
        pressure=pair.pressure,
        accounting=pair.accounting,
        eviction_set=None,
        headroom_after_bytes=pair.accounting.schedulable_bytes,
    )


def _waiting_for(question: Question, best: Candidate) -> WaitingFor | None:
    """What a queued plan waits for: worked out for the best candidate only, since only its place is held."""
    if best.verdict is not Verdict.QUEUE or best.requirement_bytes is None:
        return None
    pair = pair_of(question, question.view.deployments[best.deployment_id], best.accelerator_id)
    return waiting_for(pair, best.requirement_bytes, best.reasons[0])


def _plan_without_candidates(
    view: View,
    request: PlanRequest,
    verdict: Verdict,
    refusal: Refusal,
    as_of: int | None,
    plan_id: str | None,
) -> PlacementPlan:
    return _finished(
        PlacementPlan(
            request=request,
            decided_at=view.now,
            policy_revision=view.policy.revision,
            verdict=verdict,
            refusals=(refusal,),
            candidates=(),
            residents=(),
            waiting_for=None,
            as_of=as_of,
            plan_id=plan_id,
            fingerprint="",
        )
    )


# 6.6: the document and its fingerprint.


def _finished(unsigned: PlacementPlan) -> PlacementPlan:
    return replace(unsigned, fingerprint=fingerprint_of(canonical(unsigned)))


def fingerprint_of(document: Mapping[str, Json]) -> str:
    """SHA-256, in hex, of the canonical JSON (RFC 8785) of what `canonical` leaves of a plan.

    Keys are ASCII and numbers are integers, where sorted keys and no spaces are all that RFC 8785 asks for.
    """
    return sha256(orjson.dumps(document, option=orjson.OPT_SORT_KEYS)).hexdigest()


def canonical(plan: PlacementPlan) -> dict[str, Json]:
    """The plan document without what the fingerprint leaves out: ids of the question, instants of it, texts."""
    request, shown = plan.request, plan.candidates[:EVIDENCE_LIMIT]
    rest = plan.candidates[EVIDENCE_LIMIT:]
    return {
        "schema": PLAN_SCHEMA,
        "planner_version": PLANNER_VERSION,
        "policy_revision": plan.policy_revision,
        "capability": request.capability,
        "priority": request.priority.value,
        "lab": request.lab,
        "fallback_rank": request.fallback_rank,
        "verdict": plan.verdict.value,
        "reasons": [reason.value for reason in plan.reasons],
        "figures": _figures(plan.refusals),
        "node_id": plan.node_id,
        "accelerator_id": plan.accelerator_id,
        "deployment_id": plan.deployment_id,
        "resident_id": plan.resident_id,
        "eligible": plan.eligible,
        "start": plan.start.value if plan.start is not None else None,
        "requirement_bytes": plan.requirement_bytes,
        "needed_bytes": plan.needed_bytes,
        "estimate_ms": plan.estimate_ms,
        "evictions": [_eviction(eviction) for eviction in plan.evictions],
        "waiting_for": _waiting(plan.waiting_for) if plan.waiting_for is not None else None,
        "headroom_before_bytes": plan.headroom_before_bytes,
        "headroom_after_bytes": plan.headroom_after_bytes,
        "pressure": plan.pressure.value if plan.pressure is not None else None,
        "accounting": _accounting(plan.accounting) if plan.accounting is not None else None,
        "residents": [_resident(resident) for resident in plan.residents[:EVIDENCE_LIMIT]],
        "residents_left_out": max(0, len(plan.residents) - EVIDENCE_LIMIT),
        "candidates": [_candidate(candidate) for candidate in shown],
        "candidates_left_out": len(rest),
        "rejected_counts": _rejected_counts(rest),
    }


def _largest_first(resident: Resident) -> tuple[int, str]:
    return (-resident.attributed_bytes, resident.resident_id)


def _rejected_counts(rest: Sequence[Candidate]) -> dict[str, Json]:
    counts = Counter(reason.value for candidate in rest for reason in candidate.reasons)
    return dict(counts)


def _figures(refusals: Sequence[Refusal]) -> dict[str, Json]:
    return {refusal.reason.value: dict(refusal.figures) for refusal in refusals}


def _candidate(candidate: Candidate) -> dict[str, Json]:
    return {
        "deployment_id": candidate.deployment_id,
        "accelerator_id": candidate.accelerator_id,
        "node_id": candidate.node_id,
        "verdict": candidate.verdict.value,
        "reasons": [reason.value for reason in candidate.reasons],
        "figures": _figures(candidate.refusals),
        "start": candidate.start.value if candidate.start is not None else None,
        "estimate_ms": candidate.estimate_ms,
        "requirement_bytes": candidate.requirement_bytes,
        "needed_bytes": candidate.needed_bytes,
        "schedulable_bytes": candidate.headroom_before_bytes,
        "headroom_after_bytes": candidate.headroom_after_bytes,
        "pressure": candidate.pressure.value,
        "active_leases": candidate.active_leases,
        "evictions": len(candidate.evictions),
    }


def _resident(resident: Resident) -> dict[str, Json]:
    return {
        "resident_id": resident.resident_id,
        "deployment_id": resident.deployment_id,
        "state": resident.state.value,
        "attributed_bytes": resident.attributed_bytes,
    }


def _eviction(eviction: Eviction) -> dict[str, Json]:
    return {
        "resident_id": eviction.resident_id,
        "deployment_id": eviction.deployment_id,
        "action": eviction.action.value,
        "freed_bytes": eviction.freed_bytes,
        "price_ms": eviction.price_ms,
        "duration_ms": eviction.duration_ms,
        "preempts": list(eviction.preempts),
    }


def _waiting(waiting: WaitingFor) -> dict[str, Json]:
    not_before = waiting.not_before
    return {
        "accelerator_id": waiting.accelerator_id,
        "deployment_id": waiting.deployment_id,
        "reason": waiting.reason.value,
        "needed_bytes": waiting.needed_bytes,
        "resident_ids": list(waiting.resident_ids),
        "not_before": format_instant(not_before) if not_before is not None else None,
    }


def _accounting(accounting: Accounting) -> dict[str, Json]:
    return {
        "total_bytes": accounting.total_bytes,
        "observed_used_bytes": accounting.observed_used_bytes,
        "attributed_managed_bytes": accounting.attributed_managed_bytes,
        "attribution_delta_bytes": accounting.attribution_delta_bytes,
        "physical_used_bytes": accounting.physical_used_bytes,
        "unmanaged_external_bytes": accounting.unmanaged_external_bytes,
        "future_lease_bytes": accounting.future_lease_bytes,
        "reserve_bytes": accounting.reserve_bytes,
        "schedulable_bytes": accounting.schedulable_bytes,
        "attribution": accounting.attribution.value,
    }
