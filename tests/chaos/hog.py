"""A program of somebody else that holds memory: `python -m tests.chaos.hog`.

Each line of its input is a number of MiB, which it then holds; it answers with that number. It ends with its input, so
with whoever started it.
"""

from __future__ import annotations

import mmap
import sys
from typing import Final

CHUNK_MIB: Final = 16
_PAGE: Final = 4096


def main() -> None:
    """Hold what is asked for, in chunks of `CHUNK_MIB`."""
    held: list[mmap.mmap] = []
    for line in sys.stdin:
        wanted = int(line) // CHUNK_MIB
        while len(held) > wanted:
            held.pop().close()
        while len(held) < wanted:
            held.append(_touched())
        print(len(held) * CHUNK_MIB, flush=True)


def _touched() -> mmap.mmap:
    chunk = mmap.mmap(-1, CHUNK_MIB * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for offset in range(0, len(chunk), _PAGE):
        chunk[offset] = 1
    return chunk


if __name__ == "__main__":
    main()
