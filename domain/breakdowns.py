"""A resident that failed, and what that says of its model (semantics.md 2, 8)."""

from __future__ import annotations

from typing import Final, Literal

from .aggregates.accelerator import AcceleratorState, ResidentRecord
from .draft import Draft
from .envelopes import with_margin
from .events import (
    ArtifactCorrupt,
    EnvelopeSuspected,
    EvictionCause,
    ReleaseCause,
    ResidentFailed,
    StreamKind,
    stream_name,
)
from .evictions import begin_eviction, record_failure_of
from .failures import EMPTY_SHA256, SERVING_FAILURES, Failure
from .faults import attempt_of, try_again_or_fail
from .leases import active_on, release
from .policy import MAX_LOAD_BACKOFF_SECONDS, Policy
from .room import required_here
from .state import Attribution, ResidentState
from .units import seconds
from .view import view_of

#: Detail of a process that gave up without saying why: the device tells whether it was for want of memory. (A kill is
#: somebody's doing. The kernel's own, for want of memory, the runtime adapter knows by the kernel's count of them.)
GAVE_UP: Final = "signal_6"


def resident_failed(draft: Draft, resident_id: str, failure: Failure, detail: str, evidence_sha256: str) -> None:
    """A failure ends the leases on a resident, and what is left of it is unloaded (semantics.md 2, 8)."""
    found = draft.world.find_resident(resident_id)
    if found is None:
        return
    state, record = found
    accelerator_id = state.accelerator.accelerator_id
    if record.eviction is not None:
        if record.eviction.sleeps:  # it could not be put to sleep, or died of it: who waits for its memory still does
            record_failure_of(draft, accelerator_id, record, failure, detail, evidence_sha256)
            begin_eviction(draft, accelerator_id, resident_id, EvictionCause.SLEEP_FAILED)
        return  # otherwise it is on its way out: its process was ended by us
    failure, detail = _judged_by_device(draft, state, record, failure, detail)
    deployment_id = record.resident.deployment_id
    of_load = record.resident.state is ResidentState.LOADING and failure in SERVING_FAILURES
    attempt = state.failures.get(deployment_id, 0) + 1
    backoff = load_backoff_seconds(draft.world.policy, attempt)
    requests = [lease.lease.request_id for lease in state.leases_on(resident_id)]
    for lease in state.leases_on(resident_id):
        began = record.resident.state is not ResidentState.LOADING
        release(draft, accelerator_id, lease, ReleaseCause.FAILED, used=began)
    draft.on_accelerator(
        accelerator_id,
        ResidentFailed(
            resident_id=resident_id,
            deployment_id=deployment_id,
            failure=failure,
            detail=detail,
            failed_at=draft.now,
            attempt=attempt if of_load else 1,
            backoff_until=draft.now + seconds(backoff) if of_load else None,
        ),
    )
    of_requests = attempt_of(draft, requests, failure)
    record_failure_of(draft, accelerator_id, record, failure, detail, evidence_sha256, *of_requests)
    _doubt(draft, state, record, failure, detail, evidence_sha256)
    for request_id in requests:
        try_again_or_fail(draft, request_id, failure, detail, resident_id=resident_id)
    begin_eviction(draft, accelerator_id, resident_id, EvictionCause.FAILED)


def _judged_by_device(
    draft: Draft, state: AcceleratorState, record: ResidentRecord, failure: Failure, detail: str
) -> tuple[Failure, str]:
    """A process that gave up without a word, where the device had no room left for it: GPU_OOM (semantics.md 8)."""
    if failure not in (Failure.MODEL_LOAD_FAILED, Failure.RUNTIME_CRASH) or state.sample is None:
        return failure, detail
    if detail != GAVE_UP or not _takes_memory(state, record, draft.now):
        return failure, detail
    view = view_of(draft.world.state(draft.now))
    missing = required_here(view, state, record.resident.deployment_id) - record.resident.attributed_bytes
    left = state.accelerator.total_bytes - state.sample.used_bytes
    return (Failure.GPU_OOM, "no_room_left_on_device") if left < missing else (failure, detail)


def _takes_memory(state: AcceleratorState, record: ResidentRecord, now: int) -> bool:
    """Whether it was loading or at work: one that is idle or asleep asks for no more than it has."""
    resident = record.resident
    if resident.state is ResidentState.LOADING:
        return record.load_started
    return resident.running_requests > 0 or active_on(state, resident.resident_id, now)


def _doubt(
    draft: Draft,
    state: AcceleratorState,
    record: ResidentRecord,
    failure: Failure,
    detail: str,
    evidence_sha256: str,
) -> None:
    """What a failure says of the deployment itself: no further load until somebody has looked (semantics.md 8)."""
    deployment_id = record.resident.deployment_id
    deployment = draft.world.deployments.get(deployment_id)
    if deployment is None:
        return
    if failure is Failure.ARTIFACT_CORRUPT and deployment.corrupt is None:
        stream = stream_name(StreamKind.DEPLOYMENT, deployment_id)
        draft.emit(stream, ArtifactCorrupt(deployment_id, detail, evidence_sha256 or EMPTY_SHA256))
    if failure is Failure.GPU_OOM:
        suspect(draft, state, record, "gpu_oom", record.resident.attributed_bytes)


def suspect(
    draft: Draft,
    state: AcceleratorState,
    record: ResidentRecord,
    cause: Literal["gpu_oom", "exceeded"],
    observed_bytes: int,
) -> None:
    """Hold the envelope of a resident as suspect, once."""
    deployment_id = record.resident.deployment_id
    deployment = draft.world.deployments.get(deployment_id)
    measured = None if deployment is None else deployment.measured_on(state.accelerator.gpu_class)
    if measured is None or measured.envelope.suspect:
        return
    draft.emit(
        stream_name(StreamKind.DEPLOYMENT, deployment_id),
        EnvelopeSuspected(
            deployment_id=deployment_id,
            accelerator_id=state.accelerator.accelerator_id,
            resident_id=record.resident.resident_id,
            config_hash=measured.envelope.config_hash,
            gpu_class=measured.envelope.gpu_class,
            cause=cause,
            observed_bytes=observed_bytes,
            peak_bytes=measured.envelope.peak_bytes,
        ),
    )


def suspect_exceeded(draft: Draft) -> None:
    """A resident that is seen to hold more than its envelope and the margin for its variation (semantics.md 3, 8)."""
    for state, record in tuple(draft.world.residents()):
        resident = record.resident
        deployment = draft.world.deployments.get(resident.deployment_id)
        measured = None if deployment is None else deployment.measured_on(state.accelerator.gpu_class)
        if measured is None or resident.attribution is not Attribution.KNOWN:
            continue
        expected_bytes = with_margin(draft.world.policy, measured.envelope.peak_bytes)
        if deployment is not None and resident.attributed_bytes > max(expected_bytes, deployment.accepted_bytes):
            suspect(draft, state, record, "exceeded", resident.attributed_bytes)


def leave_retired(draft: Draft) -> None:
    """What is on an accelerator that is no more has nothing to run on: it has failed, and its process is ended."""
    for state, record in tuple(draft.world.residents()):
        if state.retired and record.eviction is None:
            resident_failed(draft, record.resident.resident_id, Failure.RUNTIME_CRASH, "accelerator_retired", "")


def load_backoff_seconds(policy: Policy, attempt: int) -> int:
    """Doubling from `load_backoff_seconds`, bounded (semantics.md 8, 10).

    >>> [load_backoff_seconds(Policy(), attempt) for attempt in (1, 2, 3, 9)]
    [5, 10, 20, 300]
    """
    doublings = min(attempt - 1, MAX_LOAD_BACKOFF_SECONDS.bit_length())
    return min(policy.load_backoff_seconds << doublings, MAX_LOAD_BACKOFF_SECONDS)
