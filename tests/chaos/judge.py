"""What became of every order, and whether all that must hold did.

A refusal for want of room is a correct outcome. A failure is *injected* where something was done to a resident that the
request had a lease on, or to its deployment; any other failure, and any answer that is none, is a defect.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gpuledger.adapters.http.openai_errors import status_of
from gpuledger.domain.events import FailureRecorded
from gpuledger.domain.failures import CAPACITY_FAILURES, Failure
from gpuledger.domain.reasons import Reason, waiting_helps

from .arena import Arena
from .asking import Answer
from .faults import Hit
from .follower import Follower
from .starved import Starvation
from .watch import Findings

#: While a scheduler starts or leaves; only around an outage of our doing.
_COMING_AND_GOING: Final = frozenset({"starting", "draining"})
_OF_KEYS: Final = frozenset({"request_in_progress", "request_completed", "request_cancelled"})
#: Failures of the scheduler itself, or of the machine: nothing that is done here may lead to them.
_NEVER: Final = frozenset(
    {Failure.DRIVER_ERROR, Failure.LEASE_TIMEOUT, Failure.ARTIFACT_CORRUPT, Failure.LEASE_CONFLICT}
)


@dataclass
class Tally:
    """Outcomes by sort, and defects with their words."""

    completed: Counter[str] = field(default_factory=Counter[str])
    capacity: Counter[str] = field(default_factory=Counter[str])
    policy: Counter[str] = field(default_factory=Counter[str])
    injected: Counter[str] = field(default_factory=Counter[str])
    other: Counter[str] = field(default_factory=Counter[str])
    internal: Findings = field(default_factory=Findings)
    untyped: Findings = field(default_factory=Findings)
    unexplained: Findings = field(default_factory=Findings)
    repeated_work: Findings = field(default_factory=Findings)

    @property
    def orders(self) -> int:
        sorts = (self.completed, self.capacity, self.policy, self.injected, self.other)
        return sum(sum(one.values()) for one in sorts) + self.defects

    @property
    def defects(self) -> int:
        return self.internal.count + self.untyped.count + self.unexplained.count


@dataclass(frozen=True, slots=True)
class Judge:
    """What is known when all is over."""

    arena: Arena
    follower: Follower
    hits: Iterable[Hit]
    starvation: Starvation

    def tally(self, answers: Iterable[Answer]) -> Tally:
        found = Tally()
        by_key: dict[tuple[str, str], int] = {}
        for answer in answers:
            self._count(answer, found)
            if answer.order.key is not None and answer.whole:
                key = (answer.order.who.name, answer.order.key)
                by_key[key] = by_key.get(key, 0) + 1
        for (client, name), times in by_key.items():
            if times > 1:
                found.repeated_work.add(f"{client}'s {name} was served {times} times")
        return found

    def _count(self, answer: Answer, found: Tally) -> None:
        if answer.gone:
            found.other["client went away"] += 1
        elif answer.fault is not None:
            self._count_fault(answer, found)
        elif answer.error is not None:
            self._count_error(answer, answer.error, found)
        else:
            found.completed[answer.order.offer.capability] += 1

    def _count_fault(self, answer: Answer, found: Tally) -> None:
        if answer.status in (None, 200) and self.arena.was_out(answer.begin, answer.end):
            found.injected["scheduler killed"] += 1
        else:
            found.untyped.add(f"{_named(answer)}: {answer.fault}")

    def _count_error(self, answer: Answer, error: Mapping[str, Any], found: Tally) -> None:
        code = str(error["code"])
        told = f"{_named(answer)}: {answer.status} {code}: {error.get('message')}"
        if answer.status == 500 or code == "internal_error" or code == Failure.CAPABILITY_UNAVAILABLE:
            found.internal.add(told)
        elif code in _COMING_AND_GOING and self.arena.was_out(answer.begin, answer.end):
            found.injected["scheduler killed"] += 1
        elif code in _OF_KEYS or code == Reason.COMMAND_ID_REUSED:
            self._count_repetition(answer, code, told, found)
        elif code in Reason.__members__:
            self._count_refusal(answer, Reason(code), told, found)
        elif code in Failure.__members__ and answer.status in (200, 503, 504):
            self._count_failure(answer, Failure(code), told, found)
        else:
            found.untyped.add(told)

    def _count_repetition(self, answer: Answer, code: str, told: str, found: Tally) -> None:
        expected = code == Reason.COMMAND_ID_REUSED or answer.order.key_use != "other body"
        if answer.order.key is not None and expected:
            found.other["asked under a key again"] += 1
        else:
            found.untyped.add(told)

    def _count_refusal(self, answer: Answer, reason: Reason, told: str, found: Tally) -> None:
        status = status_of(reason)
        repeated = answer.order.key is not None
        # A stream that began is a 200, whatever ends it; what is told again under a key has no time to wait.
        if answer.status not in (200, status):
            found.untyped.add(told)
        elif answer.status != 200 and not repeated and waiting_helps(reason) != ("retry-after" in answer.headers):
            found.untyped.add(f"{told}: Retry-After is wrong")
        elif status == 429:
            found.capacity[reason.value] += 1
        elif reason is Reason.PREEMPTED:
            found.other["preempted in the midst of its answer"] += 1
        else:
            found.policy[reason.value] += 1

    def _count_failure(self, answer: Answer, failure: Failure, told: str, found: Tally) -> None:
        if failure in CAPACITY_FAILURES:
            found.untyped.add(told)  # they are reasons of plans, never failures that a client is told
        elif failure not in _NEVER and failure is not Failure.GPU_OOM and self._was_hit(answer):
            found.injected[failure.value] += 1
        else:
            found.unexplained.add(f"{told} ({', '.join(self._residents_of(answer)) or 'no lease'})")

    def _residents_of(self, answer: Answer) -> tuple[str, ...]:
        return tuple(self.follower.granted.get(answer.request_id or "", ()))

    def _was_hit(self, answer: Answer) -> bool:
        return any(self.is_hit(resident_id) for resident_id in self._residents_of(answer))

    def is_hit(self, resident_id: str) -> bool:
        """Whether something was done to a resident, or to its deployment, at any time."""
        deployment_id = self.follower.deployment_of.get(resident_id)
        return any(hit.resident_id == resident_id or hit.deployment_id == deployment_id for hit in self.hits)

    def out_of_memory(self) -> Findings:
        """Each GPU_OOM."""
        found = Findings()
        for one in self.follower.failures:
            if one.failure is Failure.GPU_OOM:
                found.add(f"GPU_OOM of {one.resident_id}: {one.detail}")
        return found

    def failures(self) -> tuple[Counter[str], Findings]:
        """The failures that the ledger has by class, and those among them that nothing that was done explains."""
        counts: Counter[str] = Counter()
        unexplained = Findings()
        for one in self.follower.failures:
            counts[one.failure.value] += 1
            if one.failure in CAPACITY_FAILURES or one.failure is Failure.GPU_OOM:
                continue
            if one.failure is Failure.SCHEDULER_STATE_STALE:
                explained = self.starvation.explains(one.recorded_at)
            else:
                explained = any(self.is_hit(resident_id) for resident_id in self._subjects_of(one))
            if one.failure in _NEVER or not explained:
                unexplained.add(f"{one.failure.value} of {one.resident_id}, {one.request_id}: {one.detail}")
        return counts, unexplained

    def _subjects_of(self, failure: FailureRecorded) -> tuple[str, ...]:
        """The resident that failed; of what the gateway gave up, all that the request had a lease on."""
        if failure.resident_id is not None:
            return (failure.resident_id,)
        return tuple(self.follower.granted.get(failure.request_id or "", ()))


def log_trouble(log: Path, begin_bytes: int = 0) -> Findings:
    """What the servers logged as errors, and every line that is no entry of a log, from a place on."""
    found = Findings()
    for line in log.read_bytes()[begin_bytes:].decode("utf-8", "replace").splitlines():
        try:
            entry = json.loads(line)
            if entry["level"] in ("error", "critical") or "exception" in entry:
                found.add(line[:2000])
        except (ValueError, KeyError, TypeError):
            found.add(line[:2000])
    return found


def _named(answer: Answer) -> str:
    order = answer.order
    asked = f"{order.who.name} asked for {order.offer.capability}"
    return f"order {order.number}, {answer.request_id or 'without an id'}, {asked}"
