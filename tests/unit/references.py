"""Reference runtimes in processes of their own, under a real manager, for tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from gpuledger.adapters.runtimes.config import ReferenceConfig
from gpuledger.adapters.runtimes.manager import RuntimeManager
from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import ProcessIdentity, RuntimeFault

PATIENCE_SECONDS: Final = 60
FOR_EVER_MS: Final = 10**9
#: Answers that end when their client leaves; the functional check asks for few tokens.
ENDLESS: Final[dict[str, Any]] = {"tokens": 10**6, "token_ms": 1}
HOST: Final = "host:node-1"


class Loaded:
    """One resident, and a client of it."""

    def __init__(self, runtimes: RuntimeManager, process: ProcessIdentity, http: httpx.AsyncClient) -> None:
        self.runtimes = runtimes
        self.process = process
        self.http = http

    async def ask(self, path: str, **document: Any) -> httpx.Response:
        return await self.http.post(path, json=document)

    async def until_running(self, count: int) -> None:
        while (told := await self.runtimes.figures("r")) is None or told.busy != count:
            await asyncio.sleep(0.01)

    @asynccontextmanager
    async def stream(self) -> AsyncGenerator[AsyncIterator[Any]]:
        """An answer that is under way: its first part has come."""
        async with self.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            parts = events(answer)
            await anext(parts)
            yield parts

    async def is_listening(self) -> bool:
        try:
            async with httpx.AsyncClient(trust_env=False) as http:
                await http.get(f"{self.http.base_url}/health")
        except httpx.ConnectError:
            return False
        return True

    def resident_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) * 1024


@asynccontextmanager
async def opened(folder: Path, **config: Any) -> AsyncGenerator[RuntimeManager]:
    runtimes = RuntimeManager({"d": ReferenceConfig.model_validate({"type": "reference", **config})}, folder)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            yield runtimes
    finally:
        await runtimes.close()


@asynccontextmanager
async def loaded(folder: Path, **config: Any) -> AsyncGenerator[Loaded]:
    async with opened(folder, **config) as runtimes:
        process = await runtimes.spawn("r", "d", HOST)
        await runtimes.load("r")
        endpoint = runtimes.endpoint("r")
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        async with httpx.AsyncClient(
            base_url=endpoint.base_url, headers=headers, trust_env=False, timeout=PATIENCE_SECONDS
        ) as http:
            yield Loaded(runtimes, process, http)


async def fault_of(awaitable: Any) -> tuple[Failure, str]:
    with pytest.raises(RuntimeFault) as raised:
        await awaitable
    return raised.value.failure, raised.value.detail


async def events(answer: httpx.Response) -> AsyncIterator[Any]:
    async for line in answer.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))
