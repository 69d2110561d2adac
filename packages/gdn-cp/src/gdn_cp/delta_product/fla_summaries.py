"""Affine summaries of a shard on FLA's kernels: of its boundary fragment, or of every batch row; and their fold."""

from __future__ import annotations

import torch
from torch import Tensor

from gdn_cp.chunkwise import CPBackwardPackedSummary, CPBackwardSummary, CPForwardPackedSummary, CPForwardSummary
from gdn_cp.delta_product import fla_functions
from gdn_cp.delta_product.fla_functions import CHUNK, WIDEST_KEY


def _compute_fragment_summary(k: Tensor, w: Tensor, u: Tensor, g: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Return ``[b | M]``, fp32: ``[HV, K, V + K]`` of the last fragment, or of every batch row with B in front."""
    _check_summary_operands(k, u)
    batch, rows, _, width = k.shape
    summary = k.new_zeros(batch, u.shape[2], width, u.shape[3] + width, dtype=torch.float32)
    if cu_seqlens is not None:
        bounds, target = cu_seqlens[-2:].clone(), summary[0]
    else:
        bounds, target = rows * torch.arange(batch + 1, dtype=torch.int32, device=k.device), summary
        k, w, u = (x.reshape(1, -1, *x.shape[2:]) for x in (k, w, u))
        g = None if g is None else g.reshape(1, -1, g.shape[2])
    fla_functions.load().chunk_cp_fwd_h(
        k=k, w=w, u=u, hm=target, g=g, cu_seqlens=bounds, chunk_size=CHUNK, multi_seqs=cu_seqlens is None
    )
    return target


def _compute_backward_fragment_summary(
    q: Tensor, k: Tensor, w: Tensor, g: Tensor | None, do: Tensor, dv: Tensor, scale: float, cu_seqlens: Tensor | None
) -> Tensor:
    """Return ``[gamma | M^T]``, fp32: of the first fragment, or of every batch row in one launch, B in front."""
    _check_summary_operands(k, do)
    batch, heads, width = k.shape[0], do.shape[2], k.shape[3]
    summary = k.new_zeros(batch, heads, width, do.shape[3] + width, dtype=torch.float32)
    if cu_seqlens is None:  # the kernel knows one sequence: batch rows become heads, which keeps groups together
        q, k, w, do, dv = (_rows_to_heads(x) for x in (q, k, w, do, dv))
        g = None if g is None else _rows_to_heads(g)
    fla_functions.load().chunk_cp_bwd_dh(
        q=q, k=k, w=w, do=do, dv=dv, dhm=summary.view(-1, *summary.shape[2:]), g=g, scale=scale,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens[:2].clone(), chunk_size=CHUNK,
    )  # fmt: skip
    return summary if cu_seqlens is None else summary[0]


def _rows_to_heads(x: Tensor) -> Tensor:
    """Return ``[1, N, B*heads, ...]`` from ``[B, N, heads, ...]``, contiguous."""
    return x.transpose(0, 1).reshape(1, x.shape[1], -1, *x.shape[3:]).contiguous()


def _check_summary_operands(k: Tensor, values: Tensor) -> None:
    if k.shape[1] != values.shape[1]:
        raise ValueError(f"keys and values must have as many rows, got {k.shape[1]} and {values.shape[1]}")
    if values.shape[2] % k.shape[2]:
        raise ValueError(f"HV must be a multiple of H = {k.shape[2]}, got {values.shape[2]}")
    if k.shape[3] > WIDEST_KEY:
        raise ValueError(f"K must be <= {WIDEST_KEY}, got {k.shape[3]}")


def resting_summary(shape: tuple[int, ...], needed: bool, like: Tensor) -> Tensor:
    """Return ``[0 | I]`` of states ``[..., K, V]``, the summary of no tokens; zeros if nobody reads it."""
    *lead, width, value_width = shape
    summary = like.new_zeros(*lead, width, value_width + width, dtype=torch.float32)
    if needed:
        summary[..., value_width:] = torch.eye(width, dtype=torch.float32, device=like.device)
    return summary


def take_in(summary: Tensor, states: Tensor) -> None:
    """Let the summary start from states, in place: ``b <- b + M S``."""
    width = states.shape[-1]
    entering = torch.zeros_like(summary)
    entering[..., :width] = states
    started = torch.empty_like(states, dtype=torch.float32, memory_format=torch.contiguous_format)
    summary[..., :width] = _merge_affine_summaries(torch.stack([entering, summary]), started, True)


def _merge_affine_summaries(packed_summaries: Tensor, output: Tensor, forward: bool) -> Tensor:
    """Fold summaries from zero into ``output``: ranks ascending in forward, else descending; none give zero."""
    count = packed_summaries.shape[0]
    if not count:
        return output.zero_()
    if output.numel():
        flat = packed_summaries.reshape(count, -1, *packed_summaries.shape[-2:])
        fla_functions.load().chunk_cp_merge(
            h=output, ag_hm=flat, num_ranks=count, rank=count if forward else -1, forward=forward
        )  # fmt: skip
    return output


def _merge_forward_summaries(summaries: CPForwardSummary, output: Tensor) -> Tensor:
    """Fold the summaries of preceding ranks into ``output``."""
    if not isinstance(summaries, CPForwardPackedSummary):
        raise TypeError(f"summaries must be a CPForwardPackedSummary, got {type(summaries).__name__}")
    return _merge_affine_summaries(summaries.packed, output, True)


def _merge_backward_summaries(summaries: CPBackwardSummary, output_grad: Tensor) -> Tensor:
    """Fold the adjoint summaries of following ranks into ``output_grad``."""
    if not isinstance(summaries, CPBackwardPackedSummary):
        raise TypeError(f"summaries must be a CPBackwardPackedSummary, got {type(summaries).__name__}")
    return _merge_affine_summaries(summaries.packed, output_grad, False)
