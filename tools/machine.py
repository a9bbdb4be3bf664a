"""This machine as `gpuledger doctor` and `gpuledger init` look at it: its files, its clocks, and what NVML answers.

All of it can be another: a folder in place of `/`, clocks that tell what a test wants, the library of another driver.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gpuledger.adapters import procfs
from gpuledger.adapters.telemetry import nvml_binding as nvml
from gpuledger.adapters.telemetry.cgroups import MemoryLimit, tightest_limit
from gpuledger.adapters.telemetry.nvml_binding import Device, NvmlBinding, NvmlError
from gpuledger.domain.units import KIB

_NANOS_PER_MS: Final = 1_000_000
_NVIDIA: Final = "0x10de"
#: Programs whose first argument says which of their processes it is.
_TOLD_APART: Final = frozenset({"ollama"})
#: PCI class of what drives a display or computes (03).
_DISPLAY: Final = "0x03"


@dataclass(frozen=True, slots=True)
class ClockState:
    """What the kernel says of its clock (adjtimex(2)). `max_error_us`: how wrong it may be, as far as is known."""

    synchronised: bool
    max_error_us: int


@dataclass(frozen=True, slots=True)
class CardUse:
    """A process on a card; `used_bytes` None where the driver does not tell."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class Card:
    """A card as NVML answered. `error`: what it answered instead of its memory; `persistent` None: it does not say.

    `read_ms`: what one reading of its memory and processes took.
    """

    uuid: str
    name: str
    index: int
    read_ms: int
    error: int = 0
    total_bytes: int = 0
    used_bytes: int = 0
    persistent: bool | None = None
    uses: tuple[CardUse, ...] = ()


@dataclass(frozen=True, slots=True)
class Driver:
    """NVML as a whole. `error`: what it answered when it was opened, 0 when it is there."""

    error: int
    version: str = ""
    open_ms: int = 0
    cards: tuple[Card, ...] = ()
    #: Index and answer of cards that do not even say who they are.
    silent: Mapping[int, int] = field(default_factory=dict[int, int])


def adjtimex() -> ClockState:
    """Raises OSError where the kernel does not answer."""
    libc = ctypes.CDLL(None, use_errno=True)
    answer = _Timex()
    state = libc.adjtimex(ctypes.byref(answer))
    if state < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    unsynchronised = state == _TIME_ERROR or bool(answer.status & _STA_UNSYNC)
    return ClockState(not unsynchronised, int(answer.maxerror))


#: linux/timex.h.
_TIME_ERROR: Final = 5
_STA_UNSYNC: Final = 0x0040


class _Timex(ctypes.Structure):
    """The beginning of `struct timex`, and room for the rest; `modes` 0 changes nothing."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    )


def _usable(path: Path) -> bool:
    return os.access(path, os.R_OK | os.W_OK)


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


@dataclass(frozen=True, slots=True)
class Machine:
    """Where things are looked at. `library`: of NVML, a path in place of what the loader finds."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    library: str | None = None
    wall_ns: Callable[[], int] = time.time_ns
    monotonic_ns: Callable[[], int] = time.monotonic_ns
    pause: Callable[[float], None] = time.sleep
    clock_state: Callable[[], ClockState] = adjtimex
    usable: Callable[[Path], bool] = _usable
    free_bytes: Callable[[Path], int] = _free_bytes

    @property
    def proc(self) -> Path:
        return self.root / "proc"

    def memory_bytes(self, key: str) -> int:
        """A line of /proc/meminfo. Raises OSError, KeyError, ValueError."""
        lines = (self.proc / "meminfo").read_text("ascii").splitlines()
        figures = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
        number, *unit = figures[key]
        return int(number) * (KIB if unit == ["kB"] else 1)

    def memory_limit(self) -> MemoryLimit | None:
        """The lowest limit of a cgroup below the memory of the machine. Raises OSError, KeyError, ValueError."""
        return tightest_limit(self.memory_bytes("MemTotal"), self.proc)

    def host_bytes(self) -> int:
        """What can be had of the host's memory: all of it, or the limit. Raises OSError, KeyError, ValueError."""
        limit = self.memory_limit()
        return self.memory_bytes("MemTotal") if limit is None else limit.limit_bytes

    def limit_of(self, name: str) -> int | None:
        """A soft limit of this process, named as in /proc/self/limits; None for unlimited. Raises OSError, KeyError."""
        for line in (self.proc / "self/limits").read_text("ascii").splitlines():
            if line.startswith(name + " "):
                soft = line.removeprefix(name).split()[0]
                return None if soft == "unlimited" else int(soft)
        raise KeyError(name)

    def cards_on_bus(self) -> tuple[str, ...]:
        """Addresses of NVIDIA's cards on the PCI bus, whether there is a driver or not."""
        found: list[str] = []
        for function in sorted(self.root.glob("sys/bus/pci/devices/*")):
            try:
                vendor = (function / "vendor").read_text("ascii").strip()
                device_class = (function / "class").read_text("ascii").strip()
            except OSError:
                continue
            if vendor == _NVIDIA and device_class.startswith(_DISPLAY):
                found.append(function.name)
        return tuple(found)

    def sees_host_pids(self) -> bool:
        return procfs.sees_host_pids(self.proc)

    def program_of(self, pid: int) -> str | None:
        """What a process runs, for people: `ollama runner`; None when nobody runs under this pid here."""
        line = procfs.read_process_file(pid, "cmdline", self.proc) or b""
        words = [word.decode("utf-8", "replace") for word in line.split(b"\0") if word]
        if words:
            # A title that a process gave itself may be one long word.
            program = Path(words[0].split(" ")[0]).name
            # No more than that: arguments may be anybody's secrets.
            return " ".join([program, *(words[1:2] if program in _TOLD_APART else ())])
        name = procfs.read_process_file(pid, "comm", self.proc)
        return None if name is None else name.decode("utf-8", "replace").strip()

    def driver(self) -> Driver:
        """What NVML answers now. Not to be called where an NvmlSource is in use (nvml_binding)."""
        binding = NvmlBinding(self.library)
        started_ns = self.monotonic_ns()
        try:
            binding.open()
            version = binding.driver_version()
            open_ms = self._ms_since(started_ns)
            cards: list[Card] = []
            silent: dict[int, int] = {}
            for index in range(binding.device_count()):
                try:
                    device = binding.device(index)
                    cards.append(self._card(binding, device, index, binding.uuid(device), binding.name(device)))
                except NvmlError as error:
                    silent[index] = error.code
            return Driver(0, version, open_ms, tuple(cards), silent)
        except NvmlError as error:
            return Driver(error.code)
        finally:
            binding.close()

    def _card(self, binding: NvmlBinding, device: Device, index: int, uuid: str, name: str) -> Card:
        persistent = _offered(binding.persistent, device)
        started_ns = self.monotonic_ns()
        try:
            memory = binding.memory(device)
            uses = _uses(binding, device)
        except NvmlError as error:
            return Card(uuid, name, index, self._ms_since(started_ns), error.code, persistent=persistent)
        return Card(
            uuid=uuid,
            name=name,
            index=index,
            read_ms=self._ms_since(started_ns),
            total_bytes=memory.total_bytes,
            used_bytes=memory.total_bytes - memory.free_bytes,
            persistent=persistent,
            uses=uses,
        )

    def _ms_since(self, started_ns: int) -> int:
        return (self.monotonic_ns() - started_ns) // _NANOS_PER_MS


_NOT_OFFERED: Final = frozenset({nvml.NOT_SUPPORTED, nvml.FUNCTION_NOT_FOUND, nvml.NO_PERMISSION})


def _offered(call: Callable[[Device], bool], device: Device) -> bool | None:
    try:
        return call(device)
    except NvmlError:
        return None


def _uses(binding: NvmlBinding, device: Device) -> tuple[CardUse, ...]:
    """Who is on a card, each once. Raises NvmlError where a list fails that the card keeps."""
    found: dict[int, int | None] = {}
    for processes in (binding.compute_processes, binding.mps_processes, binding.graphics_processes):
        try:
            for one in processes(device):
                found[one.pid] = max((found.get(one.pid) or 0, one.used_bytes or 0)) or None
        except NvmlError as error:
            if error.code not in _NOT_OFFERED:
                raise
    return tuple(CardUse(pid, used_bytes) for pid, used_bytes in sorted(found.items()))
