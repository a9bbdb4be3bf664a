"""The steps of a model's life, and how a stage is brought to each: what goes on there goes on for a moment yet."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import assert_never

from gpuledger.domain.aggregates.request import Phase
from gpuledger.domain.ports import ProcessIdentity
from gpuledger.domain.state import ResidentState
from tests.integration.fault_callers import Caller
from tests.integration.fault_stage import Stage


class Step(Enum):
    """Where a model is when something breaks."""

    GRANTED = "granted, and its victim still unloads"
    LOADING = "its process has started and loads"
    ANSWERING = "ready, and at work on an answer"
    STREAMING = "in the midst of a stream"
    FALLING_ASLEEP = "being put to sleep"
    ASLEEP = "asleep"
    WAKING = "waking up"


@dataclass(frozen=True)
class Scene:
    """`process` is the runtime that the step is about; `caller` waits."""

    step: Step
    process: ProcessIdentity
    caller: Caller


def bring_to(stage: Stage, step: Step) -> Scene:
    """Returns while it is there."""
    match step:
        case Step.GRANTED:
            stage.has("chat")
            stage.break_model("chat")  # it does not go before it is killed
            caller = stage.embed("emb")
            stage.until(lambda: (record := stage.of("emb")) is not None and record.awaits)
            return Scene(step, stage.process_of("chat"), caller)
        case Step.LOADING:
            caller = stage.embed("emb")
            stage.until(lambda: (record := stage.of("emb")) is not None and record.process is not None)
            return Scene(step, stage.process_of("emb"), caller)
        case Step.ANSWERING:
            stage.has("emb")
            caller = stage.embed("emb")
            stage.until(lambda: _is_granted(stage, "emb"))
            return Scene(step, stage.process_of("emb"), caller)
        case Step.STREAMING:
            caller = stage.chat()
            stage.until(caller.has_begun)
            return Scene(step, stage.process_of("chat"), caller)
        case Step.FALLING_ASLEEP:
            stage.has("doze")
            caller = stage.embed("emb")
            stage.until(lambda: _falls_asleep(stage))
            return Scene(step, stage.process_of("doze"), caller)
        case Step.ASLEEP:
            stage.has("doze")
            caller = stage.embed("emb")
            stage.until(lambda: stage.is_at("doze", ResidentState.SLEEPING))
            return Scene(step, stage.process_of("doze"), caller)
        case Step.WAKING:
            stage.has("doze")
            stage.has("emb")
            stage.until(lambda: stage.is_at("doze", ResidentState.SLEEPING))
            caller = stage.embed("doze")
            stage.until(lambda: (record := stage.of("doze")) is not None and record.asleep and record.load_started)
            return Scene(step, stage.process_of("doze"), caller)
        case _:
            assert_never(step)


def _is_granted(stage: Stage, name: str) -> bool:
    asked = (one for one in stage.world.requests.values() if one.question.capability == f"{name}@1")
    return any(one.phase is Phase.GRANTED for one in asked)


def _falls_asleep(stage: Stage) -> bool:
    record = stage.of("doze")
    return record is not None and record.eviction is not None and record.eviction.sleeps
