"""Every check of `gpuledger doctor`, each of its answers: on files of a machine that is made for it, and real NVML."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gpuledger.adapters.ledger.lock import LedgerLock
from gpuledger.domain.document_problems import DocumentError
from gpuledger.domain.units import GIB, MIB
from gpuledger.tools import doctor_gpu, doctor_host, doctor_ledger, doctor_models
from gpuledger.tools.bootstrap import request_key, tokens_of
from gpuledger.tools.config import Config, config_of
from gpuledger.tools.doctor import Asked, configuration_findings, document_of, examined
from gpuledger.tools.doctor_findings import Finding, Result, guarded, ok
from gpuledger.tools.machine import ClockState, Driver, Machine, adjtimex
from tests.shim import NvmlShim, ShimCard, ShimProcess
from tests.simulation.ledgers import Lived, crowded_minutes, write_sqlite
from tests.unit.machines import Clocks, Made

OK, WARN, FAIL = Result.OK, Result.WARN, Result.FAIL
UUID = "GPU-0f6ffa9b-1d3a-4b0e-9d55-0123456789ab"
#: Answers of NVML (nvml.h).
NO_PERMISSION, NOT_LOADED, NOT_FOUND, LOST, RESET, MISMATCH = 4, 9, 12, 15, 16, 18


@pytest.fixture
def made(tmp_path: Path) -> Made:
    (tmp_path / "root").mkdir()
    return Made(tmp_path / "root")


@pytest.fixture
def shim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NvmlShim:
    shim = NvmlShim(tmp_path)
    monkeypatch.setenv(*shim.state_variable)
    return shim


@pytest.fixture(scope="module")
def lived() -> Lived:
    return crowded_minutes()


def only(findings: Iterable[Finding]) -> Finding:
    (finding,) = findings
    if finding.result is not OK:
        assert finding.mend, finding
    return finding


def named(findings: Iterable[Finding], name: str) -> Finding:
    return only(one for one in findings if one.name == name)


def config(folder: Path, *deployments: dict[str, Any], **options: Any) -> Config:
    document: dict[str, Any] = {
        "ledger": "state/ledger.db",
        "clients": [{"id": "app", "token_sha256": "0" * 64}],
        "deployments": list(deployments),
        **options,
    }
    return config_of(document, folder / "gpuledger.yaml")


def llama(model: Path, **options: Any) -> dict[str, Any]:
    """A deployment of a model; `runtime`: more of its keys."""
    runtime = {"type": "llama_cpp", "task": "chat", "model": str(model), **options.pop("runtime", {})}
    return {"id": "m", "capability": "m@1", "kind": "host", "runtime": runtime, **options}


# ---- cards ------------------------------------------------------------------------------------------------------


def driver_of(shim: NvmlShim, made: Made) -> Driver:
    return made.machine(library=str(shim.library)).driver()


class TestDriver:
    def check(self, made: Made, driver: Driver, wanted: bool = False) -> Finding:
        return only(doctor_gpu.check_driver(made.machine(), driver, wanted))

    def test_it_answers(self, made: Made, shim: NvmlShim) -> None:
        shim.set([ShimCard(UUID)])
        finding = self.check(made, driver_of(shim, made))
        assert finding.result is OK
        assert "550.54.15 with 1 card" in finding.found

    def test_nothing_there_and_nothing_wanted(self, made: Made, tmp_path: Path) -> None:
        driver = made.machine(library=str(tmp_path / "none.so")).driver()
        assert driver.error == NOT_FOUND
        assert self.check(made, driver).result is OK
        assert self.check(made, driver, wanted=True).result is FAIL

    def test_a_card_without_a_library(self, made: Made, tmp_path: Path) -> None:
        made.card_on_bus()
        finding = self.check(made, made.machine(library=str(tmp_path / "none.so")).driver())
        assert finding.result is FAIL
        assert "0000:01:00.0" in finding.found
        assert "--gpus all" in finding.mend

    @pytest.mark.parametrize(
        ("answer", "found", "mend"),
        [
            (NOT_LOADED, "no driver loaded", "modprobe"),
            (NO_PERMISSION, "may not", "/dev/nvidia"),
            (MISMATCH, "different versions (the loaded one is 535.104.05)", "reboot"),
            (999, "999", "nvidia-smi"),
        ],
    )
    def test_it_does_not_answer(self, made: Made, shim: NvmlShim, answer: int, found: str, mend: str) -> None:
        made.card_on_bus()
        version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
        made.write("proc/driver/nvidia/version", version)
        shim.set([], init=answer)
        finding = self.check(made, driver_of(shim, made))
        assert finding.result is FAIL
        assert found in finding.found
        assert mend in finding.mend

    def test_a_driver_that_shows_no_card(self, made: Made, shim: NvmlShim) -> None:
        assert self.check(made, driver_of(shim, made)).result is OK
        made.card_on_bus()
        assert self.check(made, driver_of(shim, made)).result is FAIL


class TestDevices:
    ALL = ("nvidiactl", "nvidia-uvm", "nvidia0")

    def check(self, made: Made, shim: NvmlShim, closed: frozenset[str] = frozenset()) -> list[Finding]:
        shim.set([ShimCard(UUID)])
        machine = made.machine(usable=lambda path: path.name not in closed)
        return list(doctor_gpu.check_devices(machine, driver_of(shim, made)))

    def test_all_there(self, made: Made, shim: NvmlShim) -> None:
        made.devices(*self.ALL)
        assert only(self.check(made, shim)).result is OK

    def test_one_that_this_user_may_not_use(self, made: Made, shim: NvmlShim) -> None:
        made.devices(*self.ALL)
        finding = only(self.check(made, shim, frozenset({"nvidia0"})))
        assert (finding.result, "/dev/nvidia0" in finding.found) == (FAIL, True)
        assert "/dev/nvidiactl" not in finding.found

    def test_none_there(self, made: Made, shim: NvmlShim) -> None:
        finding = only(self.check(made, shim))
        assert finding.result is WARN
        assert "/dev/nvidia0" in finding.found

    def test_without_that_of_unified_memory(self, made: Made, shim: NvmlShim) -> None:
        made.devices("nvidiactl", "nvidia0")
        finding = only(self.check(made, shim))
        assert finding.result is WARN
        assert "nvidia-modprobe -u" in finding.mend

    def test_under_windows(self, made: Made, shim: NvmlShim) -> None:
        made.devices("dxg")
        assert only(self.check(made, shim)).result is OK

    def test_nothing_to_say_without_a_driver(self, made: Made, shim: NvmlShim) -> None:
        shim.set([], init=NOT_LOADED)
        assert list(doctor_gpu.check_devices(made.machine(), driver_of(shim, made))) == []


class TestCards:
    def check(self, made: Made, shim: NvmlShim, *cards: ShimCard) -> list[Finding]:
        shim.set(cards)
        return list(doctor_gpu.check_cards(driver_of(shim, made)))

    def test_one_that_answers(self, made: Made, shim: NvmlShim) -> None:
        finding = only(self.check(made, shim, ShimCard(UUID, used_bytes=3 * GIB, persistence=True)))
        assert finding.result is OK
        assert "24.0 GiB, 3.0 GiB used" in finding.found

    def test_persistence_mode_off(self, made: Made, shim: NvmlShim) -> None:
        finding = only(self.check(made, shim, ShimCard(UUID, persistence=False)))
        assert finding.result is WARN
        assert "nvidia-smi -i 0 -pm 1" in finding.mend

    def test_one_that_takes_long(self, made: Made, shim: NvmlShim) -> None:
        made.clocks.ticks_ms = 1500
        finding = only(self.check(made, shim, ShimCard(UUID)))
        assert (finding.result, "read in 1.5 s" in finding.found) == (WARN, True)

    def test_one_that_shares_the_memory_of_the_host(self, made: Made, shim: NvmlShim) -> None:
        assert only(self.check(made, shim, ShimCard(UUID, memory_error=3))).result is WARN

    @pytest.mark.parametrize(("answer", "mend"), [(LOST, "xid"), (RESET, "reset"), (NO_PERMISSION, "device")])
    def test_one_that_cannot_be_read_beside_one_that_can(
        self, made: Made, shim: NvmlShim, answer: int, mend: str
    ) -> None:
        bad, good = self.check(made, shim, ShimCard(UUID, memory_error=answer), ShimCard(UUID[:-1] + "c"))
        assert (bad.result, good.result) == (FAIL, OK)
        assert mend in bad.mend

    def test_one_that_does_not_say_who_it_is(self, made: Made, shim: NvmlShim) -> None:
        finding = only(self.check(made, shim, ShimCard(UUID, error=LOST)))
        assert (finding.name, finding.result) == ("card 0", FAIL)


class TestProcesses:
    def test_ids_of_the_machine_and_of_a_container(self, made: Made, shim: NvmlShim) -> None:
        shim.set([ShimCard(UUID)])
        driver = driver_of(shim, made)
        assert only(doctor_gpu.check_pids(made.machine(), driver)).result is OK
        made.pid_namespace("pid:[4026532001]")
        finding = only(doctor_gpu.check_pids(made.machine(), driver))
        assert finding.result is WARN
        assert "ESTIMATED" in finding.found
        assert "--pid=host" in finding.mend
        assert list(doctor_gpu.check_pids(made.machine(), Driver(NOT_FOUND))) == []

    def check(self, made: Made, shim: NvmlShim, *processes: ShimProcess, ours: frozenset[int] = frozenset()) -> Finding:
        shim.set([ShimCard(UUID, used_bytes=20 * GIB, processes=processes)])
        return only(doctor_gpu.check_programs(made.machine(), driver_of(shim, made), ours))

    def test_programs_of_others_are_named_and_external(self, made: Made, shim: NvmlShim) -> None:
        made.process(10, "/usr/local/bin/ollama", "runner", "--model", "secret")
        made.process(11, comm="Xorg")
        finding = self.check(
            made, shim, ShimProcess(10, 3 * GIB), ShimProcess(11, None, "graphics"), ShimProcess(12, 1 * GIB)
        )
        assert finding.result is OK
        assert "ollama runner (10, 3.0 GiB), Xorg (11, ?), a program that is not seen from here (12" in finding.found
        assert "external, 4.0 GiB in all" in finding.found
        assert "secret" not in finding.found

    def test_much_of_them_is_pressure(self, made: Made, shim: NvmlShim) -> None:
        made.process(10, "ollama", "runner")
        finding = self.check(made, shim, ShimProcess(10, 12 * GIB))
        assert finding.result is WARN
        assert "ollama stop" in finding.mend

    def test_ours_are_none_of_others(self, made: Made, shim: NvmlShim) -> None:
        finding = self.check(made, shim, ShimProcess(10, 12 * GIB), ours=frozenset({10}))
        assert (finding.result, finding.found) == (OK, "none of others")

    def test_of_many_some_are_named(self, made: Made, shim: NvmlShim) -> None:
        assert "and 12 more" in self.check(made, shim, *(ShimProcess(pid, MIB) for pid in range(10, 30))).found


# ---- host -------------------------------------------------------------------------------------------------------


class TestClock:
    def test_quiet(self, made: Made) -> None:
        steps, clock = doctor_host.check_clock(made.machine())
        assert (steps.result, clock.result) == (OK, OK)
        assert "within 1 ms" in clock.found

    @pytest.mark.parametrize("step_ms", [-3000, 700])
    def test_a_step(self, made: Made, step_ms: int) -> None:
        made.clocks.steps_ms = step_ms
        steps, _ = doctor_host.check_clock(made.machine())
        assert steps.result is WARN
        assert f"{step_ms:+d} ms" in steps.found

    def test_nothing_synchronises_it(self, made: Made) -> None:
        _, clock = doctor_host.check_clock(made.machine(clock_state=ClockState(False, 16_000_000)))
        assert clock.result is WARN

    def test_the_kernel_is_asked(self) -> None:
        state = adjtimex()
        assert state.max_error_us >= 0


class TestMemory:
    def test_a_cgroup(self, made: Made) -> None:
        assert "no cgroup" in only(doctor_host.check_memory(made.machine())).found
        made.memory_limit(8 * GIB)
        finding = only(doctor_host.check_memory(made.machine()))
        assert (finding.result, "8.0 GiB of 32.0 GiB, 4.0 GiB used" in finding.found) == (OK, True)
        made.memory_limit(512 * MIB)
        assert only(doctor_host.check_memory(made.machine())).result is WARN

    def test_overcommit(self, made: Made) -> None:
        assert only(doctor_host.check_overcommit(made.machine())).result is OK
        made.write("proc/sys/vm/overcommit_memory", "2\n")
        finding = only(doctor_host.check_overcommit(made.machine()))
        assert (finding.result, "1.0 GiB can be promised" in finding.found) == (WARN, True)

    def test_limits_of_a_process(self, made: Made) -> None:
        def results(requests: int, pins: bool) -> list[Result]:
            return [one.result for one in doctor_host.check_limits(made.machine(), requests, pins)]

        made.limits(files="65536", locked="unlimited")
        assert results(1024, True) == [OK, OK]
        made.limits(files="1024", locked="8388608")
        assert results(1024, True) == [WARN, WARN]
        assert results(100, False) == [OK, OK]
        made.limits(files="unlimited", locked="8388608")
        assert results(1024, False) == [OK, OK]

    def test_the_cache_of_zfs(self, made: Made) -> None:
        assert only(doctor_host.check_caches(made.machine())).found == "there is no ZFS"
        rows = "13 1 0x01 123 33456 1 2\nname type data\nhits 4 7\nsize 4 {}\nc_max 4 {}\n"
        made.write("proc/spl/kstat/zfs/arcstats", rows.format(9 * GIB, 16 * GIB))
        finding = only(doctor_host.check_caches(made.machine()))
        assert finding.result is WARN
        assert "holds 9.0 GiB and may grow to 16.0 GiB" in finding.found
        assert f"zfs_arc_max={32 * GIB // 20}" in finding.mend
        made.write("proc/spl/kstat/zfs/arcstats", rows.format(GIB, GIB))
        assert only(doctor_host.check_caches(made.machine())).result is OK

    def test_huge_pages(self, made: Made) -> None:
        assert only(doctor_host.check_huge_pages(made.machine())).result is OK
        made.meminfo(HugePages_Total=4096)
        finding = only(doctor_host.check_huge_pages(made.machine()))
        assert (finding.result, "8.0 GiB that no model gets" in finding.found) == (WARN, True)

    def test_a_limit_of_the_operator(self, made: Made) -> None:
        def result(limit_bytes: int) -> Result:
            return only(doctor_host.check_host_limit(made.machine(), limit_bytes)).result

        assert [result(64 * GIB), result(16 * GIB), result(MIB)] == [WARN, OK, FAIL]
        assert list(doctor_host.check_host_limit(made.machine(), None)) == []


# ---- ledger -----------------------------------------------------------------------------------------------------


class TestDisk:
    def test_a_good_one(self, made: Made, tmp_path: Path) -> None:
        results = {one.name: one.result for one in doctor_ledger.check_disk(made.machine(), config(tmp_path))}
        assert (results["file system"], results["disk"]) == (OK, OK)
        assert not (tmp_path / "state").exists()  # a doctor makes nothing

    @pytest.mark.parametrize(("kind", "result"), [("nfs4", FAIL), ("cifs", FAIL), ("tmpfs", WARN), ("xfs", OK)])
    def test_file_systems(self, made: Made, tmp_path: Path, kind: str, result: Result) -> None:
        made.mounts((("/", "ext4"), (str(tmp_path).replace(" ", "\\040"), kind), ("/elsewhere", "btrfs")))
        finding = named(doctor_ledger.check_disk(made.machine(), config(tmp_path)), "file system")
        assert (finding.result, kind in finding.found) == (result, True)

    @pytest.mark.parametrize(("free_bytes", "result"), [(10 * MIB, FAIL), (GIB, WARN), (50 * GIB, OK)])
    def test_room(self, made: Made, tmp_path: Path, free_bytes: int, result: Result) -> None:
        machine = made.machine(free_bytes=free_bytes)
        assert named(doctor_ledger.check_disk(machine, config(tmp_path)), "disk space").result is result

    def test_a_slow_one(self, made: Made, tmp_path: Path) -> None:
        made.clocks.ticks_ms = 80
        finding = named(doctor_ledger.check_disk(made.machine(), config(tmp_path)), "disk")
        assert (finding.result, "80 ms" in finding.found) == (WARN, True)

    def test_one_that_cannot_be_written(self, made: Made) -> None:
        found = doctor_ledger.check_disk(made.machine(), config(Path("/proc"), ledger="ledger.db"))
        assert named(found, "disk").result is FAIL

    def test_a_state_folder_that_cannot_be_written(self, made: Made, tmp_path: Path) -> None:
        found = list(doctor_ledger.check_disk(made.machine(), config(tmp_path, state_dir="/proc/1")))
        assert [one.result for one in found if one.name == "disk"] == [OK, FAIL]


class TestPermissions:
    def check(self, folder: Path) -> list[Finding]:
        return list(doctor_ledger.check_permissions(config(folder)))

    def test_only_for_the_owner(self, tmp_path: Path) -> None:
        assert only(self.check(tmp_path)).result is OK

    def test_a_configuration_that_others_may_write(self, tmp_path: Path) -> None:
        (tmp_path / "gpuledger.yaml").touch()
        (tmp_path / "gpuledger.yaml").chmod(0o664)
        assert only(self.check(tmp_path)).result is FAIL
        (tmp_path / "gpuledger.yaml").chmod(0o644)
        assert only(self.check(tmp_path)).result is OK

    def test_a_token_and_a_key_that_others_may_read(self, tmp_path: Path) -> None:
        (tmp_path / "state").mkdir()
        for name, mode in (("app.token", 0o644), ("state/request.key", 0o640), ("state/ledger.db", 0o600)):
            (tmp_path / name).touch()
            (tmp_path / name).chmod(mode)
        token, key = self.check(tmp_path)
        assert (token.result, token.mend) == (FAIL, f"chmod 600 {tmp_path}/app.token")
        assert (key.result, "request.key" in key.found) == (WARN, True)

    @pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
    def test_tokens_that_others_can_write_stop_a_server(self, tmp_path: Path, mode: int) -> None:
        """It must be as sure about them as the start is."""
        tokens = tmp_path / "state" / "tokens.json"
        tokens.parent.mkdir()
        tokens.write_text('{"schema": "gpuledger.tokens/1", "tokens": []}')
        tokens.chmod(mode)
        with pytest.raises(DocumentError):
            tokens_of(config(tmp_path))
        finding = named(self.check(tmp_path), "tokens")
        assert (finding.result, f"chmod 600 {tokens}" in finding.found) == (FAIL, True)
        tokens.chmod(0o600)
        tokens_of(config(tmp_path))
        assert only(self.check(tmp_path)).result is OK

    @pytest.mark.parametrize("text", ["", "[]", '{"schema": "other", "tokens": []}'])
    def test_tokens_that_are_none_stop_a_server(self, tmp_path: Path, text: str) -> None:
        tokens = tmp_path / "state" / "tokens.json"
        tokens.parent.mkdir()
        tokens.touch(0o600)
        tokens.write_text(text)
        with pytest.raises(DocumentError):
            tokens_of(config(tmp_path))
        assert named(self.check(tmp_path), "tokens").result is FAIL

    def test_a_key_that_cannot_be_read_stops_a_server(self, tmp_path: Path) -> None:
        (tmp_path / "state" / "request.key").mkdir(0o700, parents=True)
        with pytest.raises(OSError, match="directory"):
            request_key(tmp_path / "state")
        assert only(self.check(tmp_path)).result is FAIL


class TestScheduler:
    def check(self, made: Made, folder: Path) -> list[Finding]:
        return list(doctor_ledger.check_scheduler(made.machine(), config(folder, ledger="ledger.db")))

    def test_none_and_no_ledger_yet(self, made: Made, tmp_path: Path) -> None:
        assert only(self.check(made, tmp_path)).result is OK

    def test_a_ledger_without_and_with_a_scheduler(self, made: Made, tmp_path: Path, lived: Lived) -> None:
        write_sqlite(lived, tmp_path / "ledger.db")
        made.clocks.elapsed_ns = 10**18
        assert named(self.check(made, tmp_path), "scheduler").found == "none is running on this ledger"
        with LedgerLock(tmp_path / "ledger.db"):
            findings = self.check(made, tmp_path)
        assert named(findings, "scheduler").found == f"process {os.getpid()} drives this ledger"
        assert all(one.result is OK for one in findings)

    def test_a_clock_behind_the_ledger(self, made: Made, tmp_path: Path, lived: Lived) -> None:
        write_sqlite(lived, tmp_path / "ledger.db")
        made.clocks.stepped_ns = -(10**18)
        assert named(self.check(made, tmp_path), "ledger clock").result is WARN

    def test_a_ledger_that_is_none(self, made: Made, tmp_path: Path) -> None:
        (tmp_path / "ledger.db").write_bytes(b"SQLite format 3\0" + b"x" * 5000)
        assert only(self.check(made, tmp_path)).result is FAIL


class TestAddress:
    def check(self, machine: Machine, folder: Path, listen: str, **options: Any) -> Finding:
        return only(doctor_ledger.check_address(machine, config(folder, listen=listen, **options)))

    def test_a_free_one(self, made: Made, tmp_path: Path) -> None:
        assert self.check(made.machine(), tmp_path, "127.0.0.1:0").result is OK

    def test_one_that_this_program_has(self, tmp_path: Path) -> None:
        """The real /proc says who holds it."""
        with closing(socket.create_server(("127.0.0.1", 0))) as server:
            listen = f"127.0.0.1:{server.getsockname()[1]}"
            finding = self.check(Machine(), tmp_path, listen)
            assert finding.result is FAIL
            assert f"({os.getpid()})" in finding.found
            with LedgerLock(tmp_path / "state" / "ledger.db"):
                assert self.check(Machine(), tmp_path, listen).result is OK

    def test_one_of_a_program_that_is_not_seen(self, made: Made, tmp_path: Path) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as server:
            finding = self.check(made.machine(), tmp_path, f"127.0.0.1:{server.getsockname()[1]}")
        assert (finding.result, "another program" in finding.found) == (FAIL, True)

    def test_one_of_another_machine(self, made: Made, tmp_path: Path) -> None:
        finding = self.check(made.machine(), tmp_path, "192.0.2.7:8910", allow_remote=True)
        assert (finding.result, "none of this machine" in finding.found) == (FAIL, True)


# ---- models -----------------------------------------------------------------------------------------------------


class TestModels:
    def check(self, made: Made, folder: Path, *deployments: dict[str, Any], **options: Any) -> list[Finding]:
        driver = options.pop("driver", Driver(NOT_FOUND))
        return list(doctor_models.check_models(made.machine(), driver, config(folder, *deployments, **options)))

    def test_a_good_one(self, made: Made, tmp_path: Path, tiny_chat_gguf: Path) -> None:
        finding = only(self.check(made, tmp_path, llama(tiny_chat_gguf)))
        assert (finding.result, "2.4 MiB, llama F16" in finding.found) == (OK, True)

    def test_missing_cut_and_no_model_at_all(self, made: Made, tmp_path: Path, tiny_chat_gguf: Path) -> None:
        model = tmp_path / "m.gguf"
        assert "no such file" in only(self.check(made, tmp_path, llama(model))).found
        model.write_bytes(tiny_chat_gguf.read_bytes()[:-1000])
        assert "is cut" in only(self.check(made, tmp_path, llama(model))).found
        model.write_bytes(b"not a model, but long enough to be read as one")
        finding = only(self.check(made, tmp_path, llama(model)))
        assert (finding.result, "is not a GGUF file" in finding.found) == (FAIL, True)

    def test_one_of_another_task(self, made: Made, tmp_path: Path, minilm_gguf: Path) -> None:
        finding = only(self.check(made, tmp_path, llama(minilm_gguf)))
        assert (finding.result, "task: embedding" in finding.mend) == (WARN, True)

    def test_a_context_beyond_what_it_was_trained_with(self, made: Made, tmp_path: Path, tiny_chat_gguf: Path) -> None:
        finding = only(self.check(made, tmp_path, llama(tiny_chat_gguf, runtime={"context_length": 100_000})))
        assert (finding.result, "trained with 8192" in finding.found) == (WARN, True)

    def test_one_that_never_fits(self, made: Made, tmp_path: Path, tiny_chat_gguf: Path, shim: NvmlShim) -> None:
        made.memory_limit(GIB)
        assert only(self.check(made, tmp_path, llama(tiny_chat_gguf))).result is FAIL
        on_card = llama(tiny_chat_gguf, kind="gpu", runtime={"gpu_layers": "all"})
        shim.set([ShimCard(UUID, total_bytes=GIB)])
        assert only(self.check(made, tmp_path, on_card, driver=driver_of(shim, made))).result is FAIL
        shim.set([ShimCard(UUID, total_bytes=2 * GIB)])
        assert only(self.check(made, tmp_path, on_card, driver=driver_of(shim, made))).result is OK

    def test_a_projector(self, made: Made, tmp_path: Path, tiny_chat_gguf: Path) -> None:
        seeing = llama(tiny_chat_gguf, runtime={"projector": str(tmp_path / "mmproj.gguf"), "max_images": 1})
        _, finding = self.check(made, tmp_path, seeing)
        assert (finding.result, "projector" in finding.found) == (FAIL, True)

    def test_the_share_of_vllm(self, made: Made, tmp_path: Path, shim: NvmlShim) -> None:
        shim.set([ShimCard(UUID)])
        runtime: dict[str, Any] = {"type": "vllm", "task": "chat", "model": str(tmp_path)}
        entry: dict[str, Any] = {"id": "v", "capability": "v@1", "kind": "gpu", "runtime": runtime}
        assert only(self.check(made, tmp_path, entry, driver=driver_of(shim, made))).result is OK, "the default fits"
        entry["runtime"] = {**runtime, "gpu_memory_utilization_bp": 9_200}
        finding = only(self.check(made, tmp_path, entry, driver=driver_of(shim, made)))
        assert finding.result is FAIL
        most = int(finding.mend.split("at most ")[1].split(";")[0])
        for share, result in ((most, OK), (most + 2, FAIL)):
            entry["runtime"] = {**runtime, "gpu_memory_utilization_bp": share}
            assert only(self.check(made, tmp_path, entry, driver=driver_of(shim, made))).result is result

    def test_places(self, made: Made, tmp_path: Path, shim: NvmlShim, tiny_chat_gguf: Path) -> None:
        on_card = llama(tiny_chat_gguf, id="g", capability="g@1", kind="gpu", runtime={"gpu_layers": "all"})
        both = (llama(tiny_chat_gguf), on_card)
        shim.set([ShimCard(UUID)])
        driver = driver_of(shim, made)

        def results(driver: Driver, **accelerators: Any) -> list[Result]:
            loaded = config(tmp_path, *both, accelerators=accelerators)
            return [one.result for one in doctor_models.check_places(driver, loaded)]

        assert results(driver) == [OK, OK]
        assert results(Driver(NOT_LOADED)).count(FAIL) == 1
        assert results(driver, nvml=False).count(FAIL) == 1
        assert results(driver, host=False).count(FAIL) == 1


class TestServed:
    def test_nothing_to_serve_and_nobody_to_ask(self, made: Made, tmp_path: Path, tiny_chat_gguf: Path) -> None:
        bare = config(tmp_path, clients=[])
        assert [(one.name, one.result) for one in doctor_models.check_served(bare)] == [
            ("deployments", WARN),
            ("clients", WARN),
        ]
        shown = list(examined(made.machine(), Asked(bare, quick=True)))
        assert named(shown, "deployments").result is WARN
        assert list(doctor_models.check_served(config(tmp_path, llama(tiny_chat_gguf)))) == []


class TestRuntimes:
    def check(self, made: Made, loaded: Config) -> Finding:
        return only(doctor_models.check_runtimes(made.machine(), loaded))

    def test_its_version_and_its_model(self, made: Made, tmp_path: Path, tiny_chat_gguf: Path) -> None:
        sha256 = hashlib.sha256(tiny_chat_gguf.read_bytes()).hexdigest()
        finding = self.check(made, config(tmp_path, llama(tiny_chat_gguf, runtime={"sha256": sha256})))
        assert finding.result is OK
        assert sha256[:12] in finding.found

    def test_a_model_with_another_hash(self, made: Made, tmp_path: Path, tiny_chat_gguf: Path) -> None:
        finding = self.check(made, config(tmp_path, llama(tiny_chat_gguf, runtime={"sha256": "1" * 64})))
        assert finding.result is FAIL
        assert f"and {'1' * 64} is configured" in finding.found
        assert hashlib.sha256(tiny_chat_gguf.read_bytes()).hexdigest() in finding.found

    def test_a_server_that_is_not_there(self, made: Made, tmp_path: Path, tiny_chat_gguf: Path) -> None:
        finding = self.check(made, config(tmp_path, llama(tiny_chat_gguf, runtime={"server": "/none/llama-server"})))
        assert (finding.result, "llama-server" in finding.found) == (FAIL, True)

    def test_a_card_and_a_server_for_the_cpu(self, made: Made, tmp_path: Path, tiny_chat_gguf: Path) -> None:
        on_card = llama(tiny_chat_gguf, kind="gpu", runtime={"gpu_layers": "all"})
        finding = self.check(made, config(tmp_path, on_card))
        assert (finding.result, "computes on the CPU" in finding.found) == (FAIL, True)

    def test_a_command_that_is_no_program(self, made: Made, tmp_path: Path) -> None:
        program = tmp_path / "server"
        runtime = {"type": "command", "task": "chat", "command": [str(program), "{port}"], "version": "1"}
        entry = {"id": "c", "capability": "c@1", "kind": "host", "runtime": runtime}

        def result() -> Result:
            return only(doctor_models.check_commands(made.machine(), config(tmp_path, entry))).result

        assert result() is FAIL
        program.write_text("#!/bin/sh\n")
        assert result() is FAIL  # it may not be run
        program.chmod(0o755)
        assert result() is OK

    def test_the_wheel_of_llama_cpp(self) -> None:
        assert list(doctor_models.check_binding()) == []
        dying = only(doctor_models.check_binding((sys.executable, "-c", "import os; os.kill(os.getpid(), 4)")))
        assert (dying.result, "SIGILL" in dying.found) == (FAIL, True)
        absent = only(doctor_models.check_binding((sys.executable, "-c", "import not_there")))
        assert (absent.result, "not_there" in absent.found) == (FAIL, True)

    def test_servers_on_path(self, made: Made, tmp_path: Path) -> None:
        program = tmp_path / "llama-server"
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        finding = only(doctor_models.check_servers(made.machine(environment={"PATH": str(tmp_path)})))
        assert (finding.result, f"llama-server at {program}" in finding.found) == (OK, True)

    def test_no_server_at_all(self, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor_models, "BINDING", "not_there")
        assert only(doctor_models.check_servers(made.machine(environment={}))).result is WARN


# ---- all of it --------------------------------------------------------------------------------------------------


class TestAll:
    def test_a_check_that_fails_itself_warns_and_keeps_what_it_had(self) -> None:
        def check() -> Iterable[Finding]:
            yield ok("x", "one")
            raise ZeroDivisionError("what is this")

        one, failed = guarded("x", check)
        assert one.result is OK
        assert (failed.result, failed.found) == (WARN, "could not be checked: what is this")

    def test_a_machine_of_which_nothing_can_be_read(self, tmp_path: Path) -> None:
        machine = Machine(root=tmp_path, library=str(tmp_path / "none.so"), environment={}, pause=lambda _: None)
        findings = list(examined(machine, Asked(config(tmp_path))))
        assert sum("could not be checked" in one.found for one in findings) >= 4
        assert all(one.mend for one in findings if one.result is not OK)

    def test_the_machine_alone(self, made: Made, shim: NvmlShim) -> None:
        shim.set([ShimCard(UUID)])
        made.devices(*TestDevices.ALL)
        made.limits(files="65536")
        findings = list(examined(made.machine(library=str(shim.library)), Asked()))
        assert {one.result for one in findings} == {OK}
        assert {"driver", "card 0", "process ids", "clock", "memory", "runtimes"} <= {one.name for one in findings}

    def test_cards_that_are_not_watched_are_not_looked_at(self, made: Made, tmp_path: Path, shim: NvmlShim) -> None:
        shim.set([ShimCard(UUID, error=LOST)])
        asked = Asked(config(tmp_path, accelerators={"nvml": False}), quick=True)
        findings = list(examined(made.machine(library=str(shim.library)), asked))
        assert not any(one.name.startswith("card") for one in findings)

    def test_slow_cards_and_the_policy(self, made: Made, tmp_path: Path, shim: NvmlShim) -> None:
        shim.set([ShimCard(UUID)])
        machine = made.machine(library=str(shim.library))
        assert named(examined(machine, Asked(config(tmp_path), quick=True)), "policy").result is OK
        made.clocks.ticks_ms = 7000
        assert named(examined(machine, Asked(config(tmp_path), quick=True)), "policy").result is WARN

    def test_the_document(self) -> None:
        findings = [ok("a", "b"), Finding("c", WARN, "d", "e")]
        document = json.loads(json.dumps(document_of(findings, None)))
        assert (document["schema"], document["result"]) == ("gpuledger.doctor/1", "WARN")
        assert document["counts"] == {"OK": 1, "WARN": 1, "FAIL": 0}
        assert document["findings"][1] == {"name": "c", "result": "WARN", "found": "d", "mend": "e"}

    def test_every_problem_of_a_configuration_is_a_finding(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="config") as caught:
            config(tmp_path, policy={"telemetry_max_age_seconds": 3}, listen="nowhere")
        findings = list(configuration_findings(caught.value))  # type: ignore[arg-type]
        assert len(findings) == 2
        assert any("telemetry_max_age_seconds" in one.found for one in findings)
        assert all(one.result is FAIL for one in findings)


def test_clocks_of_a_test_are_what_they_say() -> None:
    clocks = Clocks(steps_ms=5)
    before = clocks.wall_ns() - clocks.monotonic_ns()
    clocks.pause(1)
    assert clocks.wall_ns() - clocks.monotonic_ns() == before + 5_000_000
