"""One node: where accelerators are, and whether it takes work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias, assert_never

from ..events import (
    ClockStepped,
    ConfigurationApplied,
    NodeCordoned,
    NodeDrainCompleted,
    NodeDrainStarted,
    NodeRegistered,
    NodeUncordoned,
    SchedulerStarted,
    SchedulerStopped,
)

NodeEvent: TypeAlias = (
    NodeRegistered
    | ConfigurationApplied
    | NodeCordoned
    | NodeUncordoned
    | NodeDrainStarted
    | NodeDrainCompleted
    | ClockStepped
    | SchedulerStarted
    | SchedulerStopped
)


@dataclass(frozen=True, slots=True)
class NodeState:
    """`running`: a scheduler drives it now. `draining_for_shutdown` ends with the next start.

    `cordoned` and `draining` are an operator's, and stand until it takes them back; `drained`: nothing is left there.
    `applied`: the hash of each item of its configuration file that was applied last. `clock_skew_ms`: how far its wall
    clock was ahead of the ledger's when that was recorded last.
    """

    node_id: str
    production_eligible: bool = True
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    running: bool = False
    draining_for_shutdown: bool = False
    memory_bytes: int | None = None
    external_bytes: int | None = None
    cordoned: bool = False
    draining: bool = False
    drained: bool = False
    applied: Mapping[str, str] = field(default_factory=dict[str, str])
    clock_skew_ms: int = 0

    @property
    def leaves(self) -> bool:
        """Whether what is idle there is to be unloaded."""
        return self.draining or self.draining_for_shutdown


def evolve(state: NodeState, event: NodeEvent) -> NodeState:
    """The state after one event. A node that registers again keeps what it is doing (semantics.md 9)."""
    match event:
        case NodeRegistered():
            return replace(state, production_eligible=event.production_eligible, labels=event.labels)
        case ConfigurationApplied():
            return replace(state, applied=event.items)
        case NodeCordoned():
            return replace(state, cordoned=True)
        case NodeUncordoned():
            return replace(state, cordoned=False, draining=False, drained=False)
        case NodeDrainStarted():
            if event.cause == "shutdown":
                return replace(state, draining_for_shutdown=True)
            return replace(state, draining=True, drained=False)
        case ClockStepped():
            return replace(state, clock_skew_ms=event.skew_ms)
        case NodeDrainCompleted():
            return replace(state, drained=True)
        case SchedulerStarted():
            return replace(state, running=True, draining_for_shutdown=False)
        case SchedulerStopped():
            return replace(state, running=False)
        case _:
            assert_never(event)
