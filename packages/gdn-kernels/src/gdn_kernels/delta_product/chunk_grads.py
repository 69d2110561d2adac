"""Gradients of queries, keys, decays and of the WY factor within chunks of rows, from the states around each chunk."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn_kernels.frame_gdn.layouts import device_guard, given
from gdn_kernels.frame_gdn.tiles import shared_memory


class ChunkGrads(NamedTuple):
    """``dq, dk [B, N, H, K]`` fp32, ``dw [B, N, HV, K]`` in the dtype of k, ``dg [B, N, HV]`` fp32 or None."""

    dq: Tensor
    dk: Tensor
    dw: Tensor
    dg: Tensor | None


# With e_ij = 2^(g_i - g_j) for rows j <= i of a chunk and C its last row, per value head:
#   Y   = scale lower(dO V'^T * e)                 Y^T = scale upper(V' dO^T * e^T)                   two products
#   dQ  = scale 2^g dO S^T + Y K                   dK  = dK_s + Y^T Q,  dK_s = 2^(g_C - g) V' dS^T          dW = -dV' S^T
#   dg_i = <dQ_i, q_i> - <dK_i, k_i>;   last row: += 2^g_C <S, dS> + sum dK_s * K
# On Hopper, Triton 3.4 to 3.7.0 emits wrong code where an accumulator is transposed in registers and multiplied again
# (fla-org/flash-linear-attention #640). Here Y and Y^T are accumulated apart, from tiles that are transposed by address.
# One program per chunk and value head; Y and Y^T stay in registers over the blocks of key channels.
#   q_ptr, k_ptr [B, N, H, K]   v_ptr, do_ptr, dv_ptr [B, N, HV, V]   s_ptr, ds_ptr [chunks, HV, K, V]   g_ptr [B, N, HV]
#   cu_ptr [fragments + 1], chunk_ptr [chunks, 2], read if IS_PACKED     dq_ptr, dk_ptr, dw_ptr [B, N, HV, K]    dg_ptr as g
@triton.jit(do_not_specialize=["N", "H", "HV", "chunks"])
def chunk_grads_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dv_ptr, s_ptr, ds_ptr, g_ptr, cu_ptr, chunk_ptr, dq_ptr, dk_ptr, dw_ptr, dg_ptr,
    N, H, HV, chunks, scale,
    K: tl.constexpr, V: tl.constexpr, HAS_G: tl.constexpr, IS_PACKED: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    i_chunk = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1).to(tl.int64)
    if IS_PACKED:
        i_fragment = tl.load(chunk_ptr + 2 * i_chunk).to(tl.int64)
        first = tl.load(cu_ptr + i_fragment).to(tl.int64)
        stop = tl.load(cu_ptr + i_fragment + 1).to(tl.int64)
        first += tl.load(chunk_ptr + 2 * i_chunk + 1).to(tl.int64) * BLOCK_N
    else:
        first = i_chunk // chunks * N + i_chunk % chunks * BLOCK_N
        stop = (i_chunk // chunks + 1) * N
    count = tl.minimum(stop - first, BLOCK_N).to(tl.int32)
    o_n = tl.arange(0, BLOCK_N)
    m_n = o_n < count
    i_key = i_h // (HV // H)
    q_ptr += (first * H + i_key) * K
    k_ptr += (first * H + i_key) * K
    dq_ptr += (first * HV + i_h) * K
    dk_ptr += (first * HV + i_h) * K
    dw_ptr += (first * HV + i_h) * K
    v_ptr += (first * HV + i_h) * V
    do_ptr += (first * HV + i_h) * V
    dv_ptr += (first * HV + i_h) * V
    s_ptr += (i_chunk * HV + i_h) * K * V
    ds_ptr += (i_chunk * HV + i_h) * K * V
    row_v = o_n * HV * V
    y = tl.zeros((BLOCK_N, BLOCK_N), tl.float32)
    y_turned = tl.zeros((BLOCK_N, BLOCK_N), tl.float32)
    for v in range(0, V, BLOCK_V):
        o_v = v + tl.arange(0, BLOCK_V)
        m_v = o_v < V
        m_rows = m_n[:, None] & m_v[None, :]
        m_columns = m_v[:, None] & m_n[None, :]
        do = tl.load(do_ptr + row_v[:, None] + o_v[None, :], mask=m_rows, other=0.0)
        values = tl.load(v_ptr + row_v[:, None] + o_v[None, :], mask=m_rows, other=0.0)
        do_columns = tl.load(do_ptr + o_v[:, None] + row_v[None, :], mask=m_columns, other=0.0)
        value_columns = tl.load(v_ptr + o_v[:, None] + row_v[None, :], mask=m_columns, other=0.0)
        y += tl.dot(do, value_columns, input_precision=DOT)
        y_turned += tl.dot(values, do_columns, input_precision=DOT)
    lower = (o_n[:, None] >= o_n[None, :]) & m_n[:, None]
    upper = (o_n[:, None] <= o_n[None, :]) & m_n[None, :]
    g = tl.zeros((BLOCK_N,), tl.float32)
    g_last = 0.0
    if HAS_G:
        g_ptr += first * HV + i_h
        dg_ptr += first * HV + i_h
        g = tl.load(g_ptr + o_n * HV, mask=m_n, other=0.0)
        g_last = tl.load(g_ptr + (count - 1).to(tl.int64) * HV)
        y *= tl.exp2(tl.where(lower, g[:, None] - g[None, :], 0.0))
        y_turned *= tl.exp2(tl.where(upper, g[None, :] - g[:, None], 0.0))
    y = tl.where(lower, scale * y, 0.0).to(k_ptr.dtype.element_ty)
    y_turned = tl.where(upper, scale * y_turned, 0.0).to(q_ptr.dtype.element_ty)
    since = tl.exp2(g)
    until = tl.where(m_n, tl.exp2(g_last - g), 0.0)
    dg = tl.zeros((BLOCK_N,), tl.float32)
    last = 0.0
    for c in range(0, K, BLOCK_K):
        o_k = c + tl.arange(0, BLOCK_K)
        m_k = o_k < K
        m_keys = m_n[:, None] & m_k[None, :]
        dq = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        dk = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        dw = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for v in range(0, V, BLOCK_V):
            o_v = v + tl.arange(0, BLOCK_V)
            m_v = o_v < V
            m_rows = m_n[:, None] & m_v[None, :]
            m_state = m_v[:, None] & m_k[None, :]
            o_state = o_v[:, None] + o_k[None, :] * V
            state = tl.load(s_ptr + o_state, mask=m_state, other=0.0)
            dstate = tl.load(ds_ptr + o_state, mask=m_state, other=0.0)
            last += tl.exp2(g_last) * tl.sum(state.to(tl.float32) * dstate.to(tl.float32))
            do = tl.load(do_ptr + row_v[:, None] + o_v[None, :], mask=m_rows, other=0.0)
            values = tl.load(v_ptr + row_v[:, None] + o_v[None, :], mask=m_rows, other=0.0)
            dv = tl.load(dv_ptr + row_v[:, None] + o_v[None, :], mask=m_rows, other=0.0)
            dq += tl.dot(do, state.to(do.dtype), input_precision=DOT)
            dk += tl.dot(values, dstate.to(values.dtype), input_precision=DOT)
            dw += tl.dot(dv.to(values.dtype), state.to(values.dtype), input_precision=DOT)
        key = tl.load(k_ptr + o_n[:, None] * H * K + o_k[None, :], mask=m_keys, other=0.0)
        query = tl.load(q_ptr + o_n[:, None] * H * K + o_k[None, :], mask=m_keys, other=0.0)
        dq *= (scale * since)[:, None]
        dk *= until[:, None]
        last += tl.sum(dk * key.to(tl.float32))
        dq += tl.dot(y, key, input_precision=DOT)
        dk += tl.dot(y_turned, query, input_precision=DOT)
        dg += tl.sum(dq * query.to(tl.float32), 1) - tl.sum(dk * key.to(tl.float32), 1)
        o_out = o_n[:, None] * HV * K + o_k[None, :]
        tl.store(dq_ptr + o_out, dq.to(dq_ptr.dtype.element_ty), mask=m_keys)
        tl.store(dk_ptr + o_out, dk.to(dk_ptr.dtype.element_ty), mask=m_keys)
        tl.store(dw_ptr + o_out, (-dw).to(dw_ptr.dtype.element_ty), mask=m_keys)
    if HAS_G:
        dg = tl.where(o_n == count - 1, dg + last, dg)
        tl.store(dg_ptr + o_n * HV, dg, mask=m_n)


def chunk_grads(
    q: Tensor,
    k: Tensor,
    v_new: Tensor,
    do: Tensor,
    h: Tensor,
    dh: Tensor,
    g: Tensor | None,
    dv: Tensor,
    *,
    scale: float,
    chunk_size: int = 64,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> ChunkGrads:
    """Return gradients within chunks of rows, as a replacement for the stage that Hopper with older Triton gets wrong.

    Grid: (chunks, HV). Rows are those of the gated delta rule: R per token, with zero queries and gradients but for the
    last step of a token.

    Args:
        q: ``[B, N, H, K]``, contiguous, as everything here; bf16 or fp16 (fp32 is right too, and slow).
        k: ``[B, N, H, K]``, in the dtype of q.
        v_new: ``[B, N, HV, V]``, in the dtype of q: values minus what the state already held.
        do: ``[B, N, HV, V]``, in the dtype of q, gradient of the output.
        h: ``[chunks, HV, K, V]`` or ``[B, chunks of a row, HV, K, V]``, the states before the chunks.
        dh: as h, gradients of the states after the chunks.
        g: ``[B, N, HV]`` fp32, logarithm to base 2 of the decay, summed up from the start of each chunk; or None.
        dv: ``[B, N, HV, V]``, gradient of v_new.
        scale: factor of the output.
        chunk_size: rows of a chunk, a power of two, 16 ... 64.
        cu_seqlens: ``[fragments + 1]``, first row of each fragment, for B = 1; with ``chunk_indices``.
        chunk_indices: ``[chunks, 2]``, fragment of each chunk and its place there.

    Returns:
        ChunkGrads: dq and dk summed over the value heads of a key head in fp32; dg in natural units, not yet summed over
            the later rows of a chunk.
    """
    batch, rows, heads, width = k.shape
    value_heads, value_width = v_new.shape[2:]
    wide: dict[str, Any] = {"dtype": torch.float32, "device": k.device}
    dq, dk = (torch.empty(batch, rows, value_heads, width, **wide) for _ in range(2))
    dw = torch.empty(batch, rows, value_heads, width, dtype=k.dtype, device=k.device)
    dg = torch.empty(batch, rows, value_heads, **wide) if g is not None else None
    per_row = -(-rows // chunk_size)
    chunks = batch * per_row if chunk_indices is None else chunk_indices.shape[0]
    if chunks and value_heads:
        shape = chunk_shape(width, value_width, chunk_size, k.element_size(), shared_memory(k.device))
        packed = chunk_indices is not None
        tables: list[Any] = [given(x, k) for x in (g, cu_seqlens, chunk_indices)]
        with device_guard(k):
            chunk_grads_kernel[chunks, value_heads](
                q, k, v_new, do, dv, h, dh, *tables, dq, dk, dw, given(dg, k), rows, heads, value_heads, per_row, scale,
                K=width, V=value_width, HAS_G=g is not None, IS_PACKED=packed,
                DOT="ieee" if k.dtype == torch.float32 else "tf32",
                BLOCK_N=chunk_size, BLOCK_K=shape.block_k, BLOCK_V=shape.block_v,
                num_warps=shape.num_warps, num_stages=1,
            )  # fmt: skip
    group = value_heads // heads
    if group > 1:
        dq, dk = (x.view(batch, rows, heads, group, width).sum(3) for x in (dq, dk))
    return ChunkGrads(dq, dk, dw, dg)


class ChunkShape(NamedTuple):
    """Channels of keys and values that are worked on at once, and warps.

    Loads are not pipelined: with two stages and widths that do not fill a block, Triton 3.6 on Hopper gave results that
    changed from run to run.
    """

    block_k: int
    block_v: int
    num_warps: int


@functools.lru_cache(maxsize=64)
def chunk_shape(width: int, value_width: int, chunk_size: int, operand_bytes: int, shared_bytes: int) -> ChunkShape:
    """Return the largest blocks whose tiles fit the shared memory of one program.

    Raises:
        NotImplementedError: Not even the smallest fit; the message says what is needed and available.
    """
    needed = 0
    for block in (64, 32, 16):
        block_k, block_v = (max(16, min(block, 1 << (n - 1).bit_length())) for n in (width, value_width))
        shape = ChunkShape(block_k, block_v, 4)
        needed = shared_estimate(shape, chunk_size, operand_bytes)
        if needed <= shared_bytes:
            return shape
    raise NotImplementedError(
        f"chunk_grads at chunks of {chunk_size} rows needs {needed} bytes of shared memory, the device offers "
        f"{shared_bytes}; use the torch backend"
    )


def shared_estimate(shape: ChunkShape, chunk_size: int, operand_bytes: int) -> int:
    """Bound the shared memory of a program: operands of a step, Y and Y^T, an fp32 tile on its way."""
    block_k, block_v, _ = shape
    step = 3 * chunk_size * block_v + 2 * block_v * block_k + chunk_size * block_v
    held = 2 * chunk_size * chunk_size * operand_bytes
    return step * operand_bytes + max(held, 4 * chunk_size * max(block_k, chunk_size)) + 1024
