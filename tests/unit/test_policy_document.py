"""Policies as people revise them: which one some keys lead to, and what it is called."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuledger.domain.document_problems import DocumentError
from gpuledger.domain.documents import policy_document
from gpuledger.domain.policy import Policy, Pressure
from gpuledger.tools.config import config_of
from gpuledger.tools.policy_document import changes_of, revised


def configured(keys: dict[str, Any]) -> Policy:
    document: dict[str, Any] = {"ledger": "l.db", "clients": [], "deployments": [], "policy": keys}
    return config_of(document, Path("/nowhere/gpuledger.yaml")).policy


@pytest.mark.parametrize("keys", [{"max_replans": 4}, {"max_replans": 4, "recovery_seconds": 5}, {"lab_paused": True}])
def test_it_is_called_as_a_configuration_would_call_it(keys: dict[str, Any]) -> None:
    assert revised(Policy(), keys) == configured(keys)


def test_step_by_step_is_the_same_as_at_once() -> None:
    steps = revised(revised(Policy(), {"max_replans": 4}), {"recovery_seconds": 5})
    assert steps == revised(Policy(), {"recovery_seconds": 5, "max_replans": 4})


def test_back_to_the_defaults_is_the_policy_of_this_release() -> None:
    assert revised(revised(Policy(), {"max_replans": 4}), {"max_replans": 5}) == Policy()


def test_no_keys_are_no_revision_whatever_it_is_called() -> None:
    mine = Policy(max_replans=4, revision="mine-1")
    assert revised(mine, {}) == mine
    assert revised(mine, {"max_replans": 4}) == mine


def test_a_name_alone_may_change() -> None:
    assert revised(Policy(max_replans=4, revision="mine-1"), {"revision": "mine-2"}).revision == "mine-2"


def test_whether_lab_is_paused_now_is_no_part_of_the_name() -> None:
    paused = replace(Policy(), lab_paused=True)
    after = revised(paused, {"max_replans": 4})
    assert after.lab_paused
    assert after.revision == revised(Policy(), {"max_replans": 4}).revision


@pytest.mark.parametrize(
    ("present", "keys"),
    [
        (Policy(max_replans=4, revision="mine-1"), {"revision": "mine-1", "max_replans": 3}),
        (Policy(max_replans=4, revision="mine-1"), {"revision": "m10-v1"}),
    ],
)
def test_a_name_stands_for_one_policy(present: Policy, keys: dict[str, Any]) -> None:
    with pytest.raises(DocumentError) as error:
        revised(present, keys)
    assert [problem.where for problem in error.value.problems] == ["policy.revision"]


def test_levels_are_revised_as_a_whole() -> None:
    levels: dict[str, Any] = {"ELEVATED": 4600, "HIGH": 7000, "CRITICAL": 9000}
    after = revised(Policy(), {"pressure_enter_bp": levels})
    assert after.pressure_enter_bp[Pressure.CRITICAL] == 9000
    with pytest.raises(DocumentError):
        revised(Policy(), {"pressure_enter_bp": levels | {"HIGH": 9500}})


def test_what_is_different_is_told_in_the_order_of_the_keys() -> None:
    before, after = Policy(), Policy(max_replans=4, reserve_ratio_bp=100, revision="mine-1")
    assert changes_of(before, after) == [
        {"key": "revision", "from": "m10-v1", "to": "mine-1"},
        {"key": "reserve_ratio_bp", "from": 500, "to": 100},
        {"key": "max_replans", "from": 5, "to": 4},
    ]
    assert policy_document(before) != policy_document(after)
