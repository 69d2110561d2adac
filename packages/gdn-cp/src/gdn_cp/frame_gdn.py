"""The operations of gdn-kernels over the ranks of a context: same arguments, and the result of one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gdn_cp import schedules
from gdn_cp.context import CPContext
from gdn_cp.cost_model import Link, as_link
from gdn_cp.frame_pass import FramePass
from gdn_cp.handshake import Terms, agree, digest
from gdn_cp.partition import FramePartition
from gdn_cp.passes import RankPlan
from gdn_kernels import (
    Direction,
    FrameGDNNumeratorResult,
    FrameGDNRawResult,
    FrameGDNResult,
    FrameState,
    Impl,
    Precision,
    RotaryTables,
    checks,
    frame_gdn,
    frame_gdn_numerator,
    frame_gdn_raw,
)
from gdn_kernels.frame_gdn.op import frame_gdn_arguments, numerator_arguments
from gdn_kernels.types import FrameBoundary, FrameInputs, FrameOptions

_Checked = tuple[FrameInputs, FrameOptions, FrameBoundary]
_Prepared = tuple[FrameInputs, FrameBoundary, RankPlan]


def cp_frame_gdn(
    qkv: Tensor,
    beta: Tensor,
    decay: Tensor,
    *,
    context: CPContext,
    partition: FramePartition | None = None,
    rope: RotaryTables | None = None,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    k_scale: float = 1.0,
    direction: Direction | str = Direction.FORWARD,
    chunk_starts: Sequence[int] | None = None,
    frame_valid: Tensor | None = None,
    initial_state: FrameState | None = None,
    output_final_state: bool = False,
    norm_eps: float = 1e-5,
    eps: float = 1e-6,
    precision: Precision | str | int | None = None,
    impl: Impl | str = Impl.AUTO,
) -> FrameGDNResult:
    """Run `gdn_kernels.frame_gdn` on this rank's frames of a clip, with the result of one device.

    Args:
        qkv: ``[B, N, 3, H, D]``, the tokens of this rank's frames; a rank may have none (N = 0).
        beta: ``[B, H, F, S]``, local frames.
        decay: ``[B, H, F]``, local frames.
        context: the ranks. With one rank this is the local operation.
        partition: frames of each rank; needed with interior chunk starts, checked if given. The same on every rank.
        rope: tables of this rank's tokens, at their global positions.
        q_norm_weight: as in `gdn_kernels.frame_gdn`; this and what follows is equal on all ranks unless said.
        k_norm_weight: as in `gdn_kernels.frame_gdn`.
        k_scale: as in `gdn_kernels.frame_gdn`.
        direction: as in `gdn_kernels.frame_gdn`.
        chunk_starts: counted over the whole clip, equal on all ranks.
        frame_valid: ``[B, F]``, local frames; a mask on some ranks only is fine.
        initial_state: every rank passes a state of the same shape, or every rank None. That of rank 0 is read, and
            receives a gradient; the others receive zeros.
        output_final_state: return the state after the clip's last frame, the same on every rank. Gradients that arrive
            on several ranks are summed. Not with ``schedule="chain"`` or ``"doubling"`` of the context.
        norm_eps: as in `gdn_kernels.frame_gdn`.
        eps: as in `gdn_kernels.frame_gdn`.
        precision: as in `gdn_kernels.frame_gdn`.
        impl: as in `gdn_kernels.frame_gdn`.

    Returns:
        FrameGDNResult: ``output [B, N, H, D]`` of this rank's tokens, ``final_state`` of the clip or None.

    Raises:
        ValueError, TypeError, NotImplementedError: As the local operation; on every rank if on one.
        RuntimeError: Ranks disagree; no partition with chunk starts; a partition of another size or other counts; an
            exchange did not complete.

    Communication: one exchange per pass, fp32 (fp64 for fp64), whatever F and S. By all-gather ``4 D^2 + 2 D`` numbers
        per batch element and head forward (both directions) and ``2 D^2 + 2 D`` backward; along a chain ``D^2 + D`` to
        each neighbour in either pass; doubling, ``3 D^2 + D`` per direction and round in either pass.
    Every rank must call this: yes, and its backward, if some rank's input requires a gradient.
    Gradient: of the sum of all ranks' losses. Parameters that ranks share get partial gradients; sum them.

    Example:
        >>> context = CPContext.single()
        >>> qkv, beta, decay = torch.rand(1, 6, 3, 2, 4), torch.rand(1, 2, 3, 2), torch.rand(1, 2, 3)
        >>> cp_frame_gdn(qkv, beta, decay, context=context, direction="bidirectional").output.shape
        torch.Size([1, 6, 2, 4])
    """
    options: dict[str, Any] = dict(
        rope=rope, q_norm_weight=q_norm_weight, k_norm_weight=k_norm_weight, k_scale=k_scale, direction=direction,
        chunk_starts=chunk_starts, frame_valid=frame_valid, initial_state=initial_state,
        output_final_state=output_final_state, norm_eps=norm_eps, precision=precision, impl=impl,
    )  # fmt: skip
    if _is_local(context, partition, beta):
        return frame_gdn(qkv, beta, decay, eps=eps, **options)

    def check() -> _Checked:
        return frame_gdn_arguments(
            qkv, beta, decay, eps=checks.require_positive("eps", eps), divide=True, **{**options, "chunk_starts": None}
        )

    output, _, final_kv, final_z = _run("cp_frame_gdn", check, context, partition, chunk_starts, output_final_state)
    return FrameGDNResult(output, _state(final_kv, final_z))


def cp_frame_gdn_raw(
    qkv: Tensor,
    beta: Tensor,
    decay: Tensor,
    *,
    context: CPContext,
    partition: FramePartition | None = None,
    rope: RotaryTables | None = None,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    k_scale: float = 1.0,
    direction: Direction | str = Direction.FORWARD,
    chunk_starts: Sequence[int] | None = None,
    frame_valid: Tensor | None = None,
    initial_state: FrameState | None = None,
    output_final_state: bool = False,
    norm_eps: float = 1e-5,
    precision: Precision | str | int | None = None,
    impl: Impl | str = Impl.AUTO,
) -> FrameGDNRawResult:
    """Run `gdn_kernels.frame_gdn_raw` on this rank's frames: numerator and denominator, not divided.

    Arguments, errors, communication and gradients are those of `cp_frame_gdn`.

    Returns:
        FrameGDNRawResult: ``numerator [B, N, H, D]`` and ``denominator [B, H, N]`` of this rank's tokens, fp32 (fp64).
    """
    options: dict[str, Any] = dict(
        rope=rope, q_norm_weight=q_norm_weight, k_norm_weight=k_norm_weight, k_scale=k_scale, direction=direction,
        chunk_starts=chunk_starts, frame_valid=frame_valid, initial_state=initial_state,
        output_final_state=output_final_state, norm_eps=norm_eps, precision=precision, impl=impl,
    )  # fmt: skip
    if _is_local(context, partition, beta):
        return frame_gdn_raw(qkv, beta, decay, **options)

    def check() -> _Checked:
        return frame_gdn_arguments(qkv, beta, decay, eps=0.0, divide=False, **{**options, "chunk_starts": None})

    numerator, denominator, final_kv, final_z = _run(
        "cp_frame_gdn_raw", check, context, partition, chunk_starts, output_final_state
    )
    assert denominator is not None
    return FrameGDNRawResult(numerator, denominator, _state(final_kv, final_z))


def cp_frame_gdn_numerator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    *,
    context: CPContext,
    partition: FramePartition | None = None,
    direction: Direction | str = Direction.FORWARD,
    chunk_starts: Sequence[int] | None = None,
    frame_valid: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    precision: Precision | str | int | None = None,
    impl: Impl | str = Impl.AUTO,
) -> FrameGDNNumeratorResult:
    """Run `gdn_kernels.frame_gdn_numerator` on this rank's frames: the kv stream alone, on prepared operands.

    Arguments, errors and gradients are those of `cp_frame_gdn`; q, k, v ``[B, N, H, D]``.

    Communication: one exchange per pass. By all-gather ``3 D^2`` numbers per batch element and head forward (both
        directions), then ``2 D^2`` backward; chain ``D^2``, doubling ``2 D^2``, counted as in `cp_frame_gdn`.

    Returns:
        FrameGDNNumeratorResult: ``numerator [B, N, H, D]`` fp32 (fp64), ``final_state`` ``[B, H, D, D]`` or None.
    """
    options: dict[str, Any] = dict(
        direction=direction, chunk_starts=chunk_starts, frame_valid=frame_valid, initial_state=initial_state,
        output_final_state=output_final_state, precision=precision, impl=impl,
    )  # fmt: skip
    if _is_local(context, partition, beta):
        return frame_gdn_numerator(q, k, v, beta, decay, **options)

    def check() -> _Checked:
        return numerator_arguments(q, k, v, beta, decay, **{**options, "chunk_starts": None})

    numerator, _, final_kv, _ = _run(
        "cp_frame_gdn_numerator", check, context, partition, chunk_starts, output_final_state
    )
    return FrameGDNNumeratorResult(numerator, final_kv)


def _is_local(context: CPContext, partition: FramePartition | None, beta: Tensor) -> bool:
    """Whether the context has one rank, and then checks the partition, which the local operation does not know."""
    if not isinstance(context, CPContext):
        raise TypeError(f"context must be a CPContext, got {type(context).__name__}")
    if context.is_trivial and partition is not None:
        require_partition(context, partition, beta.shape[2])
    return context.is_trivial


def require_partition(context: CPContext, partition: FramePartition, frames: int) -> None:
    """Raise RuntimeError unless the partition has the context's ranks and this rank's number of frames."""
    _require_kind(partition)
    if partition.size != context.size:
        raise RuntimeError(f"partition must have as many ranks as the context, {context.size}, got {partition.size}")
    if partition.counts[context.rank] != frames:
        raise RuntimeError(
            f"beta must have F = {partition.counts[context.rank]} frames, this rank's part of the partition "
            f"{partition.counts} (rank {context.rank}), got {frames}"
        )


def _require_kind(partition: object) -> None:
    if partition is not None and not isinstance(partition, FramePartition):
        raise TypeError(f"partition must be a FramePartition or None, got {type(partition).__name__}")


def _run(
    op: str,
    check: Callable[[], _Checked],
    context: CPContext,
    partition: FramePartition | None,
    chunk_starts: Sequence[int] | None,
    output_final_state: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Agree on the call with the other ranks, then run it; returns result, denominator, final kv and z."""
    if torch.compiler.is_compiling():
        from gdn_cp.frame_op import arguments_of, call_op

        _require_kind(partition)
        inputs, options, initial = check()
        arguments = arguments_of(op, context, partition, chunk_starts, output_final_state, inputs, options, initial)
        return call_op(arguments, options, output_final_state)

    def make() -> tuple[Terms, _Prepared]:
        inputs, options, initial = check()
        if partition is not None:
            require_partition(context, partition, inputs.beta.shape[2])
        plan = plan_over(context, inputs, options, initial, partition, chunk_starts, output_final_state)
        return call_terms(inputs, initial, plan, partition, chunk_starts), (inputs, initial, plan)

    (inputs, initial, plan), backward = agree(op, context, _device_of(check), make)
    # an input that requires a gradient on every rank makes every rank's backward reach the exchange
    tie = torch.empty(0, device=plan.device, requires_grad=backward)
    result: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None] = FramePass.apply(  # type: ignore[no-untyped-call]
        op, context, plan, tie, *inputs, initial.forward_kv, initial.forward_z
    )[:4]
    return result


def plan_over(
    context: CPContext,
    inputs: FrameInputs,
    options: FrameOptions,
    initial: FrameBoundary,
    partition: FramePartition | None,
    chunk_starts: Sequence[int] | None,
    has_final: bool,
) -> RankPlan:
    """Return the plan of this rank of a context."""
    schedule = schedules.wanted(context, inputs.beta.device)
    plan = make_plan(inputs, options, initial, context.rank, context.size, partition, chunk_starts, has_final,
                     context.save_transitions, schedule, as_link(context.link))  # fmt: skip
    return dataclasses.replace(plan, poison=context.validate == "always")


def make_plan(
    inputs: FrameInputs,
    options: FrameOptions,
    initial: FrameBoundary,
    rank: int,
    size: int,
    partition: FramePartition | None,
    chunk_starts: Sequence[int] | None,
    has_final: bool,
    save_transitions: bool,
    schedule: str,
    link: Link,
) -> RankPlan:
    """Return the plan of one rank, with the clip's chunk starts turned into this rank's resets and a schedule chosen.

    Raises:
        NotImplementedError: A final state with another schedule than all_gather.
        RuntimeError: Interior chunk starts without a partition.
    """
    has_reset = (False,) * size
    if chunk_starts is not None:
        total = partition.total if partition is not None else 1 << 62
        interior = checks.as_chunk_starts(chunk_starts, total)
        if interior and partition is None:
            raise RuntimeError("chunk_starts need a partition: they are counted over the frames of all ranks")
        if interior and partition is not None and options.direction.reads_future:
            local = [partition.local_starts(interior, r) for r in range(partition.size)]
            has_reset = tuple(bool(starts) for starts in local)
            options = dataclasses.replace(options, resets=local[rank] if rank < len(local) else ())
    batch, heads = inputs.beta.shape[:2]
    plan = RankPlan(
        options, size, rank, has_reset, initial.forward_kv is not None, has_final, batch, heads,
        inputs.operands()[0].shape[-1], inputs.state_dtype, inputs.beta.device, save_transitions,
    )  # fmt: skip
    return schedules.scheduled(plan, schedule, link)


def call_terms(
    inputs: FrameInputs,
    initial: FrameBoundary,
    plan: RankPlan,
    partition: FramePartition | None,
    chunk_starts: Sequence[int] | None,
) -> Terms:
    """Return what ranks compare before the first call of a kind."""
    options = plan.options
    operand = inputs.operands()[0]
    wire = (
        ("B", plan.batch), ("H", plan.heads), ("D", plan.width), ("dtype", _short(operand.dtype)),
        ("direction", options.direction.value), ("streams", len(plan.streams)), ("initial state", plan.has_initial),
        ("final state", plan.has_final), ("save_transitions", plan.save_transitions), ("schedule", plan.schedule),
        ("blocks of the chain", plan.blocks),
    )  # fmt: skip
    agreed = (
        ("S", inputs.beta.shape[3]), ("partition", partition and digest(partition.counts)),
        ("chunk_starts", digest(tuple(chunk_starts or ()))), ("precision", options.precision.value),
        ("impl", options.impl.value), ("k_scale", options.k_scale), ("norm_eps", options.norm_eps),
        ("eps", options.eps), ("rope", inputs.rope_cos is not None),
        ("q_norm_weight", inputs.q_norm_weight is not None), ("k_norm_weight", inputs.k_norm_weight is not None),
    )  # fmt: skip
    floats = [x for x in (*inputs, *initial) if x is not None]
    return Terms(wire, agreed, any(x.requires_grad for x in floats), torch.is_grad_enabled())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device_of(check: Callable[[], _Checked]) -> torch.device | None:
    """Return the device of the first tensor the call was given."""
    for cell in check.__closure__ or ():
        if isinstance(cell.cell_contents, Tensor):
            return cell.cell_contents.device
    return None


def _state(kv: Tensor | None, z: Tensor | None) -> FrameState | None:
    return FrameState(kv, z) if kv is not None and z is not None else None
