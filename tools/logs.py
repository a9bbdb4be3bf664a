"""Logs of the server: lines for people at a terminal, JSON for everything else. Ids, sizes and words; never content."""

from __future__ import annotations

import logging
import sys
from typing import Final, Literal

import structlog

_QUIET: Final = ("httpx", "httpcore", "asyncio", "uvicorn.error")


def configure(form: Literal["auto", "console", "json"]) -> None:
    """Everything goes to standard error, also what libraries log."""
    people = sys.stderr.isatty() if form == "auto" else form == "console"
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info if not people else _unchanged,
    ]
    renderer: structlog.types.Processor = (
        # The usual renderer shows the values of variables beside a traceback: what clients said, and their tokens.
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)
        if people
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    # A log that nobody takes any more ends nothing.
    logging.raiseExceptions = False
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


def _unchanged(
    _: structlog.types.WrappedLogger, __: str, event: structlog.types.EventDict
) -> structlog.types.EventDict:
    return event
