"""One call on a clip: its grid, which frames count, where chunks start, and which frames are this rank's."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gdn_kernels import checks
from gdn_models.cache import GDNState
from gdn_models.gates import Grid
from gdn_models.parallel import Shard


class Clip(NamedTuple):
    """The checked arguments of one forward pass, apart from x.

    ``frame_valid [B, F]`` bool or None; ``chunk_starts`` interior, global; ``shard`` the local part of the clip;
    ``state`` what a stream hands in, or None.
    """

    grid: Grid
    frame_valid: Tensor | None
    chunk_starts: tuple[int, ...]
    shard: Shard
    state: GDNState | None = None

    @property
    def first(self) -> int:
        """The position of the first local frame: in the clip, or in the stream."""
        return self.shard.first + (self.state.frames if self.state is not None else 0)


def check_grid(grid: object) -> Grid:
    """Return ``grid`` as a tuple; TypeError unless it is three ints, ValueError if one is negative."""
    if (
        not isinstance(grid, tuple | list)
        or len(grid) != 3
        or any(isinstance(size, bool) or not isinstance(size, int) for size in grid)
    ):
        raise TypeError(f"grid must be three ints (F, h, w), got {grid!r}")
    if min(grid) < 0:
        raise ValueError(f"grid must be three sizes >= 0, got {tuple(grid)}")
    return grid[0], grid[1], grid[2]


def check_frame_valid(frame_valid: Tensor | None, x: Tensor, frames: int) -> Tensor | None:
    """Return the mask of ``x [B, N, C]`` as ``[B, F]`` bool, whichever of its shapes and dtypes it came in.

    Raises:
        ValueError: Another shape, dtype or device, or a mask that requires a gradient.
        TypeError: Not a tensor.
    """
    if frame_valid is None:
        return None
    checks.require_tensor("frame_valid", frame_valid)
    batch = x.shape[0]
    if tuple(frame_valid.shape) not in ((batch, frames), (batch, 1, frames), (batch, 1, frames, 1, 1)):
        raise ValueError(
            f"frame_valid must have shape [B, F] = [{batch}, {frames}], [B, 1, F] or [B, 1, F, 1, 1], "
            f"got {list(frame_valid.shape)}"
        )
    checks.require_dtype("frame_valid", frame_valid, (torch.bool, *checks.FLOATING))
    checks.require_device("frame_valid", frame_valid, x.device, "x")
    if frame_valid.requires_grad:
        raise ValueError("frame_valid must not require a gradient")
    return frame_valid.reshape(batch, frames) != 0


def mask_tokens(x: Tensor, clip: Clip) -> Tensor:
    """Put zeros into the tokens of invalid frames; ``x [B, N, C]``."""
    if clip.frame_valid is None:
        return x
    batch, tokens, channels = x.shape
    invalid = ~clip.frame_valid[:, :, None, None]
    x = x.reshape(batch, clip.grid[0], clip.grid[1] * clip.grid[2], channels)
    return x.masked_fill(invalid, 0).reshape(batch, tokens, channels)
