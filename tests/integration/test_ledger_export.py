"""Exports: written from any ledger, read as one, and refused by the line (adapters/ledger/export.py)."""

from __future__ import annotations

import io
import os
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gpuledger.adapters.ledger import codec
from gpuledger.adapters.ledger import export as export_module
from gpuledger.adapters.ledger.export import ExportedLedger, export, open_target
from gpuledger.adapters.ledger.memory import MemoryLedger
from gpuledger.adapters.ledger.sqlite import SqliteLedger
from gpuledger.domain.events import LeaseRenewed, NewEvent
from gpuledger.domain.ports import Batch, Leaf, LedgerCorrupt, LedgerUnavailable
from gpuledger.domain.units import parse_instant
from tests.golden.examples import GOLDEN, golden_leaves

AT = parse_instant("2026-11-30T12:00:00.000000Z")
STREAM = "accelerator:GPU-0"
LINES = golden_leaves()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "export.jsonl"


def renewals(count: int, at: int = AT) -> Batch:
    return Batch((NewEvent(STREAM, LeaseRenewed("lease-1", at)),) * count, {STREAM: 0})


def test_the_golden_leaves_are_an_export() -> None:
    with closing(open_target(GOLDEN)) as ledger:
        assert ledger.head() == len(LINES)
        assert [leaf.body for leaf in ledger.leaves()] == LINES
        assert [codec.encode(event) for event in ledger.read()] == LINES


def test_an_export_of_an_export_is_the_same(path: Path) -> None:
    out = io.BytesIO()
    assert export(ExportedLedger(GOLDEN), out) == len(LINES)
    assert out.getvalue() == GOLDEN.read_bytes()


class TestTarget:
    def test_a_sqlite_file(self, tmp_path: Path) -> None:
        with closing(SqliteLedger(tmp_path / "ledger.db")) as ledger:
            ledger.append(renewals(3), AT)
            with closing(open_target(tmp_path / "ledger.db")) as target:
                assert isinstance(target, SqliteLedger)
                assert target.read() == ledger.read()
        with closing(open_target(tmp_path / "ledger.db")) as target:
            assert target.head() == 3
        assert os.listdir(tmp_path) == ["ledger.db"]

    @pytest.mark.parametrize("size", [15, 16, 100, 511, 512, 5000])
    def test_what_is_neither(self, path: Path, size: int) -> None:
        path.write_bytes(b"x" * size)
        with pytest.raises(LedgerCorrupt, match=r"line 1 of .*export.jsonl: is "):
            open_target(path)

    def test_a_database_of_others(self, path: Path) -> None:
        path.write_bytes(b"SQLite format 3\0" + b"x" * 5000)
        with pytest.raises(LedgerCorrupt):
            open_target(path)

    def test_an_empty_file(self, path: Path) -> None:
        path.touch()
        with pytest.raises(LedgerCorrupt, match="the file is empty"):
            open_target(path)
        with pytest.raises(LedgerCorrupt, match="the file is empty"):
            ExportedLedger(path)

    def test_nothing(self, path: Path) -> None:
        with pytest.raises(LedgerUnavailable, match="No such file"):
            open_target(path)

    def test_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(LedgerUnavailable):
            open_target(tmp_path)


def edited(number: int, *lines: bytes) -> bytes:
    """The golden export with other lines in the place of one."""
    return b"".join(line + b"\n" for line in [*LINES[: number - 1], *lines, *LINES[number:]])


DAMAGED = {
    "a line that is no leaf": (edited(7, b'{"at":'), 7, "is not the canonical envelope"),
    "an empty line": (edited(7, b""), 7, "is not the canonical envelope"),
    "a line too many": (edited(7, LINES[6], b""), 8, "is not the canonical envelope"),
    "a line twice": (edited(7, LINES[6], LINES[6]), 8, "says that it is event 7"),
    "a line less": (edited(7), 7, "says that it is event 8"),
    "two lines in another order": (edited(7, LINES[7], LINES[6]), 7, "says that it is event 8"),
    "Windows's ends of lines": (edited(7, LINES[6] + b"\r"), 7, "is not the canonical envelope"),
    "another version": (edited(2, LINES[1].replace(b'"version":2', b'"version":3')), 2, "out of its order"),
    "an instant before": (edited(7, LINES[6].replace(b'{"at":"2026', b'{"at":"2025')), 7, "before the event before it"),
    "a cut last line": (edited(len(LINES), LINES[-1])[:-10], len(LINES), "is cut off"),
    "no newline at the end": (edited(len(LINES), LINES[-1])[:-1], len(LINES), "is cut off"),
    "no first line": (edited(1), 1, "says that it is event 2"),
    "a byte-order mark": (b"\xef\xbb\xbf" + edited(1, LINES[0]), 1, "is not the canonical envelope"),
    "a line without an end": (edited(7, b"x" * (codec.MAX_LEAF_BYTES + 2)), 7, "is longer than a leaf"),
    "compressed": (b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\n", 1, "is not the canonical envelope"),
}


class TestDamaged:
    @pytest.mark.parametrize(("content", "line", "message"), DAMAGED.values(), ids=DAMAGED.keys())
    def test_the_line_is_named(self, path: Path, content: bytes, line: int, message: str) -> None:
        path.write_bytes(content)
        with pytest.raises(LedgerCorrupt, match=f"^line {line} of {path}: .*{message}") as caught:
            ExportedLedger(path)
        assert caught.value.seq == line

    @pytest.mark.parametrize("change", [(b'"node_id":"', b'"node_id": "'), (b'"pid":', b'"pid":"x","pid":')])
    def test_what_a_line_says_is_checked_when_it_is_read(self, path: Path, change: tuple[bytes, bytes]) -> None:
        path.write_bytes(edited(3, LINES[2].replace(*change)))
        ledger = ExportedLedger(path)
        assert len(ledger.read(0, 2)) == 2
        with pytest.raises(LedgerCorrupt, match=f"line 3 of {path}: is not in canonical form"):
            ledger.read()

    def test_a_file_that_shrinks_while_it_is_read(self, path: Path) -> None:
        path.write_bytes(edited(1, LINES[0]))
        ledger = ExportedLedger(path)
        path.write_bytes(LINES[0] + b"\n")
        with pytest.raises(LedgerCorrupt, match="is gone"):
            ledger.read()

    def test_one_that_grows_is_read_to_where_it_was(self, path: Path) -> None:
        path.write_bytes(b"".join(line + b"\n" for line in LINES[:5]))
        ledger = ExportedLedger(path)
        path.write_bytes(edited(1, LINES[0]))
        assert len(ledger.read()) == len(list(ledger.leaves())) == 5


class TestWriting:
    @pytest.mark.parametrize(
        ("leaf", "message"),
        [
            (Leaf(1, LINES[0], b"\0" * 32), "another hash"),
            (Leaf(1, LINES[1], codec.leaf_hash(LINES[1])), "says that it is event 2"),
            (Leaf(1, b"{}", codec.leaf_hash(b"{}")), "canonical envelope"),
        ],
    )
    def test_a_ledger_that_is_not_whole_is_not_exported(self, leaf: Leaf, message: str) -> None:
        class Forged(MemoryLedger):
            def leaves(self, after: int = 0) -> Iterator[Leaf]:
                yield leaf

        out = io.BytesIO()
        with pytest.raises(LedgerCorrupt, match=f"event 1: .*{message}"):
            export(Forged(), out)
        assert out.getvalue() == b""


def test_memory_does_not_grow_with_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_module, "_LINES_PER_MARK", 64)
    with closing(SqliteLedger(tmp_path / "ledger.db")) as ledger:
        ledger.append(renewals(8000), AT)
        tracemalloc.start()
        try:
            with (tmp_path / "export.jsonl").open("wb") as out:
                export(ledger, out)
            exported = ExportedLedger(tmp_path / "export.jsonl")
            assert sum(1 for _ in exported.leaves()) == 8000
            assert len(exported.read_backward(frozenset({"LeaseRenewed"}), 3)) == 3
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert (tmp_path / "export.jsonl").stat().st_size > 1_500_000
    assert peak < 700_000
