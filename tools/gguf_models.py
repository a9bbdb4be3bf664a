"""What a GGUF file is as a model: what it answers, how many files it is, what to call it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpuledger.adapters.runtimes.artifacts import parts_of
from gpuledger.adapters.runtimes.options import Task

from .gguf_header import GgufError, GgufHeader, read_header
from .reading import reason_of

# llama.h, LLAMA_POOLING_TYPE_*.
_NO_POOLING, _RANK_POOLING = 0, 4
#: Encoders that answer with a vector, whatever their file says of pooling (llama-arch.cpp).
_ENCODERS: Final = frozenset({"gemma-embedding", "t5encoder"})
#: What is part of a model, and none by itself: `general.type` in docs/gguf.md, and the architecture of projectors.
_PARTS: Final = frozenset({"adapter", "mmproj", "vocab", "imatrix", "clip"})

#: The folders of a model hub are three deep; a folder with more models is not searched to its end.
MAX_DEPTH: Final = 4
MAX_MODELS: Final = 256
_PART: Final = re.compile(r"-(?P<number>\d{5})-of-\d{5}\.gguf$")
#: How names end: the weights' type, which is no part of what a model can do.
_QUANTISATION: Final = re.compile(
    r"[-._](?:(?:i?q\d(?:_[a-z0-9]+)*)|(?:tq\d_\d)|bf16|f16|f32|fp16|mxfp4(?:_moe)?)$", re.I
)


@dataclass(frozen=True, slots=True)
class Model:
    """A model that can be served. `size_bytes`: of all its files; `context_length`: what it was trained with."""

    path: Path
    task: Task
    header: GgufHeader
    size_bytes: int

    @property
    def context_length(self) -> int | None:
        return self.header.of_architecture("context_length")

    @property
    def kind(self) -> str:
        """What it is made of, for people: `llama Q4_K_M`."""
        return " ".join(one for one in (self.header.architecture, self.header.quantisation) if one)

    @property
    def name(self) -> str:
        """What it is called without the type of its weights, in the letters that ids have: `all-minilm-l6-v2`."""
        return _QUANTISATION.sub("", self.full_name)

    @property
    def full_name(self) -> str:
        stem = _PART.sub("", self.path.name).removesuffix(".gguf").lower()
        return re.sub(r"[^a-z0-9._]+", "-", stem).strip("-._") or "model"


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A file that cannot be served, and why."""

    path: Path
    why: str


def task_of(header: GgufHeader) -> Task | None:
    """What a model answers; None for what is only a part of one."""
    kind = header.values.get("general.type", "model")
    if kind in _PARTS or header.architecture in _PARTS:
        return None
    pooling = header.of_architecture("pooling_type")
    if pooling == _RANK_POOLING:
        return Task.RERANK
    causal = header.values.get(f"{header.architecture}.attention.causal", True)
    encoder = "bert" in header.architecture or header.architecture in _ENCODERS or not causal
    return Task.EMBEDDING if encoder or pooling not in (None, _NO_POOLING) else Task.CHAT


def models_in(folder: Path) -> tuple[list[Model], list[PassedOver]]:
    """The models below a folder by path, and what was found and is none. Raises OSError for the folder itself."""
    models: list[Model] = []
    passed: list[PassedOver] = []
    for path in _gguf_files(folder, MAX_DEPTH):
        if len(models) + len(passed) == MAX_MODELS:
            passed.append(PassedOver(path, f"more than {MAX_MODELS} files: name a folder with fewer"))
            break
        part = _PART.search(path.name)
        if part is not None and int(part["number"]) != 1:
            continue
        try:
            str(path).encode()
        except UnicodeEncodeError:
            passed.append(PassedOver(Path(ascii(path.name)), "has a name that is no text"))
            continue
        found = model_of(path)
        models += [found] if isinstance(found, Model) else []
        passed += [found] if isinstance(found, PassedOver) else []
    return models, passed


def model_of(path: Path) -> Model | PassedOver:
    """The model that a file is, or is the first part of."""
    try:
        header = read_header(path)
        sizes = [read_header(part).size_bytes for part in parts_of(path)]
    except GgufError as error:
        return PassedOver(path, str(error))
    except OSError as error:
        which = "" if error.filename is None or Path(error.filename) == path else f"{Path(error.filename).name} "
        return PassedOver(path, f"{which}cannot be read: {reason_of(error)}")
    if header.is_cut:
        return PassedOver(
            path, f"is cut: it has {header.size_bytes:,} bytes, and its tensors end at {header.least_bytes:,}"
        )
    task = task_of(header)
    if task is None:
        return PassedOver(path, "is a part of a model (an adapter or a projector), and none by itself")
    return Model(path, task, header, sum(sizes))


def _gguf_files(folder: Path, depth: int) -> Iterator[Path]:
    """By path; hidden folders are caches of downloads, and a folder that cannot be read is left out."""
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            try:
                yield from _gguf_files(entry, depth - 1) if depth > 1 else ()
            except PermissionError:
                continue
        elif entry.name.endswith(".gguf"):
            yield entry
