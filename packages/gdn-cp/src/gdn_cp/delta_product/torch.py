"""The backend in batched torch operations: any device, fp16 to fp64, any key width that `gdn_kernels` takes."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor

from gdn_cp import affine
from gdn_cp.affine import AffineMap
from gdn_cp.chunkwise import CPBackwardPackedSummary, CPForwardPackedSummary, CPSavedContext
from gdn_cp.delta_product.common import GDPChunkwiseContextParallel, GDPInputGradients, GDPInputs
from gdn_kernels.reference.delta_product_chunks import (
    backward_summary,
    chunk_backward,
    chunk_forward,
    chunk_states,
    forward_summary,
)
from gdn_kernels.reference.delta_product_grid import ChunkGrid, chunk_grid
from gdn_kernels.reference.delta_product_operands import (
    ChunkOperands,
    gradients_to_streams,
    operands_on_grid,
    output_gradient_on_grid,
    output_to_stream,
)

CHUNK_ROWS = 64


@dataclasses.dataclass(frozen=True)
class _Kept:
    """What the backward needs beside tensors."""

    lengths: tuple[int, ...]
    packed: bool
    num_householder: int
    scale: float
    gated: bool
    has_initial: bool
    needed: bool


@dataclasses.dataclass(frozen=True)
class _Local:
    inputs: GDPInputs
    grid: ChunkGrid
    operands: ChunkOperands


@dataclasses.dataclass(frozen=True)
class _Backward:
    kept: _Kept
    streams: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
    grid: ChunkGrid
    operands: ChunkOperands
    doutput: Tensor
    dfinal: Tensor | None
    initial: Tensor


class TorchGatedDeltaProductCPBackend:
    """Gated delta product of one shard; fp32 arithmetic for 16-bit inputs, summaries in fp32 (fp64).

    Autocast has no effect inside. Its summaries are laid out as those of every packed backend: ``[HV, K, V + K]``
    of the boundary fragment for packed sequences, ``[B, HV, K, V + K]`` otherwise.
    """

    autograd_function = GDPChunkwiseContextParallel

    def cp_forward_prepare(self, inputs: GDPInputs) -> tuple[CPForwardPackedSummary, _Local]:
        """Summarise the last fragment, or every batch row."""
        with _exact(inputs.q):
            packed = inputs.cu_seqlens is not None
            lengths = _lengths(inputs)
            grid = _grid(lengths, inputs.num_householder, inputs.q.device)
            operands = operands_on_grid(
                inputs.q, inputs.k, inputs.v, inputs.beta, inputs.g, grid, inputs.num_householder
            )  # fmt: skip
            last = [len(lengths) - 1] if packed else None
            shape = _state_shape(inputs.q, inputs.v, 1 if packed else len(lengths))
            if packed and not lengths:
                summary = _identity(shape, operands.q)
            elif not inputs.forward_summary_needed:
                summary = operands.q.new_zeros(*shape[:-1], shape[-1] + shape[-2])
            else:
                summary = forward_summary(operands.k, operands.decay, operands.factors, grid.plan, last)
                if inputs.initial_state is not None:
                    rows = inputs.initial_state[-1:] if packed else inputs.initial_state
                    summary = _folded(summary, rows)
            return CPForwardPackedSummary(summary[0] if packed else summary), _Local(inputs, grid, operands)

    def cp_forward_apply(
        self, local_context: _Local, preceding_summaries: CPForwardPackedSummary
    ) -> tuple[Any, CPSavedContext]:
        """Run the shard from the state that the preceding ranks leave."""
        with _exact(local_context.inputs.q):
            inputs, grid, operands = local_context.inputs, local_context.grid, local_context.operands
            packed = inputs.cu_seqlens is not None
            initial = operands.q.new_zeros(_state_shape(inputs.q, inputs.v, len(grid.lengths)))
            if inputs.initial_state is not None:
                initial = inputs.initial_state.to(initial.dtype).clone()
            folded = _fold(preceding_summaries.packed, range(len(preceding_summaries.packed)))
            if folded is not None and len(initial):
                if packed:
                    initial[0] = folded
                else:
                    initial = folded
            o, states = chunk_forward(
                operands.q, operands.k, operands.decay, operands.factors, grid.plan, initial, scale=inputs.scale
            )
            output: Any = output_to_stream(o, grid, inputs.q, inputs.v)
            if inputs.output_final_state:
                output = (output, states.final_state.clone())
            kept = _Kept(
                grid.lengths, packed, inputs.num_householder, inputs.scale, inputs.g is not None,
                inputs.initial_state is not None, inputs.backward_summary_needed,
            )  # fmt: skip
            gate = () if inputs.g is None else (inputs.g,)
            return output, CPSavedContext((inputs.q, inputs.k, inputs.v, inputs.beta, initial, *gate), kept)

    def cp_backward_prepare(
        self, output_grad: Any, saved_context: CPSavedContext
    ) -> tuple[CPBackwardPackedSummary, _Backward]:
        """Summarise the adjoint of the first fragment, or of every batch row."""
        kept = saved_context.metadata
        if not isinstance(kept, _Kept):
            raise TypeError(f"saved_context must come from this backend, got metadata {type(kept).__name__}")
        with _exact(saved_context.tensors[0]):
            q, k, v, beta, initial, *gate = saved_context.tensors
            g = gate[0] if kept.gated else None
            doutput, dfinal = output_grad if isinstance(output_grad, tuple) else (output_grad, None)
            grid = _grid(kept.lengths, kept.num_householder, q.device)
            operands = operands_on_grid(q, k, v, beta, g, grid, kept.num_householder)
            do = output_gradient_on_grid(doutput, grid, operands)
            shape = _state_shape(q, v, 1 if kept.packed else len(kept.lengths))
            if kept.packed and not kept.lengths:
                summary = _identity(shape, operands.q)
            elif not kept.needed:
                summary = operands.q.new_zeros(*shape[:-1], shape[-1] + shape[-2])
            else:
                first = [0] if kept.packed else None
                summary = backward_summary(
                    operands.q, operands.k, operands.decay, operands.factors.w, do, grid.plan, first, scale=kept.scale
                )
                if dfinal is not None:
                    summary = _folded(summary, dfinal[:1] if kept.packed else dfinal)
            packed = CPBackwardPackedSummary(summary[0] if kept.packed else summary)
            return packed, _Backward(kept, (q, k, v, beta, g), grid, operands, do, dfinal, initial)

    def cp_backward_apply(
        self, backward_context: _Backward, following_summaries: CPBackwardPackedSummary
    ) -> GDPInputGradients:
        """Finish the gradients from the state gradient that the following ranks leave."""
        with _exact(backward_context.initial):
            c, (q, k, v, beta, g) = backward_context, backward_context.streams
            dfinal = torch.zeros_like(c.initial) if c.dfinal is None else c.dfinal.to(c.initial.dtype).clone()
            folded = _fold(following_summaries.packed, reversed(range(len(following_summaries.packed))))
            if folded is not None and len(dfinal):
                if c.kept.packed:
                    dfinal[-1] += folded
                else:
                    dfinal += folded
            o = c.operands
            states = chunk_states(o.k, o.decay, o.factors, c.grid.plan, c.initial)
            found = chunk_backward(
                o.q, o.k, o.v, o.beta, o.decay, o.factors, states, c.doutput, dfinal, c.grid.plan, scale=c.kept.scale
            )
            dq, dk, dv, dbeta, dg = gradients_to_streams(found, c.grid, q, k, v, beta, g)
            gradients = (dq, dk, dv, dg, dbeta)
            return (*gradients, found.dinitial_state) if c.kept.has_initial else gradients


def _exact(operand: Tensor) -> torch.autocast:
    """Return a context without autocast on the operand's device."""
    return torch.autocast(operand.device.type, enabled=False)


def _lengths(inputs: GDPInputs) -> tuple[int, ...]:
    """Return the tokens of each fragment; reads ``cu_seqlens`` from its device if the host does not know it."""
    if inputs.cu_seqlens is None:
        return (inputs.q.shape[1],) * inputs.q.shape[0]
    bounds = inputs.bounds if inputs.bounds is not None else tuple(inputs.cu_seqlens.tolist())
    return tuple(stop - start for start, stop in itertools.pairwise(bounds))


def _grid(lengths: tuple[int, ...], num_householder: int, device: torch.device) -> ChunkGrid:
    return chunk_grid(lengths, max(1, CHUNK_ROWS // num_householder), device)


def _state_shape(q: Tensor, v: Tensor, count: int) -> tuple[int, int, int, int]:
    return count, v.shape[2], q.shape[3], v.shape[3]


def _identity(shape: tuple[int, int, int, int], like: Tensor) -> Tensor:
    """Return ``[0 | I]``."""
    summary = like.new_zeros(*shape[:-1], shape[-1] + shape[-2])
    summary[..., shape[-1] :] = torch.eye(shape[-2], dtype=like.dtype, device=like.device)
    return summary


def _map(summary: Tensor) -> AffineMap:
    """Split ``[increment | transition]``, a square transition of as many columns as rows."""
    width = summary.shape[-1] - summary.shape[-2]
    return AffineMap(summary[..., width:], summary[..., :width])


def _folded(summary: Tensor, state: Tensor) -> Tensor:
    """Return the summary whose increment has taken in a state: ``b <- b + M S``."""
    m = _map(summary)
    return torch.cat([affine.apply(m, state.to(summary.dtype)), m.transition], dim=-1)


def _fold(summaries: Tensor, order: Any) -> Tensor | None:
    """Return the state after the maps in ``order``, from zero; None without a map."""
    maps = [_map(summaries[i]) for i in order]
    return affine.fold(maps, torch.zeros_like(maps[0].increment)) if maps else None
