"""Looks every second at what processes really hold, beside what the ledger says that they may.

Two bounds are checked, both by figures that are not the product's own (PSS of smaps_rollup, MemAvailable):

- a resident's processes hold no more than what is attributed to it or, while its reservation lives, is reserved for it;
- more than the limit is used only when others have taken more, since room was last given, than the reserve absorbs.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from gpuledger.adapters import procfs
from gpuledger.adapters.procfs import ProcessTable, read_process_file
from gpuledger.domain.accounting import reservations
from gpuledger.domain.units import KIB, MIB, seconds
from gpuledger.domain.view import view_of

from .arena import Arena
from .follower import Follower
from .scene import RESERVE_BYTES, Scene, memory
from .starved import Starvation

TICK_SECONDS: Final = 1.0
#: What an idle process may take between a sample of the scheduler's and ours: buffers of the scrape of its metrics.
TOLERANCE_BYTES: Final = 8 * MIB
#: How long a process may outlive its resident, and a lease its end, before it is called a ghost or stale: the kernel
#: ends a process of a GiB in less than a second, and the scheduler looks every second.
GRACE_SECONDS: Final = 20.0
#: Findings are kept in words up to this many of a sort; all are counted.
TOLD: Final = 20
_PR_SET_CHILD_SUBREAPER: Final = 36


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies: none can get out of sight (prctl(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot become a subreaper")


@dataclass
class Findings:
    """How often something was seen that must not be, and the first of it in words."""

    count: int = 0
    words: list[str] = field(default_factory=list[str])

    def add(self, told: str) -> None:
        self.count += 1
        if len(self.words) < TOLD:
            self.words.append(told)


@dataclass
class Watch:
    """One thread. What it found is read when it has ended."""

    scene: Scene
    arena: Arena
    follower: Follower
    grace_seconds: float = GRACE_SECONDS
    overcommitted: Findings = field(default_factory=Findings)
    beyond_limit: Findings = field(default_factory=Findings)
    ghosts: Findings = field(default_factory=Findings)
    stale_leases: Findings = field(default_factory=Findings)
    starvation: Starvation = field(default_factory=Starvation)
    ticks: int = 0
    most_held_bytes: int = 0
    least_available_bytes: int = 2**63
    _gone_at: dict[str, float] = field(default_factory=dict[str, float])
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Until it is stopped. Raises LedgerCorrupt."""
        while not self._stop.wait(TICK_SECONDS):
            self.tick()

    def stop(self) -> None:
        self._stop.set()

    def tick(self) -> None:
        """One look. The ledger is read before and after it, and the more generous of the two counts."""
        self.starvation.look(self.arena.server.process.pid)
        self.follower.poll()
        allowed = self._allowed_bytes()
        table = procfs.scan()
        held = self.held_bytes(table)
        total_bytes, available_bytes = memory()
        if not self.follower.poll():
            return
        for bounds in (self._allowed_bytes(), self.follower.promised):
            for resident_id, bound in bounds.items():
                allowed[resident_id] = max(allowed.get(resident_id, 0), bound)
        self.compare(held, allowed)
        self._weigh(total_bytes - available_bytes, sum(held.values()))
        self.look_for_ghosts(table)
        self._look_for_stale_leases()
        self.ticks += 1
        self.most_held_bytes = max(self.most_held_bytes, sum(held.values()))
        self.least_available_bytes = min(self.least_available_bytes, available_bytes)

    def _allowed_bytes(self) -> dict[str, int]:
        world = self.follower.world
        view = view_of(world.state(world.at))
        allowed: dict[str, int] = {}
        for accelerator_id in world.accelerators:
            reserved = reservations(view, accelerator_id)
            for one in view.residents_at.get(accelerator_id, ()):
                held = reserved.get(one.deployment_id)
                allowed[one.resident_id] = max(one.attributed_bytes, held.reserved_bytes if held is not None else 0)
        return allowed

    def held_bytes(self, table: ProcessTable) -> dict[str, int]:
        """What the processes of each resident hold, also of those that should be gone."""
        held: dict[str, int] = {}
        for resident_id, process in self.follower.processes.items():
            members = table.tree(process)
            if members:
                held[resident_id] = sum(_share_bytes(member.pid) for member in members)
        return held

    def compare(self, held: Mapping[str, int], allowed: Mapping[str, int]) -> None:
        """Note each resident that holds more than its own."""
        for resident_id, bytes_ in held.items():
            bound = allowed.get(resident_id, 0)
            if bytes_ > bound + TOLERANCE_BYTES:
                what = f"{resident_id} holds {bytes_ // KIB} KiB, and {bound // KIB} KiB are its own"
                self.overcommitted.add(f"{what} (event {self.follower.world.seq})")

    def _weigh(self, used_bytes: int, held_bytes: int) -> None:
        external_bytes = used_bytes - held_bytes
        if used_bytes <= self.scene.limit_bytes:
            return
        if external_bytes <= self.follower.decided_external_bytes + RESERVE_BYTES - TOLERANCE_BYTES:
            grown = f"others hold {external_bytes // MIB} MiB, {self.follower.decided_external_bytes // MIB} when given"
            self.beyond_limit.add(f"{used_bytes // MIB} of {self.scene.limit_bytes // MIB} MiB used; {grown}")

    def look_for_ghosts(self, table: ProcessTable) -> None:
        """Note each process that outlives its resident, and forget those that do not."""
        now = time.monotonic()
        for resident_id, process in tuple(self.follower.processes.items()):
            if self.follower.world.find_resident(resident_id) is not None:
                continue
            if not table.tree(process):
                _bury(process.pid)
                del self.follower.processes[resident_id]
            elif now - self._gone_at.setdefault(resident_id, now) > self.grace_seconds:
                self.ghosts.add(f"process {process.pid} of {resident_id}, which is gone")

    def _look_for_stale_leases(self) -> None:
        if not self.arena.is_up:
            return
        late = self.follower.world.at - seconds(int(self.grace_seconds))
        for _, record in self.follower.world.leases():
            if record.lease.expires_at < late:
                self.stale_leases.add(f"{record.lease.lease_id} has run out")


def descendants(pid: int) -> list[int]:
    """Every process below one, by who is whose parent; those that have ended are left out."""
    entries = procfs.scan().entries.values()
    found = {pid}
    while more := {one.pid for one in entries if one.parent in found and one.running} - found:
        found |= more
    return sorted(found - {pid})


def _share_bytes(pid: int) -> int:
    """PSS without file-backed pages: the program and its libraries are the kernel's to drop."""
    rollup = read_process_file(pid, "smaps_rollup") or b""
    fields = (line.split() for line in rollup.decode("ascii", "replace").splitlines())
    return sum(int(one[1]) * KIB for one in fields if len(one) == 3 and one[0] in ("Pss_Anon:", "Pss_Shmem:"))


def _bury(pid: int) -> None:
    """An orphan of a scheduler that was killed is our child, and stays a zombie until somebody asks."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
