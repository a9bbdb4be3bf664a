"""SHA-256 of model files. Flipped bytes of weights load and serve garbage: only the hash tells (runtimes.md)."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import threading
from dataclasses import dataclass
from pathlib import Path

from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import RuntimeFault

_SPLIT = re.compile(r"^(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})(?P<suffix>\.gguf)$")


@dataclass(frozen=True, slots=True)
class Artifact:
    """A model as it lies on disk. Of a split model `sha256` is the hash of the parts' hashes."""

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
        """Raises RuntimeFault: MODEL_LOAD_FAILED `artifact_missing`, `artifact_unreadable`."""
        try:
            parts = [self._inspect_file(path) for path in parts_of(model)]
        except FileNotFoundError as error:
            raise RuntimeFault(Failure.MODEL_LOAD_FAILED, "artifact_missing", str(error).encode()) from error
        except OSError as error:
            raise RuntimeFault(Failure.MODEL_LOAD_FAILED, "artifact_unreadable", str(error).encode()) from error
        if len(parts) == 1:
            return parts[0]
        together = hashlib.sha256("".join(part.sha256 for part in parts).encode())
        return Artifact(together.hexdigest(), sum(part.size_bytes for part in parts))

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


def _version(descriptor: int) -> _Version:
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode):
        raise OSError("not a regular file")
    return _Version(facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
