"""What comes in: read within its bounds, parsed, and looked at as far as the gateway needs it. The rest passes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Final, TypeAlias

import orjson
from fastapi import Request

from gpuledger.domain.documents import Json

from .openai_errors import CLIENT_CLOSED, ApiError, bad_request
from .ports import Operation

#: Deeper than any schema of a tool, and far from where a parser runs out of stack.
MAX_DEPTH: Final = 64
MAX_MODEL_CHARACTERS: Final = 200
READ_TIMEOUT_SECONDS: Final = 60.0
#: So many times the limit is read of a body that is too long, before its connection is cut.
DISCARD_FACTOR: Final = 16

Document: TypeAlias = dict[str, Json]

#: Where an operation takes a text or a list of them.
_TEXTS: Final[Mapping[Operation, str]] = {"embeddings": "input", "completion": "prompt"}


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The body, held to its limit while it is read: nobody has to announce how long it is. Raises ApiError.

    One that is too long is read on and forgotten for a while, since most clients listen only when they have said all.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise bad_request("the Content-Type must be application/json", code="unsupported_media_type", status=415)
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise bad_request("a Content-Encoding is not supported", code="unsupported_media_type", status=415)
    announced = request.headers.get("content-length", "")
    too_long = announced.isdecimal() and int(announced) > limit_bytes
    chunks: list[bytes] = []
    length = 0
    try:
        async with asyncio.timeout(READ_TIMEOUT_SECONDS):
            if too_long and "expect" in request.headers:
                raise _too_long(limit_bytes)  # nothing was sent yet, and nothing will be
            async for chunk in _chunks(request):
                length += len(chunk)
                if length > limit_bytes:
                    chunks.clear()
                    too_long = True
                if length > DISCARD_FACTOR * limit_bytes:
                    break
                if not too_long:
                    chunks.append(chunk)
    except TimeoutError:
        raise bad_request("the body did not come in time", code="request_timeout", status=408) from None
    if too_long:
        raise _too_long(limit_bytes)
    return b"".join(chunks)


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ApiError(CLIENT_CLOSED, "client_closed", "the client went away before its body was there")
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


def _too_long(limit_bytes: int) -> ApiError:
    error = bad_request(f"the body is longer than {limit_bytes} bytes", code="request_too_large", status=413)
    # What may be left of the body would be taken for the next request.
    return ApiError(error.status, error.code, error.message, headers={"Connection": "close"})


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
    _check_model(document)
    match operation:
        case "embeddings":
            _check_texts(document, "input")
            _check_encoding(document)
        case "chat":
            _check_messages(document)
        case "completion":
            _check_texts(document, "prompt")
    _check_stream(document)
    return document


def check_inputs(document: Document, operation: Operation, limit: int) -> None:
    """No more texts, or prompts, than the envelope was measured with: each costs memory. Raises ApiError."""
    name = _TEXTS.get(operation)
    value = None if name is None else document[name]
    if isinstance(value, list) and not _are_tokens(value) and len(value) > limit:
        raise bad_request(f"{name} has {len(value)} entries, and {document['model']} takes {limit} at once", name)


def wants_stream(document: Mapping[str, Json], operation: Operation) -> bool:
    return operation != "embeddings" and document.get("stream") is True


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


def _check_model(document: Document) -> None:
    model = document.get("model")
    if not isinstance(model, str) or not model:
        raise bad_request("model must be a string: the capability to ask for", "model")
    if len(model) > MAX_MODEL_CHARACTERS:
        raise bad_request(f"model is longer than {MAX_MODEL_CHARACTERS} characters", "model")


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


def _check_stream(document: Document) -> None:
    stream = document.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise bad_request("stream must be true or false", "stream")
    options = document.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise bad_request("stream_options must be an object", "stream_options")
