"""What the camera kernels do to a tile: find its rows, load halves of heads, map groups of four by a token's matrix.

A tile is ``R = BLOCK_T * BLOCK_H`` rows, a token and a head each, by ``HALF`` channels: half a head, rounded up to a
power of two. Four neighbouring channels lie in one thread, so taking them apart and together moves no data.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def token_rows(i_block, total, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr):
    """Return, for each row of a tile, its token among B * N, its head within the block, and whether there is a token.

    Tokens past the end are counted as token 0, so that what is computed from their number stays in range.
    """
    o_r = tl.arange(0, BLOCK_T * BLOCK_H)
    i_token = i_block * BLOCK_T + (o_r // BLOCK_H).to(tl.int64)
    here = i_token < total
    return tl.where(here, i_token, 0), o_r % BLOCK_H, here


@triton.jit
def load_half(x_ptr, o_r, m_r, stride_d, D: tl.constexpr, HALF: tl.constexpr, SECOND: tl.constexpr):
    """Load one half of the heads that begin at ``o_r`` as fp32; zeros outside."""
    o_c = tl.arange(0, HALF)
    offsets = o_r[:, None] + ((o_c + SECOND * (D // 2)).to(tl.int64) * stride_d)[None, :]
    if D == 2 * HALF:
        x = tl.load(x_ptr + offsets, mask=m_r[:, None], other=0.0)
    else:
        x = tl.load(x_ptr + offsets, mask=m_r[:, None] & (o_c < D // 2)[None, :], other=0.0)
    return x.to(tl.float32)


@triton.jit
def store_half(x_ptr, x, o_r, m_r, D: tl.constexpr, HALF: tl.constexpr, SECOND: tl.constexpr):
    """Store one half of the heads that begin at ``o_r``, channels contiguous, in the dtype of the pointer."""
    o_c = tl.arange(0, HALF)
    offsets = o_r[:, None] + (o_c + SECOND * (D // 2))[None, :]
    x = x.to(x_ptr.dtype.element_ty)
    if D == 2 * HALF:
        tl.store(x_ptr + offsets, x, mask=m_r[:, None])
    else:
        tl.store(x_ptr + offsets, x, mask=m_r[:, None] & (o_c < D // 2)[None, :])


@triton.jit
def load_row(m_ptr, i_token, here, ROW: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Load one row of each token's 4 x 4 matrix, or one column: four tensors ``[R, 1]``."""
    base = m_ptr + (i_token * 16 + (ROW if TRANSPOSED else 4 * ROW))[:, None]
    m = here[:, None]
    step: tl.constexpr = 4 if TRANSPOSED else 1
    return (
        tl.load(base, mask=m, other=0.0), tl.load(base + step, mask=m, other=0.0),
        tl.load(base + 2 * step, mask=m, other=0.0), tl.load(base + 3 * step, mask=m, other=0.0),
    )  # fmt: skip


@triton.jit
def load_map(m_ptr, i_token, here, TRANSPOSED: tl.constexpr):
    """Load each token's 4 x 4 matrix, or its transpose, as four rows of four tensors ``[R, 1]``."""
    return (
        load_row(m_ptr, i_token, here, 0, TRANSPOSED), load_row(m_ptr, i_token, here, 1, TRANSPOSED),
        load_row(m_ptr, i_token, here, 2, TRANSPOSED), load_row(m_ptr, i_token, here, 3, TRANSPOSED),
    )  # fmt: skip


@triton.jit
def row_times(row, x0, x1, x2, x3):
    """Multiply one row of the matrices by columns of four."""
    return row[0] * x0 + row[1] * x1 + (row[2] * x2 + row[3] * x3)


@triton.jit
def apply_map(x, m, R: tl.constexpr, HALF: tl.constexpr):
    """Map every group of four channels of ``x [R, HALF]`` by its row's matrix."""
    even, odd = tl.split(tl.reshape(x, (R, HALF // 4, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    even = tl.join(row_times(m[0], x0, x1, x2, x3), row_times(m[2], x0, x1, x2, x3))
    odd = tl.join(row_times(m[1], x0, x1, x2, x3), row_times(m[3], x0, x1, x2, x3))
    return tl.reshape(tl.join(even, odd), (R, HALF))


@triton.jit
def apply_transpose(x, m, R: tl.constexpr, HALF: tl.constexpr):
    """Map every group of four channels by the transpose of its row's matrix: the adjoint of `apply_map`."""
    even, odd = tl.split(tl.reshape(x, (R, HALF // 4, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    y0 = m[0][0] * x0 + m[1][0] * x1 + (m[2][0] * x2 + m[3][0] * x3)
    y1 = m[0][1] * x0 + m[1][1] * x1 + (m[2][1] * x2 + m[3][1] * x3)
    y2 = m[0][2] * x0 + m[1][2] * x1 + (m[2][2] * x2 + m[3][2] * x3)
    y3 = m[0][3] * x0 + m[1][3] * x1 + (m[2][3] * x2 + m[3][3] * x3)
    return tl.reshape(tl.join(tl.join(y0, y2), tl.join(y1, y3)), (R, HALF))


@triton.jit
def load_turns(cos_ptr, sin_ptr, i_n, here, D: tl.constexpr, HALF: tl.constexpr):
    """Load cosines and sines of the tokens' pairs: ``[R, HALF / 2]`` each."""
    o_i = tl.arange(0, HALF // 2)
    offsets = (i_n * (D // 4))[:, None] + o_i[None, :]
    mask = here[:, None] & (o_i < D // 4)[None, :]
    return tl.load(cos_ptr + offsets, mask=mask, other=0.0), tl.load(sin_ptr + offsets, mask=mask, other=0.0)


@triton.jit
def over_token(x, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr):
    """Sum one number per row over the rows of each token; every row gets its token's sum."""
    total = tl.sum(tl.reshape(x, (BLOCK_T, BLOCK_H)), 1)
    return tl.reshape(tl.broadcast_to(total[:, None], (BLOCK_T, BLOCK_H)), (BLOCK_T * BLOCK_H,))


@triton.jit
def weights_of(w_ptr, i_h, m_h, D: tl.constexpr, HALF: tl.constexpr, HAS_WEIGHT: tl.constexpr, SECOND: tl.constexpr):
    """Load one half of the norm weights of each row's head, ones without a weight."""
    if HAS_WEIGHT:
        w = load_half(w_ptr, i_h * D, m_h, 1, D, HALF, SECOND)
    else:
        w = tl.full((1, HALF), 1.0, tl.float32)
    return w
