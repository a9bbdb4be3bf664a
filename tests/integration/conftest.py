"""Fixtures of the suites that run real servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.serving import chat, embedding, measured_ledger


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger with the envelopes of `embedding()` and `chat()`, to be copied: measuring takes seconds."""
    return measured_ledger(tmp_path_factory.mktemp("measured"), [embedding(), chat()])
