"""Phase A: the frame operators P, A of the kv stream and P_z, b of the z stream, from the tokens of each frame."""

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
    load_tile,
    load_weight,
    operand,
    store_matrix,
    turn,
)
from gdn_kernels.frame_gdn.layouts import device_guard, given, token_layout
from gdn_kernels.frame_gdn.tiles import launch_shape
from gdn_kernels.types import FrameTransitions


@triton.jit
def load_keys(
    k_ptr, cos_ptr, sin_ptr, scale, w, s, o_s, m_s, o_d, i_block, skn, skd,
    D: tl.constexpr, FEATURES: tl.constexpr, HAS_ROPE: tl.constexpr, OPERAND: tl.constexpr, DOT: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Load a block of the keys' features, turned and times their row factor, as an operand."""
    x = feature(load_tile(k_ptr, o_s, o_d, m_s, skn, skd, D, BLOCK_D), w, FEATURES)
    if HAS_ROPE:
        cos, sin = load_angles(cos_ptr, sin_ptr, s + o_s, m_s, i_block, D, BLOCK_D)
        x = turn(x, cos, sin, BLOCK_S, BLOCK_D)
    return operand(x * scale[:, None], OPERAND, DOT)


# x_s = sqrt(beta_s) k_scale rho_s turn(relu(w k_s)),   P = x' x,   A = x' (sqrt(beta) v)
# Writing P as one matrix times itself makes it symmetric to the last bit. One program per frame, head and pair (i, j) of
# channel blocks; both accumulators stay in registers.
#   k_ptr, v_ptr   [B, N, H, D], strides in units of ALIGN       beta_ptr  [B, H, F, S] fp32
#   rho_ptr        [B, N] fp32        w_ptr  [H, D]        cos_ptr, sin_ptr  [N, D / 2] fp32
#   p_ptr, a_ptr   [B, H, F, D, D] operand dtype
@triton.jit(do_not_specialize=["F", "S", "H", "skb", "skn", "skh", "svb", "svn", "svh"])
def phase_a_kernel(
    k_ptr, v_ptr, beta_ptr, rho_ptr, w_ptr, cos_ptr, sin_ptr, p_ptr, a_ptr,
    F, S, H, k_scale, skb, skn, skh, skd, svb, svn, svh, svd,
    D: tl.constexpr, FEATURES: tl.constexpr, HAS_NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_ROPE: tl.constexpr,
    ALIGN: tl.constexpr, OPERAND: tl.constexpr, DOT: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, NUM_BLOCKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    i_b, i_h, i_f = frame_index(tl.program_id(0), F, H)
    i_row = tl.program_id(1) // NUM_BLOCKS
    i_col = tl.program_id(1) - i_row * NUM_BLOCKS
    i_frame = (i_b * H + i_h) * F + i_f
    k_ptr += (i_b * skb + i_h * skh + i_f * S * skn) * ALIGN
    v_ptr += (i_b * svb + i_h * svh + i_f * S * svn) * ALIGN
    beta_ptr += i_frame * S
    rho_ptr += (i_b * F + i_f) * S
    cos_ptr += i_f * S * (D // 2)
    sin_ptr += i_f * S * (D // 2)
    o_row = i_row * BLOCK_D + tl.arange(0, BLOCK_D)
    o_col = i_col * BLOCK_D + tl.arange(0, BLOCK_D)
    o_s = tl.arange(0, BLOCK_S)
    w_row = load_weight(w_ptr, i_h, o_row, D, HAS_WEIGHT, BLOCK_D)
    w_col = load_weight(w_ptr, i_h, o_col, D, HAS_WEIGHT, BLOCK_D)
    skn *= ALIGN
    svn *= ALIGN
    far_k, far_v = skn.to(tl.int64), svn.to(tl.int64)
    p = tl.zeros((BLOCK_D, BLOCK_D), tl.float32)
    a = tl.zeros((BLOCK_D, BLOCK_D), tl.float32)
    for s in tl.range(0, S, BLOCK_S, num_stages=STAGES):
        m_s = s + o_s < S
        root = tl.sqrt(tl.load(beta_ptr + s + o_s, mask=m_s, other=0.0))
        scale = root * k_scale
        if HAS_NORM:
            scale *= tl.load(rho_ptr + s + o_s, mask=m_s, other=0.0)
        x = load_keys(k_ptr + s * far_k, cos_ptr, sin_ptr, scale, w_row, s, o_s, m_s, o_row, i_row, skn, skd,
                      D, FEATURES, HAS_ROPE, OPERAND, DOT, BLOCK_S, BLOCK_D)  # fmt: skip
        y = x
        if NUM_BLOCKS > 1 or DOT == "tf32":  # one tile as both operands has no shared layout for Hopper's tf32 product
            y = load_keys(k_ptr + s * far_k, cos_ptr, sin_ptr, scale, w_col, s, o_s, m_s, o_col, i_col, skn, skd,
                          D, FEATURES, HAS_ROPE, OPERAND, DOT, BLOCK_S, BLOCK_D)  # fmt: skip
        p = tl.dot(tl.trans(x), y, p, input_precision=DOT)
        v = load_tile(v_ptr + s * far_v, o_s, o_col, m_s, svn, svd, D, BLOCK_D) * root[:, None]
        a = tl.dot(tl.trans(x), operand(v, OPERAND, DOT), a, input_precision=DOT)
    store_matrix(p_ptr + i_frame * D * D, p, o_row, o_col, D)
    store_matrix(a_ptr + i_frame * D * D, a, o_row, o_col, D)


# y_s = sqrt(beta_s) k_scale rho_s relu(w k_s), not turned,   P_z = y' y,   b = y' sqrt(beta)
# A launch of its own: with one accumulator two programs share a multiprocessor and hide each other's loads.
#   pz_ptr  [B, H, F, D, D] operand dtype        b_ptr  [B, H, F, D] fp32        the rest as above
@triton.jit(do_not_specialize=["F", "S", "H", "skb", "skn", "skh"])
def phase_a_z_kernel(
    k_ptr, beta_ptr, rho_ptr, w_ptr, pz_ptr, b_ptr, F, S, H, k_scale, skb, skn, skh, skd,
    D: tl.constexpr, FEATURES: tl.constexpr, HAS_NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    ALIGN: tl.constexpr, OPERAND: tl.constexpr, DOT: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, NUM_BLOCKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    i_b, i_h, i_f = frame_index(tl.program_id(0), F, H)
    i_row = tl.program_id(1) // NUM_BLOCKS
    i_col = tl.program_id(1) - i_row * NUM_BLOCKS
    i_frame = (i_b * H + i_h) * F + i_f
    k_ptr += (i_b * skb + i_h * skh + i_f * S * skn) * ALIGN
    beta_ptr += i_frame * S
    rho_ptr += (i_b * F + i_f) * S
    o_row = i_row * BLOCK_D + tl.arange(0, BLOCK_D)
    o_col = i_col * BLOCK_D + tl.arange(0, BLOCK_D)
    o_s = tl.arange(0, BLOCK_S)
    w_row = load_weight(w_ptr, i_h, o_row, D, HAS_WEIGHT, BLOCK_D)
    w_col = load_weight(w_ptr, i_h, o_col, D, HAS_WEIGHT, BLOCK_D)
    skn *= ALIGN
    far_k = skn.to(tl.int64)
    p = tl.zeros((BLOCK_D, BLOCK_D), tl.float32)
    b = tl.zeros((BLOCK_D,), tl.float32)
    for s in tl.range(0, S, BLOCK_S, num_stages=STAGES):
        m_s = s + o_s < S
        root = tl.sqrt(tl.load(beta_ptr + s + o_s, mask=m_s, other=0.0))
        scale = root * k_scale
        if HAS_NORM:
            scale *= tl.load(rho_ptr + s + o_s, mask=m_s, other=0.0)
        tile_k = k_ptr + s * far_k
        x = feature(load_tile(tile_k, o_s, o_row, m_s, skn, skd, D, BLOCK_D), w_row, FEATURES) * scale[:, None]
        b += tl.sum(x * root[:, None], 0)
        x = operand(x, OPERAND, DOT)
        y = x
        if NUM_BLOCKS > 1 or DOT == "tf32":
            y = feature(load_tile(tile_k, o_s, o_col, m_s, skn, skd, D, BLOCK_D), w_col, FEATURES) * scale[:, None]
            y = operand(y, OPERAND, DOT)
        p = tl.dot(tl.trans(x), y, p, input_precision=DOT)
    store_matrix(pz_ptr + i_frame * D * D, p, o_row, o_col, D)
    if i_col == 0:
        tl.store(b_ptr + i_frame * D + o_row, b, mask=o_row < D)


def phase_a(call: TritonCall, k: Tensor, v: Tensor, beta: Tensor, rho_k: Tensor | None) -> FrameTransitions:
    """Return the operators of all frames, decay not folded in, in the operand dtype of the call's precision (b: fp32).

    Grid: (B*F*H, pairs of channel blocks), a launch per stream.
    Saves: P, P_z for both scans of the backward; A is not needed there.
    """
    batch, heads, frames, spatial = beta.shape
    width = k.shape[-1]

    def operator() -> Tensor:
        return torch.empty(batch, heads, frames, width, width, dtype=call.operand_dtype, device=k.device)

    p_kv, a = operator(), operator()
    p_z = operator() if call.has_z else None
    b = torch.empty(batch, heads, frames, width, dtype=torch.float32, device=k.device) if call.has_z else None
    if p_kv.numel() == 0:
        return FrameTransitions(p_kv, a, p_z, b)
    layout = token_layout((k, v))
    flags = dict(
        D=width, FEATURES=call.features, HAS_NORM=rho_k is not None, HAS_WEIGHT=call.k_weight is not None,
        ALIGN=layout.align, OPERAND=call.operand, DOT=call.dot,
    )  # fmt: skip
    rho, w, cos, sin = (given(x, beta) for x in (rho_k, call.k_weight, call.cos, call.sin))
    sizes = (frames, spatial, heads, call.k_scale)
    with device_guard(k):
        shape = launch_shape("phase_a", width, call.precision, k.device)
        phase_a_kernel[batch * frames * heads, shape.num_blocks**2](
            k, v, beta, rho, w, cos, sin, p_kv, a, *sizes, *layout.strides[0], *layout.strides[1],
            **flags, HAS_ROPE=call.cos is not None, BLOCK_S=shape.block_s, BLOCK_D=shape.block_d,
            NUM_BLOCKS=shape.num_blocks, STAGES=shape.num_stages, **shape.options(),
        )  # fmt: skip
        if call.has_z:
            shape = launch_shape("phase_a_z", width, call.precision, k.device)
            phase_a_z_kernel[batch * frames * heads, shape.num_blocks**2](
                k, beta, rho, w, p_z, b, *sizes, *layout.strides[0],
                **flags, BLOCK_S=shape.block_s, BLOCK_D=shape.block_d, NUM_BLOCKS=shape.num_blocks,
                STAGES=shape.num_stages, **shape.options(),
            )  # fmt: skip
    return FrameTransitions(p_kv, a, p_z, b)
