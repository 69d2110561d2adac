"""Backward of phase A: gradients of keys, values and write strengths, from the gradients of the frame operators."""

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
    load_matrix,
    load_tile,
    load_weight,
    operand,
    store_tile,
    turn,
    unturn,
)
from gdn_kernels.frame_gdn.layouts import device_guard, given, token_layout
from gdn_kernels.frame_gdn.phase_b import FrameHistories
from gdn_kernels.frame_gdn.phase_b_bwd import ScanGradients
from gdn_kernels.frame_gdn.tiles import launch_shape, token_shares


@triton.jit
def load_vector(x_ptr, o_d, D: tl.constexpr):
    """Load a block of a D-vector; zeros outside."""
    return tl.load(x_ptr + o_d, mask=o_d < D, other=0.0)


# With kr = turn(k), k = c relu(w x), c = k_scale rho;  G = dP + dP';  per direction the z stream's l, z and gate g:
#   dkr = beta (kr G + v dA')        dv = beta (kr dA)        dk = beta (l - g [(k.l) z + (k.z) l])
#   dbeta = kr.(kr G / 2 + v dA') + k.l - g (k.l)(k.z)
#   dy = k_scale (unturn(dkr) + dk), zero where the feature is zero;   p = w dy,   u = rowsum(p x),   dw = sum rho dy x
# dP_z has rank one per direction, so its product with k needs row sums only. One program per frame, head, share of the
# tokens and channel block i; p goes to the gradient buffer.
#   k_ptr, v_ptr, dk_ptr, dv_ptr  [B, N, H, D], strides in units of ALIGN      beta_ptr, dbeta_ptr  [B, H, F, S] fp32
#   g_ptr, da_ptr  [B, H, F, D, D]      z_*_ptr  [B, H, F+1, D]      lz_*_ptr  [B, H, F, D]
#   u_ptr  [blocks, B, N, H], dbeta likewise [blocks, ...]      dw_ptr  [B*F, shares, H, D]
@triton.jit(do_not_specialize=["F", "S", "H", "skb", "skn", "skh", "svb", "svn", "svh", "sdb", "sdn", "sdh",
                               "svgb", "svgn", "svgh"])  # fmt: skip
def phase_a_bwd_kernel(
    k_ptr, v_ptr, dk_ptr, dv_ptr, beta_ptr, dbeta_ptr, u_ptr, dw_ptr, rho_ptr, w_ptr, cos_ptr, sin_ptr, decay_ptr,
    g_ptr, da_ptr, z_forward_ptr, z_reverse_ptr, lz_forward_ptr, lz_reverse_ptr,
    F, S, H, k_scale, skb, skn, skh, skd, svb, svn, svh, svd, sdb, sdn, sdh, sdd, svgb, svgn, svgh, svgd,
    D: tl.constexpr, FEATURES: tl.constexpr, HAS_NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_ROPE: tl.constexpr,
    HAS_Z: tl.constexpr, HAS_FORWARD: tl.constexpr, HAS_REVERSE: tl.constexpr,
    ALIGN: tl.constexpr, OPERAND: tl.constexpr, DOT: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, NUM_BLOCKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    i_b, i_h, i_f = frame_index(tl.program_id(0), F, H)
    i_row = tl.program_id(2)
    i_frame = (i_b * H + i_h) * F + i_f
    i_state = (i_b * H + i_h) * (F + 1) + i_f
    k_ptr += (i_b * skb + i_h * skh + i_f * S * skn) * ALIGN
    v_ptr += (i_b * svb + i_h * svh + i_f * S * svn) * ALIGN
    dk_ptr += (i_b * sdb + i_h * sdh + i_f * S * sdn) * ALIGN
    dv_ptr += (i_b * svgb + i_h * svgh + i_f * S * svgn) * ALIGN
    beta_ptr += i_frame * S
    i_tokens = tl.num_programs(0).to(tl.int64) * S * i_row  # where this channel block keeps its partial row sums
    dbeta_ptr += i_tokens + i_frame * S
    u_ptr += i_tokens + (i_b * F + i_f) * S * H + i_h
    rho_ptr += (i_b * F + i_f) * S
    cos_ptr += i_f * S * (D // 2)
    sin_ptr += i_f * S * (D // 2)
    g_ptr += i_frame * D * D
    da_ptr += i_frame * D * D
    skn *= ALIGN
    svn *= ALIGN
    sdn *= ALIGN
    svgn *= ALIGN
    far_k, far_v, far_d, far_e = skn.to(tl.int64), svn.to(tl.int64), sdn.to(tl.int64), svgn.to(tl.int64)
    o_row = i_row * BLOCK_D + tl.arange(0, BLOCK_D)
    w_row = load_weight(w_ptr, i_h, o_row, D, HAS_WEIGHT, BLOCK_D)
    decay = tl.load(decay_ptr + i_frame)
    if HAS_Z:
        if HAS_FORWARD:
            z_f = load_vector(z_forward_ptr + i_state * D, o_row, D)
            l_f = load_vector(lz_forward_ptr + i_frame * D, o_row, D)
        if HAS_REVERSE:
            z_r = load_vector(z_reverse_ptr + (i_state + 1) * D, o_row, D)
            l_r = load_vector(lz_reverse_ptr + i_frame * D, o_row, D)
    if NUM_BLOCKS == 1:
        g = load_matrix(g_ptr, o_row, o_row, D, 1, D)
        da = load_matrix(da_ptr, o_row, o_row, D, 1, D)
        da_t = load_matrix(da_ptr, o_row, o_row, 1, D, D)
    dw = tl.zeros((BLOCK_D,), tl.float32)
    for s in tl.range(tl.program_id(1) * BLOCK_S, S, tl.num_programs(1) * BLOCK_S, num_stages=STAGES):
        o_s = tl.arange(0, BLOCK_S)
        m_s = s + o_s < S
        beta = tl.load(beta_ptr + s + o_s, mask=m_s, other=0.0)
        rho = tl.full((BLOCK_S,), 1.0, tl.float32)
        if HAS_NORM:
            rho = tl.load(rho_ptr + s + o_s, mask=m_s, other=0.0)
        scale = rho
        if FEATURES:
            scale = rho * k_scale
        if NUM_BLOCKS == 1:
            x = load_tile(k_ptr + s * far_k, o_s, o_row, m_s, skn, skd, D, BLOCK_D)
            k = feature(x, w_row, FEATURES) * scale[:, None]
            if HAS_Z:
                if HAS_FORWARD:
                    kl_f = tl.sum(k * l_f[None, :], 1)
                    kz_f = tl.sum(k * z_f[None, :], 1)
                if HAS_REVERSE:
                    kl_r = tl.sum(k * l_r[None, :], 1)
                    kz_r = tl.sum(k * z_r[None, :], 1)
            if HAS_ROPE:
                cos, sin = load_angles(cos_ptr, sin_ptr, s + o_s, m_s, 0, D, BLOCK_D)
                k = turn(k, cos, sin, BLOCK_S, BLOCK_D)
            k = operand(k, OPERAND, DOT)
            v = operand(load_tile(v_ptr + s * far_v, o_s, o_row, m_s, svn, svd, D, BLOCK_D), OPERAND, DOT)
            dv = tl.dot(k, da, input_precision=DOT)
            kg = tl.dot(k, g, input_precision=DOT)
            va = tl.dot(v, da_t, input_precision=DOT)
        else:
            dv = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
            kg = dv
            va = dv
            kl_f = tl.zeros((BLOCK_S,), tl.float32)
            kz_f = kl_f
            kl_r = kl_f
            kz_r = kl_f
            for j in tl.static_range(NUM_BLOCKS):
                o_j = j * BLOCK_D + tl.arange(0, BLOCK_D)
                w_j = load_weight(w_ptr, i_h, o_j, D, HAS_WEIGHT, BLOCK_D)
                k_j = feature(load_tile(k_ptr + s * far_k, o_s, o_j, m_s, skn, skd, D, BLOCK_D), w_j, FEATURES)
                k_j *= scale[:, None]
                v_j = load_tile(v_ptr + s * far_v, o_s, o_j, m_s, svn, svd, D, BLOCK_D)
                if HAS_Z:
                    if HAS_FORWARD:
                        kl_f += tl.sum(k_j * load_vector(lz_forward_ptr + i_frame * D, o_j, D)[None, :], 1)
                        kz_f += tl.sum(k_j * load_vector(z_forward_ptr + i_state * D, o_j, D)[None, :], 1)
                    if HAS_REVERSE:
                        kl_r += tl.sum(k_j * load_vector(lz_reverse_ptr + i_frame * D, o_j, D)[None, :], 1)
                        kz_r += tl.sum(k_j * load_vector(z_reverse_ptr + (i_state + 1) * D, o_j, D)[None, :], 1)
                if HAS_ROPE:
                    cos, sin = load_angles(cos_ptr, sin_ptr, s + o_s, m_s, j, D, BLOCK_D)
                    k_j = turn(k_j, cos, sin, BLOCK_S, BLOCK_D)
                k_j = operand(k_j, OPERAND, DOT)
                kg = tl.dot(k_j, load_matrix(g_ptr, o_j, o_row, D, 1, D), kg, input_precision=DOT)
                va = tl.dot(
                    operand(v_j, OPERAND, DOT), load_matrix(da_ptr, o_j, o_row, 1, D, D), va, input_precision=DOT
                )
                dv = tl.dot(k_j, load_matrix(da_ptr, o_j, o_row, D, 1, D), dv, input_precision=DOT)
        store_tile(dv_ptr + s * far_e, dv * beta[:, None], o_s, o_row, m_s, svgn, svgd, D)
        # loaded and turned again: holding these tiles over the products costs more registers than there are
        x = load_tile(k_ptr + s * far_k, o_s, o_row, m_s, skn, skd, D, BLOCK_D)
        kr = feature(x, w_row, FEATURES) * scale[:, None]
        dkr = kg + va
        if HAS_ROPE:
            cos, sin = load_angles(cos_ptr, sin_ptr, s + o_s, m_s, i_row, D, BLOCK_D)
            kr = turn(kr, cos, sin, BLOCK_S, BLOCK_D)
        dbeta = tl.sum(kr * (0.5 * kg + va), 1)
        if HAS_ROPE:
            dkr = unturn(dkr, cos, sin, BLOCK_S, BLOCK_D)
        if HAS_Z:
            first = tl.where(i_row == 0, 1.0, 0.0)  # the z stream's share of dbeta is counted once
            if HAS_FORWARD:
                dbeta += first * (kl_f - decay * kl_f * kz_f)
                dkr += l_f[None, :] - decay * (kl_f[:, None] * z_f[None, :] + kz_f[:, None] * l_f[None, :])
            if HAS_REVERSE:
                dbeta += first * (kl_r - decay * kl_r * kz_r)
                dkr += l_r[None, :] - decay * (kl_r[:, None] * z_r[None, :] + kz_r[:, None] * l_r[None, :])
        tl.store(dbeta_ptr + s + o_s, dbeta, mask=m_s)
        dkr *= beta[:, None]
        if FEATURES:
            dkr = tl.where(x * w_row[None, :] > 0, dkr * k_scale, 0.0)
            if HAS_NORM:
                dw += tl.sum(dkr * x * rho[:, None], 0)
                dkr *= w_row[None, :]
                tl.store(u_ptr + (s + o_s).to(tl.int64) * H, tl.sum(dkr * x, 1), mask=m_s)
        store_tile(dk_ptr + s * far_d, dkr, o_s, o_row, m_s, sdn, sdd, D)
    if HAS_NORM:
        i_part = ((i_b * F + i_f) * tl.num_programs(1) + tl.program_id(1)) * H + i_h
        tl.store(dw_ptr + i_part * D + o_row, dw, mask=o_row < D)


class WriteGradients(NamedTuple):
    """``dbeta [B, H, F, S]``; for the key's norm ``u [B, N, H]`` and ``dw [H, D]``, None without a norm."""

    dbeta: Tensor
    u: Tensor | None
    dw: Tensor | None


def phase_a_bwd(
    call: TritonCall,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    rho_k: Tensor | None,
    operator_gradients: tuple[Tensor, Tensor],
    histories: FrameHistories,
    scans: ScanGradients,
    dk: Tensor,
    dv: Tensor,
) -> WriteGradients:
    """Write the gradients of values and keys (before the coupling part of the keys' norm); return the rest.

    Grid: (B*F*H, shares of a frame's tokens, channel blocks). Needs: k, v, gates; nothing token-sized was saved.
    """
    batch, tokens, heads, width = k.shape
    frames = beta.shape[2]
    shape = launch_shape("phase_a_bwd", width, call.precision, k.device)
    has_norm = rho_k is not None
    shares = token_shares(batch * frames * heads * shape.num_blocks, beta.shape[3], shape, k.device)
    dbeta = torch.empty(shape.num_blocks, *beta.shape, dtype=torch.float32, device=k.device)
    u = torch.empty(shape.num_blocks, batch, tokens, heads, dtype=torch.float32, device=k.device) if has_norm else None
    parts = batch * frames * shares if has_norm else 0
    dw = torch.empty(parts, heads, width, dtype=torch.float32, device=k.device)
    if beta.numel():
        layout = token_layout((k, v, dk, dv))
        with device_guard(k):
            phase_a_bwd_kernel[batch * frames * heads, shares, shape.num_blocks](
                k, v, dk, dv, beta, dbeta, given(u, beta), dw,
                *(given(x, beta) for x in (rho_k, call.k_weight, call.cos, call.sin)), decay, *operator_gradients,
                *(given(x, beta) for x in (histories.forward_z, histories.reverse_z, scans.lz_forward, scans.lz_reverse)),
                frames, beta.shape[3], heads, call.k_scale,
                *(stride for strides in layout.strides for stride in strides),
                D=width, FEATURES=call.features, HAS_NORM=has_norm, HAS_WEIGHT=call.k_weight is not None,
                HAS_ROPE=call.cos is not None, HAS_Z=call.has_z, HAS_FORWARD=histories.forward_kv is not None,
                HAS_REVERSE=histories.reverse_kv is not None, ALIGN=layout.align, OPERAND=call.operand, DOT=call.dot,
                BLOCK_S=shape.block_s, BLOCK_D=shape.block_d, NUM_BLOCKS=shape.num_blocks,  STAGES=shape.num_stages, **shape.options(),
            )  # fmt: skip
    else:
        dbeta, dw = dbeta.zero_(), dw.zero_()

    def total(x: Tensor) -> Tensor:
        return x[0] if x.shape[0] == 1 else x.sum(0)

    return WriteGradients(total(dbeta), None if u is None else total(u), dw.sum(0) if has_norm else None)
