"""vllm and command: what their configurations may say, the command lines that follow, and what shapes their hashes."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from gpuledger.adapters.runtimes.artifacts import Artifacts
from gpuledger.adapters.runtimes.command import CommandServer
from gpuledger.adapters.runtimes.config import BASE_FOLDER, CommandConfig, RuntimeConfig, VllmConfig
from gpuledger.adapters.runtimes.options import Call
from gpuledger.adapters.runtimes.vllm import Vllm
from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import RuntimeFault
from gpuledger.domain.state import Kind

CONFIG: TypeAdapter[RuntimeConfig] = TypeAdapter(RuntimeConfig)
VLLM = {"type": "vllm", "task": "chat", "model": "m"}
COMMAND = {"type": "command", "task": "chat", "command": ["server", "--port", "{port}"], "version": "1"}
#: Of a scheduler: only what is named may leave it.
SOURCE = {"PATH": os.environ["PATH"], "HF_TOKEN": "hf_secret", "DATABASE_PASSWORD": "hunter2"}
INHERITED = {"PATH": os.environ["PATH"]}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**VLLM, "parallel": 8, "batch_size": 4}, "batch_size: must not be less than parallel"),
        ({**VLLM, "task": "embedding", "context_length": 1024}, "batch_size: a text is computed in one piece"),
        ({**VLLM, "gpu_memory_utilization_bp": 10_001}, "less than or equal to 10000"),
        ({**VLLM, "sleep_level": 3}, "Input should be 1 or 2"),
        ({**VLLM, "dtype": "--x y"}, "should match pattern"),
        ({**VLLM, "command": []}, "at least 1 item"),
        ({**VLLM, "arguments": ["--port", "1"]}, "arguments: --port follows from the other keys"),
        ({**VLLM, "arguments": ["--max_model_len=9"]}, "arguments: --max_model_len follows from the other keys"),
        ({**VLLM, "arguments": ["--no-enable-sleep-mode"]}, "follows from the other keys"),
        ({**VLLM, "arguments": ["-tp", "2"]}, "arguments: -tp follows from the other keys"),
        ({**VLLM, "arguments": ["--enable-log-requests"]}, "follows from the other keys"),
        ({**VLLM, "arguments": ["a\0b"]}, "should match pattern"),
        ({**VLLM, "set": {"VLLM_API_KEY": "mine"}}, "set: VLLM_API_KEY is set by gpuledger"),
        ({**VLLM, "set": {"PYTHONPATH": "/x"}}, "set: PYTHONPATH is set by gpuledger"),
        ({**VLLM, "set": {"CUDA_VISIBLE_DEVICES": "0"}}, "set: CUDA_VISIBLE_DEVICES is set by gpuledger"),
        ({**VLLM, "environment": ["GPULEDGER_RESIDENT"]}, "environment: GPULEDGER_RESIDENT is set by gpuledger"),
        ({**VLLM, "environment": ["A=B"]}, "should match pattern"),
        ({**COMMAND, "version": None}, "version: give either version or version_command"),
        ({**COMMAND, "version_command": ["x"]}, "version: give either version or version_command"),
        ({**COMMAND, "command": ["server"]}, "command: must say {port} somewhere"),
        ({**COMMAND, "command": ["s", "{port}", "{api_key}"]}, "command: the key is never an argument"),
        ({**COMMAND, "set": {"KEY": "{api_key}"}}, "command: the key is never an argument"),
        ({**COMMAND, "command": ["s", "{port}", "{model}"]}, "model: is what {model} stands for, and is missing"),
        ({**COMMAND, "sha256": "0" * 64}, "sha256: is that of model"),
        ({**COMMAND, "api_key_variable": "KEY", "set": {"KEY": "mine"}}, "set: KEY is set by gpuledger"),
        *(
            ({**COMMAND, "api_key_variable": name}, f"api_key_variable: {name} is there for something else")
            for name in ("CUDA_VISIBLE_DEVICES", "GPULEDGER_RESIDENT", "PATH", "LD_PRELOAD", "LD_LIBRARY_PATH")
        ),
        ({**COMMAND, "paths": {"poetry": "/x"}}, "Input should be 'embeddings'"),
        ({**COMMAND, "paths": {"chat": "http://elsewhere/"}}, "should match pattern"),
        ({**COMMAND, "paths": {"chat": "/x y"}}, "should match pattern"),
        ({**COMMAND, "sleep": {"sleep_path": "/s"}}, "Field required"),
        ({**COMMAND, "shell": True}, "Extra inputs are not permitted"),
    ],
)
def test_what_cannot_be_meant_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as raised:
        CONFIG.validate_python(config)
    assert message in str(raised.value)


def test_a_name_that_only_begins_as_one_of_ours_is_free() -> None:
    known = {
        **COMMAND,
        "api_key_variable": "KEY",
        "set": {"KEYRING": "/x"},
        "environment": ["CUDA_VISIBLE_DEVICES_OLD"],
    }
    assert CONFIG.validate_python(known)


def test_paths_are_relative_to_the_configuration() -> None:
    context = {BASE_FOLDER: Path("/etc/gpuledger")}
    vllm = CONFIG.validate_python({**VLLM, "command": ["bin/vllm", "a/b"]}, context=context)
    assert isinstance(vllm, VllmConfig)
    assert vllm.model == Path("/etc/gpuledger/m")
    assert vllm.command == ("/etc/gpuledger/bin/vllm", "a/b"), "of a command line the program alone is a path to us"
    server = CONFIG.validate_python({**COMMAND, "model": "m", "files": ["a", "/b"]}, context=context)
    assert isinstance(server, CommandConfig)
    assert server.files == (Path("/etc/gpuledger/a"), Path("/b"))
    assert server.command[0] == "server", "a bare name is looked for on PATH"


# ---- programs ---------------------------------------------------------------------------------------------------


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def counting(path: Path, version: str) -> Path:
    """A program that writes down how often it was asked."""
    return script(path, f"echo asked >> {shlex.quote(str(path))}.log\necho starting\necho '{version}'")


def asked(path: Path) -> int:
    return len(Path(f"{path}.log").read_text().splitlines())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(100))
    return folder


def vllm(model: Path, program: Path, **changes: Any) -> Vllm:
    config = VllmConfig.model_validate({**VLLM, "model": model, "command": [str(program)], **changes})
    return Vllm(config, Artifacts(), INHERITED, SOURCE)


def command(**changes: Any) -> CommandServer:
    server = {**COMMAND, "command": [sys.executable, "{port}"], **changes}
    return CommandServer(CommandConfig.model_validate(server), Artifacts(), INHERITED, SOURCE)


def test_each_build_is_asked_for_its_version_once(model: Path, tmp_path: Path) -> None:
    program = counting(tmp_path / "vllm", "0.24.0")
    engine = vllm(model, program)
    assert {engine.facts().runtime_version for _ in range(3)} == {"vllm-0.24.0"}
    assert asked(program) == 1
    counting(program, "0.25.0rc1")
    assert engine.facts().runtime_version == "vllm-0.25.0rc1"
    assert asked(program) == 2


def test_packages_beside_a_program_are_part_of_its_build(model: Path, tmp_path: Path) -> None:
    """`pip install --upgrade` leaves the program as it is, where that is `python -m`."""
    packages = tmp_path / "lib" / "python3.12" / "site-packages"
    (tmp_path / "bin").mkdir()
    packages.mkdir(parents=True)
    program = counting(tmp_path / "bin" / "vllm", "0.24.0")
    engine = vllm(model, program)
    engine.facts()
    (packages / "vllm-0.25.0.dist-info").mkdir()
    engine.facts()
    assert asked(program) == 2


@pytest.mark.parametrize("text", ["exit 1", "echo hello", "echo 0.24.0; exit 3", ":"])
def test_a_vllm_that_does_not_know_its_version_is_none(model: Path, tmp_path: Path, text: str) -> None:
    with pytest.raises(RuntimeFault) as raised:
        vllm(model, script(tmp_path / "vllm", text)).facts()
    assert (raised.value.failure, raised.value.detail) == (Failure.MODEL_LOAD_FAILED, "no_vllm")


@pytest.mark.parametrize("name", ["no-such-program-anywhere", "/nowhere/vllm", "/etc/passwd"])
def test_a_program_that_is_not_there_is_told(model: Path, name: str) -> None:
    engines = vllm(model, Path("x"), command=[name]), command(command=[name, "{port}"])
    for engine in engines:
        with pytest.raises(RuntimeFault) as raised:
            engine.command(1, "key")
        assert (raised.value.failure, raised.value.detail) == (Failure.MODEL_LOAD_FAILED, "no_program")
        assert name.encode() in raised.value.evidence


def test_a_version_command_is_asked_with_the_servers_environment(tmp_path: Path) -> None:
    program = script(tmp_path / "v", 'echo one; echo "two $HF_TOKEN$DATABASE_PASSWORD$FLAVOUR"; echo')
    engine = command(
        version=None, version_command=[str(program)], environment=["HF_TOKEN", "ABSENT"], set={"FLAVOUR": "-x"}
    )
    assert engine.facts().runtime_version == "two hf_secret-x"


# ---- command lines ----------------------------------------------------------------------------------------------


def test_the_command_line_of_vllm(model: Path, tmp_path: Path) -> None:
    program = counting(tmp_path / "vllm", "0.24.0")
    engine = vllm(
        model,
        program,
        context_length=8192,
        parallel=4,
        batch_size=2048,
        gpu_memory_utilization_bp=4505,
        kv_cache_bytes=2**30,
        kv_cache_dtype="fp8",
        quantization="awq",
        enforce_eager=True,
        max_images=2,
        sleep_level=2,
        served_name="vision.chat@1",
        arguments=["--tool-call-parser", "hermes"],
    )
    started = engine.command(4321, "secret-key")
    assert engine.kinds == {Kind.GPU}
    assert started.argv[:3] == (str(program), "serve", str(model))
    options = dict(zip(started.argv, started.argv[1:], strict=False))
    assert {name: options[name] for name in options if name.startswith("--")}.items() >= {
        "--host": "127.0.0.1",
        "--port": "4321",
        "--served-model-name": "vision.chat@1",
        "--middleware": "gpuledger_guard.Guard",
        "--max-model-len": "8192",
        "--max-num-seqs": "4",
        "--max-num-batched-tokens": "2048",
        "--gpu-memory-utilization": "0.4505",
        "--kv-cache-memory-bytes": "1073741824",
        "--kv-cache-dtype": "fp8",
        "--quantization": "awq",
        "--tool-call-parser": "hermes",
        "--max-log-len": "0",
    }.items()
    assert json.loads(options["--limit-mm-per-prompt"]) == {"image": 2}
    assert {"--enforce-eager", "--enable-sleep-mode", "--disable-uvicorn-access-log"} <= set(started.argv)
    assert not any("secret-key" in argument for argument in started.argv)
    assert started.environment["VLLM_API_KEY"] == "secret-key"
    assert started.environment["VLLM_SERVER_DEV_MODE"] == "1"


def test_what_pools_is_told_so(model: Path, tmp_path: Path) -> None:
    for task, pools in (("chat", False), ("transcription", False), ("embedding", True), ("rerank", True)):
        argv = vllm(model, counting(tmp_path / "vllm", "1.0"), task=task).command(1, "key").argv
        assert ("--runner" in argv) is pools


def test_levels_of_sleep(model: Path, tmp_path: Path) -> None:
    """After level 2 the weights are read again before anything else is taken (docs.vllm.ai, "Sleep Mode")."""
    first, second = (VllmConfig.model_validate({**VLLM, "sleep_level": level}).manners.sleep for level in (1, 2))
    assert first is not None
    assert second is not None
    assert (first.sleep, first.wake) == ((Call("/sleep?level=1"),), (Call("/wake_up"),))
    assert [call.path for call in second.wake] == ["/wake_up?tags=weights", "/collective_rpc", "/wake_up?tags=kv_cache"]


def test_only_three_words_in_braces_stand_for_something(model: Path) -> None:
    engine = command(
        command=[sys.executable, "--port={port}", '{"image": 2}', "{other}", "--name", "{name}", "{model}/x"],
        model=model,
        served_name="rag@1",
        set={"URL": "http://127.0.0.1:{port}/{name}"},
        api_key_variable="API_KEY",
    )
    started = engine.command(4321, "secret-key")
    assert started.argv[1:] == ("--port=4321", '{"image": 2}', "{other}", "--name", "rag@1", f"{model}/x")
    assert started.environment == {"URL": "http://127.0.0.1:4321/rag@1", "API_KEY": "secret-key"}


@pytest.mark.parametrize("kind", ["vllm", "command"])
def test_of_the_environment_only_what_is_named_is_inherited(model: Path, tmp_path: Path, kind: str) -> None:
    chosen: dict[str, Any] = {"environment": ["HF_TOKEN", "ABSENT"]}
    engine = vllm(model, counting(tmp_path / "v", "1.0"), **chosen) if kind == "vllm" else command(**chosen)
    variables = engine.command(1, "key").environment
    assert variables["HF_TOKEN"] == "hf_secret"
    assert "ABSENT" not in variables
    assert "DATABASE_PASSWORD" not in variables


# ---- what shapes memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"context_length": 256},
        {"batch_size": 1024},
        {"parallel": 2},
        {"max_inputs": 2},
        {"max_images": 1},
        {"task": "rerank"},
        {"gpu_memory_utilization_bp": 5000},
        {"kv_cache_bytes": 2**30},
        {"dtype": "float16"},
        {"quantization": "awq"},
        {"kv_cache_dtype": "fp8"},
        {"enforce_eager": True},
        {"sleep_level": 1},
        {"arguments": ["--seed", "1"]},
        {"set": {"VLLM_ATTENTION_BACKEND": "X"}},
        {"environment": ["X"]},
    ],
    ids=str,
)
def test_whatever_shapes_the_memory_of_vllm_is_in_its_hash(model: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    program = counting(tmp_path / "vllm", "1.0")
    assert vllm(model, program, **change).facts().config_hash != vllm(model, program).facts().config_hash


@pytest.mark.parametrize(
    "change",
    [
        {"served_name": "other"},
        {"load_timeout_seconds": 7},
        {"metrics": {"running": "x"}},
        {"check_schema": {"type": "object"}},
        {"guard": False},
    ],
    ids=str,
)
def test_what_shapes_nothing_is_not(model: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    program = counting(tmp_path / "vllm", "1.0")
    assert vllm(model, program, **change).facts() == vllm(model, program).facts()


def test_where_a_model_lies_shapes_nothing_and_what_it_is_does(model: Path, tmp_path: Path) -> None:
    arguments = [sys.executable, "{port}", "{model}"]
    before = command(command=arguments, model=model).facts()
    moved = model.rename(tmp_path / "moved")
    assert command(command=arguments, model=moved).facts() == before
    (moved / "model.safetensors").write_bytes(bytes(99) + b"\1")
    after = command(command=arguments, model=moved).facts()
    assert (after.config_hash, after.artifact_sha256) != (before.config_hash, before.artifact_sha256)


@pytest.mark.parametrize("change", [{"version": "2"}, {"command": [sys.executable, "{port}", "-x"]}, {"parallel": 2}])
def test_whatever_shapes_the_memory_of_a_server_is_in_its_hash(change: dict[str, Any]) -> None:
    assert command(**change).facts().config_hash != command().facts().config_hash


def test_files_of_a_server_are_in_its_hash(tmp_path: Path) -> None:
    file = tmp_path / "engine.plan"
    file.write_bytes(b"one")
    before = command(files=[str(file)]).facts()
    assert before.artifact_bytes == 3
    file.write_bytes(b"two")
    assert command(files=[str(file)]).facts().config_hash != before.config_hash


def test_a_pinned_hash_must_be_that_of_the_model(model: Path, tmp_path: Path) -> None:
    for engine in (
        vllm(model, counting(tmp_path / "vllm", "1.0"), sha256="0" * 64),
        command(model=model, sha256="0" * 64),
    ):
        with pytest.raises(RuntimeFault) as raised:
            engine.facts()
        assert (raised.value.failure, raised.value.detail) == (Failure.ARTIFACT_CORRUPT, "sha256_mismatch")


@pytest.mark.parametrize("alone", [True, False])
def test_a_server_says_whether_it_starts_alone(alone: bool) -> None:
    assert command(starts_alone=alone).facts().starts_alone is alone
