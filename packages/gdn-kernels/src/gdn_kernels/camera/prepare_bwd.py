"""Backward of the preparation: gradients of q, k, v and of the norm weights, in one walk over the data."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn_kernels.camera.blocks import camera_block, padded_half, shared_programs
from gdn_kernels.camera.prepare import CameraCall
from gdn_kernels.camera.ray_maps import (
    apply_map,
    apply_transpose,
    load_half,
    load_map,
    load_turns,
    over_token,
    store_half,
    token_rows,
    weights_of,
)
from gdn_kernels.frame_gdn.features import turn, unturn
from gdn_kernels.frame_gdn.layouts import device_guard, given, token_layout
from gdn_kernels.reference.camera import LEAST_SQUARED_LENGTH


class Gradients(NamedTuple):
    """Of q, k, v, each ``[B, N, H, D]`` in their dtype, and of the weights, ``[H, D]`` fp32 or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_weight: Tensor | None
    k_weight: Tensor | None


@triton.jit
def query_gradients(
    x0, x1, w0, w1, rho, d0, d1, m, cos, sin, HAS_ROPE: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr
):
    """Return the gradient of ``y = rho w q`` from that of ``T(P') relu(y)``; ``d0, d1`` are its halves."""
    d0 = apply_transpose(d0, m, R, HALF)
    if HAS_ROPE:
        d1 = unturn(d1, cos, sin, R, HALF)
    return tl.where(x0 * w0 * rho > 0, d0, 0.0), tl.where(x1 * w1 * rho > 0, d1, 0.0)


@triton.jit
def key_gradients(
    x0, x1, w0, w1, rho, k_scale, d0, d1, dratio, m, cos, sin, least,
    HAS_RATIO: tl.constexpr, HAS_ROPE: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Return the gradient of ``y = rho w k`` from those of ``T(P^-1) k_scale relu(y)`` and of the ratio of lengths."""
    if HAS_RATIO:
        k0 = tl.maximum(x0 * w0, 0.0) * (rho * k_scale)
        k1 = tl.maximum(x1 * w1, 0.0) * (rho * k_scale)
        before = tl.sum(k0 * k0 + k1 * k1, 1)
        moved = apply_map(k0, m, R, HALF)
        turned = k1
        if HAS_ROPE:
            turned = turn(k1, cos, sin, R, HALF)
        after = tl.sum(moved * moved + turned * turned, 1)
        least_before = tl.where(before > least, before, least)
        growth = 2.0 * dratio / least_before
        grown = tl.where(after > least, growth, 0.0)[:, None]
        shrunk = growth * (tl.where(after > least, after, least) / least_before)
        shrunk = tl.where(before > least, shrunk, 0.0)[:, None]
        d0 += grown * moved
        d1 += grown * turned
    d0 = apply_transpose(d0, m, R, HALF)
    if HAS_ROPE:
        d1 = unturn(d1, cos, sin, R, HALF)
    if HAS_RATIO:
        d0 -= shrunk * k0
        d1 -= shrunk * k1
    return tl.where(x0 * w0 * rho > 0, d0 * k_scale, 0.0), tl.where(x1 * w1 * rho > 0, d1 * k_scale, 0.0)


@triton.jit
def add_partial(
    p_ptr, y0, y1, i_h, later, H,
    D: tl.constexpr, HALF: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Add the sums of both halves over a tile's tokens to the program's own partial sums, ``[H, D]`` from ``p_ptr``.

    Several threads may hold an entry: all have read it before one of them writes.
    """
    o_c = tl.arange(0, HALF)
    offsets = i_h[:, None] * D + o_c[None, :]
    mask = (i_h < H)[:, None] & (o_c < D // 2)[None, :]
    p0 = tl.load(p_ptr + offsets, mask=mask & later, other=0.0)
    p1 = tl.load(p_ptr + offsets + D // 2, mask=mask & later, other=0.0)
    p0 += tl.sum(tl.reshape(y0, (BLOCK_T, BLOCK_H, HALF)), 0)
    p1 += tl.sum(tl.reshape(y1, (BLOCK_T, BLOCK_H, HALF)), 0)
    tl.debug_barrier()
    tl.store(p_ptr + offsets, p0, mask=mask)
    tl.store(p_ptr + offsets + D // 2, p1, mask=mask)


# A program takes every NUM-th block of tokens and keeps one partial sum of the weights' gradients.
#   q_ptr, k_ptr                       [B, N, H, D], strides given
#   dout_q_ptr, dout_k_ptr, dout_v_ptr [B, N, H, D], strides given      dq_ptr, dk_ptr, dv_ptr  [B, N, H, D] contiguous
#   dinflation_ptr                     [B, H, F], strides given         part_q_ptr, part_k_ptr  [programs, H, D] fp32
#   others as in prepare_kernel
@triton.jit(
    do_not_specialize=[
        "total", "N", "H", "S", "sqb", "sqn", "sqh", "skb", "skn", "skh", "sab", "san", "sah", "sbb", "sbn", "sbh",
        "scb", "scn", "sch", "sib", "sih", "sif",
    ]
)  # fmt: skip
def prepare_bwd_kernel(
    q_ptr, k_ptr, dout_q_ptr, dout_k_ptr, dout_v_ptr, dinflation_ptr, wq_ptr, wk_ptr, to_ray_ptr, to_world_ptr,
    cos_ptr, sin_ptr, rho_q_ptr, rho_k_ptr, dq_ptr, dk_ptr, dv_ptr, part_q_ptr, part_k_ptr, total, N, H, S, k_scale,
    least, sqb, sqn, sqh, sqd, skb, skn, skh, skd, sab, san, sah, sad, sbb, sbn, sbh, sbd, scb, scn, sch, scd,
    sib, sih, sif,
    D: tl.constexpr, HALF: tl.constexpr, ALIGN: tl.constexpr, HAS_NORM: tl.constexpr, HAS_WQ: tl.constexpr,
    HAS_WK: tl.constexpr, HAS_ROPE: tl.constexpr, HAS_RATIO: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    R: tl.constexpr = BLOCK_T * BLOCK_H
    i_program = tl.program_id(0)
    part_q_ptr += i_program.to(tl.int64) * H * D
    part_k_ptr += i_program.to(tl.int64) * H * D
    channels = (H * D).to(tl.float32)
    for i_block in range(i_program, tl.cdiv(total, BLOCK_T), tl.num_programs(0)):
        later = i_block != i_program
        i_token, o_h, here = token_rows(i_block, total, BLOCK_T, BLOCK_H)
        i_b, i_n = i_token // N, i_token % N
        cos, sin = 0.0, 0.0
        if HAS_ROPE:
            cos, sin = load_turns(cos_ptr, sin_ptr, i_n, here, D, HALF)
        rho = tl.full((R, 1), 1.0, tl.float32)

        # queries
        o_x, o_d = (i_b * sqb + i_n * sqn) * ALIGN, (i_b * sab + i_n * san) * ALIGN
        m = load_map(to_ray_ptr, i_token, here, True)
        t = tl.zeros((R, HALF), tl.float32)
        if HAS_NORM:
            rho = tl.load(rho_q_ptr + i_token, mask=here, other=0.0)[:, None]
            for start in range(0, H, BLOCK_H):
                i_h = (start + o_h).to(tl.int64)
                m_r = here & (i_h < H)
                x0 = load_half(q_ptr, o_x + i_h * sqh * ALIGN, m_r, sqd, D, HALF, 0)
                x1 = load_half(q_ptr, o_x + i_h * sqh * ALIGN, m_r, sqd, D, HALF, 1)
                d0 = load_half(dout_q_ptr, o_d + i_h * sah * ALIGN, m_r, sad, D, HALF, 0)
                d1 = load_half(dout_q_ptr, o_d + i_h * sah * ALIGN, m_r, sad, D, HALF, 1)
                w0 = weights_of(wq_ptr, i_h, m_r, D, HALF, HAS_WQ, 0)
                w1 = weights_of(wq_ptr, i_h, m_r, D, HALF, HAS_WQ, 1)
                y0, y1 = query_gradients(x0, x1, w0, w1, rho, d0, d1, m, cos, sin, HAS_ROPE, R, HALF)
                t += y0 * w0 * x0 + y1 * w1 * x1
        factor = rho * rho * rho * over_token(tl.sum(t, 1), BLOCK_T, BLOCK_H)[:, None] / channels
        for start in range(0, H, BLOCK_H):
            i_h = (start + o_h).to(tl.int64)
            m_r = here & (i_h < H)
            o_out = (i_token * H + i_h) * D
            x0 = load_half(q_ptr, o_x + i_h * sqh * ALIGN, m_r, sqd, D, HALF, 0)
            x1 = load_half(q_ptr, o_x + i_h * sqh * ALIGN, m_r, sqd, D, HALF, 1)
            d0 = load_half(dout_q_ptr, o_d + i_h * sah * ALIGN, m_r, sad, D, HALF, 0)
            d1 = load_half(dout_q_ptr, o_d + i_h * sah * ALIGN, m_r, sad, D, HALF, 1)
            w0 = weights_of(wq_ptr, i_h, m_r, D, HALF, HAS_WQ, 0)
            w1 = weights_of(wq_ptr, i_h, m_r, D, HALF, HAS_WQ, 1)
            y0, y1 = query_gradients(x0, x1, w0, w1, rho, d0, d1, m, cos, sin, HAS_ROPE, R, HALF)
            store_half(dq_ptr, rho * w0 * y0 - factor * x0, o_out, m_r, D, HALF, 0)
            store_half(dq_ptr, rho * w1 * y1 - factor * x1, o_out, m_r, D, HALF, 1)
            if HAS_WQ:
                i_p = (start + tl.arange(0, BLOCK_H)).to(tl.int64)
                add_partial(part_q_ptr, rho * y0 * x0, rho * y1 * x1, i_p, later, H, D, HALF, BLOCK_T, BLOCK_H)

        # keys
        o_x, o_d = (i_b * skb + i_n * skn) * ALIGN, (i_b * sbb + i_n * sbn) * ALIGN
        m = load_map(to_world_ptr, i_token, here, False)
        o_i = i_b * sib + (i_n // S) * sif
        t = tl.zeros((R, HALF), tl.float32)
        if HAS_NORM:
            rho = tl.load(rho_k_ptr + i_token, mask=here, other=0.0)[:, None]
            for start in range(0, H, BLOCK_H):
                i_h = (start + o_h).to(tl.int64)
                m_r = here & (i_h < H)
                x0 = load_half(k_ptr, o_x + i_h * skh * ALIGN, m_r, skd, D, HALF, 0)
                x1 = load_half(k_ptr, o_x + i_h * skh * ALIGN, m_r, skd, D, HALF, 1)
                d0 = load_half(dout_k_ptr, o_d + i_h * sbh * ALIGN, m_r, sbd, D, HALF, 0)
                d1 = load_half(dout_k_ptr, o_d + i_h * sbh * ALIGN, m_r, sbd, D, HALF, 1)
                w0 = weights_of(wk_ptr, i_h, m_r, D, HALF, HAS_WK, 0)
                w1 = weights_of(wk_ptr, i_h, m_r, D, HALF, HAS_WK, 1)
                dratio = tl.zeros((R,), tl.float32)
                if HAS_RATIO:
                    dratio = tl.load(dinflation_ptr + o_i + i_h * sih, mask=m_r, other=0.0).to(tl.float32) / S
                y0, y1 = key_gradients(
                    x0, x1, w0, w1, rho, k_scale, d0, d1, dratio, m, cos, sin, least, HAS_RATIO, HAS_ROPE, R, HALF
                )
                t += y0 * w0 * x0 + y1 * w1 * x1
        factor = rho * rho * rho * over_token(tl.sum(t, 1), BLOCK_T, BLOCK_H)[:, None] / channels
        for start in range(0, H, BLOCK_H):
            i_h = (start + o_h).to(tl.int64)
            m_r = here & (i_h < H)
            o_out = (i_token * H + i_h) * D
            x0 = load_half(k_ptr, o_x + i_h * skh * ALIGN, m_r, skd, D, HALF, 0)
            x1 = load_half(k_ptr, o_x + i_h * skh * ALIGN, m_r, skd, D, HALF, 1)
            d0 = load_half(dout_k_ptr, o_d + i_h * sbh * ALIGN, m_r, sbd, D, HALF, 0)
            d1 = load_half(dout_k_ptr, o_d + i_h * sbh * ALIGN, m_r, sbd, D, HALF, 1)
            w0 = weights_of(wk_ptr, i_h, m_r, D, HALF, HAS_WK, 0)
            w1 = weights_of(wk_ptr, i_h, m_r, D, HALF, HAS_WK, 1)
            dratio = tl.zeros((R,), tl.float32)
            if HAS_RATIO:
                dratio = tl.load(dinflation_ptr + o_i + i_h * sih, mask=m_r, other=0.0).to(tl.float32) / S
            y0, y1 = key_gradients(
                x0, x1, w0, w1, rho, k_scale, d0, d1, dratio, m, cos, sin, least, HAS_RATIO, HAS_ROPE, R, HALF
            )
            store_half(dk_ptr, rho * w0 * y0 - factor * x0, o_out, m_r, D, HALF, 0)
            store_half(dk_ptr, rho * w1 * y1 - factor * x1, o_out, m_r, D, HALF, 1)
            if HAS_WK:
                i_p = (start + tl.arange(0, BLOCK_H)).to(tl.int64)
                add_partial(part_k_ptr, rho * y0 * x0, rho * y1 * x1, i_p, later, H, D, HALF, BLOCK_T, BLOCK_H)

        # values
        o_d = (i_b * scb + i_n * scn) * ALIGN
        for start in range(0, H, BLOCK_H):
            i_h = (start + o_h).to(tl.int64)
            m_r = here & (i_h < H)
            o_out = (i_token * H + i_h) * D
            d0 = load_half(dout_v_ptr, o_d + i_h * sch * ALIGN, m_r, scd, D, HALF, 0)
            d1 = load_half(dout_v_ptr, o_d + i_h * sch * ALIGN, m_r, scd, D, HALF, 1)
            d0 = apply_transpose(d0, m, R, HALF)
            if HAS_ROPE:
                d1 = unturn(d1, cos, sin, R, HALF)
            store_half(dv_ptr, d0, o_out, m_r, D, HALF, 0)
            store_half(dv_ptr, d1, o_out, m_r, D, HALF, 1)
        if HAS_WQ or HAS_WK:
            tl.debug_barrier()  # another thread may read the partial sums that this one wrote


def prepare_bwd(
    q: Tensor,
    k: Tensor,
    rho_q: Tensor,
    rho_k: Tensor,
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    call: CameraCall,
) -> Gradients:
    """Return what the gradients of prepared q, k, v and inflation become; any strides, None is zero.

    Without a norm nothing of ``rho_q, rho_k`` is read.

    Grid: a few programs per multiprocessor, each with a share of the blocks of tokens. Partial sums of the weights'
    gradients are added in a fixed order: results repeat bit by bit on a device.
    """
    batch, tokens, heads, width = q.shape
    *upstream, dinflation = gradients
    nothing = q.new_zeros(()).expand(q.shape)
    dout_q, dout_k, dout_v = (given(x, nothing) for x in upstream)
    dq, dk, dv = (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(3))
    total, block = batch * tokens, camera_block("prepare_bwd", width)
    blocks = -(-total // block.block_t)
    programs = shared_programs(blocks, block, q.device) if total else 0
    partial = [
        None if weight is None else torch.empty(programs, heads, width, dtype=torch.float32, device=q.device)
        for weight in (call.q_weight, call.k_weight)
    ]
    if total:
        layout = token_layout((q, k, dout_q, dout_k, dout_v))
        strides = [stride for one in layout.strides for stride in one]
        ratio_strides = (0, 0, 0) if dinflation is None else dinflation.stride()
        with device_guard(q):
            prepare_bwd_kernel[(programs,)](
                q, k, dout_q, dout_k, dout_v, given(dinflation, call.to_ray), given(call.q_weight, q),
                given(call.k_weight, q), call.to_ray, call.to_world, given(call.cos, call.to_ray),
                given(call.sin, call.to_ray), rho_q, rho_k, dq, dk, dv,
                given(partial[0], call.to_ray), given(partial[1], call.to_ray), total, tokens, heads,
                tokens // max(call.frames, 1), call.k_scale, LEAST_SQUARED_LENGTH, *strides, *ratio_strides,
                D=width, HALF=padded_half(width), ALIGN=layout.align, HAS_NORM=call.has_norm,
                HAS_WQ=call.q_weight is not None, HAS_WK=call.k_weight is not None, HAS_ROPE=call.cos is not None,
                HAS_RATIO=dinflation is not None, BLOCK_T=block.block_t, BLOCK_H=block.block_h,
                num_warps=block.num_warps,
            )  # fmt: skip
    return Gradients(dq, dk, dv, *(None if x is None else x.sum(0) for x in partial))
