"""What a rank does between collectives: pure functions of its own frames.

A pass is publish, exchange, run. The exchange is one of `gdn_cp.schedules`.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from gdn_cp import affine
from gdn_cp.affine import AffineMap
from gdn_cp.wire import WireLayout
from gdn_kernels.types import FrameBoundary, FrameOptions, FrameSummary

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


def publish_backward(
    plan: RankPlan, gamma: FrameBoundary, dfinal: tuple[Tensor | None, Tensor | None], kept: Tensor
) -> Tensor:
    """Return what this rank sends backward; a missing gradient of the final state counts as zero.

    ``kept`` is what the forward exchange returned of that name.
    """
    layout = plan.backward_layout()
    blocks: dict[str, Tensor | None] = dict(
        zip(("forward_kv", "forward_z", "reverse_kv", "reverse_z"), gamma, strict=True)
    )
    blocks.update(plan.transition_layout().unpack(kept[plan.rank if len(kept) > 1 else 0]))
    for stream, gradient in zip(("kv", "z"), dfinal, strict=True):
        like = blocks[f"forward_{stream}"]
        blocks[f"final_{stream}"] = torch.zeros_like(like) if gradient is None and like is not None else gradient
    return layout.pack([_present(blocks[name]) for name in layout.names], plan.device)


def _columns(x: Tensor, stream: str) -> Tensor:
    return x[..., None] if stream == "z" else x


def _shaped(x: Tensor, stream: str) -> Tensor:
    return x.squeeze(-1) if stream == "z" else x


def _present(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def boundary(states: dict[str, Tensor]) -> FrameBoundary:
    """Return the states by name as a boundary; those that are not there are None."""
    return FrameBoundary(*(states.get(name) for name in FrameBoundary._fields))
