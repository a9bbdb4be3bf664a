"""Bytes, basis points, instants and ids: the vocabulary every other module speaks.

An instant is an `int` of microseconds since the Unix epoch inside the program and RFC 3339 UTC with six
fractional digits and a `Z` in every document (semantics.md, preamble; ledger.md, Bytes). The annotated types
below carry that rule: `pydantic.TypeAdapter` reads and writes documents by them, nothing else does.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final, TypeAlias

from pydantic import Field, PlainSerializer, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

#: RFC 8785 numbers are IEEE doubles: beyond this an integer would be rounded on its way through JSON.
MAX_INTEGER: Final = 2**53 - 1

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

MICROS_PER_MS: Final = 1_000
MICROS_PER_SECOND: Final = 1_000_000

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
INSTANT_PATTERN: Final = r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}\.\d{6}Z$"
_INSTANT_RE: Final = re.compile(INSTANT_PATTERN[1:-1], re.ASCII)
#: A century before the calendar of `datetime` ends: an instant plus the longest durations stays one.
_INSTANT_END: Final = datetime(9900, 1, 1, tzinfo=UTC)
#: Ids appear in stream names, labels of metrics and file names: no spaces, quotes, slashes or control characters
#: except `/` inside model-like names. 200 keeps a leaf small.
ID_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._@#:+/-]{0,199}$"


def parse_instant(text: str) -> int:
    """Microseconds since the epoch of `2026-11-30T12:00:00.000000Z`; `ValueError` on any other form.

    >>> parse_instant("1970-01-01T00:00:01.500000Z")
    1500000
    """
    if not _INSTANT_RE.fullmatch(text):
        raise ValueError("must be an instant in UTC with six fractional digits, as 2026-11-30T12:00:00.000000Z")
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("must be an instant that exists: no such day or time") from None
    if not _EPOCH <= moment < _INSTANT_END:
        raise ValueError("must be an instant from 1970 on and before 9900")
    return (moment - _EPOCH) // timedelta(microseconds=1)


def format_instant(micros: int) -> str:
    """The RFC 3339 form of an instant.

    >>> format_instant(1500000)
    '1970-01-01T00:00:01.500000Z'
    """
    moment = _EPOCH + timedelta(microseconds=micros)
    return moment.replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def _validate_instant(value: object) -> int:
    if isinstance(value, str):
        try:
            return parse_instant(value)
        except ValueError as error:
            raise PydanticCustomError("instant", "{detail}", {"detail": str(error)}) from None
    raise PydanticCustomError("instant", "must be a string with an instant in UTC, as 2026-11-30T12:00:00.000000Z")


Instant: TypeAlias = Annotated[
    int,
    PlainValidator(_validate_instant),
    PlainSerializer(format_instant, return_type=str),
    WithJsonSchema({"type": "string", "pattern": INSTANT_PATTERN, "examples": ["2026-11-30T12:00:00.000000Z"]}),
]
"""Microseconds since the epoch; RFC 3339 UTC in documents."""

Bytes: TypeAlias = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
PositiveBytes: TypeAlias = Annotated[int, Field(ge=1, le=MAX_INTEGER)]
BasisPoints: TypeAlias = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
#: Bounded at about 31 years, so that an instant (before 9900) plus some durations can still be written.
Milliseconds: TypeAlias = Annotated[int, Field(ge=0, le=10**12)]
SignedMilliseconds: TypeAlias = Annotated[int, Field(ge=-(10**12), le=10**12)]
Seconds: TypeAlias = Annotated[int, Field(ge=0, le=10**9)]
Count: TypeAlias = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
Sha256Hex: TypeAlias = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

Identifier: TypeAlias = Annotated[str, Field(pattern=ID_PATTERN)]
NodeId: TypeAlias = Identifier
AcceleratorId: TypeAlias = Identifier
DeploymentId: TypeAlias = Identifier
ResidentId: TypeAlias = Identifier
LeaseId: TypeAlias = Identifier
RequestId: TypeAlias = Identifier
ClientId: TypeAlias = Identifier
CapabilityId: TypeAlias = Identifier


def ceil_div(dividend: int, divisor: int) -> int:
    """`ceil(dividend / divisor)` in integers, for a positive divisor.

    >>> ceil_div(7, 2), ceil_div(-7, 2)
    (4, -3)
    """
    return -(-dividend // divisor)


def ratio_of(amount: int, ratio_bp: int) -> int:
    """A ratio in basis points of an amount, rounded up (semantics.md, preamble).

    >>> ratio_of(1_216_348_160, 1000)
    121634816
    """
    return ceil_div(amount * ratio_bp, 10_000)


def milliseconds(duration_ms: int) -> int:
    """A duration in the unit of instants."""
    return duration_ms * MICROS_PER_MS


def seconds(duration_seconds: int) -> int:
    """A duration in the unit of instants."""
    return duration_seconds * MICROS_PER_SECOND
