"""`gpuledger serve` on GPUs: the real NVML module on a driver of ours, whose cards hold what the runtimes hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpuledger.domain.events import FailureRecorded
from gpuledger.domain.failures import Failure
from gpuledger.domain.units import GIB, MIB
from tests.integration.gpu_stand_in import LOST, gpu_configuration, gpu_stand_in
from tests.integration.serving import Serving, chat, embedding
from tests.shim import ShimCard

A = "GPU-0a6ffa9b-1d3a-4b0e-9d55-00000000000a"
B = "GPU-0b6ffa9b-1d3a-4b0e-9d55-00000000000b"
CONTEXT_BYTES = 200 * MIB
#: A model that holds a GiB, and two while it works, on cards that show 16 times what is really held.
SCALE = 16
ASLEEP_BYTES = SCALE * 24 * MIB
SIZES = {"idle_bytes": "64MiB", "peak_bytes": "128MiB", "service_ms": 50, "max_inputs": 8}


def on_gpu(**options: Any) -> dict[str, Any]:
    return embedding(kind="gpu", **{**options, "runtime": {**SIZES, **options.get("runtime", {})}})


def residents(server: Serving) -> Iterator[tuple[str, int]]:
    """Where models are, and how much is attributed to each."""
    for state, record in server.world().residents():
        yield state.accelerator.accelerator_id, record.resident.attributed_bytes


def external_bytes(server: Serving, accelerator_id: str) -> int:
    """What the newest sample shows of others."""
    state = server.world().accelerators[accelerator_id]
    managed = sum(held for place, held in residents(server) if place == accelerator_id)
    return 0 if state.sample is None else state.sample.used_bytes - managed


def test_it_finds_the_card_measures_serves_and_survives_its_loss(tmp_path: Path) -> None:
    card = ShimCard(A, used_bytes=3 * GIB)
    config = gpu_configuration([on_gpu()], policy={"telemetry_max_age_seconds": 6})
    with (
        gpu_stand_in(tmp_path, [card], context_bytes=CONTEXT_BYTES) as gpus,
        gpus.serving(tmp_path / "server", config) as server,
    ):
        (state,) = server.world().accelerators.values()
        assert (state.accelerator.accelerator_id, state.accelerator.gpu_class) == (A, "rtx-3090")
        (measured,) = server.world().deployments["emb"].measured
        assert measured.envelope.gpu_class == "rtx-3090"
        assert measured.envelope.peak_bytes == 128 * MIB + CONTEXT_BYTES, "more than the process itself knows of"

        assert server.embed().status_code == 200
        server.until(lambda: list(residents(server)) == [(A, 64 * MIB + CONTEXT_BYTES)])

        gpus.change(A, error=LOST)
        server.until(lambda: server.embed().status_code == 503)
        with server.http() as http:
            conditions = http.get("/readyz").json()["conditions"]
        assert not conditions["telemetry"]["holds"]
        assert "NVML_GPU_LOST" in conditions["telemetry"]["detail"]

        gpus.change(A, error=0)
        server.until(lambda: server.embed().status_code == 200)
        assert server.stop() == 0, server.log()
    assert list(server.world().residents()) == []


def test_a_model_goes_where_others_leave_room(tmp_path: Path) -> None:
    """Of two cards one is taken by somebody else's program; that is gone, and its card is as good as the other."""
    with (
        gpu_stand_in(tmp_path, [ShimCard(A), ShimCard(B)], scale=SCALE) as gpus,
        gpus.serving(tmp_path / "server", gpu_configuration([on_gpu()])) as server,
    ):
        with gpus.program(A, 22 * GIB):
            server.until(lambda: external_bytes(server, A) == 22 * GIB)
            assert server.embed().status_code == 200
            server.until(lambda: list(residents(server)) == [(B, GIB)])
        server.until(lambda: external_bytes(server, A) == 0)
        assert gpus.used_bytes(B) == GIB
        assert server.stop() == 0, server.log()
        assert (gpus.used_bytes(A), gpus.used_bytes(B)) == (0, 0)


def test_memory_that_does_not_come_back_is_a_failure_and_external(tmp_path: Path) -> None:
    """The process is gone, and the card, which does not tell whose memory it is, goes on showing it as used."""
    marker = tmp_path / "marker"
    model = on_gpu(
        residency={"policy": "keep_warm", "ttl_seconds": 3},
        runtime={"faults": {"keep_memory": True, "while_file": str(marker)}},
    )
    with (
        gpu_stand_in(tmp_path, [ShimCard(A)], scale=SCALE) as gpus,
        gpus.serving(tmp_path / "server", gpu_configuration([model], policy={"reclaim_timeout_seconds": 2})) as server,
    ):
        marker.touch()
        gpus.withhold(A)
        assert server.embed().status_code == 200
        server.until(lambda: Failure.GPU_MEMORY_NOT_RECLAIMED in failures(server))
        server.until(lambda: external_bytes(server, A) == gpus.kept_bytes(A) == GIB)
        assert list(residents(server)) == []

        marker.unlink()
        assert gpus.give_back(A) == GIB
        assert server.embed().status_code == 200
        server.until(lambda: external_bytes(server, A) == 0)
        assert server.stop() == 0, server.log()
    assert gpus.used_bytes(A) == 0


def test_a_model_sleeps_to_make_room_and_wakes_when_it_is_wanted(tmp_path: Path) -> None:
    """On a card that holds one of them at work beside the other asleep."""
    runtime = {**SIZES, "load_ms": 1_000, "sleep": {"asleep_bytes": "24MiB"}}
    declared = {"asleep_bytes": ASLEEP_BYTES, "sleep_ms": 0, "wake_ms": 0}
    one = on_gpu(sleep=declared, runtime=runtime)
    other = chat(kind="gpu", sleep=declared, runtime=runtime)
    with (
        gpu_stand_in(tmp_path, [ShimCard(A, total_bytes=11 * GIB // 4)], scale=SCALE) as gpus,
        gpus.serving(tmp_path / "server", gpu_configuration([one, other])) as server,
    ):
        assert server.embed().status_code == 200
        server.until(lambda: list(residents(server)) == [(A, GIB)])
        for _ in range(2):
            assert talk(server) == 200
            server.until(lambda: sorted(residents(server)) == [(A, ASLEEP_BYTES), (A, GIB)])
            assert server.embed().status_code == 200
            server.until(lambda: sorted(residents(server)) == [(A, ASLEEP_BYTES), (A, GIB)])
        assert server.event_names().count("ResidentSlept") == 4
        assert server.event_names().count("ResidentProcessStarted") == 2, "nobody was unloaded"
        assert gpus.most_bytes(A) <= 11 * GIB // 4
        assert server.stop() == 0, server.log()
    assert gpus.used_bytes(A) == 0


def talk(server: Serving) -> int:
    question = {"model": "chat@1", "messages": [{"role": "user", "content": "hello"}]}
    with server.http() as http:
        return http.post("/v1/chat/completions", json=question).status_code


def failures(server: Serving) -> list[Failure]:
    return [event.data.failure for event in server.events() if isinstance(event.data, FailureRecorded)]
