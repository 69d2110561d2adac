"""Phase C: read the states with the queries of each frame, and divide."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn_kernels.frame_gdn.call import TritonCall
from gdn_kernels.frame_gdn.features import (
    feature,
    frame_index,
    load_angles,
    load_matrix,
    load_tile,
    load_weight,
    operand,
    store_tile,
    turn,
)
from gdn_kernels.frame_gdn.layouts import device_guard, given, token_layout
from gdn_kernels.frame_gdn.phase_b import FrameHistories
from gdn_kernels.frame_gdn.tiles import launch_shape, token_shares


@triton.jit
def load_state(forward_ptr, reverse_ptr, o_row, o_col, stride_row, stride_col, D: tl.constexpr,
               HAS_FORWARD: tl.constexpr, HAS_REVERSE: tl.constexpr):  # fmt: skip
    """Load a tile of the state a frame reads: the sum of the directions in use, fp32."""
    if HAS_FORWARD:
        m = load_matrix(forward_ptr, o_row, o_col, stride_row, stride_col, D)
        if HAS_REVERSE:
            m += load_matrix(reverse_ptr, o_row, o_col, stride_row, stride_col, D)
    else:
        m = load_matrix(reverse_ptr, o_row, o_col, stride_row, stride_col, D)
    return m


@triton.jit
def load_z(forward_ptr, reverse_ptr, o_row, D: tl.constexpr, HAS_FORWARD: tl.constexpr, HAS_REVERSE: tl.constexpr):
    """Load a block of the z state a frame reads."""
    if HAS_FORWARD:
        z = tl.load(forward_ptr + o_row, mask=o_row < D, other=0.0)
        if HAS_REVERSE:
            z += tl.load(reverse_ptr + o_row, mask=o_row < D, other=0.0)
    else:
        z = tl.load(reverse_ptr + o_row, mask=o_row < D, other=0.0)
    return z


# num_s = rho_s turn(relu(w q_s)) M_f,   den_s = rho_s relu(w q_s) z_f,   out_s = num_s / (den_s + eps)
# One program per frame, head, share of the frame's tokens and block of value channels; M_f stays on chip.
#   q_ptr, out_ptr  [B, N, H, D], strides in units of ALIGN        den_ptr  [B, H, N] fp32       rho_ptr  [B, N]
#   kv_*_ptr        [B, H, F+1, D, D], z_*_ptr [B, H, F+1, D], fp32       valid_ptr  [B, F] fp32
@triton.jit(do_not_specialize=["F", "S", "H", "sqb", "sqn", "sqh", "sob", "son", "soh"])
def phase_c_kernel(
    q_ptr, out_ptr, den_ptr, rho_ptr, w_ptr, cos_ptr, sin_ptr, valid_ptr,
    kv_forward_ptr, z_forward_ptr, kv_reverse_ptr, z_reverse_ptr,
    F, S, H, eps, sqb, sqn, sqh, sqd, sob, son, soh, sod,
    D: tl.constexpr, FEATURES: tl.constexpr, HAS_NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_ROPE: tl.constexpr,
    HAS_Z: tl.constexpr, HAS_VALID: tl.constexpr, DIVIDE: tl.constexpr,
    HAS_FORWARD: tl.constexpr, HAS_REVERSE: tl.constexpr,
    ALIGN: tl.constexpr, OPERAND: tl.constexpr, DOT: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, NUM_BLOCKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    i_b, i_h, i_f = frame_index(tl.program_id(0), F, H)
    i_col = tl.program_id(2)
    i_state = (i_b * H + i_h) * (F + 1) + i_f + 1
    q_ptr += (i_b * sqb + i_h * sqh + i_f * S * sqn) * ALIGN
    out_ptr += (i_b * sob + i_h * soh + i_f * S * son) * ALIGN
    den_ptr += ((i_b * H + i_h) * F + i_f) * S
    rho_ptr += (i_b * F + i_f) * S
    cos_ptr += i_f * S * (D // 2)
    sin_ptr += i_f * S * (D // 2)
    sqn *= ALIGN
    son *= ALIGN
    far_q, far_out = sqn.to(tl.int64), son.to(tl.int64)
    o_low = tl.arange(0, BLOCK_D)
    o_col = i_col * BLOCK_D + o_low
    at_kv, at_z = i_state * D * D, i_state * D
    m_low = load_state(kv_forward_ptr + at_kv, kv_reverse_ptr + at_kv, o_low, o_col, D, 1, D, HAS_FORWARD, HAS_REVERSE)
    m_low = operand(m_low, OPERAND, DOT)
    w_low = load_weight(w_ptr, i_h, o_low, D, HAS_WEIGHT, BLOCK_D)
    if HAS_Z:
        z_low = load_z(z_forward_ptr + at_z, z_reverse_ptr + at_z, o_low, D, HAS_FORWARD, HAS_REVERSE)
    if NUM_BLOCKS == 2:
        o_high = BLOCK_D + tl.arange(0, BLOCK_D)
        m_high = load_state(
            kv_forward_ptr + at_kv, kv_reverse_ptr + at_kv, o_high, o_col, D, 1, D, HAS_FORWARD, HAS_REVERSE
        )
        m_high = operand(m_high, OPERAND, DOT)
        w_high = load_weight(w_ptr, i_h, o_high, D, HAS_WEIGHT, BLOCK_D)
        if HAS_Z:
            z_high = load_z(z_forward_ptr + at_z, z_reverse_ptr + at_z, o_high, D, HAS_FORWARD, HAS_REVERSE)
    valid = 1.0
    if HAS_VALID:
        valid = tl.load(valid_ptr + i_b * F + i_f)
    for s in tl.range(tl.program_id(1) * BLOCK_S, S, tl.num_programs(1) * BLOCK_S, num_stages=STAGES):
        o_s = tl.arange(0, BLOCK_S)
        m_s = s + o_s < S
        row = tl.full((BLOCK_S,), 1.0, tl.float32)
        if HAS_NORM:
            row = tl.load(rho_ptr + s + o_s, mask=m_s, other=0.0)
        q = feature(load_tile(q_ptr + s * far_q, o_s, o_low, m_s, sqn, sqd, D, BLOCK_D), w_low, FEATURES)
        if HAS_Z:
            den = tl.sum(q * z_low[None, :], 1)
        if HAS_ROPE:
            cos, sin = load_angles(cos_ptr, sin_ptr, s + o_s, m_s, 0, D, BLOCK_D)
            q = turn(q, cos, sin, BLOCK_S, BLOCK_D)
        num = tl.dot(operand(q, OPERAND, DOT), m_low, input_precision=DOT)
        if NUM_BLOCKS == 2:
            q = feature(load_tile(q_ptr + s * far_q, o_s, o_high, m_s, sqn, sqd, D, BLOCK_D), w_high, FEATURES)
            if HAS_Z:
                den += tl.sum(q * z_high[None, :], 1)
            if HAS_ROPE:
                cos, sin = load_angles(cos_ptr, sin_ptr, s + o_s, m_s, 1, D, BLOCK_D)
                q = turn(q, cos, sin, BLOCK_S, BLOCK_D)
            num = tl.dot(operand(q, OPERAND, DOT), m_high, num, input_precision=DOT)
        row *= valid
        if HAS_Z:
            den *= row
            if i_col == 0:
                tl.store(den_ptr + s + o_s, den, mask=m_s)
            if DIVIDE:
                row = row / (den + eps)
        store_tile(out_ptr + s * far_out, num * row[:, None], o_s, o_col, m_s, son, sod, D)


def phase_c(
    call: TritonCall, q: Tensor, frames: int, rho_q: Tensor | None, histories: FrameHistories, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return output (or numerator) ``[B, N, H, D]`` in ``out_dtype`` and denominator ``[B, H, N]`` fp32 or None.

    Grid: (B*F*H, shares of a frame's tokens, blocks of value channels).
    Saves: output and denominator; together they replace the numerator in the backward.
    """
    batch, tokens, heads, width = q.shape
    out = torch.empty(batch, tokens, heads, width, dtype=out_dtype, device=q.device)
    den = torch.empty(batch, heads, tokens, dtype=torch.float32, device=q.device) if call.has_z else None
    if out.numel() == 0:
        return out, den
    shape = launch_shape("phase_c", width, call.precision, q.device)
    layout = token_layout((q, out))
    spatial = tokens // frames
    shares = token_shares(batch * frames * heads * shape.num_blocks, spatial, shape, q.device)
    grid = (batch * frames * heads, shares, shape.num_blocks)
    with device_guard(q):
        phase_c_kernel[grid](
            q, out, *(given(x, q) for x in (den, rho_q, call.q_weight, call.cos, call.sin, call.valid, *histories)),
            frames, spatial, heads, call.eps, *layout.strides[0], *layout.strides[1],
            D=width, FEATURES=call.features, HAS_NORM=rho_q is not None, HAS_WEIGHT=call.q_weight is not None,
            HAS_ROPE=call.cos is not None, HAS_Z=call.has_z, HAS_VALID=call.valid is not None, DIVIDE=call.divide,
            HAS_FORWARD=histories.forward_kv is not None, HAS_REVERSE=histories.reverse_kv is not None,
            ALIGN=layout.align, OPERAND=call.operand, DOT=call.dot, BLOCK_S=shape.block_s, BLOCK_D=shape.block_d,
            NUM_BLOCKS=shape.num_blocks, STAGES=shape.num_stages, **shape.options(),
        )  # fmt: skip
    return out, den
