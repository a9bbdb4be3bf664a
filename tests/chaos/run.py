"""One run: a storm, a calm in which everything must come back, an end at which nothing is left, and a verdict."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from gpuledger.adapters import procfs
from tests.integration.serving import PATIENCE_SECONDS, wait_until

from .arena import Arena, NotReady
from .ballast import Ballast
from .clients import Clients
from .faults import Faults
from .follower import Follower
from .judge import Judge, Tally, log_trouble
from .scene import CLIENTS, Scene
from .traffic import Order, Traffic
from .watch import Findings, Watch, adopt_orphans, descendants

#: After the storm a deployment may be in the midst of its longest back-off (300 s), and then load.
RECOVERY_SECONDS: Final = 360.0
#: In a storm of this length these events are there, unless the harness does not do what it should.
_LONG_SECONDS: Final = 300.0
_SHOWN_BY_LONG_RUNS: Final = ("PressureChanged", "ResidentSlept", "ResidentWoken", "LeasePreempted", "RequestRetried")
_STARTS: Final = 10
_START_PAUSE_SECONDS: Final = 10.0
_COMMAND_SECONDS: Final = 600.0


@dataclass
class Chaos:
    """The parts of a run, and what it found."""

    scene: Scene
    seed: int
    seconds: float
    per_second: float
    say: Callable[[str], None] = print
    checks: dict[str, Findings] = field(default_factory=dict[str, Findings])
    tally: Tally = field(default_factory=Tally)
    figures: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def passed(self) -> bool:
        return bool(self.checks) and not any(found.count for found in self.checks.values())

    def run(self) -> None:
        """All of it. What is wrong is in `checks`; what cannot be raises."""
        adopt_orphans()
        oom_before = procfs.oom_kills()
        arena = Arena(self.scene.folder, self.scene.config)
        self._make_parts(arena)
        with ThreadPoolExecutor(3) as pool:
            try:
                self.say("measuring every deployment")
                self._measure()
                self._storm(pool)
                self._calm()
                self._end()
            finally:
                for part in (self.faults, self.ballast, self.watch):
                    part.stop()
                arena.close()
        self.say("deciding every plan again")
        self._judge(procfs.oom_kills() - oom_before)

    def _make_parts(self, arena: Arena) -> None:
        scene = self.scene
        token = command(scene, "tokens", "create", "operator", "chaos", "--scope", "operate").strip()
        self.arena = arena
        self.follower = Follower(scene.folder / "state" / "ledger.db")
        self.watch = Watch(scene, arena, self.follower)
        self.ballast = Ballast(scene.base_bytes, self._draw("ballast"), self._held_by_ours)
        self.faults = Faults(scene, arena, self.follower, self._draw("faults"), token, self.seconds)
        self.clients = Clients(lambda: arena.base_url, self._is_broken)
        self._token = token
        self._log = scene.folder / "log"
        self._log_bytes = 0
        self._running: dict[str, Future[None]] = {}

    def _is_broken(self) -> bool:
        return any(one.done() and one.exception() is not None for one in self._running.values())

    def _draw(self, part: str) -> Random:
        """A generator of its own for each part: what one draws is not moved by how fast another is."""
        return Random(f"{self.seed}/{part}")

    def _held_by_ours(self) -> int:
        """What runtimes hold now. Without the scheduler: it is a process as any other to the accounts."""
        server = procfs.identity(self.arena.server.process.pid)
        members = () if server is None else procfs.tree(server)
        return sum(_own_bytes(one.pid) for one in members if one != server)

    # ---- phases --------------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        """A start measures what it can: less, while others take memory for a moment."""
        self.arena.start()
        for _ in range(_STARTS):
            if not self._unmeasured():
                break
            self.say(f"measuring again, when others leave room: {self._unmeasured()}")
            time.sleep(_START_PAUSE_SECONDS)
            self.arena.restart()
        else:
            raise NotReady(f"could not be measured: {self._unmeasured()}: {self.arena.server.log()}")
        self._log_bytes = self._log.stat().st_size

    def _unmeasured(self) -> str:
        """The deployments without an envelope, in words."""
        self.follower.poll()
        known = self.follower.world.deployments
        return ", ".join(one for one in self.scene.deployment_ids if known[one].measured_on("host") is None)

    def _storm(self, pool: ThreadPoolExecutor) -> None:
        self.say(f"{self.seconds:.0f} seconds of chaos")
        self.ballast.stormy = True
        for part in (self.watch, self.ballast, self.faults):
            self._running[type(part).__name__] = pool.submit(part.run)
        orders = Traffic(self._draw("traffic"), self.scene.offers, self.per_second).orders(self.seconds)
        asyncio.run(self.clients.run(self._until_over(orders)))
        self._running["Faults"].result()

    def _until_over(self, orders: Iterator[Order]) -> Iterator[Order]:
        """Faults end with the last order: answers that are still to come are waited for in peace."""
        yield from orders
        self.ballast.stormy = False
        self.faults.stop()

    def _calm(self) -> None:
        """Every capability answers again, for a client that may have it."""
        self.say("calm: every capability must answer again")
        lost = Findings()
        for number, offer in enumerate(self.scene.offers):
            who = next(one for one in CLIENTS if one.lab == offer.lab)
            body: dict[str, Any] = {"model": offer.capability, "input": "calm"}
            if offer.task == "chat":
                body = {"model": offer.capability, "messages": [{"role": "user", "content": "calm"}], "max_tokens": 4}
            order = Order(-number, 0.0, who, offer, body)
            answer = asyncio.run(self.clients.persist(order, RECOVERY_SECONDS))
            if not answer.whole:
                lost.add(f"{offer.capability}: {answer.code or answer.fault}")
        self.checks["capabilities that do not come back"] = lost

    def _end(self) -> None:
        """By an operator's drain, and then in order."""
        self.say("draining")
        drain = ("nodes", "drain", "local", "--wait", "--timeout", "120", "--server", self.arena.base_url)
        command(self.scene, *drain, token=self._token)
        wait_until(lambda: not self.arena.server.runtimes(), self.arena.server.log)
        self.watch.stop()
        self._running["Watch"].result(PATIENCE_SECONDS)
        self.follower.poll()
        world = self.follower.world
        left = Findings()
        for what in (*world.residents(), *world.leases(), *world.requests):
            left.add(str(what))
        self.checks["residents, leases and requests left after a drain"] = left
        status = self.arena.server.stop()
        self.checks["scheduler does not leave in order"] = found = Findings()
        if status != 0:
            found.add(f"exit status {status}: {self.arena.server.log()}")
        self.ballast.stop()
        self._running["Ballast"].result(PATIENCE_SECONDS)

    # ---- verdict -------------------------------------------------------------------------------------------------

    def _judge(self, oom: int) -> None:
        self.follower.poll()
        judge = Judge(self.arena, self.follower, self.faults.hits, self.watch.starvation)
        self.tally = judge.tally(self.clients.answers)
        failures, unexplained = judge.failures()
        watch, checks = self.watch, self.checks
        checks["internal errors told to clients"] = self.tally.internal
        checks["answers that are not typed"] = self.tally.untyped
        checks["failures of requests that nothing explains"] = self.tally.unexplained
        checks["failures in the ledger that nothing explains"] = unexplained
        checks["errors and tracebacks in the log"] = log_trouble(self._log, self._log_bytes)
        checks["processes that the kernel killed for want of memory"] = _of(oom, "in this time")
        checks["out of memory"] = judge.out_of_memory()
        checks["work done twice under one key"] = self.tally.repeated_work
        checks["memory held beyond what the ledger allows"] = watch.overcommitted
        checks["use beyond the limit by our doing"] = watch.beyond_limit
        checks["envelopes exceeded"] = _told(str(one) for one in self.follower.suspected if one.cause == "exceeded")
        checks["ghost processes"] = _told((*watch.ghosts.words, *self._still_there()))
        checks["stale leases"] = watch.stale_leases
        checks["operators' calls that went wrong"] = _told(self.faults.wrong)
        checks["plans that are decided otherwise"] = self._replayed()
        checks["exports that differ"] = self._exported_twice()
        checks["kinds of work of which nothing was done"] = _told(self._idle_parts())
        self.figures["failures"] = dict(failures)

    def _idle_parts(self) -> list[str]:
        """A storm in which nothing happened proves nothing."""
        done = {
            "requests answered": sum(self.tally.completed.values()),
            "runtimes killed": self.faults.done["runtime killed"],
            "schedulers killed": self.faults.done["scheduler killed"],
            "samples of memory": self.watch.ticks,
            "plans replayed": self.figures["replay"]["summary"]["MATCH"],
        }
        if self.seconds >= _LONG_SECONDS:
            done |= {name: self.follower.counts[name] for name in _SHOWN_BY_LONG_RUNS}
        return [what for what, count in done.items() if count == 0]

    def _still_there(self) -> list[str]:
        return [f"process {pid} is still there" for pid in descendants(os.getpid())]

    def _replayed(self) -> Findings:
        done = run_command(self.scene, "replay", str(self.follower.ledger), "--json")
        summary = json.loads(done.stdout)
        self.figures["replay"] = {key: value for key, value in summary.items() if key != "plans"}
        return _of(done.returncode, f"is the exit status of the replay: {done.stderr[-500:]}")

    def _exported_twice(self) -> Findings:
        exports = [run_command(self.scene, "ledger", "export", str(self.follower.ledger)).stdout for _ in range(2)]
        return _of(int(exports[0] != exports[1] or not exports[0]), "two exports of one ledger, or an empty one")


def command(scene: Scene, *words: str, token: str | None = None) -> str:
    """What a command of gpuledger prints, which must go well."""
    done = run_command(scene, *words, token=token)
    if done.returncode != 0:
        raise AssertionError(f"gpuledger {' '.join(words[:3])} left with {done.returncode}: {done.stderr}")
    return done.stdout


def run_command(scene: Scene, *words: str, token: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({} if token is None else {"GPULEDGER_TOKEN": token})}
    return subprocess.run(
        (sys.executable, "-m", "gpuledger.tools.cli", *words),
        cwd=scene.folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_COMMAND_SECONDS,
    )


def _own_bytes(pid: int) -> int:
    """Anonymous memory of one process; 0 when it has ended."""
    status = procfs.read_process_file(pid, "status") or b""
    for line in status.decode("ascii", "replace").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def _of(count: int, what: str) -> Findings:
    found = Findings()
    if count:
        found.count = count
        found.words.append(f"{count} {what}")
    return found


def _told(words: Iterable[str]) -> Findings:
    found = Findings()
    for one in words:
        found.add(one)
    return found
