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
from typing import Any, Final, Protocol

import httpx
import orjson
from fastapi import FastAPI, Request, Response

from .auth import Client, Clients
from .bodies import check_inputs, parse, read_body, wants_stream
from .openai_errors import (
    CLIENT_CLOSED,
    ApiError,
    bad_request,
    refusal_error,
    repeated_error,
    unavailable_error,
)
from .ports import Desk, Granted, Insight, Operation, Outcome, Question, Refused, Repeated, Unavailable
from .relay import PATHS, Presence, Served, Tally, Work

DEADLINE_HEADER: Final = "x-gpuledger-deadline-ms"
KEY_HEADER: Final = "idempotency-key"
MAX_DEADLINE_MS: Final = 86_400_000
MAX_KEY_CHARACTERS: Final = 255
_DIGITS: Final = re.compile(r"[0-9]{1,9}")

Handler = Callable[[Request], Awaitable[Response]]


class GatewayTally(Tally, Protocol):
    """Told how each request ended, also those that were never granted."""

    def answered(self, client: Client | None, capability: str | None, outcome: Outcome | ApiError) -> None: ...


@dataclass(frozen=True, slots=True)
class Service:
    """What a capability does, and how many inputs of one request its envelope was measured with."""

    operations: frozenset[Operation]
    max_inputs: int


@dataclass(frozen=True, slots=True)
class Settings:
    """What the gateway is configured with: capabilities and what each of them does.

    `key` authenticates the content of requests that clients name.
    """

    capabilities: Mapping[str, Service]
    max_body_bytes: int
    key: bytes = field(repr=False)


class Gateway:
    """Routes of the OpenAI API, on one desk."""

    def __init__(
        self,
        desk: Desk,
        insight: Insight,
        clients: Clients,
        settings: Settings,
        http: httpx.AsyncClient,
        tally: GatewayTally,
    ) -> None:
        self._desk = desk
        self._insight = insight
        self._clients = clients
        self._settings = settings
        self._http = http
        self._tally = tally
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
        try:
            body = await read_body(request, self._settings.max_body_bytes)
            document = parse(body, operation)
            capability = self._check_allowed(client, str(document["model"]))
            self._check_serves(capability, operation)
            check_inputs(document, operation, self._settings.capabilities[capability].max_inputs)
            question = self._question(request, client, capability, operation, body)
        except ApiError as error:
            self._tally.answered(client, capability, error)
            raise
        stream = wants_stream(document, operation)
        work = Work(capability, client.priority, operation, orjson.dumps(document), stream)
        presence = Presence(request.receive)
        outcome = await presence.or_gone(self._desk.submit(question))
        if isinstance(outcome, Granted):
            return Served(self._desk, self._http, work, outcome, presence, self._tally)
        presence.forget()
        if outcome is None:
            return Response(status_code=CLIENT_CLOSED)
        self._tally.answered(client, capability, outcome)
        raise self._error_of(outcome, capability)

    def _question(
        self, request: Request, client: Client, capability: str, operation: Operation, body: bytes
    ) -> Question:
        key = request.headers.get(KEY_HEADER)
        if key is not None and not (1 <= len(key) <= MAX_KEY_CHARACTERS):
            raise bad_request(f"{KEY_HEADER} must have 1 to {MAX_KEY_CHARACTERS} characters")
        return Question(
            request_id=_fresh_id() if key is None else _named_id(client.client_id, key),
            client_id=client.client_id,
            capability=capability,
            operation=operation,
            body_bytes=len(body),
            deadline_ms=_deadline(request.headers.get(DEADLINE_HEADER)),
            content_mac=None if key is None else self._mac(operation, body),
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
