"""A real server that measures by itself while nothing is wanted of it (`profile: when_idle`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpuledger.adapters import procfs
from gpuledger.domain.events import EnvelopeMeasured, ProfilingEnded, ProfilingStarted, RequestCompleted
from tests.integration.serving import (
    Serving,
    chat,
    configuration,
    copy_ledger,
    deployment,
    embedding,
    serving,
)

#: Loads for ever, as far as a test is concerned.
STUCK = {"load_ms": 10**8, "load_timeout_seconds": 86_400}
ON_DEMAND = {"policy": "load_on_demand"}


def when_idle(deployments: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
    return configuration(deployments, profile="when_idle", **options)


def slow() -> dict[str, Any]:
    """A deployment whose measurement does not end by itself."""
    return deployment("slow", "slow@1", "chat", runtime=STUCK)


def of_type(server: Serving, kind: type[Any]) -> list[Any]:
    return [event.data for event in server.events() if isinstance(event.data, kind)]


def is_measuring(server: Serving, attempt: int = 1) -> bool:
    """The measurement of that number runs: its process is there."""
    begun, ended = of_type(server, ProfilingStarted), of_type(server, ProfilingEnded)
    return len(begun) == attempt > len(ended) and bool(server.runtimes())


def test_it_measures_what_has_no_envelope_and_then_serves_it(tmp_path: Path) -> None:
    with serving(tmp_path, when_idle([embedding(), chat()])) as server:
        server.until(lambda: len(of_type(server, ProfilingEnded)) == 2)
        begun, ended = of_type(server, ProfilingStarted), of_type(server, ProfilingEnded)
        assert {(one.accelerator_id, one.deployment_id) for one in begun} == {
            ("host:local", "emb"), ("host:local", "chat")
        }  # fmt: skip
        assert [one.outcome for one in ended] == ["measured", "measured"]
        assert sorted(one.deployment_id for one in of_type(server, EnvelopeMeasured)) == ["chat", "emb"]
        assert server.embed().status_code == 200
        assert server.stop() == 0, server.log()
    assert len(of_type(server, ProfilingStarted)) == 2


def test_a_request_ends_a_measurement_and_is_served(tmp_path: Path, measured: Path) -> None:
    """`slow` would be measured for a day; who asks for `emb` meanwhile waits for the end of that alone."""
    copy_ledger(measured, tmp_path)
    with serving(tmp_path, when_idle([embedding(residency=ON_DEMAND), chat(), slow()])) as server:
        server.until(lambda: is_measuring(server))
        (runtime,) = server.runtimes()
        assert server.embed().status_code == 200
        assert not procfs.is_alive(runtime)
        (ended,) = of_type(server, ProfilingEnded)
        assert (ended.deployment_id, ended.outcome, ended.detail) == ("slow", "preempted", "request")
        # It comes back to it when nothing is wanted any more, and again makes way: now for several at once.
        server.until(lambda: is_measuring(server, attempt=2))
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(server.embed, ("one", "two", "three", "four")))
        assert [answer.status_code for answer in answers] == [200] * 4
        assert [one.outcome for one in of_type(server, ProfilingEnded)] == ["preempted", "preempted"]
        assert server.stop() == 0, server.log()
    assert not server.runtimes()
    assert len(of_type(server, RequestCompleted)) == 5


def test_a_stop_ends_a_measurement(tmp_path: Path) -> None:
    with serving(tmp_path, when_idle([slow()])) as server:
        server.until(lambda: is_measuring(server))
        (runtime,) = server.runtimes()
        assert server.stop() == 0, server.log()
        assert not procfs.is_alive(runtime)
    names = [name for name in server.event_names() if name != "TelemetrySampled"]
    assert names[-3:] == ["ProfilingEnded", "NodeDrainStarted", "SchedulerStopped"]
    (ended,) = of_type(server, ProfilingEnded)
    assert (ended.outcome, ended.detail) == ("preempted", "node_draining")


def test_nothing_is_measured_beside_a_model_that_is_there(tmp_path: Path, measured: Path) -> None:
    copy_ledger(measured, tmp_path)
    warm = embedding(residency={"policy": "always_warm"})
    with serving(tmp_path, when_idle([warm, slow()])) as server:
        server.until(lambda: "ResidentReady" in server.event_names())
        attempts = len(of_type(server, ProfilingStarted))
        samples = server.event_names().count("TelemetrySampled")
        server.until(lambda: server.event_names().count("TelemetrySampled") >= samples + 3)
        assert len(of_type(server, ProfilingStarted)) == attempts
        assert server.stop() == 0, server.log()


def test_one_that_cannot_be_measured_is_told_and_the_others_are_measured(tmp_path: Path) -> None:
    broken = deployment("broken", "broken@1", "embedding", runtime={"faults": {"fail_load": "exit", "exit_status": 7}})
    with serving(tmp_path, when_idle([broken, embedding()])) as server:
        server.until(lambda: len(of_type(server, ProfilingEnded)) == 2)
        outcomes = {one.deployment_id: (one.outcome, one.detail) for one in of_type(server, ProfilingEnded)}
        assert outcomes == {
            "broken": ("failed", "MODEL_LOAD_FAILED: exit_status_7"),
            "emb": ("measured", ""),
        }
        assert server.embed().status_code == 200
        assert server.stop() == 0, server.log()
