"""Everything that goes wrong and that operators do, as a seed draws it: one thread, one thing after the other.

What was hit is written down before it is hit: a failure of it is then explained. What is changed for a while is changed
back when its time is over, at the latest when the storm is.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

import httpx

from gpuledger.adapters import procfs
from gpuledger.domain.ports import ProcessIdentity

from .arena import Arena
from .follower import Follower
from .scene import UPSTREAM_SECONDS, Scene

#: Seconds between two faults, at least and at most.
_PAUSE: Final = (1.5, 7.0)
#: Seconds between two kills of the scheduler: each costs a start, and the clients their requests.
_KILL_PAUSE: Final = (50.0, 140.0)
_RESIDENCIES: Final = ("keep_warm", "keep_warm", "load_on_demand", "exclusive")
_POLICIES: Final[tuple[dict[str, Any], ...]] = (
    {"fair_wait_seconds": 2},
    {"fair_wait_seconds": 15, "max_preemptions": 0},
    {"gateway_retries": 0},
    {"gateway_retries": 2, "max_queue_seconds": 8},
    {"min_residency_seconds": 4},
    {"critical_admits_warm": True},
    {"max_residents": 3},
)
#: What is said of a resident whose process got a SIGKILL.
KILLED: Final = "killed"
_CALL_SECONDS: Final = 30.0
#: What works is hit so much more often than what is idle: it has requests to lose.
_BUSY_WEIGHT: Final = 5


@dataclass(frozen=True, slots=True)
class Hit:
    """A resident, or every resident of a deployment, that something was done to."""

    at: float
    what: str
    resident_id: str | None = None
    deployment_id: str | None = None


@dataclass
class Faults:
    """Draws faults and carries them out. `token`: of an operator who may operate."""

    scene: Scene
    arena: Arena
    follower: Follower
    draw: Random
    token: str
    seconds: float
    hits: list[Hit] = field(default_factory=list[Hit])
    done: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])
    _undo: list[tuple[float, Callable[[], None]]] = field(default_factory=list[tuple[float, Callable[[], None]]])
    _stop: threading.Event = field(default_factory=threading.Event)
    _base_policy: dict[str, Any] = field(default_factory=dict[str, Any])

    def run(self) -> None:
        """Until it is stopped; everything is changed back when it returns. Raises NotReady."""
        try:
            self._base_policy = self._call("GET", "/policy").get("policy", {})
            self._storm()
        finally:
            self._undo_until(float("inf"))

    def stop(self) -> None:
        self._stop.set()

    def _storm(self) -> None:
        now = time.monotonic()
        next_fault = now + self.draw.uniform(*_PAUSE)
        next_kill = now + min(self.draw.uniform(*_KILL_PAUSE), self.seconds * self.draw.uniform(0.3, 0.6))
        faults, weights = zip(*self._faults(), strict=True)
        while not self._stop.wait(0.1):
            now = time.monotonic()
            self._undo_until(now)
            if now >= next_kill:
                self._kill_scheduler()
                next_kill = time.monotonic() + self.draw.uniform(*_KILL_PAUSE)
            if now >= next_fault:
                # However short it is, a storm has one of these.
                kill_first = not self.done["runtime killed"]
                (self._kill_runtime if kill_first else self.draw.choices(faults, weights)[0])()
                next_fault = time.monotonic() + self.draw.uniform(*_PAUSE)

    def _faults(self) -> tuple[tuple[Callable[[], None], int], ...]:
        return (
            (self._kill_runtime, 6),
            (self._stop_runtime, 5),
            (self._hang_runtime, 3),
            (self._break_loads, 2),
            (self._cordon, 1),
            (self._drain, 1),
            (self._unload, 2),
            (self._change_residency, 2),
            (self._pause_lab, 1),
            (self._revise_policy, 2),
        )

    def _undo_until(self, now: float) -> None:
        due = [one for one in self._undo if one[0] <= now]
        self._undo = [one for one in self._undo if one[0] > now]
        for _, undo in due:
            undo()

    def _later(self, least: float, most: float, undo: Callable[[], None]) -> None:
        self._undo.append((time.monotonic() + self.draw.uniform(least, most), undo))

    # ---- processes -----------------------------------------------------------------------------------------------

    def _kill_scheduler(self) -> None:
        self.done["scheduler killed"] += 1
        self.arena.kill()
        self._stop.wait(self.draw.uniform(0.0, 2.0))
        self.arena.start()

    def _kill_runtime(self) -> None:
        if (found := self._some_runtime(KILLED)) is not None:
            self.done["runtime killed"] += 1
            _send(found, signal.SIGKILL)

    def _stop_runtime(self) -> None:
        self._halt("stopped for a moment", 0.3, 6.0)

    def _hang_runtime(self) -> None:
        """Longer than the gateway waits for an answer: one at work, since one that is idle is evicted meanwhile."""
        self._halt("stopped for long", UPSTREAM_SECONDS + 5.0, UPSTREAM_SECONDS + 25.0, idle_weight=0)

    def _halt(self, what: str, least: float, most: float, *, idle_weight: int = 1) -> None:
        if (found := self._some_runtime(what, idle_weight)) is not None:
            self.done[f"runtime {what}"] += 1
            _send(found, signal.SIGSTOP)
            self._later(least, most, lambda: _send(found, signal.SIGCONT))

    def _some_runtime(self, what: str, idle_weight: int = 1) -> ProcessIdentity | None:
        table = procfs.scan()
        alive = [one for one in self.follower.processes.copy().items() if table.is_alive(one[1])]
        busy = {record.resident_id for _, record in self.follower.world.leases()}
        weights = [_BUSY_WEIGHT if one in busy else idle_weight for one, _ in alive]
        if not any(weights):
            return None
        resident_id, process = self.draw.choices(alive, weights)[0]
        self.hits.append(Hit(time.monotonic(), what, resident_id=resident_id))
        return process

    def _break_loads(self) -> None:
        self.done["loads of one deployment fail"] += 1
        self.hits.append(Hit(time.monotonic(), "loads fail", deployment_id="flaky"))
        self.scene.flaky_file.touch()
        self._later(3.0, 12.0, lambda: self.scene.flaky_file.unlink(missing_ok=True))

    # ---- operators -----------------------------------------------------------------------------------------------

    def _cordon(self) -> None:
        self._operate("cordon", "POST", "/nodes/local/cordon")
        self._later(1.0, 5.0, lambda: self._must("POST", "/nodes/local/uncordon"))

    def _drain(self) -> None:
        self._operate("drain", "POST", "/nodes/local/drain")
        self._later(1.0, 5.0, lambda: self._must("POST", "/nodes/local/uncordon"))

    def _unload(self) -> None:
        deployment_id = self.draw.choice((None, *self.scene.deployment_ids))
        self._operate("unload", "POST", "/unload", {} if deployment_id is None else {"deployment": deployment_id})

    def _change_residency(self) -> None:
        one = self.draw.choice(self.scene.config["deployments"])
        path = f"/deployments/{one['id']}/residency"
        policy = "always_warm" if one["id"] == "pinned" else self.draw.choice(_RESIDENCIES)
        wanted = {"policy": policy, "ttl_seconds": self.draw.randrange(0, 20)}
        before = one.get("residency", {"policy": "keep_warm", "ttl_seconds": 901})
        self._operate("residency", "PUT", path, wanted)
        self._later(5.0, 20.0, lambda: self._must("PUT", path, before))

    def _pause_lab(self) -> None:
        self._operate("lab pause", "POST", "/lab/pause")
        self._later(2.0, 10.0, lambda: self._must("POST", "/lab/resume"))

    def _revise_policy(self) -> None:
        keys = self.draw.choice(_POLICIES)
        before = {key: self._base_policy[key] for key in keys if key in self._base_policy}
        self._operate("policy revise", "POST", "/policy", {"policy": keys})
        self._later(5.0, 25.0, lambda: self._must("POST", "/policy", {"policy": before}))

    def _operate(self, what: str, method: str, path: str, body: dict[str, Any] | None = None) -> None:
        self.done[f"operator: {what}"] += 1
        self._call(method, path, body)

    def _must(self, method: str, path: str, body: dict[str, Any] | None = None) -> None:
        """What is changed back: nothing after it would be as it should."""
        if "recorded" not in self._call(method, path, body):
            self.wrong.append(f"{method} {path} was not done")

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """An answer of the operator API; whatever is no answer in its shape is written down."""
        url = f"{self.arena.base_url}/operator/v1{path}"
        headers = {"Authorization": f"Bearer {self.token}"}
        try:
            answer = httpx.request(method, url, json=body, headers=headers, timeout=_CALL_SECONDS, trust_env=False)
            document: dict[str, Any] = answer.json()
        except (httpx.TransportError, ValueError) as error:
            self.wrong.append(f"{method} {path}: {type(error).__name__}: {error}")
            return {}
        if answer.status_code != 200:
            self.wrong.append(f"{method} {path}: {answer.status_code} {document}")
        return document


def _send(process: ProcessIdentity, number: signal.Signals) -> None:
    """A signal to exactly this process, where it is still there."""
    with suppress(ProcessLookupError):
        if procfs.is_alive(process):
            os.kill(process.pid, number)
