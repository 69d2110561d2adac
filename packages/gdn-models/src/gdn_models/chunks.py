"""Chunk starts: how a clip is cut into runs of frames that see one another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gdn_models.config import require_count, require_option

CHUNK_MODES = ("uniform", "first_frame", "first_plus_one")
_WORD = 32


def chunk_schedule(num_frames: int, size: int, mode: str = "uniform") -> tuple[int, ...]:
    """Cut a clip into chunks of ``size`` frames and return the frames at which they start.

    A last chunk shorter than ``size`` is merged into the one before it; in ``"first_frame"`` never into the lone first
    frame.

    Args:
        num_frames: frames of the whole clip, over all ranks, >= 0. Without frames there are no starts.
        size: frames of a chunk, >= 1.
        mode: ``"uniform"`` starts at 0, size, 2 size, …; ``"first_frame"`` at 0, 1, 1 + size, …;
            ``"first_plus_one"`` at 0, size + 1, 2 size + 1, …

    Returns:
        tuple[int, ...]: what ``chunk_starts=`` of `ChunkCausalGDN` takes.

    Raises:
        ValueError: ``num_frames`` or ``size`` is too small, or ``mode`` is not one of the three.
        TypeError: ``num_frames`` or ``size`` is not an int, or ``mode`` is not a str.

    Example:
        >>> chunk_schedule(21, 4), chunk_schedule(3, 4, "first_frame"), chunk_schedule(11, 3, "first_plus_one")
        ((0, 4, 8, 12, 16), (0, 1), (0, 4, 7))
    """
    require_count("num_frames", num_frames, 0)
    require_count("size", size, 1)
    require_option("mode", mode, CHUNK_MODES)
    second = {"uniform": size, "first_frame": 1, "first_plus_one": size + 1}[mode]
    starts = [0, *range(second, num_frames, size)] if num_frames else []
    mergeable = len(starts) > (2 if mode == "first_frame" else 1)
    if mergeable and num_frames - starts[-1] < size:
        starts.pop()
    return tuple(starts)


def same_chunk(starts: Sequence[int], first: int, frames: int, reach: int, device: torch.device) -> Tensor:
    """Tell which of the ``reach`` frames after a frame lie in its chunk.

    Made on the device from integers that travel as kernel arguments: no copy from the host, so no synchronisation, and
    legal while a graph is captured.

    Args:
        starts: interior chunk starts, global frames, increasing.
        first: global frame of local frame 0.
        frames: local frames.
        reach: how far to look.
        device: where the answer is made.

    Returns:
        Tensor: ``[reach, frames]`` bool; entry ``[d - 1, f]`` says that no chunk starts in frames f + 1 … f + d.
    """
    horizon = frames + reach
    words = [0] * max(-(-horizon // _WORD), 1)
    for start in starts:
        if 0 <= start - first < horizon:
            words[(start - first) // _WORD] |= 1 << (start - first) % _WORD
    bits = torch.arange(_WORD, device=device)
    is_start = torch.cat([torch.bitwise_right_shift(word, bits) & 1 for word in words]).bool()
    rows, clear = [], torch.ones(frames, dtype=torch.bool, device=device)
    for distance in range(1, reach + 1):
        clear = clear & ~is_start[distance : distance + frames]
        rows.append(clear)
    return torch.stack(rows) if rows else torch.ones(0, frames, dtype=torch.bool, device=device)
