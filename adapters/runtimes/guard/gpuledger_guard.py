"""A middleware for vLLM (`--middleware gpuledger_guard.Guard`): the key is asked for on every path.

vLLM itself asks for it below /v1 and few other paths alone; /invocations, /sleep and /collective_rpc answer anybody
(docs.vllm.ai, "Security"). It runs inside vLLM, with the standard library only.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]


class Guard:
    """ASGI around ASGI: what has the key goes through, everything else gets 401, or no websocket."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._expected = _digest(b"Bearer " + os.environ["VLLM_API_KEY"].encode())

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._has_key(scope):
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error":{"message":"Unauthorized","code":401}}'})
        elif scope["type"] == "websocket" and not self._has_key(scope):
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._app(scope, receive, send)

    def _has_key(self, scope: Message) -> bool:
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(_digest(given[0]), self._expected)


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()
