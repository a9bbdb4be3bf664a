"""How each class of failure is provoked: for real, on a running server, and so that it is over when the block is.

A case is a context manager: what the client got, while the cause of it lasts.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

import httpx

from gpuledger.domain.events import LeaseGranted, RequestQueued, ResidentProcessStarted, StreamKind, stream_name
from gpuledger.domain.failures import Failure
from gpuledger.domain.state import Health, ResidentState
from gpuledger.domain.units import GIB
from tests.children import read_line, running
from tests.integration.failure_stages import CARD, LEASE_TTL_SECONDS, TOTAL_BYTES, Stage, chat_request
from tests.integration.gpu_stand_in import LOST
from tests.integration.serving import sse

Provoke: TypeAlias = Callable[[Stage], AbstractContextManager[httpx.Response]]


@dataclass(frozen=True, slots=True)
class Case:
    """Where a class is provoked, and how. `capability`: the one that it hits."""

    stage: str
    capability: str
    provoke: Provoke


def code_of(answer: httpx.Response) -> str:
    """Of an answer that is an error."""
    code: str = answer.json()["error"]["code"]
    return code


# ---- of a runtime -----------------------------------------------------------------------------------------------


def _asked(name: str, capability: str | None = None) -> Provoke:
    """A request to a model, or two of one capability, that do wrong now."""

    @contextmanager
    def provoke(stage: Stage) -> Generator[httpx.Response]:
        with stage.faulty(name):
            yield stage.embed(capability or f"{name}@1")

    return provoke


@contextmanager
def _no_model_of_the_contract(stage: Stage) -> Generator[httpx.Response]:
    with stage.faulty("first"), stage.faulty("second"):
        yield stage.embed("both@1")


@contextmanager
def _flipped_byte(stage: Stage) -> Generator[httpx.Response]:
    model = stage.folder / "model.gguf"
    weights = bytearray(model.read_bytes())
    weights[-1] ^= 0xFF
    model.write_bytes(weights)
    before = stage.server.world().seq
    answer = stage.chat("corrupt@1")
    started = [event for event in stage.server.events()[before:] if isinstance(event.data, ResidentProcessStarted)]
    assert started == [], "it is found out before any memory is taken"
    yield answer


# ---- of the queue and of leases ---------------------------------------------------------------------------------


@contextmanager
def _too_soon(stage: Stage) -> Generator[httpx.Response]:
    yield stage.embed("slow@1", **{"X-Gpuledger-Deadline-Ms": "100"})


@contextmanager
def _one_too_many(stage: Stage) -> Generator[httpx.Response]:
    """One is answered for as long as somebody listens, one waits, and there is no place for a third."""
    server = stage.server
    body = chat_request("busy@1", stream=True)
    with server.http() as http, http.stream("POST", "/v1/chat/completions", json=body) as first:
        listening = sse(first.iter_lines(), server.log)
        next(listening)
        before = server.world().seq
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(stage.chat, "busy@1", max_tokens=2)
            try:
                server.until(lambda: any(isinstance(event.data, RequestQueued) for event in server.events()[before:]))
                yield stage.chat("busy@1")
            finally:
                first.close()
            assert second.result().status_code == 200


@contextmanager
def _another_writer(stage: Stage) -> Generator[httpx.Response]:
    """Requests are served, in spite of it, until one has lost every race."""
    server = stage.server
    assert stage.embed("endless@1").status_code == 200
    (accelerator_id,) = server.world().accelerators
    stream = stream_name(StreamKind.ACCELERATOR, accelerator_id)
    writer = (sys.executable, "-m", "tests.integration.failure_writer", str(server.ledger), stream)
    with running(*writer) as other:
        assert read_line(other) == "ready"
        answers: list[httpx.Response] = []

        def has_lost() -> bool:
            answers.append(stage.embed("endless@1"))
            return answers[-1].status_code != 200 and code_of(answers[-1]) == Failure.LEASE_CONFLICT

        server.until(has_lost)
    yield answers[-1]


@contextmanager
def _stopped_scheduler(stage: Stage) -> Generator[httpx.Response]:
    """It is stopped over its work; its clock, and with it the life of its leases, goes on."""
    server = stage.server
    before = server.world().seq
    with stage.faulty("endless"), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(stage.embed, "endless@1")
        server.until(lambda: any(isinstance(event.data, LeaseGranted) for event in server.events()[before:]))
        server.until(lambda: _is_at_work(stage))
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            time.sleep(LEASE_TTL_SECONDS + 1)
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        yield asked.result()


def _is_at_work(stage: Stage) -> bool:
    residents = [record.resident for _, record in stage.server.world().residents()]
    return any(one.state is ResidentState.READY and one.running_requests > 0 for one in residents)


# ---- of a card --------------------------------------------------------------------------------------------------


@contextmanager
def _foreign_program(stage: Stage) -> Generator[httpx.Response]:
    with stage.cards.program(CARD, GIB):
        stage.server.until(lambda: _used_bytes(stage) == 2 * GIB)
        yield stage.embed("large@1")


@contextmanager
def _plain(stage: Stage, capability: str) -> Generator[httpx.Response]:
    yield stage.embed(capability)


def _refused(capability: str) -> Provoke:
    """A request to a model that is well, where there is no place for it."""
    return lambda stage: _plain(stage, capability)


@contextmanager
def _impossible_figures(stage: Stage) -> Generator[httpx.Response]:
    stage.cards.change(CARD, free_bytes=TOTAL_BYTES + 1)
    try:
        stage.server.until(lambda: stage.server.world().accelerators[CARD].missed is not None)
        yield stage.embed("large@1")
    finally:
        stage.cards.change(CARD, free_bytes=None)
        stage.server.until(lambda: stage.server.world().accelerators[CARD].missed is None)


@contextmanager
def _lost_card(stage: Stage) -> Generator[httpx.Response]:
    stage.cards.change(CARD, error=LOST)
    try:
        stage.server.until(lambda: stage.server.world().accelerators[CARD].accelerator.health is Health.LOST)
        yield stage.embed("large@1")
    finally:
        stage.cards.change(CARD, error=0)
        stage.server.until(lambda: stage.server.world().accelerators[CARD].accelerator.health is Health.HEALTHY)


@contextmanager
def _kept_memory(stage: Stage) -> Generator[httpx.Response]:
    """Whose memory it is the card does not tell; so only what it shows as used says that it did not come back."""
    stage.cards.withhold(CARD)
    try:
        with stage.faulty("keeps"):
            assert stage.embed("keeps@1").status_code == 200
            stage.server.until(lambda: _used_bytes(stage) == GIB)
            answer = stage.embed("large@1")
            assert stage.cards.kept_bytes(CARD) == GIB
            yield answer
    finally:
        stage.cards.give_back(CARD)
        stage.cards.withhold(CARD, False)


def _used_bytes(stage: Stage) -> int:
    sample = stage.server.world().accelerators[CARD].sample
    return -1 if sample is None else sample.used_bytes


CASES: Final[Mapping[Failure, Case]] = {
    Failure.MODEL_LOAD_FAILED: Case("host", "ends@1", _asked("ends")),
    Failure.RUNTIME_CRASH: Case("host", "crashes@1", _asked("crashes")),
    Failure.HEALTHCHECK_FAILED: Case("host", "sick@1", _asked("sick")),
    Failure.INVALID_OUTPUT: Case("host", "zeros@1", _asked("zeros")),
    Failure.TIMEOUT: Case("host", "silent@1", _asked("silent")),
    Failure.DEADLINE_CANNOT_BE_MET: Case("host", "slow@1", _too_soon),
    Failure.QUEUE_FULL: Case("host", "busy@1", _one_too_many),
    Failure.CAPABILITY_UNAVAILABLE: Case("host", "both@1", _no_model_of_the_contract),
    Failure.ARTIFACT_CORRUPT: Case("host", "corrupt@1", _flipped_byte),
    Failure.LEASE_CONFLICT: Case("lease", "endless@1", _another_writer),
    Failure.LEASE_TIMEOUT: Case("lease", "endless@1", _stopped_scheduler),
    Failure.INSUFFICIENT_SCHEDULABLE_VRAM: Case("crowded", "huge@1", _refused("huge@1")),
    Failure.EXTERNAL_GPU_PRESSURE: Case("crowded", "large@1", _foreign_program),
    Failure.RESIDENCY_CONFLICT: Case("crowded", "alone@1", _refused("alone@1")),
    Failure.EVICTION_NOT_ALLOWED: Case("crowded", "large@1", _refused("large@1")),
    Failure.GPU_OOM: Case("faulty", "greedy@1", _asked("greedy")),
    Failure.SCHEDULER_STATE_STALE: Case("faulty", "large@1", _impossible_figures),
    Failure.GPU_MEMORY_NOT_RECLAIMED: Case("faulty", "keeps@1", _kept_memory),
    Failure.DRIVER_ERROR: Case("faulty", "large@1", _lost_card),
}
