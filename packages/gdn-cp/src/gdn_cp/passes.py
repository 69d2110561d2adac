"""What a rank does between collectives: pure functions of its own frames and of the gathered buffers.

A pass is publish, gather, fold, run. `gdn_cp.frame_gdn` puts a collective in between, `gdn_cp.simulate` a stack.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from gdn_cp import affine
from gdn_cp.affine import AffineMap
from gdn_cp.wire import WireLayout
from gdn_kernels.types import FrameBoundary, FrameOptions, FrameSummary, Impl

_FORWARD, _REVERSE, _TRANSITION, _FINAL = "forward", "reverse", "transition", "final"


@dataclasses.dataclass(frozen=True)
class RankPlan:
    """What all ranks know of one call.

    Attributes:
        options: flags of the call, equal on all ranks but for the local resets.
        size, rank: of the group.
        has_reset: for each rank whether an interior chunk start lies in its frames: its reverse transition then is 0.
        has_initial, has_final: an initial state was given; the final state is returned.
        batch, heads, width, dtype, device: of the states.
        save_transitions: the backward finds the gathered transitions saved, and does not send them again.
    """

    options: FrameOptions
    size: int
    rank: int
    has_reset: tuple[bool, ...]
    has_initial: bool
    has_final: bool
    batch: int
    heads: int
    width: int
    dtype: torch.dtype
    device: torch.device
    save_transitions: bool = True

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams in use."""
        return ("kv", "z") if self.options.has_z else ("kv",)

    @property
    def directions(self) -> tuple[str, ...]:
        """The directions in use."""
        direction = self.options.direction
        return (_FORWARD,) * direction.reads_past + (_REVERSE,) * direction.reads_future

    def forward_layout(self) -> WireLayout:
        """Layout of the forward exchange: transitions, then increments: 4 D^2 + 2 D numbers for both directions."""
        return self._layout((_TRANSITION, *self.directions))

    def backward_layout(self) -> WireLayout:
        """Layout of the backward exchange: entry gradients, with transitions or final-state gradients as needed."""
        again = () if self.save_transitions else (_TRANSITION,)
        return self._layout((*again, *self.directions, *((_FINAL,) if self.has_final else ())))

    def transition_layout(self) -> WireLayout:
        """Layout of the part of the forward exchange that the backward keeps."""
        return self._layout((_TRANSITION,))

    def _layout(self, kinds: tuple[str, ...]) -> WireLayout:
        names, shapes = [], []
        for kind in kinds:
            for stream in self.streams:
                names.append(f"{kind}_{stream}")
                square = stream == "kv" or kind == _TRANSITION
                shapes.append((self.batch, self.heads, self.width, *((self.width,) if square else ())))
        return WireLayout(tuple(names), tuple(shapes), self.dtype)


def publish(plan: RankPlan, summary: FrameSummary, initial: tuple[Tensor | None, Tensor | None]) -> Tensor:
    """Return what this rank sends forward: its affine maps. Rank 0 folds the initial state into its increment."""
    blocks: dict[str, Tensor | None] = {"transition_kv": summary.transition_kv, "transition_z": summary.transition_z}
    blocks.update(zip(("forward_kv", "forward_z", "reverse_kv", "reverse_z"), summary.increment, strict=True))
    if plan.rank == 0 and plan.has_initial:
        for stream, state in zip(("kv", "z"), initial, strict=True):
            transition, increment = blocks[f"transition_{stream}"], blocks[f"forward_{stream}"]
            if state is not None and transition is not None and increment is not None:
                m = AffineMap(transition, _columns(increment, stream))
                blocks[f"forward_{stream}"] = _shaped(affine.apply(m, _columns(state, stream)), stream)
    layout = plan.forward_layout()
    return layout.pack([_present(blocks[name]) for name in layout.names], plan.device)


def entries(
    plan: RankPlan, gathered: Tensor, initial: tuple[Tensor | None, Tensor | None]
) -> tuple[FrameBoundary, tuple[Tensor | None, Tensor | None]]:
    """Return this rank's entry states and the final state of the clip, from the buffers of all ranks ``[P, length]``.

    Forward ``X_{r+1} = E_r X_r + h_r`` from rank 0 on, reverse ``Y_{r-1} = E_r' Y_r + h_r`` from the last rank down,
    E_r' replaced by 0 where a chunk starts.
    """
    blocks = plan.forward_layout().unpack(gathered)
    entry: dict[str, Tensor] = {}
    final: dict[str, Tensor] = {}
    for stream in plan.streams:
        if _FORWARD in plan.directions:
            states = _fold(plan, blocks, _FORWARD, stream, range(plan.size if plan.has_final else plan.rank))
            entry[f"forward_{stream}"] = states[plan.rank]
            if plan.has_final:
                final[stream] = states[plan.size].clone()  # it leaves, and may be written to
        if _REVERSE in plan.directions:
            later = range(plan.size - 1, plan.rank, -1)
            entry[f"reverse_{stream}"] = _fold(plan, blocks, _REVERSE, stream, later, transposed=True)[-1]
    if plan.rank == 0 and plan.has_initial:
        for stream, state in zip(("kv", "z"), initial, strict=True):
            if state is not None:
                entry[f"forward_{stream}"] = state
    return _boundary(entry), (final.get("kv"), final.get("z"))


def publish_backward(
    plan: RankPlan, gamma: FrameBoundary, dfinal: tuple[Tensor | None, Tensor | None], own_transitions: Tensor
) -> Tensor:
    """Return what this rank sends backward; a missing gradient of the final state counts as zero."""
    layout = plan.backward_layout()
    blocks: dict[str, Tensor | None] = dict(
        zip(("forward_kv", "forward_z", "reverse_kv", "reverse_z"), gamma, strict=True)
    )
    blocks.update(plan.transition_layout().unpack(own_transitions))
    for stream, gradient in zip(("kv", "z"), dfinal, strict=True):
        like = blocks[f"forward_{stream}"]
        blocks[f"final_{stream}"] = torch.zeros_like(like) if gradient is None and like is not None else gradient
    return layout.pack([_present(blocks[name]) for name in layout.names], plan.device)


def exit_gradients(
    plan: RankPlan, gathered: Tensor, transitions: Tensor
) -> tuple[FrameBoundary, tuple[Tensor | None, Tensor | None]]:
    """Return the gradients of this rank's exit states, and of the initial state (zero but on rank 0).

    ``G_{P-1}`` sums the final-state gradients of all ranks; ``G_{r-1} = E_r' G_r + gamma_r``. ``J_0 = 0``;
    ``J_{r+1} = E_r J_r + gamma_r``, E_r replaced by 0 where a chunk starts.
    """
    blocks = plan.backward_layout().unpack(gathered)
    if plan.save_transitions:
        blocks.update(plan.transition_layout().unpack(transitions))
    exit_: dict[str, Tensor] = {}
    initial: dict[str, Tensor] = {}
    for stream in plan.streams:
        if _FORWARD in plan.directions:
            total = blocks[f"final_{stream}"].sum(0) if plan.has_final else None
            stop = -1 if plan.rank == 0 and plan.has_initial else plan.rank
            states = _fold(plan, blocks, _FORWARD, stream, range(plan.size - 1, stop, -1), total, transposed=True)
            exit_[f"forward_{stream}"] = states[plan.size - 1 - plan.rank]
            if plan.has_initial:
                initial[stream] = states[plan.size] if plan.rank == 0 else torch.zeros_like(states[0])
        if _REVERSE in plan.directions:
            exit_[f"reverse_{stream}"] = _fold(plan, blocks, _REVERSE, stream, range(plan.rank))[-1]
    return _boundary(exit_), (initial.get("kv"), initial.get("z"))


def _fold(
    plan: RankPlan,
    blocks: dict[str, Tensor],
    kind: str,
    stream: str,
    order: range,
    start: Tensor | None = None,
    *,
    transposed: bool = False,
) -> Sequence[Tensor]:
    """Return the states before, between and after the maps of the ranks in ``order``, from ``start`` (None: zero).

    In the reverse direction a rank with a chunk start hands on nothing of what it was given.
    """
    transition, increment = blocks[f"transition_{stream}"], blocks[f"{kind}_{stream}"]
    dropped = tuple(r for r in range(plan.size) if plan.has_reset[r]) if kind == _REVERSE else ()
    if plan.options.impl is Impl.TRITON:
        from gdn_kernels.frame_gdn.fold import fold

        return fold(transition, increment, start, order, transposed=transposed, dropped=dropped).unbind(0)
    maps = []
    for r in order:
        factor = torch.zeros_like(transition[r]) if r in dropped else transition[r]
        maps.append(AffineMap(factor.mT if transposed else factor, _columns(increment[r], stream)))
    first = torch.zeros_like(increment[0]) if start is None else start
    return [_shaped(x, stream) for x in affine.states_between(maps, _columns(first, stream))]


def _columns(x: Tensor, stream: str) -> Tensor:
    return x[..., None] if stream == "z" else x


def _shaped(x: Tensor, stream: str) -> Tensor:
    return x.squeeze(-1) if stream == "z" else x


def _present(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def _boundary(states: dict[str, Tensor]) -> FrameBoundary:
    return FrameBoundary(*(states.get(name) for name in FrameBoundary._fields))
