"""`gpuledger plan --live`: what a request would be told now. The running server decides, and records nothing."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from .operator_cli import operating, show
from .operator_client import Document
from .plan_report import report_of


def plan_live(
    trial: Document, *, server: str | None, token_file: Path | None, config: Path | None, as_json: bool
) -> None:
    """Ask, show, and end as the commands of operators do. Keys of the trial that are None are not sent."""
    with operating(server, token_file, config) as client:
        answer = client.post("/plan", {key: value for key, value in trial.items() if value is not None})
        show(answer, as_json, _report)


def _report(document: Document) -> RenderableType:
    parts: list[RenderableType] = []
    if not document["client_may_ask"]:
        parts.append(Text("this client may not ask for the capability: the gateway refuses it before it is planned"))
    parts.append(report_of(document["plan"]))
    if document["fallback"] is not None:
        parts.append(Text("\nso the request is planned for the fallback of its contract:"))
        parts.append(report_of(document["fallback"]["plan"]))
    return Group(*parts)
