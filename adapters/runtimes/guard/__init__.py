"""What is loaded into vLLM: this folder is all that a process of vLLM gets of ours on its PYTHONPATH."""

from __future__ import annotations
