"""The ASGI application: the gateway, health and metrics; every error in one shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson
from fastapi import FastAPI, Request, Response

from .gateway import Gateway
from .metrics import Metrics
from .openai_errors import ApiError
from .ports import Desk

#: What the framework refuses by itself.
_OF_THE_FRAMEWORK: Final[Mapping[int, str]] = {404: "not_found", 405: "method_not_allowed"}


def application(gateway: Gateway, desk: Desk, metrics: Metrics) -> FastAPI:
    """Everything that is served at one address."""
    app = FastAPI(title="gpuledger", docs_url=None, redoc_url=None, openapi_url=None)
    gateway.mount(app)

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

    async def metrics_page() -> Response:
        """Prometheus' text format."""
        return Response(metrics.render(), media_type=metrics.CONTENT_TYPE)

    for path, endpoint in (("/healthz", healthz), ("/readyz", readyz), ("/metrics", metrics_page)):
        app.add_api_route(path, endpoint, methods=["GET"], response_class=Response)
    app.add_exception_handler(ApiError, _api_error)
    for status in _OF_THE_FRAMEWORK:
        app.add_exception_handler(status, _http_error)
    return app


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    """What the framework refuses by itself: unknown paths and methods."""
    status = int(getattr(error, "status_code", 404))
    return ApiError(status, _OF_THE_FRAMEWORK[status], f"no {request.method} {request.url.path} here").response()
