"""What one rank knows of a pass in one direction, from either end of the ranks, and what it does between collectives.

States are in the left form; z is a state of one column. Transitions need not be symmetric.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gdn_cp import affine, collectives
from gdn_cp.affine import AffineMap
from gdn_cp.context import CPContext
from gdn_cp.handshake import Terms
from gdn_cp.wire import WireLayout

Exchange = Callable[[list[Tensor], str], Tensor]


@dataclasses.dataclass(frozen=True)
class ScanPlan:
    """What one rank knows of a pass in one direction.

    Attributes:
        size, rank: of the group.
        is_reversed: states pass from the last rank to the first.
        streams: ``("kv", "z")`` or ``("kv",)``.
        lead: leading dims of a state, ``(B*H,)`` or ``(B, H)``.
        width, dtype, device: of the states.
        has_final: the state after all frames is returned.
        active: how many of this rank's frames change the state.
        save_transitions: the backward finds the gathered transitions saved, and does not send them again.
        fold_kernel: fold the maps of ranks with the Triton kernel, which takes ``lead = (B, H)`` and fp32.
    """

    size: int
    rank: int
    is_reversed: bool
    streams: tuple[str, ...]
    lead: tuple[int, ...]
    width: int
    dtype: torch.dtype
    device: torch.device
    has_final: bool
    active: int
    save_transitions: bool = True
    fold_kernel: bool = False

    @property
    def order(self) -> range:
        """The ranks in the order of states."""
        ranks = range(self.size)
        return ranks[::-1] if self.is_reversed else ranks

    @property
    def place(self) -> int:
        """How many ranks come before this one in the order of states."""
        return self.order.index(self.rank)

    def layout(self, *kinds: str) -> WireLayout:
        """Layout of blocks ``kind_stream``: ``transition`` is square, ``state`` and ``final`` as wide as the stream."""
        pairs = [(kind, stream) for kind in kinds for stream in self.streams]
        columns = [self.width if kind == "transition" or stream == "kv" else 1 for kind, stream in pairs]
        shapes = tuple((*self.lead, self.width, n) for n in columns)
        return WireLayout(tuple("_".join(pair) for pair in pairs), shapes, self.dtype)

    def publish(self, maps: dict[str, AffineMap]) -> Tensor:
        """Return what this rank sends forward: the map of its frames, per stream."""
        blocks = [maps[stream].transition for stream in self.streams] + [maps[s].increment for s in self.streams]
        return self.layout("transition", "state").pack(blocks, self.device)

    def entries(self, gathered: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return this rank's entry states and, if wanted, the final ones, from the buffers of all ranks."""
        blocks = self.layout("transition", "state").unpack(gathered)
        entry, final = {}, {}
        for stream in self.streams:
            ranks = self.order if self.has_final else self.order[: self.place]
            states = self._fold(blocks[f"transition_{stream}"], blocks[f"state_{stream}"], None, ranks)
            entry[stream] = states[self.place]
            if self.has_final:
                final[stream] = states[-1].clone()  # it leaves, and may be written to
        return entry, final

    def kept(self, gathered: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the backward needs of the forward buffers: all ranks' transitions if they are saved, and own."""
        length = self.layout("transition").offsets[-1]
        return gathered[:, : length if self.save_transitions else 0].clone(), own[:length].clone()

    def publish_backward(
        self, gamma: dict[str, Tensor], dfinal: dict[str, Tensor | None], own_transitions: Tensor
    ) -> Tensor:
        """Return what this rank sends backward; a missing gradient of the final state counts as zero."""
        blocks = [gamma[stream] for stream in self.streams]
        if not self.save_transitions:
            blocks = [*self.layout("transition").unpack(own_transitions).values(), *blocks]
        if self.has_final:
            for stream in self.streams:
                gradient = dfinal[stream]
                blocks.append(torch.zeros_like(gamma[stream]) if gradient is None else gradient)
        return self._backward_layout().pack(blocks, self.device)

    def exits(self, gathered: Tensor, transitions: Tensor) -> dict[str, Tensor]:
        """Return the gradients of this rank's exit states: ``G = sum dfinal`` at the end, ``G <- E' G + gamma``."""
        blocks = self._backward_layout().unpack(gathered)
        if self.save_transitions:
            blocks.update(self.layout("transition").unpack(transitions))
        exits = {}
        for stream in self.streams:
            total = blocks[f"final_{stream}"].sum(0) if self.has_final else None
            later = self.order[: self.place : -1]
            maps = blocks[f"transition_{stream}"], blocks[f"state_{stream}"]
            exits[stream] = self._fold(*maps, total, later, transposed=True)[-1]
        return exits

    def terms(self, tensors: Sequence[Tensor], truncate: int | None, frames: int) -> Terms:
        """Return what must be equal on all ranks."""
        wire = (
            ("B*H" if len(self.lead) == 1 else "B, H", self.lead), ("D", self.width), ("dtype", str(self.dtype)),
            ("reverse", self.is_reversed), ("streams", len(self.streams)),
            ("save_transitions", self.save_transitions), ("truncate_to_active", truncate),
            ("T_local", frames if self.has_final else None),
        )  # fmt: skip
        agreed = (("operand dtype", str(tensors[0].dtype).removeprefix("torch.")),)
        needs_grad = any(x.requires_grad for x in tensors)
        return Terms(wire, agreed, needs_grad, torch.is_grad_enabled(), value_names=("T_local",))

    def _fold(
        self, transition: Tensor, increment: Tensor, start: Tensor | None, ranks: range, *, transposed: bool = False
    ) -> Sequence[Tensor]:
        """Return the states before, between and after the maps of the ranks, from ``start`` (None: zero)."""
        if self.fold_kernel:
            from gdn_kernels.frame_gdn.fold import fold

            return fold(transition, increment, start, ranks, transposed=transposed).unbind(0)
        maps = [AffineMap(transition[r].mT if transposed else transition[r], increment[r]) for r in ranks]
        return affine.states_between(maps, torch.zeros_like(increment[0]) if start is None else start)

    def _backward_layout(self) -> WireLayout:
        again = () if self.save_transitions else ("transition",)
        return self.layout(*again, "state", *(("final",) if self.has_final else ()))


def over_ranks(context: CPContext, op: str) -> Exchange:
    """Return the exchange of one rank with those of its context; with one rank nothing is sent."""

    def exchange(buffers: list[Tensor], label: str) -> Tensor:
        return buffers[0][None] if context.is_trivial else collectives.all_gather(buffers[0], context, f"{op} {label}")

    return exchange


def active_frames(truncate: int | None, reverse: bool, frames: int, rank: int, size: int) -> int:
    """Return how many of a rank's frames come before global frame ``truncate``; all of them with None.

    Raises:
        NotImplementedError: With ``reverse``.
        ValueError: Outside ``1 ... frames * size``.
    """
    if truncate is None:
        return frames
    if isinstance(truncate, bool) or not isinstance(truncate, int):
        raise TypeError(f"truncate_to_active must be an int or None, got {type(truncate).__name__}")
    if reverse:
        raise NotImplementedError("truncate_to_active is for states that pass from the first rank to the last")
    if not 1 <= truncate <= frames * size:
        raise ValueError(f"truncate_to_active must lie in 1 ... T_local * P = {frames * size}, got {truncate}")
    return min(max(truncate - rank * frames, 0), frames)
