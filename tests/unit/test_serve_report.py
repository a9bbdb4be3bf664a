"""What `gpuledger serve` tells people at a terminal."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from gpuledger.adapters.runtimes.output import LOG_FOLDER, BoundedLog, log_path
from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import RuntimeFault
from gpuledger.domain.world import World
from gpuledger.tools.config import config_of
from gpuledger.tools.envelopes import Unmeasured
from gpuledger.tools.measure import Place
from gpuledger.tools.serve_report import ConsoleAnnouncer

HOST = "host:local"


def told(folder: Path, unmeasured: list[Unmeasured], deployments: tuple[Any, ...] = ()) -> str:
    document: Any = {"ledger": "l.db", "clients": [], "deployments": list(deployments)}
    config = config_of(document, folder / "gpuledger.yaml")
    shown = io.StringIO()
    ConsoleAnnouncer(Console(file=shown, width=1000), config, 8910).ready(World(), unmeasured)
    return shown.getvalue()


def failed(deployment_id: str) -> Unmeasured:
    fault = RuntimeFault(Failure.MODEL_LOAD_FAILED, "exit_status_2")
    return Unmeasured(Place(deployment_id, HOST, 0, None), fault)


def test_a_deployment_that_failed_has_the_log_of_its_runtime_named(tmp_path: Path) -> None:
    log = log_path(tmp_path / LOG_FOLDER, "team/emb", HOST)
    BoundedLog(log, 4096).close()
    shown = told(tmp_path, [failed("team/emb")])
    assert f"team/emb could not be measured: MODEL_LOAD_FAILED: exit_status_2; what it printed is in {log}" in shown


def test_one_that_never_started_has_no_log(tmp_path: Path) -> None:
    shown = told(tmp_path, [failed("emb")])
    assert "emb could not be measured: MODEL_LOAD_FAILED: exit_status_2" in shown
    assert "printed" not in shown


def test_a_server_with_nothing_to_serve_says_so(tmp_path: Path) -> None:
    assert "It serves nothing: the configuration has no deployments." in told(tmp_path, [])
    runtime = {"type": "reference", "task": "embedding"}
    served = {"id": "emb", "capability": "emb@1", "kind": "host", "runtime": runtime}
    assert "serves nothing" not in told(tmp_path, [], (served,))
