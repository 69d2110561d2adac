"""Named sets of constructor arguments: what published models, and the benchmarks, are made of."""

from __future__ import annotations

import dataclasses
from typing import Any

from gdn_models.block import FrameGDNBlock
from gdn_models.camera import CameraBidirectionalGDN, CameraChunkCausalGDN
from gdn_models.chunks import chunk_schedule
from gdn_models.config import FrameGDNConfig
from gdn_models.frame_gdn import BidirectionalGDN, ChunkCausalGDN


@dataclasses.dataclass(frozen=True)
class Preset:
    """A block of a model, the clips it is for, and how they are cut.

    Attributes:
        name: of the preset.
        block: the class.
        config: what it is made from.
        spatial: rows and columns of a frame's tokens.
        frames: frames of a call, one number per kind of call: a whole clip, or the first and following steps of a
            stream.
        chunk_size: frames of a chunk, or None for one chunk per call.
        chunk_mode: how chunks are laid out; see `chunk_schedule`.

    Example:
        >>> from gdn_models import preset
        >>> preset("wide_d128").config.head_dim
        128
    """

    name: str
    block: type[FrameGDNBlock]
    config: FrameGDNConfig
    spatial: tuple[int, int]
    frames: tuple[int, ...]
    chunk_size: int | None = None
    chunk_mode: str = "uniform"

    def with_block(self, block: type[FrameGDNBlock]) -> Preset:
        """Return the preset for another class of blocks: the same sizes and options, without chunks if it has none.

        Raises:
            TypeError: ``block`` is not a class of frame-wise blocks.

        Example:
            >>> from gdn_models import CameraChunkCausalGDN, preset
            >>> preset("tiny").with_block(CameraChunkCausalGDN).config.patch_size
            (1, 1, 1)
        """
        if not isinstance(block, type) or not issubclass(block, FrameGDNBlock):
            raise TypeError(f"block must be a class such as FrameGDN, got {getattr(block, '__name__', block)!r}")
        names = [field.name for field in dataclasses.fields(block.config_kind) if hasattr(self.config, field.name)]
        config = block.config_kind(**{name: getattr(self.config, name) for name in names})
        chunk_size = self.chunk_size if block.has_chunks else None
        return dataclasses.replace(self, block=block, config=config, chunk_size=chunk_size)

    def make(self, **factory: Any) -> FrameGDNBlock:
        """Return a new block; ``device`` and ``dtype`` may be given."""
        return self.block(self.config, **factory)

    def grid(self, frames: int | None = None) -> tuple[int, int, int]:
        """Return (F, h, w), of a call with as many frames, or of the first kind of call."""
        return (self.frames[0] if frames is None else frames, *self.spatial)

    def chunk_starts(self, frames: int) -> tuple[int, ...] | None:
        """Return where chunks start in a clip; None where a call is one chunk."""
        return None if self.chunk_size is None else chunk_schedule(frames, self.chunk_size, self.chunk_mode)


def _preset(
    name: str, block: type[FrameGDNBlock], dim: int, heads: int, spatial: tuple[int, int], *frames: int, **chunks: Any
) -> Preset:
    return Preset(name, block, block.config_kind(dim=dim, heads=heads), spatial, frames, **chunks)


PRESETS = {
    preset.name: preset
    for preset in (
        _preset("sana_wm_720p", CameraBidirectionalGDN, 2240, 20, (22, 40), 121),
        _preset(
            "sana_wm_720p_chunk",
            CameraChunkCausalGDN,
            2240,
            20,
            (22, 40),
            121,
            chunk_size=3,
            chunk_mode="first_plus_one",
        ),
        _preset("sana_wm_stream", CameraChunkCausalGDN, 2240, 20, (22, 40), 4, 3),
        _preset("sana_v2v_stream", ChunkCausalGDN, 2240, 20, (22, 40), 4, 3),
        _preset("wide_d128", BidirectionalGDN, 2560, 20, (22, 40), 11),
        _preset("tiny", ChunkCausalGDN, 64, 2, (2, 2), 6, chunk_size=3),
    )
}


def preset(name: str) -> Preset:
    """Return a preset by name.

    ``"sana_v2v_stream"``: the linear blocks of SANA-Streaming's video-to-video model (NVlabs/Sana), one chunk per call,
    4 frames and then 3 (its softmax blocks are the model's own). ``"wide_d128"``: heads of 128 channels, a power of
    two. ``"sana_wm_720p"``, ``"sana_wm_720p_chunk"`` and ``"sana_wm_stream"``: the linear blocks of SANA-WM, which take
    cameras, for clips of 121 frames read both ways or in chunks of 3, and for one chunk per call. ``"tiny"``: for tests
    on a CPU, of every class through `Preset.with_block`.

    Raises:
        ValueError: There is no preset of this name; the message lists what there is.

    Example:
        >>> tiny = preset("tiny")
        >>> x = torch.rand(1, 24, 64)
        >>> tiny.make()(x, tiny.grid(), chunk_starts=tiny.chunk_starts(6)).shape
        torch.Size([1, 24, 64])
    """
    if name not in PRESETS:
        raise ValueError(f"name must be one of {', '.join(map(repr, PRESETS))}, got {name!r}")
    return PRESETS[name]
