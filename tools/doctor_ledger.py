"""Checks of where the ledger lies, of who may read what is beside it, of its scheduler, and of the address."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from gpuledger.adapters import procfs
from gpuledger.adapters.ledger.lock import holder
from gpuledger.adapters.ledger.sqlite import SqliteLedger
from gpuledger.adapters.runtimes.output import LOG_FOLDER
from gpuledger.adapters.tokens import FILE_NAME as TOKENS
from gpuledger.adapters.tokens import TokensUnusable, read_tokens
from gpuledger.domain.explain import duration, size
from gpuledger.domain.ports import LedgerCorrupt, LedgerUnavailable
from gpuledger.domain.units import GIB, MIB

from .bootstrap import KEY_NAME
from .config import Config
from .doctor_findings import Finding, fail, ok, warn
from .machine import Machine
from .reading import reason_of

_NANOS_PER_MS: Final = 1_000_000
_MICROS_PER_MS: Final = 1_000

#: What a day of a busy ledger and the logs of its runtimes take, and what leaves time to act.
LEAST_FREE_BYTES: Final = 200 * MIB
LITTLE_FREE_BYTES: Final = 2 * GIB
#: Commits that are tried; each decision waits for one.
SYNCS: Final = 8
SLOW_SYNC_MS: Final = 30
#: SQLite's write-ahead log needs memory that all its users share: no file system of several machines has it.
NO_WAL: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs", "9p", "afs", "ceph", "fuse.ceph", "lustre", "fuse.glusterfs",
     "vboxsf", "fuse.s3fs", "fuse.rclone", "drvfs"}
)  # fmt: skip
_OURS: Final = "or run the doctor as the user that the server runs as"
#: Gone with the power.
VOLATILE: Final = frozenset({"tmpfs", "ramfs"})


# ---- disk -------------------------------------------------------------------------------------------------------


def check_disk(machine: Machine, config: Config) -> Iterator[Finding]:
    """The folder of the ledger: room, kind of file system, whether it can be written, and how long a commit takes."""
    folder = _nearest(config.ledger.parent)
    yield from _file_system(machine, folder)
    free_bytes = machine.free_bytes(folder)
    if free_bytes < LEAST_FREE_BYTES:
        yield fail(
            "disk space", f"{size(free_bytes)} free in {folder}: nothing is admitted on a full disk", "make room"
        )
    elif free_bytes < LITTLE_FREE_BYTES:
        yield warn("disk space", f"{size(free_bytes)} free in {folder}; a ledger grows by some MB a day", "make room")
    else:
        yield ok("disk space", f"{size(free_bytes)} free in {folder}")
    state = _nearest(config.state_dir)
    for one in dict.fromkeys((folder, state)):
        try:
            yield _tried(machine, one)
        except OSError as error:
            yield fail(
                "disk",
                f"{one} cannot be written: {reason_of(error)}",
                f"let this user write there: sudo chown $USER {one}; in a unit: ReadWritePaths={one}",
            )


def _nearest(folder: Path) -> Path:
    """The folder, or what of its path is there: the rest is made at the first start."""
    return next(one for one in (folder, *folder.parents) if one.is_dir())


def _tried(machine: Machine, folder: Path) -> Finding:
    """Locks and durable writes, tried on a file that is gone at once. Raises OSError."""
    took: list[int] = []
    with tempfile.TemporaryFile(prefix=".gpuledger-doctor-", dir=folder) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for _ in range(SYNCS):
            started_ns = machine.monotonic_ns()
            os.write(file.fileno(), b"\0" * 4096)
            os.fsync(file.fileno())
            took.append((machine.monotonic_ns() - started_ns) // _NANOS_PER_MS)
    median_ms = sorted(took)[SYNCS // 2]
    if median_ms > SLOW_SYNC_MS:
        return warn(
            "disk",
            f"a durable write in {folder} takes {duration(median_ms)}, and every decision waits for one",
            "put the ledger on an SSD of this machine",
        )
    return ok("disk", f"locks and durable writes work in {folder}, {duration(median_ms)} each")


def _file_system(machine: Machine, folder: Path) -> Iterator[Finding]:
    kind = file_system_of(machine, folder)
    if kind in NO_WAL:
        yield fail(
            "file system",
            f"{folder} is on {kind}: SQLite's write-ahead log does not work there, and locks may not",
            "put the ledger on a disk of this machine (`ledger:` in the configuration)",
        )
    elif kind in VOLATILE:
        yield warn(
            "file system",
            f"{folder} is on {kind}: the ledger is gone with the power",
            "put the ledger on a disk, unless this is a test",
        )
    else:
        yield ok("file system", f"{kind} at {folder}")


def file_system_of(machine: Machine, folder: Path) -> str:
    """The type of the file system that a path is on (proc_pid_mountinfo(5)). Raises OSError."""
    found, length = "unknown", -1
    for line in (machine.proc / "self/mountinfo").read_text("utf-8", "surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), before.split()[4]))
        # Of two at one place the later one is on top.
        if folder.resolve().is_relative_to(point) and len(point.parts) >= length:
            found, length = after.split()[0], len(point.parts)
    return found


# ---- who may read what ------------------------------------------------------------------------------------------


def check_permissions(config: Config) -> Iterator[Finding]:
    """The configuration names programs that are run, the folder has a key, and tokens are passwords."""
    wrong = [*_unusable(config), *_wrong_modes(config)]
    yield from wrong
    if not wrong:
        yield ok("permissions", "the configuration, the state and the tokens beside it are for their owner only")


def _unusable(config: Config) -> Iterator[Finding]:
    """What a server does not start with."""
    try:
        read_tokens(config.state_dir / TOKENS)
    except TokensUnusable as error:
        mend = "mend that, or move the file away: then make tokens anew (gpuledger tokens create)"
        yield fail("tokens", str(error), mend)
    key = config.state_dir / KEY_NAME
    try:
        key.read_bytes()
    except FileNotFoundError:
        pass  # The first start makes it.
    except OSError as error:
        yield fail("permissions", f"{key} cannot be read: {reason_of(error)}", f"let this user read it: chown, {_OURS}")
    if config.ledger.exists() and not os.access(config.ledger, os.R_OK | os.W_OK):
        mend = f"let this user read and write it: chown, {_OURS}"
        yield fail("permissions", f"{config.ledger} cannot be read and written by this user", mend)


def _wrong_modes(config: Config) -> Iterator[Finding]:
    mode = _mode(config.path)
    if mode is not None and mode & 0o022:
        yield fail(
            "permissions",
            f"{config.path} can be written by others: it names programs that are run (mode {mode:04o})",
            f"chmod go-w {config.path}",
        )
    for token in sorted(config.path.parent.glob("*.token")):
        mode = _mode(token)
        if mode is not None and mode & 0o077:
            yield fail("permissions", f"{token} can be read by others (mode {mode:04o})", f"chmod 600 {token}")
    for path in (config.ledger, *(config.state_dir / name for name in (KEY_NAME, LOG_FOLDER, TOKENS))):
        mode = _mode(path)
        if mode is not None and mode & 0o077:
            yield warn("permissions", f"{path} is open to others (mode {mode:04o})", f"chmod go-rwx {path}")


def _mode(path: Path) -> int | None:
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return None


# ---- scheduler --------------------------------------------------------------------------------------------------


def check_scheduler(machine: Machine, config: Config) -> Iterator[Finding]:
    """Who drives the ledger, whether it can be read, and whether the clock is behind what it says."""
    try:
        pid = holder(config.ledger)
        if not config.ledger.exists():
            yield ok("ledger", f"there is none yet; the first start makes {config.ledger}")
            return
        with closing(SqliteLedger(config.ledger, read_only=True)) as reader:
            head = reader.head()
            newest = reader.read(head - 1, 1) if head else ()
    except (LedgerUnavailable, LedgerCorrupt) as error:
        yield fail("ledger", str(error), "docs/operating.md, Backup, says how to put a copy in its place")
        return
    if pid is None:
        yield ok("scheduler", "none is running on this ledger")
    else:
        yield ok("scheduler", f"process {pid} drives this ledger")
    yield ok("ledger", f"{head} events in {config.ledger}")
    ahead_ms = max((event.at // _MICROS_PER_MS for event in newest), default=0) - machine.wall_ns() // _NANOS_PER_MS
    if ahead_ms > config.policy.max_clock_skew_seconds * 1000:
        yield warn(
            "ledger clock",
            f"the newest event is {duration(ahead_ms)} ahead of the wall clock: instants go on from there",
            "set the clock; what the ledger says until then is dated too late",
        )


def pids_of_scheduler(machine: Machine, config: Config) -> frozenset[int]:
    """The processes of the scheduler of this ledger and of its runtimes. Raises OSError, LedgerUnavailable."""
    pid = holder(config.ledger)
    root = None if pid is None else procfs.identity(pid, machine.proc)
    return frozenset() if root is None else frozenset(one.pid for one in procfs.tree(root, machine.proc))


# ---- address ----------------------------------------------------------------------------------------------------


def check_address(machine: Machine, config: Config) -> Iterator[Finding]:
    """Whether `listen` can be had, or is had by the scheduler of this ledger."""
    address = config.document.listen
    try:
        problem = _bound(config)
    except (socket.gaierror, UnicodeError):
        yield fail("address", f"{config.host} is no name of a host", "correct `listen`")
        return
    if problem is None:
        free = "a free port is taken" if config.port == 0 else f"{address} is free"
        yield ok("address", free)
    elif problem == errno.EADDRINUSE:
        yield _in_use(machine, config)
    elif problem == errno.EACCES:
        yield fail(
            "address",
            f"this user may not listen at {address}",
            "take a port above 1023, or AmbientCapabilities=CAP_NET_BIND_SERVICE in the unit",
        )
    else:
        yield fail("address", f"{address} is none of this machine: {os.strerror(problem)}", "correct `listen`")


def _bound(config: Config) -> int | None:
    """None where the address can be had, else the error of the system. Raises gaierror, UnicodeError."""
    family, kind, protocol, _, place = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
    try:
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
            listener.listen()
    except OSError as error:
        return error.errno or errno.EADDRNOTAVAIL
    return None


def _in_use(machine: Machine, config: Config) -> Finding:
    address = config.document.listen
    listening = _listeners(machine, config.port)
    holders = {pid for pid in _pids(machine) if listening & _sockets(machine, pid)}
    ours = pids_of_scheduler(machine, config)
    if holders & ours or (ours and not holders):
        return ok("address", f"{address} is held by the scheduler of this ledger")
    told = ", ".join(f"{machine.program_of(pid) or 'a program'} ({pid})" for pid in sorted(holders))
    return fail(
        "address",
        f"{address} is in use by {told or 'another program (that is not seen from here)'}",
        "end it, or set another `listen`",
    )


def _listeners(machine: Machine, port: int) -> frozenset[str]:
    """Sockets that listen at a port, as `socket:[INODE]` (proc_net_tcp: 0A is LISTEN)."""
    found: set[str] = set()
    for table in ("net/tcp", "net/tcp6"):
        path = machine.proc / table
        for line in path.read_text("ascii").splitlines()[1:] if path.exists() else ():
            words = line.split()
            if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                found.add(f"socket:[{words[9]}]")
    return frozenset(found)


def _pids(machine: Machine) -> Iterator[int]:
    yield from procfs.scan(machine.proc).entries


def _sockets(machine: Machine, pid: int) -> set[str]:
    """What a process has open; of another user's nothing is shown."""
    folder = machine.proc / str(pid) / "fd"
    found: set[str] = set()
    with suppress(FileNotFoundError, PermissionError, ProcessLookupError):
        for descriptor in os.listdir(folder):
            with suppress(FileNotFoundError):
                found.add(os.readlink(folder / descriptor))
    return found
