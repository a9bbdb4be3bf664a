"""Logs of runtimes: bounded, private, and in nobody's way."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from gpuledger.adapters.runtimes.output import BoundedLog, pump

LIMIT_BYTES = 256 * 1024


def test_it_is_its_owners(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "folder" / "x.log", LIMIT_BYTES)
    log.close()
    assert stat.S_IMODE((tmp_path / "folder" / "x.log").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o700


def test_it_never_grows_beyond_its_limit_and_keeps_the_newest(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    log = BoundedLog(path, LIMIT_BYTES)
    for number in range(20_000):
        log.write(f"line {number:06}: {'x' * 80}\n".encode())
        if number % 100 == 0:
            assert path.stat().st_size <= LIMIT_BYTES
    assert log.tail(200).endswith(b"line 019999: " + b"x" * 80 + b"\n")
    assert path.stat().st_size >= LIMIT_BYTES // 4
    log.close()


def test_the_run_before_is_kept(tmp_path: Path) -> None:
    for run in (b"first", b"second", b"third"):
        log = BoundedLog(tmp_path / "x.log", LIMIT_BYTES)
        log.write(run)
        log.close()
    assert (tmp_path / "x.log").read_bytes() == b"third"
    assert (tmp_path / "x.log.1").read_bytes() == b"second"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_link_in_its_place_is_replaced_and_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_bytes(b"precious")
    (tmp_path / "x.log").symlink_to(target)
    log = BoundedLog(tmp_path / "x.log", LIMIT_BYTES)
    log.write(b"output")
    log.close()
    assert target.read_bytes() == b"precious"


def test_a_closed_log_takes_and_tells_nothing(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "x.log", LIMIT_BYTES)
    log.close()
    log.close()
    log.write(b"late")
    assert log.tail() == b""


def test_the_pump_drains_a_pipe_even_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = BoundedLog(tmp_path / "x.log", LIMIT_BYTES)
    read_end, write_end = os.pipe()
    really_write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if descriptor == write_end:
            return really_write(descriptor, data)
        raise OSError(28, "No space left on device")

    with os.fdopen(read_end, "rb", buffering=0) as source:
        pumping = threading.Thread(target=pump, args=(source, log))
        pumping.start()
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", full)
            for _ in range(64):
                os.write(write_end, b"x" * 65536)
        os.close(write_end)
        pumping.join(60)
        assert not pumping.is_alive()
    log.close()
