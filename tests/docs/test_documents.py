"""What the documents name is there: links, commands and their options, keys, reasons, events, metrics, headers.

These are checks of words. Whether commands do what is said is for `test_readme.py`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol, cast

import pytest
import typer

from gpuledger.adapters.http.metrics import Metrics
from gpuledger.adapters.http.openai_errors import status_of
from gpuledger.adapters.http.operator import CALLS_AT_ONCE, CALLS_PER_SECOND
from gpuledger.adapters.http.operator_ports import Denial
from gpuledger.adapters.http.ports import ServerFacts
from gpuledger.adapters.runtimes.manager import INHERITED
from gpuledger.adapters.runtimes.vllm import SETTINGS as VLLM_SETTINGS
from gpuledger.adapters.telemetry.faults import Blindness, FaultCode, HealthCause
from gpuledger.adapters.telemetry.xids import FATAL_XIDS, cause_of
from gpuledger.domain.documents import Json, plan_case_of, policy_document, pressure_case_of
from gpuledger.domain.events import EVENT_TYPES
from gpuledger.domain.failures import Failure
from gpuledger.domain.policy import Policy, Pressure
from gpuledger.domain.reasons import Reason, Verdict
from gpuledger.domain.state import Attribution, Health, ResidentState
from gpuledger.domain.world import World
from gpuledger.projections.alerts import AlertKind
from gpuledger.tools import docs_config
from gpuledger.tools.cli import app
from gpuledger.tools.config import config_of
from gpuledger.tools.reading import parse_yaml
from gpuledger.tools.replay import Outcome
from gpuledger.tools.server_options import TOKEN_VARIABLE
from tests.docs.documents import ROOT, Block, blocks_of, name_of, pages, prose_of

PAGES: Final = pages()
#: Pages for people who use gpuledger; the others are about its code.
FOR_USERS: Final = tuple(
    ROOT / name
    for name in (
        "README.md",
        "docs/operating.md",
        "docs/clients.md",
        "docs/auditing.md",
        "docs/configuration.md",
        "docs/operations/RUNBOOK_GPU_PRESSURE.md",
    )
)
LONGEST_README: Final = 150
LONGEST_LINE: Final = 135

each_page: Final = pytest.mark.parametrize("page", PAGES, ids=name_of)
each_for_users: Final = pytest.mark.parametrize("page", FOR_USERS, ids=name_of)

_LINK: Final = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CODE: Final = re.compile(r"`([^`\n]+)`")


def codes_of(page: Path) -> Iterator[str]:
    """What stands between backticks in the prose of a page."""
    yield from _CODE.findall(prose_of(page))


# ---- form and links ---------------------------------------------------------------------------------------------


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").read_text("utf-8").count("\n") < LONGEST_README


@each_page
def test_lines_of_prose_are_short(page: Path) -> None:
    """Tables and blocks are as wide as they must be."""
    if page.name == "configuration.md":
        return  # generated
    long = [line for line in prose_of(page).splitlines() if len(line) > LONGEST_LINE and not line.startswith("|")]
    assert long == []


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    broken: list[str] = []
    for target in _LINK.findall(prose_of(page)):
        path, _, anchor = target.partition("#")
        if path.startswith(("http://", "https://")):
            continue
        found = (page.parent / path).resolve() if path else page
        if not found.exists() or (anchor and anchor not in anchors_of(found)):
            broken.append(target)
    assert broken == []


def anchors_of(page: Path) -> set[str]:
    """The anchors that headings get: lower case, blanks as dashes, punctuation dropped."""
    headings = re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in plain}


def test_the_index_has_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / target.partition("#")[0]).resolve() for target in _LINK.findall(index.read_text("utf-8"))}
    missing = [name_of(page) for page in PAGES if page != index and not ({page, page.parent} & linked)]
    assert missing == []


# ---- commands ---------------------------------------------------------------------------------------------------

_SHELL: Final = frozenset({"console", "sh", "ini"})
#: Where one command ends and the next begins.
_BETWEEN: Final = re.compile(r"\|\||&&|[|;&\n]|\$\(|\)")


def commands_of(page: Path) -> Iterator[str]:
    """Every `gpuledger ...` that a page tells people to type."""
    for block in blocks_of(page):
        if block.language in _SHELL:
            text = block.text.replace("\\\n", " ")
            yield from (part for part in _BETWEEN.split(text) if "gpuledger " in part)
    yield from (code for code in codes_of(page) if code.startswith("gpuledger "))


def words_after_gpuledger(command: str) -> list[str] | None:
    """The words of a command of ours; None for a text that only mentions gpuledger."""
    try:
        words = shlex.split(command, comments=True)
    except ValueError:
        return None  # half of something quoted: no command
    programs = [word == "gpuledger" or word.endswith("/bin/gpuledger") for word in words]
    prompts = ["$"] if words[:1] == ["$"] else []
    return words[len(prompts) + 1 :] if programs[len(prompts) : len(prompts) + 1] == [True] else None


class Parameter(Protocol):
    """What typer keeps of an option or an argument, whatever it is made of."""

    opts: list[str]
    param_type_name: str


class Command(Protocol):
    """A command or, with `commands`, a group of them."""

    name: str | None
    params: list[Parameter]


def subcommands_of(command: Command) -> dict[str, Command] | None:
    return cast("dict[str, Command] | None", getattr(command, "commands", None))


def complaint_about(words: list[str]) -> str | None:
    """What is wrong with a command line; None when every word that can be checked is known."""
    command = cast("Command", typer.main.get_command(app))
    words = list(words)
    while (commands := subcommands_of(command)) is not None:
        if not words or words[0] in options_of(command):
            return None
        name = words.pop(0)
        if name not in commands:
            return f"there is no command {name}"
        command = commands[name]
    options = options_of(command)
    unknown = [word for word in words if word.startswith("-") and word != "-" and word not in options]
    return f"{command.name} has no option {unknown[0]}" if unknown else None


def options_of(command: Command) -> set[str]:
    return {option for one in command.params if one.param_type_name == "option" for option in one.opts}


@each_page
def test_commands_and_their_options_exist(page: Path) -> None:
    found = [words for command in commands_of(page) if (words := words_after_gpuledger(command)) is not None]
    wrong = [f"{' '.join(words)}: {complaint}" for words in found if (complaint := complaint_about(words)) is not None]
    assert wrong == []


def test_commands_are_found_and_complained_about() -> None:
    """Whether the checks above see anything."""
    assert sum(1 for page in FOR_USERS for _ in commands_of(page)) > 40
    assert words_after_gpuledger("gpuledger plans --limit 1 --json") == ["plans", "--limit", "1", "--json"]
    assert words_after_gpuledger("/opt/gpuledger/bin/gpuledger serve --log json") == ["serve", "--log", "json"]
    assert words_after_gpuledger("pip install gpuledger") is None
    assert complaint_about(["plans", "--reason", "QUEUE_FULL"]) is None
    assert complaint_about(["plans", "--because", "QUEUE_FULL"]) == "plans has no option --because"
    assert complaint_about(["ledger", "import"]) is not None
    assert complaint_about(["--show-completion", "bash"]) is None
    assert complaint_about(["--hide-completion"]) is not None
    assert complaint_about(["verify"]) is not None


@each_page
def test_targets_of_make_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    text = "\n".join([*codes_of(page), *(block.text for block in blocks_of(page) if block.language in _SHELL)])
    assert set(re.findall(r"\bmake ([a-z]+)\b", text)) <= targets


# ---- words of the code ------------------------------------------------------------------------------------------

_ENUMS: Final[tuple[type[StrEnum], ...]] = (
    Reason,
    Failure,
    Verdict,
    AlertKind,
    Pressure,
    Health,
    Attribution,
    ResidentState,
    FaultCode,
    Blindness,
    HealthCause,
    Outcome,
)
_XIDS: Final = frozenset(cause_of(xid) for xid in FATAL_XIDS)
#: Names of our own files.
_FILES: Final = frozenset({"RUNBOOK_GPU_PRESSURE", "ADVANCED_GPU_SCHEDULER"})
#: Variables of the environment: those that runtimes get, and one of a server that is an example.
_VARIABLES: Final = frozenset({*INHERITED, *VLLM_SETTINGS, "CUDA_VISIBLE_DEVICES", "API_KEY", TOKEN_VARIABLE})


@each_page
def test_reasons_and_other_closed_words_exist(page: Path) -> None:
    known = {member.value for enum in _ENUMS for member in enum} | _XIDS | _FILES | _VARIABLES
    named = set(re.findall(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b", page.read_text("utf-8")))
    assert named - known == set()


@each_for_users
def test_events_that_are_named_exist(page: Path) -> None:
    known = set(EVENT_TYPES)
    named = set(re.findall(r"\b(?:[A-Z][a-z]+){2,}\b", prose_of(page)))
    others = {"MemTotal", "MemAvailable", "MemoryMax", "KillMode", "TimeoutStopSec", "OpenAI", "MiniLM"}
    assert {name for name in named if name not in known} - others == set()


def vocabulary() -> set[str]:
    """Snake-case words that a page for users may put between backticks."""
    # Kept current by a test of their own.
    generated = "".join((ROOT / "docs" / name).read_text("utf-8") for name in ("events.md", "configuration.md"))
    fields = set(re.findall(r"^\| `([a-z0-9_]+)` \|", generated, re.MULTILINE))
    values = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", generated))
    # Codes of the gateway's errors that are no reason, and details of failures of runtimes.
    paths = (path for family in ("http", "runtimes") for path in (ROOT / "adapters" / family).glob("*.py"))
    sources = "".join(path.read_text("utf-8") for path in paths)
    codes = set(re.findall(r'"([a-z]+(?:_[a-z]+)+)"', sources))
    repeated = {f"request_{state}" for state in ("completed", "refused", "cancelled")}
    return fields | values | codes | repeated | {name for name, _ in metric_names()} | OF_OTHER_PROGRAMS


#: Snake-case words of OpenAI's client and of vLLM, and names of our own files.
OF_OTHER_PROGRAMS: Final = {
    *("max_retries", "timestamp_granularities", "docs_gen", "docs_config", "test_readme", "collective_rpc"),
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
}


@each_for_users
def test_keys_and_fields_that_are_named_exist(page: Path) -> None:
    known = vocabulary()
    named = {word for code in codes_of(page) for word in re.findall(r"\b[a-z]+(?:_[a-z0-9]+)+\b", code)}
    assert named - known == set()


def test_every_key_of_the_configuration_is_documented() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    assert [key for key in (*docs_config.keys(), *policy_document(Policy())) if f"| `{key}` |" not in text] == []


# ---- documents in yaml ------------------------------------------------------------------------------------------


@each_page
def test_documents_in_yaml_are_valid(page: Path) -> None:
    for block in blocks_of(page):
        if block.language == "yaml":
            check_document(page, block)


def check_document(page: Path, block: Block) -> None:
    value = parse_yaml(block.text.encode(), f"{name_of(page)}:{block.line}")
    assert isinstance(value, dict)
    if "ledger" in value:
        config_of(value, ROOT / "gpuledger.yaml")
    elif "samples" in value:
        pressure_case_of(value)
    elif "nodes" in value:
        plan_case_of({"state": value, "request": a_request()})
    elif "requested_at" in value:
        plan_case_of({"state": {"now": value["requested_at"], "policy": {}}, "request": value})
    else:
        raise AssertionError(f"{name_of(page)}:{block.line}: what document is this?")


def a_request() -> Json:
    return {
        "request_id": "r",
        "client_id": "c",
        "capability": "some@1",
        "priority": "interactive",
        "requested_at": "2026-11-30T12:00:00.000000Z",
    }


# ---- the gateway ------------------------------------------------------------------------------------------------


def rows_of(page: Path, head: str) -> list[list[str]]:
    """The rows of the table whose head begins so."""
    lines = page.read_text("utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(head))
    rows: list[list[str]] = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_clients_are_told_the_status_of_every_reason() -> None:
    told: dict[str, set[int]] = {}
    for status, codes, _ in rows_of(ROOT / "docs" / "clients.md", "| status | code |"):
        for code in re.findall(r"[A-Za-z_]+", codes):
            told.setdefault(code, set()).update(int(one) for one in status.split(", "))
    assert {reason.value: told.get(reason.value) for reason in Reason} == {
        reason.value: {status_of(reason)} for reason in Reason
    }


def test_operators_are_told_the_status_of_every_code() -> None:
    told: dict[str, set[str]] = {}
    for statuses, codes, _ in rows_of(ROOT / "docs" / "operating.md", "| status | code of an operator's call |"):
        for code in re.findall(r"[a-z_]+", codes):
            told.setdefault(code, set()).update(statuses.split(", "))
    door = (ROOT / "adapters" / "http" / "operator.py").read_text("utf-8")
    made = re.findall(r'ApiError\((\d+), "([a-z_]+)"', door)
    assert len(made) >= 4
    assert {(status, code) for status, code in made if status not in told.get(code, set())} == set()
    assert {denial.value for denial in Denial} - told.keys() == set()
    # The other way: none that nobody makes.
    sources = "".join(path.read_text("utf-8") for path in (ROOT / "adapters" / "http").glob("*.py"))
    assert {code for code in told if f'"{code}"' not in sources} == set()


def test_clients_are_told_of_a_route_that_is_not_for_them() -> None:
    rows = rows_of(ROOT / "docs" / "clients.md", "| status | code |")
    assert [status for status, codes, _ in rows if "`operator_token_needed`" in codes] == ["403"]


def test_the_pace_of_operators_is_as_it_is_told() -> None:
    text = (ROOT / "docs" / "operating.md").read_text("utf-8")
    quiet_seconds = CALLS_AT_ONCE // CALLS_PER_SECOND
    told = f"A token has {CALLS_PER_SECOND} calls a second; one that was quiet for {quiet_seconds} seconds"
    assert f"{told} may make {CALLS_AT_ONCE} at once." in text


def test_headers_that_are_named_exist() -> None:
    text = (ROOT / "docs" / "clients.md").read_text("utf-8").lower()
    named = set(re.findall(r"\bx-[a-z-]+[a-z]", text))
    sources = "".join(path.read_text("utf-8").lower() for path in (ROOT / "adapters" / "http").glob("*.py"))
    assert named
    assert {name for name in named if f'"{name}"' not in sources} == set()


class Nothing:
    """A server with nothing in it, for the names of its metrics."""

    def __init__(self) -> None:
        self.world = World()

    def facts(self) -> ServerFacts:
        return ServerFacts(now=0, open_requests=0, ledger_writable=True)


def metric_names() -> set[tuple[str, str]]:
    """(name, type) of everything at /metrics. The instants at which counters were created are left out."""
    page = Metrics(Nothing()).render().decode()
    found = re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE)
    return {(name, kind) for name, kind in found if not name.endswith("_created")}


def test_every_metric_is_documented_and_no_other() -> None:
    rows = rows_of(ROOT / "docs" / "operating.md", "| metric |")
    told = {name for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert told == {name for name, _ in metric_names()}
    everywhere = {name for page in FOR_USERS for name in re.findall(r"\bgpuledger_[a-z_]+\b", page.read_text("utf-8"))}
    assert everywhere <= told


def test_codes_of_telemetry_are_documented() -> None:
    rows = rows_of(ROOT / "docs" / "operating.md", "| code | what it says |")
    told = {code for codes, _ in rows for code in codes.split(", ")}
    assert told == {code.value for code in FaultCode}


def test_causes_of_faults_of_a_device_are_documented() -> None:
    rows = rows_of(ROOT / "docs" / "operating.md", "| cause | health | what it says |")
    told = [word for causes, *_ in rows for word in re.findall(r"[A-Z][A-Z0-9_]{2,}", causes)]
    assert sorted(told) == sorted({*HealthCause, *_XIDS})


def test_words_for_what_cannot_be_attributed_are_documented() -> None:
    rows = rows_of(ROOT / "docs" / "operating.md", "| `blind` | why memory cannot be attributed by process |")
    assert {words for words, _ in rows} == set(Blindness)
