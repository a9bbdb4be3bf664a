"""Rules of the tree that no linter knows, each with its why. A rule has no list of exceptions: it holds, or it goes."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpuledger.domain.events import EVENT_TYPES
from gpuledger.domain.failures import Failure
from gpuledger.domain.reasons import Reason
from gpuledger.tools import docs_gen

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("domain", "projections", "adapters", "tools")
MAX_FILE_LINES = 900
MAX_FUNCTION_LINES = 70

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Source:
    """A file of ours, read and parsed once."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def layer(self) -> str:
        return self.path.parts[0]

    def at(self, node: ast.stmt | ast.expr | ast.ExceptHandler) -> str:
        return f"{self.path}:{node.lineno}"


def sources(*folders: str) -> list[Source]:
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return [Source(path.relative_to(ROOT), text := path.read_text("utf-8"), ast.parse(text)) for path in paths]


PRODUCT = sources(*LAYERS)
PURE = [source for source in PRODUCT if source.layer in ("domain", "projections")]
TESTS = sources("tests")


def dotted(node: ast.expr) -> str:
    """`datetime.now` for the expression that reads so; empty for what is no plain chain of names."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attribute):
            owner = dotted(value)
            return f"{owner}.{attribute}" if owner else ""
        case _:
            return ""


def calls(source: Source) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            yield dotted(node.func), node


def functions(tree: ast.AST) -> Iterator[FunctionNode]:
    for node in ast.walk(tree):
        if isinstance(node, FunctionNode):
            yield node


class TestLayers:
    def test_the_contracts_of_pyproject_hold(self) -> None:
        program = "import sys, importlinter.cli as cli; sys.exit(cli.lint_imports(cache_dir=None))"
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    def test_a_file_is_imported_by_one_name_only(self) -> None:
        """`domain.state` beside `gpuledger.domain.state` would be two enums, two exceptions, that are not equal."""
        wrong: list[str] = []
        for source in PRODUCT + TESTS:
            for node in ast.walk(source.tree):
                match node:
                    case ast.ImportFrom(level=0, module=str(module)):
                        wrong += [source.at(node)] if module.split(".")[0] in LAYERS else []
                    case ast.ImportFrom(level=level) if level >= len(source.path.parts):
                        wrong.append(source.at(node))
                    case ast.Import(names=names):
                        wrong += [source.at(node) for alias in names if alias.name.split(".")[0] in LAYERS]
                    case _:
                        pass
        assert wrong == []

    def test_decisions_ask_nothing_of_the_world(self) -> None:
        """Replay recomputes them: no clock, no randomness, no environment, no hash that differs between processes."""
        banned_calls = {"open", "print", "input", "hash", "id", "datetime.now", "datetime.utcnow", "datetime.today"}
        banned_modules = {"os", "random", "secrets", "time", "uuid", "subprocess", "socket", "threading", "asyncio"}
        wrong: list[str] = []
        for source in PURE:
            wrong += [f"{source.at(node)} {name}" for name, node in calls(source) if _ends(name, banned_calls)]
            for node in ast.walk(source.tree):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                    wrong += [f"{source.at(node)} {name}" for name in names if name.split(".")[0] in banned_modules]
        assert wrong == []

    def test_only_programs_print(self) -> None:
        """Standard output belongs to who runs a program: to `tools`, and to the child processes of runtimes."""
        libraries = [source for source in PRODUCT if source.layer != "tools" and "__main__" not in source.text]
        assert [source.at(node) for source in libraries for name, node in calls(source) if name == "print"] == []


def _ends(name: str, banned: set[str]) -> bool:
    """`datetime.datetime.now` reads the clock as `datetime.now` does; `state.open` is not the builtin."""
    return name in banned or any(name.endswith(f".{entry}") for entry in banned if "." in entry)


class TestReadability:
    def test_files_have_one_subject(self) -> None:
        assert [f"{s.path}: {n} lines" for s in PRODUCT + TESTS if (n := s.text.count("\n")) > MAX_FILE_LINES] == []

    def test_functions_fit_on_a_screen(self) -> None:
        long = [
            f"{source.at(node)} {node.name}: {length} lines"
            for source in PRODUCT + TESTS
            for node in functions(source.tree)
            if (length := _length(node)) > MAX_FUNCTION_LINES
        ]
        assert long == []

    def test_what_others_use_of_the_domain_says_what_it_is(self) -> None:
        silent = [str(source.path) for source in PURE if source.tree.body and ast.get_docstring(source.tree) is None]
        for source in PURE:
            public = [n for n in source.tree.body if isinstance(n, FunctionNode) and not n.name.startswith("_")]
            silent += [f"{source.at(node)} {node.name}" for node in public if ast.get_docstring(node) is None]
        assert silent == []

    def test_no_failure_is_swallowed_without_a_word(self) -> None:
        """What is ignored is named by `contextlib.suppress`, or says why on the line that does nothing."""
        wrong: list[str] = []
        for source in PRODUCT:
            lines = source.text.splitlines()
            handlers = [node for node in ast.walk(source.tree) if isinstance(node, ast.ExceptHandler)]
            steps = [handler.body[0] for handler in handlers if len(handler.body) == 1]
            wrong += [source.at(s) for s in steps if isinstance(s, ast.Pass) and "#" not in lines[s.lineno - 1]]
        assert wrong == []

    @pytest.mark.parametrize("mark", ["TO" + "DO", "FIX" + "ME", "XX" + "X"])
    def test_nothing_is_left_for_later(self, mark: str) -> None:
        assert [str(source.path) for source in PRODUCT + TESTS if mark in source.text] == []


def _length(node: FunctionNode) -> int:
    """Lines of a function; a `case` with one step is a row of a table, not a step of a procedure."""
    rows = [
        case
        for inner in ast.walk(node)
        if isinstance(inner, ast.Match)
        for case in inner.cases
        if len(case.body) == 1 and isinstance(case.body[0], ast.Return)
    ]
    in_rows = sum((case.body[-1].end_lineno or 0) - case.pattern.lineno + 1 for case in rows)
    return (node.end_lineno or node.lineno) - node.lineno + 1 - in_rows


class TestDocuments:
    @pytest.mark.parametrize("name", docs_gen.PAGES)
    def test_generated_pages_are_up_to_date(self, name: str) -> None:
        written = (ROOT / "docs" / name).read_text("utf-8")
        assert written == docs_gen.PAGES[name](), "run `python -m gpuledger.tools.docs_gen`"

    def test_every_reason_failure_and_event_is_documented(self) -> None:
        reasons = (ROOT / "docs" / "reasons.md").read_text("utf-8")
        events = (ROOT / "docs" / "events.md").read_text("utf-8")
        assert [name for name in (*Reason, *Failure) if f"| `{name}` |" not in reasons] == []
        assert [name for name in EVENT_TYPES if f"### {name}\n" not in events] == []


class TestPackage:
    def test_the_wheel_holds_every_file_of_the_package(self, tmp_path: Path) -> None:
        """Data files too: a wheel without its SQL installs well and fails at the first start."""
        copy = tmp_path / "checkout"
        copy.mkdir()
        for name in (*LAYERS, ".import", "pyproject.toml", "README.md", "LICENSE"):
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("*.egg-info"))
            else:
                shutil.copy(ROOT / name, copy / name)
        program = "from setuptools.build_meta import build_wheel; build_wheel('out')"
        done = subprocess.run([sys.executable, "-c", program], cwd=copy, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (wheel,) = (copy / "out").glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            packed = set(archive.namelist())
        expected = {f"gpuledger/{path.relative_to(copy)}" for layer in LAYERS for path in _files(copy / layer)}
        assert expected | {"gpuledger/__init__.py", "gpuledger/py.typed"} <= packed
        assert {name.split("/")[0] for name in packed if ".dist-info/" not in name} == {"gpuledger"}


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
