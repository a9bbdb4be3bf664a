"""docs/configuration.md, from the types of `config.py`, of the runtimes and of the policy; written by `docs_gen`.

Types, bounds and defaults come from the code. What a key means stands in its type where that says it, otherwise here;
a key about which neither says anything stops the generation.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

from pydantic import TypeAdapter

from gpuledger.adapters.runtimes.config import (
    CommandConfig,
    LlamaCppConfig,
    MetricsMapping,
    ReferenceConfig,
    ReferenceFaults,
    SleepPaths,
    VllmConfig,
)
from gpuledger.adapters.runtimes.reference_config import ReferenceSleep
from gpuledger.domain.policy import Policy
from gpuledger.domain.state import Residency, Sleep
from gpuledger.domain.units import GIB, KIB, MAX_INTEGER, MIB

from .config import AcceleratorsEntry, ClientEntry, ConfigDocument, DeploymentEntry, HostEntry, NodeEntry

Schema: TypeAlias = Mapping[str, Any]

#: A bound at or above this is one of the program, and says nothing to an operator.
_NO_BOUND: Final = 10**6

_FILE: Final = {
    "ledger": "The ledger, one SQLite file. It and its folder are made at the first start.",
    "clients": "Who may ask. One that is not here gets 401.",
    "deployments": "What is served.",
    "state_dir": "Where `request.key` and the logs of runtimes are; the folder of the ledger when absent.",
    "listen": "Address of the gateway, `host:port`; IPv6 in brackets. Port 0 takes a free one.",
    "allow_remote": "Must be true for an address that other machines reach. There is no TLS: put a proxy in front.",
    "node": "This machine.",
    "accelerators": "What is measured and scheduled.",
    "policy": "Keys of the policy that differ from their defaults.",
    "profile": "What is measured without being asked, of deployments that have no envelope as they are configured now, "
    "or a suspect one. `at_start`: a start measures them before requests are admitted. `when_idle`: requests are "
    "admitted at once, and the server measures whenever nothing is wanted and an accelerator is empty; a request ends "
    "the measurement. `never`: such a deployment is refused with NO_MEASURED_ENVELOPE until `gpuledger profile` has "
    "measured it.",
    "drain_seconds": "After SIGTERM: how long work that runs may go on.",
    "upstream_timeout_seconds": "How long a runtime may be silent before its request fails with TIMEOUT.",
    "max_body_bytes": "The longest body of a request; a longer one gets 413.",
    "max_open_requests": "Requests that run or wait at the same time; more get 429.",
}
_NODE: Final = {
    "id": "Its name in the ledger. The memory of the host is the accelerator `host:ID`.",
    "labels": "What a `node_selector` can ask for.",
    "production_eligible": "Where false, every request is refused with NODE_NOT_PRODUCTION_ELIGIBLE.",
}
_ACCELERATORS: Final = {
    "host": "The memory of this machine, for deployments of kind `host`: yes, no, or with a limit of its own.",
    "nvml": "Watch NVIDIA GPUs. `auto`: where there is a driver, or a card on the bus without one.",
    "nvml_library": "Path of `libnvidia-ml.so.1` where the loader does not find it.",
}
_HOST: Final = {
    "memory_limit_bytes": "The most of this machine's memory that is scheduled. What others use counts against it.",
}
_CLIENT: Final = {
    "id": "Its name in the ledger.",
    "token_sha256": "SHA-256, in hex, of its token. The token itself stands nowhere. Without it, those that "
    "`gpuledger tokens create client NAME` makes.",
    "priority": "The class of all that it asks for.",
    "lab": "Whether what it asks for is LAB.",
    "capabilities": "What it may ask for; `*` for everything.",
}
_DEPLOYMENT: Final = {
    "id": "Its name in the ledger, in `gpuledger profile` and in `status`.",
    "capability": "What clients ask for as `model`, with a version: `rag.embedding@1`.",
    "kind": "The kind of accelerator that it runs on. It never falls back to the other.",
    "runtime": "The program that serves it, and with what.",
    "priority": "Its class: how dear its eviction is, and from whom its keep-warm time protects it.",
    "concurrency": "Requests at the same time. More wait with CONCURRENCY_LIMIT. It is measured at this many.",
    "queue_limit": "Queued requests of the capability that may come before a new one; else QUEUE_FULL.",
    "interruptible": "Whether more important work may preempt its leases.",
    "production_eligible": "Where false, only LAB clients get it.",
    "max_replicas": "On how many accelerators at the same time.",
    "min_memory_bytes": "Memory of the node that must be left for it: NODE_MEMORY_INSUFFICIENT otherwise.",
    "node_selector": "Labels that the node must have: LABEL_MISMATCH otherwise.",
    "fallback_rank": "Its place in the contract of the capability. Clients get rank 0. Rank 1 is the fallback: a "
    "request is planned for it when rank 0 refused it or failed. Higher ranks serve nobody.",
    "load_ms": "How long a load is expected to take until one was measured.",
    "unload_ms": "The same for an unload.",
    "residency": "How long it stays in memory when nothing uses it.",
    "sleep": "What it keeps asleep and how long that takes, until it is measured. Only where the runtime can sleep: it "
    "is then put to sleep, where that frees enough, when it has to make room for another. At the end of its keep-warm "
    "time it is unloaded.",
}
_SLEEP: Final = {
    "asleep_bytes": "What it still holds asleep.",
    "sleep_ms": "How long it takes to give the rest back.",
    "wake_ms": "How long it takes to take it again.",
}
_RESIDENCY: Final = {
    "policy": "`keep_warm`: unloaded `ttl_seconds` after its last use. `load_on_demand`: unloaded after each use. "
    "`always_warm`: loaded at the start, never evicted. `exclusive`: as `keep_warm`, and shares its accelerator "
    "with nobody. `lab_only`: as `keep_warm`, for LAB clients only.",
    "ttl_seconds": "The keep-warm time, from the end of the last use.",
}
_RUNTIME: Final = {
    "task": "What it answers, and so how it is checked after a load.",
    "type": "Which runtime.",
}
_LLAMA: Final = {
    **_RUNTIME,
    "parallel": "The concurrency of the deployment, which it is when absent.",
    "max_inputs": "Texts of one embeddings request, or prompts of one completion, at most; measured with as many.",
    "gpu_layers": "Layers on the GPU. 0 where `kind` is host, at least 1 or `all` where it is gpu.",
    "mmap": "Map the weights instead of reading them. The sample counts mapped pages all the same.",
    "flash_attention": "llama.cpp's `--flash-attn`.",
    "cache_type_k": "Type of the cache of keys.",
    "cache_type_v": "Type of the cache of values.",
}
_SLEEP_PATHS: Final = {
    "sleep_path": "Where it is told to give its memory back.",
    "wake_path": "Where it is told to take it again.",
}
_REFERENCE: Final = {
    **_RUNTIME,
    "parallel": _LLAMA["parallel"],
    "faults": "What it does wrong.",
}
_FAULTS: Final = {"exit_status": "The exit status with which it ends where a fault ends it."}
_POLICY: Final = {
    "revision": "Its name in the ledger. Left out where a key differs: the default's, and a hash of what differs.",
    "reserve_floor_bytes": "Memory that is never handed out: at least this,",
    "reserve_ratio_bp": "at least this ratio of the accelerator,",
    "runtime_margin_bytes": "and at least this. The greatest of the three is the reserve.",
    "margin_floor_bytes": "Added to a measured peak: at least this,",
    "margin_ratio_bp": "and at least this ratio of the peak. Peak and margin are the requirement.",
    "pressure_enter_bp": "Pressure from which a level holds, at once. All three levels are given.",
    "pressure_exit_bp": "Pressure below which a level may be left, after `recovery_seconds`. All three are given.",
    "recovery_seconds": "How long pressure must stay below, without a gap in the samples.",
    "telemetry_max_age_seconds": "An older sample is none: SCHEDULER_STATE_STALE. At least 3 times the interval.",
    "sample_interval_seconds": "Between samples while all is quiet; 1 while a model comes or goes.",
    "max_clock_skew_seconds": "How far in the future a sample may lie.",
    "critical_admits_warm": "Whether a warm request that needs no more memory is admitted under CRITICAL.",
    "lab_paused": "Refuse LAB requests, and every request for a deployment that is `lab_only`.",
    "min_residency_seconds": "A model that was loaded stays at least this long, unless for more important work;",
    "min_residency_loads": "and at least as long as this many of its loads took,",
    "min_residency_cap_seconds": "but at most this much longer than one load.",
    "max_residents": "Models on one accelerator.",
    "max_preemptions": "How often one request may be preempted.",
    "fair_wait_seconds": "After this wait a request may no longer be passed by others of its class.",
    "lease_ttl_seconds": "Life of a lease; it is renewed at a third of it while its request is held.",
    "max_replans": "How often a decision is made again after a conflict, or a grant that found no room.",
    "reclaim_tolerance_bytes": "How much less than expected may come back where a device does not tell whose it is.",
    "reclaim_timeout_seconds": "How long memory may take to come back, after the graces: GPU_MEMORY_NOT_RECLAIMED.",
    "stop_grace_seconds": "A runtime is stopped by TERM, this, TERM, this, KILL.",
    "max_queue_seconds": "How long a request without a deadline waits in the queue.",
    "load_backoff_seconds": "After a failed load none is tried for so long, doubling up to 300.",
    "degraded_after_failures": "A capability that failed so often in a row is degraded: an alert and `/readyz` name "
    "it, until it answers a request.",
    "gateway_retries": "How often a request is tried again of whose failure its client saw nothing (once after "
    "GPU_OOM, whatever is set).",
    "plan_history_limit": "How many plans `gpuledger plans` reaches back.",
}


@dataclass(frozen=True, slots=True)
class _Section:
    title: str
    about: str
    type: Any
    words: Mapping[str, str]
    #: Of a runtime: keys of another section that are not told twice.
    without: frozenset[str] = frozenset()


_COMMON: Final = frozenset(
    {
        *("task", "context_length", "batch_size", "parallel", "max_inputs", "max_images", "max_audio_bytes"),
        *("dimensions", "load_timeout_seconds", "check_schema"),
    }
)
_SERVED: Final = frozenset({"served_name", "folder", "environment", "set", "metrics"})

SECTIONS: Final = (
    _Section("The file", "The top level.", ConfigDocument, _FILE),
    _Section("`node`", "This machine, as the planner sees it.", NodeEntry, _NODE),
    _Section("`accelerators`", "Nothing is scheduled that is not measured here.", AcceleratorsEntry, _ACCELERATORS),
    _Section("`accelerators.host`", "In place of true.", HostEntry, _HOST),
    _Section("`clients[]`", "A client and what it is bound to.", ClientEntry, _CLIENT),
    _Section("`deployments[]`", "A model in one configuration of one runtime.", DeploymentEntry, _DEPLOYMENT),
    _Section("`deployments[].residency`", "", Residency, _RESIDENCY),
    _Section("`deployments[].sleep`", "", Sleep, _SLEEP),
    _Section(
        "`deployments[].runtime` with `type: llama_cpp`",
        "llama.cpp's server: the one that `server` names, else a `llama-server` on PATH, else the one in the PyPI "
        "package xllamacpp. All keys but `model`, `projector`, `sha256`, `server`, `load_timeout_seconds` and "
        "`check_schema`, with the content of the files and the version of the server, make the `config_hash` that an "
        "envelope is measured for.",
        LlamaCppConfig,
        _LLAMA,
    ),
    _Section(
        "`deployments[].runtime` with `type: vllm`",
        "vLLM on one GPU, of a version that takes UUIDs of devices (its pull request 45026, of June 2026). Starts and "
        "stops of others wait while it starts. `task`, `max_images` and the other keys that every runtime has are as "
        "above; `context_length`, `parallel` and `batch_size` are its `--max-model-len`, `--max-num-seqs` and "
        "`--max-num-batched-tokens`. All keys but `model`, `sha256`, `command`, `served_name`, `folder`, `metrics`, "
        "`guard`, `load_timeout_seconds` and `check_schema`, with the content of the model and the version, make the "
        "`config_hash`.",
        VllmConfig,
        _RUNTIME,
        _COMMON,
    ),
    _Section(
        "`deployments[].runtime` with `type: command`",
        "Any server that takes a port of the loopback and answers in the way of OpenAI's API; "
        "[operating.md](operating.md) has examples. In `command` and in the values of `set`, `{port}` is the port, "
        "`{model}` the path of `model`, `{name}` the `served_name`; other braces stay. `served_name`, `folder`, "
        "`environment`, `set` and `metrics` are as with `vllm`, and the keys that every runtime has as above. The "
        "arguments of `command`, those keys, the version and the content of `model` and `files` make the "
        "`config_hash`; of `environment` the names, and not the values.",
        CommandConfig,
        _RUNTIME,
        _COMMON | _SERVED,
    ),
    _Section(
        "`deployments[].runtime.metrics` of `type: vllm` and `type: command`",
        "Three numbers are read of a server's metrics, in Prometheus' text format. Where no name is given, vLLM's "
        "names are looked for: `vllm:num_requests_running`, `vllm:num_requests_waiting`, `vllm:kv_cache_usage_perc`. A "
        "mapping that names its own `running` is complete: what it leaves blank is not read.",
        MetricsMapping,
        {},
    ),
    _Section(
        "`deployments[].runtime.sleep` of `type: command`",
        "Requests are POST, with an empty JSON object, and answered with 200.",
        SleepPaths,
        _SLEEP_PATHS,
    ),
    _Section(
        "`deployments[].runtime` with `type: reference`",
        "Our own small server without a model, for trying things out: it holds the bytes that it is told to hold and "
        "answers the same to the same. The keys that every runtime has are as above.",
        ReferenceConfig,
        _REFERENCE,
        _COMMON,
    ),
    _Section("`deployments[].runtime.sleep` of `type: reference`", "", ReferenceSleep, {}),
    _Section("`deployments[].runtime.faults` of `type: reference`", "For tests.", ReferenceFaults, _FAULTS),
    _Section(
        "`policy`",
        "Ratios are in basis points: 500 is 5 %.",
        Policy,
        _POLICY,
    ),
)

_INTRODUCTION: Final = """\
`gpuledger serve --config gpuledger.yaml` and `gpuledger profile` read this file, once, when they start. Without
`--config` they take `./gpuledger.yaml`, then `var/gpuledger.yaml`. To change something, edit the file and start again:
what changed becomes events, and a client or a deployment that is no longer in the file is retired.

- YAML (at most 1 MiB) or JSON. Unknown keys, keys that are there twice, floats, `yes` and `no`, and merge keys are
  refused: all problems at once, each with its place, as `config.deployments[0].kind: is required`.
- Sizes (keys that end in `_bytes`) are bytes, or text with a unit: `512MiB`, `1.5 GB`. Units are B, KB, MB, GB, TB
  (powers of 1000) and KiB, MiB, GiB, TiB (powers of 1024).
- Paths are relative to the folder of the file; `~` is the home folder.
- Ids have letters, digits and `._@#:+/-`, at most 64 characters.

The smallest file that serves something:

```yaml
ledger: ledger.db
clients:
  - id: app
    token_sha256: e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855
deployments:
  - id: minilm
    capability: rag.embedding@1
    kind: host
    runtime: {type: llama_cpp, task: embedding, model: models/all-minilm-l6-v2.f16.gguf}
```

A token and its hash are made by

```sh
python3 -c 'import secrets; print(secrets.token_urlsafe(32))' > app.token && chmod 600 app.token
tr -d '\\n' < app.token | sha256sum
```

or, where the file need not have the hash, by `gpuledger tokens create client NAME` ([operating](operating.md))."""

_RULES: Final = """\
## Rules between keys

- Ids of clients and of deployments, and hashes of tokens, are there once. A capability that a client may ask for is
  served by some deployment. All deployments of a capability have the same `task`.
- `parallel` is `concurrency`. For `llama_cpp`, `ubatch_size` is at most `batch_size`, and for embeddings at least
  `context_length`, as for rankings: such a text is computed in one piece. `dimensions` and `pooling` are for embeddings
  only, `max_images` for chats, `max_audio_bytes` for transcriptions.
- `gpu_layers` is 0 exactly where `kind` is `host`. `projector` and `max_images` go together.
- `vllm` serves where `kind` is `gpu`. Its `batch_size` is at least `parallel`, and for embeddings and rankings at least
  `context_length`.
- A `command` has either `version` or `version_command`, and {port} in one of its arguments or in a value of `set`.
- `always_warm` is the only deployment of its capability at its rank, and that rank is 0.
- `peak_bytes` of a reference runtime is at least its `idle_bytes`, and `sleep.asleep_bytes` at most that.
- `telemetry_max_age_seconds` is at least 3 times `sample_interval_seconds`. The levels of `pressure_enter_bp` rise, and
  each level of `pressure_exit_bp` is at most that of `pressure_enter_bp`."""


def configuration_page(generated: str) -> str:
    """docs/configuration.md, with its comment on where it comes from. Raises KeyError for a key without words."""
    lines = ["# Configuration", "", generated, "", _INTRODUCTION]
    for section in SECTIONS:
        lines += ["", f"## {section.title}", ""]
        lines += [section.about, ""] if section.about else []
        lines += _table(_rows(section))
    return "\n".join([*lines, "", _RULES]) + "\n"


def keys() -> frozenset[str]:
    """Every key that a configuration can have, at whatever place."""
    return frozenset(key for section in SECTIONS for key in _schema(section)["properties"])


def _schema(section: _Section) -> Schema:
    schema: Schema = TypeAdapter(section.type).json_schema()
    return schema


def _rows(section: _Section) -> Iterator[tuple[str, ...]]:
    schema = _schema(section)
    required, types = schema.get("required", ()), schema.get("$defs", {})
    for key, value in schema["properties"].items():
        if key not in section.without:
            default = "required" if key in required else _default(key, value, section.type)
            yield f"`{key}`", _type(key, value, types), default, _meaning(section, key, value)


def _meaning(section: _Section, key: str, value: Schema) -> str:
    words = section.words.get(key) or value.get("description")
    if words is None:
        raise KeyError(f"{section.title} {key}: say in tools/docs_config.py what it means")
    return str(words)


def _type(key: str, value: Schema, types: Mapping[str, Schema]) -> str:
    if "$ref" in value:
        return _type(key, types[str(value["$ref"]).rpartition("/")[2]], types)
    if "anyOf" in value:
        some = [one for one in value["anyOf"] if one.get("type") != "null"]
        return " or ".join(_type(key, one, types) for one in some)
    if "const" in value:
        return f"`{value['const']}`"
    if "enum" in value:
        return ", ".join(f"`{one}`" for one in value["enum"])
    match value["type"]:
        case "boolean":
            return "`true`, `false`"
        case "integer":
            return "size" if key.endswith("_bytes") else f"integer{_bounds(value)}"
        case "array":
            return "list"
        case "object":
            return "mapping"
        case _:
            return "path" if value.get("format") == "path" else "text"


def _bounds(value: Schema) -> str:
    least, most = value.get("minimum", 0), value.get("maximum", MAX_INTEGER)
    if most < _NO_BOUND:
        return f" {least} to {most}"
    return f" ≥ {least}" if least else ""


def _default(key: str, value: Schema, owner: Any) -> str:
    if "default" not in value:
        return _made_default(key, owner)
    default: object = value["default"]
    if default is None:
        return "none"
    if isinstance(default, dict):
        return "see below" if default else "empty"
    if isinstance(default, str):
        return f"`{default}`"
    if type(default) is int and key.endswith("_bytes"):
        return f"`{_size(default)}`"
    return f"`{json.dumps(default)}`"


def _made_default(key: str, owner: Any) -> str:
    """Of a default that a function makes."""
    made: object = owner.__dataclass_fields__[key].default_factory()
    if not isinstance(made, dict):
        return "see below"
    entries = cast("dict[str, object]", made)
    return ", ".join(f"{name} `{one}`" for name, one in entries.items()) or "empty"


def _size(amount_bytes: int) -> str:
    unit, name = next(((u, n) for u, n in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if amount_bytes >= u), (1, "B"))
    return f"{amount_bytes // unit}{name}" if amount_bytes % unit == 0 else str(amount_bytes)


def _table(rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [("key", "type", "default", "meaning"), ("---",) * 4, *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
