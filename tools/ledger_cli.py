"""`gpuledger ledger`: what can be done with a ledger as a whole."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Annotated, BinaryIO, Final, cast

import typer

from gpuledger.adapters.ledger.export import export as export_leaves

from .ledger_target import ConfigOption, TargetArgument, TargetError, opened

STDOUT: Final = "-"


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the command line."""
    ledger = typer.Typer(help="Export a ledger.", no_args_is_help=True)
    ledger.command("export")(export)
    app.add_typer(ledger, name="ledger")


def export(
    target: TargetArgument = None,
    output: Annotated[
        str,
        typer.Option("--output", "-o", metavar="FILE", help="Where to; - is standard output. A file appears whole."),
    ] = STDOUT,
    config: ConfigOption = None,
) -> None:
    """Write every event, one a line, in the exact bytes that were stored and hashed.

    The same ledger gives the same bytes, from a running server too. Exit status: 0 done, 2 bad input.
    """
    with opened(target, config) as found:
        if output == STDOUT:
            export_leaves(found.reader, sys.stdout.buffer)
            sys.stdout.buffer.flush()
            return
        with _appearing_whole(Path(output), found.path) as file:
            events = export_leaves(found.reader, file)
            size = file.tell()
        typer.echo(f"{output}: {events} events, {size} bytes", err=True)


@contextmanager
def _appearing_whole(path: Path, ledger: Path) -> Generator[BinaryIO]:
    """A file to write to that takes its name when it is complete and on the disk. Raises TargetError."""
    try:
        # Asked first: links that lead in a circle end here, on every version of Python.
        mode = _mode_of(path)
        # A link is followed: it goes on pointing to the file that it was made for.
        path = path.resolve()
        if not stat.S_ISREG(mode):
            raise TargetError(f"{path}: is no file that could be written")
        if path.exists() and path.samefile(ledger):
            raise TargetError(f"{path}: is the ledger itself")
        with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as draft:
            try:
                yield cast("BinaryIO", draft)
                draft.flush()
                os.fchmod(draft.fileno(), stat.S_IMODE(mode))
                os.fsync(draft.fileno())
                Path(draft.name).replace(path)
            except BaseException:
                with suppress(OSError):
                    Path(draft.name).unlink()
                raise
    except OSError as error:
        raise TargetError(f"{path}: {(error.strerror or str(error)).lower()}") from error


def _mode_of(path: Path) -> int:
    """Of a file that is to be written; what a new one gets where there is none. Raises OSError."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return stat.S_IFREG | 0o600
