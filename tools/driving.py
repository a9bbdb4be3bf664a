"""What every command needs that drives devices: its configuration, the lock of its ledger, and its adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer

from gpuledger.adapters.ledger.lock import LedgerInUse, LedgerLock

from .bootstrap import Parts, open_parts
from .config import Config, load_config
from .ledger_target import TargetError, end, usual_config
from .running import PartEnded

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


def named_config(path: Path | None) -> Config:
    """The configuration that is meant. Raises DocumentError, TargetError, LedgerUnavailable."""
    return load_config(usual_config("no --config was named") if path is None else path)


@contextmanager
def driving(config: Config) -> Generator[None]:
    """Be the one scheduler of a ledger for as long as the block runs. Raises TargetError when there is another."""
    lock = LedgerLock(config.ledger)
    try:
        config.ledger.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock.acquire()
    except LedgerInUse as error:
        raise TargetError(f"{error}: stop that scheduler first") from None
    except OSError as error:
        raise TargetError(f"{config.ledger.parent}: {error.strerror}") from None
    try:
        yield
    finally:
        lock.release()


def opened_parts(config: Config) -> Parts:
    """The adapters of a configuration. Raises LedgerUnavailable, LedgerCorrupt, TargetError."""
    try:
        return open_parts(config)
    except OSError as error:
        raise TargetError(f"{config.state_dir}: {error.strerror}") from None


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """Run to the end; a part that failed ends the command with exit status 1."""
    try:
        return asyncio.run(work)
    except PartEnded as error:
        end(f"internal error: {error} ended unexpectedly; the log has why", FAILED)
