"""Bearer token -> client or operator. Tokens are known by their SHA-256 only, and compared in constant time over all.

Those of the configuration file stand as long as the server runs; those of the file of tokens as long as they are there.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from gpuledger.domain.policy import Priority

from ..tokens import Scope, Token, TokenKind, digest_of, wall_clock

_SCHEME: Final = "bearer"

Tokens = Callable[[], Sequence[Token]]
"""The tokens of the file as they are now."""


@dataclass(frozen=True, slots=True)
class Client:
    """Who asks, as the operator bound it. `capabilities`: None for all. `token_sha256`: None without one of its own."""

    client_id: str
    token_sha256: str | None
    priority: Priority
    lab: bool
    capabilities: frozenset[str] | None

    def may_ask_for(self, capability: str) -> bool:
        return self.capabilities is None or capability in self.capabilities


@dataclass(frozen=True, slots=True)
class Operator:
    """Who changes how the server runs, and may do what."""

    name: str
    scope: Scope
    token_id: str


class Clients:
    """All clients of a server. A token of the file counts when its client is one of them."""

    def __init__(
        self, clients: Iterable[Client], tokens: Tokens = tuple[Token, ...], now: Callable[[], int] = wall_clock
    ) -> None:
        self._clients = {client.client_id: client for client in clients}
        self._tokens = tokens
        self._now = now

    def by_authorization(self, header: str | None) -> Client | None:
        """The client of an `Authorization` header; None for none and for one that is not known.

        Every client is compared with, whichever matches: how long it takes tells nothing.
        """
        scheme, given = _given(header)
        found: Client | None = None
        for digest, client in self._known():
            if hmac.compare_digest(digest, given):
                found = client
        return found if scheme == _SCHEME else None

    def _known(self) -> Iterator[tuple[str, Client]]:
        for client in self._clients.values():
            if client.token_sha256 is not None:
                yield client.token_sha256, client
        now = self._now()
        for token in self._tokens():
            named = self._clients.get(token.subject)
            if token.kind is TokenKind.CLIENT and named is not None and token.is_valid(now):
                yield token.sha256, named


class Operators:
    """All operators of a server: there are none but those of the file of tokens."""

    def __init__(self, tokens: Tokens, now: Callable[[], int] = wall_clock) -> None:
        self._tokens = tokens
        self._now = now

    def by_authorization(self, header: str | None) -> Operator | None:
        """As for clients."""
        scheme, given = _given(header)
        now = self._now()
        found: Operator | None = None
        for token in self._tokens():
            if token.scope is None or not token.is_valid(now):
                continue
            if hmac.compare_digest(token.sha256, given):
                found = Operator(token.subject, token.scope, token.id)
        return found if scheme == _SCHEME else None


def _given(header: str | None) -> tuple[str, str]:
    """The scheme of a header, and the hash of its token."""
    scheme, _, token = (header or "").partition(" ")
    return scheme.lower(), digest_of(token.strip())
