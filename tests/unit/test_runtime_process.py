"""Processes of ours: the gate, the signals of death, the ladder of ending, and nobody else's processes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpuledger.adapters import procfs
from gpuledger.adapters.runtimes import launcher, process
from gpuledger.adapters.runtimes.output import BoundedLog
from gpuledger.adapters.runtimes.process import AT_ONCE, POLITE, Child, Command, PortReservation, Spawner, end_tree
from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import ProcessIdentity, RuntimeFault

pytestmark = pytest.mark.anyio

PATIENCE_SECONDS = 60


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def log(tmp_path: Path) -> Iterator[BoundedLog]:
    log = BoundedLog(tmp_path / "x.log", 2**20)
    yield log
    log.close()


@pytest.fixture
def spawner() -> Iterator[Spawner]:
    spawner = Spawner()
    yield spawner
    spawner.close()


def python(program: str, *arguments: str) -> Command:
    return Command((sys.executable, "-I", "-S", "-c", textwrap.dedent(program), *arguments), {"PATH": "/usr/bin"})


SLEEPER = python("import time; print('up', flush=True); time.sleep(600)")


async def until_printed(child: Child, text: bytes) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while text not in child.log.tail():
            await asyncio.sleep(0.01)


@pytest.fixture
async def sleeper(spawner: Spawner, log: BoundedLog, tmp_path: Path) -> AsyncIterator[Child]:
    child = await spawner.spawn(SLEEPER, tmp_path, log)
    yield child
    await child.end(AT_ONCE, 0)


# ---- the gate ---------------------------------------------------------------------------------------------------


async def test_the_program_begins_when_the_gate_opens(sleeper: Child) -> None:
    assert sleeper.exit_status is None
    assert sleeper.log.tail() == b""
    sleeper.open_gate()
    sleeper.open_gate()
    await until_printed(sleeper, b"up")
    assert procfs.is_alive(sleeper.identity)


async def test_it_inherits_no_descriptor_but_the_standard_ones(
    spawner: Spawner, log: BoundedLog, tmp_path: Path
) -> None:
    program = python("import os; print(sorted(os.listdir('/proc/self/fd'))); print('done', flush=True)")
    child = await spawner.spawn(program, tmp_path, log)
    child.open_gate()
    assert str(await child.wait()) == "exit_status_0"
    # 3 is the folder that is being listed.
    assert await child.last_words() == b"['0', '1', '2', '3']\ndone\n"
    await child.end(AT_ONCE, 0)


async def test_the_launcher_leaves_no_trace_but_caution(spawner: Spawner, log: BoundedLog, tmp_path: Path) -> None:
    child = await spawner.spawn(Command(("/bin/cat", "/proc/self/status", "/proc/self/limits"), {}), tmp_path, log)
    child.open_gate()
    await child.wait()
    said = (await child.last_words()).decode()
    await child.end(AT_ONCE, 0)
    mask = next(line for line in said.splitlines() if line.startswith("SigIgn")).split()[1]
    # The two that belong to the C library (32, 33) are nobody's to reset.
    assert not [number for number in signal.valid_signals() if int(mask, 16) >> (number - 1) & 1]
    assert "Umask:\t0077" in said
    cores = next(line for line in said.splitlines() if line.startswith("Max core file size"))
    assert cores.split()[4:6] == ["0", "0"]


def launch(gate: int, parent: int, *command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", launcher.__file__, str(gate), str(parent), *command],
        pass_fds=(gate,),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.parametrize(
    ("byte", "parent", "status"),
    [
        pytest.param(b"", os.getpid(), launcher.EXIT_NOT_STARTED, id="gate closed"),
        pytest.param(b"x", os.getpid(), launcher.EXIT_NOT_STARTED, id="another byte"),
        pytest.param(launcher.OPEN, 1, launcher.EXIT_NOT_STARTED, id="another parent"),
        pytest.param(launcher.OPEN, os.getpid(), 0, id="opened"),
    ],
)
async def test_the_launcher_goes_on_for_its_parent_only(byte: bytes, parent: int, status: int) -> None:
    read_end, write_end = os.pipe()
    with launch(read_end, parent, "/bin/echo", "ran") as held:
        os.close(read_end)
        if byte:
            os.write(write_end, byte)
        os.close(write_end)
        said, _ = held.communicate(timeout=PATIENCE_SECONDS)
    assert held.returncode == status
    assert (said == b"ran\n") == (status == 0)


async def test_a_program_that_cannot_be_executed_says_so(spawner: Spawner, log: BoundedLog, tmp_path: Path) -> None:
    child = await spawner.spawn(Command(("/nowhere/llama-server",), {}), tmp_path, log)
    child.open_gate()
    assert str(await child.wait()) == f"exit_status_{launcher.EXIT_CANNOT_EXECUTE}"
    assert b"cannot execute /nowhere/llama-server: No such file" in await child.last_words()
    await child.end(AT_ONCE, 0)


async def test_who_prints_without_end_fills_neither_the_pipe_nor_the_disk(spawner: Spawner, tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "x.log", 256 * 1024)
    child = await spawner.spawn(python("for _ in range(2000): print('x' * 9999)"), tmp_path, log)
    child.open_gate()
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert str(await child.wait()) == "exit_status_0"
    await child.end(AT_ONCE, 0)
    assert 64 * 1024 < (tmp_path / "x.log").stat().st_size <= 256 * 1024


async def test_a_process_that_nobody_waits_for_is_ended(
    spawner: Spawner, log: BoundedLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the loop is shut down in the midst of a start."""
    started: list[ProcessIdentity | None] = []
    may_return = threading.Event()
    really_start = process.start_held

    def start(command: Command, folder: Path) -> tuple[subprocess.Popen[bytes], int]:
        result = really_start(command, folder)
        started.append(procfs.identity(result[0].pid))
        may_return.wait(PATIENCE_SECONDS)
        return result

    monkeypatch.setattr(process, "start_held", start)
    spawning = asyncio.create_task(spawner.spawn(SLEEPER, tmp_path, log))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not started:
            await asyncio.sleep(0.01)
        spawning.cancel()
        await asyncio.wait((spawning,))
    assert spawning.cancelled()
    may_return.set()
    spawner.close()
    (identity,) = started
    assert identity is not None
    assert not Path(f"/proc/{identity.pid}").exists()


# ---- who lives as long as whom ----------------------------------------------------------------------------------


def test_a_child_outlives_the_thread_that_asked_for_it(spawner: Spawner, log: BoundedLog, tmp_path: Path) -> None:
    """The kernel's signal comes when the *starting* thread ends, so that must not be the thread of the event loop."""
    loop = asyncio.new_event_loop()
    started: list[Child] = []
    asking = threading.Thread(
        target=lambda: started.append(loop.run_until_complete(spawner.spawn(SLEEPER, tmp_path, log)))
    )
    asking.start()
    asking.join(PATIENCE_SECONDS)
    (child,) = started
    child.open_gate()
    loop.run_until_complete(until_printed(child, b"up"))
    assert procfs.is_alive(child.identity)
    loop.run_until_complete(child.end(AT_ONCE, 0))
    loop.close()


async def test_a_child_dies_with_the_thread_that_started_it(sleeper: Child, spawner: Spawner) -> None:
    sleeper.open_gate()
    await until_printed(sleeper, b"up")
    spawner.close()
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert str(await sleeper.wait()) == "signal_9"


# ---- ending -----------------------------------------------------------------------------------------------------

STUBBORN = python(
    """
    import signal, sys, time
    left = int(sys.argv[1])
    def refuse(*_):
        global left
        print("TERM", flush=True)
        left -= 1
        if left == 0:
            sys.exit(3)
    signal.signal(signal.SIGTERM, refuse)
    print("up", flush=True)
    while True:
        time.sleep(600)
    """
)


@pytest.mark.parametrize(
    ("terms", "grace_seconds", "end"), [(1, 60.0, "exit_status_3"), (2, 2.0, "exit_status_3"), (3, 0.2, "signal_9")]
)
async def test_ending_climbs_the_ladder(
    spawner: Spawner, log: BoundedLog, tmp_path: Path, terms: int, grace_seconds: float, end: str
) -> None:
    """TERM, grace, TERM, grace, KILL: no more of them than are needed."""
    child = await spawner.spawn(replace(STUBBORN, argv=(*STUBBORN.argv, str(terms))), tmp_path, log)
    child.open_gate()
    await until_printed(child, b"up")
    await child.end(POLITE, grace_seconds)
    assert str(child.exit_status) == end
    assert (tmp_path / "x.log").read_bytes().count(b"TERM") <= min(terms, 2)


#: A grandchild that left the session and whose parent has ended: init's child by now.
ESCAPES = python(
    """
    import os, time
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(write_end, str(os.getpid()).encode())
            time.sleep(600)
        time.sleep(600)
    print("pid", os.read(read_end, 20).decode(), flush=True)
    time.sleep(600)
    """
)


async def test_ending_takes_what_it_started_along(spawner: Spawner, log: BoundedLog, tmp_path: Path) -> None:
    child = await spawner.spawn(ESCAPES, tmp_path, log)
    child.open_gate()
    await until_printed(child, b"pid")
    escaped = procfs.identity(int(log.tail().split()[1]))
    assert escaped is not None
    assert len(procfs.tree(child.identity)) == 3
    await child.end(POLITE, 30)
    assert not procfs.is_alive(escaped)


async def test_what_is_left_of_a_crash_is_ended(spawner: Spawner, log: BoundedLog, tmp_path: Path) -> None:
    """The root has crashed, its child has not; while the root is a zombie, its group is certainly ours."""
    forks = python("import os, time; os.fork() and os._exit(7); print('up', flush=True); time.sleep(600)")
    child = await spawner.spawn(forks, tmp_path, log)
    child.open_gate()
    await until_printed(child, b"up")
    assert str(await child.wait()) == "exit_status_7"
    (left,) = procfs.tree(child.identity)
    await child.end(POLITE, 30)
    assert not procfs.is_alive(left)


@pytest.mark.parametrize("ends", [False, True], ids=["root-runs", "root-ended"])
async def test_what_it_has_sent_away_is_ended(spawner: Spawner, log: BoundedLog, tmp_path: Path, ends: bool) -> None:
    """Two forks and a session of its own: its parent is init, and it is in nobody's tree. Its marks are left."""
    detaches = f"""
    import os, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            print("pid", os.getpid(), flush=True)
            time.sleep(600)
        os._exit(0)
    os.wait()
    time.sleep({0 if ends else 600})
    """
    argv = python(detaches).argv
    environment = {"PATH": "/usr/bin", "MARK": str(tmp_path), "SECOND": "1"}
    child = await spawner.spawn(Command(argv, environment, ("MARK", "SECOND")), tmp_path, log)
    # One of another resident has another mark, and one of them is not both.
    other = Command(python("import time; time.sleep(600)").argv, {"MARK": str(tmp_path)})
    stranger = await spawner.spawn(other, tmp_path, log)
    child.open_gate()
    await until_printed(child, b"pid")
    if ends:
        await child.wait()
    sent_away = procfs.identity(int(log.tail().split()[1]))
    assert sent_away is not None
    assert sent_away not in procfs.tree(child.identity)
    await child.end(POLITE, 30)
    assert not procfs.is_alive(sent_away)
    assert procfs.is_alive(stranger.identity)
    await stranger.end(AT_ONCE, 0)


async def test_ending_twice_at_once_is_ending(sleeper: Child) -> None:
    await asyncio.gather(sleeper.end(POLITE, 30), sleeper.end(AT_ONCE, 0))
    assert not Path(f"/proc/{sleeper.identity.pid}").exists()


async def test_a_process_that_will_not_die_is_a_fault(sleeper: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that hangs in a driver: signals reach it and nothing happens."""
    sent: list[int] = []

    def ignore(handle: int, number: int) -> None:
        sent.append(number)

    with monkeypatch.context() as patched:
        patched.setattr(signal, "pidfd_send_signal", ignore)
        patched.setattr(process, "KILL_PATIENCE_SECONDS", 0.05)
        with pytest.raises(RuntimeFault) as raised:
            await end_tree(sleeper.identity, POLITE, 0.05)
    assert (raised.value.failure, raised.value.detail) == (Failure.TIMEOUT, "not_gone")
    assert sent == [signal.SIGTERM, signal.SIGTERM, signal.SIGKILL]


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that this scheduler did not start: an earlier one did, or nobody of ours."""
    with subprocess.Popen(["/bin/sleep", "600"], start_new_session=True) as stranger:
        yield stranger
        stranger.kill()


async def test_another_start_time_is_another_process(stranger: subprocess.Popen[bytes]) -> None:
    identity = procfs.identity(stranger.pid)
    assert identity is not None
    earlier = replace(identity, start_ticks=identity.start_ticks - 1)
    other_boot = replace(identity, boot_id="another")
    for somebody_else in (earlier, other_boot):
        await end_tree(somebody_else, AT_ONCE, 0)
        assert procfs.is_alive(identity)
    await end_tree(identity, POLITE, 30)
    assert not procfs.is_alive(identity)


async def test_only_admitted_members_are_signalled(stranger: subprocess.Popen[bytes]) -> None:
    identity = procfs.identity(stranger.pid)
    assert identity is not None

    def nobody(_: ProcessIdentity) -> bool:
        return False

    await end_tree(identity, AT_ONCE, 0, admit=nobody)
    assert procfs.is_alive(identity)


# ---- ports ------------------------------------------------------------------------------------------------------


async def test_a_reserved_port_is_given_to_nobody_else() -> None:
    reservation = PortReservation()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", reservation.port))
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", reservation.port)) != 0, "reserved, not listening"
    reservation.close()


@pytest.mark.parametrize("option", [socket.SO_REUSEADDR, socket.SO_REUSEPORT])
async def test_a_runtime_can_listen_at_its_reserved_port(option: int) -> None:
    reservation = PortReservation()
    with socket.socket() as runtime, socket.socket() as client:
        runtime.setsockopt(socket.SOL_SOCKET, option, 1)
        runtime.bind(("127.0.0.1", reservation.port))
        runtime.listen()
        client.connect(("127.0.0.1", reservation.port))
        connection, _ = runtime.accept()
        connection.close()
    reservation.close()
