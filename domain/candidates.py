"""What the stages of section 6 hand to each other: the question, one candidate of it, and its outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from .accounting import Accounting
from .eviction import Eviction, EvictionSet, wake_ms_of
from .policy import Policy, Pressure
from .reasons import Reason, Verdict
from .state import (
    Accelerator,
    Deployment,
    Lease,
    Node,
    PlanRequest,
    QueuedRequest,
    Resident,
    ResidentState,
)
from .units import (
    MICROS_PER_MS,
    AcceleratorId,
    DeploymentId,
    NodeId,
    ResidentId,
    ceil_div,
    milliseconds,
)
from .view import View


class Start(StrEnum):
    """How a candidate would start (6.3, rule 4), the quickest first."""

    WARM = "warm"
    WAKE = "wake"
    COLD = "cold"


Figures: TypeAlias = Mapping[str, int | str | None]
"""What a reason is about: sizes in bytes, counts, ids, instants; units last in the names."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """One failing check with its figures. `explain.describe` renders it."""

    reason: Reason
    figures: Figures


@dataclass(frozen=True, slots=True)
class Question:
    """What all candidates of one request share."""

    view: View
    request: PlanRequest
    accounts: Mapping[AcceleratorId, Accounting]
    #: Accelerators with a serving replica, by deployment.
    serving: Mapping[DeploymentId, frozenset[AcceleratorId]]
    #: Queued requests for this capability that come before this one in the claim order.
    queued_ahead: int
    #: Queued requests other than this one, in claim order.
    others_queued: tuple[QueuedRequest, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """One candidate as it is found: a deployment, an accelerator, and what is there of it."""

    question: Question
    deployment: Deployment
    node: Node
    accelerator: Accelerator
    accounting: Accounting
    pressure: Pressure
    own: Resident | None
    own_leases: tuple[Lease, ...]
    #: It has a resident in state LOADING or READY here (6.1).
    active: bool
    requirement_bytes: int | None

    @property
    def view(self) -> View:
        return self.question.view

    @property
    def policy(self) -> Policy:
        return self.question.view.policy

    @property
    def serving_elsewhere(self) -> int:
        """How many serving replicas there are on other accelerators (6.1)."""
        serving = self.question.serving[self.deployment.deployment_id]
        return len(serving - {self.accelerator.accelerator_id})

    @property
    def start_micros(self) -> int:
        """How long the start itself takes (6.3)."""
        now, own = self.view.now, self.own
        if own is not None:
            match own.state:
                case ResidentState.READY:
                    return max(0, own.available_at - now) if own.available_at is not None else 0
                case ResidentState.LOADING:
                    return max(0, own.loaded_at + milliseconds(own.start_ms) - now)
                case ResidentState.SLEEPING:
                    return milliseconds(wake_ms_of(self.deployment))
                case ResidentState.DRAINING | ResidentState.UNLOADING | ResidentState.FAILED:
                    pass
        return milliseconds(self.deployment.load_ms)


@dataclass(frozen=True, slots=True)
class Candidate:
    """The outcome of one candidate."""

    deployment_id: DeploymentId
    accelerator_id: AcceleratorId
    node_id: NodeId
    verdict: Verdict
    refusals: tuple[Refusal, ...]
    #: It passed the policy and the health stage.
    eligible: bool
    #: None without an envelope.
    requirement_bytes: int | None
    #: None where a rule before 6.3, 4 decided; so is `start`.
    needed_bytes: int | None
    start: Start | None
    start_micros: int
    #: The resident that would serve, where there is one.
    resident_id: ResidentId | None
    active_leases: int
    pressure: Pressure
    accounting: Accounting
    eviction_set: EvictionSet | None
    headroom_after_bytes: int

    @property
    def reasons(self) -> tuple[Reason, ...]:
        return tuple(refusal.reason for refusal in self.refusals)

    @property
    def headroom_before_bytes(self) -> int:
        return self.accounting.schedulable_bytes

    @property
    def evictions(self) -> tuple[Eviction, ...]:
        return self.eviction_set.evictions if self.eviction_set is not None else ()

    @property
    def estimate_ms(self) -> int | None:
        """Evictions and start, one after the other, rounded up; None where it would not start."""
        if self.start is None:
            return None
        evicting_ms = self.eviction_set.duration_ms if self.eviction_set is not None else 0
        return ceil_div(self.start_micros, MICROS_PER_MS) + evicting_ms
