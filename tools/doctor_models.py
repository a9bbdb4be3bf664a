"""Checks of what the configuration serves: places for deployments, model files, and programs of runtimes."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpuledger.adapters.runtimes.config import CommandConfig, LlamaCppConfig, VllmConfig
from gpuledger.adapters.runtimes.manager import RuntimeManager
from gpuledger.adapters.runtimes.programs import found
from gpuledger.domain.accounting import reserve_of
from gpuledger.domain.envelopes import with_margin
from gpuledger.domain.explain import size
from gpuledger.domain.policy import Policy
from gpuledger.domain.ports import RuntimeFacts, RuntimeFault
from gpuledger.domain.state import Kind

from .config import Config, DeploymentEntry, HostEntry
from .doctor_findings import Finding, fail, ok, warn
from .fault_words import pinned, told
from .gguf_header import GgufError, read_header
from .gguf_models import Model, model_of
from .machine import Driver, Machine
from .reading import reason_of

#: llama.cpp in a wheel; another build than that of its authors has died of an instruction that the CPU lacks.
BINDING: Final = "xllamacpp"
IMPORT_SECONDS: Final = 60
#: Basis points of the whole.
BASIS: Final = 10_000


# ---- programs ---------------------------------------------------------------------------------------------------


def check_servers(machine: Machine) -> Iterator[Finding]:
    """Which servers of models there are at all."""
    path = machine.environment.get("PATH", "")
    programs = {name: shutil.which(name, path=path) for name in ("llama-server", "vllm")}
    there = [f"{name} at {where}" for name, where in programs.items() if where is not None]
    if importlib.util.find_spec(BINDING) is not None:
        there.append(f"{BINDING} (llama.cpp for the CPU)")
        yield from check_binding()
    if there:
        yield ok("runtimes", "; ".join(there))
    else:
        yield warn(
            "runtimes",
            "no llama-server and no vllm on PATH, and no xllamacpp beside gpuledger",
            f"{sys.executable} -m pip install xllamacpp, or install llama.cpp or vLLM",
        )


def check_binding(command: tuple[str, ...] = (sys.executable, "-I", "-c", f"import {BINDING}")) -> Iterator[Finding]:
    """Whether the wheel runs on this CPU, tried in a process that may die of it. Nothing to say when it does."""
    tried = subprocess.run(command, capture_output=True, timeout=IMPORT_SECONDS, check=False)
    if tried.returncode < 0:
        yield fail(
            BINDING,
            f"it dies of {signal.Signals(-tried.returncode).name} on this CPU",
            "use a llama-server that was built here, on PATH or as runtime.server",
        )
    elif tried.returncode:
        last = tried.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        yield fail(BINDING, f"it cannot be imported: {' '.join(last)}", f"pip install --force-reinstall {BINDING}")


def check_commands(machine: Machine, config: Config) -> Iterator[Finding]:
    """The programs that command lines of the configuration name, looked for as they will be."""
    for entry in config.document.deployments:
        runtime = config.runtimes[entry.id]
        if isinstance(runtime, CommandConfig | VllmConfig):
            name = f"program of {entry.id}"
            try:
                yield ok(name, found(runtime.command[0], machine.environment))
            except RuntimeFault as fault:
                yield fail(name, *told(fault, entry.id, pinned(runtime)))


def check_runtimes(
    machine: Machine, config: Config, reading: Callable[[str], None] = lambda _: None
) -> Iterator[Finding]:
    """The version of each deployment's runtime, and the SHA-256 of its model: what a start asks first.

    Reads every model through, about a second a GB. `reading` is called with each deployment's id.
    """
    manager = RuntimeManager(config.runtimes, config.state_dir, environment=machine.environment)
    for entry in config.document.deployments:
        reading(entry.id)
        try:
            yield _runtime(entry, manager.facts(entry.id))
        except RuntimeFault as fault:
            yield fail(f"runtime of {entry.id}", *told(fault, entry.id, pinned(config.runtimes[entry.id])))


def _runtime(entry: DeploymentEntry, facts: RuntimeFacts) -> Finding:
    name = f"runtime of {entry.id}"
    if entry.kind is Kind.GPU and facts.runtime_version.startswith(BINDING):
        return fail(
            name,
            f"{facts.runtime_version} computes on the CPU, and the deployment is of kind gpu",
            "install a llama-server that was built for the card, on PATH or as runtime.server",
        )
    read = "" if facts.artifact_sha256 is None else f", model {facts.artifact_sha256[:12]}… read through"
    return ok(name, f"{facts.runtime} {facts.runtime_version}{read}")


# ---- models -----------------------------------------------------------------------------------------------------


def check_models(machine: Machine, driver: Driver, config: Config) -> Iterator[Finding]:
    """The GGUF files: whole, of the task that is configured, and no greater than the place they are for."""
    for entry in config.document.deployments:
        runtime = config.runtimes[entry.id]
        name = f"model of {entry.id}"
        if isinstance(runtime, LlamaCppConfig):
            model = model_of(runtime.model)
            if isinstance(model, Model):
                yield _model(name, model, runtime, _room(machine, driver, config, entry), config.policy)
            else:
                yield fail(name, f"{model.path} {model.why}", "fetch it again, or correct runtime.model")
            if runtime.projector is not None:
                yield from _projector(name, runtime.projector)
        elif isinstance(runtime, VllmConfig):
            yield from _share(name, runtime, _room(machine, driver, config, entry), config.policy)


def _model(name: str, model: Model, runtime: LlamaCppConfig, room: _Room | None, policy: Policy) -> Finding:
    weights = f"{model.path.name}, {size(model.size_bytes)}"
    trained = model.context_length
    # Of a model that is partly on the card only the scheduler's measurement can tell.
    whole = runtime.gpu_layers in (0, "all")
    if room is not None and whole and with_margin(policy, model.size_bytes) > room.schedulable_bytes:
        return fail(
            name,
            f"{weights}, and at most {size(room.schedulable_bytes)} can be scheduled: with its margin it never fits",
            "a smaller quantisation, fewer gpu_layers, or a place with more memory",
        )
    if model.task is not runtime.task:
        return warn(
            name,
            f"{weights}: by its file it is a model for {model.task.value}, and task is {runtime.task.value}",
            f"task: {model.task.value}, unless you know better",
        )
    if trained is not None and runtime.context_length > trained:
        return warn(
            name,
            f"{weights}: context_length is {runtime.context_length}, and it was trained with {trained}",
            f"context_length: {trained}; llama.cpp gives no more",
        )
    return ok(name, f"{weights}, {model.kind}")


def _projector(name: str, path: Path) -> Iterator[Finding]:
    try:
        header = read_header(path)
    except (GgufError, OSError) as error:
        yield fail(name, f"projector {path}: {reason_of(error)}", "fetch it again, or correct runtime.projector")
        return
    if header.is_cut:
        yield fail(name, f"projector {path} is cut: it is shorter than its tensors", "fetch it again")


def _share(name: str, runtime: VllmConfig, room: _Room | None, policy: Policy) -> Iterator[Finding]:
    """vLLM takes its share of a card whole, and more than what is schedulable can never be granted."""
    if room is None:
        return
    share_bytes = room.total_bytes * runtime.gpu_memory_utilization_bp // BASIS
    if with_margin(policy, share_bytes) > room.schedulable_bytes:
        fitting_bp = room.schedulable_bytes * BASIS // (BASIS + policy.margin_ratio_bp) * BASIS // room.total_bytes
        yield fail(
            name,
            f"vLLM takes {size(share_bytes)} of {size(room.total_bytes)}, and with the margin of the policy that is "
            f"more than the {size(room.schedulable_bytes)} that can be scheduled",
            f"gpu_memory_utilization_bp: at most {fitting_bp}; or a policy with a smaller margin",
        )
    else:
        yield ok(name, f"vLLM takes {size(share_bytes)} of {size(room.total_bytes)}")


@dataclass(frozen=True, slots=True)
class _Room:
    """The largest accelerator of a kind, and what of it is ever handed out."""

    total_bytes: int
    schedulable_bytes: int


def _room(machine: Machine, driver: Driver, config: Config, entry: DeploymentEntry) -> _Room | None:
    """Where the deployment goes; None where that is not known."""
    if entry.kind is Kind.HOST:
        host = config.document.accelerators.host
        total_bytes = machine.host_bytes()
        if isinstance(host, HostEntry) and host.memory_limit_bytes is not None:
            total_bytes = min(total_bytes, host.memory_limit_bytes)
    else:
        total_bytes = max((card.total_bytes for card in driver.cards), default=0)
    if total_bytes == 0:
        return None
    return _Room(total_bytes, max(0, total_bytes - reserve_of(config.policy, total_bytes)))


def check_served(config: Config) -> Iterator[Finding]:
    """Whether there is anything to serve, and anybody to ask for it. Nothing to say where there is."""
    if not config.document.deployments:
        yield warn(
            "deployments",
            "the configuration has none: a server that is started with it serves nothing",
            "gpuledger init FOLDER --models MODELS writes one for each model; docs/configuration.md has every key",
        )
    if not config.document.clients:
        yield warn(
            "clients", "the configuration has none: nobody may ask", "add one under `clients`, then make its token"
        )


def check_places(driver: Driver, config: Config) -> Iterator[Finding]:
    """Whether there is an accelerator of the kind of each deployment at all."""
    accelerators = config.document.accelerators
    watched = accelerators.nvml is not False
    lost = {
        Kind.GPU: not watched or not any(card.error == 0 or card.total_bytes for card in driver.cards),
        Kind.HOST: accelerators.host is False,
    }
    why = {
        Kind.GPU: "no card can be read" if watched else "accelerators.nvml is false",
        Kind.HOST: "accelerators.host is false",
    }
    for kind in Kind:
        names = [entry.id for entry in config.document.deployments if entry.kind is kind]
        if names and lost[kind]:
            yield fail(
                f"kind {kind.value}",
                f"{', '.join(names)}: of kind {kind.value}, and {why[kind]}",
                "nothing falls back to the other kind: change `kind`, or what is watched under `accelerators`",
            )
        elif names:
            yield ok(f"kind {kind.value}", f"there is a place for {', '.join(names)}")
