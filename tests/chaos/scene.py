"""What a run of chaos is played on: real models that do not fit together, their clients, and how much memory there is.

The memory that is scheduled is half of `BALLAST_BYTES` and `ROOM_BYTES` more than what is used at the start. Ballast
(`ballast.py`) fills it up to a level that is drawn, whatever else runs here: what is left for models is at most
`ROOM_BYTES`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from gpuledger.adapters.procfs import PROC
from gpuledger.domain.units import GIB, KIB, MIB
from gpuledger.tools import example_models
from tests.integration.serving import client, configuration, deployment

#: What models have together when nothing presses: less than half of what all of them would take.
ROOM_BYTES: Final = 900 * MIB
#: How much the use of the machine by others may change before it is felt: so much ballast makes way for it.
BALLAST_BYTES: Final = 2 * GIB
#: Of the machine, so much stays free, whatever is drawn. A run does not begin, and ballast does not grow, beyond it.
SPARED_BYTES: Final = 4 * GIB
RESERVE_BYTES: Final = 64 * MIB

_LOOKS: Final = 20
_LOOK_PAUSE_SECONDS: Final = 0.25
QUEUE_SECONDS: Final = 20
#: How long a runtime may be silent. Some are stopped for longer than that.
UPSTREAM_SECONDS: Final = 20

Priority = Literal["production", "interactive", "background", "benchmark"]


@dataclass(frozen=True, slots=True)
class Who:
    """A client, and its share of the requests."""

    name: str
    priority: Priority
    weight: int
    lab: bool = False

    @property
    def token(self) -> str:
        return f"token-of-{self.name}"


@dataclass(frozen=True, slots=True)
class Offer:
    """A capability: how it is asked for, at most how much of it, and its share of the requests."""

    capability: str
    task: Literal["embedding", "chat"]
    weight: int
    words: int = 12
    max_tokens: int = 24
    lab: bool = False


CLIENTS: Final = (
    Who("checkout", "production", 3),
    Who("desk", "interactive", 4),
    Who("indexer", "background", 4),
    Who("bench", "benchmark", 1),
    Who("lab", "interactive", 2, lab=True),
)

OFFERS: Final = (
    Offer("search@1", "embedding", 6, words=25),
    Offer("docs@1", "embedding", 4, words=200),
    Offer("chat@1", "chat", 5, max_tokens=60),
    Offer("essay@1", "chat", 3, max_tokens=800),
    Offer("trial@1", "chat", 2, lab=True),
    Offer("nap@1", "embedding", 3),
    Offer("doze@1", "chat", 2),
    Offer("bulk@1", "embedding", 2),
    Offer("alone@1", "embedding", 1),
    Offer("flaky@1", "embedding", 1),
    Offer("pinned@1", "embedding", 2),
)

#: What a short run, as that of the tests, is played with: a model of each sort.
FEW: Final = frozenset({"search@1", "chat@1", "nap@1", "bulk@1", "flaky@1"})


@dataclass(frozen=True, slots=True)
class Scene:
    """One run's configuration, and the files that it is about. `base_bytes`: what others use when nothing presses."""

    folder: Path
    config: Mapping[str, Any]
    offers: tuple[Offer, ...]
    limit_bytes: int
    base_bytes: int

    @property
    def flaky_file(self) -> Path:
        """While it is there, loads of `flaky` fail."""
        return self.folder / "flaky"

    @property
    def deployment_ids(self) -> tuple[str, ...]:
        return tuple(one["id"] for one in self.config["deployments"])


class TooLittleMemory(Exception):
    """The machine cannot spare what a run takes; the message says what is missing."""


def prepare(folder: Path, *, few: bool) -> Scene:
    """Look at the machine, make the models, and write down what runs. Raises TooLittleMemory, ExampleError."""
    total_bytes, available_bytes = memory()
    if available_bytes < ROOM_BYTES + BALLAST_BYTES + SPARED_BYTES:
        needed = (ROOM_BYTES + BALLAST_BYTES + SPARED_BYTES) // MIB
        raise TooLittleMemory(f"{needed} MiB of free memory are needed, and {available_bytes // MIB} are there")
    used_bytes = total_bytes - _most_available_bytes(available_bytes)
    base_bytes = used_bytes + BALLAST_BYTES // 2
    limit_bytes = base_bytes + ROOM_BYTES
    offers = tuple(offer for offer in OFFERS if not few or offer.capability in FEW)
    models = _models()
    wanted = {offer.capability for offer in offers}
    deployments = [one for one in _deployments(folder.resolve(), *models) if one["capability"] in wanted]
    config = configuration(
        deployments,
        clients=[client(who.name, who.token, priority=who.priority, lab=who.lab) for who in CLIENTS],
        accelerators={"host": {"memory_limit_bytes": limit_bytes}, "nvml": False},
        policy=_policy(base_bytes, limit_bytes),
        upstream_timeout_seconds=UPSTREAM_SECONDS,
        drain_seconds=30,
    )
    return Scene(folder, config, offers, limit_bytes, base_bytes)


def memory() -> tuple[int, int]:
    """(MemTotal, MemAvailable) of this machine, in bytes."""
    lines = (PROC / "meminfo").read_text("ascii").splitlines()
    fields = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    return int(fields["MemTotal"][0]) * KIB, int(fields["MemAvailable"][0]) * KIB


def _most_available_bytes(bytes_: int) -> int:
    """What is available while nothing of a moment, such as a compiler, takes more."""
    for _ in range(_LOOKS):
        time.sleep(_LOOK_PAUSE_SECONDS)
        bytes_ = max(bytes_, memory()[1])
    return bytes_


def _policy(base_bytes: int, limit_bytes: int) -> dict[str, Any]:
    """Short times, and levels of pressure that are reached when so many hundredths of the room are taken by others."""

    def level(hundredths: int) -> int:
        return (base_bytes + ROOM_BYTES * hundredths // 100) * 10_000 // (limit_bytes - RESERVE_BYTES)

    return {
        "reserve_floor_bytes": RESERVE_BYTES,
        "reserve_ratio_bp": 0,
        "margin_floor_bytes": "24MiB",
        "pressure_enter_bp": {"ELEVATED": level(35), "HIGH": level(55), "CRITICAL": level(75)},
        "pressure_exit_bp": {"ELEVATED": level(28), "HIGH": level(48), "CRITICAL": level(68)},
        "recovery_seconds": 3,
        "max_queue_seconds": QUEUE_SECONDS,
        "fair_wait_seconds": 8,
        "min_residency_cap_seconds": 5,
        "load_backoff_seconds": 1,
        "lease_ttl_seconds": 30,
        "degraded_after_failures": 2,
    }


def _models() -> tuple[Path, Path]:
    """(embedding, chat), made once per change of what makes them: those of the fixtures of the tests."""
    key = hashlib.sha256(Path(example_models.__file__).read_bytes()).hexdigest()[:16]
    folder = Path(__file__).resolve().parents[2] / "var" / "test-models" / key
    minilm, chat = folder / "all-minilm-l6-v2.f16.gguf", folder / "tiny-chat.gguf"
    if not minilm.exists():
        example_models.convert_minilm(minilm)
    if not chat.exists():
        example_models.make_tiny_chat(chat)
    return minilm, chat


def _deployments(folder: Path, minilm: Path, chat: Path) -> Sequence[dict[str, Any]]:
    return (*_of_llama_cpp(minilm, chat), *_of_reference_runtimes(folder))


def _of_llama_cpp(minilm: Path, chat: Path) -> Sequence[dict[str, Any]]:
    """Two models in six configurations, from 60 to 600 MiB."""

    def embedding(name: str, capability: str, tokens: int, **options: Any) -> dict[str, Any]:
        shape = {"context_length": tokens, "batch_size": tokens, "ubatch_size": tokens, "dimensions": 384}
        return _llama(name, capability, {"task": "embedding", "model": str(minilm), **shape}, options)

    def talking(name: str, capability: str, context: int, **options: Any) -> dict[str, Any]:
        return _llama(name, capability, {"task": "chat", "model": str(chat), "context_length": context}, options)

    idle = {"policy": "keep_warm", "ttl_seconds": 30}
    return (
        embedding("search", "search@1", 128, priority="production", residency=idle, concurrency=2),
        embedding("search-small", "search@1", 64, fallback_rank=1, residency=idle),
        embedding("docs", "docs@1", 512, priority="background", interruptible=True, queue_limit=6),
        talking("chat", "chat@1", 2048, concurrency=2, residency=idle),
        talking("essay", "essay@1", 8192, priority="background", interruptible=True, concurrency=3),
        talking("trial", "trial@1", 1024, residency={"policy": "lab_only", "ttl_seconds": 20}),
    )


def _llama(name: str, capability: str, runtime: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    known = {"id": name, "capability": capability, "kind": "host"}
    slots = options.get("concurrency", 1)
    return {**known, **options, "runtime": {"type": "llama_cpp", "threads": 1, "parallel": slots, **runtime}}


def _of_reference_runtimes(folder: Path) -> Sequence[dict[str, Any]]:
    """What llama.cpp on a host cannot: sleep, take long, fail on demand."""

    def holding(mib: int, **more: Any) -> dict[str, Any]:
        return {"idle_bytes": f"{mib}MiB", "peak_bytes": f"{mib + 16}MiB", "load_ms": 300, "service_ms": 30, **more}

    nap = {"asleep_bytes": "24MiB", "sleep_ms": 100, "wake_ms": 200}
    asleep = {"asleep_bytes": "28MiB", "sleep_ms": 200, "wake_ms": 300}
    flaky = {"fail_load": "exit", "while_file": str(folder / "flaky")}
    talk = {"token_ms": 20, "tokens": 60}
    return (
        deployment("nap", "nap@1", "embedding", sleep=asleep, runtime=holding(260, sleep=nap)),
        deployment("doze", "doze@1", "chat", interruptible=True, sleep=asleep, runtime=holding(180, sleep=nap, **talk)),
        deployment(
            "bulk",
            "bulk@1",
            "embedding",
            priority="benchmark",
            interruptible=True,
            residency={"policy": "load_on_demand", "ttl_seconds": 0},
            runtime=holding(420, service_ms=400),
        ),
        deployment(
            "alone",
            "alone@1",
            "embedding",
            residency={"policy": "exclusive", "ttl_seconds": 3},
            runtime=holding(120),
        ),
        deployment("flaky", "flaky@1", "embedding", runtime=holding(60, faults=flaky)),
        # Operators make it always warm for a while. For good, nothing that is exclusive could ever be loaded.
        deployment("pinned", "pinned@1", "embedding", runtime=holding(40)),
    )
