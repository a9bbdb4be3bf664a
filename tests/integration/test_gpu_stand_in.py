"""The stand-in for GPUs itself: what its cards show of real processes is what these hold, to the byte."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuledger.adapters.runtimes.config import ReferenceConfig
from gpuledger.adapters.runtimes.manager import RuntimeManager
from gpuledger.domain.units import GIB, MIB
from tests.integration.gpu_stand_in import LOST, GpuStandIn, gpu_stand_in
from tests.shim import ShimCard, ShimInstance

pytestmark = pytest.mark.anyio

A = "GPU-0a000000-0000-0000-0000-00000000000a"
B = "GPU-0b000000-0000-0000-0000-00000000000b"
INSTANCE = "MIG-0c000000-0000-0000-0000-00000000000c"
CARDS = (ShimCard(A, used_bytes=GIB), ShimCard(B))
PATIENCE_SECONDS = 60
SIZES: dict[str, Any] = {"idle_bytes": 64 * MIB, "peak_bytes": 96 * MIB}
#: What a client of NVML reads of each card, and of each process on it.
READER = """
import json, pynvml as n
n.nvmlInit()
cards = [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]
lists = [[(p.pid, p.usedGpuMemory) for p in n.nvmlDeviceGetComputeRunningProcesses(card)] for card in cards]
print(json.dumps([[n.nvmlDeviceGetMemoryInfo(card).used, found] for card, found in zip(cards, lists)]))
"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def gpus(tmp_path: Path) -> Generator[GpuStandIn]:
    with gpu_stand_in(tmp_path, CARDS, scale=16) as gpus:
        gpus.watch(os.getpid())
        yield gpus


@asynccontextmanager
async def manager(folder: Path, **config: Any) -> AsyncGenerator[RuntimeManager]:
    """One deployment `d`, run by this process."""
    config = {"type": "reference", "task": "chat", **SIZES, **config}
    runtimes = RuntimeManager({"d": ReferenceConfig.model_validate(config)}, folder / "state")
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            yield runtimes
    finally:
        await runtimes.close()


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


def read_by_nvml(gpus: GpuStandIn) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-c", READER], env={**os.environ, **gpus.shim.env()}, capture_output=True, check=True
    )
    cards: list[Any] = json.loads(done.stdout)
    return cards


async def test_a_card_shows_what_a_runtime_on_it_holds(gpus: GpuStandIn, tmp_path: Path) -> None:
    """Nothing before its first instruction, its size once loaded, times the scale, and nothing when it is gone."""
    async with manager(tmp_path) as runtimes:
        process = await runtimes.spawn("r", "d", A)
        gpus.update()
        assert (gpus.used_bytes(A), gpus.held_bytes(process)) == (GIB, 0)
        await runtimes.load("r")
        # The functional check has been answered; what it took is given back just after.
        await until(lambda: gpus.used_bytes(A) == GIB + 16 * 64 * MIB)
        assert gpus.used_bytes(B) == 0
        assert read_by_nvml(gpus) == [[2 * GIB, [[process.pid, GIB]]], [0, []]]
        await runtimes.stop("r", 10)
        await until(lambda: gpus.used_bytes(A) == GIB)
        assert gpus.kept_bytes(A) == 0


async def test_it_follows_a_runtime_into_its_sleep_and_back(gpus: GpuStandIn, tmp_path: Path) -> None:
    async with manager(tmp_path, sleep={"asleep_bytes": 24 * MIB}) as runtimes:
        await runtimes.spawn("r", "d", B)
        await runtimes.load("r")
        await until(lambda: gpus.used_bytes(B) == 16 * 64 * MIB)
        await runtimes.sleep("r")
        await until(lambda: gpus.used_bytes(B) == 16 * 24 * MIB)
        await runtimes.wake("r")
        await until(lambda: gpus.used_bytes(B) == 16 * 64 * MIB)


async def test_what_a_runtime_keeps_is_nobodys_until_it_is_given_back(gpus: GpuStandIn, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    marker.touch()
    async with manager(tmp_path, faults={"keep_memory": True, "while_file": marker}) as runtimes:
        for times in (1, 2):
            await runtimes.spawn("r", "d", B)
            await runtimes.load("r")
            await until(lambda: gpus.used_bytes(B) - gpus.kept_bytes(B) == GIB)
            await runtimes.stop("r", 10)
            await until(lambda: gpus.used_bytes(B) == gpus.kept_bytes(B))
            assert read_by_nvml(gpus)[1] == [times * GIB, []]
        assert gpus.give_back(B) == 2 * GIB
        assert gpus.used_bytes(B) == 0
        marker.unlink()
        await runtimes.spawn("r", "d", B)
        await runtimes.load("r")
        await until(lambda: gpus.used_bytes(B) == GIB)
        await runtimes.stop("r", 10)
        await until(lambda: gpus.used_bytes(B) == 0)


def test_foreign_programs_come_grow_and_go(gpus: GpuStandIn) -> None:
    with gpus.program(A, 3 * GIB) as one, gpus.program(A, GIB, "graphics"):
        assert read_by_nvml(gpus)[0] == [5 * GIB, [[one.pid, 3 * GIB]]]
        one.hold(30 * GIB)
        assert gpus.used_bytes(A) == 24 * GIB, "a card shows no more than it has"
        assert gpus.most_bytes(A) == 32 * GIB, "and remembers what was asked of it"
        one.hold(2 * GIB)
        assert gpus.used_bytes(A) == 4 * GIB
    assert gpus.used_bytes(A) == GIB
    assert read_by_nvml(gpus)[0] == [GIB, []]


def test_cards_change_are_lost_and_come_back(gpus: GpuStandIn) -> None:
    gpus.change(A, error=LOST)
    assert "error 15" in Path(gpus.shim.state_variable[1]).read_text()
    card = gpus.remove(A)
    assert card.error == LOST
    assert read_by_nvml(gpus) == [[0, []]]
    gpus.add(CARDS[0])
    gpus.raise_xid(A, 79)
    gpus.raise_xid(A, 31)
    gpus.set_driver(driver="560.1")
    assert read_by_nvml(gpus) == [[0, []], [GIB, []]]
    state = Path(gpus.shim.state_variable[1]).read_text()
    assert [line for line in state.splitlines() if line.startswith(("xid", "driver"))] == [
        "driver 560.1",
        "xid 79 -",
        "xid 31 -",
    ]


async def test_an_instance_shows_its_runtime_and_its_card_shows_it_too(tmp_path: Path) -> None:
    card = ShimCard(A, mig=1, instances=(ShimInstance(INSTANCE, 1, total_bytes=5 * GIB, used_bytes=MIB),))
    with gpu_stand_in(tmp_path, [card], context_bytes=100 * MIB) as gpus:
        gpus.watch(os.getpid())
        async with manager(tmp_path, peak_bytes=SIZES["idle_bytes"]) as runtimes:
            process = await runtimes.spawn("r", "d", INSTANCE)
            await runtimes.load("r")
            await until(lambda: gpus.held_bytes(process) == (64 + 100) * MIB)
            assert gpus.used_bytes(A) == (64 + 100 + 1) * MIB
            assert gpus.most_bytes(INSTANCE) == (64 + 100 + 1) * MIB
