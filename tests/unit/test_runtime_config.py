"""The configuration of a runtime, what follows from it, and the hashes that tell one from another."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from gpuledger.adapters.runtimes.artifacts import Artifacts, parts_of
from gpuledger.adapters.runtimes.config import BASE_FOLDER, LlamaCppConfig, ReferenceConfig, RuntimeConfig
from gpuledger.adapters.runtimes.engine import fault_of
from gpuledger.adapters.runtimes.llama_cpp import LlamaCpp
from gpuledger.adapters.runtimes.reference import Reference
from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import RuntimeFault
from gpuledger.domain.state import Kind

CONFIG: TypeAdapter[RuntimeConfig] = TypeAdapter(RuntimeConfig)
LLAMA = {"type": "llama_cpp", "task": "chat", "model": "m.gguf"}
EMBEDDING = {"type": "llama_cpp", "task": "embedding", "model": "m.gguf"}
REFERENCE = {"type": "reference", "task": "chat"}


def test_the_type_chooses_the_runtime() -> None:
    assert isinstance(CONFIG.validate_python(LLAMA), LlamaCppConfig)
    assert isinstance(CONFIG.validate_python(REFERENCE), ReferenceConfig)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"type": "ollama", "task": "chat"}, "does not match any of the expected tags: 'llama_cpp', 'vllm'"),
        ({**LLAMA, "task": "poetry"}, "Input should be 'embedding', 'chat', 'transcription' or 'rerank'"),
        ({**LLAMA, "modell": "x"}, "Extra inputs are not permitted"),
        ({**LLAMA, "parallel": 0}, "greater than or equal to 1"),
        ({**LLAMA, "batch_size": 256, "ubatch_size": 512}, "ubatch_size: must not be greater than batch_size"),
        ({**EMBEDDING, "context_length": 1024}, "an embedding is computed in one piece"),
        ({**LLAMA, "pooling": "mean"}, "pooling: only a deployment that serves embeddings"),
        ({**REFERENCE, "dimensions": 3}, "dimensions: only a deployment that serves embeddings"),
        ({**EMBEDDING, "max_images": 1}, "max_images: only a deployment that chats"),
        ({**LLAMA, "max_audio_bytes": 1}, "max_audio_bytes: only a deployment that transcribes"),
        ({**LLAMA, "max_images": 1}, "projector: goes with max_images"),
        ({**LLAMA, "projector": "p.gguf"}, "projector: goes with max_images"),
        ({**LLAMA, "task": "transcription"}, "task: llama.cpp is started here for text and images"),
        ({**LLAMA, "task": "rerank", "context_length": 1024}, "a text is ranked in one piece"),
        ({**REFERENCE, "check_schema": {"type": "objekt"}}, "is no JSON schema: 'objekt' is not valid"),
        ({**REFERENCE, "check_schema": {"allOf": [{"$ref": "http://x/y"}]}}, "each $ref begins with #"),
        ({**LLAMA, "sha256": "abc"}, "should match pattern"),
        ({**REFERENCE, "idle_bytes": 10, "peak_bytes": 9}, "peak_bytes: must not be less than idle_bytes"),
        ({**REFERENCE, "faults": {"explode": True}}, "Extra inputs are not permitted"),
    ],
)
def test_what_cannot_be_meant_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as raised:
        CONFIG.validate_python(config)
    assert message in str(raised.value)


def test_paths_are_relative_to_the_configuration() -> None:
    context = {BASE_FOLDER: Path("/etc/gpuledger")}
    relative = CONFIG.validate_python({**LLAMA, "server": "/opt/llama-server"}, context=context)
    assert isinstance(relative, LlamaCppConfig)
    assert relative.model == Path("/etc/gpuledger/m.gguf")
    assert relative.server == Path("/opt/llama-server")
    seeing = CONFIG.validate_python({**LLAMA, "projector": "p.gguf", "max_images": 1}, context=context)
    assert isinstance(seeing, LlamaCppConfig)
    assert seeing.projector == Path("/etc/gpuledger/p.gguf")
    home = CONFIG.validate_python({**LLAMA, "model": "~/m.gguf"}, context=context)
    assert isinstance(home, LlamaCppConfig)
    assert home.model == Path.home() / "m.gguf"


# ---- what shapes memory -----------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + bytes(1000))
    return path


def llama(model: Path, **changes: Any) -> LlamaCpp:
    config = LlamaCppConfig.model_validate({**LLAMA, "model": model, **changes})
    return LlamaCpp(config, Artifacts(), {"PATH": os.environ["PATH"]})


@pytest.mark.parametrize(
    "change",
    [
        {"context_length": 1024},
        {"batch_size": 1024},
        {"ubatch_size": 256},
        {"parallel": 2},
        {"threads": 3},
        {"gpu_layers": 1},
        {"gpu_layers": "all"},
        {"mmap": True},
        {"flash_attention": "off"},
        {"cache_type_k": "q8_0"},
        {"cache_type_v": "q8_0"},
        {"task": "embedding"},
        {"task": "embedding", "pooling": "mean"},
        {"task": "rerank"},
        {"max_inputs": 2048},
    ],
    ids=str,
)
def test_whatever_shapes_memory_is_in_the_hash(model: Path, change: dict[str, Any]) -> None:
    assert llama(model, **change).facts().config_hash != llama(model).facts().config_hash


def test_what_a_model_sees_by_is_in_the_hash(model: Path, tmp_path: Path) -> None:
    projector = tmp_path / "mmproj.gguf"
    projector.write_bytes(b"GGUF eyes")
    hashes = {llama(model).facts().config_hash}
    hashes |= {llama(model, projector=projector, max_images=count).facts().config_hash for count in (1, 2)}
    projector.write_bytes(b"GGUF other eyes")
    hashes.add(llama(model, projector=projector, max_images=1).facts().config_hash)
    assert len(hashes) == 4
    argv = llama(model, projector=projector, max_images=1).command(1, "key").argv
    assert argv[argv.index("--mmproj") + 1] == str(projector)


def test_where_a_model_lies_shapes_nothing_and_what_it_is_does(model: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere.gguf"
    moved.write_bytes(model.read_bytes())
    assert llama(moved).facts() == llama(model).facts()
    moved.write_bytes(b"GGUF" + bytes(999) + b"\1")
    assert llama(moved).facts().config_hash != llama(model).facts().config_hash


def test_faults_and_times_shape_nothing() -> None:
    def hash_of(**changes: Any) -> str:
        return Reference(ReferenceConfig.model_validate({**REFERENCE, **changes})).facts().config_hash

    assert hash_of(load_ms=5, tokens=9, faults={"ignore_term": True}) == hash_of()
    assert hash_of(idle_bytes=2**24) != hash_of()


def test_the_total_context_is_that_of_all_slots(model: Path) -> None:
    argv = llama(model, context_length=1000, parallel=3).command(1, "key").argv
    assert argv[argv.index("--ctx-size") + 1] == "3000"


def test_the_key_is_in_the_environment_alone(model: Path) -> None:
    command = llama(model).command(1, "secret-key")
    assert "secret-key" in command.environment.values()
    assert not any("secret-key" in argument for argument in command.argv)


@pytest.mark.parametrize(("layers", "kind", "device"), [(0, Kind.HOST, "none"), (9, Kind.GPU, "CUDA0")])
def test_nothing_falls_back_to_another_kind(model: Path, layers: int, kind: Kind, device: str) -> None:
    engine = llama(model, gpu_layers=layers)
    argv = engine.command(1, "key").argv
    assert engine.kinds == {kind}
    assert argv[argv.index("--device") + 1] == device


# ---- artifacts --------------------------------------------------------------------------------------------------


def test_a_file_is_read_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    really_digest = hashlib.file_digest

    def digest(file: Any, name: str) -> Any:
        reads.append(name)
        return really_digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", digest)
    artifacts = Artifacts()
    assert artifacts.inspect(model) == artifacts.inspect(model)
    assert len(reads) == 1


def test_a_flipped_byte_is_found_though_size_and_time_are_as_before(model: Path) -> None:
    artifacts = Artifacts()
    before, times = artifacts.inspect(model), model.stat()
    with model.open("r+b") as file:
        file.seek(500)
        file.write(b"\1")
    os.utime(model, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert model.stat().st_size == times.st_size
    assert artifacts.inspect(model).sha256 != before.sha256


def test_a_split_model_is_all_of_its_parts(tmp_path: Path) -> None:
    first, second = parts_of(tmp_path / "m-00001-of-00002.gguf")
    assert second.name == "m-00002-of-00002.gguf"
    first.write_bytes(b"GGUF one")
    second.write_bytes(b"GGUF second")
    artifacts = Artifacts()
    before = artifacts.inspect(first)
    assert before.size_bytes == 19
    second.write_bytes(b"GGUF SECOND")
    assert artifacts.inspect(first).sha256 != before.sha256
    second.unlink()
    with pytest.raises(RuntimeFault) as raised:
        artifacts.inspect(first)
    assert (raised.value.failure, raised.value.detail) == (Failure.MODEL_LOAD_FAILED, "artifact_missing")


def folder_of(path: Path, **files: bytes) -> Path:
    for name, content in files.items():
        file = path / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return path


def test_a_folder_is_all_that_shapes_its_model(tmp_path: Path) -> None:
    """Names and content, in whatever order the file system has them; links as what they point to."""
    folder = folder_of(tmp_path / "a", weights=b"one", config=b"{}", sub__tokenizer=b"t")
    artifacts = Artifacts()
    before = artifacts.inspect(folder)
    assert before.size_bytes == 6
    same = folder_of(tmp_path / "b", sub__tokenizer=b"t", config=b"{}", blobs=b"")
    (same / "blobs").unlink()
    (tmp_path / "blob").write_bytes(b"one")
    (same / "weights").symlink_to(tmp_path / "blob")
    assert artifacts.inspect(same) == before
    for prose in ("README.md", "LICENSE.txt", "Notice.txt"):
        (same / prose).write_bytes(b"prose")
    (same / ".cache").mkdir()
    (same / ".cache" / "lock").write_bytes(b"x")
    assert artifacts.inspect(same) == before
    (tmp_path / "blob").write_bytes(b"two")
    assert artifacts.inspect(same).sha256 != before.sha256
    (folder / "weights").rename(folder / "renamed")
    assert artifacts.inspect(folder).sha256 != before.sha256


@pytest.mark.parametrize("name", ["merges.txt", "vocab.txt", "spiece.model.txt"])
def test_texts_that_make_tokens_shape_a_model(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path / "a", weights=b"one")
    (folder / name).write_text("a b\nc d\n")
    artifacts = Artifacts()
    before = artifacts.inspect(folder)
    (folder / name).write_text("a b\nc e\n")
    assert artifacts.inspect(folder).sha256 != before.sha256


def test_a_link_to_a_folder_is_not_passed_over(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a", weights=b"one")
    folder_of(tmp_path / "b", tokenizer=b"t")
    (folder / "more").symlink_to(tmp_path / "b")
    with pytest.raises(RuntimeFault) as raised:
        Artifacts().inspect(folder)
    assert raised.value.detail == "artifact_unreadable"
    assert b"is a link to a folder" in raised.value.evidence


def test_a_folder_is_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuledger.adapters.runtimes.artifacts.MAX_FILES", 2)
    folder = folder_of(tmp_path / "a", x=b"1", y=b"2")
    Artifacts().inspect(folder)
    folder_of(folder, z=b"3")
    with pytest.raises(RuntimeFault) as raised:
        Artifacts().inspect(folder)
    assert raised.value.detail == "artifact_unreadable"


def test_known_hashes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest goes, and is read again where it is asked for."""
    monkeypatch.setattr("gpuledger.adapters.runtimes.artifacts.MAX_KNOWN_FILES", 2)
    artifacts, models = Artifacts(), [tmp_path / name for name in "abc"]
    for model in models:
        model.write_bytes(model.name.encode())
    first = [artifacts.inspect(model).sha256 for model in models]
    assert [artifacts.inspect(model).sha256 for model in models] == first
    assert len(vars(artifacts)["_hashes"]) == 2


@pytest.mark.parametrize(
    ("name", "detail"),
    [("absent.gguf", "artifact_missing"), ("folder", "artifact_missing"), ("pipe", "artifact_unreadable")],
)
def test_what_is_no_file_is_no_model(tmp_path: Path, name: str, detail: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RuntimeFault) as raised:
        llama(tmp_path / name).facts()
    assert (raised.value.failure, raised.value.detail) == (Failure.MODEL_LOAD_FAILED, detail)


def test_a_pinned_hash_must_be_that_of_the_file(model: Path) -> None:
    sha256 = Artifacts().inspect(model).sha256
    assert llama(model, sha256=sha256).facts().artifact_sha256 == sha256
    with pytest.raises(RuntimeFault) as raised:
        llama(model, sha256="0" * 64).facts()
    assert (raised.value.failure, raised.value.detail) == (Failure.ARTIFACT_CORRUPT, "sha256_mismatch")


# ---- programs ---------------------------------------------------------------------------------------------------


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_llama_server_on_the_path_is_preferred(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = script(tmp_path / "llama-server", "echo 'version: 7123 (0123abcd)' >&2")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    engine = llama(model)
    assert engine.command(1, "key").argv[0] == str(found)
    assert engine.facts().runtime_version == "llama-server-7123-0123abcd"
    assert (
        engine.facts().config_hash
        != llama(model, server=script(tmp_path / "x", "echo 'version: 1 (a)'")).facts().config_hash
    )


@pytest.mark.parametrize("text", ["exit 1", "echo hello"])
def test_a_server_that_does_not_know_its_version_is_none(model: Path, tmp_path: Path, text: str) -> None:
    with pytest.raises(RuntimeFault) as raised:
        llama(model, server=script(tmp_path / "server", text)).facts()
    assert (raised.value.failure, raised.value.detail) == (Failure.MODEL_LOAD_FAILED, "no_llama_server")


def test_a_server_that_is_not_there_is_none(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeFault) as raised:
        llama(model, server=tmp_path / "absent").facts()
    assert raised.value.detail == "no_llama_server"


# ---- what runtimes say ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "complaint"),
    [
        (b"gguf_init_from_reader: invalid magic characters", (Failure.MODEL_LOAD_FAILED, "model_corrupt")),
        (b"data is not within the file bounds, model is corrupted or incomplete",
         (Failure.MODEL_LOAD_FAILED, "model_corrupt")),
        (b"unknown model architecture: 'foo'", (Failure.MODEL_LOAD_FAILED, "model_not_supported")),
        (b"couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 1", (Failure.MODEL_LOAD_FAILED, "port_in_use")),
        (b"something else", None),
    ],
)  # fmt: skip
def test_llama_cpp_is_understood(model: Path, output: bytes, complaint: tuple[Failure, str] | None) -> None:
    assert llama(model).complaint(output) == complaint


def test_want_of_memory_explains_an_end_at_any_time_and_other_words_a_load_alone(model: Path) -> None:
    engine, killed = llama(model), "killed"
    memory, port = b"cudaMalloc failed: out of memory\n", b"couldn't bind HTTP server socket\n"
    for failure in (Failure.MODEL_LOAD_FAILED, Failure.RUNTIME_CRASH):
        assert fault_of(engine, failure, killed, port + memory).failure is Failure.GPU_OOM
    assert fault_of(engine, Failure.MODEL_LOAD_FAILED, killed, port).detail == "port_in_use"
    crash = fault_of(engine, Failure.RUNTIME_CRASH, killed, port)
    assert (crash.failure, crash.detail, crash.evidence) == (Failure.RUNTIME_CRASH, killed, port)


@pytest.mark.parametrize(
    ("key", "value"),
    [("parallel", 257), ("max_inputs", 2049), ("load_timeout_seconds", 86_401), ("threads", 1025), ("parallel", 0)],
)
def test_every_bound_of_an_option_holds(key: str, value: int) -> None:
    with pytest.raises(ValidationError, match=key):
        LlamaCppConfig.model_validate({"type": "llama_cpp", "task": "chat", "model": "/m.gguf", key: value})
