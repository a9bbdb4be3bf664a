"""What `/readyz` says of a capability that fails again and again: it is named, and requests still come."""

from __future__ import annotations

import pytest

from gpuledger.adapters.http.ports import Condition, Ending, Granted, Refused
from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import RuntimeFault
from tests.unit.shells import Shell, shell

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


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
