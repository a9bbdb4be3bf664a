"""Documents that are damaged at random: refused in words at a place, or good enough to plan with. Never a traceback."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuledger.domain import documents
from gpuledger.domain.document_problems import DocumentError, Problem
from gpuledger.domain.planner import plan
from gpuledger.domain.state import State
from gpuledger.tools.reading import parse_yaml

Place: TypeAlias = tuple[Any, ...]

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "vectors" / "reported.json").read_bytes())
#: What no message of ours says.
FOREIGN_WORDS = ("Input should", "pydantic", "Unexpected keyword", "Field required", "valid dictionary")

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        ("GPU-0", "m", "host", "2026-11-30T12:00:00.000000Z", "2026-02-30T12:00:00.000000Z", 2**53 - 1, 2**53, -1, 0)
    )
)
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner))


def places(value: documents.Json, at: Place = ()) -> list[Place]:
    found: list[Place] = [at] if at else []
    below: Iterable[tuple[str | int, documents.Json]] = ()
    if isinstance(value, dict):
        below = value.items()
    elif isinstance(value, list):
        below = enumerate(value)
    for step, entry in below:
        found += places(entry, (*at, step))
    return found


def is_list(value: object) -> bool:
    return isinstance(value, list)


def damage(case: dict[str, Any], place: Place, how: str, value: Any) -> None:
    """Replace, remove, repeat or add at one place."""
    *above, last = place
    parent: Any = case
    for step in above:
        parent = parent[step]
    if how == "replace":
        parent[last] = value
    elif how == "remove":
        del parent[last]
    elif is_list(parent):
        parent.append(copy.deepcopy(parent[last]) if how == "repeat" else value)
    else:
        parent[f"{last}x"] = value


def refusal_of(read: Callable[[], object]) -> tuple[Problem, ...]:
    """The problems that reading tells, in our own words; none where it is content."""
    try:
        read()
    except DocumentError as error:
        refused = error.problems
    else:
        return ()
    foreign = [problem for problem in refused if any(word in problem.message for word in FOREIGN_WORDS)]
    assert foreign == []
    assert refused
    return refused


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_what_is_damaged_is_refused_in_words_or_good_enough_to_plan(data: st.DataObject) -> None:
    original = CASES[data.draw(st.integers(0, len(CASES) - 1))]
    case = copy.deepcopy({key: original[key] for key in ("state", "request")})
    for _ in range(data.draw(st.integers(1, 3))):
        found = places(case)
        if found:
            place = found[data.draw(st.integers(0, len(found) - 1))]
            how = data.draw(st.sampled_from(("replace", "remove", "repeat", "add")))
            damage(case, place, how, data.draw(values))
    value = documents.parse_json(json.dumps(case).encode())
    if not refusal_of(lambda: documents.plan_case_of(value)):
        assert plan(*documents.plan_case_of(value)).document()["fingerprint"]


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_bytes_at_random_are_no_state(text: bytes) -> None:
    for parse in (documents.parse_json, parse_yaml):
        assert refusal_of(partial(state_in, parse, text))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 20))
def test_a_text_with_other_bytes_is_refused_or_read(seed: int, changes: int) -> None:
    rng = Random(seed)
    case = CASES[rng.randrange(len(CASES))]
    text = bytearray(json.dumps(case["state"]).encode())
    short = bytearray(json.dumps(case["request"]).encode())
    for _ in range(changes):
        text[rng.randrange(len(text))] = rng.randrange(256)
        short[rng.randrange(len(short))] = rng.randrange(256)
    refusal_of(partial(state_in, documents.parse_json, bytes(text)))
    refusal_of(lambda: documents.request_of(parse_yaml(bytes(short))))


def state_in(parse: Callable[[bytes], documents.Json], text: bytes) -> State:
    return documents.state_of(parse(text))
