"""Unit-length keys and queries, with a backward by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gdn_kernels import checks
from gdn_kernels.once import once_differentiable


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Divide by the length over the last dimension.

        y = x r        r = (sum x^2 + eps)^(-1/2)

    Keys of at most unit length keep the gated delta product from expanding, with write strengths up to 2.

    Args:
        x: ``[..., K]``, fp16, bf16, fp32 or fp64, any strides.
        eps: added to the squared length, > 0; a zero vector stays zero.

    Returns:
        Tensor: ``[..., K]`` in the dtype of x, rounded once from fp32 (fp64).

    Raises:
        ValueError: x has no dimension or no floating dtype, or eps is not a finite number > 0.
        TypeError: x is not a tensor, or eps not a number.

    Cost: reads x and writes the result; the backward reads x again and keeps nothing else.
    Gradient: once differentiable, ``dx = r (dy - y <y, dy>)``.

    Example:
        >>> l2_normalize(torch.tensor([3.0, 4.0]))
        tensor([0.6000, 0.8000])
    """
    checks.require_tensor("x", x)
    checks.require_dtype("x", x, checks.FLOATING)
    if x.ndim == 0:
        raise ValueError("x must have shape [..., K], got []")
    eps = checks.require_positive("eps", eps)
    if torch.compiler.is_compiling():  # a compiler fuses the formula and finds the same derivative
        return _normalize(x, eps)
    y: Tensor = _EagerCall.apply(x, eps)  # type: ignore[no-untyped-call]
    return y


class _EagerCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.eps = eps
        return _normalize(x, eps)

    @staticmethod
    @once_differentiable("l2_normalize")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        wide, dy = _widen(x), _widen(dy)
        r = _inverse_length(wide, ctx.eps)
        y = wide * r
        return (r * (dy - y * (y * dy).sum(-1, keepdim=True))).to(x.dtype), None


def _normalize(x: Tensor, eps: float) -> Tensor:
    wide = _widen(x)
    return (wide * _inverse_length(wide, eps)).to(x.dtype)


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _inverse_length(x: Tensor, eps: float) -> Tensor:
    return (x.square().sum(-1, keepdim=True) + eps).rsqrt()
