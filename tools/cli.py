"""`gpuledger`: the one command. `commands.py` says where each subcommand is; nothing else is in here.

Exit status: 0 the command did what was asked, 1 what it says could not be written, 2 the input cannot be used. None of
them shows a traceback.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from enum import StrEnum
from importlib import metadata
from typing import Annotated, Final

import typer
from typer.completion import get_completion_inspect_parameters, show_callback

from gpuledger.domain.document_problems import DocumentError

from .commands import LazyGroup

PROGRAM: Final = "gpuledger"
#: The variable by which a completion script asks for the words that fit.
COMPLETE_VARIABLE: Final = "_GPULEDGER_COMPLETE"


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def _print_version(asked: bool) -> None:
    if asked:
        from gpuledger.domain.planner import PLANNER_VERSION

        typer.echo(f"{PROGRAM} {metadata.version('gpuledger')} ({PLANNER_VERSION})")
        raise typer.Exit


app = typer.Typer(
    cls=LazyGroup,
    help="A scheduler for the memory of GPUs, with a ledger from which every decision can be made again.",
    no_args_is_help=True,
    # Typer's own options guess the shell from the parents of the process, and write into people's startup files.
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
    show_completion: Annotated[
        Shell | None,
        typer.Option(
            "--show-completion",
            help="Print the completion script for a shell, and exit.",
            is_eager=True,
            callback=show_callback,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Options of `gpuledger` itself."""
    del version, show_completion  # their callbacks have answered


OUTPUT_LOST: Final = 1
BAD_INPUT: Final = 2
#: What writing to standard output meets; whoever opens a file says which one it was.
_UNWRITTEN: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


def main() -> None:
    """Run the command line and exit with its status."""
    _open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        # What a terminal cannot show is escaped: never a reason to fail.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if COMPLETE_VARIABLE in os.environ:
        get_completion_inspect_parameters()  # it is what tells typer of the shells
    try:
        app(prog_name=PROGRAM)
    except DocumentError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(BAD_INPUT)
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITTEN:
            raise
        # Here, so that no command waits for what reads ledgers.
        from .ledger_target import abandon_output
        from .reading import reason_of

        abandon_output()
        sys.stderr.write(f"the output could not be written: {reason_of(error)}\n")
        sys.exit(OUTPUT_LOST)


def _open_missing_streams() -> None:
    """A stream that was closed by whoever started us is an empty one: else files that are opened take its number."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - for as long as the process lives
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


if __name__ == "__main__":
    main()
