"""Affine summary of a run of frames: the scans of phase B that keep nothing but their last state."""

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
from gdn_kernels.types import Direction, FrameBoundary, FrameSummary, FrameTransitions


@triton.jit
def _load_if(x_ptr, o_row, o_col, wanted, D: tl.constexpr):
    """Load a tile of a D x D matrix as fp32; zeros outside, or if it is not wanted."""
    offsets = o_row[:, None] * D + o_col[None, :]
    x = tl.load(x_ptr + offsets, mask=(o_row < D)[:, None] & (o_col < D)[None, :] & wanted, other=0.0)
    return x.to(tl.float32)


# Role 0: forward increment from zero, role 1: reverse increment from zero (the first frame written too),
# role 2: transition of the kv stream, role 3: of the z stream, both from the identity with A = 0, E <- g (E - P E).
# One program per head, column block and role. The last program on axis 1 of roles 0 and 1 scans the z increments.
#   p_ptr, a_ptr, pz_ptr [B, H, F, D, D], b_ptr [B, H, F, D]     decay_ptr [B, H, F]     keep_ptr [F]
#   *_out_ptr  [B, H, D, D] and [B, H, D] fp32
@triton.jit(do_not_specialize=["F"])
def summary_kernel(
    p_ptr, a_ptr, pz_ptr, b_ptr, decay_ptr, keep_ptr, forward_out_ptr, forward_z_out_ptr, reverse_out_ptr,
    reverse_z_out_ptr, transition_out_ptr, transition_z_out_ptr, F,
    D: tl.constexpr, FIRST_ROLE: tl.constexpr, HAS_REVERSE: tl.constexpr, HAS_RESETS: tl.constexpr,
    OPERAND: tl.constexpr, DOT: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, NUM_BLOCKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    i_bh = tl.program_id(0).to(tl.int64)
    i_col = tl.program_id(1)
    role = tl.program_id(2) + FIRST_ROLE
    if not HAS_REVERSE:
        role = tl.where(role == 0, 0, role + 1)
    is_reverse = role == 1
    decay_ptr += i_bh * F
    TWO: tl.constexpr = NUM_BLOCKS == 2
    if i_col * BLOCK_V < D:
        o_low = tl.arange(0, BLOCK_D)
        o_high = BLOCK_D + tl.arange(0, BLOCK_D)
        o_v = i_col * BLOCK_V + tl.arange(0, BLOCK_V)
        adds = role < 2
        if role == 3:
            step_ptr = pz_ptr + i_bh * F * D * D
        else:
            step_ptr = p_ptr + i_bh * F * D * D
        if role == 0:
            out_ptr = forward_out_ptr
        elif role == 1:
            out_ptr = reverse_out_ptr
        elif role == 2:
            out_ptr = transition_out_ptr
        else:
            out_ptr = transition_z_out_ptr
        a_ptr += i_bh * F * D * D
        m_low = tl.where((o_low[:, None] == o_v[None, :]) & (role >= 2), 1.0, 0.0)
        m_high = m_low
        if TWO:
            m_high = tl.where((o_high[:, None] == o_v[None, :]) & (role >= 2), 1.0, 0.0)
        for t in tl.range(0, F, num_stages=STAGES):
            f = tl.where(is_reverse, F - 1 - t, t).to(tl.int64)
            g = tl.load(decay_ptr + f)
            low, high = _apply_step(step_ptr + f * D * D, m_low, m_high, o_low, o_high, D, TWO, OPERAND, DOT)
            m_low = g * low + _load_if(a_ptr + f * D * D, o_low, o_v, adds, D)
            if TWO:
                m_high = g * high + _load_if(a_ptr + f * D * D, o_high, o_v, adds, D)
            if HAS_RESETS:
                keep = tl.where(is_reverse, tl.load(keep_ptr + f), 1.0)
                m_low = tl.where(keep > 0, m_low, 0.0)
                if TWO:
                    m_high = tl.where(keep > 0, m_high, 0.0)
        store_matrix(out_ptr + i_bh * D * D, m_low, o_low, o_v, D)
        if TWO:
            store_matrix(out_ptr + i_bh * D * D, m_high, o_high, o_v, D)
    elif role < 2:
        o_row = tl.arange(0, NUM_BLOCKS * BLOCK_D)
        m_row = o_row < D
        if is_reverse:
            out_ptr = reverse_z_out_ptr
        else:
            out_ptr = forward_z_out_ptr
        pz_ptr += i_bh * F * D * D
        b_ptr += i_bh * F * D
        z = tl.zeros((NUM_BLOCKS * BLOCK_D,), tl.float32)
        for t in tl.range(0, F, num_stages=STAGES):
            f = tl.where(is_reverse, F - 1 - t, t).to(tl.int64)
            g = tl.load(decay_ptr + f)
            pz = load_matrix(pz_ptr + f * D * D, o_row, o_row, D, 1, D).to(tl.float32)
            z = g * (z - tl.sum(pz * z[None, :], 1)) + tl.load(b_ptr + f * D + o_row, mask=m_row, other=0.0)
            if HAS_RESETS:
                keep = tl.where(is_reverse, tl.load(keep_ptr + f), 1.0)
                z = tl.where(keep > 0, z, 0.0)
        tl.store(out_ptr + i_bh * D + o_row, z, mask=m_row)


def summary(
    call: TritonCall,
    transitions: FrameTransitions,
    decay: Tensor,
    direction: Direction,
    resets: tuple[int, ...],
    into: FrameSummary | None = None,
) -> FrameSummary:
    """Return the affine maps of the run, fp32; the reverse transition is the transpose, or zero after a reset.

    They are written to ``into`` if it is given: contiguous fp32 tensors, where the caller will send them from.

    Grid: (B*H, column blocks and z, roles): increments of the directions in use, then transitions. All are fp32 states
    multiplied by operators in the operand dtype, as in phase B.
    """
    p_kv, a, p_z, b = transitions
    batch, heads, _, width, _ = p_kv.shape
    past, future = direction.reads_past, direction.reads_future

    if into is None:

        def fresh(*tail: int) -> Tensor:
            return torch.empty(batch, heads, *tail, dtype=torch.float32, device=decay.device)

        increment = FrameBoundary(
            fresh(width, width) if past else None, fresh(width) if past and call.has_z else None,
            fresh(width, width) if future else None, fresh(width) if future and call.has_z else None,
        )  # fmt: skip
        into = FrameSummary(fresh(width, width), fresh(width, width) if call.has_z else None, increment)
    transition, transition_z, increment = into
    if batch * heads:
        shape = launch_shape("summary", width, call.precision, decay.device)
        columns = triton.cdiv(width, shape.block_v) + (1 if call.has_z else 0)
        roles = past + future + 1 + call.has_z
        with device_guard(decay):
            summary_kernel[batch * heads, columns, roles](
                p_kv, a, *(given(x, decay) for x in (p_z, b)), decay,
                given(keep_factors(resets, p_kv.shape[2], decay.device), decay),
                *(given(x, decay) for x in increment), transition, given(transition_z, decay), p_kv.shape[2],
                D=width, FIRST_ROLE=0 if past else 1, HAS_REVERSE=future, HAS_RESETS=future and bool(resets),
                OPERAND=call.operand, DOT=call.dot, BLOCK_D=shape.block_d, BLOCK_V=shape.block_v,
                NUM_BLOCKS=shape.num_blocks, STAGES=shape.num_stages, **shape.options(),
            )  # fmt: skip
    return into
