"""`gpuledger config diff`: what a start would record, in the words of its operator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.text import Text

from gpuledger.adapters.runtimes.manager import RuntimeManager
from gpuledger.domain.configuration import Configuration, difference
from gpuledger.domain.draft import Draft
from gpuledger.domain.events import EnvelopeMeasured
from gpuledger.domain.world import World
from gpuledger.tools.bootstrap import accelerator_ids_of, declared_by
from gpuledger.tools.config import config_of
from gpuledger.tools.config_cli import diff_report
from gpuledger.tools.config_diff import diff_document
from tests.unit.shells import envelope

NOW = 1_000_000


def declared(folder: Path, limit: str = "16GiB", **runtime: Any) -> Configuration:
    own = {"type": "reference", "task": "embedding", **runtime}
    deployment: Any = {"id": "emb", "capability": "emb@1", "kind": "host", "runtime": own}
    document: Any = {
        "ledger": "l.db",
        "clients": [{"id": "app"}],
        "deployments": [deployment],
        "accelerators": {"host": {"memory_limit_bytes": limit}, "nvml": False},
    }
    config = config_of(document, folder / "gpuledger.yaml")
    return declared_by(config, RuntimeManager(config.runtimes, folder), accelerator_ids_of(config))


def started(configuration: Configuration) -> Draft:
    draft = Draft(World(), NOW)
    for event in difference(World(), configuration, NOW):
        draft.emit(event.stream, event.data)
    return draft


def shown(world: World, configuration: Configuration) -> str:
    document = {"ledger": "l.db", **diff_document(world, configuration, NOW)}
    report = diff_report(document)
    assert isinstance(report, Text)
    return report.plain


def test_another_runtime_is_told_by_what_follows(tmp_path: Path) -> None:
    draft, changed = started(declared(tmp_path)), declared(tmp_path, idle_bytes="2MiB", peak_bytes="4MiB")
    told = shown(draft.world, changed)
    assert "its runtime, model or version changed (config_hash): it has to be measured again" in told
    (spec,) = changed.deployments
    assert spec.config_hash not in told
    draft.emit("deployment:emb", measured_as(spec.config_hash))
    assert "(config_hash): what it takes was measured so before" in shown(draft.world, changed)


def test_keys_that_are_not_recorded_are_not_passed_over(tmp_path: Path) -> None:
    draft, changed = started(declared(tmp_path)), declared(tmp_path, limit="8GiB")
    told = shown(draft.world, changed)
    assert "A start would record nothing of it." in told
    assert "Not shown: accelerators and the other keys" in told
    assert "take effect at the start" in told


def measured_as(config_hash: str) -> EnvelopeMeasured:
    known = envelope("emb", 1, NOW)
    return replace(known, envelope=replace(known.envelope, config_hash=config_hash))
