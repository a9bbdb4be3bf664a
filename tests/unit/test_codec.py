"""Event <-> leaf (ledger.md, Bytes): canonical, closed, and refused at the door rather than found later."""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import pytest
import rfc8785
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuledger.adapters.ledger.codec import (
    MAX_DATA_BYTES,
    EventRefused,
    decode,
    draft,
    encode,
    leaf_hash,
    parse_envelope,
)
from gpuledger.domain import events as vocabulary
from gpuledger.domain.events import (
    EVENT_TYPES,
    Event,
    LeaseRenewed,
    NewEvent,
    NodeRegistered,
    PlanDecided,
    Recorded,
    RequestCompleted,
    TelemetryMissed,
)
from gpuledger.domain.ports import LedgerCorrupt
from gpuledger.domain.units import parse_instant
from tests.golden.examples import Full, example, golden_events, golden_leaves, place, stream_of

_T = TypeVar("_T")

AT = parse_instant("2026-11-30T12:00:00.000000Z")
RENEWED = Recorded(42, AT, "accelerator:GPU-0", 7, LeaseRenewed("lease-1", AT))
LEAF = (
    b'{"at":"2026-11-30T12:00:00.000000Z","data":{"expires_at":"2026-11-30T12:00:00.000000Z","lease_id":"lease-1"},'
    b'"schema":1,"seq":42,"stream":"accelerator:GPU-0","type":"LeaseRenewed","version":7}'
)
PLAN = cast("PlanDecided", example("PlanDecided", Full()))
COMPLETED = cast("RequestCompleted", example("RequestCompleted", Full()))


class Drawn:
    """Values drawn by hypothesis."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def instant(self) -> int:
        return self._draw(st.integers(0, parse_instant("9899-12-31T23:59:59.999999Z")))

    def identifier(self) -> str:
        return self._draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._@#:+/-]{0,20}", fullmatch=True))

    def digest(self) -> str:
        return self._draw(st.from_regex(r"[0-9a-f]{64}", fullmatch=True))

    def text(self) -> str:
        return self._draw(TEXT)

    def choice(self, options: Sequence[_T]) -> _T:
        return self._draw(st.sampled_from(options))

    def length(self) -> int:
        return self._draw(st.integers(0, 3))

    def document(self) -> Mapping[str, Any]:
        return self._draw(st.dictionaries(KEY, JSON, max_size=4))


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).map(
    lambda text: unicodedata.normalize("NFC", text)
)
KEY = st.text(st.characters(max_codepoint=127), max_size=8)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEY, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def events(draw: st.DrawFn) -> Event:
    return example(draw(st.sampled_from(sorted(EVENT_TYPES))), Drawn(draw))


class TestGolden:
    def test_a_leaf_is_what_the_design_says(self) -> None:
        assert encode(RENEWED) == LEAF
        assert decode(LEAF, exact=True) == RENEWED

    def test_every_type_of_event_has_golden_leaves(self) -> None:
        present = [parse_envelope(leaf).type for leaf in golden_leaves()]
        assert sorted(present) == sorted([*EVENT_TYPES, *EVENT_TYPES]), "python -m tests.golden.examples"

    @pytest.mark.parametrize("name", EVENT_TYPES)
    def test_leaves_stay_as_they_are(self, name: str) -> None:
        leaves = [leaf for leaf in golden_leaves() if parse_envelope(leaf).type == name]
        for leaf, event in zip(leaves, golden_events()[name], strict=True):
            envelope = parse_envelope(leaf)
            placed = place(envelope.seq, envelope.version, event)
            assert encode(placed) == leaf
            assert decode(leaf, exact=True) == placed

    def test_the_closed_list_is_the_type_of_events(self) -> None:
        assert set(EVENT_TYPES) == {event.__name__ for event in vocabulary.Event.__args__}

    def test_leaf_hash_is_that_of_rfc_6962(self) -> None:
        # transparency-dev/merkle: the hash of the empty leaf.
        assert leaf_hash(b"").hex() == "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d"


class TestCanonical:
    @settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
    @given(events(), st.integers(1, 2**53 - 1), st.integers(1, 2**53 - 1))
    def test_bytes_are_those_of_another_rfc_8785(self, event: Event, seq: int, version: int) -> None:
        recorded = Recorded(seq, AT, stream_of(type(event).__name__), version, event)
        leaf = encode(recorded)
        assert leaf == rfc8785.dumps(json.loads(leaf))
        assert decode(leaf, seq, exact=True) == recorded

    @settings(max_examples=300)
    @given(st.data())
    def test_no_other_bytes_pass_for_a_leaf(self, data: st.DataObject) -> None:
        """Whatever is decoded exactly is encoded to the same bytes: there is one leaf per event and place."""
        leaf = bytearray(data.draw(st.sampled_from(golden_leaves())))
        for _ in range(data.draw(st.integers(1, 3))):
            start = data.draw(st.integers(0, len(leaf)))
            stop = data.draw(st.integers(start, min(len(leaf), start + 3)))
            leaf[start:stop] = data.draw(
                st.binary(max_size=2) | st.sampled_from([b'"', b",", b"0", b" ", b"}", b"\\u0041"])
            )
        try:
            recorded = decode(bytes(leaf), exact=True)
        except LedgerCorrupt:
            return
        assert encode(recorded) == leaf

    @given(st.integers(0, len(LEAF) - 1))
    def test_a_cut_leaf_is_none(self, length: int) -> None:
        with pytest.raises(LedgerCorrupt):
            decode(LEAF[:length])

    def test_what_is_handed_out_is_what_every_reader_gets(self) -> None:
        """Not the event that was decided, with what its maker may still change in it."""
        labels = {"rack": "r1"}
        drafted = draft(NewEvent("node:n1", NodeRegistered("n1", True, labels, "configuration")))
        labels["rack"] = "r2"
        assert drafted.event == NodeRegistered("n1", True, {"rack": "r1"}, "configuration")


@dataclass(frozen=True, slots=True)
class Refused:
    event: Event
    path: str
    message: str
    stream: str = "request:r1"


def _plan(value: object) -> PlanDecided:
    return replace(PLAN, plan={"steps": [{"ok": 1}, {"bad": value}]})


CIRCLE: dict[str, Any] = {}
CIRCLE["self"] = CIRCLE
IMPOSTOR: Any = type("RequestCompleted", (), {})
REFUSED = {
    "float": Refused(_plan(1.0), "PlanDecided.plan.steps.1.bad", "is a float"),
    "nan": Refused(_plan(math.nan), "PlanDecided.plan", "another value"),
    "tuple": Refused(_plan((1, 2)), "PlanDecided.plan", "another value"),
    "set": Refused(_plan({1}), "PlanDecided.plan", "another value"),
    "key no string": Refused(_plan({1: 1}), "PlanDecided.plan", "another value"),
    "circle": Refused(replace(PLAN, plan=CIRCLE), "PlanDecided", "Circular"),
    "integer beyond doubles": Refused(_plan(2**53), "PlanDecided.plan.steps.1.bad", "beyond 2^53 - 1"),
    "negative beyond doubles": Refused(_plan(-(2**53)), "PlanDecided.plan.steps.1.bad", "beyond 2^53 - 1"),
    "integer beyond 64 bits": Refused(_plan(2**80), "PlanDecided.plan.steps.1.bad", "beyond 2^53 - 1"),
    "key not ASCII": Refused(_plan({"ключ": 1}), "PlanDecided.plan.steps.1.bad", "keys are ASCII"),
    "not NFC": Refused(_plan("e\u0301"), "PlanDecided.plan.steps.1.bad", "NFC"),
    "lone surrogate": Refused(_plan("\ud800"), "PlanDecided.plan.steps.1.bad", "surrogate"),
    "lone surrogate in a field": Refused(
        replace(PLAN, planner_version="\udfff"), "PlanDecided.planner_version", "surrogate"
    ),
    "not NFC in a field": Refused(replace(PLAN, planner_version="\u212b"), "PlanDecided.planner_version", "NFC"),
    "what JSON has no form for": Refused(_plan(object()), "PlanDecided", "object"),
    "too deep": Refused(_plan(json.loads("[" * 400 + "]" * 400)), "PlanDecided", "depth"),
    "too large": Refused(_plan("x" * MAX_DATA_BYTES), "PlanDecided", "more than a leaf may have"),
    "float for a figure": Refused(replace(COMPLETED, queued_ms=cast("int", 1.5)), "RequestCompleted", "queued_ms"),
    "figure out of its bounds": Refused(replace(COMPLETED, queued_ms=-1), "RequestCompleted.queued_ms", "0"),
    "no identifier": Refused(replace(COMPLETED, request_id="a b"), "RequestCompleted.request_id", "pattern"),
    "instant before 1970": Refused(replace(COMPLETED, completed_at=-1), "RequestCompleted.completed_at", "1970"),
    "instant beyond calendars": Refused(replace(COMPLETED, completed_at=2**62), "RequestCompleted", "date"),
    "text for an enum": Refused(replace(PLAN, verdict=cast("Any", "ADMIT")), "PlanDecided", "verdict"),
    "nothing for something": Refused(replace(PLAN, plan_id=cast("Any", None)), "PlanDecided.plan_id", "string"),
    "another stream": Refused(COMPLETED, "RequestCompleted", "does not belong", stream="accelerator:GPU-0"),
    "a stream without an id": Refused(COMPLETED, "RequestCompleted", "does not belong", stream="request"),
    "a stream with a bad id": Refused(COMPLETED, "RequestCompleted", "does not belong", stream='request:"'),
    "an unknown stream": Refused(COMPLETED, "RequestCompleted", "does not belong", stream="requests:r1"),
    "a stranger": Refused(cast("Any", object()), "object", "closed list"),
    "an impostor": Refused(IMPOSTOR(), "RequestCompleted", "closed list"),
}


class TestRefusedWhenMade:
    @pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
    def test_outside_the_profile_or_not_to_be_read_back(self, case: Refused) -> None:
        with pytest.raises(EventRefused, match=case.message.replace("^", r"\^")) as caught:
            draft(NewEvent(case.stream, case.event))
        assert caught.value.path == case.path

    def test_it_is_a_value_error(self) -> None:
        assert issubclass(EventRefused, ValueError)


def changed(old: bytes, new: bytes) -> bytes:
    assert LEAF.count(old) == 1, old
    return LEAF.replace(old, new)


CORRUPT = {
    "nothing": (b"", "canonical envelope"),
    "no object": (b"[]", "canonical envelope"),
    "unknown type": (changed(b"LeaseRenewed", b"LeaseLost"), "not one this release knows"),
    "a topic to import": (changed(b"LeaseRenewed", b"os:system"), "canonical envelope"),
    "unknown schema": (changed(b'"schema":1', b'"schema":2'), "this release knows 1"),
    "another key in the envelope": (changed(b'"schema":1', b'"qux":1,"schema":1'), "canonical envelope"),
    "a key less in the envelope": (changed(b'"schema":1,', b""), "canonical envelope"),
    "a space": (changed(b'"schema":1', b'"schema": 1'), "canonical envelope"),
    "a newline at its end": (LEAF + b"\n", "canonical envelope"),
    "a newline in its data": (changed(b'{"expires_at"', b'{\n"expires_at"'), "canonical envelope"),
    "bytes that are no UTF-8": (changed(b"lease-1", b"\xff\xfe"), "LeaseRenewed"),
    "another key in the data": (changed(b'"lease_id"', b'"extra":1,"lease_id"'), "LeaseRenewed.extra"),
    "a key less in the data": (changed(b',"lease_id":"lease-1"', b""), "LeaseRenewed.lease_id"),
    "data of another type": (changed(b'"lease-1"', b"17"), "LeaseRenewed.lease_id"),
    "data with a tail": (changed(b'"lease-1"}', b'"lease-1"},"data":{}'), "LeaseRenewed"),
    "data that is a list": (changed(b'"data":{', b'"data":[{').replace(b"},", b"}],"), "canonical envelope"),
    "another stream": (changed(b"accelerator:GPU-0", b"request:GPU-0"), "does not belong"),
    "a stream that is alone": (changed(b"accelerator:GPU-0", b"accelerator"), "does not belong"),
    "another seq": (changed(b'"seq":42', b'"seq":43'), "says that it is event 43"),
    "seq 0": (changed(b'"seq":42', b'"seq":0'), "canonical envelope"),
    "a leading zero": (changed(b'"seq":42', b'"seq":042'), "canonical envelope"),
    "a version beyond doubles": (changed(b'"version":7', b'"version":9007199254740992'), "beyond 2\\^53"),
    "no instant": (changed(b'{"at":"2026-11', b'{"at":"2026-13'), "at: must be an instant"),
}
ONLY_EXACT = {
    "keys in another order": LEAF.replace(
        b'"expires_at":"2026-11-30T12:00:00.000000Z","lease_id":"lease-1"',
        b'"lease_id":"lease-1","expires_at":"2026-11-30T12:00:00.000000Z"',
    ),
    "a key twice": changed(b'"lease_id"', b'"lease_id":"lease-2","lease_id"'),
    "a space in its data": changed(b'"lease_id":', b'"lease_id": '),
    "an escape that is not needed": changed(b"lease-1", b"\\u006cease-1"),
}


class TestRefusedWhenRead:
    @pytest.mark.parametrize(("leaf", "message"), CORRUPT.values(), ids=CORRUPT.keys())
    def test_what_was_not_written_by_us(self, leaf: bytes, message: str) -> None:
        with pytest.raises(LedgerCorrupt, match=f"^event 42: .*{message}") as caught:
            decode(leaf, 42)
        assert caught.value.seq == 42

    @pytest.mark.parametrize("leaf", ONLY_EXACT.values(), ids=ONLY_EXACT.keys())
    def test_exactly_when_asked(self, leaf: bytes) -> None:
        assert decode(leaf, 42) == RENEWED, "for leaves of ours their hash says it"
        with pytest.raises(LedgerCorrupt, match="event 42: is not in canonical form"):
            decode(leaf, 42, exact=True)

    def test_exactly_a_default_that_was_left_out(self) -> None:
        event = example("TelemetrySampled", Full())
        leaf = encode(Recorded(1, AT, "telemetry:n", 1, event)).replace(b'"invalid":null,', b"")
        shorter = leaf.replace(json.dumps(json.loads(leaf)["data"]["accelerators"][0]["invalid"]).encode(), b"null")
        assert decode(shorter, 1)
        without = rfc8785.dumps(_without_invalid(json.loads(leaf)))
        assert decode(without, 1)
        with pytest.raises(LedgerCorrupt, match="canonical form"):
            decode(without, 1, exact=True)

    def test_exactly_a_float_in_a_document(self) -> None:
        leaf = encode(Recorded(1, AT, "request:r1", 1, replace(PLAN, plan={"x": 15})))
        with pytest.raises(LedgerCorrupt, match=r"PlanDecided.plan.x: is a float"):
            decode(leaf.replace(b'{"x":15}', b'{"x":1.5}'), 1, exact=True)

    def test_missed_telemetry_names_the_place_of_what_is_wrong(self) -> None:
        leaf = encode(Recorded(1, AT, "telemetry:n", 1, TelemetryMissed("n", AT, ("a", "b"), "code")))
        with pytest.raises(LedgerCorrupt, match=r"TelemetryMissed.accelerator_ids.1"):
            decode(leaf.replace(b'["a","b"]', b'["a",""]'))


def _without_invalid(document: Any) -> Any:
    for accelerator in document["data"]["accelerators"]:
        del accelerator["invalid"]
    return document
