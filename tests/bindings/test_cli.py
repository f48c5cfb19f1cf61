"""The command line: what it refuses, and in which words."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from evenload.bindings import cli

if TYPE_CHECKING:
    from pathlib import Path


def call(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "200", "TERM": "dumb"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_version_is_that_of_the_package() -> None:
    assert call("--version") == (0, f"evenload {importlib.metadata.version('evenload')}\n")


def test_help_names_the_commands() -> None:
    status, text = call("--help")
    assert status == 0
    assert "demo" in text


def test_help_needs_no_torch() -> None:
    code = "import sys, evenload.bindings.cli; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--ranks", "0"), "'--ranks': a whole number from 1 to 16, found 0"),
        (("--ranks", "two"), "integer"),
        (("--steps", "0"), "a whole number from 1 to 100000, found 0"),
        (("--seed", "-1"), "'--seed': a whole number from 0 to 9223372036854775807, found -1"),
        (("--picture", "demo.txt"), "a picture's name ends in .png, .svg, .pdf, found 'demo.txt'"),
        (("--picture", "."), "is a directory"),
        (("--json", "."), "is a directory"),
    ],
)
def test_bad_values_are_named(arguments: tuple[str, str], sentence: str) -> None:
    status, text = call("demo", *arguments)
    assert status == 2
    assert sentence in " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize(
    ("absent", "sentence"),
    [
        ({"skimage"}, "this command needs scikit-image, which is not installed: pip install 'evenload[demo]'"),
        ({"sklearn", "matplotlib"}, "needs scikit-learn, matplotlib, which are not installed"),
    ],
)
def test_a_missing_extra_is_one_sentence(monkeypatch: pytest.MonkeyPatch, absent: set[str], sentence: str) -> None:
    find_spec = importlib.util.find_spec

    def find(name: str, *rest: Any) -> Any:
        return None if name in absent else find_spec(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    status, text = call("demo")
    assert status == 2
    assert sentence in text
    assert len(text.splitlines()) == 1


def test_json_is_written_into_a_new_folder(tmp_path: Path) -> None:
    cli._write_json(tmp_path / "new" / "figures.json", {"ranks": 2})
    assert (tmp_path / "new" / "figures.json").read_text() == '{\n  "ranks": 2\n}\n'
