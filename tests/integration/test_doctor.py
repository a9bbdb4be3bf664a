"""`gpuledger init`, `serve` and `doctor` after each other, as a new user meets them: real models, real processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.serving import PATIENCE_SECONDS, embedding, serving, wait_until
from tests.integration.serving import configuration as reference_configuration
from tests.shim import GIB, NvmlShim, ShimCard, ShimProcess

CLI = (sys.executable, "-m", "gpuledger.tools.cli")
UUID = "GPU-0f6ffa9b-1d3a-4b0e-9d55-0123456789ab"


def run(
    *arguments: object, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        (*CLI, *map(str, arguments)),
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        timeout=PATIENCE_SECONDS,
    )
    assert "Traceback" not in done.stdout + done.stderr
    return done


def diagnosed(*arguments: object, env: Mapping[str, str] | None = None) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit status, and findings by name; of several of one name the last."""
    done = run("doctor", "--json", *arguments, env=env)
    document = json.loads(done.stdout)
    return done.returncode, {one["name"]: one for one in document["findings"]}


@dataclass(frozen=True)
class Set:
    """What `init` made of the two example models. `token`: of its client."""

    folder: Path
    token: str

    @property
    def config(self) -> Path:
        return self.folder / "gpuledger.yaml"


@pytest.fixture
def made(tmp_path: Path, tiny_chat_gguf: Path, minilm_gguf: Path) -> Set:
    (tmp_path / "models").mkdir()
    for model in (tiny_chat_gguf, minilm_gguf):
        shutil.copy(model, tmp_path / "models")
    done = run("init", tmp_path)
    assert done.returncode == 0, done.stderr
    # An address that nobody else has while tests run beside each other, and room for a small machine.
    text = (tmp_path / "gpuledger.yaml").read_text("utf-8").replace("127.0.0.1:8910", "127.0.0.1:0")
    text = text.replace("context_length: 4096", "context_length: 256")
    (tmp_path / "gpuledger.yaml").write_text(text, "utf-8")
    return Set(tmp_path, done.stdout.split("this one time:\n")[1].split()[0])


def test_what_init_writes_passes_and_serves(made: Set) -> None:
    status, findings = diagnosed("--config", made.config)
    assert status == 0, findings
    assert findings["model of tiny-chat"]["result"] == "OK"
    assert findings["runtime of all-minilm-l6-v2"]["result"] == "OK"

    with (made.folder / "log").open("w") as log:
        command = (*CLI, "serve", "--config", str(made.config), "--log", "json")
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True) as server:
            try:
                assert server.stdout is not None
                base_url = server.stdout.readline().split()[-1]
                authorization = {"Authorization": f"Bearer {made.token}"}
                with httpx.Client(base_url=base_url, headers=authorization, timeout=PATIENCE_SECONDS) as http:
                    wait_until(lambda: http.get("/readyz").status_code == 200, (made.folder / "log").read_text)
                    vector = http.post("/v1/embeddings", json={"model": "all-minilm-l6-v2@1", "input": "hello"})
                    assert len(vector.json()["data"][0]["embedding"]) == 384
                    said = [{"role": "user", "content": "hi"}]
                    answer = http.post(
                        "/v1/chat/completions", json={"model": "tiny-chat@1", "messages": said, "max_tokens": 4}
                    )
                    assert answer.status_code == 200, answer.text
                status, findings = diagnosed("--quick", "--config", made.config)
                assert (status, findings["scheduler"]["found"]) == (0, f"process {server.pid} drives this ledger")
            finally:
                server.terminate()
                assert server.wait(PATIENCE_SECONDS) == 0


def test_the_address_of_its_own_server_is_in_order_and_of_another_it_is_not(tmp_path: Path, measured: Path) -> None:
    shutil.copytree(measured.parent, tmp_path / "one" / "state")
    with serving(tmp_path / "one", reference_configuration([embedding()])) as server:
        port = server.base_url.rpartition(":")[2]
        for name, result in (("one", "OK"), ("two", "FAIL")):
            path = tmp_path / name / "other.yaml"
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(reference_configuration([embedding()], listen=f"127.0.0.1:{port}")), "utf-8")
            _, findings = diagnosed("--quick", "--config", path)
            assert findings["address"]["result"] == result, findings["address"]
        assert server.stop() == 0, server.log()


def test_a_driver_and_its_cards_as_a_user_has_them(tmp_path: Path) -> None:
    shim = NvmlShim(tmp_path)
    holder = ShimProcess(os.getpid(), 3 * GIB)
    shim.set([ShimCard(UUID, used_bytes=3 * GIB, persistence=False, processes=(holder,))])
    status, findings = diagnosed(env=shim.env())
    assert findings["driver"]["result"] == "OK"
    assert "persistence mode" in findings["card 0"]["found"]
    assert f"({os.getpid()}, 3.0 GiB): external" in findings["programs on card 0"]["found"]
    assert status == 0

    shim.set([], init=18)
    status, findings = diagnosed(env=shim.env())
    assert (status, findings["driver"]["result"]) == (1, "FAIL")


def test_a_configuration_that_cannot_be_used_shows_all_problems_and_the_machine(made: Set) -> None:
    text = made.config.read_text("utf-8").replace("kind: host", "kind: hots")
    made.config.write_text(text.replace("listen: 127.0.0.1:0", "listen: 0.0.0.0:1"), "utf-8")
    done = run("doctor", "--json", "--config", made.config)
    document = json.loads(done.stdout)
    problems = [one["found"] for one in document["findings"] if one["name"] == "configuration"]
    assert (done.returncode, len(problems)) == (2, 2)
    assert any(one["name"] == "memory" for one in document["findings"])

    done = run("doctor", "--config", made.folder / "none.yaml")
    assert done.returncode == 2
    assert "no such file" in done.stdout


def test_a_failure_is_shown_with_what_to_do(made: Set) -> None:
    os.truncate(made.folder / "models" / "tiny-chat.gguf", 1_000_000)
    done = run("doctor", "--config", made.config, "--quick")
    assert done.returncode == 1
    assert "tiny-chat.gguf is cut" in done.stdout
    assert "-> fetch it again" in done.stdout
    assert "1 of " in done.stdout.splitlines()[-1]


def test_without_a_configuration_the_machine_alone(tmp_path: Path) -> None:
    done = run("doctor", "--quick", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "the machine alone" in done.stdout
    assert list(tmp_path.iterdir()) == []
