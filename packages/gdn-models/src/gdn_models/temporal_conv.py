"""Short depthwise convolution over frames, each spatial position its own sequence.

Letters: B batch, F frames, S tokens of a frame, C channels, K taps; the last tap belongs to the present frame.

    y_t = sum_{d = 0 ... K-1} w_{K-1-d} x_{t-d}  +  sum_{d = 1 ... min(K-1, e(t)-1-t)} w_{K-1-d} x_{t+d}

with x = 0 outside the clip. Frame t sees what comes before e(t): t + 1 in the causal form, F in the bidirectional one,
the end of t's chunk in the chunk-causal one. A tap looks as far ahead as back, and the present counts once.
The adjoint walks the same pairs (t, s): dx_s = sum w dy_t and dw = sum x_s dy_t.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gdn_kernels import checks
from gdn_kernels.once import once_differentiable
from gdn_models.gates import wide_dtype


class ConvWindow(NamedTuple):
    """What the frames of one call may see; shared by all convolutions of a block.

    ``before`` and ``after`` count the frames of the input on either side that have no result: a halo, a stream's tail.
    ``ahead``: frames after its own count too. ``same_chunk``: ``[K - 1, F]`` bool or None for all; entry ``[d - 1, t]``
    says that frame t + d lies in the chunk of frame t (`gdn_models.chunks.same_chunk`).
    """

    before: int = 0
    after: int = 0
    ahead: bool = False
    same_chunk: Tensor | None = None


class TemporalConv(nn.Module):
    """Weight ``[C, 1, K]`` of `temporal_conv`: no bias, no activation, the identity at first (last tap 1, others 0).

    Args:
        channels: C.
        size: K, taps, >= 1.
        device: of the weight.
        dtype: of the weight.
    """

    def __init__(
        self, channels: int, size: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Make the weight and reset it."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Make the convolution the identity."""
        with torch.no_grad():
            self.weight.zero_()
            self.weight[..., -1] = 1

    def forward(self, x: Tensor, window: ConvWindow) -> Tensor:
        """Convolve ``x [B, before + F + after, S, C]``; see `temporal_conv`."""
        return temporal_conv(x, self.weight, window)

    def extra_repr(self) -> str:
        """Return channels and taps."""
        return f"{self.weight.shape[0]}, size={self.weight.shape[2]}"


def temporal_conv(x: Tensor, weight: Tensor, window: ConvWindow) -> Tensor:
    """Convolve over frames.

    Args:
        x: ``[B, before + F + after, S, C]``, any floating dtype and strides. Frames that are not given are zero.
        weight: ``[C, 1, K]``.
        window: which frames are given, and which of them a frame sees.

    Returns:
        Tensor: ``[B, F, S, C]`` in the dtype of ``x``; products and sums, also those of both gradients, are fp32 (fp64
        for fp64).

    Raises:
        ValueError: A shape or dtype is wrong, or ``before`` and ``after`` exceed the frames of ``x``.

    Cost: 2K - 1 passes over x (K in the causal form); saves x and the weight. The backward is once-differentiable.

    Example:
        >>> x, weight = torch.arange(1.0, 4.0).reshape(1, 3, 1, 1), torch.tensor([[[10.0, 1.0]]])
        >>> temporal_conv(x, weight, ConvWindow()).flatten().tolist()
        [1.0, 12.0, 23.0]
        >>> temporal_conv(x, weight, ConvWindow(ahead=True)).flatten().tolist()
        [21.0, 42.0, 23.0]
    """
    checks.require_rank("x", x, "B, F, S, C")
    checks.require_dtype("x", x, checks.FLOATING)
    checks.require_rank("weight", weight, "C, 1, K")
    channels, size = x.shape[-1], weight.shape[-1]
    checks.require_shape("weight", weight, "C, 1, K", (channels, 1, max(size, 1)))
    frames = x.shape[1] - window.before - window.after
    if min(window.before, window.after, frames) < 0:
        raise ValueError(
            f"before and after must be >= 0 and leave F >= 0 of {x.shape[1]} frames, "
            f"got before={window.before}, after={window.after}"
        )
    if window.same_chunk is not None:
        checks.require_shape("same_chunk", window.same_chunk, "K - 1, F", (size - 1, frames))
    geometry = window.same_chunk, window.ahead, window.before, frames
    result: Tensor = _TemporalConv.apply(x.contiguous(), weight, *geometry)  # type: ignore[no-untyped-call]
    return result


class _TemporalConv(torch.autograd.Function):
    """The convolution and its adjoint; written by hand so that both gradients accumulate in fp32 and round once."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, same_chunk: Tensor | None, ahead: bool, before: int, frames: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight, same_chunk)
        ctx.geometry = ahead, before, frames
        y = torch.zeros(x.shape[0], frames, *x.shape[2:], dtype=wide_dtype(x), device=x.device)
        for tap, target, source, seen in _taps(x, weight, same_chunk, *ctx.geometry):
            y[:, target].addcmul_(x[:, source], _coefficient(weight, tap, seen, y.dtype))
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable("temporal_conv")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        x, weight, same_chunk = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        wide = wide_dtype(x)
        dx = torch.zeros(x.shape, dtype=wide, device=x.device) if needs_x else None
        dweight = torch.zeros(weight.shape, dtype=wide, device=x.device) if needs_weight else None
        for tap, target, source, seen in _taps(x, weight, same_chunk, *ctx.geometry):
            if dx is not None:
                dx[:, source].addcmul_(dy[:, target], _coefficient(weight, tap, seen, wide))
            if dweight is not None:
                products = (dy[:, target].to(wide) * x[:, source]).sum((0, 2))  # [frames, C]
                dweight[:, 0, tap] += (products if seen is None else products * seen[:, None]).sum(0)
        dx = None if dx is None else dx.to(x.dtype)
        dweight = None if dweight is None else dweight.to(weight.dtype)
        return dx, dweight, None, None, None, None


def _taps(
    x: Tensor, weight: Tensor, same_chunk: Tensor | None, ahead: bool, before: int, frames: int
) -> Iterator[tuple[int, slice, slice, Tensor | None]]:
    """Yield every tap with the frames it writes, the frames of ``x`` it reads and, ahead, which of them count."""
    size = weight.shape[-1]
    for offset in range(1 - size, size if ahead else 1):
        start = max(0, -(before + offset))
        stop = min(frames, x.shape[1] - before - offset)
        if start < stop:
            source = slice(before + offset + start, before + offset + stop)
            seen = same_chunk[offset - 1, start:stop] if same_chunk is not None and offset > 0 else None
            yield size - 1 - abs(offset), slice(start, stop), source, seen


def _coefficient(weight: Tensor, tap: int, seen: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return what the tap multiplies by, ``[C]``, or ``[frames, 1, C]`` where it depends on the frame."""
    coefficient = weight[:, 0, tap].to(dtype)
    return coefficient if seen is None else coefficient * seen[:, None, None]
