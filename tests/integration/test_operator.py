"""Operators and a running server: tokens that come and go, every command, and what the ledger says of each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gpuledger.domain.events import (
    EvictionStarted,
    LabPaused,
    NodeDrainCompleted,
    NodeDrainStarted,
    PolicyRevised,
    ResidencyPolicyChanged,
)
from gpuledger.domain.state import ResidencyPolicy
from gpuledger.tools.cli import app
from tests.integration.serving import (
    PATIENCE_SECONDS,
    Serving,
    chat,
    client,
    configuration,
    copy_ledger,
    embedding,
    serving,
    wait_until,
)


class Terminal:
    """Commands with the token of an operator, to a server that is a process of its own."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._token = token

    def run(self, *words: str, token: str | None = None) -> Result:
        return command(*words, token=self._token if token is None else token)

    def does(self, *words: str) -> Any:
        """The answer of the server to a command that must be done."""
        done = self.run(*words, "--server", self._url, "--json")
        assert done.exit_code == 0, done.stderr
        return json.loads(done.stdout)

    def says(self, *words: str) -> str:
        done = self.run(*words, "--server", self._url)
        assert done.exit_code == 0, done.stderr
        return done.stdout

    def is_refused(self, *words: str, status: int, token: str | None = None) -> str:
        """The one line on standard error."""
        done = self.run(*words, "--server", self._url, token=token)
        assert (done.exit_code, done.stdout) == (status, ""), done.output
        (line,) = done.stderr.splitlines()
        return line


def command(*words: str, token: str = "") -> Result:
    return CliRunner().invoke(app, words, env={"GPULEDGER_TOKEN": token})


def make_token(folder: Path, *words: str) -> str:
    done = command("tokens", *words, "--config", str(folder / "gpuledger.yaml"))
    assert done.exit_code == 0, done.stderr
    return done.stdout.strip()


def types_in(answer: Any) -> list[str]:
    return [event["type"] for event in answer["recorded"]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, measured: Path) -> Generator[Serving]:
    folder = tmp_path_factory.mktemp("operator")
    copy_ledger(measured, folder)
    with serving(folder, configuration([embedding(), chat()])) as running:
        yield running


@pytest.fixture(scope="module")
def terminal(server: Serving) -> Terminal:
    token = make_token(server.folder, "create", "operator", "ann", "--scope", "operate")
    return Terminal(server.base_url, token)


class TestTokens:
    def test_a_running_server_takes_up_and_lets_go_of_a_token(self, server: Serving) -> None:
        made = json.loads(make_token(server.folder, "create", "client", "batch", "--json"))
        assert server.embed(token=made["token"]).status_code == 200
        renewed = json.loads(make_token(server.folder, "rotate", made["id"], "--json"))
        assert server.embed(token=made["token"]).status_code == 401
        assert server.embed(token=renewed["token"]).status_code == 200
        make_token(server.folder, "revoke", renewed["id"])
        assert server.embed(token=renewed["token"]).status_code == 401
        # Tokens of the configuration go on to work.
        assert server.embed().status_code == 200

    def test_a_client_without_a_token_in_the_configuration(self, tmp_path: Path, measured: Path) -> None:
        copy_ledger(measured, tmp_path)
        clients = [client("app", "of-the-app"), {"id": "other", "capabilities": ["chat@1"]}]
        with serving(tmp_path, configuration([embedding(), chat()], clients=clients)) as server:
            token = make_token(tmp_path, "create", "client", "other", "--expires", "1d")
            refused = server.embed(token=token)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "capability_not_allowed")

    def test_a_file_that_breaks_changes_nothing(self, server: Serving, terminal: Terminal) -> None:
        assert terminal.does("nodes", "list")["nodes"]
        path = server.folder / "state" / "tokens.json"
        good = path.read_bytes()
        try:
            path.write_text("{")
            assert terminal.does("nodes", "list")["nodes"]
            assert "cannot be used" in server.log()
        finally:
            path.write_bytes(good)
        assert terminal.does("nodes", "list")["nodes"]

    def test_a_start_with_a_broken_file_says_so(self, tmp_path: Path) -> None:
        (tmp_path / "state").mkdir()
        (tmp_path / "state" / "tokens.json").write_text("{")
        (tmp_path / "gpuledger.yaml").write_text(json.dumps(configuration([embedding()])))
        words = (sys.executable, "-m", "gpuledger.tools.cli", "serve")
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
        assert done.returncode == 2
        assert "tokens.json" in done.stderr
        assert "Traceback" not in done.stderr


class TestCommands:
    def test_the_policy(self, server: Serving, terminal: Terminal) -> None:
        shown = terminal.says("policy", "show")
        file = server.folder / "policy.yaml"
        file.write_text(shown.replace("max_replans: 5", "max_replans: 7"))
        tried = terminal.does("policy", "revise", str(file), "--dry-run")
        assert tried["changes"] == [{"key": "max_replans", "from": 5, "to": 7}]
        assert types_in(terminal.does("policy", "revise", str(file))) == ["PolicyRevised"]
        file.write_text("policy: {reserve_floor_bytes: 32MiB}")
        assert "33554432" in terminal.says("policy", "revise", str(file))
        file.write_text("sample_interval_seconds: 400\n")
        told = terminal.is_refused("policy", "revise", str(file), status=2)
        assert told.startswith("policy.telemetry_max_age_seconds: must be at least 3 times")
        file.write_text("reserve_floor_bytes: 1 parsec\n")
        assert terminal.is_refused("policy", "revise", str(file), status=2).startswith("policy.reserve_floor_bytes: ")
        revised = [event.data for event in server.events() if isinstance(event.data, PolicyRevised)]
        assert [(one.by, one.policy.max_replans) for one in revised if one.by is not None] == [("ann", 7), ("ann", 7)]
        assert revised[-1].policy.reserve_floor_bytes == 32 * 2**20

    def test_lab_and_residency(self, server: Serving, terminal: Terminal) -> None:
        assert types_in(terminal.does("lab", "pause")) == ["LabPaused"]
        assert terminal.says("lab", "pause") == "nothing to change: it stands so already\n"
        assert types_in(terminal.does("lab", "resume")) == ["LabResumed"]
        assert types_in(terminal.does("residency", "set", "emb", "exclusive", "--ttl", "60")) == [
            "ResidencyPolicyChanged"
        ]
        assert types_in(terminal.does("residency", "set", "emb", "keep_warm", "--ttl", "901")) == [
            "ResidencyPolicyChanged"
        ]
        events = [event.data for event in server.events()]
        assert [one.by for one in events if isinstance(one, LabPaused)] == ["ann"]
        changed = [one.residency.policy for one in events if isinstance(one, ResidencyPolicyChanged)]
        assert changed == [ResidencyPolicy.EXCLUSIVE, ResidencyPolicy.KEEP_WARM]

    def test_what_is_idle_is_unloaded(self, server: Serving, terminal: Terminal) -> None:
        assert server.embed().status_code == 200
        assert "emb is being unloaded" in terminal.says("unload", "--idle", "emb")
        server.until(lambda: not list(server.world().residents()))
        evicted = [event.data for event in server.events() if isinstance(event.data, EvictionStarted)]
        assert (evicted[-1].cause, evicted[-1].by) == ("operator", "ann")
        assert terminal.says("unload", "--idle") == "nothing is idle\n"

    def test_a_node_is_drained_and_comes_back(self, server: Serving, terminal: Terminal) -> None:
        assert server.embed().status_code == 200
        assert terminal.does("nodes", "drain", "local", "--wait")["node"]["drained"] is True
        assert server.runtimes() == ()
        refused = server.embed()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "NODE_DRAINING")
        tried = terminal.does("plan", "--live", "--capability", "emb@1", "--client", "app")
        assert tried["plan"]["reasons"] == ["NODE_DRAINING"]
        assert terminal.says("nodes", "list").count("drained") == 1
        assert types_in(terminal.does("nodes", "uncordon", "local")) == ["NodeUncordoned"]
        assert server.embed().status_code == 200
        events = [event.data for event in server.events()]
        assert [one.by for one in events if isinstance(one, NodeDrainStarted)][-1] == "ann"
        assert sum(isinstance(one, NodeDrainCompleted) for one in events) == 1

    def test_a_plan_is_tried_and_not_recorded(self, server: Serving, terminal: Terminal) -> None:
        before = server.event_names().count("PlanDecided")
        asked = ("--capability", "chat@1", "--class", "background", "--deadline-ms", "60000")
        shown = terminal.says("plan", "--live", *asked)
        assert shown.startswith("ADMIT  chat@1 for dry-run (background)")
        assert server.event_names().count("PlanDecided") == before

    def test_how_it_says_no(self, server: Serving, terminal: Terminal) -> None:
        assert "no node nowhere" in terminal.is_refused("nodes", "cordon", "nowhere", status=1)
        assert "no fault to clear" in terminal.is_refused("accelerator", "clear", "host:local", status=1)
        assert "is suspect" in terminal.is_refused("envelope", "accept", "emb", status=1)
        assert "no operator has this" in terminal.is_refused("nodes", "list", status=1, token="nobody")
        assert "is not a token" in terminal.is_refused("nodes", "list", status=2, token="two words")
        assert "is needed" in terminal.is_refused("nodes", "list", status=2, token="")
        assert "say --idle" in terminal.is_refused("unload", status=2)
        reader = make_token(server.folder, "create", "operator", "eve", "--scope", "read")
        assert "has read" in terminal.is_refused("lab", "pause", status=1, token=reader)

    def test_a_server_that_is_not_there(self) -> None:
        nowhere = Terminal("http://127.0.0.1:9", "glo_x")
        assert "cannot be reached" in nowhere.is_refused("nodes", "list", status=1)

    def test_the_door_is_found_by_the_configuration(self, server: Serving, terminal: Terminal) -> None:
        port = server.base_url.rpartition(":")[2]
        (server.folder / "other.yaml").write_text(f"ledger: state/ledger.db\nlisten: 0.0.0.0:{port}\n")
        done = terminal.run("nodes", "list", "--config", str(server.folder / "other.yaml"))
        assert done.exit_code == 0, done.stderr
        # The server took any free port, as its configuration says.
        done = terminal.run("nodes", "list", "--config", str(server.folder / "gpuledger.yaml"))
        assert (done.exit_code, "takes any free port" in done.stderr) == (2, True)

    def test_a_token_file(self, server: Serving, terminal: Terminal) -> None:
        path = server.folder / "ann.token"
        path.write_text(make_token(server.folder, "create", "operator", "ann", "--scope", "audit") + "\n")
        done = terminal.run("nodes", "list", "--server", server.base_url, "--token-file", str(path), token="nobody")
        assert done.exit_code == 0, done.stderr


class TestRestart:
    def test_what_an_operator_changed_stands_until_the_file_changes(self, tmp_path: Path, measured: Path) -> None:
        copy_ledger(measured, tmp_path)
        config = configuration([embedding(), chat()])
        with serving(tmp_path, config) as server:
            token = make_token(tmp_path, "create", "operator", "ann", "--scope", "operate")
            terminal = Terminal(server.base_url, token)
            (tmp_path / "keys.yaml").write_text("max_replans: 7\n")
            terminal.does("policy", "revise", str(tmp_path / "keys.yaml"))
            terminal.does("nodes", "cordon", "local")
            assert server.stop() == 0, server.log()
        shown = _diff(tmp_path)
        assert [event["type"] for event in shown["events"]] == []
        assert {kept["what"] for kept in shown["kept"]} == {"policy", "node local"}
        (tmp_path / "gpuledger.yaml").write_text(json.dumps(configuration([embedding()], policy={"max_replans": 3})))
        shown = _diff(tmp_path)
        assert [event["type"] for event in shown["events"]] == [
            "PolicyRevised",
            "DeploymentRetired",
            "ConfigurationApplied",
        ]
        assert {"key": "max_replans", "from": 7, "to": 3} in shown["events"][0]["changes"]
        with serving(tmp_path, config, ready=False) as server:
            wait_until(lambda: _conditions(server).get("admitting") is True, server.log)
            world = server.world()
            assert (world.policy.max_replans, world.nodes["local"].cordoned) == (7, True)
            assert _conditions(server)["nodes"] is False, "a node that is cordoned and empty takes no work"


def _conditions(server: Serving) -> dict[str, bool]:
    with server.http() as http:
        return {name: one["holds"] for name, one in http.get("/readyz").json()["conditions"].items()}


def _diff(folder: Path) -> Any:
    done = command("config", "diff", str(folder / "gpuledger.yaml"), "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)
