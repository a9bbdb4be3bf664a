"""One node: where accelerators are, and whether it takes work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..events import NodeRegistered


@dataclass(frozen=True, slots=True)
class NodeState:
    """`running`: a scheduler drives it now. `draining_for_shutdown` ends with the next start."""

    node_id: str
    production_eligible: bool = True
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    running: bool = False
    draining_for_shutdown: bool = False
    memory_bytes: int | None = None
    external_bytes: int | None = None


def register(state: NodeState | None, event: NodeRegistered) -> NodeState:
    """A node that registers again keeps what it is doing (semantics.md 9)."""
    known = NodeState(event.node_id) if state is None else state
    return replace(known, production_eligible=event.production_eligible, labels=event.labels)
