"""What a runtime answers, on its way to the client: named by its capability, its usage noted, nothing kept."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

import orjson

from gpuledger.domain.documents import Json

#: A line of a stream that is longer passes as it is: it is not one of a runtime that speaks this protocol.
MAX_LINE_BYTES: Final = 1024 * 1024
_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"
#: What llama.cpp says of a text that is too long, with its bound: how many tokens it takes in one batch, or in all.
_TOO_LONG: Final = re.compile(
    r"input \((?P<batch_given>\d+) tokens\) is too large to process\b.{0,80}\(current batch size: (?P<batch>\d+)\)"
    r"|request \((?P<given>\d+) tokens\) exceeds the available context size \((?P<context>\d+) tokens\)",
)


@dataclass(slots=True)
class Usage:
    """Tokens as the runtime counted them; None where it did not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    def note(self, document: dict[str, Json]) -> None:
        usage = document.get("usage")
        if isinstance(usage, dict):
            # Transcriptions have the names of OpenAI's newer interfaces.
            for names in (("prompt_tokens", "completion_tokens"), ("input_tokens", "output_tokens")):
                self.prompt_tokens = _count(usage.get(names[0]), self.prompt_tokens)
                self.completion_tokens = _count(usage.get(names[1]), self.completion_tokens)


def _count(value: Json, before: int | None) -> int | None:
    return value if type(value) is int and 0 <= value < 2**53 else before


def named(body: bytes, capability: str, usage: Usage) -> bytes:
    """A whole answer under the name that the client asked for."""
    try:
        document: Json = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body
    if not isinstance(document, dict):
        return body
    usage.note(document)
    if document.get("model", capability) == capability:
        return body
    return orjson.dumps({**document, "model": capability})


@dataclass(slots=True)
class EventStream:
    """Server-sent events line by line: each passes as soon as it is whole, since no client can use half of one."""

    capability: str
    usage: Usage
    _rest: bytearray = field(default_factory=bytearray)

    def feed(self, chunk: bytes) -> bytes:
        """What can go to the client after this chunk."""
        self._rest += chunk
        end = self._rest.rfind(b"\n") + 1
        if end == 0 and len(self._rest) <= MAX_LINE_BYTES:
            return b""
        whole = bytes(self._rest[: end or len(self._rest)])
        del self._rest[: len(whole)]
        return b"".join(self._line(line) for line in whole.splitlines(keepends=True))

    def finish(self) -> bytes:
        """What is left when the runtime has ended its stream."""
        rest = self._line(bytes(self._rest))
        self._rest.clear()
        return rest

    def _line(self, line: bytes) -> bytes:
        if not line.startswith(_DATA):
            return line
        payload = line[len(_DATA) :].strip()
        if payload == _DONE or len(payload) > MAX_LINE_BYTES:
            return line
        answer = named(payload, self.capability, self.usage)
        if answer is payload:
            return line
        return b"data: " + answer + line[len(line.rstrip(b"\r\n")) :]


def complaint(body: bytes) -> str:
    """What a runtime says is wrong with a request, in any of the shapes that runtimes have for it.

    >>> complaint(b'{"error": {"message": "too long"}}'), complaint(b'{"error": "too long"}')
    ('too long', 'too long')
    """
    try:
        told: Json = orjson.loads(body)
    except orjson.JSONDecodeError:
        told = None
    for name in ("error", "message", "detail"):
        if isinstance(told, dict) and name in told:
            told = told[name]
    return told if isinstance(told, str) else "the runtime refused the request"


def for_clients(told: str, capability: str) -> str:
    """A complaint without advice that only whoever runs the server could follow.

    >>> for_clients("request (900 tokens) exceeds the available context size (512 tokens), try increasing it", "rag@1")
    'the text has 900 tokens, and rag@1 takes 512 at once'
    >>> for_clients("no such role", "rag@1")
    'no such role'
    """
    found = _TOO_LONG.search(told)
    if found is None:
        return told
    given, limit = found["batch_given"] or found["given"], found["batch"] or found["context"]
    return f"the text has {given} tokens, and {capability} takes {limit} at once"
