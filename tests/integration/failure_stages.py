"""The servers on which failures are provoked: each a real `gpuledger serve`, shared where that hides nothing.

    host      models of this machine's memory, each with a fault of its own
    lease     one model, leases of four seconds, and one plan more after a lost race
    crowded   a card that a model which is never evicted is on
    faulty    a card that fails, and whose memory does not always come back

A fault acts only while its file exists, so that what is measured at the start is a model that is well.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from gpuledger.adapters.procfs import is_alive
from gpuledger.domain.ports import ProcessIdentity
from gpuledger.domain.state import ResidentState
from gpuledger.domain.units import GIB, MIB
from gpuledger.domain.world import World
from tests.integration.gpu_stand_in import GpuStandIn, gpu_configuration, gpu_stand_in
from tests.integration.serving import Serving, configuration, deployment, serving
from tests.shim import ShimCard

CARD: Final = "GPU-0a6ffa9b-1d3a-4b0e-9d55-00000000000a"
#: A reference runtime of 64 MiB is a model of a GiB on the cards, whose total is small for it.
SCALE: Final = 16
TOTAL_BYTES: Final = 4 * GIB
#: What every request says, and nothing else does: it must be nowhere but in the request.
SECRET: Final = "xyzzyplugh"
#: How often a request is tried again, and how many failures in a row degrade a capability.
POLICY: Final[Mapping[str, Any]] = {
    "gateway_retries": 1,
    "degraded_after_failures": 2,
    "load_backoff_seconds": 1,
    "min_residency_loads": 0,
}
#: So long a silence of a runtime is a TIMEOUT. Healthy ones answer within milliseconds.
SILENCE_SECONDS: Final = 4
LEASE_TTL_SECONDS: Final = 4


@dataclass
class Stage:
    """A server that runs. `stays`: deployments that are resident for good."""

    server: Serving
    folder: Path
    gpus: GpuStandIn | None = None
    stays: frozenset[str] = frozenset()
    seen: set[ProcessIdentity] = field(default_factory=set[ProcessIdentity])

    @property
    def cards(self) -> GpuStandIn:
        assert self.gpus is not None
        return self.gpus

    def marker(self, name: str) -> Path:
        return marker(self.folder, name)

    @contextmanager
    def faulty(self, name: str) -> Generator[None]:
        """While the block runs, the models whose fault this file is do wrong."""
        self.marker(name).touch()
        try:
            yield
        finally:
            self.marker(name).unlink()

    def embed(self, capability: str, **headers: str) -> httpx.Response:
        with self.server.http() as http:
            return http.post("/v1/embeddings", json={"model": capability, "input": SECRET}, headers=headers)

    def chat(self, capability: str, **options: Any) -> httpx.Response:
        with self.server.http() as http:
            return http.post("/v1/chat/completions", json=chat_request(capability, **options))

    def is_at_rest(self) -> bool:
        """Nothing is asked, leased, loaded or running but what stays; and of a card the newest sample shows that."""
        world = self.server.world()
        self.seen.update(self.server.runtimes())
        resident = sorted(record.resident.deployment_id for _, record in world.residents())
        if world.requests or list(world.leases()) or resident != sorted(self.stays):
            return False
        return len(self.server.runtimes()) == len(self.stays) and self._cards_are_at_rest(world)

    def _cards_are_at_rest(self, world: World) -> bool:
        if self.gpus is None:
            return True
        sample = world.accelerators[CARD].sample
        held_bytes = sum(record.resident.attributed_bytes for _, record in world.residents())
        return sample is not None and self.gpus.used_bytes(CARD) == sample.used_bytes == held_bytes

    def leave(self) -> None:
        """Stop the server, and see that it left nothing: no lease, no resident, no process, no memory."""
        self.seen.update(self.server.runtimes())
        assert self.server.stop() == 0, self.server.log()
        world = self.server.world()
        assert (list(world.leases()), list(world.residents()), dict(world.requests)) == ([], [], {})
        assert not [process for process in self.seen if is_alive(process)]
        if self.gpus is not None:
            self.server.until(lambda: self.cards.used_bytes(CARD) == 0)
            assert self.gpus.most_bytes(CARD) <= TOTAL_BYTES


def chat_request(capability: str, **options: Any) -> dict[str, Any]:
    return {"model": capability, "messages": [{"role": "user", "content": SECRET}], **options}


def marker(folder: Path, name: str) -> Path:
    return folder / f"fault-{name}"


def _model(name: str, folder: Path, faults: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """A deployment of its own capability that leaves when nobody uses it."""
    runtime: dict[str, Any] = {"max_inputs": 8, **options.pop("runtime", {})}
    if faults is not None:
        runtime["faults"] = {**faults, "while_file": str(marker(folder, name))}
    shape: dict[str, Any] = {"residency": {"policy": "load_on_demand"}, "capability": f"{name}@1", **options}
    return deployment(name, shape.pop("capability"), shape.pop("task", "embedding"), runtime=runtime, **shape)


def _on_card(name: str, folder: Path, size: str, **options: Any) -> dict[str, Any]:
    runtime = {"idle_bytes": size, "peak_bytes": size, **options.pop("runtime", {})}
    return _model(name, folder, kind="gpu", runtime=runtime, **options)


# ---- the stages -------------------------------------------------------------------------------------------------


@contextmanager
def host(folder: Path, artifact: Path) -> Generator[Stage]:
    """`artifact`: a GGUF file, of which the server gets a copy that may be damaged."""
    model = folder / "model.gguf"
    shutil.copy(artifact, model)
    at_request = {"healthy_requests": 1}
    deployments = [
        _model("ends", folder, {"fail_load": "exit"}),
        _model("crashes", folder, {**at_request, "crash_after_tokens": 0}),
        _model("sick", folder, {"fail_load": "unhealthy"}),
        _model("zeros", folder, {"invalid_output": True}),
        _model("silent", folder, {**at_request, "hang_requests": True}),
        _model("slow", folder, runtime={"load_ms": 1000}),
        _model("busy", folder, task="chat", queue_limit=1, runtime={"token_ms": 50, "tokens": 100_000}),
        _model("first", folder, {"fail_load": "exit"}, capability="both@1"),
        _model("second", folder, {"fail_load": "exit"}, capability="both@1", fallback_rank=1),
        {
            **_model("corrupt", folder),
            "runtime": {"type": "llama_cpp", "task": "chat", "model": str(model), "threads": 1},
        },
    ]
    config = configuration(deployments, policy=POLICY, upstream_timeout_seconds=SILENCE_SECONDS)
    with serving(folder / "server", config) as server:
        stage = Stage(server, folder)
        yield stage
        stage.leave()


@contextmanager
def lease(folder: Path, artifact: Path) -> Generator[Stage]:
    endless = _model("endless", folder, {"healthy_requests": 1, "hang_requests": True})
    policy = {**POLICY, "lease_ttl_seconds": LEASE_TTL_SECONDS, "max_replans": 1}
    with serving(folder / "server", configuration([endless], policy=policy)) as server:
        stage = Stage(server, folder)
        yield stage
        stage.leave()


@contextmanager
def crowded(folder: Path, artifact: Path) -> Generator[Stage]:
    """4 GiB, of which 64 MiB are reserved and 1 GiB is taken for good; a quarter of a GiB is added to each model."""
    deployments = [
        _on_card("stays", folder, "64MiB", residency={"policy": "always_warm"}),
        _on_card("alone", folder, "32MiB", residency={"policy": "exclusive"}),
        _on_card("large", folder, "208MiB"),
        _on_card("huge", folder, "240MiB"),
    ]
    with _on_gpu(folder, deployments, margin_floor_bytes=256 * MIB) as stage:
        stage.stays = frozenset({"stays"})
        stage.server.until(lambda: _is_ready(stage.server, "stays"))
        yield stage
        stage.leave()


@contextmanager
def faulty(folder: Path, artifact: Path) -> Generator[Stage]:
    deployments = [
        _on_card("greedy", folder, "32MiB", faults={"fail_load": "oom"}),
        _on_card("keeps", folder, "64MiB", faults={"keep_memory": True}, residency={"policy": "keep_warm"}),
        _on_card("large", folder, "208MiB"),
    ]
    with _on_gpu(folder, deployments, reclaim_timeout_seconds=2) as stage:
        yield stage
        stage.leave()


@contextmanager
def _on_gpu(folder: Path, deployments: list[dict[str, Any]], **policy: Any) -> Generator[Stage]:
    config = gpu_configuration(deployments, policy={**POLICY, **policy})
    with (
        gpu_stand_in(folder, [ShimCard(CARD, total_bytes=TOTAL_BYTES)], scale=SCALE) as gpus,
        gpus.serving(folder / "server", config) as server,
    ):
        yield Stage(server, folder, gpus)


def _is_ready(server: Serving, deployment_id: str) -> bool:
    found = [record.resident for _, record in server.world().residents()]
    return any(one.deployment_id == deployment_id and one.state is ResidentState.READY for one in found)


STAGES: Final[Mapping[str, Callable[[Path, Path], AbstractContextManager[Stage]]]] = {
    "host": host,
    "lease": lease,
    "crowded": crowded,
    "faulty": faulty,
}
