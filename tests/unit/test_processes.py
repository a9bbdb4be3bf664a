"""Who is who in /proc: reuse of pids, zombies, odd names, and trees whose parents have died."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpuledger.adapters import procfs
from gpuledger.adapters.procfs import ProcessEntry, ProcessTable
from gpuledger.adapters.telemetry.processes import Forest, Owned, Tree, look
from gpuledger.domain.ports import ManagedProcess, ProcessIdentity
from tests.children import end, identity_of, read_line, running, sleeping, with_worker

BOOT = "c14f007e-7b10-4c3c-a6fe-bec2177b518b"


def entry(
    pid: int, parent: int = 1, group: int = 1, session: int = 1, start: int = 100, running: bool = True
) -> ProcessEntry:
    return ProcessEntry(pid, start, parent, group, session, running)


def table(*entries: ProcessEntry) -> ProcessTable:
    return ProcessTable(BOOT, {one.pid: one for one in entries})


def process(pid: int, start: int = 100, boot: str = BOOT) -> ProcessIdentity:
    return ProcessIdentity(pid, start, boot)


def pids(members: tuple[ProcessIdentity, ...]) -> list[int]:
    return [member.pid for member in members]


# ---- identity ---------------------------------------------------------------------------------------------------


def test_this_process_is_who_it_is() -> None:
    me = identity_of(os.getpid())
    assert me.boot_id == procfs.boot_id()
    assert procfs.is_alive(me)
    assert procfs.scan().identity(os.getpid()) == me


def test_another_start_or_boot_is_another_process() -> None:
    me = identity_of(os.getpid())
    for other in (replace(me, start_ticks=1), replace(me, boot_id="another")):
        assert not procfs.is_alive(other)
        assert not procfs.scan().is_alive(other)
        assert procfs.tree(other) == ()


def test_nobody_runs_under_a_free_pid(tmp_path: Path) -> None:
    assert procfs.identity(2**22 - 1) is None


def test_a_zombie_is_not_alive() -> None:
    """It has ended and its parent has not looked yet."""
    with running(*sleeping()) as child:
        started = identity_of(child.pid)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert (procfs.PROC / str(child.pid)).exists()
        assert procfs.identity(child.pid) is None
        assert not procfs.is_alive(started)
        assert procfs.tree(started) == ()


def test_a_process_whose_main_thread_has_ended_is_alive() -> None:
    """Its line says Z, and its other thread works on."""
    script = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
ctypes.CDLL(None).syscall(ctypes.c_long(SYS_EXIT), 0)
"""
    numbers = {"x86_64": 60, "aarch64": 93}
    script = script.replace("SYS_EXIT", str(numbers[os.uname().machine]))
    with running(sys.executable, "-c", script) as child:
        stat = procfs.PROC / str(child.pid) / "stat"
        while b") Z" not in stat.read_bytes():
            os.sched_yield()
        assert procfs.identity(child.pid) is not None


def test_a_name_may_look_like_the_rest_of_the_line() -> None:
    with running("sh", "-c", "printf ') Z 1 (' > /proc/$$/comm; echo named; read -r _") as child:
        read_line(child)
        stat = (procfs.PROC / str(child.pid) / "stat").read_text()
        assert stat.startswith(f"{child.pid} () Z 1 () ")
        assert identity_of(child.pid).start_ticks == int(stat.split()[24])


def test_what_could_not_be_looked_at_is_not_taken_for_nobody(tmp_path: Path) -> None:
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text(f"{BOOT}\n")
    (tmp_path / "17").mkdir()
    assert procfs.scan(tmp_path).entries == {}  # it ended while we looked
    (tmp_path / "17/stat").mkdir()
    with pytest.raises(IsADirectoryError):
        procfs.scan(tmp_path)


def test_pids_are_the_machine_s_own_only_in_its_first_namespace(tmp_path: Path) -> None:
    (tmp_path / "self/ns").mkdir(parents=True)
    assert not procfs.sees_host_pids(tmp_path)
    (tmp_path / "self/ns/pid").symlink_to("pid:[4026531836]")
    assert procfs.sees_host_pids(tmp_path)
    (tmp_path / "self/ns/pid").unlink()
    (tmp_path / "self/ns/pid").symlink_to("pid:[4026532177]")
    assert not procfs.sees_host_pids(tmp_path)


# ---- trees ------------------------------------------------------------------------------------------------------


def test_a_tree_is_its_root_and_all_below() -> None:
    found = table(entry(10), entry(12, parent=10), entry(11, parent=12), entry(20), entry(21, parent=20))
    assert pids(found.tree(process(10))) == [10, 11, 12]


def test_a_grandchild_whose_parent_died_is_in_the_group_or_session() -> None:
    found = table(
        entry(10, group=10, session=10),
        entry(11, parent=1, group=10, session=10),
        entry(12, parent=1, group=12, session=10),  # a job of its own in the session
        entry(13, parent=12, group=13, session=13),  # and what that one started
        entry(14, parent=1, group=99, session=99),
    )
    assert pids(found.tree(process(10))) == [10, 11, 12, 13]


def test_what_a_dead_root_left_is_its_tree() -> None:
    left = entry(11, parent=1, group=10, session=10)
    assert pids(table(left).tree(process(10))) == [11]
    assert pids(table(entry(10, running=False), left).tree(process(10))) == [11]


def test_a_reused_pid_has_no_tree_of_the_one_before() -> None:
    found = table(entry(10, group=10, start=500), entry(11, parent=10, group=10, start=501))
    assert found.tree(process(10, start=100)) == ()
    assert found.tree(process(10, start=500, boot="another")) == ()
    assert pids(found.tree(process(10, start=500))) == [10, 11]


def test_zombies_are_walked_through_and_not_listed() -> None:
    found = table(entry(10, running=False), entry(11, parent=10))
    assert pids(found.tree(process(10))) == [11]


def test_a_real_tree_survives_the_death_of_its_root() -> None:
    with running(*with_worker()) as root:
        worker = int(read_line(root))
        started = identity_of(root.pid)
        assert pids(procfs.tree(started)) == [root.pid, worker]
        end(root)
        assert pids(procfs.tree(started)) == [worker]


# ---- owners -----------------------------------------------------------------------------------------------------


def managed(pid: int, resident_id: str, accelerator_id: str = "GPU-0") -> ManagedProcess:
    return ManagedProcess(resident_id, accelerator_id, process(pid))


def forest(found: ProcessTable, *residents: ManagedProcess) -> Forest:
    return Forest(found, tuple(Tree(one, found.tree(one.process)) for one in residents), host_pids=True)


def test_every_member_is_its_resident_s() -> None:
    found = table(entry(10), entry(11, parent=10), entry(20), entry(30))
    owners = forest(found, managed(10, "a"), managed(20, "b")).owners()
    assert {pid: owned.resident_id for pid, owned in owners.items()} == {10: "a", 11: "a", 20: "b"}


def test_a_root_that_ended_stays_its_resident_s_until_its_pid_is_another_s() -> None:
    resident = managed(10, "a")
    assert forest(table(), resident).owners() == {10: Owned("a", process(10))}
    assert forest(table(entry(10, running=False)), resident).owners() == {10: Owned("a", process(10))}
    assert forest(table(entry(10, start=500)), resident).owners() == {}
    elsewhere = replace(resident, process=process(10, boot="another"))
    assert forest(table(), elsewhere).owners() == {}


def test_residents_of_one_accelerator() -> None:
    found = forest(table(), managed(10, "a", "GPU-0"), managed(20, "b", "GPU-1"))
    assert [tree.resident_id for tree in found.on("GPU-1")] == ["b"]


def test_a_look_at_the_real_processes() -> None:
    with running(*sleeping()) as child:
        started = identity_of(child.pid)
        (tree,) = look([ManagedProcess("a", "GPU-0", started)]).trees
    assert tree.alive
    assert tree.members == (started,)
