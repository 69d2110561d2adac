"""Neighbouring frames (or tokens) from other ranks, for convolutions over them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gdn_cp import collectives
from gdn_cp.context import CPContext, as_context
from gdn_cp.handshake import Terms, agree, digest
from gdn_cp.partition import FramePartition, Partition
from gdn_kernels import checks
from gdn_kernels.once import once_differentiable


class HaloPlan:
    """Which frames one rank sends to and receives from every other: a function of the partition alone. Not written to.

    Attributes:
        counts, left, right: as given; ``rank`` of this process.
        receive: for each owner the clip's frames that this rank gets from it, in time order.
        send: for each peer the clip's frames of this rank that it gets.
    """

    def __init__(self, partition: Partition, rank: int, left: int, right: int) -> None:
        self.partition, self.rank, self.left, self.right = partition, rank, left, right
        self.receive = _frames_by_owner(partition, rank, left, right)
        self.send = [_frames_by_owner(partition, peer, left, right)[rank] for peer in range(partition.size)]

    def outgoing(self, x: Tensor) -> list[Tensor]:
        """Return what each peer gets of ``x``, this rank's frames along dim 0."""
        start = self.partition.starts[self.rank]
        return [x[_run(frames, start)] for frames in self.send]

    def extend(self, x: Tensor, pieces: list[Tensor], fill: float) -> Tensor:
        """Return ``x`` with the received frames around it along dim 0; ``fill`` outside the clip."""
        span = self.partition.span(self.rank)
        if not span:
            return x
        extended = x.new_full((self.left + len(span) + self.right, *x.shape[1:]), fill)
        extended[self.left : self.left + len(span)] = x
        for frames, piece in zip(self.receive, pieces, strict=True):
            if frames:
                extended[_run(frames, span.start - self.left)] = piece
        return extended

    def reduce(self, gradient: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Take the gradient of an extended tensor apart: this rank's own part, and what goes back to each owner."""
        span = self.partition.span(self.rank)
        if not span:
            return gradient.clone(), [gradient.new_empty(0, *gradient.shape[1:]) for _ in self.receive]
        back = [gradient[_run(frames, span.start - self.left)] for frames in self.receive]
        return gradient[self.left : self.left + len(span)].clone(), back

    def collect(self, own: Tensor, pieces: list[Tensor]) -> Tensor:
        """Add the gradients that came back for this rank's frames, in rank order, to its own part."""
        start = self.partition.starts[self.rank]
        for frames, piece in zip(self.send, pieces, strict=True):
            if frames:
                own[_run(frames, start)] += piece
        return own


@functools.lru_cache(maxsize=256)
def halo_plan(partition: Partition, rank: int, left: int, right: int) -> HaloPlan:
    """Return the plan of a rank; making one takes as many steps as the cube of the number of ranks."""
    return HaloPlan(partition, rank, left, right)


def halo_exchange(
    x: Tensor,
    left: int,
    right: int,
    dim: int,
    context: CPContext,
    partition: Partition,
    *,
    fill: float = 0.0,
    same: Tensor | None = None,
) -> Tensor:
    """Extend this rank's frames by ``left`` frames from before and ``right`` from after, whoever holds them.

    Args:
        x: this rank's frames along ``dim``, any strides.
        left: frames to add before, >= 0; with both sides 0, x itself comes back and no frame is sent.
        right: frames to add after, >= 0.
        dim: the dim of frames.
        context: the ranks.
        partition: frames, or tokens, of each rank, the same on every rank. A halo may span several
            short or empty ranks.
        fill: value of frames outside the clip.
        same: ``[left + F + right]`` bool or None, this rank's: halo frames where it is False, as those of another
            sequence, become ``fill``. Not looked at on a rank without frames.

    Returns:
        Tensor: ``left + F + right`` frames along ``dim``; a rank without frames gets its empty x.

    Raises:
        ValueError: A negative size, a dim that x does not have, or ``same`` does not fit; on every rank if on one.
        TypeError: An argument is of the wrong type.
        RuntimeError: The partition does not match context or x; the ranks disagree; an exchange did not complete.

    Communication: one all-to-all per pass, of the halo frames alone; backward the same way back.
    Every rank must call this: yes, also one without frames.
    Gradient: that of a halo frame goes to its owner and is added there; that of ``fill`` is dropped.

    Example:
        >>> x = torch.ones(1, 2, 3)
        >>> halo_exchange(x, 1, 0, 1, CPContext.single(), FramePartition((2,)))[0, :, 0]
        tensor([0., 1., 1.])
    """
    if not isinstance(context, CPContext):
        raise TypeError(f"context must be a CPContext, got {type(context).__name__}")
    return _exchange(x, left, right, dim, context, lambda: partition, fill, same)


def cp_halo_exchange(
    x: Tensor, left_size: int, right_size: int, dim: int, group: collectives.ProcessGroup | CPContext
) -> Tensor:
    """Extend equal shards by neighbouring frames, with the published arguments; zeros outside the clip.

    `halo_exchange` with a partition of as many frames on every rank as here; a halo may span several ranks.

    Args:
        x: this rank's frames along ``dim``; every rank has as many.
        left_size: frames to add before, >= 0.
        right_size: frames to add after, >= 0.
        dim: the dim of frames.
        group: a process group or a `CPContext`.

    Returns:
        Tensor: ``left_size + T + right_size`` frames along ``dim``; x itself with both sizes 0.

    Raises:
        ValueError, TypeError, RuntimeError: As `halo_exchange`; ranks with different numbers of frames disagree on the
            partition.

    Communication: one all-to-all per pass, of the halo frames alone.
    Every rank must call this: yes.
    Gradient: that of a halo frame goes to its owner and is added there; that of zeros is dropped.

    Example:
        >>> cp_halo_exchange(torch.ones(1, 2, 3), 1, 0, 1, CPContext.single())[0, :, 0]
        tensor([0., 1., 1.])
    """

    def partition() -> FramePartition:
        in_range = isinstance(x, Tensor) and -x.ndim <= dim < x.ndim
        return FramePartition(((x.shape[dim] if in_range else 1),) * context.size)

    context = as_context(group)
    return _exchange(x, left_size, right_size, dim, context, partition, 0.0, None)


def _exchange(
    x: Tensor,
    left: int,
    right: int,
    dim: int,
    context: CPContext,
    partition: Callable[[], Partition],
    fill: float,
    same: Tensor | None,
) -> Tensor:
    """Run `halo_exchange`; what ``partition`` raises is raised on all ranks."""
    if context.is_trivial:
        axis = _check(x, left, right, dim, context, partition(), same)
        if left == right == 0:
            return x
        plan = halo_plan(partition(), context.rank, left, right)
        extended = plan.extend(x.movedim(axis, 0), [x.movedim(axis, 0)[:0]], fill)
    elif torch.compiler.is_compiling():
        axis = _axis(x, dim)
        if left == right == 0:
            return x
        from gdn_cp.halo_op import call_op

        extended = call_op(x.movedim(axis, 0), context, partition(), left, right, fill)
        if same is not None and x.shape[axis]:
            _check_same(same, x, left + x.shape[axis] + right)
    else:
        (plan, axis), backward = agree_on_halo(x, left, right, dim, context, partition, fill, same)
        if left == right == 0:
            return x
        tie = torch.empty(0, device=x.device, requires_grad=backward)
        extended = _Halo.apply(x.movedim(axis, 0), plan, context, fill, tie)  # type: ignore[no-untyped-call]
    extended = extended.movedim(0, axis)
    if same is None or not x.shape[axis]:
        return extended
    shape = [1] * extended.ndim
    shape[axis] = -1
    return torch.where(same.reshape(shape), extended, extended.new_tensor(fill))


def agree_on_halo(
    x: Tensor,
    left: int,
    right: int,
    dim: int,
    context: CPContext,
    partition: Callable[[], Partition],
    fill: float,
    same: Tensor | None = None,
    traced: tuple[bool, bool] | None = None,
) -> tuple[tuple[HaloPlan, int], bool]:
    """Check the arguments and agree with the other ranks; returns plan and axis, and whether a backward will run.

    ``traced``: a graph says whether x needs a gradient, and the grad mode; x itself no longer knows.
    """

    def make() -> tuple[Terms, tuple[HaloPlan, int]]:
        found = partition()
        axis = _check(x, left, right, dim, context, found, same)
        rest = tuple(n for i, n in enumerate(x.shape) if i != axis)
        wire = (("shape apart from frames", rest), ("dtype", str(x.dtype)), ("left", left), ("right", right))
        agreed = (("partition", digest(found.counts)), ("fill", float(fill)))
        needs_grad, grad_mode = (x.requires_grad, torch.is_grad_enabled()) if traced is None else traced
        joins = traced is None or needs_grad or context.force_backward
        terms = Terms(wire, agreed, needs_grad and (left, right) != (0, 0), grad_mode, joins=joins)
        return terms, (halo_plan(found, context.rank, left, right), axis)

    return agree("halo_exchange", context, x.device if isinstance(x, Tensor) else None, make)


def _check(
    x: Tensor, left: int, right: int, dim: int, context: CPContext, partition: Partition, same: Tensor | None
) -> int:
    """Return the dim of frames, >= 0, or raise."""
    checks.require_tensor("x", x)
    if not isinstance(partition, Partition):
        raise TypeError(f"partition must be a FramePartition or TokenPartition, got {type(partition).__name__}")
    if operator.index(left) < 0 or operator.index(right) < 0:
        raise ValueError(f"left and right must be >= 0, got {left} and {right}")
    axis = _axis(x, dim)
    if partition.size != context.size or partition.counts[context.rank] != x.shape[axis]:
        raise RuntimeError(
            f"halo_exchange needs a partition of {context.size} ranks with {x.shape[axis]} {partition.unit}s on "
            f"rank {context.rank}, got {partition.counts}"
        )
    if same is not None and x.shape[axis]:
        _check_same(same, x, left + x.shape[axis] + right)
    return axis


def _check_same(same: Tensor, x: Tensor, frames: int) -> None:
    checks.require_shape("same", same, "left + F + right", (frames,))
    checks.require_dtype("same", same, (torch.bool,))
    checks.require_device("same", same, x.device, "x")


def _axis(x: Tensor, dim: int) -> int:
    checks.require_tensor("x", x)
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim must be a dim of x, which has {x.ndim}, got {dim}")
    return dim % x.ndim


def run_forward(x: Tensor, plan: HaloPlan, context: CPContext, fill: float) -> Tensor:
    """Return x, frames along dim 0, with the frames of others around it, in new memory."""
    sizes = [len(frames) * _row(x) for frames in plan.receive]
    received = collectives.all_to_all(plan.outgoing(x), sizes, context, "halo_exchange forward")
    pieces = [piece.view(len(f), *x.shape[1:]) for piece, f in zip(received, plan.receive, strict=True)]
    extended = plan.extend(x, pieces, fill)
    return extended.clone() if extended is x else extended


def run_backward(gradient: Tensor, plan: HaloPlan, context: CPContext) -> Tensor:
    """Return the gradient of x from that of what `run_forward` returned."""
    own, back = plan.reduce(gradient)
    sizes = [len(frames) * _row(gradient) for frames in plan.send]
    received = collectives.all_to_all(back, sizes, context, "halo_exchange backward")
    pieces = [piece.view(len(f), *gradient.shape[1:]) for piece, f in zip(received, plan.send, strict=True)]
    return plan.collect(own, pieces)


class _Halo(torch.autograd.Function):
    """Frames out, gradients back: one all-to-all each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: HaloPlan, context: CPContext, fill: float, tie: Tensor) -> Tensor:
        ctx.plan, ctx.context = plan, context
        ctx.save_for_backward(tie)
        return run_forward(x, plan, context, fill)

    @staticmethod
    @once_differentiable("halo_exchange")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return run_backward(gradient, ctx.plan, ctx.context), None, None, None, None


def _row(x: Tensor) -> int:
    """Numbers in one frame."""
    size = 1
    for n in x.shape[1:]:
        size *= n
    return size


def _frames_by_owner(partition: Partition, rank: int, left: int, right: int) -> list[list[int]]:
    frames: list[list[int]] = [[] for _ in range(partition.size)]
    for piece in partition.halo(rank, left, right):
        frames[piece.owner].extend(piece.span)
    return frames


def _run(frames: list[int], start: int) -> slice:
    """Return neighbouring frames, counted from ``start``, as a slice: indices would have to be copied to the device.

    What one rank takes of another's frames lies on one side of its own, and so without a gap.
    """
    return slice(frames[0] - start, frames[-1] + 1 - start) if frames else slice(0, 0)
