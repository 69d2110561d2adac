"""The backend on Triton kernels of flash-linear-attention (fla-core 0.6): bf16 and fp16 on a CUDA device.

Nothing of FLA or Triton is imported before a backend is made. Functions are found by attribute, and called with chunk
tables that were made from host integers, so that nothing reads the device back. FLA's gated gradient stage, which some
Triton versions compile wrongly on Hopper, is replaced by `gdn_kernels.delta_product.chunk_grads`.

Names, order of fields and of saved tensors are those of Megatron-LM's ``ssm.context_parallel.gdp``; what is added comes
last. Letters: see `gdn_kernels.gated_delta_product`. Rows are steps, R per token; "dp" marks tables in rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from gdn_cp.chunkwise import (
    CPBackwardPackedSummary,
    CPBackwardSummary,
    CPForwardPackedSummary,
    CPForwardSummary,
    CPSavedContext,
)
from gdn_cp.delta_product import fla_functions
from gdn_cp.delta_product.common import GDPChunkwiseContextParallel, GDPInputGradients, GDPInputs
from gdn_cp.delta_product.fla_functions import CHUNK, WIDEST_KEY, chunk_tables
from gdn_cp.delta_product.fla_functions import _expand_cu_seqlens as _expand_cu_seqlens
from gdn_cp.delta_product.fla_summaries import (
    _compute_backward_fragment_summary,
    _compute_fragment_summary,
    _merge_backward_summaries,
    _merge_forward_summaries,
    resting_summary,
    take_in,
)
from gdn_cp.delta_product.fla_summaries import _merge_affine_summaries as _merge_affine_summaries

LOG2_E = 1.4426950216  # as FLA rounds it: its kernels take exponents to base 2
DTYPES = (torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class GDPLocalContext:
    """Forward workspace: decays summed up per token and per row, the WY factors, and tables of packed sequences."""

    inputs: GDPInputs
    g_cumsum: Tensor | None
    g_interleaved: Tensor | None
    A: Tensor
    w: Tensor
    u: Tensor
    cu_seqlens_dp: Tensor | None
    chunk_indices: Tensor | None
    chunk_indices_dp: Tensor | None


@dataclasses.dataclass(frozen=True)
class GDPSavedInputs:
    """Inputs as the backward finds them again."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    cu_seqlens_dp: Tensor | None
    num_householder: int
    scale: float
    g_dtype: torch.dtype | None
    backward_summary_needed: bool = True
    has_initial_state: bool = False


@dataclasses.dataclass(frozen=True)
class GDPSavedMetadata:
    """What is saved beside tensors."""

    num_householder: int
    scale: float
    has_cu_seqlens: bool
    g_dtype: torch.dtype | None
    backward_summary_needed: bool = True
    has_initial_state: bool = False


@dataclasses.dataclass(frozen=True)
class GDPBackwardContext:
    """Backward workspace: queries and output gradients in rows, what was recomputed, the final states' gradient."""

    inputs: GDPSavedInputs
    g_interleaved: Tensor | None
    A: Tensor
    initial_state: Tensor
    chunk_indices_dp: Tensor | None
    q_interleaved: Tensor
    output_grad_interleaved: Tensor
    w: Tensor
    h: Tensor
    v_new: Tensor
    dv: Tensor
    final_state_grad: Tensor | None = None


class FLAGDPChunkwiseContextParallel(GDPChunkwiseContextParallel):
    """The autograd function with FLA's guards: contiguous operands, their device current, autocast as in forward."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        """Run the forward pass of `GDPChunkwiseContextParallel`."""
        guarded = fla_functions.load().input_guard(GDPChunkwiseContextParallel.forward)
        return torch.amp.custom_fwd(guarded, device_type="cuda")(ctx, *arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Run the backward pass of `GDPChunkwiseContextParallel`; once differentiable, as that is."""
        guarded = fla_functions.load().input_guard(GDPChunkwiseContextParallel.backward)
        return torch.amp.custom_bwd(guarded, device_type="cuda")(ctx, *gradients)


class FLAGatedDeltaProductCPBackend:
    """Gated delta product of one shard on FLA's kernels; summaries in fp32, laid out as those of the torch backend.

    Raises:
        ImportError: FLA, or a function of it, is missing; the message names it and the version that is installed.
        NotImplementedError: Inputs are not bf16 or fp16 on a CUDA device, or K > 256, when the backend is run.
    """

    autograd_function = FLAGDPChunkwiseContextParallel

    def __init__(self) -> None:
        fla_functions.load()

    def cp_forward_prepare(self, inputs: GDPInputs) -> tuple[CPForwardPackedSummary, GDPLocalContext]:
        """Summarise the last fragment, or every batch row."""
        _require_supported(inputs)
        local = _prepare_fla_forward(inputs)
        inputs = local.inputs
        packed = inputs.cu_seqlens is not None
        shape = _state_shape(inputs.q, inputs.v, inputs.cu_seqlens)
        summary = resting_summary(shape[1:] if packed else shape, inputs.forward_summary_needed, inputs.q)
        if inputs.forward_summary_needed and shape[0]:
            if inputs.q.numel():
                summary = _compute_fragment_summary(
                    inputs.k, local.w, local.u, local.g_interleaved, local.cu_seqlens_dp
                )
            if inputs.initial_state is not None:
                take_in(summary, inputs.initial_state[-1] if packed else inputs.initial_state)
        return CPForwardPackedSummary(summary), local

    def cp_forward_apply(
        self, local_context: GDPLocalContext, preceding_summaries: CPForwardSummary
    ) -> tuple[Any, CPSavedContext]:
        """Run the shard from the state that the preceding ranks leave."""
        local, inputs = local_context, local_context.inputs
        initial = _build_initial_state(inputs, preceding_summaries)
        output, final = _apply_fla_forward(local, initial)
        kept = initial
        tables: tuple[Tensor, ...] = ()
        if local.cu_seqlens_dp is not None and local.chunk_indices_dp is not None:
            tables = (local.cu_seqlens_dp, local.chunk_indices_dp)
            if inputs.initial_state is None and len(initial) > 1:
                kept = initial[:1].clone()  # the other fragments begin here, from zero
        tensors: Any = (inputs.q, inputs.k, inputs.v, inputs.beta, local.g_interleaved, local.A, kept, *tables)
        metadata = GDPSavedMetadata(
            inputs.num_householder, inputs.scale, bool(tables), None if inputs.g is None else inputs.g.dtype,
            inputs.backward_summary_needed, inputs.initial_state is not None,
        )  # fmt: skip
        return (output, final) if inputs.output_final_state else output, CPSavedContext(tensors, metadata)

    def cp_backward_prepare(
        self, output_grad: Any, saved_context: CPSavedContext
    ) -> tuple[CPBackwardPackedSummary, GDPBackwardContext]:
        """Summarise the adjoint of the first fragment, or of every batch row."""
        saved, g, a, initial, chunk_indices_dp = _restore_saved_context(saved_context)
        doutput, dfinal = output_grad if isinstance(output_grad, tuple) else (output_grad, None)
        q = _interleave_last_update(saved.q, saved.num_householder)
        do = _interleave_last_update(doutput, saved.num_householder)
        context = _recompute(saved, g, a, initial, chunk_indices_dp, q, do, dfinal)
        packed = saved.cu_seqlens_dp is not None
        shape = _state_shape(saved.q, saved.v, saved.cu_seqlens_dp)
        summary = resting_summary(shape[1:] if packed else shape, saved.backward_summary_needed, saved.q)
        if saved.backward_summary_needed and shape[0]:
            if saved.q.numel():
                summary = _compute_backward_fragment_summary(
                    q, saved.k, context.w, g, do, context.dv, saved.scale, saved.cu_seqlens_dp
                )
            if dfinal is not None:
                take_in(summary, dfinal[0] if packed else dfinal)
        return CPBackwardPackedSummary(summary), context

    def cp_backward_apply(
        self, backward_context: GDPBackwardContext, following_summaries: CPBackwardSummary
    ) -> GDPInputGradients:
        """Finish the gradients from the state gradient that the following ranks leave."""
        given = backward_context.final_state_grad
        final_state_grad = _build_final_state_grad(backward_context.inputs, following_summaries, given)
        return _apply_fla_backward(backward_context, final_state_grad)


def _require_supported(inputs: GDPInputs) -> None:
    q, gates = inputs.q, [inputs.beta] if inputs.g is None else [inputs.beta, inputs.g]
    name = str(q.dtype).removeprefix("torch.")
    if not q.is_cuda or q.dtype not in DTYPES:
        raise NotImplementedError(
            "the FLA backend takes q, k and v in bfloat16 or float16 on a CUDA device, "
            f"got {name} on {q.device}; use the torch backend for others, or auto for whichever can run"
        )
    if any(x.dtype == torch.float64 for x in gates):
        raise NotImplementedError(
            "the FLA backend takes beta and g in float32 or 16 bits, got float64; cast them, or use the torch backend"
        )
    if q.shape[3] > WIDEST_KEY:
        raise NotImplementedError(f"the FLA backend takes K <= {WIDEST_KEY}, got K = {q.shape[3]}; use narrower heads")


def _prepare_fla_forward(inputs: GDPInputs) -> GDPLocalContext:
    """Sum up the decays per token and per row, and form the WY factors; launches nothing for an empty shard."""
    ops, steps, k, g = fla_functions.load(), inputs.num_householder, inputs.k, inputs.g
    cu = cu_dp = indices = indices_dp = None
    if inputs.cu_seqlens is not None:
        bounds = inputs.bounds if inputs.bounds is not None else tuple(inputs.cu_seqlens.tolist())
        cu, cu_dp, indices, indices_dp = chunk_tables(bounds, steps, inputs.q.device)
        inputs = dataclasses.replace(inputs, cu_seqlens=cu, bounds=bounds)
    batch, rows, _, width = k.shape
    heads = inputs.v.shape[2]
    if not inputs.q.numel():
        summed = None if g is None else g.new_empty(g.shape, dtype=torch.float32)
        summed_dp = None if g is None else g.new_empty(batch, rows, heads, dtype=torch.float32)
        a, w, u = (
            k.new_empty(batch, rows, heads, CHUNK),
            k.new_empty(batch, rows, heads, width),
            torch.empty_like(inputs.v),
        )
        return GDPLocalContext(inputs, summed, summed_dp, a, w, u, cu_dp, indices, indices_dp)
    summed = summed_dp = None
    if g is not None:
        sums: dict[str, Any] = {"chunk_size": CHUNK, "scale": LOG2_E, "output_dtype": torch.float32}
        g = g.float().contiguous()
        summed = ops.chunk_local_cumsum(g=g, cu_seqlens=cu, chunk_indices=indices, **sums)
        summed_dp = summed
        if steps > 1:
            first = g.new_zeros(batch, g.shape[1], steps, heads)
            first[:, :, 0] = g
            first = first.view(batch, rows, heads)
            summed_dp = ops.chunk_local_cumsum(g=first, cu_seqlens=cu_dp, chunk_indices=indices_dp, **sums)
    a = ops.chunk_scaled_dot_kkt_fwd(
        k=k, g=summed_dp, beta=inputs.beta, cu_seqlens=cu_dp, chunk_size=CHUNK, output_dtype=torch.float32,
        chunk_indices=indices_dp,
    )  # fmt: skip
    a = ops.solve_tril(A=a, cu_seqlens=cu_dp, chunk_indices=indices_dp, output_dtype=k.dtype)
    w, u = ops.recompute_w_u_fwd(
        k=k, v=inputs.v, beta=inputs.beta, A=a, g=summed_dp, cu_seqlens=cu_dp, chunk_indices=indices_dp
    )
    return GDPLocalContext(inputs, summed, summed_dp, a, w, u, cu_dp, indices, indices_dp)


def _apply_fla_forward(local: GDPLocalContext, initial_state: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the output, and the final states if they are wanted."""
    ops, inputs = fla_functions.load(), local.inputs
    q, k, v, steps = inputs.q, inputs.k, inputs.v, inputs.num_householder
    if not q.numel():
        return q.new_empty(*q.shape[:2], *v.shape[2:]), initial_state.clone() if inputs.output_final_state else None
    run: dict[str, Any] = {
        "k": k, "w": local.w, "u": local.u, "g": local.g_interleaved, "initial_state": initial_state,
        "output_final_state": inputs.output_final_state, "chunk_size": CHUNK, "cu_seqlens": local.cu_seqlens_dp,
    }  # fmt: skip
    if v.shape[2] == q.shape[2]:
        h, v_new, final = ops.chunk_gated_delta_product_fwd_h(
            **run, num_householder=steps, chunk_indices=local.chunk_indices
        )
        output = ops.chunk_gated_delta_product_fwd_o(
            q=q, k=k, v=v_new, h=h, g=local.g_cumsum, scale=inputs.scale, cu_seqlens=inputs.cu_seqlens,
            chunk_size=CHUNK, num_householder=steps, chunk_indices=local.chunk_indices,
        )  # fmt: skip
        return output, final
    # FLA reads out over several steps for equal numbers of heads only; by rows it knows groups of value heads
    h, v_new, final = ops.chunk_gated_delta_rule_fwd_h(**run, chunk_indices=local.chunk_indices_dp)
    output = ops.chunk_fwd_o(
        q=_interleave_last_update(q, steps), k=k, v=v_new, h=h, g=local.g_interleaved, scale=inputs.scale,
        cu_seqlens=local.cu_seqlens_dp, chunk_size=CHUNK, chunk_indices=local.chunk_indices_dp,
    )  # fmt: skip
    return _step(output, steps, -1), final


def _state_shape(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[int, int, int, int]:
    """Return ``(N, HV, K, V)``, N the batch rows or fragments."""
    count = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return count, v.shape[2], q.shape[3], v.shape[3]


def _build_initial_state(inputs: GDPInputs, summaries: CPForwardSummary) -> Tensor:
    """Return the states that fragments start from: those given, and what the preceding ranks leave."""
    shape, packed = _state_shape(inputs.q, inputs.v, inputs.cu_seqlens), inputs.cu_seqlens is not None
    state = inputs.q.new_zeros(shape, dtype=torch.float32)
    entering = _merge_forward_summaries(summaries, state.new_empty(shape[1:] if packed else shape))
    if inputs.initial_state is not None:
        state += inputs.initial_state  # zero where a fragment continues another rank's
    if shape[0]:
        (state[0] if packed else state).add_(entering)
    return state


def _build_final_state_grad(
    inputs: GDPSavedInputs, summaries: CPBackwardSummary, given: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Return the gradients of the states after fragments: those given, and what the following ranks leave."""
    shape, packed = _state_shape(inputs.q, inputs.v, inputs.cu_seqlens_dp), inputs.cu_seqlens_dp is not None
    grad = inputs.q.new_zeros(shape, dtype=torch.float32)
    arriving = _merge_backward_summaries(summaries, grad.new_empty(shape[1:] if packed else shape))
    if given is not None:
        grad += given
    if shape[0]:
        (grad[-1] if packed else grad).add_(arriving)
    return grad


def _restore_saved_context(
    saved_context: CPSavedContext,
) -> tuple[GDPSavedInputs, Tensor | None, Tensor, Tensor, Tensor | None]:
    """Return the inputs, row decays, A, the initial state of every fragment, and the chunks in rows."""
    kept, tensors = saved_context.metadata, saved_context.tensors
    if not isinstance(kept, GDPSavedMetadata):
        raise TypeError(f"saved_context must come from the FLA backend, got metadata {type(kept).__name__}")
    expected = 9 if kept.has_cu_seqlens else 7
    if len(tensors) != expected:
        raise ValueError(f"saved_context must hold {expected} tensors, got {len(tensors)}")
    q, k, v, beta, g, a, initial = tensors[:7]
    cu_dp, indices_dp = tensors[7:] if kept.has_cu_seqlens else (None, None)
    missing = _state_shape(q, v, cu_dp)[0] - initial.shape[0]
    if missing:
        initial = torch.cat([initial, initial.new_zeros(missing, *initial.shape[1:])])
    inputs = GDPSavedInputs(
        q, k, v, beta, cu_dp, kept.num_householder, kept.scale, kept.g_dtype, kept.backward_summary_needed,
        kept.has_initial_state,
    )  # fmt: skip
    return inputs, g, a, initial, indices_dp


def _interleave_last_update(tensor: Tensor, num_householder: int) -> Tensor:
    """Return ``[B, T*R, ...]`` from ``[B, T, ...]``: the last step of a token, zero at the others."""
    if num_householder == 1:
        return tensor
    batch, tokens, *rest = tensor.shape
    rows = tensor.new_zeros(batch, tokens, num_householder, *rest)
    rows[:, :, -1] = tensor
    return rows.view(batch, tokens * num_householder, *rest)


def _step(tensor: Tensor, num_householder: int, step: int) -> Tensor:
    """Return one step of every token, ``[B, T, ...]``, contiguous."""
    batch, rows, *rest = tensor.shape
    return tensor.view(batch, rows // num_householder, num_householder, *rest)[:, :, step].contiguous()


def _recompute(
    saved: GDPSavedInputs, g: Tensor | None, a: Tensor, initial: Tensor, chunk_indices_dp: Tensor | None,
    q: Tensor, do: Tensor, dfinal: Tensor | None,
) -> GDPBackwardContext:  # fmt: skip
    """Compute the WY factors, states and new values again, and the part of their gradient that needs no state."""
    if not saved.q.numel():
        none = saved.q.new_empty(0)
        return GDPBackwardContext(saved, g, a, initial, chunk_indices_dp, q, do, none, none, none, none, dfinal)
    ops, k, where = (
        fla_functions.load(),
        saved.k,
        {"cu_seqlens": saved.cu_seqlens_dp, "chunk_indices": chunk_indices_dp},
    )
    w, u = ops.recompute_w_u_fwd(k=k, v=saved.v, beta=saved.beta, A=a, g=g, **where)
    h, v_new, _ = ops.chunk_gated_delta_rule_fwd_h(
        k=k, w=w, u=u, g=g, initial_state=initial, output_final_state=False, chunk_size=CHUNK, **where
    )
    dv = ops.chunk_bwd_dv_local(q=q, k=k, do=do, g=g, scale=saved.scale, chunk_size=CHUNK, **where)
    return GDPBackwardContext(saved, g, a, initial, chunk_indices_dp, q, do, w, h, v_new, dv, dfinal)


def _apply_fla_backward(context: GDPBackwardContext, final_state_grad: Tensor) -> GDPInputGradients:
    """Return the gradients of the inputs, from those of the states after fragments."""
    ops, c, saved, g = fla_functions.load(), context, context.inputs, context.g_interleaved
    k, steps, scale = saved.k, saved.num_householder, saved.scale
    if not saved.q.numel():
        dg = None if g is None else g.new_empty(*saved.q.shape[:2], g.shape[2], dtype=saved.g_dtype)
        empty = (*(torch.empty_like(x) for x in (saved.q, k, saved.v)), dg, torch.empty_like(saved.beta))
        return (*empty, final_state_grad) if saved.has_initial_state else empty
    where: dict[str, Any] = {"cu_seqlens": saved.cu_seqlens_dp, "chunk_indices": c.chunk_indices_dp}
    q, do = c.q_interleaved, c.output_grad_interleaved
    dh, dinitial, dv_new = ops.chunk_gated_delta_rule_bwd_dhu(
        q=q, k=k, w=c.w, do=do, dv=c.dv, g=g, h0=c.initial_state if saved.has_initial_state else None,
        dht=final_state_grad, scale=scale, chunk_size=CHUNK, **where,
    )  # fmt: skip
    dq, dk, dw, dg = ops.chunk_grads(q, k, c.v_new, do, c.h, dh, g, dv_new, scale=scale, chunk_size=CHUNK, **where)
    dk_wy, dv, dbeta, dg_wy = ops.prepare_wy_repr_bwd(
        k=k, v=saved.v, beta=saved.beta, A=c.A, dw=dw, du=dv_new, g=g, **where
    )
    dq, dk = _step(dq, steps, -1).to(saved.q.dtype), dk.add_(dk_wy).to(k.dtype)
    if g is not None:
        dg = ops.chunk_local_cumsum(
            g=dg.add_(dg_wy), chunk_size=CHUNK, reverse=True, output_dtype=torch.float32, **where
        )
        dg = _step(dg, steps, 0).to(saved.g_dtype)
    gradients = (dq, dk, dv, dg, dbeta)
    return (*gradients, dinitial) if saved.has_initial_state else gradients
