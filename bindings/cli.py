"""The command `evenload`.

Each subcommand is one function below. What it needs beyond a bare install is imported inside it, so that
`evenload --help` is quick and a missing extra is one sentence instead of a traceback.

Exit status: 0 all is well, 1 the command ran and found a problem, 2 it could not run as it was called.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from evenload.bindings.demo.run import DemoConfig, Outcome

__all__ = ["app", "main"]

app = typer.Typer(
    help="Even out the work of the ranks that train a multimodal model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_PICTURES = (".png", ".svg", ".pdf")


def main() -> None:
    """Run the command line."""
    app()


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"evenload {importlib.metadata.version('evenload')}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


def _stop(sentence: str, *, status: int) -> NoReturn:
    Console(stderr=True).print(f"[bold red]evenload:[/] {escape(sentence)}", highlight=False, soft_wrap=True)
    raise typer.Exit(status)


def _require(extra: str, packages: Mapping[str, str]) -> None:
    """End the command unless every module of `packages` (module name to package name) is installed."""
    missing = [package for module, package in packages.items() if importlib.util.find_spec(module) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        command = f"pip install 'evenload[{extra}]'"
        _stop(f"this command needs {', '.join(missing)}, which {verb} not installed: {command}", status=2)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2) + "\n")


def _between(low: int, high: int) -> Callable[[int], int]:
    """Return a check of an option, since typer's own does not tell the value that it found."""

    def check(value: int) -> int:
        if not low <= value <= high:
            msg = f"a whole number from {low} to {high}, found {value}"
            raise typer.BadParameter(msg)
        return value

    return check


def _check_picture(path: Path) -> Path:
    if path.suffix.lower() not in _PICTURES:
        msg = f"a picture's name ends in {', '.join(_PICTURES)}, found {path.name!r}"
        raise typer.BadParameter(msg)
    return path


@app.command()
def demo(
    *,
    ranks: Annotated[
        int, typer.Option(callback=_between(1, 16), help="Local processes that train together, 16 at most.")
    ] = 4,
    steps: Annotated[
        int, typer.Option(callback=_between(1, 100_000), help="Optimizer steps of each of the two runs.")
    ] = 8,
    seed: Annotated[int, typer.Option(callback=_between(0, 2**63 - 1), help="Of the data and of the weights.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Also write the figures to this file.")
    ] = None,
    picture: Annotated[
        Path, typer.Option(dir_okay=False, callback=_check_picture, help="Draw the two runs into this file.")
    ] = Path("out/demo.png"),
) -> None:
    """Train on real photographs, once as loaded and once balanced, and compare.

    Ends with status 1 if the two runs differ in weights or in the items that they encoded.
    """
    _require(
        "demo",
        {"PIL": "pillow", "skimage": "scikit-image", "sklearn": "scikit-learn", "matplotlib": "matplotlib"},
    )
    from evenload.bindings.demo.data import DataConfig
    from evenload.bindings.demo.picture import draw
    from evenload.bindings.demo.run import DemoConfig

    console = Console()
    outcome = _run_with_progress(DemoConfig(ranks=ranks, steps=steps, data=DataConfig(seed=seed)), console)
    report = outcome.report
    console.print(report.table())
    draw(picture, outcome.times_before, outcome.times_after, weight_difference=report.max_weight_difference)
    console.print(f"picture: {picture}")
    if json_file is not None:
        _write_json(json_file, dataclasses.asdict(report))
    if problems := report.problems():
        _stop(" ".join(problems), status=1)


def _run_with_progress(config: DemoConfig, console: Console) -> Outcome:
    """Run the demo under two progress bars, one a run."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from evenload.bindings.demo.run import RunName, run_demo
    from evenload.bindings.launch import RanksFailedError

    columns = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        names: tuple[RunName, ...] = ("as loaded", "balanced")
        bars = {name: progress.add_task(name, total=config.steps, start=False) for name in names}

        def on_step(name: RunName) -> None:
            progress.start_task(bars[name])
            progress.advance(bars[name])

        try:
            return run_demo(config, on_step)
        except RanksFailedError as error:
            _stop(str(error), status=1)


if __name__ == "__main__":
    main()
