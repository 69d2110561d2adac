"""Context parallelism of modules: attach a context, weigh a loss, sum gradients.

Ranks of a context own consecutive frames of the same samples. A module then exchanges what its frames need of others,
and its outputs and the gradient of the *sum of all ranks' losses* are those of one process. Parameters are replicated,
so each rank holds a partial gradient: their sum over the context is the gradient (`all_reduce_gradients`), or a wrapper
averages them and the loss is weighted for that (`reduce_loss`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from gdn_cp import CPContext, FramePartition
from gdn_cp.collectives import all_reduce_sum
from gdn_cp.handshake import Terms, agree
from gdn_cp.partition import Partition
from gdn_kernels import checks
from gdn_kernels.once import once_differentiable
from gdn_models.gates import wide_dtype

_Model = TypeVar("_Model", bound=nn.Module)
_T = TypeVar("_T")


class Shard(NamedTuple):
    """This rank's part of the clip (or token stream) of one call; without a context the part is the clip.

    ``first`` and ``frames`` are the global index of the first local frame and the number of local frames, ``total`` the
    frames of the clip. ``context`` and ``partition`` are None, both, where nothing is to be exchanged.
    """

    first: int
    frames: int
    total: int
    context: CPContext | None
    partition: Any  # of the module's kind


class ContextParallelModule(nn.Module):
    """A module that can run on the frames, or tokens, of one rank; `apply_context_parallel` gives it the context."""

    partition_kind: ClassVar[type[Partition]] = FramePartition

    def __init__(self) -> None:
        """Start without a context."""
        super().__init__()
        self._attached = _Attached(None, None)

    @property
    def context(self) -> CPContext | None:
        """The attached context, or None."""
        return self._attached.context

    def attach_context(self, context: CPContext | None, partition: Partition | None = None) -> None:
        """Replace the context and the partition that calls without one use; one of another kind is left out."""
        partition = partition if isinstance(partition, self.partition_kind) else None
        self._attached = _Attached(context, partition)

    def shard(self, frames: int, partition: Partition | None) -> Shard:
        """Return this rank's part of a call with ``frames`` local frames, or tokens.

        Raises:
            RuntimeError: A partition without a context, a context of several ranks without a partition, or one whose
                sizes differ.
            ValueError: ``frames`` is not what the partition gives this rank.
            TypeError: ``partition`` is not of the module's kind.
        """
        kind, (context, default) = self.partition_kind, (self._attached.context, self._attached.partition)
        if partition is not None and not isinstance(partition, kind):
            raise TypeError(f"partition must be a {kind.__name__} or None, got {type(partition).__name__}")
        if context is None:
            if partition is not None:
                raise RuntimeError("partition needs a context: call apply_context_parallel(model, context) first")
            return Shard(0, frames, frames, None, None)
        partition = default if partition is None else partition
        if partition is None:
            if not context.is_trivial:
                raise RuntimeError(
                    f"a context of {context.size} ranks needs a partition: pass partition= to the call or to "
                    "apply_context_parallel"
                )
            return Shard(0, frames, frames, None, None)
        if partition.size != context.size:
            raise RuntimeError(
                f"partition must have as many ranks as the context, {context.size}, got {partition.size}"
            )
        if frames != partition.counts[context.rank]:
            owner = "grid" if kind is FramePartition else "x"
            raise ValueError(
                f"{owner} must have {kind.letter} = {partition.counts[context.rank]} {kind.unit}s, this rank's part of "
                f"the partition {tuple(partition.counts)} (rank {context.rank}), got {frames}"
            )
        if context.is_trivial:
            return Shard(0, frames, frames, None, None)
        return Shard(partition.starts[context.rank], frames, partition.total, context, partition)


def raise_on_all_ranks(error: Exception, op: str, context: CPContext, device: torch.device) -> NoReturn:
    """Raise this rank's error on every rank of the context, instead of leaving the others to wait for this one.

    Args:
        error: what a check of this rank's arguments raised.
        op: the operation of gdn_cp that the other ranks go on to.
        context: the ranks.
        device: where the message travels.

    Communication: the comparison that ``op`` makes the first time it is called on a group. Later errors are raised here
        alone, unless the context has ``validate="always"``; the others then wait for their group's time limit.
    """

    def fail() -> NoReturn:
        raise error

    agree(op, context, device, fail)
    raise error


def agree_on_call(
    op: str,
    context: CPContext,
    device: torch.device,
    check: Callable[[], _T],
    agreed: tuple[tuple[str, str], ...],
    further: tuple[tuple[str, str], ...] = (),
) -> _T:
    """Check this rank's arguments and compare what decides which operations follow; an error is one on every rank.

    For what no operation of gdn_cp would compare, because ranks that disagree on it call different ones.

    Args:
        op: starts the message.
        context: the ranks.
        device: where the comparison travels.
        check: checks this rank's arguments and returns what the caller goes on with.
        agreed: (name, value) pairs that must be equal on all ranks.
        further: more such pairs, which new values of do not make ranks compare again.

    Raises:
        Exception: ``check`` raised it: of its class on this rank, and of its class or a RuntimeError on the others.
        RuntimeError: The ranks disagree.

    Communication: one gather of 512 bytes per rank the first time ``agreed`` has these values in the group, or as
        ``validate`` of the context says. The host waits for it, so no graph of ``torch.compile`` can hold it.
    """
    value, _ = agree(op, context, device, lambda: (Terms(agreed, further, False, torch.is_grad_enabled()), check()))
    return value


def apply_context_parallel(model: _Model, context: CPContext | None, partition: Partition | None = None) -> _Model:
    """Attach a context to every module of ``model`` that can use one, and return the model.

    There is no process-wide context: two models may use different ones. Calling it again replaces the context; None
    takes it away. Copies of the model keep the context, pickles drop it.

    Args:
        model: a block, or anything that contains blocks.
        context: the ranks that share the clip, in time order.
        partition: frames (a `FramePartition`), or tokens (a `TokenPartition`), of each rank in calls that pass none. A
            call's own ``partition=`` wins.

    Raises:
        ValueError: Nothing in the model can use a context.
        TypeError: ``context`` or ``partition`` is of another type.
        RuntimeError: ``partition`` without a context, or of another number of ranks.

    Example:
        >>> from gdn_models import BidirectionalGDN
        >>> block = apply_context_parallel(BidirectionalGDN(dim=16, heads=2), CPContext.single())
        >>> block(torch.rand(1, 12, 16), (3, 2, 2)).shape
        torch.Size([1, 12, 16])
    """
    if context is not None and not isinstance(context, CPContext):
        raise TypeError(f"context must be a CPContext or None, got {type(context).__name__}")
    if partition is not None:
        if not isinstance(partition, Partition):
            raise TypeError(
                f"partition must be a FramePartition, a TokenPartition or None, got {type(partition).__name__}"
            )
        if context is None:
            raise RuntimeError("partition needs a context")
        if partition.size != context.size:
            raise RuntimeError(
                f"partition must have as many ranks as the context, {context.size}, got {partition.size}"
            )
    modules = [module for module in model.modules() if isinstance(module, ContextParallelModule)]
    if not modules:
        raise ValueError(f"model must contain a module of gdn_models, got {type(model).__name__} without any")
    for module in modules:
        module.attach_context(context, partition)
    return model


def reduce_loss(loss: Tensor, context: CPContext, n_local: int | Tensor) -> Tensor:
    """Turn the mean over this rank's tokens into the mean over all, with the gradient that averaging wrappers need.

    Value: ``sum_r L_r n_r / sum_r n_r``, equal on all ranks. Gradient: that of ``L_r n_r / mean(n)``, so that the
    *average* over the ranks of the parameter gradients (DDP or FSDP over the context's ranks) is the gradient of the
    value. With summed gradients (`all_reduce_gradients`) divide by the number of ranks, or weigh the loss with
    ``n_r / sum(n)`` instead.

    Args:
        loss: scalar, the mean over this rank's ``n_local`` tokens. On a rank without tokens its value is not read, and
            may be the NaN of an empty mean; it must still depend on the outputs, so that backward reaches every rank.
        context: the ranks.
        n_local: tokens of this rank, >= 0; a tensor without dimensions where the number is known to the device only.

    Returns:
        Tensor: scalar in the dtype of ``loss``.

    Raises:
        ValueError: ``loss`` or ``n_local`` is not a scalar, or ``n_local`` is negative.
        TypeError: An argument is of the wrong type.

    Communication: one sum of two numbers forward, nothing backward. Every rank must call this: yes.

    Example:
        >>> reduce_loss(torch.tensor(2.0), CPContext.single(), 12)
        tensor(2.)
    """
    _require_scalar("loss", loss)
    if isinstance(n_local, Tensor):
        _require_scalar("n_local", n_local)
    elif isinstance(n_local, bool) or not isinstance(n_local, int):
        raise TypeError(f"n_local must be an int or a tensor, got {type(n_local).__name__}")
    elif n_local < 0:
        raise ValueError(f"n_local must be >= 0, got {n_local}")
    if context.is_trivial:
        return loss
    with torch.no_grad():
        wide = wide_dtype(loss)
        n = n_local.to(wide) if isinstance(n_local, Tensor) else torch.full((), n_local, dtype=wide, device=loss.device)
        weighted = torch.where(n > 0, loss.detach().to(wide) * n, torch.zeros_like(n))
        total_loss, total = all_reduce_sum(torch.stack((weighted, n)), context).unbind()
        value, weight = total_loss / total, n * context.size / total
    result: Tensor = _WeightedLoss.apply(loss, value.to(loss.dtype), weight)  # type: ignore[no-untyped-call]
    return result


def all_reduce_gradients(
    parameters: nn.Module | Iterable[Tensor], context: CPContext, *, bucket_numel: int = 2**25
) -> None:
    """Sum the gradients of replicated parameters over the ranks of a context, in place, after ``loss.backward()``.

    This is all that plain training needs when every rank's loss is its part of a sum over tokens. A parameter without a
    gradient on this rank gets one if any rank has one and it requires one here; if no rank has one it keeps None. Which
    parameters are frozen may therefore differ over ranks. The number of collectives and their sizes follow from the
    parameters' shapes alone.

    Args:
        parameters: a model, or the parameters to reduce, the same in the same order on every rank. Parameters that are
            frozen on all ranks are better left out: they travel as zeros.
        context: the ranks.
        bucket_numel: most numbers in one collective, unless a single parameter has more.

    Raises:
        TypeError: ``parameters`` holds something that is not a tensor.
        NotImplementedError: A gradient is sparse.

    Communication: one sum per bucket of fp32 (fp64) numbers. Every rank must call this: yes. The host waits for the
    device only on a rank that lacks a gradient.

    Example:
        >>> layer = torch.nn.Linear(2, 1)
        >>> layer(torch.ones(1, 2)).sum().backward()
        >>> all_reduce_gradients(layer, CPContext.single())
        >>> layer.weight.grad
        tensor([[1., 1.]])
    """
    given = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
    for parameter in given:
        checks.require_tensor("parameters", parameter)
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise NotImplementedError("all_reduce_gradients supports dense gradients only, got a sparse one")
    if context.is_trivial:
        return
    for bucket in _buckets(given, bucket_numel):
        _all_reduce_bucket(bucket, context)


def _buckets(parameters: Sequence[Tensor], bucket_numel: int) -> list[list[Tensor]]:
    """Group parameters of one device and wide dtype, in order, up to ``bucket_numel`` numbers each."""
    closed: list[list[Tensor]] = []
    filling: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        bucket = filling.setdefault((parameter.device, wide_dtype(parameter)), [])
        if bucket and sum(x.numel() for x in bucket) + parameter.numel() > bucket_numel:
            closed.append(bucket[:])
            bucket.clear()
        bucket.append(parameter)
    return [*closed, *filling.values()]


@torch.no_grad()
def _all_reduce_bucket(parameters: Sequence[Tensor], context: CPContext) -> None:
    """Sum one flat buffer: all gradients, then for each parameter how many ranks have one."""
    sizes = [_local(parameter).numel() for parameter in parameters]
    held = [parameter.grad is not None for parameter in parameters]
    device = parameters[0].device
    buffer = torch.zeros(sum(sizes) + len(sizes), dtype=wide_dtype(parameters[0]), device=device)
    *parts, holders = torch.split(buffer, [*sizes, len(sizes)])
    for parameter, part in zip(parameters, parts, strict=True):
        if parameter.grad is not None:
            part.copy_(_local(parameter.grad).flatten())
    holders.copy_(torch.tensor(held))
    *parts, holders = torch.split(all_reduce_sum(buffer, context), [*sizes, len(sizes)])
    if any(parameter.requires_grad and parameter.grad is None for parameter in parameters):
        held = [count > 0 for count in holders.tolist()]
    for parameter, part, is_held in zip(parameters, parts, held, strict=True):
        if parameter.grad is None and parameter.requires_grad and is_held:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad is not None:
            _local(parameter.grad).copy_(part.view_as(_local(parameter.grad)))


def _local(x: Tensor) -> Tensor:
    """Return this rank's shard of a tensor that is sharded over another mesh axis, or the tensor itself."""
    local: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return local


def _require_scalar(name: str, value: object) -> None:
    checks.require_tensor(name, value)
    assert isinstance(value, Tensor)
    if value.ndim:
        raise ValueError(f"{name} must be a scalar, got shape {list(value.shape)}")


class _Attached:
    """Context and partition of a module. A copy of the module shares them; a pickle of it leaves them behind."""

    def __init__(self, context: CPContext | None, partition: Partition | None) -> None:
        self.context, self.partition = context, partition

    def __deepcopy__(self, memo: dict[int, Any]) -> _Attached:
        return self

    def __reduce__(self) -> tuple[type[_Attached], tuple[None, None]]:
        return _Attached, (None, None)


class _WeightedLoss(torch.autograd.Function):
    """A value given from outside, and ``weight`` times the gradient: the value of the argument is not read."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return value.clone()

    @staticmethod
    @once_differentiable("reduce_loss")
    def backward(ctx: Any, dvalue: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return (dvalue * weight).to(dvalue.dtype), None, None
