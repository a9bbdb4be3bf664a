"""What a shell tells the application, and what the application wants of it (architecture.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from .configuration import Configuration
from .events import EnvelopeMeasured
from .failures import Failure
from .policy import Policy, Priority
from .ports import ProcessIdentity
from .reasons import Reason
from .sampling import SampleTaken
from .state import Residency

# ---- inputs: what happened --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A client asks. `content_mac` is set when it named the request itself."""

    request_id: str
    client_id: str
    capability: str
    priority: Priority
    lab: bool
    requested_at: int
    deadline: int | None
    operation: Literal["embeddings", "chat", "completion", "transcription", "rerank"]
    body_bytes: int
    content_mac: str | None = None


@dataclass(frozen=True, slots=True)
class WorkEnded:
    """The work under a lease is over. `failure` is None when the runtime answered with a status below 500.

    `unsent`: the client still waits and has seen nothing of an answer, so a failure may be tried again. `lease_id`: the
    lease that it ended under, where that is known: what is said of one that is lost already is of no lease after it.
    """

    request_id: str
    status: int
    served_ms: int
    response_bytes: int
    prompt_tokens: int | None
    completion_tokens: int | None
    failure: Failure | None
    detail: str
    client_gone: bool
    unsent: bool = False
    lease_id: str | None = None


@dataclass(frozen=True, slots=True)
class ClientGone:
    """Before its work began."""

    request_id: str


@dataclass(frozen=True, slots=True)
class AnswerCutOff:
    """Its lease was lost and it was put back to be planned again, but its answer had begun: it ends here.

    One of `reason` (PREEMPTED) and `failure` is set: why the lease was lost.
    """

    request_id: str
    reason: Reason | None
    failure: Failure | None
    detail: str


@dataclass(frozen=True, slots=True)
class RequestsHeld:
    """These requests still have somebody who waits for them: their leases are renewed."""

    request_ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class RuntimeSpawned:
    resident_id: str
    process: ProcessIdentity


@dataclass(frozen=True, slots=True)
class RuntimeReady:
    resident_id: str


@dataclass(frozen=True, slots=True)
class RuntimeFailed:
    resident_id: str
    failure: Failure
    detail: str
    evidence_sha256: str


@dataclass(frozen=True, slots=True)
class RuntimeStopped:
    """Every process of it is gone."""

    resident_id: str


@dataclass(frozen=True, slots=True)
class EnvelopeTaken:
    """A measurement of one deployment's present configuration."""

    measured: EnvelopeMeasured


@dataclass(frozen=True, slots=True)
class Started:
    """A scheduler takes the ledger over, with this configuration."""

    configuration: Configuration


@dataclass(frozen=True, slots=True)
class ShutdownRequested:
    """Drain: no new work, what runs may end."""

    node_id: str


@dataclass(frozen=True, slots=True)
class DrainTimedOut:
    """What still runs is cancelled, so that its runtimes can be stopped."""

    node_id: str


# ---- inputs: what an operator wants (operations.py) ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RevisePolicy:
    by: str
    policy: Policy


@dataclass(frozen=True, slots=True)
class PauseLab:
    by: str


@dataclass(frozen=True, slots=True)
class ResumeLab:
    by: str


@dataclass(frozen=True, slots=True)
class SetResidency:
    by: str
    deployment_id: str
    residency: Residency


@dataclass(frozen=True, slots=True)
class CordonNode:
    by: str
    node_id: str


@dataclass(frozen=True, slots=True)
class UncordonNode:
    by: str
    node_id: str


@dataclass(frozen=True, slots=True)
class DrainNode:
    by: str
    node_id: str


@dataclass(frozen=True, slots=True)
class UnloadIdle:
    """Unload what nothing uses now, of one deployment or of all."""

    by: str
    deployment_id: str | None


@dataclass(frozen=True, slots=True)
class ClearAccelerator:
    """Its fault was looked at: work may go there again, until it shows another one."""

    by: str
    accelerator_id: str


@dataclass(frozen=True, slots=True)
class AcceptEnvelope:
    """An operator answers for an envelope that is suspect."""

    by: str
    deployment_id: str


Operation: TypeAlias = (
    RevisePolicy
    | PauseLab
    | ResumeLab
    | SetResidency
    | CordonNode
    | UncordonNode
    | DrainNode
    | UnloadIdle
    | ClearAccelerator
    | AcceptEnvelope
)

# ---- inputs: measuring by itself ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProfilingBegins:
    """Nothing is wanted, so an envelope could be measured. Refused (nothing recorded) when that is no longer so."""

    accelerator_id: str
    deployment_id: str


@dataclass(frozen=True, slots=True)
class ProfilingOver:
    accelerator_id: str
    deployment_id: str
    outcome: Literal["measured", "preempted", "failed"]
    detail: str


Input: TypeAlias = (
    RequestArrived
    | WorkEnded
    | AnswerCutOff
    | ClientGone
    | RequestsHeld
    | SampleTaken
    | RuntimeSpawned
    | RuntimeReady
    | RuntimeFailed
    | RuntimeStopped
    | EnvelopeTaken
    | Started
    | ShutdownRequested
    | DrainTimedOut
    | Operation
    | ProfilingBegins
    | ProfilingOver
)

# ---- effects: what is wanted of the world -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SpawnRuntime:
    """Start its process and hold it; answer RuntimeSpawned or RuntimeFailed."""

    resident_id: str
    deployment_id: str
    accelerator_id: str


@dataclass(frozen=True, slots=True)
class LoadRuntime:
    """Let it go on, and answer RuntimeReady or RuntimeFailed."""

    resident_id: str


@dataclass(frozen=True, slots=True)
class SleepRuntime:
    """Let it give its memory back; what that is worth the device shows. Answer RuntimeFailed if it does not."""

    resident_id: str


@dataclass(frozen=True, slots=True)
class WakeRuntime:
    """Let it take its memory again; answer RuntimeReady or RuntimeFailed."""

    resident_id: str


@dataclass(frozen=True, slots=True)
class StopRuntime:
    """End it, and answer RuntimeStopped. `process` is how one of an earlier run is known."""

    resident_id: str
    process: ProcessIdentity | None
    grace_seconds: int


@dataclass(frozen=True, slots=True)
class Forward:
    """Its work may begin; answer WorkEnded."""

    request_id: str
    lease_id: str
    resident_id: str
    deployment_id: str


Effect: TypeAlias = SpawnRuntime | LoadRuntime | SleepRuntime | WakeRuntime | StopRuntime | Forward


@dataclass(frozen=True, slots=True)
class Agenda:
    """Everything that is wanted now.

    `wake_at`: when time alone makes something due. `sample_after`: a sample observed after this instant is wanted as
    soon as that is possible. `sample_interval_ms`: otherwise, this often.
    """

    effects: tuple[Effect, ...]
    wake_at: int | None
    sample_after: int | None
    sample_interval_ms: int
    stopped: bool
