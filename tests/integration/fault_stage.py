"""A real server on a card of the stand-in that is brought to a step of a model's life, broken there, and looked at.

    stage.has("chat")       loads it and lets it be idle; `fault_steps.py` brings it further
    stage.rest()            unloads everything, and checks that nothing is left: by the ledger, the card, and /proc
    stage.leave()           the same of the server, in order, by `status` and by a replay, too

The models: `chat` and `emb` fill the card, each alone; `doze` too, and sleeps to make room; `by` is small, is asked all
the time, and must not notice anything.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx

from gpuledger.adapters import procfs
from gpuledger.adapters.ledger.sqlite import SqliteLedger
from gpuledger.adapters.runtimes.manager import MARK, SCHEDULER_MARK
from gpuledger.domain.aggregates.accelerator import ResidentRecord
from gpuledger.domain.policy import Pressure
from gpuledger.domain.ports import ProcessIdentity
from gpuledger.domain.state import ResidentState
from gpuledger.domain.units import GIB, MIB
from gpuledger.domain.world import World, fold
from tests.integration.fault_callers import Caller
from tests.integration.gpu_stand_in import GpuStandIn, gpu_configuration, gpu_stand_in
from tests.integration.serving import PATIENCE_SECONDS, Serving, deployment
from tests.integration.test_operator import make_token
from tests.shim import ShimCard

CARD: Final = "GPU-0a6ffa9b-1d3a-4b0e-9d55-00000000000a"
#: 96 MiB of a process are 12 GiB of the card: two such models and another at work do not fit.
SCALE: Final = 128
TOTAL_BYTES: Final = 24 * GIB
#: How long a model is at a step, if nothing breaks; and how long a start, and a silence, may last.
STEP_MS: Final = 700
LOAD_TIMEOUT_SECONDS: Final = 6
SILENCE_SECONDS: Final = 5
ASLEEP_BYTES: Final = SCALE * 24 * MIB
#: Kept for longer than any test takes: what leaves is told to.
KEPT: Final = {"policy": "keep_warm", "ttl_seconds": 3600}
POLICY: Final = {
    "min_residency_loads": 0,
    "load_backoff_seconds": 1,
    "reclaim_timeout_seconds": 4,
    "lease_ttl_seconds": 6,
    "recovery_seconds": 1,
}

_T = TypeVar("_T")


def models(folder: Path, step_ms: int = STEP_MS, **faults: Any) -> list[dict[str, Any]]:
    """`faults`, by model, act while the file of its name is in the folder. The victim of GRANTED is slow to go."""
    faults = {"chat": {"ignore_term": True}, **faults}
    heavy = {
        "idle_bytes": "96MiB",
        "peak_bytes": "104MiB",
        "load_ms": step_ms,
        "load_timeout_seconds": LOAD_TIMEOUT_SECONDS,
    }
    naps = {"asleep_bytes": "24MiB", "sleep_ms": step_ms, "wake_ms": step_ms}
    made: list[dict[str, Any]] = []
    for name, task, runtime in (
        ("chat", "chat", {**heavy, "token_ms": 40, "tokens": 100}),
        ("emb", "embedding", {**heavy, "service_ms": 2 * step_ms}),
        ("doze", "embedding", {**heavy, "sleep": naps}),
        ("by", "embedding", {}),
    ):
        flaws = {**faults.get(name, {}), "while_file": str(folder / f"{name}-is-broken")}
        sleep = {"asleep_bytes": ASLEEP_BYTES, "sleep_ms": 0, "wake_ms": 0} if name == "doze" else None
        model = deployment(name, f"{name}@1", task, runtime={**runtime, "faults": flaws})
        made.append({**model, "kind": "gpu", "residency": KEPT, **({} if sleep is None else {"sleep": sleep})})
    return made


@contextmanager
def staged(folder: Path, state: Path | None = None, step_ms: int = STEP_MS, **faults: Any) -> Generator[Stage]:
    """A stage with a server that runs, on a copy of what another one left, or else on nothing."""
    folder.mkdir(exist_ok=True)
    if state is not None:
        shutil.copytree(state, folder / "state")
    deployments = models(folder, step_ms, **faults)
    config = gpu_configuration(deployments, policy=POLICY, upstream_timeout_seconds=SILENCE_SECONDS)
    with gpu_stand_in(folder, [ShimCard(CARD, total_bytes=TOTAL_BYTES)], scale=SCALE) as gpus:
        stage = Stage(folder, gpus, config)
        try:
            stage.start()
            token = folder / "state" / "token-of-olga"
            if state is None:
                token.write_text(make_token(folder, "create", "operator", "olga", "--scope", "operate"), "utf-8")
            stage.token = token.read_text("utf-8")
            yield stage
        finally:
            stage.close()


@dataclass
class Stage:
    """`servers`: all that ran here, the newest last."""

    folder: Path
    gpus: GpuStandIn
    config: dict[str, Any]
    token: str = ""
    servers: list[Serving] = field(default_factory=list[Serving])
    world: World = field(default_factory=World)
    noticed: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self._life = ExitStack()
        self._marks: set[str] = set()
        self._ledger: SqliteLedger | None = None

    # ---- servers -------------------------------------------------------------------------------------------------

    @property
    def server(self) -> Serving:
        return self.servers[-1]

    def start(self) -> None:
        """A server, on what the one before it left."""
        self.servers.append(self._life.enter_context(self.gpus.serving(self.folder, self.config)))
        known = procfs.identity(self.server.process.pid)
        assert known is not None
        self._marks.add(f"{known.pid}:{known.start_ticks}:{known.boot_id}")
        if self._ledger is None:
            self._ledger = self._life.enter_context(closing(SqliteLedger(self.server.ledger, read_only=True)))

    def close(self) -> None:
        self._life.close()

    @contextmanager
    def asked_all_the_time(self, model: str) -> Generator[None]:
        """A client that asks for it until the end of the block; what went wrong is in `noticed`."""
        over = threading.Event()

        def ask() -> None:
            while not over.is_set():
                told = self.embed(model).told()
                if told is None or told.status != 200:
                    self.noticed.append(f"{model}: {told}")
                over.wait(0.2)

        thread = threading.Thread(target=ask, name=f"asks for {model}")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(PATIENCE_SECONDS)
        assert not self.noticed, self.noticed[:3]

    # ---- what is seen --------------------------------------------------------------------------------------------

    def look(self) -> World:
        """The newest state by the ledger."""
        assert self._ledger is not None
        while page := self._ledger.read(self.world.seq):
            self.world = fold(self.world, page)
        return self.world

    def until(self, holds: Callable[[], _T]) -> _T:
        """What it says, once it is true of the newest state."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (found := self._holds(holds)):
            assert time.monotonic() < deadline, self.told()
            time.sleep(0.01)
        return found

    def _holds(self, holds: Callable[[], _T]) -> _T:
        self.look()
        return holds()

    def told(self) -> str:
        residents = [(r.resident.resident_id, r.resident.state, r.eviction) for _, r in self.world.residents()]
        return f"{residents}, requests {sorted(self.world.requests)}\n{self.server.log()}"

    def of(self, name: str) -> ResidentRecord | None:
        """The resident of a model, by the state looked at last."""
        return next((r for _, r in self.world.residents() if r.resident.deployment_id == name), None)

    def process_of(self, name: str) -> ProcessIdentity:
        record = self.of(name)
        assert record is not None, self.told()
        assert record.process is not None, self.told()
        return record.process

    def runtimes(self) -> dict[int, str]:
        """Every process on this machine that a server of ours started as a runtime: its pid, and whose it is."""
        found: dict[int, str] = {}
        for folder in Path("/proc").iterdir():
            content = procfs.read_process_file(int(folder.name), "environ") if folder.name.isdecimal() else None
            pairs = (field.partition("=") for field in (content or b"").decode("utf-8", "replace").split("\0"))
            variables = {key: value for key, _, value in pairs}
            if MARK in variables and variables.get(SCHEDULER_MARK) in self._marks:
                found[int(folder.name)] = variables[MARK]
        return found

    # ---- models --------------------------------------------------------------------------------------------------

    def embed(self, name: str) -> Caller:
        return Caller(self.server.base_url, f"{name}@1")

    def chat(self, **options: Any) -> Caller:
        return Caller(self.server.base_url, "chat@1", chats=True, **options)

    def has(self, name: str) -> None:
        """Load it, if it is not there, let it be idle, and let the device show what it holds."""
        told = (self.chat(max_tokens=1) if name == "chat" else self.embed(name)).told()
        assert told is not None
        assert (told.status, told.code) == (200, None), told
        self.until(lambda: self.is_idle(name))

    def is_at(self, name: str, state: ResidentState) -> bool:
        return (record := self.of(name)) is not None and record.resident.state is state and record.eviction is None

    def is_idle(self, name: str) -> bool:
        leased = any(lease.lease.deployment_id == name for _, lease in self.world.leases())
        holds = SCALE * (24 if name == "by" else 96) * MIB
        shown = (record := self.of(name)) is not None and record.resident.attributed_bytes >= holds
        return shown and not leased and self.is_at(name, ResidentState.READY)

    def break_model(self, name: str) -> None:
        (self.folder / f"{name}-is-broken").touch()

    def mend_models(self) -> None:
        for marker in self.folder.glob("*-is-broken"):
            marker.unlink()

    # ---- afterwards ----------------------------------------------------------------------------------------------

    def rest(self, *, but: frozenset[str] = frozenset()) -> None:
        """Unload all models but those, and see that nothing else is left."""
        self.mend_models()

        def is_idle() -> bool:
            return not [one for one in self.world.requests.values() if one.question.capability not in kept]

        kept = {f"{name}@1" for name in but}
        self.until(is_idle)
        for name in sorted({"chat", "emb", "doze", "by"} - but):
            self.until(lambda name=name: self.is_away(name))  # type: ignore[misc]
        self.until(lambda: set(self.runtimes().values()) == self.resident_ids())
        self.until(self.is_clear)
        assert self.gpus.most_bytes(CARD) <= TOTAL_BYTES, "more was asked of the card than it has"

    def is_clear(self) -> bool:
        """Whether the newest sample shows nobody else's memory, and no pressure any more."""
        sample = self.world.accelerators[CARD].sample
        managed_bytes = sum(record.resident.attributed_bytes for _, record in self.world.residents())
        return sample is not None and sample.used_bytes == managed_bytes and sample.pressure is Pressure.NORMAL

    def is_away(self, name: str) -> bool:
        """Tells it to go, as often as it takes: what is not idle yet is not unloaded."""
        record = self.of(name)
        if record is None:
            return True
        if record.eviction is None:
            self.unload(name)
        return False

    def unload(self, name: str) -> None:
        url = f"{self.server.base_url}/operator/v1/unload"
        done = httpx.post(url, json={"deployment": name}, headers={"Authorization": f"Bearer {self.token}"})
        assert done.status_code == 200, done.text

    def resident_ids(self) -> set[str]:
        return {record.resident.resident_id for _, record in self.world.residents()}

    def leave(self) -> None:
        """In order; and then nothing is left, by the card, by /proc, by `status` and by a replay of the ledger."""
        assert self.server.stop() == 0, self.server.log()
        self.until(lambda: not self.runtimes())
        self.until(lambda: self.gpus.used_bytes(CARD) == 0)
        world = self.look()
        assert (list(world.residents()), list(world.leases()), dict(world.requests)) == ([], [], {})
        status = command("status", str(self.server.ledger), "--json")
        assert '"leases": []' in status or '"leases":[]' in status, status
        command("replay", str(self.server.ledger), "--json")


def command(*words: str) -> str:
    """What a command says that succeeds."""
    done = subprocess.run(
        [sys.executable, "-m", "gpuledger.tools.cli", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout
