"""The header of GGUF files: real ones, written by llama.cpp's own package, and broken ones of every kind."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuledger.tools import gguf_header
from gpuledger.tools.gguf_header import FILE_TYPES, MAX_KEPT_BYTES, GgufError, GgufHeader, read_header


def written(path: Path, texts: int = 1000, template: str = "{{ messages }}", data_type: int | None = None) -> Path:
    """A small file with all kinds of values in its metadata, and two tensors."""
    writer = gguf.GGUFWriter(None, "llama")
    writer.add_type("model")
    writer.add_context_length(4096)
    writer.add_file_type(15)
    writer.add_causal_attention(True)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_int64("x.negative", -7)
    writer.add_uint8("x.small", 200)
    writer.add_token_list([f"word-{number}" for number in range(texts)])
    writer.add_token_scores([0.5] * texts)
    writer.add_chat_template(template)
    kind = None if data_type is None else gguf.GGMLQuantizationType(data_type)
    for name, shape in (("a.weight", (64, 256)), ("b.weight", (256, 256))):
        stored = np.zeros(shape, np.float32) if kind is None else np.zeros((shape[0], 8 * 34), np.uint8)
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return written(tmp_path_factory.mktemp("whole") / "m.gguf").read_bytes()


def read(folder: Path, content: bytes) -> GgufHeader:
    path = folder / "read.gguf"
    path.write_bytes(content)
    return read_header(path)


def refused(folder: Path, content: bytes) -> str:
    with pytest.raises(GgufError) as caught:
        read(folder, content)
    return str(caught.value)


def start(keys: int = 0, tensors: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def key(name: str, kind: int) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind)


class TestWholeFiles:
    def test_what_the_package_writes_is_read(self, tmp_path: Path) -> None:
        header = read_header(written(tmp_path / "m.gguf"))
        assert header.architecture == "llama"
        assert header.of_architecture("context_length") == 4096
        assert header.quantisation == "Q4_K_M"
        assert header.values["llama.attention.causal"] is True
        assert header.values["x.negative"] == -7
        assert header.values["x.small"] == 200
        assert header.values["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
        assert header.values["tokenizer.chat_template"] == "{{ messages }}"
        assert header.tensors == 2
        assert "tokenizer.ggml.tokens" not in header.values

    @pytest.mark.parametrize("data_type", [None, 8], ids=["f32", "q8_0"])
    def test_the_end_of_the_last_tensor_is_known(self, tmp_path: Path, data_type: int | None) -> None:
        path = written(tmp_path / "m.gguf", data_type=data_type)
        header = read_header(path)
        assert not header.is_cut
        # The writer pads the last tensor.
        assert header.size_bytes - 32 < header.least_bytes <= header.size_bytes
        os.truncate(path, header.least_bytes - 1)
        assert read_header(path).is_cut

    def test_the_example_models(self, tiny_chat_gguf: Path, minilm_gguf: Path) -> None:
        chat, embedding = read_header(tiny_chat_gguf), read_header(minilm_gguf)
        assert (chat.architecture, chat.of_architecture("context_length")) == ("llama", 8192)
        assert (embedding.architecture, embedding.of_architecture("pooling_type")) == ("bert", 1)
        assert (chat.is_cut, embedding.is_cut) == (False, False)

    def test_a_long_text_is_there_and_not_kept(self, tmp_path: Path) -> None:
        header = read_header(written(tmp_path / "m.gguf", template="x" * (MAX_KEPT_BYTES + 1)))
        assert header.values["tokenizer.chat_template"] == ""

    def test_numbers_of_file_types_are_those_of_llama_cpp(self) -> None:
        theirs = {one.value: one.name.removeprefix("MOSTLY_").removeprefix("ALL_") for one in gguf.LlamaFileType}
        assert {number: theirs[number] for number in FILE_TYPES} == FILE_TYPES

    def test_sizes_of_blocks_are_those_of_ggml(self) -> None:
        theirs = {kind.value: sizes for kind, sizes in GGML_QUANT_SIZES.items()}
        ours = gguf_header.BLOCKS
        assert {kind: theirs[kind] for kind in ours} == ours


class TestBrokenFiles:
    def test_not_one_at_all(self, tmp_path: Path) -> None:
        assert refused(tmp_path, b"") == "is not a GGUF file"
        assert refused(tmp_path, b"PK" + b"\0" * 100) == "is not a GGUF file"

    def test_an_unknown_version_and_the_other_byte_order(self, tmp_path: Path) -> None:
        assert "version 1" in refused(tmp_path, start(version=1))
        assert "version 50331648" in refused(tmp_path, start(version=3 << 24))

    def test_counts_that_cannot_be(self, tmp_path: Path) -> None:
        assert "tensors" in refused(tmp_path, start(tensors=2**63))
        assert "keys" in refused(tmp_path, start(keys=2**63))

    @pytest.mark.parametrize("length", [2**64 - 1, 2**40, 100_000])
    def test_a_name_or_a_text_that_claims_too_much_is_not_read(self, tmp_path: Path, length: int) -> None:
        claim = struct.pack("<Q", length)
        assert "name" in refused(tmp_path, start(keys=1) + claim + b"x" * 50)
        assert "cut or damaged" in refused(tmp_path, start(keys=1) + key("k", 8) + claim + b"x" * 50)

    @pytest.mark.parametrize("kind", [4, 8, 12])
    def test_an_array_that_claims_too_much_is_not_read(self, tmp_path: Path, kind: int) -> None:
        array = key("k", 9) + struct.pack("<IQ", kind, 2**62) + b"\0" * 64
        assert ("cut or damaged" if kind != 8 else "texts") in refused(tmp_path, start(keys=1) + array)

    def test_arrays_in_arrays_and_types_that_are_none(self, tmp_path: Path) -> None:
        assert "type" in refused(tmp_path, start(keys=1) + key("k", 9) + struct.pack("<IQ", 9, 1) + b"\0" * 64)
        assert "type" in refused(tmp_path, start(keys=1) + key("k", 13) + b"\0" * 64)

    def test_a_tensor_or_an_alignment_that_cannot_be(self, tmp_path: Path) -> None:
        tensor = struct.pack("<Q", 1) + b"t" + struct.pack("<I", 9)
        assert "9 dimensions" in refused(tmp_path, start(tensors=1) + tensor + b"\0" * 200)
        alignment = key("general.alignment", 4) + struct.pack("<I", 0)
        assert "alignment" in refused(tmp_path, start(keys=1) + alignment)

    def test_a_pipe_does_not_hold_us_up(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe.gguf")
        with pytest.raises(GgufError, match="regular file"):
            read_header(tmp_path / "pipe.gguf")

    def test_cut_anywhere_it_is_refused_or_known_to_be_cut(self, tmp_path: Path, whole: bytes) -> None:
        least = read(tmp_path, whole).least_bytes
        for length in (*range(400), *range(400, least, 4001), least - 1):
            try:
                assert read(tmp_path, whole[:length]).is_cut
            except GgufError:
                assert length < least

    @settings(max_examples=200, deadline=None)
    @given(changes=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), min_size=1, max_size=8))
    def test_whatever_its_bytes_are_it_is_read_or_refused(
        self, tmp_path_factory: pytest.TempPathFactory, whole: bytes, changes: list[tuple[int, int]]
    ) -> None:
        damaged = bytearray(whole)
        for place, byte in changes:
            damaged[place] = byte
        try:
            header = read(tmp_path_factory.getbasetemp(), bytes(damaged))
        except GgufError as error:
            assert str(error)  # noqa: PT017 - either is right
        else:
            assert header.least_bytes > 0
