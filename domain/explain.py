"""The one place where figures become words (style.md, habit 2). No text here enters a fingerprint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, assert_never

from .candidates import Figures, Refusal
from .reasons import Reason
from .units import GIB, KIB, MIB

#: Of a hash: as many digits as git shows of a commit in a large repository.
SHORT_DIGITS: Final = 12
SHA256_DIGITS: Final = 64
_UNITS: Final = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))


def size(amount_bytes: int) -> str:
    """A size for people, to a tenth. Exact bytes are in the documents.

    >>> size(8 * 1024**3), size(3_328_599_654), size(512), size(-1536)
    ('8.0 GiB', '3.1 GiB', '512 B', '-1.5 KiB')
    """
    sign, amount = ("-", -amount_bytes) if amount_bytes < 0 else ("", amount_bytes)
    for unit, name in _UNITS:
        tenths = (amount * 20 + unit) // (2 * unit)
        if tenths >= 10:
            return f"{sign}{tenths // 10}.{tenths % 10} {name}"
    return f"{sign}{amount} B"


def duration(milliseconds: int) -> str:
    """A duration for people.

    >>> duration(250), duration(8_000), duration(12_345), duration(95_000)
    ('250 ms', '8.0 s', '12.3 s', '1 min 35 s')
    """
    if milliseconds < 1_000:
        return f"{milliseconds} ms"
    if milliseconds < 60_000:
        return f"{milliseconds // 1_000}.{milliseconds % 1_000 // 100} s"
    minutes, rest = divmod(milliseconds // 1_000, 60)
    return f"{minutes} min {rest} s"


def short(digest: object) -> str:
    """The beginning of a hash, as much as people compare; what is no long one stays as it is.

    >>> short("789ae17d0aae336b" * 4), short("cfg-chat")
    ('789ae17d0aae', 'cfg-chat')
    """
    text = str(digest)
    return text[:SHORT_DIGITS] if len(text) == SHA256_DIGITS else text


def explain(refusals: Iterable[Refusal]) -> str:
    """All failing checks as one text; empty for an admission."""
    return "; ".join(describe(refusal) for refusal in refusals)


def describe(refusal: Refusal) -> str:
    """One failing check in words, with its figures. Works for a reason without figures too."""
    of = _Words(refusal.figures)
    match refusal.reason:
        # 6.1
        case Reason.ACCELERATOR_KIND_MISMATCH:
            return f"is for kind {of['deployment_kind']}, this is {of['accelerator_kind']}"
        case Reason.NODE_NOT_PRODUCTION_ELIGIBLE:
            return f"node {of['node_id']} is not production-eligible"
        case Reason.DEPLOYMENT_NOT_PRODUCTION_ELIGIBLE:
            return f"{of['deployment_id']} is not production-eligible, and the request is not LAB"
        case Reason.LAB_ONLY:
            return f"{of['deployment_id']} serves LAB requests only"
        case Reason.LAB_PAUSED:
            return "the policy pauses LAB"
        case Reason.NODE_CORDONED:
            return f"node {of['node_id']} is cordoned"
        case Reason.NODE_DRAINING:
            return f"node {of['node_id']} is draining"
        case Reason.LABEL_MISMATCH:
            return f"does not carry {of['label']}={of['wanted']}{of.others('failing')}"
        case Reason.NODE_MEMORY_INSUFFICIENT:
            return (
                f"node has {of.size('left_bytes')} of memory left of {of.size('memory_bytes')}, "
                f"needs {of.size('needed_bytes')}"
            )
        case Reason.NO_MEASURED_ENVELOPE:
            as_configured = f"as it is configured now ({short(of['config_hash'])})"
            return f"no usable measurement of it {as_configured} on {of['gpu_class']}: none was made, or it is suspect"
        case Reason.REPLICA_LIMIT:
            return f"{of['serving']} serving replicas elsewhere, at most {of['max_replicas']}"
        # 6.2
        case Reason.NODE_NOT_READY:
            return f"node {of['node_id']} is not ready"
        case Reason.ACCELERATOR_UNHEALTHY:
            return f"accelerator is {of['health']}"
        case Reason.ACCELERATOR_ALLOCATED:
            return f"is allocated to {of['allocated_to']}"
        case Reason.SCHEDULER_STATE_STALE:
            return f"no usable sample: {of.newest_sample()}"
        # 6.3
        case Reason.DEADLINE_CANNOT_BE_MET:
            if of.is_zero("left_ms"):
                return "its deadline has passed"
            return f"would start in {of.duration('takes_ms')}, the deadline leaves {of.duration('left_ms')}"
        case Reason.EXTERNAL_GPU_PRESSURE:
            return (
                f"others hold {of.size('unmanaged_external_bytes')} (pressure {of['pressure']}), "
                f"needs {of.size('requirement_bytes')}"
            )
        case Reason.RESIDENT_DRAINING:
            return f"its resident {of['resident_id']} is {of['state']}"
        case Reason.CONCURRENCY_LIMIT:
            return f"as many run as it serves at once: {of['active_leases']} of {of['concurrency']}"
        case Reason.DRAINING_FOR_WAITER:
            return f"its door is closed: {of['waiter']} waits for this resident to go"
        case Reason.LOAD_BACKOFF:
            return f"its last load here failed: not before {of['until']}"
        case Reason.GPU_PRESSURE_HOLD:
            return f"nothing of this class is started under pressure {of['pressure']}"
        case Reason.LOAD_IN_PROGRESS:
            return f"{of['resident_id']} is loading and its figure is an estimate: one load at a time"
        case Reason.QUEUED_BEHIND:
            return (
                f"needs {of.size('needed_bytes')}, and {of['waiter']} waits here for {of.size('waiter_needed_bytes')}"
            )
        case Reason.RESIDENCY_CONFLICT:
            return f"cannot share the accelerator with {of['deployment_id']} ({of['resident_id']})"
        case Reason.RESIDENCY_PROTECTED:
            return f"{of.needs()}; {of['protected']} protected until {of['until']}"
        case Reason.WAITING_FOR_DRAIN:
            return f"{of.needs()}; waits for what runs or unloads here"
        case Reason.INSUFFICIENT_SCHEDULABLE_VRAM:
            return f"needs {of.size('requirement_bytes')}, {of.size('full_bytes')} is all there is: never fits"
        case Reason.EVICTION_NOT_ALLOWED:
            return f"{of.needs()}; what is in the way may never be evicted"
        case Reason.QUEUE_FULL:
            return f"{of['queued_ahead']} requests come first, the queue holds {of['queue_limit']}"
        # 6.5
        case Reason.CAPABILITY_UNAVAILABLE:
            return f"no deployment serves {of['capability']} at rank {of['fallback_rank']}"
        case Reason.NO_ACCELERATOR:
            return "no accelerator is registered"
        # 7
        case Reason.LEASE_CONFLICT:
            return "the grant lost every race for the accelerator"
        case Reason.COMMAND_ID_REUSED:
            return "this request id stands for another question"
        case Reason.PREEMPTED:
            return "was preempted by more important work"
        case _:
            assert_never(refusal.reason)


@dataclass(frozen=True, slots=True)
class _Words:
    """Figures by name, as words. One that is missing, or unknown, reads `-`: never 0."""

    figures: Figures

    def __getitem__(self, name: str) -> str:
        value = self.figures.get(name)
        return str(value) if value is not None else "-"

    def size(self, name: str) -> str:
        value = self.figures.get(name)
        return size(value) if isinstance(value, int) else "-"

    def duration(self, name: str) -> str:
        value = self.figures.get(name)
        return duration(value) if isinstance(value, int) else "-"

    def is_zero(self, name: str) -> bool:
        return self.figures.get(name) == 0

    def needs(self) -> str:
        return f"needs {self.size('needed_bytes')}, {self.size('schedulable_bytes')} schedulable"

    def newest_sample(self) -> str:
        observed_at = self.figures.get("observed_at")
        if observed_at is None:
            return "there is none"
        return f"the newest is of {observed_at}, at most {self['telemetry_max_age_seconds']} s old counts"

    def others(self, name: str) -> str:
        value = self.figures.get(name)
        return f" (and {value - 1} more)" if isinstance(value, int) and value > 1 else ""
