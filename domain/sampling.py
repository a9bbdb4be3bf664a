"""From what was read of a node to what is recorded of it: judged, attributed, turned into pressure (semantics.md 1, 4).

What cannot be read is estimated here, by rule, and marked; what contradicts itself is INVALID; what failed is missed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from .accounting import is_fresh
from .aggregates.accelerator import AcceleratorState, ResidentRecord, is_of_device
from .aggregates.deployment import planned
from .draft import Draft
from .events import (
    AcceleratorHealthChanged,
    AcceleratorRegistered,
    AcceleratorRetired,
    AcceleratorRevised,
    ClockStepped,
    PressureChanged,
    ResidencyMaterialized,
    SampledAccelerator,
    SampledResident,
    StreamKind,
    TelemetryMissed,
    TelemetrySampled,
    stream_name,
)
from .policy import Policy, Pressure
from .ports import NO_FAULT, AcceleratorReading, HealthFault, ManagedReading, NodeReading, RuntimeFigures
from .pressure import PressureTrack, judge, pressure_bp
from .state import Attribution, Health, Kind, ResidentState
from .units import milliseconds

#: A total that differs from the registered one is believed after so many samples in a row (semantics.md 1: "stays").
CHANGED_TOTAL_SAMPLES: Final = 3
TOTAL_CHANGED: Final = "TOTAL_CHANGED"
#: After the end of a process its memory comes back "in tens to hundreds of milliseconds" (runtimes.md).
LINGERING_MS: Final = 500

_GRAVITY: Final = {Health.HEALTHY: 0, Health.DEGRADED: 1, Health.FAILED: 2, Health.LOST: 3}


@dataclass(frozen=True, slots=True)
class SampleTaken:
    """One reading of one node, received now. `figures`: what each runtime says of itself.

    `clock_skew_ms`: how far the wall clock of the node is ahead of the ledger's, in milliseconds.
    """

    node_id: str
    reading: NodeReading
    figures: Mapping[str, RuntimeFigures]
    clock_skew_ms: int = 0


def record_sample(draft: Draft, taken: SampleTaken) -> None:
    """Append what one reading says: new devices, the sample, levels of pressure, health, memory that materialized."""
    _record_skew(draft, taken)
    _register_devices(draft, taken)
    observed_at = draft.now - milliseconds(taken.reading.age_ms)
    sampled = tuple(_judge(draft, taken, reading, observed_at) for reading in taken.reading.accelerators)
    before = draft.world
    if sampled:
        draft.emit(
            stream_name(StreamKind.TELEMETRY, taken.node_id),
            TelemetrySampled(
                node_id=taken.node_id,
                observed_at=observed_at,
                received_at=draft.now,
                memory_bytes=taken.reading.memory_bytes,
                external_bytes=_node_external(sampled, taken),
                accelerators=sampled,
            ),
        )
    _record_faults(draft, taken, observed_at)
    for accelerator_id in sorted(taken.reading.gone):
        retire(draft, accelerator_id)
    for one in sampled:
        _record_pressure(draft, before.accelerators[one.accelerator_id], one)
        _record_materialized(draft, one.accelerator_id)
    for reading in taken.reading.accelerators:
        _record_health(draft, reading.accelerator_id, reading.faults)
        _revise(draft, reading)


def _record_skew(draft: Draft, taken: SampleTaken) -> None:
    """When the clocks came apart, or together: a skewed wall clock is a warning, never the death of a node (1)."""
    node = draft.world.nodes.get(taken.node_id)
    allowed_ms = draft.world.policy.max_clock_skew_seconds * 1000
    if node is None:
        return
    known_ms = node.clock_skew_ms
    apart_ms = taken.clock_skew_ms if abs(taken.clock_skew_ms) > allowed_ms else 0
    # While the difference is made up for it shrinks; only one that grows, or turns round, is another step.
    further = abs(apart_ms) > abs(known_ms) + allowed_ms or apart_ms * known_ms < 0
    if (apart_ms == 0) != (known_ms == 0) or further:
        draft.emit(stream_name(StreamKind.NODE, taken.node_id), ClockStepped(taken.node_id, apart_ms))


# ---- devices ----------------------------------------------------------------------------------------------------


def _revise_host(draft: Draft, reading: AcceleratorReading, known: AcceleratorState) -> None:
    """How much of a host is scheduled is configured: another size at the first look of a run is nobody's mistake."""
    first_look = known.sample is None and known.missed is None and known.invalid is None
    if reading.kind is Kind.HOST and first_look and reading.total_bytes != known.accelerator.total_bytes:
        _emit_revision(draft, reading)


def _register_devices(draft: Draft, taken: SampleTaken) -> None:
    for reading in taken.reading.accelerators:
        known = draft.world.accelerators.get(reading.accelerator_id)
        usable = reading.total_bytes > 0 and reading.used_bytes <= reading.total_bytes
        if usable and known is not None and not known.retired:
            _revise_host(draft, reading, known)
        if usable and (known is None or known.retired):
            draft.on_accelerator(
                reading.accelerator_id,
                AcceleratorRegistered(
                    accelerator_id=reading.accelerator_id,
                    node_id=taken.node_id,
                    index=reading.index,
                    kind=reading.kind,
                    gpu_class=reading.gpu_class,
                    total_bytes=reading.total_bytes,
                    device_name=reading.device_name,
                    driver_version=reading.driver_version,
                ),
            )


def _revise(draft: Draft, reading: AcceleratorReading) -> None:
    """A total that stays changed is taken up (semantics.md 1), and so is what else the device says it is now."""
    known = draft.world.accelerators.get(reading.accelerator_id)
    if known is None or known.retired or known.invalid not in (None, TOTAL_CHANGED):
        return
    stays = known.changed_total is not None and known.changed_total[1] >= CHANGED_TOTAL_SAMPLES
    described = (known.accelerator.index, known.accelerator.gpu_class, known.device_name, known.driver_version)
    told = (reading.index, reading.gpu_class, reading.device_name, reading.driver_version)
    if stays or (known.changed_total is None and described != told):
        _emit_revision(draft, reading)


def _emit_revision(draft: Draft, reading: AcceleratorReading) -> None:
    draft.on_accelerator(
        reading.accelerator_id,
        AcceleratorRevised(
            accelerator_id=reading.accelerator_id,
            index=reading.index,
            gpu_class=reading.gpu_class,
            total_bytes=reading.total_bytes,
            device_name=reading.device_name,
            driver_version=reading.driver_version,
        ),
    )


def _record_health(draft: Draft, accelerator_id: str, told: Sequence[HealthFault]) -> None:
    """What a device says of its health, the worst first, when that is news.

    A fault of the device itself stands until an operator clears it; one that was cleared is no news again.
    """
    known = draft.world.accelerators.get(accelerator_id)
    if known is None or known.retired:
        return
    uncleared = (one for one in told if one.mark > known.cleared.get(one.cause, -1))
    shown = next(uncleared, NO_FAULT)
    standing = known.fault
    if standing is not None and _GRAVITY[shown.health] <= _GRAVITY[standing.health]:
        further = shown.cause == standing.cause and shown.mark > standing.mark
        shown = shown if further else standing
    if _is_health_news(known, shown):
        changed = AcceleratorHealthChanged(accelerator_id, shown.health, shown.cause, shown.mark)
        draft.on_accelerator(accelerator_id, changed)


def _is_health_news(known: AcceleratorState, shown: HealthFault) -> bool:
    if shown.health is not known.accelerator.health:
        return True
    if shown.health is Health.HEALTHY:
        return False
    further = is_of_device(shown.cause) and (known.fault is None or shown.mark > known.fault.mark)
    return further or shown.cause != known.health_cause


def retire(draft: Draft, accelerator_id: str) -> None:
    """It is no more, by the word of the device: what is left of ours there is ended (semantics.md 1)."""
    known = draft.world.accelerators.get(accelerator_id)
    if known is not None and not known.retired:
        draft.on_accelerator(accelerator_id, AcceleratorRetired(accelerator_id))


def _record_faults(draft: Draft, taken: SampleTaken, observed_at: int) -> None:
    """DRIVER_ERROR: what failed is UNKNOWN from now on; recorded when it begins and when its code changes."""
    read = {reading.accelerator_id for reading in taken.reading.accelerators}
    here = {key for key, state in draft.world.accelerators.items() if state.node_id == taken.node_id}
    for fault in taken.reading.faults:
        hit = here - read if fault.accelerator_id is None else here & {fault.accelerator_id}
        newly = tuple(
            sorted(one for one in hit if not draft.world.accelerators[one].retired and _is_news(draft, one, fault.code))
        )
        if newly:
            draft.emit(
                stream_name(StreamKind.TELEMETRY, taken.node_id),
                TelemetryMissed(taken.node_id, observed_at, newly, fault.code),
            )
        for accelerator_id in sorted(hit):
            if fault.health is not None:
                _record_health(draft, accelerator_id, (HealthFault(fault.health, fault.code, 0),))


def _is_news(draft: Draft, accelerator_id: str, code: str) -> bool:
    state = draft.world.accelerators[accelerator_id]
    return state.sample is not None or state.missed != code


# ---- one accelerator --------------------------------------------------------------------------------------------


def _judge(draft: Draft, taken: SampleTaken, reading: AcceleratorReading, observed_at: int) -> SampledAccelerator:
    policy = draft.world.policy
    state = draft.world.accelerators.get(reading.accelerator_id)
    track = PressureTrack() if state is None or state.track is None else state.track
    invalid = _contradiction(state, reading)
    if state is None or invalid is not None:
        return SampledAccelerator(
            accelerator_id=reading.accelerator_id,
            total_bytes=max(0, reading.total_bytes),
            used_bytes=max(0, reading.used_bytes),
            pressure_bp=0,
            pressure=track.level,
            recovering_since=track.recovering_since,
            foreign_processes=reading.foreign_processes,
            residents=(),
            invalid=invalid or "UNREGISTERED",
        )
    residents = attribute(draft, state, reading, taken.figures)
    attributed = sum(one.attributed_bytes for one in residents)
    bp = pressure_bp(policy, reading.total_bytes, reading.used_bytes, attributed)
    track = judge(policy, track, bp, observed_at, draft.now)
    return SampledAccelerator(
        accelerator_id=reading.accelerator_id,
        total_bytes=reading.total_bytes,
        used_bytes=reading.used_bytes,
        pressure_bp=bp,
        pressure=track.level,
        recovering_since=track.recovering_since,
        foreign_processes=reading.foreign_processes,
        residents=residents,
        blind=reading.blind,
    )


def _contradiction(state: AcceleratorState | None, reading: AcceleratorReading) -> str | None:
    """Why the figures cannot be used, or None (semantics.md 1). Missing is not 0."""
    if reading.total_bytes <= 0:
        return "TOTAL_NOT_POSITIVE"
    if reading.used_bytes < 0:
        return "USED_NEGATIVE"
    if reading.used_bytes > reading.total_bytes:
        return "USED_OVER_TOTAL"
    if state is not None and reading.total_bytes != state.accelerator.total_bytes:
        return TOTAL_CHANGED
    return None


def attribute(
    draft: Draft, state: AcceleratorState, reading: AcceleratorReading, told: Mapping[str, RuntimeFigures]
) -> tuple[SampledResident, ...]:
    """What of `used` belongs to which resident: as read, or ESTIMATED where it cannot be read (semantics.md 1)."""
    seen = {managed.resident_id: managed for managed in reading.managed}
    figures = [
        _attribute_one(draft, state, record, seen.get(resident_id), reading.used_bytes, told.get(resident_id))
        for resident_id, record in sorted(state.residents.items())
    ]
    return _share_unexplained(state, figures, reading.used_bytes)


def _attribute_one(
    draft: Draft,
    state: AcceleratorState,
    record: ResidentRecord,
    seen: ManagedReading | None,
    used_bytes: int,
    told: RuntimeFigures | None,
) -> SampledResident:
    resident = record.resident
    told = RuntimeFigures(None) if told is None else told
    requests = resident.running_requests if told.busy is None else told.busy
    alive = seen is not None and seen.alive
    readable = seen is not None and seen.used_bytes is not None
    if seen is None or not alive or readable:
        figure = seen.used_bytes if seen is not None and seen.used_bytes is not None and alive else 0
        if not alive:
            figure = _lingering_bytes(draft, state, record, used_bytes)
        estimated = not alive and _lingers(draft.world.policy, record, used_bytes)
        return SampledResident(
            resident_id=resident.resident_id,
            attributed_bytes=resident.attributed_bytes if estimated else figure,
            attribution=Attribution.ESTIMATED if estimated else Attribution.KNOWN,
            running_requests=requests if alive else 0,
            alive=alive,
            waiting_requests=told.waiting,
            cache_use_bp=told.cache_use_bp,
        )
    return SampledResident(
        resident_id=resident.resident_id,
        attributed_bytes=_estimate(draft, state, record, used_bytes),
        attribution=Attribution.ESTIMATED,
        running_requests=requests,
        alive=True,
        waiting_requests=told.waiting,
        cache_use_bp=told.cache_use_bp,
    )


def _lingering_bytes(draft: Draft, state: AcceleratorState, record: ResidentRecord, used_bytes: int) -> int:
    """What a card does not show free yet of a process that has just gone: it is ours until then (semantics.md 2).

    A process that is not there holds nothing; but its memory comes back a moment later, and is no pressure meanwhile.
    """
    eviction = record.eviction
    if state.accelerator.kind is Kind.HOST or eviction is None or eviction.sleeps or eviction.used_bytes is None:
        return 0
    if eviction.gone_at is not None and draft.now > eviction.gone_at + milliseconds(LINGERING_MS):
        return 0
    left_bytes = eviction.attributed_bytes - (eviction.used_bytes - used_bytes)
    if left_bytes <= draft.world.policy.reclaim_tolerance_bytes:
        return 0
    return min(left_bytes, record.resident.attributed_bytes)


def _lingers(policy: Policy, record: ResidentRecord, used_bytes: int) -> bool:
    """Whether memory of an ended process, never attributed by process, is still shown as used (semantics.md 7)."""
    eviction = record.eviction
    if record.resident.attribution is Attribution.KNOWN or eviction is None or eviction.used_bytes is None:
        return False
    fallen = eviction.used_bytes - used_bytes
    return fallen < eviction.attributed_bytes - policy.reclaim_tolerance_bytes


def _estimate(draft: Draft, state: AcceleratorState, record: ResidentRecord, used_bytes: int) -> int:
    resident = record.resident
    # A wake that has not begun has taken nothing yet: until then it holds what it holds asleep.
    if resident.state is ResidentState.LOADING and not record.waits_to_load:
        return min(max(0, used_bytes - record.load_base_bytes), resident.reserved_bytes)
    deployment = draft.world.deployments.get(resident.deployment_id)
    measured = None if deployment is None else deployment.measured_on(state.accelerator.gpu_class)
    if deployment is None or measured is None:
        return resident.attributed_bytes
    sleep = planned(deployment, ()).sleep
    if sleep is not None and (record.asleep or _fell_asleep(draft.world.policy, record, used_bytes)):
        return sleep.asleep_bytes
    return measured.envelope.idle_bytes


def _fell_asleep(policy: Policy, record: ResidentRecord, used_bytes: int) -> bool:
    """Whether as much has become free as a sleep under way promised, where nothing is attributed by process."""
    eviction = record.eviction
    if eviction is None or not eviction.sleeps or eviction.used_bytes is None:
        return False
    promised = eviction.attributed_bytes - eviction.left_bytes
    return eviction.used_bytes - used_bytes >= max(1, promised - policy.reclaim_tolerance_bytes)


def _share_unexplained(
    state: AcceleratorState, figures: list[SampledResident], used_bytes: int
) -> tuple[SampledResident, ...]:
    """What is unexplained is first of estimated residents at work, by id, up to their reservations (semantics.md 1)."""
    unexplained = max(0, used_bytes - sum(one.attributed_bytes for one in figures))
    shared: list[SampledResident] = []
    for one in figures:
        share = 0
        if one.attribution is Attribution.ESTIMATED and one.running_requests > 0:
            reserved = state.residents[one.resident_id].resident.reserved_bytes
            share = min(unexplained, max(0, reserved - one.attributed_bytes))
            unexplained -= share
        shared.append(replace(one, attributed_bytes=one.attributed_bytes + share) if share else one)
    return tuple(shared)


def _node_external(sampled: tuple[SampledAccelerator, ...], taken: SampleTaken) -> int | None:
    """What others use of the node's memory: of the host's domain, what is not attributed (semantics.md 6.1)."""
    hosts = {one.accelerator_id for one in taken.reading.accelerators if one.kind is Kind.HOST or one.unified}
    for one in sampled:
        if one.accelerator_id in hosts and one.invalid is None:
            return max(0, one.used_bytes - sum(resident.attributed_bytes for resident in one.residents))
    return None


def _record_pressure(draft: Draft, before: AcceleratorState, one: SampledAccelerator) -> None:
    previous = Pressure.NORMAL if before.track is None else before.track.level
    if one.invalid is None and one.pressure is not previous:
        draft.on_accelerator(
            one.accelerator_id, PressureChanged(one.accelerator_id, one.pressure, previous, one.pressure_bp)
        )


def _record_materialized(draft: Draft, accelerator_id: str) -> None:
    """As the device shows the memory of a loading model, what its leases have materialized rises with it."""
    state = draft.world.accelerators[accelerator_id]
    for resident_id, record in sorted(state.residents.items()):
        if record.resident.state is not ResidentState.LOADING:
            continue
        shown = record.resident.attributed_bytes
        held = [lease.lease for lease in state.leases_on(resident_id)]
        if any(lease.materialized_bytes < min(shown, lease.reserved_bytes) for lease in held):
            draft.on_accelerator(accelerator_id, ResidencyMaterialized(resident_id, shown))


def fresh_enough(policy: Policy, state: AcceleratorState, after: int, now: int) -> bool:
    """Whether the newest sample was observed after an instant, and is fresh at `now` (semantics.md 7)."""
    sample = state.sample
    if sample is None or sample.observed_at <= after:
        return False
    return is_fresh(policy, sample.observed_at, sample.received_at, now)
