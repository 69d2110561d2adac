"""Schedules in which something travels from rank to rank: forward and reverse run along the ranks, opposite ways.

A pass has one line per direction. In the forward pass the forward states travel up the ranks through ``E_r``, the
reverse states down through ``E_r'`` (0 where a chunk starts); in the backward pass each goes the other way through the
transpose. A schedule is only how a line is travelled: chain and doubling.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gdn_cp import affine
from gdn_cp.affine import AffineMap
from gdn_cp.passes import FORWARD, REVERSE, RankPlan, boundary
from gdn_cp.schedules.rounds import Steps
from gdn_kernels.types import FrameBoundary, Impl


class Entered(NamedTuple):
    """Entry states of this rank, final state of the clip (kv, z) or Nones, and transitions ``[P or 1, n]`` to keep.

    One row is this rank's own; with P rows row r is that of rank r.
    """

    entry: FrameBoundary
    final: tuple[Tensor | None, Tensor | None]
    kept: Tensor


class Left(NamedTuple):
    """Gradients of this rank's exit states, and of the initial state (kv, z; zero but on rank 0) or Nones."""

    exits: FrameBoundary
    initial: tuple[Tensor | None, Tensor | None]


@dataclasses.dataclass(frozen=True)
class Route:
    """What a schedule knows of the ranks: their number, this one, parts of a message in the chain, who multiplies."""

    size: int
    rank: int
    blocks: int = 1
    impl: Impl = Impl.TORCH


def route_of(plan: RankPlan) -> Route:
    """Return the route of a plan."""
    return Route(plan.size, plan.rank, plan.blocks, plan.options.impl)


@dataclasses.dataclass(frozen=True, eq=False)
class Line:
    """One direction of a pass on this rank.

    Attributes:
        direction: forward or reverse.
        step: +1 if states travel to higher ranks, -1 if to lower ones.
        place: number of ranks that come before this one on the line.
        maps: this rank's map of each stream, ``transition [..., D, D]``, ``increment [..., D, V]``, V = 1 for z.
        carries: what enters this rank leaves it. If not, its transitions are zero.
    """

    direction: str
    step: int
    place: int
    maps: dict[str, AffineMap]
    carries: bool = True


Travel = Callable[[Route, list[Line]], Steps[list[dict[str, Tensor]]]]
"""From the lines of this rank to the states that enter it on each, by stream, ``[..., D, V]``."""


def line(direction: str, upwards: bool, route: Route, maps: dict[str, AffineMap], carries: bool = True) -> Line:
    """Return a line along which maps are met in rank order (``upwards``), or in the opposite order.

    Without ``carries`` the transitions are replaced by zeros.
    """
    step, place = (1, route.rank) if upwards else (-1, route.size - 1 - route.rank)
    if not carries:
        maps = {stream: m._replace(transition=torch.zeros_like(m.transition)) for stream, m in maps.items()}
    return Line(direction, step, place, maps, carries)


def lines(plan: RankPlan, increments: dict[str, Tensor], transitions: dict[str, Tensor], backward: bool) -> list[Line]:
    """Return the lines of a pass, from this rank's blocks by name."""
    found = []
    for direction in plan.directions:
        down = (direction == REVERSE) != backward
        maps = {}
        for stream in plan.streams:
            transition, increment = transitions[f"transition_{stream}"], increments[f"{direction}_{stream}"]
            transition = transition.mT.contiguous() if down else transition
            maps[stream] = AffineMap(transition, increment[..., None] if stream == "z" else increment)
        carries = direction != REVERSE or not plan.has_reset[plan.rank]
        found.append(line(direction, not down, route_of(plan), maps, carries))
    return found


def enter(plan: RankPlan, own: Tensor, initial: tuple[Tensor | None, Tensor | None], travel: Travel) -> Steps[Entered]:
    """Return this rank's entry states, from what it publishes and what arrives; keeps its own transitions."""
    blocks = plan.forward_layout().unpack(own)
    arrived = yield from travel(route_of(plan), lines(plan, blocks, blocks, backward=False))
    entry = _named(plan, arrived)
    if plan.rank == 0 and plan.has_initial:
        for stream, state in zip(("kv", "z"), initial, strict=True):
            if state is not None:
                entry[f"forward_{stream}"] = state
    return Entered(boundary(entry), (None, None), own[None, : plan.transition_layout().offsets[-1]])


def leave(plan: RankPlan, own: Tensor, kept: Tensor, travel: Travel) -> Steps[Left]:
    """Return the gradients of this rank's exit states, from its entry gradients and what arrives."""
    blocks, transitions = plan.backward_layout().unpack(own), plan.transition_layout().unpack(kept[0])
    ways = lines(plan, blocks, transitions, backward=True)
    route = route_of(plan)
    arrived = yield from travel(route, ways)
    initial: dict[str, Tensor] = {}
    if plan.has_initial:
        (position,) = (i for i, way in enumerate(ways) if way.direction == FORWARD)
        for stream, m in ways[position].maps.items():
            state = arrived[position][stream]
            gradient = advance(route, m, state) if plan.rank == 0 else torch.zeros_like(state)
            initial[stream] = gradient.squeeze(-1) if stream == "z" else gradient
    return Left(boundary(_named(plan, arrived)), (initial.get("kv"), initial.get("z")))


def advance(route: Route, m: AffineMap, state: Tensor) -> Tensor:
    """Return the state after a map; both ``[B, H, D, ...]`` or a block of heads ``[1, n, D, ...]``."""
    if route.impl is Impl.TRITON:
        from gdn_kernels.frame_gdn.fold import fold

        return fold(m.transition[None], m.increment[None], state, range(1))[1]
    return affine.apply(m, state)


def compose(route: Route, later: AffineMap, earlier: AffineMap) -> AffineMap:
    """Return the map that applies ``earlier`` first; of that, a transition of zeros lets nothing through, no NaN."""
    if route.impl is Impl.TRITON:
        linear = AffineMap(later.transition, torch.zeros_like(later.transition))
        return AffineMap(advance(route, linear, earlier.transition), advance(route, later, earlier.increment))
    carries = later.transition.ne(0).flatten(-2).any(-1)[..., None, None]
    return affine.compose(later, AffineMap(*(torch.where(carries, x, 0) for x in earlier)))


def _named(plan: RankPlan, arrived: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        f"{direction}_{stream}": x.squeeze(-1) if stream == "z" else x
        for direction, states in zip(plan.directions, arrived, strict=True)
        for stream, x in states.items()
    }
