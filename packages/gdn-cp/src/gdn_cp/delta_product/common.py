"""What every backend of the gated delta product shares: inputs, the autograd function and the published entry point.

Names and order of arguments are those of Megatron-LM's ``ssm.context_parallel.gdp_common``; what is added comes last,
with a default. Letters: see `gdn_kernels.gated_delta_product`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import torch
from torch import Tensor

from gdn_cp.chunkwise import CPSavedContext, LinearAttentionCPBackend, chunkwise_cp_backward, chunkwise_cp_forward
from gdn_cp.context import CPContext
from gdn_cp.cost_model import as_link
from gdn_cp.handshake import Terms, agree, digest
from gdn_cp.token_partition import PackedSequenceCPMetadata
from gdn_kernels import checks
from gdn_kernels.delta_product.op import delta_product_arguments
from gdn_kernels.once import once_differentiable

GDPInputGradients = tuple[Tensor | None, ...]  # dq, dk, dv, dg, dbeta; with an initial state also its gradient


@dataclasses.dataclass(frozen=True)
class GDPInputs:
    """One rank's shard of a call.

    Attributes:
        q: ``[B, T, H, K]``.
        k: ``[B, T*R, H, K]``.
        v: ``[B, T*R, HV, V]``.
        g: ``[B, T, HV]`` or None.
        beta: ``[B, T*R, HV]``.
        cu_seqlens: ``[fragments + 1]`` int32, tokens, local; None is one sequence per batch row.
        num_householder: R.
        scale: of the output.
        initial_state: ``[N, HV, K, V]``, a state per fragment (or batch row), zero where it does not begin here.
        output_final_state: return the state after each fragment.
        forward_summary_needed: some rank reads the forward summary. A backend may leave out what is not.
        backward_summary_needed: the same of the backward summary.
        bounds: ``cu_seqlens`` on the host, if it is known.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor
    cu_seqlens: Tensor | None
    num_householder: int
    scale: float
    initial_state: Tensor | None = None
    output_final_state: bool = False
    forward_summary_needed: bool = True
    backward_summary_needed: bool = True
    bounds: tuple[int, ...] | None = None


_MEMBERS = (
    "autograd_function", "cp_forward_prepare", "cp_forward_apply", "cp_backward_prepare", "cp_backward_apply",
)  # fmt: skip


class GDPChunkwiseCPBackend(LinearAttentionCPBackend[GDPInputs, Any, Any, GDPInputGradients], Protocol):
    """A backend of the gated delta product; ``output_grad`` is a pair with the final state's if that was returned."""

    autograd_function: Any


@dataclasses.dataclass(frozen=True)
class _Appended:
    """Ours, beside the published arguments of the autograd function.

    ``beginning`` lists (fragment, sequence) pairs of the fragments that begin on this rank.
    """

    context: CPContext | None = None
    exchange: bool = True
    output_final_state: bool = False
    beginning: tuple[tuple[int, int], ...] = ()
    fragments: int = 0
    bounds: tuple[int, ...] | None = None


class GDPChunkwiseContextParallel(torch.autograd.Function):
    """Both passes of a backend as one node; once differentiable."""

    @classmethod
    def apply(cls, *arguments: Any) -> Any:
        """Return the output, with the final states if they are wanted; not what only ties gradients to arguments."""
        *results, _ = super().apply(*arguments)  # type: ignore[no-untyped-call]
        return tuple(results) if len(results) > 1 else results[0]

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, cu_seqlens: Tensor | None,
        num_householder: int, scale: float, cp_group: Any, backend: GDPChunkwiseCPBackend,
        preceding_rank_start: int, following_rank_stop: int, initial_state: Tensor | None = None,
        appended: _Appended | None = None, tie: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Prepare, exchange, apply: slices ``[start, rank)`` of the forward summaries."""
        appended = appended or _Appended()
        context = appended.context if appended.context is not None else CPContext(cp_group)
        rank, empty = context.rank, q.shape[1] == 0
        rows = None
        if initial_state is not None:
            rows = initial_state.new_zeros(appended.fragments, *initial_state.shape[1:])
            for fragment, sequence in appended.beginning:
                rows[fragment] = initial_state[sequence]
        inputs = GDPInputs(
            q, k, v, g, beta, cu_seqlens, num_householder, scale, rows, appended.output_final_state,
            empty or following_rank_stop > rank + 1, empty or preceding_rank_start < rank, appended.bounds,
        )  # fmt: skip
        one_piece = cu_seqlens is None or cu_seqlens.shape[0] == 2
        result = chunkwise_cp_forward(
            backend, inputs, cp_group, slice(preceding_rank_start, rank),
            exchange=appended.exchange, needed=inputs.forward_summary_needed,
            carries=empty or (one_piece and preceding_rank_start < rank), context=context,
        )  # fmt: skip
        thread = q.new_empty(0)  # saved as an output, it leads from gradients to all arguments
        ctx.save_for_backward(*result.saved_context.tensors, thread)
        ctx.kept, ctx.backend, ctx.cp_group = result.saved_context.metadata, backend, cp_group
        ctx.context, ctx.appended, ctx.needed = context, appended, inputs.backward_summary_needed
        ctx.following = slice(rank + 1, following_rank_stop)
        ctx.carries = empty or (one_piece and following_rank_stop > rank + 1)
        ctx.sequences = None if initial_state is None else len(initial_state)
        ctx.set_materialize_grads(appended.output_final_state is False)
        ctx.output_like = (q.shape[:2] + v.shape[2:], q.dtype, q.device)
        return (*result.output, thread) if appended.output_final_state else (result.output, thread)

    @staticmethod
    @once_differentiable("gdp_chunkwise_context_parallel")
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Prepare, exchange, apply: slices ``[rank + 1, stop)`` of the adjoint summaries."""
        shape, dtype, device = ctx.output_like
        given = gradients[0]
        doutput = torch.zeros(shape, dtype=dtype, device=device) if given is None else given.contiguous()
        output_grad: Any = doutput
        if ctx.appended.output_final_state:
            dfinal = gradients[1]
            output_grad = (doutput, None if dfinal is None else dfinal.contiguous())
        found = chunkwise_cp_backward(
            ctx.backend, output_grad, CPSavedContext(ctx.saved_tensors[:-1], ctx.kept), ctx.cp_group, ctx.following,
            exchange=ctx.appended.exchange, needed=ctx.needed, carries=ctx.carries, context=ctx.context,
        )  # fmt: skip
        dinitial = None
        if ctx.sequences is not None:
            rows = found[5]
            assert rows is not None
            dinitial = rows.new_zeros(ctx.sequences, *rows.shape[1:])
            for fragment, sequence in ctx.appended.beginning:
                dinitial[sequence] = rows[fragment]
        return (*found[:5], *(None,) * 7, dinitial, None, None)


def gdp_chunkwise_context_parallel(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, cu_seqlens: Tensor | None,
    num_householder: int, scale: float, cp_group: Any, backend: GDPChunkwiseCPBackend,
    preceding_rank_start: int = 0, following_rank_stop: int | None = None, *,
    initial_state: Tensor | None = None, output_final_state: bool = False,
    metadata: PackedSequenceCPMetadata | None = None, context: CPContext | None = None,
) -> Any:  # fmt: skip
    """Run `gdn_kernels.gated_delta_product` on this rank's tokens, with the result of one device.

    Args:
        q: ``[B, T, H, K]``, this rank's tokens; a rank may have none.
        k: ``[B, T*R, H, K]``.
        v: ``[B, T*R, HV, V]``, HV a multiple of H.
        g: ``[B, T, HV]``, natural log of the decay, or None.
        beta: ``[B, T*R, HV]``.
        cu_seqlens: ``[fragments + 1]`` int32 (int64) of this rank's fragments, B = 1; None for one sequence per batch
            row, or with ``metadata``.
        num_householder: R.
        scale: of the output.
        cp_group: process group; may be None with ``context``.
        backend: the local kernels, as `choose_backend` makes them.
        preceding_rank_start: first rank of this rank's first sequence.
        following_rank_stop: one more than the last rank of this rank's last sequence; None is the number of ranks.
        initial_state: ``[N, HV, K, V]`` fp32 (fp64), of the same shape on every rank, one per batch row or per sequence
            of the whole stream (then ``metadata`` is needed). A row is read, and its gradient is nonzero, only where
            its sequence begins; on rank 0 for batch rows.
        output_final_state: return also the state after each local fragment or batch row, ``[fragments, HV, K, V]``.
        metadata: of packed sequences, made for this rank; replaces cu_seqlens, start and stop, and tells whether
            anything is exchanged.
        context: how exchanges are named and checked; one of ``cp_group`` if None.

    Returns:
        Tensor: ``[B, T, HV, V]`` in the dtype of q; with ``output_final_state`` the pair of it and the states.

    Raises:
        ValueError, TypeError, NotImplementedError: A wrong argument; on every rank if on one, at the first call.
        RuntimeError: Ranks disagree, or an exchange did not complete.

    Communication: one exchange per pass, on the context's schedule: an all-gather of ``HV K (V + K)`` numbers in fp32
        (fp64), times B unpacked; states from rank to rank; or composed maps. None if ``metadata`` says that no sequence
        crosses ranks.
    Every rank must call this: yes, and its backward, if some rank's input requires a gradient.
    Gradient: of the sum of all ranks' losses, once differentiable.
    Compilation: runs outside the graph, which ``torch.compile`` breaks before and after it.

    Example:
        >>> from gdn_cp.delta_product.torch import TorchGatedDeltaProductCPBackend
        >>> q, k, v = torch.rand(1, 4, 2, 3), torch.rand(1, 8, 2, 3), torch.rand(1, 8, 2, 3)
        >>> beta = torch.rand(1, 8, 2)
        >>> backend, context = TorchGatedDeltaProductCPBackend(), CPContext.single()
        >>> gdp_chunkwise_context_parallel(q, k, v, None, beta, None, 2, 1.0, None, backend, context=context).shape
        torch.Size([1, 4, 2, 3])
    """
    if torch.compiler.is_compiling():  # one break; traced into, each helper that meets a rank would be another
        eager = torch.compiler.disable(gdp_chunkwise_context_parallel)  # type: ignore[no-untyped-call]
        return eager(
            q, k, v, g, beta, cu_seqlens, num_householder, scale, cp_group, backend, preceding_rank_start,
            following_rank_stop, initial_state=initial_state, output_final_state=output_final_state, metadata=metadata,
            context=context,
        )  # fmt: skip
    context = context if context is not None else CPContext(cp_group)

    def make() -> tuple[Terms, tuple[Tensor | None, int, int, _Appended]]:
        local_cu, start, stop = cu_seqlens, preceding_rank_start, following_rank_stop
        _check_backend(backend)
        if local_cu is not None:
            checks.require_rank("cu_seqlens", local_cu, "fragments + 1")
            checks.require_dtype("cu_seqlens", local_cu, (torch.int32, torch.int64))
        if initial_state is not None:
            checks.require_rank("initial_state", initial_state, "N, HV, K, V")
        if metadata is not None:
            _check_metadata(metadata, local_cu, context)
            local_cu, start, stop = (
                metadata.local_cu_seqlens, metadata.preceding_rank_start, metadata.following_rank_stop
            )  # fmt: skip
        stop = context.size if stop is None else stop
        if not 0 <= start <= context.rank or not context.rank < stop <= context.size:
            raise ValueError(
                f"ranks must satisfy 0 <= preceding_rank_start <= {context.rank} < following_rank_stop <= "
                f"{context.size}, got {start} and {stop}"
            )
        bounds = metadata.bounds if metadata is not None else None
        if bounds is None and local_cu is not None and not local_cu.is_cuda:
            bounds = tuple(local_cu.tolist())
        spans = bounds if local_cu is not None and bounds is not None else None
        delta_product_arguments(q, k, v, beta, g, num_householder, scale, None, spans, 64)
        if local_cu is not None and q.shape[0] != 1:
            raise ValueError(f"cu_seqlens needs B = 1, got B = {q.shape[0]}")
        beginning, fragments = _beginning(context, q, local_cu, metadata, start, initial_state)
        exchange = metadata is None or metadata.any_crossing
        appended = _Appended(context, exchange, output_final_state, beginning, fragments, bounds)
        if initial_state is not None:
            dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
            shape = (len(initial_state), v.shape[2], q.shape[3], v.shape[3])
            checks.require_state("initial_state", initial_state, "N, HV, K, V", shape, dtype, q.device)
        wire = (
            ("B", q.shape[0]), ("HV", v.shape[2]), ("K", q.shape[3]), ("V", v.shape[3]),
            ("dtype", str(q.dtype).removeprefix("torch.")), ("packed", local_cu is not None),
            ("initial state", None if initial_state is None else len(initial_state)), ("any_crossing", exchange),
            ("schedule", context.schedule), ("link", digest(as_link(context.link))),
        )  # fmt: skip
        agreed = (
            ("H", q.shape[2]), ("R", num_householder), ("scale", scale), ("gate", g is not None),
            ("backend", type(backend).__name__),
            ("packed sequences", None if metadata is None else metadata.plan),
        )  # fmt: skip
        needs = any(x is not None and x.requires_grad for x in (q, k, v, g, beta, initial_state))
        return Terms(wire, agreed, needs, torch.is_grad_enabled()), (local_cu, start, stop, appended)

    if context.is_trivial:
        (local_cu, start, stop, appended), backward = make()[1], False
    else:
        device = q.device if isinstance(q, Tensor) else None
        (local_cu, start, stop, appended), backward = agree("gdp_chunkwise_context_parallel", context, device, make)
    tie = torch.empty(0, device=q.device, requires_grad=backward)
    return backend.autograd_function.apply(
        q, k, v, g, beta, local_cu, num_householder, scale, cp_group, backend, start, stop, initial_state, appended, tie
    )


def _check_backend(backend: object) -> None:
    """Raise TypeError unless the backend is an object with all that the protocol names."""
    if isinstance(backend, type) or not all(hasattr(backend, name) for name in _MEMBERS):
        given = f"the class {backend.__name__}" if isinstance(backend, type) else type(backend).__name__
        raise TypeError(f"backend must be a GDPChunkwiseCPBackend, as choose_backend makes them, got {given}")


def _check_metadata(metadata: object, cu_seqlens: Tensor | None, context: CPContext) -> None:
    """Raise unless the metadata were made for this rank and go together with ``cu_seqlens``."""
    if not isinstance(metadata, PackedSequenceCPMetadata):
        raise TypeError(f"metadata must be a PackedSequenceCPMetadata or None, got {type(metadata).__name__}")
    if cu_seqlens is not None and cu_seqlens is not metadata.local_cu_seqlens:
        raise ValueError("cu_seqlens must be None or metadata.local_cu_seqlens when metadata is given")
    if metadata.rank is not None and (metadata.rank, metadata.size) != (context.rank, context.size):
        raise ValueError(
            f"metadata must be made for this rank, {context.rank} of {context.size} ranks, got those of rank "
            f"{metadata.rank} of {metadata.size}"
        )


def _beginning(
    context: CPContext,
    q: Tensor,
    cu_seqlens: Tensor | None,
    metadata: PackedSequenceCPMetadata | None,
    start: int,
    initial_state: Tensor | None,
) -> tuple[tuple[tuple[int, int], ...], int]:
    """Return the (fragment, sequence) pairs that begin on this rank, and the number of fragments."""
    if cu_seqlens is None:
        if initial_state is not None and len(initial_state) != q.shape[0]:
            raise ValueError(f"initial_state must have N = B = {q.shape[0]} states, got {len(initial_state)}")
        return tuple((row, row) for row in range(q.shape[0])) if context.rank == 0 else (), q.shape[0]
    fragments = cu_seqlens.shape[0] - 1
    if initial_state is None:
        return (), fragments
    if metadata is None or len(metadata.fragment_sequences) != fragments:
        raise ValueError("initial_state of packed sequences needs metadata that numbers them, as TokenPartition.packed")
    held = metadata.fragment_sequences
    if min(held, default=0) < 0:
        raise ValueError(f"sequences must be numbered >= 0 when initial_state is given, got {min(held)}")
    if max(held, default=-1) >= len(initial_state):
        raise ValueError(f"initial_state must have a state for sequence {max(held)}, got N = {len(initial_state)}")
    first = 1 if start < context.rank else 0
    return tuple((fragment, held[fragment]) for fragment in range(first, fragments)), fragments
