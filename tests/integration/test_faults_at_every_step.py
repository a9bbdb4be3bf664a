"""A real server with real runtimes, broken at every step between a grant and its release (issue 3).

Nothing that breaks makes it promise the card twice, leaves a process or a lease behind, or leaves a client without an
answer: who is not served is told why, by a typed error. What is asserted is seen from outside. Each server waits most
of the time, so all of them run side by side, each on a card of its own.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Final, TypeAlias

import pytest

from gpuledger.domain.events import EvictionCause, EvictionStarted, FailureRecorded
from gpuledger.domain.failures import Failure
from tests.integration.fault_callers import Told
from tests.integration.fault_stage import CARD, TOTAL_BYTES, Stage, staged
from tests.integration.fault_steps import Scene, Step, bring_to

#: Longer than a sample takes, and shorter than any time limit.
A_WHILE_SECONDS: Final = 1.5
BYSTANDER: Final = frozenset({"by"})
ALL_ANSWERED: Final = dict.fromkeys(Step, "answered")

#: Makes a stage; its keywords are the faults of models.
Staged: TypeAlias = Callable[..., AbstractContextManager[Stage]]


def what(told: Told | None) -> str:
    """All of an answer, the code of the typed error that stands in its place or ends a stream, or neither."""
    if told is None or (told.code is None and not told.done):
        return "cut off"
    if told.code is not None:
        assert told.status in (429, 503, 504) or (told.status == 200 and not told.done), told
        return told.code
    return "answered" if told.status == 200 else f"status {told.status}"


def walk(stage: Stage, break_at: Callable[[Scene], None], *steps: Step) -> dict[Step, str]:
    """Break it at each step; what each caller was told. After each nothing is left but the bystander."""
    told: dict[Step, str] = {}
    for step in steps or tuple(Step):
        scene = bring_to(stage, step)
        break_at(scene)
        told[step] = what(scene.caller.told())
        stage.rest(but=BYSTANDER)
    return told


def failures(stage: Stage) -> list[tuple[str, Failure]]:
    """Model and class of every failure that is recorded."""
    recorded = [event.data for event in stage.server.events() if isinstance(event.data, FailureRecorded)]
    return [(one.deployment_id or "", one.failure) for one in recorded]


def leave(stage: Stage) -> None:
    stage.rest()
    stage.leave()


# ---- what is done to it -----------------------------------------------------------------------------------------


def the_runtime_is_killed(staged: Staged) -> None:
    """Who has seen nothing is served by the next process; a stream that has begun ends with a typed error."""
    with staged() as stage:
        stage.has("by")
        with stage.asked_all_the_time("by"):
            told = walk(stage, lambda scene: os.kill(scene.process.pid, signal.SIGKILL))
        assert told == {**ALL_ANSWERED, Step.STREAMING: "RUNTIME_CRASH"}
        assert {model for model, _ in failures(stage)} <= {"emb", "chat", "doze"}
        leave(stage)


def the_scheduler_is_killed(staged: Staged) -> None:
    """Its runtimes go with it; the next one begins with nothing of theirs, and serves."""
    with staged() as stage:

        def kill(_: Scene) -> None:
            stage.server.kill()
            stage.until(lambda: not stage.runtimes())
            stage.until(lambda: stage.gpus.used_bytes(CARD) == 0)
            stage.start()
            world = stage.look()
            assert (list(world.leases()), dict(world.requests)) == ([], {})
            stage.has("by")

        assert walk(stage, kill) == dict.fromkeys(Step, "cut off")
        assert failures(stage) == []
        leave(stage)


def the_client_goes_away(staged: Staged) -> None:
    """What nobody waits for any more is given up, and others notice nothing."""
    with staged() as stage:
        stage.has("by")
        with stage.asked_all_the_time("by"):
            walk(stage, lambda scene: scene.caller.cut())
        assert failures(stage) == []
        leave(stage)


def the_runtime_hangs(staged: Staged) -> None:
    """Each start, sleep and silence has a time limit; what hangs beyond it is killed. A moment is borne."""

    def hang(scene: Scene) -> None:
        os.kill(scene.process.pid, signal.SIGSTOP)
        if scene.step in (Step.STREAMING, Step.ASLEEP):
            time.sleep(A_WHILE_SECONDS)
            os.kill(scene.process.pid, signal.SIGCONT)

    with staged() as stage:
        stage.has("by")
        with stage.asked_all_the_time("by"):
            told = walk(stage, hang)
        # Who got no answer in time has waited long enough: only that is not tried again.
        assert told == {**ALL_ANSWERED, Step.ANSWERING: "TIMEOUT"}
        leave(stage)


def the_scheduler_hangs_for_a_while(staged: Staged) -> None:
    """Nobody notices more than that it takes longer."""
    with staged() as stage:

        def stop(_: Scene) -> None:
            stage.server.process.send_signal(signal.SIGSTOP)
            time.sleep(A_WHILE_SECONDS)
            stage.server.process.send_signal(signal.SIGCONT)

        assert walk(stage, stop) == ALL_ANSWERED
        assert failures(stage) == []
        leave(stage)


def runtimes_lie_and_keep_memory(staged: Staged) -> None:
    """What they say of themselves is not believed: a functional check and the device decide."""
    flaws = {"emb": {"lie_ready": True}, "chat": {"keep_memory": True}, "doze": {"sleep_keeps_memory": True}}
    with staged(**flaws) as stage:
        stage.has("by")
        with stage.asked_all_the_time("by"):
            stage.break_model("emb")
            assert what(stage.embed("emb").told()) == "HEALTHCHECK_FAILED"
            stage.rest(but=BYSTANDER)

            stage.has("doze")
            stage.break_model("doze")
            assert what(stage.embed("emb").told()) == "answered"
            assert ("doze", Failure.GPU_MEMORY_NOT_RECLAIMED) in failures(stage)
            stage.rest(but=BYSTANDER)

            for withheld in (False, True):
                stage.gpus.withhold(CARD, withheld)
                stage.has("chat")
                stage.break_model("chat")
                assert what(stage.embed("emb").told()) == "EXTERNAL_GPU_PRESSURE"
                assert stage.gpus.give_back(CARD) > 0
                stage.rest(but=BYSTANDER)
                stage.has("emb")
                stage.rest(but=BYSTANDER)
        assert ("chat", Failure.GPU_MEMORY_NOT_RECLAIMED) in failures(stage), (
            "where the card tells only how much it has"
        )
        leave(stage)


def another_program_takes_the_room(staged: Staged) -> None:
    """Before a load begins, the card is looked at once more: it finds other room, or is told that there is none."""
    with staged() as stage:

        def take(scene: Scene) -> None:
            with stage.gpus.program(CARD, TOTAL_BYTES - stage.gpus.used_bytes(CARD)):
                assert what(scene.caller.told()) in ("answered", "EXTERNAL_GPU_PRESSURE")

        walk(stage, take, Step.GRANTED, Step.FALLING_ASLEEP)
        causes = [event.data.cause for event in stage.server.events() if isinstance(event.data, EvictionStarted)]
        assert EvictionCause.NO_ROOM in causes
        leave(stage)


WALKS: Final = (
    the_runtime_is_killed,
    the_scheduler_is_killed,
    the_client_goes_away,
    the_runtime_hangs,
    the_scheduler_hangs_for_a_while,
    runtimes_lie_and_keep_memory,
    another_program_takes_the_room,
)


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> Generator[Mapping[str, Future[None]]]:
    """All of them, under way. They begin with the envelopes of all models: measuring takes seconds."""
    folder = tmp_path_factory.mktemp("faults")
    with staged(folder / "measured", step_ms=0) as stage:
        stage.leave()
    with ThreadPoolExecutor(len(WALKS)) as pool:
        yield {
            one.__name__: pool.submit(one, partial(staged, folder / one.__name__, folder / "measured" / "state"))
            for one in WALKS
        }


@pytest.mark.parametrize("name", [one.__name__ for one in WALKS])
def test_at_every_step(name: str, walks: Mapping[str, Future[None]]) -> None:
    walks[name].result()
