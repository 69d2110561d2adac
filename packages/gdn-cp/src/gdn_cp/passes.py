"""What a rank does between collectives: functions of its own frames.

A pass is publish, exchange, run. The exchange is one of `gdn_cp.schedules`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from gdn_cp import affine
from gdn_cp.affine import AffineMap
from gdn_cp.wire import WireLayout
from gdn_kernels.frame_gdn import stages
from gdn_kernels.types import FrameBoundary, FrameInputs, FrameOptions, FrameSummary, Impl

FORWARD, REVERSE, _TRANSITION, _FINAL = "forward", "reverse", "transition", "final"


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
        schedule: how summaries travel.
        blocks: parts of a message in the chain.
        poison: slots of a gathered buffer that this rank must not read hold NaN.
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
    schedule: str = "all_gather"
    blocks: int = 1
    poison: bool = False

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams in use."""
        return ("kv", "z") if self.options.has_z else ("kv",)

    @property
    def directions(self) -> tuple[str, ...]:
        """The directions in use."""
        direction = self.options.direction
        return (FORWARD,) * direction.reads_past + (REVERSE,) * direction.reads_future

    def forward_layout(self) -> WireLayout:
        """Layout of the forward exchange: transitions, then increments: 4 D^2 + 2 D numbers for both directions."""
        return self._layout((_TRANSITION, *self.directions))

    def backward_layout(self) -> WireLayout:
        """Layout of the backward exchange: entry gradients, with transitions or final-state gradients as needed."""
        again = (_TRANSITION,) if self.schedule == "all_gather" and not self.save_transitions else ()
        return self._layout((*again, *self.directions, *((_FINAL,) if self.has_final else ())))

    def transition_layout(self) -> WireLayout:
        """Layout of the part of the forward exchange that the backward keeps."""
        return self._layout((_TRANSITION,))

    @property
    def message_bytes(self) -> tuple[int, int]:
        """Bytes of this rank's transitions, and of the states of one direction."""
        square = self.batch * self.heads * self.width * self.width * self.dtype.itemsize
        vector = square // max(self.width, 1) if "z" in self.streams else 0
        return len(self.streams) * square, square + vector

    def _layout(self, kinds: tuple[str, ...]) -> WireLayout:
        names, shapes = [], []
        for kind in kinds:
            for stream in self.streams:
                names.append(f"{kind}_{stream}")
                square = stream == "kv" or kind == _TRANSITION
                shapes.append((self.batch, self.heads, self.width, *((self.width,) if square else ())))
        return WireLayout(tuple(names), tuple(shapes), self.dtype)


def begin(
    plan: RankPlan, inputs: FrameInputs, initial: tuple[Tensor | None, Tensor | None], own: Tensor | None = None
) -> tuple[stages.Run, Tensor]:
    """Begin the forward of this rank's frames; return it, and what the rank sends: ``own`` if it is given.

    The summary is written into the buffer, not copied there.
    """
    own = plan.forward_layout().buffer(plan.device) if own is None else own
    blocks = plan.forward_layout().unpack(own)
    summary = FrameSummary(blocks["transition_kv"], blocks.get("transition_z"), boundary(blocks))
    run = stages.begin(inputs, plan.options, summary)
    for name, x in _after_initial(plan, blocks, initial).items():
        blocks[name].copy_(x)
    return run, own


def begin_backward(
    plan: RankPlan,
    inputs: FrameInputs,
    entry: FrameBoundary,
    dresults: tuple[Tensor | None, Tensor | None],
    saved: Sequence[Tensor | None],
    dfinal: tuple[Tensor | None, Tensor | None],
    kept: Tensor,
    own: Tensor | None = None,
) -> tuple[stages.Adjoint, Tensor]:
    """Begin the backward of this rank's frames; return it, and what the rank sends: ``own`` if it is given.

    ``dresults`` are the gradients of result and denominator; the others as in `publish_backward`.
    """
    layout = plan.backward_layout()
    own = layout.buffer(plan.device) if own is None else own
    blocks = layout.unpack(own)
    adjoint = stages.adjoint(inputs, plan.options, entry, *dresults, saved, boundary(blocks))
    for name, x in _beside_gamma(plan, blocks, dfinal, kept).items():
        blocks[name].copy_(x)
    return adjoint, own


def publish(plan: RankPlan, summary: FrameSummary, initial: tuple[Tensor | None, Tensor | None]) -> Tensor:
    """Return what this rank sends forward: its affine maps. Rank 0 folds the initial state into its increment."""
    named = {"transition_kv": summary.transition_kv, "transition_z": summary.transition_z}
    named.update(zip(FrameBoundary._fields, summary.increment, strict=True))
    blocks = {name: x for name, x in named.items() if x is not None}
    blocks.update(_after_initial(plan, blocks, initial))
    layout = plan.forward_layout()
    return layout.pack([blocks[name] for name in layout.names], plan.device)


def _after_initial(
    plan: RankPlan, blocks: dict[str, Tensor], initial: tuple[Tensor | None, Tensor | None]
) -> dict[str, Tensor]:
    """Return the forward increments of rank 0, by name, with the initial state folded in; nothing elsewhere."""
    if plan.rank > 0 or not plan.has_initial:
        return {}
    given = {stream: x for stream, x in zip(plan.streams, initial, strict=False) if x is not None}
    names = [f"forward_{stream}" for stream in given]
    transitions, increments = [blocks[f"transition_{stream}"] for stream in given], [blocks[name] for name in names]
    if plan.options.impl is Impl.TRITON:
        from gdn_kernels.frame_gdn.fold import FoldLine, fold_lines

        maps = [x[None] for x in transitions], [x[None] for x in increments]
        (states,) = fold_lines([FoldLine(*maps, list(given.values()), range(1))])
        return {name: x[1] for name, x in zip(names, states, strict=True)}
    found: dict[str, Tensor] = {}
    for stream, name, transition, increment in zip(given, names, transitions, increments, strict=True):
        m = AffineMap(transition, _columns(increment, stream))
        found[name] = _shaped(affine.apply(m, _columns(given[stream], stream)), stream)
    return found


def publish_backward(
    plan: RankPlan, gamma: FrameBoundary, dfinal: tuple[Tensor | None, Tensor | None], kept: Tensor
) -> Tensor:
    """Return what this rank sends backward; a missing gradient of the final state counts as zero.

    ``kept`` is what the forward exchange returned of that name.
    """
    layout = plan.backward_layout()
    blocks = {name: x for name, x in zip(FrameBoundary._fields, gamma, strict=True) if x is not None}
    blocks.update(_beside_gamma(plan, blocks, dfinal, kept))
    return layout.pack([blocks[name] for name in layout.names], plan.device)


def _beside_gamma(
    plan: RankPlan, blocks: dict[str, Tensor], dfinal: tuple[Tensor | None, Tensor | None], kept: Tensor
) -> dict[str, Tensor]:
    """Return the other blocks of the backward exchange, by name: transitions, gradients of the final state."""
    names = plan.backward_layout().names
    found = plan.transition_layout().unpack(kept[plan.rank if len(kept) > 1 else 0])
    for stream, gradient in zip(("kv", "z"), dfinal, strict=True):
        if f"final_{stream}" in names:
            found[f"final_{stream}"] = torch.zeros_like(blocks[f"forward_{stream}"]) if gradient is None else gradient
    return {name: x for name, x in found.items() if name in names}


def _columns(x: Tensor, stream: str) -> Tensor:
    return x[..., None] if stream == "z" else x


def _shaped(x: Tensor, stream: str) -> Tensor:
    return x.squeeze(-1) if stream == "z" else x


def boundary(states: dict[str, Tensor]) -> FrameBoundary:
    """Return the states by name as a boundary; those that are not there are None."""
    return FrameBoundary(*(states.get(name) for name in FrameBoundary._fields))
