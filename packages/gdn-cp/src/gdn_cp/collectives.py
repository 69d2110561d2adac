"""The only file that calls ``torch.distributed``: packed gather, uneven all-to-all, sum, and what a group is."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from gdn_cp.handles import context_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from gdn_cp.context import CPContext

ProcessGroup = dist.ProcessGroup


@dataclasses.dataclass
class ExchangeCount:
    """Exchanges seen by `count_exchanges`: ``labels`` in order, ``sent`` bytes of each from this rank."""

    labels: list[str] = dataclasses.field(default_factory=list)
    sent: list[int] = dataclasses.field(default_factory=list)

    @property
    def total(self) -> int:
        """Number of exchanges."""
        return len(self.labels)


_counters: list[ExchangeCount] = []
_started = threading.local()  # the work of the exchange that this thread started last


@contextlib.contextmanager
def count_exchanges() -> Iterator[ExchangeCount]:
    """Count the collectives that gdn_cp issues inside the block, with the bytes this rank sends; for tests and reports.

    Example:
        >>> with count_exchanges() as exchanges:
        ...     pass  # run a block under context parallelism
        >>> exchanges.total
        0
    """
    counter = ExchangeCount()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)


def group_rank(group: ProcessGroup) -> int:
    """Return this process's rank in the group; RuntimeError if it is not a member."""
    rank = dist.get_rank(group)
    if rank < 0:
        raise RuntimeError(f"CPContext needs a process group that contains this rank (global rank {dist.get_rank()})")
    return rank


def group_size(group: ProcessGroup) -> int:
    """Return the number of ranks of the group."""
    return dist.get_world_size(group)


def global_rank(group: ProcessGroup, rank: int) -> int:
    """Return the global rank of a rank of the group."""
    return dist.get_global_rank(group, rank)


def mesh_group(mesh: DeviceMesh, axis: str | None) -> ProcessGroup:
    """Return the group of one axis of a mesh.

    Raises:
        RuntimeError: The mesh has several axes and none is named, or the axis does not list its ranks in ascending
            order: a group sorts its ranks, so that group ranks would not be the order along the axis.
    """
    names = mesh.mesh_dim_names or ()
    if axis is None and mesh.ndim > 1:
        raise RuntimeError(f"a mesh of {mesh.ndim} axes needs mesh_axis, one of {', '.join(map(repr, names))}")
    index = 0 if axis is None else names.index(axis) if axis in names else -1
    if index < 0:
        raise RuntimeError(f"mesh_axis must be one of {', '.join(map(repr, names))}, got {axis!r}")
    lines = mesh.mesh.movedim(index, -1).reshape(-1, mesh.mesh.shape[index])
    if bool((lines[:, 1:] <= lines[:, :-1]).any()):
        raise RuntimeError(f"mesh axis {axis!r} must list its ranks in ascending order, got {lines.tolist()}")
    return mesh.get_group(index)


def is_process_group(x: object) -> bool:
    """Whether ``x`` is a process group; RuntimeError for what a rank gets of a group that it is not in."""
    if x is dist.GroupMember.NON_GROUP_MEMBER:
        raise RuntimeError(f"CPContext needs a process group that contains this rank (global rank {dist.get_rank()})")
    return isinstance(x, ProcessGroup)


class Exchange:
    """An exchange on its way. `wait` makes the device's current stream wait for it, not the host (gloo: the host)."""

    def __init__(self, received: Tensor, work: Any, context: CPContext, label: str) -> None:
        self._received, self._work, self._context, self._label = received, work, context, label

    def wait(self) -> Tensor:
        """Return what was received.

        Raises:
            RuntimeError: The exchange did not complete; names operation, tag and rank, with the cause chained.
        """
        if self._work is not None:
            with _named(self._context, self._label, "wait for "):
                self._work.wait()
            self._work = None
        return self._received


def start_all_gather(buffer: Tensor, context: CPContext, label: str) -> Exchange:
    """Start gathering equal flat buffers of all ranks: ``[n]`` to ``[P, n]`` in rank order.

    Communication: one all-gather of the buffer. Every rank must call this: yes. Gradient: none.

    Raises:
        RuntimeError: The exchange could not start; names operation, tag and rank, with the cause chained.
    """
    received: Tensor = torch.ops.gdn_cp.exchange(buffer.contiguous(), context.handle, label)
    return Exchange(received, _take_work(), context, label)


def all_gather(buffer: Tensor, context: CPContext, label: str) -> Tensor:
    """Gather equal flat buffers of all ranks and wait; see `start_all_gather`."""
    return start_all_gather(buffer, context, label).wait()


def all_to_all(send: Sequence[Tensor], receive_sizes: Sequence[int], context: CPContext, label: str) -> list[Tensor]:
    """Send a flat tensor to every rank and receive one from each, of sizes that both sides know.

    Communication: one all-to-all. Every rank must call this: yes. Gradient: none.
    """
    buffer = torch.cat([x.reshape(-1) for x in send])
    sizes = [x.numel() for x in send]
    flat = torch.ops.gdn_cp.exchange_uneven(buffer, sizes, list(receive_sizes), context.handle, label)
    return list(torch.split(Exchange(flat, _take_work(), context, label).wait(), list(receive_sizes)))


def all_reduce_sum(tensor: Tensor, context: CPContext) -> Tensor:
    """Return the sum of ``tensor`` over the ranks, in a new tensor.

    Communication: one all-reduce. Every rank must call this: yes. Gradient: none, see `gdn_models.reduce_loss`.
    """
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    if not context.is_trivial:
        with _exchange(context, "all_reduce_sum", total.numel() * total.element_size()):
            dist.all_reduce(total, group=_group(context))
    return total


def gather_descriptors(descriptor: bytes, context: CPContext, device: torch.device, label: str) -> list[bytes]:
    """Gather one fixed-size descriptor of every rank; waits for it on the host. Not counted as an exchange."""
    group = _group(context)
    own = torch.frombuffer(bytearray(descriptor), dtype=torch.uint8).to(device)
    gathered = torch.empty(group_size(group) * own.numel(), dtype=torch.uint8, device=device)
    with _named(context, label):
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        _wait(gather(gathered, own, group=group, async_op=True))
        rows = gathered.cpu().view(group_size(group), -1)
    return [bytes(row.tolist()) for row in rows]


def _group(context: CPContext) -> ProcessGroup:
    group: ProcessGroup | None = context.process_group
    assert group is not None
    return group


def _take_work() -> Any:
    """Return the work that the operator called last has started; None if its result was kept from an earlier call."""
    work, _started.work = getattr(_started, "work", None), None
    return work


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


@contextlib.contextmanager
def _exchange(context: CPContext, label: str, sent: int) -> Iterator[None]:
    with _named(context, label):
        yield
    for counter in _counters:
        counter.labels.append(label)
        counter.sent.append(sent)


@contextlib.contextmanager
def _named(context: CPContext, label: str, what: str = "") -> Iterator[None]:
    """Put the exchange in a profiler range of its name, and its name into what goes wrong."""
    tag = f" (tag {context.tag})" if context.tag else ""
    try:
        with torch.profiler.record_function(f"gdn_cp: {what}{label}{tag}"):
            yield
    except RuntimeError as error:
        raise RuntimeError(
            f"gdn_cp: exchange of {label}{tag} did not complete on rank {context.rank} of {context.size}"
        ) from error


def _gather_op(buffer: Tensor, handle: str, label: str) -> Tensor:
    context = context_of(handle)
    group = _group(context)
    gathered = torch.empty(group_size(group) * buffer.numel(), dtype=buffer.dtype, device=buffer.device)
    with _exchange(context, label, buffer.numel() * buffer.element_size()):
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the latter until torch 2.13
        _started.work = gather(gathered, buffer, group=group, async_op=True)
    return gathered.view(group_size(group), buffer.numel())


def _uneven_op(buffer: Tensor, send: list[int], receive: list[int], handle: str, label: str) -> Tensor:
    context = context_of(handle)
    received = torch.empty(sum(receive), dtype=buffer.dtype, device=buffer.device)
    with _exchange(context, label, buffer.numel() * buffer.element_size()):
        group = _group(context)
        _started.work = dist.all_to_all_single(received, buffer, receive, send, group=group, async_op=True)
    return received


# Operators, so that a checkpoint can keep what they return. They start an exchange; its work is picked up at once.
_library: Any = torch.library.Library("gdn_cp", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("exchange(Tensor buffer, str context, str label) -> Tensor")
_library.impl("exchange", _gather_op, "CompositeExplicitAutograd")
_library.define("exchange_uneven(Tensor buffer, int[] send, int[] receive, str context, str label) -> Tensor")
_library.impl("exchange_uneven", _uneven_op, "CompositeExplicitAutograd")
