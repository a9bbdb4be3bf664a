"""A real `gpuledger serve` in a child process, with reference runtimes of a few MiB, for tests.

Nothing here depends on speed: who waits, waits for a condition, and long enough for a slow machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from gpuledger.adapters import procfs
from gpuledger.adapters.ledger.sqlite import SqliteLedger
from gpuledger.domain.events import Recorded
from gpuledger.domain.ports import ProcessIdentity
from gpuledger.domain.world import World, fold

PATIENCE_SECONDS: Final = 90.0
TOKEN: Final = "token-of-the-app"
OTHER_TOKEN: Final = "token-of-the-batch"

#: Small figures, so that a server with several models fits beside whatever else runs here.
POLICY: Final[Mapping[str, Any]] = {
    "reserve_floor_bytes": "64MiB",
    "reserve_ratio_bp": 100,
    "runtime_margin_bytes": 0,
    "margin_floor_bytes": "8MiB",
    "margin_ratio_bp": 0,
    "sample_interval_seconds": 1,
    "stop_grace_seconds": 1,
}


def deployment(name: str, capability: str, task: str, **options: Any) -> dict[str, Any]:
    """One deployment with a reference runtime. `runtime`: further keys of it."""
    runtime = {"type": "reference", "task": task, "idle_bytes": "24MiB", "peak_bytes": "32MiB"}
    return {
        "id": name,
        "capability": capability,
        "kind": "host",
        **{key: value for key, value in options.items() if key != "runtime"},
        "runtime": {**runtime, **options.get("runtime", {})},
    }


def embedding(**options: Any) -> dict[str, Any]:
    return deployment("emb", "emb@1", "embedding", **options)


def chat(**options: Any) -> dict[str, Any]:
    return deployment("chat", "chat@1", "chat", **options)


def client(name: str, token: str, **options: Any) -> dict[str, Any]:
    return {"id": name, "token_sha256": hashlib.sha256(token.encode()).hexdigest(), **options}


def configuration(deployments: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
    """A whole configuration; `options` replace what is in it, `policy` adds to it."""
    policy = {**POLICY, **options.pop("policy", {})}
    base = {
        "ledger": "state/ledger.db",
        "listen": "127.0.0.1:0",
        "accelerators": {"host": True, "nvml": False},
        "clients": [client("app", TOKEN), client("batch", OTHER_TOKEN, priority="background")],
        "deployments": list(deployments),
        "drain_seconds": 20,
    }
    return {**base, "policy": policy, **options}


@dataclass
class Serving:
    """A server that runs, or ran."""

    folder: Path
    process: subprocess.Popen[str]
    base_url: str
    output: list[str] = field(default_factory=list[str])

    @property
    def ledger(self) -> Path:
        return self.folder / "state" / "ledger.db"

    def http(self, token: str = TOKEN, **options: Any) -> httpx.Client:
        return httpx.Client(
            base_url=self.base_url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=PATIENCE_SECONDS,
            trust_env=False,
            **options,
        )

    def embed(self, text: str = "hello", **options: Any) -> httpx.Response:
        with self.http(options.pop("token", TOKEN)) as http:
            document = {"model": "emb@1", "input": text, **options.pop("body", {})}
            return http.post("/v1/embeddings", json=document, headers=options.pop("headers", {}))

    def until_ready(self) -> None:
        self.until(self.is_ready)

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log()
        with self.http() as http:
            return http.get("/readyz").status_code == 200

    def until(self, holds: Callable[[], bool]) -> None:
        wait_until(holds, self.log)

    def events(self) -> tuple[Recorded, ...]:
        """All of the ledger, beside the server that writes it."""
        return read_events(self.ledger)

    def world(self) -> World:
        return fold(World(), self.events())

    def event_names(self) -> list[str]:
        return [type(event.data).__name__ for event in self.events()]

    def runtimes(self) -> tuple[ProcessIdentity, ...]:
        """Its runtime processes that live."""
        server = procfs.identity(self.process.pid)
        return () if server is None else tuple(one for one in procfs.tree(server) if one != server)

    def stop(self) -> int:
        """SIGTERM, and how it ended."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_SECONDS)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_SECONDS)

    def log(self) -> str:
        return (self.folder / "log").read_text("utf-8", "replace")[-4000:] + "".join(self.output)


def read_events(ledger: Path) -> tuple[Recorded, ...]:
    with closing(SqliteLedger(ledger, read_only=True)) as reader:
        events: list[Recorded] = []
        while page := reader.read(len(events)):
            events += page
        return tuple(events)


def wait_until(holds: Callable[[], bool], told: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, told()
        time.sleep(0.05)


@contextmanager
def serving(
    folder: Path, config: Mapping[str, Any], *, ready: bool = True, env: Mapping[str, str] | None = None
) -> Generator[Serving]:
    """A server on a configuration, its state in `folder`; killed at the end if it still runs. `env`: on top of ours."""
    (folder / "state").mkdir(parents=True, exist_ok=True)
    path = folder / "gpuledger.yaml"
    path.write_text(json.dumps(config), "utf-8")
    command = (sys.executable, "-m", "gpuledger.tools.cli", "serve", "--config", str(path), "--log", "json")
    with (folder / "log").open("a") as log:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )
    server = Serving(folder, process, "")
    try:
        server.base_url = _address(process, server)
        if ready:
            server.until_ready()
        yield server
    finally:
        _end(process)


def _address(process: subprocess.Popen[str], server: Serving) -> str:
    """Its first line says where it listens."""
    assert process.stdout is not None
    line = process.stdout.readline()
    server.output.append(line)
    assert "starting at http" in line, server.log()
    return line.split()[-1]


def _end(process: subprocess.Popen[str]) -> None:
    try:
        if process.poll() is None:
            process.terminate()
            process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    finally:
        if process.stdout is not None:
            process.stdout.close()


def measured_ledger(folder: Path, deployments: Sequence[Mapping[str, Any]]) -> Path:
    """A ledger with the envelopes of these deployments, made by a server that measured them and left."""
    with serving(folder, configuration(deployments)) as server:
        assert server.stop() == 0, server.log()
    return server.ledger


def copy_ledger(source: Path, folder: Path) -> None:
    """The state that a test starts from."""
    (folder / "state").mkdir(parents=True, exist_ok=True)
    shutil.copy(source, folder / "state" / "ledger.db")


def sse(lines: Iterator[str], told: Callable[[], str] = str) -> Iterator[Any]:
    """The documents of a stream of events, up to its end, which must come in time."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    for line in lines:
        assert time.monotonic() < deadline, told()
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))
