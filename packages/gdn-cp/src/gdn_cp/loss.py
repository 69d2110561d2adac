"""Ties a loss to outputs it does not use, so that every rank's backward reaches the same exchanges."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _JoinBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, *outputs: Tensor) -> Tensor:
        ctx.like = [(x.shape, x.dtype, x.device) for x in outputs]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)
        return (gradients[0], *zeros)


def join_backward(loss: Tensor, *outputs: Tensor) -> Tensor:
    """Return ``loss``, whose backward also reaches ``outputs`` with zero gradients.

    For a rank whose loss ignores an output of a context-parallel operation that another rank's loss uses, and for the
    empty outputs of a rank without frames: a backward exchange runs on every rank or on none. Adding ``0 * output``
    would do the same but carry a NaN into the loss.

    Args:
        loss: any tensor, usually a scalar.
        outputs: outputs of context-parallel operations.

    Communication: none. Every rank must call this: no.

    Example:
        >>> output = torch.ones(3, requires_grad=True)
        >>> join_backward(torch.zeros(()), output).backward()
        >>> output.grad
        tensor([0., 0., 0.])
    """
    joined: Tensor = _JoinBackward.apply(loss, *outputs)  # type: ignore[no-untyped-call]
    return joined
