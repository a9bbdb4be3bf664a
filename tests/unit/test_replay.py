"""Replay: what a ledger's plans are worth, on ledgers that were lived and on forged ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuledger.adapters.ledger.export import ExportedLedger
from gpuledger.adapters.ledger.memory import MemoryLedger
from gpuledger.domain.events import PlanDecided, RequestReceived
from gpuledger.domain.messages import RequestArrived
from gpuledger.domain.planner import PLANNER_VERSION
from gpuledger.domain.policy import Priority
from gpuledger.domain.ports import LedgerCorrupt
from gpuledger.domain.reasons import Verdict
from gpuledger.domain.scheduler import Scheduler
from gpuledger.domain.units import GIB
from gpuledger.domain.world import World
from gpuledger.tools import replay as replay_module
from gpuledger.tools.replay import RECENT_WORLDS, Absent, Outcome, PlanResult, Replay, fold_to
from tests.simulation.ledgers import MODELS, Lived, crowded_minutes, forged, write_export
from tests.simulation.virtual_shell import NODE, Card, VirtualShell

Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def story() -> Lived:
    return crowded_minutes()


def replayed(path: Path) -> tuple[Replay, list[PlanResult]]:
    run = Replay(ExportedLedger(path))
    return run, list(run.results())


def a_plan(story: Lived, verdict: Verdict) -> int:
    """The `seq` of the newest plan with a verdict."""
    plans = (event for event in reversed(story.events) if isinstance(event.data, PlanDecided))
    return next(event.seq for event in plans if isinstance(event.data, PlanDecided) and event.data.verdict is verdict)


class TestALivedLedger:
    def test_every_plan_is_a_match(self, story: Lived, tmp_path: Path) -> None:
        run, results = replayed(write_export(story, tmp_path / "export"))
        plans = [event for event in story.events if isinstance(event.data, PlanDecided)]
        assert [result.seq for result in results] == [event.seq for event in plans]
        assert {result.outcome for result in results} == {Outcome.MATCH}
        assert run.counts == {Outcome.MATCH: len(plans)}
        assert run.events == len(story.events)
        assert all(run.invariants.values())
        assert {result.verdict for result in results} >= {Verdict.ADMIT, Verdict.QUEUE, Verdict.ADMIT_AFTER_EVICTION}

    def test_it_ends_in_the_state_that_was_lived(self, story: Lived, tmp_path: Path) -> None:
        run, _ = replayed(write_export(story, tmp_path / "export"))
        assert run.world == story.world

    def test_it_reads_a_ledger_in_memory_too(self) -> None:
        shell = VirtualShell(MemoryLedger(), MODELS, (Card("GPU-0", 16 * GIB),))
        shell.start()
        shell.ask("one", "embed@1")
        shell.run_for(10)
        run = Replay(shell.ledger)
        assert [result.outcome for result in run.results()] == [Outcome.MATCH]

    def test_only_some_plans(self, story: Lived, tmp_path: Path) -> None:
        seq = a_plan(story, Verdict.ADMIT_AFTER_EVICTION)
        run = Replay(ExportedLedger(write_export(story, tmp_path / "export")), only=frozenset({seq}))
        assert [(result.seq, result.outcome) for result in run.results()] == [(seq, Outcome.MATCH)]
        assert run.events == seq, "nothing after it is folded"

    def test_progress_comes_to_the_end(self, story: Lived, tmp_path: Path) -> None:
        told: list[int] = []
        run = Replay(ExportedLedger(write_export(story, tmp_path / "export")))
        list(run.results(told.append))
        assert told == sorted(told)
        assert told[-1] == run.last == len(story.events)


class TestAKeptState:
    def test_it_is_that_of_the_fold(self, story: Lived, tmp_path: Path) -> None:
        half = story.until(len(story.events) // 2).world
        run = Replay(ExportedLedger(write_export(story, tmp_path / "export")), kept=half)
        list(run.results())
        assert run.state is not None
        assert (run.state.seq, run.state.outcome, run.state.field) == (half.seq, Outcome.MATCH, None)

    def test_one_that_is_not_names_the_field(self, story: Lived, tmp_path: Path) -> None:
        half = story.until(len(story.events) // 2).world
        kept = replace(half, queue_revision=half.queue_revision + 1)
        run = Replay(ExportedLedger(write_export(story, tmp_path / "export")), kept=kept)
        list(run.results())
        assert run.state is not None
        assert (run.state.outcome, run.state.field) == (Outcome.MISMATCH, "queue_revision")


def _set(*path: str | int, to: object) -> Change:
    def change(data: dict[str, Any]) -> None:
        place: Any = data
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = to

    return change


class TestAForgedPlan:
    @pytest.mark.parametrize(
        ("verdict", "change", "field"),
        [
            (Verdict.QUEUE, _set("verdict", to="REJECT_CAPACITY"), "verdict"),
            (Verdict.QUEUE, _set("reasons", to=["LOAD_BACKOFF"]), "reasons[0]"),
            (Verdict.QUEUE, _set("reasons", to=[]), "reasons[0]"),
            (Verdict.QUEUE, _set("plan", "verdict", to="ADMIT"), "plan.verdict"),
            (Verdict.QUEUE, _set("plan", "accounting", "schedulable_bytes", to=1), "plan.accounting.schedulable_bytes"),
            (Verdict.QUEUE, _set("plan", "candidates", 0, "estimate_ms", to=1), "plan.candidates[0].estimate_ms"),
            (Verdict.QUEUE, _set("plan", "eligible", to=1), "plan.eligible"),
            (Verdict.QUEUE, _set("plan", "extra", to="new"), "plan.extra"),
            (Verdict.QUEUE, _set("plan", "client_id", to="somebody"), "plan.client_id"),
            (Verdict.QUEUE, _set("policy_revision", to="m11"), "policy_revision"),
            (Verdict.QUEUE, _set("fingerprint", to="0" * 64), "fingerprint"),
            (Verdict.ADMIT, _set("fingerprint", to="0" * 64), "fingerprint"),
            (Verdict.ADMIT, _set("plan", "start", to="wake"), "plan.start"),
            (Verdict.ADMIT, _set("plan", "candidates", to=[]), "plan.candidates"),
            (Verdict.ADMIT_AFTER_EVICTION, _set("plan", "evictions", to=[]), "plan.evictions[0]"),
        ],
    )
    def test_the_first_field_that_differs_is_named(
        self, story: Lived, tmp_path: Path, verdict: Verdict, change: Change, field: str
    ) -> None:
        seq = a_plan(story, verdict)
        run, results = replayed(write_export(forged(story, seq, change), tmp_path / "export"))
        wrong = [result for result in results if result.outcome is not Outcome.MATCH]
        assert [(result.seq, result.outcome) for result in wrong] == [(seq, Outcome.MISMATCH)]
        (difference,) = (result.difference for result in wrong)
        assert difference is not None
        assert difference.path == field
        assert run.counts[Outcome.MISMATCH] == 1

    def test_both_sides_are_shown(self, story: Lived, tmp_path: Path) -> None:
        seq = a_plan(story, Verdict.QUEUE)
        decided = story.events[seq - 1].data
        assert isinstance(decided, PlanDecided)

        def drop(data: dict[str, Any]) -> None:
            del data["plan"]["pressure"]

        _, results = replayed(write_export(forged(story, seq, drop), tmp_path / "export"))
        (difference,) = (result.difference for result in results if result.difference is not None)
        assert isinstance(difference.recorded, Absent)
        assert difference.recomputed == decided.plan["pressure"]

    def test_texts_are_not_compared(self, story: Lived, tmp_path: Path) -> None:
        """They are rendered at the edge and are in no fingerprint (semantics.md 6.6)."""
        change = _set("plan", "message", to="in other words")
        run, _ = replayed(write_export(forged(story, a_plan(story, Verdict.QUEUE), change), tmp_path / "export"))
        assert set(run.counts) == {Outcome.MATCH}

    def test_a_forged_sample_shows_in_the_plans_made_on_it(self, story: Lived, tmp_path: Path) -> None:
        seq = a_plan(story, Verdict.QUEUE)
        decided = story.events[seq - 1].data
        assert isinstance(decided, PlanDecided)
        newest = [event for event in story.events[: decided.as_of] if type(event.data).__name__ == "TelemetrySampled"]
        change = _set("accelerators", 0, "used_bytes", to=15 * GIB)
        run, results = replayed(write_export(forged(story, newest[-1].seq, change), tmp_path / "export"))
        assert run.counts[Outcome.MISMATCH] >= 1
        (mine,) = (result for result in results if result.seq == seq)
        assert mine.outcome is Outcome.MISMATCH


class TestWhatCannotBeReplayed:
    def test_another_planner(self, story: Lived, tmp_path: Path) -> None:
        seq = a_plan(story, Verdict.ADMIT)
        change = _set("planner_version", to="gpuledger-planner/99")
        run, results = replayed(write_export(forged(story, seq, change), tmp_path / "export"))
        (wrong,) = (result for result in results if result.outcome is not Outcome.MATCH)
        assert wrong.outcome is Outcome.UNREPLAYABLE
        assert wrong.why == f"it was made by gpuledger-planner/99; this release has {PLANNER_VERSION}"
        assert run.counts[Outcome.UNREPLAYABLE] == 1

    def test_a_state_that_is_not_before_the_plan(self, story: Lived, tmp_path: Path) -> None:
        seq = a_plan(story, Verdict.QUEUE)
        run, results = replayed(write_export(forged(story, seq, _set("as_of", to=seq)), tmp_path / "export"))
        (wrong,) = (result for result in results if result.outcome is not Outcome.MATCH)
        assert wrong.outcome is Outcome.UNREPLAYABLE
        assert run.as_of_broken == [seq]
        assert not run.invariants["as_of_before_plan"]

    def test_a_planner_that_is_not_here_is_said_first(self, story: Lived, tmp_path: Path) -> None:
        seq = a_plan(story, Verdict.QUEUE)

        def change(data: dict[str, Any]) -> None:
            data.update(as_of=seq + 1, planner_version="other/1")

        run, _ = replayed(write_export(forged(story, seq, change), tmp_path / "export"))
        assert run.counts[Outcome.UNREPLAYABLE] == 1
        assert run.as_of_broken == [seq]

    def test_a_question_that_is_not_there(self, story: Lived, tmp_path: Path) -> None:
        seq = a_plan(story, Verdict.QUEUE)
        change = _set("request_id", to="nobody")
        _, results = replayed(write_export(forged(story, seq, change), tmp_path / "export"))
        (wrong,) = (result for result in results if result.outcome is not Outcome.MATCH)
        assert wrong.why == "its request was not received, or had ended, before it"

    def test_a_state_that_the_planner_trips_over(
        self, story: Lived, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def trip(*_: object, **__: object) -> None:
            raise KeyError("GPU-9")

        monkeypatch.setattr(replay_module, "plan", trip)
        run, results = replayed(write_export(story, tmp_path / "export"))
        assert set(run.counts) == {Outcome.UNREPLAYABLE}
        assert results[0].why == "the planner finds no answer on its state (KeyError)"


class TestALedgerThatIsNone:
    def test_an_event_that_fits_no_state(self, story: Lived, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def trip(world: World, event: object) -> World:
            raise AssertionError

        path = write_export(story, tmp_path / "export")
        monkeypatch.setattr(replay_module, "evolve", trip)
        with pytest.raises(LedgerCorrupt, match="event 1: does not fit the events before it"):
            replayed(path)

    @pytest.mark.parametrize(("seq", "version", "at"), [(2, 1, 5), (1, 2, 5), (1, 1, -1)])
    def test_an_event_out_of_its_place(self, story: Lived, seq: int, version: int, at: int) -> None:
        """What a reader should have seen is seen again: a replay vouches for the order that it folds in."""

        class Reader(MemoryLedger):
            def head(self) -> int:
                return 1

            def read(self, after: int = 0, limit: int = 1000) -> Any:
                return (replace(story.events[0], seq=seq, version=version, at=at),)

        with pytest.raises(LedgerCorrupt):
            list(Replay(Reader()).results())


class TestWritersThatInterleave:
    def interleaved(self, between: int) -> VirtualShell:
        """A plan that was made, and committed only after `between` other events."""
        shell = VirtualShell(MemoryLedger(), MODELS, (Card("GPU-0", 16 * GIB),))
        shell.start()
        other = Scheduler(NODE)
        asked = RequestArrived("slow", "client", "embed@1", Priority.INTERACTIVE, False, shell.now, None, "chat", 1)
        batch = other.handle(shell.world, asked, shell.now)
        assert batch is not None
        before = shell.world.seq
        while shell.world.seq < before + between:
            shell.run_for(5)
        shell.ledger.append(batch, shell.now)
        return shell

    @pytest.mark.parametrize("between", [1, 20, RECENT_WORLDS + 20])
    def test_the_state_is_the_one_that_the_plan_saw(self, between: int) -> None:
        shell = self.interleaved(between)
        run = Replay(shell.ledger)
        (result,) = run.results()
        assert result.outcome is Outcome.MATCH
        assert result.as_of <= result.seq - between
        assert bool(run.folded_again) == (between > RECENT_WORLDS)

    def test_what_is_folded_again_comes_in_the_order_of_the_ledger(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(replay_module, "RECENT_WORLDS", 1)
        shell = VirtualShell(MemoryLedger(), MODELS, (Card("GPU-0", 16 * GIB),))
        shell.start()
        for number in range(6):
            shell.ask(f"r{number}", MODELS[number % 4].capability)
            shell.run_for(2)
        run = Replay(shell.ledger)
        results = list(run.results())
        again = [result for result in results if result.as_of < result.seq - 1]
        assert len(again) >= 6
        assert results[-len(again) :] == again == sorted(again, key=lambda result: result.seq)
        assert {result.outcome for result in results} == {Outcome.MATCH}
        assert run.folded_again == shell.ledger.head()

    def test_a_plan_on_no_events_at_all(self, story: Lived, tmp_path: Path) -> None:
        """`as_of` 0 is the empty state, which is always too far back for a long ledger."""
        seq = a_plan(story, Verdict.QUEUE)
        assert seq > RECENT_WORLDS
        _, results = replayed(write_export(forged(story, seq, _set("as_of", to=0)), tmp_path / "export"))
        (mine,) = (result for result in results if result.seq == seq)
        assert mine.outcome is Outcome.MISMATCH
        assert mine.difference is not None
        assert (mine.difference.path, mine.difference.recomputed) == ("verdict", "REJECT_POLICY")


class TestFoldTo:
    def test_from_the_beginning_and_from_a_state(self, story: Lived) -> None:
        ledger = _Read(story)
        half = fold_to(ledger, 100)
        assert half == story.until(100).world
        assert fold_to(ledger, len(story.events), half) == story.world

    def test_beyond_the_head(self, story: Lived) -> None:
        with pytest.raises(LedgerCorrupt, match="is missing"):
            fold_to(_Read(story), len(story.events) + 1)


class _Read(MemoryLedger):
    """A reader of events that were recorded elsewhere."""

    def __init__(self, story: Lived) -> None:
        super().__init__()
        self._story = story

    def read(self, after: int = 0, limit: int = 1000) -> Any:
        return self._story.events[after : after + limit]


def test_a_request_asks_one_question_in_all_its_plans(story: Lived) -> None:
    """What replay takes from the newest state, since a plan's own state may lie before its request."""
    received = [event.data.request_id for event in story.events if isinstance(event.data, RequestReceived)]
    assert len(received) == len(set(received))
