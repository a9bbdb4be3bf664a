"""Everything that is made to go wrong, each at one step, and mended a while later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gpuledger.domain.messages import LoadRuntime, WakeRuntime
from gpuledger.domain.units import GIB, seconds

from .breakable_engine import SchedulerKilled
from .breakable_ledger import StoreFault
from .breakable_machine import FOREVER, Body, Sight
from .breakable_shell import BreakableShell

#: More often than a decision is made anew before its request is refused (max_replans: 5).
TOO_MANY_CONFLICTS: Final = 7
#: What tells again does so every 250 ms: the store cannot be written for some seconds.
MANY_FAILURES: Final = 12

Strike = Callable[[BreakableShell], bool]


@dataclass(frozen=True)
class Breakage:
    """`strike` says whether it hit anything. It is mended `lasts_seconds` after it."""

    name: str
    strike: Strike
    lasts_seconds: int = 1


def mend(shell: BreakableShell) -> None:
    """Everything works again, and what was kept is given back. What hangs hangs, until it is killed."""
    machine = shell.machine
    machine.sight = Sight.CLEAR
    machine.fail_spawns = machine.lies_ready = machine.keeps_memory = False
    shell.stubborn.clear()
    shell.store.mend()
    for card in machine.cards:
        card.external_bytes = card.kept_bytes = 0
    for body in machine.bodies.values():
        body.unkillable = body.keeps_memory = False


def _bodies(shell: BreakableShell, *, asleep: bool | None = None) -> list[Body]:
    """Those that live, the newest first."""
    living = [body for body in reversed(shell.machine.bodies.values()) if not body.gone]
    return [body for body in living if asleep is None or body.asleep is asleep]


def _to(which: int, do: Callable[[BreakableShell, Body], None]) -> Strike:
    """To the newest process (0), or the one before it (1)."""

    def strike(shell: BreakableShell) -> bool:
        bodies = _bodies(shell)
        if len(bodies) <= which:
            return False
        do(shell, bodies[which])
        return True

    return strike


def _stall(duration_seconds: int | None) -> Callable[[BreakableShell, Body], None]:
    def stall(shell: BreakableShell, body: Body) -> None:
        shell.stall(body, FOREVER if duration_seconds is None else shell.now + seconds(duration_seconds))

    return stall


def _kill_and_keep(shell: BreakableShell, body: Body) -> None:
    body.keeps_memory = True
    shell.kill(body)


def _cannot_be_killed(shell: BreakableShell, body: Body) -> None:
    body.unkillable = True


def _keep_memory(shell: BreakableShell) -> bool:
    shell.machine.keeps_memory = True
    for body in _bodies(shell):
        body.keeps_memory = True
    return True


def _keep_memory_asleep(shell: BreakableShell) -> bool:
    able = {model.deployment_id for model in shell.models if model.sleep is not None}
    shell.stubborn |= able
    return bool(able)


def _see(sight: Sight) -> Strike:
    def strike(shell: BreakableShell) -> bool:
        shell.machine.sight = sight
        return True

    return strike


def _take_room(left_bytes: int) -> Strike:
    def strike(shell: BreakableShell) -> bool:
        for card in shell.machine.cards:
            shell.machine.take_room(card, left_bytes)
        return True

    return strike


def _client_gone(which: int) -> Strike:
    def strike(shell: BreakableShell) -> bool:
        held = sorted(shell.held)
        if len(held) <= which:
            return False
        shell.after_ms(0, lambda: shell.leave(held[which]) if held[which] in shell.held else None)
        return True

    return strike


def _lose_connections(shell: BreakableShell) -> bool:
    works = list(shell.works.values())
    for work in works:
        shell.lose_connection(work)
    return bool(works)


def _end_loads(end: Callable[[BreakableShell, Body], None]) -> Strike:
    """Of whatever loads or wakes now."""

    def strike(shell: BreakableShell) -> bool:
        starting = [job.resident_id for job in shell.jobs.values() if isinstance(job.effect, LoadRuntime | WakeRuntime)]
        loading = [body for body in _bodies(shell) if body.resident_id in starting]
        for body in loading:
            end(shell, body)
        return bool(loading)

    return strike


def _flag(name: str) -> Strike:
    def strike(shell: BreakableShell) -> bool:
        setattr(shell.machine, name, True)
        return True

    return strike


def _store(*faults: StoreFault) -> Strike:
    def strike(shell: BreakableShell) -> bool:
        shell.store.fail_next(faults)
        return True

    return strike


def _kill_scheduler(after_seconds: int) -> Strike:
    """Its processes die with it (runtimes.md, PDEATHSIG)."""

    def strike(shell: BreakableShell) -> bool:
        for body in list(shell.machine.bodies.values()):
            body.noticed = True
            shell.machine.bury(body)
        raise SchedulerKilled(after_seconds)

    return strike


def _kill_scheduler_alone(after_seconds: int) -> Strike:
    """Its processes live on: those that it has recorded, for no other was let go on."""

    def strike(shell: BreakableShell) -> bool:
        for resident_id, body in list(shell.machine.bodies.items()):
            found = shell.world.find_resident(resident_id)
            body.working = 0
            if found is None or found[1].process is None:
                shell.machine.bury(body)
        if not _bodies(shell):
            return False
        raise SchedulerKilled(after_seconds)

    return strike


def _suspend(duration_seconds: int) -> Strike:
    """The scheduler is stopped for a while and goes on (SIGSTOP, a suspended machine)."""

    def strike(shell: BreakableShell) -> bool:
        shell.now += seconds(duration_seconds)
        return True

    return strike


BREAKAGES: Final = (
    Breakage("the newest runtime is killed", _to(0, lambda shell, body: shell.kill(body))),
    Breakage("the runtime before it is killed", _to(1, lambda shell, body: shell.kill(body))),
    Breakage("the newest runtime hangs", _to(0, _stall(None))),
    Breakage("the runtime before it hangs", _to(1, _stall(None))),
    Breakage("the newest runtime hangs for a while", _to(0, _stall(8))),
    Breakage("the newest runtime hangs for long", _to(0, _stall(70)), 71),
    Breakage("a runtime is killed and its memory stays", _to(0, _kill_and_keep), 80),
    Breakage("not even SIGKILL ends a runtime", _to(0, _cannot_be_killed), 90),
    Breakage("memory stays when processes end", _keep_memory, 80),
    Breakage("sleep frees nothing", _keep_memory_asleep, 80),
    Breakage("no process can be started", _flag("fail_spawns"), 8),
    Breakage("runtimes say that they are ready and are not", _flag("lies_ready"), 8),
    Breakage("loads fail", _end_loads(lambda shell, body: shell.kill(body, "exit_status_1"))),
    Breakage("loads run out of memory", _end_loads(lambda shell, body: shell.run_out(body))),
    Breakage("the scheduler is killed", _kill_scheduler(1)),
    Breakage("the scheduler is killed and its runtimes live on", _kill_scheduler_alone(1)),
    Breakage("the scheduler is killed, and the next one comes late", _kill_scheduler(900)),
    Breakage("the scheduler is killed, its runtimes live on, the next one comes late", _kill_scheduler_alone(900)),
    Breakage("the scheduler is stopped for a while", _suspend(10)),
    Breakage("the scheduler is stopped for longer than a lease lives", _suspend(100)),
    Breakage("the first client goes away", _client_gone(0)),
    Breakage("the second client goes away", _client_gone(1)),
    Breakage("connections of work are lost", _lose_connections),
    Breakage("the driver hangs", _see(Sight.HUNG), 70),
    Breakage("the driver fails for a moment", _see(Sight.DRIVER_ERROR), 3),
    Breakage("the driver fails", _see(Sight.DRIVER_ERROR), 60),
    Breakage("the cards are lost", _see(Sight.LOST), 50),
    Breakage("figures contradict each other", _see(Sight.INVALID), 70),
    Breakage("others take all room", _take_room(0), 60),
    Breakage("others take most room for a moment", _take_room(3 * GIB), 4),
    Breakage("another writer is faster", _store(StoreFault.OTHER_WRITER)),
    Breakage("another writer is faster thrice", _store(*[StoreFault.OTHER_WRITER] * 3)),
    Breakage("the store is in conflict too often", _store(*[StoreFault.CONFLICT] * TOO_MANY_CONFLICTS)),
    Breakage("the store fails once", _store(StoreFault.UNAVAILABLE)),
    Breakage("the store fails for a while", _store(*[StoreFault.UNAVAILABLE] * MANY_FAILURES), 20),
    Breakage("the store loses its answer", _store(StoreFault.UNACKNOWLEDGED)),
    Breakage("the store fails, then loses its answer", _store(StoreFault.UNAVAILABLE, StoreFault.UNACKNOWLEDGED)),
)
