"""Output transform of the camera branch and its adjoint: the ray transform and the rotation, of one tensor."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn_kernels.camera.blocks import camera_block, padded_half
from gdn_kernels.camera.ray_maps import apply_map, load_half, load_map, load_turns, store_half, token_rows
from gdn_kernels.frame_gdn.features import turn, unturn
from gdn_kernels.frame_gdn.layouts import device_guard, given, token_layout


# One program per BLOCK_T of all B * N tokens, all heads.
#   x_ptr     [B, N, H, D], strides given        y_ptr              [B, N, H, D] contiguous
#   map_ptr   [B, N, 4, 4] fp32                  cos_ptr, sin_ptr   [N, D/4] fp32
@triton.jit(do_not_specialize=["total", "N", "H", "sxb", "sxn", "sxh"])
def output_kernel(
    x_ptr, map_ptr, cos_ptr, sin_ptr, y_ptr, total, N, H, sxb, sxn, sxh, sxd,
    D: tl.constexpr, HALF: tl.constexpr, ALIGN: tl.constexpr, ADJOINT: tl.constexpr, HAS_ROPE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    R: tl.constexpr = BLOCK_T * BLOCK_H
    i_token, o_h, here = token_rows(tl.program_id(0), total, BLOCK_T, BLOCK_H)
    i_b, i_n = i_token // N, i_token % N
    o_x = (i_b * sxb + i_n * sxn) * ALIGN
    m = load_map(map_ptr, i_token, here, ADJOINT)
    if HAS_ROPE:
        cos, sin = load_turns(cos_ptr, sin_ptr, i_n, here, D, HALF)
    for start in range(0, H, BLOCK_H):
        i_h = (start + o_h).to(tl.int64)
        m_r = here & (i_h < H)
        o_y = (i_token * H + i_h) * D
        x0 = load_half(x_ptr, o_x + i_h * sxh * ALIGN, m_r, sxd, D, HALF, 0)
        x1 = load_half(x_ptr, o_x + i_h * sxh * ALIGN, m_r, sxd, D, HALF, 1)
        x0 = apply_map(x0, m, R, HALF)
        if HAS_ROPE:
            if ADJOINT:
                x1 = turn(x1, cos, sin, R, HALF)
            else:
                x1 = unturn(x1, cos, sin, R, HALF)
        store_half(y_ptr, x0, o_y, m_r, D, HALF, 0)
        store_half(y_ptr, x1, o_y, m_r, D, HALF, 1)


def transform_output(
    x: Tensor, to_ray: Tensor, cos: Tensor | None, sin: Tensor | None, dtype: torch.dtype, *, adjoint: bool = False
) -> Tensor:
    """Map ``x [B, N, H, D]`` of any strides by P and rotate it back; with ``adjoint`` by P' and rotate it on.

    Grid: one program per block of tokens. Moves: x once in, the result once out.
    """
    batch, tokens, heads, width = x.shape
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    total = batch * tokens
    if total:
        block, layout = camera_block("output", width), token_layout((x,))
        with device_guard(x):
            output_kernel[(-(-total // block.block_t),)](
                x, to_ray, given(cos, to_ray), given(sin, to_ray), y, total, tokens, heads, *layout.strides[0],
                D=width, HALF=padded_half(width), ALIGN=layout.align, ADJOINT=adjoint, HAS_ROPE=cos is not None,
                BLOCK_T=block.block_t, BLOCK_H=block.block_h, num_warps=block.num_warps,
            )  # fmt: skip
    return y
