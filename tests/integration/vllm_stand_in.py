"""A process that speaks as vLLM does, without a model: written from docs.vllm.ai ("vllm serve", "OpenAI-Compatible
Server", "Sleep Mode", "Production Metrics", "Security").

    VLLM_API_KEY=... python vllm_stand_in.py serve MODEL --host 127.0.0.1 --port N --served-model-name NAME ...

It takes the options that gpuledger may give, and no others; asks for its key below /v1 alone, as vLLM does; loads the
middleware that it is told to; and holds bytes that it touches. What it does wrong stands in the variable
VLLM_STAND_IN, a JSON object with the keys of `Orders`.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib
import json
import math
import mmap
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import uvicorn

VERSION = "0.24.0"
DIMENSIONS = 384
WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "haven")
Message = dict[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]


@dataclass(frozen=True)
class Orders:
    """`fail`: how its start fails. `lie`: it says that it sleeps and keeps its memory. `deaf`: it is told to sleep and
    does not. `wake_fails`: it finds no memory then. `dies_after`: so many answers, and then of want of memory."""

    hold_bytes: int = 32 * 2**20
    fail: str | None = None
    lie: bool = False
    deaf: bool = False
    wake_fails: bool = False
    dies_after: int | None = None
    token_seconds: float = 0.0


#: How starts fail, in vLLM's and PyTorch's words, before what it prints in any case.
FAILURES = {
    "free_memory": "ValueError: Free memory on device cuda:0 (2.6/23.43 GiB) on startup is less than desired GPU "
    "memory utilization (0.92, 21.56 GiB). Decrease GPU memory utilization or reduce GPU memory used by others.",
    "no_cache": "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
    "initializing the engine.",
    "torch": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.74 GiB. GPU 0 has a total capacity of "
    "23.57 GiB of which 605.88 MiB is free.",
    "device": "ValueError: invalid literal for int() with base 10: 'GPU-01234567-89ab-cdef-0123-456789abcdef'",
    "bug": "RuntimeError: something else",
}


class Engine:
    """What it holds, and whether it works."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.running = 0
        self.answers = 0
        self.asleep: set[str] = set()
        #: After level 2 its weights are room without content.
        self.weights_read = True
        self._held: mmap.mmap | None = None
        self.take()

    def take(self) -> None:
        if self._held is None:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
            self._held = mmap.mmap(-1, self.orders.hold_bytes, flags=flags)

    def sleep(self, level: int) -> None:
        if not self.orders.deaf:
            self.asleep = {"weights", "kv_cache"}
            self.weights_read = level == 1
        if not (self.orders.lie or self.orders.deaf) and self._held is not None:
            self._held.close()
            self._held = None

    def wake(self, tags: set[str]) -> None:
        self.asleep -= tags or {"weights", "kv_cache"}
        self.take()

    def count(self) -> None:
        self.answers += 1
        if self.orders.dies_after is not None and self.answers > self.orders.dies_after:
            say("ERROR [core.py:708] " + FAILURES["torch"])
            say("ERROR [async_llm.py:480] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.")
            os._exit(1)


class Server:
    """The application, as ASGI has it."""

    def __init__(self, engine: Engine, options: argparse.Namespace) -> None:
        self._engine = engine
        self._name = options.served_model_name
        self._pools = options.runner == "pooling"
        self._sleeps = options.enable_sleep_mode and os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
        self._key = os.environ.get("VLLM_API_KEY")

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await lifespan(receive, send)
            return
        if scope["path"].startswith("/v1") and not self._has_key(scope):
            await answer(send, 401, {"error": "Unauthorized"})
            return
        body = await read(receive)
        query = scope["query_string"].decode()
        await self._route(f"{scope['method']} {scope['path']}", query, body, send)

    def _has_key(self, scope: Message) -> bool:
        given = dict(scope["headers"]).get(b"authorization")
        return self._key is None or given == b"Bearer " + self._key.encode()

    async def _route(self, what: str, query: str, body: bytes, send: Send) -> None:
        match what:
            case "GET /health":
                await answer(send, 200, None)
            case "GET /version":
                await answer(send, 200, {"version": VERSION})
            case "GET /v1/models":
                await answer(send, 200, {"object": "list", "data": [{"id": self._name, "object": "model"}]})
            case "GET /metrics":
                await answer(send, 200, self._metrics())
            case "POST /v1/chat/completions" | "POST /invocations" if not self._pools:
                await self._counted(self._chat, body, send)
            case "POST /v1/embeddings" if self._pools:
                await self._counted(self._embed, body, send)
            case "POST /v1/rerank" if self._pools:
                await self._counted(self._rank, body, send)
            case _ if self._sleeps:
                await self._sleep_mode(what, query, body, send)
            case _:
                await answer(send, 404, {"detail": "Not Found"})

    async def _sleep_mode(self, what: str, query: str, body: bytes, send: Send) -> None:
        match what:
            case "GET /is_sleeping":
                await answer(send, 200, {"is_sleeping": bool(self._engine.asleep)})
            case "POST /sleep":
                self._engine.sleep(int(query.removeprefix("level=") or "1"))
                await answer(send, 200, None)
            case "POST /wake_up" if self._engine.orders.wake_fails:
                await answer(send, 500, {"error": {"message": FAILURES["torch"]}})
            case "POST /wake_up":
                self._engine.wake({tag.removeprefix("tags=") for tag in query.split("&") if tag})
                await answer(send, 200, None)
            case "POST /collective_rpc" if json.loads(body) == {"method": "reload_weights"}:
                self._engine.weights_read = "weights" not in self._engine.asleep
                await answer(send, 200, {"results": [None]})
            case _:
                await answer(send, 404, {"detail": "Not Found"})

    async def _counted(self, work: Callable[[dict[str, Any], Send], Awaitable[None]], body: bytes, send: Send) -> None:
        document = json.loads(body)
        if document.get("model", self._name) != self._name:
            await answer(send, 404, {"error": {"message": f"The model `{document['model']}` does not exist."}})
            return
        self._engine.count()
        self._engine.running += 1
        try:
            await work(document, send)
        finally:
            self._engine.running -= 1

    def _metrics(self) -> str:
        labels = f'{{engine="0",model_name="{self._name}"}}'
        return (
            "# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
            "# TYPE vllm:num_requests_running gauge\n"
            f"vllm:num_requests_running{labels} {float(self._engine.running)}\n"
            f"vllm:num_requests_waiting{labels} 0.0\n"
            f"vllm:kv_cache_usage_perc{labels} {self._engine.running / 8}\n"
            f'vllm:iteration_tokens_total_bucket{{le="1.0",model_name="{self._name}"}} 3.0\n'
        )

    async def _chat(self, document: dict[str, Any], send: Send) -> None:
        count = document.get("max_tokens", 16)
        words = [WORDS[n % len(WORDS)] for n in range(count)] if self._engine.weights_read else []
        if document.get("stream"):
            await stream(send, words, self._engine.orders.token_seconds)
            return
        message = {"role": "assistant", "content": " ".join(words)}
        usage = {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": 1 + count}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        await answer(send, 200, {"object": "chat.completion", "choices": [choice], "usage": usage})

    async def _embed(self, document: dict[str, Any], send: Send) -> None:
        given = document["input"]
        texts = [given] if isinstance(given, str) else given
        data = [{"index": index, "embedding": self._vector(text)} for index, text in enumerate(texts)]
        await answer(send, 200, {"object": "list", "data": data})

    async def _rank(self, document: dict[str, Any], send: Send) -> None:
        scores = [self._vector(document["query"] + text)[0] for text in document["documents"]]
        results = [{"index": index, "relevance_score": score} for index, score in enumerate(scores)]
        await answer(send, 200, {"results": sorted(results, key=lambda one: -one["relevance_score"])})

    def _vector(self, text: str) -> list[float]:
        if not self._engine.weights_read:
            return [0.0] * DIMENSIONS
        digest = hashlib.shake_128(text.encode()).digest(DIMENSIONS)
        length = math.sqrt(sum((byte - 127.5) ** 2 for byte in digest))
        return [(byte - 127.5) / length for byte in digest]


async def lifespan(receive: Receive, send: Send) -> None:
    await receive()
    # vLLM ends at SIGTERM without waiting for answers; uvicorn would.
    signal.signal(signal.SIGTERM, end)
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await send({"type": "lifespan.shutdown.complete"})


def end(_number: int, _frame: object) -> None:
    os._exit(0)


async def read(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(body)


async def answer(send: Send, status: int, document: object) -> None:
    text = document if isinstance(document, str) else "" if document is None else json.dumps(document)
    kind = b"text/plain" if isinstance(document, str) else b"application/json"
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
    await send({"type": "http.response.body", "body": text.encode()})


async def stream(send: Send, words: list[str], token_seconds: float) -> None:
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for word in words:
        chunk = {"choices": [{"index": 0, "delta": {"content": word + " "}}]}
        await send({"type": "http.response.body", "body": f"data: {json.dumps(chunk)}\n\n".encode(), "more_body": True})
        await asyncio.sleep(token_seconds)
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="vllm", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=VERSION)
    serve = parser.add_subparsers(required=True).add_parser("serve", allow_abbrev=False)
    serve.add_argument("model")
    for name in ("host", "port", "served-model-name", "middleware", "max-log-len", "max-model-len", "max-num-seqs"):
        serve.add_argument(f"--{name}")
    for name in ("max-num-batched-tokens", "gpu-memory-utilization", "dtype", "kv-cache-dtype", "quantization"):
        serve.add_argument(f"--{name}")
    serve.add_argument("--kv-cache-memory-bytes", type=int)
    serve.add_argument("--limit-mm-per-prompt", type=json.loads)
    serve.add_argument("--runner", choices=("auto", "generate", "pooling"), default="auto")
    serve.add_argument("--seed", type=int)
    for name in ("enforce-eager", "enable-sleep-mode", "disable-uvicorn-access-log", "no-log-error-stack"):
        serve.add_argument(f"--{name}", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    orders = Orders(**json.loads(os.environ.get("VLLM_STAND_IN", "{}")))
    if orders.fail is not None:
        say(f"(EngineCore_DP0 pid=18799) ERROR 10-08 20:33:48 [core.py:708] {FAILURES[orders.fail]}")
        # What vLLM prints after the cause is longer than its last words.
        say('  File "/opt/vllm/lib/python3.12/site-packages/vllm/v1/engine/core_client.py", line 602\n' * 80)
        say("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}")
        sys.exit(1)
    app: Any = Server(Engine(orders), options)
    if options.middleware is not None:
        module, _, name = options.middleware.rpartition(".")
        app = getattr(importlib.import_module(module), name)(app)
    uvicorn.run(app, host=options.host, port=int(options.port), log_level="warning", access_log=False, ws="none")


if __name__ == "__main__":
    main(sys.argv[1:])
