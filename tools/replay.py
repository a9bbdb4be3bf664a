"""Replay: fold a ledger from its first event and decide every plan in it again (ledger.md, Replay).

A plan is recomputed from the ledger alone: the state folded to its `as_of`, at its instant, under the policy of that
state, for the question of its request. Nothing is loaded, evicted, sent or written.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from itertools import zip_longest
from typing import Final, TypeAlias

import orjson

from gpuledger.domain.events import PlanDecided, Recorded
from gpuledger.domain.grants import evidence
from gpuledger.domain.planner import PLANNER_VERSION, Json, PlacementPlan, plan
from gpuledger.domain.ports import LedgerCorrupt, LedgerReader
from gpuledger.domain.reasons import Verdict
from gpuledger.domain.state import PlanRequest
from gpuledger.domain.world import World, evolve

#: Folded states kept while folding. A plan of the only writer was made some events ago; with writers that interleave it
#: is older by what they committed while it was being made. What is older still is folded again, in one further pass.
RECENT_WORLDS: Final = 256
#: Events in memory at once.
PAGE_EVENTS: Final = 512
#: Texts are rendered at the edge; like the fingerprint, replay leaves them out (semantics.md 6.6).
TEXTS: Final = frozenset({"message"})

#: What code raises on values that no scheduler wrote. A forged ledger must not look like a fault of this program.
_DOES_NOT_FIT: Final = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)

Document: TypeAlias = dict[str, Json]


class Outcome(StrEnum):
    """What came of deciding one plan again. UNREPLAYABLE is never a pass."""

    MATCH = "MATCH"
    MISMATCH = "MISMATCH"
    UNREPLAYABLE = "UNREPLAYABLE"


class Absent:
    """Stands for a field that one of two documents does not have."""

    def __repr__(self) -> str:
        return "(absent)"


ABSENT: Final = Absent()


@dataclass(frozen=True, slots=True)
class Difference:
    """The first field in which a recorded plan is not the recomputed one. `path`: `plan.accounting.total_bytes`."""

    path: str
    recorded: Json | Absent
    recomputed: Json | Absent


@dataclass(frozen=True, slots=True)
class PlanResult:
    """One plan of the ledger, decided again. `difference` is set for a MISMATCH, `why` for an UNREPLAYABLE."""

    seq: int
    plan_id: str
    request_id: str
    as_of: int
    verdict: Verdict
    outcome: Outcome
    difference: Difference | None = None
    why: str | None = None


@dataclass(frozen=True, slots=True)
class StateResult:
    """The state that a scheduler kept after event `seq`, against the fold. `field` names the first that differs."""

    seq: int
    outcome: Outcome
    field: str | None


@dataclass(frozen=True, slots=True)
class _Deferred:
    """A plan whose state was folded too long ago."""

    seq: int
    decided: PlanDecided
    question: PlanRequest


class Replay:
    """One replay of one ledger. `results` yields as it folds; counts and findings are complete when it has ended."""

    def __init__(self, reader: LedgerReader, *, only: frozenset[int] | None = None, kept: World | None = None) -> None:
        """`only`: the `seq` of the plans to decide again; the fold then ends with the newest of them.

        `kept`: a state that the scheduler that lived it kept. The fold must come to the same one.
        """
        self._reader = reader
        self._only = only
        self._kept = kept
        self._last = reader.head() if only is None else min(reader.head(), max(only, default=0))
        self._recent: deque[World] = deque([World()], maxlen=RECENT_WORLDS)
        self._deferred: list[_Deferred] = []
        self.events = 0
        self.folded_again = 0
        self.counts: Counter[Outcome] = Counter()
        #: The kept state against the fold, once the fold has come to it.
        self.state: StateResult | None = None
        #: Plans that name a state from after themselves: the one invariant that a fold can survive.
        self.as_of_broken: list[int] = []

    @property
    def world(self) -> World:
        """The state folded so far."""
        return self._recent[-1]

    @property
    def is_partial(self) -> bool:
        """Only some plans were asked for."""
        return self._only is not None

    @property
    def last(self) -> int:
        """The `seq` that the fold ends with."""
        return self._last

    @property
    def invariants(self) -> Mapping[str, bool]:
        """What was checked while folding. The first two hold when `results` has ended: it raises otherwise."""
        return {"seq_dense": True, "versions_dense": True, "as_of_before_plan": not self.as_of_broken}

    def results(self, progress: Callable[[int], None] = lambda _: None) -> Iterator[PlanResult]:
        """Every plan in the order of the ledger, then those that had to be folded again. Raises LedgerCorrupt.

        `progress` is called with the events done after every page; those of a further pass come on top.
        """
        for event in self._events(self._last, progress):
            world = self.world
            _check_place(world, event)
            if isinstance(event.data, PlanDecided) and (self._only is None or event.seq in self._only):
                result = self._judge(event, event.data)
                if result is not None:
                    yield self._counted(result)
            self._recent.append(_evolved(world, event))
            self.events += 1
            if self._kept is not None and self._kept.seq == event.seq:
                self.state = _compare_states(self._kept, self.world)
        for result in self._judge_deferred(progress):
            yield self._counted(result)

    def _counted(self, result: PlanResult) -> PlanResult:
        self.counts[result.outcome] += 1
        return result

    def _events(self, last: int, progress: Callable[[int], None]) -> Iterator[Recorded]:
        after = 0
        while after < last:
            page = self._reader.read(after, min(PAGE_EVENTS, last - after))
            if not page:
                raise LedgerCorrupt("is missing", after + 1)
            yield from page
            after = page[-1].seq
            progress(self.folded_again + after)

    def _judge(self, event: Recorded, decided: PlanDecided) -> PlanResult | None:
        """None when its state is older than what is kept."""
        hopeless = unreplayable(event.seq, decided)
        if hopeless is not None:
            self.as_of_broken += [event.seq] if decided.as_of >= event.seq else []
            return hopeless
        request = self.world.requests.get(decided.request_id)
        if request is None:
            return _unreplayable(event.seq, decided, "its request was not received, or had ended, before it")
        kept = decided.as_of - self._recent[0].seq
        if kept < 0:
            self._deferred.append(_Deferred(event.seq, decided, request.question))
            return None
        return judge(self._recent[kept], event.seq, decided, request.question)

    def _judge_deferred(self, progress: Callable[[int], None]) -> Sequence[PlanResult]:
        if not self._deferred:
            return ()
        self.folded_again = self._last
        by_state: dict[int, list[_Deferred]] = {}
        for one in self._deferred:
            by_state.setdefault(one.decided.as_of, []).append(one)
        world = World()
        results = [judge(world, one.seq, one.decided, one.question) for one in by_state.get(0, ())]
        for event in self._events(max(by_state), progress):
            world = _evolved(world, event)
            made_here = by_state.get(event.seq, ())
            results.extend(judge(world, one.seq, one.decided, one.question) for one in made_here)
        return sorted(results, key=lambda result: result.seq)


def _check_place(world: World, event: Recorded) -> None:
    """Raises LedgerCorrupt for an event that is not the next one, of the ledger or of its stream."""
    if event.seq != world.seq + 1:
        raise LedgerCorrupt(f"follows event {world.seq}", event.seq)
    # A request that has ended is in no state any more; that nothing takes its place again is the reader's to see.
    version = world.versions.get(event.stream, 0) + 1
    if event.version != version:
        raise LedgerCorrupt(f"is version {event.version} of {event.stream}, where {version} comes next", event.seq)
    if event.at < world.at:
        raise LedgerCorrupt("happened before the event before it", event.seq)


def _evolved(world: World, event: Recorded) -> World:
    try:
        return evolve(world, event)
    except _DOES_NOT_FIT as error:
        raise LedgerCorrupt(f"does not fit the events before it ({type(error).__name__})", event.seq) from error


def _compare_states(kept: World, folded: World) -> StateResult:
    names = (one.name for one in fields(World))
    field = next((name for name in names if getattr(kept, name) != getattr(folded, name)), None)
    return StateResult(folded.seq, Outcome.MATCH if field is None else Outcome.MISMATCH, field)


def fold_to(reader: LedgerReader, seq: int, start: World | None = None) -> World:
    """The state after event `seq`, from the beginning or from a state folded earlier. Raises LedgerCorrupt."""
    world = World() if start is None else start
    while world.seq < seq:
        page = reader.read(world.seq, min(PAGE_EVENTS, seq - world.seq))
        if not page:
            raise LedgerCorrupt("is missing", world.seq + 1)
        for event in page:
            world = _evolved(world, event)
    return world


# ---- one plan ---------------------------------------------------------------------------------------------------


def redecide(world: World, decided: PlanDecided, question: PlanRequest) -> PlacementPlan:
    """The plan that this release makes of the state at `as_of`, at the plan's instant, for its question."""
    return plan(
        world.state(decided.decided_at),
        replace(question, fallback_rank=decided.fallback_rank),
        as_of=decided.as_of,
        plan_id=decided.plan_id,
    )


def unreplayable(seq: int, decided: PlanDecided) -> PlanResult | None:
    """Why the plan of event `seq` cannot be decided again whatever its state was; None when it can."""
    if decided.planner_version != PLANNER_VERSION:
        why = f"it was made by {decided.planner_version}; this release has {PLANNER_VERSION}"
        return _unreplayable(seq, decided, why)
    if decided.as_of >= seq:
        return _unreplayable(seq, decided, f"as_of {decided.as_of} does not lie before the plan itself")
    return None


def judge(world: World, seq: int, decided: PlanDecided, question: PlanRequest) -> PlanResult:
    """Decide the plan of event `seq` again on the state at its `as_of`, and compare."""
    try:
        difference = difference_of(decided, redecide(world, decided, question))
    except _DOES_NOT_FIT as error:
        return _unreplayable(seq, decided, f"the planner finds no answer on its state ({type(error).__name__})")
    return PlanResult(
        seq=seq,
        plan_id=decided.plan_id,
        request_id=decided.request_id,
        as_of=decided.as_of,
        verdict=decided.verdict,
        outcome=Outcome.MATCH if difference is None else Outcome.MISMATCH,
        difference=difference,
    )


def _unreplayable(seq: int, decided: PlanDecided, why: str) -> PlanResult:
    return PlanResult(
        seq=seq,
        plan_id=decided.plan_id,
        request_id=decided.request_id,
        as_of=decided.as_of,
        verdict=decided.verdict,
        outcome=Outcome.UNREPLAYABLE,
        why=why,
    )


def difference_of(decided: PlanDecided, recomputed: PlacementPlan) -> Difference | None:
    """The first difference: what was decided, then its evidence in the order of the document, then its fingerprint.

    The fingerprint comes last, since it differs with everything else and says nothing of what it was.
    """
    return (
        _difference("verdict", decided.verdict.value, recomputed.verdict.value)
        or _difference("reasons", [*decided.reasons], [*recomputed.reasons])
        or _difference_of_plans(dict(decided.plan), dict(evidence(recomputed)))
        or _difference("policy_revision", decided.policy_revision, recomputed.policy_revision)
        or _difference("fingerprint", decided.fingerprint, recomputed.fingerprint)
    )


def _difference_of_plans(recorded: Document, recomputed: Document) -> Difference | None:
    # Nearly all are the same to the byte, which is seen ten times faster than field by field.
    if orjson.dumps(recorded, option=orjson.OPT_SORT_KEYS) == orjson.dumps(recomputed, option=orjson.OPT_SORT_KEYS):
        return None
    return _difference("plan", recorded, recomputed)


def _difference(path: str, recorded: Json | Absent, recomputed: Json | Absent) -> Difference | None:
    if isinstance(recorded, dict) and isinstance(recomputed, dict):
        return _difference_of_objects(path, recorded, recomputed)
    if isinstance(recorded, list) and isinstance(recomputed, list):
        return _difference_of_lists(path, recorded, recomputed)
    # `True == 1` is so in Python and not in a document.
    if type(recorded) is type(recomputed) and recorded == recomputed:
        return None
    return Difference(path, recorded, recomputed)


def _difference_of_objects(path: str, recorded: Document, recomputed: Document) -> Difference | None:
    unexpected = sorted(key for key in recorded if key not in recomputed)
    for key in [*recomputed, *unexpected]:
        if key not in TEXTS:
            found = _difference(f"{path}.{key}", recorded.get(key, ABSENT), recomputed.get(key, ABSENT))
            if found is not None:
                return found
    return None


def _difference_of_lists(path: str, recorded: list[Json], recomputed: list[Json]) -> Difference | None:
    for index, pair in enumerate(zip_longest(recorded, recomputed, fillvalue=ABSENT)):
        found = _difference(f"{path}[{index}]", *pair)
        if found is not None:
            return found
    return None
