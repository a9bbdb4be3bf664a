"""What the configuration of a server has that is started by a command line of the operator's: vllm and command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, Self, TypeAlias, cast

from pydantic import Field, ValidationInfo, field_validator, model_validator

from gpuledger.domain.units import ID_PATTERN

from .metrics import MetricsMapping
from .options import Json, RuntimeOptions, resolve

#: Longer ones cannot be executed (MAX_ARG_STRLEN is 128 KiB), and a NUL would end them early.
ARGUMENT_PATTERN: Final = r"^[^\x00]*$"
Argument: TypeAlias = Annotated[str, Field(max_length=8_192, pattern=ARGUMENT_PATTERN)]
Arguments: TypeAlias = Annotated[tuple[Argument, ...], Field(max_length=256)]
CommandLine: TypeAlias = Annotated[tuple[Argument, ...], Field(min_length=1, max_length=256)]
VARIABLE_PATTERN: Final = r"^[A-Za-z_][A-Za-z0-9_]{0,199}$"
Variable: TypeAlias = Annotated[str, Field(pattern=VARIABLE_PATTERN)]

#: Variables that are ours: what a process may see, and whose it is.
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_OURS: Final = "GPULEDGER_"


class ServerOptions(RuntimeOptions):
    """Its environment is what is named here and nothing else; its metrics are read by names that are given here."""

    served_name: str = Field(
        default="model",
        pattern=ID_PATTERN,
        description="The name by which requests ask it for its model, which is the capability.",
    )
    folder: Path = Field(
        default=Path(),
        validate_default=True,
        description="The folder that it runs in: relative paths among its arguments are below it.",
    )
    environment: Annotated[tuple[Variable, ...], Field(max_length=64)] = Field(
        default=(), description="Names of variables that it inherits, besides the few that every runtime does."
    )
    set: Mapping[Variable, Argument] = Field(
        default={}, max_length=64, description="Variables with a value of their own."
    )
    metrics: MetricsMapping = Field(default=MetricsMapping(), description="How its metrics are called.")

    @field_validator("folder", mode="before")
    @classmethod
    def _resolve_folder(cls, folder: object, info: ValidationInfo) -> object:
        """The default too is relative to the folder of the file."""
        return resolve(str(folder) if isinstance(folder, Path) else folder, info)

    @model_validator(mode="after")
    def _leaves_our_variables(self) -> Self:
        for key, names in (("environment", self.environment), ("set", tuple(self.set))):
            for name in names:
                if is_ours(name) or name in self.reserved_variables:
                    raise ValueError(f"{key}: {name} is set by gpuledger")
        return self

    @property
    def reserved_variables(self) -> tuple[str, ...]:
        """More variables that are not the operator's."""
        return ()

    def variables(self, source: Mapping[str, str]) -> dict[str, str]:
        """What it gets of the operator's: of `source` what is inherited, and what is set."""
        inherited = {name: source[name] for name in self.environment if name in source}
        return {**inherited, **self.set}

    def own_shape(self) -> dict[str, Json]:
        """What of these options shapes memory. Of what is inherited the names alone: a value may be a secret."""
        return {
            "task": self.task.value,
            "context_length": self.context_length,
            "batch_size": self.batch_size,
            "parallel": self.parallel,
            "max_inputs": self.max_inputs,
            "max_images": self.max_images,
            "max_audio_bytes": self.max_audio_bytes,
            "environment": sorted(self.environment),
            "set": dict(self.set),
        }


def is_ours(variable: str) -> bool:
    """Whether every runtime gets it from us, whatever its configuration says."""
    return variable == _VISIBLE or variable.startswith(_OURS)


def resolve_program(command: object, info: ValidationInfo) -> object:
    """A command line whose program is named by a relative path: a `before` validator."""
    if not isinstance(command, list | tuple):
        return command
    words = list(cast("Sequence[object]", command))
    if words and isinstance(words[0], str) and "/" in words[0]:
        words[0] = resolve(words[0], info)
    return words
