"""Backward of phase B: the adjoint scans over frames, then the gradients of the frame operators."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn_kernels.frame_gdn.call import TritonCall
from gdn_kernels.frame_gdn.features import frame_index, load_matrix, operand, store_matrix
from gdn_kernels.frame_gdn.layouts import device_guard, given
from gdn_kernels.frame_gdn.phase_b import FrameHistories, _apply_step, keep_factors
from gdn_kernels.frame_gdn.tiles import launch_shape
from gdn_kernels.types import Direction, FrameBoundary, FrameTransitions


# forward (direction 0), f descending:  l = x + C_f;    w = l - P_f l;  dg_f = <w, M_{f-1}>;      x = g_f w
# reverse (direction 1), f ascending:   l = m_f x;      w = l - P_f l;  dg_f = <w, M of frame f>;  x = g_f w + C_f
# x starts as the gradient of the exit state and ends as that of the entry state. l is the gradient of A_f. P is its own
# transpose. Columns are independent but for dg, which is summed over column blocks afterwards.
#   c_ptr [B, H, F, D, D], cz_ptr [B, H, F, D]      kv_*_ptr, z_*_ptr  histories      l_*_ptr as c, lz_*_ptr as cz
#   dexit_* [B, H, D, D], [B, H, D], read if HAS_EXIT       dentry_* the same, written      dg_ptr [2, columns, B*H, F]
@triton.jit(do_not_specialize=["F"])
def phase_b_bwd_kernel(
    p_ptr, pz_ptr, decay_ptr, keep_ptr, c_ptr, cz_ptr,
    kv_forward_ptr, z_forward_ptr, kv_reverse_ptr, z_reverse_ptr,
    dexit_forward_ptr, dexit_z_forward_ptr, dexit_reverse_ptr, dexit_z_reverse_ptr,
    dentry_forward_ptr, dentry_z_forward_ptr, dentry_reverse_ptr, dentry_z_reverse_ptr,
    l_forward_ptr, lz_forward_ptr, l_reverse_ptr, lz_reverse_ptr, dg_ptr, F,
    D: tl.constexpr, HAS_FORWARD: tl.constexpr, HAS_REVERSE: tl.constexpr, HAS_RESETS: tl.constexpr,
    HAS_EXIT_FORWARD: tl.constexpr, HAS_EXIT_REVERSE: tl.constexpr, OPERAND: tl.constexpr, DOT: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, NUM_BLOCKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    i_bh = tl.program_id(0).to(tl.int64)
    i_col = tl.program_id(1)
    if HAS_FORWARD:
        is_reverse = tl.program_id(2) == 1
    else:
        is_reverse = tl.program_id(2) == 0
    TWO: tl.constexpr = NUM_BLOCKS == 2
    decay_ptr += i_bh * F
    i_part = tl.program_id(2) * tl.num_programs(1) + i_col
    dg_ptr += (i_part.to(tl.int64) * tl.num_programs(0) + i_bh) * F
    has_exit = tl.where(is_reverse, 1 if HAS_EXIT_REVERSE else 0, 1 if HAS_EXIT_FORWARD else 0) == 1
    if i_col * BLOCK_V < D:
        o_low = tl.arange(0, BLOCK_D)
        o_high = BLOCK_D + tl.arange(0, BLOCK_D)
        o_v = i_col * BLOCK_V + tl.arange(0, BLOCK_V)
        if is_reverse:
            state_ptr, exit_ptr, entry_ptr, l_ptr = kv_reverse_ptr, dexit_reverse_ptr, dentry_reverse_ptr, l_reverse_ptr
        else:
            state_ptr, exit_ptr, entry_ptr, l_ptr = kv_forward_ptr, dexit_forward_ptr, dentry_forward_ptr, l_forward_ptr
        p_ptr += i_bh * F * D * D
        c_ptr += i_bh * F * D * D
        l_ptr += i_bh * F * D * D
        state_ptr += i_bh * (F + 1) * D * D
        x_low = tl.zeros((BLOCK_D, BLOCK_V), tl.float32)
        x_high = x_low
        if has_exit:
            x_low = load_matrix(exit_ptr + i_bh * D * D, o_low, o_v, D, 1, D)
            if TWO:
                x_high = load_matrix(exit_ptr + i_bh * D * D, o_high, o_v, D, 1, D)
        for t in tl.range(0, F, num_stages=STAGES):
            f = tl.where(is_reverse, t, F - 1 - t).to(tl.int64)
            g = tl.load(decay_ptr + f)
            before = tl.where(is_reverse, 0.0, 1.0)
            keep = 1.0
            if HAS_RESETS:
                keep = tl.where(is_reverse, tl.load(keep_ptr + f), 1.0)
            at = state_ptr + tl.where(is_reverse, f + 1, f) * D * D
            c_low = load_matrix(c_ptr + f * D * D, o_low, o_v, D, 1, D)
            l_low = keep * x_low + before * c_low
            l_high = l_low
            if TWO:
                c_high = load_matrix(c_ptr + f * D * D, o_high, o_v, D, 1, D)
                l_high = keep * x_high + before * c_high
            store_matrix(l_ptr + f * D * D, l_low, o_low, o_v, D)
            w_low, w_high = _apply_step(p_ptr + f * D * D, l_low, l_high, o_low, o_high, D, TWO, OPERAND, DOT)
            dg = tl.sum(w_low * load_matrix(at, o_low, o_v, D, 1, D))
            x_low = g * w_low + (1.0 - before) * c_low
            if TWO:
                store_matrix(l_ptr + f * D * D, l_high, o_high, o_v, D)
                dg += tl.sum(w_high * load_matrix(at, o_high, o_v, D, 1, D))
                x_high = g * w_high + (1.0 - before) * c_high
            tl.store(dg_ptr + f, dg)
        store_matrix(entry_ptr + i_bh * D * D, x_low, o_low, o_v, D)
        if TWO:
            store_matrix(entry_ptr + i_bh * D * D, x_high, o_high, o_v, D)
    else:
        o_row = tl.arange(0, NUM_BLOCKS * BLOCK_D)
        m_row = o_row < D
        if is_reverse:
            state_ptr, exit_ptr, entry_ptr, l_ptr = (
                z_reverse_ptr,
                dexit_z_reverse_ptr,
                dentry_z_reverse_ptr,
                lz_reverse_ptr,
            )
        else:
            state_ptr, exit_ptr, entry_ptr, l_ptr = (
                z_forward_ptr,
                dexit_z_forward_ptr,
                dentry_z_forward_ptr,
                lz_forward_ptr,
            )
        pz_ptr += i_bh * F * D * D
        cz_ptr += i_bh * F * D
        l_ptr += i_bh * F * D
        state_ptr += i_bh * (F + 1) * D
        x = tl.zeros((NUM_BLOCKS * BLOCK_D,), tl.float32)
        if has_exit:
            x = tl.load(exit_ptr + i_bh * D + o_row, mask=m_row, other=0.0)
        for t in tl.range(0, F, num_stages=STAGES):
            f = tl.where(is_reverse, t, F - 1 - t).to(tl.int64)
            g = tl.load(decay_ptr + f)
            before = tl.where(is_reverse, 0.0, 1.0)
            keep = 1.0
            if HAS_RESETS:
                keep = tl.where(is_reverse, tl.load(keep_ptr + f), 1.0)
            c = tl.load(cz_ptr + f * D + o_row, mask=m_row, other=0.0)
            lz = keep * x + before * c
            tl.store(l_ptr + f * D + o_row, lz, mask=m_row)
            pz = load_matrix(pz_ptr + f * D * D, o_row, o_row, D, 1, D).to(tl.float32)
            w = lz - tl.sum(pz * lz[None, :], 1)
            state = tl.load(state_ptr + tl.where(is_reverse, f + 1, f) * D + o_row, mask=m_row, other=0.0)
            tl.store(dg_ptr + f, tl.sum(w * state))
            x = g * w + (1.0 - before) * c
        tl.store(entry_ptr + i_bh * D + o_row, x, mask=m_row)


# G = dP + dP' = -g sum over directions of (L M' + M L'),   dA = sum of L      (L, M of one frame, M the state before)
# One program per frame, head and pair (i, j) of blocks. Transposes come from addressing, none from registers.
#   l_*_ptr [B, H, F, D, D]     kv_*_ptr [B, H, F+1, D, D]     g_ptr, da_ptr [B, H, F, D, D] operand dtype
@triton.jit(do_not_specialize=["F", "H"])
def operators_bwd_kernel(
    l_forward_ptr, l_reverse_ptr, kv_forward_ptr, kv_reverse_ptr, decay_ptr, g_ptr, da_ptr, F, H,
    D: tl.constexpr, HAS_FORWARD: tl.constexpr, HAS_REVERSE: tl.constexpr, OPERAND: tl.constexpr, DOT: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, NUM_BLOCKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    i_b, i_h, i_f = frame_index(tl.program_id(0), F, H)
    i_row = tl.program_id(1) // NUM_BLOCKS
    i_col = tl.program_id(1) % NUM_BLOCKS
    i_frame = (i_b * H + i_h) * F + i_f
    i_state = (i_b * H + i_h) * (F + 1) + i_f
    o_row = i_row * BLOCK_D + tl.arange(0, BLOCK_D)
    o_col = i_col * BLOCK_D + tl.arange(0, BLOCK_D)
    g = tl.zeros((BLOCK_D, BLOCK_D), tl.float32)
    # a loop per direction: four products into one accumulator in one body become a trap on sm_100
    if HAS_FORWARD:
        for k in tl.range(0, D, BLOCK_V, num_stages=STAGES):
            o_k = k + tl.arange(0, BLOCK_V)
            g = _outer(
                l_forward_ptr + i_frame * D * D, kv_forward_ptr + i_state * D * D, g, o_row, o_col, o_k, D, OPERAND, DOT
            )
    if HAS_REVERSE:
        for k in tl.range(0, D, BLOCK_V, num_stages=STAGES):
            o_k = k + tl.arange(0, BLOCK_V)
            at = kv_reverse_ptr + (i_state + 1) * D * D
            g = _outer(l_reverse_ptr + i_frame * D * D, at, g, o_row, o_col, o_k, D, OPERAND, DOT)
    store_matrix(g_ptr + i_frame * D * D, -tl.load(decay_ptr + i_frame) * g, o_row, o_col, D)
    if HAS_FORWARD:
        da = load_matrix(l_forward_ptr + i_frame * D * D, o_row, o_col, D, 1, D)
        if HAS_REVERSE:
            da += load_matrix(l_reverse_ptr + i_frame * D * D, o_row, o_col, D, 1, D)
    else:
        da = load_matrix(l_reverse_ptr + i_frame * D * D, o_row, o_col, D, 1, D)
    store_matrix(da_ptr + i_frame * D * D, da, o_row, o_col, D)


@triton.jit
def _outer(l_ptr, m_ptr, g, o_row, o_col, o_k, D: tl.constexpr, OPERAND: tl.constexpr, DOT: tl.constexpr):
    """Add ``L M' + M L'`` over the value channels ``o_k``."""
    l_row = operand(load_matrix(l_ptr, o_row, o_k, D, 1, D), OPERAND, DOT)
    m_row = operand(load_matrix(m_ptr, o_row, o_k, D, 1, D), OPERAND, DOT)
    l_col = operand(load_matrix(l_ptr, o_k, o_col, 1, D, D), OPERAND, DOT)
    m_col = operand(load_matrix(m_ptr, o_k, o_col, 1, D, D), OPERAND, DOT)
    g = tl.dot(l_row, m_col, g, input_precision=DOT)
    return tl.dot(m_row, l_col, g, input_precision=DOT)


class ScanGradients(NamedTuple):
    """What the adjoint scans leave: ``l_* [B, H, F, D, D]``, ``lz_* [B, H, F, D]`` per direction, ``ddecay``, entries."""

    l_forward: Tensor | None
    lz_forward: Tensor | None
    l_reverse: Tensor | None
    lz_reverse: Tensor | None
    ddecay: Tensor
    entry: FrameBoundary


def phase_b_bwd(
    call: TritonCall,
    transitions: FrameTransitions,
    decay: Tensor,
    direction: Direction,
    resets: tuple[int, ...],
    histories: FrameHistories,
    c: Tensor,
    cz: Tensor | None,
    exit_gradient: FrameBoundary,
) -> ScanGradients:
    """Sweep the gradients of the states against the scans, from the gradients of the exit states (None: zero).

    Grid: (B*H, column blocks and z, directions). Needs: P, P_z, histories of both directions apart.
    ``ddecay`` is one fp32 contraction, never a quotient: right at decay 0, exactly 0 where the incoming state is 0.
    """
    p_kv, _, p_z, _ = transitions
    batch, heads, frames, width, _ = p_kv.shape
    past, future = direction.reads_past, direction.reads_future

    def fresh(like: Tensor | None, present: bool, *shape: int) -> Tensor | None:
        return torch.empty(shape, dtype=torch.float32, device=decay.device) if present and like is not None else None

    lead = (batch, heads)
    gradients = [
        fresh(x, present, *lead, frames, *tail)
        for x, present, tail in ((c, past, (width, width)), (cz, past, (width,)), (c, future, (width, width)),
                                 (cz, future, (width,)))
    ]  # fmt: skip
    entry = FrameBoundary(
        fresh(c, past, *lead, width, width), fresh(cz, past, *lead, width),
        fresh(c, future, *lead, width, width), fresh(cz, future, *lead, width),
    )  # fmt: skip
    shape = launch_shape("phase_b_bwd", width, call.precision, decay.device)
    directions = 2 if past and future else 1
    columns = triton.cdiv(width, shape.block_v) + (1 if call.has_z else 0)
    dg = torch.empty(directions * columns, batch, heads, frames, dtype=torch.float32, device=decay.device)
    exits = _both_or_none(exit_gradient, histories)
    if batch * heads:
        with device_guard(decay):
            phase_b_bwd_kernel[batch * heads, columns, directions](
                p_kv, given(p_z, decay), decay, given(keep_factors(resets, frames, decay.device), decay), c,
                *(given(x, decay) for x in (cz, *histories, *exits, *entry, *gradients)), dg, frames,
                D=width, HAS_FORWARD=past, HAS_REVERSE=future, HAS_RESETS=future and bool(resets),
                HAS_EXIT_FORWARD=exits.forward_kv is not None, HAS_EXIT_REVERSE=exits.reverse_kv is not None,
                OPERAND=call.operand, DOT=call.dot, BLOCK_D=shape.block_d, BLOCK_V=shape.block_v,
                NUM_BLOCKS=shape.num_blocks, STAGES=shape.num_stages, **shape.options(),
            )  # fmt: skip
    l_forward, lz_forward, l_reverse, lz_reverse = gradients
    return ScanGradients(l_forward, lz_forward, l_reverse, lz_reverse, dg.sum(0), entry)


def _both_or_none(exit_gradient: FrameBoundary, histories: FrameHistories) -> FrameBoundary:
    """Fill in zeros where one stream of a direction has an exit gradient and the other has none."""

    def pair(kv: Tensor | None, z: Tensor | None, states: tuple[Tensor | None, Tensor | None]) -> list[Tensor | None]:
        if kv is None and z is None:
            return [None, None]
        given_or_zero = [
            torch.zeros_like(state[:, :, 0]) if x is None and state is not None else x
            for x, state in zip((kv, z), states, strict=True)
        ]
        return [None if x is None else x.float().contiguous() for x in given_or_zero]

    forward = pair(exit_gradient.forward_kv, exit_gradient.forward_z, (histories.forward_kv, histories.forward_z))
    reverse = pair(exit_gradient.reverse_kv, exit_gradient.reverse_z, (histories.reverse_kv, histories.reverse_z))
    return FrameBoundary(*forward, *reverse)


def operators_bwd(
    call: TritonCall, decay: Tensor, histories: FrameHistories, gradients: ScanGradients
) -> tuple[Tensor, Tensor]:
    """Return ``dP + dP'`` and ``dA``, ``[B, H, F, D, D]`` each in the operand dtype, summed over the directions.

    Grid: (B*F*H, pairs of channel blocks).
    """
    some = gradients.l_forward if gradients.l_forward is not None else gradients.l_reverse
    assert some is not None
    batch, heads, frames, width, _ = some.shape
    g, da = (torch.empty(some.shape, dtype=call.operand_dtype, device=some.device) for _ in range(2))
    if some.numel():
        shape = launch_shape("operators_bwd", width, call.precision, decay.device)
        with device_guard(decay):
            operators_bwd_kernel[batch * frames * heads, shape.num_blocks**2](
                *(given(x, decay) for x in (gradients.l_forward, gradients.l_reverse)),
                *(given(x, decay) for x in (histories.forward_kv, histories.reverse_kv)), decay, g, da, frames, heads,
                D=width, HAS_FORWARD=histories.forward_kv is not None, HAS_REVERSE=histories.reverse_kv is not None,
                OPERAND=call.operand, DOT=call.dot, BLOCK_D=shape.block_d, BLOCK_V=shape.block_v,
                NUM_BLOCKS=shape.num_blocks, STAGES=shape.num_stages, **shape.options(),
            )  # fmt: skip
    return g, da
