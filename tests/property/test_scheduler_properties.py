"""The scheduler under random operations, faults and crashes: whatever the order, the invariants hold."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from gpuledger.adapters.ledger.memory import MemoryLedger
from gpuledger.domain.accounting import account
from gpuledger.domain.events import (
    LeaseExpired,
    LeaseGranted,
    LeasePreempted,
    LeaseReleased,
    PlanDecided,
    RequestReceived,
)
from gpuledger.domain.failures import Failure
from gpuledger.domain.messages import (
    AcceptEnvelope,
    ClearAccelerator,
    CordonNode,
    DrainNode,
    PauseLab,
    ProfilingBegins,
    ProfilingOver,
    ResumeLab,
    RevisePolicy,
    SetResidency,
    UncordonNode,
    UnloadIdle,
)
from gpuledger.domain.planner import plan
from gpuledger.domain.policy import Policy, Priority
from gpuledger.domain.ports import NodeReading, TelemetryFault
from gpuledger.domain.sampling import SampleTaken
from gpuledger.domain.state import Attribution, Health, Residency, ResidencyPolicy, ResidentState, Sleep
from gpuledger.domain.units import GIB, MIB, MICROS_PER_MS, seconds
from gpuledger.domain.view import view_of
from gpuledger.domain.world import World, evolve, fold
from tests.simulation.virtual_shell import NODE, Card, Model, VirtualShell

MODELS = (
    Model("embed", 1 * GIB, 1 * GIB + 200 * MIB, load_ms=2000, priority=Priority.PRODUCTION, concurrency=2),
    Model("chat", 9 * GIB, 11 * GIB, load_ms=9000, concurrency=4, queue_limit=3),
    Model("vision", 7 * GIB, 8 * GIB, load_ms=7000, residency=Residency(ResidencyPolicy.LOAD_ON_DEMAND, 0)),
    Model("batch", 6 * GIB, 7 * GIB, load_ms=5000, priority=Priority.BACKGROUND, interruptible=True),
    Model("alone", 5 * GIB, 6 * GIB, load_ms=3000, residency=Residency(ResidencyPolicy.EXCLUSIVE, 60)),
    Model("pinned", 1 * GIB, 1 * GIB, load_ms=1000, residency=Residency(ResidencyPolicy.ALWAYS_WARM, 0)),
    Model("dozer", 8 * GIB, 9 * GIB, load_ms=6000, sleep=Sleep(1 * GIB, 300, 700), interruptible=True),
    Model("hermit", 4 * GIB, 5 * GIB, load_ms=4000, starts_alone=True),
    Model("spare", 1 * GIB, 2 * GIB, load_ms=1000, fallback_of="chat"),
)
OPERATOR = "olga"
POLICY = replace(Policy(), fair_wait_seconds=5, lease_ttl_seconds=30, max_residents=4)


class Hostile:
    """One run: a seed, one ledger, as many schedulers as it takes."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.ledger = MemoryLedger()
        self.asked = 0
        self.shell = self._shell(VirtualShell(self.ledger, MODELS, self._cards(), POLICY).now)
        self.shell.start()

    def _cards(self) -> tuple[Card, ...]:
        return (Card("GPU-0", 24 * GIB), Card("GPU-1", 16 * GIB))

    def _shell(self, now: int) -> VirtualShell:
        shell = VirtualShell(self.ledger, MODELS, self._cards(), POLICY, now=now, check=invariants)
        shell.work_ms = lambda request_id: 100 + sum(request_id.encode()) * 7919 % 20_000
        shell.streams = lambda request_id: sum(request_id.encode()) % 2 == 0
        return shell

    def step(self) -> None:
        operations = (self.ask,) * 8 + (
            self.leave,
            self.others,
            self.blind,
            self.lose,
            self.crash_runtime,
            self.fail_loads,
            self.stubborn,
            self.operate,
            self.retire,
            self.profile,
        )
        self.draw.choice(operations)()
        if self.draw.randrange(200) == 0:
            self.restart()
        self.shell.run_until(self.shell.now + self.draw.randrange(1, 8000) * MICROS_PER_MS)

    def ask(self) -> None:
        self.asked += 1
        deadline = self.shell.now + seconds(self.draw.randrange(1, 40)) if self.draw.randrange(4) == 0 else None
        self.shell.ask(
            f"r{self.asked}",
            self.draw.choice(MODELS).capability,
            self.draw.choice(tuple(Priority)),
            deadline=deadline,
            lab=self.draw.randrange(9) == 0,
        )

    def leave(self) -> None:
        waiting = [
            key for key, outcome in self.shell.outcomes.items() if outcome.event is None and outcome.began_at is None
        ]
        if waiting:
            self.shell.leave(self.draw.choice(waiting))

    def others(self) -> None:
        card = self.draw.choice(self.shell.cards)
        card.external_bytes = (
            self.draw.randrange(0, (card.total_bytes - self.shell.held_on(card.accelerator_id)) // MIB) * MIB
        )

    def blind(self) -> None:
        card = self.draw.choice(self.shell.cards)
        card.silent = not card.silent

    def lose(self) -> None:
        card = self.draw.choice(self.shell.cards)
        fault = TelemetryFault(card.accelerator_id, "NVML_GPU_LOST", self.draw.choice((None, Health.LOST)))
        self.shell.feed(SampleTaken(NODE, NodeReading((), (fault,), None, 0), {}))

    def crash_runtime(self) -> None:
        alive = [key for key, process in self.shell.processes.items() if not process.gone]
        if alive:
            self.shell.crash_runtime(self.draw.choice(alive))

    def fail_loads(self) -> None:
        self.shell.fail_loads ^= {self.draw.choice(MODELS).deployment_id}
        self.shell.load_failure = self.draw.choice((Failure.MODEL_LOAD_FAILED, Failure.GPU_OOM, Failure.TIMEOUT))

    def stubborn(self) -> None:
        self.shell.stubborn ^= {"dozer"}

    def operate(self) -> None:
        deployment_id = self.draw.choice(MODELS).deployment_id
        residency = Residency(self.draw.choice(tuple(ResidencyPolicy)), self.draw.randrange(0, 300))
        operation = self.draw.choice(
            (
                UnloadIdle(OPERATOR, None),
                CordonNode(OPERATOR, NODE),
                DrainNode(OPERATOR, NODE),
                UncordonNode(OPERATOR, NODE),
                PauseLab(OPERATOR),
                ResumeLab(OPERATOR),
                SetResidency(OPERATOR, deployment_id, residency),
                AcceptEnvelope(OPERATOR, deployment_id),
                ClearAccelerator(OPERATOR, "GPU-0"),
                RevisePolicy(OPERATOR, replace(POLICY, min_residency_loads=self.draw.randrange(3))),
            )
        )
        self.shell.feed(operation)

    def retire(self) -> None:
        gone = (self.draw.choice(self.shell.cards).accelerator_id,) if self.draw.randrange(6) == 0 else ()
        self.shell.feed(SampleTaken(NODE, NodeReading((), (), None, 0, gone=gone), {}))

    def profile(self) -> None:
        accelerator_id = self.draw.choice(self.shell.cards).accelerator_id
        deployment_id = self.draw.choice(MODELS).deployment_id
        self.shell.feed(ProfilingBegins(accelerator_id, deployment_id))
        over = ProfilingOver(accelerator_id, deployment_id, "preempted", "made_way")
        self.shell.after_ms(self.draw.randrange(1, 3000), lambda: self.shell.feed(over))

    def restart(self) -> None:
        self.shell.crash()
        self.shell = self._shell(self.shell.now + MICROS_PER_MS)
        self.shell.start()

    def heal(self) -> None:
        """Faults stop: everything must drain."""
        self.shell.fail_loads.clear()
        self.shell.stubborn.clear()
        self.shell.feed(UncordonNode(OPERATOR, NODE))
        for card in self.shell.cards:
            card.silent, card.external_bytes = False, 0


def invariants(shell: VirtualShell) -> None:
    state = shell.world.state(shell.now)
    view = view_of(state)
    for accelerator_id, accelerator in shell.world.accelerators.items():
        pairs = [record.resident.deployment_id for record in accelerator.residents.values()]
        assert len(pairs) == len(set(pairs)), "two residents of one deployment on one accelerator"
        staying = [record for record in accelerator.residents.values() if record.eviction is None]
        assert len(staying) <= POLICY.max_residents, "more residents than the policy allows"
        for lease in accelerator.leases.values():
            assert lease.resident_id in accelerator.residents, "a lease on nothing"
            assert lease.lease.expires_at > shell.now, "a lease that ran out is shown as live"
            assert lease.lease.request_id in shell.world.requests, "a lease of nobody"
        if accelerator.retired:
            assert all(record.eviction is not None for record in accelerator.residents.values()), "it is no more"
            continue
        accounting = account(view, accelerator_id)
        if accounting.attribution is not Attribution.UNKNOWN:
            assert accounting.schedulable_bytes <= max(0, accounting.full_bytes - accounting.physical_used_bytes)
        for record in accelerator.residents.values():
            assert set(record.awaits) <= set(accelerator.residents), "it waits for what is gone"
            if record.resident.state is ResidentState.LOADING and record.load_started:
                assert not record.awaits, "it loads before its victims are gone"
            if record.resident.state is ResidentState.SLEEPING:
                assert record.asleep, "it sleeps without ever having been put to sleep"
                assert not accelerator.leases_on(record.resident.resident_id), "somebody holds what sleeps"
        starting = [r for r in accelerator.residents.values() if r.resident.state is ResidentState.LOADING]
        begun = [r for r in starting if r.load_started]
        assert len(begun) <= 1 or not any(r.starts_alone for r in begun), "it does not start alone"
    for request in shell.world.requests.values():
        assert request.retries <= 1, "retries are bounded"
        assert request.question.fallback_rank <= 1


@pytest.mark.parametrize("seed", range(8))
def test_random_operations_keep_the_invariants_and_everything_drains(seed: int) -> None:
    run = Hostile(seed)
    for _ in range(250):
        run.step()
    run.heal()
    run.shell.run_for(400)
    assert not run.shell.world.requests, "somebody waits for ever"
    run.shell.shut_down()
    assert run.shell.stopped
    assert not list(run.shell.world.residents())
    assert not list(run.shell.world.leases())

    events = run.ledger.read(0, run.ledger.head())
    assert fold(World(), events) == run.shell.world, "the fold is not the live state"
    ended: set[str] = set()
    granted: set[str] = set()
    for event in events:
        if isinstance(event.data, LeaseGranted):
            granted.add(event.data.lease_id)
        if isinstance(event.data, LeaseReleased | LeaseExpired | LeasePreempted):
            assert event.data.lease_id not in ended, "a lease ended twice"
            ended.add(event.data.lease_id)
    assert granted == ended, "a lease was granted and never ended"


@pytest.mark.parametrize("seed", [100, 101])
def test_every_recorded_plan_is_decided_again_alike(seed: int) -> None:
    run = Hostile(seed)
    for _ in range(150):
        run.step()
    worlds: dict[int, World] = {0: World()}
    world = World()
    questions: dict[str, RequestReceived] = {}
    for event in run.ledger.read(0, run.ledger.head()):
        if isinstance(event.data, RequestReceived):
            questions[event.data.request_id] = event.data
        if isinstance(event.data, PlanDecided):
            then = worlds[event.data.as_of]
            decided = event.data
            known = then.requests.get(decided.request_id)
            question = known.question if known is not None else world.requests[decided.request_id].question
            again = plan(then.state(decided.decided_at), question)
            assert (again.fingerprint, again.verdict) == (decided.fingerprint, decided.verdict)
        world = evolve(world, event)
        worlds[event.seq] = world
