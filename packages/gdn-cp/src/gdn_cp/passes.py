"""What a rank does between collectives: pure functions of its own frames and of the gathered buffers.

A pass is publish, gather, fold, run. `gdn_cp.frame_gdn` puts a collective in between, `gdn_cp.simulate` a stack.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from gdn_cp import affine
from gdn_cp.affine import AffineMap
from gdn_cp.wire import WireLayout
from gdn_kernels.frame_gdn import stages
from gdn_kernels.types import FrameBoundary, FrameInputs, FrameOptions

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


def publish(plan: RankPlan, inputs: FrameInputs, initial: tuple[Tensor | None, Tensor | None]) -> Tensor:
    """Return what this rank sends forward: its affine maps. Rank 0 folds the initial state into its increment."""
    summary = stages.summarize(inputs, plan.options)
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
            maps = _maps(blocks, _FORWARD, stream, range(plan.size if plan.has_final else plan.rank))
            zero = torch.zeros_like(_columns(blocks[f"forward_{stream}"][0], stream))
            states = affine.states_between(maps, zero)
            entry[f"forward_{stream}"] = _shaped(states[plan.rank], stream)
            if plan.has_final:
                final[stream] = _shaped(states[plan.size], stream)
        if _REVERSE in plan.directions:
            later = range(plan.size - 1, plan.rank, -1)
            maps = [
                _reverse(m, plan.has_reset[r])
                for m, r in zip(_maps(blocks, _REVERSE, stream, later), later, strict=True)
            ]
            zero = torch.zeros_like(_columns(blocks[f"reverse_{stream}"][0], stream))
            entry[f"reverse_{stream}"] = _shaped(affine.fold(maps, zero), stream)
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
            zero = torch.zeros_like(_columns(blocks[f"forward_{stream}"][0], stream))
            total = _columns(blocks[f"final_{stream}"].sum(0), stream) if plan.has_final else zero
            stop = -1 if plan.rank == 0 and plan.has_initial else plan.rank
            later = range(plan.size - 1, stop, -1)
            maps = [_reverse(m, False) for m in _maps(blocks, _FORWARD, stream, later)]
            states = affine.states_between(maps, total)
            exit_[f"forward_{stream}"] = _shaped(states[plan.size - 1 - plan.rank], stream)
            if plan.has_initial:
                own = plan.rank == 0
                initial[stream] = _shaped(states[plan.size], stream) if own else _shaped(torch.zeros_like(zero), stream)
        if _REVERSE in plan.directions:
            zero = torch.zeros_like(_columns(blocks[f"reverse_{stream}"][0], stream))
            earlier = range(plan.rank)
            maps = [
                AffineMap(torch.zeros_like(m.transition) if plan.has_reset[r] else m.transition, m.increment)
                for m, r in zip(_maps(blocks, _REVERSE, stream, earlier), earlier, strict=True)
            ]
            exit_[f"reverse_{stream}"] = _shaped(affine.fold(maps, zero), stream)
    return _boundary(exit_), (initial.get("kv"), initial.get("z"))


def _maps(blocks: dict[str, Tensor], kind: str, stream: str, ranks: range) -> list[AffineMap]:
    transition, increment = blocks[f"transition_{stream}"], blocks[f"{kind}_{stream}"]
    return [AffineMap(transition[r], _columns(increment[r], stream)) for r in ranks]


def _reverse(m: AffineMap, has_reset: bool) -> AffineMap:
    return AffineMap(torch.zeros_like(m.transition) if has_reset else m.transition.mT, m.increment)


def _columns(x: Tensor, stream: str) -> Tensor:
    return x[..., None] if stream == "z" else x


def _shaped(x: Tensor, stream: str) -> Tensor:
    return x.squeeze(-1) if stream == "z" else x


def _present(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def _boundary(states: dict[str, Tensor]) -> FrameBoundary:
    return FrameBoundary(*(states.get(name) for name in FrameBoundary._fields))
