"""`gpuledger serve` on a GPU: the real NVML module on a driver of ours, whose card holds what the runtimes hold."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuledger.adapters.telemetry import process_memory
from gpuledger.domain.ports import ProcessIdentity
from gpuledger.domain.units import GIB, MIB
from tests.integration.serving import Serving, configuration, embedding, serving
from tests.shim import NvmlShim, ShimCard, ShimProcess

UUID = "GPU-0f6ffa9b-1d3a-4b0e-9d55-0123456789ab"
CONTEXT_BYTES = 200 * MIB
#: Of programs of others.
EXTERNAL_BYTES = 3 * GIB


class Driver:
    """Keeps the state of the card up to date with the processes of a server."""

    def __init__(self, folder: Path) -> None:
        self.shim = NvmlShim(folder)
        self.lost = False
        self._server: Serving | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._update()

    @contextmanager
    def serving(self, folder: Path, config: dict[str, Any]) -> Generator[Serving]:
        with serving(folder, config, ready=False, env=self.shim.env()) as server:
            self._server = server
            self._thread.start()
            try:
                server.until_ready()
                yield server
            finally:
                self._stop.set()
                self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            self._update()

    def _update(self) -> None:
        runtimes: tuple[ProcessIdentity, ...] = () if self._server is None else self._server.runtimes()
        held = {one.pid: process_memory.read(one.pid).own_bytes for one in runtimes}
        processes = tuple(ShimProcess(pid, used + CONTEXT_BYTES) for pid, used in held.items() if used > 16 * MIB)
        used_bytes = EXTERNAL_BYTES + sum(process.used_bytes or 0 for process in processes)
        self.shim.set([ShimCard(UUID, used_bytes=used_bytes, processes=processes, error=15 if self.lost else 0)])


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return Driver(tmp_path)


def config() -> dict[str, Any]:
    on_card = embedding(kind="gpu", runtime={"idle_bytes": "64MiB", "peak_bytes": "96MiB"})
    return configuration(
        [on_card], accelerators={"host": False, "nvml": "auto"}, policy={"telemetry_max_age_seconds": 6}
    )


def test_it_finds_the_card_measures_serves_and_survives_its_loss(driver: Driver, tmp_path: Path) -> None:
    with driver.serving(tmp_path / "server", config()) as server:
        (state,) = server.world().accelerators.values()
        assert (state.accelerator.accelerator_id, state.accelerator.gpu_class) == (UUID, "rtx-3090")
        (measured,) = server.world().deployments["emb"].measured
        assert measured.envelope.gpu_class == "rtx-3090"
        assert measured.envelope.peak_bytes > 64 * MIB + CONTEXT_BYTES  # more than the process itself knows of

        assert server.embed().status_code == 200
        server.until(lambda: _attributed(server) > CONTEXT_BYTES)

        driver.lost = True
        server.until(lambda: server.embed().status_code == 503)
        with server.http() as http:
            conditions = http.get("/readyz").json()["conditions"]
        assert not conditions["telemetry"]["holds"]
        assert "NVML_GPU_LOST" in conditions["telemetry"]["detail"]

        driver.lost = False
        server.until(lambda: server.embed().status_code == 200)
        assert server.stop() == 0, server.log()
    assert list(server.world().residents()) == []


def _attributed(server: Serving) -> int:
    return sum(record.resident.attributed_bytes for _, record in server.world().residents())
