"""The only file that calls ``torch.distributed``: gather, swap, uneven all-to-all, sum, and what a group is."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gdn_cp.checkpoint import current_log

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from gdn_cp.context import CPContext

ProcessGroup = dist.ProcessGroup


@dataclasses.dataclass
class ExchangeCount:
    """Exchanges seen by `count_exchanges`, in order, and of each what this rank sent.

    An exchange is a collective, or all rounds of a schedule of point-to-point messages in one pass.

    Attributes:
        labels: operation and pass of each exchange.
        sent: bytes.
        messages: messages; 1 for a collective.
    """

    labels: list[str] = dataclasses.field(default_factory=list)
    sent: list[int] = dataclasses.field(default_factory=list)
    messages: list[int] = dataclasses.field(default_factory=list)

    @property
    def total(self) -> int:
        """Number of exchanges."""
        return len(self.labels)


_counters: list[ExchangeCount] = []
_opened: weakref.WeakSet[Any] = weakref.WeakSet()  # groups that all ranks have met in


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


@contextlib.contextmanager
def world_of_environment() -> Iterator[tuple[ProcessGroup, torch.device]]:
    """Join the group of all ranks that a launcher describes in the environment; yields it and this rank's device.

    NCCL and a GPU per rank where there are enough of them, else gloo and the CPU.
    """
    local = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        world = dist.group.WORLD
        assert world is not None
        yield world, device
    finally:
        dist.destroy_process_group()


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


def sends_over_host(context: CPContext, device: torch.device) -> bool:
    """Whether messages between ranks have to lie on the host: gloo gathers from a GPU, but sends none from there."""
    return device.type != "cpu" and dist.get_backend(_group(context)) == "gloo"


def all_gather(buffer: Tensor, context: CPContext, label: str, meanwhile: Callable[[], None] | None = None) -> Tensor:
    """Gather equal flat buffers of all ranks: ``[n]`` to ``[P, n]`` in rank order.

    ``meanwhile`` is called once the exchange is under way, and before it is waited for.

    Communication: one all-gather of the buffer. Every rank must call this: yes. Gradient: none.

    Raises:
        RuntimeError: The exchange did not complete; names operation, tag and rank, with the cause chained.
    """
    log = current_log()
    if log is not None and log.replays:
        if meanwhile is not None:
            meanwhile()
        return cast(Tensor, log.take())
    group = _group(context)
    flat = buffer.contiguous()
    with _exchange(context, label, flat.numel() * flat.element_size()):
        gathered, work = _start_gather(flat, group)
    if meanwhile is not None:
        meanwhile()
    with _named(context, label):
        _wait(work)
    if log is not None:
        log.put(gathered)
    return gathered


def all_to_all(send: Sequence[Tensor], receive_sizes: Sequence[int], context: CPContext, label: str) -> list[Tensor]:
    """Send a flat tensor to every rank and receive one from each, of sizes that both sides know.

    Communication: one all-to-all. Every rank must call this: yes. Gradient: none.
    """
    log = current_log()
    if log is not None and log.replays:
        return list(log.take())
    group = _group(context)
    sizes = [x.numel() for x in send]
    buffer = torch.cat([x.reshape(-1) for x in send])
    received = torch.empty(sum(receive_sizes), dtype=buffer.dtype, device=buffer.device)
    with _exchange(context, label, buffer.numel() * buffer.element_size()):
        _wait(dist.all_to_all_single(received, buffer, list(receive_sizes), sizes, group=group, async_op=True))
    parts = list(torch.split(received, list(receive_sizes)))
    if log is not None:
        log.put(parts)
    return parts


def swap(
    sends: Sequence[tuple[int, Tensor]],
    receives: Sequence[tuple[int, int]],
    like: Tensor,
    context: CPContext,
    label: str,
    *,
    continued: bool = False,
    meanwhile: Callable[[], None] | None = None,
) -> list[Tensor]:
    """Send flat tensors to some ranks and receive from some, all at once.

    Args:
        sends: (rank, tensor) pairs, at most one per rank; a rank is one of the context.
        receives: (rank, number of elements) pairs, at most one per rank.
        like: a tensor of the dtype and device of what arrives.
        context: the ranks.
        label: name of the exchange.
        continued: this is a further round of the exchange that was counted last.
        meanwhile: called once the messages are under way, and before they are waited for.

    Communication: one batch of point-to-point messages. Every rank must call this: those that its messages name. The
        first time on a group that no collective was made on, all ranks must, for one gather of one element before it.
        Gradient: none.
    """
    log = current_log()
    if log is not None and log.replays:
        if meanwhile is not None:
            meanwhile()
        return list(log.take())
    group = _group(context)
    device = torch.device("cpu") if sends_over_host(context, like.device) else like.device
    outgoing = [(rank, x.to(device).contiguous()) for rank, x in sends if x.numel()]  # nothing is not worth a message
    received = [torch.empty(size, dtype=like.dtype, device=device) for _, size in receives]
    sent = sum(x.numel() * x.element_size() for _, x in outgoing)
    with _exchange(context, label, sent, len(outgoing), continued=continued):
        if group not in _opened:  # NCCL wants every rank in a group's first operation
            _gather(like.new_zeros(1), group)
        operations = [dist.P2POp(dist.isend, x, global_rank(group, rank), group) for rank, x in outgoing]
        for (rank, size), x in zip(receives, received, strict=True):
            if size:
                operations.append(dist.P2POp(dist.irecv, x, global_rank(group, rank), group))
        pending = dist.batch_isend_irecv(operations) if operations else []
    if meanwhile is not None:
        meanwhile()
    with _named(context, label):
        for work in pending:
            _wait(work)
    arrived = [x.to(like.device) for x in received]
    if log is not None:
        log.put(arrived)
    return arrived


def all_reduce_sum(tensor: Tensor, context: CPContext) -> Tensor:
    """Return the sum of ``tensor`` over the ranks, in a new tensor.

    Communication: one all-reduce. Every rank must call this: yes. Gradient: none, see `gdn_models.reduce_loss`.
    """
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    if not context.is_trivial:
        with _exchange(context, "all_reduce_sum", total.numel() * total.element_size()):
            dist.all_reduce(total, group=_group(context))
    return total


def gather_descriptors(descriptor: bytes, context: CPContext, device: torch.device | None, label: str) -> list[bytes]:
    """Gather one fixed-size descriptor of every rank; waits for it on the host. Not counted as an exchange."""
    group = _group(context)
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    own = torch.frombuffer(bytearray(descriptor), dtype=torch.uint8).to(descriptor_device(list(backends), device))
    with _named(context, label):
        rows = _gather(own, group).cpu()
    if len(set(backends.values())) == 1:
        _opened.add(group)
    return [bytes(row.tolist()) for row in rows]


def descriptor_device(sends: Sequence[str], device: torch.device | None) -> torch.device:
    """Return where a descriptor travels in a group that ``sends`` tensors of these devices: the same on all ranks.

    On the CPU if that can be, else on ``device`` if it is of such a kind: ranks with tensors elsewhere take part.
    """
    if "cpu" in sends:
        return torch.device("cpu")
    return device if device is not None and device.type in sends else torch.device(sends[0])


def _group(context: CPContext) -> ProcessGroup:
    group: ProcessGroup | None = context.process_group
    assert group is not None
    return group


def _gather(flat: Tensor, group: ProcessGroup) -> Tensor:
    gathered, work = _start_gather(flat, group)
    _wait(work)
    return gathered


def _start_gather(flat: Tensor, group: ProcessGroup) -> tuple[Tensor, Any]:
    size = group_size(group)
    gathered = torch.empty(size * flat.numel(), dtype=flat.dtype, device=flat.device)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the latter until torch 2.13
    return gathered.view(size, flat.numel()), gather(gathered, flat, group=group, async_op=True)


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


@contextlib.contextmanager
def _exchange(
    context: CPContext, label: str, sent: int, messages: int = 1, *, continued: bool = False
) -> Iterator[None]:
    with _named(context, label):
        yield
    _opened.add(context.process_group)
    for counter in _counters:
        if not continued:
            counter.labels.append(label)
            counter.sent.append(0)
            counter.messages.append(0)
        counter.sent[-1] += sent
        counter.messages[-1] += messages


@contextlib.contextmanager
def _named(context: CPContext, label: str) -> Iterator[None]:
    """Put the exchange in a profiler range of its name, and its name into what goes wrong."""
    tag = f" (tag {context.tag})" if context.tag else ""
    try:
        with torch.profiler.record_function(f"gdn_cp: {label}{tag}"):
            yield
    except RuntimeError as error:
        raise RuntimeError(
            f"gdn_cp: exchange of {label}{tag} did not complete on rank {context.rank} of {context.size}"
        ) from error
