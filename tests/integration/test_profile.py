"""`gpuledger profile` over a grid, with real runtimes: what is recorded, and that it goes on where it was stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuledger.adapters import procfs
from gpuledger.domain.events import EnvelopeMeasured
from tests.integration.serving import (
    PATIENCE_SECONDS,
    chat,
    configuration,
    deployment,
    embedding,
    read_events,
    serving,
    wait_until,
)

#: Loads for ever, as far as a test is concerned.
STUCK = {"load_ms": 10**8, "load_timeout_seconds": 86_400}


def written(folder: Path, deployments: Sequence[Mapping[str, Any]], **options: Any) -> Path:
    path = folder / "gpuledger.yaml"
    path.write_text(json.dumps(configuration(deployments, **options)), "utf-8")
    return path


def command(config: Path, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "gpuledger.tools.cli", "profile", *arguments, "--config", str(config))


def profiled(config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(config, *arguments), capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert "Traceback" not in done.stderr
    return done


@contextmanager
def running(config: Path, *arguments: str) -> Generator[subprocess.Popen[str]]:
    """The command in a process group of its own, as a terminal would start it."""
    process = subprocess.Popen(
        command(config, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def measurements(folder: Path) -> list[EnvelopeMeasured]:
    ledger = folder / "state" / "ledger.db"
    if not ledger.exists():
        return []
    return [event.data for event in read_events(ledger) if isinstance(event.data, EnvelopeMeasured)]


def shapes(events: Sequence[EnvelopeMeasured]) -> list[tuple[int | None, int | None, int | None]]:
    return [(e.envelope.context_length, e.envelope.concurrency, e.envelope.batch_size) for e in events]


def test_a_grid_is_measured_and_each_point_is_recorded_for_its_own_configuration(tmp_path: Path) -> None:
    config = written(tmp_path, [embedding(), chat()])
    done = profiled(config, "emb", "--context", "512,128", "--concurrency", "1,2", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [point["outcome"] for point in document["points"]] == ["measured"] * 4
    events = measurements(tmp_path)
    assert shapes(events) == [(128, 1, 512), (128, 2, 512), (512, 1, 512), (512, 2, 512)]
    assert len({event.envelope.config_hash for event in events}) == 4
    assert {event.deployment_id for event in events} == {"emb"}
    for point, event in zip(document["points"], events, strict=True):
        assert point["config_hash"] == event.envelope.config_hash
        assert point["requirement_bytes"] == event.envelope.peak_bytes + 8 * 2**20
        assert point["fits"] > 0


def test_a_configuration_that_was_measured_in_a_grid_serves_without_another_measurement(tmp_path: Path) -> None:
    assert profiled(written(tmp_path, [embedding()]), "emb", "--concurrency", "1,2").returncode == 0
    changed = configuration([embedding(concurrency=2)], profile="never")
    with serving(tmp_path, changed) as server:
        assert server.embed().status_code == 200
    assert len(measurements(tmp_path)) == 2


def test_what_is_measured_is_skipped_unless_it_is_to_be_measured_again(tmp_path: Path) -> None:
    config = written(tmp_path, [embedding()])
    assert profiled(config, "emb").returncode == 0
    second = profiled(config, "emb", "--context", "512,128", "--json")
    assert [point["outcome"] for point in json.loads(second.stdout)["points"]] == ["measured", "known"]
    assert shapes(measurements(tmp_path)) == [(512, 1, 512), (128, 1, 512)]
    third = profiled(config, "emb", "--again")
    assert "measured" in third.stdout
    assert shapes(measurements(tmp_path)) == [(512, 1, 512), (128, 1, 512), (512, 1, 512)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_it_goes_on_where_it_was_stopped(tmp_path: Path, number: signal.Signals) -> None:
    """The first point is recorded and the second one loads for ever, until whoever measures is killed or told."""
    slow = deployment("slow", "slow@1", "embedding", runtime=STUCK)
    grid = ("slow", "--context", "128,256,512")
    assert profiled(written(tmp_path, [embedding(id="slow")]), "slow", "--context", "128").returncode == 0
    with running(written(tmp_path, [slow]), *grid) as process:
        loading = procfs.identity(process.pid)
        assert loading is not None
        wait_until(lambda: len(procfs.tree(loading)) > 1)
        (runtime,) = (one for one in procfs.tree(loading) if one != loading)
        process.send_signal(number)
        out, told = process.communicate(timeout=PATIENCE_SECONDS)
        wait_until(lambda: not procfs.is_alive(runtime))
    assert "Traceback" not in told
    if number is signal.SIGINT:
        assert process.returncode == 130
        assert told.endswith("interrupted: what was measured is recorded, 2 left for the next time\n")
        assert "left" in out
    assert shapes(measurements(tmp_path)) == [(128, 1, 512)]
    done = profiled(written(tmp_path, [embedding(id="slow")]), *grid, "--json")
    assert [point["outcome"] for point in json.loads(done.stdout)["points"]] == ["known", "measured", "measured"]
    assert shapes(measurements(tmp_path)) == [(128, 1, 512), (256, 1, 512), (512, 1, 512)]


def test_a_point_that_fails_is_told_and_the_others_are_measured(tmp_path: Path) -> None:
    """Its functional check and two prompts are answered, the next request ends it; the first point was known."""
    config = written(tmp_path, [embedding()])
    assert profiled(config, "emb", "--context", "128").returncode == 0
    config = written(tmp_path, [embedding(runtime={"faults": {"crash_after_requests": 3}})])
    done = profiled(config, "emb", "--context", "128,256", "--json")
    assert done.returncode == 1
    known, failed = json.loads(done.stdout)["points"]
    assert (known["outcome"], failed["outcome"]) == ("known", "failed")
    assert failed["reason"].startswith("RUNTIME_CRASH")
    assert len(measurements(tmp_path)) == 1


def test_a_grid_without_a_possible_point_is_refused(tmp_path: Path, minilm_gguf: Path) -> None:
    runtime = {"type": "llama_cpp", "task": "embedding", "model": str(minilm_gguf), "context_length": 512}
    config = written(tmp_path, [{"id": "emb", "capability": "emb@1", "kind": "host", "runtime": runtime}])
    refused = profiled(config, "emb", "--batch", "128,256")
    assert refused.returncode == 2
    assert "emb can have none of these shapes:" in refused.stderr
    assert "context 512, concurrency 1, batch 128: batch_size: an embedding" in refused.stderr
    assert not measurements(tmp_path)


def test_a_grid_that_is_too_large_is_refused(tmp_path: Path) -> None:
    contexts = ",".join(str(100 + number) for number in range(65))
    refused = profiled(written(tmp_path, [embedding()]), "emb", "--context", contexts)
    assert refused.returncode == 2
    assert "65 points on 1 classes of accelerators are more than the 64 of one run" in refused.stderr
    assert not measurements(tmp_path)


def test_the_table_and_the_plot(tmp_path: Path) -> None:
    config = written(tmp_path, [embedding()])
    picture = tmp_path / "grid.png"
    done = profiled(config, "emb", "--context", "128,512", "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    assert "emb on host:local" in done.stdout
    assert "requirement" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "2/2 emb on host:local, context 512, concurrency 1, batch 512: peak" in done.stderr


def test_a_plot_without_matplotlib_says_how_to_get_it(tmp_path: Path) -> None:
    """Before anything is measured. A folder of that name on the path stands in for an installation that has none."""
    hidden = tmp_path / "matplotlib"
    hidden.mkdir()
    (hidden / "__init__.py").write_text("raise ImportError('hidden')\n")
    config = written(tmp_path, [embedding()])
    done = subprocess.run(
        command(config, "emb", "--plot", str(tmp_path / "x.png")),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 2
    assert "--plot needs matplotlib: pip install 'gpuledger[plot]'" in done.stderr
    assert not measurements(tmp_path)
