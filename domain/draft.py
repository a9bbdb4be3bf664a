"""Events of one decision while it is being made, folded as they are decided, and committed together or not at all."""

from __future__ import annotations

from .events import Event, NewEvent, Recorded, StreamKind, stream_name
from .ports import Batch
from .world import World, evolve


class Draft:
    """`world` is what will be, if the batch commits. Everything in it depends on `base`, the committed state."""

    def __init__(self, base: World, now: int) -> None:
        self.base = base
        self.now = now
        self.world = base
        self._events: list[NewEvent] = []
        self._read: set[str] = set()

    def emit(self, stream: str, data: Event) -> None:
        """Add one event, and fold it."""
        self._events.append(NewEvent(stream, data))
        version = self.world.versions.get(stream, 0) + 1
        self.world = evolve(self.world, Recorded(self.world.seq + 1, self.now, stream, version, data))

    def depends_on(self, stream: str) -> None:
        """The decision holds only while this stream stands as it was read."""
        self._read.add(stream)

    def batch(self) -> Batch | None:
        """All of it, or None when nothing was decided."""
        if not self._events:
            return None
        touched = {event.stream for event in self._events} | self._read
        return Batch(tuple(self._events), {stream: self.base.versions.get(stream, 0) for stream in touched})

    def on_accelerator(self, accelerator_id: str, data: Event) -> None:
        self.emit(stream_name(StreamKind.ACCELERATOR, accelerator_id), data)

    def on_request(self, request_id: str, data: Event) -> None:
        self.emit(stream_name(StreamKind.REQUEST, request_id), data)
