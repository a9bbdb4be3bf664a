"""The example that `make serve` runs: its models, made once, and a configuration to start from.

`python -m gpuledger.tools.examples DIRECTORY` prepares a state directory and may be repeated: what is there and
whole is left as it is, and a configuration that somebody wrote is never touched.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import secrets
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from . import example_models
from .example_models import ExampleError, Progress, convert_minilm, make_tiny_chat, silent

__all__ = ["ExampleError", "Prepared", "Progress", "convert_minilm", "make_tiny_chat", "prepare", "silent"]

CONFIG_NAME: Final = "gpuledger.yaml"
#: Client -> class it is bound to.
CLIENTS: Final = {"demo": "interactive", "indexer": "background"}


def _make_tiny_chat(out: Path, progress: Progress) -> None:
    make_tiny_chat(out, progress=progress)


#: File -> what makes it.
MODELS: Final[dict[str, Callable[[Path, Progress], None]]] = {
    "all-minilm-l6-v2.f16.gguf": convert_minilm,
    "tiny-chat.f16.gguf": _make_tiny_chat,
}


@dataclass(frozen=True, slots=True)
class Prepared:
    """What stands in the state directory now, and what of it this call made."""

    config: Path
    sha256: dict[str, str]
    made: tuple[str, ...]


def prepare(state_dir: Path, progress: Progress = silent) -> Prepared:
    """Make what is missing of the models, the tokens and the configuration. Raises ExampleError, OSError.

    A model is made again when its SHA-256 is not the recorded one, or when what makes it has changed.
    """
    models = state_dir / "models"
    models.mkdir(parents=True, exist_ok=True)
    with _alone(state_dir / ".prepare.lock"):
        sha256, made = _prepare_models(models, progress)
        config = state_dir / CONFIG_NAME
        if not config.exists():
            hashes = {client: _token_hash(state_dir / f"{client}.token") for client in CLIENTS}
            _replace(config, configuration(hashes).encode(), 0o644)
            made = (*made, CONFIG_NAME)
    return Prepared(config, sha256, made)


@contextmanager
def _alone(path: Path) -> Generator[None]:
    """One at a time, also among processes; the kernel lets go when one dies."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---- models -----------------------------------------------------------------------------------------------------


def _prepare_models(models: Path, progress: Progress) -> tuple[dict[str, str], tuple[str, ...]]:
    for abandoned in models.glob(".*.part"):
        abandoned.unlink()
    recipe = hashlib.sha256(Path(example_models.__file__).read_bytes()).hexdigest()
    record_path = models / "models.json"
    record = _read_record(record_path, recipe)
    made: list[str] = []
    for name, make in MODELS.items():
        path = models / name
        if name in record and path.is_file() and _sha256(path) == record[name]:
            continue
        make(path, progress)
        record[name] = _sha256(path)
        made.append(name)
        document = json.dumps({"recipe": recipe, "sha256": record}, indent=1, sort_keys=True)
        _replace(record_path, f"{document}\n".encode(), 0o644)
    return record, tuple(made)


def _read_record(path: Path, recipe: str) -> dict[str, str]:
    """What was made, by the same recipe; nothing where the record is absent, damaged or of another one."""
    try:
        document = json.loads(path.read_bytes())
        if document["recipe"] != recipe:
            return {}
        return {name: str(document["sha256"][name]) for name in MODELS if name in document["sha256"]}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _replace(path: Path, content: bytes, mode: int) -> None:
    """Write a small file whole, durably, and never readable by more than `mode` allows."""
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


# ---- configuration ----------------------------------------------------------------------------------------------


def _token_hash(path: Path) -> str:
    """The SHA-256 of the token in the file, which is made when it is not there."""
    if not path.exists():
        _replace(path, f"{secrets.token_urlsafe(32)}\n".encode(), 0o600)
    return hashlib.sha256(path.read_bytes().strip()).hexdigest()


def configuration(token_hashes: dict[str, str]) -> str:
    """The example configuration, for clients whose tokens have these hashes."""
    clients = "\n".join(
        f"  - {{id: {client}, token_sha256: {token_hashes[client]}, "
        f'priority: {priority}, lab: false, capabilities: ["*"]}}'
        for client, priority in CLIENTS.items()
    )
    return f"""\
# Written by `make serve` when there was none; yours to change. Paths are relative to this file.
ledger: ledger.db
listen: 127.0.0.1:8910
node: {{id: local, labels: {{}}}}
accelerators: {{host: true, nvml: auto}}
policy: {{}}  # the policy m10-v1; every key that is set here makes it another

# Tokens are in demo.token and indexer.token beside this file; only their hashes are here.
clients:
{clients}

deployments:
  - id: minilm
    capability: rag.embedding@1
    kind: host
    priority: interactive
    concurrency: 1
    queue_limit: 16
    residency: {{policy: keep_warm, ttl_seconds: 901}}
    runtime:
      type: llama_cpp
      model: models/all-minilm-l6-v2.f16.gguf
      task: embedding
      context_length: 512
      batch_size: 512
      ubatch_size: 512
      parallel: 1
      threads: 2
  - id: chat-tiny
    capability: chat.tiny@1
    kind: host
    priority: interactive
    concurrency: 1
    queue_limit: 16
    residency: {{policy: keep_warm, ttl_seconds: 901}}
    runtime:
      type: llama_cpp
      model: models/tiny-chat.f16.gguf
      task: chat
      context_length: 2048
      batch_size: 512
      ubatch_size: 512
      parallel: 1
      threads: 2
"""


# ---- command line -----------------------------------------------------------------------------------------------


def _prepare_shown(state_dir: Path, console: Console) -> Prepared:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    bars = Bars(*columns, console=console)
    tasks: dict[str, TaskID] = {}

    def show(step: str, done: int, total: int) -> None:
        bars.start()
        if step not in tasks:
            tasks[step] = bars.add_task(step, total=total)
        bars.update(tasks[step], completed=done)

    try:
        return prepare(state_dir, show)
    finally:
        if tasks:
            bars.stop()


def main(arguments: list[str] | None = None) -> int:
    """Prepare a state directory, showing progress; 1 and one line when it cannot be done."""
    parser = argparse.ArgumentParser(prog="python -m gpuledger.tools.examples", description=__doc__)
    parser.add_argument("directory", type=Path, help="where models, tokens and configuration go")
    state_dir: Path = parser.parse_args(arguments).directory
    console = Console(stderr=True, highlight=False)
    try:
        prepared = _prepare_shown(state_dir, console)
    except (ExampleError, OSError) as error:
        console.print(f"cannot prepare the example: {error}", style="red", markup=False)
        return 1
    if prepared.made:
        console.print(f"made {', '.join(prepared.made)} in {state_dir}", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
