"""`gpuledger.yaml`: what an operator declares. Read and checked whole; every problem is told at once, with its place.

The shape of each entry is one of the types below; what joins two entries is in `_broken_rules`. Sizes may be written
as `512MiB`, paths are relative to the file. What shapes the memory of a model is `adapters/runtimes/config.py`.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from gpuledger.adapters.paths import written_path
from gpuledger.adapters.runtimes.config import (
    BASE_FOLDER,
    CommandConfig,
    LlamaCppConfig,
    RuntimeConfig,
    Task,
    VllmConfig,
)
from gpuledger.domain.document_problems import DocumentError, Problem, at, problems_of
from gpuledger.domain.documents import Json, inspected, policy_document, policy_of
from gpuledger.domain.policy import Policy, Priority
from gpuledger.domain.state import DOCUMENT, Kind, Residency, ResidencyPolicy, Sleep
from gpuledger.domain.units import GIB, KIB, MAX_INTEGER, MIB, Count, Identifier, Milliseconds, PositiveBytes, Sha256Hex

from .config_words import UNITS, in_words, shape_of
from .reading import read_document

#: Ids that are declared become parts of longer ones (residents, leases), which have 200 characters.
ShortId: TypeAlias = Annotated[Identifier, Field(max_length=64)]
Seconds: TypeAlias = Annotated[int, Field(ge=0, le=86_400)]
Positive: TypeAlias = Annotated[int, Field(ge=1, le=1_000_000)]

ALL_CAPABILITIES: Final = "*"
DEFAULT_LISTEN: Final = "127.0.0.1:8910"
MAX_LABEL_CHARACTERS: Final = 1000


@dataclass(frozen=True, slots=True)
class NodeEntry:
    """This machine, as the planner sees it."""

    __pydantic_config__ = DOCUMENT

    id: ShortId = "local"
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    production_eligible: bool = True


@dataclass(frozen=True, slots=True)
class HostEntry:
    """This machine's memory as an accelerator; `memory_limit_bytes` is the most of it that is scheduled."""

    __pydantic_config__ = DOCUMENT

    memory_limit_bytes: PositiveBytes | None = None


@dataclass(frozen=True, slots=True)
class AcceleratorsEntry:
    """What is measured and scheduled. `nvml: auto` watches GPUs where there is a driver or a card."""

    __pydantic_config__ = DOCUMENT

    host: bool | HostEntry = True
    nvml: bool | Literal["auto"] = "auto"
    nvml_library: str | None = None


@dataclass(frozen=True, slots=True)
class ClientEntry:
    """A client and what it is bound to (semantics.md 5). Its token is not here: only the SHA-256 of it, in hex, or
    nothing where its tokens are in the file of tokens alone.
    """

    __pydantic_config__ = DOCUMENT

    id: ShortId
    token_sha256: Sha256Hex | None = None
    priority: Priority = Priority.INTERACTIVE
    lab: bool = False
    capabilities: tuple[str, ...] = (ALL_CAPABILITIES,)

    @property
    def allowed(self) -> frozenset[str] | None:
        """The capabilities it may ask for; None for all."""
        return None if ALL_CAPABILITIES in self.capabilities else frozenset(self.capabilities)


@dataclass(frozen=True, slots=True)
class DeploymentEntry:
    """A model in one configuration of one runtime. `load_ms` and `unload_ms` count until they are measured."""

    __pydantic_config__ = DOCUMENT

    id: ShortId
    capability: ShortId
    kind: Kind
    runtime: Mapping[str, Any]
    priority: Priority = Priority.INTERACTIVE
    concurrency: Annotated[int, Field(ge=1, le=256)] = 1
    queue_limit: Count = 16
    interruptible: bool = False
    production_eligible: bool = True
    max_replicas: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    min_memory_bytes: PositiveBytes | None = None
    node_selector: Mapping[str, str] = field(default_factory=dict[str, str])
    fallback_rank: Count = 0
    load_ms: Milliseconds = 30_000
    unload_ms: Milliseconds = 2_000
    residency: Residency = field(default_factory=Residency)
    sleep: Sleep | None = None


@dataclass(frozen=True, slots=True)
class ConfigDocument:
    """The file as it stands."""

    __pydantic_config__ = DOCUMENT

    ledger: str
    clients: tuple[ClientEntry, ...]
    deployments: tuple[DeploymentEntry, ...]
    state_dir: str | None = None
    listen: str = DEFAULT_LISTEN
    allow_remote: bool = False
    node: NodeEntry = NodeEntry()
    accelerators: AcceleratorsEntry = AcceleratorsEntry()
    policy: Mapping[str, Any] = field(default_factory=dict[str, Any])
    profile: Literal["at_start", "when_idle", "never"] = "at_start"
    drain_seconds: Seconds = 30
    upstream_timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] = 600
    max_body_bytes: Annotated[int, Field(ge=KIB, le=GIB)] = 4 * MIB
    max_open_requests: Positive = 1024


@dataclass(frozen=True, slots=True)
class Config:
    """A configuration that can be served: paths resolved, runtimes read, the policy complete."""

    path: Path
    document: ConfigDocument
    ledger: Path
    state_dir: Path
    host: str
    port: int
    #: As it is given to the loader, which looks for a bare name itself.
    nvml_library: str | None
    policy: Policy
    #: By deployment id.
    runtimes: Mapping[str, RuntimeConfig]

    @property
    def remote(self) -> bool:
        """Whether programs on other machines can reach the address."""
        return not _is_loopback(self.host)


def load_config(path: Path) -> Config:
    """The configuration in a file. Raises DocumentError with everything that is wrong with it."""
    return config_of(read_document(str(path), "config"), path.absolute())


def config_of(value: Json, path: Path) -> Config:
    """The configuration that a document stands for, as if it lay at `path`. Raises DocumentError."""
    problems: list[Problem] = list(inspected(value, "config"))
    tree = with_sizes(value)
    document = _shape(tree, problems)
    runtimes = _runtimes(tree, path.parent, problems)
    policy = _policy(tree, problems)
    if document is not None:
        problems.extend(_broken_rules(document, runtimes))
    address = None if document is None else _address(document, problems)
    ledger = None if document is None else _path("ledger", document.ledger, path.parent, problems)
    state_dir = None if ledger is None else ledger.parent
    if document is not None and document.state_dir is not None:
        state_dir = _path("state_dir", document.state_dir, path.parent, problems)
    nvml_library = None if document is None else _library(document.accelerators.nvml_library, path.parent, problems)
    if problems or document is None or policy is None or address is None or ledger is None or state_dir is None:
        raise DocumentError([in_words(problem) for problem in problems])
    return Config(
        path=path,
        document=document,
        ledger=ledger,
        state_dir=state_dir,
        host=address[0],
        port=address[1],
        nvml_library=nvml_library,
        policy=policy,
        runtimes=runtimes,
    )


# ---- text -------------------------------------------------------------------------------------------------------

_FACTORS: Final = (1, 10**3, 10**6, 10**9, 10**12, KIB, MIB, GIB, KIB * GIB)
_UNITS: Final[Mapping[str, int]] = dict(zip(UNITS, _FACTORS, strict=True))
_SIZE: Final = re.compile(rf"([0-9]{{1,16}}(?:\.[0-9]{{1,9}})?) ?({'|'.join(_UNITS)})")
#: Mappings whose keys are an operator's own words.
_LABELS: Final = frozenset({"labels", "node_selector", "check_schema", "check_body", "set"})


def with_sizes(value: Json, key: str = "") -> Json:
    """The tree with every size as an integer. What is not a size is left for the types to refuse."""
    if isinstance(value, dict):
        return value if key in _LABELS else {name: with_sizes(one, name) for name, one in value.items()}
    if isinstance(value, list):
        return [with_sizes(one) for one in value]
    if isinstance(value, str) and key.endswith("_bytes"):
        match = _SIZE.fullmatch(value)
        size = None if match is None else Fraction(match[1]) * _UNITS[match[2]]
        return value if size is None or size > MAX_INTEGER else int(size)
    return value


# ---- shapes -----------------------------------------------------------------------------------------------------

_DOCUMENT: Final = TypeAdapter(ConfigDocument)
RUNTIME_TYPES: Final = ("llama_cpp", "vllm", "command", "reference")
#: Of a value that is wrong: all of it may be a page.
_SHOWN: Final = 60
#: Those that are told by which name they are asked for their model.
_NAMED_TYPES: Final = ("vllm", "command")
_RUNTIME: Final[TypeAdapter[RuntimeConfig]] = TypeAdapter(RuntimeConfig)


def _shape(tree: Json, problems: list[Problem]) -> ConfigDocument | None:
    try:
        # Only the JSON mode of the types is strict about what a document can say, and lenient about lists for tuples.
        return _DOCUMENT.validate_json(json.dumps(tree))
    except ValidationError as error:
        problems.extend(_told_once(tuple(problems_of(error, ConfigDocument, "config"))))
        return None


def _told_once(problems: tuple[Problem, ...]) -> Iterator[Problem]:
    """`accelerators.host` has two shapes, and pydantic tells what is wrong with it for each of them."""
    host = at("config", "accelerators", "host")
    as_entry, as_answer = at(host, HostEntry.__name__), at(host, bool.__name__)
    for problem in problems:
        if problem.where == as_entry:
            yield Problem(host, problem.message.replace("an object", "true, false or an object", 1))
        elif problem.where != as_answer:
            yield Problem(problem.where.replace(as_entry, host, 1), problem.message)


def _runtimes(tree: Json, folder: Path, problems: list[Problem]) -> Mapping[str, RuntimeConfig]:
    """By deployment id; read also where other parts of the document are wrong."""
    entries = tree.get("deployments") if isinstance(tree, dict) else None
    runtimes: dict[str, RuntimeConfig] = {}
    for index, entry in enumerate(entries if isinstance(entries, list) else ()):
        if isinstance(entry, dict) and isinstance(runtime := entry.get("runtime"), dict):
            where = at("config", "deployments", index, "runtime")
            implied: dict[str, Json] = {"parallel": entry.get("concurrency", 1)}
            if runtime.get("type") in _NAMED_TYPES and isinstance(entry.get("capability"), str):
                implied["served_name"] = entry["capability"]
            found = _runtime({**implied, **runtime}, folder, where, problems)
            if found is not None:
                runtimes[str(entry.get("id"))] = found
    return runtimes


def _runtime(value: dict[str, Json], folder: Path, where: str, problems: list[Problem]) -> RuntimeConfig | None:
    try:
        return _RUNTIME.validate_json(json.dumps(value), strict=None, context={BASE_FOLDER: folder})
    except ValidationError as error:
        problems.extend(_runtime_problem(where, value, detail) for detail in error.errors(include_url=False))
        return None


def _runtime_problem(where: str, value: dict[str, Json], detail: ErrorDetails) -> Problem:
    kind, message = detail["type"], detail["msg"]
    # The first step of a place is the type by which one of the shapes was chosen.
    steps = detail["loc"][1:] if detail["loc"][:1] == (value.get("type"),) else detail["loc"]
    match kind:
        case "value_error":
            text = message.removeprefix("Value error, ")
            if steps:
                return Problem(at(where, *steps), text)
            # A rule of ours that joins two keys names the one that is wrong.
            key, _, text = text.partition(": ")
            return Problem(at(where, key), text)
        case "union_tag_not_found":
            return Problem(at(where, "type"), "is required")
        case "union_tag_invalid":
            known = " or ".join(f'"{tag}"' for tag in RUNTIME_TYPES)
            return Problem(at(where, "type"), f"must be {known}, not {json.dumps(value.get('type'))}")
        case "extra_forbidden":
            return Problem(at(where, *steps), "unknown key")
        case "missing":
            return Problem(at(where, *steps), "is required")
        case "string_pattern_mismatch":
            return Problem(at(where, *steps), shape_of(detail.get("ctx", {})["pattern"]))
        case "int_parsing" | "int_type" | "int_from_float":
            return Problem(at(where, *steps), f"must be an integer, not {json.dumps(detail['input'])[:_SHOWN]}")
        case _:
            words = message.replace("Input should be", "must be").replace("greater than or equal to", "at least")
            return Problem(at(where, *steps), words.replace("less than or equal to", "at most").replace("'", '"'))


def _policy(tree: Json, problems: list[Problem]) -> Policy | None:
    """The policy of this release with the keys that are set. One that differs gets a revision of its own."""
    overrides: Json = tree.get("policy", {}) if isinstance(tree, dict) else {}
    if not isinstance(overrides, dict):
        return None
    base = policy_document(Policy())
    changed = {key: value for key, value in overrides.items() if base.get(key) != value}
    if changed and overrides.get("revision") == base["revision"]:
        where = at("config", "policy", "revision")
        told = f"{base['revision']} is the policy of this release, and other keys differ from it"
        problems.append(Problem(where, f"{told}: leave it out, or name another"))
        return None
    if changed and "revision" not in overrides:
        digest = hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()
        changed["revision"] = f"{base['revision']}+{digest[:8]}"
    try:
        return policy_of({**base, **changed}, at("config", "policy"))
    except DocumentError as error:
        problems.extend(error.problems)
        return None


# ---- rules ------------------------------------------------------------------------------------------------------


def _broken_rules(document: ConfigDocument, runtimes: Mapping[str, RuntimeConfig]) -> Iterator[Problem]:
    """What two entries must be to each other."""
    clients, deployments = document.clients, document.deployments
    yield from _twice("clients", "id", [client.id for client in clients])
    yield from _twice("clients", "token_sha256", [client.token_sha256 for client in clients])
    yield from _twice("deployments", "id", [deployment.id for deployment in deployments])
    yield from _unknown_capabilities(document)
    yield from _mixed_tasks(deployments, runtimes)
    yield from _unrecordable_labels(document)
    for index, deployment in enumerate(deployments):
        where = at("config", "deployments", index)
        yield from _always_warm_shares(where, deployment, deployments)
        if (runtime := runtimes.get(deployment.id)) is not None:
            yield from _runtime_fits(at(where, "runtime"), deployment, runtime)
            if deployment.sleep is not None and not runtime.sleeps:
                told = f"a runtime of type {runtime.type}, as it is configured here, cannot sleep"
                yield Problem(at(where, "sleep"), told)


def _twice(section: str, name: str, values: Sequence[str | None]) -> Iterator[Problem]:
    first: dict[str, int] = {}
    for index, value in enumerate(values):
        if value is None:
            continue
        if value in first:
            yield Problem(
                at("config", section, index, name), f"is there already, at {at('config', section, first[value], name)}"
            )
        else:
            first[value] = index


def _unknown_capabilities(document: ConfigDocument) -> Iterator[Problem]:
    known = {ALL_CAPABILITIES, *(deployment.capability for deployment in document.deployments)}
    for index, client in enumerate(document.clients):
        for number, capability in enumerate(client.capabilities):
            if capability not in known:
                yield Problem(at("config", "clients", index, "capabilities", number), f"nothing serves {capability}")


def _mixed_tasks(deployments: tuple[DeploymentEntry, ...], runtimes: Mapping[str, RuntimeConfig]) -> Iterator[Problem]:
    """What a capability does must not depend on which of its deployments serves it."""
    tasks: dict[str, Task] = {}
    for index, deployment in enumerate(deployments):
        runtime = runtimes.get(deployment.id)
        if runtime is not None and tasks.setdefault(deployment.capability, runtime.task) is not runtime.task:
            where = at("config", "deployments", index, "runtime", "task")
            yield Problem(where, f"another deployment of {deployment.capability} has another task")


def _unrecordable_labels(document: ConfigDocument) -> Iterator[Problem]:
    """Labels enter the ledger, and so its profile of JSON (ledger.md, Bytes); other text that does has a pattern."""
    mappings = {at("config", "node", "labels"): document.node.labels}
    for index, deployment in enumerate(document.deployments):
        mappings[at("config", "deployments", index, "node_selector")] = deployment.node_selector
    for where, labels in mappings.items():
        for key, value in labels.items():
            if not key.isascii():
                yield Problem(at(where, key), "must have a key of ASCII characters")
            if not unicodedata.is_normalized("NFC", value):
                yield Problem(at(where, key), "must be in Unicode normal form NFC")
            if max(len(key), len(value)) > MAX_LABEL_CHARACTERS:
                yield Problem(at(where, key), f"must have at most {MAX_LABEL_CHARACTERS} characters")


def _always_warm_shares(
    where: str, deployment: DeploymentEntry, deployments: tuple[DeploymentEntry, ...]
) -> Iterator[Problem]:
    """It is loaded by asking for its capability, so no other may answer in its place."""
    others = [
        other.id
        for other in deployments
        if other is not deployment
        and (other.capability, other.fallback_rank) == (deployment.capability, deployment.fallback_rank)
    ]
    if deployment.residency.policy is ResidencyPolicy.ALWAYS_WARM and others:
        yield Problem(
            at(where, "residency", "policy"),
            f"always_warm must be the only deployment of {deployment.capability} at its rank, and {others[0]} is too",
        )
    if deployment.residency.policy is ResidencyPolicy.ALWAYS_WARM and deployment.fallback_rank != 0:
        yield Problem(at(where, "fallback_rank"), "must be 0 for always_warm: only rank 0 is asked for")


def _runtime_fits(where: str, deployment: DeploymentEntry, runtime: RuntimeConfig) -> Iterator[Problem]:
    if runtime.parallel != deployment.concurrency:
        yield Problem(at(where, "parallel"), f"must be the concurrency of the deployment ({deployment.concurrency})")
    if isinstance(runtime, LlamaCppConfig):
        on_gpu = runtime.gpu_layers != 0
        if deployment.kind is Kind.HOST and on_gpu:
            yield Problem(at(where, "gpu_layers"), "must be 0 where kind is host")
        if deployment.kind is Kind.GPU and not on_gpu:
            yield Problem(at(where, "gpu_layers"), 'must be "all" or at least 1 where kind is gpu')
    if isinstance(runtime, VllmConfig | CommandConfig) and runtime.served_name != deployment.capability:
        # Requests are passed on as they come, and the checks would find a name that no client says.
        told = f"must be the capability ({deployment.capability}), by which clients name it: leave it out"
        yield Problem(at(where, "served_name"), told)
    if isinstance(runtime, VllmConfig) and deployment.kind is not Kind.GPU:
        yield Problem(at(where, "type"), "vllm serves where kind is gpu, and nowhere else")


# ---- paths and address ------------------------------------------------------------------------------------------

_LISTEN: Final = re.compile(r"(?:\[(?P<v6>[^\[\]]+)\]|(?P<host>[^\[\]:]+)):(?P<port>[0-9]{1,5})")


def _path(key: str, text: str, folder: Path, problems: list[Problem]) -> Path | None:
    try:
        return written_path(text, folder)
    except ValueError as error:
        problems.append(Problem(f"config.{key}", str(error)))
        return None


def _library(name: str | None, folder: Path, problems: list[Problem]) -> str | None:
    if name is None:
        return None
    found = _path("accelerators.nvml_library", name, folder, problems)
    return str(found) if "/" in name else name


def _address(document: ConfigDocument, problems: list[Problem]) -> tuple[str, int] | None:
    where = at("config", "listen")
    match = _LISTEN.fullmatch(document.listen)
    if match is None or int(match["port"]) > 65_535:
        problems.append(Problem(where, f"must be host:port, as {DEFAULT_LISTEN}"))
        return None
    host = match["v6"] or match["host"]
    if not (_is_loopback(host) or document.allow_remote):
        problems.append(
            Problem(where, "reaches beyond this machine, where tokens travel unencrypted: needs allow_remote: true")
        )
    return host, int(match["port"])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
