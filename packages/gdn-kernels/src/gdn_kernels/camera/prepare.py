"""Preparation of q, k and v: norm, ReLU, scale, ray transform, rotation, and how much longer the keys became."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn_kernels.camera.blocks import camera_block, padded_half
from gdn_kernels.camera.ray_maps import (
    apply_map,
    load_half,
    load_map,
    load_turns,
    over_token,
    store_half,
    token_rows,
    weights_of,
)
from gdn_kernels.frame_gdn.features import turn
from gdn_kernels.frame_gdn.layouts import device_guard, given, token_layout
from gdn_kernels.reference.camera import LEAST_SQUARED_LENGTH


class CameraCall(NamedTuple):
    """What the kernels of one call share: contiguous weights ``[H, D]``, fp32 rays and tables, scalars."""

    q_weight: Tensor | None
    k_weight: Tensor | None
    to_ray: Tensor
    to_world: Tensor
    cos: Tensor | None
    sin: Tensor | None
    frames: int
    k_scale: float
    norm_eps: float

    @property
    def has_norm(self) -> bool:
        """Whether q and k are normalised."""
        return self.q_weight is not None or self.k_weight is not None


class Prepared(NamedTuple):
    """``q, k, v [B, N, H, D]``, ``inflation [B, H, F]``; ``rho_q, rho_k [B, N]``, None without norm."""

    q: Tensor
    k: Tensor
    v: Tensor
    inflation: Tensor
    rho_q: Tensor | None
    rho_k: Tensor | None


# One program per BLOCK_T of all B * N tokens; it walks over the heads twice, the second time through the cache.
#   q_ptr, k_ptr, v_ptr        [B, N, H, D], strides given        out_q, out_k, out_v   [B, N, H, D] contiguous
#   wq_ptr, wk_ptr             [H, D]                             ratio_ptr             [B, H, N] fp32
#   to_ray_ptr, to_world_ptr   [B, N, 4, 4] fp32                  rho_q, rho_k          [B, N] fp32
#   cos_ptr, sin_ptr           [N, D/4] fp32
@triton.jit(do_not_specialize=["total", "N", "H", "sqb", "sqn", "sqh", "skb", "skn", "skh", "svb", "svn", "svh"])
def prepare_kernel(
    q_ptr, k_ptr, v_ptr, wq_ptr, wk_ptr, to_ray_ptr, to_world_ptr, cos_ptr, sin_ptr,
    out_q_ptr, out_k_ptr, out_v_ptr, ratio_ptr, rho_q_ptr, rho_k_ptr, total, N, H, k_scale, norm_eps, least,
    sqb, sqn, sqh, sqd, skb, skn, skh, skd, svb, svn, svh, svd,
    D: tl.constexpr, HALF: tl.constexpr, ALIGN: tl.constexpr, HAS_NORM: tl.constexpr, HAS_WQ: tl.constexpr,
    HAS_WK: tl.constexpr, HAS_ROPE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    R: tl.constexpr = BLOCK_T * BLOCK_H
    i_token, o_h, here = token_rows(tl.program_id(0), total, BLOCK_T, BLOCK_H)
    i_b, i_n = i_token // N, i_token % N
    o_q, o_k, o_v = (i_b * sqb + i_n * sqn) * ALIGN, (i_b * skb + i_n * skn) * ALIGN, (i_b * svb + i_n * svn) * ALIGN
    rho_q = tl.full((R,), 1.0, tl.float32)
    rho_k = tl.full((R,), 1.0, tl.float32)
    if HAS_NORM:
        sum_q = tl.zeros((R, HALF), tl.float32)
        sum_k = tl.zeros((R, HALF), tl.float32)
        for start in range(0, H, BLOCK_H):
            i_h = (start + o_h).to(tl.int64)
            m_r = here & (i_h < H)
            q0 = load_half(q_ptr, o_q + i_h * sqh * ALIGN, m_r, sqd, D, HALF, 0)
            q1 = load_half(q_ptr, o_q + i_h * sqh * ALIGN, m_r, sqd, D, HALF, 1)
            k0 = load_half(k_ptr, o_k + i_h * skh * ALIGN, m_r, skd, D, HALF, 0)
            k1 = load_half(k_ptr, o_k + i_h * skh * ALIGN, m_r, skd, D, HALF, 1)
            sum_q += q0 * q0 + q1 * q1
            sum_k += k0 * k0 + k1 * k1
        channels = (H * D).to(tl.float32)
        rho_q = 1.0 / tl.sqrt(over_token(tl.sum(sum_q, 1), BLOCK_T, BLOCK_H) / channels + norm_eps)
        rho_k = 1.0 / tl.sqrt(over_token(tl.sum(sum_k, 1), BLOCK_T, BLOCK_H) / channels + norm_eps)
        tl.store(rho_q_ptr + i_token, rho_q, mask=here & (o_h == 0))
        tl.store(rho_k_ptr + i_token, rho_k, mask=here & (o_h == 0))
    query_map = load_map(to_ray_ptr, i_token, here, True)
    key_map = load_map(to_world_ptr, i_token, here, False)
    if HAS_ROPE:
        cos, sin = load_turns(cos_ptr, sin_ptr, i_n, here, D, HALF)
    scale_q, scale_k = rho_q[:, None], (rho_k * k_scale)[:, None]
    for start in range(0, H, BLOCK_H):
        i_h = (start + o_h).to(tl.int64)
        m_r = here & (i_h < H)
        o_out = (i_token * H + i_h) * D
        q0 = load_half(q_ptr, o_q + i_h * sqh * ALIGN, m_r, sqd, D, HALF, 0)
        q1 = load_half(q_ptr, o_q + i_h * sqh * ALIGN, m_r, sqd, D, HALF, 1)
        q0 = tl.maximum(q0 * weights_of(wq_ptr, i_h, m_r, D, HALF, HAS_WQ, 0), 0.0) * scale_q
        q1 = tl.maximum(q1 * weights_of(wq_ptr, i_h, m_r, D, HALF, HAS_WQ, 1), 0.0) * scale_q
        q0 = apply_map(q0, query_map, R, HALF)
        if HAS_ROPE:
            q1 = turn(q1, cos, sin, R, HALF)
        store_half(out_q_ptr, q0, o_out, m_r, D, HALF, 0)
        store_half(out_q_ptr, q1, o_out, m_r, D, HALF, 1)

        k0 = load_half(k_ptr, o_k + i_h * skh * ALIGN, m_r, skd, D, HALF, 0)
        k1 = load_half(k_ptr, o_k + i_h * skh * ALIGN, m_r, skd, D, HALF, 1)
        k0 = tl.maximum(k0 * weights_of(wk_ptr, i_h, m_r, D, HALF, HAS_WK, 0), 0.0) * scale_k
        k1 = tl.maximum(k1 * weights_of(wk_ptr, i_h, m_r, D, HALF, HAS_WK, 1), 0.0) * scale_k
        before = tl.sum(k0 * k0 + k1 * k1, 1)
        k0 = apply_map(k0, key_map, R, HALF)
        if HAS_ROPE:
            k1 = turn(k1, cos, sin, R, HALF)
        after = tl.sum(k0 * k0 + k1 * k1, 1)
        store_half(out_k_ptr, k0, o_out, m_r, D, HALF, 0)
        store_half(out_k_ptr, k1, o_out, m_r, D, HALF, 1)
        ratio = tl.where(after > least, after, least) / tl.where(before > least, before, least)
        tl.store(ratio_ptr + (i_b * H + i_h) * N + i_n, ratio, mask=m_r)

        v0 = load_half(v_ptr, o_v + i_h * svh * ALIGN, m_r, svd, D, HALF, 0)
        v1 = load_half(v_ptr, o_v + i_h * svh * ALIGN, m_r, svd, D, HALF, 1)
        v0 = apply_map(v0, key_map, R, HALF)
        if HAS_ROPE:
            v1 = turn(v1, cos, sin, R, HALF)
        store_half(out_v_ptr, v0, o_out, m_r, D, HALF, 0)
        store_half(out_v_ptr, v1, o_out, m_r, D, HALF, 1)


def prepare(q: Tensor, k: Tensor, v: Tensor, call: CameraCall) -> Prepared:
    """Prepare ``q, k, v [B, N, H, D]`` of any strides.

    Grid: one program per block of tokens. Saves: the norm's statistics. Moves: q, k and v once in and once out.
    """
    batch, tokens, heads, width = q.shape
    outs = [torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(3)]
    ratio = torch.empty(batch, heads, tokens, dtype=torch.float32, device=q.device)
    rho_q, rho_k = (
        torch.empty(batch, tokens, dtype=torch.float32, device=q.device) if call.has_norm else None for _ in range(2)
    )
    total = batch * tokens
    if total:
        block, layout = camera_block("prepare", width), token_layout((q, k, v))
        with device_guard(q):
            prepare_kernel[(-(-total // block.block_t),)](
                q, k, v, given(call.q_weight, q), given(call.k_weight, q), call.to_ray, call.to_world,
                given(call.cos, call.to_ray), given(call.sin, call.to_ray), *outs, ratio, given(rho_q, ratio),
                given(rho_k, ratio), total, tokens, heads, call.k_scale, call.norm_eps, LEAST_SQUARED_LENGTH,
                *layout.strides[0], *layout.strides[1], *layout.strides[2],
                D=width, HALF=padded_half(width), ALIGN=layout.align, HAS_NORM=call.has_norm,
                HAS_WQ=call.q_weight is not None, HAS_WK=call.k_weight is not None, HAS_ROPE=call.cos is not None,
                BLOCK_T=block.block_t, BLOCK_H=block.block_h, num_warps=block.num_warps,
            )  # fmt: skip
    spatial = tokens // max(call.frames, 1)
    shape = (batch, heads, call.frames)
    inflation = ratio.view(*shape, spatial).mean(-1) if spatial else ratio.new_zeros(shape)
    return Prepared(outs[0], outs[1], outs[2], inflation, rho_q, rho_k)
