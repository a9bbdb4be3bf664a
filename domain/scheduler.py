"""The application, sans-I/O: an input and the folded state go in, events to append come out (architecture.md).

A shell owns the threads, timers and sockets. It appends what `handle` and `settle` return, folds it, and then carries
out what `agenda` says is wanted. Three rules make that safe:

1. `handle(world, input, now)` answers one thing that happened, in one batch.
2. `settle(world, now)` is called until it returns None: it does, one batch at a time, everything that the state and
   the clock make due (leases that ran out, evictions that are confirmed, the queue in claim order).
3. `agenda(world, now)` is a function of the folded state: every effect follows events that are already durable, and is
   wanted until later events say that it was done. Asking twice is harmless, and after a crash it is simply asked again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, assert_never

from .accounting import is_fresh
from .aggregates.accelerator import AcceleratorState, ResidentRecord
from .aggregates.request import Phase, RequestState
from .breakdowns import leave_retired, resident_failed, suspect_exceeded
from .configuration import apply_configuration, end_earlier_run
from .draft import Draft
from .events import (
    NodeDrainStarted,
    ProfilingEnded,
    ProfilingStarted,
    ReleaseCause,
    RequestCompleted,
    RequestFailed,
    RequestReceived,
    ResidentProcessStarted,
    ResidentReady,
    ResidentWoken,
    SchedulerStopped,
    StreamKind,
    stream_name,
)
from .evictions import must_not_stop_yet, reclaim_deadline
from .failures import Failure
from .faults import note_success, try_again_or_fail
from .grants import decide, give_up, refuse
from .leases import active_on, cancel_request, expire_due, lease_of, record_failure, release, renew
from .messages import (
    Agenda,
    AnswerCutOff,
    ClientGone,
    DrainTimedOut,
    Effect,
    EnvelopeTaken,
    Forward,
    Input,
    LoadRuntime,
    Operation,
    ProfilingBegins,
    ProfilingOver,
    RequestArrived,
    RequestsHeld,
    RuntimeFailed,
    RuntimeReady,
    RuntimeSpawned,
    RuntimeStopped,
    ShutdownRequested,
    SleepRuntime,
    SpawnRuntime,
    Started,
    StopRuntime,
    WakeRuntime,
    WorkEnded,
)
from .operations import apply_operation, finish_node_drains
from .policy import LOADING_SAMPLE_INTERVAL_SECONDS, RENEWALS_PER_TTL
from .ports import Batch
from .queue import Planned, is_due, is_held, is_profiling, next_change, waiting, wants_sample
from .reasons import Reason
from .reclaim import finish_evictions, process_ended
from .residency import drain, drain_deadline, drain_silent, kept_until, let_go, wants_to_be_seen
from .room import room_given_up_at, use_fresh_sample, wants_fresh_sample
from .sampling import SampleTaken, record_sample
from .state import Kind, ResidencyPolicy, ResidentState
from .units import MICROS_PER_MS, milliseconds, seconds
from .world import World

#: The client in whose name the scheduler itself loads what is `always_warm` (semantics.md 7).
SCHEDULER_CLIENT: Final = "gpuledger"
#: Between the two samples that must agree that memory is back: long enough to be two readings, short enough that an
#: eviction is not held up by its proof (memory comes back in tens to hundreds of milliseconds, runtimes.md).
AGREEING_SAMPLES_APART_MS: Final = 100
#: States in which a resident is kept for as long as its residency policy says.
_KEPT: Final = (ResidentState.READY, ResidentState.SLEEPING)


class Scheduler:
    """Decides. It holds no state of its own: `_planned` only remembers which questions it need not ask again."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._planned: dict[str, Planned] = {}

    # ---- one thing that happened ---------------------------------------------------------------------------------

    def handle(self, world: World, happened: Input, now: int, *, attempt: int = 0) -> Batch | None:
        """The events of one input. `attempt` counts how often its batch was in conflict (semantics.md 7)."""
        draft = Draft(world, now)
        if isinstance(happened, Operation):
            apply_operation(draft, happened)
            return draft.batch()
        match happened:
            case RequestArrived():
                self._arrived(draft, happened, attempt)
            case WorkEnded():
                _work_ended(draft, happened)
            case AnswerCutOff():
                _cut_off(draft, happened)
            case ClientGone():
                cancel_request(draft, happened.request_id, "client_gone")
            case RequestsHeld():
                renew(draft, happened.request_ids)
            case SampleTaken():
                record_sample(draft, happened)
                leave_retired(draft)
                suspect_exceeded(draft)
                drain_silent(draft, {key for key, figures in happened.figures.items() if figures.busy is not None})
                finish_evictions(draft)
                use_fresh_sample(draft)
            case RuntimeSpawned() | RuntimeReady() | RuntimeFailed() | RuntimeStopped():
                _runtime(draft, happened)
            case EnvelopeTaken():
                measured = happened.measured
                draft.emit(stream_name(StreamKind.DEPLOYMENT, measured.deployment_id), measured)
            case Started():
                end_earlier_run(draft, self._node_id)
                apply_configuration(draft, happened.configuration)
            case ShutdownRequested():
                _start_drain(draft, happened.node_id)
            case DrainTimedOut():
                for request_id in sorted(world.requests):
                    cancel_request(draft, request_id, "shutdown")
            case ProfilingBegins():
                _begin_profiling(draft, happened)
            case ProfilingOver():
                _end_profiling(draft, happened)
            case _:
                assert_never(happened)
        return draft.batch()

    def _arrived(self, draft: Draft, arrived: RequestArrived, attempt: int) -> None:
        request = _receive(draft, arrived, draft.world.policy.max_queue_seconds)
        if attempt > draft.world.policy.max_replans:
            refuse(draft, request, Reason.LEASE_CONFLICT, "max_replans")
        elif not is_profiling(draft.base) and not (is_held(draft.base, draft.now) and waiting(draft.base)):
            decide(draft, request)

    # ---- everything that is due ----------------------------------------------------------------------------------

    def settle(self, world: World, now: int, *, attempt: int = 0) -> Batch | None:
        """The next batch that the state and the clock make due; None when nothing is."""
        draft = Draft(world, now)
        self._housekeeping(draft)
        if (batch := draft.batch()) is not None:
            return batch
        self._planned = {key: value for key, value in self._planned.items() if key in world.requests}
        return self._plan_next(world, now, attempt)

    def _housekeeping(self, draft: Draft) -> None:
        for accelerator_id, resident_id in expire_due(draft):
            drain(draft, accelerator_id, resident_id, "lease_expired")
        leave_retired(draft)
        finish_evictions(draft)
        use_fresh_sample(draft)
        _finish_warming(draft)
        let_go(draft)
        _give_up_waiting(draft)
        _keep_always_warm(draft)
        finish_node_drains(draft)
        _finish_shutdown(draft, self._node_id)

    def _plan_next(self, world: World, now: int, attempt: int) -> Batch | None:
        """Plan who waits, in claim order, up to the first decision: the next one is made on what it left."""
        if is_held(world, now):
            return None
        for request in waiting(world):
            request_id = request.question.request_id
            if request.held_by is not None and world.find_resident(request.held_by) is not None:
                continue
            if not is_due(world, request, self._planned.get(request_id), now):
                continue
            draft = Draft(world, now)
            if attempt > world.policy.max_replans or request.replans > world.policy.max_replans:
                refuse(draft, request, Reason.LEASE_CONFLICT, "max_replans")
            else:
                decide(draft, request)
            if (batch := draft.batch()) is not None:
                return batch
            self._planned[request_id] = Planned(world.queue_revision, _later(next_change(request), now))
        return None

    # ---- what is wanted ------------------------------------------------------------------------------------------

    def agenda(self, world: World, now: int) -> Agenda:
        """Everything that the folded state wants of the world."""
        effects: list[Effect] = []
        busy = False
        for state, record in world.residents():
            effects.extend(_of_resident(world, state, record))
            busy = busy or record.resident.state not in (ResidentState.READY, ResidentState.SLEEPING)
        effects.extend(_forwards(world, now))
        # A total that changed is believed when it stays (sampling.py): until then the accelerator takes no work.
        busy = busy or any(state.changed_total is not None for state in world.accelerators.values())
        interval = LOADING_SAMPLE_INTERVAL_SECONDS if busy else world.policy.sample_interval_seconds
        node = world.nodes.get(self._node_id)
        return Agenda(
            effects=tuple(effects),
            wake_at=_wake_at(world, now),
            sample_after=_sample_after(world),
            sample_interval_ms=interval * 1000,
            stopped=node is not None and node.draining_for_shutdown and not node.running,
        )


# ---- requests ---------------------------------------------------------------------------------------------------


def _receive(draft: Draft, arrived: RequestArrived, max_queue_seconds: int) -> RequestState:
    """It waits up to its deadline, or `max_queue_seconds` where it names none."""
    until = arrived.requested_at + seconds(max_queue_seconds)
    draft.on_request(
        arrived.request_id,
        RequestReceived(
            request_id=arrived.request_id,
            client_id=arrived.client_id,
            capability=arrived.capability,
            priority=arrived.priority,
            lab=arrived.lab,
            requested_at=arrived.requested_at,
            deadline=arrived.deadline,
            queue_until=until if arrived.deadline is None else arrived.deadline,
            operation=arrived.operation,
            body_bytes=arrived.body_bytes,
            content_mac=arrived.content_mac,
        ),
    )
    return draft.world.requests[arrived.request_id]


def _work_ended(draft: Draft, ended: WorkEnded) -> None:
    request = draft.world.requests.get(ended.request_id)
    if request is None:
        return  # it was ended already: its lease ran out, or it was cancelled
    if ended.unsent and (request.lease_id is None or ended.lease_id not in (None, request.lease_id)):
        return  # it was put back meanwhile, and is tried again as it is
    record = lease_of(draft.world, request)
    if record is not None and ended.failure is Failure.GPU_OOM:
        _out_of_memory(draft, ended, record.resident_id)
        return
    if record is not None:
        release(draft, record.lease.accelerator_id, record, _cause_of(ended), used=True)
    if ended.client_gone:
        cancel_request(draft, ended.request_id, "client_gone")
        return
    if ended.failure is not None:
        if record is not None:
            record_failure(draft, record.lease, record.resident_id, ended.failure, ended.detail)
            if ended.failure is Failure.TIMEOUT:  # whatever it does, it may do it for ever: no new work, then the end
                drain(draft, record.lease.accelerator_id, record.resident_id, "no_answer_in_time")
        if ended.unsent:
            try_again_or_fail(draft, ended.request_id, ended.failure, ended.detail, resident_id=request.resident_id)
        else:
            failed = RequestFailed(ended.request_id, draft.now, None, ended.failure, ended.detail)
            draft.on_request(ended.request_id, failed)
        return
    draft.on_request(ended.request_id, _completed(draft, request, ended))
    note_success(draft, request.question.capability)


def _out_of_memory(draft: Draft, ended: WorkEnded, resident_id: str) -> None:
    """A runtime that answers so is in no state to go on: it is ended, so that its memory is seen to be back (8)."""
    if not ended.unsent:
        failed = RequestFailed(ended.request_id, draft.now, None, ended.failure, ended.detail)
        draft.on_request(ended.request_id, failed)
    resident_failed(draft, resident_id, Failure.GPU_OOM, ended.detail, "")


def _cut_off(draft: Draft, cut: AnswerCutOff) -> None:
    """Part of its answer was sent, so it cannot be begun again: what it was put back for ends it."""
    request = draft.world.requests.get(cut.request_id)
    if request is None:
        return
    if (record := lease_of(draft.world, request)) is not None:
        release(draft, record.lease.accelerator_id, record, ReleaseCause.FAILED, used=False)
    failed = RequestFailed(cut.request_id, draft.now, cut.reason, cut.failure, cut.detail)
    draft.on_request(cut.request_id, failed)


def _cause_of(ended: WorkEnded) -> ReleaseCause:
    if ended.client_gone:
        return ReleaseCause.CLIENT_GONE
    return ReleaseCause.COMPLETED if ended.failure is None else ReleaseCause.FAILED


def _completed(draft: Draft, request: RequestState, ended: WorkEnded) -> RequestCompleted:
    total_ms = (draft.now - request.question.requested_at) // MICROS_PER_MS
    return RequestCompleted(
        request_id=ended.request_id,
        completed_at=draft.now,
        status=ended.status,
        queued_ms=max(0, total_ms - ended.served_ms),
        served_ms=ended.served_ms,
        response_bytes=ended.response_bytes,
        prompt_tokens=ended.prompt_tokens,
        completion_tokens=ended.completion_tokens,
    )


def _give_up_waiting(draft: Draft) -> None:
    """Who has waited as long as it may is refused for what it waits for."""
    for request in waiting(draft.world):
        # With a deadline of its own the planner says so itself, with figures (6.3, rule 1).
        if request.question.deadline is None and request.queue_until <= draft.now:
            give_up(draft, request, request.last_reason, "max_queue_seconds")


# ---- always warm ------------------------------------------------------------------------------------------------


def _keep_always_warm(draft: Draft) -> None:
    """Ask for what should be loaded and is not, as any client would, and not more often than a request may wait."""
    if any(node.leaves or node.cordoned for node in draft.world.nodes.values()):
        return
    for deployment_id, deployment in sorted(draft.world.deployments.items()):
        spec = deployment.spec
        if deployment.retired or spec.residency.policy is not ResidencyPolicy.ALWAYS_WARM:
            continue
        if deployment.corrupt is not None or all(one.envelope.suspect for one in deployment.measured):
            continue
        if any(record.resident.deployment_id == deployment_id for _, record in draft.world.residents()):
            continue
        if not _is_seen(draft, spec.kind):
            continue
        asked_at = draft.world.warmed_at.get(spec.capability)
        if asked_at is not None and draft.now < asked_at + seconds(draft.world.policy.max_queue_seconds):
            continue
        request_id = f"warm-{deployment_id}-{draft.world.seq + 1}"
        draft.on_request(
            request_id,
            RequestReceived(
                request_id=request_id,
                client_id=SCHEDULER_CLIENT,
                capability=spec.capability,
                priority=spec.priority,
                lab=False,
                requested_at=draft.now,
                deadline=None,
                queue_until=draft.now + seconds(draft.world.policy.max_queue_seconds),
                operation="warm",
                body_bytes=0,
                content_mac=None,
            ),
        )


def _is_seen(draft: Draft, kind: Kind) -> bool:
    """Whether something of this kind is known now: after a start it takes a sample, and asking before it is in vain."""
    for state in draft.world.accelerators.values():
        sample = None if state.retired or state.accelerator.kind is not kind else state.sample
        if sample is not None and is_fresh(draft.world.policy, sample.observed_at, sample.received_at, draft.now):
            return True
    return False


def _finish_warming(draft: Draft) -> None:
    """A lease that was only there to load a model ends when the model is ready."""
    for _, request in sorted(draft.world.requests.items()):
        if request.operation != "warm" or not _may_begin(draft.world, request, draft.now):
            continue
        ended = WorkEnded(request.question.request_id, 200, 0, 0, None, None, None, "", client_gone=False)
        _work_ended(draft, ended)


# ---- runtimes ---------------------------------------------------------------------------------------------------


def _runtime(draft: Draft, happened: RuntimeSpawned | RuntimeReady | RuntimeFailed | RuntimeStopped) -> None:
    found = draft.world.find_resident(happened.resident_id)
    if found is None:
        return
    state, record = found
    accelerator_id = state.accelerator.accelerator_id
    match happened:
        case RuntimeSpawned(process=process):
            if record.process is None and record.eviction is None:
                started = ResidentProcessStarted(
                    happened.resident_id, process.pid, process.start_ticks, process.boot_id
                )
                draft.on_accelerator(accelerator_id, started)
        case RuntimeReady():
            if record.resident.state is ResidentState.LOADING:
                start_ms = max(0, draft.now - record.resident.loaded_at) // MICROS_PER_MS
                ready = ResidentWoken if record.asleep else ResidentReady
                draft.on_accelerator(accelerator_id, ready(happened.resident_id, draft.now, start_ms))
        case RuntimeFailed():
            resident_failed(draft, happened.resident_id, happened.failure, happened.detail, happened.evidence_sha256)
        case RuntimeStopped():
            process_ended(draft, happened.resident_id)
        case _:
            assert_never(happened)


# ---- measuring by itself ----------------------------------------------------------------------------------------


def _begin_profiling(draft: Draft, begins: ProfilingBegins) -> None:
    """Only while nothing is wanted and nothing is there: what is measured is measured alone (runtimes.md)."""
    state = draft.world.accelerators.get(begins.accelerator_id)
    deployment = draft.world.deployments.get(begins.deployment_id)
    if state is None or state.retired or deployment is None or deployment.retired or is_profiling(draft.world):
        return
    node = draft.world.nodes.get(state.node_id)
    if draft.world.requests or state.residents or state.leases or node is None or node.leaves or node.cordoned:
        return
    started = ProfilingStarted(begins.accelerator_id, begins.deployment_id, draft.now)
    draft.on_accelerator(begins.accelerator_id, started)


def _end_profiling(draft: Draft, over: ProfilingOver) -> None:
    state = draft.world.accelerators.get(over.accelerator_id)
    if state is not None and state.profiling == over.deployment_id:
        ended = ProfilingEnded(over.accelerator_id, over.deployment_id, draft.now, over.outcome, over.detail)
        draft.on_accelerator(over.accelerator_id, ended)


# ---- shutdown ---------------------------------------------------------------------------------------------------


def _start_drain(draft: Draft, node_id: str) -> None:
    node = draft.world.nodes.get(node_id)
    if node is not None and not node.draining_for_shutdown:
        draft.emit(stream_name(StreamKind.NODE, node_id), NodeDrainStarted(node_id, "shutdown"))


def _finish_shutdown(draft: Draft, node_id: str) -> None:
    """Residency and leases are zero: the scheduler has left."""
    node = draft.world.nodes.get(node_id)
    if node is None or not node.draining_for_shutdown or not node.running:
        return
    if draft.world.requests or any(True for _ in draft.world.residents()):
        return
    draft.emit(stream_name(StreamKind.LEDGER), SchedulerStopped(node_id))


# ---- the agenda -------------------------------------------------------------------------------------------------


def _of_resident(world: World, state: AcceleratorState, record: ResidentRecord) -> tuple[Effect, ...]:
    resident = record.resident
    if record.eviction is not None:
        if must_not_stop_yet(world, state, record):
            return ()
        if record.eviction.sleeps:
            return (SleepRuntime(resident.resident_id),)
        return (StopRuntime(resident.resident_id, record.process, world.policy.stop_grace_seconds),)
    if resident.state is not ResidentState.LOADING or not record.load_started:
        return ()
    if record.asleep:
        return (WakeRuntime(resident.resident_id),)
    if record.process is None:
        accelerator_id = state.accelerator.accelerator_id
        return (SpawnRuntime(resident.resident_id, resident.deployment_id, accelerator_id),)
    return (LoadRuntime(resident.resident_id),)


def _forwards(world: World, now: int) -> tuple[Forward, ...]:
    return tuple(
        Forward(request.question.request_id, request.lease_id, request.resident_id, resident.resident.deployment_id)
        for _, request in sorted(world.requests.items())
        if request.operation != "warm"
        and request.lease_id is not None
        and request.resident_id is not None
        and (resident := _ready_resident(world, request, now)) is not None
    )


def _may_begin(world: World, request: RequestState, now: int) -> bool:
    return _ready_resident(world, request, now) is not None


def _ready_resident(world: World, request: RequestState, now: int) -> ResidentRecord | None:
    """Its resident, when work may begin: READY, room shown, no eviction it waits for unfinished (semantics.md 7)."""
    if request.phase is not Phase.GRANTED or request.accelerator_id is None:
        return None
    state = world.accelerators[request.accelerator_id]
    lease = state.leases.get(request.lease_id or "")
    if lease is None or lease.lease.expires_at <= now or not lease.room_confirmed:
        return None
    record = state.residents.get(lease.resident_id)
    if record is None or record.awaits or record.resident.state is not ResidentState.READY:
        return None
    return record


def _sample_after(world: World) -> int | None:
    wanted = [wants_sample(world)]
    for state in world.accelerators.values():
        if state.retired or state.missed is not None:
            continue
        observed_at = None if state.sample is None else state.sample.observed_at
        fresh_after = wants_fresh_sample(state)
        if fresh_after is not None and (observed_at is None or observed_at <= fresh_after):
            wanted.append(fresh_after)
        if observed_at is not None and any(_half_confirmed(record) for record in state.residents.values()):
            wanted.append(observed_at + milliseconds(AGREEING_SAMPLES_APART_MS))
        wanted.extend(_to_be_seen(world, state))
    return max((instant for instant in wanted if instant is not None), default=None)


def _to_be_seen(world: World, state: AcceleratorState) -> Iterator[int | None]:
    """What leaves as soon as its use is over is to be seen before."""
    for record in state.residents.values():
        deployment = world.deployments.get(record.resident.deployment_id)
        leaves = deployment is None or deployment.spec.residency.policy is ResidencyPolicy.LOAD_ON_DEMAND
        if leaves and record.eviction is None and not state.leases_on(record.resident.resident_id):
            yield wants_to_be_seen(state, record)


def _half_confirmed(record: ResidentRecord) -> bool:
    """Another sample soon may show that it is over."""
    eviction = record.eviction
    return eviction is not None and (eviction.gone_samples > 0 or eviction.gone_at is not None)


def _wake_at(world: World, now: int) -> int | None:
    """The earliest instant at which time alone makes something due."""
    instants: list[int | None] = []
    instants.extend(lease.lease.expires_at for _, lease in world.leases())
    for state, record in world.residents():
        if record.eviction is not None:
            instants.append(reclaim_deadline(world.policy, record.eviction.started_at))
        elif record.resident.state is ResidentState.DRAINING and record.drain_started_at is not None:
            instants.append(drain_deadline(world.policy, record.drain_started_at))
        elif record.resident.state in _KEPT and not active_on(state, record.resident.resident_id, now):
            instants.append(kept_until(Draft(world, now), record))
            seen = wants_to_be_seen(state, record)
            instants.append(None if seen is None else seen + seconds(world.policy.telemetry_max_age_seconds) + 1)
    instants.extend(room_given_up_at(world.policy, state) for state in world.accelerators.values())
    for request in waiting(world):
        instants.append(request.queue_until if request.question.deadline is None else None)
        instants.append(next_change(request))
    pause = seconds(world.policy.max_queue_seconds)
    instants.extend(asked_at + pause for asked_at in world.warmed_at.values())
    if waiting(world):
        patience = seconds(world.policy.telemetry_max_age_seconds) + 1
        released = (state.released_at for state in world.accelerators.values())
        instants.extend(instant + patience for instant in released if instant is not None)
    return min((instant for instant in instants if instant is not None and instant > now), default=None)


def _later(instant: int | None, now: int) -> int | None:
    return instant if instant is not None and instant > now else None


def renewal_interval_ms(lease_ttl_seconds: int) -> int:
    """How often a shell should say RequestsHeld (semantics.md 10)."""
    return lease_ttl_seconds * 1000 // RENEWALS_PER_TTL // 2
