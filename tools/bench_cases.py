"""Benches of what needs no disk: the codec, the fold, the planner and replay, on a ledger of a virtual day.

Their floor is one pass of orjson over the bytes that they work on: nobody can use an event without reading it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

import orjson

from gpuledger.adapters.ledger.codec import decode, encode
from gpuledger.domain.documents import state_document
from gpuledger.domain.events import PlanDecided, Recorded
from gpuledger.domain.planner import plan
from gpuledger.domain.reasons import Verdict
from gpuledger.domain.state import PlanRequest, State
from gpuledger.domain.world import World, evolve, fold

from .bench import Case, Round, Turns
from .bench_ledger import Day
from .bench_plans import Situation, situations
from .replay import Outcome, Replay

#: Events of one round: long enough to be timed, short enough that what disturbs it disturbs one round only.
PIECE_EVENTS: Final = 250
PLANS_PER_ROUND: Final = 10
#: Replay begins at the first event, so its rounds take a beginning of the day.
REPLAYED_EVENTS: Final = 750

_LOADS: Final = "orjson.loads, same bytes"


@contextmanager
def encode_bench(make_day: Callable[[], Day]) -> Generator[Sequence[Case]]:
    """Events to leaves, as an append does it: dumped, checked against the profile, read back once, compared."""
    day = make_day()
    trees = [orjson.loads(leaf) for leaf in day.leaves]
    pieces = _pieces(len(day.events))
    turns = Turns()

    def one(number: int) -> Round:
        piece = pieces[number % len(pieces)]
        events, parsed = day.events[piece], trees[piece]
        return turns.round(
            number,
            len(events),
            lambda: [encode(event) for event in events],
            lambda: [orjson.dumps(tree, option=orjson.OPT_SORT_KEYS) for tree in parsed],
        )

    yield (Case("a day", "event", "orjson.dumps, same trees", "cpu", one),)


@contextmanager
def decode_bench(make_day: Callable[[], Day]) -> Generator[Sequence[Case]]:
    """Leaves to events, as a ledger reads its own, and as foreign ones are read (written again and compared)."""
    day = make_day()
    pieces = _pieces(len(day.leaves))

    def one(turns: Turns, number: int, *, exact: bool) -> Round:
        leaves = day.leaves[pieces[number % len(pieces)]]
        return turns.round(
            number,
            len(leaves),
            lambda: [decode(leaf, exact=exact) for leaf in leaves],
            lambda: _loads(leaves),
        )

    yield (
        Case("our own", "event", _LOADS, "cpu", partial(one, Turns(), exact=False)),
        Case("foreign (exact)", "event", _LOADS, "cpu", partial(one, Turns(), exact=True)),
    )


@contextmanager
def fold_bench(make_day: Callable[[], Day]) -> Generator[Sequence[Case]]:
    """Events to the state, from the state before each piece of the day."""
    day = make_day()
    pieces = _pieces(len(day.events))
    before = list(_worlds_before(day.events))
    turns = Turns()

    def one(number: int) -> Round:
        at = number % len(pieces)
        events, leaves, world = day.events[pieces[at]], day.leaves[pieces[at]], before[at]
        return turns.round(number, len(events), lambda: fold(world, events), lambda: _loads(leaves))

    yield (Case("a day", "event", _LOADS, "cpu", one),)


@contextmanager
def plan_bench(make_day: Callable[[], Day]) -> Generator[Sequence[Case]]:
    """One decision on a state that is in memory."""
    yield tuple(_plan_case(situation) for situation in situations(make_day()))


def _plan_case(situation: Situation) -> Case:
    state, question = situation.state, situation.question
    document = orjson.dumps(state_document(state))
    turns = Turns()
    _expect(plan(state, question).verdict, situation.verdict)

    def one(number: int) -> Round:
        return turns.round(
            number,
            PLANS_PER_ROUND,
            lambda: _plans(state, question),
            lambda: [orjson.loads(document) for _ in range(PLANS_PER_ROUND)],
        )

    return Case(situation.name, "plan", "orjson.loads, state document", "cpu", one)


def _plans(state: State, question: PlanRequest) -> None:
    for _ in range(PLANS_PER_ROUND):
        plan(state, question)


def _expect(found: Verdict, expected: Verdict) -> None:
    """A figure of something else than its name says would mislead."""
    if found is not expected:
        raise AssertionError(f"the plan says {found}, and the bench is about {expected}")


@contextmanager
def replay_bench(make_day: Callable[[], Day]) -> Generator[Sequence[Case]]:
    """Leaves to plans that match: decoded, folded, and every plan decided again and compared."""
    day = make_day()
    leaves = day.leaves[:REPLAYED_EVENTS]
    plans = frozenset(event.seq for event in day.events[: len(leaves)] if isinstance(event.data, PlanDecided))
    leaves = leaves[: max(plans)]
    turns = Turns()

    def ours() -> None:
        run = Replay(day.ledger, only=plans)
        results = list(run.results())
        if run.events != len(leaves) or any(result.outcome is not Outcome.MATCH for result in results):
            raise AssertionError("the ledger of the bench does not replay")

    def one(number: int) -> Round:
        return turns.round(number, len(leaves), ours, lambda: _loads(leaves))

    yield (Case(f"{len(plans)} plans in {len(leaves)} events", "event", _LOADS, "cpu", one),)


# ---- shared -----------------------------------------------------------------------------------------------------


def _pieces(count: int) -> list[slice]:
    """Whole pieces; what is left over at the end is no round of its own."""
    starts = range(0, max(count - PIECE_EVENTS, 0) + 1, PIECE_EVENTS)
    return [slice(start, start + PIECE_EVENTS) for start in starts]


def _worlds_before(events: Sequence[Recorded]) -> Generator[World]:
    world = World()
    for number, event in enumerate(events):
        if number % PIECE_EVENTS == 0:
            yield world
        world = evolve(world, event)


def _loads(leaves: Iterable[bytes]) -> None:
    for leaf in leaves:
        orjson.loads(leaf)
