"""RMS statistics of q and k over all channels of a token, and the part of the norm's backward that couples heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn_kernels.frame_gdn.layouts import device_guard, given, token_layout


# rho = (mean over heads and channels of x^2 + norm_eps) ** -1/2, one program per token; of q and k, or of q alone.
#   q_ptr, k_ptr    [B, N, H, D], strides given, heads and channels contiguous after one another if PACKED
#   rho_q, rho_k    [B, N] fp32
@triton.jit(do_not_specialize=["N", "H", "sqb", "sqn", "sqh", "skb", "skn", "skh"])
def qk_norm_kernel(
    q_ptr, k_ptr, rho_q_ptr, rho_k_ptr, N, H, norm_eps,
    sqb, sqn, sqh, sqd, skb, skn, skh, skd,
    D: tl.constexpr, HAS_K: tl.constexpr, PACKED: tl.constexpr, ALIGN: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    i_token = tl.program_id(0).to(tl.int64)
    i_b, i_n = i_token // N, i_token % N
    q_ptr += (i_b * sqb + i_n * sqn) * ALIGN
    k_ptr += (i_b * skb + i_n * skn) * ALIGN
    sum_q = tl.zeros((BLOCK_C,), tl.float32)
    sum_k = tl.zeros((BLOCK_C,), tl.float32)
    for start in range(0, H * D, BLOCK_C):
        o_c = start + tl.arange(0, BLOCK_C)
        m_c = o_c < H * D
        if PACKED:
            o_q, o_k = o_c, o_c
        else:
            o_q = (o_c // D) * sqh * ALIGN + (o_c % D) * sqd
            o_k = (o_c // D) * skh * ALIGN + (o_c % D) * skd
        q = tl.load(q_ptr + o_q, mask=m_c, other=0.0).to(tl.float32)
        sum_q += q * q
        if HAS_K:
            k = tl.load(k_ptr + o_k, mask=m_c, other=0.0).to(tl.float32)
            sum_k += k * k
    C = (H * D).to(tl.float32)
    tl.store(rho_q_ptr + i_token, 1.0 / tl.sqrt(tl.sum(sum_q) / C + norm_eps))
    if HAS_K:
        tl.store(rho_k_ptr + i_token, 1.0 / tl.sqrt(tl.sum(sum_k) / C + norm_eps))


def qk_norm(q: Tensor, k: Tensor, norm_eps: float) -> tuple[Tensor, Tensor]:
    """Return ``rho_q, rho_k [B, N]`` fp32 for ``q, k [B, N, H, D]`` of any strides.

    Grid: one program per token. Saves: both results, for the backward of the norm.
    """
    rho_q, rho_k = _statistics(q, k, norm_eps)
    assert rho_k is not None
    return rho_q, rho_k


def rms_statistic(x: Tensor, norm_eps: float) -> Tensor:
    """Return ``rho [B, N]`` of one of q and k, where the other is not due yet; see `qk_norm`."""
    return _statistics(x, None, norm_eps)[0]


def _statistics(q: Tensor, k: Tensor | None, norm_eps: float) -> tuple[Tensor, Tensor | None]:
    batch, tokens, heads, width = q.shape
    rho_q = torch.empty(batch, tokens, dtype=torch.float32, device=q.device)
    rho_k = None if k is None else torch.empty_like(rho_q)
    if batch * tokens == 0:
        return rho_q, rho_k
    other = given(k, q)
    packed = all(x.stride(3) == 1 and x.stride(2) == width for x in (q, other))
    layout = token_layout((q, other))
    with device_guard(q):
        qk_norm_kernel[(batch * tokens,)](
            q, other, rho_q, given(rho_k, rho_q), tokens, heads, norm_eps, *layout.strides[0], *layout.strides[1],
            D=width, HAS_K=k is not None, PACKED=packed, ALIGN=layout.align, BLOCK_C=512, num_warps=2,
        )  # fmt: skip
    return rho_q, rho_k


# dx = rho p - rho^3 / C t x with t = sum over heads of u; p stands in the gradient buffer, dx replaces it.
#   x_ptr  [B, N, H, D], strides given       dx_ptr [B, N, H, D], strides given, p on entry
#   u_ptr  [B, N, H] fp32                    rho_ptr [B, N] fp32
@triton.jit(do_not_specialize=["N", "H", "sxb", "sxn", "sxh", "sgb", "sgn", "sgh"])
def qk_norm_bwd_kernel(
    x_ptr, dx_ptr, u_ptr, rho_ptr, N, H,
    sxb, sxn, sxh, sxd, sgb, sgn, sgh, sgd,
    D: tl.constexpr, PACKED: tl.constexpr, ALIGN: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    i_token = tl.program_id(0).to(tl.int64)
    i_b, i_n = i_token // N, i_token % N
    x_ptr += (i_b * sxb + i_n * sxn) * ALIGN
    dx_ptr += (i_b * sgb + i_n * sgn) * ALIGN
    t = 0.0
    for start_h in range(0, H, BLOCK_H):
        o_h = start_h + tl.arange(0, BLOCK_H)
        t += tl.sum(tl.load(u_ptr + i_token * H + o_h, mask=o_h < H, other=0.0))
    rho = tl.load(rho_ptr + i_token)
    factor = rho * rho * rho * t / (H * D).to(tl.float32)
    for start in range(0, H * D, BLOCK_C):
        o_c = start + tl.arange(0, BLOCK_C)
        m_c = o_c < H * D
        if PACKED:
            o_x, o_g = o_c, o_c
        else:
            o_x = (o_c // D) * sxh * ALIGN + (o_c % D) * sxd
            o_g = (o_c // D) * sgh * ALIGN + (o_c % D) * sgd
        x = tl.load(x_ptr + o_x, mask=m_c, other=0.0).to(tl.float32)
        p = tl.load(dx_ptr + o_g, mask=m_c, other=0.0).to(tl.float32)
        tl.store(dx_ptr + o_g, (rho * p - factor * x).to(dx_ptr.dtype.element_ty), mask=m_c)


def qk_norm_bwd(x: Tensor, dx: Tensor, u: Tensor, rho: Tensor) -> None:
    """Finish the gradient of one of q and k in place: ``dx [B, N, H, D]`` holds ``p = w dy`` on entry.

    Grid: one program per token. Needs: ``u [B, N, H]``, the sum of ``p x`` over the channels of each head, because no
    program of the stages before sees all heads of a token.
    """
    batch, tokens, heads, width = x.shape
    if batch * tokens == 0:
        return
    packed = all(y.stride(3) == 1 and y.stride(2) == width for y in (x, dx))
    layout = token_layout((x, dx))
    with device_guard(x):
        qk_norm_bwd_kernel[(batch * tokens,)](
            x, dx, u, rho, tokens, heads, *layout.strides[0], *layout.strides[1],
            D=width, PACKED=packed, ALIGN=layout.align, BLOCK_C=1024, BLOCK_H=32, num_warps=4,
        )  # fmt: skip
