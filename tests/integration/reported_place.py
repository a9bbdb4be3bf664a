"""The place that a reported case has on a server: its cards, its requests, its runtimes, and what an operator does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from gpuledger.adapters import procfs
from gpuledger.adapters.http.gateway import DEADLINE_HEADER
from gpuledger.domain.aggregates.accelerator import AcceleratorState, ResidentRecord
from gpuledger.domain.events import PlanDecided
from gpuledger.domain.ports import ProcessIdentity
from gpuledger.domain.reasons import Verdict
from gpuledger.domain.state import ResidentState
from gpuledger.domain.units import GIB
from gpuledger.domain.world import World
from tests.integration.gpu_stand_in import ForeignProgram
from tests.integration.reported_live import TOKENS, Document, Live, fault_file
from tests.integration.reported_stage import Stage
from tests.integration.serving import PATIENCE_SECONDS

HOST: Final = "host:local"
PATH: Final = "/v1/chat/completions"
#: Times that the planner computes from are this far behind before one is said to be over.
SURELY_SECONDS: Final = 0.3


@dataclass
class Stream:
    """An answer that goes on and on: it holds a lease until it is closed."""

    stage: Stage
    deployment_id: str
    response: httpx.Response
    chunks: AsyncIterator[bytes]

    async def close(self) -> None:
        await self.response.aclose()
        await self.stage.until(lambda world: not _leased(world, self.deployment_id))


@dataclass
class Place:
    """The cards and deployments of one case. Names are those of the vector; sizes are in GiB."""

    stage: Stage
    live: Live
    requests: AsyncExitStack
    programs: ExitStack
    #: Kept: who forgets one closes its connection.
    streams: list[Stream] = field(default_factory=list[Stream])
    _answer: asyncio.Task[httpx.Response] | None = None

    # ---- what is on the cards ------------------------------------------------------------------------------------

    def card(self, number: int = 0) -> str:
        return self.live.cards()[number].uuid

    def state(self, number: int = 0, world: World | None = None) -> AcceleratorState:
        return (self.stage.world if world is None else world).accelerators[self.card(number)]

    @property
    def accelerators(self) -> Mapping[str, str]:
        """The names that the vector has for them."""
        shown = {self.card(number): f"GPU-{number}" for number in range(len(self.live.cards()))}
        kinds = [one["kind"] for node in self.live.case["state"]["nodes"] for one in node["accelerators"]]
        return {**shown, HOST: f"GPU-{len(shown)}"} if "host" in kinds else shown

    async def others(self, gib: float, card: int = 0) -> ForeignProgram:
        """A real process of somebody else's holds so much of a card, and the newest sample shows it."""
        program = self.programs.enter_context(self.stage.gpus.program(self.card(card), round(gib * GIB)))
        await self.shown(card)
        return program

    async def changed(self, program: ForeignProgram, gib: float, card: int = 0) -> None:
        program.hold(round(gib * GIB))
        await self.shown(card)

    async def shown(self, card: int = 0) -> None:
        """A sample shows the card as it is now, and whose memory it is."""

        def shows(world: World) -> bool:
            sample = self.state(card, world).sample
            return sample is not None and sample.used_bytes == self.stage.gpus.used_bytes(self.card(card))

        await self.stage.until(shows)

    async def contradicted(self) -> None:
        """From now on the driver tells another total at every look: no sample of the card is of use any more."""
        self.stage.gpus.change(self.card(), restless=True)
        await self.stage.until(lambda world: self.state(world=world).invalid)

    def resident(self, name: str, world: World | None = None) -> ResidentRecord | None:
        of_case = self.live.prefix + name
        for _, record in (self.stage.world if world is None else world).residents():
            if record.resident.deployment_id == of_case:
                return record
        return None

    async def holds(self, name: str, gib: float, state: ResidentState = ResidentState.READY) -> ResidentRecord:
        """The newest sample shows that the model holds so much."""

        def as_it_should(world: World) -> ResidentRecord | None:
            record = self.resident(name, world)
            if record is None or record.resident.state is not state:
                return None
            return record if record.resident.attributed_bytes == round(gib * GIB) else None

        return await self.stage.until(as_it_should)

    def running(self, name: str, world: World) -> int:
        """What the runtime of the model says of itself."""
        record = self.resident(name, world)
        return 0 if record is None else record.resident.running_requests

    async def rested(self) -> None:
        """What is here is kept for its start no longer (semantics.md 6.4, rule 4)."""
        starts = [record.resident for _, record in self.stage.world.residents() if self._is_here(record)]
        until = max(one.loaded_at / 1_000_000 + 2 * one.start_ms / 1000 for one in starts)
        await asyncio.sleep(max(0.0, until + SURELY_SECONDS - time.time()))

    def _is_here(self, record: ResidentRecord) -> bool:
        return record.resident.deployment_id.startswith(self.live.prefix)

    # ---- what is asked -------------------------------------------------------------------------------------------

    async def use(self, *names: str, by: str = "interactive") -> None:
        """A short request to each in turn, from beginning to end, and the sample that shows what they left."""
        for name in names:
            answer = await self.stage.http.post(PATH, json=self._question(name, max_tokens=1), headers=_headers(by))
            assert answer.status_code == 200, answer.text
        await self.stage.until(self._use_is_seen)

    def _use_is_seen(self, world: World) -> bool:
        for state, record in world.residents():
            if not self._is_here(record):
                continue
            if state.leases or state.sample is None or record.resident.last_used_at >= state.sample.observed_at:
                return False
        return True

    async def hold(self, name: str, by: str = "interactive") -> Stream:
        """A stream that has begun: it holds a lease, until it is closed or the case is over."""
        asked = self.stage.http.stream(
            "POST", PATH, json=self._question(name, stream=True), headers=_headers(by), timeout=None
        )
        response = await self.requests.enter_async_context(asked)
        assert response.status_code == 200, await response.aread()
        stream = Stream(self.stage, self.live.prefix + name, response, response.aiter_raw())
        await anext(stream.chunks)
        self.streams.append(stream)
        await self.stage.until(lambda world: _leased(world, stream.deployment_id))
        return stream

    def begin(self, name: str, by: str = "interactive", deadline_ms: int | None = None) -> asyncio.Task[httpx.Response]:
        """A request whose answer is not waited for; whoever asks goes when the case is over, at the latest."""
        headers = {} if deadline_ms is None else {DEADLINE_HEADER: str(deadline_ms)}
        question = self._question(name, max_tokens=1)
        asked = self.stage.http.post(PATH, json=question, headers={**_headers(by), **headers}, timeout=None)
        task = asyncio.create_task(asked)
        self.requests.push_async_callback(_given_up, task)
        return task

    async def ask(self, number: int = 1, deadline_ms: int | None = None) -> PlanDecided:
        """The request of the case, from a client bound to its class; the plan of that number that it gets."""
        request = self.live.case["request"]
        name = request["capability"].removesuffix("@1")
        number += len(self.plans)
        self._answer = self.begin(name, "lab" if request["lab"] else request["priority"], deadline_ms)
        await self.stage.until(lambda _: len(self.plans) >= number)
        return self.plans[number - 1]

    async def answer(self) -> httpx.Response:
        """To the request of the case."""
        assert self._answer is not None
        return await asyncio.wait_for(self._answer, PATIENCE_SECONDS)

    async def dry_run(self) -> Mapping[str, Any]:
        """The plan that the request of the case would get."""
        request = self.live.case["request"]
        trial = {
            "capability": self.live.prefix + request["capability"],
            "priority": request["priority"],
            "lab": request["lab"],
            "fallback_rank": request["fallback_rank"],
        }
        plan: Document = (await self.stage.operate("POST", "/plan", trial))["plan"]
        return plan

    async def admitted(self) -> None:
        """It was served."""
        answer = await self.answer()
        assert answer.status_code == 200, answer.text

    async def refused(self, plan: PlanDecided) -> None:
        """The client was told the reason of its plan."""
        answer = await self.answer()
        status = 429 if plan.verdict is Verdict.REJECT_CAPACITY else 503
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, plan.reasons[0].value), answer.text

    def _question(self, name: str, **options: Any) -> Document:
        capability = self.live.prefix + f"{name}@1"
        return {"model": capability, "messages": [{"role": "user", "content": "hello"}], **options}

    @property
    def plans(self) -> Sequence[PlanDecided]:
        """Of the request of the case."""
        return self.stage.plans[self.live.prefix + self.live.case["request"]["capability"]]

    async def queued(self, name: str, reason: str) -> None:
        """A request that was begun waits, for that reason."""

        def waits(world: World) -> bool:
            capability = self.live.prefix + f"{name}@1"
            asked = (one for one in world.requests.values() if one.question.capability == capability)
            return any(one.waiting_for is not None and one.waiting_for.reason == reason for one in asked)

        await self.stage.until(waits)

    # ---- what an operator does -----------------------------------------------------------------------------------

    async def stays(self, name: str) -> None:
        """From now on the model is never evicted."""
        path = f"/deployments/{self.live.prefix + name}/residency"
        await self.stage.operate("PUT", path, {"policy": "always_warm"})

    async def unload(self, name: str) -> None:
        await self.stage.operate("POST", "/unload", {"deployment": self.live.prefix + name})
        await self.stage.until(lambda world: self.resident(name, world) is None)

    # ---- its runtimes --------------------------------------------------------------------------------------------

    def fault(self, name: str) -> Path:
        """The file while which the fault of a deployment acts."""
        return fault_file(self.stage.server.folder.parent, self.live, name)

    @asynccontextmanager
    async def past_the_gateway(self, name: str, requests: int) -> AsyncGenerator[None]:
        """While the block runs, so many streams of a runtime have no lease: whoever had one has lost it."""
        process = await self.stage.until(lambda world: _process(self.resident(name, world)))
        key, port = _door(process)
        headers = {"Authorization": f"Bearer {key}"}
        question = self._question(name, stream=True)
        limits = httpx.Limits(max_connections=None)
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(httpx.AsyncClient(timeout=None, trust_env=False, limits=limits))
            for _ in range(requests):
                asked = http.stream("POST", f"http://127.0.0.1:{port}{PATH}", json=question, headers=headers)
                response = await stack.enter_async_context(asked)
                assert response.status_code == 200
            yield


@asynccontextmanager
async def placed(stage: Stage, live: Live) -> AsyncGenerator[Place]:
    """Where a case is driven. At the end everything of it leaves: requests, programs, and what is idle then."""
    await stage.arrive(live)
    async with AsyncExitStack() as requests:
        with ExitStack() as programs:
            yield Place(stage, live, requests, programs)
    for model in live.models():
        await stage.operate("POST", "/unload", {"deployment": live.prefix + model.name})


def _headers(by: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {TOKENS[by]}"}


async def _given_up(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _leased(world: World, deployment_id: str) -> bool:
    return any(record.lease.deployment_id == deployment_id for _, record in world.leases())


def _process(record: ResidentRecord | None) -> ProcessIdentity | None:
    return None if record is None else record.process


def _door(process: ProcessIdentity) -> tuple[str, str]:
    """The key and the port of a reference runtime. Only its own user can read them."""
    pairs = (one.partition("=") for one in _fields(process, "environ"))
    variables = {name: value for name, _, value in pairs}
    return variables["GPULEDGER_API_KEY"], next(one for one in _fields(process, "cmdline") if one.isdecimal())


def _fields(process: ProcessIdentity, name: str) -> list[str]:
    return (procfs.read_process_file(process.pid, name) or b"").decode().split("\0")
