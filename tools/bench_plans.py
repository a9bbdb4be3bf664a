"""States for the bench of the planner: a small node, a card full of residents, many places to choose from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpuledger.domain.policy import Policy, Priority
from gpuledger.domain.reasons import Verdict
from gpuledger.domain.state import (
    Accelerator,
    Deployment,
    Envelope,
    Kind,
    Node,
    PlanRequest,
    Resident,
    ResidentState,
    Sample,
    State,
)
from gpuledger.domain.units import GIB, MIB, seconds

from .bench_ledger import CHAT, START, Day

NOW: Final = START + seconds(3600)
_CLASS: Final = "virtual"
#: The most that one accelerator may hold by default (semantics.md 10).
RESIDENTS: Final = 16


@dataclass(frozen=True, slots=True)
class Situation:
    """A state, a question, and what the planner has to say."""

    name: str
    state: State
    question: PlanRequest
    verdict: Verdict


def situations(day: Day) -> Sequence[Situation]:
    """What the bench decides on."""
    return (_small_node(day), _full_card(), _many_places())


def _small_node(day: Day) -> Situation:
    """A node as it stands at the end of the virtual day, asked for a model that is loaded."""
    return Situation("small node, warm", day.world.state(day.now), _question(CHAT.capability, day.now), Verdict.ADMIT)


def _full_card() -> Situation:
    """The cheapest of the 65,536 sets of 16 idle residents that make room for one that does not fit."""
    held = [1_000 * MIB + number * 137 * MIB for number in range(RESIDENTS)]
    models = [_deployment(f"model-{number}", size) for number, size in enumerate(held)]
    residents = tuple(
        Resident(
            resident_id=f"resident-{number}",
            deployment_id=f"model-{number}",
            accelerator_id="GPU-0",
            state=ResidentState.READY,
            attributed_bytes=size,
            reserved_bytes=size,
            loaded_at=NOW - seconds(3_000),
            last_used_at=NOW - seconds(60 + 7 * number),
            start_ms=2_000 + 371 * (number * 5 % RESIDENTS),
        )
        for number, size in enumerate(held)
    )
    state = State(
        now=NOW,
        policy=Policy(),
        nodes=(_node("node-0", (_card("GPU-0", 0, sum(held) + 2 * GIB),)),),
        deployments=(*models, _deployment("wanted", 9 * GIB)),
        residents=residents,
        telemetry=(_sample("GPU-0", sum(held)),),
    )
    return Situation("16 residents, evict", state, _question("wanted@1", NOW), Verdict.ADMIT_AFTER_EVICTION)


def _many_places() -> Situation:
    """Ten deployments of one capability on ten nodes of one card each: a hundred candidates for a cold start."""
    cards = [_card(f"GPU-{number}", 0, 24 * GIB) for number in range(10)]
    state = State(
        now=NOW,
        policy=Policy(),
        nodes=tuple(_node(f"node-{number}", (card,)) for number, card in enumerate(cards)),
        deployments=tuple(_deployment(f"choice-{number}", (4 + number) * GIB, "wanted@1") for number in range(10)),
        telemetry=tuple(_sample(card.accelerator_id, number * GIB) for number, card in enumerate(cards)),
    )
    return Situation("100 candidates, cold", state, _question("wanted@1", NOW), Verdict.ADMIT)


def _question(capability: str, now: int) -> PlanRequest:
    return PlanRequest("req-bench", "client", capability, Priority.INTERACTIVE, requested_at=now)


def _node(node_id: str, cards: tuple[Accelerator, ...]) -> Node:
    return Node(node_id=node_id, accelerators=cards)


def _card(accelerator_id: str, index: int, total_bytes: int) -> Accelerator:
    return Accelerator(accelerator_id, index, Kind.GPU, _CLASS, total_bytes)


def _sample(accelerator_id: str, used_bytes: int) -> Sample:
    return Sample(accelerator_id, used_bytes, observed_at=NOW - seconds(1), received_at=NOW - seconds(1))


def _deployment(deployment_id: str, peak_bytes: int, capability: str = "") -> Deployment:
    envelope = Envelope(
        config_hash=f"cfg-{deployment_id}",
        gpu_class=_CLASS,
        idle_bytes=peak_bytes,
        peak_bytes=peak_bytes,
        measured_at=NOW - seconds(86_400),
        context_length=4096,
        batch_size=8,
        concurrency=1,
    )
    return Deployment(
        deployment_id=deployment_id,
        capability=capability or f"{deployment_id}@1",
        kind=Kind.GPU,
        config_hash=envelope.config_hash,
        envelopes=(envelope,),
        context_length=4096,
        batch_size=8,
        load_ms=4_000,
        unload_ms=400,
    )
