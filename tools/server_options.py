"""The options of commands that talk to a running server. Apart, since they are needed before what talks to it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

TOKEN_VARIABLE: Final = "GPULEDGER_TOKEN"  # noqa: S105 - its name

#: As that of commands that drive devices, without what these import.
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="The configuration; without it ./gpuledger.yaml, then var/gpuledger.yaml.",
        show_default=False,
    ),
]
ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        help="Where the server listens; without it the `listen` of the configuration.",
        show_default=False,
    ),
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help=f"A file with the token of an operator; without it the variable {TOKEN_VARIABLE} has the token.",
        show_default=False,
    ),
]
