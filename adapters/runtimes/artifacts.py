"""SHA-256 of model files. Flipped bytes of weights load and serve garbage: only the hash tells (runtimes.md)."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import RuntimeFault

#: Of the files whose hashes are remembered, about 300 bytes each. A folder of weights has a few hundred at most.
MAX_KNOWN_FILES: Final = 16_384
#: A folder with more is no model, but somebody's disk.
MAX_FILES: Final = 4_096
#: What lies beside a model in its folder and shapes nothing. Texts are not all prose: tokenizers are made of some
#: (merges.txt, vocab.txt), and a word in them that has changed makes nonsense of good weights.
_PROSE: Final = (".md", ".png", ".jpg", ".jpeg", ".gif", ".pdf")
_PROSE_TEXTS: Final = ("license", "licence", "notice", "readme", "changelog", "use_policy", "requirements")
_SPLIT = re.compile(r"^(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})(?P<suffix>\.gguf)$")


@dataclass(frozen=True, slots=True)
class Artifact:
    """A model as it lies on disk.

    Of a split model `sha256` is the hash of the parts' hashes, of a folder that of the names and hashes of its files.
    """

    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Version:
    """Which content a file has, as far as the file system tells: ctime moves even when mtime is set back."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int


class Artifacts:
    """Hashes each version of a file once in the life of a scheduler. Blocking (about a second a GB); thread-safe.

    The cache is in memory on purpose: every start of the scheduler reads the weights anew, so bits that rot on a
    disk, which move no inode and no time, are found then.
    """

    def __init__(self) -> None:
        self._hashes: dict[_Version, str] = {}
        self._lock = threading.Lock()

    def inspect(self, model: Path) -> Artifact:
        """Of a file with its other parts, or a folder. Raises RuntimeFault: MODEL_LOAD_FAILED `artifact_missing`,
        `artifact_unreadable`."""
        try:
            if model.is_dir():
                return self._inspect_folder(model)
            parts = [self._inspect_file(path) for path in parts_of(model)]
        except FileNotFoundError as error:
            raise RuntimeFault(Failure.MODEL_LOAD_FAILED, "artifact_missing", str(error).encode()) from error
        except OSError as error:
            raise RuntimeFault(Failure.MODEL_LOAD_FAILED, "artifact_unreadable", str(error).encode()) from error
        if len(parts) == 1:
            return parts[0]
        together = hashlib.sha256("".join(part.sha256 for part in parts).encode())
        return Artifact(together.hexdigest(), _size(parts))

    def inspect_pinned(self, model: Path, sha256: str | None) -> Artifact:
        """The same. Raises RuntimeFault (ARTIFACT_CORRUPT `sha256_mismatch`) too, when another hash was pinned."""
        artifact = self.inspect(model)
        if sha256 not in (None, artifact.sha256):
            raise RuntimeFault(Failure.ARTIFACT_CORRUPT, "sha256_mismatch", artifact.sha256.encode())
        return artifact

    def _inspect_folder(self, folder: Path) -> Artifact:
        """Weights, configuration and tokenizer, whatever they are called. Raises OSError."""
        paths = sorted(_files(folder))
        if not paths:
            raise FileNotFoundError(f"no file of a model in {folder}")
        parts = [self._inspect_file(path) for path in paths]
        names = (path.relative_to(folder).as_posix() for path in paths)
        lines = (f"{part.sha256} {name}\n" for part, name in zip(parts, names, strict=True))
        return Artifact(hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest(), _size(parts))

    def _inspect_file(self, path: Path) -> Artifact:
        # Not to be held up by a pipe that nobody writes to.
        with open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            version = _version(file.fileno())
            with self._lock:
                known = self._hashes.get(version)
                if known is None:
                    known = hashlib.file_digest(file, "sha256").hexdigest()
                    # Only of a file that stood still while it was read may the hash be kept.
                    if _version(file.fileno()) == version:
                        if len(self._hashes) >= MAX_KNOWN_FILES:
                            self._hashes.pop(next(iter(self._hashes)))
                        self._hashes[version] = known
        return Artifact(known, version.size_bytes)


def parts_of(model: Path) -> tuple[Path, ...]:
    """All files of a model: `x-00001-of-00003.gguf` has two more."""
    match = _SPLIT.match(model.name)
    if match is None:
        return (model,)
    parts = int(match["parts"])
    names = (f"{match['stem']}-{part:05d}-of-{match['parts']}{match['suffix']}" for part in range(1, parts + 1))
    return tuple(model.with_name(name) for name in names)


def _size(parts: Sequence[Artifact]) -> int:
    return sum(part.size_bytes for part in parts)


def _files(folder: Path) -> Iterator[Path]:
    """Every file below a folder that may shape its model. Links to files are followed, hidden names are passed over."""
    found = 0
    for parent, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in folders:
            if Path(parent, name).is_symlink():
                raise OSError(f"{Path(parent, name)} is a link to a folder, where nobody has looked")
        for name in names:
            if not name.startswith(".") and not _is_prose(name.lower()):
                found += 1
                if found > MAX_FILES:
                    raise OSError(f"more than {MAX_FILES} files in {folder}")
                yield Path(parent, name)


def _is_prose(name: str) -> bool:
    return name.endswith(_PROSE) or (name.endswith(".txt") and name.startswith(_PROSE_TEXTS))


def _raise(error: OSError) -> None:
    raise error


def _version(descriptor: int) -> _Version:
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode):
        raise OSError("not a regular file")
    return _Version(facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
