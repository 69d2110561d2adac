"""Fold of affine summaries: from the maps of several runs of frames to the states between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn_kernels.frame_gdn.layouts import device_guard, given
from gdn_kernels.frame_gdn.phase_b import keep_factors

_BLOCK_V = 16


class FoldLine(NamedTuple):
    """Affine maps to be applied one after the other to the states of up to two streams.

    Attributes:
        transitions: per stream ``[P, B, H, D, D]`` fp32, contiguous but for the first dim.
        increments: per stream ``[P, B, H, D, V]`` or, for vector states, ``[P, B, H, D]``, likewise.
        starts: per stream the state before the first map, in the shape of one increment; None is zero.
        order: which maps are applied, first to last.
        transposed: apply the transposes of the transitions.
        dropped: maps whose transition counts as zero.
    """

    transitions: Sequence[Tensor]
    increments: Sequence[Tensor]
    starts: Sequence[Tensor | None]
    order: range
    transposed: bool = False
    dropped: tuple[int, ...] = ()


@triton.jit
def _columns_of(e_ptr, o_row, k, D: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load columns ``k ...`` of a transition, or of its transpose; zeros outside."""
    o_k = k + tl.arange(0, BLOCK_K)
    if TRANSPOSED:
        offsets = o_k[None, :] * D + o_row[:, None]
    else:
        offsets = o_row[:, None] * D + o_k[None, :]
    return tl.load(e_ptr + offsets, mask=(o_row < D)[:, None] & (o_k < D)[None, :], other=0.0)


# out[0] = start,  out[t + 1] = keep_r E_r out[t] + h_r  with r = first + t step; E_r' if TRANSPOSED.
# One program per line, head and column block of the matrix stream, or for the whole vector stream, walks all maps. It
# holds all rows of a state as an accumulator; what it multiplies is read back from where it has just been written. The
# first map from zero is a copy.
#   e_ptr [P, B*H, D, D] fp32, se between maps     h_ptr [P, B*H, D, V] fp32, sh between maps     keep_ptr [P]
#   se and sh in units of ALIGN elements: vector loads need that factor
#   start_ptr [B*H, D, V] fp32, read if HAS_START   out_ptr [count + 1, B*H, D, V] fp32
@triton.jit
def _walk(
    e_ptr, h_ptr, start_ptr, keep_ptr, out_ptr, i_col, count, first, step, se, sh,
    D: tl.constexpr, V: tl.constexpr, HAS_START: tl.constexpr, HAS_KEEP: tl.constexpr, TRANSPOSED: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    i_bh = tl.program_id(0).to(tl.int64)
    se = se.to(tl.int64) * ALIGN
    sh = sh.to(tl.int64) * ALIGN
    stride_out = tl.num_programs(0).to(tl.int64) * D * V
    o_row = tl.arange(0, BLOCK_D)
    o_v = i_col * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = (o_row < D)[:, None] & (o_v < V)[None, :]
    offsets = o_row[:, None] * V + o_v[None, :]
    e_ptr += i_bh * D * D
    h_ptr += i_bh * D * V
    out_ptr += i_bh * D * V
    x = tl.zeros((BLOCK_D, BLOCK_V), tl.float32)
    if HAS_START:
        x = tl.load(start_ptr + i_bh * D * V + offsets, mask=mask, other=0.0)
    tl.store(out_ptr + offsets, x, mask=mask)
    begin = 0
    if not HAS_START:
        begin = 1
        if count > 0:
            x = tl.load(h_ptr + first * sh + offsets, mask=mask, other=0.0)
            tl.store(out_ptr + stride_out + offsets, x, mask=mask)
    for t in range(begin, count):
        tl.debug_barrier()  # what other threads of this program wrote is read below
        r = first + t * step
        e_map = e_ptr + r * se
        state_ptr = out_ptr + t * stride_out
        total = tl.zeros((BLOCK_D, BLOCK_V), tl.float32)
        products = tl.zeros((BLOCK_D, BLOCK_K), tl.float32)
        e = _columns_of(e_map, o_row, 0, D, TRANSPOSED, BLOCK_K)
        for k in tl.range(0, D, BLOCK_K, num_stages=1):
            following = _columns_of(e_map, o_row, k + BLOCK_K, D, TRANSPOSED, BLOCK_K)  # in flight during the product
            o_k = k + tl.arange(0, BLOCK_K)
            if V == 1:
                x_k = tl.load(state_ptr + o_k, mask=o_k < D, other=0.0)
                products += e * x_k[None, :]
            else:
                m_x = (o_k < D)[:, None] & (o_v < V)[None, :]
                x_k = tl.load(state_ptr + o_k[:, None] * V + o_v[None, :], mask=m_x, other=0.0)
                total = tl.dot(e, x_k, total, input_precision="ieee")  # this carries the memory of the clip
            e = following
        if V == 1:
            total = tl.sum(products, 1)[:, None]
        if HAS_KEEP:
            total = tl.where(tl.load(keep_ptr + r) > 0, total, 0.0)
        total += tl.load(h_ptr + r * sh + offsets, mask=mask, other=0.0)
        tl.store(out_ptr + (t + 1) * stride_out + offsets, total, mask=mask)


@triton.jit
def _walk_stream(
    e_ptr, ez_ptr, h_ptr, hz_ptr, start_ptr, start_z_ptr, keep_ptr, out_ptr, out_z_ptr, count, first, step,
    se, sez, sh, shz,
    D: tl.constexpr, V: tl.constexpr, HAS_START: tl.constexpr, HAS_START_Z: tl.constexpr, HAS_KEEP: tl.constexpr,
    TRANSPOSED: tl.constexpr, ALIGN: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    i_col = tl.program_id(1)
    if i_col * BLOCK_V < V:
        _walk(
            e_ptr, h_ptr, start_ptr, keep_ptr, out_ptr, i_col, count, first, step, se, sh,
            D, V, HAS_START, HAS_KEEP, TRANSPOSED, ALIGN, BLOCK_D, BLOCK_K, BLOCK_V,
        )  # fmt: skip
    else:
        _walk(
            ez_ptr, hz_ptr, start_z_ptr, keep_ptr, out_z_ptr, 0, count, first, step, sez, shz,
            D, 1, HAS_START_Z, HAS_KEEP, TRANSPOSED, ALIGN, BLOCK_D, BLOCK_K, 1,
        )  # fmt: skip


# Grid: (heads, column blocks of the matrix stream and one program for the vector stream, lines). V is 0 without the
# matrix stream. The second line's arguments have the number 1.
@triton.jit(
    do_not_specialize=["count_0", "first_0", "step_0", "count_1", "first_1", "step_1", "se_0", "sez_0", "sh_0",
                       "shz_0", "se_1", "sez_1", "sh_1", "shz_1"]
)  # fmt: skip
def fold_kernel(
    e_0_ptr, ez_0_ptr, h_0_ptr, hz_0_ptr, start_0_ptr, start_z_0_ptr, keep_0_ptr, out_0_ptr, out_z_0_ptr,
    e_1_ptr, ez_1_ptr, h_1_ptr, hz_1_ptr, start_1_ptr, start_z_1_ptr, keep_1_ptr, out_1_ptr, out_z_1_ptr,
    count_0, first_0, step_0, se_0, sez_0, sh_0, shz_0, count_1, first_1, step_1, se_1, sez_1, sh_1, shz_1,
    D: tl.constexpr, V: tl.constexpr, HAS_SECOND: tl.constexpr,
    HAS_START_0: tl.constexpr, HAS_START_Z_0: tl.constexpr, HAS_KEEP_0: tl.constexpr, TRANSPOSED_0: tl.constexpr,
    HAS_START_1: tl.constexpr, HAS_START_Z_1: tl.constexpr, HAS_KEEP_1: tl.constexpr, TRANSPOSED_1: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    if tl.program_id(2) == 0:
        _walk_stream(
            e_0_ptr, ez_0_ptr, h_0_ptr, hz_0_ptr, start_0_ptr, start_z_0_ptr, keep_0_ptr, out_0_ptr, out_z_0_ptr,
            count_0, first_0, step_0, se_0, sez_0, sh_0, shz_0,
            D, V, HAS_START_0, HAS_START_Z_0, HAS_KEEP_0, TRANSPOSED_0, ALIGN, BLOCK_D, BLOCK_K, BLOCK_V,
        )  # fmt: skip
    elif HAS_SECOND:
        _walk_stream(
            e_1_ptr, ez_1_ptr, h_1_ptr, hz_1_ptr, start_1_ptr, start_z_1_ptr, keep_1_ptr, out_1_ptr, out_z_1_ptr,
            count_1, first_1, step_1, se_1, sez_1, sh_1, shz_1,
            D, V, HAS_START_1, HAS_START_Z_1, HAS_KEEP_1, TRANSPOSED_1, ALIGN, BLOCK_D, BLOCK_K, BLOCK_V,
        )  # fmt: skip


def fold_lines(lines: Sequence[FoldLine]) -> list[list[Tensor]]:
    """Apply the maps of one or two lines; return per line and stream the states before, between and after them.

    The streams of a line are a matrix stream, a vector stream, or both in this order; the same for all lines, on the
    same heads. One launch. Grid: (B*H, column blocks and the vector, lines): a chain of at most ``len(order)`` products
    of D x D by D x 16 per program, fp32.

    Returns:
        list[list[Tensor]]: per line and stream ``[len(order) + 1, B, H, D, V]`` or ``[len(order) + 1, B, H, D]``, fp32.
    """
    _, batch, heads, width, _ = lines[0].transitions[0].shape
    states = [
        [torch.empty(len(line.order) + 1, *h.shape[1:], dtype=torch.float32, device=h.device) for h in line.increments]
        for line in lines
    ]
    if batch * heads * width == 0:
        return states
    device, stand_in = lines[0].transitions[0].device, lines[0].transitions[0]
    columns = [1 if h.ndim == 4 else h.shape[4] for h in lines[0].increments]
    wide = max(columns) if max(columns) > 1 else 0
    pointers: list[Tensor] = []
    orders: list[list[int]] = []
    strides: list[int] = []
    flags: dict[str, bool] = {}
    for i in range(2):
        line, out = lines[min(i, len(lines) - 1)], states[min(i, len(lines) - 1)]
        streams: list[list[Tensor | None]] = [[None, None], [None, None], [None, None], [None, None]]
        for x in zip(line.transitions, line.increments, line.starts, out, strict=True):
            e, h, start, states_of = x
            slot = 0 if wide and h.ndim == 5 and h.shape[4] > 1 else 1
            streams[0][slot], streams[1][slot] = _rows_contiguous(e), _rows_contiguous(h)
            streams[2][slot] = None if start is None else start.contiguous()
            streams[3][slot] = states_of
        keep = keep_factors(line.dropped, len(line.transitions[0]), device)
        transitions, increments, starts, outs = streams
        pointers += [given(x, stand_in) for x in (*transitions, *increments, *starts, keep, *outs)]
        orders.append([len(line.order), line.order.start, line.order.step])
        strides += [0 if x is None else x.stride(0) for x in (*transitions, *increments)]
        flags |= {
            f"HAS_START_{i}": starts[0] is not None, f"HAS_START_Z_{i}": starts[1] is not None,
            f"HAS_KEEP_{i}": bool(line.dropped), f"TRANSPOSED_{i}": line.transposed,
        }  # fmt: skip
    align = min(4, *(x & -x for x in strides if x)) if any(strides) else 4
    block_d = max(16, 1 << (width - 1).bit_length())
    units = [x // align for x in strides]
    scalars = (*orders[0], *units[:4], *orders[1], *units[4:])
    grid = (batch * heads, triton.cdiv(wide, _BLOCK_V) + (1 if 1 in columns else 0), len(lines))
    with device_guard(stand_in):
        fold_kernel[grid](
            *pointers, *scalars, D=width, V=wide, HAS_SECOND=len(lines) > 1, **flags,
            ALIGN=align, BLOCK_D=block_d, BLOCK_K=min(32, block_d), BLOCK_V=_BLOCK_V,
            num_warps=8 if block_d > 128 else 4,
        )  # fmt: skip
    return states


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x[0].is_contiguous() else x.contiguous()


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

    The one-stream, one-line form of `fold_lines`; arguments as in `FoldLine`.

    Returns:
        Tensor: ``[len(order) + 1, B, H, D, V]`` or ``[len(order) + 1, B, H, D]``, fp32.
    """
    ((states,),) = fold_lines([FoldLine((transitions,), (increments,), (start,), order, transposed, dropped)])
    return states
