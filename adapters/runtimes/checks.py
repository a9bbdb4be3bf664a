"""Is it ready, does it work, what runs: the questions that are asked of a runtime over HTTP.

A process that answers /health may still serve nonsense, so one real request is made and its answer is looked at.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Sequence
from typing import Annotated, Final

import httpx
from pydantic import BaseModel, Field, ValidationError

from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import Endpoint, RuntimeFault

from .config import RuntimeConfig, Task

#: The detail of a fault when the connection failed: as it does when the process is about to end.
NO_ANSWER: Final = "no_answer"
_OK: Final = 200
_FIRST_POLL_SECONDS: Final = 0.005
_LAST_POLL_SECONDS: Final = 0.1
#: Two that differ: a server that answers everything alike is broken too.
_PROBES: Final = ("memory", "a ledger of what was lent")
_PROBE_TOKENS: Final = 8


class _Vector(BaseModel):
    index: int
    embedding: Annotated[list[float], Field(min_length=1)]


class _Embeddings(BaseModel):
    data: list[_Vector]


class _Message(BaseModel):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(BaseModel):
    message: _Message


class _Completion(BaseModel):
    choices: Annotated[list[_Choice], Field(min_length=1)]


def client() -> httpx.AsyncClient:
    """A client for the loopback: no proxy, no redirect, whatever the environment says."""
    # A bare context trusts nobody; the default one reads all authorities of the world first, in 0.1 s.
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return httpx.AsyncClient(trust_env=False, follow_redirects=False, verify=nobody, timeout=httpx.Timeout(10.0))


async def until_ready(http: httpx.AsyncClient, endpoint: Endpoint) -> None:
    """Wait until /health answers 200, for ever if need be: the caller bounds it."""
    pause = _FIRST_POLL_SECONDS
    while True:
        try:
            if (await http.get(f"{endpoint.base_url}/health")).status_code == _OK:
                return
        except httpx.TransportError:
            pass  # It does not listen yet.
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LAST_POLL_SECONDS)


async def check(http: httpx.AsyncClient, endpoint: Endpoint, config: RuntimeConfig) -> None:
    """Make one functional request and look at the answer.

    Raises RuntimeFault: HEALTHCHECK_FAILED when there is no answer, INVALID_OUTPUT when it is not one.
    """
    match config.task:
        case Task.EMBEDDING:
            body = await _post(http, endpoint, "/v1/embeddings", {"input": list(_PROBES)})
            _check_embeddings(body, config.dimensions)
        case Task.CHAT:
            question = {"messages": [{"role": "user", "content": _PROBES[0]}], "max_tokens": _PROBE_TOKENS}
            _check_completion(await _post(http, endpoint, "/v1/chat/completions", {**question, "temperature": 0}))


async def metrics(http: httpx.AsyncClient, endpoint: Endpoint) -> str | None:
    """What it answers at /metrics; None when it does not."""
    try:
        answer = await http.get(f"{endpoint.base_url}/metrics", headers=_authorization(endpoint), timeout=2.0)
    except httpx.TransportError:
        return None
    return answer.text if answer.status_code == _OK else None


async def _post(http: httpx.AsyncClient, endpoint: Endpoint, path: str, document: object) -> bytes:
    try:
        # No time limit of its own: that of the load holds.
        answer = await http.post(
            endpoint.base_url + path, json=document, headers=_authorization(endpoint), timeout=None
        )
    except httpx.TransportError as error:
        raise RuntimeFault(Failure.HEALTHCHECK_FAILED, NO_ANSWER, repr(error).encode()) from error
    if answer.status_code != _OK:
        raise RuntimeFault(Failure.HEALTHCHECK_FAILED, f"http_status_{answer.status_code}", answer.content)
    return answer.content


def _authorization(endpoint: Endpoint) -> dict[str, str]:
    return {"Authorization": f"Bearer {endpoint.api_key}"}


def _check_embeddings(body: bytes, dimensions: int | None) -> None:
    try:
        vectors = _Embeddings.model_validate_json(body).data
    except ValidationError as error:
        raise RuntimeFault(Failure.INVALID_OUTPUT, "embedding_malformed", body) from error
    if [vector.index for vector in vectors] != list(range(len(_PROBES))):
        raise RuntimeFault(Failure.INVALID_OUTPUT, "embedding_count", body)
    first, second = (vector.embedding for vector in vectors)
    if len(first) != len(second) or dimensions not in (None, len(first)):
        raise RuntimeFault(Failure.INVALID_OUTPUT, "embedding_length", body)
    if first == second or not all(_says_something(vector) for vector in (first, second)):
        raise RuntimeFault(Failure.INVALID_OUTPUT, "embedding_degenerate", body)


def _says_something(vector: Sequence[float]) -> bool:
    return all(math.isfinite(value) for value in vector) and (len(vector) == 1 or min(vector) != max(vector))


def _check_completion(body: bytes) -> None:
    try:
        message = _Completion.model_validate_json(body).choices[0].message
    except ValidationError as error:
        raise RuntimeFault(Failure.INVALID_OUTPUT, "completion_malformed", body) from error
    if not (message.content or message.reasoning_content):
        raise RuntimeFault(Failure.INVALID_OUTPUT, "completion_empty", body)
