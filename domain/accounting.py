"""The accounting invariant of one accelerator (semantics.md 2)."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Final

from .policy import Policy
from .state import Attribution, Lease, Resident, ResidentState, Sample
from .units import AcceleratorId, DeploymentId, ratio_of, seconds
from .view import View

NOTHING: Final[frozenset[DeploymentId]] = frozenset()


@dataclass(frozen=True, slots=True)
class Reservation:
    """What one deployment may still take on one accelerator. Held once per such pair."""

    reserved_bytes: int
    materialized_bytes: int

    @property
    def future_bytes(self) -> int:
        """The part that the device does not show yet."""
        return max(0, self.reserved_bytes - self.materialized_bytes)


@dataclass(frozen=True, slots=True)
class Accounting:
    """The figures of section 2, in bytes, by the names that the plan shows.

    `observed_used_bytes` and `attribution_delta_bytes` are None where there is no sample: missing is not 0.
    """

    total_bytes: int
    observed_used_bytes: int | None
    attributed_managed_bytes: int
    attribution_delta_bytes: int | None
    physical_used_bytes: int
    unmanaged_external_bytes: int
    future_lease_bytes: int
    reserve_bytes: int
    schedulable_bytes: int
    attribution: Attribution

    @property
    def full_bytes(self) -> int:
        """All that could ever be handed out here: `total - reserve` (6.3, rule 12). May be negative."""
        return self.total_bytes - self.reserve_bytes

    @property
    def room_bytes(self) -> int:
        """`schedulable` before it is cut off at 0: how much is free, or, negative, how much is missing."""
        return self.full_bytes - self.physical_used_bytes - self.future_lease_bytes


def account(
    view: View,
    accelerator_id: AcceleratorId,
    *,
    without_reservations_of: Set[DeploymentId] = NOTHING,
    freed_bytes: int = 0,
) -> Accounting:
    """The accounting of a registered accelerator at `view.now`; `KeyError` when it is not registered.

    With `without_reservations_of` and `freed_bytes` it is the accounting after evictions (6.4), or before a
    load, without the grant's own reservation and those whose load has not begun (7).
    """
    _, accelerator = view.accelerators[accelerator_id]
    here = view.residents_at.get(accelerator_id, ())
    sample = view.samples.get(accelerator_id)
    attribution = attribution_of(view, sample, here)
    attributed = -freed_bytes
    for resident in here:
        attributed += resident.attributed_bytes
    observed = max(0, sample.used_bytes - freed_bytes) if sample is not None else None
    # Without a sample the managed part is all that is known; `attribution` says that it is not enough.
    physical = max(attributed, observed or 0)
    future = 0
    for deployment_id, reservation in reservations(view, accelerator_id).items():
        if deployment_id not in without_reservations_of:
            future += reservation.future_bytes
    reserve = reserve_of(view.policy, accelerator.total_bytes)
    schedulable = max(0, accelerator.total_bytes - physical - future - reserve)
    return Accounting(
        total_bytes=accelerator.total_bytes,
        observed_used_bytes=observed,
        attributed_managed_bytes=attributed,
        attribution_delta_bytes=observed - attributed if observed is not None else None,
        physical_used_bytes=physical,
        unmanaged_external_bytes=max(0, observed - attributed) if observed is not None else 0,
        future_lease_bytes=future,
        reserve_bytes=reserve,
        schedulable_bytes=0 if attribution is Attribution.UNKNOWN else schedulable,
        attribution=attribution,
    )


def reserve_of(policy: Policy, total_bytes: int) -> int:
    """What of an accelerator is never handed out, in bytes."""
    return max(
        policy.reserve_floor_bytes,
        ratio_of(total_bytes, policy.reserve_ratio_bp),
        policy.runtime_margin_bytes,
    )


def attribution_of(view: View, sample: Sample | None, residents: tuple[Resident, ...]) -> Attribution:
    """How well the figures of an accelerator are known at `view.now`."""
    if sample is None or not is_fresh(view.policy, sample.observed_at, sample.received_at, view.now):
        return Attribution.UNKNOWN
    for resident in residents:
        if resident.attribution is not Attribution.KNOWN:
            return Attribution.ESTIMATED
    return Attribution.KNOWN


def is_fresh(policy: Policy, observed_at: int, received_at: int, now: int) -> bool:
    """Whether a sample is neither stale nor in the future, at `now`."""
    stale = now - min(observed_at, received_at) > seconds(policy.telemetry_max_age_seconds)
    in_the_future = observed_at - now > seconds(policy.max_clock_skew_seconds)
    return not stale and not in_the_future


def reservations(view: View, accelerator_id: AcceleratorId) -> Mapping[DeploymentId, Reservation]:
    """Every reservation that lives on an accelerator, by deployment."""
    sample = view.samples.get(accelerator_id)
    leases = view.leases.get(accelerator_id)
    found: dict[DeploymentId, Reservation] = {}
    for resident in view.residents_at.get(accelerator_id, ()):
        held = leases.get(resident.deployment_id, ()) if leases is not None else ()
        reserved = _greatest_reserved(held)
        if _reserves_by_itself(resident, sample):
            reserved = max(reserved, resident.reserved_bytes)
        elif not held:
            continue
        found[resident.deployment_id] = Reservation(reserved, resident.attributed_bytes)
    if leases is not None:
        for deployment_id, held in leases.items():
            if view.resident(accelerator_id, deployment_id) is None:
                materialized = max(lease.materialized_bytes for lease in held)
                found[deployment_id] = Reservation(_greatest_reserved(held), materialized)
    return found


def _greatest_reserved(leases: tuple[Lease, ...]) -> int:
    return max((lease.reserved_bytes for lease in leases), default=0)


def _reserves_by_itself(resident: Resident, sample: Sample | None) -> bool:
    """Whether a resident's reservation lives without any lease.

    It loads, or the runtime itself reports work, or the device has not yet shown what the last use left.
    """
    if resident.state is ResidentState.LOADING:
        return True
    if resident.state is ResidentState.FAILED:
        return False
    unseen = sample is not None and resident.last_used_at > sample.observed_at
    return resident.running_requests > 0 or unseen
