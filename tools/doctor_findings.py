"""What `gpuledger doctor` says: one finding after the other, and never a traceback."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from .reading import reason_of


class Result(StrEnum):
    """FAIL: gpuledger will not work as it stands. WARN: it will, and somebody should know."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, how it is, what was found, and, where it is not OK, what to do about it."""

    name: str
    result: Result
    found: str
    mend: str = ""


Check: TypeAlias = Callable[[], Iterable[Finding]]


def ok(name: str, found: str) -> Finding:
    return Finding(name, Result.OK, found)


def warn(name: str, found: str, mend: str) -> Finding:
    return Finding(name, Result.WARN, found, mend)


def fail(name: str, found: str, mend: str) -> Finding:
    return Finding(name, Result.FAIL, found, mend)


def guarded(name: str, check: Check) -> Iterator[Finding]:
    """The findings of a check; one that fails itself is a finding too, after those that it had."""
    try:
        yield from check()
    except Exception as error:  # noqa: BLE001 - whatever it is, the other checks are still of use
        told = reason_of(error) or type(error).__name__
        yield warn(name, f"could not be checked: {told}", "look at it yourself; the other checks do not depend on it")
