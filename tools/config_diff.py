"""`gpuledger.config-diff/1`: what a start would record of a configuration, and what stands otherwise all the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Final, TypeAlias

from pydantic import TypeAdapter

from gpuledger.domain.configuration import Configuration, difference
from gpuledger.domain.draft import Draft
from gpuledger.domain.events import (
    ClientRevised,
    DeploymentRegistered,
    DeploymentRevised,
    DeploymentSpec,
    NewEvent,
    NodeRegistered,
    PolicyRevised,
    ResidencyPolicyChanged,
)
from gpuledger.domain.world import World

from .policy_document import changes_of

SCHEMA: Final = "gpuledger.config-diff/1"

Document: TypeAlias = dict[str, Any]


def diff_document(world: World, configuration: Configuration, now: int) -> Document:
    """`events` are those of the start that are about what is declared; each that revises something says what.
    `measured`, of deployments: whether an envelope is known of what they become.

    `kept` is where the state differs from the file all the same: an operator changed it, and the file did not change.
    """
    events = difference(world, configuration, now)
    draft = Draft(world, now)
    for event in events:
        draft.emit(event.stream, event.data)
    return {
        "schema": SCHEMA,
        "seq": world.seq,
        "events": [_event(world, event) for event in events],
        "kept": _kept(draft.world, configuration),
    }


def _event(world: World, event: NewEvent) -> Document:
    kind = type(event.data)
    document = {
        "type": kind.__name__,
        "stream": event.stream,
        "changes": _changes(world, event),
        "data": TypeAdapter[Any](kind).dump_python(event.data, mode="json"),
    }
    if isinstance(event.data, DeploymentRevised | DeploymentRegistered):
        document["measured"] = _is_measured(world, event.data.spec)
    return document


def _is_measured(world: World, spec: DeploymentSpec) -> bool:
    """Whether an envelope of what it is to become is known, of whatever class of accelerator."""
    known = world.deployments.get(spec.deployment_id)
    return known is not None and any(
        one.envelope.config_hash == spec.config_hash and not one.envelope.suspect for one in known.measured
    )


def _changes(world: World, event: NewEvent) -> list[Document]:
    """Of what was there before. Empty for what is new, and for what goes."""
    data = event.data
    match data:
        case PolicyRevised(policy=policy):
            return changes_of(world.policy, policy)
        case DeploymentRevised(spec=spec):
            known = world.deployments.get(spec.deployment_id)
            return [] if known is None else _differences(known.spec, spec)
        case ResidencyPolicyChanged(deployment_id=deployment_id, residency=residency):
            known = world.deployments.get(deployment_id)
            return [] if known is None else _differences(known.spec.residency, residency)
        case ClientRevised(client_id=client_id):
            client = world.clients.get(client_id)
            return [] if client is None else _differences(client, data)
        case NodeRegistered(node_id=node_id):
            node = world.nodes.get(node_id)
            return [] if node is None else _differences(node, data)
        case _:
            return []


def _differences(before: object, after: object) -> list[Document]:
    """Field by field, of those that both have."""
    old, new = _plain(before), _plain(after)
    return [
        {"key": key, "from": old[key], "to": value} for key, value in new.items() if key in old and old[key] != value
    ]


def _plain(value: object) -> Mapping[str, Any]:
    assert is_dataclass(value)
    tree = TypeAdapter[Any](type(value)).dump_python(value, mode="json")
    return {field.name: tree[field.name] for field in fields(value)}


def _kept(after: World, configuration: Configuration) -> list[Document]:
    kept: list[Document] = []
    named = replace(configuration.policy, revision=after.policy.revision)
    if (changes := changes_of(named, after.policy)) != []:
        kept.append({"what": "policy", "changes": changes})
    for spec in configuration.deployments:
        known = after.deployments[spec.deployment_id].spec
        if (changes := _differences(spec.residency, known.residency)) != []:
            kept.append({"what": f"residency of {spec.deployment_id}", "changes": changes})
    node = after.nodes[configuration.node_id]
    marks = [name for name, holds in (("cordoned", node.cordoned), ("draining", node.draining)) if holds]
    if marks:
        changes = [{"key": mark, "from": False, "to": True} for mark in marks]
        kept.append({"what": f"node {node.node_id}", "changes": changes})
    return kept
