"""Tensors of a gated delta product, from the streams of a caller to the chunks of a grid and back.

Letters: see `gdn_kernels.reference.delta_product_chunks`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gdn_kernels.reference.delta_product_chunks import (
    ChunkDecay,
    ChunkGradients,
    WYFactors,
    chunk_decay,
    wy_factors,
)
from gdn_kernels.reference.delta_product_grid import ChunkGrid


class ChunkOperands(NamedTuple):
    """Inputs on the grid, heads before rows, in one dtype, with what `chunk_forward` derives from them."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    decay: ChunkDecay
    factors: WYFactors


def operands_on_grid(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, grid: ChunkGrid, num_householder: int
) -> ChunkOperands:
    """Lay out ``q [B, T, H, K]``, ``k [B, T*R, H, K]``, ``v [B, T*R, HV, V]``, ``beta [B, T*R, HV]``, ``g [B, T, HV]``.

    Computes in fp64 if q is fp64 and in fp32 otherwise.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    heads = (q.shape[2], v.shape[2] // q.shape[2])
    q_chunks, k_chunks = grid.to_chunks(q, 1, dtype), grid.to_chunks(k, num_householder, dtype)
    v_chunks = torch.unflatten(grid.to_chunks(v, num_householder, dtype), 1, heads)
    beta_chunks = torch.unflatten(grid.to_chunks(beta[..., None], num_householder, dtype).squeeze(-1), 1, heads)
    g_chunks = None if g is None else torch.unflatten(grid.to_chunks(g[..., None], 1, dtype).squeeze(-1), 1, heads)
    decay = chunk_decay(g_chunks, grid.chunk_tokens, q_chunks)
    factors = wy_factors(k_chunks, v_chunks, beta_chunks, decay)
    return ChunkOperands(q_chunks, k_chunks, v_chunks, beta_chunks, decay, factors)


def output_to_stream(output: Tensor, grid: ChunkGrid, q: Tensor, v: Tensor) -> Tensor:
    """Return ``output [X, H, G, C, V]`` as ``[B, T, HV, V]`` in the dtype of q."""
    return grid.to_stream(output.flatten(1, 2), (*q.shape[:2], *v.shape[2:]), q.dtype)


def output_gradient_on_grid(doutput: Tensor, grid: ChunkGrid, operands: ChunkOperands) -> Tensor:
    """Return ``doutput [B, T, HV, V]``, any strides, as ``[X, H, G, C, V]`` in the dtype of the operands."""
    return torch.unflatten(grid.to_chunks(doutput, 1, operands.q.dtype), 1, operands.v.shape[1:3])


def gradients_to_streams(
    gradients: ChunkGradients, grid: ChunkGrid, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return dq, dk, dv, dbeta and dg, each in shape and dtype of its input; dg is None for g None."""
    return (
        grid.to_stream(gradients.dq, q.shape, q.dtype),
        grid.to_stream(gradients.dk, k.shape, k.dtype),
        grid.to_stream(gradients.dv.flatten(1, 2), v.shape, v.dtype),
        grid.to_stream(gradients.dbeta.flatten(1, 2)[..., None], beta.shape, beta.dtype),
        None
        if gradients.dg is None or g is None
        else grid.to_stream(gradients.dg.flatten(1, 2)[..., None], g.shape, g.dtype),
    )
