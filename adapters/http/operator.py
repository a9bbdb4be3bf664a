"""`/operator/v1`: what an operator sees and does over the network, under a token with the scope that it needs.

Each route is a row of `ROUTES`: its scope, what it takes, and what it asks of the desk. Whatever is refused has the
shape of the gateway's errors; what has wrong values is 422 and has `problems`, each with its place.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, assert_never

import orjson
from fastapi import FastAPI, Request, Response
from pydantic import TypeAdapter, ValidationError

from gpuledger.domain.document_problems import DocumentError, Problem, problems_of
from gpuledger.domain.documents import Json, inspected, parse_json
from gpuledger.domain.messages import (
    AcceptEnvelope,
    ClearAccelerator,
    CordonNode,
    DrainNode,
    PauseLab,
    ResumeLab,
    UncordonNode,
    UnloadIdle,
)
from gpuledger.domain.policy import Priority
from gpuledger.domain.units import Identifier

from ..tokens import MAX_TOKENS, Scope
from .auth import Clients, Operator, Operators
from .bodies import read_body
from .openai_errors import ApiError, bad_request, unavailable_error
from .operator_models import Newest, Nothing, PlanTrial, PolicyRevision, ResidencyChange, Trying, Unload
from .operator_ports import Answer, Denial, Denied, OperatorDesk, Residing, Revision, Shut, Trial

PREFIX: Final = "/operator/v1"
#: A policy with every key is 2 KiB.
MAX_BODY_BYTES: Final = 64 * 1024
#: Far more than a person or a script that waits needs, and little beside what the gateway takes.
CALLS_PER_SECOND: Final = 20
CALLS_AT_ONCE: Final = 100

_IDENTIFIER: Final = TypeAdapter[str](Identifier)


@dataclass(frozen=True, slots=True)
class Call:
    """What may be answered. `body` and `query` are of the types of its route, `subject` is the id in its path."""

    operator: Operator
    subject: str
    body: Any
    query: Any

    @property
    def by(self) -> str:
        """Who it is, in the ledger."""
        return self.operator.name


Act = Callable[[OperatorDesk, Call], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class Route:
    """One thing that can be asked. A path with `{subject}` names what it is about."""

    method: str
    path: str
    scope: Scope
    act: Act
    body: type[Any] = Nothing
    query: type[Any] = Nothing


# ---- what each of them does -------------------------------------------------------------------------------------


async def _status(desk: OperatorDesk, _: Call) -> Answer:
    return await desk.status()


async def _alerts(desk: OperatorDesk, _: Call) -> Answer:
    return await desk.alerts()


async def _queue(desk: OperatorDesk, _: Call) -> Answer:
    return await desk.queue()


async def _nodes(desk: OperatorDesk, _: Call) -> Answer:
    return desk.nodes()


async def _policy(desk: OperatorDesk, _: Call) -> Answer:
    return desk.policy()


async def _plans(desk: OperatorDesk, call: Call) -> Answer:
    return await desk.plans(call.query.limit)


async def _operations(desk: OperatorDesk, call: Call) -> Answer:
    return await desk.operations(call.query.limit)


async def _try_plan(desk: OperatorDesk, call: Call) -> Answer:
    asked: PlanTrial = call.body
    if asked.client is not None and (asked.priority is not None or asked.lab is not None):
        raise _unprocessable([Problem("client", "is bound to its class and to LAB or not: leave out priority and lab")])
    return desk.try_plan(
        Trial(
            capability=asked.capability,
            client=asked.client,
            priority=asked.priority or Priority.INTERACTIVE,
            lab=asked.lab or False,
            fallback_rank=asked.fallback_rank,
            deadline_ms=asked.deadline_ms,
        )
    )


async def _revise_policy(desk: OperatorDesk, call: Call) -> Answer:
    if not call.query.dry_run:
        _check_scope(call.operator, Scope.OPERATE)
    wanted: PolicyRevision = call.body
    return await desk.revise_policy(Revision(call.by, wanted.policy, wanted.if_revision, call.query.dry_run))


async def _pause_lab(desk: OperatorDesk, call: Call) -> Answer:
    return await desk.carry_out(PauseLab(call.by))


async def _resume_lab(desk: OperatorDesk, call: Call) -> Answer:
    return await desk.carry_out(ResumeLab(call.by))


async def _set_residency(desk: OperatorDesk, call: Call) -> Answer:
    wanted: ResidencyChange = call.body
    return await desk.set_residency(Residing(call.by, call.subject, wanted.policy, wanted.ttl_seconds))


async def _accept_envelope(desk: OperatorDesk, call: Call) -> Answer:
    return await desk.carry_out(AcceptEnvelope(call.by, call.subject))


async def _cordon(desk: OperatorDesk, call: Call) -> Answer:
    return await desk.carry_out(CordonNode(call.by, call.subject))


async def _uncordon(desk: OperatorDesk, call: Call) -> Answer:
    return await desk.carry_out(UncordonNode(call.by, call.subject))


async def _drain(desk: OperatorDesk, call: Call) -> Answer:
    return await desk.carry_out(DrainNode(call.by, call.subject))


async def _unload(desk: OperatorDesk, call: Call) -> Answer:
    wanted: Unload = call.body
    return await desk.carry_out(UnloadIdle(call.by, wanted.deployment))


async def _clear(desk: OperatorDesk, call: Call) -> Answer:
    return await desk.carry_out(ClearAccelerator(call.by, call.subject))


ROUTES: Final = (
    Route("GET", "/status", Scope.READ, _status),
    Route("GET", "/alerts", Scope.READ, _alerts),
    Route("GET", "/queue", Scope.READ, _queue),
    Route("GET", "/nodes", Scope.READ, _nodes),
    Route("GET", "/policy", Scope.READ, _policy),
    Route("GET", "/plans", Scope.READ, _plans, query=Newest),
    Route("GET", "/operations", Scope.READ, _operations, query=Newest),
    Route("POST", "/plan", Scope.READ, _try_plan, body=PlanTrial),
    # To try one is to read; to revise it needs more, which its action asks for.
    Route("POST", "/policy", Scope.READ, _revise_policy, body=PolicyRevision, query=Trying),
    Route("POST", "/lab/pause", Scope.OPERATE, _pause_lab),
    Route("POST", "/lab/resume", Scope.OPERATE, _resume_lab),
    Route("PUT", "/deployments/{subject}/residency", Scope.OPERATE, _set_residency, body=ResidencyChange),
    Route("POST", "/deployments/{subject}/envelope/accept", Scope.OPERATE, _accept_envelope),
    Route("POST", "/nodes/{subject}/cordon", Scope.OPERATE, _cordon),
    Route("POST", "/nodes/{subject}/uncordon", Scope.OPERATE, _uncordon),
    Route("POST", "/nodes/{subject}/drain", Scope.OPERATE, _drain),
    Route("POST", "/unload", Scope.OPERATE, _unload, body=Unload),
    Route("POST", "/accelerators/{subject}/clear", Scope.OPERATE, _clear),
)


# ---- the door ---------------------------------------------------------------------------------------------------


class OperatorApi:
    """The routes, on one desk. `clients` are known so that who sends the wrong one of its tokens is told so."""

    def __init__(
        self,
        desk: OperatorDesk,
        operators: Operators,
        clients: Clients,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._desk = desk
        self._operators = operators
        self._clients = clients
        self._pace = _Pace(monotonic)

    def mount(self, app: FastAPI) -> None:
        """Add the routes. Ids may have slashes in them, as those of MIG instances do."""
        for route in ROUTES:
            app.add_api_route(
                PREFIX + route.path.replace("{subject}", "{subject:path}"),
                self._endpoint(route),
                methods=[route.method],
                response_class=Response,
                openapi_extra=_openapi_of(route),
            )

    def _endpoint(self, route: Route) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            operator = self.operator_of(request, route.scope)
            self._pace.take(operator)
            query = _query_of(request, route.query)
            call = Call(operator, _subject_of(request), await _body_of(request, route.body), query)
            return _answered(await route.act(self._desk, call))

        endpoint.__name__ = route.act.__name__.lstrip("_")
        return endpoint

    def is_operator(self, request: Request) -> bool:
        """Whether an operator asks: each may read."""
        return self._operators.by_authorization(request.headers.get("authorization")) is not None

    def operator_of(self, request: Request, needed: Scope) -> Operator:
        """Who asks, when it may. Raises ApiError."""
        given = request.headers.get("authorization")
        operator = self._operators.by_authorization(given)
        if operator is not None:
            _check_scope(operator, needed)
            return operator
        if self._clients.by_authorization(given) is not None:
            raise ApiError(403, "operator_token_needed", "this is the token of a client, not of an operator")
        message = "a bearer token of an operator is needed" if given is None else "no operator has this bearer token"
        raise ApiError(401, "invalid_operator_token", message, headers={"WWW-Authenticate": "Bearer"})


def _check_scope(operator: Operator, needed: Scope) -> None:
    if not operator.scope.allows(needed):
        message = f"this needs the scope {needed.value}, and the token of {operator.name} has {operator.scope.value}"
        raise ApiError(403, "scope_needed", message)


@dataclass(slots=True)
class _Bucket:
    left: float = CALLS_AT_ONCE
    filled_at: float = 0.0


@dataclass(slots=True)
class _Pace:
    """So many calls a second of one token, and some at once: a script that runs wild does not slow the gateway down."""

    monotonic: Callable[[], float]
    buckets: dict[str, _Bucket] = field(default_factory=dict[str, _Bucket])

    def take(self, operator: Operator) -> None:
        """Raises ApiError."""
        now = self.monotonic()
        if len(self.buckets) > 2 * MAX_TOKENS:
            self.buckets.clear()  # tokens that are no more
        bucket = self.buckets.setdefault(operator.token_id, _Bucket(filled_at=now))
        bucket.left = min(CALLS_AT_ONCE, bucket.left + (now - bucket.filled_at) * CALLS_PER_SECOND)
        bucket.filled_at = now
        if bucket.left < 1:
            message = f"more than {CALLS_PER_SECOND} calls a second with this token"
            raise ApiError(429, "too_many_calls", message, retry_after=1)
        bucket.left -= 1


# ---- what comes in ----------------------------------------------------------------------------------------------


def _subject_of(request: Request) -> str:
    """The id in the path; empty where it has none. Raises ApiError: what is no id names nothing."""
    subject = request.path_params.get("subject")
    if subject is None:
        return ""
    try:
        return _IDENTIFIER.validate_python(subject)
    except ValidationError:
        raise ApiError(404, Denial.NOT_FOUND.value, "the path names something that is no id") from None


_ADAPTERS: Final[Mapping[type[Any], TypeAdapter[Any]]] = {
    kind: TypeAdapter(kind) for route in ROUTES for kind in (route.body, route.query)
}


def _query_of(request: Request, kind: type[Any]) -> Any:
    given = request.query_params
    if len(given.multi_items()) != len(given):
        raise _unprocessable([Problem("query", "has a key more than once")])
    try:
        return _ADAPTERS[kind].validate_strings(dict(given))
    except ValidationError as error:
        raise _unprocessable(problems_of(error, kind, "query")) from None


async def _body_of(request: Request, kind: type[Any]) -> Any:
    """What was sent, read by its type. Nothing at all is an empty object."""
    if request.method == "GET":
        return None
    length = request.headers.get("content-length", "0")
    empty = length == "0" and "transfer-encoding" not in request.headers
    value = {} if empty else _json_of(await read_body(request, MAX_BODY_BYTES))
    try:
        problems = inspected(value, "")
        found = _ADAPTERS[kind].validate_json(json.dumps(value))
    except DocumentError as error:
        raise _unprocessable(error.told()) from None
    except ValidationError as error:
        raise _unprocessable(problems_of(error, kind, "")) from None
    if problems:
        raise _unprocessable(problems)
    return found


def _json_of(body: bytes) -> Json:
    try:
        return parse_json(body, "the body")
    except DocumentError as error:
        raise bad_request(str(error)) from None


# ---- what goes out ----------------------------------------------------------------------------------------------


def _answered(answer: Answer) -> Response:
    """Raises ApiError."""
    match answer:
        case Denied():
            raise _denied(answer)
        case Shut(cause=cause):
            raise unavailable_error(None, cause)
        case _:
            return Response(orjson.dumps(answer), media_type="application/json")


def _denied(denied: Denied) -> ApiError:
    match denied.denial:
        case Denial.NOT_FOUND:
            status = 404
        case Denial.REFUSED | Denial.REVISION_CHANGED:
            status = 409
        case Denial.INVALID:
            return _unprocessable(denied.problems)
        case _:
            assert_never(denied.denial)
    return ApiError(status, denied.denial.value, denied.message)


def _unprocessable(problems: Iterable[Problem]) -> ApiError:
    """422, with everything that is wrong."""
    error = DocumentError(tuple(problems))
    told = [{"where": problem.where, "message": problem.message} for problem in error.told()]
    first = next(iter(error.problems), None)
    param = first.where if first is not None and first.where else None
    return ApiError(422, Denial.INVALID.value, str(error), param=param, extra={"problems": told})


def _openapi_of(route: Route) -> dict[str, Any]:
    """What a route takes, for whoever reads the schema of the API."""
    told: dict[str, Any] = {"parameters": _parameters_of(route)}
    if route.method != "GET":
        told["requestBody"] = {"content": {"application/json": {"schema": _schema_of(route.body)}}}
    return told


def _parameters_of(route: Route) -> list[dict[str, Any]]:
    found = [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in _schema_of(route.query)["properties"].items()
    ]
    if "{subject}" in route.path:
        found.append({"name": "subject", "in": "path", "required": True, "schema": _IDENTIFIER.json_schema()})
    return found


def _schema_of(kind: type[Any]) -> dict[str, Any]:
    return _ADAPTERS[kind].json_schema()
