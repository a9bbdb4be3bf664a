"""GPUs that are not there: the real NVML module on a driver of ours, whose cards hold what real processes hold.

    with gpu_stand_in(tmp_path, [ShimCard(UUID, total_bytes=24 * GIB)], scale=64) as gpus:
        with gpus.serving(tmp_path / "server", gpu_configuration([embedding(kind="gpu")])) as server:
            with gpus.program(UUID, 3 * GIB) as foreign:       # a real process of somebody else's, on that card
                foreign.hold(5 * GIB)
            gpus.change(UUID, error=LOST)                       # or any field: ecc_errors, remap, mig, name
            gpus.raise_xid(UUID, 79); gpus.withhold(UUID)       # and the bytes of processes are not told any more
            gpus.remove(UUID); gpus.add(card)
        gpus.used_bytes(UUID), gpus.most_bytes(UUID)            # what the device shows now, and what it was asked for

What a card shows: the `used_bytes` of its ShimCard, which nobody claims; each program; each runtime that a watched
process started (`serving` watches its server, `watch` any other) on the card, or the MIG instance, that its variable
CUDA_VISIBLE_DEVICES names, from its first instruction of its own until it has ended. A runtime's bytes are those of
its resident memory, followed live: to the nearest `GRAIN_BYTES`, times `scale`, plus `context_bytes`. So a reference
runtime whose sizes are multiples of `GRAIN_BYTES` (8 MiB) shows them exactly, and a scale of 128 makes a model of 16
GiB of one that holds 128 MiB. Of a reference runtime with the fault `keep_memory` what it showed stays used, and
nobody's, after its end: until `give_back`.

The cards follow within `INTERVAL_SECONDS`, as a real device does: who waits for a figure, waits for a condition. What
`change`, `program` and the like do shows when they return. Several servers, one after the other or side by side, may
use the same cards; a server that is killed takes its runtimes with it, and they leave the cards when they are gone.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from gpuledger.adapters import procfs
from gpuledger.adapters.procfs import ProcessTable
from gpuledger.adapters.runtimes import launcher, reference_main
from gpuledger.adapters.runtimes.manager import MARK
from gpuledger.adapters.telemetry import process_memory
from gpuledger.domain.ports import ProcessIdentity
from gpuledger.domain.units import MIB
from tests.children import running, sleeping
from tests.integration.serving import Serving, configuration, serving
from tests.shim import NvmlShim, ShimCard, ShimInstance, ShimProcess, ShimXid

#: What a reading is rounded to: a reference runtime is exact to less than half of it.
GRAIN_BYTES: Final = 8 * MIB
#: One pass over /proc takes 4 ms; memory comes back on a real device in tens of milliseconds too.
INTERVAL_SECONDS: Final = 0.03
#: What NVML answers for a card that has fallen off the bus, and for a driver that is not loaded.
LOST: Final = 15
NOT_LOADED: Final = 9
#: Of include/linux/sched.h.
_PF_EXITING: Final = 0x4

_Place = TypeVar("_Place", ShimCard, ShimInstance)


def gpu_configuration(deployments: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
    """A whole configuration of a server on the cards, and not on the host."""
    return configuration(deployments, accelerators={"host": False, "nvml": "auto"}, **options)


@contextmanager
def gpu_stand_in(
    folder: Path, cards: Sequence[ShimCard], *, scale: int = 1, context_bytes: int = 0
) -> Generator[GpuStandIn]:
    """The cards, while the block runs. Whatever went wrong in following the processes is raised at its end."""
    gpus = GpuStandIn(folder, cards, scale, context_bytes)
    with gpus.following():
        yield gpus


@dataclass(frozen=True, slots=True)
class _Runtime:
    """A process that shows on a place: a card, or a MIG instance of one."""

    place: str
    faults: Mapping[str, Any]

    def keeps_memory(self) -> bool:
        marker = self.faults.get("while_file")
        return bool(self.faults.get("keep_memory")) and (marker is None or Path(marker).exists())


@dataclass
class ForeignProgram:
    """A process that is no runtime's, and holds memory of a card until the block of `program` ends."""

    pid: int
    place: str
    used_bytes: int
    kind: str
    stand_in: GpuStandIn = field(repr=False)

    def hold(self, used_bytes: int) -> None:
        """Take or give back, to hold so much."""
        self.used_bytes = used_bytes
        self.stand_in.update()


class GpuStandIn:
    """See the module. Made by `gpu_stand_in`; every method may be called while servers run."""

    def __init__(self, folder: Path, cards: Sequence[ShimCard], scale: int, context_bytes: int) -> None:
        self.shim = NvmlShim(folder)
        self._scale = scale
        self._context_bytes = context_bytes
        self._cards = {card.uuid: card for card in cards}
        self._shown: dict[str, ShimCard] = {}
        self._driver: dict[str, Any] = {}
        self._watched: list[ProcessIdentity] = []
        self._runtimes: dict[ProcessIdentity, _Runtime] = {}
        self._held_bytes: dict[ProcessIdentity, int] = {}
        self._kept_bytes: dict[str, int] = {}
        self._programs: list[ForeignProgram] = []
        self._withheld: set[str] = set()
        self._lock = threading.RLock()
        self._most_bytes: dict[str, int] = {}
        self._stop = threading.Event()
        self.update()

    # ---- servers and programs -----------------------------------------------------------------------------------

    @contextmanager
    def serving(self, folder: Path, config: Mapping[str, Any], *, ready: bool = True) -> Generator[Serving]:
        """`tests.integration.serving.serving`, on these cards."""
        with serving(folder, config, ready=False, env=self.shim.env()) as server:
            self.watch(server.process.pid)
            if ready:
                server.until_ready()
            yield server

    def watch(self, pid: int) -> None:
        """Whatever this process starts as a runtime shows from now on; give it the environment of `shim.env()`."""
        process = procfs.identity(pid)
        assert process is not None, f"process {pid} has ended"
        with self._lock:
            self._watched.append(process)

    @contextmanager
    def program(self, place: str, used_bytes: int, kind: str = "compute") -> Generator[ForeignProgram]:
        """A real process of somebody else's that holds memory of a card, until the block ends. `kind`: of list."""
        with running(*sleeping()) as process:
            program = ForeignProgram(process.pid, place, used_bytes, kind, self)
            with self._lock:
                self._programs.append(program)
            self.update()
            try:
                yield program
            finally:
                with self._lock:
                    self._programs.remove(program)
                self.update()

    # ---- cards --------------------------------------------------------------------------------------------------

    def change(self, uuid: str, **fields: Any) -> None:
        """Of its ShimCard; `used_bytes` is what nobody claims, and `processes` are those that are in no other way."""
        with self._lock:
            self._cards[uuid] = replace(self._cards[uuid], **fields)
            self.update()

    def withhold(self, place: str, withheld: bool = True) -> None:
        """Whether the driver lists processes there without their bytes, as under WDDM: what is ours is ESTIMATED."""
        with self._lock:
            self._withheld = self._withheld | {place} if withheld else self._withheld - {place}
            self.update()

    def add(self, card: ShimCard) -> None:
        with self._lock:
            self._cards[card.uuid] = card
            self.update()

    def remove(self, uuid: str) -> ShimCard:
        """The card as it was given, to be added again."""
        with self._lock:
            card = self._cards.pop(uuid)
            self.update()
            return card

    def raise_xid(self, uuid: str, code: int, gpu_instance: int | None = None) -> None:
        with self._lock:
            self.change(uuid, xids=(*self._cards[uuid].xids, ShimXid(code, gpu_instance)))

    def set_driver(self, **options: Any) -> None:
        """Of `NvmlShim.set`: `init`, `build`, `load`, `driver`. They stay until they are set again."""
        with self._lock:
            self._driver |= options
            self.update()

    def give_back(self, place: str) -> int:
        """What ended runtimes kept there is free again; how much that was."""
        with self._lock:
            kept_bytes = self._kept_bytes.pop(place, 0)
            self.update()
            return kept_bytes

    def used_bytes(self, uuid: str) -> int:
        """What the card shows."""
        with self._lock:
            return self._shown[uuid].used_bytes

    def most_bytes(self, place: str) -> int:
        """The most that was ever asked of a card or an instance of its own: more than its total is an over-commit."""
        with self._lock:
            return self._most_bytes[place]

    def kept_bytes(self, place: str) -> int:
        """What of it ended runtimes have kept."""
        with self._lock:
            return self._kept_bytes.get(place, 0)

    def held_bytes(self, process: ProcessIdentity) -> int:
        """What the cards show of one runtime; 0 before its first instruction and after its end."""
        with self._lock:
            return self._held_bytes.get(process, 0)

    # ---- following ----------------------------------------------------------------------------------------------

    @contextmanager
    def following(self) -> Generator[None]:
        with ThreadPoolExecutor(1, "gpu-stand-in") as executor:
            follower = executor.submit(self._follow)
            try:
                yield
            finally:
                self._stop.set()
            follower.result()

    def _follow(self) -> None:
        while not self._stop.wait(INTERVAL_SECONDS):
            self.update()

    def update(self) -> None:
        """Look at the processes, and show the cards."""
        with self._lock:
            table = procfs.scan()
            self._find_runtimes(table)
            self._read_runtimes(table)
            self._shown = {uuid: self._show(card) for uuid, card in self._cards.items()}
            self.shim.set(list(self._shown.values()), **self._driver)

    def _find_runtimes(self, table: ProcessTable) -> None:
        for process in {member for root in self._watched for member in table.tree(root)} - self._runtimes.keys():
            arguments = _fields(process.pid, "cmdline")
            environment = _variables(process.pid)
            # Held, it is the launcher still: the runtime has not yet executed an instruction.
            if MARK in environment and arguments[0] and launcher.__file__ not in arguments[:4]:
                place = environment.get("CUDA_VISIBLE_DEVICES", "")
                if place and self._is_there(place):
                    self._runtimes[process] = _Runtime(place, _faults(arguments))

    def _is_there(self, place: str) -> bool:
        return any(place in (card.uuid, *(one.uuid for one in card.instances)) for card in self._cards.values())

    def _read_runtimes(self, table: ProcessTable) -> None:
        for process, runtime in list(self._runtimes.items()):
            if table.is_alive(process):
                resident_bytes = process_memory.read(process.pid).total_bytes
                # One that is ending gives its pages back one by one; the device frees a context when it is gone.
                if resident_bytes and not _is_ending(process.pid):
                    grains = (resident_bytes + GRAIN_BYTES // 2) // GRAIN_BYTES
                    self._held_bytes[process] = grains * GRAIN_BYTES * self._scale + self._context_bytes
                continue
            held_bytes = self._held_bytes.pop(process, 0)
            if runtime.keeps_memory():
                self._kept_bytes[runtime.place] = self._kept_bytes.get(runtime.place, 0) + held_bytes
            del self._runtimes[process]

    def _show(self, card: ShimCard) -> ShimCard:
        """A parent shows what its instances use as its own too; their processes are theirs."""
        instances = tuple(self._filled(one) for one in card.instances)
        filled = self._filled(card)
        used_bytes = filled.used_bytes + sum(one.used_bytes for one in instances)
        return replace(filled, used_bytes=used_bytes, instances=instances)

    def _filled(self, place: _Place) -> _Place:
        """With what is on it. A device never shows more than it has, whatever was asked of it."""
        on_it: list[ShimProcess] = [
            ShimProcess(process.pid, self._held_bytes[process])
            for process, runtime in self._runtimes.items()
            if runtime.place == place.uuid and process in self._held_bytes
        ]
        on_it += [ShimProcess(one.pid, one.used_bytes, one.kind) for one in self._programs if one.place == place.uuid]
        used_bytes = place.used_bytes + self._kept_bytes.get(place.uuid, 0) + sum(one.used_bytes or 0 for one in on_it)
        if place.uuid in self._withheld:
            on_it = [replace(one, used_bytes=None) for one in on_it]
        self._most_bytes[place.uuid] = max(used_bytes, self._most_bytes.get(place.uuid, 0))
        return replace(place, used_bytes=min(used_bytes, place.total_bytes), processes=(*place.processes, *on_it))


def _is_ending(pid: int) -> bool:
    """Whether the kernel has begun to end it, or has done so: the ninth field of its line (proc_pid_stat(5))."""
    line = procfs.read_process_file(pid, "stat") or b""
    fields = line.rpartition(b")")[2].split()
    return not fields or bool(int(fields[6]) & _PF_EXITING)


def _fields(pid: int, name: str) -> list[str]:
    """Of a file whose fields end with NUL; none of a process that is gone, or between two programs."""
    content = procfs.read_process_file(pid, name) or b""
    return content.decode("utf-8", "replace").split("\0")


def _variables(pid: int) -> dict[str, str]:
    pairs = (field.partition("=") for field in _fields(pid, "environ"))
    return {name: value for name, _, value in pairs}


def _faults(arguments: Sequence[str]) -> Mapping[str, Any]:
    """What a reference runtime was told to do wrong: its last argument is its configuration."""
    if reference_main.__file__ not in arguments:
        return {}
    config: dict[str, Any] = json.loads(arguments[arguments.index(reference_main.__file__) + 2])
    faults: dict[str, Any] = config["faults"]
    return faults
