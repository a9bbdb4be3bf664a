"""`gpuledger serve` as a process: how it starts, what it leaves, and what happens when it is killed."""

from __future__ import annotations

import json
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx

from gpuledger.adapters import procfs
from gpuledger.adapters.ledger.sqlite import SqliteLedger
from gpuledger.domain.events import LeaseExpired, RequestCancelled
from gpuledger.tools.snapshots import load_world
from tests.integration.serving import (
    PATIENCE_SECONDS,
    TOKEN,
    Serving,
    chat,
    client,
    configuration,
    copy_ledger,
    embedding,
    read_events,
    serving,
    sse,
    wait_until,
)


def start(folder: Path, measured: Path, *deployments: dict[str, Any], **options: Any) -> Any:
    copy_ledger(measured, folder)
    return serving(folder, configuration(deployments or (embedding(), chat()), **options))


class TestLife:
    def test_it_starts_serves_and_leaves_nothing(self, tmp_path: Path, measured: Path) -> None:
        with start(tmp_path, measured) as server:
            assert server.embed().status_code == 200
            assert len(server.runtimes()) == 1
            processes = server.runtimes()
            assert server.stop() == 0, server.log()
        assert not any(procfs.is_alive(process) for process in processes)
        assert server.event_names()[-1] == "SchedulerStopped"
        world = server.world()
        assert list(world.residents()) == []
        assert list(world.leases()) == []
        assert world.requests == {}

    def test_the_second_start_measures_nothing(self, tmp_path: Path, measured: Path) -> None:
        with start(tmp_path, measured) as server:
            assert server.embed().headers["x-gpuledger-start"] == "cold"
        assert server.event_names().count("EnvelopeMeasured") == 2

    def test_health_is_told_before_it_is_ready(self, tmp_path: Path) -> None:
        slow = embedding(runtime={"load_ms": 3000})
        with serving(tmp_path, configuration([slow]), ready=False) as server, server.http() as http:
            assert http.get("/healthz").json() == {"status": "ok"}
            conditions = http.get("/readyz")
            assert conditions.status_code == 503
            assert not conditions.json()["conditions"]["admitting"]["holds"]
            early = http.post("/v1/embeddings", json={"model": "emb@1", "input": "x"})
            assert early.status_code == 503
            assert early.json()["error"]["code"] == "starting"
            assert int(early.headers["retry-after"]) > 0

    def test_a_signal_while_it_measures_ends_it_in_order(self, tmp_path: Path) -> None:
        slow = embedding(runtime={"load_ms": 60_000})
        with serving(tmp_path, configuration([slow]), ready=False) as server:
            server.until(lambda: len(server.runtimes()) > 0)
            processes = server.runtimes()
            assert server.stop() == 0, server.log()
        assert not any(procfs.is_alive(process) for process in processes)
        assert server.event_names()[-1] == "SchedulerStopped"

    def test_a_running_stream_may_end_before_the_scheduler_does(self, tmp_path: Path, measured: Path) -> None:
        slow = chat(runtime={"token_ms": 150})
        with start(tmp_path, measured, embedding(), slow) as server, server.http() as http:
            body = {"model": "chat@1", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
            with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                lines = answer.iter_lines()
                next(sse(lines))
                server.process.send_signal(signal.SIGTERM)
                rest = list(sse(lines, server.log))
            assert rest[-1]["choices"][0]["finish_reason"] == "stop"
            assert server.process.wait(PATIENCE_SECONDS) == 0

    def test_a_second_signal_hastens_the_end(self, tmp_path: Path, measured: Path) -> None:
        endless = chat(runtime={"token_ms": 50, "tokens": 1_000_000})
        with start(tmp_path, measured, embedding(), endless, drain_seconds=86_400) as server, server.http() as http:
            body = {"model": "chat@1", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
            with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                lines = answer.iter_lines()
                next(sse(lines))
                drains = server.event_names().count("NodeDrainStarted")
                server.process.send_signal(signal.SIGINT)
                server.until(lambda: server.event_names().count("NodeDrainStarted") > drains)
                server.process.send_signal(signal.SIGINT)
                rest = list(sse(lines, server.log))
            assert rest[-1]["error"]["code"] == "draining"
            assert server.process.wait(PATIENCE_SECONDS) == 0
        cancelled = [e.data.cause for e in server.events() if isinstance(e.data, RequestCancelled)]
        assert cancelled == ["shutdown"]

    def test_a_revised_configuration_becomes_events(self, tmp_path: Path, measured: Path) -> None:
        clients = [client("app", TOKEN, priority="production")]
        with start(tmp_path, measured, embedding(queue_limit=3), clients=clients) as server:
            assert server.embed().status_code == 200
        names = server.event_names()
        for name in ("DeploymentRevised", "DeploymentRetired", "ClientRevised", "ClientRevoked"):
            assert name in names


class TestKill:
    def test_after_kill_9_under_load_nothing_is_left_and_requests_work(self, tmp_path: Path, measured: Path) -> None:
        slow = embedding(runtime={"service_ms": 200})
        copy_ledger(measured, tmp_path)
        config = configuration([slow, chat()])
        with serving(tmp_path, config) as server, ThreadPoolExecutor(6) as pool:
            asked = [pool.submit(_embed_or_cut, server) for _ in range(6)]
            server.until(lambda: "RequestQueued" in server.event_names())
            processes = server.runtimes()
            server.kill()
            for one in asked:
                one.result(PATIENCE_SECONDS)
        wait_until(lambda: not any(procfs.is_alive(process) for process in processes))
        with serving(tmp_path, config) as server:
            world = server.world()
            assert list(world.leases()) == []
            assert list(world.residents()) == []
            assert world.requests == {}
            assert server.embed().status_code == 200
            assert not any(isinstance(event.data, LeaseExpired) for event in server.events())
            assert server.stop() == 0, server.log()
        replayed = cli("replay", str(server.ledger), "--json")
        assert replayed.returncode == 0, replayed.stdout + replayed.stderr

    def test_a_runtime_that_is_killed_is_replaced(self, tmp_path: Path, measured: Path) -> None:
        with start(tmp_path, measured) as server:
            assert server.embed().status_code == 200
            (process,) = server.runtimes()
            subprocess.run(["kill", "-9", str(process.pid)], check=True)
            server.until(lambda: "ResidentFailed" in server.event_names())
            assert server.embed().status_code == 200
            assert server.embed().headers["x-gpuledger-start"] == "warm"

    def test_a_runtime_that_dies_at_work_fails_its_request(self, tmp_path: Path, measured: Path) -> None:
        doomed = embedding(runtime={"faults": {"crash_after_requests": 1}})
        with start(tmp_path, measured, doomed, chat()) as server:
            answer = server.embed()
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "RUNTIME_CRASH"
            assert int(answer.headers["retry-after"]) > 0

    def test_a_snapshot_is_saved_and_used(self, tmp_path: Path, measured: Path) -> None:
        with start(tmp_path, measured) as server:
            assert server.embed().status_code == 200
            assert server.stop() == 0
        with closing(SqliteLedger(server.ledger, read_only=True)) as ledger:
            snapshot = ledger.load_snapshot()
            assert snapshot is not None
            assert snapshot.seq == ledger.head()
            assert load_world(ledger, snapshot) == load_world(ledger)


def _embed_or_cut(server: Serving) -> int | None:
    try:
        return server.embed().status_code
    except httpx.TransportError:
        return None


class TestRefusals:
    def test_a_second_server_on_the_same_ledger(self, tmp_path: Path, measured: Path) -> None:
        with start(tmp_path, measured) as server:
            second = cli("serve", "--config", str(tmp_path / "gpuledger.yaml"))
            assert second.returncode == 2
            assert f"process {server.process.pid}" in second.stderr
            profiled = cli("profile", "emb", "--config", str(tmp_path / "gpuledger.yaml"))
            assert profiled.returncode == 2
            assert f"process {server.process.pid}" in profiled.stderr
            assert server.embed().status_code == 200

    def test_a_port_that_is_taken(self, tmp_path: Path) -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            refused = run_config(tmp_path, configuration([embedding()], listen=f"127.0.0.1:{port}"))
        assert refused.returncode == 2
        assert f"127.0.0.1:{port} is in use by another program: `gpuledger doctor --config " in refused.stderr

    def test_a_host_that_is_no_name(self, tmp_path: Path) -> None:
        refused = run_config(tmp_path, configuration([embedding()], listen="a..b:0", allow_remote=True))
        assert refused.returncode == 2
        assert refused.stderr.endswith("config.listen: a..b:0 cannot be used (no name of a host)\n")

    def test_a_bad_configuration(self, tmp_path: Path) -> None:
        refused = run_config(tmp_path, configuration([embedding(priority="urgent")], listne="x"))
        assert refused.returncode == 2
        assert 'config.listne: unknown key, did you mean "listen"?' in refused.stderr
        assert "config.deployments[0].priority" in refused.stderr

    def test_a_model_that_is_not_there(self, tmp_path: Path) -> None:
        absent = {"type": "llama_cpp", "task": "chat", "model": "absent.gguf"}
        refused = run_config(tmp_path, configuration([{**chat(), "runtime": absent}]))
        assert refused.returncode == 2
        assert "config.deployments[0].runtime: MODEL_LOAD_FAILED (artifact_missing)" in refused.stderr

    def test_a_ledger_that_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "state").mkdir()
        (tmp_path / "state" / "ledger.db").write_text("not a ledger, and long enough to be looked at")
        refused = run_config(tmp_path, configuration([embedding()]))
        assert refused.returncode == 2
        assert "ledger" in refused.stderr


class TestProfile:
    def test_it_measures_and_records(self, tmp_path: Path) -> None:
        (tmp_path / "gpuledger.yaml").write_text(json.dumps(configuration([embedding()])))
        done = cli("profile", "emb", "--json", "--config", str(tmp_path / "gpuledger.yaml"))
        assert done.returncode == 0, done.stderr
        (measurement,) = json.loads(done.stdout)["measurements"]
        assert measurement["envelope"]["peak_bytes"] >= 32 * 2**20
        names = [type(event.data).__name__ for event in read_events(tmp_path / "state" / "ledger.db")]
        assert names == ["DeploymentRegistered", "EnvelopeMeasured"]
        with serving(tmp_path, configuration([embedding()])) as server:
            assert server.embed().status_code == 200
        assert server.event_names().count("EnvelopeMeasured") == 1

    def test_a_deployment_that_is_not_there(self, tmp_path: Path) -> None:
        (tmp_path / "gpuledger.yaml").write_text(json.dumps(configuration([embedding()])))
        done = cli("profile", "other", "--config", str(tmp_path / "gpuledger.yaml"))
        assert done.returncode == 2
        assert "has no deployment other" in done.stderr


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "gpuledger.tools.cli", *arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)


def run_config(folder: Path, config: Mapping[str, Any]) -> subprocess.CompletedProcess[str]:
    """`serve` on a configuration that it must refuse: without a traceback."""
    path = folder / "gpuledger.yaml"
    path.write_text(json.dumps(config))
    done = cli("serve", "--config", str(path))
    assert "Traceback" not in done.stderr
    return done


class TestFullDisk:
    def test_nothing_is_admitted_while_it_is_full_and_everything_after(self, tmp_path: Path, measured: Path) -> None:
        """A limit on the size of files is the full disk that needs no privilege, and that can be emptied."""
        with start(tmp_path, measured) as server:
            assert server.embed().status_code == 200
            unlimited = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (4096, unlimited[1]))
            server.until(lambda: server.embed().status_code == 503)
            refused = server.embed()
            assert refused.json()["error"]["code"] == "ledger_unavailable"
            assert int(refused.headers["retry-after"]) > 0
            with server.http() as http:
                conditions = http.get("/readyz")
                assert conditions.status_code == 503
                assert not conditions.json()["conditions"]["ledger"]["holds"]
                assert http.get("/healthz").status_code == 200
            resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, unlimited)
            server.until_ready()
            assert server.embed().status_code == 200
            assert server.stop() == 0, server.log()
        assert list(server.world().leases()) == []
