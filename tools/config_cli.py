"""`gpuledger config`: look at a configuration before a server is started with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Final

import orjson
import typer
from rich.console import RenderableType
from rich.text import Text

from gpuledger.domain.document_problems import DocumentError

from .config import Config, load_config
from .ledger_target import BAD_INPUT, TargetError, bad_input_ends, usual_config, wall_now
from .plan_report import console, printable

CHECK_SCHEMA: Final = "gpuledger.config-check/1"
#: Nobody who looks for such a key below shall think that it did not change.
_NOT_RECORDED: Final = (
    "Not shown: accelerators and the other keys that are no entry of the ledger. They take effect at the start."
)

FileArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="[FILE]",
        help="The configuration; without it ./gpuledger.yaml, then var/gpuledger.yaml.",
        show_default=False,
    ),
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="The same as FILE.", show_default=False)
]
NoFiles = Annotated[
    bool, typer.Option("--no-files", help="Look at the text alone, not at the models and programs that it names.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

config_app = typer.Typer(help="Look at a configuration before a server is started with it.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the command line."""
    app.add_typer(config_app, name="config")


@config_app.command("check")
def check(
    file: FileArgument = None, config: ConfigOption = None, no_files: NoFiles = False, as_json: AsJson = False
) -> None:
    """Say everything that is wrong with a configuration, its models and programs included: models are hashed.

    Exit status: 0 a server can be started with it, 2 it cannot.
    """
    with bad_input_ends():
        path = _named(file, config)
        try:
            loaded = load_config(path)
            if not no_files:
                _look_at_files(loaded)
        except DocumentError as error:
            if not as_json:
                raise
            problems = [{"where": problem.where, "message": problem.message} for problem in error.told()]
            _print_json({"schema": CHECK_SCHEMA, "ok": False, "file": str(path), "problems": problems})
            raise typer.Exit(BAD_INPUT) from None
        document = _check_document(loaded, files=not no_files)
        _show(document, as_json, _check_report(document))


@config_app.command("diff")
def diff(file: FileArgument = None, config: ConfigOption = None, as_json: AsJson = False) -> None:
    """Show what a start with this configuration would record of it. Nothing is recorded; models are hashed.

    Exit status: 0 shown, 2 bad input, also of a model or program that is not there.
    """
    with bad_input_ends():
        document = _difference(load_config(_named(file, config)))
        _show(document, as_json, diff_report(document))


def _named(file: Path | None, config: Path | None) -> Path:
    """Raises TargetError, LedgerUnavailable."""
    if file is not None and config is not None:
        raise TargetError("FILE and --config are two words for the same: give one of them")
    named = file or config
    return usual_config("no FILE was named") if named is None else named


def _look_at_files(config: Config) -> None:
    """What a start looks at. Raises DocumentError."""
    # Here, so that a check of the text alone need not wait for what runs models.
    from gpuledger.adapters.runtimes.manager import RuntimeManager

    from .bootstrap import facts_of

    facts_of(config, RuntimeManager(config.runtimes, config.state_dir))


def _difference(config: Config) -> dict[str, Any]:
    """Raises DocumentError, LedgerUnavailable, LedgerCorrupt."""
    # Here, so that a check need not wait for what runs models.
    from gpuledger.adapters.ledger.sqlite import SqliteLedger
    from gpuledger.adapters.runtimes.manager import RuntimeManager
    from gpuledger.domain.world import World

    from .bootstrap import accelerator_ids_of, declared_by
    from .config_diff import diff_document
    from .snapshots import load_world

    world = World()
    if config.ledger.exists():
        with closing(SqliteLedger(config.ledger, read_only=True)) as ledger:
            world = load_world(ledger, ledger.load_snapshot())
    runtimes = RuntimeManager(config.runtimes, config.state_dir)
    configuration = declared_by(config, runtimes, accelerator_ids_of(config))
    found = diff_document(world, configuration, max(wall_now(), world.at))
    return {"ledger": str(config.ledger), "file": str(config.path), **found}


def _check_document(config: Config, *, files: bool) -> dict[str, Any]:
    document = config.document
    return {
        "schema": CHECK_SCHEMA,
        "ok": True,
        "file": str(config.path),
        "files": files,
        "listen": document.listen,
        "ledger": str(config.ledger),
        "state_dir": str(config.state_dir),
        "policy_revision": config.policy.revision,
        "clients": [client.id for client in document.clients],
        "deployments": [deployment.id for deployment in document.deployments],
        "capabilities": sorted({deployment.capability for deployment in document.deployments}),
    }


# ---- for people -------------------------------------------------------------------------------------------------


def _show(document: dict[str, Any], as_json: bool, report: RenderableType) -> None:
    if as_json:
        _print_json(document)
    else:
        console().print(report, soft_wrap=True)


def _print_json(document: dict[str, Any]) -> None:
    sys.stdout.buffer.write(orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    sys.stdout.buffer.flush()


def _check_report(document: Mapping[str, Any]) -> RenderableType:
    names = ("clients", "deployments", "capabilities")
    return _text(
        [
            f"{document['file']} can be used" + ("" if document["files"] else " (models and programs: not looked at)"),
            *(f"  {name}: {', '.join(document[name]) or 'none'}" for name in names),
            f"  policy: {document['policy_revision']}",
            f"  listen: {document['listen']}",
            f"  ledger: {document['ledger']}",
        ]
    )


def diff_report(document: Mapping[str, Any]) -> RenderableType:
    # The hashes of the file are recorded whenever anything in it changes.
    events = [event for event in document["events"] if event["type"] != "ConfigurationApplied"]
    lines = [f"A start would record in {document['ledger']}:" if events else "A start would record nothing of it."]
    for event in events:
        lines.append(f"  {event['type']} in {event['stream']}")
        lines += [f"    {_change(event, one)}" for one in event["changes"]]
    if document["kept"]:
        lines.append("Kept, since an operator changed it and the file did not change since:")
    for kept in document["kept"]:
        lines.append(f"  {kept['what']}")
        lines += [
            f"    {one['key']}: {_json(one['to'])}, where the file says {_json(one['from'])}" for one in kept["changes"]
        ]
    return _text([*lines, _NOT_RECORDED])


def _change(event: Mapping[str, Any], change: Mapping[str, Any]) -> str:
    """A change of the hash is one of its runtime, which is told by what follows from it."""
    if change["key"] != "config_hash":
        return f"{change['key']}: {_json(change['from'])} to {_json(change['to'])}"
    told = "its runtime, model or version changed (config_hash)"
    follows = "what it takes was measured so before" if event["measured"] else "it has to be measured again"
    return f"{told}: {follows}"


def _text(lines: list[str]) -> Text:
    return Text("\n".join(printable(line) for line in lines))


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
