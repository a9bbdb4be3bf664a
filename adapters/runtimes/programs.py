"""Which program a command line runs, and which version it calls itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import RuntimeFault

NO_PROGRAM: Final = "no_program"
#: Python servers import most of what they have before they say their version.
VERSION_SECONDS: Final = 120
_EVIDENCE_BYTES: Final = 4096

#: What a program that was asked said: standard output, and standard error.
ReadVersion: TypeAlias = Callable[[bytes, bytes], str | None]


@dataclass(frozen=True, slots=True)
class _Part:
    """Which content a file or folder has, as far as the file system tells."""

    path: str
    inode: int
    size_bytes: int
    mtime_ns: int


def found(name: str, environment: Mapping[str, str]) -> str:
    """The absolute path of a program, looked for on the PATH that it will have. Raises RuntimeFault (`no_program`)."""
    path = name if "/" in name else shutil.which(name, path=environment.get("PATH", ""))
    if path is None or not os.access(path, os.X_OK):
        raise RuntimeFault(Failure.MODEL_LOAD_FAILED, NO_PROGRAM, f"{name} is no program here".encode())
    return str(Path(path).absolute())


class Versions:
    """Asks each build of a program once which version it is. Blocking; thread-safe."""

    def __init__(self) -> None:
        self._known: dict[tuple[_Part, ...], str] = {}
        self._lock = threading.Lock()

    def ask(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        read: ReadVersion,
        detail: str,
        folder: Path | None = None,
    ) -> str:
        """Raises RuntimeFault (MODEL_LOAD_FAILED with this detail) when it cannot be asked, or says none.

        It runs in `folder`, where one is named.
        """
        # To say its version it needs no card, and some would take memory of one.
        blind = {**environment, "CUDA_VISIBLE_DEVICES": ""}
        try:
            build = tuple(_parts(argv, folder))
            with self._lock:
                if build not in self._known:
                    # Of an upgrade in place the build before is of no use any more.
                    self._known = {build: _asked(argv, blind, read, detail, folder)}
                return self._known[build]
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RuntimeFault(Failure.MODEL_LOAD_FAILED, detail, str(error).encode()) from error


def _asked(
    argv: Sequence[str], environment: Mapping[str, str], read: ReadVersion, detail: str, folder: Path | None
) -> str:
    said = subprocess.run(
        tuple(argv), capture_output=True, timeout=VERSION_SECONDS, env=environment, cwd=folder, check=False
    )
    version = read(said.stdout, said.stderr) if said.returncode == 0 else None
    if version is None:
        raise RuntimeFault(Failure.MODEL_LOAD_FAILED, detail, said.stderr[-_EVIDENCE_BYTES:])
    return version


def _parts(argv: Sequence[str], folder: Path | None) -> Iterator[_Part]:
    """The program, the files among its arguments, and the packages beside it where it is one of Python's."""
    for argument in argv:
        path = Path(argument) if folder is None else folder / argument
        if path.is_absolute() and os.path.exists(path):
            yield _part(path)
    for packages in sorted(Path(argv[0]).parent.parent.glob("lib/python3*/*-packages")):
        yield _part(packages)


def _part(path: Path) -> _Part:
    facts = os.stat(path)
    return _Part(str(path), facts.st_ino, facts.st_size, facts.st_mtime_ns)
