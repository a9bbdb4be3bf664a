"""`gpuledger tokens` and `gpuledger config` as their users meet them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gpuledger.adapters.tokens import read_tokens
from gpuledger.tools.cli import app

CONFIG = """\
ledger: state/ledger.db
accelerators: {host: true, nvml: false}
clients:
  - {id: app}
  - {id: batch, token_sha256: e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855}
deployments:
  - {id: emb, capability: emb@1, kind: host, runtime: {type: reference, task: embedding}}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpuledger.yaml").write_text(CONFIG)
    return tmp_path


def run(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def done(*words: str) -> Any:
    result = run(*words, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def refused(*words: str) -> str:
    result = run(*words)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    return result.stderr


class TestTokens:
    def test_the_token_alone_is_on_standard_output(self, folder: Path) -> None:
        result = run("tokens", "create", "client", "app")
        assert result.stdout.startswith("glc_")
        assert len(result.stdout.splitlines()) == 1
        assert "It is not shown again." in result.stderr
        assert result.stdout.strip() not in (folder / "state" / "tokens.json").read_text()

    def test_operators_have_a_scope_and_an_end(self) -> None:
        made = done("tokens", "create", "operator", "ann", "--scope", "audit", "--expires", "12h")
        assert (made["kind"], made["subject"], made["scope"], made["valid"]) == ("operator", "ann", "audit", True)
        (listed,) = done("tokens", "list")["tokens"]
        assert listed == {key: value for key, value in made.items() if key not in ("schema", "token")} | {
            "declared": None
        }

    def test_the_list_has_no_token_and_no_hash(self) -> None:
        secret = run("tokens", "create", "client", "app").stdout.strip()
        (token,) = read_tokens(Path("state/tokens.json"))
        for shown in (run("tokens", "list").stdout, run("tokens", "list", "--json").stdout):
            assert token.id in shown
            assert secret not in shown
            assert token.sha256 not in shown

    def test_tokens_of_the_configuration_are_listed(self) -> None:
        assert done("tokens", "list")["clients_with_a_token_in_the_configuration"] == ["batch"]
        assert "in the configuration" in run("tokens", "list").stdout

    def test_one_of_a_client_that_is_gone_is_marked(self, folder: Path) -> None:
        run("tokens", "create", "client", "app")
        (folder / "gpuledger.yaml").write_text(CONFIG.replace("id: app", "id: other"))
        assert [token["declared"] for token in done("tokens", "list")["tokens"]] == [False]
        assert "of no client" in run("tokens", "list").stdout

    def test_rotated_and_revoked(self) -> None:
        first = done("tokens", "create", "client", "app")
        second = done("tokens", "rotate", first["id"], "--grace", "10m")
        assert second["token"] != first["token"]
        old, new = done("tokens", "list")["tokens"]
        assert (old["id"], new["id"], new["expires_at"]) == (first["id"], second["id"], None)
        assert old["expires_at"] is not None
        assert run("tokens", "revoke", old["id"]).stdout == f"{old['id']} of client app is revoked\n"
        assert [token["id"] for token in done("tokens", "list")["tokens"]] == [new["id"]]

    def test_a_configuration_that_is_half_edited_is_enough(self, folder: Path) -> None:
        made = done("tokens", "create", "client", "app")
        (folder / "gpuledger.yaml").write_text(CONFIG + "nonsense: 1\n")
        assert done("tokens", "revoke", made["id"])["valid"] is False

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (("create", "client", "nobody"), "declares no client nobody: there are app, batch"),
            (("create", "operator", "a b", "--scope", "read"), "NAME must begin with"),
            (("create", "operator", "a" * 65, "--scope", "read"), "at most 64"),
            (("create", "client", "app", "--expires", "soon"), "--expires must be a duration"),
            (("create", "client", "app", "--expires", "0s"), "--expires must be a duration"),
            (("create", "client", "app", "--expires", "9999d"), "at most ten years"),
            (("create", "client", "app", "--config", "absent.yaml"), "cannot read absent.yaml"),
            (("rotate", "tok-00000000"), "no token tok-00000000"),
            (("revoke", "tok-00000000"), "no token tok-00000000"),
        ],
    )
    def test_bad_input_is_told_in_a_line(self, words: tuple[str, ...], told: str) -> None:
        (line,) = refused("tokens", *words).splitlines()
        assert told in line

    def test_a_file_that_is_broken(self, folder: Path) -> None:
        (folder / "state").mkdir()
        (folder / "state" / "tokens.json").write_text("[]")
        for words in (("list",), ("create", "client", "app")):
            assert "tokens.json: must be an object" in refused("tokens", *words)


class TestConfig:
    def test_one_that_can_be_used(self) -> None:
        checked = done("config", "check")
        assert (checked["ok"], checked["clients"], checked["deployments"]) == (True, ["app", "batch"], ["emb"])
        assert run("config", "check", "gpuledger.yaml").stdout.startswith("gpuledger.yaml can be used") is False
        assert "can be used" in run("config", "check", "gpuledger.yaml").stdout

    def test_one_that_cannot(self, folder: Path) -> None:
        (folder / "gpuledger.yaml").write_text(CONFIG + "lisen: 1\nprofile: often\n")
        told = refused("config", "check").splitlines()
        assert 'config.lisen: unknown key, did you mean "listen"?' in told
        assert len(told) == 2
        result = run("config", "check", "--json")
        assert result.exit_code == 2
        assert [problem["where"] for problem in json.loads(result.stdout)["problems"]] == [
            problem.partition(": ")[0] for problem in told
        ]

    def test_without_a_ledger_all_of_it_is_new(self, folder: Path) -> None:
        shown = done("config", "diff")
        types = [event["type"] for event in shown["events"]]
        assert types == [
            "PolicyRevised",
            "NodeRegistered",
            "DeploymentRegistered",
            "ClientRegistered",
            "ClientRegistered",
            "ConfigurationApplied",
        ]
        assert shown["kept"] == []
        assert "DeploymentRegistered in deployment:emb" in run("config", "diff").stdout
        assert not (folder / "state").exists()

    def test_a_model_that_is_not_there_is_told(self, folder: Path) -> None:
        runtime = "{type: llama_cpp, task: embedding, model: absent.gguf}"
        (folder / "gpuledger.yaml").write_text(CONFIG.replace("{type: reference, task: embedding}", runtime))
        for words in (("config", "diff"), ("config", "check")):
            told = refused(*words)
            assert told.startswith("config.deployments[0].runtime: MODEL_LOAD_FAILED (artifact_missing)")
            assert "correct the path, or fetch the file" in told
        assert done("config", "check", "--no-files")["files"] is False
        assert "models and programs: not looked at" in run("config", "check", "--no-files").stdout

    def test_of_another_model_both_hashes_are_told(self, folder: Path) -> None:
        (folder / "m.gguf").write_bytes(b"another")
        digest = hashlib.sha256(b"another").hexdigest()
        runtime = f"{{type: llama_cpp, task: embedding, model: m.gguf, sha256: {'a' * 64}}}"
        (folder / "gpuledger.yaml").write_text(CONFIG.replace("{type: reference, task: embedding}", runtime))
        told = refused("config", "check")
        assert f"has the SHA-256 {digest}, and {'a' * 64} is configured" in told
        assert "fetch it again" in told

    def test_the_file_is_named_as_everywhere(self, folder: Path) -> None:
        (folder / "gpuledger.yaml").rename(folder / "other.yaml")
        assert done("config", "check", "--config", "other.yaml") == done("config", "check", "other.yaml")
        assert done("config", "diff", "--config", "other.yaml") == done("config", "diff", "other.yaml")
        assert "give one of them" in refused("config", "check", "other.yaml", "--config", "other.yaml")


class TestPlanLive:
    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (("--live",), "--live needs --capability"),
            (("--live", "--capability", "c", "--state", "s"), "--live has the state of the server"),
            (("--live", "--capability", "c", "--client", "a", "--lab"), "leave out --class and --lab"),
            (("--capability", "c", "--state", "s", "--request", "r"), "go with --live"),
        ],
    )
    def test_options_that_do_not_go_together(self, words: tuple[str, ...], told: str) -> None:
        result = run("plan", *words)
        assert result.exit_code == 2
        assert told in " ".join(result.stderr.replace("│", " ").split())
