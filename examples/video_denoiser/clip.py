"""A clip as patch tokens: decode, resize, cut; and back to frames for the picture."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from footage import decode
from torch import Tensor

FRAMES, HEIGHT, WIDTH, PATCH, STRIDE = 13, 64, 96, 8, 2
GRID = (FRAMES, HEIGHT // PATCH, WIDTH // PATCH)


class Clip(NamedTuple):
    """``tokens [1, N, 3*PATCH*PATCH]`` in [-1, 1], frame-major; ``name`` for the picture."""

    tokens: Tensor
    name: str


def load_clip(path: Path) -> Clip:
    """Decode the first frames of a video file, every other one, as tokens.

    Raises:
        ClipError: The file is missing, cannot be decoded or is too short.
    """
    return Clip(to_tokens(decode(path, HEIGHT, WIDTH, STRIDE, FRAMES)), path.name)


def to_tokens(frames: Tensor) -> Tensor:
    """``[F, height, width, 3]`` to ``[1, F*h*w, 3*PATCH*PATCH]``."""
    f, height, width, colours = frames.shape
    rows, columns = height // PATCH, width // PATCH
    patches = frames.reshape(f, rows, PATCH, columns, PATCH, colours).permute(0, 1, 3, 2, 4, 5)
    return patches.reshape(1, f * rows * columns, PATCH * PATCH * colours)


def to_frames(tokens: Tensor) -> Tensor:
    """The inverse of `to_tokens`, clamped to [0, 1] for display."""
    _, rows, columns = GRID
    frames = tokens.reshape(-1, rows, columns, PATCH, PATCH, 3).permute(0, 1, 3, 2, 4, 5)
    return (frames.reshape(-1, HEIGHT, WIDTH, 3) * 0.5 + 0.5).clamp(0, 1)
