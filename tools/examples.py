"""The example that `make serve` runs: its models, made once, and a configuration to start from."""

from __future__ import annotations

from .example_models import ExampleError, Progress, convert_minilm, make_tiny_chat, silent

__all__ = ["ExampleError", "Progress", "convert_minilm", "make_tiny_chat", "silent"]
