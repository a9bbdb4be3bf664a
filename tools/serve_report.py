"""What `gpuledger serve` tells people at a terminal: what it found, where it listens, and what to try."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gpuledger.adapters.runtimes.config import Task
from gpuledger.adapters.runtimes.output import LOG_FOLDER, log_path
from gpuledger.domain.explain import duration, size
from gpuledger.domain.world import World

from .config import Config, DeploymentEntry
from .envelopes import Unmeasured

#: Tokens that the example leaves beside its configuration.
TOKEN_SUFFIX: Final = ".token"  # noqa: S105

_NOTHING: Final = (
    "It serves nothing: the configuration has no deployments. `gpuledger init FOLDER --models MODELS` writes one for "
    "each model."
)


class ConsoleAnnouncer:
    """Implements `Announcer`."""

    def __init__(self, console: Console, config: Config, port: int) -> None:
        self._console = console
        self._config = config
        host = f"[{config.host}]" if ":" in config.host else config.host
        self._base_url = f"http://{host}:{port}"
        self._measured: set[str] = set()

    def starting(self) -> None:
        """The address is taken; whether it is ready, `/readyz` says."""
        self._print(Text(f"gpuledger is starting at {self._base_url}", style="dim"))

    def measuring(self, deployment_id: str, step: str) -> None:  # noqa: ARG002
        if deployment_id not in self._measured:
            self._measured.add(deployment_id)
            self._print(Text(f"measuring what {deployment_id} takes (once for each configuration) ...", style="dim"))

    def ready(self, world: World, unmeasured: list[Unmeasured]) -> None:
        parts: list[RenderableType] = [_accelerators(world), Text(), _deployments(world), Text()]
        parts += [Text(self._failure(one), style="bold red") for one in unmeasured]
        if not self._config.document.deployments:
            parts.append(Text(_NOTHING, style="yellow"))
        if self._config.remote:
            parts.append(Text("Reachable from other machines, unencrypted: put TLS in front of it.", style="yellow"))
        parts.append(Text(f"Listening on {self._base_url}  (/readyz, /metrics)"))
        self._print(Panel(Group(*parts), title="gpuledger is ready", border_style="green"))
        self._print_examples()

    def _failure(self, one: Unmeasured) -> str:
        """Why a runtime does not start only its own output can say."""
        place = one.place
        log = log_path(self._config.state_dir / LOG_FOLDER, place.deployment_id, place.accelerator_id)
        told = f"{place.deployment_id} could not be measured: {one.fault}"
        return f"{told}; what it printed is in {log}" if log.is_file() else told

    def _print(self, shown: RenderableType) -> None:
        """A server does not end because nobody reads what it says."""
        with suppress(OSError):
            self._console.print(shown, soft_wrap=isinstance(shown, Text))

    def _print_examples(self) -> None:
        """Lines to copy: printed as they are, outside the panel, so that no frame is copied with them."""
        entry = _first(self._config)
        if entry is None:
            return
        token = _token(self._config)
        lines = [f"curl {self._base_url}{_path(entry, self._config)} \\"]
        lines += [f'  -H "Authorization: Bearer {token}" -H "Content-Type: application/json" \\']
        lines += [f"  -d '{_body(entry, self._config)}'"]
        for line in ["Try:", "", *lines, "", *self._snippet(entry)]:
            self._print(Text(line))

    def _snippet(self, entry: DeploymentEntry) -> list[str]:
        path = _token_file(self._config)
        key = f'open("{path}").read().strip()' if path is not None else '"YOUR TOKEN"'
        embeds = self._config.runtimes[entry.id].task is Task.EMBEDDING
        call = (
            f'client.embeddings.create(model="{entry.capability}", input="What is a lease?").data[0].embedding[:4]'
            if embeds
            else f'client.chat.completions.create(model="{entry.capability}", '
            'messages=[{"role": "user", "content": "Hello"}]).choices[0].message.content'
        )
        return [
            "from openai import OpenAI",
            f'client = OpenAI(base_url="{self._base_url}/v1", api_key={key})',
            f"print({call})",
        ]


def _accelerators(world: World) -> Table:
    table = Table(box=None, pad_edge=False, title="Accelerators", title_justify="left")
    for column in ("id", "class", "device", "total", "used"):
        table.add_column(column, justify="right" if column in ("total", "used") else "left")
    for accelerator_id, state in sorted(world.accelerators.items()):
        if not state.retired:
            used = "unknown" if state.sample is None else size(state.sample.used_bytes)
            accelerator = state.accelerator
            device = Text(state.device_name)
            table.add_row(accelerator_id, accelerator.gpu_class, device, size(accelerator.total_bytes), used)
    return table


def _deployments(world: World) -> Table:
    table = Table(box=None, pad_edge=False, title="Deployments", title_justify="left")
    for column in ("id", "capability", "runtime", "idle", "peak", "load"):
        table.add_column(column, justify="right" if column in ("idle", "peak", "load") else "left")
    for deployment_id, deployment in sorted(world.deployments.items()):
        if deployment.retired:
            continue
        spec = deployment.spec
        envelope = next((m for m in deployment.measured if m.envelope.config_hash == spec.config_hash), None)
        figures = ("not measured", "", "")
        if envelope is not None:
            peak = size(envelope.envelope.peak_bytes)
            figures = (size(envelope.envelope.idle_bytes), peak, duration(envelope.load_ms))
        table.add_row(deployment_id, spec.capability, spec.runtime, *figures)
    return table


def _first(config: Config) -> DeploymentEntry | None:
    return next((entry for entry in config.document.deployments if entry.fallback_rank == 0), None)


def _token_file(config: Config) -> Path | None:
    """Where the first client's token lies, when the example put it there. As it would be typed here."""
    for client in config.document.clients:
        path = config.path.parent / f"{client.id}{TOKEN_SUFFIX}"
        if path.is_file():
            here = Path.cwd()
            return path.relative_to(here) if path.is_relative_to(here) else path
    return None


def _token(config: Config) -> str:
    path = _token_file(config)
    return "YOUR TOKEN" if path is None else f"$(cat '{path}')" if " " in str(path) else f"$(cat {path})"


def _path(entry: DeploymentEntry, config: Config) -> str:
    return "/v1/embeddings" if config.runtimes[entry.id].task is Task.EMBEDDING else "/v1/chat/completions"


def _body(entry: DeploymentEntry, config: Config) -> str:
    if config.runtimes[entry.id].task is Task.EMBEDDING:
        return f'{{"model": "{entry.capability}", "input": "What is a lease?"}}'
    return f'{{"model": "{entry.capability}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
