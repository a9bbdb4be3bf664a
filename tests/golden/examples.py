"""Events made from their annotations: fixed ones for the golden leaves, drawn ones for property tests.

`python -m tests.golden.examples` adds the leaves of types that have none yet. It changes no line that is there: a type
whose leaves would differ has another schema, and is another entry of the codec. (`--rewrite` is for what was never
released.)
"""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo

from gpuledger.adapters.ledger.codec import encode, parse_envelope
from gpuledger.domain.events import EVENT_TYPES, Event, Recorded, StreamKind, stream_name
from gpuledger.domain.units import Identifier, Instant, Sha256Hex, parse_instant

GOLDEN = Path(__file__).with_name("leaves.jsonl")
START = parse_instant("2026-11-30T12:00:00.000000Z")

_T = TypeVar("_T")


class Values(Protocol):
    """Where the values of an example come from."""

    def integer(self, low: int, high: int) -> int: ...
    def instant(self) -> int: ...
    def identifier(self) -> str: ...
    def digest(self) -> str: ...
    def text(self) -> str: ...
    def choice(self, options: Sequence[_T]) -> _T: ...
    def length(self) -> int: ...
    def document(self) -> Mapping[str, Any]: ...


def example(name: str, values: Values) -> Event:
    """An event of one type."""
    return cast("Event", _of_class(EVENT_TYPES[name].data, values))


def stream_of(name: str, identifier: str = "GPU-0") -> str:
    """A stream in which the type belongs."""
    kind = EVENT_TYPES[name].stream
    return stream_name(kind, None if kind in (StreamKind.LEDGER, StreamKind.POLICY) else identifier)


def _of_class(cls: type[Any], values: Values) -> Any:
    hints = get_type_hints(cls, include_extras=True)
    return cls(**{field.name: _value(hints[field.name], values) for field in fields(cls)})


def _value(hint: Any, values: Values) -> Any:
    for known, make in ((Instant, values.instant), (Identifier, values.identifier), (Sha256Hex, values.digest)):
        if hint == known:
            return make()
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _annotated(arguments[0], arguments[1:], values)
    if origin in (Union, types.UnionType):
        options = [option for option in arguments if option is not type(None)]
        return None if values.length() == 0 and len(options) < len(arguments) else _value(options[0], values)
    if origin is tuple:
        return tuple(_value(arguments[0], values) for _ in range(values.length()))
    if origin is Literal:
        return values.choice(arguments)
    if origin is Mapping:
        return _mapping(arguments, values)
    return _plain(hint, values)


def _annotated(hint: Any, metadata: Sequence[Any], values: Values) -> Any:
    if hint is not int:
        return _value(hint, values)
    bounds = {"ge": 0, "le": 2**53 - 1}
    for one in metadata:
        for constraint in one.metadata if isinstance(one, FieldInfo) else ():
            bounds |= {name: getattr(constraint, name) for name in bounds if hasattr(constraint, name)}
    return values.integer(bounds["ge"], bounds["le"])


def _mapping(arguments: tuple[Any, ...], values: Values) -> Mapping[Any, Any]:
    key, value = arguments
    if value is Any:
        return values.document()
    if _is_enum(key):
        return {member: _value(value, values) for member in key}
    return {f"key{number}": _value(value, values) for number in range(values.length())}


def _plain(hint: Any, values: Values) -> Any:
    if _is_enum(hint):
        return values.choice(list(hint))
    if hint is bool:
        return values.choice((True, False))
    if hint is str:
        return values.text()
    return _of_class(hint, values)


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Enum)


class Full:
    """Every optional value there, two of everything, and something of each kind that JSON has to escape."""

    def __init__(self) -> None:
        self._made = 0

    def integer(self, low: int, high: int) -> int:
        return min(max(low, self._next() * 1_000_003), high)

    def instant(self) -> int:
        return START + self._next() * 1_000_001

    def identifier(self) -> str:
        return f"id-{self._next()}/a.b@1"

    def digest(self) -> str:
        return f"{self._next():064x}"

    def text(self) -> str:
        return f'{self._next()}: "é漢😀" \\ /\t\n\x01\x7f\u2028'

    def choice(self, options: Sequence[_T]) -> _T:
        return options[self._next() % len(options)]

    def length(self) -> int:
        return 2

    def document(self) -> Mapping[str, Any]:
        return {"b": [1, {"z": None, "a": True}], "a": self.text(), "B": {}, "": -(2**53) + 1}

    def _next(self) -> int:
        self._made += 1
        return self._made


class Least:
    """No optional value, nothing in any collection, the least of every figure."""

    def integer(self, low: int, high: int) -> int:
        return low

    def instant(self) -> int:
        return START

    def identifier(self) -> str:
        return "0"

    def digest(self) -> str:
        return "0" * 64

    def text(self) -> str:
        return ""

    def choice(self, options: Sequence[_T]) -> _T:
        return options[0]

    def length(self) -> int:
        return 0

    def document(self) -> Mapping[str, Any]:
        return {}


def golden_events() -> Mapping[str, tuple[Event, Event]]:
    """Type -> its two fixed events."""
    return {name: (example(name, Full()), example(name, Least())) for name in EVENT_TYPES}


def golden_leaves() -> list[bytes]:
    return GOLDEN.read_bytes().splitlines() if GOLDEN.exists() else []


def place(seq: int, version: int, event: Event) -> Recorded:
    """An event of the golden ledger."""
    return Recorded(seq, START + seq, stream_of(type(event).__name__), version, event)


def _main(rewrite: bool) -> None:
    leaves = [] if rewrite else golden_leaves()
    envelopes = [parse_envelope(leaf) for leaf in leaves]
    versions = {envelope.stream: envelope.version for envelope in envelopes}
    present = {envelope.type for envelope in envelopes}
    for name, events in golden_events().items():
        for event in events if name not in present else ():
            stream = stream_of(name)
            versions[stream] = versions.get(stream, 0) + 1
            leaves.append(encode(place(len(leaves) + 1, versions[stream], event)))
    GOLDEN.write_bytes(b"".join(leaf + b"\n" for leaf in leaves))


if __name__ == "__main__":
    _main(rewrite="--rewrite" in sys.argv)
