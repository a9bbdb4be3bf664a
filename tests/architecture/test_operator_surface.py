"""Nothing that comes over the network names a program, a place in a file system, an address or a process (issue 3).

The schema of the operator API is walked as it is mounted: every name in it, and every shape that a value may have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import pytest
from fastapi import FastAPI

from gpuledger.adapters.http.auth import Clients, Operators
from gpuledger.adapters.http.operator import PREFIX, ROUTES, OperatorApi
from tests.unit.operator_nowhere import Nowhere

#: Words that a field for such a thing would have in its name.
FORBIDDEN: Final = frozenset(
    (
        "addr",
        "address",
        "arg",
        "args",
        "argv",
        "bin",
        "binary",
        "bind",
        "cmd",
        "command",
        "cwd",
        "dir",
        "directory",
        "endpoint",
        "entrypoint",
        "env",
        "environ",
        "environment",
        "exec",
        "executable",
        "file",
        "filename",
        "folder",
        "host",
        "hostname",
        "image",
        "library",
        "listen",
        "module",
        "path",
        "pid",
        "pids",
        "port",
        "process",
        "program",
        "python",
        "root",
        "script",
        "server",
        "shell",
        "signal",
        "socket",
        "uri",
        "url",
        "user",
        "volume",
        "workdir",
    )
)
#: What such a thing looks like. A value of any string that the API takes must not fit.
SHAPES: Final = (
    "/bin/sh",
    "./run.sh",
    "../../etc/passwd",
    "~/.ssh/id",
    "-c",
    "rm -rf x",
    "a;b",
    "$(id)",
    "`id`",
    "a|b",
)


def schema() -> dict[str, Any]:
    app = FastAPI()
    OperatorApi(Nowhere(), Operators(tuple), Clients(())).mount(app)
    return app.openapi()


def operations() -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in schema()["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def parts_of(operation: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, schema) of everything that a caller may write."""
    for parameter in operation.get("parameters", ()):
        yield from walk(parameter["name"], parameter["schema"], {})
    body = operation.get("requestBody")
    if body is not None:
        found = body["content"]["application/json"]["schema"]
        yield from walk("body", found, found.get("$defs", {}))


def walk(name: str, node: dict[str, Any], types: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    if "$ref" in node:
        node = types[str(node["$ref"]).rpartition("/")[2]]
    yield name, node
    for key, value in node.get("properties", {}).items():
        yield from walk(key, value, types)
    for choice in (*node.get("anyOf", ()), *node.get("oneOf", ()), *node.get("allOf", ())):
        yield from walk(name, choice, types)
    for inner in ("items", "additionalProperties", "propertyNames"):
        if isinstance(node.get(inner), dict):
            yield from walk(name, node[inner], types)


def words_of(name: str) -> set[str]:
    return set(re.findall(r"[a-z]+", name.lower()))


def test_the_schema_has_every_route() -> None:
    """Else what follows would look at nothing."""
    named = {name for name, _ in operations()}
    assert named == {f"{route.method} {PREFIX}{route.path}" for route in ROUTES}
    assert {"policy", "capability", "deployment", "reserve_ratio_bp", "limit", "subject"} <= {
        name for _, operation in operations() for name, _ in parts_of(operation)
    }


def test_no_field_is_called_so() -> None:
    wrong = [
        f"{where}: {name}"
        for where, operation in operations()
        for name, _ in parts_of(operation)
        if words_of(name) & FORBIDDEN
    ]
    assert wrong == []


def test_no_text_is_shaped_so() -> None:
    """Every text is a word of a closed list, or an id by a pattern that nothing of the sort fits."""
    wrong: list[str] = []
    for where, operation in operations():
        for name, node in parts_of(operation):
            if node.get("type") != "string" or "enum" in node or "const" in node:
                continue
            pattern = node.get("pattern")
            if pattern is None or any(re.search(pattern, shape) for shape in SHAPES):
                wrong.append(f"{where}: {name}")
    assert wrong == []


def test_every_value_has_a_type_and_every_object_is_closed() -> None:
    """Where anything may stand, a command may."""
    wrong: list[str] = []
    for where, operation in operations():
        for name, node in parts_of(operation):
            if not {"type", "anyOf", "oneOf", "allOf", "enum", "const"} & node.keys():
                wrong.append(f"{where}: {name} may be anything")
            if node.get("type") == "object" and node.get("additionalProperties") is not False:
                values = node.get("additionalProperties")
                if not isinstance(values, dict) or "enum" not in key_of(node):
                    wrong.append(f"{where}: {name} may have any key")
    assert wrong == []


def key_of(node: dict[str, Any]) -> dict[str, Any]:
    """Of a mapping whose keys are of a closed list."""
    found: dict[str, Any] = node.get("propertyNames", {})
    return found


@pytest.mark.parametrize("shape", [*SHAPES, "127.0.0.1 80", "\\\\host\\share", "C:\\x"])
def test_the_pattern_of_ids_refuses_them(shape: str) -> None:
    (pattern,) = {
        node["pattern"] for _, operation in operations() for _, node in parts_of(operation) if "pattern" in node
    }
    assert re.search(pattern, shape) is None
