"""The torch implementation of the gated delta product: chunk form forward, and its backward by hand.

States, sums and products are fp32, or fp64 for fp64 inputs; 16-bit results are rounded once, at the end. Nothing of the
forward is kept but its inputs: the backward solves the triangular systems and scans the states again.

Under ``torch.compile`` forward and backward are two ``torch.library`` operators, so that a graph does not hold the loop
over chunks; eager calls run the same functions behind a plain autograd Function, which costs less host time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdn_kernels.once import once_differentiable
from gdn_kernels.reference.delta_product_chunks import chunk_backward, chunk_forward, chunk_states
from gdn_kernels.reference.delta_product_grid import chunk_grid
from gdn_kernels.reference.delta_product_operands import (
    gradients_to_streams,
    operands_on_grid,
    output_gradient_on_grid,
    output_to_stream,
)


class DeltaProductInputs(NamedTuple):
    """Tensors of one call, checked; shapes as in `gdn_kernels.gated_delta_product`."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor | None
    initial_state: Tensor | None


class DeltaProductOptions(NamedTuple):
    """Everything about one call that is not a tensor.

    ``lengths`` are the tokens of each sequence (T for every batch row if nothing is packed), ``chunk_tokens`` is C.
    """

    lengths: Sequence[int]
    num_householder: int
    chunk_tokens: int
    scale: float


def apply_torch(inputs: DeltaProductInputs, options: DeltaProductOptions) -> tuple[Tensor, Tensor]:
    """Run one checked call; return output ``[B, T, HV, V]`` and final state ``[N, HV, K, V]``.

    Differentiable once, in every tensor.
    """
    if torch.compiler.is_compiling():
        output, final_state = torch.ops.gdn_kernels.delta_product_torch(*inputs, *options)
    else:
        output, final_state = _EagerCall.apply(options, *inputs)  # type: ignore[no-untyped-call]
    return output, final_state


def _forward(inputs: DeltaProductInputs, options: DeltaProductOptions) -> tuple[Tensor, Tensor]:
    q, k, v, beta, g, initial_state = inputs
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        grid = chunk_grid(options.lengths, options.chunk_tokens, q.device)
        x = operands_on_grid(q, k, v, beta, g, grid, options.num_householder)
        output, states = chunk_forward(x.q, x.k, x.decay, x.factors, grid.plan, initial_state, scale=options.scale)
        return output_to_stream(output, grid, q, v), states.final_state


def _backward(
    inputs: DeltaProductInputs, options: DeltaProductOptions, doutput: Tensor | None, dfinal_state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Return the gradients of all inputs; a gradient that is None counts as zero."""
    q, k, v, beta, g, initial_state = inputs
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        grid = chunk_grid(options.lengths, options.chunk_tokens, q.device)
        x = operands_on_grid(q, k, v, beta, g, grid, options.num_householder)
        states = chunk_states(x.k, x.decay, x.factors, grid.plan, initial_state)
        if doutput is None:
            doutput = q.new_zeros(*q.shape[:2], *v.shape[2:])
        found = chunk_backward(
            *x, states, output_gradient_on_grid(doutput, grid, x), dfinal_state, grid.plan, scale=options.scale
        )
        return (*gradients_to_streams(found, grid, q, k, v, beta, g), found.dinitial_state)


class _EagerCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: DeltaProductOptions, *tensors: Any) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.options = options
        ctx.save_for_backward(*tensors)
        return _forward(DeltaProductInputs(*tensors), options)

    @staticmethod
    @once_differentiable("gated_delta_product")
    def backward(ctx: Any, doutput: Tensor | None, dfinal_state: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = DeltaProductInputs(*ctx.saved_tensors)
        found = _backward(inputs, ctx.options, doutput, dfinal_state)
        return (None, *(None if x is None else dx for x, dx in zip(inputs, found, strict=True)))


@torch.library.custom_op("gdn_kernels::delta_product_torch", mutates_args=())
def _forward_op(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, initial_state: Tensor | None,
    lengths: Sequence[int], num_householder: int, chunk_tokens: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    options = DeltaProductOptions(lengths, num_householder, chunk_tokens, scale)
    return _forward(DeltaProductInputs(q, k, v, beta, g, initial_state), options)


@_forward_op.register_fake
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    lengths = others[3]
    state = torch.float64 if q.dtype == torch.float64 else torch.float32
    final_state = q.new_empty((len(lengths), v.shape[2], q.shape[3], v.shape[3]), dtype=state)
    return q.new_empty((*q.shape[:2], *v.shape[2:])), final_state


@torch.library.custom_op("gdn_kernels::delta_product_torch_bwd", mutates_args=())
def _backward_op(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, initial_state: Tensor | None,
    doutput: Tensor | None, dfinal_state: Tensor | None,
    lengths: Sequence[int], num_householder: int, chunk_tokens: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    options = DeltaProductOptions(lengths, num_householder, chunk_tokens, scale)
    inputs = DeltaProductInputs(q, k, v, beta, g, initial_state)
    dq, dk, dv, dbeta, dg, dinitial_state = _backward(inputs, options, doutput, dfinal_state)
    return dq, dk, dv, dbeta, q.new_empty(0) if dg is None else dg, dinitial_state


@_backward_op.register_fake
def _backward_fake(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    _, final_state = _forward_fake(q, k, v, beta, g, *others[:1], *others[3:])
    dq, dk, dv, dbeta = (x.new_empty(x.shape) for x in (q, k, v, beta))
    return dq, dk, dv, dbeta, q.new_empty(0) if g is None else g.new_empty(g.shape), final_state


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.options = inputs[len(DeltaProductInputs._fields) :]
    ctx.save_for_backward(*inputs[: len(DeltaProductInputs._fields)])


@once_differentiable("gated_delta_product")
def _op_backward(ctx: Any, doutput: Tensor | None, dfinal_state: Tensor | None) -> tuple[Any, ...]:
    inputs = ctx.saved_tensors
    found = torch.ops.gdn_kernels.delta_product_torch_bwd(*inputs, doutput, dfinal_state, *ctx.options)
    given = (None if x is None else dx for x, dx in zip(inputs, found, strict=True))
    return (*given, *(None for _ in ctx.options))


_forward_op.register_autograd(_op_backward, setup_context=_setup_context)
