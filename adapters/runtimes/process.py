"""Processes of ours: started held, watched by pidfd, and ended with all that they started (semantics.md 7).

Identity is (pid, start time, boot) throughout, and every signal goes through a pidfd whose process was compared with
that identity after it was opened: a pid that was reused meanwhile is never hit.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from gpuledger.adapters import procfs
from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import ProcessIdentity, RuntimeFault

from . import launcher
from .output import BoundedLog, pump

LOOPBACK: Final = "127.0.0.1"
#: A runtime that generates survives the first SIGTERM until its request ends, and the second not (runtimes.md).
POLITE: Final = (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL)
AT_ONCE: Final = (signal.SIGKILL,)
#: After SIGKILL only the kernel is left to wait for; a driver that hangs can make this for ever.
KILL_PATIENCE_SECONDS: Final = 30.0
#: How long output is waited for after its writer has ended: a process that left the tree may hold the pipe open.
LAST_WORDS_SECONDS: Final = 2.0

Admit: TypeAlias = Callable[[ProcessIdentity], bool]
_Started: TypeAlias = tuple[subprocess.Popen[bytes], int]


@dataclass(frozen=True, slots=True)
class Command:
    """What a runtime process executes. `environment` is all of it, with a secret in it: nothing is inherited.

    `marks`: names of the variables in it by which whatever it starts is known, wherever that puts itself.
    `folder`: where it runs, if not beside its log.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    marks: tuple[str, ...] = ()
    folder: Path | None = None

    def marked(self) -> frozenset[bytes]:
        """As they stand in /proc/PID/environ."""
        return frozenset(f"{name}={self.environment[name]}".encode() for name in self.marks)


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a process ended: by itself or by a signal. Neither is known when somebody else took the status."""

    code: int | None = None
    signal: int | None = None

    def __str__(self) -> str:
        if self.signal is not None:
            return f"signal_{self.signal}"
        return "exit_status_unknown" if self.code is None else f"exit_status_{self.code}"


class PortReservation:
    """A free port of the loopback, kept free for one runtime.

    A socket that is bound and does not listen takes no connection, and keeps the kernel from giving its port to
    anybody who asks for any port. Whoever names it, with SO_REUSEADDR or SO_REUSEPORT, can bind it: so does the
    runtime. Held until the runtime is gone, so that nothing meant for it reaches another program.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._socket.bind((LOOPBACK, 0))
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


class Child:
    """A process that `Spawner` started. It belongs to the event loop in which it was started."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        identity: ProcessIdentity,
        gate: int,
        log: BoundedLog,
        marks: frozenset[bytes] = frozenset(),
    ) -> None:
        self.identity = identity
        self.log = log
        self._marks = marks
        self._process = process
        self._gate: int | None = gate
        self._loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[ExitStatus] = self._loop.create_future()
        self._pidfd = os.pidfd_open(process.pid)
        self._loop.add_reader(self._pidfd, self._on_exit)
        self._pump = _start_pump(process, log)

    @property
    def exit_status(self) -> ExitStatus | None:
        """None while it runs. The kernel is asked: it knows before the event loop has been told."""
        return self._exit.result() if self._exit.done() else _exit_status(self._process.pid)

    async def wait(self) -> ExitStatus:
        """Wait until it ends. What it started may go on; `end` ends that too."""
        return await asyncio.shield(self._exit)

    async def last_words(self, count_bytes: int = 4096) -> bytes:
        """The end of its output, once it has ended; the pump gets a moment to read it all."""
        await asyncio.to_thread(self._pump.join, LAST_WORDS_SECONDS)
        return self.log.tail(count_bytes)

    def open_gate(self) -> None:
        """Let the held process become the runtime. Once is enough, and a process that has ended does not mind."""
        if self._gate is not None:
            with suppress(BrokenPipeError):
                os.write(self._gate, launcher.OPEN)
            self._close_gate()

    async def end(self, ladder: Sequence[signal.Signals], grace_seconds: float) -> None:
        """End its tree and reap it. Raises RuntimeFault (TIMEOUT `not_gone`) when SIGKILL did not help.

        The process is reaped last: as long as it is a zombie nobody else can have its pid, its group or its session.
        """
        await end_tree(self.identity, ladder, grace_seconds, marks=self._marks)
        await self.wait()
        self._process.wait()
        await asyncio.to_thread(self._pump.join, LAST_WORDS_SECONDS)
        self.log.close()
        self._close_gate()

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._exit.set_result(_exit_status(self._process.pid) or ExitStatus())

    def _close_gate(self) -> None:
        if self._gate is not None:
            os.close(self._gate)
            self._gate = None


class Spawner:
    """Starts processes from one thread that lives until `close`.

    The kernel sends a child its death signal when the *thread* that started it ends, so no other will do: not the
    event loop's, which in a test or behind a web server is not the main one.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gpuledger-spawner")

    async def spawn(self, command: Command, folder: Path, log: BoundedLog) -> Child:
        """Start `command`, held at its gate. Raises OSError, and RuntimeFault (MODEL_LOAD_FAILED `cannot_start`)."""
        starting = self._executor.submit(start_held, command, folder)
        try:
            process, gate = await asyncio.wrap_future(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_discard)
            raise
        try:
            # Not yet reaped, so whoever has the pid now is the child.
            identity = procfs.identity(process.pid)
            if identity is None:
                raise RuntimeFault(Failure.MODEL_LOAD_FAILED, "cannot_start")
            return Child(process, identity, gate, log, command.marked())
        except BaseException:
            _discard(starting)
            raise

    def close(self) -> None:
        """End the thread, and with it every child that is left."""
        self._executor.shutdown(wait=True)


def _exit_status(pid: int) -> ExitStatus | None:
    """How a child ended, leaving it the zombie that it is; None while it runs."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # SIGCHLD is ignored in this process: the kernel keeps no zombies.
        return ExitStatus()
    if ended is None:
        return None
    return ExitStatus(code=ended.si_status) if ended.si_code == os.CLD_EXITED else ExitStatus(signal=ended.si_status)


def start_held(command: Command, folder: Path) -> _Started:
    """The launcher, waiting, and the end of its gate that opens it."""
    read_end, write_end = os.pipe()
    try:
        launch = (sys.executable, "-I", "-S", launcher.__file__, str(read_end), str(os.getpid()), *command.argv)
        process = subprocess.Popen(
            launch,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=dict(command.environment),
            pass_fds=(read_end,),
            start_new_session=True,
        )
    except BaseException:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
    return process, write_end


def _discard(starting: Future[_Started]) -> None:
    """End a process that nobody took."""
    if not starting.cancelled() and starting.exception() is None:
        process, gate = starting.result()
        os.close(gate)
        process.kill()
        process.communicate()


def _start_pump(process: subprocess.Popen[bytes], log: BoundedLog) -> threading.Thread:
    assert process.stdout is not None
    thread = threading.Thread(target=pump, args=(process.stdout, log), name=f"gpuledger-log-{process.pid}", daemon=True)
    thread.start()
    return thread


# ---- ending -----------------------------------------------------------------------------------------------------


async def end_tree(
    root: ProcessIdentity,
    ladder: Sequence[signal.Signals],
    grace_seconds: float,
    admit: Admit | None = None,
    marks: frozenset[bytes] = frozenset(),
) -> None:
    """Send the signals of `ladder`, `grace_seconds` apart, to root's tree until it is gone.

    With `admit`, only to the members that it admits. With `marks`, also to whoever has all of these in its environment:
    what a runtime has sent away (two forks and a session of its own) is in nobody's tree. Returns as soon as no member
    runs. Raises RuntimeFault (TIMEOUT `not_gone`).
    """
    family = _Family(root, admit, marks)
    for rung in ladder:
        patience = KILL_PATIENCE_SECONDS if rung is signal.SIGKILL else grace_seconds
        if await _step(family, rung, patience):
            return
    raise RuntimeFault(Failure.TIMEOUT, "not_gone")


async def _step(family: _Family, rung: signal.Signals, patience_seconds: float) -> bool:
    """One rung: the signal once to every member, those that appear meanwhile too. True when none is left."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_seconds
    signalled: set[ProcessIdentity] = set()
    while members := await asyncio.to_thread(family.members):
        with _handles(members) as handles:
            for process, handle in handles.items():
                if process not in signalled:
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(handle, rung)
                    signalled.add(process)
            if not await _all_end(list(handles.values()), deadline - loop.time()):
                return False
    return True


class _Family:
    """Who belongs to a root, from one look to the next."""

    def __init__(self, root: ProcessIdentity, admit: Admit | None, marks: frozenset[bytes]) -> None:
        self._root = root
        self._admit = admit
        self._marks = marks
        #: A member whose parent ended and that has left the session is init's child: memory tells that it is ours.
        self._known: set[ProcessIdentity] = {root}

    def members(self) -> list[ProcessIdentity]:
        """Who of it runs."""
        table = procfs.scan()
        members = set(table.tree(self._root))
        for process in (*self._known, *self._marked(table)):
            if table.is_alive(process):
                members.update(table.tree(process))
        self._known.update(members)
        return [process for process in members if self._admit is None or self._admit(process)]

    def _marked(self, table: procfs.ProcessTable) -> list[ProcessIdentity]:
        if not self._marks:
            return []
        running = (process for pid in table.entries if (process := table.identity(pid)) is not None)
        return [process for process in running if self._marks <= _variables(process.pid)]


def _variables(pid: int) -> frozenset[bytes]:
    """What a process was started with; empty when it is gone or not ours to look at."""
    return frozenset((procfs.read_process_file(pid, "environ") or b"").split(b"\0"))


@contextmanager
def _handles(processes: Sequence[ProcessIdentity]) -> Generator[dict[ProcessIdentity, int]]:
    """A pidfd for each that still is who it was."""
    handles: dict[ProcessIdentity, int] = {}
    try:
        for process in processes:
            try:
                handle = os.pidfd_open(process.pid)
            except ProcessLookupError:
                continue
            handles[process] = handle
            if not procfs.is_alive(process):
                os.close(handles.pop(process))
        yield handles
    finally:
        for handle in handles.values():
            os.close(handle)


async def _all_end(handles: Sequence[int], timeout_seconds: float) -> bool:
    """Wait until every process behind a pidfd has ended; False when the time is over before."""
    loop = asyncio.get_running_loop()
    ends: list[asyncio.Future[None]] = []
    for handle in handles:
        end = loop.create_future()
        loop.add_reader(handle, _note, loop, handle, end)
        ends.append(end)
    try:
        async with asyncio.timeout(timeout_seconds):
            await asyncio.gather(*ends)
    except TimeoutError:
        return False
    finally:
        for handle in handles:
            loop.remove_reader(handle)
    return True


def _note(loop: asyncio.AbstractEventLoop, handle: int, end: asyncio.Future[None]) -> None:
    loop.remove_reader(handle)
    if not end.done():
        end.set_result(None)
