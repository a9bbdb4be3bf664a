"""The table of failures: what each class leads to, as the tests expect it and as docs/failures.md says it.

python -m tests.integration.failure_rows        # prints the table of the page
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from gpuledger.domain.failures import CAPACITY_FAILURES, Failure, owner_of
from gpuledger.projections.alerts import AlertKind

#: Of whom a failure tells: fields of FailureRecorded that are set.
OF_A_RESIDENT: Final = ("deployment_id", "accelerator_id", "resident_id")
OF_A_PLAN: Final = ("deployment_id", "accelerator_id", "request_id")
OF_A_REQUEST: Final = ("request_id",)
OF_A_LEASE: Final = (*OF_A_RESIDENT, "request_id")


@dataclass(frozen=True, slots=True)
class Row:
    """One class of failure.

    `status`, `code`, `retry_after`: what the client got, and whether it was told when to ask again. `alerts`: shown
    while it lasts. `grants`: how many leases it cost in all, with the `gateway_retries` of 1 of the tests. `backs_off`:
    whether a failed load set a back-off. `bound`: in words.
    """

    provoked: str
    status: int
    code: str
    retry_after: bool
    subjects: tuple[str, ...]
    grants: int
    bound: str
    alerts: tuple[AlertKind, ...] = ()
    backs_off: bool = False

    @property
    def client(self) -> str:
        return f"{self.status} `{self.code}`, {'with' if self.retry_after else 'no'} `Retry-After`"


_LOADED_TWICE: Final = "loaded `1 + gateway_retries` times; each failed load doubles the back-off"
_NOTHING_GRANTED: Final = "nothing is granted"

ROWS: Final[Mapping[Failure, Row]] = {
    Failure.MODEL_LOAD_FAILED: Row(
        provoked="a runtime that ends while it loads",
        status=503,
        code="MODEL_LOAD_FAILED",
        retry_after=True,
        subjects=OF_A_RESIDENT,
        grants=2,
        bound=_LOADED_TWICE,
        alerts=(AlertKind.CAPABILITY_DEGRADED,),
        backs_off=True,
    ),
    Failure.RUNTIME_CRASH: Row(
        provoked="a runtime that dies over each request",
        status=503,
        code="RUNTIME_CRASH",
        retry_after=True,
        subjects=OF_A_RESIDENT,
        grants=2,
        bound="served `1 + gateway_retries` times, each by a process of its own",
        alerts=(AlertKind.CAPABILITY_DEGRADED,),
    ),
    Failure.HEALTHCHECK_FAILED: Row(
        provoked="a runtime that is ready and answers its functional check with 500",
        status=503,
        code="HEALTHCHECK_FAILED",
        retry_after=True,
        subjects=OF_A_RESIDENT,
        grants=2,
        bound=_LOADED_TWICE,
        alerts=(AlertKind.CAPABILITY_DEGRADED,),
        backs_off=True,
    ),
    Failure.INVALID_OUTPUT: Row(
        provoked="a runtime whose embeddings are all zeros",
        status=503,
        code="INVALID_OUTPUT",
        retry_after=True,
        subjects=OF_A_RESIDENT,
        grants=2,
        bound=_LOADED_TWICE,
        alerts=(AlertKind.CAPABILITY_DEGRADED,),
        backs_off=True,
    ),
    Failure.TIMEOUT: Row(
        provoked="a runtime that does not answer a request within `upstream_timeout_seconds`",
        status=504,
        code="TIMEOUT",
        retry_after=True,
        subjects=OF_A_LEASE,
        grants=1,
        bound="not tried again: its client has waited long enough",
    ),
    Failure.GPU_OOM: Row(
        provoked="a runtime that ends with `CUDA out of memory`",
        status=503,
        code="GPU_OOM",
        retry_after=False,
        subjects=OF_A_RESIDENT,
        grants=1,
        bound="planned again once, when its memory is back; its envelope is suspect, so it is not loaded again",
        alerts=(AlertKind.ENVELOPE_SUSPECT,),
        backs_off=True,
    ),
    Failure.SCHEDULER_STATE_STALE: Row(
        provoked="a driver that tells of more free memory than there is",
        status=503,
        code="SCHEDULER_STATE_STALE",
        retry_after=True,
        subjects=OF_A_PLAN,
        grants=0,
        bound=_NOTHING_GRANTED,
        alerts=(AlertKind.STALE_TELEMETRY,),
    ),
    Failure.INSUFFICIENT_SCHEDULABLE_VRAM: Row(
        provoked="a model that fits the card, and not with its margin and the reserve",
        status=429,
        code="INSUFFICIENT_SCHEDULABLE_VRAM",
        retry_after=False,
        subjects=OF_A_PLAN,
        grants=0,
        bound=_NOTHING_GRANTED,
    ),
    Failure.EXTERNAL_GPU_PRESSURE: Row(
        provoked="a program of somebody else's that takes memory of the card",
        status=429,
        code="EXTERNAL_GPU_PRESSURE",
        retry_after=True,
        subjects=OF_A_PLAN,
        grants=0,
        bound=_NOTHING_GRANTED,
    ),
    Failure.RESIDENCY_CONFLICT: Row(
        provoked="an `exclusive` model beside one that is `always_warm`",
        status=429,
        code="RESIDENCY_CONFLICT",
        retry_after=True,
        subjects=OF_A_PLAN,
        grants=0,
        bound=_NOTHING_GRANTED,
    ),
    Failure.EVICTION_NOT_ALLOWED: Row(
        provoked="a model for which one that is `always_warm` would have to go",
        status=429,
        code="EVICTION_NOT_ALLOWED",
        retry_after=True,
        subjects=OF_A_PLAN,
        grants=0,
        bound=_NOTHING_GRANTED,
    ),
    Failure.DEADLINE_CANNOT_BE_MET: Row(
        provoked="a deadline that is over before the model is loaded",
        status=429,
        code="DEADLINE_CANNOT_BE_MET",
        retry_after=True,
        subjects=OF_A_PLAN,
        grants=0,
        bound=_NOTHING_GRANTED,
    ),
    Failure.LEASE_CONFLICT: Row(
        provoked="another process that writes to the accelerator's stream of the same ledger, without end",
        status=503,
        code="LEASE_CONFLICT",
        retry_after=True,
        subjects=OF_A_REQUEST,
        grants=0,
        bound="planned `1 + max_replans` times; nothing is granted",
    ),
    Failure.GPU_MEMORY_NOT_RECLAIMED: Row(
        provoked="a card that goes on showing the memory of a process that is gone",
        status=429,
        code="EXTERNAL_GPU_PRESSURE",
        retry_after=True,
        subjects=OF_A_RESIDENT,
        grants=1,
        bound="waited for `2 * stop_grace_seconds + reclaim_timeout_seconds`; then booked as external, once, and who"
        " waited for it is planned again",
    ),
    Failure.QUEUE_FULL: Row(
        provoked="one more request than `queue_limit` behind a long answer",
        status=429,
        code="QUEUE_FULL",
        retry_after=True,
        subjects=OF_A_PLAN,
        grants=0,
        bound=_NOTHING_GRANTED,
    ),
    Failure.LEASE_TIMEOUT: Row(
        provoked="a scheduler that is stopped (SIGSTOP) for longer than `lease_ttl_seconds`, and goes on",
        status=503,
        code="LEASE_TIMEOUT",
        retry_after=True,
        subjects=OF_A_LEASE,
        grants=1,
        bound="not tried again; its resident is drained, for `lease_ttl_seconds` at most",
    ),
    Failure.CAPABILITY_UNAVAILABLE: Row(
        provoked="a model that cannot be loaded, and a fallback that cannot either",
        status=503,
        code="MODEL_LOAD_FAILED",
        retry_after=True,
        subjects=OF_A_REQUEST,
        grants=3,
        bound="loaded `1 + gateway_retries` times, then the fallback of its contract once",
        alerts=(AlertKind.CAPABILITY_DEGRADED,),
        backs_off=True,
    ),
    Failure.ARTIFACT_CORRUPT: Row(
        provoked="a byte of a llama.cpp model that flips on disk",
        status=503,
        code="ARTIFACT_CORRUPT",
        retry_after=False,
        subjects=OF_A_RESIDENT,
        grants=1,
        bound="no process is started, and nothing is granted again until a start finds the right file",
        alerts=(AlertKind.ARTIFACT_CORRUPT,),
        backs_off=True,
    ),
    Failure.DRIVER_ERROR: Row(
        provoked="a card that falls off the bus",
        status=503,
        code="ACCELERATOR_UNHEALTHY",
        retry_after=True,
        subjects=("accelerator_id",),
        grants=0,
        bound="recorded when it begins and when its code changes; nothing is granted",
        alerts=(AlertKind.ACCELERATOR_UNHEALTHY, AlertKind.STALE_TELEMETRY),
    ),
}

HEAD: Final = (
    "| class | owner | kind | provoked by | what the client gets | alerts | what it cost, and what bounds it |"
)


def table_lines() -> Iterator[str]:
    """The table of docs/failures.md."""
    yield HEAD
    yield "| --- " * HEAD.count(" | ") + "| --- |"
    for failure, row in ROWS.items():
        kind = "capacity" if failure in CAPACITY_FAILURES else "internal"
        alerts = ", ".join(f"`{alert.value}`" for alert in row.alerts) or "-"
        leases = f"{row.grants} lease{'' if row.grants == 1 else 's'}: {row.bound}"
        cells = (f"`{failure.value}`", owner_of(failure).value, kind, row.provoked, row.client, alerts, leases)
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print("\n".join(table_lines()))
