"""The rules of a document that join two of its values: ids there once, references that lead somewhere.

Each function yields every place that breaks a rule. The shape of each value is checked before, by its type.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import chain, pairwise
from typing import Final

from .accounting import reserve_of
from .document_problems import Problem, Step, at
from .envelopes import with_margin
from .policy import Policy, Pressure
from .state import Accelerator, Attribution, Deployment, Kind, State
from .units import MAX_INTEGER

_RISING: Final = (Pressure.ELEVATED, Pressure.HIGH, Pressure.CRITICAL)
#: `gpu_class` of a node's own memory (semantics.md 1).
HOST_CLASS: Final = "host"


def broken_policy_rules(policy: Policy, where: str = "policy") -> Iterator[Problem]:
    """Sections 4 and 10: what two numbers of a policy must be to each other."""
    if policy.telemetry_max_age_seconds < 3 * policy.sample_interval_seconds:
        yield Problem(
            at(where, "telemetry_max_age_seconds"),
            f"must be at least 3 times sample_interval_seconds ({3 * policy.sample_interval_seconds})",
        )
    for name, thresholds in (
        ("pressure_enter_bp", policy.pressure_enter_bp),
        ("pressure_exit_bp", policy.pressure_exit_bp),
    ):
        for level in _RISING:
            if level not in thresholds:
                yield Problem(at(where, name, level.value), "is required")
        if Pressure.NORMAL in thresholds:
            yield Problem(at(where, name, "NORMAL"), "unknown key: NORMAL has no thresholds")
    enter, leave = policy.pressure_enter_bp, policy.pressure_exit_bp
    for lower, higher in pairwise(_RISING):
        if lower in enter and higher in enter and enter[higher] < enter[lower]:
            place = at(where, "pressure_enter_bp", higher.value)
            yield Problem(place, f"must be at least that of {lower.value} ({enter[lower]})")
    for level in _RISING:
        if level in enter and level in leave and leave[level] > enter[level]:
            place = at(where, "pressure_exit_bp", level.value)
            yield Problem(place, f"must be at most pressure_enter_bp of {level.value} ({enter[level]})")


def broken_state_rules(state: State, where: str = "state") -> Iterator[Problem]:
    """Every rule of a state, its policy's among them."""
    accelerators = {a.accelerator_id: a for node in state.nodes for a in node.accelerators}
    deployments = {deployment.deployment_id: deployment for deployment in state.deployments}
    return chain(
        broken_policy_rules(state.policy, at(where, "policy")),
        _repeated_ids(state, where),
        _dangling_references(state, accelerators, deployments, where),
        _mismatched_kinds(state, where),
        _unknown_attributions(state, where),
        _sleeps_that_free_nothing(state, where),
        _figures_too_large(state, where),
    )


# Ids that must be there once.


def _repeated_ids(state: State, where: str) -> Iterator[Problem]:
    for name, keys in (
        ("nodes", [("node_id", node.node_id) for node in state.nodes]),
        ("deployments", [("deployment_id", d.deployment_id) for d in state.deployments]),
        ("residents", [("resident_id", resident.resident_id) for resident in state.residents]),
        ("leases", [("lease_id", lease.lease_id) for lease in state.leases]),
        ("queue", [("request_id", queued.request_id) for queued in state.queue]),
        ("telemetry", [("accelerator_id", sample.accelerator_id) for sample in state.telemetry]),
    ):
        yield from _twice((((name, at_), key[0]), key[1]) for at_, key in enumerate(keys)) and ()
    yield from ()
