"""What a deployment needs on an accelerator: only what was measured counts (semantics.md 3)."""

from __future__ import annotations

from .policy import Policy
from .state import Accelerator, Deployment, Envelope
from .units import ratio_of


def envelope_of(deployment: Deployment, accelerator: Accelerator, active: bool) -> Envelope | None:
    """The envelope measured for this very configuration on this very class, or None.

    Of several, the newest, then the largest. A suspect one counts only for an `active` deployment: one that has
    a resident in state LOADING or READY there.
    """
    best: Envelope | None = None
    for envelope in deployment.envelopes:
        if (
            envelope.config_hash == deployment.config_hash
            and envelope.gpu_class == accelerator.gpu_class
            and (active or not envelope.suspect)
            and (best is None or _newness(envelope) > _newness(best))
        ):
            best = envelope
    return best


def requirement_of(deployment: Deployment, accelerator: Accelerator, active: bool, policy: Policy) -> int | None:
    """The bytes to find for the deployment, margin included; None without an envelope: no admission."""
    envelope = envelope_of(deployment, accelerator, active)
    return with_margin(policy, envelope.peak_bytes) if envelope is not None else None


def with_margin(policy: Policy, peak_bytes: int) -> int:
    """A measured peak and the margin that the policy adds, in bytes.

    >>> with_margin(Policy(), 1_216_348_160)
    1350565888
    """
    return peak_bytes + max(policy.margin_floor_bytes, ratio_of(peak_bytes, policy.margin_ratio_bp))


def _newness(envelope: Envelope) -> tuple[int, int]:
    return (envelope.measured_at, envelope.peak_bytes)
