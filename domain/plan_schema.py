"""The JSON Schema of the plan document `gpuledger.plan/1` (semantics.md 6). A test holds every vector against it."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final, TypeAlias

from .candidates import Start
from .documents import JSON_SCHEMA
from .eviction import Action
from .planner import EVIDENCE_LIMIT, PLAN_SCHEMA
from .policy import Pressure, Priority
from .reasons import Reason, Verdict
from .state import Attribution, ResidentState
from .units import INSTANT_PATTERN, MAX_INTEGER

Schema: TypeAlias = dict[str, Any]


def _enum(members: type[StrEnum]) -> Schema:
    return {"enum": [member.value for member in members]}


def _list(entries: Schema, longest: int | None = None) -> Schema:
    bound = {"maxItems": longest} if longest is not None else {}
    return {"type": "array", "items": entries, **bound}


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _object(properties: Schema, description: str) -> Schema:
    """An object that has all of these properties and no others."""
    return {
        "type": "object",
        "description": description,
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_TEXT: Final[Schema] = {"type": "string"}
_ID: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": 200}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": MAX_INTEGER}
_SIGNED: Final[Schema] = {"type": "integer", "minimum": -MAX_INTEGER, "maximum": MAX_INTEGER}
_INSTANT: Final[Schema] = {"type": "string", "pattern": INSTANT_PATTERN}
_REASONS: Final[Schema] = _list(_enum(Reason))
#: By reason: what the check was about. Names end in their units.
_FIGURES: Final[Schema] = {
    "type": "object",
    "propertyNames": _enum(Reason),
    "additionalProperties": {"type": "object", "additionalProperties": {"type": ["integer", "string", "null"]}},
}

_ACCOUNTING: Final = _object(
    {
        "total_bytes": _COUNT,
        "observed_used_bytes": _nullable(_COUNT),
        "attributed_managed_bytes": _COUNT,
        "attribution_delta_bytes": _nullable(_SIGNED),
        "physical_used_bytes": _COUNT,
        "unmanaged_external_bytes": _COUNT,
        "future_lease_bytes": _COUNT,
        "reserve_bytes": _COUNT,
        "schedulable_bytes": _COUNT,
        "attribution": _enum(Attribution),
    },
    "The figures of semantics.md 2. Null is unknown, never 0.",
)

_RESIDENT: Final = _object(
    {
        "resident_id": _ID,
        "deployment_id": _ID,
        "state": _enum(ResidentState),
        "attributed_bytes": _COUNT,
    },
    "A resident of the chosen accelerator.",
)

_EVICTION: Final = _object(
    {
        "resident_id": _ID,
        "deployment_id": _ID,
        "action": _enum(Action),
        "freed_bytes": _COUNT,
        "price_ms": _COUNT,
        "duration_ms": _COUNT,
        "preempts": _list(_ID),
    },
    "One eviction, and the leases that it preempts (6.4).",
)

_WAITING_FOR: Final = _object(
    {
        "accelerator_id": _ID,
        "deployment_id": _ID,
        "reason": _enum(Reason),
        "needed_bytes": _COUNT,
        "resident_ids": _list(_ID),
        "not_before": _nullable(_INSTANT),
    },
    "What a queued request waits for (6.5).",
)

_CANDIDATE: Final = _object(
    {
        "deployment_id": _ID,
        "accelerator_id": _ID,
        "node_id": _ID,
        "verdict": _enum(Verdict),
        "reasons": _REASONS,
        "figures": _FIGURES,
        "message": _TEXT,
        "start": _nullable(_enum(Start)),
        "estimate_ms": _nullable(_COUNT),
        "requirement_bytes": _nullable(_COUNT),
        "needed_bytes": _nullable(_COUNT),
        "schedulable_bytes": _COUNT,
        "headroom_after_bytes": _COUNT,
        "pressure": _enum(Pressure),
        "active_leases": _COUNT,
        "evictions": _COUNT,
    },
    "A deployment on an accelerator, and why it was or was not admitted.",
)

_PLAN: Final[Schema] = {
    "schema": {"const": PLAN_SCHEMA},
    "plan_id": _nullable(_ID),
    "request_id": _ID,
    "client_id": _ID,
    "as_of": _nullable(_COUNT),
    "decided_at": _INSTANT,
    "planner_version": _TEXT,
    "policy_revision": _ID,
    "capability": _ID,
    "priority": _enum(Priority),
    "lab": {"type": "boolean"},
    "fallback_rank": _COUNT,
    "verdict": _enum(Verdict),
    "reasons": _REASONS,
    "figures": _FIGURES,
    "message": _TEXT,
    "node_id": _nullable(_ID),
    "accelerator_id": _nullable(_ID),
    "deployment_id": _nullable(_ID),
    "resident_id": _nullable(_ID),
    "eligible": {"type": "boolean"},
    "start": _nullable(_enum(Start)),
    "requirement_bytes": _nullable(_COUNT),
    "needed_bytes": _nullable(_COUNT),
    "estimate_ms": _nullable(_COUNT),
    "evictions": _list(_EVICTION),
    "waiting_for": _nullable(_WAITING_FOR),
    "headroom_before_bytes": _nullable(_COUNT),
    "headroom_after_bytes": _nullable(_COUNT),
    "pressure": _nullable(_enum(Pressure)),
    "accounting": _nullable(_ACCOUNTING),
    "residents": _list(_RESIDENT, EVIDENCE_LIMIT),
    "residents_left_out": _COUNT,
    "candidates": _list(_CANDIDATE, EVIDENCE_LIMIT),
    "candidates_left_out": _COUNT,
    "rejected_counts": {"type": "object", "propertyNames": _enum(Reason), "additionalProperties": _COUNT},
    "fingerprint": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
}


def plan_schema() -> Schema:
    """The JSON Schema of a plan."""
    return {"$schema": JSON_SCHEMA, "title": "PlacementPlan", **_object(_PLAN, "One request, one plan.")}
