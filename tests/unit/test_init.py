"""`gpuledger init` and `gpuledger systemd-unit`: what they write can be served, whatever they find."""

from __future__ import annotations

import hashlib
import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from typer.testing import CliRunner, Result

from gpuledger.adapters.runtimes.options import Task
from gpuledger.domain.state import Kind
from gpuledger.domain.units import GIB, MIB
from gpuledger.tools.cli import app
from gpuledger.tools.config import Config, config_of, load_config
from gpuledger.tools.gguf_models import MAX_MODELS, Model, PassedOver, model_of, models_in
from gpuledger.tools.init_file import configuration_text
from gpuledger.tools.init_found import Found, look_around, proposals
from gpuledger.tools.ledger_target import TargetError
from gpuledger.tools.machine import Card
from gpuledger.tools.reading import parse_yaml
from gpuledger.tools.systemd_cli import unit_of
from tests.shim import NvmlShim, ShimCard
from tests.unit.machines import Made

CARD = Card("GPU-1", "NVIDIA H200", 0, 1, total_bytes=24 * GIB)
SERVER = "/opt/llama.cpp/bin/llama-server"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def small_model(path: Path, architecture: str = "llama", **values: int | bool | str) -> Path:
    """A whole GGUF file with these values in its metadata, `arch_` in a name being the architecture's own."""
    writer = gguf.GGUFWriter(None, architecture)
    for name, value in values.items():
        key = name.replace("arch_", f"{architecture}.").replace("__", ".")
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.add_tensor("a.weight", np.zeros((8, 8), np.float32))
    path.parent.mkdir(parents=True, exist_ok=True)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def a_model(path: Path, size_bytes: int, **values: int | bool | str) -> Model:
    """A model that is on disk, and said to be larger."""
    found = model_of(small_model(path, "llama", **values))
    assert isinstance(found, Model)
    return Model(found.path, found.task, found.header, size_bytes)


def found_with(*models: Model, **options: Any) -> Found:
    known: dict[str, Any] = {
        "cards": (),
        "driver_version": "",
        "host_bytes": 32 * GIB,
        "threads": 4,
        "server": None,
        "binding": True,
        "vllm": None,
        "models": models,
        "passed_over": (),
    }
    return Found(**{**known, **options})


def loaded(found: Found, folder: Path) -> Config:
    return config_of(parse_yaml(written(found, folder).encode()), folder / "gpuledger.yaml")


def written(found: Found, folder: Path) -> str:
    return configuration_text(found, folder, "0" * 64, "0.1.0")


def uncommented(text: str) -> str:
    """A file with everything in it that is commented out and looks like YAML, instead of what it stands beside."""
    lines = re.sub(r"^deployments: \[\]$", "", text, flags=re.MULTILINE).splitlines()
    shape = re.compile(r"^( *)#( *(?:- )?[a-z_]+:.*)$")
    skipped = ("sha256:", "state_dir:", "allow_remote:")
    kept = [
        match[1] + match[2] if (match := shape.match(line)) and not match[2].strip().startswith(skipped) else line
        for line in lines
    ]
    return "\n".join(kept) + "\n"


# ---- models -----------------------------------------------------------------------------------------------------


class TestModels:
    @pytest.mark.parametrize(
        ("architecture", "values", "task"),
        [
            ("llama", {}, Task.CHAT),
            ("qwen3", {"arch_pooling_type": 3}, Task.EMBEDDING),
            ("qwen3", {"arch_pooling_type": 4}, Task.RERANK),
            ("bert", {"arch_pooling_type": 4}, Task.RERANK),
            ("nomic-bert", {}, Task.EMBEDDING),
            ("gemma-embedding", {}, Task.EMBEDDING),
            ("llama", {"arch_attention__causal": False}, Task.EMBEDDING),
            ("gemma3", {"arch_pooling_type": 0}, Task.CHAT),
        ],
    )
    def test_what_it_answers(self, tmp_path: Path, architecture: str, values: dict[str, Any], task: Task) -> None:
        found = model_of(small_model(tmp_path / "m.gguf", architecture, **values))
        assert isinstance(found, Model)
        assert found.task is task

    @pytest.mark.parametrize(("architecture", "kind"), [("clip", "model"), ("llama", "adapter"), ("llama", "mmproj")])
    def test_parts_of_models_are_passed_over(self, tmp_path: Path, architecture: str, kind: str) -> None:
        found = model_of(small_model(tmp_path / "m.gguf", architecture, general__type=kind))
        assert isinstance(found, PassedOver)
        assert "part of a model" in found.why

    @pytest.mark.parametrize(
        ("file", "name"),
        [
            ("all-MiniLM-L6-v2.f16.gguf", "all-minilm-l6-v2"),
            ("Qwen3-8B-Q4_K_M.gguf", "qwen3-8b"),
            ("Llama 3.1 (8B)-IQ2_XXS.gguf", "llama-3.1-8b"),
            ("gpt-oss-20b-MXFP4.gguf", "gpt-oss-20b"),
            ("weird é name.gguf", "weird-name"),
            ("F16.gguf", "f16"),
            ("ééé.gguf", "model"),
        ],
    )
    def test_names(self, tmp_path: Path, file: str, name: str) -> None:
        found = model_of(small_model(tmp_path / file))
        assert isinstance(found, Model)
        assert found.name == name

    def test_a_split_model_is_one(self, tmp_path: Path) -> None:
        for part in (1, 2):
            small_model(tmp_path / f"big-Q8_0-{part:05d}-of-00002.gguf")
        small_model(tmp_path / "half-00001-of-00002.gguf")
        (model,), (half,) = models_in(tmp_path)
        assert (model.name, model.path.name) == ("big", "big-Q8_0-00001-of-00002.gguf")
        assert model.size_bytes == 2 * model.header.size_bytes
        assert half.why == "half-00002-of-00002.gguf cannot be read: no such file or directory"

    def test_folders_below_and_what_is_not_looked_at(self, tmp_path: Path) -> None:
        small_model(tmp_path / "a" / "b" / "deep.gguf")
        small_model(tmp_path / ".cache" / "hidden.gguf")
        small_model(tmp_path / "1" / "2" / "3" / "4" / "too-deep.gguf")
        (tmp_path / "broken.gguf").write_bytes(b"x" * 100)
        (tmp_path / "notes.txt").write_bytes(b"x")
        (tmp_path / "a" / "round").symlink_to(tmp_path)
        models, passed = models_in(tmp_path / "a")
        assert [model.name for model in models][:1] == ["deep"]
        models, passed = models_in(tmp_path)
        assert "deep" in [model.name for model in models]
        assert not {"hidden", "too-deep"} & {model.name for model in models}
        assert [one.path.name for one in passed if one.path.parent == tmp_path] == ["broken.gguf"]

    def test_a_name_that_is_no_text_and_too_many(self, tmp_path: Path) -> None:
        (tmp_path / "a\udcff.gguf").write_bytes(b"")
        for number in range(MAX_MODELS + 5):
            (tmp_path / f"n{number:04d}.gguf").write_bytes(b"")
        _, passed = models_in(tmp_path)
        assert passed[0].why == "has a name that is no text"
        assert len(passed) == MAX_MODELS + 1
        assert "more than" in passed[-1].why


# ---- what is made of them ---------------------------------------------------------------------------------------


class TestProposals:
    def test_on_a_card_where_there_is_a_server_for_it(self, tmp_path: Path) -> None:
        model = a_model(tmp_path / "m.gguf", 8 * GIB, arch_context_length=131_072)
        (one,) = proposals(found_with(model, cards=(CARD,), server=SERVER))
        assert (one.kind, one.fits, one.context_length, one.concurrency) == (Kind.GPU, True, 8192, 2)

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            ({}, "there is no card"),
            ({"cards": (CARD,)}, "there is a card, and no llama-server that can use it"),
            ({"cards": (Card("GPU-1", "T", 0, 1, total_bytes=4 * GIB),), "server": SERVER}, "does not fit on a card"),
        ],
    )
    def test_on_the_host_otherwise(self, tmp_path: Path, options: dict[str, Any], why: str) -> None:
        (one,) = proposals(found_with(a_model(tmp_path / "m.gguf", 8 * GIB), **options))
        assert (one.kind, one.fits, one.context_length) == (Kind.HOST, True, 4096)
        assert why in one.why

    def test_nowhere(self, tmp_path: Path) -> None:
        (one,) = proposals(found_with(a_model(tmp_path / "m.gguf", 31 * GIB)))
        assert not one.fits

    def test_names_are_unlike_each_other(self, tmp_path: Path) -> None:
        names = ("m-Q4_K_M.gguf", "m-Q8_0.gguf", "x/m-Q8_0.gguf", "other-f16.gguf", "n" * 200 + ".gguf")
        models = [a_model(tmp_path / name, MIB) for name in names]
        proposed = [one.name for one in proposals(found_with(*models))]
        assert proposed == ["m-q4_k_m", "m-q8_0", "m-q8_0-2", "other", "n" * 56]

    def test_a_machine_is_looked_at(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "root").mkdir()
        shim = NvmlShim(tmp_path)
        monkeypatch.setenv(*shim.state_variable)
        shim.set([ShimCard("GPU-a"), ShimCard("GPU-b", memory_error=15)])
        program = tmp_path / "bin" / "llama-server"
        program.parent.mkdir()
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        made = Made(tmp_path / "root")
        made.memory_limit(8 * GIB)
        machine = made.machine(library=str(shim.library), environment={"PATH": str(program.parent)})
        small_model(tmp_path / "models" / "m.gguf")
        found = look_around(machine, tmp_path / "models")
        assert [card.uuid for card in found.cards] == ["GPU-a"]
        assert (found.host_bytes, found.server, found.vllm) == (8 * GIB, str(program), None)
        assert [model.name for model in found.models] == ["m"]


class TestFile:
    def test_with_everything_found(self, tmp_path: Path) -> None:
        models = (
            a_model(tmp_path / "models" / "chat.gguf", 8 * GIB, arch_context_length=32_768),
            a_model(tmp_path / "models" / "vec.gguf", MIB, arch_pooling_type=1, arch_context_length=8192),
            a_model(tmp_path / "models" / "rank.gguf", MIB, arch_pooling_type=4),
            a_model(tmp_path / "models" / "huge.gguf", 500 * GIB),
        )
        found = found_with(*models, cards=(CARD,), server=SERVER, vllm="/opt/vllm/bin/vllm")
        config = loaded(found, tmp_path)
        kinds = {
            entry.capability: (entry.kind, config.runtimes[entry.id].task) for entry in config.document.deployments
        }
        assert kinds == {
            "chat@1": (Kind.GPU, Task.CHAT),
            "vec@1": (Kind.GPU, Task.EMBEDDING),
            "rank@1": (Kind.GPU, Task.RERANK),
        }
        assert config.runtimes["vec"].batch_size == 2048
        (client,) = config.document.clients
        assert client.id == "app"
        assert config.path.parent == tmp_path

    def test_what_is_commented_out_can_be_used_too(self, tmp_path: Path) -> None:
        found = found_with(
            a_model(tmp_path / "small.gguf", MIB),
            a_model(tmp_path / "huge.gguf", 500 * GIB),
            cards=(CARD,),
            server=SERVER,
            vllm="/opt/vllm/bin/vllm",
        )
        config = config_of(parse_yaml(uncommented(written(found, tmp_path)).encode()), tmp_path / "gpuledger.yaml")
        assert [entry.id for entry in config.document.deployments] == ["small", "huge", "my-vllm-model"]
        assert config.policy.sample_interval_seconds == 10

    def test_with_nothing_found(self, tmp_path: Path) -> None:
        found = found_with(binding=False, passed_over=(PassedOver(Path("a\nb.gguf"), "is\nnone"),) * 30)
        text = written(found, tmp_path)
        assert loaded(found, tmp_path).document.deployments == ()
        assert "#   a?b.gguf: is?none" in text
        assert "#   and 10 more" in text
        (entry,) = config_of(parse_yaml(uncommented(text).encode()), tmp_path / "g.yaml").document.deployments
        assert entry.id == "my-model"

    @pytest.mark.parametrize(
        "name", ['it\'s #1: 50% "off".gguf', "a\u2028b\\c.gguf", "\U0001f999 é\x85.gguf", "a\nb.gguf"]
    )
    def test_paths_are_what_they_are(self, tmp_path: Path, name: str) -> None:
        path = tmp_path / "models" / name
        config = loaded(found_with(a_model(path, MIB)), tmp_path)
        (runtime,) = config.runtimes.values()
        assert getattr(runtime, "model", None) == path

    def test_paths_elsewhere_are_whole(self, tmp_path: Path) -> None:
        found = found_with(a_model(tmp_path / "models" / "m.gguf", MIB))
        assert f'model: "{tmp_path}/models/m.gguf"' in written(found, tmp_path / "etc")
        assert 'model: "models/m.gguf"' in written(found, tmp_path)


class TestCommand:
    def test_it_writes_once_for_its_owner_only_and_shows_the_token_once(self, tmp_path: Path) -> None:
        small_model(tmp_path / "models" / "m.gguf")
        answer = run("init", tmp_path)
        assert answer.exit_code == 0, answer.output
        place = tmp_path / "gpuledger.yaml"
        assert stat.S_IMODE(place.stat().st_mode) == 0o600
        config = load_config(place)
        token = answer.stdout.split("this one time:\n")[1].split()[0]
        (client,) = config.document.clients
        assert client.token_sha256 == hashlib.sha256(token.encode()).hexdigest()
        assert token not in place.read_text()
        assert [entry.capability for entry in config.document.deployments] == ["m@1"]
        assert f"gpuledger doctor --config {place}" in answer.stdout
        assert f"gpuledger serve --config {place}" in answer.stdout

        before = place.read_bytes()
        again = run("init", tmp_path)
        assert (again.exit_code, "--force" in again.stderr) == (2, True)
        assert place.read_bytes() == before
        assert run("init", tmp_path, "--force").exit_code == 0
        assert place.read_bytes() != before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["gpuledger.yaml", "models"]

    def test_models_elsewhere_and_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        small_model(tmp_path / "store" / "m.gguf")
        answer = run("init", tmp_path / "new" / "folder", "--models", tmp_path / "store")
        assert answer.exit_code == 0, answer.output
        (runtime,) = load_config(tmp_path / "new" / "folder" / "gpuledger.yaml").runtimes.values()
        assert getattr(runtime, "model", None) == tmp_path / "store" / "m.gguf"

    def test_a_folder_of_models_that_is_not_there(self, tmp_path: Path) -> None:
        answer = run("init", tmp_path, "--models", tmp_path / "none")
        assert (answer.exit_code, f"{tmp_path}/none: no such file" in answer.stderr) == (2, True)
        assert not (tmp_path / "gpuledger.yaml").exists()

    def test_a_place_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        answer = run("init", tmp_path / "file")
        assert (answer.exit_code, "Traceback" in answer.output) == (2, False)


# ---- systemd ----------------------------------------------------------------------------------------------------


def configured(folder: str, **options: Any) -> Config:
    document: dict[str, Any] = {"ledger": "ledger.db", "clients": [], "deployments": [], **options}
    return config_of(document, Path(folder) / "gpuledger.yaml")


def settings(unit: str) -> dict[str, list[str]]:
    """Every key of a unit with its values."""
    found: dict[str, list[str]] = {}
    for line in unit.splitlines():
        if line and not line.startswith(("#", "[")):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


class TestUnit:
    PROGRAM = ("/opt/gpuledger/bin/gpuledger",)

    def of(self, config: Config) -> dict[str, list[str]]:
        return settings(unit_of(config, "gpuledger", self.PROGRAM))

    def test_what_follows_from_the_configuration(self) -> None:
        config = configured("/etc/gpuledger", ledger="/var/lib/gpuledger/ledger.db", drain_seconds=300)
        unit = self.of(config)
        command = "/opt/gpuledger/bin/gpuledger serve --config /etc/gpuledger/gpuledger.yaml --log json"
        assert unit["ExecStart"] == [command]
        assert unit["StateDirectory"] == ["gpuledger"]
        assert "ReadWritePaths" not in unit
        assert int(unit["TimeoutStopSec"][0]) > 300 + 2 * 10 + 30
        assert unit["IPAddressDeny"] == ["any"]
        assert unit["CapabilityBoundingSet"] == [""]

    def test_state_elsewhere_other_addresses_and_low_ports(self) -> None:
        config = configured("/srv/g", listen="0.0.0.0:443", allow_remote=True, state_dir="/srv/state")
        unit = self.of(config)
        assert unit["ReadWritePaths"] == ["/srv/g", "/srv/state"]
        assert "IPAddressDeny" not in unit
        assert unit["AmbientCapabilities"] == ["CAP_NET_BIND_SERVICE"]

    def test_it_is_hardened_and_leaves_the_cards(self) -> None:
        unit = self.of(configured("/etc/gpuledger"))
        for key in ("NoNewPrivileges", "RestrictNamespaces", "LockPersonality", "ProtectKernelModules", "PrivateTmp"):
            assert unit[key] == ["yes"]
        assert unit["ProtectSystem"] == ["strict"]
        assert unit["KillMode"] == ["mixed"]
        assert unit["DeviceAllow"] == ["char-nvidia* rw"]
        assert unit["MemoryDenyWriteExecute"] == ["no"]
        assert unit["SystemCallFilter"] == ["@system-service"]

    def test_paths_with_characters_that_mean_something(self) -> None:
        unit = self.of(configured('/srv/a b/50%$x"y'))
        assert unit["ExecStart"][0].split(" --config ")[1] == '"/srv/a b/50%%$$x\\"y/gpuledger.yaml" --log json'
        assert unit["ReadWritePaths"] == ['"/srv/a b/50%%$x\\"y"']
        with pytest.raises(TargetError, match="cannot name"):
            unit_of(configured("/srv/a\nExecStartPre=x"), "gpuledger", self.PROGRAM)

    def test_a_configuration_below_tmp_is_seen_by_the_service(self) -> None:
        assert self.of(configured("/tmp/g"))["PrivateTmp"] == ["no"]

    @pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
    @pytest.mark.parametrize("options", [{}, {"listen": "[::]:80", "allow_remote": True}])
    def test_systemd_takes_it(self, tmp_path: Path, options: dict[str, Any]) -> None:
        folder = tmp_path / "with blanks 50%"
        folder.mkdir()
        (folder / "gpuledger.yaml").write_text("x")
        unit = tmp_path / "gpuledger.service"
        text = unit_of(configured(str(folder), **options), "root", (shutil.which("true") or "", "x y"))
        unit.write_text(text)
        done = subprocess.run(
            ("systemd-analyze", "verify", "--man=no", str(unit)),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, "")

    def test_the_command_prints_it(self, tmp_path: Path) -> None:
        assert run("init", tmp_path).exit_code == 0
        answer = run("systemd-unit", "--config", tmp_path / "gpuledger.yaml", "--user", "models")
        assert answer.exit_code == 0, answer.output
        unit = settings(answer.stdout)
        assert unit["User"] == ["models"]
        assert Path(unit["ExecStart"][0].split()[0]).exists()
        refused = run("systemd-unit", "--config", tmp_path / "gpuledger.yaml", "--user", "a b")
        assert (refused.exit_code, refused.stdout) == (2, "")
