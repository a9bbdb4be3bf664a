"""Checks of the NVIDIA driver, of each card, and of whose programs are on it (runtimes.md, NVML)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Final

from gpuledger.adapters.telemetry import nvml_binding as nvml
from gpuledger.domain.explain import duration, size

from .doctor_findings import Finding, fail, ok, warn
from .machine import Card, CardUse, Driver, Machine

#: A card that takes longer to be read than this makes samples late, at one every second while models load.
SLOW_READ_MS: Final = 1_000
#: Where others hold this much of a card, pressure is ELEVATED by the policy of this release (semantics.md 10).
MUCH_BP: Final = 5_000
#: Programs on a card that are named; of more only the number is told.
_PROGRAMS_TOLD: Final = 8

_DEVICES: Final = ("nvidiactl", "nvidia-uvm")
_CARD_DEVICE: Final = re.compile(r"nvidia[0-9]+")


def check_driver(machine: Machine, driver: Driver, wanted: bool) -> Iterator[Finding]:
    """`wanted`: whether the configuration insists on GPUs (`accelerators.nvml: true`, or a deployment of kind gpu)."""
    bus = machine.cards_on_bus()
    card = f"the card at {bus[0]}" if bus else "no NVIDIA card is on the bus"
    if driver.error == 0:
        yield from _open_driver(driver, bus)
    elif driver.error in (nvml.LIBRARY_NOT_FOUND, nvml.DRIVER_NOT_LOADED) and not bus and not wanted:
        yield ok("driver", "there is no NVIDIA driver and no card: models run on the host")
    elif driver.error == nvml.LIBRARY_NOT_FOUND:
        yield fail(
            "driver",
            f"libnvidia-ml.so.1 is not found ({card})",
            "install NVIDIA's driver; in a container: start it with `--gpus all` and the NVIDIA Container Toolkit; "
            "or name the file as accelerators.nvml_library",
        )
    elif driver.error == nvml.DRIVER_NOT_LOADED:
        yield fail(
            "driver",
            f"the library is there, and the kernel has no driver loaded ({card})",
            "sudo modprobe nvidia; if that fails, `dmesg | grep -i nvrm` says why (often a newer kernel)",
        )
    elif driver.error == nvml.LIB_RM_VERSION_MISMATCH:
        yield fail(
            "driver",
            f"the library and the loaded driver are of different versions{_loaded_version(machine)}",
            "reboot, or stop what uses the cards and reload the modules: sudo rmmod nvidia_uvm nvidia_drm "
            "nvidia_modeset nvidia; sudo modprobe nvidia",
        )
    elif driver.error == nvml.NO_PERMISSION:
        yield fail(
            "driver",
            "this user may not talk to the driver",
            "allow it the devices /dev/nvidia* (see `devices`), in a unit by DeviceAllow=",
        )
    else:
        yield fail(
            "driver",
            f"NVML answers {driver.error} when it is opened",
            "nvidia-smi and dmesg say more; reload the driver",
        )


def _open_driver(driver: Driver, bus: Collection[str]) -> Iterator[Finding]:
    count = len(driver.cards) + len(driver.silent)
    if count == 0 and bus:
        yield fail(
            "driver",
            f"driver {driver.version} shows no card, and {len(bus)} are on the bus",
            "in a container: start it with `--gpus all`; on the machine: dmesg says why the driver left them out",
        )
    else:
        cards = "1 card" if count == 1 else f"{count} cards"
        yield ok("driver", f"driver {driver.version} with {cards}, opened in {duration(driver.open_ms)}")


def _loaded_version(machine: Machine) -> str:
    try:
        text = (machine.proc / "driver/nvidia/version").read_text("utf-8", "replace")
    except OSError:
        return ""
    found = re.search(r"Kernel Module\s+(?:for \S+\s+)?([0-9.]+)", text)
    return "" if found is None else f" (the loaded one is {found[1]})"


def check_devices(machine: Machine, driver: Driver) -> Iterator[Finding]:
    """Whether this user may open what a runtime must open. Nothing to say where there is no driver."""
    if driver.error not in (0, nvml.NO_PERMISSION) or not (driver.cards or driver.silent or driver.error):
        return
    folder = machine.root / "dev"
    if (folder / "dxg").exists():
        yield ok("devices", "/dev/dxg: the card is reached by way of Windows")
        return
    cards = sorted(path.name for path in folder.glob("nvidia*") if _CARD_DEVICE.fullmatch(path.name))
    names = [*_DEVICES, *cards]
    absent = [name for name in names if not (folder / name).exists()]
    closed = [name for name in names if name not in absent and not machine.usable(folder / name)]
    if closed:
        yield fail(
            "devices",
            f"this user may not use {_paths(closed)}",
            "add the user to the group that owns them (`ls -l /dev/nvidia*`: often video or render), and log in again",
        )
    if "nvidiactl" in absent or not cards:
        yield warn(
            "devices",
            f"not there: {_paths([*absent, *([] if cards else ['nvidia0'])])}",
            "sudo nvidia-modprobe -c 0 makes them; in a container: `--gpus all`",
        )
    elif absent:
        yield warn(
            "devices",
            f"{_paths(absent)} is not there: CUDA makes it by a setuid program, which a hardened unit forbids",
            "sudo nvidia-modprobe -u -c 0, at every boot; nvidia-persistenced does it too",
        )
    elif not closed:
        yield ok("devices", f"{_paths(names)} can be used")


def _paths(names: Collection[str]) -> str:
    return ", ".join(f"/dev/{name}" for name in names)


def check_cards(driver: Driver) -> Iterator[Finding]:
    """Each card: whether it can be read, how long that takes, and whether the driver keeps it ready."""
    for index, code in driver.silent.items():
        yield fail(f"card {index}", f"it does not say who it is (NVML answers {code})", _card_mend(code))
    for card in driver.cards:
        yield _card(card)


def _card(card: Card) -> Finding:
    name = f"card {card.index}"
    of = f"{card.name} ({card.uuid})"
    if card.error == nvml.NOT_SUPPORTED:
        return warn(
            name,
            f"{of} tells no memory of its own: it shares that of the host",
            "leave room for what else runs on this machine: it takes from the same memory",
        )
    if card.error:
        return fail(name, f"{of} cannot be read (NVML answers {card.error})", _card_mend(card.error))
    took = f"{size(card.total_bytes)}, {size(card.used_bytes)} used, read in {duration(card.read_ms)}"
    if card.persistent is False:
        return warn(
            name,
            f"{of}: {took}; persistence mode is off: each sample of an idle card may take seconds",
            f"sudo nvidia-smi -i {card.index} -pm 1, or enable nvidia-persistenced.service",
        )
    if card.read_ms > SLOW_READ_MS:
        return warn(
            name,
            f"{of}: {took}: samples will be late",
            "look for what holds the driver's lock (other monitoring, nvidia-smi in a loop)",
        )
    return ok(name, f"{of}: {took}")


def _card_mend(code: int) -> str:
    if code == nvml.GPU_IS_LOST:
        return "the card fell off the bus: dmesg | grep -i xid; power and cooling; reboot"
    if code == nvml.RESET_REQUIRED:
        return "it wants a reset: sudo nvidia-smi --gpu-reset, with nothing on it"
    if code == nvml.NO_PERMISSION:
        return "allow this user the card's device, or give the container the whole card"
    return "nvidia-smi -q and dmesg say more"


def check_pids(machine: Machine, driver: Driver) -> Iterator[Finding]:
    """NVML names processes by the machine's ids, which mean nothing in a container with ids of its own."""
    if not (driver.cards or driver.silent):
        return
    if machine.sees_host_pids():
        yield ok("process ids", "they are the machine's own: memory of cards is attributed to each process")
    else:
        yield warn(
            "process ids",
            "this container has process ids of its own: what a model holds is ESTIMATED, and loads go one at a time",
            "start the container with --pid=host (Docker, Podman), hostPID: true (Kubernetes)",
        )


def check_programs(machine: Machine, driver: Driver, ours: Collection[int]) -> Iterator[Finding]:
    """Programs on each card that no scheduler of this configuration started. `ours`: pids of its runtimes."""
    for card in driver.cards:
        others = [use for use in card.uses if use.pid not in ours]
        if others:
            yield _programs(machine, card, others)
        elif card.error == 0:
            yield ok(f"programs on card {card.index}", "none of others")


def _programs(machine: Machine, card: Card, others: list[CardUse]) -> Finding:
    name = f"programs on card {card.index}"
    told = [_program(machine, use) for use in others[:_PROGRAMS_TOLD]]
    told += [f"and {len(others) - _PROGRAMS_TOLD} more"] if len(others) > _PROGRAMS_TOLD else []
    held_bytes = sum(use.used_bytes or 0 for use in others)
    found = f"{', '.join(told)}: external, {size(held_bytes)} in all, counted and never touched"
    if held_bytes * 10_000 < card.total_bytes * MUCH_BP:
        return ok(name, found)
    end = "`ollama stop MODEL`" if any("ollama" in one for one in told) else "end what you do not need"
    return warn(name, found, f"that much is pressure, and keeps less important models from loading: {end}")


def _program(machine: Machine, use: CardUse) -> str:
    program = machine.program_of(use.pid) or "a program that is not seen from here"
    return f"{program} ({use.pid}, {'?' if use.used_bytes is None else size(use.used_bytes)})"
