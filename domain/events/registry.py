"""Streams, and the closed list of event types: how a type enters it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias, TypeVar

Source: TypeAlias = Literal["configuration", "operator", "device"]
"""Who caused a change of what is declared (ledger.md, Configuration and ledger)."""


class StreamKind(StrEnum):
    """The prefix of a stream's name."""

    LEDGER = "ledger"
    POLICY = "policy"
    NODE = "node"
    ACCELERATOR = "accelerator"
    TELEMETRY = "telemetry"
    DEPLOYMENT = "deployment"
    CLIENT = "client"
    REQUEST = "request"
    CAPABILITY = "capability"


@dataclass(frozen=True, slots=True)
class EventType:
    """One entry of the closed list."""

    name: str
    stream: StreamKind
    schema: int
    data: type[Any]


_TYPES: dict[str, EventType] = {}
_T = TypeVar("_T")


def register(stream: StreamKind, schema: int = 1) -> Callable[[type[_T]], type[_T]]:
    """Enter a frozen dataclass in the closed list."""

    def enter(data: type[_T]) -> type[_T]:
        _TYPES[data.__name__] = EventType(data.__name__, stream, schema, data)
        return data

    return enter


#: Name of the type -> entry.
EVENT_TYPES: Final[Mapping[str, EventType]] = MappingProxyType(_TYPES)


def stream_name(kind: StreamKind, identifier: str | None = None) -> str:
    """`accelerator:GPU-0`; the streams `ledger` and `policy` are alone and carry no id."""
    return kind.value if identifier is None else f"{kind.value}:{identifier}"
