"""`gpuledger systemd-unit`: a hardened unit for a configuration, with the paths and times that follow from it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from string import Template
from typing import Annotated, Final

import typer

from .config import Config, load_config
from .ledger_target import TargetError, bad_input_ends, usual_config
from .server_options import ConfigOption

TEMPLATE: Final = "data/gpuledger.service"
DEFAULT_USER: Final = "gpuledger"
#: Where systemd makes the folders of services (StateDirectory=).
STATE_ROOT: Final = Path("/var/lib")
#: Ports below this one need a capability.
UNPRIVILEGED_PORT: Final = 1024
#: Beyond drain, graces and the memory's return: ledger, connections, and a machine that is slow just then.
SPARE_SECONDS: Final = 60

_USER: Final = re.compile(r"[a-z_][a-z0-9_-]{0,31}")

User = Annotated[str, typer.Option("--user", metavar="NAME", help="The user that it runs as.")]


def register(app: typer.Typer) -> None:
    """Add the command of this module to the command line."""
    app.command("systemd-unit")(systemd_unit)


def systemd_unit(user: User = DEFAULT_USER, config: ConfigOption = None) -> None:
    """Print a hardened systemd unit that serves a configuration. Its comments say how to install it.

    Exit status: 0 printed, 2 bad input.
    """
    with bad_input_ends():
        if _USER.fullmatch(user) is None:
            raise TargetError(f"--user {user}: is no name of a user")
        loaded = load_config(usual_config("no --config was named") if config is None else config)
        typer.echo(unit_of(loaded, user, _program()), nl=False)


def unit_of(config: Config, user: str, program: tuple[str, ...]) -> str:
    """The text of the unit. `program`: the words that `serve` follows. Raises TargetError."""
    policy = config.policy
    stop_seconds = (
        config.document.drain_seconds + 2 * policy.stop_grace_seconds + policy.reclaim_timeout_seconds + SPARE_SECONDS
    )
    folders = sorted({config.ledger.parent, config.state_dir})
    for path in (config.path, *folders):
        if not str(path).isprintable():
            raise TargetError(f"{str(path)!r}: a unit cannot name this path")
    template = Template((resources.files("gpuledger.tools") / TEMPLATE).read_text("utf-8"))
    return template.substitute(
        config=config.path,
        config_word=_argument(str(config.path)),
        command=" ".join(_argument(word) for word in program),
        user=user,
        folders=" ".join(str(folder) for folder in folders),
        home=_word(f"HOME={config.state_dir}"),
        private_tmp="no" if any(_is_temporary(path) for path in (config.path, *folders)) else "yes",
        state="\n".join(_state(folders)),
        drain_seconds=config.document.drain_seconds,
        stop_seconds=stop_seconds,
        capabilities="CAP_NET_BIND_SERVICE" if 0 < config.port < UNPRIVILEGED_PORT else "",
        network="\n".join(_network(config)),
    )


def _state(folders: list[Path]) -> Iterator[str]:
    """Folders below /var/lib are made by systemd; others have to be there."""
    for folder in folders:
        if folder != STATE_ROOT and folder.is_relative_to(STATE_ROOT):
            yield f"StateDirectory={_word(str(folder.relative_to(STATE_ROOT)))}"
            yield "StateDirectoryMode=0700"
        else:
            yield f"ReadWritePaths={_word(str(folder))}"


def _is_temporary(path: Path) -> bool:
    """Whether a service with a /tmp of its own would not see it."""
    return path.is_relative_to("/tmp") or path.is_relative_to("/var/tmp")  # noqa: S108 - nothing is put there


def _network(config: Config) -> Iterator[str]:
    if config.remote:
        yield "# Clients on other machines reach it (`listen`): no address is denied."
    else:
        yield "# Nothing leaves this machine. A runtime that fetches something needs these two lines gone."
        yield "IPAddressDeny=any"
        yield "IPAddressAllow=localhost"


def _program() -> tuple[str, ...]:
    """How this very gpuledger is started: by its script where there is one beside the interpreter."""
    script = Path(sys.executable).with_name("gpuledger")
    return (str(script),) if script.exists() else (sys.executable, "-m", "gpuledger.tools.cli")


def _argument(text: str) -> str:
    """A word of a command line (systemd.service(5)): dollars too mean something there."""
    return _word(text.replace("$", "$$"))


def _word(text: str) -> str:
    """A word of a unit (systemd.syntax(7)): quoted where it has blanks, its percent signs doubled."""
    plain = text.replace("%", "%%")
    if re.fullmatch(r"[A-Za-z0-9_@%+=:,./$~-]+", plain):
        return plain
    return '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'
