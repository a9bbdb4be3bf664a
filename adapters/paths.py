"""Paths as people write them in a configuration."""

from __future__ import annotations

from pathlib import Path


def written_path(text: str, folder: Path) -> Path:
    """The path that a text stands for, below `folder` unless it says otherwise. Raises ValueError, in words.

    >>> written_path("models/a.gguf", Path("/etc/gpuledger"))
    PosixPath('/etc/gpuledger/models/a.gguf')
    """
    if not text or "\0" in text:
        raise ValueError("must be a path: not empty, and without NUL")
    try:
        return folder / Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"there is no home folder for {Path(text).parts[0]}") from None
