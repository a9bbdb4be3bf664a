"""Real child processes for tests: each in a group of its own, as runtimes are started, and gone when the test is."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import IO

from gpuledger.adapters import procfs
from gpuledger.domain.ports import ProcessIdentity


@contextmanager
def running(*command: str) -> Generator[subprocess.Popen[str]]:
    """A child with pipes as its standard input and output; its whole group is killed at the end, whatever happened."""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        try:
            yield child
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def sleeping() -> tuple[str, ...]:
    """A command that does nothing until it is killed."""
    return ("sleep", "600")


def with_worker() -> tuple[str, ...]:
    """A command that starts a child, prints its pid and waits."""
    return ("sh", "-c", "sleep 600 & echo $!; wait")


def read_line(child: subprocess.Popen[str]) -> str:
    return output_of(child).readline().strip()


def output_of(child: subprocess.Popen[str]) -> IO[str]:
    assert child.stdout is not None
    return child.stdout


def identity_of(pid: int) -> ProcessIdentity:
    """Of a process that runs."""
    found = procfs.identity(pid)
    assert found is not None
    return found


def end(child: subprocess.Popen[str]) -> None:
    """Kill it and wait until it is gone."""
    child.kill()
    child.wait()
