"""All-gather: one collective, after which every rank holds every map and folds those that come before it."""

from __future__ import annotations

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
    blocks = plan.forward_layout().unpack(gathered)
    entry: dict[str, Tensor] = {}
    final: dict[str, Tensor] = {}
    for stream in plan.streams:
        if FORWARD in plan.directions:
            states = _fold(plan, blocks, FORWARD, stream, range(plan.size if plan.has_final else plan.rank))
            entry[f"forward_{stream}"] = states[plan.rank]
            if plan.has_final:
                final[stream] = states[plan.size].clone()  # it leaves, and may be written to
        if REVERSE in plan.directions:
            later = range(plan.size - 1, plan.rank, -1)
            entry[f"reverse_{stream}"] = _fold(plan, blocks, REVERSE, stream, later, transposed=True)[-1]
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
    exit_: dict[str, Tensor] = {}
    initial: dict[str, Tensor] = {}
    for stream in plan.streams:
        if FORWARD in plan.directions:
            total = blocks[f"final_{stream}"].sum(0) if plan.has_final else None
            stop = -1 if plan.rank == 0 and plan.has_initial else plan.rank
            states = _fold(plan, blocks, FORWARD, stream, range(plan.size - 1, stop, -1), total, transposed=True)
            exit_[f"forward_{stream}"] = states[plan.size - 1 - plan.rank]
            if plan.has_initial:
                initial[stream] = states[plan.size] if plan.rank == 0 else torch.zeros_like(states[0])
        if REVERSE in plan.directions:
            exit_[f"reverse_{stream}"] = _fold(plan, blocks, REVERSE, stream, range(plan.rank))[-1]
    return Left(boundary(exit_), (initial.get("kv"), initial.get("z")))


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
    if plan.poison:
        transition, increment = (_with_nan_outside(x, order) for x in (transition, increment))
    dropped = tuple(r for r in range(plan.size) if plan.has_reset[r]) if kind == REVERSE else ()
    if plan.options.impl is Impl.TRITON:
        from gdn_kernels.frame_gdn.fold import fold

        return fold(transition, increment, start, order, transposed=transposed, dropped=dropped).unbind(0)
    maps = []
    for r in order:
        factor = torch.zeros_like(transition[r]) if r in dropped else transition[r]
        maps.append(AffineMap(factor.mT if transposed else factor, _columns(increment[r], stream)))
    first = torch.zeros_like(increment[0]) if start is None else start
    return [_shaped(x, stream) for x in affine.states_between(maps, _columns(first, stream))]


def _with_nan_outside(x: Tensor, order: range) -> Tensor:
    """Return a copy ``[P, ...]`` in which the slots that a fold must not read are NaN."""
    unread = [r for r in range(len(x)) if r not in order]
    x = x.clone()
    x[unread] = torch.nan
    return x


def _columns(x: Tensor, stream: str) -> Tensor:
    return x[..., None] if stream == "z" else x


def _shaped(x: Tensor, stream: str) -> Tensor:
    return x.squeeze(-1) if stream == "z" else x
