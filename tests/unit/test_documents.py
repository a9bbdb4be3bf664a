"""Every way in which a document is refused, with its place and in our words."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from gpuledger.domain import documents
from gpuledger.domain.document_problems import DocumentError, Problem
from gpuledger.domain.policy import Policy
from gpuledger.domain.reasons import Reason
from gpuledger.domain.state import Backoff, Sleep
from gpuledger.domain.units import GIB
from gpuledger.tools.reading import parse_yaml
from tests.unit.situations import GPU, NOW, ask, lease, model, queued, resident, state_of

Document: TypeAlias = dict[str, Any]

SLEEP = Sleep(asleep_bytes=GIB, sleep_ms=1, wake_ms=1)


def good_state() -> Document:
    """One of everything."""
    state = state_of(
        [model("m", backoff=(Backoff(GPU, NOW),), sleep=SLEEP), model("x")],
        [resident("m"), resident("x")],
        leases=[lease("m"), lease("x")],
        queue=[queued("w", "x", Reason.WAITING_FOR_DRAIN, "res-m")],
        memory_bytes=64 * GIB,
        labels={"ram": "64g"},
    )
    return documents.state_document(state)


def put(document: Any, path: str, value: Any) -> None:
    """`put(d, "nodes.0.ready", 1)`."""
    *above, last = path.split(".")
    for step in above:
        document = document[int(step) if step.isdecimal() else step]
    document[int(last) if last.isdecimal() else last] = value


def problems(read: Callable[[], object]) -> list[str]:
    with pytest.raises(DocumentError) as caught:
        read()
    return [str(problem) for problem in caught.value.problems]


def refused(changes: Document) -> list[str]:
    document = good_state()
    for path, value in changes.items():
        put(document, path, value)
    return problems(lambda: documents.state_of(document))


def refused_text(text: bytes) -> list[str]:
    return problems(lambda: documents.request_of(documents.parse_json(text, "request")))


def test_a_good_document_comes_back_as_it_went() -> None:
    document = good_state()
    assert documents.state_document(documents.state_of(document)) == document


class TestShapes:
    @pytest.mark.parametrize(
        ("path", "value", "problem"),
        [
            ("nodes.0.accelerators.0.total_bytes", 0, "nodes[0].accelerators[0].total_bytes: must be at least 1"),
            (
                "nodes.0.accelerators.0.total_bytes",
                2**53,
                "nodes[0].accelerators[0].total_bytes: must be at most 9007199254740991",
            ),
            ("nodes.0.memory_bytes", -1, "nodes[0].memory_bytes: must be at least 0"),
            ("nodes.0.memory_bytes", 1.5, "nodes[0].memory_bytes: must be an integer, not 1.5"),
            ("nodes.0.memory_bytes", 1.0, "nodes[0].memory_bytes: must be an integer, not 1.0"),
            ("nodes.0.memory_bytes", float("nan"), "nodes[0].memory_bytes: must be an integer, not NaN"),
            ("nodes.0.memory_bytes", float("-inf"), "nodes[0].memory_bytes: must be an integer, not -Infinity"),
            ("nodes.0.memory_bytes", True, "nodes[0].memory_bytes: must be an integer, not true"),
            ("nodes.0.memory_bytes", "8GiB", 'nodes[0].memory_bytes: must be an integer, not "8GiB"'),
            ("nodes.0.ready", 1, "nodes[0].ready: must be true or false, not 1"),
            ("nodes.0.redy", True, 'nodes[0].redy: unknown key, did you mean "ready"?'),
            ("nodes.0.zzz", True, "nodes[0].zzz: unknown key"),
            ("nodes.0.a b", True, 'nodes[0]["a b"]: unknown key'),
            ("deployments.0.sleep.wake", 1, 'deployments[0].sleep.wake: unknown key, did you mean "wake_ms"?'),
            ("nodes.0.labels.ram", None, "nodes[0].labels.ram: must be a string, not null"),
            ("nodes.0.accelerators", {}, "nodes[0].accelerators: must be a list, not an object"),
            ("nodes.0", [], "nodes[0]: must be an object, not a list"),
            ("deployments.0.kind", "tpu", 'deployments[0].kind: must be "gpu" or "host", not "tpu"'),
            ("schema", "gpuledger.state/2", 'schema: must be "gpuledger.state/1", not "gpuledger.state/2"'),
            (
                "policy.pressure_enter_bp",
                {"ELEVATED": 1, "HIGH": 2, "CRITICAL": 3, "LOW": 0},
                'policy.pressure_enter_bp.LOW: unknown key: must be "NORMAL", "ELEVATED", "HIGH" or "CRITICAL"',
            ),
            (
                "now",
                "2026-11-30T12:00:00.000000",
                "now: must be an instant in UTC with six fractional digits, as 2026-11-30T12:00:00.000000Z",
            ),
            ("now", "2026-02-30T12:00:00.000000Z", "now: must be an instant that exists: no such day or time"),
            ("now", "9999-12-31T12:00:00.000000Z", "now: must be an instant from 1970 on and before 9900"),
            ("now", 5, "now: must be a string with an instant in UTC, as 2026-11-30T12:00:00.000000Z"),
            (
                "nodes.0.node_id",
                "a b",
                (
                    "nodes[0].node_id: must be an id: a letter or digit, then up to 199 letters, digits and any of "
                    "._@#:+/-"
                ),
            ),
        ],
    )
    def test_a_value_is_refused_at_its_place(self, path: str, value: object, problem: str) -> None:
        assert refused({path: value}) == [f"state.{problem}"]

    def test_what_is_missing_is_named(self) -> None:
        document = good_state()
        del document["nodes"][0]["node_id"], document["policy"]
        told = problems(lambda: documents.state_of(document))
        assert told == ["state.policy: is required", "state.nodes[0].node_id: is required"]

    def test_all_problems_of_both_documents_are_told_at_once(self) -> None:
        state, request = good_state(), documents.request_document(ask("m"))
        put(state, "nodes.0.ready", None)
        put(state, "leases.1.preemptions", -1)
        put(request, "lab", "yes")
        told = problems(lambda: documents.plan_case_of({"state": state, "request": request, "name": "ignored"}))
        assert told == [
            "state.nodes[0].ready: must be true or false, not null",
            "state.leases[1].preemptions: must be at least 0",
            'request.lab: must be true or false, not "yes"',
        ]

    def test_a_case_without_its_parts(self) -> None:
        assert problems(lambda: documents.plan_case_of({})) == ["state: is required", "request: is required"]
        assert problems(lambda: documents.plan_case_of([])) == ["must be an object"]

    def test_a_thousand_problems_are_told_as_a_hundred(self) -> None:
        error = DocumentError([Problem("x", "is wrong")] * 1000)
        assert str(error).count("\n") == 100
        assert str(error).endswith("and 900 more")


class TestRules:
    @pytest.mark.parametrize(
        ("changes", "told"),
        [
            (
                {"policy.telemetry_max_age_seconds": 14},
                ["policy.telemetry_max_age_seconds: must be at least 3 times sample_interval_seconds (15)"],
            ),
            (
                {"policy.pressure_enter_bp": {"ELEVATED": 5000, "CRITICAL": 8500}},
                ["policy.pressure_enter_bp.HIGH: is required"],
            ),
            (
                {"policy.pressure_enter_bp": {"ELEVATED": 8000, "HIGH": 7000, "CRITICAL": 8500}},
                ["policy.pressure_enter_bp.HIGH: must be at least that of ELEVATED (8000)"],
            ),
            (
                {"policy.pressure_exit_bp.HIGH": 7001},
                ["policy.pressure_exit_bp.HIGH: must be at most pressure_enter_bp of HIGH (7000)"],
            ),
            (
                {"policy.pressure_exit_bp.NORMAL": 1},
                ["policy.pressure_exit_bp.NORMAL: unknown key: NORMAL has no thresholds"],
            ),
            (
                {"deployments.1.deployment_id": "m"},
                [
                    "deployments[1].deployment_id: m is there already, at state.deployments[0].deployment_id",
                    "residents[1].deployment_id: there is no deployment x",
                    "leases[1].deployment_id: there is no deployment x",
                    "queue[0].waiting_for.deployment_id: there is no deployment x",
                ],
            ),
            (
                {"residents.1.deployment_id": "m"},
                ["residents[1]: m on GPU-0 is there already, at state.residents[0]"],
            ),
            (
                {"leases.1.lease_id": "lease-m"},
                ["leases[1].lease_id: lease-m is there already, at state.leases[0].lease_id"],
            ),
            (
                {"residents.0.accelerator_id": "GPU-9"},
                ["residents[0].accelerator_id: there is no accelerator GPU-9"],
            ),
            (
                {"telemetry.0.accelerator_id": "GPU-9"},
                ["telemetry[0].accelerator_id: there is no accelerator GPU-9"],
            ),
            (
                {"deployments.0.backoff.0.accelerator_id": "GPU-9"},
                ["deployments[0].backoff[0].accelerator_id: there is no accelerator GPU-9"],
            ),
            (
                {"queue.0.waiting_for.resident_ids": ["res-m", "res-q"]},
                ["queue[0].waiting_for.resident_ids[1]: there is no resident res-q"],
            ),
            (
                {"deployments.0.envelopes.0.gpu_class": "host"},
                ['deployments[0].envelopes[0].gpu_class: must not be "host" where kind is gpu'],
            ),
            (
                {"deployments.0.kind": "host"},
                ['deployments[0].envelopes[0].gpu_class: must be "host" where kind is host'],
            ),
            (
                {"nodes.0.accelerators.0.gpu_class": "host"},
                ['nodes[0].accelerators[0].gpu_class: must not be "host" where kind is gpu'],
            ),
            (
                {"residents.0.attribution": "UNKNOWN"},
                ['residents[0].attribution: must be "KNOWN" or "ESTIMATED"'],
            ),
            (
                {"deployments.0.sleep.asleep_bytes": 5 * GIB},
                [
                    (
                        "deployments[0].sleep.asleep_bytes: must be at most the largest peak_bytes of its envelopes "
                        f"({4 * GIB})"
                    )
                ],
            ),
            (
                {"deployments.1.envelopes.0.peak_bytes": 2**53 - 1},
                [
                    (
                        "deployments[1].envelopes[0].peak_bytes: with the margin of the policy, is more than "
                        "9007199254740991 bytes"
                    )
                ],
            ),
            (
                {"residents.0.attributed_bytes": 2**53 - 1},
                [
                    (
                        "nodes[0].accelerators[0]: what residents and leases have and reserve here is more than "
                        "9007199254740991 bytes"
                    )
                ],
            ),
        ],
    )
    def test_two_values_that_do_not_go_together(self, changes: Document, told: list[str]) -> None:
        assert refused(changes) == [f"state.{problem}" for problem in told]

    @pytest.mark.parametrize("name", ["nodes", "deployments", "residents", "leases", "queue", "telemetry"])
    def test_what_is_there_twice(self, name: str) -> None:
        document = good_state()
        document[name].append(copy.deepcopy(document[name][0]))
        assert any("is there already, at" in problem for problem in problems(lambda: documents.state_of(document)))

    def test_a_policy_alone(self) -> None:
        slow = documents.policy_document(Policy(sample_interval_seconds=6))
        told = problems(lambda: documents.policy_of(slow))
        assert told == ["policy.telemetry_max_age_seconds: must be at least 3 times sample_interval_seconds (18)"]
        assert documents.policy_of(documents.policy_document(Policy())) == Policy()


class TestJson:
    @pytest.mark.parametrize(
        ("text", "told"),
        [
            (b"", "request: is empty"),
            (b" \n", "request: is empty"),
            (b"\xff\xfe{}", "request: is not UTF-8 text (byte 0)"),
            (b"\x00\x01\x02", "request: is not JSON: expecting value at line 1, column 1"),
            (b"{} {}", "request: is not JSON: extra data at line 1, column 4"),
            (b"[" * 100_000, "request: is nested deeper than 32 levels"),
            (b"null", "request: must be an object, not null"),
            (b"3", "request: must be an object, not 3"),
        ],
    )
    def test_texts_that_are_no_document(self, text: bytes, told: str) -> None:
        assert refused_text(text) == [told]

    def test_depth_is_bounded_at_its_place(self) -> None:
        (told,) = refused_text(b'{"a":' + b"[" * 40 + b"]" * 40 + b"}")
        assert told == "request.a" + "[0]" * 32 + ": is nested deeper than 32 levels"

    def test_keys_there_twice_are_named(self) -> None:
        request = json.dumps(documents.request_document(ask("m")))
        twice = request.replace('"lab": false', '"lab": false, "lab": true')
        assert refused_text(twice.encode()) == ["request.lab: is there more than once"]

    def test_half_of_a_surrogate_pair_is_no_text(self) -> None:
        assert refused_text(b'{"client_id": "\\ud800"}') == [
            "request.client_id: is not text: it has half of a surrogate pair"
        ]

    def test_an_integer_of_any_length_is_refused_as_too_large(self) -> None:
        request = json.dumps(documents.request_document(ask("m")))
        huge = request.replace('"fallback_rank": 0', '"fallback_rank": ' + "9" * 10_000)
        assert refused_text(huge.encode()) == ["request.fallback_rank: must be at most 9007199254740991"]

    def test_a_byte_order_mark_says_nothing(self) -> None:
        text = json.dumps(documents.request_document(ask("m"))).encode()
        assert documents.request_of(documents.parse_json(b"\xef\xbb\xbf" + text)) == ask("m")

    def test_size_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(documents, "MAX_JSON_BYTES", 1024**2)
        assert refused_text(b" " * (1024**2 + 1)) == ["request: is larger than 1 MiB"]


class TestYaml:
    def test_it_says_what_json_says(self) -> None:
        text = b"a: &x {n: 1, t: true, f: False, z: ~, s: text}\nb: [*x, -3, 'quoted', null]\n"
        shared = {"n": 1, "t": True, "f": False, "z": None, "s": "text"}
        assert parse_yaml(text) == {"a": shared, "b": [shared, -3, "quoted", None]}

    @pytest.mark.parametrize(
        "text",
        [
            "1.5",
            "2026-11-30",
            "2026-11-30T12:00:00.000000Z",
            "yes",
            "no",
            "on",
            "010",
            "0x1f",
            "1:30",
            "1_000",
            ".inf",
            ".nan",
        ],
    )
    def test_ideas_of_its_own_stay_text(self, text: str) -> None:
        assert parse_yaml(f"a: {text}".encode()) == {"a": text}

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            (b"", "is empty"),
            (b"a: 1\n---\nb: 2", "is not YAML: but found another document at line 2, column 1"),
            (b"a: [1", "is not YAML: expected ',' or ']', but got '<stream end>' at line 1, column 6"),
            (b"a: &x [*x]", "contains itself at line 1, column 4"),
            (b"a: !!python/object:os.system x", "has a tag that documents do not have at line 1, column 4"),
            (b"a: !!float 1.5", "has a tag that documents do not have at line 1, column 4"),
            (b"? [1]\n: 2", "has a key that is no text at line 1, column 3"),
            (b"a: \x00", "is not YAML: it has characters that are not text"),
            (b"\xff\xfe", "is not UTF-8 text (byte 0)"),
            (b"[" * 5_000, "is nested deeper than 32 levels"),
        ],
    )
    def test_texts_that_are_no_document(self, text: bytes, told: str) -> None:
        assert problems(lambda: parse_yaml(text)) == [told]

    def test_keys_there_twice_are_named(self) -> None:
        told = problems(lambda: documents.request_of(parse_yaml(b"lab: true\nlab: false")))
        assert told[0] == "request.lab: is there more than once"

    def test_aliases_in_aliases_are_not_expanded_without_bound(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(documents, "MAX_VALUES", 10_000)
        lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
        lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 20)]
        told = problems(lambda: documents.state_of(parse_yaml("\n".join(lines).encode())))
        assert [problem for problem in told if "has more than 10000 values" in problem]

    def test_merge_keys_are_keys(self) -> None:
        told = problems(lambda: documents.request_of(parse_yaml(b"<<: {lab: true}")))
        assert 'request["<<"]: unknown key' in told


class TestPressureCases:
    def test_a_policy_is_checked_there_too(self) -> None:
        case: Document = {
            "policy": documents.policy_document(Policy()) | {"sample_interval_seconds": 6},
            "total_bytes": GIB,
            "samples": [],
            "note": "ignored",
        }
        told = problems(lambda: documents.pressure_case_of(case))
        assert told == ["policy.telemetry_max_age_seconds: must be at least 3 times sample_interval_seconds (18)"]

    def test_a_sample_at_its_place(self) -> None:
        case: Document = {"policy": {}, "total_bytes": GIB, "samples": [{"observed_at": "now"}]}
        told = problems(lambda: documents.pressure_case_of(case))
        assert told[0].startswith("samples[0].observed_at: must be an instant in UTC")
        assert told[1:] == ["samples[0].used_bytes: is required", "samples[0].attributed_managed_bytes: is required"]
