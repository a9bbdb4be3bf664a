"""The only place where ports meet adapters (architecture.md)."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

from gpuledger.adapters.clock import LedgerClock
from gpuledger.adapters.http.auth import Client, Clients, Tokens
from gpuledger.adapters.http.gateway import Service
from gpuledger.adapters.http.ports import Operation
from gpuledger.adapters.ledger.sqlite import SqliteLedger
from gpuledger.adapters.runtimes.config import RuntimeConfig, Task
from gpuledger.adapters.runtimes.manager import RuntimeManager
from gpuledger.adapters.telemetry.host import HostSource
from gpuledger.adapters.telemetry.host_memory import HostMeter
from gpuledger.adapters.telemetry.node import NodeTelemetry
from gpuledger.adapters.telemetry.nvml import NvmlSource, probe
from gpuledger.adapters.telemetry.source import Source
from gpuledger.adapters.telemetry.xids import is_xid
from gpuledger.adapters.tokens import FILE_NAME, Token, TokensUnusable, TokenWatch
from gpuledger.domain.configuration import ClientSpec, Configuration
from gpuledger.domain.document_problems import DocumentError, Problem, at
from gpuledger.domain.events import DeploymentSpec
from gpuledger.domain.ports import Ledger, RuntimeFacts, RuntimeFault, Runtimes, Telemetry
from gpuledger.domain.state import Kind
from gpuledger.domain.world import World

from .config import Config, DeploymentEntry, HostEntry
from .fault_words import pinned, told
from .snapshots import load_world

#: In the state folder: authenticates the content of requests.
KEY_NAME: Final = "request.key"
_KEY_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Parts:
    """Adapters behind their ports, and the world as the ledger has it.

    `accelerator_ids`: those of the configuration; None where only the devices can tell.
    """

    ledger: Ledger
    clock: LedgerClock
    telemetry: Telemetry
    runtimes: Runtimes
    world: World
    accelerator_ids: frozenset[str] | None


def open_parts(config: Config) -> Parts:
    """Open the ledger and fold it, and make the rest. Raises LedgerUnavailable, LedgerCorrupt, OSError."""
    config.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    ledger = SqliteLedger(config.ledger)
    try:
        world = load_world(ledger, ledger.load_snapshot())
        return Parts(
            ledger=ledger,
            clock=LedgerClock(world.at),
            telemetry=NodeTelemetry(_sources(config, world)),
            runtimes=RuntimeManager(config.runtimes, config.state_dir),
            world=world,
            accelerator_ids=accelerator_ids_of(config),
        )
    except BaseException:
        ledger.close()
        raise


def _sources(config: Config, world: World) -> list[Source]:
    accelerators = config.document.accelerators
    limit = accelerators.host.memory_limit_bytes if isinstance(accelerators.host, HostEntry) else None
    sources: list[Source] = []
    if accelerators.host is not False:
        sources.append(HostSource(config.document.node.id, limit_bytes=limit))
    if _watches_gpus(config):
        meter = HostMeter(limit_bytes=limit)
        known, mark = _known_gpus(config, world), newest_xid_mark(world)
        sources.append(NvmlSource(config.nvml_library, host=meter, known=known, newest_mark=mark))
    return sources


def _watches_gpus(config: Config) -> bool:
    nvml = config.document.accelerators.nvml
    return probe(config.nvml_library) if nvml == "auto" else nvml


def accelerator_ids_of(config: Config) -> frozenset[str] | None:
    """Those that are in use; None where only the devices can tell."""
    if _watches_gpus(config):
        return None
    return frozenset({f"host:{config.document.node.id}"} if config.document.accelerators.host is not False else ())


def tokens_of(config: Config) -> TokenWatch:
    """The tokens that the command line makes. Raises DocumentError where their file cannot be used."""
    try:
        return TokenWatch(config.state_dir / FILE_NAME)
    except TokensUnusable as error:
        raise DocumentError.of("", str(error)) from None


def _known_gpus(config: Config, world: World) -> list[str]:
    """What the ledger has of this node's GPUs, for the source to say what became of them."""
    return [
        accelerator_id
        for accelerator_id, state in world.accelerators.items()
        if state.node_id == config.document.node.id and state.accelerator.kind is Kind.GPU and not state.retired
    ]


def newest_xid_mark(world: World) -> int:
    """Of all Xids that the ledger knows of, those that were cleared among them; 0 for none."""
    marks = [0]
    for state in world.accelerators.values():
        if state.fault is not None and is_xid(state.fault.cause):
            marks.append(state.fault.mark)
        marks.extend(mark for cause, mark in state.cleared.items() if is_xid(cause))
    return max(marks)


def clients_of(config: Config, tokens: Tokens = tuple[Token, ...]) -> Clients:
    """Who may ask, for the gateway. `tokens`: those beside the ones of the configuration."""
    clients = (
        Client(entry.id, entry.token_sha256, entry.priority, entry.lab, entry.allowed)
        for entry in config.document.clients
    )
    return Clients(clients, tokens)


_OPERATIONS: Final[Mapping[Task, frozenset[Operation]]] = {
    Task.EMBEDDING: frozenset({"embeddings"}),
    Task.CHAT: frozenset({"chat", "completion"}),
    Task.TRANSCRIPTION: frozenset({"transcription"}),
    Task.RERANK: frozenset({"rerank"}),
}


def services_of(config: Config) -> Mapping[str, Service]:
    """Every capability that clients can ask for, those that something serves at rank 0, and what it does.

    Deployments of one rank are interchangeable, and a fallback takes the place of them all: what one of them does not
    take, the capability does not.
    """
    entries = config.document.deployments
    return {
        capability: _service([config.runtimes[one.id] for one in entries if one.capability == capability])
        for capability in dict.fromkeys(one.capability for one in entries if one.fallback_rank == 0)
    }


def _service(runtimes: Sequence[RuntimeConfig]) -> Service:
    task = runtimes[0].task
    hears = task is Task.TRANSCRIPTION
    return Service(
        operations=_OPERATIONS[task],
        max_inputs=min(runtime.max_inputs for runtime in runtimes),
        max_images=min(runtime.max_images for runtime in runtimes),
        max_audio_bytes=min(runtime.max_audio_bytes for runtime in runtimes) if hears else 0,
    )


def configuration_of(config: Config, parts: Parts) -> Configuration:
    """What the file declares, for a start with these parts. Blocking, and raises, as `declared_by`."""
    return declared_by(config, parts.runtimes, parts.accelerator_ids)


def declared_by(config: Config, runtimes: Runtimes, accelerator_ids: frozenset[str] | None) -> Configuration:
    """What the file declares, for the domain. Blocking: hashes the models.

    Raises DocumentError for a model or a program that is not there, or is not what it should be: all of them at once.
    """
    document = config.document
    facts = facts_of(config, runtimes)
    return Configuration(
        ledger_id=f"ledger-{secrets.token_hex(8)}",
        node_id=document.node.id,
        production_eligible=document.node.production_eligible,
        labels=document.node.labels,
        policy=config.policy,
        deployments=tuple(_spec(one, config.runtimes[one.id], facts[one.id]) for one in document.deployments),
        clients=tuple(
            ClientSpec(
                entry.id,
                entry.priority,
                entry.lab,
                None if entry.allowed is None else tuple(sorted(entry.allowed)),
            )
            for entry in document.clients
        ),
        accelerator_ids=accelerator_ids,
        product_version=version("gpuledger"),
        pid=os.getpid(),
        artifacts={name: one.artifact_sha256 for name, one in facts.items() if one.artifact_sha256 is not None},
    )


def facts_of(config: Config, runtimes: Runtimes) -> Mapping[str, RuntimeFacts]:
    """What each deployment comes to, by its id. Blocking: hashes the models, and asks programs for their versions.

    Raises DocumentError with everything that is wrong.
    """
    facts: dict[str, RuntimeFacts] = {}
    problems: list[Problem] = []
    for index, entry in enumerate(config.document.deployments):
        try:
            facts[entry.id] = runtimes.facts(entry.id)
        except RuntimeFault as fault:
            where = at("config", "deployments", index, "runtime")
            found, mend = told(fault, entry.id, pinned(config.runtimes[entry.id]))
            problems.append(Problem(where, f"{fault.failure.value} ({fault.detail}): {found}: {mend}"))
    if problems:
        raise DocumentError(problems)
    return facts


def _spec(entry: DeploymentEntry, runtime: RuntimeConfig, facts: RuntimeFacts) -> DeploymentSpec:
    return DeploymentSpec(
        deployment_id=entry.id,
        capability=entry.capability,
        kind=entry.kind,
        runtime=facts.runtime,
        config_hash=facts.config_hash,
        context_length=runtime.context_length,
        batch_size=runtime.batch_size,
        concurrency=entry.concurrency,
        load_ms=entry.load_ms,
        unload_ms=entry.unload_ms,
        fallback_rank=entry.fallback_rank,
        interruptible=entry.interruptible,
        max_replicas=entry.max_replicas,
        min_memory_bytes=entry.min_memory_bytes,
        node_selector=entry.node_selector,
        priority=entry.priority,
        production_eligible=entry.production_eligible,
        queue_limit=entry.queue_limit,
        residency=entry.residency,
        sleep=entry.sleep,
        starts_alone=facts.starts_alone,
    )


def request_key(state_dir: Path) -> bytes:
    """The key that authenticates the content of requests which clients name; made at the first start. Raises OSError.

    Whoever has it can try whether a request in the ledger said what they think: it is for nobody else to read.
    """
    path = state_dir / KEY_NAME
    with contextlib.suppress(FileExistsError):
        draft = state_dir / f".request.key.{secrets.token_hex(8)}"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
                file.flush()
                os.fsync(file.fileno())
            os.link(draft, path)
        finally:
            draft.unlink()
    return path.read_bytes()
