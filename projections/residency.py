"""residency: what is in memory and since when, and how what was there left it (semantics.md 7)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from gpuledger.domain.events import (
    EvictionStarted,
    LeaseGranted,
    LeaseReleased,
    MemoryNotReclaimed,
    Recorded,
    ResidentDrainStarted,
    ResidentEvicted,
    ResidentFailed,
    ResidentLoadStarted,
    ResidentProcessStarted,
    ResidentReady,
)
from gpuledger.domain.state import ResidentState

#: Residents that have gone and are kept, the newest ones.
GONE_LIMIT: Final = 200

TYPES: Final = frozenset(
    {
        "LeaseGranted",
        "LeaseReleased",
        "ResidentLoadStarted",
        "ResidentProcessStarted",
        "ResidentReady",
        "ResidentDrainStarted",
        "EvictionStarted",
        "ResidentEvicted",
        "MemoryNotReclaimed",
        "ResidentFailed",
    }
)


@dataclass(frozen=True, slots=True)
class ResidentView:
    """One resident from the grant that made it to its end. `state_since` is when it came into its present state."""

    resident_id: str
    deployment_id: str
    accelerator_id: str
    state: ResidentState
    state_since: int
    granted_at: int
    leases: int = 1
    uses: int = 0
    last_used_at: int | None = None
    load_started_at: int | None = None
    ready_at: int | None = None
    load_ms: int | None = None
    pid: int | None = None
    failure: str | None = None
    eviction_cause: str | None = None
    by_lease_id: str | None = None
    gone_at: int | None = None
    freed_bytes: int | None = None
    residual_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Residency:
    """`present`: by id. `gone`: the newest ones, in the order in which they went."""

    seq: int = 0
    present: Mapping[str, ResidentView] = field(default_factory=dict[str, ResidentView])
    gone: tuple[ResidentView, ...] = ()

    def on(self, accelerator_id: str) -> tuple[ResidentView, ...]:
        """What is in the memory of one accelerator, in order of ids."""
        here = (view for view in self.present.values() if view.accelerator_id == accelerator_id)
        return tuple(sorted(here, key=lambda view: view.resident_id))


def evolve(residency: Residency, event: Recorded) -> Residency:
    """The residency after one event of the ledger."""
    residency = replace(residency, seq=event.seq)
    match event.data:
        case LeaseGranted():
            return _granted(residency, event.data)
        case LeaseReleased(resident_id=resident_id, used=True, released_at=released_at):
            view = residency.present.get(resident_id)
            uses = 1 if view is None else view.uses + 1
            return _changed(residency, resident_id, uses=uses, last_used_at=released_at)
        case ResidentLoadStarted(resident_id=resident_id, loaded_at=loaded_at):
            return _changed(residency, resident_id, load_started_at=loaded_at)
        case ResidentProcessStarted(resident_id=resident_id, pid=pid):
            return _changed(residency, resident_id, pid=pid)
        case ResidentReady(resident_id=resident_id, ready_at=ready_at, load_ms=load_ms):
            ready = _moved(residency, resident_id, ResidentState.READY, ready_at)
            return _changed(ready, resident_id, ready_at=ready_at, load_ms=load_ms)
        case ResidentDrainStarted(resident_id=resident_id, started_at=started_at):
            return _moved(residency, resident_id, ResidentState.DRAINING, started_at)
        case ResidentFailed(resident_id=resident_id, failure=failure, failed_at=failed_at):
            failed = _moved(residency, resident_id, ResidentState.FAILED, failed_at)
            return _changed(failed, resident_id, failure=failure.value)
        case EvictionStarted(resident_id=resident_id, started_at=started_at, cause=cause, by_lease_id=by_lease_id):
            moved = _moved(residency, resident_id, ResidentState.UNLOADING, started_at)
            return _changed(moved, resident_id, eviction_cause=cause.value, by_lease_id=by_lease_id)
        case ResidentEvicted(resident_id=resident_id, finished_at=finished_at, freed_bytes=freed_bytes):
            return _left(_changed(residency, resident_id, freed_bytes=freed_bytes), resident_id, finished_at)
        case MemoryNotReclaimed(resident_id=resident_id, finished_at=finished_at, residual_bytes=residual_bytes):
            return _left(_changed(residency, resident_id, residual_bytes=residual_bytes), resident_id, finished_at)
        case _:
            return residency


def _granted(residency: Residency, granted: LeaseGranted) -> Residency:
    known = residency.present.get(granted.resident_id)
    if known is not None:
        return _changed(residency, granted.resident_id, leases=known.leases + 1)
    view = ResidentView(
        resident_id=granted.resident_id,
        deployment_id=granted.deployment_id,
        accelerator_id=granted.accelerator_id,
        state=ResidentState.LOADING,
        state_since=granted.granted_at,
        granted_at=granted.granted_at,
    )
    return replace(residency, present={**residency.present, view.resident_id: view})


def _moved(residency: Residency, resident_id: str, state: ResidentState, since: int) -> Residency:
    return _changed(residency, resident_id, state=state, state_since=since)


def _changed(residency: Residency, resident_id: str, **changes: object) -> Residency:
    view = residency.present.get(resident_id)
    if view is None:
        return residency
    changed = replace(view, **changes)  # type: ignore[arg-type]
    return replace(residency, present={**residency.present, resident_id: changed})


def _left(residency: Residency, resident_id: str, gone_at: int) -> Residency:
    view = residency.present.get(resident_id)
    if view is None:
        return residency
    present = {other: one for other, one in residency.present.items() if other != resident_id}
    gone = (*residency.gone, replace(view, gone_at=gone_at))
    return replace(residency, present=present, gone=gone[-GONE_LIMIT:])
