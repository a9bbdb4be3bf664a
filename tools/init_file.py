"""The file that `gpuledger init` writes: a configuration with a comment for each thing that one may want to change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gpuledger.adapters.runtimes.options import Task
from gpuledger.domain.explain import size
from gpuledger.domain.state import Kind

from .config import DEFAULT_LISTEN
from .gguf_models import PassedOver
from .init_found import Found, Proposal, proposals

#: The client that the file declares; its token is shown once.
CLIENT: Final = "app"
_PASSED_OVER_TOLD: Final = 20


def configuration_text(found: Found, folder: Path, token_sha256: str, version: str) -> str:
    """The text of a gpuledger.yaml that is to lie in `folder`. Paths below it are written relative to it."""
    parts = [
        _head(found, version),
        _TOP.format(listen=DEFAULT_LISTEN),
        _CLIENTS.format(client=CLIENT, token_sha256=token_sha256),
        "\n".join(_deployments(found, folder)),
    ]
    return "\n".join(parts) + "\n"


def _head(found: Found, version: str) -> str:
    lines = [
        f"# Written by `gpuledger init` ({version}) from what was found here; yours to change.",
        "# docs/configuration.md has every key. Paths are relative to this file; sizes may be written as 512MiB.",
        "#",
        "# Found:",
        *(f"#   {card.name} with {size(card.total_bytes)} ({card.uuid})" for card in found.cards),
        *([] if found.cards else ["#   no NVIDIA card that can be read"]),
        f"#   {size(found.host_bytes)} of memory",
        f"#   llama.cpp: {_llama(found)}",
        f"#   vLLM: {_printable(found.vllm or 'none on PATH')}",
        f"#   {len(found.models)} models in GGUF files",
    ]
    return "\n".join(lines) + "\n"


def _llama(found: Found) -> str:
    if found.server is not None:
        return _printable(found.server)
    return "xllamacpp, on the CPU" if found.binding else "none: pip install xllamacpp, or install a llama-server"


_TOP: Final = """\
# The ledger: one SQLite file, made at the first start. It belongs on a disk of this machine.
ledger: ledger.db
# Where the key, the tokens and the logs of runtimes are; the folder of the ledger when it is not set.
#state_dir: .

# The address of the OpenAI-compatible API. Beyond this machine there is no TLS: put a proxy in front, and then
# an address that others reach needs `allow_remote: true`.
listen: {listen}
#allow_remote: false

node:
  id: local
#  labels: {{rack: a}}

# What is measured and scheduled. Nothing falls back from one kind to the other.
accelerators:
  host: true  # or, to schedule less than all of it: {{memory_limit_bytes: 16GiB}}
  nvml: auto  # or true, false

# A model is measured before it is scheduled: at_start, when_idle, or never (`gpuledger profile` then does it).
profile: at_start

# After SIGTERM: how long work that runs may go on.
drain_seconds: 30

# Every key has a default (docs/configuration.md); what is set here makes it another policy.
#policy:
#  reserve_floor_bytes: 2GiB
#  sample_interval_seconds: 10
#  telemetry_max_age_seconds: 30
"""

_CLIENTS: Final = """\
# Who may ask. Only the SHA-256 of a token is here; `gpuledger tokens create client NAME` makes further ones.
clients:
  - id: {client}
    token_sha256: {token_sha256}
    # production, interactive, background, benchmark or maintenance: the order of the queue.
    priority: interactive
    capabilities: ["*"]
"""

_NO_DEPLOYMENTS: Final = """\
# No model was found: this is one as it would be written.
deployments: []
#deployments:
#  - id: my-model
#    capability: my-model@1
#    kind: host
#    runtime:
#      type: llama_cpp
#      task: chat
#      model: models/my-model.gguf
#      context_length: 4096"""

_VLLM: Final = """
  # A model of vLLM, on a card that it has for itself:
  #- id: my-vllm-model
  #  capability: my-vllm-model@1
  #  kind: gpu
  #  concurrency: 16
  #  runtime:
  #    type: vllm
  #    task: chat
  #    command: [{vllm}]
  #    model: /models/my-model
  #    context_length: 8192
  #    batch_size: 8192
  #    gpu_memory_utilization_bp: 8000"""


def _deployments(found: Found, folder: Path) -> Iterator[str]:
    proposed = proposals(found)
    if not any(one.fits for one in proposed):
        yield _NO_DEPLOYMENTS
    else:
        yield "# What is served. Clients give the capability as `model`."
        yield "deployments:"
    for one in proposed:
        lines = list(_deployment(one, folder))
        if one.fits:
            yield "\n".join(lines)
        else:
            yield "\n".join([*lines[:1], "  # It fits nowhere here with its margin, so it is left out:"])
            yield "\n".join("  #" + line.removeprefix("  ") for line in lines[1:])
    if found.vllm is not None and found.cards:
        yield _VLLM.format(vllm=_quoted(found.vllm))
    yield from _passed_over(found.passed_over)


def _deployment(one: Proposal, folder: Path) -> Iterator[str]:
    model = one.model
    trained = "" if model.context_length is None else f", trained with a context of {model.context_length}"
    yield f"\n  # {_printable(model.path.name)}: {_printable(model.kind)}, {size(model.size_bytes)}{trained}"
    yield f"  - id: {one.name}"
    yield f"    capability: {one.name}@1"
    yield f"    kind: {one.kind.value}  # {_printable(one.why)}"
    yield "    priority: interactive"
    yield f"    concurrency: {one.concurrency}  # requests at the same time; it is measured at this many"
    yield "    # keep_warm, load_on_demand, always_warm, exclusive or lab_only."
    yield "    residency: {policy: keep_warm, ttl_seconds: 900}"
    yield "    runtime:"
    yield "      type: llama_cpp"
    yield f"      task: {model.task.value}"
    yield f"      model: {_quoted(_place(model.path, folder))}"
    yield "      # With the file's SHA-256 (`sha256sum` tells it) a model that was changed is not loaded:"
    yield "      #sha256: 64 digits"
    yield f"      context_length: {one.context_length}"
    if one.batch_size is not None:
        yield f"      batch_size: {one.batch_size}  # a text is computed in one piece: at least context_length"
    if one.kind is Kind.GPU:
        yield "      gpu_layers: all"
    if one.kind is Kind.HOST:
        yield f"      threads: {one.threads}  # llama.cpp spins: no more than there are idle cores"
    if model.task is Task.CHAT and one.kind is Kind.GPU:
        yield "      #cache_type_k: q8_0  # half the memory of the cache; cache_type_v likewise"


def _passed_over(passed: tuple[PassedOver, ...]) -> Iterator[str]:
    if passed:
        yield "\n# Passed over:"
    for one in passed[:_PASSED_OVER_TOLD]:
        yield f"#   {_printable(one.path.name)}: {_printable(one.why)}"
    if len(passed) > _PASSED_OVER_TOLD:
        yield f"#   and {len(passed) - _PASSED_OVER_TOLD} more"


def _place(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def _quoted(text: str) -> str:
    """Text between double quotes; what a line cannot show is written by its number, as YAML does."""
    shown = "".join(one if one.isprintable() else f"\\U{ord(one):08x}" for one in text.replace("\\", "\\\\"))
    return '"' + shown.replace('"', '\\"') + '"'


def _printable(text: str) -> str:
    """For a comment: nothing in it may end its line."""
    return "".join(character if character.isprintable() else "?" for character in text)
