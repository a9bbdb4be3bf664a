"""Reported cases of who leaves, who sleeps and who waits for whom: each brought about, and asked.

What a drive takes otherwise than the vector is said where it is: figures are GiB as the card shows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gpuledger.domain.state import ResidentState
from gpuledger.domain.units import GIB
from tests.integration.reported_live import Live
from tests.integration.reported_place import Place
from tests.integration.reported_same import AFTER, FIGURES, OF_THE_ANSWER, Declaring, same

LIVES: Final[dict[str, Live]] = {}
live: Final = Declaring(LIVES)

SLEEPING: Final = ResidentState.SLEEPING
#: What a model of the vectors keeps asleep is less than an interpreter has.
ASLEEP_GIB: Final = 1.5
SLEEPS: Final = {"sleep": {"asleep_bytes": round(ASLEEP_GIB * GIB), "sleep_ms": 700, "wake_ms": 1500}}
DOZES: Final = {"sleep": {"asleep_bytes": "24MiB"}}
#: It is kept for as long again after it is ready: the request of the case comes well before that is over.
SLOW_LOAD: Final = {"load_ms": 5000}
NEVER_LEAVES: Final = {"residency": {"policy": "keep_warm", "ttl_seconds": 901}}


# ---- who leaves, and who is waited for --------------------------------------------------------------------------


@live(
    "one-small-load-evicts-exactly-one",
    sizes=dict.fromkeys(("m", *(f"s{number:02d}" for number in range(14))), (1.5, 1.5, 1)),
    factor=1.5,
    besides=FIGURES - {"observed_used_bytes", "attributed_managed_bytes", "unmanaged_external_bytes", "total_bytes"},
)
async def _evicts_exactly_one(at: Place) -> None:
    """One and a half times as large, and models hold what they were measured to hold."""
    await at.use(*(f"s{number:02d}" for number in reversed(range(14))))
    await at.others(1.5)
    await at.rested()
    same(at, await at.ask())
    await at.admitted()


@live(
    "lru-would-drop-the-crumb-and-miss",
    sizes={"crumb": (1.5, 1.5, 1), "big": (12.0, 12.0, 1)},
    options={"pin": NEVER_LEAVES},
    besides=frozenset({"attributed_managed_bytes", "attribution_delta_bytes", "unmanaged_external_bytes", *AFTER}),
)
async def _lru_would_miss(at: Place) -> None:
    """The crumb holds more than a crumb, `big` and others so much less. `pin` becomes always_warm when all are here."""
    for name in ("big", "pin", "crumb", "pin", "big"):
        await at.use(name)
    await at.stays("pin")
    await at.others(0.5)
    await at.rested()
    same(at, await at.ask())
    await at.admitted()


@live("production-preempts-interruptible-background")
async def _production_preempts(at: Place) -> None:
    await at.hold("bg", by="background")
    await at.holds("bg", 20)
    same(at, await at.ask())
    await at.admitted()


@live("uninterruptible-is-drained-not-killed")
async def _uninterruptible_is_drained(at: Place) -> None:
    await at.hold("bg", by="background")
    await at.holds("bg", 20)
    same(at, await at.ask())


@live("cannot-make-its-deadline-even-if-it-began-now")
async def _cannot_make_its_deadline(at: Place) -> None:
    await at.hold("bg")
    await at.holds("bg", 20)
    plan = await at.ask(deadline_ms=5000)
    same(at, plan)
    await at.refused(plan)


@live("background-cannot-thrash-a-warm-interactive-model")
async def _background_cannot_thrash(at: Place) -> None:
    await at.use("chat")
    await at.holds("chat", 20)
    same(at, await at.ask())


@live("a-lost-lease-does-not-make-a-busy-model-idle")
async def _busy_without_a_lease(at: Place) -> None:
    """A stream that came past the gateway has no lease, as one whose lease was lost."""
    await at.use("k")
    async with at.past_the_gateway("k", 1):
        await at.stage.until(lambda world: at.running("k", world) == 1)
        await at.rested()
        same(at, await at.ask())


@live("running-pinned-model-is-waited-for-not-a-refusal", sizes={"p": (4.0, 12.0, 2)})
async def _running_pinned(at: Place) -> None:
    """One stream of the 2 that the model serves at a time."""
    await at.holds("p", 4)
    await at.hold("p")
    await at.holds("p", 8)
    same(at, await at.ask())


#: It took long to load, and is kept for twice as long. With a time to live of 0 it would leave by itself.
_KEPT: Final[Mapping[str, Any]] = {"options": {"a": NEVER_LEAVES}, "runtime": {"a": SLOW_LOAD}}


@live("two-models-do-not-evict-each-other-for-ever", **_KEPT)
async def _not_for_ever(at: Place) -> None:
    await at.use("a")
    same(at, await at.ask())


@live("two-background-models-do-not-evict-each-other-for-interactive-callers", **_KEPT)
async def _not_for_interactive_callers(at: Place) -> None:
    await at.use("a")
    same(at, await at.ask())


# ---- who sleeps -------------------------------------------------------------------------------------------------

_OF_SLEEP: Final = frozenset(
    {"attributed_managed_bytes", "observed_used_bytes", "physical_used_bytes", "schedulable_bytes", *OF_THE_ANSWER}
)


@live(
    "asleep-model-is-woken",
    options={"m": SLEEPS},
    runtime={"m": DOZES},
    added=("x",),
    sizes={"x": (15.0, 15.0, 1)},
    besides=_OF_SLEEP - {"requirement_bytes"},
)
async def _asleep_is_woken(at: Place) -> None:
    """A model `x` made it sleep, and was unloaded."""
    await _asleep(at, "m", 9)
    await at.unload("x")
    same(at, await at.ask())
    await at.admitted()


async def _asleep(at: Place, name: str, gib: float, by: str = "x") -> None:
    await at.use(name)
    await at.holds(name, gib)
    await at.rested()
    await at.use(by)
    await at.holds(name, ASLEEP_GIB, SLEEPING)


@live("sleep-is-cheaper-than-unload", options={"v": SLEEPS}, runtime={"v": DOZES}, besides=AFTER)
async def _sleep_is_cheaper(at: Place) -> None:
    await at.use("v")
    await at.holds("v", 20)
    await at.rested()
    same(at, await at.ask())
    await at.admitted()
    await at.holds("v", ASLEEP_GIB, SLEEPING)


@live(
    "a-sleeping-replica-does-not-forbid-a-better-card",
    options={"m": SLEEPS, "p": NEVER_LEAVES},
    runtime={"m": DOZES},
    besides=frozenset({"pressure"}),
)
async def _sleeping_replica(at: Place) -> None:
    """Both cards are of one node. `p` made `m` sleep while the other card had no room, and becomes always_warm then."""
    program = await at.others(14.5, card=1)
    await _asleep(at, "m", 8, by="p")
    await at.stays("p")
    await at.changed(program, 0, card=1)
    same(at, await at.dry_run())
    same(at, await at.ask())
    await at.admitted()


# ---- who waits --------------------------------------------------------------------------------------------------


@live(
    "small-load-passes-a-large-waiter-it-does-not-hurt",
    sizes={"b": (10.0, 10.0, 1), "m": (1.5, 1.5, 1)},
    besides=FIGURES,
)
async def _passes_a_large_waiter(at: Place) -> None:
    """Beside 8 GiB `h` would not have to wait: a queue that runs is planned whenever something changes."""
    await at.hold("b")
    await at.holds("b", 10)
    at.begin("h", by="production")
    await at.queued("h", "WAITING_FOR_DRAIN")
    same(at, await at.ask())
    await at.admitted()


@live("small-loads-do-not-keep-an-exclusive-waiter-out")
async def _exclusive_waiter(at: Place) -> None:
    await at.hold("y")
    await at.holds("y", 5)
    at.begin("e", by="production")
    await at.queued("e", "RESIDENCY_CONFLICT")
    same(at, await at.ask())


@live("exclusive-behind-a-protected-model-closes-nothing")
async def _exclusive_behind_protected(at: Place) -> None:
    await at.use("p", by="production")
    await at.holds("p", 4)
    same(at, await at.ask())


@live(
    "one-place-left-on-the-card",
    sizes=dict.fromkeys(("a", "b", "m"), (1.5, 1.5, 1)),
    factor=1.5,
    besides=OF_THE_ANSWER - {"headroom_before_bytes"},
)
async def _one_place_left(at: Place) -> None:
    """One and a half times as large. The policy is revised to a card of three residents for it."""
    await at.use("a", "b")
    await at.others(1.5)
    await at.stage.operate("POST", "/policy", {"policy": {"max_residents": 3}})
    same(at, await at.ask())
    await at.admitted()


@live("expired-lease-reserves-nothing")
async def _expired_lease(at: Place) -> None:
    """The server that granted it was killed (`holding`), and is another now."""
    await at.shown()
    assert not at.state().leases
    same(at, await at.ask())
    await at.admitted()


async def holding(at: Place) -> None:
    """A lease on `a` of the expired-lease case, as the server is killed."""
    await at.hold("a")
    await at.holds("a", 14)
