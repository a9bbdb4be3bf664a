"""`gpuledger tokens`: make, list, rotate and revoke the tokens of clients and operators.

A server that runs takes a change up at the next request. What is printed on standard output is the token alone, so that
it can go into a file; what is said about it goes to standard error.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated, Any, Final

import orjson
import typer
from pydantic import TypeAdapter, ValidationError

from gpuledger.adapters.tokens import (
    Issued,
    Scope,
    TokenFile,
    TokenKind,
    TokensUnusable,
    TokenUnknown,
    token_document,
    wall_clock,
)
from gpuledger.domain.units import Identifier, format_instant

from .config_parts import ConfigParts, config_parts
from .ledger_target import TargetError, bad_input_ends
from .plan_report import console, printable, table_of
from .server_options import ConfigOption

LIST_SCHEMA: Final = "gpuledger.token-list/1"
MAX_NAME_CHARACTERS: Final = 64
_UNITS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_DURATION: Final = re.compile(r"([0-9]{1,6})([smhd])")
#: Ten years: who wants more wants none.
_LONGEST_SECONDS: Final = 3_650 * 86_400

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Expires = Annotated[
    str | None,
    typer.Option("--expires", metavar="DURATION", help="How long it is valid, as 90d or 12h.", show_default="for good"),
]
TokenId = Annotated[str, typer.Argument(metavar="ID", help="The id of a token, as `tokens list` shows it.")]

tokens_app = typer.Typer(help="Tokens of clients and operators.", no_args_is_help=True)
create_app = typer.Typer(help="Make a token, and show it this one time.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the command line."""
    app.add_typer(tokens_app, name="tokens")


tokens_app.add_typer(create_app, name="create")


@create_app.command("client")
def create_client(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A client of the configuration.")],
    expires: Expires = None,
    as_json: AsJson = False,
    config: ConfigOption = None,
) -> None:
    """Make a token for a client that the configuration declares, which binds it to its class and capabilities.

    Exit status: 0 made, 2 bad input, or the file of the tokens cannot be used.
    """
    with _bad_tokens_end():
        parts = config_parts(config)
        if name not in parts.clients:
            known = ", ".join(parts.clients) or "none"
            raise TargetError(f"{parts.path} declares no client {name}: there are {known}")
        _show(_file(parts).create(TokenKind.CLIENT, _named(name), None, _seconds("--expires", expires)), as_json)


@create_app.command("operator")
def create_operator(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Who acts with it: what the ledger says of each action.")],
    scope: Annotated[
        Scope,
        typer.Option(help="operate: change how the server runs; audit: take the ledger away; each may also read."),
    ],
    expires: Expires = None,
    as_json: AsJson = False,
    config: ConfigOption = None,
) -> None:
    """Make a token for an operator.

    Exit status: 0 made, 2 bad input, or the file of the tokens cannot be used.
    """
    with _bad_tokens_end():
        file = _file(config_parts(config))
        _show(file.create(TokenKind.OPERATOR, _named(name), scope, _seconds("--expires", expires)), as_json)


@tokens_app.command("list")
def list_tokens(as_json: AsJson = False, config: ConfigOption = None) -> None:
    """Show every token but what it says: whose it is, what for, and until when.

    Exit status: 0 shown, 2 bad input.
    """
    with _bad_tokens_end():
        parts = config_parts(config)
        now = wall_clock()
        tokens = [
            token_document(token, now)
            | {"declared": token.subject in parts.clients if token.kind is TokenKind.CLIENT else None}
            for token in _file(parts).read()
        ]
        in_configuration = [name for name, has_token in parts.clients.items() if has_token]
        document = {
            "schema": LIST_SCHEMA,
            "now": format_instant(now),
            "tokens": tokens,
            "clients_with_a_token_in_the_configuration": in_configuration,
        }
        if as_json:
            _print_json(document)
        else:
            _print_table(tokens, in_configuration)


@tokens_app.command("rotate")
def rotate(
    token_id: TokenId,
    grace: Annotated[
        str, typer.Option("--grace", metavar="DURATION", help="How long the old one still works, as 10m.")
    ] = "0s",
    expires: Annotated[
        str | None,
        typer.Option(
            "--expires",
            metavar="DURATION",
            help="How long the new one is valid, as 90d.",
            show_default="as long as the old one was made to live",
        ),
    ] = None,
    as_json: AsJson = False,
    config: ConfigOption = None,
) -> None:
    """Make a new token in the place of another.

    Exit status: 0 made, 2 bad input, or the file of the tokens cannot be used.
    """
    with _bad_tokens_end():
        file = _file(config_parts(config))
        _show(file.rotate(token_id, _seconds("--grace", grace) or 0, _seconds("--expires", expires)), as_json)


@tokens_app.command("revoke")
def revoke(token_id: TokenId, as_json: AsJson = False, config: ConfigOption = None) -> None:
    """End a token. A server that runs refuses it from the next request on.

    Exit status: 0 ended, 2 bad input, or the file of the tokens cannot be used.
    """
    with _bad_tokens_end():
        ended = _file(config_parts(config)).revoke(token_id)
        if as_json:
            _print_json({"schema": "gpuledger.token-revoked/1", **token_document(ended, wall_clock()), "valid": False})
        else:
            typer.echo(f"{ended.id} of {ended.kind.value} {ended.subject} is revoked")


# ---- input ------------------------------------------------------------------------------------------------------


@contextmanager
def _bad_tokens_end() -> Generator[None]:
    with bad_input_ends():
        try:
            yield
        except TokensUnusable as error:
            raise TargetError(str(error)) from None
        except TokenUnknown as error:
            raise TargetError(f"no token {error}: `gpuledger tokens list` shows those that there are") from None


def _file(parts: ConfigParts) -> TokenFile:
    return TokenFile(parts.state_dir)


def _named(name: str) -> str:
    """Raises TargetError."""
    try:
        TypeAdapter[str](Identifier).validate_python(name)
    except ValidationError:
        raise TargetError(
            "NAME must begin with a letter or digit, and have letters, digits and ._@#:+/- only"
        ) from None
    if len(name) > MAX_NAME_CHARACTERS:
        raise TargetError(f"NAME must have at most {MAX_NAME_CHARACTERS} characters")
    return name


def _seconds(option: str, text: str | None) -> int | None:
    """Raises TargetError."""
    if text is None:
        return None
    match = _DURATION.fullmatch(text)
    found = None if match is None else int(match[1]) * _UNITS[match[2]]
    if found is None or found > _LONGEST_SECONDS or (found == 0 and option == "--expires"):
        raise TargetError(f"{option} must be a duration as 30m, 12h or 90d, of at most ten years")
    return found


# ---- output -----------------------------------------------------------------------------------------------------


def _show(issued: Issued, as_json: bool) -> None:
    """The one time at which a token is shown."""
    token = issued.token
    if as_json:
        shown = token_document(token, wall_clock())
        _print_json({"schema": "gpuledger.token/1", **shown, "token": issued.secret})
        return
    sys.stdout.write(f"{issued.secret}\n")
    sys.stdout.flush()
    what = f"scope {token.scope.value}, " if token.scope is not None else ""
    until = "without end" if token.expires_at is None else f"until {format_instant(token.expires_at)}"
    typer.echo(f"{token.id}: {token.kind.value} {token.subject}, {what}{until}. It is not shown again.", err=True)


def _print_table(tokens: list[dict[str, Any]], in_configuration: list[str]) -> None:
    table = table_of("Tokens", "id", "kind", "of", "scope", "made", "until", "state")
    for token in tokens:
        state = "valid" if token["valid"] else "expired"
        if token["declared"] is False:
            state = "of no client: the configuration does not declare it"
        table.add_row(
            token["id"],
            token["kind"],
            printable(token["subject"]),
            token["scope"] or "-",
            _day(token["created_at"]),
            "-" if token["expires_at"] is None else _day(token["expires_at"]),
            state,
        )
    for name in in_configuration:
        table.add_row("-", "client", printable(name), "-", "-", "-", "in the configuration")
    if table.row_count:
        console().print(table)
    else:
        typer.echo("there is no token yet")


def _day(instant: str) -> str:
    """To the minute."""
    return instant[:16].replace("T", " ") + "Z"


def _print_json(document: dict[str, Any]) -> None:
    sys.stdout.buffer.write(orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    sys.stdout.buffer.flush()
