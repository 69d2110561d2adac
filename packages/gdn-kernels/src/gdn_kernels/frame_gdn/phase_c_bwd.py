"""Backward of phase C: gradient of the queries, and the read-out's gradient of the states."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn_kernels.frame_gdn.call import TritonCall
from gdn_kernels.frame_gdn.features import (
    feature,
    frame_index,
    load_angles,
    load_tile,
    load_weight,
    operand,
    store_matrix,
    store_tile,
    turn,
    unturn,
)
from gdn_kernels.frame_gdn.layouts import device_guard, given, token_layout
from gdn_kernels.frame_gdn.phase_b import FrameHistories
from gdn_kernels.frame_gdn.phase_c import load_state, load_z
from gdn_kernels.frame_gdn.tiles import launch_shape, token_shares


@triton.jit
def load_row_factor(den_ptr, o_s, m_s, valid, eps, DIVIDE: tl.constexpr, BLOCK_S: tl.constexpr):
    """Return what multiplies dout: ``valid / (den + eps)`` for outputs, ``valid`` for numerators."""
    if DIVIDE:
        factor = valid / (tl.load(den_ptr + o_s, mask=m_s, other=1.0) + eps)
    else:
        factor = tl.full((BLOCK_S,), 1.0, tl.float32) * valid
    return factor


# dnum = dout / (den + eps)       dden = -rowsum(dout out) / (den + eps)       (both given where nothing is divided)
# dq = unturn(dnum M') + dden z,  zero where the feature is zero;   p = w dq,   u = rowsum(p x),   dw = sum rho dq x
# One program per frame, head, share of the tokens and block of key channels. p goes to the gradient buffer; the norm's
# backward finishes it there.
#   q_ptr, dout_ptr, out_ptr, dq_ptr  [B, N, H, D], strides in units of ALIGN
#   den_ptr, dden_ptr  [B, H, N] fp32; dden is read if nothing is divided, written otherwise
#   u_ptr  [B, N, H] fp32      dw_ptr  [B*F, shares, H, D] fp32, sums over the program's tokens
@triton.jit(do_not_specialize=["F", "S", "H", "sqb", "sqn", "sqh", "sgb", "sgn", "sgh", "sob", "son", "soh",
                               "sdb", "sdn", "sdh"])  # fmt: skip
def phase_c_query_bwd_kernel(
    q_ptr, dout_ptr, out_ptr, dq_ptr, den_ptr, dden_ptr, u_ptr, dw_ptr, rho_ptr, w_ptr, cos_ptr, sin_ptr, valid_ptr,
    kv_forward_ptr, z_forward_ptr, kv_reverse_ptr, z_reverse_ptr,
    F, S, H, eps, sqb, sqn, sqh, sqd, sgb, sgn, sgh, sgd, sob, son, soh, sod, sdb, sdn, sdh, sdd,
    D: tl.constexpr, FEATURES: tl.constexpr, HAS_NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_ROPE: tl.constexpr,
    HAS_Z: tl.constexpr, HAS_VALID: tl.constexpr, DIVIDE: tl.constexpr,
    HAS_FORWARD: tl.constexpr, HAS_REVERSE: tl.constexpr,
    ALIGN: tl.constexpr, OPERAND: tl.constexpr, DOT: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, NUM_BLOCKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    i_b, i_h, i_f = frame_index(tl.program_id(0), F, H)
    i_row = tl.program_id(2)
    i_token = ((i_b * H + i_h) * F + i_f) * S
    at_kv = ((i_b * H + i_h) * (F + 1) + i_f + 1) * D * D
    at_z = ((i_b * H + i_h) * (F + 1) + i_f + 1) * D
    q_ptr += (i_b * sqb + i_h * sqh + i_f * S * sqn) * ALIGN
    dout_ptr += (i_b * sgb + i_h * sgh + i_f * S * sgn) * ALIGN
    out_ptr += (i_b * sob + i_h * soh + i_f * S * son) * ALIGN
    dq_ptr += (i_b * sdb + i_h * sdh + i_f * S * sdn) * ALIGN
    den_ptr += i_token
    dden_ptr += i_token
    u_ptr += (i_b * F + i_f) * S * H + i_h
    rho_ptr += (i_b * F + i_f) * S
    cos_ptr += i_f * S * (D // 2)
    sin_ptr += i_f * S * (D // 2)
    sqn *= ALIGN
    sgn *= ALIGN
    son *= ALIGN
    sdn *= ALIGN
    far_q, far_g, far_o, far_d = sqn.to(tl.int64), sgn.to(tl.int64), son.to(tl.int64), sdn.to(tl.int64)
    o_low = tl.arange(0, BLOCK_D)
    o_high = BLOCK_D + o_low
    o_row = i_row * BLOCK_D + o_low
    w = load_weight(w_ptr, i_h, o_row, D, HAS_WEIGHT, BLOCK_D)
    # the transpose comes from addressing: rows are value channels, columns the key channels of this program
    m_low = load_state(kv_forward_ptr + at_kv, kv_reverse_ptr + at_kv, o_low, o_row, 1, D, D, HAS_FORWARD, HAS_REVERSE)
    m_low = operand(m_low, OPERAND, DOT)
    if NUM_BLOCKS == 2:
        m_high = load_state(
            kv_forward_ptr + at_kv, kv_reverse_ptr + at_kv, o_high, o_row, 1, D, D, HAS_FORWARD, HAS_REVERSE
        )
        m_high = operand(m_high, OPERAND, DOT)
    if HAS_Z:
        z = load_z(z_forward_ptr + at_z, z_reverse_ptr + at_z, o_row, D, HAS_FORWARD, HAS_REVERSE)
    valid = 1.0
    if HAS_VALID:
        valid = tl.load(valid_ptr + i_b * F + i_f)
    dw = tl.zeros((BLOCK_D,), tl.float32)
    for s in tl.range(tl.program_id(1) * BLOCK_S, S, tl.num_programs(1) * BLOCK_S, num_stages=STAGES):
        o_s = tl.arange(0, BLOCK_S)
        m_s = s + o_s < S
        factor = load_row_factor(den_ptr, s + o_s, m_s, valid, eps, DIVIDE, BLOCK_S)
        dout = load_tile(dout_ptr + s * far_g, o_s, o_low, m_s, sgn, sgd, D, BLOCK_D)
        if DIVIDE:
            out = load_tile(out_ptr + s * far_o, o_s, o_low, m_s, son, sod, D, BLOCK_D)
            dden = tl.sum(dout * out, 1)
        dq = tl.dot(operand(dout, OPERAND, DOT), m_low, input_precision=DOT)
        if NUM_BLOCKS == 2:
            dout = load_tile(dout_ptr + s * far_g, o_s, o_high, m_s, sgn, sgd, D, BLOCK_D)
            if DIVIDE:
                out = load_tile(out_ptr + s * far_o, o_s, o_high, m_s, son, sod, D, BLOCK_D)
                dden += tl.sum(dout * out, 1)
            dq = tl.dot(operand(dout, OPERAND, DOT), m_high, dq, input_precision=DOT)
        dq *= factor[:, None]
        if HAS_ROPE:
            cos, sin = load_angles(cos_ptr, sin_ptr, s + o_s, m_s, i_row, D, BLOCK_D)
            dq = unturn(dq, cos, sin, BLOCK_S, BLOCK_D)
        if HAS_Z:
            if DIVIDE:
                dden = -dden * factor
                if i_row == 0:
                    tl.store(dden_ptr + s + o_s, dden, mask=m_s)
            else:
                dden = tl.load(dden_ptr + s + o_s, mask=m_s, other=0.0) * valid
            dq += dden[:, None] * z[None, :]
        if FEATURES:
            x = load_tile(q_ptr + s * far_q, o_s, o_row, m_s, sqn, sqd, D, BLOCK_D)
            dq = tl.where(x * w[None, :] > 0, dq, 0.0)
            if HAS_NORM:
                rho = tl.load(rho_ptr + s + o_s, mask=m_s, other=0.0)
                dw += tl.sum(dq * x * rho[:, None], 0)
                dq *= w[None, :]
                u = tl.sum(dq * x, 1)
                if NUM_BLOCKS == 1:
                    tl.store(u_ptr + (s + o_s).to(tl.int64) * H, u, mask=m_s)
                else:  # two programs share a token: each owns a row of u
                    tl.store(
                        u_ptr + (s + o_s).to(tl.int64) * H + i_row * tl.num_programs(0).to(tl.int64) * S, u, mask=m_s
                    )
        store_tile(dq_ptr + s * far_d, dq, o_s, o_row, m_s, sdn, sdd, D)
    if HAS_NORM:
        i_part = ((i_b * F + i_f) * tl.num_programs(1) + tl.program_id(1)) * H + i_h
        tl.store(dw_ptr + i_part * D + o_row, dw, mask=o_row < D)


# C_f = sum over tokens of (rho turn(relu(w q)))' dnum,   Cz_f = sum of rho relu(w q) dden
# One program per frame, head and pair (i, j) of channel blocks; the accumulator stays in registers.
#   dden_ptr  [B, H, N] fp32      c_ptr  [B, H, F, D, D] fp32      cz_ptr  [B, H, F, D] fp32
@triton.jit(do_not_specialize=["F", "S", "H", "sqb", "sqn", "sqh", "sgb", "sgn", "sgh"])
def phase_c_state_bwd_kernel(
    q_ptr, dout_ptr, den_ptr, dden_ptr, rho_ptr, w_ptr, cos_ptr, sin_ptr, valid_ptr, c_ptr, cz_ptr,
    F, S, H, eps, sqb, sqn, sqh, sqd, sgb, sgn, sgh, sgd,
    D: tl.constexpr, FEATURES: tl.constexpr, HAS_NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_ROPE: tl.constexpr,
    HAS_Z: tl.constexpr, HAS_VALID: tl.constexpr, DIVIDE: tl.constexpr,
    ALIGN: tl.constexpr, OPERAND: tl.constexpr, DOT: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, NUM_BLOCKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    i_b, i_h, i_f = frame_index(tl.program_id(0), F, H)
    i_row = tl.program_id(1) // NUM_BLOCKS
    i_col = tl.program_id(1) % NUM_BLOCKS
    i_frame = (i_b * H + i_h) * F + i_f
    q_ptr += (i_b * sqb + i_h * sqh + i_f * S * sqn) * ALIGN
    dout_ptr += (i_b * sgb + i_h * sgh + i_f * S * sgn) * ALIGN
    den_ptr += i_frame * S
    dden_ptr += i_frame * S
    rho_ptr += (i_b * F + i_f) * S
    cos_ptr += i_f * S * (D // 2)
    sin_ptr += i_f * S * (D // 2)
    sqn *= ALIGN
    sgn *= ALIGN
    far_q, far_g = sqn.to(tl.int64), sgn.to(tl.int64)
    o_row = i_row * BLOCK_D + tl.arange(0, BLOCK_D)
    o_col = i_col * BLOCK_D + tl.arange(0, BLOCK_D)
    w = load_weight(w_ptr, i_h, o_row, D, HAS_WEIGHT, BLOCK_D)
    valid = 1.0
    if HAS_VALID:
        valid = tl.load(valid_ptr + i_b * F + i_f)
    c = tl.zeros((BLOCK_D, BLOCK_D), tl.float32)
    cz = tl.zeros((BLOCK_D,), tl.float32)
    for s in tl.range(0, S, BLOCK_S, num_stages=STAGES):
        o_s = tl.arange(0, BLOCK_S)
        m_s = s + o_s < S
        rho = tl.full((BLOCK_S,), 1.0, tl.float32)
        if HAS_NORM:
            rho = tl.load(rho_ptr + s + o_s, mask=m_s, other=0.0)
        factor = load_row_factor(den_ptr, s + o_s, m_s, valid, eps, DIVIDE, BLOCK_S)
        q = feature(load_tile(q_ptr + s * far_q, o_s, o_row, m_s, sqn, sqd, D, BLOCK_D), w, FEATURES)
        if HAS_Z:
            dden = tl.load(dden_ptr + s + o_s, mask=m_s, other=0.0) * rho
            if not DIVIDE:
                dden *= valid
            cz += tl.sum(q * dden[:, None], 0)
        if HAS_ROPE:
            cos, sin = load_angles(cos_ptr, sin_ptr, s + o_s, m_s, i_row, D, BLOCK_D)
            q = turn(q, cos, sin, BLOCK_S, BLOCK_D)
        q *= rho[:, None]
        dnum = load_tile(dout_ptr + s * far_g, o_s, o_col, m_s, sgn, sgd, D, BLOCK_D) * factor[:, None]
        c = tl.dot(tl.trans(operand(q, OPERAND, DOT)), operand(dnum, OPERAND, DOT), c, input_precision=DOT)
    store_matrix(c_ptr + i_frame * D * D, c, o_row, o_col, D)
    if HAS_Z:
        if i_col == 0:
            tl.store(cz_ptr + i_frame * D + o_row, cz, mask=o_row < D)


class ReadOutGradients(NamedTuple):
    """Gradients of the states read, ``c [B, H, F, D, D]`` and ``cz [B, H, F, D]`` or None, and the query's part.

    ``u [B, N, H]`` and ``dw [H, D]`` are for the norm's backward; None without a norm.
    """

    c: Tensor
    cz: Tensor | None
    u: Tensor | None
    dw: Tensor | None


def phase_c_bwd(
    call: TritonCall,
    q: Tensor,
    frames: int,
    rho_q: Tensor | None,
    histories: FrameHistories,
    out: Tensor,
    den: Tensor | None,
    dout: Tensor,
    dden: Tensor | None,
    dq: Tensor | None,
) -> ReadOutGradients:
    """Write the query's gradient into ``dq`` (before the coupling part of its norm) and return the rest.

    Grid: (B*F*H, shares, key blocks), then (B*F*H, pairs of blocks).
    Needs: output and denominator, no numerator; the histories, to recompute nothing of the scan.
    """
    batch, tokens, heads, width = q.shape
    device = q.device
    shape = launch_shape("phase_c_query_bwd", width, call.precision, device)
    has_norm = rho_q is not None
    spatial = tokens // frames if frames else 0
    shares = token_shares(batch * frames * heads * shape.num_blocks, spatial, shape, device)
    c = torch.empty(batch, heads, frames, width, width, dtype=torch.float32, device=device)
    cz = torch.empty(batch, heads, frames, width, dtype=torch.float32, device=device) if call.has_z else None
    u = torch.empty(shape.num_blocks, batch, tokens, heads, dtype=torch.float32, device=device) if has_norm else None
    dw = torch.empty(batch * frames * shares, heads, width, dtype=torch.float32, device=device)
    if call.has_z and dden is None:
        dden = torch.empty(batch, heads, tokens, dtype=torch.float32, device=device)
    if c.numel() == 0:
        return ReadOutGradients(c, cz, None if u is None else u.sum(0), dw.sum(0) if has_norm else None)
    if dq is None:
        dq = torch.empty_like(q)
    flags = dict(
        D=width, FEATURES=call.features, HAS_NORM=has_norm, HAS_WEIGHT=call.q_weight is not None,
        HAS_ROPE=call.cos is not None, HAS_Z=call.has_z, HAS_VALID=call.valid is not None, DIVIDE=call.divide,
        OPERAND=call.operand, DOT=call.dot,
    )  # fmt: skip
    small = [given(x, c) for x in (rho_q, call.q_weight, call.cos, call.sin, call.valid)]
    layout = token_layout((q, dout, out, dq))
    with device_guard(q):
        phase_c_query_bwd_kernel[batch * frames * heads, shares, shape.num_blocks](
            q, dout, out, dq, given(den, c), given(dden, c), given(u, c), dw, *small,
            *(given(x, c) for x in histories), frames, spatial, heads, call.eps,
            *(stride for strides in layout.strides for stride in strides),
            **flags, HAS_FORWARD=histories.forward_kv is not None, HAS_REVERSE=histories.reverse_kv is not None,
            ALIGN=layout.align, BLOCK_S=shape.block_s, BLOCK_D=shape.block_d, NUM_BLOCKS=shape.num_blocks,
            STAGES=shape.num_stages, **shape.options(),
        )  # fmt: skip
        shape = launch_shape("phase_c_state_bwd", width, call.precision, device)
        phase_c_state_bwd_kernel[batch * frames * heads, shape.num_blocks**2](
            q, dout, given(den, c), given(dden, c), *small, c, given(cz, c),
            frames, spatial, heads, call.eps, *layout.strides[0], *layout.strides[1],
            **flags, ALIGN=layout.align, BLOCK_S=shape.block_s, BLOCK_D=shape.block_d, NUM_BLOCKS=shape.num_blocks,
            STAGES=shape.num_stages, **shape.options(),
        )  # fmt: skip
    u = None if u is None else (u[0] if u.shape[0] == 1 else u.sum(0))
    return ReadOutGradients(c, cz, u, dw.sum(0) if has_norm else None)
