"""Gates of a block: write strength and decay, scale of the keys, output gate.

Gates are computed in fp32 (fp64 for fp64 inputs) whatever the dtype of the input and of the parameters, and under
autocast: a decay rounded to 16 bits would be raised to the power of the number of frames.

Letters: B batch, H heads, F frames, S tokens of a frame, N = F*S, C channels, D = C / H.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gdn_kernels.once import once_differentiable

Grid = tuple[int, int, int]


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of gates and sums: fp64 for fp64 tensors, fp32 otherwise."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def write_strength(x: Tensor, weight: Tensor, bias: Tensor, grid: Grid) -> Tensor:
    """Return ``beta = sigmoid(x weight' + bias)``, how strongly each token writes.

    Args:
        x: ``[B, N, C]``, any floating dtype.
        weight: ``[H, C]``.
        bias: ``[H]``.
        grid: (F, h, w) with F*h*w = N.

    Returns:
        Tensor: ``[B, H, F, S]``, fp32 (fp64), in (0, 1).

    Cost: one product; saves x itself, not a wide copy of it. The backward is once-differentiable.
    """
    frames, rows, columns = grid
    logits: Tensor = _WideLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return logits.sigmoid().reshape(x.shape[0], frames, rows * columns, weight.shape[0]).permute(0, 3, 1, 2)


def discounted_strength(beta: Tensor, inflation: Tensor) -> Tensor:
    """Return ``beta / max(inflation, 1)``: as much less as the ray transforms lengthened a frame's keys.

    Args:
        beta: ``[B, H, F, S]``.
        inflation: ``[B, H, F]``; gets no gradient where it is at most 1.
    """
    return beta / torch.where(inflation > 1, inflation, 1.0)[..., None]


def frame_decay(x: Tensor, weight: Tensor, bias: Tensor, A_log: Tensor, dt_bias: Tensor, grid: Grid) -> Tensor:
    """Return ``decay = exp(-exp(A_log) softplus(mean_s(x) weight' + bias + dt_bias))``, what remains of the past.

    Args:
        x: ``[B, N, C]``, any floating dtype.
        weight: ``[H, C]``.
        bias: ``[H]``.
        A_log: ``[H]``.
        dt_bias: ``[H]``.
        grid: (F, h, w) with F*h*w = N. The mean runs over the h*w tokens of a frame.

    Returns:
        Tensor: ``[B, H, F]``, fp32 (fp64), linear, in [0, 1].
    """
    frames, rows, columns = grid
    tokens = rows * columns
    summed = x.reshape(x.shape[0], frames, tokens, x.shape[2]).sum(2, dtype=wide_dtype(x))
    logits: Tensor = _WideLinear.apply(summed / max(tokens, 1), weight, bias)  # type: ignore[no-untyped-call]
    logits = logits.permute(0, 2, 1).contiguous()  # [B, H, F]; in order, since traced softplus_backward assumes it
    step = functional.softplus(logits + dt_bias.to(logits.dtype)[:, None])
    return torch.exp(-torch.exp(A_log.to(logits.dtype))[:, None] * step)


def key_scale(mode: str, head_dim: int, grid: Grid) -> float:
    """Return the factor of k: (D*S) ** -0.5 for ``"dim_spatial"``, D ** -0.5 for ``"dim"``, 1 for ``"none"``."""
    tokens = max(grid[1] * grid[2], 1)
    return 1.0 / math.sqrt({"dim_spatial": head_dim * tokens, "dim": head_dim, "none": 1}[mode])


def gate_output(output: Tensor, logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``output * SiLU(logits)``: computed in fp32 (fp64), rounded to ``dtype`` once.

    Args:
        output: ``[B, N, C]``, any floating dtype.
        logits: ``[B, N, C]``, any floating dtype.
        dtype: of the result.

    Cost: saves both arguments in their own dtype, no wide intermediate. The backward is once-differentiable.
    """
    result: Tensor = _OutputGate.apply(output, logits, dtype)  # type: ignore[no-untyped-call]
    return result


class _WideLinear(torch.autograd.Function):
    """``x weight' + bias`` in fp32 (fp64) of arguments of any dtype, which are saved as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = bias.dtype
        wide = wide_dtype(x)
        with torch.autocast(x.device.type, enabled=False):
            return functional.linear(x.to(wide), weight.to(wide), bias.to(wide))

    @staticmethod
    @once_differentiable("gdn_models.gates")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        dx = dweight = dbias = None
        with torch.autocast(x.device.type, enabled=False):
            if needs_x:
                dx = (dy @ weight.to(dy.dtype)).to(x.dtype)
            if needs_weight:
                dweight = (dy.flatten(0, -2).T @ x.flatten(0, -2).to(dy.dtype)).to(weight.dtype)
            if needs_bias:
                dbias = dy.flatten(0, -2).sum(0).to(ctx.bias_dtype)
        return dx, dweight, dbias


class _OutputGate(torch.autograd.Function):
    """``a SiLU(g)``: with s = sigmoid(g), da = dy g s and dg = dy a s (1 + g (1 - s))."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, logits: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(output, logits)
        wide = wide_dtype(output)
        return (output.to(wide) * functional.silu(logits.to(wide))).to(dtype)

    @staticmethod
    @once_differentiable("gate_output")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        output, logits = ctx.saved_tensors
        wide = wide_dtype(output)
        dy, g = dy.to(wide), logits.to(wide)
        s = torch.sigmoid(g)
        doutput = (dy * g * s).to(output.dtype) if ctx.needs_input_grad[0] else None
        dlogits = (dy * output.to(wide) * s * (1 + g * (1 - s))).to(logits.dtype) if ctx.needs_input_grad[1] else None
        return doutput, dlogits, None
