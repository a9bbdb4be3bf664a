"""A fake NVIDIA driver for tests: the real `pynvml` over a library of ours, in this process or in a child.

    shim = NvmlShim(tmp_path)
    shim.set(cards=[ShimCard("GPU-a", used_bytes=GIB, processes=(ShimProcess(pid, GIB),))])
    subprocess.Popen(..., env={**os.environ, **shim.env()})         # what a user has: the loader finds the driver
    monkeypatch.setenv(*shim.state_variable); NvmlSource(str(shim.library))      # in this process

`set` takes effect at the next call into the library, whoever makes it.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("nvml_shim.c")
#: What every real driver is found by.
SONAME = "libnvidia-ml.so.1"

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class ShimProcess:
    """A line of a process list. `used_bytes` None: withheld, as under WDDM."""

    pid: int
    used_bytes: int | None
    kind: str = "compute"


@dataclass(frozen=True, slots=True)
class ShimXid:
    """An Xid; `gpu_instance` None: not of one instance."""

    code: int
    gpu_instance: int | None = None


@dataclass(frozen=True, slots=True)
class ShimInstance:
    """A MIG instance of a card. Where there is none in a slot, nobody is found."""

    uuid: str
    gpu_instance: int
    compute_instance: int = 0
    slot: int = 0
    name: str = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    total_bytes: int = 5 * GIB
    used_bytes: int = 0
    processes: tuple[ShimProcess, ...] = ()
    error: int = 0
    memory_error: int = 0
    process_error: int = 0

    def lines(self) -> list[str]:
        """Its part of the state file, after that of its card."""
        return [
            f"instance {self.slot} {self.gpu_instance} {self.compute_instance} {self.uuid}",
            f"name {self.name}",
            *_memory(self.total_bytes, self.used_bytes, None),
            *_errors(self.error, self.memory_error, self.process_error),
            *(_line(one) for one in self.processes),
        ]


@dataclass(frozen=True, slots=True)
class ShimCard:
    """A card. `free_bytes` None: total - used. What it has None of further down is not supported.

    `mig` is 0 or 1, or the error that asking for it answers; `remap` is (pending, failed).
    `event_error`, `wait_error`: what registering for Xids, and waiting for them, answers. `xids`: all that happened so
    far, the oldest first. `restless`: it has one byte more, and that is free, at each look.
    """

    uuid: str
    name: str = "NVIDIA GeForce RTX 3090"
    total_bytes: int = 24 * GIB
    used_bytes: int = 0
    free_bytes: int | None = None
    processes: tuple[ShimProcess, ...] = ()
    error: int = 0
    memory_error: int = 0
    process_error: int = 0
    mig: int | None = None
    ecc_errors: int | None = None
    ecc_lifetime: int | None = None
    remap: tuple[bool, bool] | None = None
    remapped_rows: int = 0
    persistence: bool | None = None
    event_error: int = 0
    wait_error: int = 0
    xids: tuple[ShimXid, ...] = ()
    instances: tuple[ShimInstance, ...] = ()
    restless: bool = False

    def lines(self) -> list[str]:
        """Its part of the state file (nvml_shim.c)."""
        lines = [f"card {self.uuid}", f"name {self.name}"]
        lines += _memory(self.total_bytes, self.used_bytes, self.free_bytes)
        lines += _errors(self.error, self.memory_error, self.process_error)
        lines += [f"events {self.event_error}", f"wait {self.wait_error}", f"restless {self.restless:d}"]
        lines += [] if self.mig is None else [f"mig {self.mig}"]
        lines += [] if self.ecc_errors is None else [f"ecc {self.ecc_errors}"]
        lines += [] if self.ecc_lifetime is None else [f"lifetime {self.ecc_lifetime}"]
        lines += [] if self.remap is None else [f"remap {self.remap[0]:d} {self.remap[1]:d} {self.remapped_rows}"]
        lines += [] if self.persistence is None else [f"persistence {self.persistence:d}"]
        lines += [f"xid {xid.code} {'-' if xid.gpu_instance is None else xid.gpu_instance}" for xid in self.xids]
        lines += [_line(one) for one in self.processes]
        return [*lines, *(line for one in self.instances for line in one.lines())]


def _memory(total_bytes: int, used_bytes: int, free_bytes: int | None) -> list[str]:
    free_bytes = total_bytes - used_bytes if free_bytes is None else free_bytes
    return [f"total {total_bytes}", f"used {used_bytes}", f"free {free_bytes}"]


def _errors(error: int, memory_error: int, process_error: int) -> list[str]:
    return [f"error {error}", f"memory_error {memory_error}", f"process_error {process_error}"]


def _line(one: ShimProcess) -> str:
    return f"process {one.kind} {one.pid} {'-' if one.used_bytes is None else one.used_bytes}"


class NvmlShim:
    """An installed driver and the state of its cards, in a folder of the test's own."""

    def __init__(self, tmp_path: Path) -> None:
        self.library = tmp_path / "driver" / SONAME
        self._state = tmp_path / "nvml-state"
        self.library.parent.mkdir()
        self.install()
        self.set(cards=())

    def install(self, build: int = 1) -> None:
        """Put the library of one version of the driver where the loader finds it, in place of the one before."""
        self.library.unlink(missing_ok=True)
        self.library.symlink_to(_compiled(build))

    def uninstall(self) -> None:
        self.library.unlink()

    def set(
        self, cards: Sequence[ShimCard], *, init: int = 0, build: int = 1, load: int = 1, driver: str = "550.54.15"
    ) -> None:
        """Replace the whole state, atomically. `init`: what every call answers instead; the others: nvml_shim.c."""
        lines = [f"init {init}", f"build {build}", f"load {load}", f"driver {driver}"]
        lines += [line for card in cards for line in card.lines()]
        fresh = self._state.with_suffix(".new")
        fresh.write_text("\n".join(lines) + "\n", "utf-8")
        fresh.replace(self._state)

    @property
    def leaked(self) -> bool:
        """Whether a session ended with event sets that nobody freed."""
        return self._state.with_name(f"{self._state.name}.leaks").exists()

    @property
    def state_variable(self) -> tuple[str, str]:
        """Name and value of the variable by which the library finds its state."""
        return "GPULEDGER_TEST_NVML_STATE", str(self._state)

    def env(self) -> dict[str, str]:
        """What to add to a child's environment, for it to find this driver as any other."""
        name, value = self.state_variable
        return {name: value, "LD_LIBRARY_PATH": str(self.library.parent)}


@functools.cache
def _compiled(build: int) -> Path:
    """The library, compiled once per run of the tests."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise RuntimeError("the tests of NVML compile tests/shim/nvml_shim.c and need a C compiler as `cc`")
    folder = Path(tempfile.mkdtemp(prefix="gpuledger-nvml-shim-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = folder / SONAME
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-DSHIM_BUILD={build}", f"-Wl,-soname,{SONAME}"]
    subprocess.run([compiler, *flags, "-o", str(library), str(SOURCE)], check=True)
    return library
