"""The conformance vectors: expected values that another implementation computed from `semantics.md`."""

from __future__ import annotations

import json
import random
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import rfc8785
from jsonschema import Draft202012Validator

from gpuledger.domain import documents
from gpuledger.domain.plan_schema import plan_schema
from gpuledger.domain.planner import PlacementPlan, canonical, plan
from gpuledger.domain.state import State

Case: TypeAlias = dict[str, Any]

HERE = Path(__file__).parent


def cases(name: str) -> list[Case]:
    found: list[Case] = json.loads((HERE / f"{name}.json").read_bytes())
    return found


PLANS = cases("plans") + cases("reported")
PRESSURE = cases("pressure")

PLAN_SCHEMA: Any = Draft202012Validator(plan_schema())
STATE_SCHEMA: Any = Draft202012Validator(documents.state_schema())
REQUEST_SCHEMA: Any = Draft202012Validator(documents.request_schema())


def named(case: Case) -> str:
    return str(case["name"])


def planned(case: Case) -> PlacementPlan:
    return plan(*documents.plan_case_of(case))


@pytest.mark.parametrize("case", PLANS, ids=named)
class TestPlans:
    def test_every_expected_value_is_the_plans(self, case: Case) -> None:
        """Every field, also those that the runner of the vectors leaves to the implementation."""
        document, expected = planned(case).document(), dict(case["expect"])
        candidates, evictions = expected.pop("candidates", {}), expected.pop("evictions")
        assert {name: document[name] for name in expected} == expected
        assert sorted(f"{e['resident_id']}:{e['action']}" for e in entries(document, "evictions")) == evictions
        shown = {
            f"{c['deployment_id']}@{c['accelerator_id']}": [c["verdict"], c["reasons"]]
            for c in entries(document, "candidates")
        }
        assert len(shown) == min(16, len(candidates))
        assert all(candidates[key] == found for key, found in shown.items())

    def test_the_order_of_the_input_changes_nothing(self, case: Case) -> None:
        state, request = documents.plan_case_of(case)
        assert plan(shuffled(state, case["name"]), request).document() == plan(state, request).document()

    def test_the_document_keeps_its_schema(self, case: Case) -> None:
        PLAN_SCHEMA.validate(planned(case).document())

    def test_the_fingerprint_is_of_canonical_json(self, case: Case) -> None:
        """`orjson` with sorted keys, which makes it, against the reference implementation of RFC 8785."""
        made = planned(case)
        body: Any = canonical(made)
        assert made.fingerprint == sha256(rfc8785.dumps(body)).hexdigest()

    def test_the_documents_come_back_as_they_went(self, case: Case) -> None:
        state, request = documents.plan_case_of(case)
        assert documents.state_document(state) == case["state"]
        assert documents.request_document(request) == case["request"]
        STATE_SCHEMA.validate(case["state"])
        REQUEST_SCHEMA.validate(case["request"])


@pytest.mark.parametrize("case", PRESSURE, ids=named)
def test_pressure(case: Case) -> None:
    assert documents.judge_case(documents.pressure_case_of(case)) == {"levels": case["expect"]}


def entries(document: dict[str, Any], name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = document[name]
    return found


def shuffled(state: State, seed: str) -> State:
    """The same state with every list of its document, at every depth, in another order."""
    mixed = documents.state_document(state)
    shuffle(mixed, random.Random(seed))
    return documents.state_of(mixed)


def shuffle(value: documents.Json, order: random.Random) -> None:
    if isinstance(value, dict):
        for entry in value.values():
            shuffle(entry, order)
    elif isinstance(value, list):
        for entry in value:
            shuffle(entry, order)
        order.shuffle(value)
