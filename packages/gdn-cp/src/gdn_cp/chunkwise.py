"""The published interface of chunkwise context parallelism: a backend of local kernels, and the two passes over ranks.

A backend knows no process group. It turns the shard of a rank into a summary, an affine map of the state; the drivers
gather the summaries of all ranks and hand each rank those of the ranks that it depends on. Names, order of fields and
meaning are those of Megatron-LM's ``ssm.context_parallel.chunkwise``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from gdn_cp import collectives
from gdn_cp.context import CPContext
from gdn_cp.token_partition import PackedSequenceCPMetadata, build_packed_sequence_cp_metadata

__all__ = [
    "CPBackwardPackedSummary",
    "CPBackwardSummary",
    "CPBackwardUnpackedSummary",
    "CPForwardPackedSummary",
    "CPForwardResult",
    "CPForwardSummary",
    "CPForwardUnpackedSummary",
    "CPSavedContext",
    "LinearAttentionCPBackend",
    "PackedSequenceCPMetadata",
    "build_packed_sequence_cp_metadata",
    "chunkwise_cp_backward",
    "chunkwise_cp_forward",
]


@dataclasses.dataclass(frozen=True)
class CPForwardUnpackedSummary:
    """``S_out = transition @ S_in + state_update`` of one shard."""

    transition: Tensor
    state_update: Tensor


@dataclasses.dataclass(frozen=True)
class CPForwardPackedSummary:
    """The same in one tensor: ``[state_update | transition]`` along the last dim."""

    packed: Tensor


@dataclasses.dataclass(frozen=True)
class CPBackwardUnpackedSummary:
    """``dS_in = transition @ dS_out + local_state_grad`` of a shard: the transition is that of forward, transposed."""

    transition: Tensor
    local_state_grad: Tensor


@dataclasses.dataclass(frozen=True)
class CPBackwardPackedSummary:
    """The same in one tensor: ``[local_state_grad | transition]`` along the last dim."""

    packed: Tensor


CPForwardSummary = CPForwardUnpackedSummary | CPForwardPackedSummary
CPBackwardSummary = CPBackwardUnpackedSummary | CPBackwardPackedSummary


@dataclasses.dataclass(frozen=True)
class CPSavedContext:
    """What a backend keeps for its backward: ``tensors`` for ``save_for_backward``, and metadata without tensors."""

    tensors: tuple[Tensor, ...]
    metadata: object | None = None


@dataclasses.dataclass(frozen=True)
class CPForwardResult:
    """Output of the forward pass, and what the backward pass needs."""

    output: Any
    saved_context: CPSavedContext


CPInputT = TypeVar("CPInputT", contravariant=True)
LocalContextT = TypeVar("LocalContextT")
BackwardContextT = TypeVar("BackwardContextT")
CPGradientsT = TypeVar("CPGradientsT", covariant=True)
_S = TypeVar("_S", CPForwardSummary, CPBackwardSummary)


class LinearAttentionCPBackend(Protocol[CPInputT, LocalContextT, BackwardContextT, CPGradientsT]):
    """The local work of one shard; arguments are passed by name.

    Summaries handed to ``*_apply`` have a leading axis of ranks, in rank order; of length 0 it means a state, or a
    gradient of the state, of zero.
    """

    def cp_forward_prepare(self, inputs: CPInputT) -> tuple[CPForwardSummary, LocalContextT]:
        """Summarise the shard."""
        ...

    def cp_forward_apply(
        self, local_context: LocalContextT, preceding_summaries: CPForwardSummary
    ) -> tuple[Any, CPSavedContext]:
        """Fold the summaries of earlier ranks in ascending order, and compute the output from that state."""
        ...

    def cp_backward_prepare(
        self, output_grad: Any, saved_context: CPSavedContext
    ) -> tuple[CPBackwardSummary, BackwardContextT]:
        """Summarise the adjoint of the shard."""
        ...

    def cp_backward_apply(
        self, backward_context: BackwardContextT, following_summaries: CPBackwardSummary
    ) -> CPGradientsT:
        """Fold the summaries of later ranks in descending order, and compute the gradients from that state gradient."""
        ...


def chunkwise_cp_forward(
    backend: LinearAttentionCPBackend[CPInputT, Any, Any, Any],
    inputs: CPInputT,
    cp_group: Any,
    preceding_slice: slice,
    *,
    exchange: bool = True,
    needed: bool = True,
    context: CPContext | None = None,
) -> CPForwardResult:
    """Run a backend's forward pass: prepare, gather the summaries, apply those of ``preceding_slice``.

    Args:
        backend: the local kernels.
        inputs: this rank's shard, in the backend's own form.
        cp_group: process group; may be None with ``context``.
        preceding_slice: the ranks whose summaries lead to this rank's state.
        exchange: False, on every rank alike, if no rank depends on another: nothing is sent.
        needed: some rank reads this rank's summary. ``validate="always"`` fills one that is not with NaN.
        context: names the exchange, and how it is checked; one of ``cp_group`` if None.

    Raises:
        TypeError: The backend returned another summary.
        ValueError: A summary is not fp32 (fp64), not contiguous, or lies on two devices.
        RuntimeError: The exchange did not complete.

    Communication: one all-gather of the summary; none without ``exchange`` or with one rank.
    Every rank must call this: yes.
    Gradient: none of its own; `chunkwise_cp_backward` is the backward pass, for an autograd function to call.
    """
    context = context if context is not None else CPContext(cp_group)
    summary, local_context = backend.cp_forward_prepare(inputs=inputs)
    gathered = _gather(summary, _FORWARD, context, "chunkwise_cp forward", exchange, needed)
    output, saved = backend.cp_forward_apply(
        local_context=local_context, preceding_summaries=_select(gathered, preceding_slice if exchange else slice(0))
    )
    return CPForwardResult(output, saved)


def chunkwise_cp_backward(
    backend: LinearAttentionCPBackend[Any, Any, Any, CPGradientsT],
    output_grad: Any,
    saved_context: CPSavedContext,
    cp_group: Any,
    following_slice: slice,
    *,
    exchange: bool = True,
    needed: bool = True,
    context: CPContext | None = None,
) -> CPGradientsT:
    """Run a backend's backward pass: prepare, gather the adjoint summaries, apply those of ``following_slice``.

    Arguments, errors and communication are those of `chunkwise_cp_forward`; ``output_grad`` and ``saved_context``
    belong to its output.
    """
    context = context if context is not None else CPContext(cp_group)
    summary, backward_context = backend.cp_backward_prepare(output_grad=output_grad, saved_context=saved_context)
    gathered = _gather(summary, _BACKWARD, context, "chunkwise_cp backward", exchange, needed)
    return backend.cp_backward_apply(
        backward_context=backward_context,
        following_summaries=_select(gathered, following_slice if exchange else slice(0)),
    )


_FORWARD = (CPForwardPackedSummary, CPForwardUnpackedSummary)
_BACKWARD = (CPBackwardPackedSummary, CPBackwardUnpackedSummary)


def _gather(
    summary: _S, kinds: tuple[type[Any], ...], context: CPContext, label: str, exchange: bool, needed: bool
) -> _S:
    """Return the summary with a leading axis of ranks; a pair travels as one buffer."""
    if type(summary) not in kinds:
        names = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"the backend must return a {names}, got {type(summary).__name__}")
    tensors = _tensors(summary)
    for x in tensors:
        if x.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"a summary must have dtype float32, float64, got {str(x.dtype).removeprefix('torch.')}")
        if not x.is_contiguous():
            raise ValueError(f"a summary must be contiguous, got strides {x.stride()} for shape {list(x.shape)}")
        if x.device != tensors[0].device or x.dtype != tensors[0].dtype:
            raise ValueError(f"a summary must lie on one device, in one dtype, got {x.device} and {tensors[0].device}")
    if not exchange or context.is_trivial:
        return _rebuilt(summary, [x[None] for x in tensors])
    flat = tensors[0].view(-1) if len(tensors) == 1 else torch.cat([x.view(-1) for x in tensors])
    if context.validate == "always" and not needed:
        flat = torch.full_like(flat, float("nan"))
    gathered = collectives.all_gather(flat, context, label)
    parts = torch.split(gathered, [x.numel() for x in tensors], dim=1)
    return _rebuilt(summary, [part.reshape(context.size, *x.shape) for part, x in zip(parts, tensors, strict=True)])


def _select(summary: _S, ranks: slice) -> _S:
    return _rebuilt(summary, [x[ranks] for x in _tensors(summary)])


def _tensors(summary: CPForwardSummary | CPBackwardSummary) -> list[Tensor]:
    return [getattr(summary, field.name) for field in dataclasses.fields(summary)]


def _rebuilt(summary: _S, tensors: list[Tensor]) -> _S:
    kind: Any = type(summary)
    rebuilt: _S = kind(*tensors)
    return rebuilt
