"""The body of a request to a runtime, as often as it has to be sent: JSON from memory, a form from where it is kept.

--BOUNDARY                                                      small fields first, so that whoever reads it knows
Content-Disposition: form-data; name="model"                    what to do with the file when it comes

voice.transcribe@1
--BOUNDARY
Content-Disposition: form-data; name="file"; filename="audio.wav"
Content-Type: audio/wav

...
--BOUNDARY--
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Final, Protocol

from .spool import Spooled

#: Read and sent at once.
CHUNK_BYTES: Final = 64 * 1024


class Payload(Protocol):
    """What one attempt sends. The next attempt sends the same."""

    @property
    def content_type(self) -> str: ...

    @property
    def length_bytes(self) -> int: ...

    def content(self) -> bytes | AsyncIterator[bytes]:
        """All of it, from its beginning."""
        ...

    def text(self) -> bytes:
        """What the client wrote, as far as it is text: a runtime may repeat it."""
        ...

    def close(self) -> None:
        """Give up what it is kept in. May be called twice."""
        ...


class JsonPayload:
    """A document, in memory."""

    def __init__(self, body: bytes) -> None:
        self.content_type: Final = "application/json"
        self._body = body

    @property
    def length_bytes(self) -> int:
        return len(self._body)

    def content(self) -> bytes:
        return self._body

    def text(self) -> bytes:
        return self._body

    def close(self) -> None:
        """Memory goes by itself."""


class FormPayload:
    """Fields and one file. `file_name` and `file_type` are ours to choose: nothing in them is quoted."""

    def __init__(self, fields: Sequence[tuple[str, str]], file: Spooled, file_name: str, file_type: str) -> None:
        boundary = secrets.token_hex(16)
        self.content_type: Final = f"multipart/form-data; boundary={boundary}"
        head: list[str] = []
        for name, text in fields:
            head.append(f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{text}\r\n')
        disposition = f'form-data; name="file"; filename="{file_name}"'
        head.append(f"--{boundary}\r\nContent-Disposition: {disposition}\r\nContent-Type: {file_type}\r\n\r\n")
        self._head = "".join(head).encode()
        self._file = file
        self._tail = f"\r\n--{boundary}--\r\n".encode()

    @property
    def length_bytes(self) -> int:
        return len(self._head) + self._file.length_bytes + len(self._tail)

    async def content(self) -> AsyncIterator[bytes]:
        yield self._head
        async for chunk in self._file.chunks(CHUNK_BYTES):
            yield chunk
        yield self._tail

    def text(self) -> bytes:
        """Its fields: what an audio file says nobody here can tell."""
        return self._head

    def close(self) -> None:
        self._file.close()
