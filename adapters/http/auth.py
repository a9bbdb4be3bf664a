"""Bearer token -> client. Tokens are known by their SHA-256 only, and compared in constant time over all clients."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from gpuledger.domain.policy import Priority

_SCHEME: Final = "bearer"


@dataclass(frozen=True, slots=True)
class Client:
    """Who asks, as the operator bound it. `capabilities`: None for all."""

    client_id: str
    token_sha256: str
    priority: Priority
    lab: bool
    capabilities: frozenset[str] | None

    def may_ask_for(self, capability: str) -> bool:
        return self.capabilities is None or capability in self.capabilities


class Clients:
    """All clients of a server."""

    def __init__(self, clients: Iterable[Client]) -> None:
        self._clients = tuple(clients)

    def by_authorization(self, header: str | None) -> Client | None:
        """The client of an `Authorization` header; None for none and for one that is not known.

        Every client is compared with, whichever matches: how long it takes tells nothing.
        """
        scheme, _, token = (header or "").partition(" ")
        given = hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).hexdigest()
        found: Client | None = None
        for client in self._clients:
            if hmac.compare_digest(client.token_sha256, given):
                found = client
        return found if scheme.lower() == _SCHEME else None
