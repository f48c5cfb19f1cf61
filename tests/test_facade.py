"""The public names: one table, true to the modules, and no torch before somebody needs it."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import evenload

ROOT = Path(__file__).parents[1]
FOLDERS = ("balancer", "loaders", "bindings")


def module_names() -> list[str]:
    """Every module of the library, as users would import it."""
    names = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            names.append(".".join(("evenload", *(part for part in parts if part != "__init__"))))
    return names


def names_for_type_checkers() -> dict[str, str]:
    """What the facade imports under TYPE_CHECKING: name -> module."""
    tree = ast.parse(Path(evenload.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    names = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.asname == alias.name, f"write `{alias.name} as {alias.name}`: it marks the name as exported"
            names[alias.name] = str(node.module).removeprefix("evenload.")
    return names


def test_the_three_lists_agree() -> None:
    assert names_for_type_checkers() == {**evenload._HOME, **evenload._MODULES}
    assert list(evenload._HOME) == evenload.__all__


@pytest.mark.parametrize("name", evenload.__all__)
def test_each_public_name_resolves_to_its_module(name: str) -> None:
    home = importlib.import_module(f"evenload.{evenload._HOME[name]}")
    assert getattr(evenload, name) is getattr(home, name)
    assert name in home.__all__
    assert name in dir(evenload)


def test_modules_are_reached_without_an_import_of_their_own() -> None:
    done = run(
        "import sys, evenload\n"
        "assert 'hf' in dir(evenload) and 'torch' not in sys.modules\n"
        "assert evenload.hf is sys.modules['evenload.bindings.hf']\n"
        "assert 'transformers' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'evenload' has no attribute 'balance_everything'"):
        _ = evenload.balance_everything


def test_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert evenload.__version__ == project["version"]


@pytest.mark.parametrize("module", module_names())
def test_all_is_truthful(module: str) -> None:
    """What a module lists exists, is public and, but for packages that collect names, is its own."""
    found = importlib.import_module(module)
    is_package = hasattr(found, "__path__")
    names = getattr(found, "__all__", [] if is_package else None)
    assert names is not None, "each module says in __all__ what others may use"
    assert len(set(names)) == len(names)
    for name in names:
        assert not name.startswith("_")
        value = getattr(found, name)
        if not is_package and (inspect.isclass(value) or inspect.isfunction(value)):
            assert value.__module__ == module


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)


def test_planning_imports_no_torch() -> None:
    done = run(
        "import sys, evenload, evenload.balancer.cost, evenload.balancer.presets, evenload.balancer.planner\n"
        "from evenload import ItemTable, Plan, PlanOptions, ViTCost, plan\n"
        "assert 'torch' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_bare_import_is_refused(folder: str) -> None:
    done = run(f"import {folder}")
    assert done.returncode == 1
    assert f"ImportError: this folder is imported as evenload.{folder}, found {folder}" in done.stderr


def test_hugging_face_bindings_can_be_imported_by_their_short_name() -> None:
    code = (
        "import sys; from evenload.hf import balance; import evenload.hf; "
        "assert evenload.hf is sys.modules['evenload.bindings.hf'] and evenload.hf.balance is balance"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
