"""The merge of several sources into one sample."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuledger.adapters.telemetry.faults import FaultCode, faults_of
from gpuledger.adapters.telemetry.node import NodeTelemetry
from gpuledger.adapters.telemetry.nvml import gpu_class
from gpuledger.adapters.telemetry.processes import Forest
from gpuledger.adapters.telemetry.source import SourceReading
from gpuledger.domain.ports import AcceleratorReading, TelemetryFault
from gpuledger.domain.state import Health, Kind
from gpuledger.domain.units import GIB


class FakeSource:
    """One accelerator; `error` is raised instead of reading it."""

    def __init__(self, accelerator_id: str, memory_bytes: int | None = None) -> None:
        self.accelerator_id = accelerator_id
        self.memory_bytes = memory_bytes
        self.error: Exception | None = None
        self.closed = False

    def read(self, forest: Forest) -> SourceReading:
        if self.error is not None:
            raise self.error
        reading = AcceleratorReading(
            self.accelerator_id, 0, Kind.GPU, "t4", "Tesla T4", "550", 16 * GIB, 0, Health.HEALTHY, (), 0
        )
        return SourceReading((reading,), memory_bytes=self.memory_bytes)

    def close(self) -> None:
        self.closed = True
        if self.error is not None:
            raise self.error


def test_all_sources_are_one_sample() -> None:
    sample = NodeTelemetry([FakeSource("GPU-0"), FakeSource("host:n", 64 * GIB)]).sample(())
    assert [one.accelerator_id for one in sample.accelerators] == ["GPU-0", "host:n"]
    assert sample.faults == ()
    assert sample.memory_bytes == 64 * GIB


def test_a_source_that_breaks_is_a_fault_of_its_own_accelerators(caplog: pytest.LogCaptureFixture) -> None:
    broken, sound = FakeSource("GPU-0"), FakeSource("host:n")
    telemetry = NodeTelemetry([broken, sound])
    broken.error = ZeroDivisionError("a defect")
    assert telemetry.sample(()).faults == (TelemetryFault(None, "UNEXPECTED_ERROR", None),)

    broken.error = None
    telemetry.sample(())
    broken.error = ZeroDivisionError("a defect")
    sample = telemetry.sample(())

    assert sample.faults == (TelemetryFault("GPU-0", "UNEXPECTED_ERROR", None),)
    assert [one.accelerator_id for one in sample.accelerators] == ["host:n"]
    assert "a defect" in caplog.text


def test_without_processes_nothing_is_attributed_and_so_nothing_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    telemetry = NodeTelemetry([FakeSource("GPU-0"), FakeSource("host:n")], proc=tmp_path / "absent")
    sample = telemetry.sample(())
    assert sample.accelerators == ()
    assert {one.code for one in sample.faults} == {"PROCESSES_UNREADABLE"}


def test_age_is_counted_from_before_the_first_figure() -> None:
    instants = iter([1_000_000, 8_500_000])
    assert NodeTelemetry([], monotonic_ns=lambda: next(instants)).sample(()).age_ms == 8


def test_every_source_is_closed_though_one_fails() -> None:
    sources = [FakeSource("GPU-0"), FakeSource("GPU-1"), FakeSource("host:n")]
    sources[1].error = RuntimeError("cannot")
    with pytest.raises(RuntimeError, match="cannot"):
        NodeTelemetry(sources).close()
    assert all(source.closed for source in sources)


def test_a_fault_of_no_known_accelerator_is_one_fault() -> None:
    (fault,) = faults_of([], FaultCode.NVML_UNKNOWN)
    assert fault == TelemetryFault(None, "NVML_UNKNOWN", None)
    assert type(fault.code) is str  # what the ledger takes


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("GeForce RTX 3090", "rtx-3090"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4060 Ti", "rtx-4060-ti"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada-generation"),
        ("Quadro RTX 6000", "quadro-rtx-6000"),
        ("NVIDIA", "unknown-gpu"),
        ("", "unknown-gpu"),
    ],
)
def test_classes_are_names_without_the_brand(name: str, expected: str) -> None:
    assert gpu_class(name) == expected
