"""What `gpuledger init` finds on this machine, and what it makes of each model it finds."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from gpuledger.adapters.runtimes.options import Task
from gpuledger.domain.accounting import reserve_of
from gpuledger.domain.envelopes import with_margin
from gpuledger.domain.policy import Policy
from gpuledger.domain.state import Kind

from .gguf_models import Model, PassedOver, models_in
from .machine import Card, Machine

BINDING: Final = "xllamacpp"

# What a deployment starts with where the model allows it: enough to be of use, and little enough to fit beside others.
_HOST_CONTEXT: Final = 4_096
_GPU_CONTEXT: Final = 8_192
#: Texts to be embedded are computed in one piece, which costs memory by their length.
_TEXT_CONTEXT: Final = 2_048
_GPU_CONCURRENCY: Final = 2
#: Of half the logical cores, which are the real ones: llama.cpp spins. More than this brings little.
_MAX_THREADS: Final = 8
#: Of an id, so that a number and a version fit behind it.
_NAME_CHARACTERS: Final = 56


@dataclass(frozen=True, slots=True)
class Found:
    """`host_bytes`: what can be had of the host's memory. `server`, `vllm`: paths of the programs."""

    cards: tuple[Card, ...]
    driver_version: str
    host_bytes: int
    threads: int
    server: str | None
    binding: bool
    vllm: str | None
    models: tuple[Model, ...]
    passed_over: tuple[PassedOver, ...]

    @property
    def card_bytes(self) -> int:
        """The memory of the largest card, 0 without one."""
        return max((card.total_bytes for card in self.cards), default=0)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A deployment for a model. `fits`: whether its weights alone, with their margin, fit somewhere."""

    model: Model
    name: str
    kind: Kind
    why: str
    context_length: int
    concurrency: int
    threads: int
    fits: bool

    @property
    def batch_size(self) -> int | None:
        """None where the default will do: a text that is embedded or ranked must fit into one batch."""
        return None if self.model.task is Task.CHAT else self.context_length


def look_around(machine: Machine, models: Path | None) -> Found:
    """Everything that matters for a configuration. Raises OSError for a folder of models that cannot be read."""
    driver = machine.driver()
    path = machine.environment.get("PATH", "")
    found, passed_over = ([], []) if models is None else models_in(models)
    return Found(
        cards=tuple(card for card in driver.cards if card.total_bytes),
        driver_version=driver.version,
        host_bytes=machine.host_bytes(),
        threads=max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // 2)),
        server=shutil.which("llama-server", path=path),
        binding=importlib.util.find_spec(BINDING) is not None,
        vllm=shutil.which("vllm", path=path),
        models=tuple(found),
        passed_over=tuple(passed_over),
    )


def proposals(found: Found) -> tuple[Proposal, ...]:
    """A deployment for each model, their names unlike each other."""
    named = _named(found.models)
    return tuple(replace(_proposal(found, model), name=name) for model, name in named)


def _proposal(found: Found, model: Model) -> Proposal:
    on_card = _fits(model, found.card_bytes)
    if on_card and found.server is not None:
        return _on_card(found, model)
    if on_card:
        why = "there is a card, and no llama-server that can use it"
    else:
        why = "it does not fit on a card" if found.cards else "there is no card"
    fits = _fits(model, found.host_bytes)
    longest = _HOST_CONTEXT if model.task is Task.CHAT else _TEXT_CONTEXT
    return Proposal(model, "", Kind.HOST, why, _context(model, longest), 1, found.threads, fits)


def _on_card(found: Found, model: Model) -> Proposal:
    longest = _GPU_CONTEXT if model.task is Task.CHAT else _TEXT_CONTEXT
    context, why = _context(model, longest), f"it fits on a card; llama-server is {found.server}"
    return Proposal(model, "", Kind.GPU, why, context, _GPU_CONCURRENCY, found.threads, True)


def _context(model: Model, longest: int) -> int:
    return min(longest, model.context_length or longest)


def _fits(model: Model, total_bytes: int) -> bool:
    policy = Policy()
    return with_margin(policy, model.size_bytes) <= total_bytes - reserve_of(policy, total_bytes)


def _named(models: Sequence[Model]) -> Iterator[tuple[Model, str]]:
    """Names without the type of the weights, where that leaves them apart; then whole ones, then numbered."""
    short = Counter(model.name for model in models)
    taken: Counter[str] = Counter()
    for model in models:
        name = (model.name if short[model.name] == 1 else model.full_name)[:_NAME_CHARACTERS]
        taken[name] += 1
        yield model, name if taken[name] == 1 else f"{name}-{taken[name]}"
