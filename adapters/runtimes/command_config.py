"""The configuration of any server: a command line, and how its program is spoken to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeAlias, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from gpuledger.domain.units import Sha256Hex

from .options import Call, Manners, SleepCalls, UrlPath, resolve
from .server_config import CommandLine, ServerOptions, Variable, is_ours, resolve_program

PORT: Final = "{port}"
MODEL: Final = "{model}"
NAME: Final = "{name}"
_KEY: Final = "{api_key}"
#: Variables that the loader and the system's libraries read: a key there breaks the program, and is shown by some.
_OF_THE_SYSTEM: Final = frozenset({"PATH", "HOME", "LANG", "TZ", "TMPDIR", "IFS", "SHELL"})
_OF_THE_LOADER: Final = ("LD_", "LC_", "GLIBC_", "MALLOC_", "CUDA_")

Operation: TypeAlias = Literal["embeddings", "chat", "completion", "transcription", "rerank"]


class SleepPaths(BaseModel):
    """Where a server is told to give its memory back, and to take it again: by POST, with an empty JSON object."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sleep_path: UrlPath
    wake_path: UrlPath
    state_path: UrlPath | None = Field(
        default=None,
        description='Where it says whether it sleeps: {"is_sleeping": true}. Absent, its answers to the others count.',
    )


class CommandConfig(ServerOptions):
    """Any server that listens at a port of the loopback and answers in the way of OpenAI's API.

    In `command` and in the values of `set`, {port} is the port it has to take, {model} the path of `model`, {name}
    its `served_name`.
    """

    type: Literal["command"]
    command: CommandLine = Field(description="What is run: a program and its arguments. No shell is involved.")
    model: Path | None = Field(default=None, description="The file or folder that {model} stands for; it is hashed.")
    sha256: Sha256Hex | None = Field(default=None, description="What the model's SHA-256 must be; any when absent.")
    files: Annotated[tuple[Path, ...], Field(max_length=64)] = Field(
        default=(), description="More files and folders that shape what it holds or answers; they are hashed."
    )
    version: str | None = Field(
        default=None, min_length=1, max_length=200, pattern=r"^[\x20-\x7e]+$", description="What its version is."
    )
    version_command: CommandLine | None = Field(
        default=None, description="A command whose last line of output is its version, in place of `version`."
    )
    api_key_variable: Variable | None = Field(
        default=None, description="The variable in which it looks for the key that it has to ask for."
    )
    ready_path: UrlPath = Field(default="/health", description="What answers 200 as soon as it serves.")
    paths: Mapping[Operation, UrlPath] = Field(
        default={}, description="Where it answers an operation, if not where OpenAI's API does."
    )
    check_path: UrlPath | None = Field(
        default=None, description="Where the functional check asks; where the task is answered when absent."
    )
    check_fields: Mapping[str, Any] = Field(
        default={}, description="Added to the document of the functional check, in place of its own of the same name."
    )
    sleep: SleepPaths | None = Field(default=None, description="How it gives its memory back and keeps its process.")
    starts_alone: bool = Field(
        default=False, description="Whether nothing else may start or stop on its accelerator while it starts."
    )

    _paths = field_validator("model", mode="before")(resolve)
    _programs = field_validator("command", "version_command", mode="before")(resolve_program)

    @field_validator("files", mode="before")
    @classmethod
    def _resolve_files(cls, paths: object, info: ValidationInfo) -> object:
        if not isinstance(paths, list | tuple):
            return paths
        return [resolve(path, info) for path in cast("Sequence[object]", paths)]

    @property
    def manners(self) -> Manners:
        calls = None
        if self.sleep is not None:
            calls = SleepCalls(
                (Call(self.sleep.sleep_path, {}),), (Call(self.sleep.wake_path, {}),), self.sleep.state_path
            )
        return Manners(
            ready_path=self.ready_path,
            metrics_path=self.metrics.path,
            paths=dict[str, str](self.paths.items()),
            check_path=self.check_path or self.paths.get(_ASKED[self.task.value]),
            # OpenAI's API wants the name, and it is how clients ask.
            check_fields={"model": self.served_name, **self.check_fields},
            sleep=calls,
        )

    @property
    def reserved_variables(self) -> tuple[str, ...]:
        return () if self.api_key_variable is None else (self.api_key_variable,)

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if (self.version is None) == (self.version_command is None):
            raise ValueError("version: give either version or version_command")
        if not any(PORT in text for text in self.templates()):
            raise ValueError("command: must say {port} somewhere, or a value of set must")
        if (name := self.api_key_variable) is not None and _has_another_use(name):
            raise ValueError(f"api_key_variable: {name} is there for something else")
        if any(_KEY in text for text in self.templates()):
            raise ValueError("command: the key is never an argument; api_key_variable names the variable that has it")
        if self.model is None and any(MODEL in text for text in self.templates()):
            raise ValueError("model: is what {model} stands for, and is missing")
        if self.sha256 is not None and self.model is None:
            raise ValueError("sha256: is that of model, which is missing")
        return self

    def templates(self) -> Iterator[str]:
        """Every text in which something stands for something else."""
        yield from self.command
        yield from self.set.values()


#: Where the reference server looks for its key.
REFERENCE_KEY: Final = "GPULEDGER_API_KEY"


def _has_another_use(variable: str) -> bool:
    if variable == REFERENCE_KEY:
        return False  # the reference server, run by its command line, knows it by that name
    return is_ours(variable) or variable in _OF_THE_SYSTEM or variable.startswith(_OF_THE_LOADER)


#: What the functional check of a task asks for.
_ASKED: Final[Mapping[str, Operation]] = {
    "embedding": "embeddings",
    "chat": "chat",
    "transcription": "transcription",
    "rerank": "rerank",
}
