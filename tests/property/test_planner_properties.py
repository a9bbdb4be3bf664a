"""What must hold of every plan, whatever the state (semantics.md 2 and 6)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuledger.domain import documents
from gpuledger.domain.accounting import account
from gpuledger.domain.candidates import Candidate, Start
from gpuledger.domain.eviction import Occupant, Standing, occupants_of, wake_ms_of
from gpuledger.domain.planner import EVIDENCE_LIMIT, PlacementPlan, plan
from gpuledger.domain.policy import Priority
from gpuledger.domain.reasons import Reason, Verdict
from gpuledger.domain.state import PlanRequest, ResidencyPolicy, ResidentState
from gpuledger.domain.view import View, view_of
from tests.property.planner_states import NOW, Question, questions, with_less_used

profile = settings(max_examples=150, deadline=None, derandomize=bool(os.environ.get("CI")))
VECTORS = Path(__file__).parents[1] / "vectors"


def planned(question: Question) -> PlacementPlan:
    return plan(question.state, question.request)


@profile
@given(questions())
def test_a_plan_is_made_of_every_valid_state(question: Question) -> None:
    document = planned(question).document()
    state = documents.state_of(documents.state_document(question.state))
    assert plan(state, question.request).document() == document


@profile
@given(questions())
def test_no_admission_exceeds_what_is_schedulable(question: Question) -> None:
    view = view_of(question.state)
    for candidate in planned(question).candidates:
        if candidate.verdict.admits:
            assert candidate.needed_bytes is not None
            left = schedulable_after(view, candidate.accelerator_id, moves_of(candidate)) - candidate.needed_bytes
            assert left == candidate.headroom_after_bytes >= 0


@profile
@given(questions())
def test_evictions_are_the_optimum_of_all_sets(question: Question) -> None:
    """Against every set there is, by the formulas of the text."""
    view = view_of(question.state)
    for candidate in planned(question).candidates:
        if candidate.verdict is Verdict.ADMIT_AFTER_EVICTION:
            best = min(
                feasible_sets(view, question.request, candidate), key=lambda moves: order(view, candidate, moves)
            )
            assert moves_of(candidate) == best


@profile
@given(questions())
def test_no_eviction_is_in_vain(question: Question) -> None:
    """Without any one of those that nothing forces, the set would not do."""
    view = view_of(question.state)
    for candidate in planned(question).candidates:
        moves = moves_of(candidate)
        for move in moves:
            fewer = tuple(other for other in moves if other != move)
            assert fewer not in set(feasible_sets(view, question.request, candidate))


@profile
@given(questions(), st.randoms(use_true_random=False))
def test_more_free_memory_never_refuses_what_was_admitted(question: Question, rng: Random) -> None:
    """An ADMIT stays one. What would evict may instead wait for what unloads already, if the queue has room."""
    before, after = planned(question), planned(with_less_used(question, rng))
    verdicts = {(c.deployment_id, c.accelerator_id): c for c in after.candidates}
    for candidate in before.candidates:
        now = verdicts[candidate.deployment_id, candidate.accelerator_id]
        if candidate.verdict is Verdict.ADMIT:
            assert now.verdict is Verdict.ADMIT
        if candidate.verdict is Verdict.ADMIT_AFTER_EVICTION:
            assert now.verdict.admits or now.reasons[0] in (Reason.WAITING_FOR_DRAIN, Reason.QUEUE_FULL)
    if before.verdict is Verdict.ADMIT:
        assert after.verdict is Verdict.ADMIT


@profile
@given(questions(), st.randoms(use_true_random=False))
def test_the_order_of_lists_changes_nothing(question: Question, rng: Random) -> None:
    state = question.state

    def mixed(entries: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(rng.sample(entries, len(entries)))

    nodes = [replace(node, accelerators=mixed(node.accelerators)) for node in state.nodes]
    deployments = [replace(d, envelopes=mixed(d.envelopes), backoff=mixed(d.backoff)) for d in state.deployments]
    other = replace(
        state,
        nodes=mixed(nodes),
        deployments=mixed(deployments),
        residents=mixed(state.residents),
        leases=mixed(state.leases),
        queue=mixed(state.queue),
        telemetry=mixed(state.telemetry),
    )
    assert plan(other, question.request).document() == planned(question).document()


@profile
@given(questions(most_accelerators=24, most_deployments=3), st.integers(0, 40))
def test_evidence_is_bounded(question: Question, number: int) -> None:
    state = question.state
    if state.residents:
        first = state.residents[0]
        deployment = next(d for d in state.deployments if d.deployment_id == first.deployment_id)
        crowd = [f"crowd-{index}" for index in range(number)]
        state = replace(
            state,
            deployments=(*state.deployments, *(replace(deployment, deployment_id=d, capability=d) for d in crowd)),
            residents=(*state.residents, *(replace(first, deployment_id=d, resident_id=d) for d in crowd)),
        )
    made = plan(state, question.request)
    document: Any = made.document()
    assert len(document["candidates"]) == min(EVIDENCE_LIMIT, len(made.candidates))
    assert len(document["residents"]) == min(EVIDENCE_LIMIT, len(made.residents))
    rest = made.candidates[EVIDENCE_LIMIT:]
    assert sum(document["rejected_counts"].values()) == sum(len(candidate.reasons) for candidate in rest)


@profile
@given(questions())
def test_a_queued_plan_says_what_it_waits_for(question: Question) -> None:
    made = planned(question)
    assert (made.waiting_for is not None) == (made.verdict is Verdict.QUEUE)
    if made.waiting_for is not None:
        there = {r.resident_id for r in question.state.residents if r.accelerator_id == made.accelerator_id}
        assert set(made.waiting_for.resident_ids) <= there
        assert made.waiting_for.reason is made.reasons[0]
        assert made.waiting_for.not_before is None or made.waiting_for.not_before > NOW


def test_no_seed_of_hashes_changes_a_fingerprint(tmp_path: Path) -> None:
    cases = json.loads((VECTORS / "reported.json").read_bytes())
    batch = tmp_path / "cases.jsonl"
    batch.write_text("".join(json.dumps(case) + "\n" for case in cases))
    command = [sys.executable, "-m", "gpuledger.tools.cli", "plan", "--batch", str(batch)]
    answers = {
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(answers) == 1


# The text of 6.4, by brute force: every set, no bounds, no encodings.

Move: TypeAlias = tuple[str, str]
"""Resident id and action."""


def moves_of(candidate: Candidate) -> tuple[Move, ...]:
    return tuple((e.resident_id, e.action.value) for e in candidate.evictions)


def occupants_at(view: View, request: PlanRequest, candidate: Candidate) -> tuple[Occupant, ...]:
    return occupants_of(view, candidate.accelerator_id, candidate.deployment_id, request.priority)


def feasible_sets(view: View, request: PlanRequest, candidate: Candidate) -> Iterator[tuple[Move, ...]]:
    occupants = [o for o in occupants_at(view, request, candidate) if o.standing is Standing.EVICTABLE]
    residents = view.residents_at.get(candidate.accelerator_id, ())
    full_house = candidate.start is Start.COLD and len(residents) >= view.policy.max_residents
    for moves in product(*(ways(view, candidate, occupant) for occupant in occupants)):
        chosen = tuple(move for move in moves if move is not None)
        if not chosen or (full_house and all(action == "sleep" for _, action in chosen)):
            continue
        if (candidate.needed_bytes or 0) > schedulable_after(view, candidate.accelerator_id, chosen):
            continue
        if request.deadline is None or view.now + takes_micros(view, candidate, chosen) <= request.deadline:
            yield chosen


def ways(view: View, candidate: Candidate, occupant: Occupant) -> list[Move | None]:
    """What a set may do with a resident: nothing (None), a sleep, an unload."""
    name, own = occupant.resident.resident_id, view.deployments[candidate.deployment_id]
    exclusive = ResidencyPolicy.EXCLUSIVE in (own.residency.policy, occupant.deployment.residency.policy)
    if exclusive or occupant.deployment is own:
        return [(name, "unload")]
    sleep = occupant.deployment.sleep
    can_sleep = (
        sleep is not None
        and occupant.resident.state is ResidentState.READY
        and not occupant.leases
        and sleep.asleep_bytes < occupant.resident.attributed_bytes
    )
    return [None, (name, "unload"), *([(name, "sleep")] if can_sleep else [])]


def freed(view: View, move: Move) -> int:
    resident = view.residents[move[0]]
    sleep = view.deployments[resident.deployment_id].sleep
    return resident.attributed_bytes - (sleep.asleep_bytes if sleep is not None and move[1] == "sleep" else 0)


def schedulable_after(view: View, accelerator_id: str, moves: Sequence[Move]) -> int:
    gone = {view.residents[name].deployment_id for name, _ in moves}
    total = sum(freed(view, move) for move in moves)
    return account(view, accelerator_id, without_reservations_of=gone, freed_bytes=total).schedulable_bytes


def takes_micros(view: View, candidate: Candidate, moves: Sequence[Move]) -> int:
    takes = candidate.start_micros
    for name, action in moves:
        deployment = view.deployments[view.residents[name].deployment_id]
        sleep = deployment.sleep
        takes += 1000 * (sleep.sleep_ms if sleep is not None and action == "sleep" else deployment.unload_ms)
    return takes


def price(view: View, move: Move) -> int:
    resident = view.residents[move[0]]
    deployment = view.deployments[resident.deployment_id]
    match resident.state:
        case ResidentState.READY:
            return wake_ms_of(deployment) if move[1] == "sleep" else deployment.load_ms
        case ResidentState.SLEEPING:
            return max(0, deployment.load_ms - wake_ms_of(deployment))
        case _:
            return 0


def order(view: View, candidate: Candidate, moves: Sequence[Move]) -> tuple[Any, ...]:
    """Items 1 to 5."""
    classes: list[int] = []
    for priority in Priority:
        residents = [view.residents[name] for name, _ in moves]
        leases = [
            lease
            for resident in residents
            for lease in view.active_leases(resident.accelerator_id, resident.deployment_id)
        ]
        classes.append(sum(1 for lease in leases if lease.priority is priority))
        of_class = [m for m in moves if view.deployments[view.residents[m[0]].deployment_id].priority is priority]
        classes.append(sum(price(view, move) for move in of_class))
    newest = max(view.residents[name].last_used_at for name, _ in moves)
    return (classes, newest, sum(freed(view, move) for move in moves), len(moves), sorted(moves))
