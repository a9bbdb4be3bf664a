"""Reported cases of what others hold, of what is known of a card, and of what loads: each brought about, and asked.

What a drive takes otherwise than the vector is said where it is: figures are GiB as the card shows them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Final

from gpuledger.domain.accounting import reserve_of
from gpuledger.domain.policy import Policy, Pressure
from gpuledger.domain.state import ResidentState
from gpuledger.domain.units import GIB
from tests.integration.reported_live import LEAST_GIB, Live
from tests.integration.reported_place import Place
from tests.integration.reported_same import FIGURES, OF_THE_ANSWER, Declaring, same

LIVES: Final[dict[str, Live]] = {}
live: Final = Declaring(LIVES)

LOADING: Final = ResidentState.LOADING
#: Loads for good, as far as a case is concerned, and holds then what it holds at rest.
HANGS: Final = {"faults": {"fail_load": "hang"}}


# ---- what others hold -------------------------------------------------------------------------------------------


#: Of CRITICAL, which is what so much of others comes to as it is sampled: how it would start is not asked then.
_CRITICAL: Final = frozenset({"pressure", "start", "needed_bytes"})


@live("foreign-process-fills-card", besides=_CRITICAL)
async def _foreign_process_fills_card(at: Place) -> None:
    await at.others(79.5)
    plan = await at.ask()
    same(at, plan)
    assert plan.plan["pressure"] == Pressure.CRITICAL
    await at.refused(plan)


@live("orphan-runner-is-external-use")
async def _orphan_runner(at: Place) -> None:
    await at.others(7)
    plan = await at.ask()
    same(at, plan)
    await at.refused(plan)


@live("seed-embedding-example", sizes={"rag.embedding": (1.5, 1.5, 1)}, besides=OF_THE_ANSWER)
async def _seed_embedding(at: Place) -> None:
    await at.others(3)
    same(at, await at.ask())
    await at.admitted()


@live("never-fits-is-rejected-at-once")
async def _never_fits(at: Place) -> None:
    await at.shown()
    plan = await at.ask()
    same(at, plan)
    await at.refused(plan)


@live("lab-background-or-not-waits-under-high-pressure")
async def _lab_waits_under_high_pressure(at: Place) -> None:
    """The level stands for a while when others have given back what made it."""
    program = await at.others(17)
    assert (sample := at.state().sample) is not None
    assert sample.pressure is Pressure.HIGH
    await at.changed(program, 5)
    same(at, await at.ask())


#: Of 20 GiB and the margin. The card is as large as makes just that schedulable.
WHOLE: Final = {"m": (20.0, 20.0, 1)}
WHOLE_BYTES: Final = next(
    total
    for total in range(22 * GIB * 20 // 19 - 20, 22 * GIB * 20 // 19 + 20)
    if total - reserve_of(Policy(), total) == 22 * GIB
)


@live("exactly-the-whole-card-fits", sizes=WHOLE, totals=(WHOLE_BYTES,), besides=FIGURES)
async def _exactly_the_whole_card(at: Place) -> None:
    await at.shown()
    plan = await at.ask()
    same(at, plan)
    assert plan.plan["needed_bytes"] == plan.plan["headroom_before_bytes"]
    assert plan.plan["headroom_after_bytes"] == 0
    await at.admitted()


@live("one-byte-more-never-fits", sizes=WHOLE, totals=(WHOLE_BYTES - 1,), besides=FIGURES)
async def _one_byte_more(at: Place) -> None:
    await at.shown()
    plan = await at.ask()
    same(at, plan)
    assert plan.plan["needed_bytes"] == plan.plan["headroom_before_bytes"] + 1
    await at.refused(plan)


@live("one-byte-of-others-is-pressure", sizes=WHOLE, totals=(WHOLE_BYTES,), besides=FIGURES)
async def _one_byte_of_others(at: Place) -> None:
    await at.others(1 / GIB)
    plan = await at.ask()
    same(at, plan)
    assert plan.plan["accounting"]["unmanaged_external_bytes"] == 1
    await at.refused(plan)


#: On this machine, whose figures are what they are.
ON_HOST: Final[Mapping[str, Any]] = {"m-cpu": (LEAST_GIB, LEAST_GIB, 1)}


@live("no-silent-fallback-to-the-cpu", sizes=ON_HOST, besides=_CRITICAL)
async def _no_silent_fallback(at: Place) -> None:
    """The card is what the request of rank 0 is refused on; the gateway asks with rank 1 after that, and says so."""
    await at.others(23)
    same(at, await at.ask())
    answer = await at.answer()
    assert (answer.status_code, answer.headers["x-gpuledger-rank"]) == (200, "1")


@live("contract-approved-fallback-is-asked-for", sizes=ON_HOST, besides=FIGURES | {"pressure"})
async def _contract_approved_fallback(at: Place) -> None:
    """The second plan of a request whose first was refused."""
    await at.others(23)
    same(at, await at.dry_run())
    same(at, await at.ask(number=2))
    await at.admitted()


# ---- what is known ----------------------------------------------------------------------------------------------


async def _aged(at: Place, seconds: float) -> None:
    """The newest sample that is used gets so old."""
    await at.contradicted()
    sample = at.state().sample
    assert sample is not None
    await asyncio.sleep(sample.observed_at / 1_000_000 + seconds - time.time())


@live("stale-free-value-not-extrapolated")
async def _stale(at: Place) -> None:
    await at.others(1)
    await _aged(at, 16)
    plan = await at.ask()
    same(at, plan)
    await at.refused(plan)


@live("sample-of-exactly-max-age-is-fresh")
async def _old_and_fresh(at: Place) -> None:
    """Some seconds old instead of exactly as old as it may be. Nothing is loaded on it: that takes a newer one."""
    await at.others(1)
    await _aged(at, 5)
    same(at, await at.dry_run())


@live("over-attribution-gives-no-negative-external", sizes={"a": (10.0, 10.0, 1)})
async def _over_attribution(at: Place) -> None:
    """The driver does not tell processes apart, and shows less as used than the model is known to hold."""
    at.stage.gpus.withhold(at.card())
    await at.use("a")
    at.stage.gpus.change(at.card(), used_bytes=-4 * GIB)
    await at.shown()
    await at.rested()
    same(at, await at.ask())
    await at.admitted()


@live("residency-not-subtracted-twice")
async def _not_subtracted_twice(at: Place) -> None:
    await at.use("a")
    await at.holds("a", 10)
    same(at, await at.ask())
    await at.admitted()


@live("what-the-last-use-left-is-not-yet-seen", sizes={"x": (9.0, 18.0, 3)})
async def _last_use_not_yet_seen(at: Place) -> None:
    """The stream ends while no sample is of use. It is one of 3 that the model could serve at a time."""
    await at.holds("x", 9)
    stream = await at.hold("x")
    await at.holds("x", 12)
    await at.contradicted()
    await stream.close()
    same(at, await at.ask())


@live("once-seen-the-room-is-there", sizes={"x": (12.0, 18.0, 1)})
async def _once_seen(at: Place) -> None:
    await at.holds("x", 12)
    await at.use("x")
    await at.holds("x", 12)
    same(at, await at.ask())
    await at.admitted()


@live("memory-that-shrank-can-grow-back", sizes={"a": (2.0, 18.0, 4)})
async def _memory_that_shrank(at: Place) -> None:
    """A model that serves 4 at a time: when its lease was granted, 3 streams past the gateway made it hold 14."""
    await at.use("a")
    async with at.past_the_gateway("a", 3):
        await at.holds("a", 14)
        await at.hold("a")
        (lease,) = at.state().leases.values()
        assert lease.lease.materialized_bytes == 14 * GIB
    await at.holds("a", 6)
    same(at, await at.ask())


# ---- what loads -------------------------------------------------------------------------------------------------


def _hanging(idle: float, peak: float) -> Mapping[str, Any]:
    """A model `a` that loads for good, and holds so much of what it will need."""
    return {"sizes": {"a": (idle, peak, 1)}, "runtime": {"a": HANGS}}


async def _load_that_hangs(at: Place, gib: float) -> asyncio.Task[Any]:
    at.fault("a").touch()
    asked = at.begin("a")
    await at.holds("a", gib, LOADING)
    return asked


@live("loading-model-is-not-killed-for-a-newcomer", **_hanging(12.0, 36.0))
async def _loading_is_not_killed(at: Place) -> None:
    await _load_that_hangs(at, 12)
    same(at, await at.ask())


@live("loading-model-reserves-without-a-lease", **_hanging(4.0, 18.0))
async def _loading_without_a_lease(at: Place) -> None:
    """Who wanted it has gone, which ends the lease as its expiry would."""
    asked = await _load_that_hangs(at, 4)
    asked.cancel()
    await at.stage.until(lambda world: not at.state(world=world).leases)
    same(at, await at.ask())


@live("estimated-loads-go-one-at-a-time", **_hanging(3.0, 9.0))
async def _estimated_loads(at: Place) -> None:
    at.stage.gpus.withhold(at.card())
    await _load_that_hangs(at, 3)
    same(at, await at.ask())


FAILS_TO_LOAD: Final = {"faults": {"fail_load": "exit"}}


@live("a-card-that-failed-the-load-is-not-tried-again-at-once", runtime={"m": FAILS_TO_LOAD})
async def _card_that_failed(at: Place) -> None:
    """The second plan of a request whose first load failed."""
    await at.others(12)
    await at.shown(1)
    at.fault("m").touch()
    plan = await at.ask(number=2)
    at.fault("m").unlink()
    same(at, plan)
    assert at.accelerators[at.plans[0].plan["accelerator_id"]] == "GPU-0"
