"""The RAM of a node that serves models on its CPU, as one accelerator (semantics.md 1)."""

from __future__ import annotations

from pathlib import Path

from gpuledger.adapters.procfs import PROC
from gpuledger.domain.ports import AcceleratorReading, ManagedReading
from gpuledger.domain.state import Kind

from .faults import FaultCode, faults_of
from .host_memory import HostMeter, HostUnreadable
from .processes import Forest
from .source import SourceReading


class HostSource:
    """This machine's RAM, as far as its meter says that it is ours to use. Blocking; for one thread.

    Where a GPU shares this memory it is offered by that GPU, and the node leaves this one out (`NodeTelemetry`).
    """

    def __init__(self, node_id: str, *, limit_bytes: int | None = None, proc: Path = PROC) -> None:
        """`limit_bytes`: as of the HostMeter."""
        self.accelerator_id = f"host:{node_id}"
        self._meter = HostMeter(limit_bytes=limit_bytes, proc=proc)
        self._device_name = _device_name(proc)
        self._kernel_release = _kernel_release(proc)

    def read(self, forest: Forest) -> SourceReading:
        """One reading, or HOST_UNREADABLE. `memory_bytes` of the node is the total of this domain."""
        trees = tuple(forest.on(self.accelerator_id))
        try:
            memory = self._meter.read(trees)
        except HostUnreadable:
            return SourceReading(faults=faults_of([self.accelerator_id], FaultCode.HOST_UNREADABLE))
        reading = AcceleratorReading(
            accelerator_id=self.accelerator_id,
            index=0,
            kind=Kind.HOST,
            gpu_class="host",
            device_name=self._device_name,
            driver_version=self._kernel_release,
            total_bytes=memory.total_bytes,
            used_bytes=memory.used_bytes,
            managed=tuple(
                ManagedReading(tree.resident_id, tree.alive, memory.held_bytes[tree.resident_id]) for tree in trees
            ),
            foreign_processes=0,
        )
        return SourceReading((reading,), memory_bytes=memory.total_bytes)

    def close(self) -> None:
        """Nothing is held between samples."""


def _device_name(proc: Path) -> str:
    """The CPU's model; some architectures do not name one."""
    try:
        lines = (proc / "cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    names = (
        value.strip() for name, _, value in (line.partition(":") for line in lines) if name.strip() == "model name"
    )
    return next(names, "") or "unknown CPU"


def _kernel_release(proc: Path) -> str:
    try:
        return (proc / "sys/kernel/osrelease").read_text("ascii").strip()
    except OSError:
        return "unknown kernel"
