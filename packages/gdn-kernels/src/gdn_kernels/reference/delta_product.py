"""Gated delta product in plain torch, one Householder step after another, written as its equations read.

Letters: B batch, T tokens, R steps per token, H heads of q and k, G value heads per head (HV = H*G), K and V widths,
N sequences. The loop is over tokens and steps; sequences of equal length are batched, packed ones run one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gdn_kernels.types import DeltaProductResult


def delta_product_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    num_householder: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> DeltaProductResult:
    """Run the recurrence, differentiable by autograd in every floating input.

        S   <- exp(g_t) S                                   once per token
        S   <- S + beta_tj k_tj' (v_tj - k_tj S)            j = 0 ... R-1, in order
        o_t  = scale q_t S                                  after the last step

    Args:
        q: ``[B, T, H, K]``.
        k: ``[B, T*R, H, K]``, row t*R + j is step j of token t.
        v: ``[B, T*R, HV, V]``.
        beta: ``[B, T*R, HV]``.
        g: ``[B, T, HV]``, natural log of the decay; None is no decay.
        num_householder: R.
        scale: None is ``K ** -0.5``.
        initial_state: ``[N, HV, K, V]``; None is zero.
        output_final_state: return the state after the last token of every sequence.
        cu_seqlens: ``[N+1]`` token offsets of packed sequences, for B = 1; None is one sequence per batch row.

    Returns:
        DeltaProductResult: ``output [B, T, HV, V]`` in the dtype of q, ``final_state`` in fp32 (fp64 for fp64 q).
            Nothing is checked; arithmetic is in the dtype of the state.

    Cost: T*R dependent steps of 4 K V flops per value head; autograd keeps the state after each of them.
    """
    output_dtype = q.dtype
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, tokens, heads, width = q.shape
    value_heads, value_width = v.shape[2:]
    group = value_heads // heads
    scale = width**-0.5 if scale is None else scale
    bounds = [0, tokens] if cu_seqlens is None else [int(bound) for bound in cu_seqlens]
    count = batch if cu_seqlens is None else len(bounds) - 1

    steps, grouped = (tokens, num_householder), (heads, group)
    q = q.to(dtype) * scale
    k = torch.unflatten(k.to(dtype), 1, steps)[:, :, :, :, None]  # [B, T, R, H, 1, K]
    v = torch.unflatten(torch.unflatten(v.to(dtype), 1, steps), 3, grouped)  # [B, T, R, H, G, V]
    beta = torch.unflatten(torch.unflatten(beta.to(dtype), 1, steps), 3, grouped)  # [B, T, R, H, G]
    decay = None if g is None else torch.unflatten(g.to(dtype).exp(), 2, grouped)  # [B, T, H, G]
    if initial_state is None:
        initial_state = q.new_zeros(count, value_heads, width, value_width)
    entry = torch.unflatten(initial_state.to(dtype), 1, grouped)  # [N, H, G, K, V]

    outputs, finals = [], []
    for sequence, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        state = entry if cu_seqlens is None else entry[sequence : sequence + 1]
        for t in range(start, stop):
            if decay is not None:
                state = decay[:, t, ..., None, None] * state
            for j in range(num_householder):
                key = k[:, t, j]
                error = v[:, t, j] - (key[..., None] * state).sum(-2)
                state = state + key[..., None] * (beta[:, t, j, ..., None] * error)[..., None, :]
            outputs.append((q[:, t, :, None, :, None] * state).sum(-2))
        finals.append(state)
    output = torch.stack(outputs, dim=1).flatten(2, 3) if outputs else q.new_zeros(batch, 0, value_heads, value_width)
    final = torch.cat(finals).flatten(1, 2) if finals else initial_state.to(dtype)
    return DeltaProductResult(output.to(output_dtype), final if output_final_state else None)
