"""One forward-direction pass of frames over ranks, taken from either end: what the published fused functions run.

A rank's frames are collapsed, run and differentiated by the stages of gdn-kernels; between them lies one exchange, as
in `gdn_cp.frame_gdn`. Here the frames come as the caller ordered them, and only the order of ranks may be reversed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdn_cp.affine import AffineMap
from gdn_cp.scan_plan import Exchange, ScanPlan
from gdn_kernels.frame_gdn import stages
from gdn_kernels.once import once_differentiable
from gdn_kernels.types import FrameBoundary, FrameInputs, FrameOptions, FrameSummary, Impl

_FIELDS = len(FrameInputs._fields)


class FusedResult(NamedTuple):
    """``numerator [B, N, H, D]``, ``denominator [B, H, N]`` or None, and the final states in the left form or None."""

    numerator: Tensor
    denominator: Tensor | None
    final_kv: Tensor | None
    final_z: Tensor | None


@dataclasses.dataclass(frozen=True)
class FusedCall:
    """One rank's part of a pass.

    Attributes:
        plan: of the exchange; its ``lead`` is ``(B, H)``.
        inputs, options: as the stages of gdn-kernels take them, direction forward.
        recompute: keep entry states alone, and run the frames again in the backward.
    """

    plan: ScanPlan
    inputs: FrameInputs
    options: FrameOptions
    recompute: bool


def fused_plan(
    inputs: FrameInputs,
    options: FrameOptions,
    place: tuple[int, int],
    *,
    reverse: bool,
    has_final: bool,
    save_transitions: bool,
) -> ScanPlan:
    """Return the plan of the rank that ``place`` names, ``(rank, size)``. Idle frames are masked by their gates."""
    batch, heads, frames = inputs.decay.shape
    return ScanPlan(
        place[1], place[0], reverse, ("kv", "z") if options.has_z else ("kv",), (batch, heads),
        inputs.operands()[0].shape[-1], inputs.state_dtype, inputs.decay.device, has_final, frames, save_transitions,
        fold_kernel=options.impl is Impl.TRITON,
    )  # fmt: skip


def mask_idle_frames(beta: Tensor, decay: Tensor, active: int) -> tuple[Tensor, Tensor]:
    """Return gates ``[B, H, F, S]`` and ``[B, H, F]`` with which frames from ``active`` on leave the state alone."""
    if active == decay.shape[2]:
        return beta, decay
    idle = torch.arange(decay.shape[2], device=decay.device) >= active
    return beta.masked_fill(idle[:, None], 0.0), decay.masked_fill(idle, 1.0)


def run_fused(calls: Sequence[FusedCall], exchange: Exchange, tie: Tensor) -> list[FusedResult]:
    """Run the pass of the ranks of this process: one, or in a simulation all.

    A ``tie`` that requires a gradient makes the backward exchange run whatever the inputs require.
    """
    tensors = [x for call in calls for x in call.inputs]
    found = _FusedPass.apply([(call.plan, call.options, call.recompute) for call in calls], exchange, tie, *tensors)  # type: ignore[no-untyped-call]
    return [FusedResult(*found[4 * i : 4 * i + 4]) for i in range(len(calls))]


class _FusedPass(torch.autograd.Function):
    """An exchange forward, an exchange backward."""

    @staticmethod
    def forward(
        ctx: Any,
        calls: list[tuple[ScanPlan, FrameOptions, bool]],
        exchange: Exchange,
        tie: Tensor,
        *tensors: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        ranks = [FrameInputs._make(tensors[_FIELDS * i : _FIELDS * (i + 1)]) for i in range(len(calls))]
        runs = [stages.begin(inputs, call[1]) for inputs, call in zip(ranks, calls, strict=True)]
        own = [plan.publish(_maps(run.summary)) for (plan, _, _), run in zip(calls, runs, strict=True)]
        gathered = exchange(own, "forward")
        results: list[Tensor | None] = []
        saved: list[Tensor | None] = []
        lengths = []
        for (plan, _, recompute), inputs, run, buffer in zip(calls, ranks, runs, own, strict=True):
            entry, final = plan.entries(gathered)
            boundary = _boundary(entry)
            result, denominator, kept = run.finish(boundary)
            final_kv, final_z = _boundary(final)[:2]
            results += [result, denominator, final_kv, final_z]
            group = [*plan.kept(gathered, buffer), *boundary[:2], *inputs, *(() if recompute else kept)]
            saved += group
            lengths.append(len(group))
        ctx.calls, ctx.exchange, ctx.lengths = calls, exchange, lengths
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved, tie)
        return tuple(results)

    @staticmethod
    @once_differentiable("gdn_cp.fused")
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        adjoints, buffers, gathered_transitions = [], [], []
        tensors = iter(ctx.saved_tensors)
        for i, ((plan, options, _), length) in enumerate(zip(ctx.calls, ctx.lengths, strict=True)):
            transitions, own, kv, z, *rest = (next(tensors) for _ in range(length))
            inputs, kept = FrameInputs._make(rest[:_FIELDS]), rest[_FIELDS:]
            dresult, ddenominator, *dfinal = gradients[4 * i : 4 * i + 4]
            entry = FrameBoundary(kv, z, None, None)
            adjoint = stages.adjoint(inputs, options, entry, dresult, ddenominator, kept)
            arrived = {s: g if g is None else _columns(g, s) for s, g in zip(("kv", "z"), dfinal, strict=True)}
            buffers.append(plan.publish_backward(_states(adjoint.gamma), arrived, own))
            adjoints.append(adjoint)
            gathered_transitions.append(transitions)
        gathered = ctx.exchange(buffers, "backward")
        found: list[Tensor | None] = []
        for (plan, _, _), adjoint, transitions in zip(ctx.calls, adjoints, gathered_transitions, strict=True):
            needs = ctx.needs_input_grad[3 + len(found) : 3 + len(found) + _FIELDS]
            found += adjoint.finish(_boundary(plan.exits(gathered, transitions)), needs)
        return (None, None, None, *found)


def _maps(summary: FrameSummary) -> dict[str, AffineMap]:
    transitions = {"kv": summary.transition_kv, "z": summary.transition_z}
    return {s: AffineMap(_given(transitions[s]), x) for s, x in _states(summary.increment).items()}


def _states(boundary: FrameBoundary) -> dict[str, Tensor]:
    """Return the forward states by stream, z as a column."""
    pairs = (("kv", boundary.forward_kv), ("z", boundary.forward_z))
    return {stream: _columns(x, stream) for stream, x in pairs if x is not None}


def _boundary(states: dict[str, Tensor]) -> FrameBoundary:
    z = states.get("z")
    return FrameBoundary(states.get("kv"), None if z is None else z.squeeze(-1), None, None)


def _columns(x: Tensor, stream: str) -> Tensor:
    return x[..., None] if stream == "z" else x


def _given(x: Tensor | None) -> Tensor:
    assert x is not None
    return x
