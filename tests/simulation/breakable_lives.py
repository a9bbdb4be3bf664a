"""A scenario lived through with one breakage at one step, to the end: mended, drained, used again, shut down.

What must hold at every step is checked at every step; what must hold in the end, in the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from gpuledger.domain.accounting import account
from gpuledger.domain.events import (
    LeaseExpired,
    LeaseGranted,
    LeasePreempted,
    LeaseReleased,
    RequestCompleted,
)
from gpuledger.domain.messages import AcceptEnvelope, ClearAccelerator, UncordonNode
from gpuledger.domain.state import Attribution, ResidencyPolicy, ResidentState
from gpuledger.domain.units import MICROS_PER_MS, seconds
from gpuledger.domain.view import view_of
from gpuledger.domain.world import World, fold
from gpuledger.tools.replay import Outcome, Replay

from .breakable_engine import SchedulerKilled
from .breakable_ledger import BreakableLedger
from .breakable_machine import BreakableMachine
from .breakable_scenarios import OPERATOR, POLICY, Act, Scenario
from .breakable_shell import BreakableShell
from .breakages import Breakage, mend
from .virtual_shell import NODE, VirtualShell

#: The longest that any of it may take: retries, back-offs, time limits of adapters and the time to keep a model.
PATIENCE_SECONDS: Final = 900
#: How often it is looked whether everything is over.
LOOK_SECONDS: Final = 5
#: Pressure is over when it has been low for `recovery_seconds`, in samples.
RECOVERY_SECONDS: Final = POLICY.recovery_seconds + 2 * POLICY.sample_interval_seconds


class Missed(Exception):
    """There is nothing to break at this step."""


@dataclass
class Life:
    """`to_come`: acts, by instant, of whichever scheduler runs then."""

    scenario: Scenario
    shell: BreakableShell
    to_come: list[tuple[int, Act]] = field(default_factory=list[tuple[int, Act]])
    broken: bool = True
    restarts: int = 0

    @property
    def ledger(self) -> BreakableLedger:
        return self.shell.store


def undisturbed(scenario: Scenario) -> Life:
    """Lived through without a breakage: `ledger.appends` are its steps."""
    life = _begun(scenario)
    _be_quiet(life)
    return life


def lived(scenario: Scenario, breakage: Breakage, position: int) -> Life:
    """Raises Missed when the breakage finds nothing there, AssertionError when anything does not hold."""
    life = _begun(scenario)
    life.broken = False

    def strike() -> None:
        life.broken = True
        instant = life.shell.now + seconds(breakage.lasts_seconds)
        life.to_come.append((instant, mend))
        life.shell.at(instant, lambda: _act(life, mend))
        if not breakage.strike(life.shell):
            raise Missed

    life.shell.position, life.shell.strike = position, strike
    _be_quiet(life)
    assert life.broken, f"step {position} was not reached"
    _serve_again(life)
    _be_quiet(life)
    _check_processes(life)
    _leave(life)
    _check_end(life)
    return life


# ---- one life ---------------------------------------------------------------------------------------------------


def _begun(scenario: Scenario) -> Life:
    machine = BreakableMachine(scenario.slabs())
    life = Life(scenario, _shell(scenario, BreakableLedger(), machine))
    life.shell.start()
    life.shell.store.appends = 0
    origin = life.shell.now
    life.to_come = [(origin + at * MICROS_PER_MS, act) for at, act in scenario.acts]
    _schedule(life)
    return life


def _shell(
    scenario: Scenario, ledger: BreakableLedger, machine: BreakableMachine, now: int | None = None
) -> BreakableShell:
    shell = BreakableShell(ledger, scenario.models, machine.cards, POLICY, check=check_step, machine=machine)
    shell.now = shell.now if now is None else now
    shell.work_ms = lambda request_id: scenario.work_ms.get(request_id, 800)
    shell.streams = lambda request_id: request_id in scenario.streams
    return shell


def _schedule(life: Life) -> None:
    for instant, act in life.to_come:
        life.shell.at(instant, lambda act=act: _act(life, act))  # type: ignore[misc]


def _act(life: Life, act: Act) -> None:
    """Once, by whichever scheduler runs."""
    due = next((one for one in life.to_come if one[1] is act), None)
    if due is not None:
        life.to_come.remove(due)
        act(life.shell)


def _restart(life: Life, after_seconds: int = 1) -> None:
    old = life.shell
    if old.stopped:
        old.close()
    else:
        old.crash()
    new = _shell(life.scenario, old.store, old.machine, max(old.now, old.world.at) + seconds(after_seconds))
    new.fail_loads, new.load_failure, new.stubborn = old.fail_loads, old.load_failure, old.stubborn
    new.outcomes, new.position, new.strike = old.outcomes, old.position, old.strike
    life.shell, life.restarts = new, life.restarts + 1
    try:
        new.start(measure=False)
    except SchedulerKilled as killed:
        _restart(life, killed.after_seconds)
    else:
        _schedule(life)


def _run(life: Life, duration_seconds: int) -> None:
    until = life.shell.now + seconds(duration_seconds)
    while life.shell.now < until and not life.shell.stopped:
        try:
            life.shell.run_until(until)
        except SchedulerKilled as killed:
            _restart(life, killed.after_seconds)


def _until(life: Life, holds: Callable[[], bool], told: Callable[[], str]) -> None:
    waited_seconds = 0
    while not life.shell.stopped and not holds():
        assert waited_seconds < PATIENCE_SECONDS, told()
        _run(life, LOOK_SECONDS)
        waited_seconds += LOOK_SECONDS


def _what_stays(life: Life) -> list[str]:
    pinned = {m.deployment_id for m in life.scenario.models if m.residency.policy is ResidencyPolicy.ALWAYS_WARM}
    return [
        record.resident.resident_id
        for _, record in life.shell.world.residents()
        if record.resident.deployment_id not in pinned or record.resident.state is not ResidentState.READY
    ]


def _be_quiet(life: Life) -> None:
    """Until nothing is to come, nobody waits, and everything has left whose time is over."""

    def is_quiet() -> bool:
        world = life.shell.world
        return not life.to_come and not world.requests and not list(world.leases()) and not _what_stays(life)

    def told() -> str:
        world = life.shell.world
        residents = [(r.resident.resident_id, r.resident.state.value, r.eviction) for _, r in world.residents()]
        return f"it does not come to rest: {sorted(world.requests)}, {residents}, {len(life.to_come)} acts to come"

    _until(life, is_quiet, told)
    if life.shell.stopped and life.to_come:
        _restart(life)
        _be_quiet(life)


def _serve_again(life: Life) -> None:
    """Mended, every capability answers, by the same scheduler or by the next one."""
    if life.shell.stopped:
        _restart(life)
    shell = life.shell
    shell.fail_loads.clear()
    shell.feed(UncordonNode(OPERATOR, NODE))
    for accelerator_id, state in shell.world.accelerators.items():
        if state.fault is not None:
            shell.feed(ClearAccelerator(OPERATOR, accelerator_id))
    for deployment_id, deployment in shell.world.deployments.items():
        if any(one.envelope.suspect for one in deployment.measured):
            shell.feed(AcceptEnvelope(OPERATOR, deployment_id))
    _run(life, RECOVERY_SECONDS)
    again = [shell.ask(f"again-{name}", name) for name in sorted({model.capability for model in life.scenario.models})]
    _until(life, lambda: all(one.event is not None for one in again), lambda: f"no answer: {again}")
    for outcome in again:
        assert isinstance(outcome.event, RequestCompleted), f"{outcome.capability} is not served again: {outcome.event}"


def _leave(life: Life) -> None:
    life.shell.shut_down()
    assert life.shell.stopped, "the scheduler does not leave"
    life.shell.close()


# ---- what must hold ---------------------------------------------------------------------------------------------


def check_step(shell: VirtualShell) -> None:
    """After every input and all that it made due."""
    assert isinstance(shell, BreakableShell)
    shell.machine.check_promises(shell.world)
    view = view_of(shell.world.state(shell.now))
    for accelerator_id, state in shell.world.accelerators.items():
        pairs = [record.resident.deployment_id for record in state.residents.values()]
        assert len(pairs) == len(set(pairs)), "two residents of one deployment on one accelerator"
        for lease in state.leases.values():
            assert lease.resident_id in state.residents, "a lease on nothing"
            assert lease.lease.request_id in shell.world.requests, "a lease of nobody"
            assert shell.in_trouble or lease.lease.expires_at > shell.now, "a lease that ran out is shown as live"
        for record in state.residents.values():
            assert set(record.awaits) <= set(state.residents), "it waits for what is gone"
            if record.resident.state is ResidentState.LOADING and record.load_started:
                assert not record.awaits, "it loads before its victims are gone"
        accounting = account(view, accelerator_id)
        if accounting.attribution is not Attribution.UNKNOWN:
            assert accounting.schedulable_bytes <= max(0, accounting.full_bytes - accounting.physical_used_bytes)
    for request in shell.world.requests.values():
        assert request.retries <= POLICY.gateway_retries, "retries are bounded"
        assert request.replans <= POLICY.max_replans + 1, "plans are bounded"


def _check_processes(life: Life) -> None:
    """At rest every process is that of a resident, and none works for anybody."""
    for body in life.shell.machine.bodies.values():
        assert body.gone or life.shell.world.find_resident(body.resident_id), f"{body.resident_id} is a ghost process"
        assert body.gone or not body.working, f"{body.resident_id} works for nobody"


def _check_end(life: Life) -> None:
    """Zero, and a ledger that says how it came to that."""
    shell = life.shell
    assert not list(shell.world.residents()), "a stale resident"
    assert not list(shell.world.leases()), "a stale lease"
    assert not shell.world.requests, "somebody waits for ever"
    assert not [body.resident_id for body in shell.machine.bodies.values() if not body.gone], "a ghost process"
    for request_id, outcome in shell.outcomes.items():
        assert outcome.event is not None, f"the client of {request_id} never learned what became of it"
    granted: list[str] = []
    ended: list[str] = []
    events = life.ledger.read(0, life.ledger.head())
    for event in events:
        match event.data:
            case LeaseGranted(lease_id=lease_id):
                granted.append(lease_id)
            case LeaseReleased(lease_id=lease_id) | LeaseExpired(lease_id=lease_id) | LeasePreempted(lease_id=lease_id):
                ended.append(lease_id)
            case _:
                pass  # no beginning and no end of a lease
    assert len(granted) == len(set(granted))
    assert sorted(ended) == sorted(granted), "a lease did not end exactly once"
    assert fold(World(), events) == shell.world, "the fold is not the live state"


def check_replay(life: Life) -> int:
    """Every plan is decided again, and alike. Returns how many there are."""
    replay = Replay(life.ledger, kept=life.shell.world)
    for result in replay.results():
        assert result.outcome is Outcome.MATCH, result
    assert replay.state is not None
    assert replay.state.outcome is Outcome.MATCH
    return replay.counts[Outcome.MATCH]
