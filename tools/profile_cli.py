"""`gpuledger profile DEPLOYMENT`: measure an envelope and record it (runtimes.md, Measuring an envelope).

No scheduler runs meanwhile, so nothing of ours is on the accelerator; the next one starts with what is recorded.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Annotated, Any, Final, TypeAlias

import orjson
import typer
from rich.console import Console

from gpuledger.adapters.ledger.codec import draft as encoded
from gpuledger.domain.accounting import reserve_of
from gpuledger.domain.draft import Draft
from gpuledger.domain.events import (
    DeploymentRegistered,
    DeploymentRevised,
    DeploymentSpec,
    NewEvent,
    StreamKind,
    stream_name,
)
from gpuledger.domain.explain import duration, size
from gpuledger.domain.ports import AcceleratorReading, RuntimeFault

from .bootstrap import Parts, configuration_of
from .config import Config
from .driving import FAILED, ConfigOption, driving, named_config, opened_parts, run
from .ledger_target import TargetError, bad_input_ends, end
from .measure import Measurement, Place, measure
from .plan_report import console, table_of

SCHEMA: Final = "gpuledger.profile/1"
Document: TypeAlias = dict[str, Any]

Deployment = Annotated[str, typer.Argument(metavar="DEPLOYMENT", help="The id of a deployment of the configuration.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document with exact bytes.")]


def register(app: typer.Typer) -> None:
    """Add the command of this module to the command line."""
    app.command("profile")(profile)


def profile(deployment: Deployment, config: ConfigOption = None, as_json: AsJson = False) -> None:
    """Measure what a deployment takes at work, on each class of accelerator that is here, and record it.

    Exit status: 0 measured, 1 it could not be measured, 2 bad input, or a scheduler that drives this ledger.
    """
    with bad_input_ends():
        loaded = named_config(config)
        if deployment not in loaded.runtimes:
            known = ", ".join(sorted(loaded.runtimes)) or "none"
            raise TargetError(f"{loaded.path} has no deployment {deployment}; it has {known}")
        with driving(loaded):
            try:
                measurements = run(_profile(loaded, opened_parts(loaded), deployment))
            except RuntimeFault as fault:
                end(f"{deployment} could not be measured: {fault}", FAILED)
    if as_json:
        document = {"schema": SCHEMA, "measurements": [_document(one) for one in measurements]}
        typer.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2))
    else:
        _print(console(), measurements)


async def _profile(config: Config, parts: Parts, deployment_id: str) -> list[Measurement]:
    """Raises RuntimeFault, DocumentError, LedgerUnavailable, LedgerCorrupt."""
    try:
        configuration = await asyncio.to_thread(configuration_of, config, parts)
        (spec,) = (one for one in configuration.deployments if one.deployment_id == deployment_id)
        measurements: list[Measurement] = []
        for place in await _places(config, parts, spec):
            measurement = await _measured(config, parts, place)
            await asyncio.to_thread(_record, parts, spec, measurement)
            measurements.append(measurement)
        return measurements
    finally:
        await parts.runtimes.close()
        parts.telemetry.close()
        parts.ledger.close()


async def _places(config: Config, parts: Parts, spec: DeploymentSpec) -> list[Place]:
    """One accelerator of each class of its kind. Raises TargetError when there is none."""
    reading = await asyncio.to_thread(parts.telemetry.sample, ())
    of_kind = [one for one in reading.accelerators if one.kind is spec.kind]
    if not of_kind:
        told = "; ".join(sorted({fault.code for fault in reading.faults}))
        raise TargetError(f"no accelerator of kind {spec.kind.value} can be seen" + (f" ({told})" if told else ""))
    classes: dict[str, AcceleratorReading] = {}
    for one in sorted(of_kind, key=lambda one: one.accelerator_id):
        classes.setdefault(one.gpu_class, one)
    return [
        Place(spec.deployment_id, one.accelerator_id, reserve_of(config.policy, one.total_bytes))
        for one in classes.values()
    ]


async def _measured(config: Config, parts: Parts, place: Place) -> Measurement:
    shown = Console(stderr=True, highlight=False)
    at_work = shown.status(f"measuring {place.deployment_id}") if shown.is_terminal else nullcontext()
    with at_work as status:

        def progress(step: str) -> None:
            if status is not None:
                status.update(f"measuring {place.deployment_id} on {place.accelerator_id}: {step}")

        runtime = config.runtimes[place.deployment_id]
        return await measure(parts.runtimes, parts.telemetry.sample, parts.clock, runtime, place, progress=progress)


def _record(parts: Parts, spec: DeploymentSpec, measurement: Measurement) -> None:
    """The deployment as it is now, if the ledger does not have it so, and its envelope. Raises LedgerUnavailable."""
    draft = Draft(parts.world, parts.clock.now())
    stream = stream_name(StreamKind.DEPLOYMENT, spec.deployment_id)
    known = draft.world.deployments.get(spec.deployment_id)
    if known is None:
        draft.emit(stream, DeploymentRegistered(spec, "configuration"))
    elif known.spec != spec or known.retired:
        draft.emit(stream, DeploymentRevised(spec, "configuration"))
    draft.emit(stream, measurement.event)
    batch = draft.batch()
    assert batch is not None
    parts.ledger.append(batch, draft.now)


# ---- what people and programs are told --------------------------------------------------------------------------


def _document(measurement: Measurement) -> Document:
    """What the ledger has, and the raw figures that it does not keep."""
    stream = stream_name(StreamKind.DEPLOYMENT, measurement.event.deployment_id)
    return {
        **orjson.loads(encoded(NewEvent(stream, measurement.event)).data),
        "baseline_bytes": measurement.baseline_bytes,
        "process_idle_bytes": measurement.process_idle_bytes,
        "process_peak_bytes": measurement.process_peak_bytes,
        "full_context_tokens": measurement.full_context_tokens,
        "samples": measurement.samples,
    }


def _print(out: Console, measurements: list[Measurement]) -> None:
    for measurement in measurements:
        event = measurement.event
        table = table_of(
            f"{event.deployment_id} on {event.accelerator_id} ({event.device_name})", "figure", "#measured"
        )
        rows = {
            "idle": size(event.envelope.idle_bytes),
            "peak": size(event.envelope.peak_bytes),
            "peak of loading": size(event.load_peak_bytes),
            "peak at work": size(event.busy_peak_bytes),
            "device, idle": size(event.device_idle_bytes),
            "device, peak": size(event.device_peak_bytes),
            "left after its end": size(event.residual_bytes),
            "load": duration(event.load_ms),
            "unload": duration(event.unload_ms),
            "tokens of a full context": str(measurement.full_context_tokens),
            "samples": str(measurement.samples),
        }
        for name, figure in rows.items():
            table.add_row(name, figure)
        out.print(table)
        out.print(f"recorded for configuration {event.envelope.config_hash[:16]} of {event.runtime_version}")
