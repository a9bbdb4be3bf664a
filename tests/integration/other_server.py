"""A server of another make, for runtimes of type `command`: its own paths, its own names, and no key unless it is told.

    [TOKEN=...] python -I -S other_server.py PORT [ORDERS]

ORDERS is a JSON object: `answer` replaces its answers, `refuse` is a status in the place of 200, `complaint` is printed
before it ends at its start, `complain_after` ends it so in the midst of a request, `hold_bytes` it holds while awake,
`model` it has to be asked for by name.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Memory:
    def __init__(self, count_bytes: int) -> None:
        self._count_bytes = count_bytes
        self._held: mmap.mmap | None = None
        self.take()

    def take(self) -> None:
        if self._held is None:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
            self._held = mmap.mmap(-1, self._count_bytes, flags=flags)

    def give_back(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    orders: dict[str, Any]
    memory: Memory
    asked = 0

    def do_GET(self) -> None:
        pages = {"/v2/ready": "", "/numbers": 'busy{model="m"} 0\nfull 0.5\n'}
        if self._may():
            self._answer(200 if self.path in pages else 404, pages.get(self.path, ""))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        if not self._may():
            return
        match self.path:
            case "/embed":
                self._embed(json.loads(body))
            case "/memory/release" if body == b"{}":
                self.memory.give_back()
                self._answer(200, "")
            case "/memory/resume" if body == b"{}":
                self.memory.take()
                self._answer(200, "")
            case _:
                self._answer(404, "")

    def _embed(self, document: dict[str, Any]) -> None:
        if self.orders.get("model") not in (None, document.get("model")):
            self._answer(400, '{"error": "model: field required"}')
            return
        Handler.asked += 1
        if Handler.asked > self.orders.get("complain_after", Handler.asked):
            self._complain("RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB")
        data = [{"index": index, "embedding": [1.0, float(len(text))]} for index, text in enumerate(document["input"])]
        answer = self.orders.get("answer", {"data": data, "echo": document.get("extra")})
        self._answer(self.orders.get("refuse", 200), json.dumps(answer))

    def _complain(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        os._exit(7)

    def _may(self) -> bool:
        token = os.environ.get("TOKEN")
        if token is None or self.headers.get("Authorization") == f"Bearer {token}":
            return True
        self._answer(401, "")
        return False

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the name is that of the base)
        """Nothing: prompts are in no log."""


def main(arguments: list[str]) -> None:
    Handler.orders = json.loads(arguments[1]) if len(arguments) > 1 else {}
    if (complaint := Handler.orders.get("complaint")) is not None:
        print(complaint, file=sys.stderr, flush=True)
        sys.exit(3)
    Handler.memory = Memory(Handler.orders.get("hold_bytes", 4096))
    ThreadingHTTPServer(("127.0.0.1", int(arguments[0])), Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
