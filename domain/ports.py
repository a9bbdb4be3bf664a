"""The small Protocols the application needs of the world, each as small as its one user needs (style.md, habit 8)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from .events import NewEvent, Recorded
from .failures import Failure
from .state import Health, Kind

# ---- clock ------------------------------------------------------------------------------------------------------


class Clock(Protocol):
    """The clock of the ledger (semantics.md, preamble)."""

    def now(self) -> int:
        """An instant in microseconds; never less than the one before."""
        ...


# ---- ledger -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batch:
    """Events of one decision, to be appended together or not at all.

    `expect` are the stream versions that the decision was made on: all streams it writes are in it (0 for a new one),
    and those it only read and depends on (`policy`).
    """

    events: tuple[NewEvent, ...]
    expect: Mapping[str, int]


class LedgerConflict(Exception):
    """A stream of `expect` has moved on; nothing was appended."""

    def __init__(self, stream: str) -> None:
        super().__init__(f"stream {stream} has moved on")
        self.stream = stream


class LedgerUnavailable(Exception):
    """The store failed (disk full, file gone, locked past its bound); nothing was appended, as far as is known."""


class LedgerCorrupt(Exception):
    """What is stored is not what this ledger wrote."""

    def __init__(self, message: str, seq: int | None = None) -> None:
        super().__init__(message if seq is None else f"event {seq}: {message}")
        self.reason = message
        self.seq = seq


@dataclass(frozen=True, slots=True)
class Leaf:
    """The exact bytes of one event, as stored, hashed and exported."""

    seq: int
    body: bytes
    leaf_hash: bytes


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A folded state: a cache, discarded when its schema, hash or place in the ledger does not fit (ledger.md)."""

    seq: int
    schema: str
    leaf_hash: bytes
    body: bytes


class LedgerReader(Protocol):
    """A sequence of events in one total order: a ledger, or an export of one. Contract: tests/contract/test_ledger.py.

    Every method raises LedgerUnavailable, and LedgerCorrupt for what its writer would not have written.
    """

    def head(self) -> int:
        """The newest `seq`; 0 when empty."""
        ...

    def stream_version(self, stream: str) -> int:
        """The version of a stream's newest event; 0 for a stream that has none."""
        ...

    def read(self, after: int = 0, limit: int = 1000) -> tuple[Recorded, ...]:
        """At most `limit` events with `seq > after`, in order."""
        ...

    def read_stream(self, stream: str) -> tuple[Recorded, ...]:
        """The events of one stream, in order."""
        ...

    def read_backward(self, types: frozenset[str], limit: int) -> tuple[Recorded, ...]:
        """The newest `limit` events of these types, newest first."""
        ...

    def leaves(self, after: int = 0) -> Iterator[Leaf]:
        """Every leaf with `seq > after` up to the head, as stored and unjudged, in order, in constant memory."""
        ...

    def close(self) -> None: ...


class Ledger(LedgerReader, Protocol):
    """A ledger that can be appended to, by one thread or several."""

    def append(self, batch: Batch, at: int) -> tuple[Recorded, ...]:
        """Append all or nothing, durably. `at` is raised to the newest event's if it lies before it.

        A batch without events appends nothing, whatever it expects. Raises LedgerConflict, LedgerUnavailable, and
        ValueError for a batch that no ledger may take: a stream that is not in `expect`, a value outside the profile.
        """
        ...

    def save_snapshot(self, snapshot: Snapshot) -> None:
        """Keep a snapshot beside the events; older ones may go."""
        ...

    def load_snapshot(self) -> Snapshot | None:
        """The newest snapshot that is whole and whose leaf hash is that of the event at its `seq`."""
        ...


# ---- telemetry --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process, beyond the reuse of its pid: `start_ticks` is field 22 of /proc/PID/stat, in one boot."""

    pid: int
    start_ticks: int
    boot_id: str


@dataclass(frozen=True, slots=True)
class ManagedProcess:
    """The root of the process tree of a resident."""

    resident_id: str
    accelerator_id: str
    process: ProcessIdentity


@dataclass(frozen=True, slots=True)
class ManagedReading:
    """What a sample says of a resident's process tree. `used_bytes` is None where it cannot be read."""

    resident_id: str
    alive: bool
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class HealthFault:
    """One fault of a device: `cause` is a short typed word, `mark` grows with each further fault of that cause."""

    health: Health
    cause: str
    mark: int


#: What a device that nothing ails says.
NO_FAULT: Final = HealthFault(Health.HEALTHY, "", 0)


@dataclass(frozen=True, slots=True)
class AcceleratorReading:
    """One accelerator in one sample: memory and processes read together. Figures are as read, not yet judged.

    `foreign_processes`: distinct compute processes that belong to no resident (semantics.md 9); 0 on a host, where
    every other program of the machine would be one. `faults`: what the device says of its health, the worst first;
    each by itself, since one that was cleared must not hide the others. `unified`: a GPU that shares the memory of the
    host, and is measured as the host is. `blind`: why memory cannot be attributed by process here.
    """

    accelerator_id: str
    index: int
    kind: Kind
    gpu_class: str
    device_name: str
    driver_version: str
    total_bytes: int
    used_bytes: int
    managed: tuple[ManagedReading, ...]
    foreign_processes: int
    faults: tuple[HealthFault, ...] = ()
    unified: bool = False
    blind: str | None = None

    @property
    def worst(self) -> HealthFault:
        """Its health, as one value: what ails it most, or nothing."""
        return self.faults[0] if self.faults else NO_FAULT


@dataclass(frozen=True, slots=True)
class TelemetryFault:
    """DRIVER_ERROR. What is in the same sample for other accelerators stands.

    `accelerator_id` is None where the fault is that of no accelerator this source has ever seen. `code` is short and
    typed. `health` is what the fault says of the accelerator's health; None where it says nothing.
    """

    accelerator_id: str | None
    code: str
    health: Health | None


@dataclass(frozen=True, slots=True)
class NodeReading:
    """One sample of one node. `age_ms`: how old it was, by the monotonic clock, when it was handed over.

    `gone`: accelerators that no longer exist as such, by the word of the device: a GPU that was partitioned, an
    instance that its new layout no longer has. One that only cannot be seen is a fault.
    """

    accelerators: tuple[AcceleratorReading, ...]
    faults: tuple[TelemetryFault, ...]
    memory_bytes: int | None
    age_ms: int
    gone: tuple[str, ...] = ()


class Telemetry(Protocol):
    """A source of samples. Blocking: it is called in a thread of its own, never in the path of a decision."""

    def sample(self, managed: Sequence[ManagedProcess]) -> NodeReading:
        """Read every accelerator of the source once. Never raises for a device's sake: faults are values."""
        ...

    def close(self) -> None: ...


# ---- runtimes ---------------------------------------------------------------------------------------------------


class RuntimeFault(Exception):
    """A runtime did not do what was asked: class, short typed detail, and evidence that is hashed, never shown."""

    def __init__(self, failure: Failure, detail: str, evidence: bytes = b"") -> None:
        super().__init__(f"{failure}: {detail}")
        self.failure = failure
        self.detail = detail
        self.evidence = evidence


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a resident answers, and the secret that makes it answer nobody but the gateway.

    `blames_request`: words in the message of a 5xx of this runtime by which it means the request, not itself.
    `paths`: by operation, where it answers one elsewhere than OpenAI's API does.
    """

    base_url: str
    api_key: str = field(repr=False)
    blames_request: tuple[str, ...] = ()
    paths: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)


@dataclass(frozen=True, slots=True)
class RuntimeFacts:
    """What the local configuration of a deployment comes to (semantics.md 3)."""

    runtime: str
    runtime_version: str
    config_hash: str
    artifact_sha256: str | None
    artifact_bytes: int
    starts_alone: bool = False


@dataclass(frozen=True, slots=True)
class RuntimeFigures:
    """What a runtime says of itself; None where it does not. `cache_use_bp`: how full its cache is."""

    running: int | None
    waiting: int | None = None
    cache_use_bp: int | None = None

    @property
    def busy(self) -> int | None:
        """Requests that it works on or keeps waiting; None when it does not say."""
        return None if self.running is None else self.running + (self.waiting or 0)


class Runtimes(Protocol):
    """Processes of ours, each for one resident. Contract: tests/contract/test_runtimes.py.

    Every call is safe to make twice. Deployments name what stands in the local configuration; nobody passes a command.
    """

    def facts(self, deployment_id: str) -> RuntimeFacts:
        """Blocking: a model is hashed when it has changed. Raises KeyError for a deployment that is not configured.

        Raises RuntimeFault (ARTIFACT_CORRUPT, MODEL_LOAD_FAILED) when the model or the program is not there.
        """
        ...

    async def spawn(self, resident_id: str, deployment_id: str, accelerator_id: str) -> ProcessIdentity:
        """Start its process, held before the runtime's first instruction until `load`. Raises RuntimeFault.

        ARTIFACT_CORRUPT: its `config_hash` is no longer the one that `facts` told last.
        """
        ...

    async def load(self, resident_id: str) -> None:
        """Let it go on, wait until it is ready and has answered a functional request. Raises RuntimeFault.

        GPU_OOM where it complained of memory; the process may still run and is for `stop` to end.
        """
        ...

    def endpoint(self, resident_id: str) -> Endpoint:
        """Raises KeyError for a resident that has no process here."""
        ...

    async def figures(self, resident_id: str) -> RuntimeFigures | None:
        """What the runtime itself reports; None where it does not say."""
        ...

    async def sleep(self, resident_id: str) -> None:
        """Ask it to give its memory back and keep its process. What it freed only the device tells.

        Raises RuntimeFault; KeyError as `endpoint` does.
        """
        ...

    async def wake(self, resident_id: str) -> None:
        """Take its memory again, wait until it has answered a functional request. Raises as `load` does."""
        ...

    async def exited(self, resident_id: str) -> RuntimeFault:
        """Wait until its process ends, and say how: `stopped` when we asked. Raises KeyError as `endpoint` does."""
        ...

    async def stop(self, resident_id: str, grace_seconds: int) -> None:
        """TERM, grace, TERM, grace, KILL; returns when its processes are gone. Unknown residents are gone already.

        Raises RuntimeFault (TIMEOUT `not_gone`) when they survive SIGKILL, as in a driver that hangs.
        """
        ...

    async def end_orphan(self, process: ProcessIdentity, grace_seconds: int) -> None:
        """The same for a process of an earlier run; one whose start time or boot differs is not ours: left alone."""
        ...

    async def close(self) -> None:
        """End every process of ours, at once."""
        ...
