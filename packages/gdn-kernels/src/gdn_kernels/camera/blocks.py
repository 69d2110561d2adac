"""Launch shapes of the camera kernels: one table, and one function that picks from it.

The kernels use no products and next to no shared memory, so a shape depends on the width alone, not on the device.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch


class CameraBlock(NamedTuple):
    """Tokens and heads of one tile, and warps; ``waves``: programs per multiprocessor that share the backward."""

    block_t: int
    block_h: int
    num_warps: int
    waves: int = 4


KERNELS = ("prepare", "prepare_bwd", "output")

# kernel -> widest head -> block. A tile has block_t * block_h rows of half a head, about eight channels a thread.
# Blocks under 128 are the fastest of about ten each at D = 112, H = 20 on an H200; the others follow them, untimed.
TABLE: dict[str, dict[int, CameraBlock]] = {
    "prepare": {
        16: CameraBlock(16, 4, 4), 64: CameraBlock(8, 4, 4), 128: CameraBlock(8, 2, 4), 256: CameraBlock(2, 4, 4),
    },
    "prepare_bwd": {
        16: CameraBlock(16, 4, 4), 64: CameraBlock(8, 4, 4), 128: CameraBlock(2, 4, 4), 256: CameraBlock(2, 4, 4),
    },
    "output": {
        16: CameraBlock(16, 4, 4), 64: CameraBlock(8, 4, 4), 128: CameraBlock(1, 32, 8), 256: CameraBlock(2, 4, 4),
    },
}  # fmt: skip


def camera_block(kernel: str, width: int) -> CameraBlock:
    """Return the block of ``kernel`` for heads of ``width`` channels."""
    return next(block for widest, block in TABLE[kernel].items() if width <= widest)


def padded_half(width: int) -> int:
    """Return half a head's channels, rounded up to a power of two."""
    return 1 << (width // 2 - 1).bit_length()


def shared_programs(blocks: int, block: CameraBlock, device: torch.device) -> int:
    """Return how many programs share ``blocks`` blocks of tokens, each with partial sums of its own."""
    return max(1, min(blocks, block.waves * _multiprocessors(device)))


@functools.lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
