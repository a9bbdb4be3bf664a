"""What docs/reasons.md says of each reason, class of failure and alert, in words for operators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from gpuledger.domain.failures import CAPACITY_FAILURES, SERVING_FAILURES, Failure, owner_of
from gpuledger.domain.reasons import Reason, eviction_helps, waiting_helps

from .alert_words import ABOUT

#: What advice names by its id.
_SUBJECTS: Final = ("accelerator_id", "deployment_id", "node_id", "evictor", "victim")
#: Stage -> reason -> when it is given, and what an operator can do.
_STAGES: Final[Mapping[str, Mapping[Reason, tuple[str, str]]]] = MappingProxyType(
    {
        "Policy: verdict REJECT_POLICY": {
            Reason.ACCELERATOR_KIND_MISMATCH: (
                "The deployment is for the other kind of accelerator (gpu, host).",
                "Nothing: a deployment is of one kind and never falls back to the other.",
            ),
            Reason.NODE_NOT_PRODUCTION_ELIGIBLE: (
                "The node is not eligible for production.",
                "Make the node eligible when it is fit for it.",
            ),
            Reason.DEPLOYMENT_NOT_PRODUCTION_ELIGIBLE: (
                "The deployment is not eligible for production and the client is not bound to LAB.",
                "Make the deployment eligible, or use a LAB client.",
            ),
            Reason.LAB_ONLY: (
                "The deployment serves LAB requests only and the client is not bound to LAB.",
                "Use a LAB client, or give the deployment another residency policy.",
            ),
            Reason.LAB_PAUSED: (
                "The policy pauses LAB, and the request or the deployment is LAB.",
                "`gpuledger lab resume`.",
            ),
            Reason.NODE_CORDONED: (
                "The node is cordoned and the deployment is not active there.",
                "`gpuledger nodes uncordon NODE`.",
            ),
            Reason.NODE_DRAINING: (
                "The node is draining.",
                "`gpuledger nodes uncordon NODE`; a drain for a shutdown ends with the next start.",
            ),
            Reason.LABEL_MISMATCH: (
                "The node lacks a label that the deployment selects nodes by, or has another value.",
                "Label the node, or change `node_selector`.",
            ),
            Reason.NODE_MEMORY_INSUFFICIENT: (
                "The node has less memory left than the deployment's `min_memory_bytes`.",
                "`gpuledger unload --idle` for what nothing uses there, or free its memory.",
            ),
            Reason.NO_MEASURED_ENVELOPE: (
                "This configuration was not measured on this class of accelerator, or what was measured is suspect.",
                "`gpuledger profile DEPLOYMENT`; see the alerts below.",
            ),
            Reason.REPLICA_LIMIT: (
                "The deployment has `max_replicas` serving replicas elsewhere.",
                "Nothing, or raise `max_replicas`.",
            ),
        },
        "Health: verdict REJECT_HEALTH": {
            Reason.NODE_NOT_READY: ("The node is not ready.", "See why its agent is not there."),
            Reason.ACCELERATOR_UNHEALTHY: (
                "The accelerator is not HEALTHY.",
                "`gpuledger status` has the cause; `gpuledger accelerator clear ID` when you have looked at it.",
            ),
            Reason.ACCELERATOR_ALLOCATED: (
                "The accelerator is held by a replica of another deployment.",
                "Nothing, or release that replica.",
            ),
            Reason.SCHEDULER_STATE_STALE: (
                "There is no usable sample of the accelerator: absent, too old, or from the future.",
                "`gpuledger failures --class DRIVER_ERROR`; nothing is admitted on a guess.",
            ),
        },
        "Capacity: verdict QUEUE or REJECT_CAPACITY": {
            Reason.DEADLINE_CANNOT_BE_MET: (
                "It would begin after its deadline, even if all goes well.",
                "Keep the model warm, or give the client more time.",
            ),
            Reason.EXTERNAL_GPU_PRESSURE: (
                "Programs that are not ours hold the memory, or pressure is CRITICAL.",
                "See who holds it (`gpuledger status`). They are never touched.",
            ),
            Reason.RESIDENT_DRAINING: (
                "The deployment's own resident is on its way out; it can be loaded again after that.",
                "Nothing: the request waits.",
            ),
            Reason.CONCURRENCY_LIMIT: (
                "As many requests as the deployment takes are running.",
                "Nothing, or raise `concurrency` and measure again.",
            ),
            Reason.DRAINING_FOR_WAITER: (
                "The resident takes no new work: another request has waited long for it to go.",
                "Nothing: this is what keeps a busy model from starving others.",
            ),
            Reason.LOAD_BACKOFF: (
                "The last load of the deployment here failed; the next is not tried before the back-off ends.",
                "`gpuledger failures`.",
            ),
            Reason.GPU_PRESSURE_HOLD: (
                "Pressure is ELEVATED or HIGH, and work of this class starts nothing then.",
                "Nothing, or see who holds the memory.",
            ),
            Reason.LOAD_IN_PROGRESS: (
                "Another load is under way and its memory is an estimate: two would be billed for each other.",
                "Nothing: loads go one at a time there.",
            ),
            Reason.QUEUED_BEHIND: (
                "A request before this one waits for memory here, and this one would delay it.",
                "Nothing: the request waits for its turn.",
            ),
            Reason.RESIDENCY_CONFLICT: (
                "One of the two is `exclusive` and shares its accelerator with nobody.",
                "Place them on different accelerators, or change the residency policy.",
            ),
            Reason.RESIDENCY_PROTECTED: (
                "What would have to go is protected: recently loaded, or kept for more important work.",
                "Nothing, or a shorter TTL or `min_residency_loads`.",
            ),
            Reason.WAITING_FOR_DRAIN: (
                "It fits once running work has ended; running work is never interrupted for it.",
                "Nothing: the request waits.",
            ),
            Reason.INSUFFICIENT_SCHEDULABLE_VRAM: (
                "It can never fit on this accelerator, empty as it may be.",
                "A larger accelerator, a smaller context or batch, or another model.",
            ),
            Reason.EVICTION_NOT_ALLOWED: (
                "It would fit only without residents that are never evicted.",
                "Review which deployments are `always_warm`.",
            ),
            Reason.QUEUE_FULL: (
                "`queue_limit` requests for the capability come before this one.",
                "Nothing, or raise `queue_limit`.",
            ),
        },
        "No candidate": {
            Reason.CAPABILITY_UNAVAILABLE: (
                "No deployment offers the capability at the rank asked for (REJECT_POLICY).",
                "Declare a deployment of it.",
            ),
            Reason.NO_ACCELERATOR: (
                "No accelerator is registered (REJECT_HEALTH).",
                "See `accelerators` in the configuration and what the start printed.",
            ),
        },
        "Outside the plan": {
            Reason.LEASE_CONFLICT: (
                "The grant lost every race for the accelerator, `max_replans` times.",
                "Ask again.",
            ),
            Reason.COMMAND_ID_REUSED: (
                "The request id stands for another question.",
                "A new id for a new question.",
            ),
            Reason.PREEMPTED: (
                "More important work took its memory after the answer had begun.",
                "Ask again; `interruptible` says whose work may be preempted.",
            ),
        },
    }
)

_BACKS_OFF: Final = "The deployment is not loaded there again before a back-off, which doubles each time."
_REFUSED: Final = "The request is refused, or takes the fallback of its contract."
#: Class -> what happened, and what follows from it.
_FAILURES: Final[Mapping[Failure, tuple[str, str]]] = MappingProxyType(
    {
        Failure.MODEL_LOAD_FAILED: (
            "The process of a model ended, or never came up, while it was loading.",
            _BACKS_OFF,
        ),
        Failure.RUNTIME_CRASH: (
            "The process of a model ended by itself.",
            "Its leases end; while it loaded, the deployment backs off there too.",
        ),
        Failure.HEALTHCHECK_FAILED: (
            "A model came up and did not answer its functional check as it must.",
            _BACKS_OFF,
        ),
        Failure.INVALID_OUTPUT: (
            "A runtime answered with something that is not an answer.",
            "The client gets a typed error; a load whose functional check found it backs off.",
        ),
        Failure.TIMEOUT: (
            "A runtime did not answer in time.",
            "The work ends, and its resident is drained; while it loaded, the deployment backs off there.",
        ),
        Failure.GPU_OOM: (
            "A runtime ran out of the memory that it was promised.",
            "Its memory is confirmed back, the request is planned again once, and the envelope is suspect.",
        ),
        Failure.SCHEDULER_STATE_STALE: (
            "Nothing usable is known of an accelerator.",
            "Nothing is admitted there until a sample comes.",
        ),
        Failure.INSUFFICIENT_SCHEDULABLE_VRAM: ("A request can never fit.", _REFUSED),
        Failure.EXTERNAL_GPU_PRESSURE: ("Programs that are not ours hold the memory.", _REFUSED),
        Failure.RESIDENCY_CONFLICT: ("Two models may not share an accelerator.", _REFUSED),
        Failure.EVICTION_NOT_ALLOWED: ("Only models that are never evicted stand in the way.", _REFUSED),
        Failure.DEADLINE_CANNOT_BE_MET: ("A request would begin after its deadline.", _REFUSED),
        Failure.LEASE_CONFLICT: (
            "A grant lost every race, `max_replans` times.",
            "The request is refused; it may be asked again.",
        ),
        Failure.GPU_MEMORY_NOT_RECLAIMED: (
            "A process is gone, or sleeps, and the device does not show its memory back.",
            "What stays is booked as external; who waited for it is planned again.",
        ),
        Failure.QUEUE_FULL: ("The queue of a capability is full.", _REFUSED),
        Failure.LEASE_TIMEOUT: (
            "A lease ran out without being renewed or released.",
            "Its request has failed; its resident is drained, and stopped if it does not become idle.",
        ),
        Failure.CAPABILITY_UNAVAILABLE: (
            "A capability could not be served after its bounded retries and its fallback.",
            "The client is told the failure that was the last.",
        ),
        Failure.ARTIFACT_CORRUPT: (
            "The file of a model is absent, or not the one that was measured.",
            "No memory is taken, and it is not loaded until a start finds the right file.",
        ),
        Failure.DRIVER_ERROR: (
            "The driver of an accelerator failed or is not there.",
            "What is there is UNKNOWN until it can be read again. Recorded as TelemetryMissed.",
        ),
    }
)


def reasons_page(generated: str) -> str:
    """docs/reasons.md, with the line `generated`. Raises KeyError for what nothing was written about."""
    lines = [
        "# Reasons, failures and alerts",
        "",
        generated,
        "",
        "A refusal is a reason with figures. The list is closed; a value is never renamed and never reused.",
        "*Waiting*: the same question may be answered otherwise later, with nobody changing a configuration; clients",
        "get `Retry-After` exactly then. *Eviction*: less managed residency could turn the refusal into an admission.",
    ]
    written = {reason: stage for stage, reasons in _STAGES.items() for reason in reasons}
    for reason in Reason:
        if reason not in written:
            raise KeyError(f"{reason}: say in tools/docs_reasons.py when it is given and what to do about it")
    for stage, reasons in _STAGES.items():
        rows = (
            (f"`{reason}`", when, _yes(waiting_helps(reason)), _yes(eviction_helps(reason)), what_to_do)
            for reason, (when, what_to_do) in reasons.items()
        )
        lines += ["", f"## {stage}", "", *table(("reason", "when", "waiting", "eviction", "what to do"), rows)]
    return "\n".join([*lines, *_failures_part(), *_alerts_part()]) + "\n"


def _failures_part() -> list[str]:
    rows = (
        (
            f"`{failure}`",
            owner_of(failure).value,
            _yes(failure in CAPACITY_FAILURES),
            _yes(failure in SERVING_FAILURES),
            *_FAILURES[failure],
        )
        for failure in Failure
    )
    return [
        "",
        "## Classes of failure",
        "",
        "A failure of capacity is a correct outcome, and is counted apart from internal errors everywhere.",
        "*Tried again*: a request of which nothing was answered yet is planned again, `gateway_retries` times (once",
        "after GPU_OOM), then for the next rank of its contract, if there is one. `degraded_after_failures` of these",
        "in a row make a capability degraded until it answers a request.",
        "",
        *table(("class", "owner", "capacity", "tried again", "what happened", "what follows"), rows),
    ]


def _alerts_part() -> list[str]:
    names = {name: name.removesuffix("_id").upper() for name in _SUBJECTS}
    rows = ((f"`{kind}`", when, what.format_map(names)) for kind, (when, what) in ABOUT.items())
    return [
        "",
        "## Alerts",
        "",
        "What needs a look, as `gpuledger alerts`, `gpuledger status` and the metric `gpuledger_alerts` show it. An",
        "alert is there while what it says is so. It has the ids of its subjects, figures, and since when, where the",
        "ledger says.",
        "",
        *table(("alert", "when", "what to do"), rows),
    ]


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """The lines of a table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
