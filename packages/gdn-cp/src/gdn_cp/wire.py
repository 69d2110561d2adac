"""What one rank sends in one pass: blocks per batch element and head, in one flat buffer with fixed offsets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGN_BYTES = 16


@dataclasses.dataclass(frozen=True)
class WireLayout:
    """Names, shapes and offsets of the blocks of a buffer; absent blocks are left out. Equal on all ranks.

    ``shapes`` are those of whole blocks, ``[B, H, ...]``. Every block starts on 16 bytes.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each block, without padding."""
        return tuple(_product(shape) for shape in self.shapes)

    @property
    def offsets(self) -> tuple[int, ...]:
        """First element of each block, and the length of the buffer as last entry."""
        step = _ALIGN_BYTES // self.dtype.itemsize
        offsets = [0]
        for size in self.sizes:
            offsets.append(offsets[-1] + -(-size // step) * step)
        return tuple(offsets)

    def buffer(self, device: torch.device) -> Tensor:
        """Return a flat buffer whose blocks are to be written; what pads them is zero."""
        is_padded = sum(self.sizes) != self.offsets[-1]
        return (torch.zeros if is_padded else torch.empty)(self.offsets[-1], dtype=self.dtype, device=device)

    def pack(self, blocks: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return the flat buffer of the blocks, in the order of ``names``."""
        buffer = self.buffer(device)
        for block, size, start in zip(blocks, self.sizes, self.offsets, strict=False):
            buffer[start : start + size] = block.reshape(-1)
        return buffer

    def unpack(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return views of the blocks by name; leading dims of ``buffer [..., length]`` are kept."""
        lead = buffer.shape[:-1]
        return {
            name: buffer[..., start : start + size].reshape(*lead, *shape)
            for name, shape, size, start in zip(self.names, self.shapes, self.sizes, self.offsets, strict=False)
        }


def _product(shape: Sequence[int]) -> int:
    product = 1
    for n in shape:
        product *= n
    return product
