"""`cp_frame_gdn` and its twins as ``torch.library`` operators, which is what a graph of ``torch.compile`` holds.

The operators rebuild the plan of a call from its tensors and scalars and go through the functions that eager calls go
through, comparison of the ranks included. A graph is made before the ranks meet, so whether it has a backward cannot
depend on them: a rank that needs none itself has one if its context has ``force_backward``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gdn_cp.context import CPContext
from gdn_cp.frame_gdn import call_terms, plan_over, require_partition
from gdn_cp.frame_pass import run_backward, run_forward
from gdn_cp.handles import context_of
from gdn_cp.handshake import Terms, agree
from gdn_cp.partition import FramePartition
from gdn_cp.passes import RankPlan
from gdn_kernels.once import once_differentiable
from gdn_kernels.types import Direction, FrameBoundary, FrameInputs, FrameOptions, Impl, Precision

_INPUTS, _ENTRY = len(FrameInputs._fields), len(FrameBoundary._fields)
_TENSORS = _INPUTS + 3  # the inputs, the initial state, and a tie that requires a gradient where nothing else does
_RESULTS = 4
_SAVED = 8  # of the Triton implementation, besides result and denominator
_SCALARS = 16


def arguments_of(
    op: str,
    context: CPContext,
    partition: FramePartition | None,
    chunk_starts: Sequence[int] | None,
    has_final: bool,
    inputs: FrameInputs,
    options: FrameOptions,
    initial: FrameBoundary,
) -> tuple[Any, ...]:
    """Return the arguments of the operator."""
    tensors = (*inputs, initial.forward_kv, initial.forward_z)
    needs_grad = any(x is not None and x.requires_grad for x in tensors)
    grad_mode = torch.is_grad_enabled()
    tie = context.tie if grad_mode and not needs_grad else None
    return (
        *tensors, tie, op, context.handle, None if partition is None else list(partition.counts),
        None if chunk_starts is None else list(chunk_starts), has_final, options.features, options.has_z,
        options.divide, options.direction.value, options.k_scale, options.norm_eps, options.eps,
        options.precision.value, options.impl.value, needs_grad, grad_mode,
    )  # fmt: skip


def call_op(
    arguments: tuple[Any, ...], options: FrameOptions, has_final: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Put the call into the graph that is being traced; returns result, denominator, final kv and z."""
    found = torch.ops.gdn_cp.frame_gdn(*arguments)
    raw = options.has_z and not options.divide
    final_z = found[3] if has_final and options.has_z else None
    return found[0], found[1] if raw else None, found[2] if has_final else None, final_z


class _Call:
    """One call, from the arguments of an operator: the tensors first, the scalars last."""

    def __init__(self, tensors: Sequence[Tensor | None], scalars: Sequence[Any]) -> None:
        (self.op, handle, counts, self.chunk_starts, self.has_final, features, has_z, divide, direction, k_scale,
         norm_eps, eps, precision, impl, self.needs_grad, self.grad_mode) = scalars  # fmt: skip
        self.context = context_of(handle)
        self.partition = None if counts is None else FramePartition(tuple(counts))
        self.inputs = FrameInputs._make(tensors[:_INPUTS])
        self.initial = FrameBoundary(tensors[_INPUTS], tensors[_INPUTS + 1], None, None)
        self.options = FrameOptions(
            features, has_z, divide, Direction(direction), (), k_scale, norm_eps, eps, Precision(precision), Impl(impl)
        )

    @property
    def keeps_denominator(self) -> bool:
        """Whether the second output holds a denominator: to return it, or for the backward."""
        return self.options.has_z and (self.options.impl is Impl.TRITON or not self.options.divide)

    def plan(self) -> RankPlan:
        """Return the plan of this rank."""
        return plan_over(
            self.context, self.inputs, self.options, self.initial, self.partition, self.chunk_starts, self.has_final
        )

    def make(self) -> tuple[Terms, RankPlan]:
        """Return what `agree` compares."""
        if self.partition is not None:
            require_partition(self.context, self.partition, self.inputs.beta.shape[2])
        plan = self.plan()
        terms = call_terms(self.inputs, self.initial, plan, self.partition, self.chunk_starts)
        joins = self.needs_grad or self.context.force_backward
        return dataclasses.replace(terms, needs_grad=self.needs_grad, grad_mode=self.grad_mode, joins=joins), plan


def _flat(tensors: Sequence[Tensor | None], like: Tensor) -> tuple[Tensor, ...]:
    """Return tensors laid out as the fake implementations promise, empty where there is none."""
    return tuple(like.new_empty(0, dtype=torch.float32) if x is None else x.contiguous() for x in tensors)


def _or_none(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    return [x if x.ndim > 1 else None for x in tensors]


@torch.library.custom_op("gdn_cp::frame_gdn", mutates_args=())
def _forward_op(
    qkv: Tensor | None, q: Tensor | None, k: Tensor | None, v: Tensor | None, beta: Tensor, decay: Tensor,
    q_norm_weight: Tensor | None, k_norm_weight: Tensor | None, rope_cos: Tensor | None, rope_sin: Tensor | None,
    frame_valid: Tensor | None, initial_kv: Tensor | None, initial_z: Tensor | None, tie: Tensor | None, op: str,
    context: str, counts: Sequence[int] | None, chunk_starts: Sequence[int] | None, has_final: bool, features: bool,
    has_z: bool, divide: bool, direction: str, k_scale: float, norm_eps: float, eps: float, precision: str, impl: str,
    needs_grad: bool, grad_mode: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
           Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    tensors = (qkv, q, k, v, beta, decay, q_norm_weight, k_norm_weight, rope_cos, rope_sin, frame_valid, initial_kv,
               initial_z)  # fmt: skip
    call = _Call(tensors, (op, context, counts, chunk_starts, has_final, features, has_z, divide, direction, k_scale,
                           norm_eps, eps, precision, impl, needs_grad, grad_mode))  # fmt: skip
    context_of(context, hold=True)
    plan, _ = agree(op, call.context, beta.device, call.make)
    results, (kept, *rest) = run_forward(op, call.context, plan, call.inputs, call.initial[:2])
    result, denominator, *final = results
    entry, saved = [None if x is None else x.clone() for x in rest[:_ENTRY]], rest[_ENTRY:]
    if saved:
        _, denominator, *saved = saved
    absent = [None] * (_SAVED - len(saved))
    return _flat([result, denominator, *final, kept, *entry, *saved, *absent], beta)  # type: ignore[return-value]


@_forward_op.register_fake
def _forward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    tensors, scalars = arguments[:_TENSORS], arguments[_TENSORS:]
    call = _Call(tensors, scalars)
    inputs, options, plan = call.inputs, call.options, _traced_plan(call)
    operand = inputs.operands()[0]
    dtype, lead, width = inputs.state_dtype, operand.shape[:1] + operand.shape[2:3], operand.shape[-1]

    def fresh(here: bool, *shape: int) -> Tensor:
        return operand.new_empty(shape if here else (0,), dtype=dtype if here else torch.float32)

    past, future, has_z = options.direction.reads_past, options.direction.reads_future, options.has_z
    kv, z = (*lead, width, width), (*lead, width)
    result = operand.new_empty(operand.shape, dtype=operand.dtype if options.divide else dtype)
    denominator = fresh(call.keeps_denominator, *lead, operand.shape[1])
    saved: Sequence[Tensor] = [fresh(False) for _ in range(_SAVED)]
    if options.impl is Impl.TRITON:
        import gdn_kernels.frame_gdn.triton_op  # noqa: F401  registers the operator: nothing local may have run yet

        local = torch.ops.gdn_kernels.frame_gdn(
            *inputs, None, None, None, None, options.features, has_z, options.divide, options.direction.value, [],
            options.k_scale, options.norm_eps, options.eps, options.precision.value, False,
        )  # fmt: skip
        saved = local[-_SAVED:]
    kept = plan.transition_layout().offsets[-1]
    rows = plan.size if plan.schedule == "all_gather" and plan.save_transitions else 1
    return (
        result, denominator, fresh(call.has_final, *kv), fresh(call.has_final and has_z, *z),
        fresh(True, rows, kept), fresh(past, *kv),
        fresh(past and has_z, *z), fresh(future, *kv), fresh(future and has_z, *z), *saved,
    )  # fmt: skip


def _traced_plan(call: _Call) -> RankPlan:
    """Return a plan for the shapes of a trace: chunk starts and partition are looked at when the call runs."""
    return plan_over(call.context, call.inputs, call.options, call.initial, None, None, call.has_final)


def _backward_op(
    qkv: Tensor | None, q: Tensor | None, k: Tensor | None, v: Tensor | None, beta: Tensor, decay: Tensor,
    q_norm_weight: Tensor | None, k_norm_weight: Tensor | None, rope_cos: Tensor | None, rope_sin: Tensor | None,
    frame_valid: Tensor | None, initial_kv: Tensor | None, initial_z: Tensor | None, kept: Sequence[Tensor],
    dresult: Tensor | None, ddenominator: Tensor | None, dfinal_kv: Tensor | None, dfinal_z: Tensor | None, op: str,
    context: str, counts: Sequence[int] | None, chunk_starts: Sequence[int] | None, has_final: bool, features: bool,
    has_z: bool, divide: bool, direction: str, k_scale: float, norm_eps: float, eps: float, precision: str, impl: str,
    needs_grad: bool, grad_mode: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    tensors = (qkv, q, k, v, beta, decay, q_norm_weight, k_norm_weight, rope_cos, rope_sin, frame_valid, initial_kv,
               initial_z)  # fmt: skip
    call = _Call(tensors, (op, context, counts, chunk_starts, has_final, features, has_z, divide, direction, k_scale,
                           norm_eps, eps, precision, impl, needs_grad, grad_mode))  # fmt: skip
    result, denominator, transitions, *rest = kept
    entry, saved = _or_none(rest[:_ENTRY]), _or_none(rest[_ENTRY:])
    local = [result, *_or_none([denominator]), *saved] if call.options.impl is Impl.TRITON else []
    with torch.enable_grad():
        assert (beta.detach().requires_grad_() * 1).requires_grad, "this operator runs with autograd"
    needs = [x is not None and x.is_floating_point() for x in call.inputs[:-3]] + [False] * 3
    gradients = (dresult, ddenominator if has_z and not divide else None, dfinal_kv, dfinal_z)
    found = run_backward(op, call.context, call.plan(), call.inputs, [transitions, *entry, *local], gradients,
                         needs)  # fmt: skip
    dinitial = [g if x is not None else None for g, x in zip(found[_INPUTS:], call.initial[:2], strict=True)]
    dtie = beta.new_empty(0, dtype=torch.float32)
    return (*_flat([*found[: _INPUTS - 3], *dinitial], beta), dtie)  # type: ignore[return-value]


def _backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    inputs = FrameInputs._make(arguments[:_INPUTS])
    floats: list[Tensor | None] = [*inputs[:-3], *arguments[_INPUTS : _INPUTS + 2]]
    empty = inputs.beta

    def like(x: Tensor | None) -> Tensor:
        return empty.new_empty(0, dtype=torch.float32) if x is None else x.new_empty(x.shape)

    return (*(like(x) for x in floats), empty.new_empty(0, dtype=torch.float32))


# Not a custom_op: those run below autograd, and the torch implementation's backward is made by autograd.
_library: Any = torch.library.Library("gdn_cp", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("frame_gdn_bwd" + torch.library.infer_schema(_backward_op, mutates_args=()))
_library.impl("frame_gdn_bwd", _backward_op, "CompositeExplicitAutograd")
torch.library.register_fake("gdn_cp::frame_gdn_bwd", _backward_fake, lib=_library)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.scalars = inputs[_TENSORS:]
    ctx.tied = inputs[_TENSORS - 1] is not None
    ctx.save_for_backward(*inputs[: _TENSORS - 1], *output[:2], *output[_RESULTS:])


@once_differentiable("cp_frame_gdn")
def _op_backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    tensors, kept = saved[: _TENSORS - 1], saved[_TENSORS - 1 :]
    found = torch.ops.gdn_cp.frame_gdn_bwd(*tensors, kept, *gradients[:_RESULTS], *ctx.scalars)
    *dfloats, dkv, dz, dtie = found
    floats = [None if x is None else g for x, g in zip(tensors, dfloats, strict=False)]
    initial = [None if x is None else g for x, g in zip(tensors[_INPUTS:], (dkv, dz), strict=True)]
    return (*floats, None, None, None, *initial, dtie.cpu() if ctx.tied else None, *(None for _ in range(_SCALARS)))


_forward_op.register_autograd(_op_backward, setup_context=_setup_context)
