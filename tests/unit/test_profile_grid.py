"""The grid of `gpuledger profile`: which points there are, and which of them a runtime cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpuledger.adapters.runtimes.config import LlamaCppConfig, ReferenceConfig, RuntimeConfig
from gpuledger.tools.ledger_target import TargetError
from gpuledger.tools.profile_cli import values_of
from gpuledger.tools.profile_grid import Axes, Grid, Impossible, Point, Shape, grid_of, runtimes_of
from gpuledger.tools.profile_plot import plotter


def llama(task: str, **options: Any) -> LlamaCppConfig:
    return LlamaCppConfig.model_validate({"type": "llama_cpp", "task": task, "model": "/m.gguf", **options})


def reference(**options: Any) -> ReferenceConfig:
    return ReferenceConfig.model_validate({"type": "reference", "task": "chat", **options})


def possible(grid: Grid) -> list[tuple[int, int, int]]:
    return [
        (one.shape.context_length, one.shape.concurrency, one.shape.batch_size)
        for one in grid
        if isinstance(one, Point)
    ]


def test_without_axes_it_is_the_deployment_as_it_is() -> None:
    config = reference(context_length=640, parallel=3, batch_size=128, peak_bytes=99 * 2**20)
    (point,) = grid_of("d", config, Axes())
    assert isinstance(point, Point)
    assert point.runtime == config


def test_every_combination_once_and_the_smallest_first() -> None:
    grid = grid_of("d", reference(batch_size=64), Axes(contexts=(2048, 512, 512), concurrencies=(2, 1)))
    assert possible(grid) == [(512, 1, 64), (512, 2, 64), (2048, 1, 64), (2048, 2, 64)]


def test_a_point_keeps_all_else_and_has_a_name_of_its_own() -> None:
    config = reference(idle_bytes=7 * 2**20, faults={"exit_status": 9})
    grid = grid_of("d", config, Axes(contexts=(256, 1024)))
    runtimes = runtimes_of(grid)
    assert len(runtimes) == 2
    assert [one.context_length for one in runtimes.values()] == [256, 1024]
    for runtime in runtimes.values():
        assert runtime.model_copy(update={"context_length": 512}) == config
    assert not {"d", "e"} & set(runtimes)


def test_an_embedding_of_llama_cpp_needs_a_batch_that_holds_the_context() -> None:
    grid = grid_of("d", llama("embedding"), Axes(contexts=(256, 512), batches=(256, 512)))
    assert possible(grid) == [(256, 1, 256), (256, 1, 512), (512, 1, 512)]
    (impossible,) = (one for one in grid if isinstance(one, Impossible))
    assert impossible.shape == Shape(512, 1, 256)
    assert impossible.reason.startswith("batch_size: an embedding is computed in one piece")


def test_a_micro_batch_that_was_written_stays_and_bounds_the_batch() -> None:
    grid = grid_of("d", llama("chat", ubatch_size=256), Axes(batches=(128, 512)))
    assert possible(grid) == [(512, 1, 512)]
    (point,) = runtimes_of(grid).values()
    assert isinstance(point, LlamaCppConfig)
    assert point.micro_batch == 256
    assert [one.reason for one in grid if isinstance(one, Impossible)] == [
        "ubatch_size: must not be greater than batch_size"
    ]


def test_a_micro_batch_that_follows_the_batch_follows_the_new_one() -> None:
    (point,) = runtimes_of(grid_of("d", llama("chat"), Axes(batches=(64,)))).values()
    assert isinstance(point, LlamaCppConfig)
    assert point.micro_batch == 64


@pytest.mark.parametrize("config", [llama("chat", mmap=True), reference(task="embedding", dimensions=8)])
def test_a_grid_of_one_own_point_changes_nothing(config: RuntimeConfig) -> None:
    own = Shape.of(config)
    axes = Axes((own.context_length,), (own.concurrency,), (own.batch_size,))
    (point,) = runtimes_of(grid_of("d", config, axes)).values()
    assert point == config


class TestValues:
    def test_a_list(self) -> None:
        assert values_of("--context", "512, 2048,8192") == (512, 2048, 8192)
        assert values_of("--context", None) == ()

    @pytest.mark.parametrize("text", ["", "512,", "a", "-1", "0", "1.5", "1e3", "99999999999", "٣", "2147483648"])
    def test_what_is_none_names_its_option(self, text: str) -> None:
        with pytest.raises(TargetError, match="--batch: must be whole numbers from 1 to 2147483647"):
            values_of("--batch", text)

    def test_no_more_requests_at_once_than_a_deployment_can_have(self) -> None:
        assert values_of("--concurrency", "256") == (256,)
        with pytest.raises(TargetError, match="from 1 to 256"):
            values_of("--concurrency", "257")


class TestPlotFile:
    @pytest.mark.parametrize("name", ["plot", "plot.jpg", "folder.png", "absent/plot.png"])
    def test_what_cannot_be_drawn_to_is_told_before_anything_is_measured(self, name: str, tmp_path: Path) -> None:
        (tmp_path / "folder.png").mkdir()
        with pytest.raises(TargetError, match="--plot: "):
            plotter(tmp_path / name)
