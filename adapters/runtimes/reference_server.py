"""A server without a model: it holds the bytes it is told and answers deterministically after a set time.

It speaks as much of the OpenAI API as clients of gpuledger use: embeddings, chat (with images) and text completions,
streamed or not, transcriptions and rankings. Started by reference_main.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

from .reference_answers import Answer, Prompt, chat_prompt, packed, score, tokens_of, transcription, vector
from .reference_faults import Faults, Flaws
from .reference_http import MAX_HEAD_BYTES, Connection, Refusal, Request, a_list, a_text, an_object
from .reference_memory import Memory

OUT_OF_MEMORY = "CUDA out of memory"

_Handler: TypeAlias = Callable[[Connection, Any, Flaws], Awaitable[None]]


class Server:
    def __init__(self, config: dict[str, Any], api_key: str) -> None:
        self._config = config
        self._faults = Faults(config["faults"])
        self._key = f"Bearer {api_key}".encode()
        self._memory = Memory(config["idle_bytes"], config["peak_bytes"], config["parallel"])
        self._slots = asyncio.Semaphore(config["parallel"])
        self._ready = False
        self._sick = False
        self._asleep = False
        self._turning = asyncio.Lock()
        self._received = 0
        self._present = 0
        self._stop = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        #: By path: the task, what is read of the request, and what answers it.
        self._work_at: dict[str, tuple[str, Callable[[Request], Any], _Handler]] = {
            "/v1/embeddings": ("embedding", Request.json, self._embeddings),
            "/v1/chat/completions": ("chat", Request.json, self._chat),
            "/v1/completions": ("chat", Request.json, self._completion),
            "/v1/audio/transcriptions": ("transcription", Request.form, self._transcription),
            "/v1/rerank": ("rerank", Request.json, self._ranking),
        }

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
        if self._faults.has("ignore_term"):
            return
        if self._stop.is_set():
            os._exit(0)
        self._stop.set()

    async def _load(self) -> None:
        await self._take_memory(self._config["load_ms"])
        match self._faults.of_the_load:
            case "exit":
                self._die("cannot load")
            case "oom":
                self._die(OUT_OF_MEMORY)
            case "hang":
                return
            case told:
                self._sick = told == "unhealthy"
                self._ready = True

    async def _take_memory(self, duration_ms: int) -> None:
        try:
            async for share in self._memory.load(duration_ms):
                if share >= 0.5 and self._faults.of_the_load == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
        except MemoryError:
            self._die(OUT_OF_MEMORY)

    def _die(self, complaint: str) -> NoReturn:
        sys.stderr.write(f"reference: {complaint}\n")
        sys.stderr.flush()
        os._exit(self._faults.exit_status)

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
            await connection.refuse(refusal)
        except MemoryError:
            self._die(OUT_OF_MEMORY)

    async def _route(self, connection: Connection, request: Request) -> None:
        match request.method, request.path:
            case "GET", "/health":
                well = self._ready or self._faults.has("lie_ready")
                await connection.send(200 if well else 503, {"status": "ok" if well else "loading"})
            case _ if not self._is_admitted(request):
                raise Refusal(401, "wrong or missing API key")
            case "GET", "/metrics":
                await connection.send(200, self._metrics(), "text/plain; version=0.0.4")
            case "POST", "/tokenize":
                await connection.send(200, {"tokens": list(range(len(a_text(request.json().get("content")).split())))})
            case "GET", "/is_sleeping" if self._config["sleep"]:
                await connection.send(200, {"is_sleeping": self._asleep})
            case "POST", "/sleep" | "/wake_up" as path if self._config["sleep"]:
                await self._turn(path == "/sleep")
                await connection.send(200, {"is_sleeping": self._asleep})
            case "POST", path if path in self._work_at and self._work_at[path][0] == self._config["task"]:
                await self._work(connection, request)
            case _:
                raise Refusal(404, f"no {request.method} {request.path} here")

    def _is_admitted(self, request: Request) -> bool:
        given = request.headers.get("authorization", "")
        return hmac.compare_digest(given.encode("latin-1"), self._key)

    async def _work(self, connection: Connection, request: Request) -> None:
        """Take a slot and its memory for one request."""
        if not self._ready and not self._faults.has("lie_ready"):
            raise Refusal(503, "loading")
        if self._asleep:
            raise Refusal(503, "asleep")
        _, read, answer = self._work_at[request.path]
        document = read(request)
        self._received += 1
        flaws = self._faults.of_request(self._received)
        self._present += 1
        self._idle.clear()
        try:
            async with self._slots:
                with self._memory.of_a_request(len(request.body)):
                    await self._before(connection, flaws)
                    await answer(connection, document, flaws)
        finally:
            self._present -= 1
            if self._present == 0:
                self._idle.set()

    async def _before(self, connection: Connection, flaws: Flaws) -> None:
        """What goes wrong before there is an answer."""
        self._memory.leak(flaws.leak_bytes)
        if flaws.hangs:
            await asyncio.Event().wait()
        if flaws.out_of_memory:
            await connection.refuse(Refusal(500, OUT_OF_MEMORY))
            self._die(OUT_OF_MEMORY)
        if flaws.lies or self._sick:
            raise Refusal(500, "no answer")

    async def _turn(self, asleep: bool) -> None:
        """Go to sleep or wake up; nothing to do is no error. Asleep is also who is on the way into it or out of it."""
        async with self._turning:
            if not self._ready:
                raise Refusal(503, "loading")
            if self._present:
                raise Refusal(409, "requests are running")
            if asleep == self._asleep:
                return
            sleep = self._config["sleep"]
            if asleep:
                await self._doze_off(sleep["sleep_ms"], sleep["asleep_bytes"])
            else:
                await self._take_memory(sleep["wake_ms"])
                self._asleep = False

    async def _doze_off(self, duration_ms: int, left_bytes: int) -> None:
        self._asleep = True
        try:
            await asyncio.sleep(duration_ms / 1000)
        except asyncio.CancelledError:
            # Who asked has gone, and nothing was given back yet.
            self._asleep = False
            raise
        if not self._faults.has("sleep_keeps_memory"):
            self._memory.shrink(left_bytes)

    def _metrics(self) -> str:
        slots = self._config["parallel"]
        processing = min(self._present, slots)
        gauges = {
            "requests_processing": processing,
            "requests_deferred": self._present - processing,
            "cache_usage_ratio": processing / slots,
        }
        return "".join(f"# TYPE reference:{name} gauge\nreference:{name} {value}\n" for name, value in gauges.items())

    # ---- embeddings, recordings, rankings -----------------------------------------------------------------------

    async def _serve_time(self, flaws: Flaws) -> None:
        await asyncio.sleep(self._config["service_ms"] / 1000)
        if flaws.crashes or flaws.dies_after is not None:
            self._die("crashed")

    async def _embeddings(self, connection: Connection, document: dict[str, Any], flaws: Flaws) -> None:
        given = document.get("input")
        texts = [a_text(text) for text in ([given] if isinstance(given, str) else a_list(given))]
        if not texts:
            raise Refusal(400, "input is empty")
        count, dimensions = sum(map(self._count, texts)), self._config["dimensions"] or 384
        await self._serve_time(flaws)
        vectors = [[0.0] * dimensions if flaws.broken else vector(text, dimensions) for text in texts]
        as_text = document.get("encoding_format") == "base64"
        data = [
            {"object": "embedding", "index": index, "embedding": packed(values) if as_text else values}
            for index, values in enumerate(vectors)
        ]
        usage = {"prompt_tokens": count, "total_tokens": count}
        await connection.send(200, {"object": "list", "model": document.get("model", ""), "data": data, "usage": usage})

    async def _transcription(self, connection: Connection, form: dict[str, memoryview], flaws: Flaws) -> None:
        """The whole text at once; `usage` counts the bytes of the recording."""
        recording, style = form.get("file"), bytes(form.get("response_format", b"json")).decode("utf-8", "replace")
        if recording is None:
            raise Refusal(400, "file: is missing")
        if style not in ("json", "text"):
            raise Refusal(400, "response_format: json and text are known")
        if bytes(form.get("stream", b"")).lower() in (b"true", b"1"):
            raise Refusal(400, "stream: a transcription comes in one piece")
        if len(recording) > self._config["max_audio_bytes"]:
            raise Refusal(413, f"a recording may have {self._config['max_audio_bytes']} bytes")
        await self._serve_time(flaws)
        text = None if flaws.broken else transcription(recording, self._config["tokens"])
        if style == "text":
            await connection.send(200, text or "", "text/plain; charset=utf-8")
        else:
            await connection.send(200, {"text": text, "usage": {"type": "bytes", "audio_bytes": len(recording)}})

    async def _ranking(self, connection: Connection, document: dict[str, Any], flaws: Flaws) -> None:
        """The best first, `top_n` of them."""
        query, documents = a_text(document.get("query")), a_list(document.get("documents"))
        texts = [one if isinstance(one, str) else a_text(an_object(one).get("text")) for one in documents]
        if not texts:
            raise Refusal(400, "documents is empty")
        best = _positive(document.get("top_n"), "top_n", len(texts))
        count = sum(self._count(f"{query} {text}") for text in texts)
        await self._serve_time(flaws)
        ranks: list[dict[str, Any]] = [
            {"index": index, "relevance_score": 0.0 if flaws.broken else score(query, text)}
            for index, text in enumerate(texts)
        ]
        ranks.sort(key=lambda rank: -rank["relevance_score"])
        usage = {"prompt_tokens": count, "total_tokens": count}
        await connection.send(200, {"model": document.get("model", ""), "results": ranks[:best], "usage": usage})

    def _count(self, text: str) -> int:
        count = len(text.split())
        if count > self._config["context_length"]:
            raise Refusal(400, f"{count} tokens are more than the context of {self._config['context_length']}")
        return count

    # ---- completions --------------------------------------------------------------------------------------------

    async def _chat(self, connection: Connection, document: dict[str, Any], flaws: Flaws) -> None:
        messages = a_list(document.get("messages"))
        if not messages:
            raise Refusal(400, "messages is empty")
        await self._complete(connection, document, chat_prompt(messages, self._config["max_images"]), True, flaws)

    async def _completion(self, connection: Connection, document: dict[str, Any], flaws: Flaws) -> None:
        text = a_text(document.get("prompt"))
        await self._complete(connection, document, Prompt(text, len(text.split())), False, flaws)

    async def _complete(
        self, connection: Connection, document: dict[str, Any], prompt: Prompt, chat: bool, flaws: Flaws
    ) -> None:
        prompt_tokens, all_tokens = self._count(prompt.text), self._config["tokens"]
        wanted = document.get("max_tokens") or document.get("max_completion_tokens")
        count = min(_positive(wanted, "max_tokens", all_tokens), all_tokens)
        answer = Answer(
            chat=chat,
            model=str(document.get("model", "")),
            name=hashlib.sha256(prompt.text.encode()).hexdigest()[:24],
            finish="length" if count < all_tokens else "stop",
            usage={
                "prompt_tokens": prompt_tokens,
                "completion_tokens": count,
                "total_tokens": prompt_tokens + count,
            },
        )
        tokens = self._tokens(prompt, count, flaws)
        if document.get("stream"):
            options = an_object(document.get("stream_options") or {})
            await connection.stream(answer.chunks(tokens, bool(options.get("include_usage"))))
        else:
            await connection.send(200, answer.whole("".join([token async for token in tokens])))

    async def _tokens(self, prompt: Prompt, count: int, flaws: Flaws) -> AsyncIterator[str]:
        """One token after the other in its time; who is doomed dies half-way, or after so many."""
        await asyncio.sleep(self._config["service_ms"] / 1000)
        last = count // 2 if flaws.crashes else flaws.dies_after
        for index, word in enumerate(tokens_of(prompt, count)):
            if last is not None and index >= last:
                self._die("crashed")
            yield "" if flaws.broken else word
            await asyncio.sleep(self._config["token_ms"] / 1000)


def _positive(value: object, name: str, default: int) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Refusal(400, f"{name} is not a positive integer")
    return value
