"""The demo's model: packing changes nothing, zero tokens work, and the graph is connected without any row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenload.bindings.demo.model import (
    IGNORED,
    Decoder,
    ModelConfig,
    VisionEncoder,
    grid_angles,
    next_tokens,
    summed_loss,
)

CONFIG = ModelConfig(
    patch=2,
    vision_width=16,
    vision_layers=2,
    vision_heads=2,
    width=12,
    layers=2,
    heads=3,
    vocabulary=20,
    image_token=19,
)
VALUES = 3 * CONFIG.patch**2


def encoder() -> VisionEncoder:
    torch.manual_seed(0)
    return VisionEncoder(CONFIG).double()


def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder(CONFIG).double()


@given(
    squares=st.lists(st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3)), max_size=5),
    seed=st.integers(0, 1000),
)
def test_packed_images_encode_as_each_alone(squares: list[tuple[int, int, int]], seed: int) -> None:
    grids = torch.tensor([(t, 2 * h, 2 * w) for t, h, w in squares], dtype=torch.int64).reshape(-1, 3)
    torch.manual_seed(seed)
    pixels = torch.rand(int(grids.prod(-1).sum()), VALUES, dtype=torch.float64)
    model = encoder()
    together = model(pixels, grids)
    alone = [model(part, grid[None]) for grid, part in zip(grids, pixels.split(grids.prod(-1).tolist()), strict=True)]
    assert together.shape == (len(pixels) // 4, CONFIG.width)
    torch.testing.assert_close(together, torch.cat([together[:0], *alone]), rtol=1e-12, atol=1e-13)


def test_positions_follow_the_order_of_patches() -> None:
    grid = torch.tensor([[1, 2, 4], [2, 2, 2]])
    angles = grid_angles(grid, merge=2, channels=4, like=torch.zeros(0, dtype=torch.float64))
    # The first frequency of each half is 1, so its angle is the line or the column itself.
    wide = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    assert angles[:, [0, 2]].tolist() == [list(place) for place in wide + 2 * wide[:4]]
    torch.testing.assert_close(angles[:, [1, 3]], angles[:, [0, 2]] * 0.01)


def test_the_encoder_sees_where_a_patch_is() -> None:
    pixels = torch.rand(16, VALUES, dtype=torch.float64)
    square, wide = (encoder()(pixels, torch.tensor([[1, *shape]])) for shape in ((4, 4), (2, 8)))
    assert not torch.allclose(square, wide)


def test_the_encoder_runs_on_zero_tokens_with_zero_gradients() -> None:
    model = encoder()
    rows = model(torch.zeros(0, VALUES), torch.zeros(0, 3, dtype=torch.int64))
    assert rows.shape == (0, CONFIG.width)
    rows.sum().backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert not weight.grad.any(), name


def test_packed_samples_decode_as_each_alone_and_never_look_ahead() -> None:
    model = decoder()
    tokens, lengths = torch.arange(12) % 18, torch.tensor([5, 1, 6])
    none = torch.zeros(0, CONFIG.width, dtype=torch.float64)
    together = model(tokens, lengths, none)
    alone = [model(part, torch.tensor([len(part)]), none) for part in tokens.split(lengths.tolist())]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-12, atol=1e-13)
    shorter = model(tokens[:3], torch.tensor([3]), none)
    torch.testing.assert_close(together[:3], shorter, rtol=1e-12, atol=1e-13)
    assert not torch.allclose(together[3], together[4])


@pytest.mark.parametrize("rows", [0, 3])
def test_backward_reaches_the_rows_on_every_rank(rows: int) -> None:
    model = decoder()
    tokens = torch.tensor([1, 2, *[CONFIG.image_token] * rows, 3, 4])
    lengths = torch.tensor([len(tokens)])
    leaf = torch.rand(rows, CONFIG.width, dtype=torch.float64, requires_grad=True)
    reached: list[torch.Size] = []
    passed = leaf * 1.0
    passed.register_hook(lambda grad: reached.append(grad.shape))
    targets = next_tokens(tokens, lengths, image_token=CONFIG.image_token)
    summed_loss(model(tokens, lengths, passed), targets).backward()
    assert reached == [(rows, CONFIG.width)]
    assert leaf.grad is not None
    assert bool(leaf.grad.any()) == (rows > 0)


def test_rows_and_placeholders_must_agree() -> None:
    tokens = torch.tensor([1, CONFIG.image_token, 2])
    with pytest.raises(ValueError, match="1 placeholders, 2 rows"):
        decoder()(tokens, torch.tensor([3]), torch.zeros(2, CONFIG.width, dtype=torch.float64))


def test_a_row_takes_the_place_of_its_placeholder() -> None:
    model = decoder()
    row = model.embed.weight[5:6].detach()
    filled = model(torch.tensor([1, CONFIG.image_token, 2]), torch.tensor([3]), row)
    torch.testing.assert_close(filled, model(torch.tensor([1, 5, 2]), torch.tensor([3]), row[:0]))


def test_targets_stay_within_a_sample_and_skip_placeholders() -> None:
    tokens = torch.tensor([1, 2, 3, 4, 19, 19, 5, 6])
    targets = next_tokens(tokens, torch.tensor([3, 5]), image_token=19)
    assert targets.tolist() == [2, 3, IGNORED, IGNORED, IGNORED, 5, 6, IGNORED]
    assert tokens.tolist() == [1, 2, 3, 4, 19, 19, 5, 6]
