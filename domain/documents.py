"""Documents in and out: `gpuledger.state/1`, requests, cases of pressure, policies.

What is read is checked in three layers, and every layer reports all that it finds: the text (JSON profile of
ledger.md), the shape of each value (the types of `state.py`), the rules that join values (`document_rules.py`).
A value that came through is one that no decision fails on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeAlias, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from .document_problems import DocumentError, Problem, at, problems_of
from .document_rules import broken_policy_rules, broken_state_rules
from .policy import Policy, Pressure
from .pressure import PressureTrack, judge, pressure_bp
from .state import DOCUMENT, PlanRequest, State
from .units import MAX_INTEGER, Bytes, Instant, PositiveBytes

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
"""What JSON and YAML can say. A float is in it so that it can be refused at its place."""

#: A state of 100,000 accelerators is about 50 MiB. More is a mistake, and would take the memory of the process.
MAX_JSON_BYTES: Final = 64 * 1024 * 1024
#: The deepest document has 6 levels. Bounded, so that no reader runs out of stack.
MAX_DEPTH: Final = 32
#: Values in one document, so that a few lines of YAML with aliases in aliases cannot stand for billions.
MAX_VALUES: Final = 8_000_000

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class PressureSample:
    """One reading, as pressure is judged from it."""

    __pydantic_config__ = DOCUMENT

    observed_at: Instant
    used_bytes: Bytes
    attributed_managed_bytes: Bytes
    received_at: Instant | None = None


@dataclass(frozen=True, slots=True)
class PressureCase:
    """A card, a policy, and samples in the order in which they came."""

    __pydantic_config__ = DOCUMENT

    policy: Policy
    total_bytes: PositiveBytes
    samples: tuple[PressureSample, ...]


class RepeatedKeys(dict[str, Json]):
    """An object in which keys were there more than once. A reader makes one so that the place can be named."""

    def __init__(self, pairs: Sequence[tuple[str, Json]]) -> None:
        super().__init__(pairs)
        seen: set[str] = set()
        self.repeated = tuple(sorted({key for key, _ in pairs if key in seen or seen.add(key)}))


# Text.


def parse_json(text: bytes, where: str = "") -> Json:
    """The value that a JSON text stands for; `DocumentError` where it is none. Keys there twice are kept in mind.

    NaN and Infinity, floats and integers of any length are read, and refused later, at their place.
    """
    if len(text) > MAX_JSON_BYTES:
        raise DocumentError.of(where, f"is larger than {MAX_JSON_BYTES // 1024**2} MiB")
    try:
        # A byte order mark is what some editors leave; it says nothing.
        decoded = text.decode("utf-8-sig")
        value = json.loads(decoded, object_pairs_hook=_object, parse_int=_integer)
    except UnicodeDecodeError as error:
        raise DocumentError.of(where, f"is not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        if not text.strip():
            raise DocumentError.of(where, "is empty") from None
        place = f"line {error.lineno}, column {error.colno}"
        raise DocumentError.of(where, f"is not JSON: {error.msg[:1].lower()}{error.msg[1:]} at {place}") from None
    except RecursionError:
        raise DocumentError.of(where, f"is nested deeper than {MAX_DEPTH} levels") from None
    return cast("Json", value)


def _object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    return found if len(found) == len(pairs) else RepeatedKeys(pairs)


def _integer(digits: str) -> int:
    """An integer; one too long for any use stands for its sign and for more than is allowed."""
    if len(digits) <= 20:
        return int(digits)
    return -MAX_INTEGER - 1 if digits.startswith("-") else MAX_INTEGER + 1


# Values.


def state_of(value: Json, where: str = "state") -> State:
    """The state that a document stands for; `DocumentError` with everything that is wrong with it."""
    return _checked(_state_adapter(), value, where, broken_state_rules)


def request_of(value: Json, where: str = "request") -> PlanRequest:
    """The question that a document stands for; `DocumentError` with everything that is wrong with it."""
    return _checked(_request_adapter(), value, where)


def policy_of(value: Json, where: str = "policy") -> Policy:
    """The policy that a document stands for; `DocumentError` with everything that is wrong with it."""
    return _checked(_policy_adapter(), value, where, broken_policy_rules)


def plan_case_of(value: Json) -> tuple[State, PlanRequest]:
    """`state` and `request` of a case; other keys are ignored. The problems of both at once."""
    case = _case(value, ("state", "request"))
    problems: list[Problem] = []
    state = _collected(state_of, case["state"], "state", problems)
    request = _collected(request_of, case["request"], "request", problems)
    if state is None or request is None:
        raise DocumentError(tuple(problems))
    return state, request


def pressure_case_of(value: Json) -> PressureCase:
    """`policy`, `total_bytes` and `samples` of a case; other keys are ignored."""
    case = _case(value, ("policy", "total_bytes", "samples"))
    found = _checked(_pressure_adapter(), case, "")
    problems = tuple(broken_policy_rules(found.policy, "policy"))
    if problems:
        raise DocumentError(problems)
    return found


def check_policy(policy: Policy, where: str = "policy") -> None:
    """`DocumentError` where two of a policy's numbers do not go together (semantics.md 4, 10)."""
    problems = tuple(broken_policy_rules(policy, where))
    if problems:
        raise DocumentError(problems)


def judge_case(case: PressureCase) -> dict[str, Json]:
    """`{"levels": [{"pressure_bp", "level"}, ...]}`, one for each sample (semantics.md 4)."""
    track, levels = PressureTrack(), list[Json]()
    for sample in case.samples:
        pressure = pressure_bp(
            case.policy, case.total_bytes, sample.used_bytes, sample.attributed_managed_bytes
        )
        track = judge(case.policy, track, pressure, sample.observed_at, sample.received_at)
        levels.append({"pressure_bp": pressure, "level": track.level.value})
    return {"levels": levels}
