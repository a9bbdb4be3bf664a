"""Choosing among candidates: the best first (semantics.md 6.5)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from .candidates import Candidate, Start
from .reasons import Reason, Verdict

Key: TypeAlias = tuple[int, tuple[int, ...], str, str, str]


def ranked(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """All candidates, the best first. No two are equal: a pair of ids is there once."""
    return tuple(sorted(candidates, key=rank_key))


def rank_key(candidate: Candidate) -> Key:
    """The group, what decides between equals of that group, and then always the ids; the least is the best."""
    return (
        _group(candidate),
        _within_group(candidate),
        candidate.node_id,
        candidate.accelerator_id,
        candidate.deployment_id,
    )


def _group(candidate: Candidate) -> int:
    match candidate.verdict:
        case Verdict.ADMIT:
            return {Start.WARM: 0, Start.WAKE: 1, Start.COLD: 2}[candidate.start or Start.COLD]
        case Verdict.ADMIT_AFTER_EVICTION:
            return 3
        case Verdict.QUEUE:
            if candidate.start is Start.WARM:
                return 4
            return 6 if Reason.RESIDENCY_PROTECTED in candidate.reasons else 5
        case Verdict.REJECT_CAPACITY:
            return 7
        case Verdict.REJECT_HEALTH:
            return 8
        case Verdict.REJECT_POLICY:
            return 9


def _within_group(candidate: Candidate) -> tuple[int, ...]:
    match candidate.verdict:
        case Verdict.ADMIT if candidate.start is Start.WARM:
            return (candidate.start_micros, candidate.active_leases)
        case Verdict.ADMIT:
            # Best fit: the place where least is left keeps the others whole.
            return (candidate.headroom_after_bytes,)
        case Verdict.ADMIT_AFTER_EVICTION if candidate.eviction_set is not None:
            return (*candidate.eviction_set.order, candidate.headroom_after_bytes)
        case _:
            return ()
