"""The reference scenario on a server that runs: a background client indexes pictures, and people ask and speak.

Vision and speech fit on the card together, but not beside what a foreign program takes of it for a while: then the one
has to make room for the other. Whoever indexes works on four pictures at a time and tries again what was refused. All
of them use OpenAI's own client, and ask for a capability.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import openai
import pytest
from openai import DefaultHttpxClient, OpenAI
from openai.types.chat import ChatCompletionContentPartParam, ChatCompletionMessageParam

from gpuledger.adapters.ledger.sqlite import SqliteLedger
from gpuledger.adapters.runtimes import samples
from gpuledger.domain.events import (
    EvictionStarted,
    FailureRecorded,
    LeaseGranted,
    PlanDecided,
    PressureChanged,
    Recorded,
    RequestCancelled,
    RequestCompleted,
    RequestFailed,
    RequestQueued,
    RequestReceived,
)
from gpuledger.domain.failures import Failure
from gpuledger.domain.policy import Priority
from gpuledger.domain.reasons import Reason
from gpuledger.domain.state import WaitingFor
from gpuledger.domain.units import GIB
from gpuledger.tools.replay import Outcome, Replay
from tests.integration.gpu_stand_in import GpuStandIn, gpu_configuration, gpu_stand_in
from tests.integration.serving import PATIENCE_SECONDS, Serving, client, deployment
from tests.shim import ShimCard

CARD: Final = ShimCard("GPU-0a6ffa9b-1d3a-4b0e-9d55-00000000000a")
#: A model of 9 GiB holds 144 MiB of this machine.
SCALE: Final = 64
TOKENS: Final = {"indexer": "token-of-the-indexer", "people": "token-of-the-people"}
REFERENCES: Final = 40
AT_A_TIME: Final = 4
#: Questions about pictures, and recordings, of each time that people come.
QUESTIONS: Final = 5
SPOKEN: Final = 3
#: By how many references are indexed: people come then, twice, and the foreign program before them.
THEY_COME: Final = (4, 22)
#: Of the two models only one can be on the card beside it.
FOREIGN_BYTES: Final = 13 * GIB // 2
#: What it holds when people have gone: it does not go for good.
FOREIGN_LEFT_BYTES: Final = 1 * GIB
#: A reference that is not indexed by then is refused, and asked for again.
DEADLINE_MS: Final = 3000
#: What the server says of capacity. A failure of a model, say, would be another status.
NO_ROOM: Final = 429
#: And why.
CAPACITY: Final = frozenset({Reason.DEADLINE_CANNOT_BE_MET, Reason.EXTERNAL_GPU_PRESSURE, Reason.QUEUE_FULL})


def models() -> list[dict[str, Any]]:
    vision = deployment(
        "eyes",
        "vision@1",
        "chat",
        kind="gpu",
        concurrency=AT_A_TIME,
        runtime=runtime(9, 13, max_images=1, tokens=4, service_ms=400),
    )
    speech = deployment(
        "ears",
        "speech@1",
        "transcription",
        kind="gpu",
        concurrency=2,
        residency={"policy": "keep_warm", "ttl_seconds": 2},
        runtime=runtime(5, 7, max_audio_bytes="256KiB", service_ms=300),
    )
    return [vision, speech]


def runtime(idle_gib: int, peak_gib: int, **options: Any) -> dict[str, Any]:
    sizes = {"idle_bytes": idle_gib * GIB // SCALE, "peak_bytes": peak_gib * GIB // SCALE}
    return {**sizes, "context_length": 64, **options}


def config() -> dict[str, Any]:
    clients = [
        client("indexer", TOKENS["indexer"], priority="background", capabilities=["vision@1"]),
        client("people", TOKENS["people"], capabilities=["vision@1", "speech@1"]),
    ]
    # m10-v1 but for how often a card is looked at, and how long a runtime that is to end is waited for.
    policy = {"sample_interval_seconds": 1, "stop_grace_seconds": 2}
    return {**gpu_configuration(models(), clients=clients), "policy": policy}


@dataclass
class Story:
    """What became of it. `most_bytes` and `left_bytes` are of the card, `unloaded` is what the operator was told."""

    indexed: dict[int, str] = field(default_factory=dict[int, str])
    refused: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    seen: list[str] = field(default_factory=list[str])
    heard: list[str] = field(default_factory=list[str])
    unloaded: str = ""
    left_bytes: int = 0
    most_bytes: int = 0
    status: int = -1
    log: str = ""
    ledger: Path = Path()
    events: Sequence[Recorded] = ()


# ---- who asks ---------------------------------------------------------------------------------------------------


@contextmanager
def connected(server: Serving, who: str) -> Generator[OpenAI]:
    http = DefaultHttpxClient(trust_env=False)
    with OpenAI(
        base_url=f"{server.base_url}/v1",
        api_key=TOKENS[who],
        max_retries=0,
        timeout=PATIENCE_SECONDS,
        http_client=http,
    ) as api:
        yield api


def look(api: OpenAI, question: str, side_pixels: int, headers: dict[str, str] | None = None) -> str:
    """What the answer to a question about a picture says."""
    url = samples.data_url(samples.picture(side_pixels))
    content: list[ChatCompletionContentPartParam] = [
        {"type": "text", "text": question},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": content}]
    answer = api.chat.completions.create(model="vision@1", messages=messages, extra_headers=headers)
    text = answer.choices[0].message.content
    assert text is not None
    return text


class Indexing:
    """Forty references, four at a time; each is asked for until it is indexed."""

    def __init__(self, server: Serving, story: Story) -> None:
        self._server = server
        self._story = story
        self._progress = threading.Condition()

    def run(self) -> None:
        with connected(self._server, "indexer") as api, ThreadPoolExecutor(AT_A_TIME) as pool:
            for done in [pool.submit(self._index, api, number) for number in range(REFERENCES)]:
                done.result()

    def _index(self, api: OpenAI, number: int) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self._is_indexed(api, number):
            assert time.monotonic() < deadline, self._story.refused
        with self._progress:
            self._progress.notify_all()

    def _is_indexed(self, api: OpenAI, number: int) -> bool:
        """One attempt; what is refused for want of room is left for as long as the server says."""
        headers = {"x-gpuledger-deadline-ms": str(DEADLINE_MS)}
        try:
            self._story.indexed[number] = look(api, f"reference {number}", 32 + number, headers)
        except openai.APIStatusError as error:
            self._story.refused.append((error.status_code, str(error.code)))
            time.sleep(float(error.response.headers.get("retry-after", "1")))
            return False
        return True

    def until(self, count: int) -> None:
        """So many are indexed."""
        with self._progress:
            assert self._progress.wait_for(lambda: len(self._story.indexed) >= count, PATIENCE_SECONDS)


def people(server: Serving, story: Story) -> None:
    """Two of them ask about pictures, and one speaks, until all of it is answered."""
    with connected(server, "people") as api, ThreadPoolExecutor(3) as pool:
        heard = pool.submit(lambda: [listen(api, 200 + number) for number in range(SPOKEN)])
        seen = [pool.submit(look, api, f"question {number}", 100 + number) for number in range(QUESTIONS)]
        story.seen += [one.result() for one in seen]
        story.heard += heard.result()


def listen(api: OpenAI, duration_ms: int) -> str:
    file = ("recording.wav", samples.tone(duration_ms))
    return api.audio.transcriptions.create(model="speech@1", file=file).text


# ---- the scenario -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("scenario")
    told = Story()
    with (
        gpu_stand_in(folder, [CARD], scale=SCALE) as gpus,
        gpus.serving(folder / "server", config()) as server,
        gpus.program(CARD.uuid, 0) as foreign,
    ):
        indexing = Indexing(server, told)
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(indexing.run)
            for count in THEY_COME:
                indexing.until(count)
                # It takes what is free: with speech still there it would not find as much.
                server.until(lambda: "ears" not in _on_the_card(server))
                foreign.hold(FOREIGN_BYTES)
                people(server, told)
                foreign.hold(FOREIGN_LEFT_BYTES)
            done.result()
        _leave(server, gpus, told)
    told.log, told.ledger, told.events = (server.folder / "log").read_text("utf-8"), server.ledger, server.events()
    return told


def _on_the_card(server: Serving) -> set[str]:
    return {record.resident.deployment_id for _, record in server.world().residents()}


def _leave(server: Serving, gpus: GpuStandIn, told: Story) -> None:
    told.unloaded = _operate(server, "unload", "--idle", "--server", server.base_url)
    server.until(lambda: not _on_the_card(server))
    server.until(lambda: gpus.used_bytes(CARD.uuid) == FOREIGN_LEFT_BYTES)
    assert not list(server.world().leases())
    assert server.runtimes() == ()
    told.left_bytes, told.most_bytes = gpus.used_bytes(CARD.uuid), gpus.most_bytes(CARD.uuid)
    told.status = server.stop()


def _operate(server: Serving, *words: str) -> str:
    """What a command of an operator says, its token in the environment."""
    config_option = ("--config", str(server.folder / "gpuledger.yaml"))
    token = _gpuledger("tokens", "create", "operator", "ann", "--scope", "operate", *config_option)
    return _gpuledger(*words, GPULEDGER_TOKEN=token.strip())


def _gpuledger(*words: str, **environment: str) -> str:
    command = (sys.executable, "-m", "gpuledger.tools.cli", *words)
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- what must be so --------------------------------------------------------------------------------------------


def of_type(story: Story, kind: type[Any]) -> list[Any]:
    return [event.data for event in story.events if isinstance(event.data, kind)]


def test_every_reference_is_indexed_and_what_was_refused_was_refused_for_want_of_room(story: Story) -> None:
    assert sorted(story.indexed) == list(range(REFERENCES))
    assert all(text.startswith("[1 images]") for text in story.indexed.values())
    assert {status for status, _ in story.refused} <= {NO_ROOM}
    failed = of_type(story, RequestFailed)
    assert sorted(one.reason for one in failed) == sorted(code for _, code in story.refused)
    assert {one.reason for one in failed} <= CAPACITY


def test_whoever_asks_or_speaks_is_answered(story: Story) -> None:
    assert [text.partition("]")[0] for text in story.seen] == ["[1 images"] * len(THEY_COME) * QUESTIONS
    assert ["bytes: " in text for text in story.heard] == [True] * len(THEY_COME) * SPOKEN
    received = {one.request_id: one for one in of_type(story, RequestReceived)}
    completed = {one.request_id for one in of_type(story, RequestCompleted)}
    of_people = {request_id for request_id, one in received.items() if one.priority is Priority.INTERACTIVE}
    assert len(of_people) == len(THEY_COME) * (QUESTIONS + SPOKEN)
    assert of_people <= completed
    assert len(completed) == len(of_people) + REFERENCES


def test_nobody_waits_while_work_of_less_importance_is_let_in(story: Story) -> None:
    """To what it waits for: its own model, or one that is to leave for it.

    But for one that is protected for a moment after its load: closing that would gain nothing (6.3, rule 5).
    """
    grants = list(_grants_and_who_waits(story.events))
    assert len(grants) >= REFERENCES
    for granted, waiting in grants:
        assert granted.deployment_id not in [one.deployment_id for one in waiting]
        closing = [one.resident_ids for one in waiting if one.reason is not Reason.RESIDENCY_PROTECTED]
        assert granted.resident_id not in itertools.chain(*closing)


def _grants_and_who_waits(events: Sequence[Recorded]) -> Iterator[tuple[LeaseGranted, Sequence[WaitingFor]]]:
    """Each grant to the background client, and what people who are queued at that moment wait for."""
    people: set[str] = set()
    waiting: dict[str, WaitingFor] = {}
    for event in events:
        match event.data:
            case RequestReceived(request_id=request_id, priority=Priority.INTERACTIVE):
                people.add(request_id)
            case RequestQueued(request_id=request_id, waiting_for=waiting_for) if request_id in people:
                waiting[request_id] = waiting_for
            case RequestFailed(request_id=request_id) | RequestCancelled(request_id=request_id):
                waiting.pop(request_id, None)
            case LeaseGranted(request_id=request_id) as granted:
                waiting.pop(request_id, None)
                if granted.priority is Priority.BACKGROUND:
                    yield granted, list(waiting.values())
            case _:
                pass


def test_the_two_models_had_to_make_room_for_each_other(story: Story) -> None:
    """Else this would have shown nothing."""
    assert "eyes" in {one.deployment_id for one in of_type(story, EvictionStarted) if one.cause == "plan"}


def test_memory_was_never_promised_twice(story: Story) -> None:
    assert story.most_bytes <= CARD.total_bytes
    assert Failure.GPU_OOM not in {one.failure for one in of_type(story, FailureRecorded)}
    assert not of_type(story, PressureChanged), "what the foreign program holds is less, and what models leave is ours"
    for plan in of_type(story, PlanDecided):
        if plan.verdict.admits:
            assert plan.plan["headroom_after_bytes"] >= 0


def test_an_operator_unloads_what_is_idle_and_nothing_is_left(story: Story) -> None:
    assert "eyes is being unloaded" in story.unloaded
    assert story.left_bytes == FOREIGN_LEFT_BYTES
    assert story.status == 0, story.log
    assert "Traceback" not in story.log


def test_every_plan_is_decided_again_alike(story: Story) -> None:
    with closing(SqliteLedger(story.ledger, read_only=True)) as ledger:
        replay = Replay(ledger)
        assert {result.outcome for result in replay.results()} == {Outcome.MATCH}
    assert (list(replay.world.residents()), list(replay.world.leases())) == ([], [])
