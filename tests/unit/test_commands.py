"""The command line as a whole: which commands there are, what a start imports, and completion in real shells."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from gpuledger.tools.cli import app
from gpuledger.tools.commands import FAMILIES

CLI = (sys.executable, "-m", "gpuledger.tools.cli")
#: Libraries that only a server needs.
HEAVY = ("fastapi", "uvicorn", "httpx", "prometheus_client", "eventsourcing", "jsonschema")


@pytest.fixture
def program(tmp_path: Path) -> str:
    """A folder with `gpuledger` in it, as a PATH."""
    script = tmp_path / "bin" / "gpuledger"
    script.parent.mkdir()
    script.write_text(f"#!/bin/sh\nexec '{sys.executable}' -m gpuledger.tools.cli \"$@\"\n", "utf-8")
    script.chmod(0o755)
    return f"{script.parent}:{os.environ['PATH']}"


def in_bash(path: str, *lines: str) -> list[str]:
    """What a bash without start-up files prints, line by line."""
    done = subprocess.run(
        ("bash", "--norc", "--noprofile", "-c", "\n".join(lines)),
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize("module", sorted(set(FAMILIES.values())))
def test_the_table_says_what_each_module_registers(module: str) -> None:
    family = typer.Typer()
    import_module(f"gpuledger.tools.{module}").register(family)
    registered = {command.name for command in family.registered_commands}
    registered |= {group.name for group in family.registered_groups}
    assert registered == {name for name, where in FAMILIES.items() if where == module}


def test_every_module_with_commands_is_in_the_table() -> None:
    tools = Path(str(import_module("gpuledger.tools.cli").__file__)).parent
    found = {path.stem for path in tools.glob("*.py") if "\ndef register(app: typer.Typer)" in path.read_text("utf-8")}
    assert found == set(FAMILIES.values())


@pytest.mark.parametrize("arguments", [("--version",), ("--show-completion", "bash"), ("plan", "--help")])
def test_a_start_imports_no_server(arguments: tuple[str, ...]) -> None:
    code = (
        "import sys\nfrom gpuledger.tools import cli\n"
        "try:\n    cli.main()\nexcept SystemExit as ended:\n    assert not ended.code\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run((sys.executable, "-c", code, *arguments), capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_a_misspelled_command_is_told_the_right_one() -> None:
    answer = CliRunner().invoke(app, ["stauts"])
    assert answer.exit_code == 2
    assert "status" in answer.stderr


class TestCompletion:
    @pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
    def test_the_script_of_a_shell_is_printed(self, shell: str) -> None:
        answer = CliRunner().invoke(app, ["--show-completion", shell], prog_name="gpuledger")
        assert answer.exit_code == 0
        assert "_GPULEDGER_COMPLETE=complete_" + shell in answer.stdout

    def test_another_shell_is_refused(self) -> None:
        answer = CliRunner().invoke(app, ["--show-completion", "tcsh"])
        assert answer.exit_code == 2
        assert "tcsh" in answer.stderr

    @pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
    @pytest.mark.parametrize(
        ("words", "completed"),
        [
            ("gpuledger sta", ["status"]),
            ("gpuledger pla", ["plan", "plans"]),
            ("gpuledger ledger ex", ["export"]),
            ("gpuledger status --js", ["--json"]),
            ("gpuledger --show-completion z", ["zsh"]),
        ],
    )
    def test_bash_completes(self, program: str, words: str, completed: list[str]) -> None:
        """Bash's own variables, and the function that it is told to call by `complete -F`."""
        found = in_bash(
            program,
            'eval "$(gpuledger --show-completion bash)"',
            "function=$(complete -p gpuledger | sed 's/.*-F \\([^ ]*\\).*/\\1/')",
            f"COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))",
            '"$function" gpuledger',
            'printf "%s\\n" "${COMPREPLY[@]}"',
        )
        assert sorted(found) == completed
