"""Documents from files, from standard input and from lines: JSON, or YAML for what people write by hand."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import yaml

from gpuledger.domain.document_problems import DocumentError
from gpuledger.domain.documents import (
    MAX_DEPTH,
    MAX_JSON_BYTES,
    Json,
    RepeatedKeys,
    integer_of,
    parse_json,
)

#: YAML is what people write; the loader, safe and in plain Python, takes about three seconds for this much.
MAX_YAML_BYTES: Final = 1024 * 1024
STDIN: Final = "-"


def read_document(path: str, where: str) -> Json:
    """The value in a file, or in standard input for `-`; `DocumentError` where there is none.

    YAML where the name ends in `.yaml` or `.yml`, or where the text does not begin as a JSON object does.
    """
    text = _read(path, where)
    if path.endswith((".yaml", ".yml")) or not (path.endswith(".json") or _looks_like_json(text)):
        return parse_yaml(text, where)
    return parse_json(text, where)


def _read(path: str, where: str) -> bytes:
    """At most one byte more than is allowed: enough to know that it is too much."""
    try:
        if path == STDIN:
            return sys.stdin.buffer.read(MAX_JSON_BYTES + 1)
        with Path(path).open("rb") as file:
            return file.read(MAX_JSON_BYTES + 1)
    except (OSError, ValueError) as error:
        raise DocumentError.of(where, f"cannot read {path}: {reason_of(error)}") from None


def reason_of(error: Exception) -> str:
    """What the system says, without numbers and paths."""
    told = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return told[:1].lower() + told[1:]


def _looks_like_json(text: bytes) -> bool:
    return text.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"[", b"")


def open_lines(path: str) -> BinaryIO:
    """A file of lines, or standard input for `-`; `DocumentError` where it cannot be opened."""
    if path == STDIN:
        return sys.stdin.buffer
    try:
        return Path(path).open("rb")
    except (OSError, ValueError) as error:
        raise DocumentError.of("", f"cannot read {path}: {reason_of(error)}") from None


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file, one at a time. Of one that is too long only so much as shows that it is."""
    while line := file.readline(MAX_JSON_BYTES + 2):
        yield line.removesuffix(b"\n")
        while line and not line.endswith(b"\n"):
            line = file.readline(MAX_JSON_BYTES)


# YAML.

_NULL, _BOOL, _INT, _STR, _SEQ, _MAP = (
    f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "str", "seq", "map")
)

_INTEGER: Final = re.compile(r"^-?(?:0|[1-9][0-9]*)$")


class _Loader(yaml.SafeLoader):
    """What JSON can say, in YAML: null, true and false, decimal integers, text.

    YAML's own ideas stay text, and are refused as such at their place: instants, floats, `yes` and `no`, sixties
    and octals. So are merge keys. Nodes are only composed: nothing is ever constructed from a tag.
    """

    #: By the first character of a plain scalar.
    yaml_implicit_resolvers = {  # noqa: RUF012 - the name and the form that PyYAML asks for
        **{first: [(_NULL, re.compile(r"^(?:~|null|Null|NULL|)$"))] for first in ("", "~", "n", "N")},
        **{first: [(_BOOL, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"))] for first in "tTfF"},
        **{first: [(_INT, _INTEGER)] for first in "-0123456789"},
    }


def parse_yaml(text: bytes, where: str = "") -> Json:
    """The value that a YAML text stands for; `DocumentError` where it is none."""
    if len(text) > MAX_YAML_BYTES:
        raise DocumentError.of(where, f"is larger than {MAX_YAML_BYTES // 1024**2} MiB: write it as JSON")
    try:
        node = _Loader(text.decode("utf-8-sig")).get_single_node()
        if node is None:
            raise DocumentError.of(where, "is empty")
        return _value_of(node, where, {})
    except UnicodeDecodeError as error:
        raise DocumentError.of(where, f"is not UTF-8 text (byte {error.start})") from None
    except yaml.MarkedYAMLError as error:
        problem = error.problem or error.context or "cannot be read"
        raise DocumentError.of(where, f"is not YAML: {problem}{_line(error.problem_mark)}") from None
    except yaml.YAMLError:
        raise DocumentError.of(where, "is not YAML: it has characters that are not text") from None
    except RecursionError:
        raise DocumentError.of(where, f"is nested deeper than {MAX_DEPTH} levels") from None


def _value_of(node: yaml.Node, where: str, known: dict[int, Json]) -> Json:
    """The value of a node. One that is there several times, by alias, is made once: aliases cost no memory."""
    key = id(node)
    if key not in known:
        # What an alias inside its own anchor finds: an object without end is nested too deeply by definition.
        known[key] = _ENDLESS
        known[key] = _made_of(node, where, known)
    if known[key] is _ENDLESS:
        raise DocumentError.of(where, f"contains itself{_line(node.start_mark)}")
    return known[key]


_ENDLESS: Final[list[Json]] = []


def _made_of(node: yaml.Node, where: str, known: dict[int, Json]) -> Json:
    if isinstance(node, yaml.MappingNode) and node.tag == _MAP:
        pairs = [(_key_of(key, where), _value_of(entry, where, known)) for key, entry in node.value]
        found = dict(pairs)
        return found if len(found) == len(pairs) else RepeatedKeys(pairs)
    if isinstance(node, yaml.SequenceNode) and node.tag == _SEQ:
        return [_value_of(entry, where, known) for entry in node.value]
    if isinstance(node, yaml.ScalarNode):
        match node.tag:
            case "tag:yaml.org,2002:str":
                return str(node.value)
            case "tag:yaml.org,2002:null":
                return None
            case "tag:yaml.org,2002:bool" if node.value.lower() in ("true", "false"):
                return bool(node.value.lower() == "true")
            case "tag:yaml.org,2002:int" if _INTEGER.fullmatch(node.value):
                return integer_of(node.value)
            case _:
                pass
    raise DocumentError.of(where, f"has a tag that documents do not have{_line(node.start_mark)}")


def _key_of(node: yaml.Node, where: str) -> str:
    """Keys are text, whatever they look like, as in JSON."""
    if isinstance(node, yaml.ScalarNode):
        return str(node.value)
    raise DocumentError.of(where, f"has a key that is no text{_line(node.start_mark)}")


def _line(mark: yaml.Mark | None) -> str:
    return f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
