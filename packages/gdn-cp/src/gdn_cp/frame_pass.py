"""The passes of one rank: local work, an exchange, local work; and the autograd node of an eager call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gdn_cp import passes, schedules
from gdn_cp.context import CPContext
from gdn_cp.passes import RankPlan
from gdn_kernels.once import once_differentiable
from gdn_kernels.types import FrameBoundary, FrameInputs

_INPUTS, _ENTRY = len(FrameInputs._fields), len(FrameBoundary._fields)


def run_forward(
    op: str,
    context: CPContext,
    plan: RankPlan,
    inputs: FrameInputs,
    initial: tuple[Tensor | None, Tensor | None],
    has_backward: bool = True,
) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    """Return result, denominator, final kv and z; and what `run_backward` needs besides the inputs.

    The latter: what the schedule keeps, four entry states, and what the local operation keeps. Without a backward to
    come the first is a view of what was exchanged.
    """
    run, own = passes.begin(plan, inputs, initial)
    steps = schedules.enter(plan, own, initial)
    entry, final, kept = schedules.over_ranks(steps, context, f"{op} forward", run.overlap)
    result, denominator, saved = run.finish(entry)
    return (result, denominator, *final), (kept.clone() if has_backward else kept, *entry, *saved)


def run_backward(
    op: str,
    context: CPContext,
    plan: RankPlan,
    inputs: FrameInputs,
    saved: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the inputs that need one and of the initial state, from those of the four results."""
    kept, entry = saved[0], FrameBoundary(*saved[1 : 1 + _ENTRY])
    assert kept is not None
    dresult, ddenominator, dkv, dz = gradients
    dresults, local = (dresult, ddenominator), saved[1 + _ENTRY :]
    adjoint, own = passes.begin_backward(plan, inputs, entry, dresults, local, (dkv, dz), kept)
    steps = schedules.leave(plan, own, kept)
    exits, dinitial = schedules.over_ranks(steps, context, f"{op} backward", adjoint.overlap)
    return (*adjoint.finish(exits, needs), *dinitial)


class FramePass(torch.autograd.Function):
    """One node per rank: an exchange forward, an exchange backward."""

    @staticmethod
    def forward(
        ctx: Any, op: str, context: CPContext, plan: RankPlan, tie: Tensor, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Run the forward; ``tie`` requires a gradient on ranks that take part in a backward.

        The last result is empty: saved, it leads from the gradients to all arguments, the initial state too.
        """
        inputs, initial = FrameInputs._make(tensors[:_INPUTS]), (tensors[_INPUTS], tensors[_INPUTS + 1])
        results, saved = run_forward(op, context, plan, inputs, initial, tie.requires_grad)
        ctx.op, ctx.context, ctx.plan = op, context, plan
        ctx.set_materialize_grads(False)
        thread = tie.new_empty(0)
        ctx.save_for_backward(*inputs, *saved, thread)
        return (*results, thread)

    @staticmethod
    @once_differentiable("cp_frame_gdn")
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        """Run the backward."""
        tensors = ctx.saved_tensors  # once: a checkpoint unpacks them a single time
        inputs, saved = FrameInputs._make(tensors[:_INPUTS]), tensors[_INPUTS:-1]
        needs = ctx.needs_input_grad[4 : 4 + _INPUTS]
        found = run_backward(ctx.op, ctx.context, ctx.plan, inputs, saved, gradients[:-1], needs)
        return (None, None, None, None, *found)
