"""Requests through a real server: streams, queues, deadlines, keys, refusals, and what the ledger says of each."""

from __future__ import annotations

import json
import socket
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpuledger.domain.events import (
    LeaseGranted,
    LeaseReleased,
    Recorded,
    ReleaseCause,
    RequestCompleted,
    RequestReceived,
)
from gpuledger.domain.policy import Priority
from gpuledger.domain.units import GIB, MIB
from tests.children import running
from tests.integration.serving import (
    OTHER_TOKEN,
    PATIENCE_SECONDS,
    TOKEN,
    Serving,
    chat,
    configuration,
    copy_ledger,
    embedding,
    read_events,
    serving,
    sse,
    wait_until,
)

PLACE = "x-gpuledger-queue-place"
WAIT = "x-gpuledger-estimated-wait-ms"
SLOW_TOKENS = {"token_ms": 50, "tokens": 100_000}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, measured: Path) -> Generator[Serving]:
    """One embedding at a time, each taking a moment; and a chat that goes on as long as somebody listens."""
    folder = tmp_path_factory.mktemp("requests")
    copy_ledger(measured, folder)
    deployments = [embedding(runtime={"service_ms": 150}, queue_limit=4), chat(runtime=SLOW_TOKENS)]
    with serving(folder, configuration(deployments)) as running_:
        yield running_


def of_request(server: Serving, request_id: str) -> list[str]:
    """Names of the events that a request brought about, leases included."""
    return [type(event.data).__name__ for event in server.events() if _is_of(event, request_id)]


def _is_of(event: Recorded, request_id: str) -> bool:
    lease = f"lease-{request_id}-"
    return getattr(event.data, "request_id", None) == request_id or getattr(event.data, "lease_id", "").startswith(
        lease
    )


class TestAnswers:
    def test_headers_say_what_happened(self, server: Serving) -> None:
        server.embed()
        answer = server.embed()
        headers = answer.headers
        assert headers["x-gpuledger-start"] == "warm"
        assert int(headers["x-gpuledger-queued-ms"]) >= 0
        assert len(headers["x-gpuledger-plan"]) == 64
        assert headers["x-gpuledger-lease"].startswith(f"lease-{headers['x-request-id']}")
        server.until(lambda: "RequestCompleted" in of_request(server, headers["x-request-id"]))
        completed = [e.data for e in server.events() if isinstance(e.data, RequestCompleted)][-1]
        assert completed.status == 200
        assert completed.prompt_tokens == 1
        assert completed.response_bytes == len(answer.content)

    def test_unknown_fields_pass_and_the_model_is_the_capability(self, server: Serving) -> None:
        answer = server.embed(body={"user": "somebody", "x-own": {"a": [1, 2]}})
        assert answer.status_code == 200
        assert answer.json()["model"] == "emb@1"

    def test_nothing_that_was_said_is_in_the_ledger_or_the_log(self, server: Serving) -> None:
        secret = "a-secret-that-nobody-writes-down"
        assert server.embed(secret, headers={"Idempotency-Key": f"key-{secret}"}).status_code == 200
        server.until(lambda: not server.world().requests)
        files = [path for path in server.folder.rglob("*") if path.is_file()]
        assert [path for path in files if secret.encode() in path.read_bytes()] == []
        assert [path for path in files if TOKEN.encode() in path.read_bytes()] == []

    def test_a_body_in_chunks_that_nobody_announced(self, server: Serving) -> None:
        def chunks() -> Iterator[bytes]:
            yield b'{"model": "emb@1", '
            yield b'"input": "in pieces"}'

        with server.http() as http:
            answer = http.post("/v1/embeddings", content=chunks(), headers={"Content-Type": "application/json"})
            assert answer.status_code == 200

    def test_metrics_tell_of_it(self, server: Serving) -> None:
        server.embed()
        with server.http() as http:
            page = http.get("/metrics").text
        assert 'gpuledger_requests_total{capability="emb@1",outcome="completed",priority="interactive"}' in page
        for figure in ("total", "observed", "managed", "external", "leased", "reserve", "schedulable"):
            assert f'gpuledger_accelerator_bytes{{accelerator="host:local",figure="{figure}"}}' in page
        assert "gpuledger_commit_seconds_count" in page


class TestStreams:
    def test_tokens_come_one_by_one_and_a_client_that_goes_ends_its_lease(self, server: Serving) -> None:
        body = {"model": "chat@1", "stream": True, "messages": [{"role": "user", "content": "go on"}]}
        with server.http() as http, http.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            request_id = answer.headers["x-request-id"]
            seen = sse(answer.iter_lines())
            assert [next(seen)["model"] for _ in range(4)] == ["chat@1"] * 4
            assert "LeaseReleased" not in of_request(server, request_id)
        server.until(lambda: "RequestCancelled" in of_request(server, request_id))
        released = [e.data for e in server.events() if isinstance(e.data, LeaseReleased) and _is_of(e, request_id)]
        assert [event.cause for event in released] == [ReleaseCause.CLIENT_GONE]
        # The runtime was told too: its one slot is free for the next, and not after a hundred thousand tokens.
        assert ask_chat(server, max_tokens=2).status_code == 200

    def test_a_client_that_goes_before_an_answer_ends_its_lease(self, server: Serving) -> None:
        with pytest.raises(httpx.ReadTimeout):
            ask_chat(server, httpx.Timeout(PATIENCE_SECONDS, read=1.0))
        server.until(lambda: list(server.world().leases()) == [])
        assert ask_chat(server, max_tokens=2).status_code == 200


def ask_chat(server: Serving, timeout: httpx.Timeout | None = None, **options: Any) -> httpx.Response:
    with server.http() as http:
        body = {"model": "chat@1", "messages": [{"role": "user", "content": "hello"}], **options}
        return http.post("/v1/chat/completions", json=body, timeout=timeout or httpx.Timeout(PATIENCE_SECONDS))


class TestQueue:
    def test_one_at_a_time_in_the_order_of_the_claims(self, server: Serving) -> None:
        server.embed()
        before = server.world().seq
        with ThreadPoolExecutor(4) as pool:
            answers = [future.result() for future in [pool.submit(server.embed) for _ in range(4)]]
        assert [answer.status_code for answer in answers] == [200] * 4
        places = [answer.headers[PLACE] for answer in answers if answer.headers.get(PLACE)]
        assert places
        assert set(places) <= {"1", "2", "3"}
        assert int(next(a.headers[WAIT] for a in answers if a.headers.get(PLACE))) >= 0
        server.until(lambda: not server.world().requests)
        held: set[str] = set()
        for event in server.events()[before:]:
            match event.data:
                case LeaseGranted(lease_id=lease_id):
                    held.add(lease_id)
                case LeaseReleased(lease_id=lease_id):
                    held.discard(lease_id)
                case _:
                    pass  # not about leases
            assert len(held) <= 1

    def test_a_full_queue_refuses_with_retry_after(self, server: Serving) -> None:
        server.embed()
        with ThreadPoolExecutor(12) as pool:
            answers = [future.result() for future in [pool.submit(server.embed) for _ in range(12)]]
        statuses = sorted({answer.status_code for answer in answers})
        assert statuses == [200, 429]
        refused = next(answer for answer in answers if answer.status_code == 429)
        error = refused.json()["error"]
        assert error["code"] == "QUEUE_FULL"
        assert error["plan_fingerprint"] == refused.headers["x-gpuledger-plan"]
        assert error["figures"]["QUEUE_FULL"]["queue_limit"] == 4
        assert int(refused.headers["retry-after"]) > 0
        with server.http() as http:
            page = http.get("/metrics").text
        assert 'gpuledger_capacity_rejections_total{capability="emb@1",reason="QUEUE_FULL"}' in page
        assert "gpuledger_internal_errors_total{" not in page

    def test_a_deadline_that_cannot_be_met(self, server: Serving) -> None:
        server.embed()
        with ThreadPoolExecutor(3) as pool:
            others = [pool.submit(server.embed) for _ in range(2)]
            server.until(lambda: len(server.world().queue()) > 0)
            refused = server.embed(headers={"X-Gpuledger-Deadline-Ms": "1"})
            assert [other.result().status_code for other in others] == [200, 200]
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "DEADLINE_CANNOT_BE_MET"

    def test_a_deadline_is_a_number_of_milliseconds(self, server: Serving) -> None:
        for wrong in ("soon", "-1", "0", "1.5", "99999999999"):
            refused = server.embed(headers={"X-Gpuledger-Deadline-Ms": wrong})
            assert refused.status_code == 400, wrong


class TestKeys:
    def test_the_same_key_is_served_once(self, server: Serving) -> None:
        key = {"Idempotency-Key": "order-1"}
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(server.embed, "same", headers=key) for _ in range(2)]
            answers = sorted((future.result() for future in both), key=lambda answer: answer.status_code)
        assert [answer.status_code for answer in answers] == [200, 409]
        request_id = answers[0].headers["x-request-id"]
        assert answers[1].headers["x-request-id"] == request_id
        server.until(lambda: "RequestCompleted" in of_request(server, request_id))
        again = server.embed("same", headers=key)
        assert (again.status_code, again.json()["error"]["code"]) == (409, "request_completed")
        assert of_request(server, request_id).count("RequestReceived") == 1

    def test_the_same_key_for_something_else(self, server: Serving) -> None:
        key = {"Idempotency-Key": "order-2"}
        assert server.embed("one thing", headers=key).status_code == 200
        other = server.embed("another", headers=key)
        assert (other.status_code, other.json()["error"]["code"]) == (409, "COMMAND_ID_REUSED")
        # Another client's keys are its own.
        assert server.embed("another", headers=key, token=OTHER_TOKEN).status_code == 200


class TestBadInput:
    @pytest.mark.parametrize(
        ("body", "status", "word"),
        [
            (b"{", 400, "JSON"),
            (b'{"model": "emb@1", "input": "\xff"}', 400, "JSON"),
            (b"[]", 400, "object"),
            (b'{"input": "x"}', 400, "model"),
            (b'{"model": 1, "input": "x"}', 400, "model"),
            (b'{"model": "emb@1"}', 400, "input"),
            (b'{"model": "emb@1", "input": []}', 400, "input"),
            (b'{"model": "emb@1", "input": [1.5]}', 400, "input"),
            (b'{"model": "emb@1", "input": "x", "encoding_format": "hex"}', 400, "encoding_format"),
            (b'{"model": "emb@1", "input": "x", "deep": ' + b"[" * 80 + b"]" * 80 + b"}", 400, "nested"),
            (b'{"model": "emb@1", "input": "x", "deep": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400, "JSON"),
            (b'{"model": "nobody@1", "input": "x"}', 404, "nobody@1"),
        ],
    )
    def test_it_is_refused_with_a_reason(self, server: Serving, body: bytes, status: int, word: str) -> None:
        with server.http() as http:
            refused = http.post("/v1/embeddings", content=body, headers={"Content-Type": "application/json"})
        assert refused.status_code == status
        assert word in refused.json()["error"]["message"]

    def test_other_content_types(self, server: Serving) -> None:
        with server.http() as http:
            assert http.post("/v1/embeddings", content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415
            packed = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
            assert http.post("/v1/embeddings", content=b"{}", headers=packed).status_code == 415

    def test_unknown_paths_and_methods_have_the_same_shape(self, server: Serving) -> None:
        with server.http() as http:
            assert http.get("/v1/nothing").json()["error"]["code"] == "not_found"
            assert http.get("/v1/embeddings").json()["error"]["code"] == "method_not_allowed"
            assert http.get("/docs").status_code == 404

    def test_a_head_that_never_ends(self, server: Serving) -> None:
        host, _, port = server.base_url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), PATIENCE_SECONDS) as raw:
            raw.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 200_000)
            assert raw.recv(1000).startswith(b"HTTP/1.1 400")


class TestFaults:
    """A runtime that dies at work: who has seen nothing of an answer is served by the next one."""

    def test_a_request_is_served_again_on_a_new_process(self, tmp_path: Path, measured: Path) -> None:
        copy_ledger(measured, tmp_path)
        # The functional check of a load is the first, so the second request of each process kills it.
        dies = {"service_ms": 150, "faults": {"crash_after_requests": 2}}
        with serving(tmp_path, configuration([embedding(runtime=dies), chat()])) as server:
            first, second = server.embed(), server.embed()
            assert (first.status_code, second.status_code) == (200, 200), second.text
            assert "x-gpuledger-attempt" not in first.headers
            assert (second.headers["x-gpuledger-attempt"], second.headers["x-gpuledger-rank"]) == ("2", "0")
            assert second.headers["x-gpuledger-start"] == "cold"
            names = of_request(server, second.headers["x-request-id"])
            assert (names.count("RequestRetried"), names.count("LeaseGranted")) == (1, 2)
            server.until(lambda: list(server.world().leases()) == [])

    def test_a_stream_ends_with_an_event_and_others_do_not_notice(self, tmp_path: Path, measured: Path) -> None:
        copy_ledger(measured, tmp_path)
        dies = {"token_ms": 20, "tokens": 100, "faults": {"crash_after_tokens": 4, "healthy_requests": 1}}
        with serving(tmp_path, configuration([embedding(), chat(runtime=dies)])) as server:
            server.embed()
            body = {"model": "chat@1", "stream": True, "messages": [{"role": "user", "content": "go on"}]}
            with server.http() as http, http.stream("POST", "/v1/chat/completions", json=body) as answer:
                assert answer.status_code == 200
                lines = list(answer.iter_lines())
            *chunks, last = sse(iter(lines), server.log)
            assert len([one for one in chunks if one["choices"][0]["delta"].get("content")]) == 4
            assert last["error"]["code"] == "RUNTIME_CRASH"
            assert "data: [DONE]" not in lines
            names = of_request(server, answer.headers["x-request-id"])
            server.until(lambda: "RequestFailed" in of_request(server, answer.headers["x-request-id"]))
            assert names.count("LeaseGranted") == 1
            assert server.embed().headers["x-gpuledger-start"] == "warm"
            server.until(lambda: list(server.world().leases()) == [])

    def test_one_that_fails_every_time_is_told_in_the_end(self, tmp_path: Path, measured: Path) -> None:
        copy_ledger(measured, tmp_path)
        broken = {"faults": {"crash_after_tokens": 0, "healthy_requests": 1}}
        with serving(tmp_path, configuration([embedding(), chat(runtime=broken)])) as server:
            refused = ask_chat(server)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "RUNTIME_CRASH")
            assert refused.headers["x-gpuledger-attempt"] == "2"
            assert int(refused.headers["retry-after"]) > 0
            names = of_request(server, refused.headers["x-request-id"])
            assert (names.count("RequestRetried"), names.count("RequestFailed")) == (1, 1)


class TestClasses:
    def test_background_work_never_holds_up_a_waiting_interactive_request(self, tmp_path: Path, measured: Path) -> None:
        copy_ledger(measured, tmp_path)
        brief = {"policy": "keep_warm", "ttl_seconds": 2}
        model = embedding(runtime={"service_ms": 30}, residency=brief)
        with serving(tmp_path, configuration([model, chat()])) as server:
            with ThreadPoolExecutor(4) as indexer, ThreadPoolExecutor(2) as people:
                background = [indexer.submit(server.embed, f"reference {n}", token=OTHER_TOKEN) for n in range(40)]
                interactive = [people.submit(server.embed, f"question {n}") for n in range(10)]
                statuses = [future.result().status_code for future in background + interactive]
            assert statuses == [200] * 50
            server.until(lambda: list(server.world().residents()) == [])  # idle, by its time to live
            assert list(server.world().leases()) == []
        waiting: set[str] = set()
        for event in read_events(server.ledger):
            match event.data:
                case RequestReceived(request_id=request_id, priority=Priority.INTERACTIVE):
                    waiting.add(request_id)
                case LeaseGranted(request_id=request_id, priority=priority):
                    waiting.discard(request_id)
                    assert priority is Priority.INTERACTIVE or not waiting
                case _:
                    pass  # neither asked nor granted


class TestPressure:
    def test_a_load_is_refused_while_others_hold_the_memory_and_admitted_after(
        self, tmp_path: Path, measured: Path
    ) -> None:
        copy_ledger(measured, tmp_path)
        limit = _used_bytes() + 3 * GIB
        config = configuration(
            [embedding(), chat()],
            accelerators={"host": {"memory_limit_bytes": limit}, "nvml": False},
            # Levels that whatever else runs on this machine does not reach.
            policy={
                "recovery_seconds": 0,
                "pressure_enter_bp": {"ELEVATED": 9000, "HIGH": 9200, "CRITICAL": 9500},
                "pressure_exit_bp": {"ELEVATED": 8900, "HIGH": 9100, "CRITICAL": 9400},
            },
        )
        with serving(tmp_path, config) as server:
            with running(
                "python3", "-c", f"b = bytearray(b'x') * {3 * GIB - 100 * MIB}; print(1, flush=True); input()"
            ) as other:
                assert other.stdout is not None
                other.stdout.readline()
                server.until(lambda: server.embed().status_code == 429)
                refused = server.embed()
                assert refused.status_code == 429
                error = refused.json()["error"]
                assert error["code"] == "EXTERNAL_GPU_PRESSURE"
                assert "host:local" in error["message"]
                assert int(refused.headers["retry-after"]) > 0
                assert other.poll() is None
            wait_until(lambda: server.embed().status_code == 200, lambda: server.embed().text)


def _used_bytes() -> int:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text("ascii").splitlines())
    return (int(fields["MemTotal"].split()[0]) - int(fields["MemAvailable"].split()[0])) * 1024


def test_open_requests_are_bounded(tmp_path: Path, measured: Path) -> None:
    copy_ledger(measured, tmp_path)
    config = configuration([embedding(), chat(runtime=SLOW_TOKENS)], max_open_requests=1)
    with serving(tmp_path, config) as server, server.http() as http:
        body = {"model": "chat@1", "stream": True, "messages": [{"role": "user", "content": "go on"}]}
        with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            seen = sse(answer.iter_lines())  # kept: a stream that nobody holds is closed
            next(seen)
            refused = server.embed()
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_open_requests")
            assert json.loads(refused.content)["error"]["type"] == "rate_limit_error"
        server.until(lambda: server.embed().status_code == 200)
