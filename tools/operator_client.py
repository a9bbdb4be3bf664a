"""The operator API from the command line: where the server is, who asks, and what it says."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeAlias, cast
from urllib.parse import quote

import httpx

from .config import DEFAULT_LISTEN
from .config_parts import config_parts
from .ledger_target import TargetError
from .reading import reason_of
from .server_options import TOKEN_VARIABLE

PREFIX: Final = "/operator/v1"
#: An answer is made from what the server has in memory, or from the newest end of its ledger.
_TIMEOUT: Final = httpx.Timeout(30.0, connect=5.0)
#: A token is 47 characters; a file that is longer is another one.
_MAX_TOKEN_BYTES: Final = 4096
_TOKEN: Final = re.compile(r"[!-~]+")
_URL: Final = re.compile(r"https?://[^/\s]+")
#: What a program on this machine connects to for an address that stands for all of its own.
_ANY_HOST: Final = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - it is not bound

Document: TypeAlias = Mapping[str, Any]


class ServerSaysNo(Exception):
    """It refused, or cannot be reached. In one line."""


class ServerRefusesInput(Exception):
    """What was sent cannot be used; each problem with its place is a line."""


class OperatorClient:
    """One server, with the token of one operator. Raises ServerSaysNo, ServerRefusesInput."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        # Neither a proxy of the environment nor a redirect gets the token.
        self._http = httpx.Client(
            base_url=url + PREFIX,
            headers={"Authorization": f"Bearer {token}"},
            timeout=_TIMEOUT,
            trust_env=False,
            follow_redirects=False,
        )

    def get(self, path: str, **query: str | int) -> Document:
        return self._asked("GET", path, None, query)

    def post(self, path: str, body: Document | None = None, **query: str | int) -> Document:
        return self._asked("POST", path, body or {}, query)

    def put(self, path: str, body: Document) -> Document:
        return self._asked("PUT", path, body, {})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._http.close()

    def _asked(self, method: str, path: str, body: Document | None, query: Mapping[str, str | int]) -> Document:
        try:
            answer = self._http.request(method, path, json=body, params=dict(query))
        except httpx.InvalidURL as error:
            raise TargetError(f"--server: {error}") from None
        except httpx.TransportError as error:
            raise ServerSaysNo(f"{self._url} cannot be reached: {_told(error)}") from None
        document = _document_of(answer)
        if answer.status_code == 200 and document is not None:
            return document
        raise self._refusal(answer.status_code, document)

    def _refusal(self, status: int, document: Document | None) -> ServerSaysNo | ServerRefusesInput:
        error = None if document is None else document.get("error")
        if not isinstance(error, dict):
            return ServerSaysNo(f"{self._url} answered {status}, and not as a gpuledger server does")
        told = cast("dict[str, Any]", error)
        if status in (400, 422):
            return ServerRefusesInput(str(told.get("message")))
        return ServerSaysNo(f"the server says no ({status} {told.get('code')}): {told.get('message')}")


def path_of(kind: str, subject: str, action: str) -> str:
    """`/nodes/ID/cordon`: an id may have characters that mean something in a path."""
    return f"/{kind}/{quote(subject, safe='')}/{action}"


def reach(server: str | None, token_file: Path | None, config: Path | None) -> OperatorClient:
    """The server that is meant. Raises TargetError, DocumentError, LedgerUnavailable."""
    token = _token(token_file)
    return OperatorClient(_url(server, config), token)


def _url(server: str | None, config: Path | None) -> str:
    if server is not None:
        url = (server if "://" in server else f"http://{server}").rstrip("/")
        if _URL.fullmatch(url) is None:
            raise TargetError(f"--server must be a URL as http://{DEFAULT_LISTEN}, without a path")
        return url
    parts = config_parts(config)
    host, _, port = parts.listen.rpartition(":")
    if not host or not port.isdecimal():
        raise TargetError(f"config.listen: must be host:port, as {DEFAULT_LISTEN}; or name --server")
    if int(port) == 0:
        raise TargetError(f"config.listen: {parts.listen} takes any free port: name the one it took by --server")
    return f"http://{_ANY_HOST.get(host, host)}:{port}"


def _token(file: Path | None) -> str:
    told = f"{TOKEN_VARIABLE}" if file is None else str(file)
    token = os.environ.get(TOKEN_VARIABLE, "") if file is None else _token_in(file)
    if not token and file is None:
        makes = "`gpuledger tokens create operator NAME --scope operate` makes one"
        raise TargetError(f"the token of an operator is needed, in {TOKEN_VARIABLE} or by --token-file: {makes}")
    if _TOKEN.fullmatch(token) is None:
        raise TargetError(f"{told}: is not a token: one line of printable ASCII, without blanks")
    return token


def _token_in(file: Path) -> str:
    try:
        with file.open("rb") as found:
            text = found.read(_MAX_TOKEN_BYTES + 1)
    except OSError as error:
        raise TargetError(f"{file}: cannot be read ({reason_of(error)})") from None
    if len(text) > _MAX_TOKEN_BYTES:
        raise TargetError(f"{file}: is too long for a token")
    return text.decode("ascii", "replace").strip()


def _document_of(answer: httpx.Response) -> Document | None:
    try:
        found = answer.json()
    except ValueError:
        return None
    return cast("Document", found) if isinstance(found, dict) else None


def _told(error: httpx.TransportError) -> str:
    if isinstance(error, httpx.TimeoutException):
        return "it does not answer in time"
    if isinstance(error, httpx.ConnectError):
        return "nothing listens there, or the name is not known"
    return "the connection broke"
