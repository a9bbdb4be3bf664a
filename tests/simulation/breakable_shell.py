"""The desk and the gateway on a bad day: work whose lease, client, connection or runtime is lost (tools/desk.py,
adapters/http/attempt.py and relay.py), on top of `breakable_jobs.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gpuledger.domain.events import (
    LeasePreempted,
    LeaseRoomConfirmed,
    RequestCancelled,
    RequestCompleted,
    RequestFailed,
    RequestFellBack,
    RequestRetried,
    ResidentLoadStarted,
)
from gpuledger.domain.failures import Failure
from gpuledger.domain.messages import AnswerCutOff, ClientGone, Forward, RequestArrived, RequestsHeld, WorkEnded
from gpuledger.domain.policy import Priority
from gpuledger.domain.reasons import Reason
from gpuledger.domain.scheduler import renewal_interval_ms
from gpuledger.domain.state import ResidentState

from .breakable_jobs import BreakableJobs
from .breakable_machine import Body
from .virtual_shell import Outcome

#: The silence that a gateway bears, until a runtime ends work whose connection is closed, and until a gateway whose
#: connection broke waits no longer for a better explanation.
ANSWER_TIMEOUT_MS: Final = 120_000
ABORT_MS: Final = 300
EXIT_NOTICE_MS: Final = 1000
#: Failures that a gateway lets be tried again, when its client has seen nothing.
MAY_GO_BETTER: Final = (Failure.RUNTIME_CRASH, Failure.INVALID_OUTPUT, Failure.GPU_OOM)


@dataclass
class Work:
    """One attempt of a gateway. `sent`: its client has seen something of an answer. `over`: nobody listens any more."""

    request_id: str
    lease_id: str
    body: Body
    sent: bool
    over: bool = False


class BreakableShell(BreakableJobs):
    """All of it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.held: set[str] = set()
        self.works: dict[str, Work] = {}
        self._leaving: set[str] = set()
        #: By request the lease that its work ended under, while what becomes of it is not recorded.
        self._over: dict[str, str] = {}

    def crash(self) -> None:
        """It is killed: its clients are cut off. What becomes of its processes the machine knows."""
        self.stopped = True
        self._heap.clear()
        for request_id in self.held:
            self.outcomes[request_id].event = "cut_off"
        self.held.clear()

    def close(self) -> None:
        """It has left, in order: it ends what it started before it exits (Runtimes.close)."""
        for body in list(self.machine.bodies.values()):
            self.machine.bury(body)
        self.machine.bodies.clear()

    # ---- clients -------------------------------------------------------------------------------------------------

    def ask(
        self,
        request_id: str,
        capability: str,
        priority: Priority = Priority.INTERACTIVE,
        *,
        deadline: int | None = None,
        lab: bool = False,
    ) -> Outcome:
        self.outcomes[request_id] = outcome = Outcome(self.now, priority, capability)
        self.held.add(request_id)
        arrived = RequestArrived(
            request_id=request_id,
            client_id="client",
            capability=capability,
            priority=priority,
            lab=lab,
            requested_at=self.now,
            deadline=deadline,
            operation="embeddings",
            body_bytes=100,
        )
        if not self.tell(arrived):
            self.held.discard(request_id)
            outcome.event = "unavailable"
        return outcome

    def leave(self, request_id: str) -> None:
        """The client hangs up, whether its work has begun or not."""
        work = self.works.pop(request_id, None)
        self._let_go(request_id)
        self.outcomes[request_id].event = "left"
        if work is None:
            self.after_ms(1, lambda: self.feed(ClientGone(request_id)))
            return
        self._break_off(work)
        gone = WorkEnded(request_id, 499, 10, 0, None, None, None, "", client_gone=True, lease_id=work.lease_id)
        self.after_ms(1, lambda: self.feed(gone))

    def _let_go(self, request_id: str) -> None:
        self.held.discard(request_id)
        self._over.pop(request_id, None)
        self._leaving.add(request_id)

    def _hold(self) -> None:
        self.feed(RequestsHeld(frozenset(self.held)))
        self.after_ms(renewal_interval_ms(self.policy.lease_ttl_seconds), self._hold)

    def look_after(self) -> None:
        """A request in the ledger that nobody waits for (its commit was taken for failed) is given up."""
        super().look_after()
        for request_id, request in self.world.requests.items():
            if request.operation != "warm" and request_id not in self.held and request_id not in self._leaving:
                self._leaving.add(request_id)
                self.after_ms(1, lambda request_id=request_id: self.feed(ClientGone(request_id)))  # type: ignore[misc]
        self._leaving &= self.world.requests.keys()

    # ---- work ----------------------------------------------------------------------------------------------------

    def serve(self, effect: Forward) -> None:
        request_id, known = effect.request_id, self.works.get(effect.request_id)
        body = self.machine.bodies.get(effect.resident_id)
        if request_id not in self.held or self._over.get(request_id) == effect.lease_id or body is None:
            return
        if known is not None and known.lease_id == effect.lease_id:
            return
        self._check_work(effect)
        self.works[request_id] = work = Work(request_id, effect.lease_id, body, self.streams(request_id))
        self.outcomes[request_id].began_at = self.now
        if body.gone:
            self.lose_connection(work)
            return
        body.working += 1
        if not self.machine.finds_room(body):
            self.run_out(body)
            return
        self._step(body, self.work_ms(request_id), lambda: self._answered(work))
        self.after_ms(ANSWER_TIMEOUT_MS, lambda: self._no_answer(work))

    def _check_work(self, effect: Forward) -> None:
        """Only on a resident that is READY, for whose work room was shown, and whose evictions are finished."""
        found = self.world.find_resident(effect.resident_id)
        assert found is not None, "work on nothing"
        state, record = found
        lease = state.leases[effect.lease_id]
        assert record.resident.state is ResidentState.READY, "work on what is not ready"
        assert record.eviction is None
        assert not record.awaits, "work before its evictions are finished"
        assert lease.room_confirmed
        assert lease.lease.expires_at > self.now, "work under a lease that ran out"

    def _answered(self, work: Work) -> None:
        if work.over:
            return
        work.body.working -= 1
        failure = Failure.INVALID_OUTPUT if self.machine.lies_ready else None
        self._end(work, 200 if failure is None else 503, failure, "" if failure is None else "http_status_500")

    def _no_answer(self, work: Work) -> None:
        if not work.over:
            self._break_off(work)
            self._end(work, 503, Failure.TIMEOUT, "no_answer_in_time")

    def lose_connection(self, work: Work) -> None:
        """It broke; whoever knows more of it has a second to say so."""
        if work.over:
            return
        self._break_off(work)
        self.after_ms(EXIT_NOTICE_MS, lambda: self._connection_lost(work))

    def _connection_lost(self, work: Work) -> None:
        if self.works.get(work.request_id) is work:
            self._end(work, 503, Failure.RUNTIME_CRASH, "connection_lost")

    def work_of(self, body: Body) -> list[Callable[[], None]]:
        mine = [work for work in self.works.values() if work.body is body]
        return [lambda work=work: self.lose_connection(work) for work in mine]  # type: ignore[misc]

    def _break_off(self, work: Work) -> None:
        """Its connection is closed; the runtime ends it a little later, or when it is not stalled any more."""
        if not work.over:
            work.over = True
            self._step(work.body, ABORT_MS, lambda: self._aborted(work.body))

    @staticmethod
    def _aborted(body: Body) -> None:
        body.working = max(0, body.working - 1)

    def _end(self, work: Work, status: int, failure: Failure | None, detail: str) -> None:
        work.over = True
        del self.works[work.request_id]
        unsent = failure in MAY_GO_BETTER and not work.sent and not self.in_trouble
        if unsent:
            self._over[work.request_id] = work.lease_id
        else:
            self._let_go(work.request_id)
        ended = WorkEnded(
            work.request_id, status, 10, 100, 5, 7, failure, detail, False, unsent=unsent, lease_id=work.lease_id
        )
        self.feed(ended)

    # ---- what is recorded ----------------------------------------------------------------------------------------

    def _tell(self, data: object) -> None:
        match data:
            case RequestFailed() | RequestCancelled() | RequestCompleted():
                self._told_end(data)
            case LeasePreempted(request_id=request_id, requeued=True):
                self._put_back(request_id, Reason.PREEMPTED, None, "preempted")
            case RequestRetried(request_id=request_id):
                self._over.pop(request_id, None)
                self._put_back(request_id, None, data.failure, data.detail)
            case RequestFellBack(request_id=request_id):
                self._over.pop(request_id, None)
                self._put_back(request_id, data.reason, data.failure, data.detail)
            case ResidentLoadStarted(resident_id=resident_id) | LeaseRoomConfirmed(resident_id=resident_id):
                found = self.world.find_resident(resident_id)
                assert found is not None
                self.machine.note_room(resident_id, found[0].accelerator.accelerator_id)
            case _:
                pass  # nobody at the desk waits for it

    def _told_end(self, data: RequestFailed | RequestCancelled | RequestCompleted) -> None:
        request_id = data.request_id
        if (outcome := self.outcomes.get(request_id)) is not None and outcome.event is None:
            outcome.ended_at, outcome.event = self.now, data
        self._let_go(request_id)
        if (work := self.works.pop(request_id, None)) is not None:
            self._break_off(work)

    def _put_back(self, request_id: str, reason: Reason | None, failure: Failure | None, detail: str) -> None:
        """Its lease is lost and it waits for another, unless its client has seen something: then it ends here."""
        work = self.works.pop(request_id, None)
        if work is None:
            return
        self._break_off(work)
        if work.sent:
            self._let_go(request_id)
            self.outcomes[request_id].event = "cut_off"
            cut = AnswerCutOff(request_id, reason, failure, detail)
            self.after_ms(1, lambda: self.feed(cut))
