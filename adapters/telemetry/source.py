"""What a source of samples is to the node that merges them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gpuledger.domain.ports import AcceleratorReading, TelemetryFault

from .processes import Forest


@dataclass(frozen=True, slots=True)
class SourceReading:
    """What one source saw in one sample. `memory_bytes`: of the node, from a source that knows it.

    `gone`: as of a NodeReading; told in every sample, whether or not it was heard of before.
    """

    accelerators: tuple[AcceleratorReading, ...] = ()
    faults: tuple[TelemetryFault, ...] = ()
    memory_bytes: int | None = None
    gone: tuple[str, ...] = ()


class Source(Protocol):
    """Reads its accelerators once per call. Blocking; one thread at a time."""

    def read(self, forest: Forest) -> SourceReading:
        """Every accelerator of the source, each as a reading or as a fault. `forest`: the processes of this sample."""
        ...

    def close(self) -> None: ...
