"""Every runtime process of this node: the one implementation of `domain.ports.Runtimes`.

It knows residents and deployments by name and nothing of events, leases or plans. What it executes comes from the
local configuration alone.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, assert_never

import httpx
import structlog

from gpuledger.adapters import procfs
from gpuledger.adapters.complaints import out_of_memory
from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import Endpoint, ProcessIdentity, RuntimeFacts, RuntimeFault, RuntimeFigures
from gpuledger.domain.state import Kind
from gpuledger.domain.units import KIB, MIB

from . import checks, sleeping
from .artifacts import Artifacts
from .asking import client
from .command import CommandServer
from .config import CommandConfig, LlamaCppConfig, ReferenceConfig, RuntimeConfig, VllmConfig
from .engine import EVIDENCE_BYTES, OUT_OF_MEMORY, Engine, fault_of
from .llama_cpp import LlamaCpp
from .output import LOG_FOLDER, BoundedLog, log_path
from .process import AT_ONCE, LOOPBACK, POLITE, Child, PortReservation, Spawner, end_tree
from .reference import Reference
from .vllm import Vllm

_log = structlog.get_logger(__name__)

#: All that a runtime inherits. Anything else (credentials of the scheduler, proxies, LLAMA_ARG_*) stays behind.
INHERITED: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
#: Marks what a runtime leaves behind as ours when its root is gone (`end_orphan`).
MARK: Final = "GPULEDGER_RESIDENT"
#: Which scheduler started it. While that one lives its processes are no orphans, whatever a (copied) ledger says.
SCHEDULER_MARK: Final = "GPULEDGER_SCHEDULER"
#: The detail of an end by SIGKILL that was not ours: perhaps the kernel's, for want of memory. The device tells.
KILLED: Final = "killed"
KILLED_FOR_MEMORY: Final = "killed_for_memory"
#: Of the last output, that is searched for a complaint: a traceback of vLLM's is long, and its cause stands before it.
COMPLAINT_BYTES: Final = 64 * KIB
_CRASH_SHOWS_SECONDS: Final = 1.0
#: The id of an accelerator is the UUID that the driver gives it, whatever its form, unless it is a host's memory.
_HOST: Final = "host:"


@dataclass(slots=True)
class _Resident:
    """One process and what belongs to it."""

    engine: Engine
    config: RuntimeConfig
    kind: Kind
    child: Child
    port: PortReservation
    endpoint: Endpoint
    #: Processes that the kernel had ended for want of memory when this one was started.
    oom_kills: int
    ready: bool = False
    stopping: bool = False
    #: None while nobody knows: it was told, and did not do or say it.
    asleep: bool | None = False
    load: asyncio.Task[RuntimeFault | None] | None = None
    stop: asyncio.Task[None] | None = None
    #: Sleeps and wakes, one after the other, in the order in which they were asked for.
    turns: set[asyncio.Task[RuntimeFault | None]] = field(default_factory=set[asyncio.Task["RuntimeFault | None"]])
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def note_stop(self) -> None:
        """From now on its end is what was asked for, unless it has ended already."""
        self.stopping = self.stopping or self.child.exit_status is None

    async def exit_fault(self) -> RuntimeFault:
        """How its process, which has ended, ended."""
        output = await self.child.last_words(COMPLAINT_BYTES)
        failure = Failure.RUNTIME_CRASH if self.ready else Failure.MODEL_LOAD_FAILED
        if self.stopping:
            return RuntimeFault(failure, "stopped", output[-EVIDENCE_BYTES:])
        status = self.child.exit_status
        if status is None or status.signal != signal.SIGKILL:
            return fault_of(self.engine, failure, str(status), output)
        if procfs.oom_kills() > self.oom_kills:
            # Not ours, and the kernel has ended something for want of memory since this one began. On a host that is
            # the memory that was promised; on a card it is not.
            failure, detail = Failure.GPU_OOM if self.kind is Kind.HOST else failure, KILLED_FOR_MEMORY
        else:
            detail = KILLED
        return fault_of(self.engine, failure, detail, output)


class RuntimeManager:
    """Implements `domain.ports.Runtimes`. One event loop uses it, except for `facts`, which any thread may call."""

    def __init__(
        self,
        configs: Mapping[str, RuntimeConfig],
        state_folder: Path,
        *,
        environment: Mapping[str, str] | None = None,
        log_limit_bytes: int = 4 * MIB,
    ) -> None:
        """`configs` by deployment id. Logs go to `state_folder`/runtimes. `environment`: that of the process."""
        self._configs = dict(configs)
        self._folder = state_folder / LOG_FOLDER
        source = os.environ if environment is None else environment
        self._inherited = {name: source[name] for name in INHERITED if name in source}
        make = _EngineMaker(Artifacts(), self._inherited, source)
        self._engines = {name: make(config) for name, config in self._configs.items()}
        self._log_limit_bytes = log_limit_bytes
        self._known_facts: dict[str, RuntimeFacts] = {}
        self._spawner = Spawner()
        self._residents: dict[str, _Resident] = {}
        self._spawning: dict[str, asyncio.Task[_Resident]] = {}
        self._http: httpx.AsyncClient | None = None

    def facts(self, deployment_id: str) -> RuntimeFacts:
        """Raises RuntimeFault (ARTIFACT_CORRUPT, MODEL_LOAD_FAILED), KeyError for an unknown deployment. Blocking."""
        facts = self._engines[deployment_id].facts()
        self._known_facts[deployment_id] = facts
        return facts

    async def spawn(self, resident_id: str, deployment_id: str, accelerator_id: str) -> ProcessIdentity:
        """Start its process, held. Raises RuntimeFault; ARTIFACT_CORRUPT when it is not what `facts` told last."""
        resident = self._residents.get(resident_id)
        if resident is not None and resident.stop is not None:
            await asyncio.wait((resident.stop,))
            resident = self._residents.get(resident_id)
        if resident is None:
            task = self._spawning.get(resident_id)
            if task is None:
                task = asyncio.create_task(self._spawn(resident_id, deployment_id, accelerator_id))
                self._spawning[resident_id] = task
                task.add_done_callback(lambda _: self._spawning.pop(resident_id, None))
                task.add_done_callback(_look_at)
            # Shielded: a process whose asker went away is still registered, and so still ended by somebody.
            resident = await asyncio.shield(task)
        return resident.child.identity

    async def load(self, resident_id: str) -> None:
        """Raises RuntimeFault, KeyError for an unknown resident."""
        resident = self._residents[resident_id]
        if resident.load is None:
            resident.load = asyncio.create_task(self._load(resident))
        fault = await asyncio.shield(resident.load)
        if fault is not None:
            raise fault

    def endpoint(self, resident_id: str) -> Endpoint:
        return self._residents[resident_id].endpoint

    async def figures(self, resident_id: str) -> RuntimeFigures | None:
        """None also for a resident that is not ready, or too busy to say."""
        resident = self._residents.get(resident_id)
        if resident is None or not resident.ready:
            return None
        text = await checks.metrics(self._client(), resident.endpoint, resident.config.manners.metrics_path)
        return None if text is None else resident.engine.figures(text)

    async def sleep(self, resident_id: str) -> None:
        """Raises RuntimeFault (`cannot_sleep`, `not_ready`, TIMEOUT `sleep_timeout`), KeyError as `endpoint` does."""
        await self._take_turn(self._residents[resident_id], asleep=True)

    async def wake(self, resident_id: str) -> None:
        """Raises RuntimeFault (`cannot_sleep`, `not_ready`, TIMEOUT `wake_timeout`), KeyError as `endpoint` does."""
        await self._take_turn(self._residents[resident_id], asleep=False)

    async def exited(self, resident_id: str) -> RuntimeFault:
        """Raises KeyError for an unknown resident. Of one that `stop` ended the detail is `stopped`."""
        resident = self._residents[resident_id]
        await resident.child.wait()
        return await resident.exit_fault()

    async def stop(self, resident_id: str, grace_seconds: int) -> None:
        """Raises RuntimeFault (TIMEOUT `not_gone`) when even SIGKILL did not end it; it may be asked again."""
        spawning = self._spawning.get(resident_id)
        if spawning is not None:
            await asyncio.wait((spawning,))
        resident = self._residents.get(resident_id)
        if resident is None:
            return
        resident.note_stop()
        if resident.stop is None or resident.stop.done():
            resident.stop = asyncio.create_task(self._stop(resident_id, resident, grace_seconds))
            resident.stop.add_done_callback(_look_at)
        await asyncio.shield(resident.stop)

    async def end_orphan(self, process: ProcessIdentity, grace_seconds: int) -> None:
        """Raises RuntimeFault (TIMEOUT `not_gone`).

        While its root runs, its tree is ours. Of a root that is gone only what carries our mark is: by a double reuse
        of the pid others could stand in its group. What another scheduler drives that is alive is left alone: this
        ledger is then a copy of that one's.
        """
        if not await asyncio.to_thread(procfs.is_alive, process):
            await end_tree(process, POLITE, grace_seconds, admit=_is_orphan)
        elif await asyncio.to_thread(_has_no_other_scheduler, process):
            await end_tree(process, POLITE, grace_seconds)
        else:
            _log.warning("left alone: another scheduler drives it", pid=process.pid)

    async def close(self) -> None:
        """End every process of ours, at once, and the thread that started them. Raises RuntimeFault as `stop` does."""
        if self._spawning:
            await asyncio.wait(self._spawning.values())
        names = list(self._residents)
        try:
            for outcome in await asyncio.gather(*map(self._kill, names), return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome
        finally:
            self._spawner.close()
            if self._http is not None:
                await self._http.aclose()

    async def _kill(self, resident_id: str) -> None:
        """As `stop`, without its patience, whether it is being stopped or not."""
        resident = self._residents[resident_id]
        resident.note_stop()
        await resident.child.end(AT_ONCE, 0)
        await self.stop(resident_id, 0)

    # ---- one resident -------------------------------------------------------------------------------------------

    async def _spawn(self, resident_id: str, deployment_id: str, accelerator_id: str) -> _Resident:
        engine, config = self._engines[deployment_id], self._configs[deployment_id]
        if _kind(accelerator_id) not in engine.kinds:
            raise RuntimeFault(Failure.MODEL_LOAD_FAILED, "accelerator_kind_mismatch")
        await asyncio.to_thread(self._confirm_unchanged, deployment_id)
        try:
            resident = await self._start(engine, config, resident_id, deployment_id, accelerator_id)
        except OSError as error:
            raise RuntimeFault(Failure.MODEL_LOAD_FAILED, "cannot_start", str(error).encode()) from error
        self._residents[resident_id] = resident
        return resident

    async def _start(
        self, engine: Engine, config: RuntimeConfig, resident_id: str, deployment_id: str, accelerator_id: str
    ) -> _Resident:
        with ExitStack() as undo:
            port = undo.enter_context(closing(PortReservation()))
            log = undo.enter_context(closing(self._log(deployment_id, accelerator_id)))
            base_url, key = f"http://{LOOPBACK}:{port.port}", secrets.token_urlsafe(32)
            endpoint = Endpoint(base_url, key, engine.blames_request, config.manners.paths)
            command = engine.command(port.port, endpoint.api_key)
            # The one device that it may see, which it then calls CUDA0; on a host none.
            device = accelerator_id if _kind(accelerator_id) is Kind.GPU else ""
            own = {"CUDA_VISIBLE_DEVICES": device, MARK: resident_id, SCHEDULER_MARK: _written(_ourselves())}
            variables = {**self._inherited, **command.environment, **own}
            command = replace(command, environment=variables, marks=(MARK, SCHEDULER_MARK))
            child = await self._spawner.spawn(command, command.folder or self._folder, log)
            undo.pop_all()
        return _Resident(engine, config, _kind(accelerator_id), child, port, endpoint, procfs.oom_kills())

    def _confirm_unchanged(self, deployment_id: str) -> None:
        """What is started must be what its envelope was measured for (semantics.md 3)."""
        now = self._engines[deployment_id].facts()
        known = self._known_facts.setdefault(deployment_id, now)
        if known.config_hash != now.config_hash:
            # Of a server the version may have changed, or what shapes memory beside its model.
            same_model = known.artifact_sha256 is not None and known.artifact_sha256 == now.artifact_sha256
            detail = "runtime_changed" if same_model else "changed_since_registered"
            raise RuntimeFault(Failure.ARTIFACT_CORRUPT, detail, now.config_hash.encode())

    def _log(self, deployment_id: str, accelerator_id: str) -> BoundedLog:
        return BoundedLog(log_path(self._folder, deployment_id, accelerator_id), self._log_limit_bytes)

    async def _load(self, resident: _Resident) -> RuntimeFault | None:
        """The fault as a value: nobody may be there to catch it."""
        resident.child.open_gate()
        fault = await self._within(resident, "load_timeout", self._until_serving)
        resident.ready = fault is None
        return fault

    async def _within(
        self, resident: _Resident, timeout_detail: str, work: Callable[[_Resident], Coroutine[Any, Any, None]]
    ) -> RuntimeFault | None:
        """Do it in the time of a load, while its process lives. The fault as a value."""
        try:
            async with asyncio.timeout(resident.config.load_timeout_seconds):
                await self._or_ended(resident, work(resident))
        except TimeoutError:
            # It may have said why, and hang all the same.
            return fault_of(resident.engine, Failure.TIMEOUT, timeout_detail, resident.child.log.tail(COMPLAINT_BYTES))
        except RuntimeFault as fault:
            # A server that answers is not always one that could.
            if fault.failure is Failure.HEALTHCHECK_FAILED and out_of_memory(fault.evidence):
                return RuntimeFault(Failure.GPU_OOM, OUT_OF_MEMORY, fault.evidence)
            return fault
        except Exception as error:  # noqa: BLE001 - a defect that some answer has found fails this load, nothing else
            _log.exception("a runtime could not be spoken to")
            return RuntimeFault(Failure.HEALTHCHECK_FAILED, "unexpected_error", repr(error).encode())
        return None

    async def _or_ended(self, resident: _Resident, work: Coroutine[Any, Any, None]) -> None:
        """Done, or its process ended: whichever comes first. Raises RuntimeFault."""
        done = asyncio.create_task(work)
        ended = asyncio.create_task(resident.child.wait())
        try:
            await asyncio.wait((done, ended), return_when=asyncio.FIRST_COMPLETED)
            if done.done() and _lost_connection(done.exception()):
                # A crash closes the connection before it ends the process; it is the better explanation.
                await asyncio.wait((ended,), timeout=_CRASH_SHOWS_SECONDS)
            if ended.done():
                raise await resident.exit_fault()
            await done
        finally:
            ended.cancel()
            done.cancel()
            await asyncio.gather(done, ended, return_exceptions=True)

    async def _until_serving(self, resident: _Resident) -> None:
        await checks.until_ready(self._client(), resident.endpoint, resident.config.manners.ready_path)
        await self._check(resident)

    async def _check(self, resident: _Resident) -> None:
        manners = resident.config.manners
        probe = checks.Probe(manners.check_path, manners.check_fields)
        await checks.check(self._client(), resident.endpoint, resident.config, probe)

    async def _take_turn(self, resident: _Resident, *, asleep: bool) -> None:
        """Sleep or wake. Shielded: what a runtime was told goes on, whoever asked for it."""
        turn = asyncio.create_task(self._turn(resident, asleep))
        resident.turns.add(turn)
        turn.add_done_callback(resident.turns.discard)
        fault = await asyncio.shield(turn)
        if fault is not None:
            raise fault

    async def _turn(self, resident: _Resident, asleep: bool) -> RuntimeFault | None:
        async with resident.turn:
            if resident.config.manners.sleep is None:
                return RuntimeFault(Failure.HEALTHCHECK_FAILED, "cannot_sleep")
            if not resident.ready:
                return RuntimeFault(Failure.HEALTHCHECK_FAILED, "not_ready")
            if resident.asleep is asleep:
                return None
            resident.asleep = None
            if asleep:
                fault = await self._within(resident, "sleep_timeout", self._put_to_sleep)
            else:
                fault = await self._within(resident, "wake_timeout", self._wake_up)
            resident.asleep = asleep if fault is None else None
            return fault

    async def _put_to_sleep(self, resident: _Resident) -> None:
        assert resident.config.manners.sleep is not None
        await sleeping.put_to_sleep(self._client(), resident.endpoint, resident.config.manners.sleep)

    async def _wake_up(self, resident: _Resident) -> None:
        assert resident.config.manners.sleep is not None
        await sleeping.wake_up(self._client(), resident.endpoint, resident.config.manners.sleep)
        await self._check(resident)

    async def _stop(self, resident_id: str, resident: _Resident, grace_seconds: int) -> None:
        await resident.child.end(POLITE, grace_seconds)
        if resident.load is not None:
            await resident.load
        if resident.turns:
            await asyncio.wait(resident.turns)
        resident.port.close()
        self._residents.pop(resident_id, None)

    def _client(self) -> httpx.AsyncClient:
        if self._http is None:
            self._http = client()
        return self._http


@dataclass(frozen=True, slots=True)
class _EngineMaker:
    """What engines share. `source`: the whole environment, of which a configuration may name variables."""

    artifacts: Artifacts
    inherited: Mapping[str, str]
    source: Mapping[str, str]

    def __call__(self, config: RuntimeConfig) -> Engine:
        match config:
            case LlamaCppConfig():
                return LlamaCpp(config, self.artifacts, self.inherited)
            case VllmConfig():
                return Vllm(config, self.artifacts, self.inherited, self.source)
            case CommandConfig():
                return CommandServer(config, self.artifacts, self.inherited, self.source)
            case ReferenceConfig():
                return Reference(config)
            case _:
                assert_never(config)


def _kind(accelerator_id: str) -> Kind:
    return Kind.HOST if accelerator_id.startswith(_HOST) else Kind.GPU


def _look_at(task: asyncio.Task[Any]) -> None:
    """Whoever asked may have gone away: its failure is then nobody's, and no reason for asyncio to complain."""
    if not task.cancelled():
        task.exception()


def _lost_connection(error: BaseException | None) -> bool:
    return isinstance(error, RuntimeFault) and error.detail == checks.NO_ANSWER


def _is_orphan(process: ProcessIdentity) -> bool:
    return MARK in _environment(process) and _has_no_other_scheduler(process)


def _has_no_other_scheduler(process: ProcessIdentity) -> bool:
    """Whether the scheduler that started it is gone, or is this one; without a mark nobody claims it."""
    scheduler = _environment(process).get(SCHEDULER_MARK)
    if scheduler is None or scheduler == _written(_ourselves()):
        return True
    known = procfs.identity(int(pid)) if (pid := scheduler.partition(":")[0]).isdecimal() else None
    return known is None or _written(known) != scheduler or not procfs.is_alive(known)


def _environment(process: ProcessIdentity) -> dict[str, str]:
    """What it was started with; empty when it is gone or not ours to look at."""
    environment = procfs.read_process_file(process.pid, "environ") or b""
    variables = (variable.partition("=") for variable in environment.decode(errors="replace").split("\0"))
    return {name: value for name, _, value in variables}


def _ourselves() -> ProcessIdentity:
    known = procfs.identity(os.getpid())
    assert known is not None
    return known


def _written(process: ProcessIdentity) -> str:
    return f"{process.pid}:{process.start_ticks}:{process.boot_id}"
