"""What a failure leads to: its record, a capability that is degraded, and what becomes of the request it hit (8).

A request that has seen nothing of an answer is tried again, a bounded number of times; then it takes the contract's
fallback, if there is one; then it has failed, and its client is told.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from .aggregates.request import RequestState
from .draft import Draft
from .events import (
    CapabilityDegraded,
    CapabilityRecovered,
    FailureRecorded,
    RequestFailed,
    RequestFellBack,
    RequestRetried,
    StreamKind,
    stream_name,
)
from .failures import EMPTY_SHA256, SERVING_FAILURES, Failure, owner_of
from .planner import PlacementPlan
from .reasons import Reason
from .units import CapabilityId
from .world import World

#: After a GPU_OOM a request is planned again once, whatever the policy says of other failures (semantics.md 8).
OOM_RETRIES: Final = 1
#: The only rank after the first that a contract may have (semantics.md 5).
FALLBACK_RANK: Final = 1

_BY_NAME: Final = {failure.value: failure for failure in Failure}


def failure_of(reason: Reason) -> Failure | None:
    """The class of failure that a refusal is an instance of, if it is one (semantics.md 8)."""
    return _BY_NAME.get(reason.value)


# ---- records ----------------------------------------------------------------------------------------------------


def record(
    draft: Draft,
    capability: CapabilityId,
    failure: Failure,
    detail: str,
    *,
    deployment_id: str | None = None,
    accelerator_id: str | None = None,
    resident_id: str | None = None,
    request_id: str | None = None,
    attempt: int = 1,
    limit: int = 1,
    evidence_sha256: str = EMPTY_SHA256,
) -> None:
    """One structured event; and CapabilityDegraded when it was one too many in a row."""
    stream = stream_name(StreamKind.CAPABILITY, capability)
    draft.emit(
        stream,
        FailureRecorded(
            capability=capability,
            failure=failure,
            owner=owner_of(failure),
            deployment_id=deployment_id,
            accelerator_id=accelerator_id,
            resident_id=resident_id,
            request_id=request_id,
            recorded_at=draft.now,
            attempt=attempt,
            limit=limit,
            evidence_sha256=evidence_sha256,
            detail=detail,
        ),
    )
    state = draft.world.capabilities.get(capability)
    if state is None or state.degraded_at is not None or state.failures < draft.world.policy.degraded_after_failures:
        return
    draft.emit(stream, CapabilityDegraded(capability, draft.now, state.failures, failure, detail))


def record_refusal(draft: Draft, request: RequestState, reason: Reason, outcome: PlacementPlan | None) -> None:
    """A refusal that is one of the classes of section 8; its evidence is the plan."""
    failure = failure_of(reason)
    if failure is None:
        return
    best = None if outcome is None else outcome.best
    # A race that is lost is planned again; every other refusal is the first word and the last (semantics.md 7).
    attempts = 1 + draft.world.policy.max_replans if reason is Reason.LEASE_CONFLICT else 1
    record(
        draft,
        request.question.capability,
        failure,
        "refused",
        deployment_id=None if best is None else best.deployment_id,
        accelerator_id=None if best is None else best.accelerator_id,
        request_id=request.question.request_id,
        attempt=attempts,
        limit=attempts,
        evidence_sha256=EMPTY_SHA256 if outcome is None else outcome.fingerprint,
    )


def note_success(draft: Draft, capability: CapabilityId) -> None:
    """It answered a request: to be called after the event that says so."""
    state = draft.world.capabilities.get(capability)
    if state is not None and state.degraded_at is not None:
        draft.emit(stream_name(StreamKind.CAPABILITY, capability), CapabilityRecovered(capability, draft.now))


# ---- what becomes of a request ----------------------------------------------------------------------------------


def try_again_or_fail(
    draft: Draft, request_id: str, failure: Failure, detail: str, *, resident_id: str | None = None
) -> None:
    """Its lease was lost to a failure, which is recorded. `resident_id`: what failed, where that is known."""
    request = draft.world.requests.get(request_id)
    if request is None:
        return
    limit = _retries(draft, failure)
    if failure in SERVING_FAILURES and request.operation != "warm":
        if request.retries < limit:
            # After a GPU_OOM the memory has to be confirmed back first (semantics.md 8).
            after = resident_id if failure is Failure.GPU_OOM else None
            attempt = request.retries + 1
            retried = RequestRetried(request_id, draft.now, failure, detail, attempt, limit, after)
            draft.on_request(request_id, retried)
            return
        if fall_back(draft, request, failure=failure, detail=detail):
            return
        record(
            draft,
            request.question.capability,
            Failure.CAPABILITY_UNAVAILABLE,
            f"after_{failure.value}",
            request_id=request_id,
            attempt=request.retries + 1,
            limit=limit + 1,
        )
    draft.on_request(request_id, RequestFailed(request_id, draft.now, None, failure, detail))


def attempt_of(draft: Draft, request_ids: Iterable[str], failure: Failure) -> tuple[int, int]:
    """Which attempt of how many a failure hit: the greatest of the requests that it hit (semantics.md 8)."""
    known = (draft.world.requests.get(request_id) for request_id in request_ids)
    attempt = 1 + max((request.retries for request in known if request is not None), default=0)
    return attempt, max(attempt, 1 + _retries(draft, failure))


def _retries(draft: Draft, failure: Failure) -> int:
    if failure not in SERVING_FAILURES:
        return 0
    return OOM_RETRIES if failure is Failure.GPU_OOM else draft.world.policy.gateway_retries


def fall_back(
    draft: Draft,
    request: RequestState,
    *,
    reason: Reason | None = None,
    failure: Failure | None = None,
    detail: str = "",
) -> bool:
    """The contract's fallback: plan it for the next rank, where there is one (semantics.md 5). Says whether."""
    question = request.question
    if request.operation == "warm" or not has_fallback(draft.world, question.capability, question.fallback_rank):
        return False
    draft.on_request(
        question.request_id,
        RequestFellBack(question.request_id, draft.now, FALLBACK_RANK, reason, failure, detail),
    )
    return True


def has_fallback(world: World, capability: CapabilityId, rank: int) -> bool:
    """Whether its contract has a rank after this one (semantics.md 5)."""
    return rank < FALLBACK_RANK and any(
        not one.retired and one.spec.capability == capability and one.spec.fallback_rank == FALLBACK_RANK
        for one in world.deployments.values()
    )
