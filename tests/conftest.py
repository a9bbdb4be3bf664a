"""Fixtures that more than one suite uses: the two example models, made once per change of what makes them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuledger.tools import example_models


def _made_once(config: pytest.Config, name: str, make: Callable[[Path], None]) -> Path:
    """`var/test-models/KEY/NAME`. Models are renamed into place, so runs side by side disturb nobody."""
    key = hashlib.sha256(Path(example_models.__file__).read_bytes()).hexdigest()[:16]
    path = config.rootpath / "var" / "test-models" / key / name
    if not path.exists():
        make(path)
    return path


@pytest.fixture(scope="session")
def tiny_chat_gguf(pytestconfig: pytest.Config) -> Path:
    """A chat model of 2 MB with random weights that llama.cpp streams words from. Not to be written to."""
    return _made_once(pytestconfig, "tiny-chat.gguf", example_models.make_tiny_chat)


@pytest.fixture(scope="session")
def minilm_gguf(pytestconfig: pytest.Config) -> Path:
    """The real all-MiniLM-L6-v2 as llama.cpp serves it, 46 MB. Not to be written to."""
    return _made_once(pytestconfig, "all-minilm-l6-v2.f16.gguf", example_models.convert_minilm)
