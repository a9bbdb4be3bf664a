"""What keeps the runtime of a deployment from being known at all, in words: what was found, and how to mend it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Final

from gpuledger.adapters.runtimes.command import NO_VERSION
from gpuledger.adapters.runtimes.config import ReferenceConfig, RuntimeConfig
from gpuledger.adapters.runtimes.llama_cpp import NO_SERVER
from gpuledger.adapters.runtimes.programs import NO_PROGRAM
from gpuledger.adapters.runtimes.vllm import NO_VLLM
from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import RuntimeFault

_MISMATCH: Final = (Failure.ARTIFACT_CORRUPT, "sha256_mismatch")
_WORDS: Final[Mapping[tuple[Failure, str], tuple[str, str]]] = {
    (Failure.MODEL_LOAD_FAILED, "artifact_missing"): (
        "a file of its model is not there",
        "correct the path, or fetch the file",
    ),
    (Failure.MODEL_LOAD_FAILED, "artifact_unreadable"): (
        "a file of its model cannot be read",
        "let this user read it",
    ),
    (Failure.MODEL_LOAD_FAILED, NO_SERVER): (
        "there is no llama-server that says its version, and no xllamacpp",
        f"{sys.executable} -m pip install xllamacpp, or install llama.cpp, or name it as runtime.server",
    ),
    (Failure.MODEL_LOAD_FAILED, NO_PROGRAM): (
        "its program is not there, or may not be run",
        "install it, or name it with its whole path",
    ),
    (Failure.MODEL_LOAD_FAILED, NO_VLLM): ("its vllm does not say its version", "run it with --version to see why"),
    (Failure.MODEL_LOAD_FAILED, NO_VERSION): (
        "its version_command does not say a version",
        "run it to see why, or give a version of your own as `version`",
    ),
}


def told(fault: RuntimeFault, deployment_id: str, sha256: str | None = None) -> tuple[str, str]:
    """What was found and how to mend it, with the last line of what was said. `sha256`: the one that is configured."""
    said = fault.evidence.decode("utf-8", "replace").strip().splitlines()[-1:]
    if (fault.failure, fault.detail) == _MISMATCH and sha256 is not None:
        found = f"its model has the SHA-256 {' '.join(said)}, and {sha256} is configured"
        return found, "fetch it again; if it was changed on purpose, configure its new sha256"
    usual = (f"{fault.failure.value} ({fault.detail})", f"gpuledger profile {deployment_id} shows it happen")
    words, mend = _WORDS.get((fault.failure, fault.detail), usual)
    return ": ".join([words, *said]), mend


def pinned(runtime: RuntimeConfig) -> str | None:
    """The SHA-256 that its model must have, where one is configured."""
    return None if isinstance(runtime, ReferenceConfig) else runtime.sha256
