"""Cards on the stand-in driver and the telemetry that reads them: what the tests of NVML have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpuledger.adapters.telemetry.node import NodeTelemetry
from gpuledger.adapters.telemetry.nvml import NvmlSource
from gpuledger.domain.ports import AcceleratorReading, ManagedProcess, NodeReading
from gpuledger.domain.state import Health
from tests.children import identity_of
from tests.shim import GIB, NvmlShim, ShimCard

ONE = ShimCard("GPU-00000000-0000-0000-0000-00000000000a", used_bytes=3 * GIB)
OTHER = ShimCard("GPU-00000000-0000-0000-0000-00000000000b", name="NVIDIA H200", total_bytes=141 * GIB)
A, B = ONE.uuid, OTHER.uuid

#: Nobody has it: above what any pid can be on this machine, below what a pid can be at all.
NOBODY = 4_194_303


class Monotonic:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_ns = 10**12

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, milliseconds: int) -> None:
        self.now_ns += milliseconds * 1_000_000


class Wall:
    """The clock of marks, in microseconds: a second further with each look at it, unless the test sets it."""

    def __init__(self) -> None:
        self.now_us = 1_700_000_000_000_000

    def __call__(self) -> int:
        self.now_us += 1_000_000
        return self.now_us


class Bench:
    """A driver, the telemetry on it, and the time between samples (5 s, as the policy has it)."""

    def __init__(self, shim: NvmlShim, known: Iterable[str] = (), newest_mark: int = 0) -> None:
        self.shim = shim
        self.clock = Monotonic()
        self.wall = Wall()
        source = NvmlSource(
            str(shim.library), monotonic_ns=self.clock, clock_us=self.wall, known=known, newest_mark=newest_mark
        )
        self.telemetry = NodeTelemetry([source])

    def sample(self, managed: Sequence[ManagedProcess] = (), after_ms: int = 5_000) -> NodeReading:
        self.clock.advance(after_ms)
        return self.telemetry.sample(managed)

    def reading(self, managed: Sequence[ManagedProcess] = ()) -> AcceleratorReading:
        sample = self.sample(managed)
        assert sample.faults == ()
        (reading,) = sample.accelerators
        return reading


def managed(pid: int, uuid: str = A) -> ManagedProcess:
    return ManagedProcess("res-1", uuid, identity_of(pid))


def faults(sample: NodeReading) -> set[tuple[str | None, str, Health | None]]:
    return {(fault.accelerator_id, fault.code, fault.health) for fault in sample.faults}


def uuids(sample: NodeReading) -> list[str]:
    return [reading.accelerator_id for reading in sample.accelerators]
