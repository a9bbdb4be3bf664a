"""What a process holds of the host's memory (semantics.md 1; proc_pid_status(5), proc_pid_smaps(5))."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpuledger.adapters.procfs import PROC, read_process_file
from gpuledger.domain.units import KIB, MIB

#: Below this, file-backed pages are counted whole: they are the program and its libraries (llama.cpp's server: 33 MB),
#: and the reading of shares walks every page (22 ms per mapped GiB). Above it a model is mapped, and shares matter.
FILE_SHARE_FROM_BYTES: Final = 64 * MIB


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Resident memory of one process.

    `own_bytes`: anonymous and shared memory, which the kernel counts as used. `file_bytes`: its share of the
    file-backed pages. Of those the kernel counts `locked_file_bytes` as used too (mlock), the rest as available.
    """

    own_bytes: int
    file_bytes: int
    locked_file_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.own_bytes + self.file_bytes

    @property
    def reclaimable_file_bytes(self) -> int:
        """File-backed pages that MemAvailable takes for free."""
        return self.file_bytes - self.locked_file_bytes


NOTHING: Final = ProcessMemory(0, 0, 0)


def read(pid: int, proc: Path = PROC) -> ProcessMemory:
    """What a process holds now; nothing when it has ended, or is on its way there without memory. Raises OSError.

    Where shares cannot be read (another user's process), file-backed pages are counted whole: never less than it has.
    """
    status = _fields(read_process_file(pid, "status", proc) or b"")
    if "RssAnon" not in status:
        return NOTHING
    own_bytes = status["RssAnon"] + status["RssShmem"]
    resident_file_bytes = status["RssFile"]
    rollup: Mapping[str, int] = {}
    if resident_file_bytes > FILE_SHARE_FROM_BYTES:
        rollup = _fields(read_process_file(pid, "smaps_rollup", proc) or b"")
    if "Pss_File" not in rollup:
        return ProcessMemory(own_bytes, resident_file_bytes, 0)
    # `Locked` does not say of which kind; what cannot be anonymous or shared is of files.
    locked_file_bytes = max(0, rollup["Locked"] - rollup["Pss_Anon"] - rollup["Pss_Shmem"])
    return ProcessMemory(own_bytes, rollup["Pss_File"], min(locked_file_bytes, rollup["Pss_File"]))


def _fields(text: bytes) -> dict[str, int]:
    """The lines `Name:  123 kB`, in bytes. The first line of smaps_rollup, a range of addresses, is none."""
    found: dict[str, int] = {}
    for line in text.decode("ascii", "replace").splitlines():
        name, _, value = line.partition(":")
        figure, _, unit = value.strip().partition(" ")
        if unit == "kB":
            found[name] = int(figure) * KIB
    return found
