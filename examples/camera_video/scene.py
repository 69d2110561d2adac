"""Stills of a clip seen by a camera that pans and zooms: windows of a larger picture, whose cameras are known exactly.

A window of ``width`` source pixels at (left, top), shown WIDTH pixels wide, magnifies by ``m = WIDTH / width``: what
the source has at x, it has at ``(x - left) m``. So the ray through it, ``((x - SOURCE_WIDTH / 2) / FOCAL, ..., 1)`` in
the source camera, is that of a camera with the same pose, here the identity, and

    fx = FOCAL m      cx = (SOURCE_WIDTH / 2 - left) m      and the same for y

That is exact: a crop moves the principal point, a zoom scales the focal length, and neither turns the camera, which
would take a homography and the focal length that the clip was filmed with. FOCAL may be any number that all windows
share; a short one spreads the rays of neighbouring tokens, which then are easier to tell apart. Positions count from
the left edge of a pixel, as those of `ray_transforms` do, so that no half pixel is lost between two sizes.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from footage import decode
from torch import Tensor, nn

SOURCE_HEIGHT, SOURCE_WIDTH, FOCAL = 44, 104, 6.0
STILLS, STRIDE = 24, 10
HEIGHT, WIDTH, PATCH = 24, 32, 4
SPATIAL = (HEIGHT // PATCH, WIDTH // PATCH)
TOKENS = SPATIAL[0] * SPATIAL[1]  # of a frame
CHANNELS = 3 * PATCH * PATCH
LEAST, MOST = 32.0, 42.0  # width of a window


class Views(NamedTuple):
    """What cameras saw: ``tokens [B, F, S, 3*PATCH*PATCH]`` in [-1, 1] and ``camera [B, F, 20]``."""

    tokens: Tensor
    camera: Tensor


def load_stills(path: Path) -> Tensor:
    """Return stills of a video file, ``[STILLS, 3, SOURCE_HEIGHT, SOURCE_WIDTH]`` in [-1, 1], fp64.

    Raises:
        ClipError: The file is missing, cannot be decoded or is too short.
    """
    return decode(path, SOURCE_HEIGHT, SOURCE_WIDTH, STRIDE, STILLS).permute(0, 3, 1, 2).contiguous().double()


def random_windows(batch: int, frames: int, generator: torch.Generator) -> Tensor:
    """Return windows ``[batch, frames, 3]``: left, top and width, of a camera that wanders inside the source."""
    steps = 2 * torch.rand(batch, frames, 3, generator=generator) - 1
    window = torch.rand(batch, 3, generator=generator) * torch.tensor([SOURCE_WIDTH, SOURCE_HEIGHT, MOST - LEAST])
    window[:, 2] += LEAST
    windows = []
    for frame in range(frames):
        window = _inside(window + steps[:, frame] * torch.tensor([7.0, 2.5, 2.5]))
        windows.append(window)
    return torch.stack(windows, 1)


def _inside(window: Tensor) -> Tensor:
    left, top, width = window.unbind(-1)
    width = width.clamp(LEAST, MOST)
    left = left.clamp(min=0).minimum(SOURCE_WIDTH - width)
    top = top.clamp(min=0).minimum(SOURCE_HEIGHT - width * HEIGHT / WIDTH)
    return torch.stack((left, top, width), -1)


def cameras(windows: Tensor) -> Tensor:
    """Return the camera ``[..., 20]`` of each window ``[..., 3]``: the identity, then fx, fy, cx, cy."""
    left, top, width = windows.unbind(-1)
    scale = WIDTH / width
    center = (SOURCE_WIDTH / 2 - left) * scale, (SOURCE_HEIGHT / 2 - top) * scale
    intrinsics = torch.stack((FOCAL * scale, FOCAL * scale, *center), -1)
    return torch.cat((torch.eye(4, dtype=windows.dtype).flatten().expand(*windows.shape[:-1], 16), intrinsics), -1)


def look(stills: Tensor, windows: Tensor) -> Views:
    """Return what the cameras of the windows ``[B, F, 3]`` see of the stills ``[B, 3, height, width]``."""
    batch, frames, _ = windows.shape
    windows = windows.to(stills.dtype)
    left, top, width = windows.flatten(0, 1).unbind(-1)
    height = width * HEIGHT / WIDTH
    zero = torch.zeros_like(left)
    to_source = torch.stack(  # of coordinates that are -1 and 1 at the edges of window and source
        (width, zero, 2 * left + width - SOURCE_WIDTH, zero, height, 2 * top + height - SOURCE_HEIGHT), -1
    ).reshape(-1, 2, 3) / torch.tensor([[SOURCE_WIDTH], [SOURCE_HEIGHT]])  # fmt: skip
    points = nn.functional.affine_grid(to_source, [batch * frames, 3, HEIGHT, WIDTH], align_corners=False)
    source = stills.repeat_interleave(frames, 0)
    seen = nn.functional.grid_sample(source, points, padding_mode="border", align_corners=False)
    return Views(to_tokens(seen.unflatten(0, (batch, frames))), cameras(windows))


def to_tokens(frames: Tensor) -> Tensor:
    """``[B, F, 3, height, width]`` to ``[B, F, S, 3*PATCH*PATCH]``."""
    patches = frames.unflatten(4, (-1, PATCH)).unflatten(3, (-1, PATCH))  # B, F, 3, rows, PATCH, columns, PATCH
    return patches.permute(0, 1, 3, 5, 4, 6, 2).flatten(4).flatten(2, 3)


def to_frames(tokens: Tensor) -> Tensor:
    """``[..., S, 3*PATCH*PATCH]`` to ``[..., height, width, 3]``, clamped to [0, 1] for display."""
    patches = tokens.unflatten(-1, (PATCH, PATCH, 3)).unflatten(-4, SPATIAL)  # rows, columns, PATCH, PATCH, 3
    return (patches.transpose(-4, -3).flatten(-5, -4).flatten(-3, -2) * 0.5 + 0.5).clamp(0, 1)
