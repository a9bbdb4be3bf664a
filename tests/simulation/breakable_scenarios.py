"""What the scheduler is in the midst of when something breaks: small stories with every step of a resident's life."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from gpuledger.domain.failures import Failure
from gpuledger.domain.messages import (
    DrainNode,
    DrainTimedOut,
    ProfilingBegins,
    ProfilingOver,
    ShutdownRequested,
    UncordonNode,
    UnloadIdle,
)
from gpuledger.domain.policy import Policy, Priority
from gpuledger.domain.state import Residency, ResidencyPolicy, Sleep
from gpuledger.domain.units import GIB, seconds

from .breakable_machine import Slab
from .breakable_shell import BreakableShell
from .virtual_shell import NODE, Model

CARD: Final = "GPU-0"
OPERATOR: Final = "olga"
#: Short, so that a story is over when its residents have left by themselves.
TTL_SECONDS: Final = 30
KEPT: Final = Residency(ResidencyPolicy.KEEP_WARM, TTL_SECONDS)
#: Samples are rare while nothing happens, so that a story is short for those who live through it a thousand times.
POLICY: Final = replace(Policy(), fair_wait_seconds=5, sample_interval_seconds=10, telemetry_max_age_seconds=30)

SMALL: Final = Model("small", 1 * GIB, 2 * GIB, load_ms=2000, residency=KEPT)
LARGE: Final = Model("large", 11 * GIB, 12 * GIB, load_ms=4000, residency=KEPT)
OTHER: Final = replace(LARGE, deployment_id="other")
SLEEPER: Final = replace(LARGE, deployment_id="sleeper", sleep=Sleep(1 * GIB, 500, 1000))
#: Idle it fits beside LARGE, at work it does not.
GROWER: Final = replace(LARGE, deployment_id="grower", idle_bytes=5 * GIB, peak_bytes=11 * GIB)
BATCH: Final = replace(LARGE, deployment_id="batch", priority=Priority.BACKGROUND, interruptible=True, concurrency=2)
ALONE: Final = replace(SMALL, deployment_id="alone", load_ms=5000, starts_alone=True)
BACKUP: Final = replace(SMALL, deployment_id="backup", fallback_of="large")
EXCLUSIVE: Final = replace(LARGE, deployment_id="single", residency=Residency(ResidencyPolicy.EXCLUSIVE, TTL_SECONDS))
ON_DEMAND: Final = replace(LARGE, deployment_id="fleeting", residency=Residency(ResidencyPolicy.LOAD_ON_DEMAND, 0))
PINNED: Final = replace(SMALL, deployment_id="pinned", residency=Residency(ResidencyPolicy.ALWAYS_WARM, 0))

Act = Callable[[BreakableShell], object]


def ask(request_id: str, model: Model, priority: Priority = Priority.INTERACTIVE) -> Act:
    return lambda shell: shell.ask(request_id, model.capability, priority)


def ask_by(request_id: str, model: Model, deadline_seconds: int) -> Act:
    return lambda shell: shell.ask(request_id, model.capability, deadline=shell.now + seconds(deadline_seconds))


def feed(happened: object) -> Act:
    return lambda shell: shell.feed(happened)  # type: ignore[arg-type]


def fail_loads(model: Model, failure: Failure = Failure.MODEL_LOAD_FAILED) -> Act:
    def act(shell: BreakableShell) -> None:
        shell.fail_loads.add(model.deployment_id)
        shell.load_failure = failure

    return act


def load_again(shell: BreakableShell) -> None:
    shell.fail_loads.clear()


@dataclass(frozen=True)
class Scenario:
    """`acts` by their millisecond after the start. `work_ms` of a request; those in `streams` are seen at once."""

    name: str
    models: tuple[Model, ...]
    acts: tuple[tuple[int, Act], ...]
    cards: tuple[tuple[str, int], ...] = ((CARD, 24 * GIB),)
    work_ms: dict[str, int] = field(default_factory=dict[str, int], hash=False)
    streams: frozenset[str] = frozenset()
    tells_bytes: bool = True

    def slabs(self) -> tuple[Slab, ...]:
        return tuple(Slab(name, total, tells_bytes=self.tells_bytes) for name, total in self.cards)

    @property
    def lasts_seconds(self) -> int:
        """Until its last act."""
        return max(at for at, _ in self.acts) // 1000 + 1


UNLOAD: Final = ((0, ask("r1", LARGE)), (14_000, ask("r2", OTHER)), (14_500, ask("r3", LARGE)))

SCENARIOS: Final = (
    Scenario("cold start", (SMALL,), ((0, ask("r1", SMALL)), (100, ask("r2", SMALL)))),
    Scenario("start after an unload", (LARGE, OTHER), UNLOAD),
    Scenario("start after an unload, memory estimated", (LARGE, OTHER), UNLOAD, tells_bytes=False),
    Scenario("start after a sleep", (SLEEPER, OTHER), ((0, ask("r1", SLEEPER)), (14_000, ask("r2", OTHER)))),
    Scenario(
        "wake",
        (SLEEPER, OTHER),
        ((0, ask("r1", SLEEPER)), (14_000, ask("r2", OTHER)), (32_000, ask("r3", SLEEPER))),
        streams=frozenset({"r3"}),
    ),
    Scenario(
        "wake, memory estimated",
        (SLEEPER, OTHER),
        ((0, ask("r1", SLEEPER)), (14_000, ask("r2", OTHER)), (32_000, ask("r3", SLEEPER))),
        tells_bytes=False,
    ),
    Scenario(
        "warm grant that needs room",
        (GROWER, LARGE),
        ((0, ask("r1", GROWER)), (12_000, ask("r2", LARGE)), (26_000, ask("r3", GROWER))),
        work_ms={"r3": 4000},
    ),
    Scenario(
        "preemption",
        (BATCH, LARGE),
        (
            (0, ask("b1", BATCH, Priority.BACKGROUND)),
            (100, ask("b2", BATCH, Priority.BACKGROUND)),
            (6_000, ask("r1", LARGE)),
        ),
        work_ms={"b1": 20_000, "b2": 20_000},
        streams=frozenset({"b2"}),
    ),
    Scenario("retry", (SMALL,), ((0, fail_loads(SMALL)), (1, ask("r1", SMALL)), (4_000, load_again))),
    Scenario(
        "out of memory", (SMALL,), ((0, fail_loads(SMALL, Failure.GPU_OOM)), (1, ask("r1", SMALL)), (4_000, load_again))
    ),
    Scenario("fallback", (LARGE, BACKUP), ((0, fail_loads(LARGE)), (1, ask("r1", LARGE)), (40_000, load_again))),
    Scenario(
        "measuring by itself",
        (SMALL,),
        (
            (0, feed(ProfilingBegins(CARD, "small"))),
            (500, ask("r1", SMALL)),
            (1_500, feed(ProfilingOver(CARD, "small", "preempted", "request"))),
        ),
    ),
    Scenario(
        "drained by an operator",
        (LARGE, SMALL),
        (
            (0, ask("r1", LARGE)),
            (100, ask("r2", SMALL)),
            (8_000, ask("r3", LARGE)),
            (9_000, feed(DrainNode(OPERATOR, NODE))),
            (9_500, ask("r4", SMALL)),
            (25_000, feed(UncordonNode(OPERATOR, NODE))),
            (26_000, ask("r5", SMALL)),
        ),
        work_ms={"r3": 6000},
    ),
    Scenario(
        "starts alone",
        (ALONE, SMALL),
        (
            (0, ask("r1", SMALL)),
            (4_000, ask("r2", ALONE)),
            (5_000, feed(UnloadIdle(OPERATOR, "small"))),
            (6_000, ask("r3", SMALL)),
        ),
    ),
    Scenario("always warm", (PINNED,), ((5_000, ask("r1", PINNED)), (9_000, feed(UnloadIdle(OPERATOR, "pinned"))))),
    Scenario(
        "exclusive and on demand",
        (EXCLUSIVE, ON_DEMAND),
        ((0, ask("r1", ON_DEMAND)), (5_500, ask("r2", EXCLUSIVE)), (20_000, ask("r3", ON_DEMAND))),
    ),
    Scenario(
        "two cards and a deadline",
        (LARGE, OTHER, SMALL),
        (
            (0, ask("r1", LARGE)),
            (100, ask("r2", OTHER)),
            (200, ask_by("r3", SMALL, 3)),
            (300, ask_by("r4", SMALL, 5)),
            (6_000, ask("r5", LARGE)),
        ),
        cards=((CARD, 16 * GIB), ("GPU-1", 24 * GIB)),
        work_ms={"r1": 3000},
    ),
    Scenario(
        "shutdown",
        (LARGE, SMALL),
        (
            (0, ask("r1", LARGE)),
            (100, ask("r2", SMALL)),
            (7_000, ask("r3", SMALL)),
            (8_000, feed(ShutdownRequested(NODE))),
            (38_000, feed(DrainTimedOut(NODE))),
        ),
        work_ms={"r3": 5000},
    ),
)
