"""What operators tell a running server: `policy`, `lab`, `residency`, `nodes`, `unload`, `accelerator`, `envelope`.

Each is one call of the operator API, and each change an event in the ledger with the operator's name. Exit status: 0 it
was done, or stood so already; 1 the server says no or cannot be reached; 2 the input cannot be used.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import orjson
import typer
from rich.console import Group, RenderableType
from rich.text import Text

from gpuledger.domain.document_problems import DocumentError
from gpuledger.domain.documents import Json
from gpuledger.domain.state import ResidencyPolicy

from .config import with_sizes
from .ledger_target import TargetError, bad_input_ends, end
from .operator_client import (
    Document,
    OperatorClient,
    ServerRefusesInput,
    ServerSaysNo,
    path_of,
    reach,
)
from .plan_report import console, printable, table_of
from .reading import read_document
from .server_options import ConfigOption, ServerOption, TokenFileOption

SAYS_NO: Final = 1
_POLL_SECONDS: Final = 1.0

AsJson = Annotated[bool, typer.Option("--json", help="Print the server's answer as one JSON document.")]
DeploymentId = Annotated[str, typer.Argument(metavar="DEPLOYMENT", help="The id of a deployment.")]
NodeId = Annotated[str, typer.Argument(metavar="NODE", help="The id of a node.")]
Report: TypeAlias = Callable[[Document], RenderableType]

policy_app = typer.Typer(help="The policy of the running server.", no_args_is_help=True)
lab_app = typer.Typer(help="Whether LAB requests are admitted.", no_args_is_help=True)
residency_app = typer.Typer(help="How long a model stays when nothing uses it.", no_args_is_help=True)
nodes_app = typer.Typer(help="Nodes, and whether they take work.", no_args_is_help=True)
accelerator_app = typer.Typer(help="What an operator says of an accelerator.", no_args_is_help=True)
envelope_app = typer.Typer(help="What an operator says of a measurement.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the command line."""
    app.add_typer(policy_app, name="policy")
    app.add_typer(lab_app, name="lab")
    app.add_typer(residency_app, name="residency")
    app.add_typer(nodes_app, name="nodes")
    app.command("unload")(unload)
    app.add_typer(accelerator_app, name="accelerator")
    app.add_typer(envelope_app, name="envelope")


@contextmanager
def operating(server: str | None, token_file: Path | None, config: Path | None) -> Generator[OperatorClient]:
    """The server that is meant, for as long as the block runs; what goes wrong ends the command in a line."""
    with bad_input_ends():
        try:
            with reach(server, token_file, config) as client:
                yield client
        except ServerRefusesInput as error:
            end(str(error))
        except ServerSaysNo as error:
            end(str(error), SAYS_NO)


# ---- policy -----------------------------------------------------------------------------------------------------


@policy_app.command("show")
def policy_show(
    as_json: AsJson = False,
    server: ServerOption = None,
    token_file: TokenFileOption = None,
    config: ConfigOption = None,
) -> None:
    """Show the policy that decides now, as a file that `policy revise` takes.

    Exit status: 0 shown, 1 the server says no or cannot be reached, 2 bad input.
    """
    with operating(server, token_file, config) as client:
        show(client.get("/policy"), as_json, _policy_report)


@policy_app.command("revise")
def policy_revise(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Keys that change: YAML or JSON, - for standard input.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change, and change nothing.")] = False,
    if_revision: Annotated[
        str | None,
        typer.Option(metavar="REVISION", help="Only when the policy is still called so.", show_default=False),
    ] = None,
    as_json: AsJson = False,
    server: ServerOption = None,
    token_file: TokenFileOption = None,
    config: ConfigOption = None,
) -> None:
    """Change the policy of the running server. It stands until the `policy` in the configuration changes.

    Exit status: 0 changed or nothing to change, 1 the server says no or cannot be reached, 2 bad input.
    """
    with operating(server, token_file, config) as client:
        body: dict[str, Any] = {"policy": policy_keys(read_document(file, "policy"))}
        if if_revision is not None:
            body["if_revision"] = if_revision
        show(client.post("/policy", body, dry_run=str(dry_run).lower()), as_json, _revision_report)


def policy_keys(value: Json) -> Json:
    """The keys of a file: bare, or under `policy` as in a configuration and in what `policy show --json` prints."""
    found = value.get("policy", value) if isinstance(value, dict) else value
    if not isinstance(found, dict):
        raise DocumentError.of("policy", "must be an object with keys of a policy")
    return with_sizes(found)


# ---- lab, residency ---------------------------------------------------------------------------------------------


@lab_app.command("pause")
def lab_pause(
    as_json: AsJson = False,
    server: ServerOption = None,
    token_file: TokenFileOption = None,
    config: ConfigOption = None,
) -> None:
    """Admit no LAB request any more; what runs may end.

    Exit status: 0 paused, 1 the server says no or cannot be reached, 2 bad input.
    """
    with operating(server, token_file, config) as client:
        show(client.post("/lab/pause"), as_json, recorded_report)


@lab_app.command("resume")
def lab_resume(
    as_json: AsJson = False,
    server: ServerOption = None,
    token_file: TokenFileOption = None,
    config: ConfigOption = None,
) -> None:
    """Admit LAB requests again.

    Exit status: 0 resumed, 1 the server says no or cannot be reached, 2 bad input.
    """
    with operating(server, token_file, config) as client:
        show(client.post("/lab/resume"), as_json, recorded_report)


@residency_app.command("set")
def residency_set(
    deployment: DeploymentId,
    policy: Annotated[ResidencyPolicy, typer.Argument(metavar="POLICY", help=", ".join(ResidencyPolicy))],
    ttl: Annotated[
        int | None,
        typer.Option("--ttl", metavar="SECONDS", min=0, max=10**9, help="Its keep-warm time; without it as it is."),
    ] = None,
    as_json: AsJson = False,
    server: ServerOption = None,
    token_file: TokenFileOption = None,
    config: ConfigOption = None,
) -> None:
    """Change how long a model stays. It stands until the `residency` in the configuration changes.

    Exit status: 0 set, 1 the server says no or cannot be reached, 2 bad input.
    """
    with operating(server, token_file, config) as client:
        body: dict[str, Any] = {"policy": policy.value}
        if ttl is not None:
            body["ttl_seconds"] = ttl
        show(client.put(path_of("deployments", deployment, "residency"), body), as_json, recorded_report)


# ---- nodes ------------------------------------------------------------------------------------------------------


@nodes_app.command("list")
def nodes_list(
    as_json: AsJson = False,
    server: ServerOption = None,
    token_file: TokenFileOption = None,
    config: ConfigOption = None,
) -> None:
    """Show nodes, what is on them, and what operators said of them.

    Exit status: 0 shown, 1 the server says no or cannot be reached, 2 bad input.
    """
    with operating(server, token_file, config) as client:
        show(client.get("/nodes"), as_json, _nodes_report)


@nodes_app.command("cordon")
def nodes_cordon(
    node: NodeId,
    as_json: AsJson = False,
    server: ServerOption = None,
    token_file: TokenFileOption = None,
    config: ConfigOption = None,
) -> None:
    """Load nothing on a node any more; what is loaded there stays and is served.

    Exit status: 0 cordoned, 1 the server says no or cannot be reached, 2 bad input.
    """
    with operating(server, token_file, config) as client:
        show(client.post(path_of("nodes", node, "cordon")), as_json, recorded_report)


@nodes_app.command("uncordon")
def nodes_uncordon(
    node: NodeId,
    as_json: AsJson = False,
    server: ServerOption = None,
    token_file: TokenFileOption = None,
    config: ConfigOption = None,
) -> None:
    """Let a node take work again, after a cordon or a drain.

    Exit status: 0 it takes work, 1 the server says no or cannot be reached, 2 bad input.
    """
    with operating(server, token_file, config) as client:
        show(client.post(path_of("nodes", node, "uncordon")), as_json, recorded_report)


@nodes_app.command("drain")
def nodes_drain(
    node: NodeId,
    wait: Annotated[bool, typer.Option("--wait", help="Until nothing is loaded on it, and no lease is left.")] = False,
    timeout: Annotated[
        int, typer.Option("--timeout", metavar="SECONDS", min=1, max=86_400, help="With --wait: at most so long.")
    ] = 600,
    as_json: AsJson = False,
    server: ServerOption = None,
    token_file: TokenFileOption = None,
    config: ConfigOption = None,
) -> None:
    """Give a node no new work, and unload what is idle there; what runs may end.

    Exit status: 0 it drains, and with --wait is drained; 1 the server says no, cannot be reached, or the time is over;
    2 bad input.
    """
    with operating(server, token_file, config) as client:
        answer = client.post(path_of("nodes", node, "drain"))
        if wait:
            answer = {**answer, "node": _drained(client, node, timeout)}
        show(answer, as_json, _drain_report)


def _drained(client: OperatorClient, node_id: str, timeout_seconds: int) -> Document:
    """The node, when nothing is left on it. Raises ServerSaysNo."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        nodes: list[Document] = client.get("/nodes")["nodes"]
        found = next((one for one in nodes if one["node_id"] == node_id), None)
        if found is None or not found["draining"]:
            raise ServerSaysNo(f"{node_id} does not drain any more: somebody uncordoned it")
        if found["drained"]:
            return found
        left = deadline - time.monotonic()
        if left <= 0:
            there = f"{found['residents']} models and {found['leases']} leases are still there"
            raise ServerSaysNo(f"{node_id} was not drained within {timeout_seconds} seconds: {there}")
        time.sleep(min(_POLL_SECONDS, left))


# ---- unload, accelerator, envelope ------------------------------------------------------------------------------


def unload(
    deployment: Annotated[
        str | None, typer.Argument(metavar="[DEPLOYMENT]", help="Only of this deployment.", show_default=False)
    ] = None,
    idle: Annotated[bool, typer.Option("--idle", help="Unload what nothing uses; without it nothing is done.")] = False,
    as_json: AsJson = False,
    server: ServerOption = None,
    token_file: TokenFileOption = None,
    config: ConfigOption = None,
) -> None:
    """Unload models that nothing uses now. What runs is never interrupted.

    Exit status: 0 asked for, or nothing was idle; 1 the server says no or cannot be reached, 2 bad input.
    """
    with operating(server, token_file, config) as client:
        if not idle:
            raise TargetError("say --idle: only what nothing uses can be unloaded")
        body = {} if deployment is None else {"deployment": deployment}
        show(client.post("/unload", body), as_json, _unload_report)


@accelerator_app.command("clear")
def accelerator_clear(
    accelerator: Annotated[str, typer.Argument(metavar="ID", help="The id of an accelerator, as `status` shows it.")],
    as_json: AsJson = False,
    server: ServerOption = None,
    token_file: TokenFileOption = None,
    config: ConfigOption = None,
) -> None:
    """Say that the fault of an accelerator was looked at: work may go there again, until it shows another one.

    Exit status: 0 cleared, 1 the server says no or cannot be reached, 2 bad input.
    """
    with operating(server, token_file, config) as client:
        show(client.post(path_of("accelerators", accelerator, "clear")), as_json, recorded_report)


@envelope_app.command("accept")
def envelope_accept(
    deployment: DeploymentId,
    as_json: AsJson = False,
    server: ServerOption = None,
    token_file: TokenFileOption = None,
    config: ConfigOption = None,
) -> None:
    """Answer for an envelope that is suspect: the deployment may be loaded by it again.

    Exit status: 0 accepted, 1 the server says no or cannot be reached, 2 bad input.
    """
    with operating(server, token_file, config) as client:
        show(client.post(path_of("deployments", deployment, "envelope/accept")), as_json, recorded_report)


# ---- for people -------------------------------------------------------------------------------------------------


def show(document: Document, as_json: bool, report: Report) -> None:
    """An answer, as JSON or for people."""
    if as_json:
        options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
        sys.stdout.buffer.write(orjson.dumps(document, option=options))
        sys.stdout.buffer.flush()
    else:
        console().print(report(document))


def recorded_report(document: Document) -> RenderableType:
    """One line for each event."""
    if not document["recorded"]:
        return Text("nothing to change: it stands so already")
    return Group(*(_event_line(event) for event in document["recorded"]))


def _event_line(event: Document) -> Text:
    return Text(printable(f"#{event['seq']} {event['type']} in {event['stream']}"))


def _drain_report(document: Document) -> RenderableType:
    done = [Text(printable(f"{document['node']['node_id']} is drained"))] if "node" in document else []
    return Group(recorded_report(document), *done)


def _unload_report(document: Document) -> RenderableType:
    if not document["recorded"]:
        return Text("nothing is idle")
    return Group(
        *(
            Text(printable(f"#{event['seq']} {event['data']['deployment_id']} is being unloaded ({event['stream']})"))
            for event in document["recorded"]
            if event["type"] == "EvictionStarted"
        )
    )


def _policy_report(document: Document) -> RenderableType:
    """In YAML: what JSON says of a value, YAML says so too."""
    keys = [f"{key}: {json.dumps(value)}" for key, value in document["policy"].items() if key != "revision"]
    return Text("\n".join([f"# revision {document['revision']}", *keys]))


def _revision_report(document: Document) -> RenderableType:
    revision: Mapping[str, str] = document["revision"]
    if not document["changes"] and revision["from"] == revision["to"]:
        return Text("nothing to change: the policy is this one already")
    parts: list[RenderableType] = []
    if document["changes"]:
        table = table_of(f"Policy {revision['from']} to {revision['to']}", "key", "from", "to")
        for change in document["changes"]:
            table.add_row(change["key"], _value(change["from"]), _value(change["to"]))
        parts.append(table)
    else:
        parts.append(Text(f"only the name changes, from {revision['from']} to {revision['to']}"))
    if document["dry_run"]:
        parts.append(Text("a dry run: nothing was changed"))
    return Group(*parts, *(_event_line(event) for event in document["recorded"]))


def _value(value: Json) -> str:
    return ", ".join(f"{key} {one}" for key, one in value.items()) if isinstance(value, dict) else str(value)


def _nodes_report(document: Document) -> RenderableType:
    table = table_of("Nodes", "node", "takes work", "#accelerators", "#models", "#leases", "labels")
    for node in document["nodes"]:
        table.add_row(
            printable(node["node_id"]),
            _takes_work(node),
            str(len(node["accelerators"])),
            str(node["residents"]),
            str(node["leases"]),
            printable(", ".join(f"{key}={value}" for key, value in sorted(node["labels"].items()))) or "-",
        )
    return table


def _takes_work(node: Document) -> str:
    if not node["running"]:
        return "no: not running"
    if node["shutting_down"]:
        return "no: shutting down"
    if node["drained"]:
        return "no: drained"
    if node["draining"]:
        return "no: draining"
    if node["cordoned"]:
        return "only on what is loaded: cordoned"
    return "yes" if node["production_eligible"] else "no: not production-eligible"
