"""`gpuledger plan`, `pressure` and `schema`: decisions on documents, without a ledger or a device.

`plan --live` asks a running server instead, which decides on its own state and records nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any, TypeAlias

import orjson
import typer

from gpuledger.domain.document_problems import DocumentError
from gpuledger.domain.documents import (
    Json,
    judge_case,
    parse_json,
    plan_case_of,
    pressure_case_of,
    request_schema,
    state_schema,
)
from gpuledger.domain.plan_schema import plan_schema
from gpuledger.domain.planner import plan as plan_request
from gpuledger.domain.policy import Priority

from .plan_report import console, pressure_report, report_of
from .reading import STDIN, lines_of, open_lines, read_document
from .server_options import ConfigOption, ServerOption, TokenFileOption

Document: TypeAlias = dict[str, Any]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document with exact bytes.")]
Batch = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="One case a line, as JSON; one answer a line, in order. A bad line is answered with an error.",
    ),
]


class SchemaOf(StrEnum):
    STATE = "state"
    REQUEST = "request"
    PLAN = "plan"


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the command line."""
    app.command("plan")(plan)
    app.command("pressure")(pressure)
    app.command("schema")(schema)


def plan(
    state: Annotated[
        str | None, typer.Option(metavar="FILE", help="The state: JSON or YAML, - for standard input.")
    ] = None,
    request: Annotated[
        str | None, typer.Option(metavar="FILE", help="The question: JSON or YAML, - for standard input.")
    ] = None,
    batch: Batch = None,
    live: Annotated[bool, typer.Option("--live", help="On the running server, as it is now.")] = False,
    capability: Annotated[
        str | None, typer.Option(metavar="C", help="With --live: what is asked for.", show_default=False)
    ] = None,
    client: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --live: in the name of this client.", show_default=False)
    ] = None,
    priority: Annotated[
        Priority | None, typer.Option("--class", help="With --live: of this class.", show_default=False)
    ] = None,
    lab: Annotated[bool, typer.Option("--lab", help="With --live: as a LAB request.")] = False,
    rank: Annotated[int, typer.Option(metavar="N", min=0, max=100, help="With --live: of this fallback rank.")] = 0,
    deadline_ms: Annotated[
        int | None, typer.Option(metavar="MS", min=1, max=86_400_000, help="With --live: to begin so soon.")
    ] = None,
    as_json: AsJson = False,
    server: ServerOption = None,
    token_file: TokenFileOption = None,
    config: ConfigOption = None,
) -> None:
    """Decide one request, as the scheduler would, and say why: on a state that is written down, or `--live`.

    Exit status: 0 whenever there is a plan, whatever it says; 1 the server says no or cannot be reached; 2 when the
    input cannot be used.
    """
    trial = {
        "capability": capability,
        "client": client,
        "priority": None if priority is None else priority.value,
        "lab": lab or None,
        "fallback_rank": rank or None,
        "deadline_ms": deadline_ms,
    }
    if live:
        _check_live((state, request, batch), trial)
        # Here, so that documents need not wait for what talks to servers.
        from .plan_live import plan_live

        plan_live(trial, server=server, token_file=token_file, config=config, as_json=as_json)
        return
    if any(value is not None for value in trial.values()):
        raise typer.BadParameter("--capability, --client, --class, --lab, --rank and --deadline-ms go with --live")
    _plan_documents(state, request, batch, as_json)


def _check_live(documents: tuple[str | None, ...], trial: Mapping[str, object]) -> None:
    if any(document is not None for document in documents):
        raise typer.BadParameter("--live has the state of the server: it goes without --state, --request and --batch")
    if trial["capability"] is None:
        raise typer.BadParameter("--live needs --capability")
    if trial["client"] is not None and (trial["priority"] is not None or trial["lab"]):
        raise typer.BadParameter("--client has its class and LAB from the server: leave out --class and --lab")


def _plan_documents(state: str | None, request: str | None, batch: str | None, as_json: bool) -> None:
    if batch is not None:
        if state is not None or request is not None:
            raise typer.BadParameter("--batch goes without --state and --request")
        _answer_lines(batch, lambda case: plan_request(*plan_case_of(case)).document())
        return
    if state is None or request is None:
        raise typer.BadParameter("give --state and --request, or --batch")
    if state == request == STDIN:
        raise typer.BadParameter("only one of --state and --request can be read from standard input")
    case: Json = {"state": read_document(state, "state"), "request": read_document(request, "request")}
    decided = plan_request(*plan_case_of(case))
    if as_json:
        _print_json(decided.document())
    else:
        console().print(report_of(decided.document()))


def pressure(
    case: Annotated[
        str | None, typer.Argument(metavar="FILE", help="A case: `policy`, `total_bytes`, `samples`.")
    ] = None,
    batch: Batch = None,
    as_json: AsJson = False,
) -> None:
    """Judge the pressure on an accelerator, sample by sample.

    Exit status: 0 when it was judged, 2 when the input cannot be used.
    """
    if (case is None) == (batch is None):
        raise typer.BadParameter("give one FILE, or --batch")
    if batch is not None:
        _answer_lines(batch, lambda line: judge_case(pressure_case_of(line)))
        return
    found = pressure_case_of(read_document(case or STDIN, ""))
    if as_json:
        _print_json(judge_case(found))
    else:
        console().print(pressure_report(found))


def schema(document: Annotated[SchemaOf, typer.Argument(help="Which document.")]) -> None:
    """Print the JSON Schema (2020-12) of a document."""
    match document:
        case SchemaOf.STATE:
            _print_json(state_schema())
        case SchemaOf.REQUEST:
            _print_json(request_schema())
        case SchemaOf.PLAN:
            _print_json(plan_schema())


def _answer_lines(path: str, answer: Callable[[Json], Document]) -> None:
    """One answer for each line of a file, written as soon as it is known; exit status 2 after a bad line."""
    bad = False
    with open_lines(path) as file:
        for number, line in enumerate(lines_of(file), start=1):
            try:
                answered = answer(parse_json(line))
            except DocumentError as error:
                bad, answered = True, _error_of(number, error)
            sys.stdout.buffer.write(orjson.dumps(answered) + b"\n")
            sys.stdout.buffer.flush()
    if bad:
        raise typer.Exit(2)


def _error_of(number: int, error: DocumentError) -> Document:
    """The first problem of a line, and the others beside it."""
    first, *others = error.told()
    found: Document = {"line": number, "where": first.where, "message": first.message}
    if others:
        found["others"] = [{"where": other.where, "message": other.message} for other in others]
    return {"error": found}


def _print_json(document: Document) -> None:
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    sys.stdout.buffer.write(orjson.dumps(document, option=options))
    sys.stdout.buffer.flush()
