"""The few keys of a configuration that commands beside the server need. The rest of it may be wrong meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuledger.adapters.paths import written_path
from gpuledger.domain.document_problems import DocumentError
from gpuledger.domain.documents import Json

from .config import DEFAULT_LISTEN
from .ledger_target import usual_config
from .reading import read_document


@dataclass(frozen=True, slots=True)
class ConfigParts:
    """`clients`: their ids, and whether each has a token in the configuration itself."""

    path: Path
    state_dir: Path
    listen: str
    clients: Mapping[str, bool]


def config_parts(path: Path | None) -> ConfigParts:
    """Of the configuration that is meant. Raises DocumentError, TargetError, LedgerUnavailable."""
    path = usual_config("no --config was named") if path is None else path
    document = read_document(str(path), "config")
    if not isinstance(document, dict):
        raise DocumentError.of("config", "must be an object")
    return ConfigParts(
        path=path,
        state_dir=_state_dir(document, path),
        listen=_text(document.get("listen"), DEFAULT_LISTEN),
        clients=_clients(document.get("clients")),
    )


def _state_dir(document: Mapping[str, Json], path: Path) -> Path:
    """The folder of the ledger, unless it is named."""
    key = "state_dir" if isinstance(document.get("state_dir"), str) else "ledger"
    named = document.get(key)
    if not isinstance(named, str):
        raise DocumentError.of("config.ledger", f"{path} does not name a ledger")
    try:
        found = written_path(named, path.absolute().parent)
    except ValueError as error:
        raise DocumentError.of(f"config.{key}", str(error)) from None
    return found if key == "state_dir" else found.parent


def _clients(value: Json) -> Mapping[str, bool]:
    entries = [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
    return {str(entry["id"]): entry.get("token_sha256") is not None for entry in entries if "id" in entry}


def _text(value: Json, default: str) -> str:
    return value if isinstance(value, str) else default
