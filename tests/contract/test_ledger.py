"""What every ledger is: one class, run against each adapter (ledger.md).

A further adapter is one more entry of `STORES`.
"""

from __future__ import annotations

import hashlib
import io
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuledger.adapters.ledger.codec import EventRefused, decode, encode
from gpuledger.adapters.ledger.export import ExportedLedger, export
from gpuledger.adapters.ledger.memory import MemoryLedger
from gpuledger.adapters.ledger.sqlite import SqliteLedger
from gpuledger.domain.events import (
    Event,
    LeaseExpired,
    LeaseRenewed,
    NewEvent,
    NodeRegistered,
    Recorded,
    RequestCancelled,
)
from gpuledger.domain.ports import Batch, Leaf, Ledger, LedgerConflict, LedgerReader, Snapshot
from gpuledger.domain.units import parse_instant

AT = parse_instant("2026-11-30T12:00:00.000000Z")
GPU_0, GPU_1 = "accelerator:GPU-0", "accelerator:GPU-1"
RENEWED, EXPIRED = LeaseRenewed("lease-1", AT), LeaseExpired("lease-1", "resident-1", AT)

Open: TypeAlias = Callable[[], Ledger]
"""Opens the same ledger at every call, as a process that starts again would."""


def _memory(_: Path) -> Open:
    ledger = MemoryLedger()
    return lambda: ledger


def _sqlite(folder: Path) -> Open:
    return lambda: SqliteLedger(folder / "ledger.db")


STORES: Mapping[str, Callable[[Path], Open]] = {"memory": _memory, "sqlite": _sqlite}


@pytest.fixture(params=STORES)
def open_ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    return STORES[request.param](tmp_path)


@pytest.fixture
def ledger(open_ledger: Open) -> Iterator[Ledger]:
    opened = open_ledger()
    yield opened
    opened.close()


def batch(*events: tuple[str, Event], **expect: int) -> Batch:
    """Events by stream; `GPU_0=3` is the version that its stream is expected to have."""
    streams = {"GPU_0": GPU_0, "GPU_1": GPU_1, "policy": "policy", "r1": "request:r1", "n1": "node:n1"}
    return Batch(
        tuple(NewEvent(stream, event) for stream, event in events),
        {streams[key]: value for key, value in expect.items()},
    )


def filled(ledger: Ledger) -> tuple[Recorded, ...]:
    """Six events in three streams, in three batches."""
    cancelled = RequestCancelled("r1", AT, "client_gone")
    return (
        *ledger.append(batch((GPU_0, RENEWED), (GPU_1, EXPIRED), (GPU_0, EXPIRED), GPU_0=0, GPU_1=0), AT),
        *ledger.append(batch(("request:r1", cancelled), r1=0), AT + 5),
        *ledger.append(batch((GPU_0, RENEWED), (GPU_1, RENEWED), GPU_0=2, GPU_1=1), AT + 9),
    )


def everything(ledger: LedgerReader) -> object:
    """All that can be asked of a ledger."""
    return (
        ledger.head(),
        ledger.read(),
        list(ledger.leaves()),
        [ledger.read_stream(stream) for stream in (GPU_0, GPU_1, "request:r1", "policy")],
        [ledger.stream_version(stream) for stream in (GPU_0, GPU_1, "request:r1", "policy")],
        ledger.read_backward(frozenset({"LeaseRenewed", "RequestCancelled"}), 3),
    )


class TestAppend:
    def test_an_empty_ledger(self, ledger: Ledger) -> None:
        assert everything(ledger) == (0, (), [], [(), (), (), ()], [0, 0, 0, 0], ())
        assert ledger.load_snapshot() is None

    def test_numbers_are_dense_over_all_and_over_each_stream(self, ledger: Ledger) -> None:
        assert [(event.seq, event.stream, event.version) for event in filled(ledger)] == [
            (1, GPU_0, 1),
            (2, GPU_1, 1),
            (3, GPU_0, 2),
            (4, "request:r1", 1),
            (5, GPU_0, 3),
            (6, GPU_1, 2),
        ]
        assert ledger.head() == 6

    def test_what_it_answers_is_what_it_reads(self, ledger: Ledger) -> None:
        assert filled(ledger) == ledger.read()

    def test_what_is_read_is_not_what_its_maker_still_changes(self, ledger: Ledger) -> None:
        labels = {"rack": "r1"}
        (appended,) = ledger.append(batch(("node:n1", NodeRegistered("n1", True, labels, "configuration")), n1=0), AT)
        labels["rack"] = "r2"
        assert appended.data == NodeRegistered("n1", True, {"rack": "r1"}, "configuration")
        assert ledger.read() == (appended,)

    def test_instants_never_go_back(self, ledger: Ledger) -> None:
        ledger.append(batch((GPU_0, RENEWED), GPU_0=0), AT + 10)
        ledger.append(batch((GPU_0, RENEWED), (GPU_0, RENEWED), GPU_0=1), AT)
        ledger.append(batch((GPU_0, RENEWED), GPU_0=3), AT + 11)
        assert [event.at - AT for event in ledger.read()] == [10, 10, 10, 11]

    def test_nothing_is_appended_by_an_empty_batch(self, ledger: Ledger) -> None:
        assert ledger.append(batch(GPU_0=7), AT) == ()
        assert ledger.head() == 0

    @pytest.mark.parametrize(
        ("expect", "moved"),
        [
            ({"GPU_0": 2}, GPU_0),
            ({"GPU_0": 4}, GPU_0),
            ({"GPU_0": 0}, GPU_0),
            ({"GPU_0": 3, "policy": 1}, "policy"),
            ({"GPU_0": 3, "GPU_1": 0}, GPU_1),
        ],
    )
    def test_a_stream_that_moved_on_is_named_and_nothing_is_appended(
        self, ledger: Ledger, expect: dict[str, int], moved: str
    ) -> None:
        filled(ledger)
        before = everything(ledger)
        with pytest.raises(LedgerConflict) as caught:
            ledger.append(batch((GPU_0, RENEWED), **expect), AT + 20)
        assert caught.value.stream == moved
        assert everything(ledger) == before
        (after,) = ledger.append(batch((GPU_0, RENEWED), GPU_0=3), AT + 9)
        assert (after.seq, after.at) == (7, AT + 9), "a conflict leaves neither a gap nor its instant"

    def test_a_stream_that_is_only_read_may_be_expected(self, ledger: Ledger) -> None:
        filled(ledger)
        assert len(ledger.append(batch((GPU_0, RENEWED), GPU_0=3, GPU_1=2, policy=0), AT)) == 1

    @pytest.mark.parametrize("wrong", [batch((GPU_0, RENEWED)), batch((GPU_0, RENEWED), GPU_0=-1)])
    def test_a_batch_without_its_conditions_is_a_mistake(self, ledger: Ledger, wrong: Batch) -> None:
        with pytest.raises(ValueError, match=GPU_0):
            ledger.append(wrong, AT)

    @pytest.mark.parametrize("at", [-1, parse_instant("9899-12-31T23:59:59.999999Z") + 1, 2**63, -(2**80)])
    def test_an_instant_that_nobody_could_read_is_a_mistake(self, ledger: Ledger, at: int) -> None:
        with pytest.raises(ValueError, match="no instant of a ledger"):
            ledger.append(batch((GPU_0, RENEWED), GPU_0=0), at)
        assert ledger.head() == 0

    def test_a_batch_is_appended_whole_or_not_at_all(self, ledger: Ledger) -> None:
        with pytest.raises(EventRefused, match=r"LeaseRenewed\.lease_id"):
            ledger.append(batch((GPU_0, EXPIRED), (GPU_0, LeaseRenewed("no id", AT)), GPU_0=0), AT)
        with pytest.raises(LedgerConflict):
            ledger.append(batch((GPU_0, RENEWED), (GPU_1, RENEWED), GPU_0=0, GPU_1=1), AT)
        assert ledger.head() == 0

    def test_threads_that_retry_their_conflicts_all_get_through(self, ledger: Ledger) -> None:
        def append(stream: str) -> None:
            for _ in range(20):
                append_retrying(ledger, stream)

        threads = [threading.Thread(target=append, args=(stream,)) for stream in (GPU_0, GPU_0, GPU_1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [event.seq for event in ledger.read()] == list(range(1, 61))
        for stream, count in ((GPU_0, 40), (GPU_1, 20)):
            assert [event.version for event in ledger.read_stream(stream)] == list(range(1, count + 1))


def append_retrying(ledger: Ledger, stream: str) -> Recorded:
    while True:
        version = ledger.stream_version(stream)
        try:
            return ledger.append(Batch((NewEvent(stream, RENEWED),), {stream: version}), AT)[0]
        except LedgerConflict:
            continue


class TestRead:
    def test_pages(self, ledger: Ledger) -> None:
        events = filled(ledger)
        assert ledger.read(2, 3) == events[2:5]
        assert ledger.read(4) == events[4:]
        assert ledger.read(6) == ledger.read(60) == ledger.read(0, 0) == ()

    def test_a_stream(self, ledger: Ledger) -> None:
        events = filled(ledger)
        assert ledger.read_stream(GPU_0) == (events[0], events[2], events[4])
        assert ledger.stream_version(GPU_0) == 3

    def test_the_newest_of_some_types(self, ledger: Ledger) -> None:
        events = filled(ledger)
        both = frozenset({"LeaseRenewed", "RequestCancelled"})
        assert ledger.read_backward(both, 10) == (events[5], events[4], events[3], events[0])
        assert ledger.read_backward(both, 2) == (events[5], events[4])
        assert ledger.read_backward(frozenset({"LeaseExpired"}), 1) == (events[2],)
        assert ledger.read_backward(both, 0) == ledger.read_backward(frozenset(), 3) == ()
        assert ledger.read_backward(frozenset({"PlanDecided"}), 3) == ()

    def test_leaves_are_the_bytes_of_the_events(self, ledger: Ledger) -> None:
        events = filled(ledger)
        assert [leaf.body for leaf in ledger.leaves()] == [encode(event) for event in events]
        assert [leaf.seq for leaf in ledger.leaves(4)] == [5, 6]
        for leaf in ledger.leaves():
            assert leaf.leaf_hash == hashlib.sha256(b"\0" + leaf.body).digest()

    def test_more_leaves_than_a_page(self, ledger: Ledger) -> None:
        ledger.append(Batch((NewEvent(GPU_0, RENEWED),) * 700, {GPU_0: 0}), AT)
        assert [leaf.seq for leaf in ledger.leaves()] == list(range(1, 701))
        assert [leaf.seq for leaf in ledger.leaves(255)][:2] == [256, 257]
        assert len(ledger.read(256, 256)) == 256

    def test_leaves_end_at_the_head_they_began_with(self, ledger: Ledger) -> None:
        """A reader that follows a busy ledger would otherwise never come to its end."""
        filled(ledger)
        seen: list[Leaf] = []
        for leaf in ledger.leaves():
            append_retrying(ledger, GPU_0)
            seen.append(leaf)
        assert [leaf.seq for leaf in seen] == [1, 2, 3, 4, 5, 6]

    def test_opened_again_it_is_the_same(self, open_ledger: Open, ledger: Ledger) -> None:
        filled(ledger)
        before = everything(ledger)
        ledger.close()
        again = open_ledger()
        assert everything(again) == before
        assert again.append(batch((GPU_0, RENEWED), GPU_0=3), AT)[0].seq == 7
        again.close()

    def test_an_export_answers_as_its_ledger(self, ledger: Ledger, tmp_path: Path) -> None:
        filled(ledger)
        with (tmp_path / "export.jsonl").open("wb") as out:
            assert export(ledger, out) == 6
        exported = ExportedLedger(tmp_path / "export.jsonl")
        assert everything(exported) == everything(ledger)
        for after in range(8):
            assert exported.read(after, 2) == ledger.read(after, 2)
            assert list(exported.leaves(after)) == list(ledger.leaves(after))

    def test_the_bytes_do_not_depend_on_the_store(self, ledger: Ledger) -> None:
        reference = MemoryLedger()
        filled(reference)
        filled(ledger)
        exports = io.BytesIO(), io.BytesIO()
        export(reference, exports[0])
        export(ledger, exports[1])
        assert exports[0].getvalue() == exports[1].getvalue()


class TestSnapshots:
    def of(self, ledger: Ledger, seq: int, body: bytes = b"state") -> Snapshot:
        (leaf,) = (leaf for leaf in ledger.leaves() if leaf.seq == seq)
        return Snapshot(seq, "state/1", leaf.leaf_hash, body)

    def test_the_newest_is_loaded(self, ledger: Ledger) -> None:
        filled(ledger)
        ledger.save_snapshot(self.of(ledger, 5))
        ledger.save_snapshot(self.of(ledger, 2))
        assert ledger.load_snapshot() == self.of(ledger, 5)

    def test_one_of_the_same_place_takes_its_place(self, ledger: Ledger) -> None:
        filled(ledger)
        ledger.save_snapshot(self.of(ledger, 5))
        ledger.save_snapshot(self.of(ledger, 5, b"another"))
        assert ledger.load_snapshot() == self.of(ledger, 5, b"another")

    def test_one_of_another_ledger_is_passed_over(self, ledger: Ledger) -> None:
        filled(ledger)
        ledger.save_snapshot(self.of(ledger, 3))
        ledger.save_snapshot(Snapshot(5, "state/1", b"\0" * 32, b"state"))
        assert ledger.load_snapshot() == self.of(ledger, 3)

    def test_one_beyond_the_head_is_passed_over_and_displaces_none(self, ledger: Ledger) -> None:
        filled(ledger)
        for seq in (70, 71, 72):
            ledger.save_snapshot(Snapshot(seq, "state/1", b"\0" * 32, b"state"))
        assert ledger.load_snapshot() is None
        ledger.save_snapshot(self.of(ledger, 3))
        assert ledger.load_snapshot() == self.of(ledger, 3)

    def test_it_is_there_when_the_ledger_is_opened_again(self, open_ledger: Open, ledger: Ledger) -> None:
        filled(ledger)
        ledger.save_snapshot(self.of(ledger, 6))
        ledger.close()
        again = open_ledger()
        assert again.load_snapshot() == self.of(again, 6)
        again.close()


Step: TypeAlias = tuple[list[str], dict[str, int], int]
STREAMS = st.sampled_from([GPU_0, GPU_1])
STEPS = st.lists(
    st.tuples(
        st.lists(STREAMS, max_size=4),
        st.dictionaries(STREAMS, st.integers(0, 3), max_size=2),
        st.integers(AT, AT + 5),
    ),
    max_size=8,
)


class TestAgainstAModel:
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @pytest.mark.parametrize("store", STORES)
    @given(steps=STEPS)
    def test_any_sequence_of_batches(
        self, store: str, tmp_path_factory: pytest.TempPathFactory, steps: list[Step]
    ) -> None:
        """The model is a list: a batch goes on its end, or fails and leaves it as it was."""
        ledger = STORES[store](tmp_path_factory.mktemp("ledger"))()
        model: list[Recorded] = []
        for streams, offsets, at in steps:
            versions = {stream: sum(event.stream == stream for event in model) for stream in (GPU_0, GPU_1)}
            # Every stream that is written is expected, mostly where it is; `offsets` are those that are not.
            expect = {stream: offsets.get(stream, versions[stream]) for stream in {*streams, *offsets}}
            appended = Batch(tuple(NewEvent(stream, RENEWED) for stream in streams), expect)
            if streams and any(versions[stream] != version for stream, version in expect.items()):
                with pytest.raises(LedgerConflict):
                    ledger.append(appended, at)
                continue
            at = max([at, *(event.at for event in model[-1:])])
            for stream in streams:
                versions[stream] += 1
                model.append(Recorded(len(model) + 1, at, stream, versions[stream], RENEWED))
            ledger.append(appended, at)
        assert list(ledger.read()) == model
        assert [decode(leaf.body, exact=True) for leaf in ledger.leaves()] == model
        assert ledger.head() == len(model)
        ledger.close()
