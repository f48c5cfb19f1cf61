"""The documentation is true: its Python runs, its commands exist, its links lead somewhere.

Each ```python block of a page runs, in order and in one namespace, so a page reads as one program. What a reader needs
not see (a stand-in for "your encoder") goes into an HTML comment that opens with `<!-- python`. A block that cannot
run says why: ```python no-run reason="needs eight GPUs".
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    path.relative_to(ROOT)
    for path in (
        *sorted(ROOT.glob("*.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "benchmarks").rglob("*.md")),
        *sorted((ROOT / "examples").rglob("*.md")),
    )
]
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```\s*$|^<!-- python\n(?P<hidden>.*?)^-->\s*$", re.M | re.S)
LINK = re.compile(r"\]\((?P<target>[^)\s#]+)(?:#[^)]*)?\)")
NO_RUN = re.compile(r'python no-run reason="[^"]+"')

each_page = pytest.mark.parametrize("page", PAGES, ids=str)


def blocks(text: str) -> list[tuple[str, str, int]]:
    """Language line, body and the line before its first, of each block; a hidden one counts as `python`."""
    found = []
    for match in FENCE.finditer(text):
        name = "hidden" if match["hidden"] is not None else "body"
        info = "python" if name == "hidden" else match["info"].strip()
        found.append((info, match[name], text.count("\n", 0, match.start(name))))
    return found


def run_python(text: str, page: str) -> dict[str, object]:
    """Run the Python blocks of a page; line numbers in a traceback are those of the page."""
    namespace: dict[str, object] = {"__name__": "__page__"}
    for info, body, line in blocks(text):
        if info == "python":
            exec(compile("\n" * line + body, page, "exec"), namespace)
    return namespace


def commands(text: str) -> list[list[str]]:
    """The commands of the ```bash blocks, as words, without prompts, comments, and variables set for one command."""
    found = []
    for info, body, _ in blocks(text):
        if info in {"bash", "sh", "console"}:
            for line in body.replace("\\\n", " ").splitlines():
                words = line.partition(" #")[0].removeprefix("$ ").split()
                while words and re.match(r"[A-Z_]+=", words[0]):
                    del words[0]
                if words and not words[0].startswith("#"):
                    found.append(words)
    return found


def wrong_command(words: list[str]) -> str:
    """Say what is wrong with a command; nothing for one that exists or that is not ours."""
    match words:
        case ["make", *targets]:
            known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
            asked = {target for target in targets if "=" not in target and not target.startswith("-")}
            return ", ".join(sorted(asked - known))
        case [python, "-m", module, *_] if python.startswith("python") and module.startswith("benchmarks"):
            path = ROOT / module.replace(".", "/")
            return "" if path.with_suffix(".py").exists() or (path / "__main__.py").exists() else module
        case ["evenload", subcommand, *options]:
            done = subprocess.run(
                [str(Path(sys.executable).with_name("evenload")), subcommand, "--help"],
                capture_output=True,
                text=True,
                env={"COLUMNS": "200", "NO_COLOR": "1", "PATH": ""},
            )
            missing = [option for option in options if option.startswith("--") and option not in done.stdout]
            return " ".join([subcommand, *missing]) if done.returncode or missing else ""
    return ""


@each_page
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / page).read_text()
    monkeypatch.chdir(tmp_path)
    run_python(text, str(page))


@each_page
def test_a_block_that_does_not_run_says_why(page: Path) -> None:
    infos = [info for info, _, _ in blocks((ROOT / page).read_text())]
    assert not [info for info in infos if info.startswith("python") and info != "python" and not NO_RUN.fullmatch(info)]


@each_page
def test_commands_exist(page: Path) -> None:
    found = {" ".join(words): wrong_command(words) for words in commands((ROOT / page).read_text())}
    assert not {command: wrong for command, wrong in found.items() if wrong}


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    targets = [match["target"] for match in LINK.finditer((ROOT / page).read_text())]
    local = [target for target in targets if not re.match(r"[a-z]+:", target)]
    assert not [target for target in local if not (ROOT / page).parent.joinpath(target).exists()]


@each_page
def test_named_files_exist(page: Path) -> None:
    """`balancer/plan.py` in backticks is a file of the repository."""
    named = re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", (ROOT / page).read_text())
    known = [path for path in named if path.split("/")[0] in {"balancer", "loaders", "bindings", "benchmarks", "tests"}]
    assert not [path for path in known if not (ROOT / path).exists()]


def test_a_failing_block_is_found_with_its_line() -> None:
    text = "# Page\n\n<!-- python\nx = 1\n-->\n\n```python\nassert x == 1\nassert x == 2\n```\n"
    with pytest.raises(AssertionError) as caught:
        run_python(text, "page.md")
    assert (str(caught.traceback[-1].path), caught.traceback[-1].lineno + 1) == ("page.md", 9)


def test_blocks_that_are_not_to_run_are_left_alone() -> None:
    text = '```python no-run reason="no such module"\nimport no_such_module\n```\n```text\nimport nor_this\n```\n'
    assert run_python(text, "page.md").keys() == {"__name__"}


def test_wrong_commands_are_found() -> None:
    lines = ("make tset  # run the tests", "FOO=1 make test PYTHON=python3.12", "python -m benchmarks.nothing", "ls")
    text = "```bash\n" + "\n".join(lines) + "\n```\n"
    assert [wrong_command(words) for words in commands(text)] == ["tset", "", "benchmarks.nothing", ""]
