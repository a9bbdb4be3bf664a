"""The first program of every runtime process: waits at a gate, then becomes the runtime.

    python -I -S launcher.py GATE PARENT PROGRAM [ARGUMENT]...

The scheduler writes (pid, start time) into its ledger before a runtime's first instruction (semantics.md 7). This
program has that pid from the start and keeps it through execve. It reads one byte from the file descriptor GATE; a
gate that closes without one means that the scheduler is gone or thought better of it. It runs by its path, with the
standard library only, and asks the kernel for its death as soon as PARENT's starting thread ends: the request
survives execve (prctl(2), PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

OPEN = b"\n"
EXIT_NOT_STARTED = 125
EXIT_CANNOT_EXECUTE = 127

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    gate, parent, command = int(arguments[0]), int(arguments[1]), arguments[2:]
    if not _die_with(parent):
        return EXIT_NOT_STARTED
    # Memory of a runtime holds prompts: no core files, and nothing it writes is for others.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.umask(0o077)
    # Ignored signals outlive execve: those that Python ignores, and those that whoever started us did (nohup, a shell).
    for number in signal.valid_signals():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if os.read(gate, 1) != OPEN:
        return EXIT_NOT_STARTED
    os.close(gate)
    try:
        os.execve(command[0], command, os.environ)  # noqa: S606 (no shell is the point)
    except OSError as error:
        print(f"cannot execute {command[0]}: {error.strerror}", file=sys.stderr)
        return EXIT_CANNOT_EXECUTE


def _die_with(parent: int) -> bool:
    """Tie this process to the thread that started it; False when its process has ended already."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        return False
    return os.getppid() == parent


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
