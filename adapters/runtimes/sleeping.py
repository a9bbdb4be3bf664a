"""Sleep and wake: a runtime gives its memory back and keeps its process, and takes it again.

An answer of 200 says that it was told, not that the memory is free: only the device says that (runtimes.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import httpx
from pydantic import BaseModel, StrictBool, ValidationError

from gpuledger.adapters.complaints import out_of_memory
from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import Endpoint, RuntimeFault

from .asking import OK, ask
from .checks import NO_ANSWER
from .engine import EVIDENCE_BYTES, OUT_OF_MEMORY
from .options import Call, SleepCalls

_POLL_SECONDS: Final = 0.1
#: Of an answer that says nothing but that it is done.
_MAX_ANSWER_BYTES: Final = 64 * 1024


class _State(BaseModel):
    is_sleeping: StrictBool


async def put_to_sleep(http: httpx.AsyncClient, endpoint: Endpoint, calls: SleepCalls) -> None:
    """Returns when it says that it sleeps: the caller bounds it. Raises RuntimeFault."""
    await _make(http, endpoint, calls.sleep)
    await _until(http, endpoint, calls, sleeping=True)


async def wake_up(http: httpx.AsyncClient, endpoint: Endpoint, calls: SleepCalls) -> None:
    """Returns when it says that it is awake: the caller bounds it. Raises RuntimeFault; GPU_OOM where it says so."""
    await _make(http, endpoint, calls.wake)
    await _until(http, endpoint, calls, sleeping=False)


async def _make(http: httpx.AsyncClient, endpoint: Endpoint, calls: Sequence[Call]) -> None:
    for call in calls:
        status, body = await _ask(http, endpoint, "POST", call.path, json=call.document)
        if status != OK:
            if out_of_memory(body):
                raise RuntimeFault(Failure.GPU_OOM, OUT_OF_MEMORY, body)
            raise RuntimeFault(Failure.HEALTHCHECK_FAILED, f"http_status_{status}", body)


async def _until(http: httpx.AsyncClient, endpoint: Endpoint, calls: SleepCalls, *, sleeping: bool) -> None:
    while calls.state_path is not None:
        status, body = await _ask(http, endpoint, "GET", calls.state_path)
        if status != OK:
            raise RuntimeFault(Failure.HEALTHCHECK_FAILED, f"http_status_{status}", body)
        if _is_sleeping(body) is sleeping:
            return
        await asyncio.sleep(_POLL_SECONDS)


async def _ask(
    http: httpx.AsyncClient, endpoint: Endpoint, method: str, path: str, **content: Any
) -> tuple[int, bytes]:
    """Status, and the beginning of the answer. No time limit of its own: that of the whole holds."""
    try:
        answer = await ask(http, endpoint, method, path, _MAX_ANSWER_BYTES, **content)
    except httpx.TransportError as error:
        raise RuntimeFault(Failure.HEALTHCHECK_FAILED, NO_ANSWER, repr(error).encode()) from error
    return answer.status, answer.body


def _is_sleeping(body: bytes) -> bool:
    try:
        return _State.model_validate_json(body).is_sleeping
    except ValidationError as error:
        raise RuntimeFault(Failure.INVALID_OUTPUT, "sleep_state_malformed", body[:EVIDENCE_BYTES]) from error
