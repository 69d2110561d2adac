"""P ranks inside one process, in lock-step: the oracle of tests, and a way to learn the algorithm without a cluster.

The code of a pass is that of the real operations, schedule and all; messages are handed over where they would be
sent. One autograd node spans all ranks, so that a backward on one of them reaches the others, as a real exchange does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gdn_cp import passes, schedules
from gdn_cp.context import CPContext
from gdn_cp.cost_model import Link, as_link
from gdn_cp.frame_gdn import make_plan
from gdn_cp.frame_scan import CpFrameGdnScanResult, make_scan_plan, run_scan
from gdn_cp.halo import HaloPlan
from gdn_cp.partition import FramePartition
from gdn_cp.passes import RankPlan
from gdn_kernels import FrameGDNNumeratorResult, FrameGDNRawResult, FrameGDNResult, FrameState
from gdn_kernels.frame_gdn.op import frame_gdn_arguments, numerator_arguments
from gdn_kernels.once import once_differentiable
from gdn_kernels.types import FrameBoundary, FrameInputs, FrameOptions

_FIELDS, _ENTRY = len(FrameInputs._fields), len(FrameBoundary._fields)
_SLOTS = _FIELDS + 2
_DEFAULTS: dict[str, Any] = dict(
    rope=None, q_norm_weight=None, k_norm_weight=None, k_scale=1.0, direction="forward", chunk_starts=None,
    frame_valid=None, initial_state=None, output_final_state=False, norm_eps=1e-5, precision=None, impl="auto",
)  # fmt: skip
_NUMERATOR_DEFAULTS = {
    name: _DEFAULTS[name]
    for name in ("direction", "chunk_starts", "frame_valid", "initial_state", "output_final_state", "precision", "impl")
}


def frame_gdn(
    shards: Sequence[dict[str, Any]],
    partition: FramePartition,
    *,
    eps: float = 1e-6,
    save_transitions: bool = True,
    schedule: str = "all_gather",
    link: Link | str = "nvlink",
) -> list[FrameGDNResult]:
    """Run `cp_frame_gdn` on every rank of a partition.

    Args:
        shards: for each rank the arguments of `cp_frame_gdn` by name, without context and partition.
        partition: frames of each rank.
        eps: as in `cp_frame_gdn`.
        save_transitions: as in `CPContext`.
        schedule: as in `CPContext`.
        link: as in `CPContext`.

    Returns:
        list[FrameGDNResult]: one per rank.

    Example:
        >>> qkv, beta, decay = torch.rand(1, 6, 3, 2, 4), torch.rand(1, 2, 3, 2), torch.rand(1, 2, 3)
        >>> shards = [dict(qkv=qkv[:, :4], beta=beta[:, :, :2], decay=decay[:, :, :2]),
        ...           dict(qkv=qkv[:, 4:], beta=beta[:, :, 2:], decay=decay[:, :, 2:])]
        >>> [result.output.shape[1] for result in frame_gdn(shards, FramePartition((2, 1)))]
        [4, 2]
    """
    results = _simulate(shards, partition, save_transitions, schedule, link, eps=eps, divide=True)
    return [FrameGDNResult(output, _state(kv, z)) for output, _, kv, z in results]


def frame_gdn_raw(
    shards: Sequence[dict[str, Any]],
    partition: FramePartition,
    *,
    save_transitions: bool = True,
    schedule: str = "all_gather",
    link: Link | str = "nvlink",
) -> list[FrameGDNRawResult]:
    """Run `cp_frame_gdn_raw` on every rank of a partition; arguments as in `frame_gdn`."""
    results = _simulate(shards, partition, save_transitions, schedule, link, eps=0.0, divide=False)
    return [FrameGDNRawResult(numerator, denominator, _state(kv, z)) for numerator, denominator, kv, z in results]


def frame_gdn_numerator(
    shards: Sequence[dict[str, Any]],
    partition: FramePartition,
    *,
    save_transitions: bool = True,
    schedule: str = "all_gather",
    link: Link | str = "nvlink",
) -> list[FrameGDNNumeratorResult]:
    """Run `cp_frame_gdn_numerator` on every rank of a partition; arguments as in `frame_gdn`."""
    results = _simulate(shards, partition, save_transitions, schedule, link)
    return [FrameGDNNumeratorResult(numerator, kv) for numerator, _, kv, _ in results]


def scan(
    shards: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]],
    *,
    reverse: bool = False,
    truncate_to_active: int | None = None,
    save_transitions: bool = True,
) -> list[tuple[Tensor, Tensor] | CpFrameGdnScanResult]:
    """Run `cp_frame_gdn_scan` on every rank; ``shards`` are the ranks' ``W_kv, U_kv, W_z, U_z``."""
    context = CPContext.single().replace(save_transitions=save_transitions)
    frames = {shard[0].shape[1] for shard in shards}
    if truncate_to_active is not None and len(frames) > 1:
        raise ValueError(f"truncate_to_active needs the same T_local on every rank, got {sorted(frames)}")
    plans = [
        make_scan_plan(shard, context, reverse, truncate_to_active, (rank, len(shards)))
        for rank, shard in enumerate(shards)
    ]
    tensors = [x for shard in shards for x in shard]
    return run_scan(plans, lambda buffers, label: torch.stack(buffers), torch.empty(0), tensors)


def halo(
    xs: Sequence[Tensor], left: int, right: int, dim: int, partition: FramePartition, *, fill: float = 0.0
) -> list[Tensor]:
    """Run `halo_exchange` on every rank of a partition; ``xs`` are the ranks' tensors."""
    plans = [HaloPlan(partition, rank, left, right) for rank in range(partition.size)]
    moved = [x.movedim(dim, 0) for x in xs]
    sent = [plan.outgoing(x) for plan, x in zip(plans, moved, strict=True)]
    return [
        plan.extend(x, [sent[owner][rank] for owner in range(partition.size)], fill).movedim(0, dim)
        for rank, (plan, x) in enumerate(zip(plans, moved, strict=True))
    ]


def _simulate(
    shards: Sequence[dict[str, Any]],
    partition: FramePartition,
    save_transitions: bool,
    schedule: str,
    link: Link | str,
    **kind: Any,
) -> list[tuple[Any, Any, Any, Any]]:
    if len(shards) != partition.size:
        raise ValueError(f"shards must hold one entry per rank, {partition.size}, got {len(shards)}")
    plans: list[RankPlan] = []
    tensors: list[Tensor | None] = []
    for rank, shard in enumerate(shards):
        inputs, options, initial = _arguments(shard, kind)
        if inputs.beta.shape[2] != partition.counts[rank]:
            raise ValueError(f"rank {rank} must have F = {partition.counts[rank]}, got {inputs.beta.shape[2]}")
        plans.append(
            make_plan(
                inputs,
                options,
                initial,
                rank,
                partition.size,
                partition,
                shard.get("chunk_starts"),
                shard.get("output_final_state", False),
                save_transitions,
                schedule,
                as_link(link),
            )  # fmt: skip
        )
        tensors += [*inputs, initial.forward_kv, initial.forward_z]
    flat = _Lockstep.apply(plans, *tensors)  # type: ignore[no-untyped-call]
    return [tuple(flat[4 * rank : 4 * rank + 4]) for rank in range(partition.size)]


def _arguments(shard: dict[str, Any], kind: dict[str, Any]) -> tuple[FrameInputs, FrameOptions, FrameBoundary]:
    """Check one rank's arguments with the local operation's checks; chunk starts are the partition's business."""
    defaults, check = (_DEFAULTS, frame_gdn_arguments) if kind else (_NUMERATOR_DEFAULTS, numerator_arguments)
    return check(**{**defaults, **kind, **shard, "chunk_starts": None})


def _state(kv: Tensor | None, z: Tensor | None) -> FrameState | None:
    return FrameState(kv, z) if kv is not None and z is not None else None


class _Lockstep(torch.autograd.Function):
    """All ranks of a pass, one after another, and their exchange round by round."""

    @staticmethod
    def forward(ctx: Any, plans: list[RankPlan], *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        ranks = [_of_rank(tensors, plan.rank) for plan in plans]
        begun = [passes.begin(plan, *given) for plan, given in zip(plans, ranks, strict=True)]
        entered = schedules.in_lockstep(
            [
                schedules.enter(plan, own, initial)
                for plan, (_, own), (_, initial) in zip(plans, begun, ranks, strict=True)
            ]
        )
        outputs: list[Tensor | None] = []
        kept: list[Tensor | None] = []
        for (run, _), (entry, final, transitions) in zip(begun, entered, strict=True):
            result, denominator, saved = run.finish(entry)
            outputs += [result, denominator, *final]
            kept += [transitions, *entry, *saved]
        ctx.plans, ctx.set = plans, len(tensors)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *kept)
        return tuple(outputs)

    @staticmethod
    @once_differentiable("simulate.frame_gdn")
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        plans: list[RankPlan] = ctx.plans
        saved = ctx.saved_tensors
        tensors, kept = saved[: ctx.set], saved[ctx.set :]
        share = len(kept) // len(plans)
        adjoints, leaving = [], []
        for plan in plans:
            inputs, _ = _of_rank(tensors, plan.rank)
            transitions, *own = kept[share * plan.rank : share * (plan.rank + 1)]
            entry = FrameBoundary(*own[:_ENTRY])
            dresult, ddenominator, dkv, dz = gradients[4 * plan.rank : 4 * plan.rank + 4]
            dresults = (dresult, ddenominator)
            adjoint, buffer = passes.begin_backward(
                plan, inputs, entry, dresults, own[_ENTRY:], (dkv, dz), transitions
            )  # fmt: skip
            adjoints.append(adjoint)
            leaving.append(schedules.leave(plan, buffer, transitions))
        found: list[Tensor | None] = [None]
        for plan, adjoint, (exits, dinitial) in zip(plans, adjoints, schedules.in_lockstep(leaving), strict=True):
            first = 1 + plan.rank * _SLOTS
            found += [*adjoint.finish(exits, ctx.needs_input_grad[first : first + _FIELDS]), *dinitial]
        return tuple(found)


def _of_rank(tensors: Sequence[Tensor | None], rank: int) -> tuple[FrameInputs, tuple[Tensor | None, Tensor | None]]:
    own = tensors[rank * _SLOTS : (rank + 1) * _SLOTS]
    return FrameInputs._make(own[:_FIELDS]), (own[_FIELDS], own[_FIELDS + 1])
