"""What the benches found: the document `gpuledger.bench/1`, and a table of it for people."""

from __future__ import annotations

import os
import platform
import sqlite3
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Final, TypeAlias

from rich.console import Group, RenderableType
from rich.text import Text

from .bench import Figures, Result, Spread
from .plan_report import printable, table_of

Document: TypeAlias = Mapping[str, Any]

SCHEMA: Final = "gpuledger.bench/1"
#: Whose speed is in the figures.
PACKAGES: Final = ("gpuledger", "eventsourcing", "fastapi", "httpx", "orjson", "pydantic", "pydantic-core", "uvicorn")
_MICROS: Final = 1e6


def document_of(results: Sequence[Result], seconds: float, machine: Document) -> Document:
    """Everything that was measured, and on what. Durations are microseconds for one unit of work."""
    return {
        "schema": SCHEMA,
        "versions": versions(),
        "machine": machine,
        "seconds_per_bench": seconds,
        "benches": [_bench(result) for result in results],
    }


def _bench(result: Result) -> Document:
    return {
        "bench": result.bench,
        "error": result.error,
        "prepare_seconds": round(result.prepare_seconds, 3),
        "cases": [_case(figures) for figures in result.figures],
    }


def _case(figures: Figures) -> Document:
    return {
        "case": figures.case,
        "unit": figures.unit,
        "floor": figures.floor_name,
        "time": figures.time,
        "rounds": figures.rounds,
        "units": figures.units,
        "ratio": _spread(figures.ratio, 1),
        "ours_us": _spread(figures.ours, _MICROS),
        "floor_us": _spread(figures.floor, _MICROS),
        "details": figures.details,
    }


def _spread(spread: Spread, scale: float) -> dict[str, float]:
    """Median and quartiles."""
    values = {"median": spread.median, "q1": spread.low, "q3": spread.high}
    return {name: round(value * scale, 3) for name, value in values.items()}


# ---- on what ----------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Of everything that takes part."""
    own = {"python": platform.python_version(), "sqlite": sqlite3.sqlite_version}
    return own | {name: version(name) for name in PACKAGES}


def machine() -> dict[str, Any]:
    """The machine, and how busy it is. Temporary files are where the ledger of the bench is written."""
    folder = Path(gettempdir())
    return {
        "cpu": cpu_name(Path("/proc/cpuinfo")),
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.release()}",
        "file_system": file_system(folder, Path("/proc/self/mounts")),
    }


def cpu_name(cpuinfo: Path) -> str:
    """What Linux calls the first processor; the architecture where it has no name."""
    try:
        lines = cpuinfo.read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def file_system(folder: Path, mounts: Path) -> str:
    """Its type: on a `tmpfs` nothing waits for a disk."""
    try:
        entries = [line.split() for line in mounts.read_text("utf-8").splitlines()]
    except OSError:
        return "unknown"
    place = folder.resolve()
    # Of mounts on one point the last one counts.
    holding = [(len(entry[1]), number, entry[2]) for number, entry in enumerate(entries) if _holds(entry[1], place)]
    return max(holding, default=(0, 0, "unknown"))[2]


def _holds(point: str, place: Path) -> bool:
    return place.is_relative_to(point.replace("\\040", " "))


# ---- for people -------------------------------------------------------------------------------------------------


def report_of(document: Document) -> RenderableType:
    """A table of ratios with what they are made of, then what a case has to say of itself."""
    parts: list[RenderableType] = [_head(document), _table(document["benches"])]
    for bench in document["benches"]:
        for case in bench["cases"]:
            if case["details"]:
                told = ", ".join(f"{name} {value:g}" for name, value in case["details"].items())
                parts.append(Text(f"{bench['bench']}, {case['case']}: {told}"))
        if bench["error"] is not None:
            parts.append(Text(f"{bench['bench']} failed: {printable(bench['error'])}", style="bold red"))
    return Group(*parts)


def _head(document: Document) -> Text:
    on, names = document["machine"], document["versions"]
    told = " ".join(f"{name} {names[name]}" for name in ("gpuledger", "python", "orjson", "pydantic", "sqlite"))
    load = " ".join(f"{one:g}" for one in on["load_average"])
    return Text(
        f"{on['cpu']}, {on['cpus']} CPUs, load {load}, {on['system']}, temporary files on {on['file_system']}\n{told}",
        style="dim",
    )


def _table(benches: Sequence[Document]) -> RenderableType:
    title = "How many times as long as its floor takes (median of the rounds; half of them lie in the range)"
    table = table_of(
        title, "bench", "case", "#ratio", "#range", "#each", "#per second", "#floor", "floor", "time", "#rounds"
    )
    for bench in benches:
        for case in bench["cases"]:
            ratio, ours = case["ratio"], case["ours_us"]["median"]
            table.add_row(
                bench["bench"],
                case["case"],
                f"{ratio['median']:.1f}",
                f"{ratio['q1']:.1f} to {ratio['q3']:.1f}",
                f"{_duration(ours)} per {case['unit']}",
                _rate(ours),
                _duration(case["floor_us"]["median"]),
                case["floor"],
                case["time"],
                str(case["rounds"]),
            )
    return table


def _duration(micros: float) -> str:
    return f"{micros / 1000:.2f} ms" if micros >= 1000 else f"{micros:.1f} µs"


def _rate(micros: float) -> str:
    return f"{_MICROS / micros:,.0f}" if micros > 0 else "-"
