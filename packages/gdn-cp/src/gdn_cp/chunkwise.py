"""The published interface of chunkwise context parallelism: a backend of local kernels, and the two passes over ranks.

A backend knows no process group. It turns the shard of a rank into a summary, an affine map of the state; the drivers
gather the summaries of all ranks and hand each rank those of the ranks that it depends on, or, on another schedule, one
that has their effect. Names, order of fields and
meaning are those of Megatron-LM's ``ssm.context_parallel.chunkwise``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from gdn_cp import collectives
from gdn_cp.affine import AffineMap
from gdn_cp.context import CPContext
from gdn_cp.cost_model import Choice, as_link, resolve_schedule
from gdn_cp.schedules import TRAVELS, over_ranks, wanted
from gdn_cp.schedules.lines import Route, line
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
    carries: bool | None = None,
    context: CPContext | None = None,
) -> CPForwardResult:
    """Run a backend's forward pass: prepare, exchange the summaries, apply those of ``preceding_slice``.

    Args:
        backend: the local kernels.
        inputs: this rank's shard, in the backend's own form.
        cp_group: process group; may be None with ``context``.
        preceding_slice: the ranks whose summaries lead to this rank's state.
        exchange: False, on every rank alike, if no rank depends on another: nothing is sent.
        needed: some rank reads this rank's summary. ``validate="always"`` fills one that is not with NaN before it is
            gathered.
        carries: the sequence that the summary is of came from an earlier rank, or this rank has no token. Chain and
            doubling have to know; with None, auto gathers.
        context: the schedule, the name of the exchange, and how it is checked; one of ``cp_group`` if None. On chain
            and doubling a backend gets one summary, ``[state | 0]``, in place of those of ``preceding_slice``.

    Raises:
        TypeError: The backend returned another summary.
        ValueError: A summary is not fp32 (fp64), not contiguous, or lies on two devices. Chain or doubling, and
            ``carries`` is None, or the summary's last two dims are not those of an increment and a square transition.
        RuntimeError: The exchange did not complete.

    Communication: one all-gather of the summary, or the messages of another schedule; none without ``exchange`` or with
        one rank.
    Every rank must call this: yes.
    Gradient: none of its own; `chunkwise_cp_backward` is the backward pass, for an autograd function to call.
    """
    context = context if context is not None else CPContext(cp_group)
    summary, local_context = backend.cp_forward_prepare(inputs=inputs)
    preceding = _exchanged(summary, _FORWARD, context, preceding_slice, exchange, needed, carries)
    output, saved = backend.cp_forward_apply(local_context=local_context, preceding_summaries=preceding)
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
    carries: bool | None = None,
    context: CPContext | None = None,
) -> CPGradientsT:
    """Run a backend's backward pass: prepare, exchange the adjoint summaries, apply those of ``following_slice``.

    Arguments, errors and communication are those of `chunkwise_cp_forward`; ``output_grad`` and ``saved_context``
    belong to its output, and ``carries`` says whether the summary's sequence goes on on a later rank.
    """
    context = context if context is not None else CPContext(cp_group)
    summary, backward_context = backend.cp_backward_prepare(output_grad=output_grad, saved_context=saved_context)
    following = _exchanged(summary, _BACKWARD, context, following_slice, exchange, needed, carries)
    return backend.cp_backward_apply(backward_context=backward_context, following_summaries=following)


@dataclasses.dataclass(frozen=True)
class _Pass:
    """A pass over the ranks: its name, the summaries that it takes, and whether states travel to higher ranks."""

    name: str
    kinds: tuple[type[Any], ...]
    upwards: bool


_FORWARD = _Pass("forward", (CPForwardPackedSummary, CPForwardUnpackedSummary), True)
_BACKWARD = _Pass("backward", (CPBackwardPackedSummary, CPBackwardUnpackedSummary), False)


def _exchanged(
    summary: _S, way: _Pass, context: CPContext, ranks: slice, exchange: bool, needed: bool, carries: bool | None
) -> _S:
    """Return the summaries of some ranks, or one that has their effect, with a leading axis."""
    tensors = _checked(summary, way)
    if not exchange or context.is_trivial:
        return _rebuilt(summary, [x[None][: 0 if not exchange else None][ranks] for x in tensors])
    label = f"chunkwise_cp {way.name}"
    choice = _choice(summary, context, carries)
    if choice.schedule == "all_gather":
        return _gathered(summary, tensors, context, label, ranks, needed)
    own = _map(summary)
    if not needed:
        own = AffineMap(*(torch.zeros_like(x) for x in own))
    route = Route(context.size, context.rank, choice.blocks)
    lines = [line(way.name, way.upwards, route, {"kv": own}, bool(carries))]
    ((entering,),) = [x.values() for x in over_ranks(TRAVELS[choice.schedule](route, lines), context, label)]
    parts = [torch.zeros_like(own.transition), entering]
    count = min(len(range(*ranks.indices(context.size))), 1)
    folded = parts if len(tensors) == 2 else [torch.cat(parts[::-1], dim=-1)]
    return _rebuilt(summary, [x[None][:count] for x in folded])


def _choice(summary: CPForwardSummary | CPBackwardSummary, context: CPContext, carries: bool | None) -> Choice:
    """Return how the summaries travel; auto gathers what it does not know."""
    schedule = wanted(context, _tensors(summary)[0].device)
    own = _map(summary)
    square = own is not None and own.transition.shape[-1] == own.transition.shape[-2] == own.increment.shape[-2]
    if schedule == "all_gather" or (schedule == "auto" and (own is None or not square or carries is None)):
        return Choice("all_gather", 1)
    if own is None or not square:
        shapes = " and ".join(str(list(x.shape)) for x in _tensors(summary))
        raise ValueError(
            f"schedule={schedule!r} needs summaries with a square transition [..., K, K] and an increment [..., K, V], "
            f"got {shapes}"
        )
    if carries is None:
        raise ValueError(f"schedule={schedule!r} needs carries: whether the sequence of the summary goes on")
    transition, increment = (x.numel() * x.element_size() for x in own)
    choice = resolve_schedule(schedule, context.size, transition, increment, as_link(context.link), directions=1)
    return choice._replace(blocks=min(choice.blocks, max(own.increment.shape[:-2].numel(), 1)))


def _map(summary: CPForwardSummary | CPBackwardSummary) -> Any:
    """Return the summary as a map; None if a packed one holds no matrices. It does not copy."""
    tensors = _tensors(summary)
    if len(tensors) == 2:
        return AffineMap(*tensors) if all(x.ndim >= 2 for x in tensors) else None
    (packed,) = tensors
    if packed.ndim < 2 or packed.shape[-1] < packed.shape[-2]:
        return None
    width = packed.shape[-1] - packed.shape[-2]
    return AffineMap(packed[..., width:], packed[..., :width])


def _checked(summary: CPForwardSummary | CPBackwardSummary, way: _Pass) -> list[Tensor]:
    """Return the tensors of a summary that a backend may return."""
    if type(summary) not in way.kinds:
        names = " or ".join(kind.__name__ for kind in way.kinds)
        raise TypeError(f"the backend must return a {names}, got {type(summary).__name__}")
    tensors = _tensors(summary)
    for x in tensors:
        if x.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"a summary must have dtype float32, float64, got {str(x.dtype).removeprefix('torch.')}")
        if not x.is_contiguous():
            raise ValueError(f"a summary must be contiguous, got strides {x.stride()} for shape {list(x.shape)}")
        if x.device != tensors[0].device or x.dtype != tensors[0].dtype:
            raise ValueError(f"a summary must lie on one device, in one dtype, got {x.device} and {tensors[0].device}")
    return tensors


def _gathered(summary: _S, tensors: list[Tensor], context: CPContext, label: str, ranks: slice, needed: bool) -> _S:
    """Return the summaries of some ranks with a leading axis; a pair travels as one buffer."""
    flat = tensors[0].view(-1) if len(tensors) == 1 else torch.cat([x.view(-1) for x in tensors])
    if context.validate == "always" and not needed:
        flat = torch.full_like(flat, float("nan"))
    gathered = collectives.all_gather(flat, context, label)
    parts = torch.split(gathered, [x.numel() for x in tensors], dim=1)
    shaped = [part.reshape(context.size, *x.shape)[ranks] for part, x in zip(parts, tensors, strict=True)]
    return _rebuilt(summary, shaped)


def _tensors(summary: CPForwardSummary | CPBackwardSummary) -> list[Tensor]:
    return [getattr(summary, field.name) for field in dataclasses.fields(summary)]


def _rebuilt(summary: _S, tensors: list[Tensor]) -> _S:
    kind: Any = type(summary)
    rebuilt: _S = kind(*tensors)
    return rebuilt
