"""Phase B: the scan of the states over frames, both directions and both streams in one launch."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn_kernels.frame_gdn.call import TritonCall
from gdn_kernels.frame_gdn.features import load_matrix, operand, store_matrix
from gdn_kernels.frame_gdn.layouts import device_guard, given
from gdn_kernels.frame_gdn.tiles import launch_shape
from gdn_kernels.types import Direction, FrameBoundary, FrameTransitions


class FrameHistories(NamedTuple):
    """States at the F + 1 boundaries of a run, fp32: ``kv [B, H, F+1, D, D]`` and ``z [B, H, F+1, D]`` per direction.

    Index f + 1 is what frame f reads. Forward: index 0 is the entry, index F the exit. Reverse: the other way round.
    """

    forward_kv: Tensor | None
    forward_z: Tensor | None
    reverse_kv: Tensor | None
    reverse_z: Tensor | None

    def exits(self) -> FrameBoundary:
        """Return the exit states, as copies that do not keep the histories alive."""
        ends = (-1, -1, 0, 0)
        return FrameBoundary(*(None if x is None else x[:, :, end].clone() for x, end in zip(self, ends, strict=True)))


@triton.jit
def _apply_step(p_ptr, m_low, m_high, o_low, o_high, D: tl.constexpr, TWO: tl.constexpr, OPERAND: tl.constexpr,
                DOT: tl.constexpr):  # fmt: skip
    """Return ``m - P m`` for the state's column block, held as one or two row blocks."""
    x_low = operand(m_low, OPERAND, DOT)
    low = m_low - tl.dot(load_matrix(p_ptr, o_low, o_low, D, 1, D), x_low, input_precision=DOT)
    high = m_high
    if TWO:
        x_high = operand(m_high, OPERAND, DOT)
        low -= tl.dot(load_matrix(p_ptr, o_low, o_high, D, 1, D), x_high, input_precision=DOT)
        high -= tl.dot(load_matrix(p_ptr, o_high, o_low, D, 1, D), x_low, input_precision=DOT)
        high -= tl.dot(load_matrix(p_ptr, o_high, o_high, D, 1, D), x_high, input_precision=DOT)
    return low, high


# forward  (direction 0):  m <- g_f (m - P_f m) + A_f,  f ascending, index f + 1 holds the result
# reverse  (direction 1):  m <- m_f [g_f (m - P_f m) + A_f],  f descending, index f holds the result
# The state of one column block stays in registers over all frames (fp32); columns are independent. The last program on
# axis 1 scans z, whose product with P_z is a matrix by a vector and done in fp32 on the fly.
#   p_ptr, a_ptr, pz_ptr [B, H, F, D, D], b_ptr [B, H, F, D]     decay_ptr [B, H, F]     keep_ptr [F], the factors m_f
#   *_in_ptr  entry states [B, H, D, D], [B, H, D], contiguous     *_out_ptr  histories [B, H, F+1, D, D], [B, H, F+1, D]
@triton.jit(do_not_specialize=["F"])
def phase_b_kernel(
    p_ptr, a_ptr, pz_ptr, b_ptr, decay_ptr, keep_ptr,
    kv_in_forward_ptr, z_in_forward_ptr, kv_in_reverse_ptr, z_in_reverse_ptr,
    kv_out_forward_ptr, z_out_forward_ptr, kv_out_reverse_ptr, z_out_reverse_ptr, F,
    D: tl.constexpr, HAS_FORWARD: tl.constexpr, HAS_REVERSE: tl.constexpr, HAS_RESETS: tl.constexpr,
    HAS_ENTRY_FORWARD: tl.constexpr, HAS_ENTRY_REVERSE: tl.constexpr, OPERAND: tl.constexpr, DOT: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, NUM_BLOCKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    i_bh = tl.program_id(0).to(tl.int64)
    i_col = tl.program_id(1)
    if HAS_FORWARD:
        is_reverse = tl.program_id(2) == 1
    else:
        is_reverse = tl.program_id(2) == 0
    has_entry = tl.where(is_reverse, 1 if HAS_ENTRY_REVERSE else 0, 1 if HAS_ENTRY_FORWARD else 0) == 1
    decay_ptr += i_bh * F
    TWO: tl.constexpr = NUM_BLOCKS == 2
    if i_col * BLOCK_V < D:
        o_low = tl.arange(0, BLOCK_D)
        o_high = BLOCK_D + tl.arange(0, BLOCK_D)
        o_v = i_col * BLOCK_V + tl.arange(0, BLOCK_V)
        if is_reverse:
            in_ptr, out_ptr = kv_in_reverse_ptr, kv_out_reverse_ptr
        else:
            in_ptr, out_ptr = kv_in_forward_ptr, kv_out_forward_ptr
        p_ptr += i_bh * F * D * D
        a_ptr += i_bh * F * D * D
        out_ptr += i_bh * (F + 1) * D * D
        m_low = tl.zeros((BLOCK_D, BLOCK_V), tl.float32)
        if has_entry:
            m_low = load_matrix(in_ptr + i_bh * D * D, o_low, o_v, D, 1, D)
        m_high = m_low
        first = tl.where(is_reverse, F, 0).to(tl.int64)
        store_matrix(out_ptr + first * D * D, m_low, o_low, o_v, D)
        if TWO:
            if has_entry:
                m_high = load_matrix(in_ptr + i_bh * D * D, o_high, o_v, D, 1, D)
            store_matrix(out_ptr + first * D * D, m_high, o_high, o_v, D)
        for t in tl.range(0, F, num_stages=STAGES):
            f = tl.where(is_reverse, F - 1 - t, t).to(tl.int64)
            g = tl.load(decay_ptr + f)
            low, high = _apply_step(p_ptr + f * D * D, m_low, m_high, o_low, o_high, D, TWO, OPERAND, DOT)
            m_low = g * low + load_matrix(a_ptr + f * D * D, o_low, o_v, D, 1, D).to(tl.float32)
            if TWO:
                m_high = g * high + load_matrix(a_ptr + f * D * D, o_high, o_v, D, 1, D).to(tl.float32)
            if HAS_RESETS:
                keep = tl.where(is_reverse, tl.load(keep_ptr + f), 1.0)
                m_low = tl.where(keep > 0, m_low, 0.0)
                if TWO:
                    m_high = tl.where(keep > 0, m_high, 0.0)
            target = out_ptr + tl.where(is_reverse, f, f + 1) * D * D
            store_matrix(target, m_low, o_low, o_v, D)
            if TWO:
                store_matrix(target, m_high, o_high, o_v, D)
    else:
        o_row = tl.arange(0, NUM_BLOCKS * BLOCK_D)
        m_row = o_row < D
        if is_reverse:
            in_ptr, out_ptr = z_in_reverse_ptr, z_out_reverse_ptr
        else:
            in_ptr, out_ptr = z_in_forward_ptr, z_out_forward_ptr
        pz_ptr += i_bh * F * D * D
        b_ptr += i_bh * F * D
        out_ptr += i_bh * (F + 1) * D
        z = tl.zeros((NUM_BLOCKS * BLOCK_D,), tl.float32)
        if has_entry:
            z = tl.load(in_ptr + i_bh * D + o_row, mask=m_row, other=0.0)
        tl.store(out_ptr + tl.where(is_reverse, F, 0) * D + o_row, z, mask=m_row)
        for t in tl.range(0, F, num_stages=STAGES):
            f = tl.where(is_reverse, F - 1 - t, t).to(tl.int64)
            g = tl.load(decay_ptr + f)
            pz = load_matrix(pz_ptr + f * D * D, o_row, o_row, D, 1, D).to(tl.float32)
            z = g * (z - tl.sum(pz * z[None, :], 1)) + tl.load(b_ptr + f * D + o_row, mask=m_row, other=0.0)
            if HAS_RESETS:
                keep = tl.where(is_reverse, tl.load(keep_ptr + f), 1.0)
                z = tl.where(keep > 0, z, 0.0)
            tl.store(out_ptr + tl.where(is_reverse, f, f + 1) * D + o_row, z, mask=m_row)


def phase_b(
    call: TritonCall,
    transitions: FrameTransitions,
    decay: Tensor,
    direction: Direction,
    resets: tuple[int, ...],
    entry: FrameBoundary,
) -> FrameHistories:
    """Scan the states over all frames from the given entry states (None: zeros); return them at every frame boundary.

    Grid: (B*H, column blocks and z, directions): a chain of F products of D x D by D x BLOCK_V per program.
    Saves: the histories, fp32, of both directions apart: the backward needs each of them.
    """
    p_kv, a, p_z, b = transitions
    batch, heads, frames, width, _ = p_kv.shape

    def history(present: bool, *tail: int) -> Tensor | None:
        shape = (batch, heads, frames + 1, *tail)
        return torch.empty(shape, dtype=torch.float32, device=decay.device) if present else None

    past, future = direction.reads_past, direction.reads_future
    histories = FrameHistories(
        history(past, width, width), history(past and call.has_z, width),
        history(future, width, width), history(future and call.has_z, width),
    )  # fmt: skip
    if batch * heads == 0:
        return histories
    shape = launch_shape("phase_b", width, call.precision, decay.device)
    columns = triton.cdiv(width, shape.block_v)
    grid = (batch * heads, columns + (1 if call.has_z else 0), 2 if past and future else 1)
    with device_guard(decay):
        phase_b_kernel[grid](
            p_kv, a, *(given(x, decay) for x in (p_z, b)), decay,
            given(keep_factors(resets, frames, decay.device), decay),
            *(given(x, decay).contiguous() for x in entry), *(given(x, decay) for x in histories), frames,
            D=width, HAS_FORWARD=past, HAS_REVERSE=future, HAS_RESETS=future and bool(resets),
            HAS_ENTRY_FORWARD=entry.forward_kv is not None, HAS_ENTRY_REVERSE=entry.reverse_kv is not None,
            OPERAND=call.operand, DOT=call.dot, BLOCK_D=shape.block_d, BLOCK_V=shape.block_v,
            NUM_BLOCKS=shape.num_blocks, STAGES=shape.num_stages, **shape.options(),
        )  # fmt: skip
    return histories


@functools.lru_cache(maxsize=64)
def _keep_factors(resets: tuple[int, ...], frames: int, device: torch.device) -> Tensor:
    factors = torch.ones(frames)
    factors[list(resets)] = 0.0
    return factors.to(device)


def keep_factors(resets: tuple[int, ...], frames: int, device: torch.device) -> Tensor | None:
    """Return ``[F]`` fp32, 0 at the frames where the reverse state is dropped; None without any.

    Kept between calls, because making it copies from the host, which a CUDA graph may not.
    """
    return _keep_factors(resets, frames, device) if resets else None
