"""Who waits, in claim order: where, for what, since when, and about how long it will be (semantics.md 5, 6.5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias, cast

from gpuledger.domain.aggregates.request import RequestState
from gpuledger.domain.estimates import estimated_wait_ms
from gpuledger.domain.events import PlanDecided, RequestQueued, StreamKind, stream_name
from gpuledger.domain.ports import LedgerReader
from gpuledger.domain.queue import waiting
from gpuledger.domain.state import WaitingFor
from gpuledger.domain.units import MICROS_PER_MS, format_instant
from gpuledger.domain.world import World

Document: TypeAlias = dict[str, Any]

#: Of so many who wait the own events are looked at; each is one short read. More are not looked at by a person.
EXAMINED_LIMIT: Final = 100


def queue_documents(world: World, now: int) -> list[Document]:
    """Everybody without a lease, as the folded state has it. `place` counts from 1."""
    return [_waiter(world, now, place, request) for place, request in enumerate(waiting(world), start=1)]


def _waiter(world: World, now: int, place: int, request: RequestState) -> Document:
    question, waiting_for = request.question, request.waiting_for
    return {
        "place": place,
        "request_id": question.request_id,
        "client_id": question.client_id,
        "capability": question.capability,
        "priority": question.priority.value,
        "lab": question.lab,
        "operation": request.operation,
        "phase": request.phase.value,
        "requested_at": format_instant(question.requested_at),
        "waited_ms": max(0, now - question.requested_at) // MICROS_PER_MS,
        "deadline": _instant(question.deadline),
        "queue_until": format_instant(request.queue_until),
        "waiting_for": None if waiting_for is None else _waiting_for(waiting_for),
        "estimated_wait_ms": estimated_wait_ms(world, question.request_id, now),
        "attempt": request.retries + 1,
        "preemptions": request.preemptions,
        "replans": request.replans,
        "fallback_rank": question.fallback_rank,
        "held_by": request.held_by,
    }


def _waiting_for(waiting_for: WaitingFor) -> Mapping[str, Any]:
    return {
        "accelerator_id": waiting_for.accelerator_id,
        "deployment_id": waiting_for.deployment_id,
        "reason": waiting_for.reason.value,
        "needed_bytes": waiting_for.needed_bytes,
        "resident_ids": list(waiting_for.resident_ids),
        "not_before": _instant(waiting_for.not_before),
    }


def _instant(instant: int | None) -> str | None:
    return None if instant is None else format_instant(instant)


# ---- what only the ledger has -----------------------------------------------------------------------------------


def examine(reader: LedgerReader, queue: list[Document]) -> list[Document]:
    """The same, each with `waiting_since` and `figures`: when it came to wait there, and what its reason said then.

    Both are null where the ledger does not say, and past the first EXAMINED_LIMIT.
    """
    return [entry | _of_its_events(reader, entry) for entry in queue]


def _of_its_events(reader: LedgerReader, entry: Document) -> Document:
    found: Document = {"waiting_since": None, "figures": None}
    if entry["waiting_for"] is None or entry["place"] > EXAMINED_LIMIT:
        return found
    for event in reader.read_stream(stream_name(StreamKind.REQUEST, entry["request_id"])):
        match event.data:
            case RequestQueued():
                found["waiting_since"] = format_instant(event.at)
            case PlanDecided(plan=plan):
                found["figures"] = _object(_object(plan.get("figures")).get(entry["waiting_for"]["reason"])) or None
            case _:
                continue
    return found


def _object(value: object) -> Document:
    """An object of a plan document, which is data here: an auditor's ledger may hold anything."""
    return dict(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else {}
