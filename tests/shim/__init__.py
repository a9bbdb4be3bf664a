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
class ShimCard:
    """A card. `free_bytes` None: total - used. What it has None of further down is not supported.

    `mig` is 0 or 1, or the error that asking for it answers; `remap` is (pending, failed).
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
    remap: tuple[bool, bool] | None = None
    persistence: bool | None = None

    def lines(self) -> list[str]:
        """Its part of the state file (nvml_shim.c)."""
        free_bytes = self.total_bytes - self.used_bytes if self.free_bytes is None else self.free_bytes
        lines = [f"card {self.uuid}", f"name {self.name}"]
        lines += [f"total {self.total_bytes}", f"used {self.used_bytes}", f"free {free_bytes}"]
        lines += [f"error {self.error}", f"memory_error {self.memory_error}", f"process_error {self.process_error}"]
        lines += [] if self.mig is None else [f"mig {self.mig}"]
        lines += [] if self.ecc_errors is None else [f"ecc {self.ecc_errors}"]
        lines += [] if self.remap is None else [f"remap {self.remap[0]:d} {self.remap[1]:d}"]
        lines += [] if self.persistence is None else [f"persistence {self.persistence:d}"]
        for one in self.processes:
            lines.append(f"process {one.kind} {one.pid} {'-' if one.used_bytes is None else one.used_bytes}")
        return lines


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
