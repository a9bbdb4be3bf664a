"""The operator API on a scheduler that runs: who may, what is recorded of it, and how it says no."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from gpuledger.adapters.http.operator import CALLS_AT_ONCE, CALLS_PER_SECOND, MAX_BODY_BYTES, PREFIX, ROUTES
from gpuledger.adapters.http.ports import Cause, Ending, Granted
from gpuledger.adapters.tokens import Scope
from gpuledger.domain.documents import policy_document
from gpuledger.domain.events import (
    AcceleratorHealthChanged,
    EnvelopeAccepted,
    EnvelopeSuspected,
    EvictionCause,
    EvictionStarted,
    LabPaused,
    LabResumed,
    NodeCordoned,
    NodeDrainCompleted,
    NodeDrainStarted,
    NodeUncordoned,
    PolicyRevised,
    RequestReceived,
    ResidencyPolicyChanged,
)
from gpuledger.domain.policy import Policy
from gpuledger.domain.ports import LedgerUnavailable
from gpuledger.domain.state import Health, Residency, ResidencyPolicy
from tests.unit.operators import CLIENT_TOKEN, Control, control, token_of
from tests.unit.shells import HOST, MODEL_BYTES, embedding

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert {"message", "type", "code", "param", "request_id"} <= error.keys()
    return error


def recorded(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [event["type"] for event in answer.json()["recorded"]]


async def load(door: Control, capability: str = "emb@1") -> None:
    """Have a model loaded, and idle."""
    running = door.shell.running
    outcome = await running.desk.submit(door.shell.question(capability=capability))
    assert isinstance(outcome, Granted)
    running.desk.end(outcome.request_id, Ending(200, 1, 2))
    await door.shell.until(lambda: not running.world.requests)


class TestWho:
    @pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
    async def test_nothing_without_a_token(self, route: Any) -> None:
        async with control() as door:
            before = len(door.shell.names())
            path = PREFIX + route.path.format(subject="local")
            for headers in ({}, {"Authorization": "Bearer nobody"}, {"Authorization": "Basic eA=="}):
                answer = await door.http.request(route.method, path, headers=headers)
                assert error_of(answer, 401)["code"] == "invalid_operator_token"
                assert answer.headers["www-authenticate"] == "Bearer"
            answer = await door.http.request(route.method, path, headers={"Authorization": f"Bearer {CLIENT_TOKEN}"})
            assert error_of(answer, 403)["code"] == "operator_token_needed"
            assert operations_in(door.shell.names()[before:]) == set()

    @pytest.mark.parametrize("route", [route for route in ROUTES if route.scope is Scope.OPERATE], ids=lambda r: r.path)
    @pytest.mark.parametrize("scope", [Scope.READ, Scope.AUDIT])
    async def test_who_may_only_see_changes_nothing(self, route: Any, scope: Scope) -> None:
        async with control() as door:
            before = len(door.shell.names())
            path = PREFIX + route.path.format(subject="local")
            headers = {"Authorization": f"Bearer {token_of(scope)}"}
            answer = await door.http.request(route.method, path, headers=headers)
            error = error_of(answer, 403)
            assert error["code"] == "scope_needed"
            assert f"has {scope.value}" in error["message"]
            assert operations_in(door.shell.names()[before:]) == set()

    @pytest.mark.parametrize("scope", Scope)
    async def test_everyone_sees(self, scope: Scope) -> None:
        async with control() as door:
            for path in ("/status", "/alerts", "/queue", "/nodes", "/policy", "/plans", "/operations"):
                answer = await door.get(path, token_of(scope))
                assert answer.status_code == 200, answer.text
                assert answer.json()["schema"].startswith("gpuledger.")
            assert (await door.post("/plan", {"capability": "emb@1"}, token_of(scope))).status_code == 200

    async def test_a_policy_may_be_tried_by_who_may_not_revise_it(self) -> None:
        async with control() as door:
            body = {"policy": {"max_replans": 1}}
            tried = await door.post("/policy", body, token_of(Scope.READ), dry_run="true")
            assert (tried.status_code, tried.json()["recorded"]) == (200, [])
            assert error_of(await door.post("/policy", body, token_of(Scope.READ)), 403)["code"] == "scope_needed"
            assert door.shell.running.world.policy.max_replans == 5

    async def test_operators_read_metrics_where_they_are_not_open(self) -> None:
        async with control() as door:
            for token, status in ((token_of(Scope.READ), 200), (CLIENT_TOKEN, 200), ("nobody", 401)):
                answer = await door.http.get("/metrics", headers={"Authorization": f"Bearer {token}"})
                assert answer.status_code == status

    async def test_the_token_of_an_operator_opens_no_gateway(self) -> None:
        async with control() as door:
            headers = {"Authorization": f"Bearer {token_of(Scope.OPERATE)}"}
            assert error_of(await door.http.get("/v1/models", headers=headers), 401)["code"] == "invalid_api_key"


def operations_in(names: list[str]) -> set[str]:
    return {"NodeCordoned", "NodeDrainStarted", "PolicyRevised", "LabPaused", "ResidencyPolicyChanged"} & set(names)


class TestShown:
    async def test_the_status_is_that_of_the_command(self) -> None:
        async with control() as door:
            await load(door)
            status = (await door.get("/status")).json()
            assert status["schema"] == "gpuledger.status/1"
            assert status["scheduler"]["state"] == "running"
            assert [one["deployment_id"] for one in status["residents"]] == ["emb"]

    async def test_who_waits_is_in_the_queue(self) -> None:
        async with control() as door:
            desk = door.shell.running.desk
            first = await desk.submit(door.shell.question("req-first"))
            assert isinstance(first, Granted)
            second = asyncio.create_task(desk.submit(door.shell.question("req-second")))
            await door.shell.until(lambda: "RequestQueued" in door.shell.names())
            (waiter,) = (await door.get("/queue")).json()["queue"]
            assert (waiter["place"], waiter["request_id"]) == (1, "req-second")
            assert waiter["waiting_for"]["reason"] == "CONCURRENCY_LIMIT"
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)

    async def test_the_newest_plans_come_first(self) -> None:
        async with control() as door:
            await load(door)
            await load(door)
            shown = (await door.get("/plans", limit=1)).json()
            (plan,) = shown["plans"]
            assert (plan["verdict"], plan["start"], plan["capability"]) == ("ADMIT", "warm", "emb@1")
            assert [one["start"] for one in (await door.get("/plans")).json()["plans"]] == ["warm", "cold"]

    async def test_what_needs_a_look(self) -> None:
        async with control() as door:
            await door.post("/nodes/local/cordon")
            (alert,) = (await door.get("/alerts")).json()["alerts"]
            assert (alert["kind"], alert["subjects"]["node_id"]) == ("NODE_CORDONED", "local")
            assert (await door.get("/status")).json()["alerts"] == [alert]

    async def test_the_policy_is_shown_whole(self) -> None:
        async with control() as door:
            shown = (await door.get("/policy")).json()
            assert shown["policy"] == policy_document(door.shell.running.world.policy)
            assert shown["revision"] == shown["policy"]["revision"]

    async def test_what_operators_did_has_their_names(self) -> None:
        async with control() as door:
            await load(door)
            await door.post("/nodes/local/cordon")
            await door.post("/unload")
            shown = (await door.get("/operations", limit=2)).json()["operations"]
            assert [one["type"] for one in shown] == ["EvictionStarted", "NodeCordoned"]
            assert {one["data"]["by"] for one in shown} == {"operate-er"}

    async def test_what_nobody_did_is_no_operation(self) -> None:
        async with control(embedding(residency={"policy": "load_on_demand"})) as door:
            await load(door)
            await door.shell.until(lambda: "ResidentEvicted" in door.shell.names())
            assert (await door.get("/operations")).json()["operations"] == []


class TestTrials:
    async def test_it_is_the_plan_that_a_request_would_get(self) -> None:
        async with control() as door:
            before = door.shell.names()
            tried = (await door.post("/plan", {"capability": "emb@1", "client": "app"})).json()
            assert tried["plan"]["verdict"] == "ADMIT"
            assert tried["explanation"] == f"ADMIT: emb on {HOST}, cold start in about 10 ms"
            assert tried["client_may_ask"] is True
            assert [name for name in door.shell.names()[len(before) :] if name != "TelemetrySampled"] == []
            assert door.shell.of(RequestReceived) == []

    async def test_in_the_name_of_a_client(self) -> None:
        async with control() as door:
            plan = (await door.post("/plan", {"capability": "emb@1", "client": "batch"})).json()["plan"]
            assert (plan["client_id"], plan["priority"]) == ("batch", "background")
            error = error_of(await door.post("/plan", {"capability": "emb@1", "client": "nobody"}), 404)
            assert error["message"] == "no client nobody: there are app, batch"

    async def test_of_a_class_and_as_lab(self) -> None:
        async with control() as door:
            await door.post("/lab/pause")
            body = {"capability": "emb@1", "priority": "benchmark", "lab": True, "deadline_ms": 50}
            tried = (await door.post("/plan", body)).json()
            assert (tried["plan"]["priority"], tried["plan"]["reasons"]) == ("benchmark", ["LAB_PAUSED"])
            assert tried["explanation"] == "REJECT_POLICY: the policy pauses LAB"

    async def test_what_a_client_may_not_ask_for_is_said(self) -> None:
        clients = [{"id": "app", "token_sha256": "ab" * 32, "capabilities": ["emb@1"]}]
        async with control(embedding(), embedding("other"), clients=clients) as door:
            tried = (await door.post("/plan", {"capability": "other@1", "client": "app"})).json()
            assert tried["client_may_ask"] is False

    async def test_one_that_is_refused_is_planned_for_the_fallback_as_a_request_is(self) -> None:
        lab = embedding(residency={"policy": "lab_only"})
        spare = embedding("spare", capability="emb@1", fallback_rank=1)
        async with control(lab, spare) as door:
            tried = (await door.post("/plan", {"capability": "emb@1"})).json()
            assert tried["explanation"] == "REJECT_POLICY: emb serves LAB requests only"
            assert tried["fallback"]["explanation"] == f"ADMIT: spare on {HOST}, cold start in about 10 ms"
            assert tried["fallback"]["plan"]["fallback_rank"] == 1
            granted = await door.shell.running.desk.submit(door.shell.question())
            assert isinstance(granted, Granted)
            assert granted.passage.fallback_rank == 1
            admitted = (await door.post("/plan", {"capability": "emb@1", "lab": True})).json()
            assert admitted["fallback"] is None, "rank 0 serves it"
            second = (await door.post("/plan", {"capability": "emb@1", "fallback_rank": 1})).json()
            assert second["fallback"] is None, "there is none after it"

    async def test_evictions_are_named(self) -> None:
        gib = MODEL_BYTES // 64 * 1024
        async with control(embedding(), embedding("other"), policy={"reserve_floor_bytes": 7 * gib - 2**28}) as door:
            await load(door)
            tried = (await door.post("/plan", {"capability": "other@1"})).json()
            assert tried["plan"]["verdict"] == "ADMIT_AFTER_EVICTION", tried["explanation"]
            assert tried["explanation"].endswith("after evicting emb")

    async def test_a_client_has_its_class_already(self) -> None:
        async with control() as door:
            answer = await door.post("/plan", {"capability": "emb@1", "client": "app", "priority": "production"})
            assert error_of(answer, 422)["param"] == "client"


class TestPolicy:
    async def test_some_keys_are_revised(self) -> None:
        async with control() as door:
            present = door.shell.running.world.policy
            answer = await door.post("/policy", {"policy": {"max_replans": 2}, "if_revision": present.revision})
            shown = answer.json()
            assert recorded(answer) == ["PolicyRevised"]
            assert shown["changes"] == [{"key": "max_replans", "from": 5, "to": 2}]
            assert shown["revision"]["from"] == present.revision
            (*_, (seq, revised)) = door.shell.placed(PolicyRevised)
            assert (shown["recorded"][0]["seq"], revised.by, revised.source) == (seq, "operate-er", "operator")
            assert door.shell.running.world.policy == revised.policy
            assert revised.policy.revision == shown["revision"]["to"] != present.revision

    async def test_a_dry_run_records_nothing(self) -> None:
        async with control() as door:
            before = door.shell.of(PolicyRevised)
            answer = await door.post("/policy", {"policy": {"max_replans": 2}}, dry_run="true")
            assert recorded(answer) == []
            assert answer.json()["dry_run"] is True
            assert answer.json()["changes"] == [{"key": "max_replans", "from": 5, "to": 2}]
            assert door.shell.of(PolicyRevised) == before

    async def test_the_same_again_is_no_revision(self) -> None:
        async with control() as door:
            body = {"policy": {"max_replans": 2}}
            await door.post("/policy", body)
            answer = await door.post("/policy", body)
            assert (recorded(answer), answer.json()["changes"]) == ([], [])

    async def test_a_whole_document_is_one_too(self) -> None:
        async with control() as door:
            whole = policy_document(Policy(lease_ttl_seconds=6, revision="mine-1"))
            answer = await door.post("/policy", {"policy": whole})
            assert answer.json()["revision"]["to"] == "mine-1"
            assert door.shell.running.world.policy == Policy(lease_ttl_seconds=6, revision="mine-1")

    async def test_who_was_too_late_is_told(self) -> None:
        async with control() as door:
            first = door.shell.running.world.policy.revision
            bodies = [{"policy": {"max_replans": n}, "if_revision": first} for n in (1, 2, 3)]
            answers = await asyncio.gather(*(door.post("/policy", body) for body in bodies))
            assert sorted(answer.status_code for answer in answers) == [200, 409, 409]
            late = next(answer for answer in answers if answer.status_code == 409)
            assert error_of(late, 409)["code"] == "revision_changed"
            assert len(door.shell.of(PolicyRevised)) == 2  # the one of the start, and one of these

    @pytest.mark.parametrize(
        ("keys", "places"),
        [
            ({"max_replan": 1}, ["policy.max_replan"]),
            ({"max_replans": -1, "max_residents": "x"}, ["policy.max_residents", "policy.max_replans"]),
            ({"max_replans": 1.5}, ["policy.max_replans"]),
            ({"sample_interval_seconds": 100}, ["policy.telemetry_max_age_seconds"]),
            ({"revision": "m10-v1", "max_replans": 1}, ["policy.revision"]),
            ({"revision": "not an id"}, ["policy.revision"]),
        ],
    )
    async def test_every_problem_has_its_place(self, keys: dict[str, Any], places: list[str]) -> None:
        async with control() as door:
            error = error_of(await door.post("/policy", {"policy": keys}), 422)
            assert error["code"] == "invalid_document"
            assert [problem["where"] for problem in error["problems"]] == places
            assert error["param"] == places[0]
            assert len(door.shell.of(PolicyRevised)) == 1

    async def test_another_policy_is_not_called_as_the_present_one(self) -> None:
        async with control() as door:
            await door.post("/policy", {"policy": {"revision": "mine-1"}})
            error = error_of(await door.post("/policy", {"policy": {"revision": "mine-1", "max_replans": 1}}), 422)
            assert error["message"].startswith("policy.revision: mine-1 is the present policy")

    async def test_a_pause_of_lab_is_not_undone_by_a_revision(self) -> None:
        async with control() as door:
            await door.post("/lab/pause")
            await door.post("/policy", {"policy": {"max_replans": 1}})
            assert door.shell.running.world.policy.lab_paused
            await door.post("/policy", {"policy": {"lab_paused": False}})
            assert not door.shell.running.world.policy.lab_paused


class TestOperations:
    async def test_lab(self) -> None:
        async with control() as door:
            assert recorded(await door.post("/lab/pause")) == ["LabPaused"]
            assert recorded(await door.post("/lab/pause")) == []
            assert recorded(await door.post("/lab/resume")) == ["LabResumed"]
            assert (door.shell.of(LabPaused), door.shell.of(LabResumed)) == (
                [LabPaused("operate-er")],
                [LabResumed("operate-er")],
            )

    async def test_nodes(self) -> None:
        async with control() as door:
            assert recorded(await door.post("/nodes/local/cordon")) == ["NodeCordoned"]
            assert (await door.get("/nodes")).json()["nodes"][0]["cordoned"] is True
            assert recorded(await door.post("/nodes/local/uncordon")) == ["NodeUncordoned"]
            assert door.shell.of(NodeCordoned) == [NodeCordoned("local", "operate-er")]
            assert door.shell.of(NodeUncordoned) == [NodeUncordoned("local", "operate-er")]

    async def test_a_drain_ends_when_nothing_is_left(self) -> None:
        async with control() as door:
            await load(door)
            assert "NodeDrainStarted" in recorded(await door.post("/nodes/local/drain"))
            await door.shell.until(lambda: door.shell.of(NodeDrainCompleted) != [])
            (node,) = (await door.get("/nodes")).json()["nodes"]
            assert (node["draining"], node["drained"], node["residents"], node["leases"]) == (True, True, 0, 0)
            assert [one.by for one in door.shell.of(NodeDrainStarted)] == ["operate-er"]

    async def test_residency(self) -> None:
        async with control() as door:
            answer = await door.put("/deployments/emb/residency", {"policy": "load_on_demand", "ttl_seconds": 7})
            assert recorded(answer) == ["ResidencyPolicyChanged"]
            # Its keep-warm time stays when nobody says another one.
            await door.put("/deployments/emb/residency", {"policy": "keep_warm"})
            assert door.shell.of(ResidencyPolicyChanged) == [
                ResidencyPolicyChanged("emb", Residency(policy, 7), "operator", "operate-er")
                for policy in (ResidencyPolicy.LOAD_ON_DEMAND, ResidencyPolicy.KEEP_WARM)
            ]

    async def test_what_is_idle_is_unloaded(self) -> None:
        async with control(embedding(), embedding("other")) as door:
            await load(door)
            await load(door, "other@1")
            assert recorded(await door.post("/unload", {"deployment": "other"})) == ["EvictionStarted"]
            assert recorded(await door.post("/unload")) == ["EvictionStarted"]
            evicted = [(one.deployment_id, one.cause, one.by) for one in door.shell.of(EvictionStarted)]
            assert evicted == [(name, EvictionCause.OPERATOR, "operate-er") for name in ("other", "emb")]
            await door.shell.until(lambda: not list(door.shell.running.world.residents()))
            assert recorded(await door.post("/unload")) == []

    async def test_what_is_at_work_is_not(self) -> None:
        async with control() as door:
            granted = await door.shell.running.desk.submit(door.shell.question())
            assert isinstance(granted, Granted)
            assert recorded(await door.post("/unload")) == []

    async def test_a_fault_is_cleared(self) -> None:
        async with control() as door:
            error = error_of(await door.post(f"/accelerators/{HOST}/clear"), 409)
            assert error["code"] == "operation_refused"
            door.happens(f"accelerator:{HOST}", AcceleratorHealthChanged(HOST, Health.FAILED, "XID_79", 1))
            await door.shell.until(lambda: door.shell.running.world.accelerators[HOST].fault is not None)
            assert recorded(await door.post(f"/accelerators/{HOST}/clear")) == ["AcceleratorHealthChanged"]
            (*_, cleared) = door.shell.of(AcceleratorHealthChanged)
            assert (cleared.health, cleared.by) == (Health.HEALTHY, "operate-er")

    async def test_an_envelope_is_accepted(self) -> None:
        async with control() as door:
            assert error_of(await door.post("/deployments/emb/envelope/accept"), 409)["code"] == "operation_refused"
            suspected = EnvelopeSuspected("emb", HOST, "emb@1", "hash-emb", "host", "gpu_oom", 2, 1)
            door.happens("deployment:emb", suspected)
            emb = "emb"
            await door.shell.until(lambda: door.shell.running.world.deployments[emb].measured[0].envelope.suspect)
            assert recorded(await door.post("/deployments/emb/envelope/accept")) == ["EnvelopeAccepted"]
            assert door.shell.of(EnvelopeAccepted) == [EnvelopeAccepted("emb", "hash-emb", "operate-er")]

    @pytest.mark.parametrize(
        ("method", "path", "message"),
        [
            ("POST", "/nodes/elsewhere/cordon", "no node elsewhere: there are local"),
            ("POST", "/nodes/elsewhere/drain", "no node elsewhere: there are local"),
            ("POST", "/accelerators/GPU-0/clear", f"no accelerator GPU-0: there are {HOST}"),
            ("POST", "/accelerators/MIG-GPU-0%2F1%2F2/clear", f"no accelerator MIG-GPU-0/1/2: there are {HOST}"),
            ("POST", "/deployments/gone/envelope/accept", "no deployment gone: there are emb"),
            ("PUT", "/deployments/gone/residency", "no deployment gone: there are emb"),
        ],
    )
    async def test_what_is_not_there(self, method: str, path: str, message: str) -> None:
        async with control() as door:
            body = {"policy": "keep_warm"} if method == "PUT" else {}
            headers = {"Authorization": f"Bearer {token_of(Scope.OPERATE)}"}
            answer = await door.http.request(method, PREFIX + path, json=body, headers=headers)
            error = error_of(answer, 404)
            assert (error["code"], error["message"]) == ("not_found", message)
            assert error_of(await door.post("/unload", {"deployment": "gone"}), 404)["code"] == "not_found"


class TestShut:
    @pytest.mark.parametrize("cause", [Cause.STARTING, Cause.DRAINING])
    async def test_before_the_start_and_after_the_end_nothing_is_changed(self, cause: Cause) -> None:
        async with control() as door:
            door.shell.running.desk.gate.cause = cause
            for path, body in (("/lab/pause", None), ("/policy", {"policy": {"max_replans": 1}})):
                assert error_of(await door.post(path, body), 503)["code"] == cause.value
            assert (await door.get("/status")).status_code == 200
            assert door.shell.of(LabPaused) == []

    async def test_while_the_ledger_cannot_be_written(self) -> None:
        async with control() as door:
            door.shell.ledger.broken = "the disk is full"
            error = error_of(await door.post("/lab/pause"), 503)
            assert error["code"] == "ledger_unavailable"
            assert not door.shell.running.world.policy.lab_paused
            door.shell.ledger.broken = None
            await door.shell.until(lambda: door.shell.running.engine.trouble is None)
            assert recorded(await door.post("/lab/pause")) == ["LabPaused"]

    async def test_while_the_ledger_cannot_be_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(types: frozenset[str], limit: int) -> None:
            raise LedgerUnavailable("reading or writing failed")

        async with control() as door:
            monkeypatch.setattr(door.shell.ledger, "read_backward", broken)
            for path in ("/plans", "/operations"):
                assert error_of(await door.get(path), 503)["code"] == "ledger_unavailable"
            assert (await door.get("/status")).json()["failures"] == []


class TestBodies:
    @pytest.mark.parametrize(
        ("path", "body", "places"),
        [
            ("/unload", {"deployment": "emb", "pid": 1}, ["pid"]),
            ("/unload", {"deployment": "/bin/sh -c x"}, ["deployment"]),
            ("/unload", [], [""]),
            ("/lab/pause", {"command": "x"}, ["command"]),
            ("/plan", {}, ["capability"]),
            ("/plan", {"capability": "emb@1", "priority": "urgent"}, ["priority"]),
            ("/plan", {"capability": "emb@1", "fallback_rank": -1, "deadline_ms": 0}, ["fallback_rank", "deadline_ms"]),
            ("/policy", {"policy": 1}, ["policy"]),
            ("/policy", {}, ["policy"]),
        ],
    )
    async def test_every_problem_has_its_place(self, path: str, body: Any, places: list[str]) -> None:
        async with control() as door:
            error = error_of(await door.post(path, body), 422)
            assert [problem["where"] for problem in error["problems"]] == places

    async def test_what_is_no_json_at_all(self) -> None:
        async with control() as door:
            headers = {"Authorization": f"Bearer {token_of(Scope.OPERATE)}", "Content-Type": "application/json"}
            for content, status in ((b"{", 400), (b'{"deployment": "a", "deployment": "b"}', 422), (b"\xff", 400)):
                answer = await door.http.post(f"{PREFIX}/unload", content=content, headers=headers)
                assert answer.status_code == status, answer.text
            wrong = await door.http.post(
                f"{PREFIX}/unload", content=b"{}", headers={**headers, "Content-Type": "text/plain"}
            )
            assert error_of(wrong, 415)["code"] == "unsupported_media_type"

    async def test_one_that_is_too_long_is_not_read(self) -> None:
        async with control() as door:
            answer = await door.post("/policy", {"policy": {"revision": "x" * MAX_BODY_BYTES}})
            assert error_of(answer, 413)["code"] == "request_too_large"

    @pytest.mark.parametrize(
        ("path", "query", "place"),
        [
            ("/plans", {"limit": "0"}, "query.limit"),
            ("/plans", {"limit": "501"}, "query.limit"),
            ("/plans", {"limit": "many"}, "query.limit"),
            ("/plans", {"limits": "1"}, "query.limits"),
            ("/status", {"path": "x"}, "query.path"),
            ("/plans", [("limit", "1"), ("limit", "2")], "query"),
        ],
    )
    async def test_queries_are_as_strict(self, path: str, query: Any, place: str) -> None:
        async with control() as door:
            headers = {"Authorization": f"Bearer {token_of(Scope.READ)}"}
            answer = await door.http.get(PREFIX + path, params=query, headers=headers)
            assert [problem["where"] for problem in error_of(answer, 422)["problems"]] == [place]

    @pytest.mark.parametrize(
        "path", ["/nodes/a b/cordon", "/nodes/-x/cordon", "/nodes/%2e%2e/cordon", "/nodes//cordon"]
    )
    async def test_what_is_no_id_names_nothing(self, path: str) -> None:
        async with control() as door:
            assert (await door.post(path)).status_code == 404

    async def test_there_is_nothing_else(self) -> None:
        async with control() as door:
            assert error_of(await door.get("/shell"), 404)["code"] == "not_found"
            assert error_of(await door.get("/unload"), 405)["code"] == "method_not_allowed"

    async def test_what_is_no_answer_to_yes_or_no(self) -> None:
        async with control() as door:
            answer = await door.post("/policy", {"policy": {}}, dry_run="maybe")
            assert error_of(answer, 422)["message"] == 'query.dry_run: must be true or false, not "maybe"'


class TestPace:
    async def test_a_token_has_so_many_calls(self) -> None:
        async with control() as door:
            answers = [(await door.get("/policy")).status_code for _ in range(CALLS_AT_ONCE)]
            assert set(answers) == {200}
            answer = await door.get("/policy")
            assert error_of(answer, 429)["code"] == "too_many_calls"
            assert answer.headers["retry-after"] == "1"
            assert (await door.get("/policy", token_of(Scope.READ))).status_code == 200
            door.clock[0] += 1.0
            answers = [(await door.get("/policy")).status_code for _ in range(CALLS_PER_SECOND + 1)]
            assert answers == [200] * CALLS_PER_SECOND + [429]
