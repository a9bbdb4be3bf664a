"""`gpuledger init`: a configuration from what is found here, to start from."""

from __future__ import annotations

import hashlib
import os
import secrets
from importlib import metadata
from pathlib import Path
from typing import Annotated, Final

import typer

from .config import config_of
from .init_file import CLIENT, configuration_text
from .init_found import Found, look_around, proposals
from .ledger_target import TargetError, bad_input_ends
from .machine import Machine
from .plan_report import printable
from .reading import parse_yaml, reason_of

FILE_NAME: Final = "gpuledger.yaml"
#: Where models are looked for when no folder is named.
MODELS: Final = "models"
_SECRET_BYTES: Final = 32

Folder = Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Where gpuledger.yaml goes.", show_default="here")]
Models = Annotated[
    Path | None,
    typer.Option(
        "--models",
        metavar="DIR",
        help="Where GGUF files are looked for, also in folders below; without it FOLDER/models where there is one.",
        show_default=False,
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace a configuration that is there.")]


def register(app: typer.Typer) -> None:
    """Add the command of this module to the command line."""
    app.command("init")(init)


def init(folder: Folder = Path(), models: Models = None, force: Force = False) -> None:
    """Write a commented gpuledger.yaml from the GPUs, runtimes and GGUF files that are found here.

    The token of its one client is printed, this one time. Exit status: 0 written, 2 it could not be.
    """
    with bad_input_ends():
        place = folder.absolute() / FILE_NAME
        try:
            if place.exists() and not force:
                raise TargetError(f"{place} is there already: --force replaces it")
            found = look_around(Machine(), _models(place.parent, models))
            place.parent.mkdir(parents=True, exist_ok=True)
            token = secrets.token_urlsafe(_SECRET_BYTES)
            token_sha256 = hashlib.sha256(token.encode()).hexdigest()
            text = configuration_text(found, place.parent, token_sha256, metadata.version("gpuledger"))
            config_of(parse_yaml(text.encode()), place)  # what cannot be served is not written
            _write(place, text, force)
        except OSError as error:
            where = place if error.filename is None else error.filename
            raise TargetError(f"{where}: {reason_of(error)}") from None
    _tell(place, found, token)


def _models(folder: Path, named: Path | None) -> Path | None:
    """The folder to look for models in, whole; None where there is none."""
    if named is not None:
        return named.absolute()
    usual = folder / MODELS
    return usual if usual.is_dir() else None


def _write(place: Path, text: str, force: bool) -> None:
    """The whole file or none, for its owner only: it says what is run. Raises OSError."""
    draft = place.with_name(f".{place.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if force:
            draft.replace(place)
        else:
            # Fails where somebody else has made one meanwhile.
            os.link(draft, place)
    finally:
        draft.unlink(missing_ok=True)


def _tell(place: Path, found: Found, token: str) -> None:
    proposed = proposals(found)
    typer.echo(f"wrote {place}")
    for one in proposed:
        where = one.kind.value if one.fits else "left out: it fits nowhere"
        typer.echo(f"  {one.name}@1: {printable(one.model.path.name)}, {one.model.task.value}, {where}")
    for passed in found.passed_over:
        typer.echo(f"  passed over: {printable(passed.path.name)}: {printable(passed.why)}")
    if not proposed:
        typer.echo("  no model was found: name their folder with --models, or write one in by hand")
    typer.echo(f"\nthe token of the client {CLIENT}, which is shown this one time:\n  {token}")
    typer.echo(f"\nnext:\n  gpuledger doctor --config {place}\n  gpuledger serve --config {place}")
