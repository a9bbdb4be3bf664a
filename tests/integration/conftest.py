"""Fixtures of the suites that run real servers, and of those that read NVML."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.children import running, sleeping
from tests.integration.nvml_bench import Bench
from tests.integration.serving import chat, embedding, measured_ledger
from tests.shim import NvmlShim


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger with the envelopes of `embedding()` and `chat()`, to be copied: measuring takes seconds."""
    return measured_ledger(tmp_path_factory.mktemp("measured"), [embedding(), chat()])


@pytest.fixture
def shim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NvmlShim:
    """A stand-in driver that this process finds the state of."""
    shim = NvmlShim(tmp_path)
    monkeypatch.setenv(*shim.state_variable)
    return shim


@pytest.fixture
def bench(shim: NvmlShim) -> Iterator[Bench]:
    bench = Bench(shim)
    yield bench
    bench.telemetry.close()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    """A resident's process."""
    with running(*sleeping()) as process:
        yield process
