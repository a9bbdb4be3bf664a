"""The policy `m10-v1`: one versioned document with every number of the rules (semantics.md 10)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Final

from pydantic import ConfigDict, Field

from .units import GIB, MIB, BasisPoints, Bytes, Count, Identifier, Seconds


class Priority(StrEnum):
    """The classes of work, most important first (semantics.md 5)."""

    PRODUCTION = "production"
    INTERACTIVE = "interactive"
    BACKGROUND = "background"
    BENCHMARK = "benchmark"
    MAINTENANCE = "maintenance"

    @property
    def rank(self) -> int:
        """0 is the most important."""
        return _RANKS[self]

    def outranks(self, other: Priority) -> bool:
        """Strictly more important."""
        return self.rank < other.rank


_RANKS: Final[Mapping[Priority, int]] = {priority: rank for rank, priority in enumerate(Priority)}


class Pressure(StrEnum):
    """Levels of pressure from what is not ours, lowest first (semantics.md 4)."""

    NORMAL = "NORMAL"
    ELEVATED = "ELEVATED"
    HIGH = "HIGH"
    CRITICAL = "CRITICAL"

    @property
    def rank(self) -> int:
        """0 is NORMAL."""
        return _LEVELS[self]


_LEVELS: Final[Mapping[Pressure, int]] = {level: rank for rank, level in enumerate(Pressure)}

Positive = Annotated[int, Field(ge=1, le=10**9)]


@dataclass(frozen=True, slots=True)
class Policy:
    """Every knob with its default; `document_rules.broken_policy_rules` holds the rules that join two of them."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    revision: Identifier = "m10-v1"
    # Section 2: what is never handed out: the greatest of a floor, a ratio of the card, and what runtimes take unasked.
    reserve_floor_bytes: Bytes = 1 * GIB
    reserve_ratio_bp: BasisPoints = 500
    runtime_margin_bytes: Bytes = 256 * MIB
    # Section 3: measured peaks vary from run to run by fragmentation and allocator rounding.
    margin_floor_bytes: Bytes = 128 * MIB
    margin_ratio_bp: BasisPoints = 1000
    # Section 4: enter above exit, so that a level does not flap.
    pressure_enter_bp: Mapping[Pressure, BasisPoints] = field(
        default_factory=lambda: {Pressure.ELEVATED: 5000, Pressure.HIGH: 7000, Pressure.CRITICAL: 8500}
    )
    pressure_exit_bp: Mapping[Pressure, BasisPoints] = field(
        default_factory=lambda: {Pressure.ELEVATED: 4500, Pressure.HIGH: 6500, Pressure.CRITICAL: 8000}
    )
    recovery_seconds: Seconds = 30
    telemetry_max_age_seconds: Positive = 15
    sample_interval_seconds: Positive = 5
    max_clock_skew_seconds: Seconds = 2
    critical_admits_warm: bool = False
    lab_paused: bool = False
    # Section 6.4: a model that was just loaded has cost its load; evicting it at once would thrash.
    min_residency_seconds: Seconds = 0
    min_residency_loads: Count = 2
    min_residency_cap_seconds: Seconds = 15
    max_residents: Positive = 16
    max_preemptions: Count = 2
    # Section 6.3, rules 5 and 7: how long one of the same class may be passed before the door closes for it.
    fair_wait_seconds: Seconds = 30
    # Section 7.
    lease_ttl_seconds: Positive = 60
    max_replans: Count = 5
    reclaim_tolerance_bytes: Bytes = 64 * MIB
    reclaim_timeout_seconds: Positive = 30
    stop_grace_seconds: Seconds = 10
    max_queue_seconds: Positive = 60
    # Section 8.
    load_backoff_seconds: Seconds = 5
    degraded_after_failures: Positive = 3
    gateway_retries: Count = 1
    plan_history_limit: Positive = 500


#: Leases are renewed at a third of their life: two renewals may be lost before one runs out (semantics.md 10).
RENEWALS_PER_TTL: Final = 3
#: Bound of the doubling of `load_backoff_seconds` (semantics.md 10: "doubling to 300").
MAX_LOAD_BACKOFF_SECONDS: Final = 300
#: Between samples while something loads or is being evicted (semantics.md 10: "1 while something loads").
LOADING_SAMPLE_INTERVAL_SECONDS: Final = 1
