"""Clients that can be cut off: each asks once, in a thread of its own, over a socket that anybody may close."""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from tests.integration.serving import PATIENCE_SECONDS, TOKEN

#: Of a stream: more than what stands before its first words.
FIRST_EVENTS: Final = 2


@dataclass(frozen=True)
class Told:
    """What a client was told: all of a whole answer, or of the events of a stream."""

    status: int
    documents: tuple[dict[str, Any], ...]
    done: bool

    @property
    def code(self) -> str | None:
        """Of the typed error that it ends with."""
        error = self.documents[-1].get("error") if self.documents else None
        return None if error is None else str(error["code"])


class Caller:
    """`model` of an embedding, or of a chat that streams; `options` are further fields of its question."""

    def __init__(self, base_url: str, model: str, *, chats: bool = False, **options: Any) -> None:
        self._url = urlsplit(base_url)
        self._question: dict[str, Any] = {"model": model, "input": "x"}
        if chats:
            self._question = {"model": model, "stream": True, "messages": [{"role": "user", "content": "x"}]}
        self._question |= options
        self._path = "/v1/chat/completions" if chats else "/v1/embeddings"
        self._received = b""
        self._cut = False
        self._socket = socket.create_connection((self._url.hostname, self._url.port or 80), timeout=PATIENCE_SECONDS)
        self._thread = threading.Thread(target=self._ask, name=f"caller of {model}")
        self._thread.start()

    def cut(self) -> None:
        """Its client goes away."""
        self._cut = True
        self._socket.shutdown(socket.SHUT_RDWR)

    def has_begun(self) -> bool:
        """Whether it has seen some of a stream."""
        return self._received.count(b"data: ") > FIRST_EVENTS

    def told(self) -> Told | None:
        """When it is over. None where the connection broke off before an answer was complete."""
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), f"no answer to {self._question}, after {self._received!r}"
        if self._cut:
            return None
        head, _, body = self._received.partition(b"\r\n\r\n")
        if not head:
            return None
        status = int(head.split()[1])
        if b"text/event-stream" not in head:
            return Told(status, (json.loads(_whole(head, body)),), True)
        lines = [line for line in _whole(head, body).split(b"\n") if line.startswith(b"data: ")]
        done = b"data: [DONE]" in lines
        documents = tuple(json.loads(line[6:]) for line in lines if line != b"data: [DONE]")
        return Told(status, documents, done)

    def _ask(self) -> None:
        body = json.dumps(self._question).encode()
        head = (
            f"POST {self._path} HTTP/1.1\r\nHost: {self._url.netloc}\r\nAuthorization: Bearer {TOKEN}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        with self._socket:
            try:
                self._socket.sendall(head.encode() + body)
                while part := self._socket.recv(65_536):
                    self._received += part
            except OSError:
                return  # cut off: what was received until then is all there is


def _whole(head: bytes, body: bytes) -> bytes:
    """The body without its framing; of one in chunks as much as came."""
    if b"transfer-encoding: chunked" not in head.lower():
        return body
    whole = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size or b"0", 16)
        whole, body = whole + body[:length], body[length + 2 :]
    return whole
