"""`gpuledger.yaml`: everything that is wrong with it is told at once, each with its place."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from gpuledger.adapters.http.gateway import Service
from gpuledger.adapters.runtimes.config import LlamaCppConfig, ReferenceConfig, Task
from gpuledger.domain import documents
from gpuledger.domain.document_problems import DocumentError
from gpuledger.domain.documents import Json
from gpuledger.domain.policy import Policy, Priority
from gpuledger.domain.state import Kind
from gpuledger.domain.units import GIB, MIB
from gpuledger.tools import examples
from gpuledger.tools.bootstrap import clients_of, request_key, services_of
from gpuledger.tools.config import Config, HostEntry, config_of, load_config
from gpuledger.tools.reading import parse_yaml

HERE = Path("/etc/gpuledger/gpuledger.yaml")
REFERENCE: dict[str, Json] = {"type": "reference", "task": "embedding"}


def document(**changes: Any) -> dict[str, Json]:
    return {"ledger": "state/ledger.db", "clients": [], "deployments": [model()], **changes}


def model(name: str = "emb", **changes: Any) -> dict[str, Json]:
    return {"id": name, "capability": "emb@1", "kind": "host", "runtime": REFERENCE, **changes}


def one_client(**changes: Any) -> dict[str, Json]:
    return {"id": "app", "token_sha256": "ab" * 32, **changes}


def read(**changes: Any) -> Config:
    return config_of(document(**changes), HERE)


def problems(**changes: Any) -> list[str]:
    with pytest.raises(DocumentError) as error:
        read(**changes)
    return [str(problem) for problem in error.value.problems]


class TestWhole:
    def test_the_example_is_one(self) -> None:
        text = examples.configuration({client: "ab" * 31 + f"{n:02x}" for n, client in enumerate(examples.CLIENTS)})
        config = config_of(parse_yaml(text.encode()), HERE)
        assert config.ledger == Path("/etc/gpuledger/ledger.db")
        assert config.state_dir == Path("/etc/gpuledger")
        assert (config.host, config.port) == ("127.0.0.1", 8910)
        assert config.policy == Policy()
        assert isinstance(config.runtimes["minilm"], LlamaCppConfig)
        assert config.runtimes["minilm"].model == Path("/etc/gpuledger/models/all-minilm-l6-v2.f16.gguf")
        assert services_of(config) == {
            "rag.embedding@1": Service(frozenset({"embeddings"}), 256),
            "chat.tiny@1": Service(frozenset({"chat", "completion"}), 256),
        }

    def test_what_is_left_out_has_its_default(self) -> None:
        config = read()
        assert config.state_dir == Path("/etc/gpuledger/state")
        entry = config.document.deployments[0]
        assert (entry.priority, entry.concurrency, entry.queue_limit) == (Priority.INTERACTIVE, 1, 16)
        assert (entry.residency.policy, entry.residency.ttl_seconds) == ("keep_warm", 901)
        assert config.document.accelerators.nvml == "auto"
        assert not config.remote

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(DocumentError, match="cannot read"):
            load_config(tmp_path / "absent.yaml")

    def test_sizes_may_have_units(self) -> None:
        runtime = {**REFERENCE, "idle_bytes": "1.5 GiB", "peak_bytes": "2GB"}
        config = read(
            deployments=[model(runtime=runtime, min_memory_bytes="512MiB", node_selector={"x_bytes": "1GiB"})],
            accelerators={"host": {"memory_limit_bytes": "16GiB"}},
            policy={"reserve_floor_bytes": "64MiB"},
            max_body_bytes="1MiB",
        )
        assert config.runtimes["emb"] == ReferenceConfig(
            type="reference", task=Task.EMBEDDING, idle_bytes=3 * GIB // 2, peak_bytes=2 * 10**9
        )
        assert config.document.deployments[0].min_memory_bytes == 512 * MIB
        assert config.document.deployments[0].node_selector == {"x_bytes": "1GiB"}
        assert config.document.accelerators.host == HostEntry(16 * GIB)
        assert config.policy.reserve_floor_bytes == 64 * MIB
        assert config.document.max_body_bytes == MIB

    def test_concurrency_is_that_of_the_runtime(self) -> None:
        assert read(deployments=[model(concurrency=4)]).runtimes["emb"].parallel == 4
        (problem,) = problems(deployments=[model(concurrency=4, runtime={**REFERENCE, "parallel": 2})])
        assert problem == "config.deployments[0].runtime.parallel: must be the concurrency of the deployment (4)"

    def test_clients_are_bound(self) -> None:
        token = hashlib.sha256(b"token").hexdigest()
        config = read(clients=[one_client(token_sha256=token, priority="production", lab=True, capabilities=["emb@1"])])
        client = clients_of(config).by_authorization("Bearer token")
        assert client is not None
        assert (client.priority, client.lab, client.capabilities) == (Priority.PRODUCTION, True, frozenset({"emb@1"}))


class TestPolicy:
    def test_one_that_differs_has_a_revision_of_its_own(self) -> None:
        one, other = read(policy={"max_replans": 4}).policy, read(policy={"max_replans": 3}).policy
        assert one.revision.startswith("m10-v1+")
        assert one.revision != other.revision
        assert read(policy={"max_replans": 4}).policy == one
        assert read(policy={"max_replans": 4, "revision": "mine-1"}).policy.revision == "mine-1"
        assert read(policy={"max_replans": 5}).policy == Policy()

    def test_one_that_differs_does_not_go_by_the_name_of_this_release(self) -> None:
        assert read(policy={"revision": "m10-v1"}).policy == Policy()
        (problem,) = problems(policy={"revision": "m10-v1", "recovery_seconds": 5})
        assert problem.startswith("config.policy.revision: m10-v1 is the policy of this release")

    def test_its_rules_are_those_of_every_policy(self) -> None:
        assert problems(policy={"sample_interval_seconds": 20, "max_replan": 1}) == [
            'config.policy.max_replan: unknown key, did you mean "max_replans"?'
        ]
        (problem,) = problems(policy={"sample_interval_seconds": 20})
        assert problem.startswith("config.policy.telemetry_max_age_seconds: must be at least 3 times")


class TestProblems:
    def test_all_at_once(self) -> None:
        runtime = {"type": "llama_cpp", "task": "chat", "model": "m.gguf", "threads": 0, "layers": 3}
        found = problems(
            lisen="x",
            clients=[one_client(token_sha256="abc", priority="urgent")],
            deployments=[model(concurrency=0, runtime=runtime)],
            policy={"reserve_ratio_bp": -1},
        )
        hexadecimal = "must be a SHA-256: 64 hexadecimal digits, in small letters (sha256sum prints it)"
        assert f"config.clients[0].token_sha256: {hexadecimal}" in found
        assert 'config.lisen: unknown key, did you mean "listen"?' in found
        assert "config.deployments[0].concurrency: must be at least 1" in found
        assert "config.deployments[0].runtime.threads: must be at least 1" in found
        assert "config.deployments[0].runtime.layers: unknown key" in found
        assert "config.policy.reserve_ratio_bp: must be at least 0" in found
        assert any(problem.startswith("config.clients[0].priority: must be") for problem in found)

    def test_a_rule_of_a_runtime_names_its_key(self) -> None:
        runtime = {**REFERENCE, "idle_bytes": 2 * MIB, "peak_bytes": MIB}
        assert problems(deployments=[model(runtime=runtime)]) == [
            "config.deployments[0].runtime.peak_bytes: must not be less than idle_bytes"
        ]

    def test_a_runtime_without_a_type(self) -> None:
        assert problems(deployments=[model(runtime={"task": "chat"})]) == [
            "config.deployments[0].runtime.type: is required"
        ]
        (problem,) = problems(deployments=[model(runtime={"type": "ollama"})])
        known = '"llama_cpp" or "vllm" or "command" or "reference"'
        assert problem == f'config.deployments[0].runtime.type: must be {known}, not "ollama"'

    def test_what_is_there_twice(self) -> None:
        clients = [one_client(), one_client(id="other"), one_client(token_sha256="cd" * 32)]
        assert problems(clients=clients, deployments=[model(), model()]) == [
            "config.clients[2].id: is there already, at config.clients[0].id",
            "config.clients[1].token_sha256: is there already, at config.clients[0].token_sha256",
            "config.deployments[1].id: is there already, at config.deployments[0].id",
        ]
        with pytest.raises(DocumentError, match=r"config\.ledger: is there more than once"):
            config_of(parse_yaml(b"ledger: a\nledger: b\nclients: []\ndeployments: []\n"), HERE)

    def test_a_capability_that_nothing_serves(self) -> None:
        assert problems(clients=[one_client(capabilities=["emb@1", "emb@2"])]) == [
            "config.clients[0].capabilities[1]: nothing serves emb@2"
        ]

    def test_always_warm_is_alone(self) -> None:
        always = {"policy": "always_warm"}
        (problem,) = problems(deployments=[model(residency=always), model("other")])
        assert problem.startswith("config.deployments[0].residency.policy: always_warm must be the only deployment")
        assert read(deployments=[model(residency=always), model("other", fallback_rank=1)])

    def test_one_capability_does_one_thing(self) -> None:
        chat = {"type": "reference", "task": "chat"}
        assert problems(deployments=[model(), model("other", runtime=chat)]) == [
            "config.deployments[1].runtime.task: another deployment of emb@1 has another task"
        ]

    @pytest.mark.parametrize(("kind", "layers"), [("host", 3), ("gpu", 0)])
    def test_layers_are_where_the_deployment_is(self, kind: str, layers: int) -> None:
        runtime = {"type": "llama_cpp", "task": "chat", "model": "m.gguf", "gpu_layers": layers}
        (problem,) = problems(deployments=[model(kind=kind, runtime=runtime)])
        assert problem.startswith("config.deployments[0].runtime.gpu_layers: must be")
        assert (
            read(deployments=[model(kind="gpu", runtime={**runtime, "gpu_layers": "all"})]).document.deployments[0].kind
            is Kind.GPU
        )

    @pytest.mark.parametrize(
        "listen",
        [
            *("8910", "localhost", "127.0.0.1:", "127.0.0.1:99999", ":8910", "127.0.0.1:x", "localhost:\u0663"),
            *("::1:8910", "[::1:8910", "::1]:8910", "[[::1]]:8910", "localhost:" + 5000 * "9"),
        ],
    )
    def test_an_address_that_is_none(self, listen: str) -> None:
        (problem,) = problems(listen=listen)
        assert problem == "config.listen: must be host:port, as 127.0.0.1:8910"

    @pytest.mark.parametrize("listen", ["0.0.0.0:8910", "[::]:8910", "192.168.1.5:80", "gpu.example:8910"])
    def test_an_address_that_others_reach_is_meant(self, listen: str) -> None:
        (problem,) = problems(listen=listen)
        assert "allow_remote: true" in problem
        assert read(listen=listen, allow_remote=True).remote

    @pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:8910", "[::1]:8910", "127.1.2.3:1"])
    def test_an_address_that_nobody_else_reaches(self, listen: str) -> None:
        assert not read(listen=listen).remote

    @pytest.mark.parametrize("name", ["", "a b", "-a", "a" * 65, "a\n", "ä"])
    def test_ids_are_short_and_plain(self, name: str) -> None:
        assert any(
            problem.startswith("config.deployments[0].id: must ") for problem in problems(deployments=[model(name)])
        )

    @pytest.mark.parametrize("path", ["", "a\0b", "~nobody.here/x"])
    def test_a_path_that_is_none(self, path: str) -> None:
        llama = {"type": "llama_cpp", "task": "chat", "model": path, "server": path}
        found = problems(ledger=path, deployments=[model(runtime=llama)])
        assert [problem.partition(": ")[0] for problem in found] == [
            "config.deployments[0].runtime.model",
            "config.deployments[0].runtime.server",
            "config.ledger",
        ]
        assert not any("Value error" in problem for problem in found)
        (found_state_dir,) = problems(state_dir=path)
        assert found_state_dir.startswith("config.state_dir: ")
        (found_library,) = problems(accelerators={"nvml_library": path})
        assert found_library.startswith("config.accelerators.nvml_library: ")

    def test_a_library_is_a_path_or_the_loader_finds_it(self) -> None:
        assert read(accelerators={"nvml_library": "libnvidia-ml.so.1"}).nvml_library == "libnvidia-ml.so.1"
        assert read(accelerators={"nvml_library": "lib/ml.so"}).nvml_library == "/etc/gpuledger/lib/ml.so"

    @pytest.mark.parametrize(
        ("labels", "problem"),
        [
            ({"zone": "e\u0301"}, ".zone: must be in Unicode normal form NFC"),
            ({"gr\u00f6\u00dfe": "a"}, '["gr\\u00f6\\u00dfe"]: must have a key of ASCII characters'),
            ({"zone": "a" * 1001}, ".zone: must have at most 1000 characters"),
        ],
    )
    def test_labels_that_the_ledger_could_not_hold(self, labels: Json, problem: str) -> None:
        assert problems(node={"labels": labels}) == [f"config.node.labels{problem}"]
        selecting = model(node_selector=labels)
        assert problems(deployments=[selecting]) == [f"config.deployments[0].node_selector{problem}"]

    @pytest.mark.parametrize("size", ["16 Gigs", "16GIB", "-1GiB", 1.5])
    def test_a_size_that_is_none_is_told_the_units(self, size: Json) -> None:
        runtime: Any = {**REFERENCE, "idle_bytes": size}
        places: dict[str, dict[str, Any]] = {
            "accelerators.host.memory_limit_bytes": {"accelerators": {"host": {"memory_limit_bytes": size}}},
            "policy.reserve_floor_bytes": {"policy": {"reserve_floor_bytes": size}},
            "deployments[0].runtime.idle_bytes": {"deployments": [model(runtime=runtime)]},
        }
        for place, changes in places.items():
            (told,) = problems(**changes)
            assert told.startswith(f"config.{place}: must be a size: bytes, or a number with a unit (B, KB, "), told
            assert told.endswith(f", as 16GiB, not {json.dumps(size)}"), told

    @pytest.mark.parametrize(
        ("key", "value", "told"),
        [
            ("sha256", "abcd", "must be a SHA-256: 64 hexadecimal digits"),
            ("served_name", "a b", "must be an id: "),
            ("dtype", "a b", "must be a word of up to 64"),
            ("environment", ["A=B"], "must be the name of a variable"),
            ("metrics", {"path": "http://x"}, "must be a path of a URL"),
        ],
    )
    def test_a_shape_is_told_in_words(self, key: str, value: Json, told: str) -> None:
        runtime: Any = {"type": "vllm", "task": "chat", "model": "m", key: value}
        (problem,) = problems(deployments=[model(kind="gpu", runtime=runtime)])
        assert told in problem
        assert "^" not in problem

    def test_a_server_is_asked_by_the_name_that_clients_say(self) -> None:
        """Another one would pass the checks, and no request of a client."""
        vllm: Any = {"type": "vllm", "task": "chat", "model": "m"}
        any_other: Any = {"type": "command", "task": "chat", "command": ["x", "{port}"], "version": "1"}
        for runtime in (vllm, any_other):
            named = read(deployments=[model(kind="gpu", runtime={**runtime, "served_name": "emb@1"})])
            assert named.runtimes == read(deployments=[model(kind="gpu", runtime=runtime)]).runtimes
            (told,) = problems(deployments=[model(kind="gpu", runtime={**runtime, "served_name": "other"})])
            assert told.startswith("config.deployments[0].runtime.served_name: must be the capability (emb@1)")

    @pytest.mark.parametrize("key", ["batch_size", "ubatch_size"])
    def test_what_is_too_small_is_the_key_that_was_set(self, key: str) -> None:
        runtime: Any = {"type": "llama_cpp", "task": "embedding", "model": "m", "context_length": 256, key: 128}
        told = "an embedding is computed in one piece, so it must not be less than context_length (256)"
        assert problems(deployments=[model(runtime=runtime)]) == [f"config.deployments[0].runtime.{key}: {told}"]

    @pytest.mark.parametrize(
        ("host", "problem"),
        [
            (3, ": must be true, false or an object, not 3"),
            ({"memory_limit_bytes": 0}, ".memory_limit_bytes: must be at least 1"),
            ({"limit": 1}, ".limit: unknown key"),
        ],
    )
    def test_what_may_have_two_shapes_is_told_once(self, host: Json, problem: str) -> None:
        assert problems(accelerators={"host": host}) == [f"config.accelerators.host{problem}"]

    def test_aliases_cannot_stand_for_billions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(documents, "MAX_VALUES", 1000)
        tens = "".join(f"k{n + 1}: &k{n + 1} [{', '.join([f'*k{n}'] * 10)}]\n" for n in range(12))
        with pytest.raises(DocumentError, match="has more than 1000 values"):
            config_of(parse_yaml(f"k0: &k0 []\n{tens}".encode()), HERE)

    def test_text_that_no_type_can_read_has_its_place(self) -> None:
        deep: Json = 1
        for _ in range(900):
            deep = {"a": deep}
        with pytest.raises(DocumentError, match=r"config\.policy\.a[.a]+: is nested deeper than 32 levels"):
            config_of(document(policy=deep), HERE)
        assert problems(node={"id": "\ud800"}) == ["config.node.id: is not text: it has half of a surrogate pair"]

    @pytest.mark.parametrize("value", [None, [], "text", 3, {"deployments": {}}, {"deployments": [3], "policy": 3}])
    def test_what_is_no_configuration_at_all(self, value: Json) -> None:
        with pytest.raises(DocumentError):
            config_of(value, HERE)


class TestKey:
    def test_it_is_made_once_and_for_nobody_else(self, tmp_path: Path) -> None:
        key = request_key(tmp_path)
        assert request_key(tmp_path) == key
        assert len(key) == 32
        assert (tmp_path / "request.key").stat().st_mode & 0o777 == 0o600
        assert [path.name for path in tmp_path.iterdir()] == ["request.key"]
