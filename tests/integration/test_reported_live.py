"""Situations that users of other schedulers reported as faults (`tests/vectors/reported.json`), on a server that runs.

`reported_drives.py` brings each about with real runtimes, leases, queues and foreign programs on the shim of NVML, asks
as the client of the case, and compares the recorded plan with what the vector expects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping
from contextlib import AsyncExitStack, ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from gpuledger.adapters.ledger.sqlite import SqliteLedger
from gpuledger.domain.events import FailureRecorded, LeaseGranted, PlanDecided
from gpuledger.domain.failures import Failure
from gpuledger.domain.reasons import Reason, Verdict
from gpuledger.tools.replay import Outcome, Replay
from tests.integration import reported_drives, reported_evictions
from tests.integration.gpu_stand_in import GpuStandIn, gpu_configuration, gpu_stand_in
from tests.integration.reported_live import CASES, SCALE, Live, prepared
from tests.integration.reported_place import Place, placed
from tests.integration.reported_stage import AT_A_TIME, Stage, operator_token, staged
from tests.integration.serving import Serving, deployment
from tests.shim import ShimCard

LIVES: Final[Mapping[str, Live]] = {**reported_drives.LIVES, **reported_evictions.LIVES}
#: On a server that has no accelerator any more.
NOWHERE: Final = ("no-accelerator-at-all", "unknown-capability-is-judged-first")
#: After all others: of a policy of its own.
ALONE: Final = "one-place-left-on-the-card"
#: When the server was killed.
AFTER_A_KILL: Final = "expired-lease-reserves-nothing"
#: What one server cannot be brought to, and why.
NOT_LIVE: Final[Mapping[str, str]] = {
    "replica-on-a-dead-node-does-not-block-failover": "it has a second node, which is dead; a server is one node",
    "asleep-on-a-cordoned-node-does-not-stand-in-the-way": "it has a second node, which alone is cordoned",
}


def test_every_case_is_driven_or_it_is_said_why_not() -> None:
    named = [*LIVES, *NOWHERE, *NOT_LIVE]
    assert sorted(named) == sorted(CASES)


# ---- on cards ---------------------------------------------------------------------------------------------------


@dataclass
class Driven:
    """What became of each case, None where all was as expected, and of the server that they were driven on."""

    cards: list[ShimCard]
    errors: dict[str, BaseException | None] = field(default_factory=dict[str, BaseException | None])
    most_bytes: dict[str, int] = field(default_factory=dict[str, int])
    status: int | None = None
    log: str = ""
    ledger: Path = Path()


@pytest.fixture(scope="module")
def driven(tmp_path_factory: pytest.TempPathFactory) -> Driven:
    folder = tmp_path_factory.mktemp("reported")
    lives = list(LIVES.values())
    config = prepared(lives, folder)
    found = Driven([card for live in lives for card in live.cards()])
    there = [card for live in lives if live.always_warm for card in live.cards()]
    with gpu_stand_in(folder, there, scale=SCALE) as gpus:
        with gpus.serving(folder / "server", config, ready=False) as server:
            asyncio.run(_before_the_kill(server, gpus, found))
        with gpus.serving(folder / "server", config, ready=False) as server:
            asyncio.run(_after_the_kill(server, gpus, found))
            found.status = server.stop()
        found.most_bytes = {card.uuid: gpus.most_bytes(card.uuid) for card in found.cards}
    found.log, found.ledger = (folder / "server" / "log").read_text("utf-8"), server.ledger
    return found


async def _before_the_kill(server: Serving, gpus: GpuStandIn, found: Driven) -> None:
    together = [live for name, live in LIVES.items() if name not in (ALONE, AFTER_A_KILL)]
    free = asyncio.Semaphore(AT_A_TIME)
    async with staged(server, gpus) as stage:

        async def drive(live: Live) -> None:
            async with free:
                await _drive(stage, live)

        # What goes wrong with one is its own: the others are driven all the same.
        errors = await asyncio.gather(*map(drive, together), return_exceptions=True)
        found.errors |= {live.name: error for live, error in zip(together, errors, strict=True)}
        await _drive_alone(stage, ALONE, found)
        await _killed(stage)


async def _after_the_kill(server: Serving, gpus: GpuStandIn, found: Driven) -> None:
    async with staged(server, gpus) as stage:
        await _drive_alone(stage, AFTER_A_KILL, found)


async def _drive(stage: Stage, live: Live) -> None:
    async with placed(stage, live) as at:
        await live.drive(at)


async def _drive_alone(stage: Stage, name: str, found: Driven) -> None:
    (found.errors[name],) = await asyncio.gather(_drive(stage, LIVES[name]), return_exceptions=True)


async def _killed(stage: Stage) -> None:
    """In the midst of work under a lease, which is left as it is."""
    live = LIVES[AFTER_A_KILL]
    async with AsyncExitStack() as requests:
        with ExitStack() as programs:
            await stage.arrive(live)
            await reported_evictions.holding(Place(stage, live, requests, programs))
            stage.server.kill()


@pytest.mark.parametrize("name", LIVES)
def test_it_is_told_live_what_the_vector_expects(driven: Driven, name: str) -> None:
    error = driven.errors[name]
    if error is not None:
        raise error


def test_after_all_of_them_nothing_is_left_and_every_plan_is_decided_again_alike(driven: Driven) -> None:
    assert driven.status == 0, driven.log
    assert "Traceback" not in driven.log
    with closing(SqliteLedger(driven.ledger, read_only=True)) as ledger:
        replay = Replay(ledger)
        assert {result.outcome for result in replay.results()} == {Outcome.MATCH}
        events = [event.data for event in ledger.read(0, ledger.head())]
    assert (list(replay.world.leases()), list(replay.world.residents()), dict(replay.world.requests)) == ([], [], {})
    assert sum(isinstance(event, PlanDecided) for event in events) > len(LIVES)
    assert sum(isinstance(event, LeaseGranted) for event in events) > len(LIVES)
    assert Failure.GPU_OOM not in {event.failure for event in events if isinstance(event, FailureRecorded)}
    assert [card.uuid for card in driven.cards if driven.most_bytes[card.uuid] > card.total_bytes] == []


# ---- on no card -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nowhere(tmp_path_factory: pytest.TempPathFactory) -> Generator[Serving]:
    """A server whose only card is to be partitioned, and has no instance yet."""
    folder = tmp_path_factory.mktemp("nowhere")
    config = gpu_configuration([deployment("m", "m@1", "chat", kind="gpu")], profile="never")
    card = ShimCard("GPU-0", mig=0)
    with gpu_stand_in(folder, [card]) as gpus, gpus.serving(folder / "server", config, ready=False) as server:
        server.until(lambda: bool(server.world().accelerators))
        gpus.change(card.uuid, mig=1)
        server.until(lambda: all(one.retired for one in server.world().accelerators.values()))
        yield server


@pytest.mark.parametrize("name", NOWHERE)
def test_where_there_is_nothing_it_is_told_so(nowhere: Serving, name: str) -> None:
    request, expected = CASES[name]["request"], dict(CASES[name]["expect"])
    asked = {key: request[key] for key in ("capability", "priority", "lab", "fallback_rank")}
    with nowhere.http(operator_token(nowhere)) as http:
        answer = http.post("/operator/v1/plan", json=asked)
    assert answer.status_code == 200, answer.text
    plan = answer.json()["plan"]
    expected["policy_revision"] = plan["policy_revision"]
    assert {key: plan[key] for key in expected} == expected


def test_a_client_where_there_is_nothing_is_told_so(nowhere: Serving) -> None:
    """A capability that nobody serves is refused before it is planned."""
    question: dict[str, Any] = {"model": "m@1", "messages": [{"role": "user", "content": "hello"}]}
    with nowhere.http() as http:
        refused = http.post("/v1/chat/completions", json=question)
        unknown = http.post("/v1/chat/completions", json={**question, "model": "other@1"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "NO_ACCELERATOR")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    (plan,) = (event.data for event in nowhere.events() if isinstance(event.data, PlanDecided))
    assert (plan.verdict, plan.reasons) == (Verdict.REJECT_HEALTH, (Reason.NO_ACCELERATOR,))
