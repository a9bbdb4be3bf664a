"""What a GGUF file says of itself: its metadata, and how long it has to be. Not one tensor is read.

The format is ggml's docs/gguf.md, versions 2 and 3. A file may be cut, damaged or hostile: every length is held
against what the file still has, and against a bound, before anything is read for it.
"""

from __future__ import annotations

import math
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

Value: TypeAlias = str | int | float | bool

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)

# Beyond what any model has, and little enough that a file which lies costs seconds and a few MB.
MAX_KEYS: Final = 10_000
MAX_TENSORS: Final = 200_000
#: Texts in arrays, all together: vocabularies have up to half a million.
MAX_TEXTS: Final = 2_000_000
#: Of a key, or of the name of a tensor (docs/gguf.md).
MAX_NAME_BYTES: Final = 65_535
#: A longer text (a chat template) is there, and not kept.
MAX_KEPT_BYTES: Final = 4_096
MAX_DIMENSIONS: Final = 8
MAX_ALIGNMENT: Final = 1 << 20

_DEFAULT_ALIGNMENT: Final = 32
_STRING, _ARRAY, _BOOL = 8, 9, 7
#: Type of a value -> how it is packed.
_SCALARS: Final[Mapping[int, str]] = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    _BOOL: "<B",
    10: "<Q",
    11: "<q",
    12: "<d",
}
#: Type of a tensor -> (values in a block, bytes of a block), as in ggml.c; one that is missing here counts as nothing.
BLOCKS: Final[Mapping[int, tuple[int, int]]] = {
    0: (1, 4),  # F32
    1: (1, 2),  # F16
    2: (32, 18),  # Q4_0
    3: (32, 20),  # Q4_1
    6: (32, 22),  # Q5_0
    7: (32, 24),  # Q5_1
    8: (32, 34),  # Q8_0
    10: (256, 84),  # Q2_K
    11: (256, 110),  # Q3_K
    12: (256, 144),  # Q4_K
    13: (256, 176),  # Q5_K
    14: (256, 210),  # Q6_K
    16: (256, 66),  # IQ2_XXS
    17: (256, 74),  # IQ2_XS
    18: (256, 98),  # IQ3_XXS
    19: (256, 50),  # IQ1_S
    20: (32, 18),  # IQ4_NL
    21: (256, 110),  # IQ3_S
    22: (256, 82),  # IQ2_S
    23: (256, 136),  # IQ4_XS
    29: (256, 56),  # IQ1_M
    30: (1, 2),  # BF16
    39: (32, 17),  # MXFP4
}
#: `general.file_type` (llama.h, LLAMA_FTYPE_*): most of the weights.
FILE_TYPES: Final[Mapping[int, str]] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4_MOE",
}


class GgufError(Exception):
    """The file is no GGUF file, or not a whole one; the message says why, in words."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """`values`: the metadata that is one value, too long a text as ''. `least_bytes`: what the whole file has."""

    values: Mapping[str, Value]
    tensors: int
    size_bytes: int
    least_bytes: int

    @property
    def architecture(self) -> str:
        return str(self.values.get("general.architecture", ""))

    @property
    def is_cut(self) -> bool:
        """Whether the file is shorter than its tensors, as after a download that broke off."""
        return self.size_bytes < self.least_bytes

    @property
    def quantisation(self) -> str:
        """How most of the weights are stored, as `Q4_K_M`; empty where it is not told."""
        file_type = self.integer("general.file_type")
        return "" if file_type is None else FILE_TYPES.get(file_type, "")

    def integer(self, key: str) -> int | None:
        value = self.values.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def of_architecture(self, key: str) -> int | None:
        """The number that the architecture's own key has, as `context_length`."""
        return self.integer(f"{self.architecture}.{key}")


def read_header(path: Path) -> GgufHeader:
    """Raises GgufError, OSError."""
    # A pipe that nobody writes to would hold us up.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise GgufError("is not a regular file")
        return _Reader(file, facts.st_size).header()


class _Reader:
    """A position in a file, and how much is left of what may be read."""

    def __init__(self, file: BinaryIO, size_bytes: int) -> None:
        self._file = file
        self._size_bytes = size_bytes
        self._at = 0
        self._texts_left = MAX_TEXTS

    def header(self) -> GgufHeader:
        if self._size_bytes < 24 or self._take(4) != _MAGIC:
            raise GgufError("is not a GGUF file")
        version = self._number("<I")
        if version not in _VERSIONS:
            raise GgufError(f"is GGUF of version {version}, and 2 and 3 are known")
        tensors = self._count("tensors", MAX_TENSORS)
        keys = self._count("keys", MAX_KEYS)
        values: dict[str, Value] = {}
        for _ in range(keys):
            name = self._name()
            value = self._value(self._number("<I"))
            if value is not None:
                values[name] = value
        return GgufHeader(values, tensors, self._size_bytes, self._end_of_tensors(tensors, values))

    # ---- metadata ----

    def _value(self, kind: int) -> Value | None:
        """A value; None for an array, which is passed over."""
        if kind == _STRING:
            length = self._number("<Q")
            kept = length <= MAX_KEPT_BYTES
            return self._take(length).decode("utf-8", "replace") if kept else self._skip(length)
        if kind == _ARRAY:
            self._skip_array()
            return None
        (value,) = self._unpack(self._packed(kind))
        return bool(value) if kind == _BOOL else value

    def _skip_array(self) -> None:
        kind, count = self._number("<I"), self._number("<Q")
        if kind != _STRING:
            self._skip(count * struct.calcsize(self._packed(kind)))
            return
        if count > self._texts_left:
            raise GgufError(f"has more than {MAX_TEXTS:,} texts in its metadata")
        self._texts_left -= count
        for _ in range(count):
            self._skip(self._number("<Q"))

    def _packed(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise GgufError(f"is damaged: byte {self._at} has no type of a value")
        return _SCALARS[kind]

    # ---- tensors ----

    def _end_of_tensors(self, count: int, values: Mapping[str, Value]) -> int:
        """Where the last tensor ends, as far as the sizes of its type are known."""
        ends = [self._tensor_end() for _ in range(count)]
        alignment = values.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT:
            raise GgufError("is damaged: its alignment cannot be one")
        return -(-self._at // alignment) * alignment + max(ends, default=0)

    def _tensor_end(self) -> int:
        self._name()
        dimensions = self._number("<I")
        if dimensions > MAX_DIMENSIONS:
            raise GgufError(f"is damaged: a tensor has {dimensions} dimensions")
        values = math.prod(self._number("<Q") for _ in range(dimensions))
        kind, offset = self._number("<I"), self._number("<Q")
        in_block, block_bytes = BLOCKS.get(kind, (1, 0))
        return offset + values // in_block * block_bytes

    # ---- bytes ----

    def _name(self) -> str:
        length = self._number("<Q")
        if length > MAX_NAME_BYTES:
            raise GgufError(f"is damaged: at byte {self._at} a name has {length:,} bytes")
        return self._take(length).decode("utf-8", "replace")

    def _count(self, what: str, bound: int) -> int:
        count = self._number("<Q")
        if count > bound:
            raise GgufError(f"has {count:,} {what}, and more than {bound:,} cannot be")
        return count

    def _number(self, packed: str) -> int:
        return int(self._unpack(packed)[0])

    def _unpack(self, packed: str) -> tuple[Any, ...]:
        return struct.unpack(packed, self._take(struct.calcsize(packed)))

    def _take(self, length: int) -> bytes:
        self._within(length)
        taken = self._file.read(length)
        if len(taken) != length:
            raise GgufError("became shorter while it was read")
        self._at += length
        return taken

    def _skip(self, length: int) -> str:
        self._within(length)
        self._at += length
        self._file.seek(self._at)
        return ""

    def _within(self, length: int) -> None:
        if length > self._size_bytes - self._at:
            raise GgufError(f"is cut or damaged: it ends at byte {self._size_bytes:,}, within its metadata")
