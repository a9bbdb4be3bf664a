"""`gpuledger plan`, `pressure` and `schema`: decisions on documents, without a ledger or a device."""

from __future__ import annotations

import sys
from collections.abc import Callable
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

from .plan_report import console, pressure_report, report_of
from .reading import STDIN, lines_of, open_lines, read_document

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
    as_json: AsJson = False,
) -> None:
    """Decide one request on a state, as the scheduler would, and say why.

    Exit status: 0 whenever there is a plan, whatever it says; 2 when the input cannot be used.
    """
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
