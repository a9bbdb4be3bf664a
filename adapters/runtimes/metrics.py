"""The three numbers that are read of a runtime's metrics page: requests that run, that wait, and its cache's fill.

Servers differ in the names. Where a configuration names none, vLLM's are looked for; one that names its own `running`
is complete, and what it leaves blank stays blank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import ROUND_CEILING, Decimal, InvalidOperation
from typing import Annotated, Final, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from gpuledger.domain.ports import RuntimeFigures

from .options import UrlPath

MetricName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z_:][A-Za-z0-9_:]*$", max_length=200)]

#: vLLM's names; its V1 engine renamed the last (docs.vllm.ai, "Production Metrics").
VLLM_RUNNING: Final = ("vllm:num_requests_running",)
VLLM_WAITING: Final = ("vllm:num_requests_waiting",)
VLLM_CACHE_USE: Final = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
#: What is more is no count of requests; and of 1e999999999 no integer is to be made.
_GREATEST: Final = 10**9
#: Of a metric: `{label="value",...}`. A value may hold braces, spaces and escaped quotes.
_LABELS: Final = r'(?:\{(?:[^"}\n]|"(?:[^"\\\n]|\\.)*")*\})?'


class MetricsMapping(BaseModel):
    """How a server calls what is read of it, on its page in Prometheus' text format."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: UrlPath = Field(default="/metrics", description="Where the page is.")
    running: MetricName | None = Field(default=None, description="Gauge of the requests that are worked on.")
    waiting: MetricName | None = Field(default=None, description="Gauge of the requests that it keeps waiting.")
    cache_use: MetricName | None = Field(default=None, description="Gauge of how full its cache is, from 0 to 1.")

    def figures(self, page: str) -> RuntimeFigures:
        """What a page says, by the names of this mapping."""
        return RuntimeFigures(
            count(page, self._names(self.running, VLLM_RUNNING)),
            count(page, self._names(self.waiting, VLLM_WAITING)),
            ratio_bp(page, self._names(self.cache_use, VLLM_CACHE_USE)),
        )

    def _names(self, own: str | None, usual: tuple[str, ...]) -> tuple[str, ...]:
        if own is not None:
            return (own,)
        return usual if self.running is None else ()


def count(page: str, names: tuple[str, ...]) -> int | None:
    """The sum over the label sets of the first of these gauges that is there; None without it, or when it is none.

    >>> count('a{model="x{1}"} 2.0\\na{model="y"} 1\\n', ("a",))
    3
    """
    values = _values(page, names)
    return int(sum(values, Decimal(0))) if values else None


def ratio_bp(page: str, names: tuple[str, ...]) -> int | None:
    """A gauge from 0 to 1 in basis points, rounded up; of several label sets the fullest. None as `count`.

    >>> ratio_bp("a 0.28\\n", ("a",))
    2800
    """
    values = _values(page, names)
    if not values or (greatest := max(values)) > 1:
        return None
    return int((greatest * 10_000).to_integral_value(ROUND_CEILING))


def _values(page: str, names: tuple[str, ...]) -> list[Decimal]:
    """Of the first name that is there, one for each label set; none when one of them is no number from 0 on."""
    for name in names:
        if samples := list(_samples(page, name)):
            values = [_number(sample) for sample in samples]
            known = [value for value in values if value is not None]
            return known if len(known) == len(values) else []
    return []


def _samples(page: str, name: str) -> Iterator[str]:
    """A line is the name, perhaps labels, the value, and perhaps a timestamp."""
    pattern = rf"^{re.escape(name)}{_LABELS}[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t\r]*$"
    return (match[1] for match in re.finditer(pattern, page, re.MULTILINE))


def _number(text: str) -> Decimal | None:
    try:
        value = Decimal(text)
    except InvalidOperation:
        return None
    return value if value.is_finite() and 0 <= value <= _GREATEST else None
