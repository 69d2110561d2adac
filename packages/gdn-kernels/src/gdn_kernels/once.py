"""Backward formulas that have no derivative of their own, and say so.

``torch.autograd.function.once_differentiable`` says it only where an incoming gradient requires a gradient, on a node
that leads to no input: `torch.autograd.grad` passes it by, and second-order terms are missing without a word.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Formula = Callable[..., tuple[Any, ...]]


def once_differentiable(op: str) -> Callable[[Formula], Formula]:
    """Decorate ``backward(ctx, *gradients)`` so that differentiating what it returned raises.

    For the ``backward`` of an autograd Function, below ``staticmethod``, and for the formula of a ``torch.library``
    operator. With ``create_graph=True`` the gradients hang on a node whose inputs are the incoming gradients and the
    saved tensors. Where these do not lead to every input that the gradients depend on, the forward also returns, and
    saves, an empty tensor: a saved output leads to all inputs.

    Args:
        op: what the user called, for the message.

    Raises:
        NotImplementedError: In a second backward that meets the gradients, whatever asks for it and for which inputs.

    Cost: none without ``create_graph=True``; with it, gradients are copied and keep alive what was saved.

    Example:
        >>> class Square(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         ctx.save_for_backward(x)
        ...         return x * x
        ...
        ...     @staticmethod
        ...     @once_differentiable("square")
        ...     def backward(ctx, dy):
        ...         return (2 * ctx.saved_tensors[0] * dy,)
        >>> x = torch.tensor(3.0, requires_grad=True)
        >>> (dx,) = torch.autograd.grad(Square.apply(x), x, create_graph=True)
        >>> dx.backward()
        Traceback (most recent call last):
        NotImplementedError: square is differentiable once; its gradients cannot be differentiated again
    """

    def decorate(backward: Formula) -> Formula:
        @functools.wraps(backward)
        def checked(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
            if not torch.is_grad_enabled():
                return backward(ctx, *gradients)
            saved = ctx.saved_tensors
            with torch.no_grad():
                found = backward(_Unpacked(ctx, saved), *gradients)
            sources = [x for x in (*gradients, *saved) if x is not None and x.requires_grad]
            if not sources:
                return found
            nothing: Tensor = _Refusal.apply(op, *sources)  # type: ignore[no-untyped-call]
            return tuple(None if x is None else x + nothing.to(x.dtype) for x in found)

        return checked

    return decorate


class _Unpacked:
    """A context whose saved tensors are unpacked already: a checkpoint hands them out a single time."""

    def __init__(self, ctx: Any, saved_tensors: tuple[Tensor | None, ...]) -> None:
        self._ctx, self.saved_tensors = ctx, saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _Refusal(torch.autograd.Function):
    """A negative zero, which changes no number that it is added to; it depends on all sources and has no derivative."""

    @staticmethod
    def forward(ctx: Any, op: str, *sources: Tensor) -> Tensor:
        ctx.op = op
        return torch.tensor(-0.0, device="cpu")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        raise NotImplementedError(f"{ctx.op} is differentiable once; its gradients cannot be differentiated again")
