"""States and questions drawn at random: small, crowded, and near the edges where rules change."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from random import Random

from hypothesis import strategies as st

from gpuledger.domain.policy import Policy, Pressure, Priority
from gpuledger.domain.reasons import Reason
from gpuledger.domain.state import (
    Accelerator,
    Attribution,
    Backoff,
    Deployment,
    Envelope,
    Health,
    Kind,
    Lease,
    Node,
    PlanRequest,
    QueuedRequest,
    Residency,
    ResidencyPolicy,
    Resident,
    ResidentState,
    Sample,
    Sleep,
    State,
    WaitingFor,
)
from gpuledger.domain.units import GIB, MIB, parse_instant, seconds

NOW = parse_instant("2026-11-30T12:00:00.000000Z")
CAPABILITY = "chat@1"

#: What waits (6.3). A queued request holds one of these.
WAITING = (
    Reason.WAITING_FOR_DRAIN,
    Reason.RESIDENCY_PROTECTED,
    Reason.RESIDENCY_CONFLICT,
    Reason.RESIDENT_DRAINING,
    Reason.QUEUED_BEHIND,
    Reason.CONCURRENCY_LIMIT,
)


def one_in(rng: Random, times: int) -> bool:
    return rng.randrange(times) == 0


def ago(rng: Random) -> int:
    return NOW - seconds(rng.choice((0, 1, 5, 20, 40, 100, 900)))


@dataclass(frozen=True, slots=True)
class Question:
    state: State
    request: PlanRequest


@st.composite
def questions(draw: st.DrawFn, *, most_accelerators: int = 3, most_deployments: int = 7) -> Question:
    """A state and a request for one of its capabilities."""
    rng = draw(st.randoms(use_true_random=False))
    return Question(random_state(rng, most_accelerators, most_deployments), random_request(rng))


def random_request(rng: Random) -> PlanRequest:
    return PlanRequest(
        request_id="req-1",
        client_id="client-1",
        capability=CAPABILITY,
        priority=rng.choice(list(Priority)),
        requested_at=ago(rng),
        deadline=rng.choice((None, None, None, NOW + seconds(rng.randrange(40)))),
        lab=one_in(rng, 8),
    )


def random_state(rng: Random, most_accelerators: int, most_deployments: int) -> State:
    nodes = random_nodes(rng, 1 + rng.randrange(most_accelerators))
    accelerators = [accelerator for node in nodes for accelerator in node.accelerators]
    deployments = random_deployments(rng, 1 + rng.randrange(most_deployments), accelerators)
    residents = [
        random_resident(rng, deployment, accelerator)
        for accelerator in accelerators
        for deployment in deployments
        if deployment.kind is accelerator.kind and not one_in(rng, 3)
    ]
    names = count()
    leases = [lease for resident in residents for lease in random_leases(rng, resident, names)]
    return State(
        now=NOW,
        policy=random_policy(rng),
        nodes=nodes,
        deployments=deployments,
        residents=tuple(residents),
        leases=tuple(leases),
        queue=tuple(random_queue(rng, deployments, residents)),
        telemetry=tuple(random_samples(rng, accelerators, residents)),
    )


def random_policy(rng: Random) -> Policy:
    return Policy(
        max_residents=rng.choice((2, 3, 16, 16)),
        min_residency_loads=rng.choice((0, 2)),
        critical_admits_warm=one_in(rng, 2),
        lab_paused=one_in(rng, 12),
    )


def random_nodes(rng: Random, accelerators: int) -> tuple[Node, ...]:
    hosts = 1 if one_in(rng, 4) else 0
    cards = tuple(
        Accelerator(
            accelerator_id=f"GPU-{index}",
            index=index,
            kind=Kind.GPU,
            gpu_class=rng.choice(("small", "large")),
            total_bytes=rng.choice((8, 24)) * GIB,
            health=Health.DEGRADED if one_in(rng, 20) else Health.HEALTHY,
        )
        for index in range(accelerators)
    )
    host = Accelerator(accelerator_id="host-0", index=99, kind=Kind.HOST, gpu_class="host", total_bytes=16 * GIB)
    first = Node(
        node_id="node-0",
        accelerators=(*cards[:2], *(host,) * hosts),
        cordoned=one_in(rng, 12),
        draining=one_in(rng, 20),
        labels={"ram": rng.choice(("32g", "64g"))},
        memory_bytes=rng.choice((None, 32 * GIB)),
    )
    return (first, Node(node_id="node-1", accelerators=cards[2:], ready=not one_in(rng, 12)))


def random_deployments(rng: Random, number: int, accelerators: list[Accelerator]) -> tuple[Deployment, ...]:
    found: list[Deployment] = []
    for index in range(number):
        kind = Kind.HOST if one_in(rng, 8) else Kind.GPU
        peak = rng.choice((1, 2, 3, 3, 4, 6, 9)) * GIB + rng.randrange(3) * MIB
        classes = ("host",) if kind is Kind.HOST else ("small", "large")
        envelopes = tuple(
            Envelope(
                config_hash=f"cfg-{index}",
                gpu_class=gpu_class,
                idle_bytes=peak // 2,
                peak_bytes=peak,
                measured_at=ago(rng),
                context_length=4096,
                batch_size=8,
                concurrency=2,
                suspect=one_in(rng, 12),
            )
            for gpu_class in classes
            if not one_in(rng, 12)
        )
        sleep = Sleep(asleep_bytes=rng.choice((0, 64, 512)) * MIB, sleep_ms=300, wake_ms=900)
        backoff = Backoff(rng.choice(accelerators).accelerator_id, NOW + seconds(rng.choice((-5, 5))))
        found.append(
            Deployment(
                deployment_id=f"dep-{index}",
                capability=CAPABILITY if index == 0 or one_in(rng, 3) else f"other-{index}@1",
                kind=kind,
                config_hash=f"cfg-{index}",
                envelopes=envelopes,
                context_length=4096,
                batch_size=8,
                load_ms=rng.choice((1000, 8000, 8000, 20000)),
                unload_ms=rng.choice((200, 2000)),
                concurrency=rng.choice((1, 2, 4)),
                interruptible=one_in(rng, 2),
                max_replicas=rng.choice((1, 2, 4)),
                min_memory_bytes=rng.choice((None, 4 * GIB)),
                node_selector={"ram": "32g"} if one_in(rng, 8) else {},
                priority=rng.choice(list(Priority)),
                queue_limit=rng.choice((0, 1, 16)),
                residency=Residency(policy=rng.choice(RESIDENCIES), ttl_seconds=60),
                sleep=sleep if one_in(rng, 2) else None,
                backoff=(backoff,) if one_in(rng, 6) else (),
            )
        )
    return tuple(found)


RESIDENCIES = (
    *(ResidencyPolicy.KEEP_WARM,) * 6,
    ResidencyPolicy.ALWAYS_WARM,
    ResidencyPolicy.LOAD_ON_DEMAND,
    ResidencyPolicy.EXCLUSIVE,
    ResidencyPolicy.LAB_ONLY,
)

STATES = (*(ResidentState.READY,) * 8, *ResidentState)


def random_resident(rng: Random, deployment: Deployment, accelerator: Accelerator) -> Resident:
    state = rng.choice(STATES)
    reserved = max((e.peak_bytes for e in deployment.envelopes), default=GIB) * 11 // 10
    attributed = 0 if state is ResidentState.LOADING and one_in(rng, 2) else reserved * rng.randrange(5, 11) // 10
    return Resident(
        resident_id=f"res-{accelerator.accelerator_id}-{deployment.deployment_id}",
        deployment_id=deployment.deployment_id,
        accelerator_id=accelerator.accelerator_id,
        state=state,
        attributed_bytes=attributed,
        reserved_bytes=reserved,
        loaded_at=ago(rng),
        last_used_at=ago(rng),
        start_ms=deployment.load_ms,
        attribution=Attribution.ESTIMATED if one_in(rng, 8) else Attribution.KNOWN,
        available_at=NOW + seconds(2) if one_in(rng, 8) else None,
        leased_priority=rng.choice((None, *Priority)),
        protected_until=rng.choice((None, None, NOW + seconds(10))),
        running_requests=1 if one_in(rng, 8) else 0,
    )


def random_leases(rng: Random, resident: Resident, names: count[int]) -> list[Lease]:
    if one_in(rng, 2):
        return []
    return [
        Lease(
            lease_id=f"lease-{next(names)}",
            request_id=f"running-{next(names)}",
            deployment_id=resident.deployment_id,
            accelerator_id=resident.accelerator_id,
            priority=rng.choice(list(Priority)),
            reserved_bytes=resident.reserved_bytes,
            materialized_bytes=min(resident.reserved_bytes, resident.attributed_bytes),
            granted_at=ago(rng),
            expires_at=NOW + seconds(rng.choice((-1, 0, 30))),
            preemptions=rng.randrange(4),
        )
        for _ in range(1 + rng.randrange(2))
    ]


def random_queue(rng: Random, deployments: tuple[Deployment, ...], residents: list[Resident]) -> list[QueuedRequest]:
    if not residents:
        return []
    found: list[QueuedRequest] = []
    for index in range(rng.choice((0, 0, 1, 2))):
        place = rng.choice(residents)
        there = [r.resident_id for r in residents if r.accelerator_id == place.accelerator_id and one_in(rng, 2)]
        found.append(
            QueuedRequest(
                request_id=f"queued-{index}",
                capability=rng.choice(deployments).capability,
                priority=rng.choice(list(Priority)),
                enqueued_at=ago(rng),
                waiting_for=WaitingFor(
                    accelerator_id=place.accelerator_id,
                    deployment_id=rng.choice(deployments).deployment_id,
                    reason=rng.choice(WAITING),
                    needed_bytes=rng.choice((1, 4)) * GIB,
                    resident_ids=tuple(there),
                    not_before=rng.choice((None, NOW + seconds(5))),
                ),
            )
        )
    return found


def random_samples(rng: Random, accelerators: list[Accelerator], residents: list[Resident]) -> list[Sample]:
    found: list[Sample] = []
    for accelerator in accelerators:
        ours = sum(r.attributed_bytes for r in residents if r.accelerator_id == accelerator.accelerator_id)
        others = rng.choice((0, 0, 0, 1, 4)) * GIB
        observed_at = NOW - seconds(rng.choice((0, 1, 2, 2, 10, 10, 10, 16)))
        if not one_in(rng, 20):
            found.append(
                Sample(
                    accelerator_id=accelerator.accelerator_id,
                    used_bytes=min(accelerator.total_bytes, ours * rng.choice((9, 10, 10, 10)) // 10 + others),
                    observed_at=observed_at,
                    received_at=observed_at,
                    pressure=rng.choice((*(Pressure.NORMAL,) * 6, *Pressure)),
                )
            )
    return found


def with_less_used(question: Question, rng: Random) -> Question:
    """The same question where other programs, or the drivers, use less of each card."""
    samples = tuple(
        replace(sample, used_bytes=sample.used_bytes * rng.randrange(11) // 10) for sample in question.state.telemetry
    )
    return replace(question, state=replace(question.state, telemetry=samples))
