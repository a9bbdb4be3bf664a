"""As much of HTTP/1.1 as the reference runtime speaks, over asyncio and with nothing but the standard library."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, TypeGuard

MAX_HEAD_BYTES = 64 * 1024
#: More than the longest recording that a configuration can allow (options.py), and the form around it.
MAX_BODY_BYTES = 1025 * 2**20
#: What is read at once: a body is then in memory once, not twice.
CHUNK_BYTES = 64 * 1024


class Refusal(Exception):
    """An answer that is an error of the client's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Part:
    """One field of a form."""

    name: str
    content: memoryview


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytearray

    def json(self) -> dict[str, Any]:
        try:
            return an_object(json.loads(self.body))
        except (ValueError, RecursionError):
            raise Refusal(400, "the body is not JSON") from None

    def form(self) -> dict[str, memoryview]:
        """The fields of a multipart form (RFC 7578), the last of each name."""
        kind = self.headers.get("content-type", "")
        boundary = re.search(r'boundary="?([^";]+)"?', kind, re.IGNORECASE)
        if boundary is None or not kind.lower().startswith("multipart/form-data"):
            raise Refusal(400, "the body is not a multipart form")
        return {part.name: part.content for part in _parts(self.body, boundary[1].encode("latin-1"))}


class Connection:
    """One client: requests are read and answers written one after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._early = b""

    async def read(self) -> Request | None:
        """The next request; None when the client has gone, or has been told to go."""
        try:
            head = self._early + await self._reader.readuntil(b"\r\n\r\n")
            self._early = b""
            first, *lines = head.decode("latin-1").split("\r\n")
            method, path, _ = (*first.split(" "), "", "")[:3]
            pairs = (line.partition(":") for line in lines if line)
            headers = {name.lower(): value.strip() for name, _, value in pairs}
            body = await self._body(headers)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            return None
        except Refusal as refusal:
            await self.refuse(refusal)
            return None
        return Request(method, path.partition("?")[0], headers, body)

    async def gone(self) -> None:
        """Wait until the client goes away."""
        while not self._early:
            byte = await self._reader.read(1)
            if not byte:
                return
            self._early = byte
        await asyncio.Event().wait()

    async def send(self, status: int, document: object, kind: str = "application/json") -> None:
        body = document.encode() if isinstance(document, str) else json.dumps(document).encode()
        self._head(status, kind, f"Content-Length: {len(body)}")
        self._writer.write(body)
        await self._writer.drain()

    async def refuse(self, refusal: Refusal) -> None:
        await self.send(refusal.status, {"error": {"code": refusal.status, "message": str(refusal)}})

    async def stream(self, documents: AsyncIterator[object]) -> None:
        """Server-sent events, chunked: a stream that is cut off shows."""
        self._head(200, "text/event-stream", "Transfer-Encoding: chunked")
        async for document in documents:
            await self._chunk(f"data: {json.dumps(document)}\n\n".encode())
        await self._chunk(b"data: [DONE]\n\n")
        await self._chunk(b"")

    def _head(self, status: int, kind: str, framing: str) -> None:
        self._writer.write(f"HTTP/1.1 {status} -\r\nContent-Type: {kind}\r\n{framing}\r\n\r\n".encode())

    async def _chunk(self, data: bytes) -> None:
        self._writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await self._writer.drain()

    async def _body(self, headers: dict[str, str]) -> bytearray:
        body = bytearray()
        if "transfer-encoding" not in headers:
            await self._read_into(body, _length(headers.get("content-length", "0"), 10))
            return body
        if headers["transfer-encoding"].lower() != "chunked":
            raise Refusal(501, "of transfer encodings only chunked is known")
        while True:
            line = (await self._reader.readuntil(b"\r\n")).decode("latin-1")
            length = _length(line.partition(";")[0].strip(), 16)
            await self._read_into(body, length)
            # After the last chunk come trailers, if any, and an empty line.
            while (await self._reader.readuntil(b"\r\n")) != b"\r\n":
                if length:
                    raise Refusal(400, "a chunk is longer than it says")
            if not length:
                return body

    async def _read_into(self, body: bytearray, count_bytes: int) -> None:
        if len(body) + count_bytes > MAX_BODY_BYTES:
            raise Refusal(413, f"a body may have {MAX_BODY_BYTES} bytes")
        while count_bytes:
            piece = await self._reader.read(min(count_bytes, CHUNK_BYTES))
            if not piece:
                raise ConnectionResetError
            body += piece
            count_bytes -= len(piece)


def _length(text: str, base: int) -> int:
    if not re.fullmatch(r"[0-9A-Fa-f]{1,15}", text):
        raise Refusal(400, "a body needs its length")
    try:
        return int(text, base)
    except ValueError:
        raise Refusal(400, "a body needs its length") from None


def _parts(body: bytearray, boundary: bytes) -> list[Part]:
    """The fields between the boundaries, uncopied."""
    whole, parts = memoryview(body), list[Part]()
    delimiter = b"\r\n--" + boundary
    # The first boundary has no line before it.
    end = 0 if body.startswith(delimiter[2:]) else body.find(delimiter)
    start = end + len(delimiter) - (2 if end == 0 else 0)
    while end >= 0 and body.startswith(b"\r\n", start):
        end = body.find(delimiter, start)
        head_end = body.find(b"\r\n\r\n", start, end)
        if end < 0 or head_end < 0:
            raise Refusal(400, "the form is cut off")
        name = re.search(rb'content-disposition:[^\r\n]*[; ]name="([^"]*)"', body[start:head_end], re.IGNORECASE)
        if name is None:
            raise Refusal(400, "a field of the form has no name")
        parts.append(Part(name[1].decode("utf-8", "replace"), whole[head_end + 4 : end]))
        start = end + len(delimiter)
    if not body.startswith(b"--", start):
        raise Refusal(400, "the form is cut off")
    return parts


# ---- of the types that JSON has ---------------------------------------------------------------------------------


def a_text(value: object) -> str:
    if not isinstance(value, str):
        raise Refusal(400, "a string was expected")
    return value


def a_list(value: object) -> list[Any]:
    if not _is_list(value):
        raise Refusal(400, "a list was expected")
    return value


def an_object(value: object) -> dict[str, Any]:
    if not _is_object(value):
        raise Refusal(400, "an object was expected")
    return value


def _is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def _is_object(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)
