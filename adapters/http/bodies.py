"""What comes in as JSON: read within its bounds, and looked at as far as the gateway needs it. The rest passes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import orjson
from fastapi import Request

from gpuledger.domain.documents import Json

from .images import check_contents
from .openai_errors import CLIENT_CLOSED, ApiError, bad_request
from .ports import Operation

#: Deeper than any schema of a tool, and far from where a parser runs out of stack.
MAX_DEPTH: Final = 64
MAX_MODEL_CHARACTERS: Final = 200
READ_TIMEOUT_SECONDS: Final = 60.0
#: So many times the limit is read of a body that is too long, before its connection is cut.
DISCARD_FACTOR: Final = 16

Document: TypeAlias = dict[str, Json]

#: Where an operation takes a list of texts, each of which costs memory.
_TEXTS: Final[Mapping[Operation, str]] = {"embeddings": "input", "completion": "prompt", "rerank": "documents"}


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The body, held to its limit while it is read: nobody has to announce how long it is. Raises ApiError."""
    check_content_type(request, "application/json")
    body = _Gathered()
    too_long = bad_request(f"the body is longer than {limit_bytes} bytes", code="request_too_large", status=413)
    await read_chunks(request, Bounds(limit_bytes, READ_TIMEOUT_SECONDS, too_long), body)
    return b"".join(body.chunks)


def check_content_type(request: Request, wanted: str) -> None:
    """Raises ApiError."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != wanted:
        raise bad_request(f"the Content-Type must be {wanted}", code="unsupported_media_type", status=415)
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise bad_request("a Content-Encoding is not supported", code="unsupported_media_type", status=415)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a body is held to, and what is said of one that is longer."""

    limit_bytes: int
    timeout_seconds: float
    too_long: ApiError


class Sink(Protocol):
    """Where the chunks of a body go."""

    async def take(self, chunk: bytes) -> None:
        """The next one. Raises ApiError when it is not as it should be."""
        ...

    def drop(self) -> None:
        """The body is refused: nothing of it is needed any more."""
        ...


class _Gathered:
    """In memory."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []

    async def take(self, chunk: bytes) -> None:
        self.chunks.append(chunk)

    def drop(self) -> None:
        self.chunks.clear()


async def read_chunks(request: Request, bounds: Bounds, sink: Sink) -> None:
    """Every chunk of a body to `sink`, while it is within its bounds. Raises ApiError.

    One that is refused is read on and forgotten for a while, since most clients listen only when they have said all.
    """
    announced = request.headers.get("content-length", "")
    # What may be left of a body that is too long would be taken for the next request.
    too_long = bounds.too_long.telling({"Connection": "close"})
    refused = too_long if announced.isdecimal() and int(announced) > bounds.limit_bytes else None
    length = 0
    try:
        async with asyncio.timeout(bounds.timeout_seconds):
            if refused is not None and "expect" in request.headers:
                raise refused  # nothing was sent yet, and nothing will be
            async for chunk in _chunks(request):
                length += len(chunk)
                if length > bounds.limit_bytes:
                    sink.drop()
                    refused = too_long
                if length > DISCARD_FACTOR * bounds.limit_bytes:
                    break
                if refused is None:
                    refused = await _taken(sink, chunk)
    except TimeoutError:
        raise bad_request("the body did not come in time", code="request_timeout", status=408) from None
    if refused is not None:
        raise refused


async def _taken(sink: Sink, chunk: bytes) -> ApiError | None:
    try:
        await sink.take(chunk)
    except ApiError as error:
        sink.drop()
        return error
    return None


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ApiError(CLIENT_CLOSED, "client_closed", "the client went away before its body was there")
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


def parse(body: bytes, operation: Operation) -> Document:
    """The document, checked as far as the gateway answers for it. Raises ApiError."""
    try:
        document: Json = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the body is not JSON in UTF-8: {error.msg} at byte {error.pos}") from None
    if not isinstance(document, dict):
        raise bad_request("the body must be a JSON object")
    if _deeper_than(document, MAX_DEPTH):
        raise bad_request(f"the body is nested deeper than {MAX_DEPTH} levels")
    check_model(document.get("model"))
    match operation:
        case "embeddings":
            _check_no_messages(document)
            _check_texts(document, "input")
            _check_encoding(document)
        case "chat":
            _check_messages(document)
        case "completion":
            _check_texts(document, "prompt")
        case "rerank":
            _check_ranking(document)
        case "transcription":
            raise AssertionError("a transcription is asked for with a form")
    _check_stream(document)
    return document


def check_inputs(document: Document, operation: Operation, limit: int) -> None:
    """No more texts, prompts or documents than the envelope was measured with: each costs memory. Raises ApiError."""
    name = _TEXTS.get(operation)
    value = None if name is None else document[name]
    if isinstance(value, list) and not _are_tokens(value) and len(value) > limit:
        raise bad_request(f"{name} has {len(value)} entries, and {document['model']} takes {limit} at once", name)


def check_images(document: Document, operation: Operation, limit: int) -> None:
    """Parts of chat messages, and no more images than the envelope was measured with. Raises ApiError."""
    messages = document.get("messages")
    if operation == "chat" and isinstance(messages, list):
        check_contents(messages, limit, str(document["model"]))


def wants_stream(document: Mapping[str, Json], operation: Operation) -> bool:
    return operation in ("chat", "completion") and document.get("stream") is True


def _deeper_than(value: Json, levels: int) -> bool:
    """Level by level: no recursion, so no stack to run out of."""
    frontier = [value]
    for _ in range(levels):
        inner: list[Json] = []
        for one in frontier:
            if isinstance(one, dict):
                inner.extend(entry for entry in one.values() if isinstance(entry, dict | list))
            elif isinstance(one, list):
                inner.extend(entry for entry in one if isinstance(entry, dict | list))
        if not inner:
            return False
        frontier = inner
    return True


def check_model(model: Json) -> str:
    """The capability that is asked for, so far only a text. Raises ApiError."""
    if not isinstance(model, str) or not model:
        raise bad_request("model must be a string: the capability to ask for", "model")
    if len(model) > MAX_MODEL_CHARACTERS:
        raise bad_request(f"model is longer than {MAX_MODEL_CHARACTERS} characters", "model")
    return model


def _check_texts(document: Document, name: str) -> None:
    """A text, tokens, or a list of either; not empty."""
    value = document.get(name)
    if isinstance(value, str) and value:
        return
    if not isinstance(value, list) or not value:
        raise bad_request(f"{name} must be a text or a list, and not empty", name)
    if _are_tokens(value):
        return
    texts = all(isinstance(one, str) and one for one in value)
    if not texts and not all(isinstance(one, list) and one and _are_tokens(one) for one in value):
        raise bad_request(f"{name} must hold texts, or lists of token ids, and none that is empty", name)


def _check_no_messages(document: Document) -> None:
    """Some runtimes embed chat messages instead, images at addresses among them, that nobody here has looked at."""
    if "messages" in document:
        raise bad_request("messages are for chats: an embedding is of an input", "messages")


def _are_tokens(values: list[Json]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _check_encoding(document: Document) -> None:
    if document.get("encoding_format") not in (None, "float", "base64"):
        raise bad_request("encoding_format must be float or base64", "encoding_format")


def _check_messages(document: Document) -> None:
    messages = document.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_request("messages must be a list, and not empty", "messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise bad_request(f"messages[{index}] must be an object with a role", "messages")


def _check_ranking(document: Document) -> None:
    """A question, and texts that may answer it; what a document is besides a text no runtime agrees on."""
    query, documents, most = document.get("query"), document.get("documents"), document.get("top_n")
    if not isinstance(query, str) or not query:
        raise bad_request("query must be a text, and not empty", "query")
    if not isinstance(documents, list) or not documents:
        raise bad_request("documents must be a list of texts, and not empty", "documents")
    if not all(isinstance(one, str) and one for one in documents):
        raise bad_request("documents must hold texts, and none that is empty", "documents")
    if most is not None and (type(most) is not int or most < 1):
        raise bad_request("top_n must be a whole number, at least 1", "top_n")
    if not isinstance(document.get("return_documents", False), bool):
        raise bad_request("return_documents must be true or false", "return_documents")


def _check_stream(document: Document) -> None:
    stream = document.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise bad_request("stream must be true or false", "stream")
    options = document.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise bad_request("stream_options must be an object", "stream_options")
