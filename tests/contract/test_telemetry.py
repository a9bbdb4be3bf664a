"""What every source of samples owes the scheduler, asked of the GPUs (over a stand-in driver) and of the real host."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from gpuledger.adapters.telemetry.host import HostSource
from gpuledger.adapters.telemetry.node import NodeTelemetry
from gpuledger.adapters.telemetry.nvml import NvmlSource
from gpuledger.domain.ports import AcceleratorReading, ManagedProcess, ManagedReading, Telemetry
from gpuledger.domain.state import Accelerator
from gpuledger.domain.units import GIB
from tests.children import end, identity_of, read_line, running, sleeping, with_worker
from tests.shim import NvmlShim, ShimCard, ShimInstance, ShimProcess

GPU = "GPU-00000000-0000-0000-0000-00000000000a"
MIG = "MIG-00000000-0000-0000-0000-0000000000a1"
HOST = "host:node-1"


@dataclass(frozen=True)
class Subject:
    """A telemetry, the accelerator it is asked about, and how a process comes to hold some of its memory."""

    telemetry: Telemetry
    accelerator_id: str
    let_hold: Callable[[int], None]

    def reading(self, *managed: ManagedProcess) -> AcceleratorReading:
        sample = self.telemetry.sample(managed)
        assert sample.faults == ()
        (reading,) = (one for one in sample.accelerators if one.accelerator_id == self.accelerator_id)
        return reading

    def resident(self, pid: int, resident_id: str = "res-1") -> ManagedProcess:
        return ManagedProcess(resident_id, self.accelerator_id, identity_of(pid))


def on_card(shim: NvmlShim, accelerator_id: str, card_with: Callable[[tuple[ShimProcess, ...]], ShimCard]) -> Subject:
    held: list[ShimProcess] = []

    def let_hold(pid: int) -> None:
        held.append(ShimProcess(pid, GIB))
        shim.set([card_with(tuple(held))])

    shim.set([card_with(())])
    return Subject(NodeTelemetry([NvmlSource(str(shim.library))]), accelerator_id, let_hold)


def on_gpu(shim: NvmlShim) -> Subject:
    card = ShimCard(GPU, used_bytes=4 * GIB)
    return on_card(shim, GPU, lambda held: replace(card, processes=held))


def on_instance(shim: NvmlShim) -> Subject:
    """A GPU with MIG, of which one part is a resident's."""
    instance = ShimInstance(MIG, gpu_instance=7, used_bytes=3 * GIB)
    other = ShimInstance("MIG-other", gpu_instance=8, slot=1)
    card = ShimCard(GPU, mig=1, instances=(instance, other))
    return on_card(shim, MIG, lambda held: replace(card, instances=(replace(instance, processes=held), other)))


def on_unified(shim: NvmlShim) -> Subject:
    """A GPU that has no memory but this machine's."""
    card = ShimCard(GPU, memory_error=3)
    gpu = on_card(shim, GPU, lambda held: replace(card, processes=held))
    return replace(gpu, telemetry=NodeTelemetry([HostSource("node-1"), NvmlSource(str(shim.library))]))


def on_host() -> Subject:
    return Subject(NodeTelemetry([HostSource("node-1")]), HOST, lambda pid: None)


def on_both(shim: NvmlShim) -> Subject:
    gpu = on_gpu(shim)
    return replace(gpu, telemetry=NodeTelemetry([NvmlSource(str(shim.library)), HostSource("node-1")]))


@pytest.fixture(params=["gpu", "host", "both", "instance", "unified"])
def subject(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Subject]:
    shim = NvmlShim(tmp_path)
    monkeypatch.setenv(*shim.state_variable)
    makers: dict[str, Callable[[], Subject]] = {
        "gpu": lambda: on_gpu(shim),
        "host": on_host,
        "both": lambda: on_both(shim),
        "instance": lambda: on_instance(shim),
        "unified": lambda: on_unified(shim),
    }
    subject = makers[request.param]()
    yield subject
    subject.telemetry.close()


class TestTelemetry:
    """Semantics 1, and the docstrings of the port."""

    def test_what_is_read_can_stand_in_the_ledger(self, subject: Subject) -> None:
        for reading in subject.telemetry.sample(()).accelerators:
            declared = Accelerator(
                accelerator_id=reading.accelerator_id,
                index=reading.index,
                kind=reading.kind,
                gpu_class=reading.gpu_class,
                total_bytes=reading.total_bytes,
            )
            document = TypeAdapter(Accelerator)
            assert document.validate_json(document.dump_json(declared)) == declared
            assert reading.device_name
            assert reading.driver_version

    def test_used_is_within_total(self, subject: Subject) -> None:
        reading = subject.reading()
        assert 0 <= reading.used_bytes <= reading.total_bytes

    def test_an_accelerator_is_the_same_in_every_sample(self, subject: Subject) -> None:
        first, second = subject.reading(), subject.reading()
        assert replace(first, used_bytes=0) == replace(second, used_bytes=0)

    def test_ids_are_unique(self, subject: Subject) -> None:
        ids = [one.accelerator_id for one in subject.telemetry.sample(()).accelerators]
        assert len(ids) == len(set(ids))

    def test_what_is_gone_is_not_there(self, subject: Subject) -> None:
        sample = subject.telemetry.sample(())
        assert not {one.accelerator_id for one in sample.accelerators} & set(sample.gone)

    def test_age_is_a_duration(self, subject: Subject) -> None:
        assert subject.telemetry.sample(()).age_ms >= 0

    def test_every_resident_is_read_once_on_its_own_accelerator(self, subject: Subject) -> None:
        with running(*sleeping()) as one, running(*sleeping()) as other, running(*sleeping()) as third:
            subject.let_hold(one.pid)
            subject.let_hold(other.pid)
            elsewhere = ManagedProcess("res-3", "GPU-elsewhere", identity_of(third.pid))
            managed = [subject.resident(one.pid), subject.resident(other.pid, "res-2"), elsewhere]
            sample = subject.telemetry.sample(managed)

        read = [(one.accelerator_id, each) for one in sample.accelerators for each in one.managed]
        assert sorted((on, each.resident_id) for on, each in read) == [
            (subject.accelerator_id, "res-1"),
            (subject.accelerator_id, "res-2"),
        ]
        assert all(each.alive for _, each in read)
        assert all(each.used_bytes is not None and each.used_bytes > 0 for _, each in read)

    def test_a_tree_holds_what_its_members_hold(self, subject: Subject) -> None:
        with running(*with_worker()) as root:
            worker = int(read_line(root))
            subject.let_hold(root.pid)
            subject.let_hold(worker)
            part = subject.reading(subject.resident(worker, "part")).managed[0].used_bytes
            whole = subject.reading(subject.resident(root.pid, "whole")).managed[0].used_bytes
        assert part is not None
        assert whole is not None
        assert whole > part > 0

    def test_a_resident_is_alive_while_any_member_is(self, subject: Subject) -> None:
        with running(*with_worker()) as root:
            read_line(root)
            resident = subject.resident(root.pid)
            end(root)
            assert subject.reading(resident).managed[0].alive

    def test_a_resident_that_ended_is_not_alive_and_holds_nothing(self, subject: Subject) -> None:
        with running(*sleeping()) as child:
            resident = subject.resident(child.pid)
            assert subject.reading(resident).managed[0].alive
            end(child)
            assert subject.reading(resident).managed == (ManagedReading("res-1", alive=False, used_bytes=0),)

    def test_a_zombie_is_not_alive(self, subject: Subject) -> None:
        with running(*sleeping()) as child:
            resident = subject.resident(child.pid)
            child.kill()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            assert not subject.reading(resident).managed[0].alive

    @pytest.mark.parametrize("change", ["start", "boot"])
    def test_a_reused_pid_is_not_the_resident(self, subject: Subject, change: str) -> None:
        with running(*sleeping()) as child:
            subject.let_hold(child.pid)
            now = identity_of(child.pid)
            before = replace(now, start_ticks=1) if change == "start" else replace(now, boot_id="another")
            reading = subject.reading(ManagedProcess("res-1", subject.accelerator_id, before))
        assert reading.managed == (ManagedReading("res-1", alive=False, used_bytes=0),)

    def test_close_may_be_called_twice(self, subject: Subject) -> None:
        subject.telemetry.sample(())
        subject.telemetry.close()
        subject.telemetry.close()
