"""`gpuledger serve` on devices that change under it: MIG layouts, unified memory, faults that an operator clears."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuledger.domain.aggregates.accelerator import AcceleratorState
from gpuledger.domain.state import Health, Kind
from gpuledger.domain.units import GIB
from tests.integration.serving import Serving, configuration, serving
from tests.shim import NvmlShim, ShimCard, ShimInstance, ShimXid

CARD = ShimCard("GPU-00000000-0000-0000-0000-0000000000a0", name="NVIDIA A100-SXM4-40GB", total_bytes=40 * GIB)
FIRST, SECOND, THIRD = (ShimInstance(f"MIG-{n}", gpu_instance=n, slot=n, total_bytes=5 * GIB) for n in (1, 2, 3))
GB10 = ShimCard("GPU-00000000-0000-0000-0000-00000000001b", name="NVIDIA GB10", memory_error=3)


def partitioned(*instances: ShimInstance) -> ShimCard:
    return replace(CARD, mig=1, instances=instances)


def config_of(**options: Any) -> dict[str, Any]:
    return configuration([], **{"accelerators": {"host": False, "nvml": "auto"}, **options})


def here(server: Serving) -> Mapping[str, AcceleratorState]:
    """The accelerators that are not retired."""
    return {key: state for key, state in server.world().accelerators.items() if not state.retired}


def test_a_layout_may_change_while_it_runs_and_while_it_does_not(tmp_path: Path) -> None:
    shim = NvmlShim(tmp_path)
    shim.set([CARD])
    folder = tmp_path / "server"
    with serving(folder, config_of(), env=shim.env()) as server:
        assert list(here(server)) == [CARD.uuid]
        shim.set([partitioned(FIRST, SECOND)])
        server.until(lambda: set(here(server)) == {FIRST.uuid, SECOND.uuid})
        assert {one.accelerator.gpu_class for one in here(server).values()} == {"a100-sxm4-40gb-1g-5gb"}
        assert server.stop() == 0, server.log()

    shim.set([partitioned(SECOND, THIRD)])
    with serving(folder, config_of(), env=shim.env()) as server:
        server.until(lambda: set(here(server)) == {SECOND.uuid, THIRD.uuid})
        shim.set([CARD])
        server.until(lambda: set(here(server)) == {CARD.uuid})
        assert server.stop() == 0, server.log()


def test_a_gpu_that_shares_the_host_s_memory_takes_its_place(tmp_path: Path) -> None:
    """The host was served before the card was seen; the operator's limit holds for the card."""
    shim = NvmlShim(tmp_path)
    limited = config_of(accelerators={"host": {"memory_limit_bytes": "1GiB"}, "nvml": True})
    with serving(tmp_path / "server", limited, env=shim.env()) as server:
        (host,) = here(server).values()
        assert host.accelerator.kind is Kind.HOST
        shim.set([GB10])
        server.until(lambda: set(here(server)) == {GB10.uuid})
        (state,) = here(server).values()
        assert (state.accelerator.kind, state.accelerator.gpu_class) == (Kind.GPU, "gb10")
        assert state.accelerator.total_bytes == host.accelerator.total_bytes == GIB
        assert server.stop() == 0, server.log()


def test_an_xid_stands_over_a_restart_though_the_card_says_nothing_more(tmp_path: Path) -> None:
    shim = NvmlShim(tmp_path)
    shim.set([CARD])
    folder = tmp_path / "server"
    with serving(folder, config_of(), env=shim.env()) as server:
        shim.set([replace(CARD, xids=(ShimXid(13), ShimXid(79)))])
        server.until(lambda: health(server) == (Health.FAILED, "XID_79"))
        assert server.stop() == 0, server.log()

    with serving(folder, config_of(), env=shim.env()) as server:
        samples = len(server.events())
        server.until(lambda: server.event_names()[samples:].count("TelemetrySampled") >= 2)
        assert health(server) == (Health.FAILED, "XID_79")
        assert server.stop() == 0, server.log()


def health(server: Serving) -> tuple[Health, str]:
    (state,) = here(server).values()
    return state.accelerator.health, state.health_cause
