"""All convolutions of a block over one clip, whose neighbouring frames a stream or other ranks hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gdn_cp import halo_exchange
from gdn_models.cache import next_tail
from gdn_models.chunks import same_chunk
from gdn_models.clip import Clip
from gdn_models.temporal_conv import ConvWindow, TemporalConv


def convolve_clip(
    parts: Sequence[Tensor],
    layers: Sequence[TemporalConv | None],
    tails: Sequence[Tensor | None] | None,
    clip: Clip,
    ahead: bool,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Convolve tensors ``[B, F, S, C]``, each with its layer; those without one are passed on.

    Args:
        parts: inputs of the convolutions, zero in invalid frames.
        layers: as many, of one size; None leaves a tensor as it is.
        tails: as many: what a stream kept of each input, ``[B, K-1, S, C]``, None without a layer. None as a whole
            outside streams.
        clip: the call.
        ahead: a tap looks as far ahead as back, up to the end of its chunk.

    Returns:
        tuple: the convolved tensors, and the tails of the next call; None outside streams.

    Communication: with a context of several ranks one halo exchange for all, and one in backward.
    """
    results = list(parts)
    following: list[Tensor | None] = [None] * len(parts) if tails is None else list(tails)
    used = {i: layer for i, layer in enumerate(layers) if layer is not None}
    if used:
        reach = next(iter(used.values())).weight.shape[-1] - 1
        given = [parts[i] for i in used]
        if tails is None:
            extended, window = _with_halo(given, clip, reach, ahead)
        else:
            extended, window = _with_tails(given, [tails[i] for i in used], clip, reach, ahead)
        for (i, layer), part in zip(used.items(), extended, strict=True):
            results[i] = layer(part, window)
            if tails is not None:
                following[i] = next_tail(part, reach)
    return results, following


def _with_tails(
    parts: Sequence[Tensor], tails: Sequence[Tensor | None], clip: Clip, reach: int, ahead: bool
) -> tuple[Sequence[Tensor], ConvWindow]:
    """Put the tails of a stream before the tensors. A call ends with a chunk: nothing follows."""
    joined = []
    for tail, part in zip(tails, parts, strict=True):
        assert tail is not None
        joined.append(torch.cat([tail.to(part.dtype), part], 1))
    seen = None
    if ahead and clip.chunk_starts:
        seen = same_chunk(clip.chunk_starts, 0, clip.grid[0], reach, parts[0].device)
    return joined, ConvWindow(reach, 0, ahead, seen)


def _with_halo(parts: Sequence[Tensor], clip: Clip, reach: int, ahead: bool) -> tuple[Sequence[Tensor], ConvWindow]:
    """Extend the tensors by the frames of other ranks that their convolutions read."""
    shard = clip.shard
    before, after = (reach, reach if ahead else 0) if shard.context is not None else (0, 0)
    if shard.context is not None and shard.partition is not None and reach:
        joined = halo_exchange(torch.cat(list(parts), -1), before, after, 1, shard.context, shard.partition)
        parts = joined.chunk(len(parts), -1)
    if not shard.frames:
        before = after = 0  # a rank without frames serves halos and has none
    seen = None
    if ahead and clip.chunk_starts:
        seen = same_chunk(clip.chunk_starts, shard.first, shard.frames, reach, parts[0].device)
    return parts, ConvWindow(before, after, ahead, seen)
