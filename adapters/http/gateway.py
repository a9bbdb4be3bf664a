"""The OpenAI-compatible door: `model` is a capability, a bearer token is a client, and the scheduler decides the rest.

The life of a request here: who asks, read its body within bounds, look at what matters, hand it in at the desk, wait,
then relay the answer of the resident that it was given a lease on.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import orjson
from fastapi import FastAPI, Request, Response

from .attempt import PATHS, Work
from .auth import Client, Clients
from .bodies import check_images, check_inputs, parse, read_body, wants_stream
from .forms import read_form, too_large
from .openai_errors import (
    CLIENT_CLOSED,
    ApiError,
    bad_request,
    refusal_error,
    repeated_error,
    unavailable_error,
)
from .payloads import JsonPayload, Payload
from .ports import Desk, Granted, Insight, Operation, Question, Refused, Repeated, Unavailable
from .relay import Presence, Served, Tally
from .spool import Spool

DEADLINE_HEADER: Final = "x-gpuledger-deadline-ms"
KEY_HEADER: Final = "idempotency-key"
MAX_DEADLINE_MS: Final = 86_400_000
MAX_KEY_CHARACTERS: Final = 255
_DIGITS: Final = re.compile(r"[0-9]{1,9}")

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Service:
    """What a capability does, and how much one request may bring: what its envelope was measured with.

    `max_images`: in chat messages, 0 where it does not see. `max_audio_bytes`: of a file to transcribe.
    """

    operations: frozenset[Operation]
    max_inputs: int
    max_images: int = 0
    max_audio_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Settings:
    """What the gateway is configured with: capabilities and what each of them does.

    `key` authenticates the content of requests that clients name. `upload_folder`: where large files wait, unnamed.
    """

    capabilities: Mapping[str, Service]
    max_body_bytes: int
    upload_folder: Path
    key: bytes = field(repr=False)

    def max_audio_bytes(self) -> int:
        """The most that any capability takes: which one is asked for may stand after the file."""
        return max((one.max_audio_bytes for one in self.capabilities.values() if _hears(one)), default=0)


def _hears(service: Service) -> bool:
    return "transcription" in service.operations


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was read: what it asks of which capability, its sizes, and how its content is sealed."""

    model: str
    payload: Payload
    stream: bool
    body_bytes: int
    #: Raises ApiError when the capability does not take as much.
    check: Callable[[Service], None]
    mac: Callable[[], str]


class Gateway:
    """Routes of the OpenAI API, on one desk."""

    def __init__(
        self,
        desk: Desk,
        insight: Insight,
        clients: Clients,
        settings: Settings,
        http: httpx.AsyncClient,
        tally: Tally,
    ) -> None:
        self._desk = desk
        self._insight = insight
        self._clients = clients
        self._settings = settings
        self._http = http
        self._tally = tally
        self._spool = Spool(settings.upload_folder)
        self._created = int(time.time())

    def mount(self, app: FastAPI) -> None:
        """Add the routes."""
        for operation, path in PATHS.items():
            app.add_api_route(path, self._endpoint(operation), methods=["POST"], response_class=Response)
        app.add_api_route("/v1/models", self.models, methods=["GET"], response_class=Response)
        app.add_api_route("/v1/models/{name:path}", self.model, methods=["GET"], response_class=Response)

    # ---- models --------------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        """The capabilities that this client may ask for, as models."""
        client = self.client_of(request)
        allowed = [name for name in sorted(self._settings.capabilities) if client.may_ask_for(name)]
        return _json({"object": "list", "data": [self._model(name) for name in allowed]})

    async def model(self, name: str, request: Request) -> Response:
        """One of them."""
        self._check_allowed(self.client_of(request), name)
        return _json(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "gpuledger"}

    # ---- work ----------------------------------------------------------------------------------------------------

    def _endpoint(self, operation: Operation) -> Handler:
        async def endpoint(request: Request) -> Response:
            return await self._work(request, operation)

        endpoint.__name__ = operation
        endpoint.__doc__ = f"OpenAI's {operation}, for a capability."
        return endpoint

    async def _work(self, request: Request, operation: Operation) -> Response:
        client = self.client_of(request)
        capability: str | None = None
        asked: Asked | None = None
        try:
            asked = await self._read(request, operation)
            capability = self._check_allowed(client, asked.model)
            self._check_serves(capability, operation)
            asked.check(self._settings.capabilities[capability])
            question = _question(request, client, operation, asked)
        except BaseException as error:
            if asked is not None:
                asked.payload.close()
            if isinstance(error, ApiError):
                self._tally.answered(client, capability, error)
            raise
        return await self._serve(request, Work(client, capability, operation, asked.payload, asked.stream), question)

    async def _serve(self, request: Request, work: Work, question: Question) -> Response:
        """Wait until it may begin, and then hand on to who serves it; or say why not."""
        presence = Presence(request.receive)
        granted = False
        try:
            outcome = await presence.or_gone(self._desk.submit(question))
            granted = isinstance(outcome, Granted)
        finally:
            if not granted:
                presence.forget()
                work.payload.close()
        if isinstance(outcome, Granted):
            return Served(self._desk, self._http, work, outcome, presence, self._tally)
        if outcome is None:
            return Response(status_code=CLIENT_CLOSED)
        self._tally.answered(work.client, work.capability, outcome)
        raise self._error_of(outcome, work.capability)

    async def _read(self, request: Request, operation: Operation) -> Asked:
        """Raises ApiError."""
        if operation == "transcription":
            return await self._read_form(request, operation)
        body = await read_body(request, self._settings.max_body_bytes)
        document = parse(body, operation)

        def check(service: Service) -> None:
            check_inputs(document, operation, service.max_inputs)
            check_images(document, operation, service.max_images)

        return Asked(
            model=str(document["model"]),
            payload=JsonPayload(orjson.dumps(document)),
            stream=wants_stream(document, operation),
            body_bytes=len(body),
            check=check,
            mac=lambda: self._mac(operation, body),
        )

    async def _read_form(self, request: Request, operation: Operation) -> Asked:
        limit, named = self._settings.max_audio_bytes(), KEY_HEADER in request.headers
        if limit == 0:
            raise bad_request(f"nothing here serves {PATHS[operation]}", code="operation_not_supported")
        form = await read_form(request, self._spool, limit, hashed=named)

        def check(service: Service) -> None:
            if form.file.length_bytes > service.max_audio_bytes:
                raise too_large(service.max_audio_bytes)

        payload = form.payload()
        return Asked(
            model=form.model,
            payload=payload,
            stream=form.wants_stream,
            body_bytes=payload.length_bytes,
            check=check,
            mac=lambda: form.mac(self._settings.key, operation),
        )

    def _mac(self, operation: Operation, body: bytes) -> str:
        """Keyed, so that nobody who reads the ledger can try what was asked."""
        return hmac.new(self._settings.key, operation.encode() + b"\n" + body, hashlib.sha256).hexdigest()

    def _error_of(self, outcome: Refused | Unavailable | Repeated, capability: str) -> ApiError:
        now = self._insight.facts().now
        match outcome:
            case Refused():
                return refusal_error(outcome, capability, now)
            case Unavailable():
                return unavailable_error(outcome.request_id, outcome.cause)
            case Repeated():
                return repeated_error(outcome, capability, now)

    # ---- who may what --------------------------------------------------------------------------------------------

    def client_of(self, request: Request) -> Client:
        """Who asks. Raises ApiError."""
        given = request.headers.get("authorization")
        client = self._clients.by_authorization(given)
        if client is None:
            error = ApiError(
                401,
                "invalid_api_key",
                "a bearer token of a client is needed" if given is None else "no client has this bearer token",
                headers={"WWW-Authenticate": "Bearer"},
            )
            self._tally.answered(None, None, error)
            raise error
        return client

    def _check_allowed(self, client: Client, name: str) -> str:
        if name not in self._settings.capabilities:
            raise ApiError(404, "model_not_found", f"there is no capability {name!r}", param="model")
        if not client.may_ask_for(name):
            raise ApiError(403, "capability_not_allowed", f"this client may not ask for {name}", param="model")
        return name

    def _check_serves(self, capability: str, operation: Operation) -> None:
        if operation not in self._settings.capabilities[capability].operations:
            raise bad_request(f"{capability} does not serve {PATHS[operation]}", "model", "operation_not_supported")


def _key(request: Request) -> str | None:
    """The name that the client gave its request, if any. Raises ApiError."""
    key = request.headers.get(KEY_HEADER)
    if key is not None and not (1 <= len(key) <= MAX_KEY_CHARACTERS):
        raise bad_request(f"{KEY_HEADER} must have 1 to {MAX_KEY_CHARACTERS} characters")
    return key


def _question(request: Request, client: Client, operation: Operation, asked: Asked) -> Question:
    """What the scheduler is asked: of the content only its size. Raises ApiError."""
    key = _key(request)
    return Question(
        request_id=_fresh_id() if key is None else _named_id(client.client_id, key),
        client_id=client.client_id,
        capability=asked.model,
        operation=operation,
        body_bytes=asked.body_bytes,
        deadline_ms=_deadline(request.headers.get(DEADLINE_HEADER)),
        content_mac=None if key is None else asked.mac(),
    )


def _fresh_id() -> str:
    return f"req-{secrets.token_hex(12)}"


def _named_id(client_id: str, key: str) -> str:
    """The same for the same key of the same client. The key itself, which may say something, is not in it."""
    digest = hashlib.sha256(f"{client_id}\n{key}".encode("utf-8", "surrogateescape")).hexdigest()
    return f"key-{digest[:40]}"


def _deadline(header: str | None) -> int | None:
    if header is None:
        return None
    if _DIGITS.fullmatch(header.strip()) is None or not 1 <= int(header) <= MAX_DEADLINE_MS:
        raise bad_request(f"{DEADLINE_HEADER} must be milliseconds from now, from 1 to {MAX_DEADLINE_MS}")
    return int(header)


def _json(document: object) -> Response:
    return Response(orjson.dumps(document), media_type="application/json")
