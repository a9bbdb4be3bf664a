"""`gpuledger doctor`: every check in its order. What each looks at and says is in the modules beside this one.

The machine is looked at whether there is a configuration or not; NVML is asked once, and its answer is what all checks
of cards are about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from gpuledger.adapters.telemetry import nvml_binding as nvml
from gpuledger.domain.document_problems import DocumentError
from gpuledger.domain.state import Kind

from .config import Config, HostEntry
from .doctor_findings import Finding, Result, fail, guarded, ok, warn
from .doctor_gpu import check_cards, check_devices, check_driver, check_pids, check_programs
from .doctor_host import (
    check_caches,
    check_clock,
    check_host_limit,
    check_huge_pages,
    check_limits,
    check_memory,
    check_overcommit,
)
from .doctor_ledger import check_address, check_disk, check_permissions, check_scheduler, pids_of_scheduler
from .doctor_models import (
    check_binding,
    check_commands,
    check_models,
    check_places,
    check_runtimes,
    check_served,
    check_servers,
)
from .machine import Driver, Machine

SCHEMA: Final = "gpuledger.doctor/1"
Document: TypeAlias = dict[str, Any]

#: What a server without a configuration would hold open.
_OPEN_REQUESTS: Final = 1024


@dataclass(frozen=True, slots=True)
class Asked:
    """What a doctor is asked about. `config` None: the machine alone. `quick`: no model is read through."""

    config: Config | None = None
    quick: bool = False
    reading: Callable[[str], None] = lambda _: None


def examined(machine: Machine, asked: Asked) -> Iterator[Finding]:
    """Every finding, as it is made."""
    watched = asked.config is None or asked.config.document.accelerators.nvml is not False
    driver = Driver(nvml.UNKNOWN)
    if watched:
        try:
            driver = machine.driver()
        except Exception as error:  # noqa: BLE001 - what a driver does in its library must not end a doctor
            yield warn("driver", f"could not be asked: {error}", "nvidia-smi says more")
            watched = False
    else:
        yield ok("driver", "accelerators.nvml is false: cards are not watched")
    yield from _of_cards(machine, driver, asked.config) if watched else ()
    yield from _of_machine(machine, asked.config)
    if asked.config is None:
        yield from guarded("runtimes", lambda: check_servers(machine))
    else:
        yield from _of_configuration(machine, driver, asked.config, asked)


def _of_cards(machine: Machine, driver: Driver, config: Config | None) -> Iterator[Finding]:
    wanted = config is not None and (
        config.document.accelerators.nvml is True or any(one.kind is Kind.GPU for one in config.document.deployments)
    )
    yield from guarded("driver", lambda: check_driver(machine, driver, wanted))
    yield from guarded("devices", lambda: check_devices(machine, driver))
    yield from guarded("cards", lambda: check_cards(driver))
    yield from guarded("process ids", lambda: check_pids(machine, driver))

    def programs() -> Iterator[Finding]:
        ours = frozenset[int]() if config is None else pids_of_scheduler(machine, config)
        return check_programs(machine, driver, ours)

    yield from guarded("programs", programs)


def _of_machine(machine: Machine, config: Config | None) -> Iterator[Finding]:
    open_requests = _OPEN_REQUESTS if config is None else config.document.max_open_requests
    pins = config is not None and any(runtime.type == "vllm" for runtime in config.runtimes.values())
    yield from guarded("clock", lambda: check_clock(machine))
    yield from guarded("memory", lambda: check_memory(machine))
    yield from guarded("overcommit", lambda: check_overcommit(machine))
    yield from guarded("limits", lambda: check_limits(machine, open_requests, pins))
    yield from guarded("ZFS cache", lambda: check_caches(machine))
    yield from guarded("huge pages", lambda: check_huge_pages(machine))


def _of_configuration(machine: Machine, driver: Driver, config: Config, asked: Asked) -> Iterator[Finding]:
    host = config.document.accelerators.host
    limit = host.memory_limit_bytes if isinstance(host, HostEntry) else None
    yield from guarded("memory_limit_bytes", lambda: check_host_limit(machine, limit))
    yield from guarded("policy", lambda: _policy(driver, config))
    yield from guarded("disk", lambda: check_disk(machine, config))
    yield from guarded("permissions", lambda: check_permissions(config))
    yield from guarded("scheduler", lambda: check_scheduler(machine, config))
    yield from guarded("address", lambda: check_address(machine, config))
    yield from guarded("deployments", lambda: check_served(config))
    yield from guarded("places", lambda: check_places(driver, config))
    yield from guarded("models", lambda: check_models(machine, driver, config))
    yield from guarded("programs", lambda: check_commands(machine, config))
    if _uses_llama_cpp(config):
        yield from guarded("xllamacpp", check_binding)
    if not asked.quick:
        yield from guarded("runtimes", lambda: check_runtimes(machine, config, asked.reading))


def _uses_llama_cpp(config: Config) -> bool:
    return any(runtime.type == "llama_cpp" and runtime.server is None for runtime in config.runtimes.values())


def _policy(driver: Driver, config: Config) -> Iterable[Finding]:
    """Three samples must fit into the age at which one is stale, and each has to be read in time."""
    policy = config.policy
    age, interval = policy.telemetry_max_age_seconds, policy.sample_interval_seconds
    read_ms = sum(card.read_ms for card in driver.cards)
    told = f"samples every {interval} s count for {age} s"
    if read_ms > interval * 1000:
        yield warn(
            "policy",
            f"{told}, and reading the cards takes {read_ms} ms",
            f"persistence mode; or policy.sample_interval_seconds and at least 3 times that as "
            f"telemetry_max_age_seconds, above {read_ms // 1000} s",
        )
    else:
        yield ok("policy", f"{policy.revision}: {told}")


# ---- configuration that cannot be used --------------------------------------------------------------------------


def configuration_findings(error: DocumentError) -> Iterator[Finding]:
    """One for each problem of a configuration that cannot be used."""
    for problem in error.told():
        mend = "docs/configuration.md has every key and what it may be"
        yield fail("configuration", str(problem), mend)


def document_of(findings: Iterable[Finding], configuration: str | None) -> Document:
    """All findings with how the worst of them is."""
    told = list(findings)
    results = list(Result)
    return {
        "schema": SCHEMA,
        "configuration": configuration,
        "result": max((one.result for one in told), key=results.index, default=Result.OK).value,
        "counts": {result.value: sum(one.result is result for one in told) for result in results},
        "findings": [
            {"name": one.name, "result": one.result.value, "found": one.found, "mend": one.mend} for one in told
        ],
    }
