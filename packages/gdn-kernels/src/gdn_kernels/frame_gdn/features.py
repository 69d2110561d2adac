"""What every kernel of the frame operation does to a tile of tokens: load it, make features of it, turn and unturn it.

Features are ``relu(w x)`` without the factors that belong to whole rows (RMS statistic, key scale, write strength):
those commute with ReLU, rotation and products, and are applied once, in fp32, where a row is cheapest to scale.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def frame_index(i_program, F, H):
    """Split a program index over (B, F, H), heads fastest: heads of a token are neighbours in memory."""
    i_h = i_program % H
    i_bf = i_program // H
    return (i_bf // F).to(tl.int64), i_h.to(tl.int64), (i_bf % F).to(tl.int64)


@triton.jit
def load_tile(x_ptr, o_n, o_d, m_n, stride_n, stride_d, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load rows ``o_n`` and channels ``o_d`` as fp32; zeros outside."""
    offsets = o_n[:, None] * stride_n + o_d[None, :] * stride_d
    if D % BLOCK_D == 0:
        x = tl.load(x_ptr + offsets, mask=m_n[:, None], other=0.0)
    else:
        x = tl.load(x_ptr + offsets, mask=m_n[:, None] & (o_d < D)[None, :], other=0.0)
    return x.to(tl.float32)


@triton.jit
def store_tile(x_ptr, x, o_n, o_d, m_n, stride_n, stride_d, D: tl.constexpr):
    """Store rows ``o_n`` and channels ``o_d`` in the dtype of the pointer."""
    offsets = o_n[:, None] * stride_n + o_d[None, :] * stride_d
    tl.store(x_ptr + offsets, x.to(x_ptr.dtype.element_ty), mask=m_n[:, None] & (o_d < D)[None, :])


@triton.jit
def load_weight(w_ptr, i_h, o_d, D: tl.constexpr, HAS_WEIGHT: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load the norm weight of one head, ones without a weight."""
    if HAS_WEIGHT:
        w = tl.load(w_ptr + i_h * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    else:
        w = tl.full((BLOCK_D,), 1.0, tl.float32)
    return w


@triton.jit
def feature(x, w, FEATURES: tl.constexpr):
    """``relu(w x)``; prepared operands pass through."""
    if FEATURES:
        x = tl.maximum(x * w[None, :], 0.0)
    return x


@triton.jit
def operand(x, OPERAND: tl.constexpr, DOT: tl.constexpr):
    """Round to what a product reads. Hardware cuts tf32 operands off; rounding them first halves the error."""
    if DOT == "tf32":
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        x = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return x.to(OPERAND)


@triton.jit
def load_angles(cos_ptr, sin_ptr, o_n, m_n, i_block, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load cosines and sines of the pairs of channel block ``i_block``: ``[BLOCK_S, BLOCK_D / 2]`` each."""
    o_i = i_block * (BLOCK_D // 2) + tl.arange(0, BLOCK_D // 2)
    offsets = o_n.to(tl.int64)[:, None] * (D // 2) + o_i[None, :]
    mask = m_n[:, None] & (o_i < D // 2)[None, :]
    return tl.load(cos_ptr + offsets, mask=mask, other=0.0), tl.load(sin_ptr + offsets, mask=mask, other=0.0)


@triton.jit
def turn(x, cos, sin, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr):
    """Turn the interleaved pairs of ``x [BLOCK_S, BLOCK_D]`` by their angles."""
    even, odd = tl.split(tl.reshape(x, (BLOCK_S, BLOCK_D // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (BLOCK_S, BLOCK_D))


@triton.jit
def unturn(x, cos, sin, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr):
    """Turn back: the adjoint of `turn`."""
    even, odd = tl.split(tl.reshape(x, (BLOCK_S, BLOCK_D // 2, 2)))
    return tl.reshape(tl.join(even * cos + odd * sin, odd * cos - even * sin), (BLOCK_S, BLOCK_D))


@triton.jit
def load_matrix(x_ptr, o_row, o_col, stride_row, stride_col, D: tl.constexpr):
    """Load a tile of a D x D matrix in its own dtype; zeros outside. Swapped strides give the transpose."""
    offsets = o_row[:, None] * stride_row + o_col[None, :] * stride_col
    return tl.load(x_ptr + offsets, mask=(o_row < D)[:, None] & (o_col < D)[None, :], other=0.0)


@triton.jit
def store_matrix(x_ptr, x, o_row, o_col, D: tl.constexpr):
    """Store a tile of a contiguous D x D matrix in the dtype of the pointer."""
    offsets = o_row[:, None] * D + o_col[None, :]
    tl.store(x_ptr + offsets, x.to(x_ptr.dtype.element_ty), mask=(o_row < D)[:, None] & (o_col < D)[None, :])
