"""`gpuledger.explain/1`: the whole story of one request, from its question to its end, out of the ledger.

A plan, a request and a lease all lead to the request that they belong to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from gpuledger.domain.aggregates.request import receive
from gpuledger.domain.events import (
    Event,
    LeaseExpired,
    LeaseGranted,
    LeasePreempted,
    LeaseReleased,
    LeaseRenewed,
    PlanDecided,
    Recorded,
    RequestCancelled,
    RequestCompleted,
    RequestFailed,
    RequestFellBack,
    RequestReceived,
    RequestRetried,
    StreamKind,
    stream_name,
)
from gpuledger.domain.grants import EVIDENCE_OF_OTHERS
from gpuledger.domain.ports import LedgerCorrupt, LedgerReader
from gpuledger.domain.units import MICROS_PER_MS, format_instant
from gpuledger.domain.world import World

from .ledger_target import Target, TargetError
from .replay import Outcome, fold_to, judge, redecide, unreplayable
from .snapshots import read_snapshot
from .story_trail import events_of
from .story_words import told

SCHEMA: Final = "gpuledger.explain/1"
#: Of ids that a prefix fits, so many are told.
_TOLD: Final = 8

Document: TypeAlias = dict[str, Any]
SubjectKind: TypeAlias = Literal["request", "plan", "lease"]


@dataclass(frozen=True, slots=True)
class Subject:
    """What was asked about, and the request that it belongs to."""

    kind: SubjectKind
    id: str
    request_id: str


# ---- finding it -------------------------------------------------------------------------------------------------


def find_subject(reader: LedgerReader, text: str) -> Subject:
    """The request, plan or lease with an id, or with the only id that begins so. Raises TargetError."""
    if not text.isascii():
        # Nor could it be looked up: what of a command line is no text cannot be asked of SQLite.
        raise TargetError(f"no request, plan or lease of this ledger is named {text}: ids are ASCII")
    quick = _by_its_request(reader, text)
    if quick is not None:
        return quick
    found: dict[Subject, None] = {}
    for subject in _named_like(reader, text):
        if subject.id == text:
            return subject
        found[subject] = None
    if len(found) == 1:
        return next(iter(found))
    if not found:
        raise TargetError(f"no request, plan or lease of this ledger is named {text}")
    names = [subject.id for subject in found][:_TOLD]
    more = f" and {len(found) - _TOLD} more" if len(found) > _TOLD else ""
    raise TargetError(f"{text} may be any of {', '.join(names)}{more}")


def _by_its_request(reader: LedgerReader, text: str) -> Subject | None:
    """Without a pass over the ledger: the id of a request, or one that the scheduler makes of it (`plan-ID-1`)."""
    inner = text.removeprefix("plan-").removeprefix("lease-").rpartition("-")[0]
    for request_id in filter(None, dict.fromkeys((text, inner))):
        own = reader.read_stream(stream_name(StreamKind.REQUEST, request_id))
        if own and request_id == text:
            return Subject("request", text, text)
        if any(isinstance(event.data, PlanDecided) and event.data.plan_id == text for event in own):
            return Subject("plan", text, request_id)
    return None


def _named_like(reader: LedgerReader, text: str) -> Iterator[Subject]:
    """Everything that can be asked about and whose id begins so. Only leaves that contain the text are decoded."""
    needle = text.encode()
    for leaf in reader.leaves():
        if needle not in leaf.body:
            continue
        (event,) = reader.read(leaf.seq - 1, 1)
        subject = _subject_of(event.data)
        if subject is not None and subject.id.startswith(text):
            yield subject


def _subject_of(data: Event) -> Subject | None:
    match data:
        case RequestReceived(request_id=request_id):
            return Subject("request", request_id, request_id)
        case PlanDecided(plan_id=plan_id, request_id=request_id):
            return Subject("plan", plan_id, request_id)
        case LeaseGranted(lease_id=lease_id, request_id=request_id):
            return Subject("lease", lease_id, request_id)
        case _:
            return None


# ---- the document -----------------------------------------------------------------------------------------------


def story_document(target: Target, text: str, *, recorded_only: bool = False) -> Document:
    """The story of what is named, as a document. Raises TargetError, LedgerCorrupt, LedgerUnavailable.

    `recorded_only`: nothing is decided again, so an admission shows the evidence of its chosen candidate only.
    """
    subject = find_subject(target.reader, text)
    events = events_of(target.reader, subject.request_id)
    received = next((event for event in events if isinstance(event.data, RequestReceived)), None)
    if received is None or not isinstance(received.data, RequestReceived):
        raise LedgerCorrupt(f"the request {subject.request_id} was never received", events[0].seq)
    asked_at = received.data.requested_at
    plans = [event for event in events if isinstance(event.data, PlanDecided)]
    return {
        "schema": SCHEMA,
        "subject": {"kind": subject.kind, "id": subject.id},
        "request": _request(received.data),
        "outcome": _outcome(events),
        "passage": _passage(events),
        "plans": [_plan(target, event, events, recorded_only=recorded_only) for event in plans],
        "leases": _leases(events),
        "timeline": [
            {
                "seq": event.seq,
                "at": format_instant(event.at),
                "after_ms": max(0, event.at - asked_at) // MICROS_PER_MS,
                "type": type(event.data).__name__,
                "told": told(event.data),
            }
            for event in events
            if not isinstance(event.data, LeaseRenewed)
        ],
    }


def _request(data: RequestReceived) -> Document:
    return {
        "request_id": data.request_id,
        "client_id": data.client_id,
        "capability": data.capability,
        "priority": data.priority.value,
        "lab": data.lab,
        "operation": data.operation,
        "body_bytes": data.body_bytes,
        "requested_at": format_instant(data.requested_at),
        "deadline": None if data.deadline is None else format_instant(data.deadline),
        "queue_until": format_instant(data.queue_until),
    }


def _outcome(events: Sequence[Recorded]) -> Document:
    for event in reversed(events):
        match event.data:
            case RequestCompleted() as end:
                return {
                    "state": "completed",
                    "at": format_instant(end.completed_at),
                    "status": end.status,
                    "queued_ms": end.queued_ms,
                    "served_ms": end.served_ms,
                    "response_bytes": end.response_bytes,
                    "prompt_tokens": end.prompt_tokens,
                    "completion_tokens": end.completion_tokens,
                }
            case RequestFailed() as end:
                return {
                    "state": "refused" if end.failure is None else "failed",
                    "at": format_instant(end.failed_at),
                    "reason": None if end.reason is None else end.reason.value,
                    "failure": None if end.failure is None else end.failure.value,
                    "detail": end.detail,
                }
            case RequestCancelled() as end:
                return {"state": "cancelled", "at": format_instant(end.cancelled_at), "cause": end.cause}
            case _:
                continue
    return {"state": "open", "at": None}


def _passage(events: Sequence[Recorded]) -> Document:
    """What happened to it on its way: tried again, put back, planned for the next rank of its contract."""
    data = [event.data for event in events]
    fallback = next((one for one in data if isinstance(one, RequestFellBack)), None)
    return {
        "attempts": 1 + sum(isinstance(one, RequestRetried) for one in data),
        "fallback": None
        if fallback is None
        else {
            "rank": fallback.fallback_rank,
            "reason": None if fallback.reason is None else fallback.reason.value,
            "failure": None if fallback.failure is None else fallback.failure.value,
        },
    }


def _leases(events: Sequence[Recorded]) -> list[Document]:
    """The grants of the request, with how each ended as far as it has."""
    found: dict[str, Document] = {}
    for event in events:
        match event.data:
            case LeaseGranted() as granted:
                found[granted.lease_id] = {
                    "lease_id": granted.lease_id,
                    "accelerator_id": granted.accelerator_id,
                    "resident_id": granted.resident_id,
                    "start": granted.start.value,
                    "reserved_bytes": granted.reserved_bytes,
                    "granted_at": format_instant(granted.granted_at),
                    "expires_at": format_instant(granted.expires_at),
                    "renewals": 0,
                    "ended_at": None,
                    "ended_by": None,
                }
            case LeaseRenewed(lease_id=lease_id, expires_at=expires_at) if lease_id in found:
                found[lease_id]["renewals"] += 1
                found[lease_id]["expires_at"] = format_instant(expires_at)
            case LeaseReleased(lease_id=lease_id, released_at=ended_at, cause=cause) if lease_id in found:
                found[lease_id] |= {"ended_at": format_instant(ended_at), "ended_by": cause.value}
            case LeaseExpired(lease_id=lease_id, expired_at=ended_at) if lease_id in found:
                found[lease_id] |= {"ended_at": format_instant(ended_at), "ended_by": "expired"}
            case LeasePreempted(lease_id=lease_id, preempted_at=ended_at) if lease_id in found:
                found[lease_id] |= {"ended_at": format_instant(ended_at), "ended_by": "preempted"}
            case _:
                continue
    return list(found.values())


def _plan(target: Target, event: Recorded, events: Sequence[Recorded], *, recorded_only: bool) -> Document:
    """A plan with its evidence: as it was kept, or, where little was kept, decided again."""
    decided = event.data
    assert isinstance(decided, PlanDecided)
    kept = dict(decided.plan)
    about: Document = {"seq": event.seq, "plan_id": decided.plan_id, "at": format_instant(event.at)}
    is_short = any(key not in kept for key in EVIDENCE_OF_OTHERS)
    if recorded_only or not is_short:
        return {**about, "evidence": "recorded", "replay": None, "document": kept}
    question = next(one.data for one in events if isinstance(one.data, RequestReceived))
    request = receive(question).question
    hopeless = unreplayable(event.seq, decided)
    world = World() if hopeless is not None else _state_at(target, decided.as_of)
    result = hopeless or judge(world, event.seq, decided, request)
    replay = {"result": result.outcome.value}
    if result.outcome is not Outcome.MATCH:
        why = result.why if result.difference is None else f"{result.difference.path} differs"
        return {**about, "evidence": "recorded", "replay": {**replay, "why": why}, "document": kept}
    document = redecide(world, decided, request).document()
    return {**about, "evidence": "recomputed", "replay": replay, "document": document}


def _state_at(target: Target, seq: int) -> World:
    """The state after an event, from a snapshot when that lies before it."""
    snapshot = target.snapshot()
    start = read_snapshot(snapshot) if snapshot is not None and snapshot.seq <= seq else None
    return fold_to(target.reader, seq, start)
