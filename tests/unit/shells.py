"""A scheduler in asyncio with everything real but the world: memory, processes and their answers are made up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from gpuledger.adapters.clock import LedgerClock
from gpuledger.adapters.http.ports import Question
from gpuledger.adapters.ledger.memory import MemoryLedger
from gpuledger.domain.documents import Json
from gpuledger.domain.events import EnvelopeMeasured, Recorded
from gpuledger.domain.failures import Failure
from gpuledger.domain.messages import EnvelopeTaken
from gpuledger.domain.ports import (
    AcceleratorReading,
    Batch,
    Endpoint,
    LedgerUnavailable,
    ManagedProcess,
    ManagedReading,
    NodeReading,
    ProcessIdentity,
    RuntimeFacts,
    RuntimeFault,
    RuntimeFigures,
    TelemetryFault,
)
from gpuledger.domain.state import Envelope, Kind
from gpuledger.domain.units import GIB, MIB
from gpuledger.tools.bootstrap import Parts
from gpuledger.tools.config import Config, config_of
from gpuledger.tools.running import Haste, Running
from gpuledger.tools.snapshots import load_world

_T = TypeVar("_T")

HOST = "host:local"
MODEL_BYTES = 64 * MIB
ASLEEP_BYTES = MODEL_BYTES // 8
PATIENCE_SECONDS = 30.0
#: Of requests: an id is used once in the life of a ledger.
NUMBERS = count(1)


class WatchedLedger(MemoryLedger):
    """Counts appends, fails while `broken` says why, and lets others write just before one of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.appends = 0
        self.broken: str | None = None
        #: Called with each batch before it is appended.
        self.before: Callable[[Batch], None] = lambda _: None
        #: The next append is durable, and yet taken for failed.
        self.lose_next_answer = False

    def append(self, batch: Batch, at: int) -> tuple[Recorded, ...]:
        if self.broken is not None:
            raise LedgerUnavailable(self.broken)
        self.before(batch)
        recorded = super().append(batch, at)
        self.appends += 1
        if self.lose_next_answer:
            self.lose_next_answer = False
            raise LedgerUnavailable("reading or writing failed")
        return recorded


class Machine:
    """The memory of a host, and the processes in it: its Runtimes."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.spawned: list[str] = []
        self.stopped: list[str] = []
        self.orphans: list[ProcessIdentity] = []
        self.exits: dict[str, asyncio.Future[RuntimeFault]] = {}
        self.external_bytes = 1 * GIB
        self.load_fault: RuntimeFault | None = None
        self.samples = 0
        #: Nothing of it can be read.
        self.blind = False
        #: Starts wait for the one, loads for the other.
        self.may_spawn = asyncio.Event()
        self.may_load = asyncio.Event()
        self.may_spawn.set()
        self.may_load.set()

    def facts(self, deployment_id: str) -> RuntimeFacts:
        return RuntimeFacts("reference", "1", f"hash-{deployment_id}", None, 0)

    async def spawn(self, resident_id: str, deployment_id: str, accelerator_id: str) -> ProcessIdentity:
        await self.may_spawn.wait()
        if resident_id not in self.exits:
            self.spawned.append(resident_id)
            self.exits[resident_id] = asyncio.get_running_loop().create_future()
            self.held[resident_id] = 0
        return ProcessIdentity(1000 + len(self.spawned), 1, "boot")

    async def load(self, resident_id: str) -> None:
        await self.may_load.wait()
        if self.load_fault is not None:
            raise self.load_fault
        self.held[resident_id] = MODEL_BYTES

    def endpoint(self, resident_id: str) -> Endpoint:
        if resident_id not in self.exits:
            raise KeyError(resident_id)
        return Endpoint("http://127.0.0.1:1", "key")

    async def figures(self, resident_id: str) -> RuntimeFigures | None:
        return RuntimeFigures(0, 0)

    async def sleep(self, resident_id: str) -> None:
        self.held[resident_id] = ASLEEP_BYTES

    async def wake(self, resident_id: str) -> None:
        await self.load(resident_id)

    async def exited(self, resident_id: str) -> RuntimeFault:
        return await asyncio.shield(self.exits[resident_id])

    def crash(self, resident_id: str) -> None:
        self.held.pop(resident_id)
        self.exits[resident_id].set_result(RuntimeFault(Failure.RUNTIME_CRASH, "signal_9", b"evidence"))

    async def stop(self, resident_id: str, grace_seconds: int) -> None:
        await asyncio.sleep(0)
        self.held.pop(resident_id, None)
        if resident_id in self.exits:
            self.stopped.append(resident_id)
            exit_ = self.exits.pop(resident_id)
            if not exit_.done():
                exit_.set_result(RuntimeFault(Failure.RUNTIME_CRASH, "stopped"))

    async def end_orphan(self, process: ProcessIdentity, grace_seconds: int) -> None:
        self.orphans.append(process)

    async def close(self) -> None:
        for resident_id in list(self.exits):
            await self.stop(resident_id, 0)


class Sensors:
    """Its Telemetry."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def sample(self, managed: Sequence[ManagedProcess]) -> NodeReading:
        machine = self._machine
        machine.samples += 1
        if machine.blind:
            return NodeReading((), (TelemetryFault(HOST, "HOST_UNREADABLE", None),), None, 0)
        held = dict(machine.held)
        reading = AcceleratorReading(
            accelerator_id=HOST,
            index=0,
            kind=Kind.HOST,
            gpu_class="host",
            device_name="a host",
            driver_version="1",
            total_bytes=8 * GIB,
            used_bytes=machine.external_bytes + sum(held.values()),
            managed=tuple(
                ManagedReading(one.resident_id, one.resident_id in held, held.get(one.resident_id, 0))
                for one in managed
            ),
            foreign_processes=0,
        )
        return NodeReading((reading,), (), 8 * GIB, 0)

    def close(self) -> None:
        """Nothing is held."""


def document(*deployments: dict[str, Json], **options: Any) -> dict[str, Json]:
    listed: list[Json] = [*(deployments or (embedding(),))]
    return {
        "ledger": "ledger.db",
        "clients": [
            {"id": "app", "token_sha256": "ab" * 32},
            {"id": "batch", "token_sha256": "cd" * 32, "priority": "background"},
        ],
        "deployments": listed,
        "policy": {"sample_interval_seconds": 1, "lease_ttl_seconds": 3, **options.pop("policy", {})},
        **options,
    }


def embedding(name: str = "emb", **options: Json) -> dict[str, Json]:
    runtime: dict[str, Json] = {"type": "reference", "task": "embedding"}
    return {"id": name, "capability": f"{name}@1", "kind": "host", "runtime": runtime, **options}


@dataclass
class Shell:
    """A scheduler that runs on a machine."""

    running: Running
    ledger: WatchedLedger
    machine: Machine

    def question(
        self,
        request_id: str | None = None,
        *,
        client: str = "app",
        capability: str = "emb@1",
        deadline_ms: int | None = None,
        mac: str | None = None,
    ) -> Question:
        name = request_id or f"req-{next(NUMBERS)}"
        return Question(name, client, capability, "embeddings", 10, deadline_ms, mac)

    def names(self) -> list[str]:
        return [type(event.data).__name__ for event in self.ledger.read(0, 100_000)]

    def of(self, kind: type[_T]) -> list[_T]:
        """What was recorded of one type."""
        return [data for _, data in self.placed(kind)]

    def placed(self, kind: type[_T]) -> list[tuple[int, _T]]:
        """The same, each with its `seq`."""
        return [(event.seq, event.data) for event in self.ledger.read(0, 100_000) if isinstance(event.data, kind)]

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not holds():
                await asyncio.sleep(0.005)

    async def stop(self, drain_seconds: int = 5) -> bool:
        return await self.running.stop(drain_seconds, Haste(asyncio.Event(), asyncio.Event()))


def config_for(value: dict[str, Json]) -> Config:
    return config_of(value, Path("/nowhere/gpuledger.yaml"))


@asynccontextmanager
async def shell(
    *deployments: dict[str, Json],
    ledger: WatchedLedger | None = None,
    machine: Machine | None = None,
    measured: bool = True,
    **options: Any,
) -> AsyncGenerator[Shell]:
    """A scheduler that has started, with the envelope of each deployment, and an open door."""
    config = config_for(document(*deployments, **options))
    ledger = ledger or WatchedLedger()
    machine = machine or Machine()
    world = load_world(ledger, ledger.load_snapshot())
    parts = Parts(ledger, LedgerClock(world.at), Sensors(machine), machine, world, frozenset({HOST}))
    running = Running(config, parts)
    try:
        await running.start()
        for entry in config.document.deployments:
            if measured and running.world.deployments[entry.id].measured_on("host") is None:
                await running.engine.ask(EnvelopeTaken(envelope(entry.id, entry.concurrency, running.engine.now())))
        running.desk.gate.cause = None
        yield Shell(running, ledger, machine)
    finally:
        await running.close()


def envelope(deployment_id: str, concurrency: int, now: int) -> EnvelopeMeasured:
    measured = Envelope(f"hash-{deployment_id}", "host", MODEL_BYTES, MODEL_BYTES, now, 512, 512, concurrency)
    return EnvelopeMeasured(
        deployment_id=deployment_id,
        accelerator_id=HOST,
        envelope=measured,
        load_ms=10,
        unload_ms=10,
        load_peak_bytes=MODEL_BYTES,
        busy_peak_bytes=MODEL_BYTES,
        device_idle_bytes=MODEL_BYTES,
        device_peak_bytes=MODEL_BYTES,
        residual_bytes=0,
        release_ms=0,
        artifact_sha256=None,
        runtime_version="1",
        device_name="a host",
        driver_version="1",
    )
