"""From a plan to the events that carry it out: one decision, one batch (semantics.md 7, ledger.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from .aggregates.accelerator import AcceleratorState, LeaseRecord
from .aggregates.request import Phase, RequestState
from .candidates import Candidate, Start
from .draft import Draft
from .events import (
    EvictionCause,
    LeaseGranted,
    LeasePreempted,
    PlanDecided,
    RequestFailed,
    RequestQueued,
    StreamKind,
    ThrashingDetected,
    stream_name,
)
from .evictions import begin_eviction
from .faults import fall_back, record_refusal
from .planner import PLANNER_VERSION, PlacementPlan, plan
from .reasons import Reason, Verdict
from .state import WaitingFor
from .units import MICROS_PER_MS, ceil_div, milliseconds, seconds

#: What an admission does not keep: the evidence about others. It is recomputed by replay (ledger.md, Streams).
EVIDENCE_OF_OTHERS: Final = ("candidates", "residents", "rejected_counts")

#: The same pair so often within so long is thrashing: models that share a card and are wanted by turns pay a load for
#: every few requests. It is said, not forbidden: min_residency (6.4, rule 4) is what damps it.
THRASHING_EVICTIONS: Final = 3
THRASHING_WINDOW_SECONDS: Final = 600


def decide(draft: Draft, request: RequestState) -> PlacementPlan:
    """Plan a request on the committed state, and emit what follows.

    A plan that changes nothing for one who waits already is not recorded: nothing was decided.
    """
    number = request.plans + 1
    question = request.question
    outcome = plan(
        draft.base.state(draft.now),
        question,
        as_of=draft.base.seq,
        plan_id=f"plan-{question.request_id}-{number}",
    )
    draft.depends_on(stream_name(StreamKind.POLICY))
    if outcome.verdict.admits:
        _record_plan(draft, request, outcome)
        _grant(draft, request, outcome)
    elif outcome.verdict is Verdict.QUEUE:
        _queue(draft, request, outcome)
    else:
        _record_plan(draft, request, outcome)
        reason = outcome.reasons[0]
        record_refusal(draft, request, reason, outcome)
        if not fall_back(draft, request, reason=reason, detail=outcome.verdict.value):
            draft.on_request(question.request_id, _refused(draft, request, reason, outcome.verdict))
    return outcome


def _refused(draft: Draft, request: RequestState, reason: Reason, verdict: Verdict) -> RequestFailed:
    """Refused; or failed, where the very failure that it was tried again for made its envelope suspect.

    Whoever asked is told what went wrong then, and not that nobody ever measured the model.
    """
    request_id, failure = request.question.request_id, request.last_failure
    if reason is Reason.NO_MEASURED_ENVELOPE and failure is not None:
        return RequestFailed(request_id, draft.now, None, failure, f"tried_again_{reason.value}")
    return RequestFailed(request_id, draft.now, reason, None, verdict.value)


def give_up(draft: Draft, request: RequestState, reason: Reason, detail: str) -> None:
    """It is refused for what it waits for, unless its contract has a fallback (semantics.md 5)."""
    if fall_back(draft, request, reason=reason, detail=detail):
        record_refusal(draft, request, reason, None)
        return
    refuse(draft, request, reason, detail)


def _waits_in_vain(request: RequestState, waits_for: WaitingFor) -> bool:
    """A back-off that ends after it may wait no longer: nothing but time ends one, so it is told at once."""
    if waits_for.reason is not Reason.LOAD_BACKOFF or waits_for.not_before is None:
        return False
    return waits_for.not_before > request.queue_until


def refuse(draft: Draft, request: RequestState, reason: Reason, detail: str) -> None:
    """End a request without a plan of its own."""
    request_id = request.question.request_id
    record_refusal(draft, request, reason, None)
    draft.on_request(request_id, RequestFailed(request_id, draft.now, reason, None, detail))


def _record_plan(draft: Draft, request: RequestState, outcome: PlacementPlan) -> None:
    draft.on_request(
        request.question.request_id,
        PlanDecided(
            request_id=request.question.request_id,
            plan_id=f"plan-{request.question.request_id}-{request.plans + 1}",
            as_of=draft.base.seq,
            decided_at=draft.now,
            fallback_rank=request.question.fallback_rank,
            planner_version=PLANNER_VERSION,
            policy_revision=draft.base.policy.revision,
            verdict=outcome.verdict,
            reasons=outcome.reasons,
            fingerprint=outcome.fingerprint,
            plan=evidence(outcome),
        ),
    )


def evidence(outcome: PlacementPlan) -> Mapping[str, Any]:
    """The plan document as it is kept: in full unless it admits at once."""
    document = outcome.document()
    if outcome.verdict is not Verdict.ADMIT:
        return document
    return {key: value for key, value in document.items() if key not in EVIDENCE_OF_OTHERS}


def _queue(draft: Draft, request: RequestState, outcome: PlacementPlan) -> None:
    assert outcome.waiting_for is not None
    if _waits_in_vain(request, outcome.waiting_for):
        _record_plan(draft, request, outcome)
        give_up(draft, request, outcome.waiting_for.reason, "back_off_ends_too_late")
        return
    if request.phase is Phase.QUEUED and request.waiting_for == outcome.waiting_for:
        return
    _record_plan(draft, request, outcome)
    request_id = request.question.request_id
    draft.on_request(request_id, RequestQueued(request_id, request.question.requested_at, outcome.waiting_for))


def _grant(draft: Draft, request: RequestState, outcome: PlacementPlan) -> None:
    best = outcome.best
    assert best is not None
    assert best.start is not None
    assert best.requirement_bytes is not None
    assert best.needed_bytes is not None
    accelerator_id, deployment_id = best.accelerator_id, best.deployment_id
    state = draft.world.accelerators[accelerator_id]
    known = state.resident_of(deployment_id)
    lease_id = f"lease-{request.question.request_id}-{request.plans + 1}"
    awaits = _evict(draft, request, best, lease_id)
    deployment = draft.world.deployments[deployment_id]
    evicted_at = draft.now + milliseconds(0 if best.eviction_set is None else best.eviction_set.duration_ms)
    draft.on_accelerator(
        accelerator_id,
        LeaseGranted(
            lease_id=lease_id,
            request_id=request.question.request_id,
            deployment_id=deployment_id,
            accelerator_id=accelerator_id,
            resident_id=_new_resident_id(state, deployment_id) if known is None else known.resident.resident_id,
            priority=request.question.priority,
            start=best.start,
            reserved_bytes=best.requirement_bytes,
            materialized_bytes=min(best.requirement_bytes, 0 if known is None else known.resident.attributed_bytes),
            needed_bytes=best.needed_bytes,
            granted_at=draft.now,
            expires_at=draft.now + seconds(draft.world.policy.lease_ttl_seconds),
            preemptions=request.preemptions,
            start_ms=ceil_div(best.start_micros, MICROS_PER_MS),
            loaded_at=evicted_at,
            available_at=evicted_at if awaits and best.start is Start.WARM else None,
            awaits=awaits,
            starts_alone=deployment.spec.starts_alone,
        ),
    )


def _new_resident_id(state: AcceleratorState, deployment_id: str) -> str:
    """Numbered, so that a resident that comes back is another one."""
    generation = state.generations.get(deployment_id, 0) + 1
    return f"{deployment_id}@{state.accelerator.accelerator_id}#{generation}"


def _evict(draft: Draft, request: RequestState, best: Candidate, lease_id: str) -> tuple[str, ...]:
    """Start the evictions of a plan; returns the residents that the grant waits for."""
    accelerator_id = best.accelerator_id
    awaits: list[str] = []
    for eviction in best.evictions:
        for lease in draft.world.accelerators[accelerator_id].leases_on(eviction.resident_id):
            if lease.lease.expires_at > draft.now:
                _preempt(draft, accelerator_id, lease, request.question.request_id)
        begin_eviction(
            draft,
            accelerator_id,
            eviction.resident_id,
            EvictionCause.PLAN,
            action=eviction.action,
            by_lease_id=lease_id,
            by=best.deployment_id,
        )
        if eviction.resident_id in draft.world.accelerators[accelerator_id].residents:
            awaits.append(eviction.resident_id)
    _watch_for_thrashing(draft, accelerator_id)
    return tuple(awaits)


def _watch_for_thrashing(draft: Draft, accelerator_id: str) -> None:
    """Say so when one deployment has made the same other one leave again and again."""
    since = draft.now - seconds(THRASHING_WINDOW_SECONDS)
    recent = Counter(
        (one.evictor, one.victim)
        for one in draft.world.accelerators[accelerator_id].displacements
        if one.at > since and one.evictor != one.victim
    )
    for (evictor, victim), evictions in sorted(recent.items()):
        if evictions >= THRASHING_EVICTIONS:
            draft.on_accelerator(
                accelerator_id,
                ThrashingDetected(accelerator_id, evictor, victim, evictions, THRASHING_WINDOW_SECONDS, draft.now),
            )


def _preempt(draft: Draft, accelerator_id: str, lease: LeaseRecord, by_request_id: str) -> None:
    """Its request goes back to its old place (semantics.md 6.4, rule 7).

    Whether something of an answer was sent only its gateway knows, which then ends it (AnswerCutOff).
    """
    request_id = lease.lease.request_id
    draft.on_accelerator(
        accelerator_id,
        LeasePreempted(
            lease_id=lease.lease.lease_id,
            resident_id=lease.resident_id,
            request_id=request_id,
            preempted_at=draft.now,
            by_request_id=by_request_id,
            requeued=request_id in draft.world.requests,
        ),
    )
