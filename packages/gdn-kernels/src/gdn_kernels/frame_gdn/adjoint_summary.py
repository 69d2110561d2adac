"""Adjoint summary of a run of frames: the sweeps of phase B's backward that keep nothing but their last state."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn_kernels.frame_gdn.call import TritonCall
from gdn_kernels.frame_gdn.features import load_matrix, store_matrix
from gdn_kernels.frame_gdn.layouts import device_guard, given
from gdn_kernels.frame_gdn.phase_b import _apply_step, keep_factors
from gdn_kernels.frame_gdn.tiles import launch_shape
from gdn_kernels.types import Direction, FrameBoundary, FrameTransitions


# forward (direction 0), f descending:  x <- g_f (I - P_f) (x + C_f)
# reverse (direction 1), f ascending:   x <- g_f (I - P_f) (m_f x) + C_f
# From zero. One program per head, column block and direction; the last on axis 1 sweeps z.
#   c_ptr [B, H, F, D, D], cz_ptr [B, H, F, D]     *_out_ptr [B, H, D, D], [B, H, D] fp32     others as in phase B
@triton.jit(do_not_specialize=["F"])
def adjoint_summary_kernel(
    p_ptr, pz_ptr, decay_ptr, keep_ptr, c_ptr, cz_ptr, forward_out_ptr, forward_z_out_ptr, reverse_out_ptr,
    reverse_z_out_ptr, F,
    D: tl.constexpr, HAS_FORWARD: tl.constexpr, HAS_RESETS: tl.constexpr, OPERAND: tl.constexpr, DOT: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, NUM_BLOCKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    i_bh = tl.program_id(0).to(tl.int64)
    i_col = tl.program_id(1)
    if HAS_FORWARD:
        is_reverse = tl.program_id(2) == 1
    else:
        is_reverse = tl.program_id(2) == 0
    before = tl.where(is_reverse, 0.0, 1.0)
    decay_ptr += i_bh * F
    TWO: tl.constexpr = NUM_BLOCKS == 2
    if i_col * BLOCK_V < D:
        o_low = tl.arange(0, BLOCK_D)
        o_high = BLOCK_D + tl.arange(0, BLOCK_D)
        o_v = i_col * BLOCK_V + tl.arange(0, BLOCK_V)
        if is_reverse:
            out_ptr = reverse_out_ptr
        else:
            out_ptr = forward_out_ptr
        p_ptr += i_bh * F * D * D
        c_ptr += i_bh * F * D * D
        x_low = tl.zeros((BLOCK_D, BLOCK_V), tl.float32)
        x_high = x_low
        for t in tl.range(0, F, num_stages=STAGES):
            f = tl.where(is_reverse, t, F - 1 - t).to(tl.int64)
            g = tl.load(decay_ptr + f)
            keep = 1.0
            if HAS_RESETS:
                keep = tl.where(is_reverse, tl.load(keep_ptr + f), 1.0)
            c_low = load_matrix(c_ptr + f * D * D, o_low, o_v, D, 1, D)
            x_low = keep * x_low + before * c_low
            if TWO:
                c_high = load_matrix(c_ptr + f * D * D, o_high, o_v, D, 1, D)
                x_high = keep * x_high + before * c_high
            w_low, w_high = _apply_step(p_ptr + f * D * D, x_low, x_high, o_low, o_high, D, TWO, OPERAND, DOT)
            x_low = g * w_low + (1.0 - before) * c_low
            if TWO:
                x_high = g * w_high + (1.0 - before) * c_high
        store_matrix(out_ptr + i_bh * D * D, x_low, o_low, o_v, D)
        if TWO:
            store_matrix(out_ptr + i_bh * D * D, x_high, o_high, o_v, D)
    else:
        o_row = tl.arange(0, NUM_BLOCKS * BLOCK_D)
        m_row = o_row < D
        if is_reverse:
            out_ptr = reverse_z_out_ptr
        else:
            out_ptr = forward_z_out_ptr
        pz_ptr += i_bh * F * D * D
        cz_ptr += i_bh * F * D
        x = tl.zeros((NUM_BLOCKS * BLOCK_D,), tl.float32)
        for t in tl.range(0, F, num_stages=STAGES):
            f = tl.where(is_reverse, t, F - 1 - t).to(tl.int64)
            g = tl.load(decay_ptr + f)
            keep = 1.0
            if HAS_RESETS:
                keep = tl.where(is_reverse, tl.load(keep_ptr + f), 1.0)
            c = tl.load(cz_ptr + f * D + o_row, mask=m_row, other=0.0)
            x = keep * x + before * c
            pz = load_matrix(pz_ptr + f * D * D, o_row, o_row, D, 1, D).to(tl.float32)
            x = g * (x - tl.sum(pz * x[None, :], 1)) + (1.0 - before) * c
        tl.store(out_ptr + i_bh * D + o_row, x, mask=m_row)


def adjoint_summary(
    call: TritonCall,
    transitions: FrameTransitions,
    decay: Tensor,
    direction: Direction,
    resets: tuple[int, ...],
    c: Tensor,
    cz: Tensor | None,
    into: FrameBoundary | None = None,
) -> FrameBoundary:
    """Return the gradients of the entry states for exit states without one, fp32; written to ``into`` if it is given.

    Grid: (B*H, column blocks and z, directions). What `phase_b_bwd` gives as ``entry``, without the gradients of every
    frame that it writes.
    """
    p_kv, _, p_z, _ = transitions
    batch, heads, frames, width, _ = p_kv.shape
    past, future = direction.reads_past, direction.reads_future
    if into is None:

        def fresh(present: bool, *tail: int) -> Tensor | None:
            return torch.empty(batch, heads, *tail, dtype=torch.float32, device=decay.device) if present else None

        into = FrameBoundary(
            fresh(past, width, width), fresh(past and call.has_z, width),
            fresh(future, width, width), fresh(future and call.has_z, width),
        )  # fmt: skip
    if batch * heads:
        shape = launch_shape("adjoint_summary", width, call.precision, decay.device)
        columns = triton.cdiv(width, shape.block_v) + (1 if call.has_z else 0)
        with device_guard(decay):
            adjoint_summary_kernel[batch * heads, columns, 2 if past and future else 1](
                p_kv, given(p_z, decay), decay, given(keep_factors(resets, frames, decay.device), decay), c,
                given(cz, decay), *(given(x, decay) for x in into), frames,
                D=width, HAS_FORWARD=past, HAS_RESETS=future and bool(resets), OPERAND=call.operand, DOT=call.dot,
                BLOCK_D=shape.block_d, BLOCK_V=shape.block_v, NUM_BLOCKS=shape.num_blocks, STAGES=shape.num_stages,
                **shape.options(),
            )  # fmt: skip
    return into
