"""Fold of affine summaries: from the maps of several runs of frames to the states between them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn_kernels.frame_gdn.layouts import device_guard, given
from gdn_kernels.frame_gdn.phase_b import keep_factors


# out[0] = start,  out[t + 1] = keep_r E_r out[t] + h_r  with r = first + t step; E_r' if TRANSPOSED.
# One program per head and column block walks all maps; a state is read back in row blocks once it has been written.
#   e_ptr [P, B*H, D, D] fp32, se between maps     h_ptr [P, B*H, D, V] fp32, sh between maps     keep_ptr [P]
#   start_ptr [B*H, D, V] fp32, read if HAS_START   out_ptr [count + 1, B*H, D, V] fp32
@triton.jit(do_not_specialize=["count", "first", "step", "se", "sh"])
def fold_kernel(
    e_ptr, h_ptr, start_ptr, keep_ptr, out_ptr, count, first, step, se, sh,
    D: tl.constexpr, V: tl.constexpr, HAS_START: tl.constexpr, HAS_KEEP: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    i_bh = tl.program_id(0).to(tl.int64)
    o_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    o_block = tl.arange(0, BLOCK)
    stride_out = tl.num_programs(0).to(tl.int64) * D * V
    e_ptr += i_bh * D * D
    h_ptr += i_bh * D * V
    out_ptr += i_bh * D * V
    for i in range(0, D, BLOCK):
        o_row = i + o_block
        mask = (o_row < D)[:, None] & (o_v < V)[None, :]
        offsets = o_row[:, None] * V + o_v[None, :]
        x = tl.zeros((BLOCK, BLOCK_V), tl.float32)
        if HAS_START:
            x = tl.load(start_ptr + i_bh * D * V + offsets, mask=mask, other=0.0)
        tl.store(out_ptr + offsets, x, mask=mask)
    for t in range(count):
        tl.debug_barrier()  # what other threads of this program wrote is read below
        r = first + t * step
        e_map = e_ptr + r * se
        h_map = h_ptr + r * sh
        keep = 1.0
        if HAS_KEEP:
            keep = tl.load(keep_ptr + r)
        for i in range(0, D, BLOCK):
            o_row = i + o_block
            total = tl.zeros((BLOCK, BLOCK_V), tl.float32)
            for j in range(0, D, BLOCK):
                o_col = j + o_block
                if TRANSPOSED:
                    o_e = o_col[None, :] * D + o_row[:, None]
                else:
                    o_e = o_row[:, None] * D + o_col[None, :]
                e = tl.load(e_map + o_e, mask=(o_row < D)[:, None] & (o_col < D)[None, :], other=0.0)
                m_x = (o_col < D)[:, None] & (o_v < V)[None, :]
                x = tl.load(out_ptr + t * stride_out + o_col[:, None] * V + o_v[None, :], mask=m_x, other=0.0)
                total += tl.dot(e, x, input_precision="ieee")  # fp32 as it stands: this carries the memory of the clip
            mask = (o_row < D)[:, None] & (o_v < V)[None, :]
            offsets = o_row[:, None] * V + o_v[None, :]
            total = tl.where(keep > 0, total, 0.0) + tl.load(h_map + offsets, mask=mask, other=0.0)
            tl.store(out_ptr + (t + 1) * stride_out + offsets, total, mask=mask)


def fold(
    transitions: Tensor,
    increments: Tensor,
    start: Tensor | None,
    order: range,
    *,
    transposed: bool = False,
    dropped: tuple[int, ...] = (),
) -> Tensor:
    """Apply affine maps one after the other; return the states before, between and after them.

    Grid: (B*H, column blocks): a chain of ``len(order)`` products of D x D by D x 16 per program, fp32.

    Args:
        transitions: ``[P, B, H, D, D]`` fp32, contiguous but for the first dim.
        increments: ``[P, B, H, D, V]`` or, for vector states, ``[P, B, H, D]``, fp32, contiguous but for the first dim.
        start: the state before the first map, in the shape of one increment; None is zero.
        order: which maps are applied, first to last.
        transposed: apply the transposes of the transitions.
        dropped: maps whose transition counts as zero.

    Returns:
        Tensor: ``[len(order) + 1, B, H, D, V]`` or ``[len(order) + 1, B, H, D]``, fp32.
    """
    size, batch, heads, width, _ = transitions.shape
    columns = increments.shape[4] if increments.ndim == 5 else 1
    states = torch.empty(
        len(order) + 1, *increments.shape[1:], dtype=torch.float32, device=transitions.device
    )  # fmt: skip
    if not states.numel():
        return states
    transitions, increments = (x if x[0].is_contiguous() else x.contiguous() for x in (transitions, increments))
    with device_guard(transitions):
        fold_kernel[batch * heads, triton.cdiv(columns, 16)](
            transitions, increments, given(None if start is None else start.contiguous(), transitions),
            given(keep_factors(dropped, size, transitions.device), transitions), states, len(order), order.start,
            order.step, transitions.stride(0), increments.stride(0),
            D=width, V=columns, HAS_START=start is not None, HAS_KEEP=bool(dropped), TRANSPOSED=transposed,
            BLOCK=32, BLOCK_V=16, num_warps=4,
        )  # fmt: skip
    return states
