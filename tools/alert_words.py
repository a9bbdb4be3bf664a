"""What each alert says, and what to do about it, in words for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias, assert_never

from gpuledger.domain.explain import short, size
from gpuledger.domain.units import format_instant
from gpuledger.projections.alerts import Alert, AlertKind

Document: TypeAlias = dict[str, Any]

#: What `profile` in the configuration says of deployments without an envelope holds for a suspect one.
_MEASURE: Final = (
    "The next start measures it, or the running server once it is idle, as `profile` in the configuration says; or "
    "`gpuledger profile {deployment_id} --again` while no server runs."
)
_READ_WHY: Final = (
    "Where that failed, the log of the server says how, and the newest file of this deployment in the folder "
    "`runtimes` of the `state_dir` what its runtime printed."
)
_MEASURE_OR_ACCEPT: Final = f"{_MEASURE} To answer for it as it is: `gpuledger envelope accept {{deployment_id}}`."
#: Kind -> when there is one, and what to do. Ids of its subjects stand in braces.
ABOUT: Final[Mapping[AlertKind, tuple[str, str]]] = MappingProxyType(
    {
        AlertKind.ACCELERATOR_UNHEALTHY: (
            "An accelerator is not HEALTHY and takes no work.",
            (
                "Look at the device. A fault of its memory or an Xid stands until `gpuledger accelerator clear "
                "{accelerator_id}`; another one ends when the device says so."
            ),
        ),
        AlertKind.STALE_TELEMETRY: (
            "Nothing usable is known of an accelerator: it cannot be read, or its figures contradict each other.",
            (
                "See its code with `gpuledger failures --class DRIVER_ERROR`, and ask `gpuledger doctor`. Nothing is "
                "admitted there on a guess."
            ),
        ),
        AlertKind.ARTIFACT_CORRUPT: (
            "The model file of a deployment is absent, or not the one that it was registered with.",
            (
                "Put the right file in its place and start the server again: it is hashed then. Until then "
                "{deployment_id} is not loaded."
            ),
        ),
        AlertKind.CAPABILITY_DEGRADED: (
            "A capability failed `degraded_after_failures` times in a row; it is over when it answers a request.",
            "See why with `gpuledger failures`, and the log of its runtime.",
        ),
        AlertKind.ENVELOPE_EXCEEDED: (
            "A resident was seen to hold more than its envelope and the margin: no further load.",
            _MEASURE_OR_ACCEPT,
        ),
        AlertKind.ENVELOPE_SUSPECT: (
            "A runtime ran out of the memory that its envelope promised: no further load.",
            _MEASURE_OR_ACCEPT,
        ),
        AlertKind.NO_MEASURED_ENVELOPE: (
            "A deployment was not measured as it is configured now, on any class of accelerator that is here.",
            f"{_MEASURE} {_READ_WHY}",
        ),
        AlertKind.GPU_PRESSURE: (
            "Programs that are not ours hold much of an accelerator: its level is not NORMAL.",
            "See who holds the memory (docs/operations/RUNBOOK_GPU_PRESSURE.md). They are never touched.",
        ),
        AlertKind.THRASHING: (
            "One deployment made the same other one leave again and again. Shown for as long as was counted over.",
            (
                "Give one of {evictor} and {victim} another accelerator or a smaller configuration, or raise "
                "`min_residency_loads`."
            ),
        ),
        AlertKind.ATTRIBUTION_ESTIMATED: (
            "What our processes hold cannot be read on an accelerator: figures are ESTIMATED, loads go one at a time.",
            "In a container, share the process ids of the machine (`pid: host`); `gpuledger doctor` says more.",
        ),
        AlertKind.NODE_DRAINING: (
            "A node is drained by an operator, or for a shutdown: no work begins there, what is idle is unloaded.",
            "`gpuledger nodes uncordon {node_id}` when it shall take work again.",
        ),
        AlertKind.NODE_CORDONED: (
            "An operator cordoned a node: nothing is loaded there that is not there.",
            "`gpuledger nodes uncordon {node_id}` when it shall take work again.",
        ),
        AlertKind.LAB_PAUSED: (
            "LAB is paused: such requests, and all for deployments that are `lab_only`, are refused.",
            "`gpuledger lab resume` when they shall be served again.",
        ),
    }
)


def alert_documents(alerts: Sequence[Alert]) -> list[Document]:
    """Alerts as documents, with their words."""
    return [
        {
            "kind": alert.kind.value,
            "subjects": dict(alert.subjects),
            "since": None if alert.since is None else format_instant(alert.since),
            "figures": dict(alert.figures),
            "told": told(alert),
            "what_to_do": what_to_do(alert),
        }
        for alert in alerts
    ]


def what_to_do(alert: Alert) -> str:
    """The advice for its kind, with its ids."""
    return ABOUT[alert.kind][1].format_map(alert.subjects)


def told(alert: Alert) -> str:
    """One alert in a line, with its figures."""
    of, figures = alert.subjects, alert.figures
    match alert.kind:
        case AlertKind.ACCELERATOR_UNHEALTHY:
            stands = ", until an operator clears it" if figures["stands"] else ""
            return f"{of['accelerator_id']} is {figures['health']}: {figures['cause']}{stands}"
        case AlertKind.STALE_TELEMETRY:
            why = figures["fault"] or figures["invalid"] or "no fresh sample"
            return f"nothing usable is known of {of['accelerator_id']}: {why}"
        case AlertKind.ARTIFACT_CORRUPT:
            return f"the model file of {of['deployment_id']} is not what was registered: {figures['cause']}"
        case AlertKind.CAPABILITY_DEGRADED:
            last = f"{figures['failure']} ({figures['detail']})"
            return f"{of['capability']} failed {figures['failures']} times in a row, last with {last}"
        case AlertKind.ENVELOPE_EXCEEDED:
            shown = f"holds {_size(figures['observed_bytes'])}, measured were {_size(figures['peak_bytes'])} at most"
            return f"{of['resident_id']} {shown}: {of['deployment_id']} is not loaded again"
        case AlertKind.ENVELOPE_SUSPECT:
            ran_out = "ran out of memory with it" if figures["cause"] == "gpu_oom" else "is suspect"
            measured = f"{_size(figures['peak_bytes'])} at most on {of['gpu_class']}"
            return f"{of['deployment_id']} was measured to take {measured}, and {ran_out}: it is not loaded again"
        case AlertKind.NO_MEASURED_ENVELOPE:
            classes = figures["gpu_classes"] or "any accelerator that is here"
            as_configured = f"as it is configured now ({short(figures['config_hash'])})"
            return f"{of['deployment_id']} was not measured {as_configured} on {classes}: it is not loaded"
        case AlertKind.GPU_PRESSURE:
            return f"others hold {_percent(figures['pressure_bp'])} of {of['accelerator_id']}: {figures['level']}"
        case AlertKind.THRASHING:
            times = f"{figures['evictions']} times in {figures['window_seconds']} s"
            return f"on {of['accelerator_id']} {of['evictor']} made {of['victim']} leave {times}"
        case AlertKind.ATTRIBUTION_ESTIMATED:
            return f"what our processes hold on {of['accelerator_id']} is estimated: {figures['cause']}"
        case AlertKind.NODE_DRAINING:
            state = "is drained" if figures["drained"] else "drains"
            return f"node {of['node_id']} {state} ({figures['cause']}): no work begins there"
        case AlertKind.NODE_CORDONED:
            return f"node {of['node_id']} is cordoned: nothing new is loaded there"
        case AlertKind.LAB_PAUSED:
            return "the policy pauses LAB: such requests, and all for lab_only deployments, are refused"
        case _:
            assert_never(alert.kind)


def _size(amount: object) -> str:
    return size(amount) if isinstance(amount, int) else "-"


def _percent(basis_points: object) -> str:
    return f"{basis_points // 100}.{basis_points % 100:02d} %" if isinstance(basis_points, int) else "-"
