"""Arguments of one call: grids, masks, and tokens of invalid frames."""

import pytest
import torch

from gdn_models.clip import Clip, check_frame_valid, check_grid, mask_tokens
from gdn_models.parallel import Shard


@pytest.mark.parametrize("grid", [(5, 2, 1), [5, 2, 1], torch.Size((5, 2, 1)), (0, 0, 0)])
def test_check_grid_returns_a_tuple(grid: object) -> None:
    assert check_grid(grid) == tuple(grid)


@pytest.mark.parametrize("grid", [5, (5, 2), (5, 2, 1, 1), (5, 2, 1.0), (5, 2, True), "521", torch.tensor((5, 2, 1))])
def test_check_grid_refuses_what_is_not_three_ints(grid: object) -> None:
    with pytest.raises(TypeError, match=r"grid must be three ints \(F, h, w\)"):
        check_grid(grid)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16, torch.float64])
def test_check_frame_valid_returns_bool(dtype: torch.dtype) -> None:
    x, mask = torch.zeros(2, 6, 4), torch.tensor([[1, 0, 1], [0, 1, 1]]).to(dtype)
    for shaped in (mask, mask[:, None], mask[:, None, :, None, None]):
        found = check_frame_valid(shaped, x, 3)
        assert found.dtype == torch.bool
        assert torch.equal(found, mask.bool())
    assert check_frame_valid(None, x, 3) is None


def test_mask_tokens_zeroes_all_tokens_of_invalid_frames_whatever_they_hold() -> None:
    x = torch.full((2, 6, 4), float("nan"))
    x[0, :2] = x[1, 4:] = 1.0  # frame 0 of the first sample, frame 2 of the second
    valid = torch.tensor([[True, False, False], [False, False, True]])
    masked = mask_tokens(x, Clip((3, 2, 1), valid, (), Shard(0, 3, 3, None, None)))
    assert torch.equal(masked, torch.nan_to_num(x, nan=0.0))
    assert mask_tokens(x, Clip((3, 2, 1), None, (), Shard(0, 3, 3, None, None))) is x
