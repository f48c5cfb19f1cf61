"""Rules of the house that no linter checks: size, and the few things that only certain files may do."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILE_LINES = 400
FUNCTION_LINES = 40
FILES = [
    path.relative_to(ROOT)
    for folder in ("balancer", "loaders", "bindings", "benchmarks", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
] + [Path("src/evenload/__init__.py")]
LIBRARY = [path for path in FILES if path.parts[0] in {"balancer", "loaders", "bindings"}]
# Ranks that one program starts are its own processes; nothing that crosses between ranks is pickled.
MAY_PICKLE = {Path("bindings/launch.py"), Path("bindings/launch_rank.py")}

each_file = pytest.mark.parametrize("path", FILES, ids=str)
each_library_file = pytest.mark.parametrize("path", LIBRARY, ids=str)


def parse(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def docstring_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    if ast.get_docstring(function, clean=False) is None:
        return 0
    first = function.body[0]
    return (first.end_lineno or first.lineno) - first.lineno + 1


def long_functions(tree: ast.Module) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring_lines(node)
            if lines > FUNCTION_LINES:
                found.append(f"{node.name} (line {node.lineno}) has {lines} lines")
    return found


def imported(tree: ast.Module) -> set[str]:
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module.split(".")[0])
    return modules


@each_file
def test_a_file_holds_one_idea(path: Path) -> None:
    lines = len((ROOT / path).read_text().splitlines())
    assert lines <= FILE_LINES, f"{path} has {lines} lines, at most {FILE_LINES}: it usually holds two ideas"


@each_file
def test_a_function_holds_one_idea(path: Path) -> None:
    found = long_functions(parse(path))
    assert not found, f"at most {FUNCTION_LINES} lines without the docstring: {'; '.join(found)}"


@each_library_file
def test_nothing_between_ranks_is_pickled(path: Path) -> None:
    found = imported(parse(path)) & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    assert not found or path in MAY_PICKLE, f"{path} imports {', '.join(found)}"


@each_library_file
def test_the_library_imports_itself_by_its_full_name(path: Path) -> None:
    """`from balancer import x` would work in a checkout and nowhere else; relative imports hide the layer."""
    tree = parse(path)
    assert not imported(tree) & {"balancer", "loaders", "bindings", "benchmarks", "tests"}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]


@each_file
def test_nothing_is_left_for_later(path: Path) -> None:
    marks = ("TO" + "DO", "FIX" + "ME", "XX" + "X")
    text = (ROOT / path).read_text()
    assert not [mark for mark in marks if mark in text]


@pytest.mark.parametrize(
    ("body", "lines"),
    [(FUNCTION_LINES - 1, 0), (FUNCTION_LINES, 1)],
    ids=["as long as allowed", "one line too long"],
)
def test_the_measure_of_functions(body: int, lines: int) -> None:
    source = 'def f() -> None:\n    """One.\n\n    Two.\n    """\n' + "    pass\n" * body
    assert len(long_functions(ast.parse(source))) == lines
