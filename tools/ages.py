"""How long ago, and how much longer, for people."""

from __future__ import annotations

from typing import Final

from gpuledger.domain.explain import duration
from gpuledger.domain.units import MICROS_PER_MS, parse_instant

_DAY_MS: Final = 86_400_000
_HOUR_MS: Final = 3_600_000


def age(milliseconds: int) -> str:
    """A duration of any length for people.

    >>> age(1_500), age(3_700_000), age(200_000_000)
    ('1.5 s', '1 h 1 min', '2 d 7 h')
    """
    if milliseconds < _HOUR_MS:
        return duration(milliseconds)
    if milliseconds < _DAY_MS:
        return f"{milliseconds // _HOUR_MS} h {milliseconds % _HOUR_MS // 60_000} min"
    return f"{milliseconds // _DAY_MS} d {milliseconds % _DAY_MS // _HOUR_MS} h"


def ago(instant: str | None, now: str) -> str:
    """How long before `now` an instant was, or how far it lies after it."""
    if instant is None:
        return "-"
    apart_ms = (parse_instant(now) - parse_instant(instant)) // MICROS_PER_MS
    return f"{age(apart_ms)} ago" if apart_ms >= 0 else f"in {age(-apart_ms)}"
