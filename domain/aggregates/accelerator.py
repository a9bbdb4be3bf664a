"""One accelerator: its residents, its leases, its newest sample (semantics.md 1, 2, 7)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias, TypeVar, assert_never

from ..events import (
    AcceleratorHealthChanged,
    AcceleratorRegistered,
    AcceleratorRetired,
    AcceleratorRevised,
    EvictionCause,
    EvictionStarted,
    LeaseExpired,
    LeaseGranted,
    LeasePreempted,
    LeaseReleased,
    LeaseRenewed,
    LeaseRoomConfirmed,
    MemoryNotReclaimed,
    PressureChanged,
    ProfilingEnded,
    ProfilingStarted,
    ResidencyMaterialized,
    ResidentDrainStarted,
    ResidentEvicted,
    ResidentFailed,
    ResidentLoadStarted,
    ResidentProcessStarted,
    ResidentReady,
    ResidentSlept,
    ResidentWoken,
    SampledAccelerator,
    SampledResident,
    ThrashingDetected,
)
from ..policy import Pressure, Priority
from ..ports import HealthFault, ProcessIdentity
from ..pressure import PressureTrack
from ..state import Accelerator, Lease, Resident, ResidentState, Sample

_V = TypeVar("_V")

AcceleratorEvent: TypeAlias = (
    AcceleratorRegistered
    | AcceleratorRevised
    | AcceleratorRetired
    | AcceleratorHealthChanged
    | PressureChanged
    | LeaseGranted
    | LeaseRenewed
    | LeaseRoomConfirmed
    | ResidencyMaterialized
    | LeaseReleased
    | LeaseExpired
    | LeasePreempted
    | ResidentLoadStarted
    | ResidentProcessStarted
    | ResidentReady
    | ResidentSlept
    | ResidentWoken
    | ResidentDrainStarted
    | EvictionStarted
    | ThrashingDetected
    | ProfilingStarted
    | ProfilingEnded
    | ResidentEvicted
    | MemoryNotReclaimed
    | ResidentFailed
)


#: Faults of the device itself: they stand until an operator clears them, whatever later samples say.
_LATCHED: Final = re.compile(r"ECC_UNCORRECTED|ROW_REMAP_FAILED|XID_[0-9]+")
#: Of evictions that made room for another deployment so many are remembered: enough to see who evicts whom.
MAX_DISPLACEMENTS: Final = 64
#: Pairs that thrash, of which the newest are shown.
MAX_THRASHING: Final = 16


@dataclass(frozen=True, slots=True)
class Eviction:
    """An eviction under way, and the evidence so far that it is finished (semantics.md 7).

    With `sleeps` the process stays, and it is finished when no more than `left_bytes` are shown. `gone_at`: when a
    sample first showed that the process has gone.
    """

    cause: EvictionCause
    started_at: int
    attributed_bytes: int
    used_bytes: int | None
    by_lease_id: str | None
    gone_samples: int = 0
    sleeps: bool = False
    left_bytes: int = 0
    gone_at: int | None = None


@dataclass(frozen=True, slots=True)
class Displacement:
    """One resident that left to make room for another deployment."""

    evictor: str
    victim: str
    at: int


@dataclass(frozen=True, slots=True)
class ResidentRecord:
    """A resident as the planner sees it, and what only the lifecycle needs.

    `awaits`: residents whose evictions its reservation waits for. `clear_at`: when the last of them was finished (or
    the grant was made); only a sample observed after it is fresh. `load_base_bytes`: `used` when its load began, less
    what it held then. `asleep`: its process sleeps, and is woken rather than loaded. `starts_alone`: no other may start
    or stop on its accelerator while it does.
    """

    resident: Resident
    awaits: tuple[str, ...] = ()
    clear_at: int = 0
    load_started: bool = False
    load_base_bytes: int = 0
    process: ProcessIdentity | None = None
    drain_started_at: int | None = None
    eviction: Eviction | None = None
    alive: bool = False
    asleep: bool = False
    starts_alone: bool = False
    waiting_requests: int | None = None
    cache_use_bp: int | None = None

    @property
    def waits_to_load(self) -> bool:
        """Granted, and not begun: only a fresh sample lets its load or wake begin (semantics.md 7)."""
        return self.resident.state is ResidentState.LOADING and not self.load_started


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """A lease, the resident it is on, and whether room for it was shown (semantics.md 7)."""

    lease: Lease
    resident_id: str
    needed_bytes: int
    room_confirmed: bool


@dataclass(frozen=True, slots=True)
class AcceleratorState:
    """`failures` counts failed loads in a row per deployment; `generations` numbers the residents of a deployment.

    `released_at`: when work last ended here; the queue is not planned on a sample from before it (semantics.md 7).
    `changed_total`: a total that differs from the registered one, and in how many samples in a row. `fault`: of the
    device itself, not yet cleared; `cleared`: by cause the mark up to which an operator did. `blind`: why memory is not
    attributed by process. `profiling`: the deployment whose envelope is being measured here.
    """

    accelerator: Accelerator
    node_id: str
    device_name: str = ""
    driver_version: str = ""
    retired: bool = False
    residents: Mapping[str, ResidentRecord] = field(default_factory=dict[str, ResidentRecord])
    leases: Mapping[str, LeaseRecord] = field(default_factory=dict[str, LeaseRecord])
    sample: Sample | None = None
    track: PressureTrack | None = None
    pressure_bp: int = 0
    foreign_processes: int = 0
    missed: str | None = None
    invalid: str | None = None
    changed_total: tuple[int, int] | None = None
    released_at: int | None = None
    backoff: Mapping[str, int] = field(default_factory=dict[str, int])
    failures: Mapping[str, int] = field(default_factory=dict[str, int])
    generations: Mapping[str, int] = field(default_factory=dict[str, int])
    health_cause: str = ""
    fault: HealthFault | None = None
    cleared: Mapping[str, int] = field(default_factory=dict[str, int])
    blind: str | None = None
    profiling: str | None = None
    displacements: tuple[Displacement, ...] = ()
    thrashing: tuple[ThrashingDetected, ...] = ()

    def resident_of(self, deployment_id: str) -> ResidentRecord | None:
        """The one resident of a deployment here, if any (semantics.md 2)."""
        for record in self.residents.values():
            if record.resident.deployment_id == deployment_id:
                return record
        return None

    def leases_on(self, resident_id: str) -> tuple[LeaseRecord, ...]:
        return tuple(record for record in self.leases.values() if record.resident_id == resident_id)


def register(event: AcceleratorRegistered) -> AcceleratorState:
    """A device as it was first seen."""
    return AcceleratorState(
        accelerator=Accelerator(
            accelerator_id=event.accelerator_id,
            index=event.index,
            kind=event.kind,
            gpu_class=event.gpu_class,
            total_bytes=event.total_bytes,
        ),
        node_id=event.node_id,
        device_name=event.device_name,
        driver_version=event.driver_version,
    )


def evolve(state: AcceleratorState, event: AcceleratorEvent) -> AcceleratorState:
    """The state after one event of its stream. Total: an event that fits no state leaves it as it is."""
    match event:
        case AcceleratorRegistered() | AcceleratorRevised():
            return _described(state, event)
        case AcceleratorRetired():
            return replace(state, retired=True, sample=None, track=None)
        case AcceleratorHealthChanged():
            return _health_changed(state, event)
        case PressureChanged():
            return state  # the level itself is folded from the samples; this event moves the version of the stream
        case LeaseGranted():
            return _granted(state, event)
        case LeaseRenewed() | LeaseRoomConfirmed():
            return _with_lease(state, event.lease_id, event)
        case LeaseReleased():
            return _released(state, event)
        case LeaseExpired() | LeasePreempted():
            return _sleeps_on(replace(state, leases=_without(state.leases, event.lease_id)), event.resident_id)
        case ResidentLoadStarted():
            return _load_started(state, event)
        case ResidentProcessStarted():
            process = ProcessIdentity(event.pid, event.start_ticks, event.boot_id)
            return _update(state, event.resident_id, process=process, alive=True)
        case ResidencyMaterialized():
            return _materialized(state, event)
        case ResidentReady():
            return _ready(state, event.resident_id, event.ready_at, event.load_ms)
        case ResidentSlept():
            return _slept(state, event)
        case ResidentWoken():
            return _ready(state, event.resident_id, event.woken_at, event.wake_ms)
        case ResidentDrainStarted():
            drained = _move(state, event.resident_id, ResidentState.DRAINING)
            return _update(drained, event.resident_id, drain_started_at=event.started_at)
        case EvictionStarted():
            return _eviction_started(state, event)
        case ThrashingDetected():
            return _thrashing(state, event)
        case ProfilingStarted():
            return replace(state, profiling=event.deployment_id)
        case ProfilingEnded():
            return replace(state, profiling=None)
        case ResidentEvicted() | MemoryNotReclaimed():
            return _gone(state, event.resident_id, event.finished_at)
        case ResidentFailed():
            return _failed(state, event)
        case _:
            assert_never(event)


def observe(
    state: AcceleratorState, sampled: SampledAccelerator, observed_at: int, received_at: int
) -> AcceleratorState:
    """The state after a sample. What is INVALID is recorded, not used: what was known grows stale (semantics.md 1)."""
    if sampled.invalid is not None:
        return _observe_invalid(state, sampled)
    residents = dict(state.residents)
    for seen in sampled.residents:
        record = residents.get(seen.resident_id)
        if record is not None:
            residents[seen.resident_id] = _seen(record, seen, observed_at)
    return replace(
        state,
        residents=residents,
        sample=Sample(
            accelerator_id=sampled.accelerator_id,
            used_bytes=sampled.used_bytes,
            observed_at=observed_at,
            received_at=received_at,
            pressure=sampled.pressure,
        ),
        track=PressureTrack(sampled.pressure, sampled.recovering_since, observed_at),
        pressure_bp=sampled.pressure_bp,
        foreign_processes=sampled.foreign_processes,
        missed=None,
        invalid=None,
        changed_total=None,
        blind=sampled.blind,
    )


def miss(state: AcceleratorState, code: str) -> AcceleratorState:
    """After a reading that failed nothing is known: no old value stands in (semantics.md 1)."""
    return replace(state, sample=None, missed=code)


def _seen(record: ResidentRecord, seen: SampledResident, observed_at: int) -> ResidentRecord:
    """A resident as a sample shows it. Most show it as the one before did, and samples are most of a ledger."""
    known, eviction = record.resident, record.eviction
    told = (record.waiting_requests, record.cache_use_bp)
    as_known = (known.attributed_bytes, known.attribution, known.running_requests, record.alive, *told)
    shown = (seen.attributed_bytes, seen.attribution, seen.running_requests, seen.alive)
    if eviction is None and as_known == (*shown, seen.waiting_requests, seen.cache_use_bp):
        return record
    resident = replace(
        known,
        attributed_bytes=seen.attributed_bytes,
        attribution=seen.attribution,
        running_requests=seen.running_requests,
    )
    if eviction is not None:
        eviction = replace(
            eviction,
            gone_samples=eviction.gone_samples + 1 if _is_done(eviction, seen) else 0,
            gone_at=observed_at if eviction.gone_at is None and not seen.alive else eviction.gone_at,
        )
    return replace(
        record,
        resident=resident,
        alive=seen.alive,
        eviction=eviction,
        waiting_requests=seen.waiting_requests,
        cache_use_bp=seen.cache_use_bp,
    )


def _is_done(eviction: Eviction, seen: SampledResident) -> bool:
    """Whether a sample shows what the eviction is for: a process that is gone, or one that holds little."""
    if eviction.sleeps:
        return seen.alive and seen.attributed_bytes <= eviction.left_bytes
    return not seen.alive and seen.attributed_bytes == 0


def forget_sample(state: AcceleratorState) -> AcceleratorState:
    """Before the first sample of a run of the scheduler. The level of pressure stands; its evidence ages by itself."""
    return replace(state, sample=None, missed=None, invalid=None, changed_total=None, profiling=None)


# ---- one function per event -------------------------------------------------------------------------------------


def _described(state: AcceleratorState, event: AcceleratorRegistered | AcceleratorRevised) -> AcceleratorState:
    accelerator = replace(
        state.accelerator, index=event.index, gpu_class=event.gpu_class, total_bytes=event.total_bytes
    )
    described = replace(
        state,
        accelerator=accelerator,
        device_name=event.device_name,
        driver_version=event.driver_version,
        retired=False,
        changed_total=None,
    )
    if event.total_bytes == state.accelerator.total_bytes:
        return described
    # The level of pressure was that of another size: the next sample judges anew, from NORMAL.
    sample = None if state.sample is None else replace(state.sample, pressure=Pressure.NORMAL)
    return replace(described, sample=sample, track=None, invalid=None)


def _granted(state: AcceleratorState, event: LeaseGranted) -> AcceleratorState:
    lease = Lease(
        lease_id=event.lease_id,
        request_id=event.request_id,
        deployment_id=event.deployment_id,
        accelerator_id=event.accelerator_id,
        priority=event.priority,
        reserved_bytes=event.reserved_bytes,
        materialized_bytes=event.materialized_bytes,
        granted_at=event.granted_at,
        expires_at=event.expires_at,
        preemptions=event.preemptions,
    )
    record = state.residents.get(event.resident_id)
    if record is None:
        record = _new_resident(event)
    elif event.start == "wake":
        record = _waking(record, event)
    else:
        record = _joined(record, event)
    confirmed = event.start != "warm" or event.needed_bytes == 0
    generations = dict(state.generations)
    if event.start == "cold":
        generations[event.deployment_id] = generations.get(event.deployment_id, 0) + 1
    return replace(
        state,
        residents={**state.residents, event.resident_id: record},
        leases={
            **state.leases,
            event.lease_id: LeaseRecord(lease, event.resident_id, event.needed_bytes, confirmed),
        },
        generations=generations,
    )


def _new_resident(event: LeaseGranted) -> ResidentRecord:
    return ResidentRecord(
        resident=Resident(
            resident_id=event.resident_id,
            deployment_id=event.deployment_id,
            accelerator_id=event.accelerator_id,
            state=ResidentState.LOADING,
            attributed_bytes=0,
            reserved_bytes=event.reserved_bytes,
            loaded_at=event.loaded_at,
            last_used_at=event.granted_at,
            start_ms=event.start_ms,
            leased_priority=event.priority,
        ),
        awaits=event.awaits,
        clear_at=event.granted_at,
        starts_alone=event.starts_alone,
    )


def _waking(record: ResidentRecord, event: LeaseGranted) -> ResidentRecord:
    """A wake turns its resident LOADING, so whoever asks next joins it (semantics.md 2)."""
    resident = replace(
        record.resident,
        state=ResidentState.LOADING,
        reserved_bytes=event.reserved_bytes,
        loaded_at=event.loaded_at,
        start_ms=event.start_ms,
        leased_priority=more_important(record.resident.leased_priority, event.priority),
    )
    awaits, clear_at = (*record.awaits, *event.awaits), event.granted_at
    return replace(record, resident=resident, awaits=awaits, clear_at=clear_at, load_started=False)


def _joined(record: ResidentRecord, event: LeaseGranted) -> ResidentRecord:
    resident = replace(
        record.resident,
        reserved_bytes=max(record.resident.reserved_bytes, event.reserved_bytes),
        leased_priority=more_important(record.resident.leased_priority, event.priority),
        available_at=_latest(record.resident.available_at, event.available_at),
    )
    clear_at = event.granted_at if event.needed_bytes > 0 else record.clear_at
    return replace(record, resident=resident, awaits=(*record.awaits, *event.awaits), clear_at=clear_at)


def more_important(one: Priority | None, other: Priority) -> Priority:
    """The more important of two classes."""
    return other if one is None or other.outranks(one) else one


def _latest(one: int | None, other: int | None) -> int | None:
    return max((value for value in (one, other) if value is not None), default=None)


def _with_lease(state: AcceleratorState, lease_id: str, event: LeaseRenewed | LeaseRoomConfirmed) -> AcceleratorState:
    record = state.leases.get(lease_id)
    if record is None:
        return state
    match event:
        case LeaseRenewed():
            record = replace(record, lease=replace(record.lease, expires_at=event.expires_at))
        case LeaseRoomConfirmed():
            record = replace(record, room_confirmed=True)
    return replace(state, leases={**state.leases, lease_id: record})


def _released(state: AcceleratorState, event: LeaseReleased) -> AcceleratorState:
    state = _sleeps_on(replace(state, leases=_without(state.leases, event.lease_id)), event.resident_id)
    record = state.residents.get(event.resident_id)
    if record is None or not event.used:
        return state
    resident = replace(record.resident, last_used_at=event.released_at)
    if event.protected_until is not None:
        resident = replace(resident, protected_until=event.protected_until)
    return replace(
        state,
        residents={**state.residents, event.resident_id: replace(record, resident=resident)},
        released_at=event.released_at,
    )


def _sleeps_on(state: AcceleratorState, resident_id: str) -> AcceleratorState:
    """A wake that has not begun, and that nobody waits for any more, is none: the resident sleeps as before."""
    record = state.residents.get(resident_id)
    if record is None or not record.asleep or not record.waits_to_load or state.leases_on(resident_id):
        return state
    resident = replace(record.resident, state=ResidentState.SLEEPING, available_at=None)
    return _update(state, resident_id, resident=resident, awaits=())


def _load_started(state: AcceleratorState, event: ResidentLoadStarted) -> AcceleratorState:
    record = state.residents.get(event.resident_id)
    if record is None:
        return state
    resident = replace(record.resident, loaded_at=event.loaded_at)
    base_bytes = max(0, event.used_bytes - resident.attributed_bytes)
    return _update(state, event.resident_id, resident=resident, load_started=True, load_base_bytes=base_bytes)


def _materialized(state: AcceleratorState, event: ResidencyMaterialized) -> AcceleratorState:
    leases = {
        lease_id: replace(record, lease=replace(record.lease, materialized_bytes=_capped(record.lease, event)))
        if record.resident_id == event.resident_id
        else record
        for lease_id, record in state.leases.items()
    }
    return replace(state, leases=leases)


def _capped(lease: Lease, event: ResidencyMaterialized) -> int:
    return min(lease.reserved_bytes, event.materialized_bytes)


def _ready(state: AcceleratorState, resident_id: str, at: int, start_ms: int) -> AcceleratorState:
    record = state.residents.get(resident_id)
    if record is None:
        return state
    resident = replace(record.resident, state=ResidentState.READY, start_ms=start_ms, last_used_at=at)
    deployment_id = resident.deployment_id
    return _start_over(
        replace(
            state,
            residents={**state.residents, resident_id: replace(record, resident=resident, asleep=False)},
            backoff=_without(state.backoff, deployment_id),
            failures=_without(state.failures, deployment_id),
        ),
        record,
        at,
    )


def _start_over(state: AcceleratorState, started: ResidentRecord, at: int) -> AcceleratorState:
    """Evictions and loads that had to wait for the start of one that starts alone have their time from now on."""
    if not started.starts_alone:
        return state
    return replace(state, residents={key: _from_now_on(record, at) for key, record in state.residents.items()})


def _from_now_on(record: ResidentRecord, at: int) -> ResidentRecord:
    if record.eviction is not None:
        return replace(record, eviction=replace(record.eviction, started_at=max(at, record.eviction.started_at)))
    return replace(record, clear_at=max(at, record.clear_at)) if record.waits_to_load else record


def _eviction_started(state: AcceleratorState, event: EvictionStarted) -> AcceleratorState:
    """A sleep leaves it DRAINING: on its way, but what will be free then is not all that it holds."""
    sleeps = event.action == "sleep"
    state = _displaced(state, event)
    moved = _move(state, event.resident_id, ResidentState.DRAINING if sleeps else ResidentState.UNLOADING)
    eviction = Eviction(
        event.cause,
        event.started_at,
        event.attributed_bytes,
        event.used_bytes,
        event.by_lease_id,
        sleeps=sleeps,
        left_bytes=event.left_bytes,
    )
    return _update(moved, event.resident_id, eviction=eviction)


def _displaced(state: AcceleratorState, event: EvictionStarted) -> AcceleratorState:
    if event.cause is not EvictionCause.PLAN or event.by is None:
        return state
    newest = Displacement(event.by, event.deployment_id, event.started_at)
    return replace(state, displacements=(*state.displacements, newest)[-MAX_DISPLACEMENTS:])


def _thrashing(state: AcceleratorState, event: ThrashingDetected) -> AcceleratorState:
    """Said once: the pair is counted anew from here."""
    pair = (event.evictor, event.victim)
    left = tuple(one for one in state.displacements if (one.evictor, one.victim) != pair)
    others = tuple(one for one in state.thrashing if (one.evictor, one.victim) != pair)
    return replace(state, displacements=left, thrashing=(*others, event)[-MAX_THRASHING:])


def _slept(state: AcceleratorState, event: ResidentSlept) -> AcceleratorState:
    """What waited for the eviction waits no more; the process is still there, and so is the resident."""
    state = _move(state, event.resident_id, ResidentState.SLEEPING)
    state = _update(state, event.resident_id, eviction=None, asleep=True, drain_started_at=None)
    residents = {
        key: _no_longer_awaits(record, event.resident_id, event.slept_at) for key, record in state.residents.items()
    }
    return replace(state, residents=residents)


def _gone(state: AcceleratorState, resident_id: str, finished_at: int) -> AcceleratorState:
    residents: dict[str, ResidentRecord] = {}
    for key, record in state.residents.items():
        if key == resident_id:
            continue
        residents[key] = _no_longer_awaits(record, resident_id, finished_at)
    leases = {key: record for key, record in state.leases.items() if record.resident_id != resident_id}
    return replace(state, residents=residents, leases=leases)


def _no_longer_awaits(record: ResidentRecord, gone_id: str, finished_at: int) -> ResidentRecord:
    if gone_id not in record.awaits:
        return record
    awaits = tuple(awaited for awaited in record.awaits if awaited != gone_id)
    if awaits:
        return replace(record, awaits=awaits)
    return replace(record, awaits=(), clear_at=finished_at, resident=replace(record.resident, available_at=None))


def _failed(state: AcceleratorState, event: ResidentFailed) -> AcceleratorState:
    failed = state.residents.get(event.resident_id)
    state = _move(state, event.resident_id, ResidentState.FAILED)
    if failed is not None:
        state = _start_over(state, failed, event.failed_at)
    if event.backoff_until is None:
        return state
    return replace(
        state,
        backoff={**state.backoff, event.deployment_id: event.backoff_until},
        failures={**state.failures, event.deployment_id: event.attempt},
    )


def _health_changed(state: AcceleratorState, event: AcceleratorHealthChanged) -> AcceleratorState:
    fault, cleared = state.fault, state.cleared
    if event.by is not None:
        cleared = cleared if fault is None else {**cleared, fault.cause: max(fault.mark, cleared.get(fault.cause, 0))}
        fault = None
    elif is_of_device(event.cause):
        fault = HealthFault(event.health, event.cause, event.mark)
    accelerator = replace(state.accelerator, health=event.health)
    return replace(state, accelerator=accelerator, health_cause=event.cause, fault=fault, cleared=cleared)


def is_of_device(cause: str) -> bool:
    """Whether a fault is one of the device itself, which only an operator can declare over."""
    return _LATCHED.fullmatch(cause) is not None


# ---- helpers ----------------------------------------------------------------------------------------------------


def _observe_invalid(state: AcceleratorState, sampled: SampledAccelerator) -> AcceleratorState:
    changed = None
    if sampled.total_bytes not in (0, state.accelerator.total_bytes):
        seen = state.changed_total
        times = seen[1] + 1 if seen is not None and seen[0] == sampled.total_bytes else 1
        changed = (sampled.total_bytes, times)
    return replace(state, invalid=sampled.invalid, changed_total=changed)


def _move(state: AcceleratorState, resident_id: str, to: ResidentState) -> AcceleratorState:
    record = state.residents.get(resident_id)
    if record is None:
        return state
    return _update(state, resident_id, resident=replace(record.resident, state=to))


def _update(state: AcceleratorState, resident_id: str, **changes: object) -> AcceleratorState:
    record = state.residents.get(resident_id)
    if record is None:
        return state
    return replace(state, residents={**state.residents, resident_id: replace(record, **changes)})  # type: ignore[arg-type]


def _without(mapping: Mapping[str, _V], key: str) -> Mapping[str, _V]:
    if key not in mapping:
        return mapping
    return {other: value for other, value in mapping.items() if other != key}
