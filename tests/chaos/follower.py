"""The ledger read beside the scheduler that writes it: what lives now, and whose process is whose."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from gpuledger.adapters.ledger.sqlite import SqliteLedger
from gpuledger.domain.accounting import account
from gpuledger.domain.events import (
    EnvelopeSuspected,
    FailureRecorded,
    LeaseGranted,
    Recorded,
    RequestRetried,
    ResidentFailed,
    ResidentLoadStarted,
    ResidentProcessStarted,
)
from gpuledger.domain.ports import LedgerUnavailable, ProcessIdentity
from gpuledger.domain.view import view_of
from gpuledger.domain.world import World, evolve


@dataclass
class Follower:
    """What is known of a ledger up to its newest event that was read.

    `granted`: request -> residents that it had a lease on. `promised`: resident -> the most that was reserved on it by
    leases granted since the last `poll` began. `decided_external_bytes`: what others held when room was last given.
    """

    ledger: Path
    world: World = field(default_factory=World)
    processes: dict[str, ProcessIdentity] = field(default_factory=dict[str, ProcessIdentity])
    deployment_of: dict[str, str] = field(default_factory=dict[str, str])
    granted: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    failures: list[FailureRecorded] = field(default_factory=list[FailureRecorded])
    failed_at: dict[str, int] = field(default_factory=dict[str, int])
    suspected: list[EnvelopeSuspected] = field(default_factory=list[EnvelopeSuspected])
    promised: dict[str, int] = field(default_factory=dict[str, int])
    counts: Counter[str] = field(default_factory=Counter[str])
    retried: int = 0
    decided_external_bytes: int = 0
    _alone: threading.Lock = field(default_factory=threading.Lock)

    def poll(self) -> bool:
        """Read what is new; False where the ledger could not be read now. From any thread."""
        with self._alone:
            return self._poll()

    def _poll(self) -> bool:
        self.promised.clear()
        try:
            with closing(SqliteLedger(self.ledger, read_only=True)) as reader:
                while page := reader.read(self.world.seq):
                    for event in page:
                        self._take(event)
        except (LedgerUnavailable, FileNotFoundError):
            return False
        return True

    def _take(self, event: Recorded) -> None:
        self.world = evolve(self.world, event)
        self.counts[type(event.data).__name__] += 1
        match event.data:
            case LeaseGranted() as data:
                self.granted.setdefault(data.request_id, []).append(data.resident_id)
                self.deployment_of[data.resident_id] = data.deployment_id
                self.promised[data.resident_id] = max(self.promised.get(data.resident_id, 0), data.reserved_bytes)
                if data.needed_bytes > 0:
                    self._room_given(data.accelerator_id, event.at)
            case ResidentLoadStarted() as data:
                found = self.world.find_resident(data.resident_id)
                if found is not None:
                    self._room_given(found[0].accelerator.accelerator_id, event.at)
            case ResidentProcessStarted() as data:
                self.processes[data.resident_id] = ProcessIdentity(data.pid, data.start_ticks, data.boot_id)
            case ResidentFailed() as data:
                self.failed_at[data.resident_id] = event.at
            case FailureRecorded() as data:
                self.failures.append(data)
            case EnvelopeSuspected() as data:
                self.suspected.append(data)
            case RequestRetried():
                self.retried += 1
            case _:
                pass

    def _room_given(self, accelerator_id: str, at: int) -> None:
        found = account(view_of(self.world.state(at)), accelerator_id)
        self.decided_external_bytes = found.unmanaged_external_bytes
