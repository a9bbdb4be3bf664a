"""What a client is told of its request beside the answer: where it waited, which plan and lease, which try."""

from __future__ import annotations

from .ports import Granted, Passage


def of_passage(passage: Passage) -> dict[str, str]:
    """Only what happened: a request that was neither queued nor tried again has none of these."""
    told: dict[str, object | None] = {
        "x-gpuledger-fallback": passage.fallback,
        "x-gpuledger-attempt": passage.attempt if passage.attempt > 1 else None,
        "x-gpuledger-queue-place": passage.queue_place,
        "x-gpuledger-estimated-wait-ms": passage.estimated_wait_ms,
    }
    return {name: str(value) for name, value in told.items() if value is not None}


def of_granted(granted: Granted) -> dict[str, str]:
    """Of every answer to a request that had a lease, errors among them."""
    plan = {} if granted.plan is None else {"x-gpuledger-plan": granted.plan.fingerprint}
    return {
        "x-request-id": granted.request_id,
        "x-gpuledger-lease": granted.lease_id,
        "x-gpuledger-start": granted.start,
        "x-gpuledger-queued-ms": str(granted.queued_ms),
        "x-gpuledger-rank": str(granted.passage.fallback_rank),
        **plan,
        **of_passage(granted.passage),
    }
