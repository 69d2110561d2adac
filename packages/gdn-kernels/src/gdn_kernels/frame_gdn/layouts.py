"""How a tensor of any strides is handed to a kernel, and on which device the kernel is launched."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_VECTOR_BYTES = 16
_LONGEST_TILE = 256
_NO_GUARD = contextlib.nullcontext()


class TokenLayout(NamedTuple):
    """Strides of ``[B, N, H, D]`` tensors, in units of ``align`` elements but for the channels' own.

    Triton would compile anew for every divisibility of a stride, and strides follow F, S, B and H. So the launchers
    pass strides that are not specialised, divided by a power of two that the kernel multiplies back: vector loads need
    that factor, and it depends on D and the dtype alone for the usual layouts.
    """

    align: int
    strides: tuple[tuple[int, int, int, int], ...]


def token_layout(tensors: Sequence[Tensor]) -> TokenLayout:
    """Return the common layout description of ``[B, N, H, D]`` tensors."""
    align = _VECTOR_BYTES // min(x.element_size() for x in tensors)
    for x in tensors:
        for stride in x.stride()[:3]:
            while stride % align:
                align //= 2
    strides = tuple((x.stride(0) // align, x.stride(1) // align, x.stride(2) // align, x.stride(3)) for x in tensors)
    return TokenLayout(align, strides)


def within_tile_reach(x: Tensor) -> Tensor:
    """Return ``x [B, N, H, D]``, or a contiguous copy if 32-bit offsets could not span one tile of it."""
    reach = abs(x.stride(1)) * _LONGEST_TILE + abs(x.stride(3)) * x.shape[3]
    return x if reach < 2**31 else x.contiguous()


def device_guard(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Make the tensor's device current: Triton launches on the current one."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return _NO_GUARD
    return torch.cuda.device(x.device)


def given(x: Tensor | None, stand_in: Tensor) -> Tensor:
    """Return ``x``, or the stand-in for an absent tensor: a pointer that a flag keeps the kernel from reading."""
    return stand_in if x is None else x
