"""What the gateway needs of the scheduler's shell, and nothing more."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal, Protocol, TypeAlias

from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import Endpoint
from gpuledger.domain.reasons import Reason
from gpuledger.domain.world import World

Operation: TypeAlias = Literal["embeddings", "chat", "completion", "transcription", "rerank"]


@dataclass(frozen=True, slots=True)
class Question:
    """A request as the scheduler sees it: shapes and sizes, never what it says.

    `content_mac` is set when the client named the request itself: `request_id` is then the same each time it asks.
    """

    request_id: str
    client_id: str
    capability: str
    operation: Operation
    body_bytes: int
    deadline_ms: int | None
    content_mac: str | None


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """What a client is told of the plan that decided on it."""

    fingerprint: str
    document: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Passage:
    """What happened to a request on its way, as its client is told.

    `attempt`: 1, and one more each time it was tried again after a failure. `fallback`: the reason or failure for which
    it was planned for the next rank. `queue_place` and `estimated_wait_ms` are of the moment at which it was first
    queued; None when it never was.
    """

    fallback_rank: int = 0
    fallback: str | None = None
    attempt: int = 1
    queue_place: int | None = None
    estimated_wait_ms: int | None = None


#: Nothing happened that has to be told.
STRAIGHT: Final = Passage()


@dataclass(frozen=True, slots=True)
class Lost:
    """The lease of a request that was being served is gone. `again`: it waits at its old place, for this outcome."""

    reason: Reason | None
    failure: Failure | None
    detail: str
    again: asyncio.Future[Outcome] | None = None


@dataclass(frozen=True, slots=True)
class Granted:
    """Work may begin. `lost` is done when it has to end; whoever serves it looks at it."""

    request_id: str
    lease_id: str
    endpoint: Endpoint
    start: str
    queued_ms: int
    plan: PlanFacts | None
    lost: asyncio.Future[Lost]
    passage: Passage = STRAIGHT


@dataclass(frozen=True, slots=True)
class Refused:
    """It will not be served: refused by the planner (`reason`), or failed before work began (`failure`).

    `doubt`: why the envelope that a refusal with NO_MEASURED_ENVELOPE is about is suspect; None: it is not known that
    there is one.
    """

    request_id: str
    reason: Reason | None
    failure: Failure | None
    detail: str
    plan: PlanFacts | None
    passage: Passage = STRAIGHT
    doubt: str | None = None


class Cause(StrEnum):
    """Why nothing is admitted at all."""

    STARTING = "starting"
    DRAINING = "draining"
    LEDGER_UNAVAILABLE = "ledger_unavailable"
    INTERNAL_ERROR = "internal_error"
    TOO_MANY_OPEN = "too_many_open_requests"


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Nobody decided on it: nothing of it is in the ledger, as far as is known."""

    request_id: str
    cause: Cause


@dataclass(frozen=True, slots=True)
class Repeated:
    """A second submission of a request that the client named. `refused` is the first one's refusal, if it was one."""

    request_id: str
    same_content: bool
    state: Literal["in_progress", "completed", "refused", "cancelled"]
    refused: Refused | None = None


Outcome: TypeAlias = Granted | Refused | Unavailable | Repeated


@dataclass(frozen=True, slots=True)
class Ending:
    """How the work under a lease went. `failure` is None when the runtime answered with a status below 500.

    `unsent`: it failed, and its client still waits and has seen nothing of an answer: it may be tried again.
    """

    status: int
    served_ms: int
    response_bytes: int
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    failure: Failure | None = None
    detail: str = ""
    client_gone: bool = False
    unsent: bool = False


@dataclass(frozen=True, slots=True)
class Condition:
    """One thing that has to hold for `/readyz`."""

    name: str
    holds: bool
    detail: str


class Desk(Protocol):
    """Where the gateway hands requests in. One event loop."""

    async def submit(self, question: Question) -> Outcome:
        """Wait until it may begin or is ended. Cancelled, the request is given up."""
        ...

    async def resume(self, request_id: str, again: asyncio.Future[Outcome]) -> Outcome:
        """Wait again: its lease was lost and it was put back, or its work failed unsent. Cancelled, it is given up."""
        ...

    def end(self, request_id: str, ending: Ending) -> asyncio.Future[Outcome] | None:
        """Its work is over. Returns at once: nobody waits for the record of it.

        What is returned is what becomes of one that failed `unsent`, to `resume` with; None when it ends here.
        """
        ...

    def cut_off(self, request_id: str, lost: Lost) -> None:
        """It was put back after its lease was lost, and its answer had begun: it ends here. Returns at once."""
        ...

    def conditions(self) -> tuple[Condition, ...]:
        """What readiness consists of."""
        ...


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Figures of the shell that are no part of the folded state."""

    now: int
    open_requests: int
    ledger_writable: bool


class Insight(Protocol):
    """What metrics are read from."""

    @property
    def world(self) -> World: ...

    def facts(self) -> ServerFacts: ...
