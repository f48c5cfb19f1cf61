"""Draws are the same everywhere and follow their stated distributions; traces come back as they were written."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import record
from benchmarks.traces import LengthTrace, TraceError, read_column, read_trace, write_trace
from benchmarks.workloads import COSTS, SYNTHETIC, costs_of, main, workload

if TYPE_CHECKING:
    from pathlib import Path

SIZES = ("length", "segments", "rows", "nbytes")


def _same(one: object, other: object, names: tuple[str, ...]) -> None:
    for name in names:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


# What the first draws of each workload are, on any machine and with any release of NumPy.
DIGESTS = {
    "lognorm_img": "d19e86d60b9d4692",
    "video_pareto": "c64575e9fb37af51",
    "mix9010": "1f564a249624e104",
    "mix5050": "4c87f570b2514ea4",
    "mixed_img_video": "aa4fda70bc7b1368",
}


@pytest.mark.parametrize("name", SYNTHETIC)
def test_draw_never_changes(name: str) -> None:
    table = SYNTHETIC[name].draw(7, 8, 16)
    columns = np.stack([table.home, *(getattr(table, size) for size in SIZES)]).astype("<i8")
    assert hashlib.sha256(columns.tobytes()).hexdigest()[:16] == DIGESTS[name]


@pytest.mark.parametrize("name", SYNTHETIC)
def test_draw_depends_on_the_seed_and_fills_every_rank(name: str) -> None:
    table, other = (SYNTHETIC[name].draw(seed, 3, 5) for seed in (0, 1))
    assert np.diff(table.home_offsets).tolist() == [5, 5, 5]
    assert table.length.tolist() != other.length.tolist()
    assert (table.length % table.segments == 0).all()


# Mean, median, 90 % and 99 % quantile of many draws, and the largest value that can occur.
SHAPES = {
    "lognorm_img": (1146, 699, 2525, 7143, 16384),
    "video_pareto": (4779, 1992, 8424, 54072, 200000),
    "mix9010": (2513, 396, 4142, 38472, 131072),
    "mix5050": (10424, 2869, 28760, 67231, 131072),
}


@pytest.mark.parametrize("name", SHAPES)
def test_draw_has_the_stated_distribution(name: str) -> None:
    length = SYNTHETIC[name].draw(0, 512, 512).length
    found = [length.mean(), *np.quantile(length, [0.5, 0.9, 0.99])]
    assert found == pytest.approx(SHAPES[name][:4], rel=0.06)
    assert length.max() <= SHAPES[name][4]


def test_mixed_case_has_its_shares_and_bounds() -> None:
    table = SYNTHETIC["mixed_img_video"].draw(0, 256, 256)
    video = table.segments > 1
    frames, patches = table.segments[video], table.length[video] // table.segments[video]
    assert video.mean() == pytest.approx(0.15, abs=0.01)
    assert (frames.min(), frames.max()) == (8, 48)
    assert 16 * 16 <= patches.min() <= patches.max() <= 32 * 32
    assert (table.length[~video] > 32 * 32).mean() == pytest.approx(0.30 / 0.85, abs=0.02)
    assert 8 * 8 <= table.length[~video].min() <= table.length[~video].max() <= 96 * 96


def test_mixed_case_is_as_uneven_as_published() -> None:
    ratios = []
    for seed in range(200):
        table = SYNTHETIC["mixed_img_video"].draw(seed, 8, 4)
        loads = costs_of(table, "frames").values.reshape(8, 4).sum(axis=1)
        ratios.append(loads.max() / loads.mean())
    assert np.mean(ratios) == pytest.approx(2.118, rel=0.05)
    assert np.quantile(ratios, 0.95) == pytest.approx(3.047, rel=0.05)


def test_costs_are_what_their_names_say() -> None:
    length, segments = np.array([100]), np.array([4])
    found = {name: COSTS[name](length, segments)[0] for name in COSTS}
    assert found == {"lin": 100, "quad": 24576 * 100 + 10_000, "square": 10_000, "frames": 4 * 25 * (25 + 3456)}


sizes = st.lists(st.tuples(*[st.integers(1, 2**40)] * 2, *[st.integers(0, 2**40)] * 2), min_size=1, max_size=20)


@given(items=sizes, ending=st.sampled_from(["csv", "parquet"]), recorded=st.booleans())
def test_trace_comes_back_from_its_file(
    tmp_path_factory: pytest.TempPathFactory,
    items: list[tuple[int, int, int, int]],
    ending: str,
    recorded: bool,
) -> None:
    columns = dict(zip(SIZES, np.array(items).T, strict=True))
    columns["segments"] = np.minimum(columns["segments"], columns["length"])
    places = {"window": np.arange(len(items)) // 2, "home": np.arange(len(items)) % 2} if recorded else {}
    trace = LengthTrace(**columns, **places)
    path = tmp_path_factory.mktemp("trace") / f"trace.{ending}"
    write_trace(trace, path)
    _same(read_trace(path), trace, (*SIZES, "window", "home"))


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_written_windows_are_drawn_again(ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"mix.{ending}"
    main("mixed_img_video", path, ranks=4, items=3, windows=5, seed=10)
    assert "mixed_img_video" in capsys.readouterr().out
    for window in range(5):
        expected = SYNTHETIC["mixed_img_video"].draw(10 + window, 4, 3)
        _same(workload(str(path)).draw(window, 4, 3), expected, ("home", *SIZES))
    with pytest.raises(TraceError, match=r"\[3, 3, 3, 3\] items a rank, not \[2, 2, 2, 2\]"):
        workload(str(path)).draw(0, 4, 2)


def test_length_alone_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "plain.csv"
    path.write_text("# evenload-length-trace 1\nlength\n3\n5\n")
    _same(read_trace(path), LengthTrace.from_lengths([3, 5]), SIZES)
    assert set(workload(str(path)).draw(0, 2, 50).length.tolist()) == {3, 5}


def test_any_column_is_a_pool(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_text("name,image_tokens\na,7\nb,0\nc,9\n")
    source = workload(f"{path}:image_tokens")
    assert source.name == "requests:image_tokens"
    table = source.draw(0, 2, 50)
    assert set(zip(table.length.tolist(), table.rows.tolist(), table.nbytes.tolist(), strict=True)) == {
        (7, 2, 7 * 588),
        (9, 3, 9 * 588),
    }
    pq.write_table(pa.table({"n": [1, 2]}), tmp_path / "t.parquet")
    assert read_column(tmp_path / "t.parquet", "n").tolist() == [1, 2]


MARK = "# evenload-length-trace 1\n"
BAD = {
    "lacks the marker": "length\n3\n",
    "format 1; bad.csv has format 2": "# evenload-length-trace 2\nlength\n3\n",
    "has segments, rows": MARK + "segments,rows\n1,1\n",
    "has length, colour": MARK + "length,colour\n1,2\n",
    "has one in row 1": MARK + "length,rows\n3,1\n3,\n",
    "holds integers, found string": MARK + "length\nlong\n",
    "holds integers, found double": MARK + "length\n3.5\n",
    "length is at least 1: row 1 has 0": MARK + "length\n3\n0\n",
    "rows is at least 0: row 0 has -1": MARK + "length,rows\n3,-1\n",
    "row 0 has 4 segments and 3 tokens": MARK + "length,segments\n3,4\n",
    "at least one item": MARK + "length\n",
    "both or neither": MARK + "length,home\n3,0\n",
    r"without a gap, found \[0, 2\]": MARK + "length,home,window\n3,0,0\n3,0,2\n",
    "within a window: row 1 goes back": MARK + "length,home,window\n3,1,0\n3,0,0\n",
    "not a readable csv table": MARK + "length,rows\n3\n",
}


@pytest.mark.parametrize("message", BAD)
def test_bad_trace_is_refused(message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(BAD[message])
    with pytest.raises(TraceError, match=message):
        read_trace(path)


def test_bad_spec_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    for spec, message in {
        "mix5051": "one of lognorm_img, .*; found mix5051",
        f"{tmp_path}/t.txt:a": "a .csv or .parquet file",
        f"{tmp_path}/absent.csv:a": "there is no file",
        f"{tmp_path}/t.csv:c": "has the columns a, b; asked for c",
        f"{tmp_path}/t.csv": r"Name one of its columns \(t.csv:COLUMN\): a, b",
    }.items():
        with pytest.raises(TraceError, match=message):
            workload(spec)


def test_window_must_exist_and_fit_the_group() -> None:
    trace = LengthTrace.from_windows([SYNTHETIC["mix5050"].draw(0, 4, 1)])
    with pytest.raises(TraceError, match="items on rank 3; the group has 2"):
        trace.table(0, 2)
    with pytest.raises(TraceError, match=r"windows 0\.\.0, asked for 1"):
        trace.table(1, 4)
    with pytest.raises(TraceError, match="is a pool"):
        LengthTrace.from_lengths([1]).table(0, 1)


def test_result_file_names_what_a_reader_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path / "benchmarks" / "results")
    monkeypatch.setattr(record.sys, "argv", [str(tmp_path / "plan.py"), "--items", "8 9"])
    rows = [{"rule": "a", "gap": 0.5}]
    record.publish("plan", rows, json_file=tmp_path / "out" / "rows.json", record=True)
    assert json.loads((tmp_path / "out" / "rows.json").read_text()) == rows
    (path,) = record.RESULTS.iterdir()
    found = json.loads(path.read_text())
    assert path.name == f"plan-{found['date'][:10]}.json"
    assert found["command"] == "python -m benchmarks.plan --items '8 9'"
    assert found["records"] == rows
    assert found["hardware"]["cores"] >= 1
    assert found["versions"]["numpy"] == np.__version__
    with pytest.raises(ValueError, match="JSON"):
        record.publish("plan", {"gap": float("nan")}, json_file=tmp_path / "nan.json")


def test_table_shows_every_cell(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"rule": "x" * 90, "gap": 0.5, "ms": float("inf")}, {"rule": "b", "gap": None}]
    record.print_table("title", rows, {"rule": "", "gap": ".1%", "ms": ".2f"})
    printed = capsys.readouterr().out
    assert all(cell in printed for cell in ("x" * 90, "50.0%", "inf", "-"))
