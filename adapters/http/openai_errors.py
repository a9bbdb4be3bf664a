"""Every answer that is an error: one shape, the one that OpenAI's clients know, with the plan that decided it.

    {"error": {"message": ..., "type": ..., "code": ..., "param": ..., "request_id": ..., "plan_fingerprint": ...,
               "reasons": [...], "figures": {...}}}

`code` is the reason or the class of failure by its stable name. 429 is capacity, 403 and 404 policy, 503 health and
whatever else passes by itself; `Retry-After` is there exactly when waiting helps.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, assert_never

import orjson
from fastapi import Response

from gpuledger.domain.candidates import Refusal
from gpuledger.domain.explain import describe, size
from gpuledger.domain.failures import Failure
from gpuledger.domain.reasons import Reason, eviction_helps, waiting_helps
from gpuledger.domain.units import MICROS_PER_SECOND, ceil_div, parse_instant

from .headers import of_passage
from .ports import Cause, Lost, PlanFacts, Refused, Repeated

#: The client has gone: nobody sees it; it stands in the ledger (nginx's convention).
CLIENT_CLOSED: Final = 499

_CAPACITY_RETRY_SECONDS: Final = 5
_HEALTH_RETRY_SECONDS: Final = 5
_CONFLICT_RETRY_SECONDS: Final = 1
_LONGEST_RETRY_SECONDS: Final = 300

#: How the scheduler says that a request which failed was planned again, and refused with this reason.
_TRIED_AGAIN_IN_VAIN: Final = f"tried_again_{Reason.NO_MEASURED_ENVELOPE.value}"

_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})
_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """An answer that is an error. `retry_after`: seconds, None where the same question gets the same answer."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        request_id: str | None = None,
        retry_after: int | None = None,
        extra: Mapping[str, Any] = _NOTHING,
        headers: Mapping[str, str] = _NOTHING,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.request_id = request_id
        self.retry_after = retry_after
        self.extra = extra
        self.headers = headers

    def telling(self, headers: Mapping[str, str]) -> ApiError:
        """The same with further headers."""
        return ApiError(
            self.status,
            self.code,
            self.message,
            param=self.param,
            request_id=self.request_id,
            retry_after=self.retry_after,
            extra=self.extra,
            headers={**headers, **self.headers},
        )

    def document(self) -> dict[str, Any]:
        """The body."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "code": self.code, "param": self.param}
        return {"error": {**error, "request_id": self.request_id, **self.extra}}

    def response(self) -> Response:
        headers = {name.lower(): value for name, value in self.headers.items()}
        if self.request_id is not None:
            headers["x-request-id"] = self.request_id
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        elif self.status in (409, 429) or self.status >= 500:
            # OpenAI's clients repeat these by themselves unless they are told not to.
            headers["x-should-retry"] = "false"
        return Response(orjson.dumps(self.document()), self.status, headers, "application/json")


def bad_request(message: str, param: str | None = None, code: str = "invalid_request", status: int = 400) -> ApiError:
    """The client's own mistake."""
    return ApiError(status, code, message, param=param)


def refusal_error(refused: Refused, capability: str, now: int | None) -> ApiError:
    """A request that was refused, or that failed before its work began."""
    if refused.reason is not None:
        error = _reason_error(refused, refused.reason, capability, now)
    else:
        error = failure_error(refused.request_id, refused.failure, refused.detail, capability)
    return error.telling(of_passage(refused.passage))


def lost_error(request_id: str, lost: Lost, capability: str) -> ApiError:
    """A request whose lease was lost while it was being served."""
    if lost.reason is not None:
        message = f"{capability} was serving this request, and its lease was lost: {lost.reason.value}"
        return ApiError(503, lost.reason.value, message, request_id=request_id, retry_after=_CONFLICT_RETRY_SECONDS)
    if lost.failure is None:
        return unavailable_error(request_id, Cause.DRAINING)
    return failure_error(request_id, lost.failure, lost.detail, capability)


def failure_error(request_id: str, failure: Failure | None, detail: str, capability: str) -> ApiError:
    """A fault of a runtime or of the scheduler, by its class."""
    known = failure or Failure.CAPABILITY_UNAVAILABLE
    if detail == _TRIED_AGAIN_IN_VAIN:
        return ApiError(503, known.value, _in_vain(known, capability), request_id=request_id)
    told = f"{known.value} ({detail})" if detail else known.value
    return ApiError(
        504 if known is Failure.TIMEOUT else 503,
        known.value,
        f"{capability} could not be served: {told}",
        request_id=request_id,
        retry_after=_HEALTH_RETRY_SECONDS if passes(known) else None,
    )


def _in_vain(failure: Failure, capability: str) -> str:
    """It was planned again after this failure, and what serves it may not be loaded any more."""
    match failure:
        case Failure.GPU_OOM:
            what, then = "its runtime ran out of memory", f"its envelope is suspect now: {_TO_BE_DONE}"
        case Failure.ARTIFACT_CORRUPT:
            what, then = "its model file is not the one that was registered", "an operator has to put that in its place"
        case _:
            what, then = f"{failure.value} ended the first attempt", f"its envelope is suspect: {_TO_BE_DONE}"
    return f"{capability} could not be served: {what}, and planned again it found no other place; {then}"


def passes(failure: Failure) -> bool:
    """Whether the same request may be answered later, with nobody mending anything."""
    match failure:
        case (
            Failure.MODEL_LOAD_FAILED
            | Failure.RUNTIME_CRASH
            | Failure.HEALTHCHECK_FAILED
            | Failure.INVALID_OUTPUT
            | Failure.TIMEOUT
            | Failure.SCHEDULER_STATE_STALE
            | Failure.EXTERNAL_GPU_PRESSURE
            | Failure.RESIDENCY_CONFLICT
            | Failure.EVICTION_NOT_ALLOWED
            | Failure.DEADLINE_CANNOT_BE_MET
            | Failure.LEASE_CONFLICT
            | Failure.GPU_MEMORY_NOT_RECLAIMED
            | Failure.QUEUE_FULL
            | Failure.LEASE_TIMEOUT
            | Failure.CAPABILITY_UNAVAILABLE
            | Failure.DRIVER_ERROR
        ):
            return True
        case Failure.INSUFFICIENT_SCHEDULABLE_VRAM | Failure.ARTIFACT_CORRUPT | Failure.GPU_OOM:
            return False  # it never fits here; the model file is another one; its envelope is suspect
        case _:
            assert_never(failure)


def unavailable_error(request_id: str | None, cause: Cause) -> ApiError:
    """Nothing is admitted at all."""
    match cause:
        case Cause.STARTING:
            message = "the scheduler is starting: /readyz says what is missing"
        case Cause.DRAINING:
            message = "the scheduler is shutting down"
        case Cause.LEDGER_UNAVAILABLE:
            message = "the ledger cannot be written, so nothing is admitted"
        case Cause.INTERNAL_ERROR:
            return ApiError(500, cause.value, "an internal error; the log has it", request_id=request_id)
        case Cause.TOO_MANY_OPEN:
            message = "more requests are open than this server takes"
            return ApiError(429, cause.value, message, request_id=request_id, retry_after=_CONFLICT_RETRY_SECONDS)
        case _:
            assert_never(cause)
    return ApiError(503, cause.value, message, request_id=request_id, retry_after=_HEALTH_RETRY_SECONDS)


def repeated_error(repeated: Repeated, capability: str, now: int) -> ApiError:
    """A second submission under the same key gets the first one's outcome."""
    request_id = repeated.request_id
    if not repeated.same_content:
        message = "this Idempotency-Key was used for another request"
        return ApiError(409, Reason.COMMAND_ID_REUSED.value, message, request_id=request_id)
    if repeated.refused is not None:
        first = refusal_error(repeated.refused, capability, now)
        return ApiError(first.status, first.code, first.message, request_id=request_id, extra=first.extra)
    if repeated.state == "in_progress":
        message = "a request with this Idempotency-Key is in progress"
        return ApiError(409, "request_in_progress", message, request_id=request_id, retry_after=_CONFLICT_RETRY_SECONDS)
    message = f"a request with this Idempotency-Key was {repeated.state}; its answer is not kept"
    return ApiError(409, f"request_{repeated.state}", message, request_id=request_id)


# ---- refusals of the planner ------------------------------------------------------------------------------------


def _reason_error(refused: Refused, reason: Reason, capability: str, now: int | None) -> ApiError:
    status, plan = status_of(reason), refused.plan
    extra: dict[str, Any] = {}
    if plan is not None:
        figures = plan.document.get("figures", {})
        extra = {
            "plan_fingerprint": plan.fingerprint,
            "reasons": list(plan.document.get("reasons", [])),
            "figures": dict(figures),
        }
    return ApiError(
        status=status,
        code="model_not_found" if reason is Reason.CAPABILITY_UNAVAILABLE else reason.value,
        message=_message(refused, reason, capability),
        param="model" if status in (403, 404) else None,
        request_id=refused.request_id,
        retry_after=_retry_after(status, plan, now) if waiting_helps(reason) else None,
        extra=extra,
        headers={} if plan is None else {"X-Gpuledger-Plan": plan.fingerprint},
    )


def status_of(reason: Reason) -> int:
    """403 and 404: this client, or this configuration, does not get it. 429: no room now. 503: passes by itself."""
    match reason:
        case Reason.CAPABILITY_UNAVAILABLE:
            return 404
        case (
            Reason.ACCELERATOR_KIND_MISMATCH
            | Reason.NODE_NOT_PRODUCTION_ELIGIBLE
            | Reason.DEPLOYMENT_NOT_PRODUCTION_ELIGIBLE
            | Reason.LAB_ONLY
            | Reason.LAB_PAUSED
            | Reason.LABEL_MISMATCH
            | Reason.NO_MEASURED_ENVELOPE
        ):
            return 403
        case (
            Reason.NODE_MEMORY_INSUFFICIENT
            | Reason.REPLICA_LIMIT
            | Reason.DEADLINE_CANNOT_BE_MET
            | Reason.EXTERNAL_GPU_PRESSURE
            | Reason.RESIDENT_DRAINING
            | Reason.CONCURRENCY_LIMIT
            | Reason.DRAINING_FOR_WAITER
            | Reason.LOAD_BACKOFF
            | Reason.GPU_PRESSURE_HOLD
            | Reason.LOAD_IN_PROGRESS
            | Reason.QUEUED_BEHIND
            | Reason.RESIDENCY_CONFLICT
            | Reason.RESIDENCY_PROTECTED
            | Reason.WAITING_FOR_DRAIN
            | Reason.INSUFFICIENT_SCHEDULABLE_VRAM
            | Reason.EVICTION_NOT_ALLOWED
            | Reason.QUEUE_FULL
        ):
            return 429
        case (
            Reason.NODE_CORDONED
            | Reason.NODE_DRAINING
            | Reason.NODE_NOT_READY
            | Reason.ACCELERATOR_UNHEALTHY
            | Reason.ACCELERATOR_ALLOCATED
            | Reason.SCHEDULER_STATE_STALE
            | Reason.NO_ACCELERATOR
            | Reason.LEASE_CONFLICT
            | Reason.PREEMPTED
        ):
            return 503
        case Reason.COMMAND_ID_REUSED:
            return 409
        case _:
            assert_never(reason)


def _message(refused: Refused, reason: Reason, capability: str) -> str:
    """`rag.embedding@1 is refused on host:local (0.4 GiB schedulable): others hold 21.0 GiB, needs 1.3 GiB`."""
    document: Mapping[str, Any] = {} if refused.plan is None else refused.plan.document
    figures = document.get("figures", {}).get(reason.value, {})
    if reason is Reason.NO_MEASURED_ENVELOPE:
        why = _NEVER_MEASURED if refused.doubt is None else f"its envelope is suspect ({refused.doubt}): {_TO_BE_DONE}"
    else:
        why = describe(Refusal(reason, figures)) if figures else _WORDS_WITHOUT_FIGURES.get(reason, reason.value)
    waited = " after waiting as long as it may" if refused.detail == "max_queue_seconds" else ""
    accounting = document.get("accounting")
    if accounting is None or not _is_of_memory(reason):
        return f"{capability} is refused{waited}: {why}"
    room = f"on {document.get('accelerator_id')} ({size(accounting['schedulable_bytes'])} schedulable)"
    return f"{capability} is refused{waited} {room}: {why}"


#: Who asks needs no hash: which model is meant stands in the question, and what was planned in the figures.
_NEVER_MEASURED: Final = "what its model takes was never measured as it is configured now: an operator has to see to it"
_TO_BE_DONE: Final = "an operator has to accept it, or it has to be measured again"


def _is_of_memory(reason: Reason) -> bool:
    """Whether room is what was short: then the message says how much there is."""
    never = (Reason.EXTERNAL_GPU_PRESSURE, Reason.INSUFFICIENT_SCHEDULABLE_VRAM)
    return reason in never or eviction_helps(reason)


_WORDS_WITHOUT_FIGURES: Final[Mapping[Reason, str]] = {
    reason: describe(Refusal(reason, {}))
    for reason in (Reason.NO_ACCELERATOR, Reason.LAB_PAUSED, Reason.LEASE_CONFLICT, Reason.PREEMPTED)
}


def _retry_after(status: int, plan: PlanFacts | None, now: int | None) -> int:
    """When a protection or a back-off ends, where it waits for one; otherwise a few seconds."""
    waiting = None if plan is None else plan.document.get("waiting_for")
    not_before = None if waiting is None else waiting.get("not_before")
    if isinstance(not_before, str) and now is not None:
        seconds = ceil_div(max(0, parse_instant(not_before) - now), MICROS_PER_SECOND)
        return min(max(1, seconds), _LONGEST_RETRY_SECONDS)
    return _CAPACITY_RETRY_SECONDS if status == 429 else _HEALTH_RETRY_SECONDS
