"""The demo's picture: where its bars are, what it says, and that it is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("matplotlib")

from evenload.bindings.demo.picture import draw, headline, timeline

BEFORE = np.array([[[1.0, 1.0, 2.0], [0.0, 1.0, 1.0]], [[1.0, 2.0, 0.0], [1.0, 5.0, 2.0]]])


def test_all_ranks_begin_a_step_where_the_slowest_ended_the_last() -> None:
    begins, ends = timeline(BEFORE)
    assert ends.tolist() == [4.0, 12.0]
    assert begins[0].tolist() == [[0.0, 1.0, 2.0, 4.0], [0.0, 0.0, 1.0, 2.0]]
    assert begins[1].tolist() == [[4.0, 5.0, 7.0, 7.0], [4.0, 5.0, 10.0, 12.0]]


def test_the_headline_says_what_was_measured() -> None:
    assert headline(BEFORE, BEFORE / 2) == "The same 2 steps of training on 2 ranks take 50% less time"
    assert headline(BEFORE, BEFORE).endswith("2 ranks: no time saved")
    assert headline(BEFORE[:, :1], BEFORE[:, :1]).endswith("1 rank: no time saved")


@pytest.mark.parametrize("ending", ["png", "svg"])
@pytest.mark.parametrize("gain", [2.0, 1.05, 0.9])
def test_the_picture_is_written(tmp_path: Path, ending: str, gain: float) -> None:
    path = tmp_path / "new" / f"demo.{ending}"
    draw(path, BEFORE, BEFORE / gain, weight_difference=3e-14)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if ending == "png" else b"<?xml")
    assert len(content) > 5_000
