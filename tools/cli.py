"""`gpuledger`: the one command. Each family of subcommands registers itself; nothing else is in here.

Exit status: 0 the command did what was asked, 2 the input cannot be used. Bad input never shows a traceback.
"""

from __future__ import annotations

import io
import sys

import typer

from gpuledger.domain.document_problems import DocumentError

from . import bench_cli, inspect_cli, ledger_cli, plan_cli, profile_cli, replay_cli, serve_cli

app = typer.Typer(
    help="A scheduler for the memory of GPUs, with a ledger that proves its decisions.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

plan_cli.register(app)
ledger_cli.register(app)
replay_cli.register(app)
inspect_cli.register(app)
serve_cli.register(app)
profile_cli.register(app)
bench_cli.register(app)

BAD_INPUT = 2


def main() -> None:
    """Run the command line and exit with its status."""
    for stream in (sys.stdout, sys.stderr):
        # What a terminal cannot show is escaped: never a reason to fail.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="gpuledger")
    except DocumentError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(BAD_INPUT)


if __name__ == "__main__":
    main()
