"""Any server: a command line of the local configuration, with what a start decides put in its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import RuntimeFacts, RuntimeFigures
from gpuledger.domain.state import Kind

from .artifacts import Artifacts
from .command_config import MODEL, NAME, PORT, CommandConfig
from .engine import Json, config_hash
from .process import Command
from .programs import Versions, found

NO_VERSION: Final = "no_version"
_MAX_VERSION_CHARACTERS: Final = 200


class CommandServer:
    """`environment`: what it will inherit. `source`: where more is taken from, by the names in its configuration."""

    def __init__(
        self, config: CommandConfig, artifacts: Artifacts, environment: Mapping[str, str], source: Mapping[str, str]
    ) -> None:
        self._config = config
        self._artifacts = artifacts
        self._variables = config.variables(source)
        self._environment = {**environment, **self._variables}
        self._versions = Versions()

    @property
    def kinds(self) -> frozenset[Kind]:
        """What it runs on its operator knows; it sees no card unless its deployment is of that kind."""
        return frozenset(Kind)

    @property
    def blames_request(self) -> tuple[str, ...]:
        return ()

    def facts(self) -> RuntimeFacts:
        config = self._config
        artifact = None if config.model is None else self._artifacts.inspect_pinned(config.model, config.sha256)
        files = [self._artifacts.inspect(path) for path in config.files]
        version = self._version()
        shape: dict[str, Json] = {
            **config.own_shape(),
            "type": config.type,
            "version": version,
            # Where its program and its model lie shapes nothing.
            "arguments": config.command[1:],
            "artifact_sha256": None if artifact is None else artifact.sha256,
            "files": [file.sha256 for file in files],
        }
        size_bytes = sum(part.size_bytes for part in files) + (0 if artifact is None else artifact.size_bytes)
        sha256 = None if artifact is None else artifact.sha256
        return RuntimeFacts("command", version, config_hash(shape), sha256, size_bytes, config.starts_alone)

    def command(self, port: int, api_key: str) -> Command:
        first, *others = self._config.command
        argv = (found(first, self._environment), *(self._filled(text, port) for text in others))
        variables = {name: self._filled(text, port) for name, text in self._variables.items()}
        if self._config.api_key_variable is not None:
            variables[self._config.api_key_variable] = api_key
        return Command(argv, variables, folder=self._config.folder)

    def figures(self, metrics: str) -> RuntimeFigures:
        return self._config.metrics.figures(metrics)

    def complaint(self, output: bytes) -> tuple[Failure, str] | None:
        """Of memory servers complain alike; of the rest only what every server says of its port is known here."""
        return (Failure.MODEL_LOAD_FAILED, "port_in_use") if b"ddress already in use" in output else None

    def _filled(self, text: str, port: int) -> str:
        """Only these three stand for something: other braces, as of JSON, are the server's."""
        model = "" if self._config.model is None else str(self._config.model.absolute())
        return text.replace(PORT, str(port)).replace(MODEL, model).replace(NAME, self._config.served_name)

    def _version(self) -> str:
        if self._config.version_command is None:
            assert self._config.version is not None
            return self._config.version
        first, *others = self._config.version_command
        asked = (found(first, self._environment), *others)
        return self._versions.ask(asked, self._environment, _read_version, NO_VERSION, self._config.folder)


def _read_version(output: bytes, _: bytes) -> str | None:
    """The last line that says anything."""
    lines = [line.strip() for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    version = "".join(character if " " <= character <= "~" else "?" for character in lines[-1]) if lines else ""
    return version[:_MAX_VERSION_CHARACTERS] or None
