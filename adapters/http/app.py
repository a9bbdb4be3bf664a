"""The ASGI application: the gateway, the operator API, health and metrics; every error in one shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson
from fastapi import FastAPI, Request, Response

from .gateway import Gateway
from .metrics import Metrics
from .openai_errors import ApiError, unavailable_error
from .operator import OperatorApi
from .ports import Cause, Desk

#: What the framework refuses by itself.
_OF_THE_FRAMEWORK: Final[Mapping[int, str]] = {404: "not_found", 405: "method_not_allowed"}


def application(
    gateway: Gateway, desk: Desk, metrics: Metrics, operator: OperatorApi | None = None, *, open_metrics: bool
) -> FastAPI:
    """Everything that is served at one address. Without `open_metrics` they take a token, whosever it is."""
    app = FastAPI(title="gpuledger", docs_url=None, redoc_url=None, openapi_url=None)
    gateway.mount(app)
    if operator is not None:
        operator.mount(app)

    async def healthz() -> Response:
        """The process lives."""
        return Response(b'{"status":"ok"}', media_type="application/json")

    async def readyz() -> Response:
        """Whether requests can be admitted; what is missing if not."""
        conditions = desk.conditions()
        ready = all(condition.holds for condition in conditions)
        document: dict[str, Any] = {
            "ready": ready,
            "conditions": {one.name: {"holds": one.holds, "detail": one.detail} for one in conditions},
        }
        return Response(orjson.dumps(document), 200 if ready else 503, media_type="application/json")

    async def metrics_page(request: Request) -> Response:
        """Prometheus' text format."""
        if not (open_metrics or (operator is not None and operator.is_operator(request))):
            gateway.client_of(request)
        return Response(metrics.render(), media_type=metrics.CONTENT_TYPE)

    for path, endpoint in (("/healthz", healthz), ("/readyz", readyz), ("/metrics", metrics_page)):
        app.add_api_route(path, endpoint, methods=["GET"], response_class=Response)
    app.add_exception_handler(ApiError, _api_error)
    for status in _OF_THE_FRAMEWORK:
        app.add_exception_handler(status, _http_error)
    app.add_exception_handler(Exception, _defect)
    return app


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    """What the framework refuses by itself: unknown paths and methods."""
    status = int(getattr(error, "status_code", 404))
    return ApiError(status, _OF_THE_FRAMEWORK[status], f"no {request.method} {request.url.path} here").response()


async def _defect(_: Request, __: Exception) -> Response:
    """A defect of ours. The log has the traceback; the client is told no more than that."""
    return unavailable_error(None, Cause.INTERNAL_ERROR).response()
