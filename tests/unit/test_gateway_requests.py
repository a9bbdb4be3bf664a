"""What the gateway lets in, and how it says no: one shape, a status that clients understand, figures, the plan."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from gpuledger.adapters.http.auth import Client, Clients
from gpuledger.adapters.http.bodies import DISCARD_FACTOR, parse
from gpuledger.adapters.http.openai_errors import (
    CLIENT_CLOSED,
    ApiError,
    failure_error,
    refusal_error,
    repeated_error,
    status_of,
    unavailable_error,
)
from gpuledger.adapters.http.ports import Cause, PlanFacts, Refused, Repeated, Unavailable
from gpuledger.domain.failures import Failure
from gpuledger.domain.policy import Priority
from gpuledger.domain.reasons import Reason, waiting_helps
from gpuledger.domain.units import GIB, MIB, format_instant
from tests.unit.gateways import MAX_INPUTS, NOW, Visitor, door

pytestmark = pytest.mark.anyio

EMBED = {"model": "emb@1", "input": "text"}
LIMIT = 100_000


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def plan(reason: Reason, figures: dict[str, Any], **more: Any) -> PlanFacts:
    document = {
        "reasons": [reason.value],
        "figures": {reason.value: figures},
        "accelerator_id": "host:local",
        "requirement_bytes": 1331 * MIB,
        "accounting": {"schedulable_bytes": 410 * MIB},
        "waiting_for": None,
        **more,
    }
    return PlanFacts("cd" * 32, document)


def refused(reason: Reason, **more: Any) -> Refused:
    figures = {"unmanaged_external_bytes": 21 * GIB, "pressure": "HIGH", "requirement_bytes": 1331 * MIB}
    return Refused("req-1", reason, None, "REJECT_CAPACITY", plan(reason, figures, **more))


class TestTokens:
    def test_the_client_of_a_token(self) -> None:
        clients = Clients([Client(name, digest, Priority.INTERACTIVE, False, None) for name, digest in HASHES.items()])
        assert [found(clients, f"Bearer {name}") for name in HASHES] == list(HASHES)
        assert found(clients, "bearer one") == "one"

    @pytest.mark.parametrize(
        "header", [None, "", "one", "Basic one", "Bearer", "Bearer ", "Bearer ones", "Bearer \udc80"]
    )
    def test_no_client(self, header: str | None) -> None:
        clients = Clients([Client(name, digest, Priority.INTERACTIVE, False, None) for name, digest in HASHES.items()])
        assert found(clients, header) is None

    async def test_nothing_is_read_of_one_who_is_nobody(self) -> None:
        taken: list[int] = []

        async def body() -> AsyncIterator[bytes]:
            taken.append(1)
            yield b"{}"

        async with door() as gate:
            headers = {"Authorization": "Bearer wrong", "Content-Type": "application/json"}
            answer = await gate.http.post("/v1/embeddings", content=body(), headers=headers)
        assert answer.status_code == 401
        assert taken == []
        assert answer.headers["www-authenticate"] == "Bearer"
        assert gate.desk.asked == []


HASHES = {
    "one": "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed",
    "two": "3fc4ccfe745870e2c0d99f71f30ff0656c8dedd41cc1d7d3d376b0dbe685e2f3",
}


def found(clients: Clients, header: str | None) -> str | None:
    client = clients.by_authorization(header)
    return None if client is None else client.client_id


class TestQuestions:
    async def test_the_scheduler_gets_shapes_and_no_content(self) -> None:
        async with door() as gate:
            body = json.dumps({**EMBED, "input": "a secret"}).encode()
            headers = {"Content-Type": "application/json", "X-Gpuledger-Deadline-Ms": "2500"}
            await gate.http.post("/v1/embeddings", content=body, headers=headers)
        (asked,) = gate.desk.asked
        assert (asked.client_id, asked.capability, asked.operation) == ("app", "emb@1", "embeddings")
        assert (asked.body_bytes, asked.deadline_ms, asked.content_mac) == (len(body), 2500, None)
        assert "secret" not in repr(asked)

    async def test_a_key_names_the_request_and_its_content_is_sealed(self) -> None:
        async with door() as gate:
            for text, key in (("a", "k"), ("a", "k"), ("b", "k"), ("a", "other")):
                await gate.http.post("/v1/embeddings", json={**EMBED, "input": text}, headers={"Idempotency-Key": key})
        first, same, other, elsewhere = gate.desk.asked
        assert first == same
        assert other.request_id == first.request_id
        assert other.content_mac != first.content_mac
        assert elsewhere.request_id != first.request_id
        assert elsewhere.content_mac == first.content_mac

    async def test_ids_that_nobody_named_are_fresh(self) -> None:
        async with door() as gate:
            for _ in range(2):
                await gate.http.post("/v1/embeddings", json=EMBED)
        first, second = gate.desk.asked
        assert first.request_id != second.request_id

    async def test_streams_are_for_texts(self) -> None:
        async with door() as gate:
            await gate.http.post("/v1/embeddings", json={**EMBED, "stream": True})
        assert gate.desk.ended[0].status == 200


class TestBodies:
    async def test_one_as_long_as_it_may_be(self) -> None:
        async with door() as gate:
            body = json.dumps({**EMBED, "input": "x" * (LIMIT - 40)}).encode()
            assert len(body) <= LIMIT
            assert (await post(gate.http, body)).status_code == 200

    async def test_as_many_inputs_as_the_envelope_was_measured_with(self) -> None:
        async with door() as gate:
            answer = await gate.http.post("/v1/embeddings", json={**EMBED, "input": ["a"] * MAX_INPUTS})
            tokens = await gate.http.post("/v1/embeddings", json={**EMBED, "input": [7] * (MAX_INPUTS + 1)})
            more = await gate.http.post("/v1/embeddings", json={**EMBED, "input": ["a"] * (MAX_INPUTS + 1)})
            prompts = {"model": "chat@1", "prompt": ["a"] * (MAX_INPUTS + 1)}
            completion = await gate.http.post("/v1/completions", json=prompts)
        assert (answer.status_code, tokens.status_code) == (200, 200)
        assert (more.status_code, completion.status_code) == (400, 400)
        assert more.json()["error"]["message"] == "input has 5 entries, and emb@1 takes 4 at once"

    @pytest.mark.parametrize("announced", [True, False])
    async def test_one_that_is_longer(self, announced: bool) -> None:
        body = json.dumps({**EMBED, "input": "x" * (3 * LIMIT)}).encode()
        async with door() as gate:
            answer = await post(gate.http, body if announced else pieces_of(body))
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"
        assert answer.headers["connection"] == "close"
        assert gate.desk.asked == []

    async def test_one_without_end_is_not_read_to_its_end(self) -> None:
        taken = 0

        async def endless() -> AsyncIterator[bytes]:
            nonlocal taken
            while True:
                taken += 1000
                yield b"x" * 1000

        async with door() as gate:
            answer = await post(gate.http, endless())
        assert answer.status_code == 413
        assert taken <= (DISCARD_FACTOR + 1) * LIMIT

    async def test_one_whose_client_goes_before_it_is_there(self) -> None:
        async with door() as gate:
            visitor = Visitor(b'{"model": "emb@1", ', "/v1/embeddings")
            visitor.breaks_off = True
            visitor.gone.set()
            await visitor.visit(gate.app)
            assert visitor.status == CLIENT_CLOSED
        assert gate.desk.asked == []

    @pytest.mark.parametrize(
        "document",
        [
            {"model": "m", "input": ["a", "b"]},
            {"model": "m", "input": [1, 2, 3]},
            {"model": "m", "input": [[1], [2, 3]]},
            {"model": "m", "input": "a", "encoding_format": None, "stream": None},
        ],
    )
    def test_inputs_of_every_shape_that_openai_knows(self, document: dict[str, Any]) -> None:
        assert parse(json.dumps(document).encode(), "embeddings") == document

    @pytest.mark.parametrize(
        ("document", "param"),
        [
            ({"model": "m", "input": ""}, "input"),
            ({"model": "m", "input": ["a", ""]}, "input"),
            ({"model": "m", "input": ["a", 1]}, "input"),
            ({"model": "m", "input": list[Any]([[]])}, "input"),
            ({"model": "m", "input": [True]}, "input"),
            ({"model": "m", "input": [-1]}, "input"),
            ({"model": "m", "input": {"a": 1}}, "input"),
            ({"model": "m" * 201, "input": "a"}, "model"),
            ({"model": "", "input": "a"}, "model"),
            ({"model": "m", "input": "a", "stream": 1}, "stream"),
            ({"model": "m", "input": "a", "stream_options": "x"}, "stream_options"),
        ],
    )
    def test_inputs_of_no_shape(self, document: dict[str, Any], param: str) -> None:
        with pytest.raises(ApiError) as error:
            parse(json.dumps(document).encode(), "embeddings")
        assert (error.value.status, error.value.param) == (400, param)

    @pytest.mark.parametrize("messages", [None, [], "hello", ["hello"], [{"content": "hello"}], [{"role": 1}]])
    def test_messages_of_no_shape(self, messages: object) -> None:
        with pytest.raises(ApiError) as error:
            parse(json.dumps({"model": "m", "messages": messages}).encode(), "chat")
        assert error.value.param == "messages"

    @pytest.mark.parametrize("body", [b"", b"\xff\xfe", b'{"model": "\\ud800"}', b"nul", b'"text"', b"[" * 100_000])
    def test_no_json(self, body: bytes) -> None:
        with pytest.raises(ApiError) as error:
            parse(body, "chat")
        assert error.value.status == 400


async def post(http: httpx.AsyncClient, body: bytes | AsyncIterator[bytes]) -> httpx.Response:
    return await http.post("/v1/embeddings", content=body, headers={"Content-Type": "application/json"})


async def pieces_of(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 10_000):
        yield body[start : start + 10_000]


class TestRefusals:
    @pytest.mark.parametrize("reason", list(Reason))
    def test_every_reason_has_a_status_and_says_whether_waiting_helps(self, reason: Reason) -> None:
        error = refusal_error(Refused("req-1", reason, None, "", None), "emb@1", NOW)
        assert error.status == status_of(reason)
        assert (error.retry_after is not None) == waiting_helps(reason)
        headers = error.response().headers
        assert ("retry-after" in headers) == waiting_helps(reason)
        assert "emb@1" in error.message

    @pytest.mark.parametrize(
        ("failure", "told"),
        [
            (Failure.GPU_OOM, "ran out of memory, and planned again it found no other place; its envelope is suspect"),
            (Failure.ARTIFACT_CORRUPT, "its model file is not the one that was registered, and planned again"),
            (Failure.RUNTIME_CRASH, "RUNTIME_CRASH ended the first attempt, and planned again it found no other place"),
        ],
    )
    def test_one_that_was_planned_again_in_vain_is_told_in_words(self, failure: Failure, told: str) -> None:
        error = failure_error("req-1", failure, "tried_again_NO_MEASURED_ENVELOPE", "emb@1")
        assert (error.status, error.code, error.retry_after) == (503, failure.value, None)
        assert told in error.message
        assert "tried_again" not in error.message

    def test_what_is_short_is_said_with_figures(self) -> None:
        error = refusal_error(refused(Reason.EXTERNAL_GPU_PRESSURE), "rag.embedding@1", NOW)
        assert error.message == (
            "rag.embedding@1 is refused on host:local (410.0 MiB schedulable): "
            "others hold 21.0 GiB (pressure HIGH), needs 1.3 GiB"
        )
        body = error.document()["error"]
        assert body["type"] == "rate_limit_error"
        assert body["code"] == "EXTERNAL_GPU_PRESSURE"
        assert body["plan_fingerprint"] == "cd" * 32
        assert body["figures"]["EXTERNAL_GPU_PRESSURE"]["unmanaged_external_bytes"] == 21 * GIB

    def test_the_end_of_a_protection_is_when_to_come_back(self) -> None:
        waiting = {"not_before": format_instant(NOW + 12_300_000)}
        error = refusal_error(refused(Reason.RESIDENCY_PROTECTED, waiting_for=waiting), "emb@1", NOW)
        assert error.retry_after == 13

    def test_waiting_for_what_never_fits_is_not_advised(self) -> None:
        error = refusal_error(refused(Reason.INSUFFICIENT_SCHEDULABLE_VRAM), "emb@1", NOW)
        headers = error.response().headers
        assert (error.status, headers["x-should-retry"]) == (429, "false")

    @pytest.mark.parametrize("failure", list(Failure))
    def test_every_failure_is_ours_and_says_whether_it_passes(self, failure: Failure) -> None:
        error = failure_error("req-1", failure, "detail", "emb@1")
        assert error.status in (503, 504)
        mended = failure in (Failure.ARTIFACT_CORRUPT, Failure.GPU_OOM, Failure.INSUFFICIENT_SCHEDULABLE_VRAM)
        headers = error.response().headers
        assert ("retry-after" in headers) != mended
        assert ("x-should-retry" in headers) == mended
        assert error.code == failure.value
        assert "emb@1" in error.message
        assert "emb@1" in failure_error("req-1", failure, "", "emb@1").message

    @pytest.mark.parametrize("cause", list(Cause))
    async def test_nothing_is_admitted(self, cause: Cause) -> None:
        async with door() as gate:
            gate.desk.outcomes = [Unavailable("req-1", cause)]
            answer = await gate.http.post("/v1/embeddings", json=EMBED)
        assert answer.status_code == unavailable_error(None, cause).status
        assert answer.json()["error"]["code"] == cause.value
        assert answer.headers["x-request-id"] == "req-1"

    async def test_the_plan_is_named_in_a_header(self) -> None:
        async with door() as gate:
            gate.desk.outcomes = [refused(Reason.QUEUE_FULL)]
            answer = await gate.http.post("/v1/embeddings", json=EMBED)
            page = (await gate.http.get("/metrics")).text
        assert answer.headers["x-gpuledger-plan"] == "cd" * 32
        assert 'gpuledger_capacity_rejections_total{capability="emb@1",reason="QUEUE_FULL"} 1.0' in page
        assert 'gpuledger_requests_total{capability="emb@1",outcome="refused",priority="interactive"} 1.0' in page

    def test_a_repetition_of_a_refusal_is_the_refusal_without_advice_to_try_again(self) -> None:
        first = refused(Reason.QUEUE_FULL)
        error = repeated_error(Repeated("req-1", True, "refused", first), "emb@1", NOW)
        assert (error.status, error.code) == (429, "QUEUE_FULL")
        assert error.extra["plan_fingerprint"] == "cd" * 32
        assert error.retry_after is None

    @pytest.mark.parametrize("state", ["in_progress", "completed", "cancelled"])
    def test_a_repetition_of_anything_else_is_a_conflict(self, state: Any) -> None:
        error = repeated_error(Repeated("req-1", True, state), "emb@1", NOW)
        assert (error.status, error.code) == (409, f"request_{state}")


class TestPages:
    async def test_metrics_are_open_on_the_loopback_and_take_a_token_elsewhere(self) -> None:
        nobody = {"Authorization": ""}
        async with door() as gate:
            assert (await gate.http.get("/metrics", headers=nobody)).status_code == 200
        async with door(open_metrics=False) as gate:
            assert (await gate.http.get("/metrics", headers=nobody)).status_code == 401
            assert (await gate.http.get("/metrics")).status_code == 200

    async def test_health_is_always_open(self) -> None:
        async with door(open_metrics=False) as gate:
            answers = [await gate.http.get(path, headers={"Authorization": ""}) for path in ("/healthz", "/readyz")]
        assert [answer.status_code for answer in answers] == [200, 200]

    async def test_what_a_client_sends_becomes_no_label(self) -> None:
        async with door() as gate:
            for number in range(5):
                await gate.http.post("/v1/embeddings", json={"model": f"made-up-{number}", "input": "x"})
            page = (await gate.http.get("/metrics")).text
        assert "made-up" not in page

    async def test_a_defect_has_the_same_shape(self) -> None:
        async def defect(_: object) -> Any:
            raise ZeroDivisionError

        async with door() as gate:
            gate.desk.outcomes = [defect]
            answer = await gate.http.post("/v1/embeddings", json=EMBED)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
