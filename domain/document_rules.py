"""The rules of a document that join two of its values: ids there once, references that lead somewhere.

Each function yields every place that breaks a rule. The shape of each value is checked before, by its type.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from typing import Final

from .accounting import reserve_of
from .document_problems import Problem, at
from .envelopes import with_margin
from .policy import Policy, Pressure
from .state import Attribution, Kind, State
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
    return chain(
        broken_policy_rules(state.policy, at(where, "policy")),
        _repeated_ids(state, where),
        _dangling_references(state, where),
        _mismatched_kinds(state, where),
        _unknown_attributions(state, where),
        _sleepers_larger_than_awake(state, where),
        _figures_too_large(state, where),
    )


# Ids that must be there once.


def _repeated_ids(state: State, where: str) -> Iterator[Problem]:
    nodes = at(where, "nodes")
    accelerators = [
        (at(nodes, n, "accelerators", a, "accelerator_id"), accelerator.accelerator_id)
        for n, node in enumerate(state.nodes)
        for a, accelerator in enumerate(node.accelerators)
    ]
    yield from _twice(nodes, "node_id", (node.node_id for node in state.nodes))
    yield from _twice_at(accelerators)
    deployments = at(where, "deployments")
    yield from _twice(deployments, "deployment_id", (d.deployment_id for d in state.deployments))
    for d, deployment in enumerate(state.deployments):
        backoff = at(deployments, d, "backoff")
        yield from _twice(backoff, "accelerator_id", (entry.accelerator_id for entry in deployment.backoff))
    residents = at(where, "residents")
    yield from _twice(residents, "resident_id", (resident.resident_id for resident in state.residents))
    # Section 2: there is at most one resident per (accelerator, deployment).
    pairs = (f"{resident.deployment_id} on {resident.accelerator_id}" for resident in state.residents)
    yield from _twice(residents, None, pairs)
    yield from _twice(at(where, "leases"), "lease_id", (lease.lease_id for lease in state.leases))
    yield from _twice(at(where, "queue"), "request_id", (queued.request_id for queued in state.queue))
    samples = (sample.accelerator_id for sample in state.telemetry)
    yield from _twice(at(where, "telemetry"), "accelerator_id", samples)


def _twice(where: str, name: str | None, keys: Iterable[str]) -> Iterator[Problem]:
    """Keys of the entries of one list; `name` is the field they are in, or None for several together."""
    steps = (name,) if name is not None else ()
    return _twice_at((at(where, index, *steps), key) for index, key in enumerate(keys))


def _twice_at(entries: Iterable[tuple[str, str]]) -> Iterator[Problem]:
    first: dict[str, str] = {}
    for where, key in entries:
        if key in first:
            yield Problem(where, f"{key} is there already, at {first[key]}")
        else:
            first[key] = where


# References that must lead somewhere.


def _dangling_references(state: State, where: str) -> Iterator[Problem]:
    accelerators = {a.accelerator_id for node in state.nodes for a in node.accelerators}
    deployments = {deployment.deployment_id for deployment in state.deployments}
    residents = {resident.resident_id for resident in state.residents}
    for place, name, key in _references(state, where):
        known = {"accelerator_id": accelerators, "deployment_id": deployments}.get(name, residents)
        if key not in known:
            kind = name.removesuffix("_id")
            yield Problem(place, f"there is no {kind} {key}")


def _references(state: State, where: str) -> Iterator[tuple[str, str, str]]:
    """Place, kind of id and id of every reference in a state."""
    for index, sample in enumerate(state.telemetry):
        yield at(where, "telemetry", index, "accelerator_id"), "accelerator_id", sample.accelerator_id
    for d, deployment in enumerate(state.deployments):
        backoff = at(where, "deployments", d, "backoff")
        for b, entry in enumerate(deployment.backoff):
            yield at(backoff, b, "accelerator_id"), "accelerator_id", entry.accelerator_id
    for index, resident in enumerate(state.residents):
        place = at(where, "residents", index)
        yield at(place, "accelerator_id"), "accelerator_id", resident.accelerator_id
        yield at(place, "deployment_id"), "deployment_id", resident.deployment_id
    for index, lease in enumerate(state.leases):
        place = at(where, "leases", index)
        yield at(place, "accelerator_id"), "accelerator_id", lease.accelerator_id
        yield at(place, "deployment_id"), "deployment_id", lease.deployment_id
    for index, queued in enumerate(state.queue):
        place, waits_for = at(where, "queue", index, "waiting_for"), queued.waiting_for
        yield at(place, "accelerator_id"), "accelerator_id", waits_for.accelerator_id
        yield at(place, "deployment_id"), "deployment_id", waits_for.deployment_id
        for r, resident_id in enumerate(waits_for.resident_ids):
            yield at(place, "resident_ids", r), "resident_id", resident_id


# Values that contradict each other.


def _mismatched_kinds(state: State, where: str) -> Iterator[Problem]:
    """Section 1: the class of a node's own memory is `host`, and nothing else is of that class."""
    for n, node in enumerate(state.nodes):
        for a, accelerator in enumerate(node.accelerators):
            place = at(where, "nodes", n, "accelerators", a, "gpu_class")
            yield from _class_of_kind(place, accelerator.kind, accelerator.gpu_class)
    for d, deployment in enumerate(state.deployments):
        for e, envelope in enumerate(deployment.envelopes):
            place = at(where, "deployments", d, "envelopes", e, "gpu_class")
            yield from _class_of_kind(place, deployment.kind, envelope.gpu_class)


def _class_of_kind(where: str, kind: Kind, gpu_class: str) -> Iterator[Problem]:
    if kind is Kind.HOST and gpu_class != HOST_CLASS:
        yield Problem(where, f'must be "{HOST_CLASS}" where kind is host')
    if kind is Kind.GPU and gpu_class == HOST_CLASS:
        yield Problem(where, f'must not be "{HOST_CLASS}" where kind is gpu')


def _unknown_attributions(state: State, where: str) -> Iterator[Problem]:
    for index, resident in enumerate(state.residents):
        if resident.attribution is Attribution.UNKNOWN:
            yield Problem(at(where, "residents", index, "attribution"), 'must be "KNOWN" or "ESTIMATED"')


def _sleepers_larger_than_awake(state: State, where: str) -> Iterator[Problem]:
    for index, deployment in enumerate(state.deployments):
        peaks = [e.peak_bytes for e in deployment.envelopes if e.config_hash == deployment.config_hash]
        if deployment.sleep is not None and peaks and deployment.sleep.asleep_bytes > max(peaks):
            place = at(where, "deployments", index, "sleep", "asleep_bytes")
            yield Problem(place, f"must be at most the largest peak_bytes of its envelopes ({max(peaks)})")


def _figures_too_large(state: State, where: str) -> Iterator[Problem]:
    """Sums and margins that leave the integers of the documents (ledger.md, Bytes)."""
    limit = f"more than {MAX_INTEGER} bytes"
    for index, deployment in enumerate(state.deployments):
        for e, envelope in enumerate(deployment.envelopes):
            if with_margin(state.policy, envelope.peak_bytes) > MAX_INTEGER:
                place = at(where, "deployments", index, "envelopes", e, "peak_bytes")
                yield Problem(place, f"with the margin of the policy, is {limit}")
    held: Counter[str] = Counter()
    for resident in state.residents:
        held[resident.accelerator_id] += resident.attributed_bytes + resident.reserved_bytes
    for lease in state.leases:
        held[lease.accelerator_id] += lease.reserved_bytes
    for n, node in enumerate(state.nodes):
        for a, accelerator in enumerate(node.accelerators):
            place = at(where, "nodes", n, "accelerators", a)
            if reserve_of(state.policy, accelerator.total_bytes) > MAX_INTEGER:
                yield Problem(at(place, "total_bytes"), f"its reserve, by the policy, is {limit}")
            if held[accelerator.accelerator_id] > MAX_INTEGER:
                yield Problem(place, f"what residents and leases have and reserve here is {limit}")
