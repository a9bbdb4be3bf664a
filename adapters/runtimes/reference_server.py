"""A server without a model: it holds the bytes it is told and answers deterministically after a set time.

    GPULEDGER_API_KEY=... python -I -S reference_server.py PORT CONFIGURATION

CONFIGURATION is the JSON of `ReferenceConfig`. It runs by its path, in a process of its own, with the standard
library only, and speaks as much of the OpenAI API as clients of gpuledger use: embeddings, chat and text completions,
streamed or not. Tokens are words. The same prompt gets the same answer, in every process.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import math
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeGuard

MAX_HEAD_BYTES = 64 * 1024
MAX_BODY_BYTES = 64 * 1024 * 1024
LOAD_STEP_MS = 50
WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "haven", "inlet", "jade", "larch", "mesa")


class Refusal(Exception):
    """An answer that is an error of the client's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    def json(self) -> dict[str, Any]:
        try:
            return _object(json.loads(self.body))
        except ValueError:
            raise Refusal(400, "the body is not JSON") from None


class Connection:
    """One client: requests are read and answers written one after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._early = b""

    async def read(self) -> Request | None:
        """The next request; None when the client has gone."""
        try:
            head = self._early + await self._reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            return None
        self._early = b""
        first, *lines = head.decode("latin-1").split("\r\n")
        method, path, _ = (*first.split(" "), "", "")[:3]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES or "transfer-encoding" in headers:
            await self.send(413, {"error": {"message": "bodies need a Content-Length, and not a large one"}})
            return None
        try:
            body = await self._reader.readexactly(int(length))
        except (asyncio.IncompleteReadError, ConnectionError):
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


class Memory:
    """Bytes that are really held: private pages, touched by the kernel when they are mapped."""

    def __init__(self, idle_bytes: int, peak_bytes: int, parallel: int) -> None:
        self._idle_bytes = max(0, idle_bytes - _own_bytes())
        self._request_bytes = (peak_bytes - idle_bytes) // parallel
        self._held: list[mmap.mmap] = []

    async def load(self, duration_ms: int) -> None:
        """Take the idle bytes in equal steps over the time that loading is to take."""
        steps = max(1, duration_ms // LOAD_STEP_MS)
        for step in range(steps):
            share = self._idle_bytes * (step + 1) // steps - self._idle_bytes * step // steps
            self._held.extend(_take(share))
            await asyncio.sleep(duration_ms / steps / 1000)

    @contextmanager
    def of_a_request(self) -> Generator[None]:
        taken = _take(self._request_bytes)
        try:
            yield
        finally:
            for pages in taken:
                pages.close()


def _take(count_bytes: int) -> list[mmap.mmap]:
    """Raises MemoryError when the system has not as much."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    try:
        return [mmap.mmap(-1, count_bytes, flags=flags)] if count_bytes > 0 else []
    except OSError as error:
        raise MemoryError from error


def _own_bytes() -> int:
    """What the interpreter holds by itself, its libraries counted whole as the telemetry counts them."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) * 1024


class Model:
    """What it says: everything follows from the SHA-256 of what it was asked."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._broken: bool = config["faults"]["invalid_output"]
        self._dimensions: int = config["dimensions"] or 384

    def vector(self, text: str) -> list[float]:
        """A unit vector."""
        if self._broken:
            return [0.0] * self._dimensions
        words = struct.unpack(f"<{self._dimensions}H", hashlib.shake_256(text.encode()).digest(2 * self._dimensions))
        values = [word - 32767.5 for word in words]
        norm = math.sqrt(sum(value * value for value in values))
        return [value / norm for value in values]

    def words(self, prompt: str, count: int) -> Iterator[str]:
        block = b""
        for index in range(count):
            place = index % hashlib.sha256().digest_size
            if place == 0:
                block = hashlib.sha256(f"{index} {prompt}".encode()).digest()
            yield "" if self._broken else WORDS[block[place] % len(WORDS)] + " "


class Server:
    def __init__(self, config: dict[str, Any], api_key: str) -> None:
        self._config = config
        self._faults: dict[str, Any] = config["faults"]
        self._key = f"Bearer {api_key}".encode()
        self._model = Model(config)
        self._memory = Memory(config["idle_bytes"], config["peak_bytes"], config["parallel"])
        self._slots = asyncio.Semaphore(config["parallel"])
        self._ready = False
        self._received = 0
        self._present = 0
        self._stop = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    async def run(self, port: int) -> None:
        """Serve until SIGTERM, and then until what runs has ended; a second SIGTERM does not wait for it."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_term)
        server = await asyncio.start_server(self._serve, "127.0.0.1", port, limit=MAX_HEAD_BYTES)
        loading = asyncio.create_task(self._load())
        await self._stop.wait()
        server.close()
        await self._idle.wait()
        loading.cancel()

    def _on_term(self) -> None:
        if self._faults["ignore_term"]:
            return
        if self._stop.is_set():
            os._exit(0)
        self._stop.set()

    async def _load(self) -> None:
        try:
            await self._memory.load(self._config["load_ms"])
        except MemoryError:
            self._die("out of memory")
        match self._faults["fail_load"]:
            case "exit":
                self._die("cannot load")
            case "oom":
                self._die("out of memory")
            case "hang":
                return
            case _:
                self._ready = True

    def _die(self, complaint: str) -> NoReturn:
        print(f"reference: {complaint}", file=sys.stderr, flush=True)
        os._exit(self._faults["exit_status"])

    # ---- HTTP ---------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        try:
            while request := await connection.read():
                if not await self._while_present(connection, request):
                    break
        except (ConnectionError, asyncio.CancelledError):
            pass  # The client has gone, or the process is about to.
        finally:
            writer.close()

    async def _while_present(self, connection: Connection, request: Request) -> bool:
        """Answer, and stop answering when the client goes away; False when it did."""
        answer = asyncio.create_task(self._answer(connection, request))
        gone = asyncio.create_task(connection.gone())
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        present = not gone.done()
        for task in (answer, gone):
            task.cancel()
        results = await asyncio.gather(answer, gone, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, ConnectionError):
                raise result
        return present

    async def _answer(self, connection: Connection, request: Request) -> None:
        try:
            await self._route(connection, request)
        except Refusal as refusal:
            await connection.send(refusal.status, {"error": {"code": refusal.status, "message": str(refusal)}})
        except MemoryError:
            self._die("out of memory")

    async def _route(self, connection: Connection, request: Request) -> None:
        match request.method, request.path:
            case "GET", "/health" if self._ready:
                await connection.send(200, {"status": "ok"})
            case "GET", "/health":
                await connection.send(503, {"status": "loading"})
            case _ if not self._is_admitted(request):
                raise Refusal(401, "wrong or missing API key")
            case "GET", "/metrics":
                await connection.send(200, self._metrics(), "text/plain; version=0.0.4")
            case "POST", "/tokenize":
                await connection.send(200, {"tokens": list(range(len(_text(request.json().get("content")).split())))})
            case "POST", "/v1/embeddings" if self._config["task"] == "embedding":
                await self._work(connection, request, self._embeddings)
            case "POST", "/v1/chat/completions" if self._config["task"] == "chat":
                await self._work(connection, request, self._chat)
            case "POST", "/v1/completions" if self._config["task"] == "chat":
                await self._work(connection, request, self._completion)
            case _:
                raise Refusal(404, f"no {request.method} {request.path} here")

    def _is_admitted(self, request: Request) -> bool:
        given = request.headers.get("authorization", "")
        return hmac.compare_digest(given.encode("latin-1"), self._key)

    async def _work(self, connection: Connection, request: Request, answer: Any) -> None:
        """Take a slot and its memory for one request."""
        if not self._ready:
            raise Refusal(503, "loading")
        document = request.json()
        self._received += 1
        limit = self._faults["crash_after_requests"]
        doomed = limit is not None and self._received > limit
        self._present += 1
        self._idle.clear()
        try:
            async with self._slots:
                with self._memory.of_a_request():
                    if self._faults["hang_requests"]:
                        await asyncio.Event().wait()
                    await answer(connection, document, doomed)
        finally:
            self._present -= 1
            if self._present == 0:
                self._idle.set()

    def _metrics(self) -> str:
        processing = min(self._present, self._config["parallel"])
        return (
            "# TYPE reference:requests_processing gauge\n"
            f"reference:requests_processing {processing}\n"
            "# TYPE reference:requests_deferred gauge\n"
            f"reference:requests_deferred {self._present - processing}\n"
        )

    # ---- embeddings ---------------------------------------------------------------------------------------------

    async def _embeddings(self, connection: Connection, document: dict[str, Any], doomed: bool) -> None:
        given = document.get("input")
        texts = [_text(text) for text in ([given] if isinstance(given, str) else _list(given))]
        if not texts:
            raise Refusal(400, "input is empty")
        counts = [self._count(text) for text in texts]
        await asyncio.sleep(self._config["service_ms"] / 1000)
        if doomed:
            self._die("crashed")
        packed = document.get("encoding_format") == "base64"
        vectors = (self._model.vector(text) for text in texts)
        data = [
            {"object": "embedding", "index": index, "embedding": _base64(vector) if packed else vector}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": sum(counts), "total_tokens": sum(counts)}
        await connection.send(200, {"object": "list", "model": document.get("model", ""), "data": data, "usage": usage})

    def _count(self, text: str) -> int:
        count = len(text.split())
        if count > self._config["context_length"]:
            raise Refusal(400, f"{count} tokens are more than the context of {self._config['context_length']}")
        return count

    # ---- completions --------------------------------------------------------------------------------------------

    async def _chat(self, connection: Connection, document: dict[str, Any], doomed: bool) -> None:
        messages = _list(document.get("messages"))
        if not messages:
            raise Refusal(400, "messages is empty")
        await self._complete(connection, document, "\n".join(map(_message, messages)), True, doomed)

    async def _completion(self, connection: Connection, document: dict[str, Any], doomed: bool) -> None:
        await self._complete(connection, document, _text(document.get("prompt")), False, doomed)

    async def _complete(
        self, connection: Connection, document: dict[str, Any], prompt: str, chat: bool, doomed: bool
    ) -> None:
        prompt_tokens = self._count(prompt)
        wanted = document.get("max_tokens") or document.get("max_completion_tokens") or self._config["tokens"]
        if not isinstance(wanted, int) or wanted < 1:
            raise Refusal(400, "max_tokens is not a positive integer")
        count = min(wanted, self._config["tokens"])
        answer = Answer(
            chat=chat,
            model=str(document.get("model", "")),
            name=hashlib.sha256(prompt.encode()).hexdigest()[:24],
            finish="length" if count < self._config["tokens"] else "stop",
            usage={
                "prompt_tokens": prompt_tokens,
                "completion_tokens": count,
                "total_tokens": prompt_tokens + count,
            },
        )
        tokens = self._tokens(prompt, count, doomed)
        if document.get("stream"):
            options = _object(document.get("stream_options") or {})
            await connection.stream(answer.chunks(tokens, bool(options.get("include_usage"))))
        else:
            await connection.send(200, answer.whole("".join([token async for token in tokens])))

    async def _tokens(self, prompt: str, count: int, doomed: bool) -> AsyncIterator[str]:
        """One token after the other in its time; who is doomed dies half-way."""
        await asyncio.sleep(self._config["service_ms"] / 1000)
        for index, word in enumerate(self._model.words(prompt, count)):
            if doomed and index >= count // 2:
                self._die("crashed")
            yield word
            await asyncio.sleep(self._config["token_ms"] / 1000)


@dataclass(frozen=True)
class Answer:
    """One completion in the two shapes of the OpenAI API, whole and in chunks."""

    chat: bool
    model: str
    name: str
    finish: str
    usage: dict[str, int]

    def whole(self, text: str) -> dict[str, Any]:
        said: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice = {"index": 0, **said, "finish_reason": self.finish}
        return {**self._envelope("chat.completion"), "choices": [choice], "usage": self.usage}

    async def chunks(self, tokens: AsyncIterator[str], with_usage: bool) -> AsyncIterator[object]:
        if self.chat:
            yield self._chunk({"role": "assistant", "content": ""}, None)
        async for token in tokens:
            yield self._chunk({"content": token}, None)
        yield self._chunk({}, self.finish)
        if with_usage:
            yield {**self._envelope("chat.completion.chunk"), "choices": [], "usage": self.usage}

    def _chunk(self, delta: dict[str, str], finish: str | None) -> dict[str, Any]:
        said: dict[str, Any] = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        choice = {"index": 0, **said, "finish_reason": finish}
        return {**self._envelope("chat.completion.chunk"), "choices": [choice]}

    def _envelope(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {
            "id": f"{prefix}-{self.name}",
            "object": kind if self.chat else "text_completion",
            "created": int(time.time()),
            "model": self.model,
        }


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise Refusal(400, "a string was expected")
    return value


def _is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def _is_object(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _list(value: object) -> list[Any]:
    if not _is_list(value):
        raise Refusal(400, "a list was expected")
    return value


def _object(value: object) -> dict[str, Any]:
    if not _is_object(value):
        raise Refusal(400, "an object was expected")
    return value


def _message(message: object) -> str:
    """The text of a chat message; of one in parts, its text parts."""
    content: object = _object(message).get("content")
    if isinstance(content, str):
        return content
    return " ".join(_text(part.get("text", "")) for part in map(_object, _list(content)))


def _base64(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


if __name__ == "__main__":
    asyncio.run(Server(json.loads(sys.argv[2]), os.environ["GPULEDGER_API_KEY"]).run(int(sys.argv[1])))
