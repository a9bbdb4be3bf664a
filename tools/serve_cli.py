"""`gpuledger serve`: the scheduler and its OpenAI-compatible door."""

from __future__ import annotations

import errno
import os
import socket
import sys
from enum import StrEnum
from typing import Annotated

import typer

from . import logs
from .bootstrap import Parts
from .config import Config
from .driving import FAILED, ConfigOption, driving, named_config, opened_parts, run
from .ledger_target import TargetError, bad_input_ends
from .plan_report import console
from .serve import Left, Server, bind
from .serve_report import ConsoleAnnouncer


class LogForm(StrEnum):
    AUTO = "auto"
    CONSOLE = "console"
    JSON = "json"


LogOption = Annotated[LogForm, typer.Option(help="Form of the log on standard error; auto asks whether it is a tty.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the command line."""
    app.command("serve")(serve)


def serve(config: ConfigOption = None, log: LogOption = LogForm.AUTO) -> None:
    """Run the scheduler and its OpenAI-compatible door until SIGTERM or Ctrl-C.

    Exit status: 0 everything was stopped in order, 1 something was not, 2 it could not start.
    """
    logs.configure(log.value)
    with bad_input_ends():
        loaded = named_config(config)
        with driving(loaded), _bound(loaded) as listener:
            left = run(_serve(loaded, opened_parts(loaded), listener))
    status = 0 if left.in_order else FAILED
    if left.thread_stuck:
        # A driver call that never returns would keep the interpreter from ending.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    if status:
        raise typer.Exit(status)


async def _serve(config: Config, parts: Parts, listener: socket.socket) -> Left:
    announcer = ConsoleAnnouncer(console(), config, listener.getsockname()[1])
    announcer.starting()
    return await Server(config, parts, announcer).run(listener)


def _bound(config: Config) -> socket.socket:
    address = config.document.listen
    try:
        return bind(config.host, config.port)
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        named = f"`gpuledger doctor --config {config.path}` names it"
        why = f"is in use by another program: {named}" if in_use else f"cannot be used ({error.strerror})"
        raise TargetError(f"config.listen: {address} {why}") from None
    except UnicodeError:
        # What Python says of text that it cannot put into a question to the name service.
        raise TargetError(f"config.listen: {address} cannot be used (no name of a host)") from None
