"""Documents in and out: `gpuledger.state/1`, requests, cases of pressure, policies.

What is read is checked in three layers, and every layer reports all that it finds: the text (JSON profile of
ledger.md), the shape of each value (the types of `state.py`), the rules that join values (`document_rules.py`).
A value that came through is one that no decision fails on.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeAlias, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from .document_problems import DocumentError, Problem, Step, at, problems_of
from .document_rules import broken_policy_rules, broken_state_rules
from .policy import Policy
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

JSON_SCHEMA: Final = "https://json-schema.org/draft/2020-12/schema"

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
        times = Counter(key for key, _ in pairs)
        self.repeated = tuple(sorted(key for key, count in times.items() if count > 1))


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
        value = json.loads(decoded, object_pairs_hook=_object, parse_int=integer_of)
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


def integer_of(digits: str) -> int:
    """An integer; one too long for any use stands for its sign and for more than is allowed."""
    if len(digits) <= 20:
        return int(digits)
    return -MAX_INTEGER - 1 if digits.startswith("-") else MAX_INTEGER + 1


# Values.


def state_of(value: Json, where: str = "state") -> State:
    """The state that a document stands for; `DocumentError` with everything that is wrong with it."""
    return _checked(_STATE, value, where)


def request_of(value: Json, where: str = "request") -> PlanRequest:
    """The question that a document stands for; `DocumentError` with everything that is wrong with it."""
    return _checked(_REQUEST, value, where)


def policy_of(value: Json, where: str = "policy") -> Policy:
    """The policy that a document stands for; `DocumentError` with everything that is wrong with it."""
    return _checked(_POLICY, value, where)


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
    return _checked(_PRESSURE_CASE, case, "")


def judged(case: PressureCase) -> Iterator[tuple[int, PressureTrack]]:
    """The pressure of each sample, in basis points, and the track after it (semantics.md 4)."""
    track = PressureTrack()
    for sample in case.samples:
        pressure = pressure_bp(case.policy, case.total_bytes, sample.used_bytes, sample.attributed_managed_bytes)
        track = judge(case.policy, track, pressure, sample.observed_at, sample.received_at)
        yield pressure, track


def judge_case(case: PressureCase) -> dict[str, Json]:
    """`{"levels": [{"pressure_bp", "level"}, ...]}`, one for each sample."""
    return {"levels": [{"pressure_bp": pressure, "level": track.level.value} for pressure, track in judged(case)]}


def state_document(state: State) -> dict[str, Json]:
    """The document of a state, ready for JSON."""
    return cast("dict[str, Json]", _STATE.adapter.dump_python(state, mode="json"))


def request_document(request: PlanRequest) -> dict[str, Json]:
    """The document of a question, ready for JSON."""
    return cast("dict[str, Json]", _REQUEST.adapter.dump_python(request, mode="json"))


def policy_document(policy: Policy) -> dict[str, Json]:
    """The document of a policy, ready for JSON."""
    return cast("dict[str, Json]", _POLICY.adapter.dump_python(policy, mode="json"))


def state_schema() -> dict[str, Json]:
    """The JSON Schema of a state. Rules that join two of its values are not in it."""
    return {"$schema": JSON_SCHEMA, **_STATE.adapter.json_schema()}


def request_schema() -> dict[str, Json]:
    """The JSON Schema of a question."""
    return {"$schema": JSON_SCHEMA, **_REQUEST.adapter.json_schema()}


# The three layers.


@dataclass(frozen=True, slots=True)
class _Document(Generic[_T]):
    """A type of document: its shape, and the rules that join its values."""

    type: type[_T]
    adapter: TypeAdapter[_T]
    rules: Callable[[_T, str], Iterable[Problem]]


def _no_rules(_value: PlanRequest, _where: str) -> Iterable[Problem]:
    return ()


def _pressure_rules(case: PressureCase, where: str) -> Iterable[Problem]:
    return broken_policy_rules(case.policy, at(where, "policy"))


_STATE: Final = _Document(State, TypeAdapter(State), broken_state_rules)
_REQUEST: Final = _Document(PlanRequest, TypeAdapter(PlanRequest), _no_rules)
_POLICY: Final = _Document(Policy, TypeAdapter(Policy), broken_policy_rules)
_PRESSURE_CASE: Final = _Document(PressureCase, TypeAdapter(PressureCase), _pressure_rules)


def inspected(value: Json, where: str) -> tuple[Problem, ...]:
    """The first layer: what is wrong with a value whatever its type. Raises DocumentError where no type can read it."""
    inspection = _Inspection(where)
    inspection.look_at(value)
    if not inspection.readable:
        raise DocumentError(inspection.problems)
    return tuple(inspection.problems)


def _checked(document: _Document[_T], value: Json, where: str) -> _T:
    """What a value stands for. Each layer needs the one before it to have found nothing that it cannot work on."""
    problems = inspected(value, where)
    try:
        # Only its JSON mode is strict about what JSON can say, and lenient about lists for tuples.
        found = document.adapter.validate_json(json.dumps(value))
    except ValidationError as error:
        raise DocumentError((*problems, *problems_of(error, document.type, where))) from None
    problems = (*problems, *document.rules(found, where))
    if problems:
        raise DocumentError(problems)
    return found


class _Inspection:
    """What the types cannot see: keys that were there twice, depth, number of values, broken text."""

    def __init__(self, where: str) -> None:
        self.problems: list[Problem] = []
        #: Whether the next layer can work on it.
        self.readable = True
        self._where = where
        self._path: list[Step] = []
        self._left = MAX_VALUES

    def look_at(self, value: Json) -> None:
        self._left -= 1
        if self._left < 0:
            if self.readable:
                self._refuse(f"has more than {MAX_VALUES} values")
        elif len(self._path) > MAX_DEPTH:
            self._refuse(f"is nested deeper than {MAX_DEPTH} levels")
        elif isinstance(value, str):
            self._look_at_text(value)
        elif isinstance(value, dict):
            self._look_at_object(value)
        elif isinstance(value, list):
            for index, entry in enumerate(value):
                self._below(index, entry)

    def _below(self, step: Step, value: Json) -> None:
        if not isinstance(value, (str, dict, list)):
            self._left -= 1
            return
        self._path.append(step)
        self.look_at(value)
        self._path.pop()

    def _look_at_text(self, text: str) -> None:
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            self._refuse("is not text: it has half of a surrogate pair")

    def _look_at_object(self, entries: dict[str, Json]) -> None:
        if isinstance(entries, RepeatedKeys):
            for key in entries.repeated:
                self.problems.append(Problem(self._place(key), "is there more than once"))
        for key, entry in entries.items():
            self._look_at_text(key)
            self._below(key, entry)

    def _refuse(self, message: str) -> None:
        self.readable = False
        self.problems.append(Problem(self._place(), message))

    def _place(self, *steps: Step) -> str:
        return at(self._where, *self._path, *steps)


def _case(value: Json, keys: tuple[str, ...]) -> dict[str, Json]:
    """These keys of a case; what else it has is for others."""
    if not isinstance(value, dict):
        raise DocumentError.of("", "must be an object")
    problems = [Problem(key, "is required") for key in keys if key not in value]
    if isinstance(value, RepeatedKeys):
        problems += [Problem(key, "is there more than once") for key in value.repeated if key in keys]
    if problems:
        raise DocumentError(problems)
    return {key: value[key] for key in keys}


def _collected(read: Callable[[Json, str], _T], value: Json, where: str, problems: list[Problem]) -> _T | None:
    """What `read` makes of a value, or None and its problems added to those of others."""
    try:
        return read(value, where)
    except DocumentError as error:
        problems += error.problems
        return None
