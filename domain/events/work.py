"""Requests, plans, and how capabilities fare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..failures import Failure, Owner
from ..policy import Priority
from ..reasons import Reason, Verdict
from ..state import DOCUMENT, WaitingFor
from ..units import (
    AcceleratorId,
    Bytes,
    CapabilityId,
    ClientId,
    Count,
    DeploymentId,
    Identifier,
    Instant,
    Milliseconds,
    RequestId,
    ResidentId,
    Sha256Hex,
)
from .registry import StreamKind, register

# ---- requests ---------------------------------------------------------------------------------------------------


@register(StreamKind.REQUEST)
@dataclass(frozen=True, slots=True)
class RequestReceived:
    """The question of a client in shapes and sizes; what it said is never here.

    `content_mac` (keyed, and only when the client named the request itself) tells a second submission of the same
    command from another one under the same id.
    """

    __pydantic_config__ = DOCUMENT

    request_id: RequestId
    client_id: ClientId
    capability: CapabilityId
    priority: Priority
    lab: bool
    requested_at: Instant
    deadline: Instant | None
    queue_until: Instant
    operation: Literal["embeddings", "chat", "completion", "transcription", "rerank", "warm"]
    body_bytes: Bytes
    content_mac: Sha256Hex | None


@register(StreamKind.REQUEST)
@dataclass(frozen=True, slots=True)
class PlanDecided:
    """A plan: recomputable from the state at `as_of`, the instant, the named policy and planner (ledger.md, Replay).

    `plan` is the plan document `gpuledger.plan/1`; an admission keeps the evidence of its chosen candidate only.
    """

    __pydantic_config__ = DOCUMENT

    request_id: RequestId
    plan_id: Identifier
    as_of: Count
    decided_at: Instant
    fallback_rank: Count
    planner_version: str
    policy_revision: Identifier
    verdict: Verdict
    reasons: tuple[Reason, ...]
    fingerprint: Sha256Hex
    plan: Mapping[str, Any]


@register(StreamKind.REQUEST)
@dataclass(frozen=True, slots=True)
class RequestQueued:
    """It waits at one place (semantics.md 6.5); again when that place changes."""

    __pydantic_config__ = DOCUMENT

    request_id: RequestId
    enqueued_at: Instant
    waiting_for: WaitingFor


@register(StreamKind.REQUEST)
@dataclass(frozen=True, slots=True)
class RequestRetried:
    """Its lease was lost to a failure before anything of an answer was sent: it is planned again (semantics.md 8).

    `after_resident_id`: not before this one is gone and the device has shown its memory back.
    """

    __pydantic_config__ = DOCUMENT

    request_id: RequestId
    retried_at: Instant
    failure: Failure
    detail: str
    attempt: Count
    limit: Count
    after_resident_id: ResidentId | None


@register(StreamKind.REQUEST)
@dataclass(frozen=True, slots=True)
class RequestFellBack:
    """The contract's fallback: from now on it is planned for the next rank (semantics.md 5). One cause is set."""

    __pydantic_config__ = DOCUMENT

    request_id: RequestId
    fell_back_at: Instant
    fallback_rank: Count
    reason: Reason | None
    failure: Failure | None
    detail: str


@register(StreamKind.REQUEST)
@dataclass(frozen=True, slots=True)
class RequestCompleted:
    """The runtime answered with a status below 500. Sizes and counts, never content."""

    __pydantic_config__ = DOCUMENT

    request_id: RequestId
    completed_at: Instant
    status: Count
    queued_ms: Milliseconds
    served_ms: Milliseconds
    response_bytes: Bytes
    prompt_tokens: Count | None
    completion_tokens: Count | None


@register(StreamKind.REQUEST)
@dataclass(frozen=True, slots=True)
class RequestFailed:
    """Refused (`reason`, with its plan in the event before) or failed under way (`failure`); exactly one is set."""

    __pydantic_config__ = DOCUMENT

    request_id: RequestId
    failed_at: Instant
    reason: Reason | None
    failure: Failure | None
    detail: str


@register(StreamKind.REQUEST)
@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The client went away, or the scheduler did."""

    __pydantic_config__ = DOCUMENT

    request_id: RequestId
    cancelled_at: Instant
    cause: Literal["client_gone", "scheduler_restarted", "shutdown"]


# ---- capabilities -----------------------------------------------------------------------------------------------


@register(StreamKind.CAPABILITY)
@dataclass(frozen=True, slots=True)
class FailureRecorded:
    """One failure with its class, owner, subjects, attempt, limit and the hash of its evidence (semantics.md 8)."""

    __pydantic_config__ = DOCUMENT

    capability: CapabilityId
    failure: Failure
    owner: Owner
    deployment_id: DeploymentId | None
    accelerator_id: AcceleratorId | None
    resident_id: ResidentId | None
    request_id: RequestId | None
    recorded_at: Instant
    attempt: Count
    limit: Count
    evidence_sha256: Sha256Hex
    detail: str


@register(StreamKind.CAPABILITY)
@dataclass(frozen=True, slots=True)
class CapabilityDegraded:
    """So many failures in a row (semantics.md 8): visible until the capability next answers a request."""

    __pydantic_config__ = DOCUMENT

    capability: CapabilityId
    degraded_at: Instant
    failures: Count
    failure: Failure
    detail: str


@register(StreamKind.CAPABILITY)
@dataclass(frozen=True, slots=True)
class CapabilityRecovered:
    """It answered a request again."""

    __pydantic_config__ = DOCUMENT

    capability: CapabilityId
    recovered_at: Instant
