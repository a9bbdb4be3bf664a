"""queue: who waits, at which place and for what, and how long others have waited (semantics.md 5, 6.5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from gpuledger.domain.events import (
    LeaseGranted,
    LeasePreempted,
    LeaseReleased,
    Recorded,
    ReleaseCause,
    RequestCancelled,
    RequestCompleted,
    RequestFailed,
    RequestQueued,
    RequestReceived,
)
from gpuledger.domain.policy import Priority
from gpuledger.domain.state import WaitingFor

#: Waits that have ended and are kept, the newest ones.
WAITS_LIMIT: Final = 500

TYPES: Final = frozenset(
    {
        "RequestReceived",
        "RequestQueued",
        "LeaseGranted",
        "LeaseReleased",
        "LeasePreempted",
        "RequestCompleted",
        "RequestFailed",
        "RequestCancelled",
    }
)

#: Ends of a lease that put its request back into the queue (semantics.md 7).
_PUT_BACK: Final = frozenset({ReleaseCause.NO_ROOM, ReleaseCause.NOT_RECLAIMED})


@dataclass(frozen=True, slots=True)
class Waiter:
    """One request that has not ended. It waits while it holds no lease; `waiting_for` is None until it was planned."""

    request_id: str
    client_id: str
    capability: str
    priority: Priority
    requested_at: int
    deadline: int | None
    queue_until: int
    waiting_for: WaitingFor | None = None
    waiting_since: int | None = None
    places: int = 0
    lease_id: str | None = None

    @property
    def claim(self) -> tuple[int, int, str]:
        """Its place in the claim order (semantics.md 5)."""
        return (self.priority.rank, self.requested_at, self.request_id)


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait that has ended. `granted`: with a lease; otherwise refused, or nobody waited any more."""

    request_id: str
    capability: str
    priority: Priority
    waited_ms: int
    ended_at: int
    granted: bool


@dataclass(frozen=True, slots=True)
class Queue:
    """`open_requests`: every request between its arrival and its end. `waits`: the newest ones that have ended."""

    seq: int = 0
    open_requests: Mapping[str, Waiter] = field(default_factory=dict[str, Waiter])
    waits: tuple[Wait, ...] = ()

    def waiting(self) -> tuple[Waiter, ...]:
        """Who holds no lease, in claim order."""
        waiting = (waiter for waiter in self.open_requests.values() if waiter.lease_id is None)
        return tuple(sorted(waiting, key=lambda waiter: waiter.claim))


def evolve(queue: Queue, event: Recorded) -> Queue:
    """The queue after one event of the ledger."""
    queue = replace(queue, seq=event.seq)
    match event.data:
        case RequestReceived():
            waiter = _received(event.data)
            return replace(queue, open_requests={**queue.open_requests, waiter.request_id: waiter})
        case RequestQueued(request_id=request_id, waiting_for=waiting_for):
            return _queued(queue, request_id, waiting_for, event.at)
        case LeaseGranted(request_id=request_id, lease_id=lease_id, granted_at=granted_at):
            return _granted(queue, request_id, lease_id, granted_at)
        case LeaseReleased(lease_id=lease_id, cause=cause) if cause in _PUT_BACK:
            return _put_back(queue, lease_id)
        case LeasePreempted(lease_id=lease_id, requeued=True):
            return _put_back(queue, lease_id)
        case RequestCompleted(request_id=request_id, completed_at=ended_at):
            return _ended(queue, request_id, ended_at)
        case RequestFailed(request_id=request_id, failed_at=ended_at):
            return _ended(queue, request_id, ended_at)
        case RequestCancelled(request_id=request_id, cancelled_at=ended_at):
            return _ended(queue, request_id, ended_at)
        case _:
            return queue


def _received(received: RequestReceived) -> Waiter:
    return Waiter(
        request_id=received.request_id,
        client_id=received.client_id,
        capability=received.capability,
        priority=received.priority,
        requested_at=received.requested_at,
        deadline=received.deadline,
        queue_until=received.queue_until,
    )


def _queued(queue: Queue, request_id: str, waiting_for: WaitingFor, at: int) -> Queue:
    waiter = queue.open_requests.get(request_id)
    if waiter is None:
        return queue
    since = at if waiter.waiting_since is None else waiter.waiting_since
    waiter = replace(waiter, waiting_for=waiting_for, waiting_since=since, places=waiter.places + 1)
    return replace(queue, open_requests={**queue.open_requests, request_id: waiter})


def _granted(queue: Queue, request_id: str, lease_id: str, granted_at: int) -> Queue:
    waiter = queue.open_requests.get(request_id)
    if waiter is None:
        return queue
    held = replace(waiter, waiting_for=None, waiting_since=None, lease_id=lease_id)
    queue = replace(queue, open_requests={**queue.open_requests, request_id: held})
    return _with_wait(queue, waiter, granted_at, granted=True)


def _put_back(queue: Queue, lease_id: str) -> Queue:
    for request_id, waiter in queue.open_requests.items():
        if waiter.lease_id == lease_id:
            return replace(queue, open_requests={**queue.open_requests, request_id: replace(waiter, lease_id=None)})
    return queue


def _ended(queue: Queue, request_id: str, ended_at: int) -> Queue:
    waiter = queue.open_requests.get(request_id)
    if waiter is None:
        return queue
    rest = {other: one for other, one in queue.open_requests.items() if other != request_id}
    queue = replace(queue, open_requests=rest)
    return queue if waiter.lease_id is not None else _with_wait(queue, waiter, ended_at, granted=False)


def _with_wait(queue: Queue, waiter: Waiter, ended_at: int, *, granted: bool) -> Queue:
    """A request that was granted what it asked for at once has not waited."""
    if waiter.waiting_since is None and granted:
        return queue
    wait = Wait(
        request_id=waiter.request_id,
        capability=waiter.capability,
        priority=waiter.priority,
        waited_ms=max(0, ended_at - waiter.requested_at) // 1000,
        ended_at=ended_at,
        granted=granted,
    )
    return replace(queue, waits=(*queue.waits, wait)[-WAITS_LIMIT:])
