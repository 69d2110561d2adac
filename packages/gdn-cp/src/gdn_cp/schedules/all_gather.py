"""All-gather: one collective, after which every rank holds every map and folds those that come before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from gdn_cp import affine
from gdn_cp.affine import AffineMap
from gdn_cp.passes import FORWARD, REVERSE, RankPlan, boundary
from gdn_cp.schedules.lines import Entered, Left
from gdn_cp.schedules.rounds import Gather, Steps
from gdn_kernels.types import Impl


def enter(plan: RankPlan, own: Tensor, initial: tuple[Tensor | None, Tensor | None]) -> Steps[Entered]:
    """Return this rank's entry states and the final state of the clip, from the buffers of all ranks.

    Forward ``X_{r+1} = E_r X_r + h_r`` from rank 0 on, reverse ``Y_{r-1} = E_r' Y_r + h_r`` from the last rank down,
    E_r' replaced by 0 where a chunk starts.
    """
    gathered = yield Gather(own)
    ways = []
    if FORWARD in plan.directions:
        ways.append(_Way(FORWARD, range(plan.size if plan.has_final else plan.rank)))
    if REVERSE in plan.directions:
        ways.append(_Way(REVERSE, range(plan.size - 1, plan.rank, -1), transposed=True))
    folded = _fold(plan, plan.forward_layout().unpack(gathered), ways)
    entry: dict[str, Tensor] = {}
    final: dict[str, Tensor] = {}
    for stream in plan.streams:
        if FORWARD in plan.directions:
            states = folded[FORWARD, stream]
            entry[f"forward_{stream}"] = states[plan.rank]
            if plan.has_final:
                final[stream] = states[plan.size].clone()  # it leaves, and may be written to
        if REVERSE in plan.directions:
            entry[f"reverse_{stream}"] = folded[REVERSE, stream][-1]
    if plan.rank == 0 and plan.has_initial:
        for stream, state in zip(("kv", "z"), initial, strict=True):
            if state is not None:
                entry[f"forward_{stream}"] = state
    kept = gathered if plan.save_transitions else own[None]
    kept = kept[:, : plan.transition_layout().offsets[-1]]
    return Entered(boundary(entry), (final.get("kv"), final.get("z")), kept)


def leave(plan: RankPlan, own: Tensor, kept: Tensor) -> Steps[Left]:
    """Return the gradients of this rank's exit states, and of the initial state (zero but on rank 0).

    ``G_{P-1}`` sums the final-state gradients of all ranks; ``G_{r-1} = E_r' G_r + gamma_r``. ``J_0 = 0``;
    ``J_{r+1} = E_r J_r + gamma_r``, E_r replaced by 0 where a chunk starts.
    """
    gathered = yield Gather(own)
    blocks = plan.backward_layout().unpack(gathered)
    if plan.save_transitions:
        blocks.update(plan.transition_layout().unpack(kept))
    ways = []
    if FORWARD in plan.directions:
        stop = -1 if plan.rank == 0 and plan.has_initial else plan.rank
        totals = {s: blocks[f"final_{s}"].sum(0) if plan.has_final else None for s in plan.streams}
        ways.append(_Way(FORWARD, range(plan.size - 1, stop, -1), transposed=True, starts=totals))
    if REVERSE in plan.directions:
        ways.append(_Way(REVERSE, range(plan.rank)))
    folded = _fold(plan, blocks, ways)
    exit_: dict[str, Tensor] = {}
    initial: dict[str, Tensor] = {}
    for stream in plan.streams:
        if FORWARD in plan.directions:
            states = folded[FORWARD, stream]
            exit_[f"forward_{stream}"] = states[plan.size - 1 - plan.rank]
            if plan.has_initial:
                initial[stream] = states[plan.size] if plan.rank == 0 else torch.zeros_like(states[0])
        if REVERSE in plan.directions:
            exit_[f"reverse_{stream}"] = folded[REVERSE, stream][-1]
    return Left(boundary(exit_), (initial.get("kv"), initial.get("z")))


@dataclasses.dataclass(frozen=True)
class _Way:
    """A direction to be folded: maps of the ranks in ``order``, or their transposes, from ``starts`` (None: zero)."""

    kind: str
    order: range
    transposed: bool = False
    starts: dict[str, Tensor | None] = dataclasses.field(default_factory=dict)


def _fold(plan: RankPlan, blocks: dict[str, Tensor], ways: list[_Way]) -> dict[tuple[str, str], Sequence[Tensor]]:
    """Return the states before, between and after the maps, by direction and stream.

    In the reverse direction a rank with a chunk start hands on nothing of what it was given.
    """
    reset = tuple(r for r in range(plan.size) if plan.has_reset[r])
    lines = []
    for way in ways:
        names = (f"transition_{s}" for s in plan.streams), (f"{way.kind}_{s}" for s in plan.streams)
        transitions, increments = ([blocks[name] for name in kind] for kind in names)
        if plan.poison:
            transitions, increments = (
                [_with_nan_outside(x, way.order) for x in given] for given in (transitions, increments)
            )
        starts = [way.starts.get(s) for s in plan.streams]
        lines.append((way, transitions, increments, starts, reset if way.kind == REVERSE else ()))
    found: list[list[Sequence[Tensor]]]
    if plan.options.impl is Impl.TRITON:
        from gdn_kernels.frame_gdn.fold import FoldLine, fold_lines

        states = fold_lines([FoldLine(e, h, x, way.order, way.transposed, drop) for way, e, h, x, drop in lines])
        found = [[x.unbind(0) for x in of_line] for of_line in states]
    else:
        found = [[_in_torch(way, *maps, drop) for maps in zip(e, h, x, strict=True)] for way, e, h, x, drop in lines]
    return {
        (way.kind, stream): between
        for way, of_way in zip(ways, found, strict=True)
        for stream, between in zip(plan.streams, of_way, strict=True)
    }


def _in_torch(
    way: _Way, transition: Tensor, increment: Tensor, start: Tensor | None, dropped: tuple[int, ...]
) -> list[Tensor]:
    is_vector = increment.ndim < transition.ndim
    maps = []
    for r in way.order:
        factor = torch.zeros_like(transition[r]) if r in dropped else transition[r]
        maps.append(AffineMap(factor.mT if way.transposed else factor, _columns(increment[r], is_vector)))
    first = torch.zeros_like(increment[0]) if start is None else start
    states = affine.states_between(maps, _columns(first, is_vector))
    return [x.squeeze(-1) if is_vector else x for x in states]


def _with_nan_outside(x: Tensor, order: range) -> Tensor:
    """Return a copy ``[P, ...]`` in which the slots that a fold must not read are NaN."""
    unread = [r for r in range(len(x)) if r not in order]
    x = x.clone()
    x[unread] = torch.nan
    return x


def _columns(x: Tensor, is_vector: bool) -> Tensor:
    return x[..., None] if is_vector else x
