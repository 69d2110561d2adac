"""`halo_exchange` as a ``torch.library`` operator, which is what a graph of ``torch.compile`` holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gdn_cp.context import CPContext
from gdn_cp.halo import agree_on_halo, halo_plan, run_backward, run_forward
from gdn_cp.handles import context_of
from gdn_cp.partition import FramePartition, Partition
from gdn_kernels.once import once_differentiable


def call_op(x: Tensor, context: CPContext, partition: Partition, left: int, right: int, fill: float) -> Tensor:
    """Put the exchange into the graph that is being traced; frames are along dim 0."""
    needs_grad, grad_mode = x.requires_grad, torch.is_grad_enabled()
    tie = context.tie if grad_mode and not needs_grad else None
    counts = list(partition.counts)
    extended: Tensor = torch.ops.gdn_cp.halo(
        x, tie, context.handle, counts, left, right, float(fill), needs_grad, grad_mode
    )
    return extended


@torch.library.custom_op("gdn_cp::halo", mutates_args=())
def _forward_op(
    x: Tensor, tie: Tensor | None, context: str, counts: Sequence[int], left: int, right: int, fill: float,
    needs_grad: bool, grad_mode: bool,
) -> Tensor:  # fmt: skip
    ranks = context_of(context, hold=True)
    (plan, _), _ = agree_on_halo(
        x, left, right, 0, ranks, lambda: FramePartition(tuple(counts)), fill, traced=(needs_grad, grad_mode)
    )
    return run_forward(x, plan, ranks, fill).contiguous()


@_forward_op.register_fake
def _forward_fake(x: Tensor, tie: Tensor | None, context: str, counts: Sequence[int], *options: Any) -> Tensor:
    left, right = options[:2]
    own = counts[context_of(context).rank] if context_of(context).rank < len(counts) else 0
    return x.new_empty(((left + own + right) if own else 0, *x.shape[1:]))


@torch.library.custom_op("gdn_cp::halo_bwd", mutates_args=())
def _backward_op(
    gradient: Tensor, context: str, counts: Sequence[int], left: int, right: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    ranks = context_of(context)
    plan = halo_plan(FramePartition(tuple(counts)), ranks.rank, left, right)
    dtie = gradient.new_empty(0, dtype=torch.float32)
    return run_backward(gradient, plan, ranks).contiguous(), dtie


@_backward_op.register_fake
def _backward_fake(
    gradient: Tensor, context: str, counts: Sequence[int], left: int, right: int
) -> tuple[Tensor, Tensor]:
    own = counts[context_of(context).rank]
    return gradient.new_empty((own, *gradient.shape[1:])), gradient.new_empty(0, dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.tied, ctx.plan = inputs[1] is not None, inputs[2:6]


@once_differentiable("halo_exchange")
def _op_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    dx, dtie = torch.ops.gdn_cp.halo_bwd(gradient, *ctx.plan)
    return (dx, dtie.cpu() if ctx.tied else None, *(None for _ in range(7)))


_forward_op.register_autograd(_op_backward, setup_context=_setup_context)
