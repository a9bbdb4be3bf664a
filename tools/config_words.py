"""What is wrong with a value of the configuration, in the words of its operator: units, and shapes that have a name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpuledger.adapters.runtimes.options import URL_PATH_PATTERN
from gpuledger.adapters.runtimes.server_config import ARGUMENT_PATTERN, VARIABLE_PATTERN
from gpuledger.adapters.runtimes.vllm_config import WORD_PATTERN
from gpuledger.domain.document_problems import Problem
from gpuledger.domain.units import ID_PATTERN

#: That a size may have, and what each stands for is in `config.py`.
UNITS: Final = ("B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB")
_SHA256_PATTERN: Final = "^[0-9a-f]{64}$"
_SHAPES: Final[Mapping[str, str]] = {
    _SHA256_PATTERN: "a SHA-256: 64 hexadecimal digits, in small letters (sha256sum prints it)",
    ID_PATTERN: "an id: a letter or digit, then up to 199 letters, digits and any of ._@#:+/-",
    URL_PATH_PATTERN: "a path of a URL: / and then letters, digits and signs, without a host",
    VARIABLE_PATTERN: "the name of a variable: letters, digits and _, no digit first",
    ARGUMENT_PATTERN: "a text without NUL",
    WORD_PATTERN: "a word of up to 64 letters, digits and any of _.-",
}


def shape_of(pattern: str) -> str:
    """What a text has to be that a pattern describes."""
    return f"must be {_SHAPES[pattern]}" if pattern in _SHAPES else f"must match {pattern}"


def in_words(problem: Problem) -> Problem:
    """The same problem, as it is told of what has a unit or a shape with a name."""
    if problem.where.endswith("_bytes") and "integer" in problem.message:
        return Problem(problem.where, _of_size(problem.message))
    if problem.message == f"must match {_SHA256_PATTERN}":
        return Problem(problem.where, shape_of(_SHA256_PATTERN))
    return problem


def _of_size(message: str) -> str:
    _, _, shown = message.partition(", not ")
    told = f"must be a size: bytes, or a number with a unit ({', '.join(UNITS)}), as 16GiB"
    return f"{told}, not {shown}" if shown else told
