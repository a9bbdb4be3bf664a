"""What the plan of a reported case is compared with, and how a case is declared with what is not compared of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeAlias

from gpuledger.domain.events import PlanDecided
from tests.integration.reported_live import Live
from tests.integration.reported_place import Place

_ACCOUNTING: Final = (
    "total_bytes",
    "observed_used_bytes",
    "attributed_managed_bytes",
    "attribution_delta_bytes",
    "physical_used_bytes",
    "unmanaged_external_bytes",
    "future_lease_bytes",
    "reserve_bytes",
    "schedulable_bytes",
)
OF_THE_ANSWER: Final = frozenset({"needed_bytes", "requirement_bytes", "headroom_after_bytes", "headroom_before_bytes"})
AFTER: Final = frozenset({"headroom_after_bytes"})
#: Where sizes are others than those of the vector.
FIGURES: Final = frozenset({*_ACCOUNTING, *OF_THE_ANSWER})

Drive: TypeAlias = Callable[[Place], Awaitable[None]]


class Declaring:
    """A decorator of drives: the name of the case, and what it takes otherwise than the vector (`Live`)."""

    def __init__(self, lives: dict[str, Live]) -> None:
        self._lives = lives

    def __call__(self, name: str, **options: Any) -> Callable[[Drive], Drive]:
        def declared(drive: Drive) -> Drive:
            self._lives[name] = Live(name, drive, **options)
            return drive

        return declared


def same(at: Place, plan: PlanDecided | Mapping[str, Any]) -> None:
    """A plan says what the vector expects, but for what the case compares not; ids are those of this server."""
    document = plan.plan if isinstance(plan, PlanDecided) else plan
    expected, besides = at.live.case["expect"], at.live.besides
    prefix, factor = at.live.prefix, at.live.factor
    found: dict[str, Any] = {
        name: document[name] for name in ("verdict", "reasons", "start", "priority", "fallback_rank", "eligible")
    }
    wanted: dict[str, Any] = {name: expected[name] for name in found}
    found["pressure"], wanted["pressure"] = document["pressure"], expected["pressure"]
    found["deployment_id"], wanted["deployment_id"] = document["deployment_id"], prefix + expected["deployment_id"]
    found["evictions"] = sorted(f"{one['deployment_id']}:{one['action']}" for one in document["evictions"])
    wanted["evictions"] = [prefix + one.removeprefix("res-") for one in expected["evictions"]]
    found["attribution"], wanted["attribution"] = (one["accounting"]["attribution"] for one in (document, expected))
    for name in FIGURES:
        of_plan, of_case = ((one["accounting"] if name in _ACCOUNTING else one)[name] for one in (document, expected))
        found[name], wanted[name] = of_plan, None if of_case is None else round(of_case * factor)
    different = {key: (found[key], wanted[key]) for key in found if found[key] != wanted[key]}
    assert not different.keys() - besides, f"found, and wanted: {different}"
    _same_candidates(at, document, expected)


def _same_candidates(at: Place, document: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Each on the cards of the case, where the plan shows them; elsewhere none has an envelope."""
    cards = at.accelerators
    shown = {
        f"{one['deployment_id'].removeprefix(at.live.prefix)}@{cards[one['accelerator_id']]}": one
        for one in document.get("candidates", ())
        if one["accelerator_id"] in cards
    }
    for key, one in shown.items():
        assert [one["verdict"], one["reasons"]] == expected["candidates"][key], key
    assert cards[document["accelerator_id"]] == expected["accelerator_id"]
