"""Pressure from what is not ours, with memory of its own so that a level does not flap (semantics.md 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .accounting import is_fresh, reserve_of
from .policy import Policy, Pressure
from .units import ceil_div, seconds

#: Highest first, without NORMAL, which has no thresholds.
_LEVELS: Final = (Pressure.CRITICAL, Pressure.HIGH, Pressure.ELEVATED)


@dataclass(frozen=True, slots=True)
class PressureTrack:
    """The level of one accelerator, and what the next sample is judged against."""

    level: Pressure = Pressure.NORMAL
    recovering_since: int | None = None
    last_observed_at: int | None = None


def pressure_bp(policy: Policy, total_bytes: int, used_bytes: int, attributed_bytes: int) -> int:
    """What others hold of all that could be handed out, in basis points, rounded up. May be over 10,000."""
    external = max(0, used_bytes - attributed_bytes)
    return ceil_div(external * 10_000, max(1, total_bytes - reserve_of(policy, total_bytes)))


def judge(
    policy: Policy, previous: PressureTrack, pressure: int, observed_at: int, received_at: int | None = None
) -> PressureTrack:
    """The track after one more sample, whose pressure is given in basis points.

    A sample that is not fresh when it is received changes nothing. Without `received_at` it counts as fresh.
    """
    if received_at is not None and not is_fresh(policy, observed_at, received_at, received_at):
        return previous
    level = previous.level
    # Unobserved time is no evidence of stability: cleared before this sample is judged.
    unobserved = previous.last_observed_at is not None and (
        observed_at - previous.last_observed_at > seconds(policy.telemetry_max_age_seconds)
    )
    since = None if unobserved else previous.recovering_since
    raw = _highest_entered(policy, pressure)
    if raw.rank > level.rank:
        return PressureTrack(raw, None, observed_at)
    if level is Pressure.NORMAL or pressure >= policy.pressure_exit_bp[level]:
        return PressureTrack(level, None, observed_at)
    if since is None:
        return PressureTrack(level, observed_at, observed_at)
    if observed_at - since >= seconds(policy.recovery_seconds):
        return PressureTrack(_highest_kept(policy, pressure, below=level), None, observed_at)
    return PressureTrack(level, since, observed_at)


def _highest_entered(policy: Policy, pressure: int) -> Pressure:
    for level in _LEVELS:
        if policy.pressure_enter_bp[level] <= pressure:
            return level
    return Pressure.NORMAL


def _highest_kept(policy: Policy, pressure: int, *, below: Pressure) -> Pressure:
    for level in _LEVELS:
        if level.rank < below.rank and policy.pressure_exit_bp[level] <= pressure:
            return level
    return Pressure.NORMAL
