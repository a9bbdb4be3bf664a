"""What `/readyz` says of nodes that take no work, and of a capability that fails again and again."""

from __future__ import annotations

import pytest

from gpuledger.adapters.http.ports import Condition, Ending, Granted, Refused
from gpuledger.domain.failures import Failure
from gpuledger.domain.messages import CordonNode, DrainNode, UncordonNode
from gpuledger.domain.ports import RuntimeFault
from tests.unit.shells import Shell, shell

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def nodes(served: Shell) -> Condition:
    return next(one for one in served.running.desk.conditions() if one.name == "nodes")


def fare(served: Shell) -> Condition:
    return next(one for one in served.running.desk.conditions() if one.name == "capabilities")


async def test_a_degraded_capability_is_named_until_it_answers() -> None:
    policy = {"degraded_after_failures": 1, "gateway_retries": 0, "load_backoff_seconds": 1}
    async with shell(policy=policy) as served:
        desk = served.running.desk
        assert fare(served) == Condition("capabilities", True, "none is degraded")
        served.machine.load_fault = RuntimeFault(Failure.MODEL_LOAD_FAILED, "exit_status_1", b"")
        assert isinstance(await desk.submit(served.question()), Refused)
        assert fare(served).detail == "degraded: emb@1 (failed 1 times in a row, last with MODEL_LOAD_FAILED)"
        assert all(one.holds for one in desk.conditions()), "nothing else would ever let it recover"
        served.machine.load_fault = None
        granted = await desk.submit(served.question())
        assert isinstance(granted, Granted)
        assert "emb@1" in fare(served).detail, "a load is no answer"
        desk.end(granted.request_id, Ending(200, 5, 100))
        await served.until(lambda: fare(served).detail == "none is degraded")


async def test_a_server_whose_only_node_drains_is_not_ready_until_it_takes_work_again() -> None:
    async with shell() as served:
        engine = served.running.engine
        assert nodes(served) == Condition("nodes", True, "open")
        await engine.ask(DrainNode("ann", "local"))
        assert nodes(served) == Condition("nodes", False, "local drains")
        assert isinstance(await served.running.desk.submit(served.question()), Refused)
        await engine.ask(UncordonNode("ann", "local"))
        assert nodes(served).holds
        assert isinstance(await served.running.desk.submit(served.question()), Granted)


async def test_a_cordoned_node_is_ready_for_as_long_as_something_is_loaded_there() -> None:
    async with shell() as served:
        desk, engine = served.running.desk, served.running.engine
        await engine.ask(CordonNode("ann", "local"))
        assert nodes(served) == Condition("nodes", False, "local is cordoned, and nothing is loaded there")
        await engine.ask(UncordonNode("ann", "local"))
        granted = await desk.submit(served.question())
        assert isinstance(granted, Granted)
        desk.end(granted.request_id, Ending(200, 5, 100))
        await engine.ask(CordonNode("ann", "local"))
        assert nodes(served).holds
        assert isinstance(await desk.submit(served.question()), Granted)
