"""Which processes share a clip, and how their exchanges are checked."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from gdn_cp import collectives
from gdn_cp.cost_model import SCHEDULES, Link, as_link
from gdn_cp.handles import new_handle

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_SCHEDULES = ("auto", *SCHEDULES)
_VALIDATE = ("first", "always", "never")


@dataclasses.dataclass(frozen=True, eq=False)
class CPContext:
    """The ranks of one context-parallel group; rank order is time order. Nothing is process-global: models may differ.

    With ``validate="first"``, which ranks need a gradient may change from call to call: if one did when a kind of call
    was first compared, every rank runs the backward of all such calls, and one that needs none is cheaper under
    ``no_grad``. Two changes go unseen, as ranks that see none do not compare, and end in a time limit, or in a process
    that its backend ends. One: no rank needed a gradient at the first call of a kind, and later some do and others do
    not. Two: a shape other than the number of frames, the grad mode or an option becomes another one on some ranks
    only, after the first call. ``force_backward=True`` avoids the first, ``validate="always"`` finds both.

    Attributes:
        group: a process group that contains this rank; or
        mesh: a device mesh, with ``mesh_axis`` if it has several axes. Exactly one of the two; `CPContext.single` needs
            neither.
        schedule: how summaries travel: ``"all_gather"``, one collective; ``"chain"``, states from neighbour to
            neighbour; ``"doubling"``, composed maps over 1, 2, 4, ... ranks; ``"auto"`` asks `gdn_cp.cost_model`,
            and stays with the gather where messages between GPUs would go over the host.
            A final state needs all_gather, or auto, which then takes it.
        link: what the model assumes of the link, ``"nvlink"``, ``"infiniband"``, ``"ethernet"`` or what
            `gdn_cp.cost_model.measure_link` found; decides what auto takes and into how many parts a chain is cut.
            The same on every rank.
        validate: ``"first"`` compares the ranks' arguments the first time a kind of call is seen, ``"always"`` on every
            call, and fills what a rank must not read with NaN (waits on the host: for tests), ``"never"`` does not. The
            same on every rank.
        save_transitions: keep the gathered transitions for the backward (P * 2 D^2 numbers per batch element and head
            and call) instead of sending them again.
        force_backward: take part in backward exchanges even if nothing on any rank was seen to need a gradient; the
            same on every rank. Under ``torch.compile`` a rank without gradients needs it, on all ranks, if others have
            some: a graph cannot know.
        tag: a name for errors and profiles, as ``"blocks.3"``.

    Raises:
        TypeError: ``group`` is not a process group, or ``link`` neither a `gdn_cp.cost_model.Link` nor a name.
        ValueError: Both or neither of group and mesh, or an unknown option.
        RuntimeError: The group does not contain this rank, or the mesh axis is not ascending.
    """

    group: Any = None
    _: dataclasses.KW_ONLY
    mesh: DeviceMesh | None = None
    mesh_axis: str | None = None
    schedule: str = "auto"
    link: Link | str = "nvlink"
    validate: str = "first"
    save_transitions: bool = True
    force_backward: bool = False
    tag: str = ""
    alone: bool = dataclasses.field(default=False, repr=False)
    process_group: Any = dataclasses.field(default=None, init=False, repr=False)
    rank: int = dataclasses.field(default=0, init=False)
    size: int = dataclasses.field(default=1, init=False)
    handle: str = dataclasses.field(default="", init=False, repr=False)
    tie: Any = dataclasses.field(default=None, init=False, repr=False)  # with force_backward: it requires a gradient

    def __post_init__(self) -> None:
        object.__setattr__(self, "handle", new_handle(self))
        if self.force_backward:
            object.__setattr__(self, "tie", torch.empty(0, requires_grad=True))
        for name, value, allowed in (("schedule", self.schedule, _SCHEDULES), ("validate", self.validate, _VALIDATE)):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
        as_link(self.link)
        if self.alone:
            if self.group is not None or self.mesh is not None:
                raise ValueError("a context of one process takes neither group nor mesh")
            return
        if (self.group is None) == (self.mesh is None):
            raise ValueError("CPContext needs exactly one of group and mesh; CPContext.single() needs neither")
        if self.mesh is not None:
            group = collectives.mesh_group(self.mesh, self.mesh_axis)
        else:
            group = self.group
            if not collectives.is_process_group(group):
                raise TypeError(f"group must be a torch.distributed.ProcessGroup, got {type(group).__name__}")
        object.__setattr__(self, "process_group", group)
        object.__setattr__(self, "rank", collectives.group_rank(group))
        object.__setattr__(self, "size", collectives.group_size(group))

    @classmethod
    def single(cls) -> CPContext:
        """Return the context of one process, which needs no ``torch.distributed``."""
        return cls(alone=True)

    @property
    def is_trivial(self) -> bool:
        """Whether there is one rank: operations then are the local ones, to the last bit."""
        return self.size == 1

    def global_rank(self, rank: int) -> int:
        """Return the global rank of a rank of this context."""
        return 0 if self.process_group is None else collectives.global_rank(self.process_group, rank)

    def replace(self, **fields: Any) -> CPContext:
        """Return a context with some fields changed."""
        return dataclasses.replace(self, **fields)


def as_context(group: object) -> CPContext:
    """Return ``group`` if it is a context, or the context of a process group: published functions take either.

    Raises:
        TypeError: It is neither.
        RuntimeError: The group does not contain this rank.
    """
    if isinstance(group, CPContext):
        return group
    if not collectives.is_process_group(group):
        raise TypeError(f"group must be a torch.distributed.ProcessGroup or a CPContext, got {type(group).__name__}")
    return CPContext(group)
