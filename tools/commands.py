"""Which module has which command of `gpuledger`, so that a start imports what it runs and nothing else.

A command line that answers needs none of the libraries of the server: they take most of a second to be imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import Any, Final

import typer
from typer.core import TyperGroup

#: Command -> the module beside this one whose `register` adds it, in the order in which the help shows them.
FAMILIES: Final[Mapping[str, str]] = {
    "plan": "plan_cli",
    "pressure": "plan_cli",
    "schema": "plan_cli",
    "ledger": "ledger_cli",
    "replay": "replay_cli",
    "status": "inspect_cli",
    "alerts": "trouble_cli",
    "queue": "trouble_cli",
    "leases": "inspect_cli",
    "plans": "inspect_cli",
    "explain": "inspect_cli",
    "failures": "trouble_cli",
    "serve": "serve_cli",
    "profile": "profile_cli",
    "bench": "bench_cli",
    "doctor": "doctor_cli",
    "init": "init_cli",
    "systemd-unit": "systemd_cli",
    "policy": "operator_cli",
    "lab": "operator_cli",
    "residency": "operator_cli",
    "nodes": "operator_cli",
    "unload": "operator_cli",
    "accelerator": "operator_cli",
    "envelope": "operator_cli",
    "tokens": "tokens_cli",
    "config": "config_cli",
}


class LazyGroup(TyperGroup):
    """A group whose commands are imported when they are asked for by name."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Commands()

    def list_commands(self, ctx: object) -> list[str]:
        """Their names, without importing any."""
        del ctx
        return list(self.commands)


class _Commands(MutableMapping[str, Any]):
    """Commands by name. A family is imported whole, at the first question for one of its commands."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._found:
            self._found.update(_commands_of(FAMILIES[name]))
        return self._found[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._found[name] = command

    def __delitem__(self, name: str) -> None:
        del self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(FAMILIES)

    def __len__(self) -> int:
        return len(FAMILIES)


def _commands_of(module: str) -> Mapping[str, Any]:
    family = typer.Typer()
    # Without a callback typer takes a single command for the whole program.
    family.callback()(_nothing)
    import_module(f".{module}", __package__).register(family)
    return typer.main.get_group(family).commands


def _nothing() -> None:
    """A family has no options of its own."""
