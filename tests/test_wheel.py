"""What users install: the wheel, built from the source distribution, holds the whole package and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
FOLDERS = ("balancer", "loaders", "bindings")
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "build", "dist"
)


def expected_files() -> set[str]:
    """The package as the working tree has it, by the names it is imported under."""
    modules = {f"evenload/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    return modules | {"evenload/__init__.py", "evenload/hf.py", "evenload/py.typed"}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and the wheel built from it alone."""
    tree = tmp_path_factory.mktemp("wheel") / "tree"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=NOT_COPIED)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist"],
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return tree / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return next(dist.glob("*.whl"))


def test_the_source_distribution_holds_files_where_the_tree_has_links(dist: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        members = archive.getmembers()
    top = members[0].name.split("/")[0]
    files = {member.name.removeprefix(f"{top}/") for member in members if member.isfile()}
    assert {f"src/{name}" for name in expected_files()} <= files
    assert {"LICENSE", "README.md", "pyproject.toml"} <= files
    assert not [member.name for member in members if not member.isfile() and not member.isdir()]
    # Nothing of the checkout beside what is packed or describes it.
    assert {name.split("/")[0] for name in files} <= {
        *("LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg", "src"),
    }


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    packed = {name for name in names if ".dist-info/" not in name}
    assert packed == expected_files()
    assert {name.split("/")[-1] for name in names - packed} >= {"LICENSE", "METADATA", "RECORD", "entry_points.txt"}


def test_every_module_imports_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    names = sorted(name.removesuffix(".py").replace("/", ".") for name in expected_files() if name.endswith(".py"))
    modules = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
    code = f"""
import importlib, sys
sys.path.insert(0, {str(tmp_path)!r})
for name in {modules!r}:
    module = importlib.import_module(name)
    assert module.__file__.startswith({str(tmp_path)!r}), module.__file__
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
