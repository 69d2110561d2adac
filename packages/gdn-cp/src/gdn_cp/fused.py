"""Published fused functions over ranks, with the published arguments, conventions and defaults.

Inside they run the frames through the stages of gdn-kernels with one exchange per pass (`gdn_cp.fused_pass`). The two
autograd Functions that the published wrappers are made of are kept for code that imports them (`gdn_cp.fused_steps`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from gdn_cp.collectives import ProcessGroup
from gdn_cp.context import CPContext, as_context
from gdn_cp.frame_scan import run_scan
from gdn_cp.fused_pass import FusedCall, fused_plan, mask_idle_frames, run_fused
from gdn_cp.fused_steps import (
    _CpFusedGdnOutput,
    _CpFusedGdnPrep,
    check_tables,
    half_tables,
    require_precision,
    require_tokens,
)
from gdn_cp.handshake import Terms, agree
from gdn_cp.scan_plan import active_frames, over_ranks
from gdn_kernels import checks
from gdn_kernels.frame_gdn.op import frame_gdn_arguments, numerator_arguments
from gdn_kernels.types import FrameInputs, FrameOptions

_T = TypeVar("_T")

__all__ = [
    "CpFusedGdnRawResult",
    "_CpFusedGdnOutput",
    "_CpFusedGdnPrep",
    "cp_fused_cam_gdn_num_autograd",
    "cp_fused_gdn_chunkwise_raw_autograd",
]


@dataclasses.dataclass(frozen=True)
class CpFusedGdnRawResult:
    """What `cp_fused_gdn_chunkwise_raw_autograd` returns.

    Attributes:
        num: ``[B, N, H, D]``, bf16 at ``dot_precision=0``, else fp32 (fp64 for fp64 qkv).
        den: ``[B, H, N]``, as ``num``.
        terminal_state_kv: ``[B*H, D, D]``, value-first, fp32 (fp64), equal on all ranks; None without
            ``truncate_to_active``.
        terminal_state_z: ``[B*H, D]``, likewise.
    """

    num: Tensor
    den: Tensor
    terminal_state_kv: Tensor | None = None
    terminal_state_z: Tensor | None = None


def cp_fused_gdn_chunkwise_raw_autograd(
    qkv: Tensor,
    beta: Tensor,
    decay: Tensor,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    rope_cos: Tensor,
    rope_sin: Tensor,
    *,
    F: int,
    S: int,
    group: ProcessGroup | CPContext,
    k_scale: float = 1.0,
    norm_eps: float = 1e-5,
    eps: float = 1e-6,
    dot_precision: int = 0,
    reverse_rank_order: bool = False,
    truncate_to_active: int | None = None,
    use_checkpoint: bool | None = None,
    rope_cos_q: Tensor | None = None,
    rope_sin_q: Tensor | None = None,
) -> CpFusedGdnRawResult:
    """Run one direction of the frame-wise rule over ranks: numerator and denominator, not divided.

        kv_f = decay_f (I - kr_f' diag(beta_f) kr_f) kv_{f-1} + kr_f' diag(beta_f) v_f          z alike, with k and 1
        num_f = qr_f kv_f          den_f = q_f z_f

    For code written against the published function; `cp_frame_gdn_raw` does the same in both directions at once, with
    nothing to flip or shift.

    Args:
        qkv: ``[B, N, 3, H, D]``, this rank's tokens, any floating dtype and strides.
        beta: ``[B, H, F, S]``.
        decay: ``[B, H, F]``, linear.
        q_norm_weight: ``[H*D]`` or None. With both None there is no RMSNorm; one None counts as ones.
        k_norm_weight: the same for k.
        rope_cos: ``[N, D]``, cosines of this rank's tokens, each twice.
        rope_sin: ``[N, D]``, sines with the sign of the first of each pair turned:
            ``y[d] = x[d] cos[d] + x[d ^ 1] sin[d]``. Tables receive no gradient.
        F: frames of this rank; ranks may differ.
        S: tokens of a frame.
        group: a process group or a `CPContext`.
        k_scale: factor of k, > 0.
        norm_eps: added to the mean square in RMSNorm.
        eps: ignored: the caller divides.
        dot_precision: 0, 1, 2 for bf16, tf32, ieee operands of products, at least.
        reverse_rank_order: take the ranks from last to first; the caller has flipped (and shifted) its frames.
        truncate_to_active: K, counted over the frames of all ranks; see `cp_frame_gdn_scan`. Later frames read the
            state after frame K - 1. Every rank then needs the same F.
        use_checkpoint: compute in the backward again what it needs of the forward, instead of keeping it. Never
            repeats an exchange. None: if gradients are enabled and some input requires one.
        rope_cos_q: tables of the query where they differ; this path keeps the operators of all frames, in plain torch.
        rope_sin_q: the same for the sines.

    Returns:
        CpFusedGdnRawResult: num, den, and the terminal states with ``truncate_to_active``.

    Raises:
        ValueError: ``qkv.shape[2]`` is not 3, N is not F*S, another shape, dtype, device or value is wrong, K is out of
            range, ranks of a truncated call differ in F.
        NotImplementedError: ``truncate_to_active`` with ``reverse_rank_order``.
        TypeError: An argument is of the wrong type.
        RuntimeError: Ranks disagree; an exchange did not complete.

    Communication: one all-gather per pass, of ``3 D^2 + D`` numbers per batch element and head forward and ``D^2 + D``
        backward, twice that with ``truncate_to_active``; fp32 (fp64 for fp64). None with one rank.
    Every rank must call this: yes, and its backward, if some rank's input requires a gradient.
    Gradient: of the sum of all ranks' losses, to qkv, gates and norm weights.

    Example:
        >>> qkv, beta, decay = torch.rand(1, 6, 3, 2, 4), torch.rand(1, 2, 3, 2), torch.rand(1, 2, 3)
        >>> cos, sin = torch.ones(6, 4), torch.zeros(6, 4)
        >>> raw = cp_fused_gdn_chunkwise_raw_autograd(
        ...     qkv, beta, decay, None, None, cos, sin, F=3, S=2, group=CPContext.single(), dot_precision=2
        ... )
        >>> raw.num.shape, raw.den.shape, raw.terminal_state_kv
        (torch.Size([1, 6, 2, 4]), torch.Size([1, 2, 6]), None)
    """
    op, context = "cp_fused_gdn_chunkwise_raw_autograd", as_context(group)
    leaves = (qkv, beta, decay, q_norm_weight, k_norm_weight)
    cos_q = rope_cos if rope_cos_q is None else rope_cos_q
    sin_q = rope_sin if rope_sin_q is None else rope_sin_q
    same_tables = cos_q is rope_cos and sin_q is rope_sin

    def make() -> tuple[Terms, tuple[FusedCall, int]]:
        precision = require_precision(dot_precision)
        checks.require_rank("qkv", qkv, "B, N, 3, H, D")
        batch, tokens, three, heads, width = qkv.shape
        if three != 3:
            raise ValueError(f"qkv must have shape [B, N, 3, H, D], got {list(qkv.shape)}")
        require_tokens("qkv", tokens, F, S)
        checks.require_shape("beta", beta, "B, H, F, S", (batch, heads, F, S))
        checks.require_shape("decay", decay, "B, H, F", (batch, heads, F))
        check_tables("rope_cos", "rope_sin", rope_cos, rope_sin, tokens, width)
        check_tables("rope_cos_q", "rope_sin_q", cos_q, sin_q, tokens, width)
        active = active_frames(truncate_to_active, reverse_rank_order, F, context.rank, context.size)
        gates = mask_idle_frames(beta, decay, active)
        inputs, options, _ = frame_gdn_arguments(
            qkv, gates[0], gates[1], rope=half_tables(rope_cos, rope_sin),
            q_norm_weight=q_norm_weight, k_norm_weight=k_norm_weight, k_scale=k_scale, direction="forward",
            chunk_starts=None, frame_valid=None, initial_state=None, output_final_state=False, norm_eps=norm_eps,
            eps=0.0, precision=precision, impl="auto", divide=False,
        )  # fmt: skip
        terms, call = _call(inputs, options, context, leaves, reverse_rank_order, truncate_to_active, use_checkpoint,
                            not same_tables)  # fmt: skip
        return terms, (call, active)

    (call, active), backward = _agree(op, context, qkv, make)
    tie = torch.empty(0, device=call.plan.device, requires_grad=backward)
    exchange = over_ranks(context, op)
    if same_tables:
        numerator, denominator, kv, z = run_fused([call], exchange, tie)[0]
        assert denominator is not None
        kv, z = None if kv is None else _value_first(kv), None if z is None else z.flatten(0, 1)
    else:
        *operators, normed = _CpFusedGdnPrep.apply(
            qkv, beta, decay, q_norm_weight, k_norm_weight, rope_cos, rope_sin, F, S, k_scale, norm_eps, dot_precision
        )  # type: ignore[no-untyped-call]
        plan = dataclasses.replace(call.plan, lead=(operators[0].shape[0],), active=active, fold_kernel=False)
        S_kv, S_z, *terminal = run_scan([plan], exchange, tie, operators)[0]
        kv, z = terminal or (None, None)
        numerator, denominator = _CpFusedGdnOutput.apply(
            normed, cos_q, sin_q, S_kv, S_z, call.plan.width, F, S, dot_precision
        )  # type: ignore[no-untyped-call]
    dtype = torch.bfloat16 if dot_precision == 0 else call.plan.dtype
    return CpFusedGdnRawResult(numerator.to(dtype), denominator.to(dtype), kv, z)


def cp_fused_cam_gdn_num_autograd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    *,
    F: int,
    S: int,
    group: ProcessGroup | CPContext,
    reverse_rank_order: bool = False,
    truncate_to_active: int | None = None,
    eps_recurrence: float = 0.0,
    use_checkpoint: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run one direction of the kv stream over ranks on prepared operands: the camera branch, numerator only.

        kv_f = decay_f (I - k_f' diag(beta_f) k_f) kv_{f-1} + k_f' diag(beta_f) v_f          out_f = q_f kv_f

    For code written against the published function; `cp_frame_gdn_numerator` does the same in both directions at once.

    Args:
        q: ``[B, H, D, N]``, transformed, any floating dtype and strides.
        k: as q.
        v: as q.
        beta: ``[B, H, F, S]``, or ``[B, H, F]`` for all tokens of a frame.
        decay: ``[B, H, F]``.
        F: frames of this rank; ranks may differ.
        S: tokens of a frame.
        group: a process group or a `CPContext`.
        reverse_rank_order: as in `cp_fused_gdn_chunkwise_raw_autograd`.
        truncate_to_active: as in `cp_fused_gdn_chunkwise_raw_autograd`.
        eps_recurrence: ignored.
        use_checkpoint: as in `cp_fused_gdn_chunkwise_raw_autograd`.

    Returns:
        tuple[Tensor, Tensor | None]: ``out [B, H, D, N]`` and, with ``truncate_to_active``, the terminal state
        ``[B*H, D, D]``, value-first and equal on all ranks; both in the dtype of q.

    Raises:
        ValueError: q, k and v differ in shape or are not ``[B, H, D, N]``, N is not F*S, beta has neither 3 nor 4
            dims, or what `cp_fused_gdn_chunkwise_raw_autograd` lists.
        NotImplementedError: ``truncate_to_active`` with ``reverse_rank_order``.
        TypeError: An argument is of the wrong type.
        RuntimeError: Ranks disagree; an exchange did not complete.

    Communication: one all-gather per pass, of ``2 D^2`` numbers per batch element and head forward and ``D^2``
        backward, twice that with ``truncate_to_active``; nothing of a z stream. None with one rank.
    Every rank must call this: yes, and its backward, if some rank's input requires a gradient.
    Gradient: of the sum of all ranks' losses, to all five tensors.

    Example:
        >>> q, k, v = torch.rand(3, 1, 2, 4, 6).unbind(0)
        >>> beta, decay = torch.rand(1, 2, 3), torch.rand(1, 2, 3)
        >>> out, state = cp_fused_cam_gdn_num_autograd(q, k, v, beta, decay, F=3, S=2, group=CPContext.single())
        >>> out.shape, state
        (torch.Size([1, 2, 4, 6]), None)
    """
    op, context = "cp_fused_cam_gdn_num_autograd", as_context(group)
    leaves = (q, k, v, beta, decay)

    def make() -> tuple[Terms, FusedCall]:
        for name, x in (("q", q), ("k", k), ("v", v)):
            checks.require_tensor(name, x)
        if q.shape != k.shape or q.shape != v.shape:
            shapes = [list(x.shape) for x in (q, k, v)]
            raise ValueError(f"q, k and v must have the same shape [B, H, D, N], got {', '.join(map(str, shapes))}")
        checks.require_rank("q", q, "B, H, D, N")
        require_tokens("q", q.shape[3], F, S)
        checks.require_tensor("beta", beta)
        if beta.ndim not in (3, 4):
            raise ValueError(f"beta must have shape [B, H, F, S] or [B, H, F], got {list(beta.shape)}")
        shape = (*q.shape[:2], F, S)
        checks.require_shape("beta", beta, "B, H, F, S"[: 3 * beta.ndim - 2], shape[: beta.ndim])
        checks.require_shape("decay", decay, "B, H, F", shape[:3])
        active = active_frames(truncate_to_active, reverse_rank_order, F, context.rank, context.size)
        per_token = beta if beta.ndim == 4 else beta[..., None].expand(shape)
        gates = mask_idle_frames(per_token, decay, active)
        tokens_first = [x.permute(0, 3, 1, 2) for x in (q, k, v)]
        inputs, options, _ = numerator_arguments(
            tokens_first[0], tokens_first[1], tokens_first[2], gates[0], gates[1], direction="forward",
            chunk_starts=None, frame_valid=None, initial_state=None, output_final_state=False, precision=None,
            impl="auto",
        )  # fmt: skip
        return _call(inputs, options, context, leaves, reverse_rank_order, truncate_to_active, use_checkpoint)

    call, backward = _agree(op, context, q, make)
    tie = torch.empty(0, device=call.plan.device, requires_grad=backward)
    numerator, _, kv, _ = run_fused([call], over_ranks(context, op), tie)[0]
    return numerator.permute(0, 2, 3, 1).to(q.dtype), None if kv is None else _value_first(kv).to(q.dtype)


def _call(
    inputs: FrameInputs,
    options: FrameOptions,
    context: CPContext,
    leaves: Sequence[Tensor | None],
    reverse: bool,
    truncate: int | None,
    use_checkpoint: bool | None,
    has_query_tables: bool = False,
) -> tuple[Terms, FusedCall]:
    """Return what ranks compare and this rank's part of the pass; resolves ``use_checkpoint``."""
    plan = fused_plan(
        inputs, options, (context.rank, context.size), reverse=bool(reverse), has_final=truncate is not None,
        save_transitions=context.save_transitions,
    )  # fmt: skip
    given = [x for x in leaves if x is not None]
    if use_checkpoint is None:
        use_checkpoint = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    terms = plan.terms(given, truncate, inputs.decay.shape[2])
    agreed = (
        *terms.agreed, ("S", inputs.beta.shape[3]), ("precision", options.precision.value),
        ("impl", options.impl.value), ("k_scale", options.k_scale), ("norm_eps", options.norm_eps),
        ("norm weights", inputs.q_norm_weight is not None or inputs.k_norm_weight is not None),
        ("tables of the query", has_query_tables),
    )  # fmt: skip
    return dataclasses.replace(terms, agreed=agreed), FusedCall(plan, inputs, options, bool(use_checkpoint))


def _agree(op: str, context: CPContext, operand: object, make: Callable[[], tuple[Terms, _T]]) -> tuple[_T, bool]:
    if context.is_trivial:
        return make()[1], False
    return agree(op, context, operand.device if isinstance(operand, Tensor) else None, make)


def _value_first(kv: Tensor) -> Tensor:
    """``[B, H, D, D]``, key-first, to ``[B*H, D, D]``."""
    return kv.mT.flatten(0, 1).contiguous()
