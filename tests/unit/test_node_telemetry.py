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
from gpuledger.domain.state import Kind
from gpuledger.domain.units import GIB


class FakeSource:
    """One accelerator; `error` is raised instead of reading it, `gone` told beside it."""

    def __init__(self, accelerator_id: str, memory_bytes: int | None = None, *, unified: bool = False) -> None:
        self.accelerator_id = accelerator_id
        self.memory_bytes = memory_bytes
        self.kind = Kind.HOST if accelerator_id.startswith("host:") else Kind.GPU
        self.unified = unified
        self.gone: tuple[str, ...] = ()
        self.error: Exception | None = None
        self.closed = False

    def read(self, forest: Forest) -> SourceReading:
        if self.error is not None:
            raise self.error
        reading = AcceleratorReading(
            self.accelerator_id,
            0,
            self.kind,
            "t4",
            "Tesla T4",
            "550",
            16 * GIB,
            0,
            (),
            0,
            unified=self.unified,
        )
        return SourceReading((reading,), memory_bytes=self.memory_bytes, gone=self.gone)

    def close(self) -> None:
        self.closed = True
        if self.error is not None:
            raise self.error


def test_all_sources_are_one_sample() -> None:
    sample = NodeTelemetry([FakeSource("GPU-0"), FakeSource("host:n", 64 * GIB)]).sample(())
    assert [one.accelerator_id for one in sample.accelerators] == ["GPU-0", "host:n"]
    assert sample.faults == ()
    assert sample.memory_bytes == 64 * GIB


def test_one_memory_is_offered_by_the_gpu_that_shares_it() -> None:
    host, gpu = FakeSource("host:n", 64 * GIB), FakeSource("GPU-0", 32 * GIB, unified=True)
    telemetry = NodeTelemetry([host, gpu])
    sample = telemetry.sample(())
    assert [one.accelerator_id for one in sample.accelerators] == ["GPU-0"]
    assert sample.gone == ("host:n",)
    assert sample.memory_bytes == 64 * GIB

    gpu.error = ZeroDivisionError("a defect")
    sample = telemetry.sample(())
    assert (sample.accelerators, sample.gone) == ((), ("host:n",))
    assert sample.faults == (TelemetryFault("GPU-0", "UNEXPECTED_ERROR", None),)


def test_what_is_gone_is_passed_on_and_no_longer_known(caplog: pytest.LogCaptureFixture) -> None:
    source = FakeSource("GPU-0")
    telemetry = NodeTelemetry([source])
    telemetry.sample(())
    source.accelerator_id, source.gone = "MIG-1", ("GPU-0",)
    sample = telemetry.sample(())
    assert ([one.accelerator_id for one in sample.accelerators], sample.gone) == (["MIG-1"], ("GPU-0",))

    source.error = ZeroDivisionError("a defect")
    assert telemetry.sample(()).faults == (TelemetryFault("MIG-1", "UNEXPECTED_ERROR", None),)
    assert "a defect" in caplog.text


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
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "a100-sxm4-40gb-1g-5gb"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", "h100-80gb-hbm3-1g-10gb-me"),
        ("NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb", "a100-sxm4-40gb-1c-3g-20gb"),
        ("NVIDIA GB10", "gb10"),
        ("NVIDIA", "unknown-gpu"),
        ("", "unknown-gpu"),
    ],
)
def test_classes_are_names_without_the_brand(name: str, expected: str) -> None:
    assert gpu_class(name) == expected
