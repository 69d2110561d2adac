"""Rotary position tables over three axes, and the rotation itself, on interleaved pairs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gdn_kernels.checks import require_positive


class RotaryTables(NamedTuple):
    """``cos`` and ``sin`` of every pair's angle, each ``[N, D/2]`` fp32; row n belongs to token n."""

    cos: Tensor
    sin: Tensor


def axis_widths(head_dim: int) -> tuple[int, int, int]:
    """Return how many channels turn with frame, row and column: ``(D - 4 (D // 6), 2 (D // 6), 2 (D // 6))``.

    Raises:
        ValueError: ``head_dim`` is not a positive even number.
    """
    if head_dim <= 0 or head_dim % 2:
        raise ValueError(f"head_dim must be a positive even number, got {head_dim}")
    space = 2 * (head_dim // 6)
    return head_dim - 2 * space, space, space


def rotary_tables(
    grid: tuple[int, int, int],
    head_dim: int,
    *,
    theta: float = 1e4,
    frame_offset: int = 0,
    device: torch.device | str | None = None,
) -> RotaryTables:
    """Make the tables of a clip of ``grid = (F, h, w)`` tokens, frame-major, then row, then column.

    Pair i of an axis that owns n channels turns by ``position * theta ** (-2 i / n)``. Axes follow one another in the
    order frame, row, column (`axis_widths`). Angles are computed in fp64 and their cosines stored in fp32, so there is
    no longest clip.

    Args:
        grid: frames, rows and columns of the token grid.
        head_dim: D, even.
        theta: base of the frequencies, > 0.
        frame_offset: position of the first frame: frames on earlier ranks or already streamed.
        device: where the tables are made.

    Returns:
        RotaryTables: ``cos`` and ``sin``, each ``[F*h*w, D/2]`` fp32.

    Raises:
        ValueError: A grid that is not three sizes >= 0, an odd ``head_dim`` or a ``theta`` that is not positive.

    Example:
        >>> rotary_tables((2, 3, 4), 8).cos.shape
        torch.Size([24, 4])
    """
    require_positive("theta", theta)
    if len(grid) != 3 or min(grid) < 0:
        raise ValueError(f"grid must be three sizes >= 0, got {tuple(grid)}")
    starts = (frame_offset, 0, 0)
    angles = []
    for axis, (size, start, width) in enumerate(zip(grid, starts, axis_widths(head_dim), strict=True)):
        position = torch.arange(start, start + size, dtype=torch.float64, device=device)
        pair = torch.arange(width // 2, dtype=torch.float64, device=device)
        angle = position[:, None] * theta ** (-2.0 * pair / max(width, 1))
        shape = [1, 1, 1, width // 2]
        shape[axis] = size
        angles.append(angle.reshape(shape).expand(*grid, width // 2))
    table = torch.cat(angles, dim=-1).reshape(grid[0] * grid[1] * grid[2], head_dim // 2)
    return RotaryTables(table.cos().float(), table.sin().float())


def camera_rotary_tables(tables: RotaryTables) -> RotaryTables:
    """Return the tables of the camera branch, which rotates the second half of a head's channels alone.

    Of the D/4 pairs there, D // 12 turn with the row, as many with the column and the others with the frame, each by
    the angles of the leading pairs of its axis in ``tables``: the frequencies are those of all D channels, not of D/2.

    Args:
        tables: what `rotary_tables` made for D channels, D a multiple of 8.

    Returns:
        RotaryTables: ``cos`` and ``sin``, each ``[N, D/4]``.

    Raises:
        ValueError: D is not a multiple of 8.

    Example:
        >>> camera_rotary_tables(rotary_tables((2, 3, 4), 16)).cos.shape
        torch.Size([24, 4])
    """
    width = 2 * tables.cos.shape[-1]
    if width % 8 or not width:
        raise ValueError(f"the camera branch needs D to be a multiple of 8, got D = {width}")
    space = width // 12
    columns, start = [], 0
    for pairs, owned in zip((width // 4 - 2 * space, space, space), axis_widths(width), strict=True):
        columns.append(slice(start, start + pairs))
        start += owned // 2
    return RotaryTables(*(torch.cat([table[:, own] for own in columns], -1) for table in tables))


def rotate(x: Tensor, tables: RotaryTables, *, inverse: bool = False) -> Tensor:
    """Turn the interleaved pairs of ``x [..., N, H, D]`` by the token's angles, or back with ``inverse``.

    ``y[2i] = x[2i] cos - x[2i+1] sin`` and ``y[2i+1] = x[2i] sin + x[2i+1] cos``, in the dtype of ``x``.
    """
    cos = tables.cos.to(x.dtype).unsqueeze(-2)
    sin = tables.sin.to(x.dtype).unsqueeze(-2)
    if inverse:
        sin = -sin
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
