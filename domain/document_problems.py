"""What is wrong with a document, where, in words of our own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, Final, NamedTuple, TypeAlias, get_args, get_origin, get_type_hints

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from .units import ID_PATTERN

Step: TypeAlias = int | str

#: How many problems are told: who reads the first hundred has enough to do.
MAX_TOLD: Final = 100


class Problem(NamedTuple):
    """One thing that is wrong: `state.nodes[0].accelerators[1].total_bytes`, `must be at least 1`."""

    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message


class DocumentError(ValueError):
    """A document that cannot be used, with everything that is wrong with it."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(str(self))

    @classmethod
    def of(cls, where: str, message: str) -> DocumentError:
        return cls((Problem(where, message),))

    def told(self) -> tuple[Problem, ...]:
        """The first hundred problems, and how many more there are."""
        more = len(self.problems) - MAX_TOLD
        if more <= 0:
            return self.problems
        return (*self.problems[:MAX_TOLD], Problem("", f"and {more} more"))

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.told())


def at(where: str, *steps: Step) -> str:
    """A place below another one.

    >>> at("state", "nodes", 0, "labels", "a b")
    'state.nodes[0].labels["a b"]'
    """
    for step in steps:
        if isinstance(step, int):
            where += f"[{step}]"
        elif _PLAIN_KEY.fullmatch(step):
            where += f".{step}" if where else step
        else:
            where += f"[{_shown(step)}]"
    return where


_PLAIN_KEY: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,79}")


def problems_of(error: ValidationError, root: object, where: str) -> Iterator[Problem]:
    """What pydantic found while it read a `root`, in our words."""
    for detail in error.errors(include_url=False):
        steps = detail["loc"][:-1] if _is_about_a_key(detail) else detail["loc"]
        yield Problem(at(where, *steps), _message(detail, root))


def _is_about_a_key(detail: ErrorDetails) -> bool:
    """Pydantic marks the key of a mapping, as against its value, by one more step."""
    return detail["type"] == "enum" and detail["loc"][-1:] == ("[key]",)


def _message(detail: ErrorDetails, root: object) -> str:
    if _is_about_a_key(detail):
        return f"unknown key: must be {_expected(detail)}"
    if detail["type"] == "unexpected_keyword_argument":
        *above, key = detail["loc"]
        return unknown_key(str(key), _fields_at(root, above))
    word = _WORDS.get(detail["type"])
    return word(detail) if word is not None else detail["msg"]


def unknown_key(key: str, known: Sequence[str]) -> str:
    """The text for a key that nothing asks for, with the one that was probably meant."""
    close = get_close_matches(key, known, n=1)
    return f'unknown key, did you mean "{close[0]}"?' if close else "unknown key"


def _expected(detail: ErrorDetails) -> str:
    return str(detail.get("ctx", {}).get("expected", "another")).replace("'", '"')


def _bound(detail: ErrorDetails, name: str) -> str:
    return str(detail.get("ctx", {}).get(name))


def _must_be(what: str) -> Callable[[ErrorDetails], str]:
    return lambda detail: f"must be {what}, not {_shown(detail['input'])}"


_INTEGER: Final = _must_be("an integer")
_OBJECT: Final = _must_be("an object")
_LIST: Final = _must_be("a list")

_WORDS: Final[Mapping[str, Callable[[ErrorDetails], str]]] = {
    "missing": lambda _: "is required",
    "int_type": _INTEGER,
    "int_from_float": _INTEGER,
    "int_parsing": _INTEGER,
    "int_parsing_size": _INTEGER,
    "finite_number": _INTEGER,
    "string_type": _must_be("a string"),
    "bool_type": _must_be("true or false"),
    "bool_parsing": _must_be("true or false"),
    "tuple_type": _LIST,
    "list_type": _LIST,
    "dict_type": _OBJECT,
    "mapping_type": _OBJECT,
    "dataclass_type": _OBJECT,
    "model_type": _OBJECT,
    "greater_than_equal": lambda detail: f"must be at least {_bound(detail, 'ge')}",
    "less_than_equal": lambda detail: f"must be at most {_bound(detail, 'le')}",
    "enum": lambda detail: f"must be {_expected(detail)}, not {_shown(detail['input'])}",
    "literal_error": lambda detail: f"must be {_expected(detail)}, not {_shown(detail['input'])}",
    "string_too_long": lambda detail: f"must have at most {_bound(detail, 'max_length')} characters",
    "instant": lambda detail: detail["msg"],
    "string_pattern_mismatch": lambda detail: (
        "must be an id: a letter or digit, then up to 199 letters, digits and any of ._@#:+/-"
        if _bound(detail, "pattern") == ID_PATTERN
        else f"must match {_bound(detail, 'pattern')}"
    ),
}


def _shown(value: object) -> str:
    """A value as it stands in a document, cut to a few words."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, (list, tuple)):
        return "a list"
    text = json.dumps(value) if isinstance(value, (str, int, float, bool)) or value is None else "this"
    return text if len(text) <= 60 else f"{text[:56]}..."


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _fields_at(root: object, steps: Sequence[Step]) -> list[str]:
    """The names of the fields that a document may have at a place below a `root`."""
    kind = root
    for step in steps:
        kind = _below(kind, step)
    inner = _dataclass_in(kind)
    return [field.name for field in fields(inner)] if inner is not None else []


def _below(kind: object, step: Step) -> object:
    inner = _dataclass_in(kind)
    if inner is not None:
        return _hints(inner).get(str(step))
    # tuple[X, ...] and Mapping[K, X]
    arguments = get_args(kind)
    return arguments[0 if get_origin(kind) is tuple else -1] if arguments else None


def _dataclass_in(kind: object) -> type | None:
    """A dataclass, also where it may be null."""
    for one in (kind, *get_args(kind)) if get_origin(kind) not in (tuple, dict) else (kind,):
        if isinstance(one, type) and is_dataclass(one):
            return one
    return None
