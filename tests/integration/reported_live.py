"""The cases of `tests/vectors/reported.json` on a server that runs: deployments, cards and requests that are real.

A case gets deployments and cards of its own, its name before theirs, and its cards are of a class of their own: nothing
of another case is a candidate for its request, so many are driven on one server at the same time. What a card shows is
`SCALE` times what reference runtimes hold, so figures are those of the vector to the byte wherever they are multiples
of `GRAIN_GIB` that a process can hold; a drive says what else it takes, and what is then not compared.

Envelopes are measured by `gpuledger serve` as it starts, one for each size. What was measured is recorded for every
deployment of that very configuration, on the class of its card, with the durations of the vector.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from gpuledger.adapters.ledger.sqlite import SqliteLedger
from gpuledger.domain.draft import Draft
from gpuledger.domain.events import EnvelopeMeasured, StreamKind, stream_name
from gpuledger.domain.units import GIB
from gpuledger.domain.world import World, fold
from tests.integration.gpu_stand_in import GRAIN_BYTES, gpu_configuration, gpu_stand_in
from tests.integration.serving import client, configuration, serving
from tests.shim import ShimCard

VECTORS: Final = Path(__file__).parents[1] / "vectors" / "reported.json"
#: A model of 20 GiB holds 320 MiB of this machine.
SCALE: Final = 64
GRAIN_GIB: Final = GRAIN_BYTES * SCALE / GIB
#: The interpreter alone has some 20 MiB.
LEAST_GIB: Final = 3 * GRAIN_GIB
#: Servers that measure side by side: most of it is waiting for figures to settle.
MEASURING: Final = 3
#: Of each slot that a runtime has: long enough for all of them to be seen taken at the same time while it is measured.
MEASURED_SERVICE_MS: Final = 300
CLASSES: Final = ("production", "interactive", "background")
TOKENS: Final = {name: f"token-of-{name}" for name in (*CLASSES, "lab")}
OPERATOR: Final = "ann"

Document: TypeAlias = dict[str, Any]
#: What a model holds at rest and at work, and how many requests it serves at a time.
Size: TypeAlias = tuple[float, float, int]


def _cases() -> Mapping[str, Document]:
    found: list[Document] = json.loads(VECTORS.read_bytes())
    return {case["name"]: case for case in found}


CASES: Final = _cases()


@dataclass(frozen=True)
class Live:
    """How one case is driven.

    `sizes`: of deployments whose figures are not those of the vector, in GiB. `factor`: all sizes of the vector times
    it. `totals`: of the cards, in bytes, where they are others. `options`, `runtime`: of deployments, besides what the
    vector says. `added`: deployments that only help to get there. `besides`: fields that are not compared.
    """

    name: str
    drive: Callable[[Any], Awaitable[None]]
    sizes: Mapping[str, Size] = field(default_factory=dict[str, Size])
    factor: float = 1
    totals: tuple[int, ...] = ()
    options: Mapping[str, Document] = field(default_factory=dict[str, Document])
    runtime: Mapping[str, Document] = field(default_factory=dict[str, Document])
    added: tuple[str, ...] = ()
    besides: frozenset[str] = frozenset()

    @property
    def case(self) -> Document:
        return CASES[self.name]

    @property
    def prefix(self) -> str:
        return f"c{list(CASES).index(self.name):02d}-"

    @property
    def gpu_class(self) -> str:
        return f"case-{self.prefix}rtx"

    @property
    def always_warm(self) -> bool:
        """Something of it is loaded as soon as the server starts, where its card is there then."""
        return any(model.residency["policy"] == "always_warm" for model in self.models())

    def cards(self) -> tuple[ShimCard, ...]:
        """The GPUs of the case, without what is on them."""
        shown = [one for node in self.case["state"]["nodes"] for one in node["accelerators"] if one["kind"] == "gpu"]
        totals = self.totals or [round(one["total_bytes"] * self.factor) for one in shown]
        name = self.gpu_class.replace("-", " ")
        return tuple(
            ShimCard(f"GPU-{self.prefix}{number}", name=name, total_bytes=total_bytes)
            for number, total_bytes in enumerate(totals)
        )

    def models(self) -> Iterator[Model]:
        every: list[Document] = [*self.case["state"]["deployments"], *map(_helper, self.added)]
        for given in every:
            name = given["deployment_id"]
            (envelope,) = given["envelopes"]
            idle, peak = (self.factor * envelope[key] / GIB for key in ("idle_bytes", "peak_bytes"))
            size = self.sizes.get(name, (idle, peak, given["concurrency"]))
            yield Model(self, given, size)


def _helper(name: str) -> Document:
    """Like most of the vectors."""
    (given,) = CASES["never-fits-is-rejected-at-once"]["state"]["deployments"]
    return {**given, "deployment_id": name, "capability": f"{name}@1"}


@dataclass(frozen=True)
class Model:
    """One deployment of a case: as the vector gives it, and the size that it has here."""

    live: Live
    given: Document
    size: Size

    @property
    def name(self) -> str:
        return str(self.given["deployment_id"])

    @property
    def key(self) -> tuple[str, Size]:
        """What is measured once."""
        return (self.given["kind"], self.size)

    @property
    def residency(self) -> Document:
        found: Document = {**self.given, **self.live.options.get(self.name, {})}["residency"]
        return found

    def entry(self, folder: Path) -> Document:
        """Of the configuration. Its fault, if it has one, acts while `fault_file` exists."""
        taken = ("kind", "priority", "queue_limit", "interruptible", "production_eligible", "max_replicas")
        runtime: Document = {"token_ms": 100, **self.live.runtime.get(self.name, {})}
        if "faults" in runtime:
            runtime["faults"] = {**runtime["faults"], "while_file": str(fault_file(folder, self.live, self.name))}
        return {
            "id": self.live.prefix + self.name,
            "capability": self.live.prefix + self.given["capability"],
            **{key: self.given[key] for key in taken},
            "fallback_rank": self.given["fallback_rank"],
            "concurrency": self.size[2],
            **self.live.options.get(self.name, {}),
            "residency": self.residency,
            "runtime": runtime_of(self.size, **runtime),
        }

    def measured(self, template: EnvelopeMeasured) -> EnvelopeMeasured:
        """What was measured of its size, for itself."""
        gpu_class = "host" if self.given["kind"] == "host" else self.live.gpu_class
        return replace(
            template,
            deployment_id=self.live.prefix + self.name,
            envelope=replace(template.envelope, gpu_class=gpu_class),
            load_ms=self.given["load_ms"],
            unload_ms=self.given["unload_ms"],
        )


def fault_file(folder: Path, live: Live, name: str) -> Path:
    return folder / f"fault-{live.prefix}{name}"


def runtime_of(size: Size, **options: Any) -> Document:
    """A reference runtime that shows so much on a card. An answer has no end of its own."""
    idle_bytes, peak_bytes = (round(max(one, LEAST_GIB) * GIB / SCALE) for one in size[:2])
    shape = {"idle_bytes": idle_bytes, "peak_bytes": peak_bytes, "context_length": 64}
    return {"type": "reference", "task": "chat", "tokens": 2**31 - 1, **shape, **options}


# ---- the configuration, and a ledger with the envelopes ---------------------------------------------------------


def configured(lives: Sequence[Live], folder: Path) -> Document:
    """Of the server that all of them are driven on."""
    clients = [client(name, TOKENS[name], priority=name) for name in CLASSES]
    clients.append(client("lab", TOKENS["lab"], priority="interactive", lab=True))
    return {
        **configuration(
            [model.entry(folder) for live in lives for model in live.models()],
            accelerators={"host": True, "nvml": True},
            profile="never",
            clients=clients,
        ),
        # m10-v1 but for how often a card is looked at, and how long a runtime that is to end is waited for.
        "policy": {"sample_interval_seconds": 1, "stop_grace_seconds": 2},
    }


def measure_all(lives: Sequence[Live], folder: Path) -> Mapping[tuple[str, Size], EnvelopeMeasured]:
    """One measurement of each size, made by servers side by side, on a card that holds the largest."""
    keys = sorted({model.key for live in lives for model in live.models()})
    parts = [keys[number::MEASURING] for number in range(MEASURING)]
    with ThreadPoolExecutor(MEASURING) as pool:
        folders = [folder / f"measuring-{number}" for number in range(MEASURING)]
        return {key: event for part in pool.map(_measured, folders, parts) for key, event in part}


def _measured(folder: Path, keys: Sequence[tuple[str, Size]]) -> list[tuple[tuple[str, Size], EnvelopeMeasured]]:
    folder.mkdir()
    entries = [
        {
            "id": f"size-{number}",
            "capability": f"size-{number}@1",
            "kind": kind,
            "concurrency": size[2],
            "runtime": runtime_of(size, service_ms=MEASURED_SERVICE_MS * size[2] if size[1] > size[0] else 0),
        }
        for number, (kind, size) in enumerate(keys)
    ]
    config = {**gpu_configuration(entries), "accelerators": {"host": True, "nvml": True}}
    with (
        gpu_stand_in(folder, [ShimCard("GPU-measuring", total_bytes=96 * GIB)], scale=SCALE) as gpus,
        gpus.serving(folder / "server", config) as server,
    ):
        found = {e.data.deployment_id: e.data for e in server.events() if isinstance(e.data, EnvelopeMeasured)}
        assert server.stop() == 0, server.log()
    return [(key, found[f"size-{number}"]) for number, key in enumerate(keys)]


def record_envelopes(
    ledger: Path, lives: Sequence[Live], measured: Mapping[tuple[str, Size], EnvelopeMeasured]
) -> None:
    """In the ledger of a server that is down, which knows the deployments. Each is of the configuration measured."""
    with closing(SqliteLedger(ledger)) as writer:
        world = fold(World(), read_all(writer))
        draft = Draft(world, math.floor(time.time() * 1_000_000))
        for model in (model for live in lives for model in live.models()):
            event = model.measured(measured[model.key])
            spec = world.deployments[event.deployment_id].spec
            assert event.envelope.config_hash == spec.config_hash
            if spec.kind.value == "gpu":
                idle, peak, _ = model.size
                assert (event.envelope.idle_bytes, event.envelope.peak_bytes) == (idle * GIB, peak * GIB), (
                    model.key,
                    event.envelope.idle_bytes / GIB,
                    event.envelope.peak_bytes / GIB,
                )
            draft.emit(stream_name(StreamKind.DEPLOYMENT, event.deployment_id), event)
        batch = draft.batch()
        assert batch is not None
        writer.append(batch, draft.now)


def read_all(ledger: SqliteLedger, after: int = 0) -> Iterator[Any]:
    while page := ledger.read(after):
        yield from page
        after = page[-1].seq


def prepared(lives: Sequence[Live], folder: Path) -> Document:
    """The configuration of the server to come in `folder`, whose ledger has the envelopes already."""
    config = configured(lives, folder)
    with ThreadPoolExecutor(1) as pool:
        measuring = pool.submit(measure_all, lives, folder)
        # It has no driver, and learns of the deployments.
        with serving(folder / "server", {**config, "accelerators": {"host": True, "nvml": False}}) as server:
            server.until(lambda: bool(server.world().deployments))
            assert server.stop() == 0, server.log()
        record_envelopes(server.ledger, lives, measuring.result())
    return config
