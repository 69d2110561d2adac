"""The Triton implementation as ``torch.library`` operators: one forward, one backward, each one node of a graph.

Operators take and return flat tensors; absent ones are None going in and empty coming out. Under ``torch.compile`` they
are what a graph holds. Eager calls run the same functions behind a plain autograd Function, because the operators'
dispatch costs more host time than a short clip takes on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gdn_kernels.once import once_differentiable
from gdn_kernels.types import Direction, FrameBoundary, FrameInputs, FrameOptions, Impl, Precision

_INPUTS, _ENTRY = len(FrameInputs._fields), len(FrameBoundary._fields)
_RESULTS = 2 + _ENTRY  # result, denominator, exit states; what follows is saved for the backward
_NOTHING = FrameBoundary(None, None, None, None)


def apply_triton(
    inputs: FrameInputs, options: FrameOptions, entry: FrameBoundary, want_exit: bool = True
) -> tuple[Tensor, Tensor | None, FrameBoundary]:
    """Run one call on Triton; same arguments and results as the reference, differentiable once by autograd.

    Exit states are left out unless wanted: they cost copies that a call without state in its result does not need.
    """
    scalars = (
        options.features, options.has_z, options.divide, options.direction.value, options.resets, options.k_scale,
        options.norm_eps, options.eps, options.precision.value, want_exit,
    )  # fmt: skip
    if torch.compiler.is_compiling():
        outputs = torch.ops.gdn_kernels.frame_gdn(*inputs, *entry, *scalars)
        present = _exits_present(options, want_exit)
        exits = [x if here else None for x, here in zip(outputs[2:_RESULTS], present, strict=True)]
        return outputs[0], outputs[1] if _raw_denominator(options) else None, FrameBoundary(*exits)
    outputs = _EagerCall.apply(scalars, *inputs, *entry)  # type: ignore[no-untyped-call]
    return outputs[0], outputs[1] if _raw_denominator(options) else None, FrameBoundary(*outputs[2:])


def _raw_denominator(options: FrameOptions) -> bool:
    return options.has_z and not options.divide


def _exits_present(options: FrameOptions, want_exit: bool) -> tuple[bool, bool, bool, bool]:
    past, future, has_z = options.direction.reads_past, options.direction.reads_future, options.has_z
    return want_exit and past, want_exit and past and has_z, want_exit and future, want_exit and future and has_z


def _options(scalars: Sequence[Any]) -> tuple[FrameOptions, bool]:
    features, has_z, divide, direction, resets, k_scale, norm_eps, eps, precision, want_exit = scalars
    options = FrameOptions(
        features, has_z, divide, Direction(direction), tuple(resets), k_scale, norm_eps, eps, Precision(precision),
        Impl.TRITON,
    )  # fmt: skip
    return options, want_exit


def _forward(inputs: FrameInputs, entry: FrameBoundary, scalars: Sequence[Any]) -> list[Tensor | None]:
    from gdn_kernels.frame_gdn import triton_stages

    options, want_exit = _options(scalars)
    prepared = triton_stages.prepare(inputs, options)
    result, denominator, exits, saved = triton_stages.forward(prepared, options, entry, want_exit)
    return [result, denominator, *exits, *saved]


def _backward(
    inputs: FrameInputs,
    result: Tensor,
    denominator: Tensor | None,
    saved: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
    scalars: Sequence[Any],
) -> list[Tensor | None]:
    """Return the gradients of all inputs and entry states."""
    from gdn_kernels.frame_gdn import triton_stages

    options, _ = _options(scalars)
    kept = triton_stages.Saved(*saved)  # type: ignore[arg-type]
    prepared = triton_stages.prepare(inputs, options)
    buffers = triton_stages.gradient_buffers(inputs)
    dresult, ddenominator, *dexit = gradients
    read_out = triton_stages.read_out_backward(prepared, kept, result, denominator, dresult, ddenominator, buffers)
    triton_stages.query_norm_backward(prepared, kept, read_out, buffers)
    scans = triton_stages.sweep_backward(prepared, options, kept, read_out, FrameBoundary(*dexit))
    return [*triton_stages.write_backward(inputs, prepared, kept, read_out, scans, buffers), *scans.entry]


class _EagerCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scalars: tuple[Any, ...], *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs, entry = FrameInputs._make(tensors[:_INPUTS]), FrameBoundary(*tensors[_INPUTS:])
        outputs = _forward(inputs, entry, scalars)
        ctx.set_materialize_grads(False)
        ctx.scalars = scalars
        ctx.entry_given = [x is not None for x in entry]
        ctx.save_for_backward(*inputs, *outputs[:2], *outputs[_RESULTS:])
        return tuple(outputs[:_RESULTS])

    @staticmethod
    @once_differentiable("frame_gdn")
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        inputs = FrameInputs._make(tensors[:_INPUTS])
        result, denominator, *saved = tensors[_INPUTS:]
        found = _backward(inputs, result, denominator, saved, gradients, ctx.scalars)
        dentry = [g if given else None for g, given in zip(found[_INPUTS:], ctx.entry_given, strict=True)]
        return (None, *found[:_INPUTS], *dentry)


def _flat(tensors: Sequence[Tensor | None], like: Tensor) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(0) if x is None else x for x in tensors)


@torch.library.custom_op("gdn_kernels::frame_gdn", mutates_args=())
def _forward_op(
    qkv: Tensor | None, q: Tensor | None, k: Tensor | None, v: Tensor | None, beta: Tensor, decay: Tensor,
    q_norm_weight: Tensor | None, k_norm_weight: Tensor | None, rope_cos: Tensor | None, rope_sin: Tensor | None,
    frame_valid: Tensor | None, forward_kv: Tensor | None, forward_z: Tensor | None, reverse_kv: Tensor | None,
    reverse_z: Tensor | None, features: bool, has_z: bool, divide: bool, direction: str, resets: Sequence[int],
    k_scale: float, norm_eps: float, eps: float, precision: str, want_exit: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
           Tensor]:  # fmt: skip
    inputs = FrameInputs(qkv, q, k, v, beta, decay, q_norm_weight, k_norm_weight, rope_cos, rope_sin, frame_valid)
    entry = FrameBoundary(forward_kv, forward_z, reverse_kv, reverse_z)
    scalars = (features, has_z, divide, direction, resets, k_scale, norm_eps, eps, precision, want_exit)
    return _flat(_forward(inputs, entry, scalars), beta.new_empty(0, dtype=torch.float32))  # type: ignore[return-value]


@_forward_op.register_fake
def _forward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    qkv, q, _, _, beta, _, q_norm_weight, k_norm_weight = arguments[:8]
    features, has_z, divide, direction, *_, precision, want_exit = arguments[_INPUTS + _ENTRY :]
    operand: Tensor = qkv if qkv is not None else q
    batch, heads, frames, _ = beta.shape
    tokens, width = operand.shape[1], operand.shape[-1]
    way = Direction(direction)
    norm = features and (q_norm_weight is not None or k_norm_weight is not None)
    kept = torch.bfloat16 if precision == Precision.BF16.value else torch.float32

    def fresh(here: bool, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return operand.new_empty(shape if here else (0,), dtype=dtype)

    def states(here: bool, *lead: int) -> tuple[Tensor, ...]:
        past, future = here and way.reads_past, here and way.reads_future
        return (
            fresh(past, *lead, width, width), fresh(past and has_z, *lead, width),
            fresh(future, *lead, width, width), fresh(future and has_z, *lead, width),
        )  # fmt: skip

    return (
        fresh(True, batch, tokens, heads, width, dtype=operand.dtype if divide else torch.float32),
        fresh(has_z, batch, heads, tokens), *states(want_exit, batch, heads),
        fresh(norm, batch, tokens), fresh(norm, batch, tokens),
        fresh(True, batch, heads, frames, width, width, dtype=kept),
        fresh(has_z, batch, heads, frames, width, width, dtype=kept if has_z else torch.float32),
        *states(True, batch, heads, frames + 1),
    )  # fmt: skip


@torch.library.custom_op("gdn_kernels::frame_gdn_bwd", mutates_args=())
def _backward_op(
    qkv: Tensor | None, q: Tensor | None, k: Tensor | None, v: Tensor | None, beta: Tensor, decay: Tensor,
    q_norm_weight: Tensor | None, k_norm_weight: Tensor | None, rope_cos: Tensor | None, rope_sin: Tensor | None,
    frame_valid: Tensor | None, result: Tensor, denominator: Tensor, saved: Sequence[Tensor],
    dresult: Tensor | None, ddenominator: Tensor | None, dexit_forward_kv: Tensor | None,
    dexit_forward_z: Tensor | None, dexit_reverse_kv: Tensor | None, dexit_reverse_z: Tensor | None,
    features: bool, has_z: bool, divide: bool, direction: str, resets: Sequence[int], k_scale: float, norm_eps: float,
    eps: float, precision: str, want_exit: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    inputs = FrameInputs(qkv, q, k, v, beta, decay, q_norm_weight, k_norm_weight, rope_cos, rope_sin, frame_valid)
    scalars = (features, has_z, divide, direction, resets, k_scale, norm_eps, eps, precision, want_exit)
    kept = [x if x.ndim > 1 else None for x in saved]
    gradients = (dresult, ddenominator, dexit_forward_kv, dexit_forward_z, dexit_reverse_kv, dexit_reverse_z)
    found = _backward(inputs, result, denominator if has_z else None, kept, gradients, scalars)
    found = [*found[: _INPUTS - 3], *found[_INPUTS:]]  # tables and mask have no gradient
    return _flat(found, beta.new_empty(0, dtype=torch.float32))  # type: ignore[return-value]


@_backward_op.register_fake
def _backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    qkv, q, k, v, beta, decay, q_norm_weight, k_norm_weight = arguments[:8]
    features, has_z, _, direction, *_ = arguments[-len(FrameOptions.__dataclass_fields__) :]
    operand: Tensor = qkv if qkv is not None else q
    batch, heads, width = beta.shape[0], beta.shape[1], operand.shape[-1]
    way = Direction(direction)
    norm = features and (q_norm_weight is not None or k_norm_weight is not None)

    def like(x: Tensor | None, here: bool = True) -> Tensor:
        return x.new_empty(x.shape) if x is not None and here else operand.new_empty((0,), dtype=torch.float32)

    def state(here: bool, *tail: int) -> Tensor:
        return operand.new_empty((batch, heads, *tail) if here else (0,), dtype=torch.float32)

    past, future = way.reads_past, way.reads_future
    return (
        like(qkv), like(q), like(k), like(v), like(beta), like(decay), like(q_norm_weight, norm),
        like(k_norm_weight, norm), state(past, width, width), state(past and has_z, width),
        state(future, width, width), state(future and has_z, width),
    )  # fmt: skip


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.scalars = inputs[_INPUTS + _ENTRY :]
    ctx.entry_given = [x is not None for x in inputs[_INPUTS : _INPUTS + _ENTRY]]
    ctx.save_for_backward(*inputs[:_INPUTS], output[0], output[1], *output[_RESULTS:])


@once_differentiable("frame_gdn")
def _op_backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    inputs, results, saved = tensors[:_INPUTS], tensors[_INPUTS : _INPUTS + 2], tensors[_INPUTS + 2 :]
    found = torch.ops.gdn_kernels.frame_gdn_bwd(*inputs, *results, saved, *gradients[:_RESULTS], *ctx.scalars)
    dinputs = [None if x is None else g for x, g in zip(inputs, found, strict=False)][: _INPUTS - 3]
    dentry = [g if given else None for g, given in zip(found[_INPUTS - 3 :], ctx.entry_given, strict=True)]
    return (*dinputs, None, None, None, *dentry, *(None for _ in ctx.scalars))


_forward_op.register_autograd(_op_backward, setup_context=_setup_context)
