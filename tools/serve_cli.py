"""`gpuledger serve` and `gpuledger profile`: the commands that drive devices."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer

from gpuledger.adapters.ledger.lock import LedgerInUse, LedgerLock

from . import logs
from .bootstrap import Parts, configuration_of, open_parts
from .config import Config, load_config
from .ledger_target import USUAL_CONFIGS, TargetError, bad_input_ends, end
from .plan_report import console
from .running import PartEnded
from .serve import Server, bind
from .serve_report import ConsoleAnnouncer

FAILED: Final = 1
_T = TypeVar("_T")

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="The configuration; without it ./gpuledger.yaml, then var/gpuledger.yaml.",
        show_default=False,
    ),
]


class LogForm(StrEnum):
    AUTO = "auto"
    CONSOLE = "console"
    JSON = "json"


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the command line."""
    app.command("serve")(serve)


def serve(
    config: ConfigOption = None,
    log: Annotated[LogForm, typer.Option(help="console at a terminal, json elsewhere, unless one is named.")] = (
        LogForm.AUTO
    ),
) -> None:
    """Run the scheduler and its OpenAI-compatible door until SIGTERM or Ctrl-C."""
    logs.configure(log.value)
    with bad_input_ends():
        loaded = load_config(_found(config))
        with driving(loaded):
            listener = _bound(loaded)
            with listener:
                parts = _opened(loaded)
                in_order = _run(_serve(loaded, parts, listener))
    _leave(in_order)


async def _serve(config: Config, parts: Parts, listener: Any) -> bool:
    configuration = await asyncio.to_thread(configuration_of, config, parts.runtimes)
    port = listener.getsockname()[1]
    server = Server(config, parts, configuration, ConsoleAnnouncer(console(), config, port))
    return await server.run(listener)


# ---- shared with `profile` --------------------------------------------------------------------------------------


@contextmanager
def driving(config: Config) -> Generator[None]:
    """Be the one scheduler of a ledger. Raises TargetError when there is another."""
    try:
        config.ledger.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with LedgerLock(config.ledger):
            yield
    except LedgerInUse as error:
        raise TargetError(f"{error}: stop that scheduler first") from None
    except OSError as error:
        raise TargetError(f"{config.ledger}: {error.strerror}") from None


def _found(config: Path | None) -> Path:
    if config is not None:
        return config
    found = next((path for path in USUAL_CONFIGS if path.exists()), None)
    if found is None:
        raise TargetError(f"no --config was named, and there is no {' or '.join(map(str, USUAL_CONFIGS))} here")
    return found


def _bound(config: Config) -> Any:
    address = f"{config.host}:{config.port}"
    try:
        return bind(config.host, config.port)
    except OSError as error:
        why = "is in use by another program" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        raise TargetError(f"{address} {why}: name another in `listen`") from None


def _opened(config: Config) -> Parts:
    try:
        return open_parts(config)
    except OSError as error:
        raise TargetError(f"{config.state_dir}: {error.strerror}") from None


def _run(work: Coroutine[Any, Any, _T]) -> _T:
    try:
        return asyncio.run(work)
    except PartEnded as error:
        end(f"internal error: {error} ended unexpectedly; the log has why", FAILED)


def _leave(in_order: bool) -> None:
    if not in_order:
        raise typer.Exit(FAILED)
