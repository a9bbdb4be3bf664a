"""Requests of ours to a runtime, of which nothing is believed: no more of an answer is read than it can honestly be.

A program that is broken answers for ever, packs gigabytes into kilobytes, or names encodings that there are not. None
of that may be felt beyond the one request: it ends as one that was not answered.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import httpx

from gpuledger.domain.ports import Endpoint

OK: Final = 200


@dataclass(frozen=True, slots=True)
class Answer:
    """`body`: its first bytes; `whole` when these are all."""

    status: int
    body: bytes
    whole: bool


def client() -> httpx.AsyncClient:
    """A client for the loopback: no proxy, no redirect, nothing unpacked, and a connection for each request.

    A connection that is kept may be closed by the runtime at the moment it is used, and nobody could tell that from a
    crash.
    """
    # A bare context trusts nobody; the default one reads all authorities of the world first, in 0.1 s.
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return httpx.AsyncClient(
        trust_env=False,
        follow_redirects=False,
        verify=nobody,
        timeout=httpx.Timeout(10.0),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        headers={"Accept-Encoding": "identity"},
    )


async def ask(
    http: httpx.AsyncClient,
    endpoint: Endpoint,
    method: str,
    path: str,
    limit_bytes: int,
    timeout_seconds: float | None = None,
    **content: Any,
) -> Answer:
    """One request. `timeout_seconds` bounds each silence, not the whole: that is up to who asks.

    Raises httpx.TransportError when there is no answer.
    """
    options: Mapping[str, Any] = {"headers": {"Authorization": f"Bearer {endpoint.api_key}"}, **content}
    body = bytearray()
    async with http.stream(method, endpoint.base_url + path, timeout=timeout_seconds, **options) as answer:
        # Raw: what is packed although nobody asked for it is not unpacked, and so is judged as what it is.
        async for part in answer.aiter_raw():
            body += part
            if len(body) > limit_bytes:
                break
        return Answer(answer.status_code, bytes(body[:limit_bytes]), len(body) <= limit_bytes)
