"""The bench of a whole request: through `gpuledger serve` to a runtime, against the same bytes sent to a runtime.

Both are processes of their own on the loopback, with the same reference runtime behind: it answers at once, so what is
measured is what stands in front of it. The client is the least that can be one; the time of a real one would hide both.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Coroutine, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeVar

import orjson

from gpuledger.adapters.procfs import read_process_file
from gpuledger.adapters.runtimes.config import ReferenceConfig
from gpuledger.adapters.runtimes.manager import RuntimeManager
from gpuledger.adapters.runtimes.process import LOOPBACK, PortReservation
from gpuledger.domain.units import MIB

from .bench import Case, Round
from .bench_append import FOLDER_PREFIX

_T = TypeVar("_T")

CAPABILITY: Final = "bench.embedding@1"
CONCURRENCY: Final = 8
READY_SECONDS: Final = 60
STOP_SECONDS: Final = 30
#: Requests of one connection in one round.
ALONE_REQUESTS: Final = 10
TOGETHER_REQUESTS: Final = 4
#: The runtime is asked so many times as often: both sides of a round then take about as long.
FLOOR_TIMES: Final = 8
_BODY: Final = orjson.dumps({"model": CAPABILITY, "input": "what was lent, and to whom, is in the ledger " * 4})
_POLL_SECONDS: Final = 0.05
_FLOOR: Final = "sent to the runtime"


@contextmanager
def gateway_bench() -> Generator[Sequence[Case]]:
    """A server and, beside it, a runtime that is asked directly."""
    with TemporaryDirectory(prefix=FOLDER_PREFIX) as name, asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            sides = _run(runner, _open(stack, Path(name)))
            yield (
                _case("1 at a time", runner, sides, 1, ALONE_REQUESTS),
                _case(f"{CONCURRENCY} at a time", runner, sides, CONCURRENCY, TOGETHER_REQUESTS),
            )
        finally:
            _run(runner, stack.aclose())


def _case(name: str, runner: asyncio.Runner, sides: _Sides, lanes: int, requests: int) -> Case:
    tally = _Tally()

    def one(number: int) -> Round:
        return _run(runner, sides.round(number, lanes, requests, tally))

    return Case(name, "request", _FLOOR, "wall", one, tally.details)


def _run(runner: asyncio.Runner, work: Coroutine[Any, Any, _T]) -> _T:
    """As `runner.run`; what a signal breaks off does not go on while the rest is being cleaned up."""
    loop = runner.get_loop()
    task = loop.create_task(work)
    try:
        return loop.run_until_complete(task)
    finally:
        task.cancel()
        loop.run_until_complete(asyncio.wait((task,)))


@dataclass(slots=True)
class _Tally:
    """Of one case: how long each request took, and what the server wrote for all of them."""

    ours: list[float] = field(default_factory=list[float])
    floor: list[float] = field(default_factory=list[float])
    cpu_seconds: float = 0.0
    floor_cpu_seconds: float = 0.0
    commits: int = 0
    events: int = 0

    def details(self) -> Mapping[str, float]:
        """`cpu_ms` is what one request takes of the scheduler's processor, its runtime's left out."""
        requests = len(self.ours)
        return {
            **_percentiles("", self.ours),
            **_percentiles("floor_", self.floor),
            "cpu_ms": round(1000 * self.cpu_seconds / requests, 3),
            "floor_cpu_ms": round(1000 * self.floor_cpu_seconds / len(self.floor), 3),
            "commits_per_request": round(self.commits / requests, 3),
            "events_per_request": round(self.events / requests, 3),
        }


def _percentiles(prefix: str, seconds: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {f"{prefix}p{cut}_ms": round(cuts[cut - 1] * 1000, 3) for cut in (50, 99)}


# ---- two servers ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Sides:
    """Connections to the gateway and to a runtime of its own."""

    ours: Sequence[_Lane]
    floor: Sequence[_Lane]
    pid: int
    floor_pid: int

    async def round(self, number: int, lanes: int, requests: int, tally: _Tally) -> Round:
        """So many requests on each of so many connections, to both."""
        if number == 0:
            tally = _Tally()  # loads the model: not counted
        floor_seconds = await self._floor(lanes, requests, tally) if number % 2 else 0.0
        before, cpu_before = await self._written(), cpu_seconds(self.pid)
        ours_seconds = await _drive(self.ours[:lanes], requests, tally.ours)
        tally.cpu_seconds += cpu_seconds(self.pid) - cpu_before
        after = await self._written()
        tally.commits += after[0] - before[0]
        tally.events += after[1] - before[1]
        return Round(lanes * requests, ours_seconds, floor_seconds or await self._floor(lanes, requests, tally))

    async def _floor(self, lanes: int, requests: int, tally: _Tally) -> float:
        cpu_before = cpu_seconds(self.floor_pid)
        seconds = await _drive(self.floor[:lanes], FLOOR_TIMES * requests, tally.floor)
        tally.floor_cpu_seconds += cpu_seconds(self.floor_pid) - cpu_before
        return seconds / FLOOR_TIMES

    async def _written(self) -> tuple[int, int]:
        """Commits and events of the server so far."""
        page = (await self.ours[0].ask("GET", "/metrics")).decode()
        return _metric(page, "gpuledger_commit_seconds_count"), _metric(page, "gpuledger_events_total")


def cpu_seconds(pid: int) -> float:
    """What a process has had of the processors, to a hundredth of a second."""
    stat = read_process_file(pid, "stat")
    if stat is None:
        raise RuntimeError(f"process {pid} has gone")
    fields = stat.rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _metric(page: str, name: str) -> int:
    found = re.search(rf"^{name} ([0-9.e+]+)$", page, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"the server does not tell {name}")
    return int(float(found[1]))


async def _drive(lanes: Sequence[_Lane], requests: int, times: list[float]) -> float:
    started = time.perf_counter()
    await asyncio.gather(*(lane.embed(requests, times) for lane in lanes))
    return time.perf_counter() - started


async def _open(stack: AsyncExitStack, folder: Path) -> _Sides:
    """Start both, and connect. What was started is on the stack, whatever happens."""
    runtime = ReferenceConfig(
        type="reference",
        task="embedding",  # type: ignore[arg-type]
        parallel=CONCURRENCY,
        idle_bytes=32 * MIB,
        peak_bytes=40 * MIB,
    )
    direct = await stack.enter_async_context(_direct(runtime, folder / "direct"))
    serving = await stack.enter_async_context(_serving(runtime, secrets.token_urlsafe(32), folder / "serve"))
    ours, floor = [
        [await stack.enter_async_context(_lane(server.port, server.key)) for _ in range(CONCURRENCY)]
        for server in (serving, direct)
    ]
    return _Sides(ours, floor, serving.pid, direct.pid)


@dataclass(frozen=True, slots=True)
class _Server:
    """A process that answers on the loopback."""

    pid: int
    port: int
    key: str


@asynccontextmanager
async def _direct(runtime: ReferenceConfig, folder: Path) -> AsyncGenerator[_Server]:
    """A runtime that nobody schedules."""
    manager = RuntimeManager({"bench": runtime}, folder)
    try:
        process = await manager.spawn("bench#1", "bench", "host:bench")
        await manager.load("bench#1")
        endpoint = manager.endpoint("bench#1")
        yield _Server(process.pid, int(endpoint.base_url.rpartition(":")[2]), endpoint.api_key)
    finally:
        await manager.close()


@asynccontextmanager
async def _serving(runtime: ReferenceConfig, token: str, folder: Path) -> AsyncGenerator[_Server]:
    """`gpuledger serve` as an operator runs it, once it is ready."""
    folder.mkdir()
    reserved = PortReservation()
    config = folder / "gpuledger.yaml"
    config.write_bytes(orjson.dumps(_configuration(runtime, token, reserved.port)))
    command = (sys.executable, "-m", "gpuledger.tools.cli", "serve", "--config", str(config), "--log", "json")
    with (folder / "log").open("wb") as log:
        process = await asyncio.to_thread(subprocess.Popen, command, stdout=log, stderr=subprocess.STDOUT)
    try:
        await _until_ready(process, reserved.port, folder / "log")
        yield _Server(process.pid, reserved.port, token)
    finally:
        await asyncio.to_thread(_end, process)
        reserved.close()


def _configuration(runtime: ReferenceConfig, token: str, port: int) -> dict[str, Any]:
    return {
        "ledger": "ledger.db",
        "listen": f"{LOOPBACK}:{port}",
        "accelerators": {"host": True, "nvml": False},
        "clients": [{"id": "bench", "token_sha256": sha256(token.encode()).hexdigest()}],
        "deployments": [
            {
                "id": "bench",
                "capability": CAPABILITY,
                "kind": "host",
                "concurrency": CONCURRENCY,
                "queue_limit": CONCURRENCY,
                "runtime": runtime.model_dump(mode="json", exclude_defaults=True),
            }
        ],
    }


async def _until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + READY_SECONDS
    while process.poll() is None and time.monotonic() < end:
        with suppress(OSError, EOFError, UnexpectedAnswer):
            async with _lane(port, "") as lane:
                await lane.ask("GET", "/readyz")
            return
        await asyncio.sleep(_POLL_SECONDS)
    said = log.read_text("utf-8", "replace").strip().splitlines()[-1:]
    how = "was not ready in time" if process.poll() is None else f"ended with status {process.returncode}"
    raise RuntimeError(": ".join([f"gpuledger serve {how}", *said]))


def _end(process: subprocess.Popen[bytes]) -> None:
    """As an operator would; it stops its own runtime. Killed when it does not."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# ---- a client ---------------------------------------------------------------------------------------------------


class UnexpectedAnswer(Exception):
    """A figure of refusals would say nothing."""


class _Lane:
    """One connection that is kept, and one request at a time on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str) -> None:
        self._reader = reader
        self._writer = writer
        self._key = key

    async def embed(self, requests: int, times: list[float]) -> None:
        """So many requests, one after the other."""
        for _ in range(requests):
            started = time.perf_counter()
            await self.ask("POST", "/v1/embeddings", _BODY)
            times.append(time.perf_counter() - started)

    async def ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The body of the answer. Raises UnexpectedAnswer, OSError, EOFError."""
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {LOOPBACK}\r\nAuthorization: Bearer {self._key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        status = answer.split(b" ", 2)[1]
        length = re.search(rb"\r\ncontent-length: *([0-9]+)\r\n", answer, re.IGNORECASE)
        if length is None:
            raise UnexpectedAnswer(f"{method} {path}: an answer without a length")
        content = await self._reader.readexactly(int(length[1]))
        if status != b"200":
            raise UnexpectedAnswer(f"{method} {path}: {status.decode()} {content[:200].decode('utf-8', 'replace')}")
        return content


@asynccontextmanager
async def _lane(port: int, key: str) -> AsyncGenerator[_Lane]:
    reader, writer = await asyncio.open_connection(LOOPBACK, port)
    try:
        yield _Lane(reader, writer, key)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
