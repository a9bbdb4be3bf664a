"""NVML through the real `pynvml` and a compiled library: what cards and drivers do, and what becomes of it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gpuledger.adapters import procfs
from gpuledger.adapters.telemetry import processes
from gpuledger.adapters.telemetry.nvml import probe
from gpuledger.domain.ports import (
    AcceleratorReading,
    ManagedProcess,
    ManagedReading,
)
from gpuledger.domain.state import Health, Kind
from tests.children import identity_of, read_line, running, with_worker
from tests.integration.nvml_bench import NOBODY, ONE, OTHER, A, B, Bench, faults, managed, uuids
from tests.shim import GIB, NvmlShim, ShimCard, ShimProcess

# ---- what a card is ---------------------------------------------------------------------------------------------


def test_one_card_is_read_whole(bench: Bench) -> None:
    bench.shim.set([ONE])

    reading = bench.reading()

    assert reading == AcceleratorReading(
        accelerator_id=A,
        index=0,
        kind=Kind.GPU,
        gpu_class="rtx-3090",
        device_name="NVIDIA GeForce RTX 3090",
        driver_version="550.54.15",
        total_bytes=24 * GIB,
        used_bytes=3 * GIB,
        managed=(),
        foreign_processes=0,
    )


def test_used_is_what_is_not_free(bench: Bench) -> None:
    """`used` of the two versions of the call differ by the driver's reserve; total - free does not."""
    bench.shim.set([replace(ONE, used_bytes=2 * GIB, free_bytes=20 * GIB)])
    assert bench.reading().used_bytes == 4 * GIB


def test_two_cards_in_the_order_of_the_bus(bench: Bench) -> None:
    bench.shim.set([ONE, OTHER])

    sample = bench.sample()

    assert [(one.accelerator_id, one.index, one.gpu_class) for one in sample.accelerators] == [
        (A, 0, "rtx-3090"),
        (B, 1, "h200"),
    ]
    assert sample.faults == ()


def test_a_total_that_changed_is_reported_as_it_is_now(bench: Bench) -> None:
    bench.shim.set([ONE])
    assert bench.reading().total_bytes == 24 * GIB
    bench.shim.set([replace(ONE, total_bytes=20 * GIB)])
    assert bench.reading().total_bytes == 20 * GIB


# ---- figures that cannot be used --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "card",
    [
        replace(ONE, used_bytes=25 * GIB, free_bytes=GIB),
        replace(ONE, free_bytes=25 * GIB),
        replace(ONE, total_bytes=0, used_bytes=0),
        replace(ONE, total_bytes=2**63, used_bytes=0),
    ],
)
def test_impossible_figures_are_a_fault_of_their_card_alone(bench: Bench, card: ShimCard) -> None:
    bench.shim.set([card, OTHER])

    sample = bench.sample()

    assert faults(sample) == {(A, "IMPOSSIBLE_FIGURES", None)}
    assert uuids(sample) == [B]


@pytest.mark.parametrize(
    ("card", "code"),
    [
        (replace(ONE, memory_error=4), "NVML_NO_PERMISSION"),
        (replace(ONE, mig=4), "NVML_NO_PERMISSION"),
        (replace(ONE, memory_error=16), "NVML_RESET_REQUIRED"),
        (replace(ONE, process_error=999), "NVML_UNKNOWN"),
        (replace(ONE, memory_error=77), "NVML_ERROR_77"),
    ],
)
def test_a_card_that_cannot_be_scheduled_says_why(bench: Bench, card: ShimCard, code: str) -> None:
    bench.shim.set([card, replace(OTHER, mig=0)])

    sample = bench.sample()

    assert [(fault.accelerator_id, fault.code) for fault in sample.faults] == [(A, code)]
    assert uuids(sample) == [B]


@pytest.mark.parametrize("uuid", [A, "GPU bad", "\u00e9", "-GPU"])
def test_a_card_without_a_name_of_its_own_blinds_no_other(bench: Bench, uuid: str) -> None:
    """A second one of the same name, and one whose name the ledger could not take."""
    bench.shim.set([ONE, replace(OTHER, uuid=uuid)])

    sample = bench.sample()

    assert faults(sample) == {(None, "UUID_UNUSABLE", None)}
    assert [(one.accelerator_id, one.device_name) for one in sample.accelerators] == [(A, ONE.name)]


# ---- whose memory it is -----------------------------------------------------------------------------------------


def test_bytes_of_a_resident_and_of_others(bench: Bench, child: subprocess.Popen[str]) -> None:
    bench.shim.set([replace(ONE, processes=(ShimProcess(child.pid, 2 * GIB), ShimProcess(NOBODY, GIB)))])

    reading = bench.reading([managed(child.pid)])

    assert reading.managed == (ManagedReading("res-1", alive=True, used_bytes=2 * GIB),)
    assert reading.foreign_processes == 1


def test_the_whole_tree_counts(bench: Bench) -> None:
    """A runtime's workers hold the memory; one whose parent died is still in the runtime's group."""
    with running("sh", "-c", "sleep 600 & echo $!; (sleep 600 & echo $!); wait") as root:
        direct, reparented = int(read_line(root)), int(read_line(root))
        listed = (ShimProcess(root.pid, 1), ShimProcess(direct, 20), ShimProcess(reparented, 300))
        bench.shim.set([replace(ONE, processes=listed)])
        reading = bench.reading([managed(root.pid)])
    assert reading.managed == (ManagedReading("res-1", alive=True, used_bytes=321),)
    assert reading.foreign_processes == 0


def test_a_process_in_several_lists_counts_once(bench: Bench, child: subprocess.Popen[str]) -> None:
    lists = tuple(
        ShimProcess(child.pid, 100 + extra, kind) for extra, kind in enumerate(("compute", "graphics", "mps"))
    )
    bench.shim.set([replace(ONE, processes=lists)])
    assert bench.reading([managed(child.pid)]).managed[0].used_bytes == 102


def test_a_desktop_is_no_foreign_compute_process(bench: Bench) -> None:
    lists = (ShimProcess(NOBODY, 1, "graphics"), ShimProcess(NOBODY - 1, 1, "mps"), ShimProcess(NOBODY - 1, 1))
    bench.shim.set([replace(ONE, processes=lists)])
    assert bench.reading().foreign_processes == 1


@pytest.mark.parametrize(("host_pids", "used_bytes", "blind"), [(True, 0, None), (False, None, "PID_NAMESPACE")])
def test_a_resident_that_is_not_listed_holds_nothing_unless_pids_mean_nothing_here(
    bench: Bench,
    child: subprocess.Popen[str],
    monkeypatch: pytest.MonkeyPatch,
    host_pids: bool,
    used_bytes: int | None,
    blind: str | None,
) -> None:
    """In a container NVML lists ids of the machine."""

    def sees_host_pids(root: Path) -> bool:
        return host_pids

    monkeypatch.setattr(processes, "sees_host_pids", sees_host_pids)
    bench.shim.set([replace(ONE, processes=(ShimProcess(NOBODY, GIB),))])
    assert bench.reading().blind is None  # nobody of ours is there whom it could hide
    reading = bench.reading([managed(child.pid)])
    assert reading.managed == (ManagedReading("res-1", alive=True, used_bytes=used_bytes),)
    assert reading.blind == blind

    bench.shim.set([replace(ONE, processes=(ShimProcess(child.pid, GIB),))])  # a driver that translates ids
    reading = bench.reading([managed(child.pid)])
    assert (reading.managed[0].used_bytes, reading.blind) == (GIB, None)


BYTES, LIST = "NO_PROCESS_BYTES", "PROCESS_LIST_UNREADABLE"
UNREADABLE: dict[str, tuple[str, Callable[[int], ShimCard]]] = {
    "bytes are withheld": (BYTES, lambda pid: replace(ONE, processes=(ShimProcess(pid, None),))),
    "more than the card has": (BYTES, lambda pid: replace(ONE, processes=(ShimProcess(pid, 25 * GIB),))),
    "pid and bytes are swapped": (LIST, lambda pid: replace(ONE, processes=(ShimProcess(2**30, pid),))),
    "lists are not supported": (LIST, lambda pid: replace(ONE, process_error=3)),
    "lists are not permitted": (LIST, lambda pid: replace(ONE, process_error=4)),
}


@pytest.mark.parametrize(("blind", "card_with"), UNREADABLE.values(), ids=UNREADABLE.keys())
def test_bytes_that_cannot_be_read_are_unknown_not_zero(
    bench: Bench, child: subprocess.Popen[str], blind: str, card_with: Callable[[int], ShimCard]
) -> None:
    bench.shim.set([card_with(child.pid)])
    reading = bench.reading([managed(child.pid)])
    assert reading.managed == (ManagedReading("res-1", alive=True, used_bytes=None),)
    assert (reading.blind, type(reading.blind)) == (blind, str)  # what the ledger takes


def test_what_others_hold_may_stay_untold(bench: Bench, child: subprocess.Popen[str]) -> None:
    bench.shim.set([replace(ONE, processes=(ShimProcess(child.pid, GIB), ShimProcess(NOBODY, None)))])
    reading = bench.reading([managed(child.pid)])
    assert (reading.managed[0].used_bytes, reading.blind) == (GIB, None)


def test_one_unreadable_member_makes_the_tree_unknown(bench: Bench) -> None:
    with running(*with_worker()) as root:
        worker = int(read_line(root))
        bench.shim.set([replace(ONE, processes=(ShimProcess(root.pid, GIB), ShimProcess(worker, None)))])
        reading = bench.reading([managed(root.pid)])
    assert reading.managed[0].used_bytes is None


def test_a_reused_pid_is_a_stranger(bench: Bench, child: subprocess.Popen[str]) -> None:
    earlier = replace(identity_of(child.pid), start_ticks=1)
    bench.shim.set([replace(ONE, processes=(ShimProcess(child.pid, GIB),))])

    reading = bench.reading([ManagedProcess("res-1", A, earlier)])

    assert reading.managed == (ManagedReading("res-1", alive=False, used_bytes=0),)
    assert reading.foreign_processes == 1


def test_a_dead_resident_keeps_what_the_driver_has_not_taken_back(bench: Bench) -> None:
    """Its worker has ended too; both stay listed for some milliseconds, and are nobody else's."""
    with running(*with_worker()) as root:
        worker = int(read_line(root))
        resident = managed(root.pid)
        listed = replace(ONE, processes=(ShimProcess(root.pid, 1), ShimProcess(worker, 20)))
        bench.shim.set([listed])
        assert bench.reading([resident]).managed == (ManagedReading("res-1", alive=True, used_bytes=21),)
        worker_end = os.pidfd_open(worker)
    wait_for(worker_end)

    reading = bench.reading([resident])
    assert reading.managed == (ManagedReading("res-1", alive=False, used_bytes=21),)
    assert reading.foreign_processes == 0

    bench.shim.set([ONE])
    assert bench.reading([resident]).managed == (ManagedReading("res-1", alive=False, used_bytes=0),)


def test_a_driver_that_still_lists_a_pid_gives_it_to_nobody_else(bench: Bench) -> None:
    """What a resident held is not inherited: not by a stranger with its pid, not by its successor's name."""
    with running(*with_worker()) as root:
        worker = int(read_line(root))
        resident = managed(root.pid)
        bench.shim.set([replace(ONE, processes=(ShimProcess(worker, GIB),))])
        assert bench.reading([resident]).managed[0].used_bytes == GIB

        successor = replace(resident, resident_id="res-2", process=replace(resident.process, start_ticks=1))
        reading = bench.reading([successor])
        assert reading.managed == (ManagedReading("res-2", alive=False, used_bytes=0),)
        assert reading.foreign_processes == 1


def test_a_listed_pid_that_a_stranger_got_is_foreign(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(*with_worker()) as root:
        worker = int(read_line(root))
        resident = managed(root.pid)
        bench.shim.set([replace(ONE, processes=(ShimProcess(worker, GIB),))])
        bench.reading([resident])
        found = procfs.scan()

    def scan_later(proc: Path) -> procfs.ProcessTable:
        """The worker has ended, and its pid is that of a process that started afterwards."""
        stranger = replace(found.entries[worker], parent=1, group=1, session=1, start_ticks=2**40)
        return procfs.ProcessTable(found.boot_id, {root.pid: found.entries[root.pid], worker: stranger})

    monkeypatch.setattr(processes, "scan", scan_later)
    reading = bench.reading([resident])
    assert reading.managed == (ManagedReading("res-1", alive=True, used_bytes=0),)
    assert reading.foreign_processes == 1


def wait_for(pidfd: int) -> None:
    """Until the process has ended, if only as a zombie that nobody has looked at."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll()
    os.close(pidfd)


def test_a_resident_is_read_on_its_own_card_and_a_stranger_on_none(bench: Bench, child: subprocess.Popen[str]) -> None:
    bench.shim.set([replace(one, processes=(ShimProcess(child.pid, GIB),)) for one in (ONE, OTHER)])

    first, second = bench.sample([managed(child.pid, uuid=B)]).accelerators

    assert first.managed == ()
    assert second.managed == (ManagedReading("res-1", alive=True, used_bytes=GIB),)
    assert first.foreign_processes == second.foreign_processes == 0


# ---- cards that go and come back --------------------------------------------------------------------------------


def test_a_lost_card_is_lost_until_it_answers(bench: Bench) -> None:
    bench.shim.set([ONE])
    bench.sample()
    bench.shim.set([replace(ONE, error=15)])

    sample = bench.sample()
    assert faults(sample) == {(A, "NVML_GPU_LOST", Health.LOST)}
    assert sample.accelerators == ()

    bench.shim.set([ONE])
    assert uuids(bench.sample()) == [A]


def test_one_lost_card_does_not_blind_the_other(bench: Bench) -> None:
    bench.shim.set([ONE, OTHER])
    bench.sample()
    bench.shim.set([replace(ONE, error=15), replace(OTHER, used_bytes=GIB)])

    sample = bench.sample()

    assert faults(sample) == {(A, "NVML_GPU_LOST", Health.LOST)}
    assert [(one.accelerator_id, one.used_bytes) for one in sample.accelerators] == [(B, GIB)]


def test_a_card_lost_before_it_was_ever_seen_is_a_fault_without_a_name(bench: Bench) -> None:
    bench.shim.set([replace(ONE, error=15), OTHER])
    sample = bench.sample()
    assert faults(sample) == {(None, "NVML_GPU_LOST", Health.LOST)}
    assert uuids(sample) == [B]


def test_a_card_that_vanishes_without_an_error_is_missed(bench: Bench) -> None:
    """The count drops and the other card moves to its index."""
    bench.shim.set([ONE, OTHER])
    bench.sample()
    bench.shim.set([OTHER])

    sample = bench.sample()

    assert faults(sample) == {(A, "GPU_VANISHED", Health.LOST)}
    assert [(one.accelerator_id, one.index) for one in sample.accelerators] == [(B, 0)]

    bench.shim.set([ONE, OTHER])
    assert uuids(bench.sample()) == [A, B]


# ---- the driver -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("init", "code"), [(9, "NVML_DRIVER_NOT_LOADED"), (18, "NVML_VERSION_MISMATCH"), (999, "NVML_UNKNOWN")]
)
def test_a_driver_that_does_not_answer_is_asked_again_at_a_bounded_pace(bench: Bench, init: int, code: str) -> None:
    bench.shim.set([ONE], init=init)
    assert faults(bench.sample()) == {(None, code, None)}

    bench.shim.set([ONE])
    assert faults(bench.sample(after_ms=4_999)) == {(None, code, None)}
    assert uuids(bench.sample(after_ms=1)) == [A]


def test_a_driver_that_stops_answering_leaves_no_old_figures(bench: Bench) -> None:
    bench.shim.set([ONE, OTHER])
    bench.sample()
    bench.shim.set([], init=9)

    for _ in range(3):
        sample = bench.sample(after_ms=1_000)
        assert sample.accelerators == ()
        assert faults(sample) == {(A, "NVML_DRIVER_NOT_LOADED", None), (B, "NVML_DRIVER_NOT_LOADED", None)}

    bench.shim.set([ONE, OTHER], load=2, driver="555.42.02")
    sample = bench.sample(after_ms=5_000)
    assert [(one.accelerator_id, one.driver_version) for one in sample.accelerators] == [
        (A, "555.42.02"),
        (B, "555.42.02"),
    ]


def test_a_reload_between_two_samples_is_recovered_from(bench: Bench) -> None:
    bench.shim.set([ONE])
    bench.sample()
    bench.shim.set([ONE], load=2)
    assert faults(bench.sample()) == {(A, "NVML_UNKNOWN", None)}
    assert uuids(bench.sample()) == [A]


def test_an_upgraded_driver_is_loaded_anew(bench: Bench) -> None:
    """The library in memory never fits the new driver; the one on disk does."""
    bench.shim.set([ONE])
    bench.sample()
    bench.shim.set([ONE], build=2, load=2, driver="555.42.02")
    bench.sample()
    assert faults(bench.sample()) == {(A, "NVML_VERSION_MISMATCH", None)}

    bench.shim.install(build=2)

    (reading,) = bench.sample().accelerators
    assert reading.driver_version == "555.42.02"


def test_a_lost_card_is_looked_for_anew_less_often_while_others_answer(bench: Bench) -> None:
    """A new session would re-initialise the healthy cards; what one does is seen by the load that it is begun under."""
    bench.shim.set([ONE, OTHER])
    bench.sample()
    bench.shim.set([replace(ONE, error=15), OTHER])
    bench.sample()
    assert uuids(bench.sample(after_ms=59_999)) == [B]

    bench.shim.set([ONE, OTHER], load=2)  # only a new session can see this
    assert uuids(bench.sample(after_ms=1)) == [A, B]


@pytest.mark.parametrize(
    ("first", "later"),
    [
        pytest.param(replace(ONE, error=15), ONE, id="it came back by itself"),
        pytest.param(replace(ONE, memory_error=4), replace(ONE, memory_error=4), id="it will never answer"),
        pytest.param(replace(ONE, mig=1), replace(ONE, mig=1), id="it is partitioned"),
    ],
)
def test_no_new_session_is_begun_for_nothing(bench: Bench, first: ShimCard, later: ShimCard) -> None:
    bench.shim.set([first, OTHER])
    bench.sample()
    bench.shim.set([later, OTHER])
    bench.sample()

    bench.shim.set([later, OTHER], load=2)  # the session at hand stumbles over this, and a new one would not
    assert {fault.code for fault in bench.sample(after_ms=60_000).faults} == {"NVML_UNKNOWN"}


def test_without_a_library_there_is_a_fault_and_no_crash(bench: Bench) -> None:
    bench.shim.uninstall()
    assert faults(bench.sample()) == {(None, "NVML_LIBRARY_NOT_FOUND", None)}

    bench.shim.install()
    bench.shim.set([ONE])
    assert uuids(bench.sample()) == [A]


def test_close_may_be_called_in_every_state(shim: NvmlShim) -> None:
    bench = Bench(shim)
    bench.telemetry.close()
    shim.set([ONE])
    bench.sample()
    bench.telemetry.close()
    bench.telemetry.close()


# ---- whether there is a driver at all ---------------------------------------------------------------------------


def bus_with(tmp_path: Path, vendor: str, device_class: str) -> Path:
    function = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    function.mkdir(parents=True)
    (function / "vendor").write_text(f"{vendor}\n")
    (function / "class").write_text(f"{device_class}\n")
    return tmp_path / "sys"


def test_probe_finds_a_driver_that_answers_or_should(shim: NvmlShim, tmp_path: Path) -> None:
    shim.set([ONE])
    assert probe(str(shim.library))
    shim.set([], init=18)
    assert probe(str(shim.library))
    shim.set([], init=9)
    assert probe(str(shim.library), bus_with(tmp_path, "0x10de", "0x030200"))


def test_probe_finds_none_on_a_machine_without_a_card(shim: NvmlShim, tmp_path: Path) -> None:
    bus = bus_with(tmp_path, "0x10de", "0x020700")  # of the vendor, and no display controller
    shim.set([], init=9)
    assert not probe(str(shim.library), bus)
    shim.uninstall()
    assert not probe(str(shim.library), bus)


# ---- as users have it -------------------------------------------------------------------------------------------

CHILD = """
import json, sys
from gpuledger.adapters import procfs
from gpuledger.adapters.telemetry import processes
from gpuledger.adapters.telemetry.node import NodeTelemetry
from gpuledger.adapters.telemetry.nvml import NvmlSource, probe
telemetry = NodeTelemetry([NvmlSource(retry_ms=0)])
for line in sys.stdin:
    sample = telemetry.sample(())
    found = [[one.accelerator_id, one.used_bytes, one.driver_version] for one in sample.accelerators]
    print(json.dumps([probe() if line == "probe\\n" else None, found, [one.code for one in sample.faults]]), flush=True)
telemetry.close()
"""


def test_the_loader_finds_the_driver_and_its_upgrade(shim: NvmlShim) -> None:
    """No path is configured: the real module loads `libnvidia-ml.so.1` by name, and again after an upgrade."""
    environment = {**os.environ, **shim.env()}
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(question: str = "sample") -> object:
            assert process.stdin is not None
            assert process.stdout is not None
            print(question, file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

        shim.set([ONE])
        assert ask() == [None, [[A, 3 * GIB, "550.54.15"]], []]
        shim.set([ONE], build=2, load=2, driver="555.42.02")
        ask()
        assert ask() == [None, [], ["NVML_VERSION_MISMATCH"]]
        shim.install(build=2)
        assert ask() == [None, [[A, 3 * GIB, "555.42.02"]], []]
        assert ask("probe") == [True, [[A, 3 * GIB, "555.42.02"]], []]
        process.stdin.close()
        assert process.wait() == 0
