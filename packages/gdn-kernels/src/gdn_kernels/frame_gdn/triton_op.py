"""The Triton implementation as ``torch.library`` operators: one forward, one backward, each one node of a graph.

Operators take and return flat tensors; absent ones are None going in and empty coming out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gdn_kernels.types import Direction, FrameBoundary, FrameInputs, FrameOptions, Impl, Precision

_INPUTS, _ENTRY = len(FrameInputs._fields), len(FrameBoundary._fields)
_RESULTS = 2 + _ENTRY  # result, denominator, exit states; what follows is saved for the backward


def apply_triton(
    inputs: FrameInputs, options: FrameOptions, entry: FrameBoundary
) -> tuple[Tensor, Tensor | None, FrameBoundary]:
    """Run one call on Triton; same arguments and results as the reference, differentiable once by autograd."""
    outputs = torch.ops.gdn_kernels.frame_gdn(
        *inputs, *entry, options.features, options.has_z, options.divide, options.direction.value, options.resets,
        options.k_scale, options.norm_eps, options.eps, options.precision.value,
    )  # fmt: skip
    past, future, has_z = options.direction.reads_past, options.direction.reads_future, options.has_z
    present = (past, past and has_z, future, future and has_z)
    exits = [x if here else None for x, here in zip(outputs[2:_RESULTS], present, strict=True)]
    return outputs[0], outputs[1] if has_z else None, FrameBoundary(*exits)


def _options(scalars: Sequence[Any]) -> FrameOptions:
    features, has_z, divide, direction, resets, k_scale, norm_eps, eps, precision = scalars
    return FrameOptions(
        features, has_z, divide, Direction(direction), tuple(resets), k_scale, norm_eps, eps, Precision(precision),
        Impl.TRITON,
    )  # fmt: skip


def _present(x: Tensor | None, like: Tensor) -> Tensor:
    return x if x is not None else like.new_empty(0)


@torch.library.custom_op("gdn_kernels::frame_gdn", mutates_args=())
def _forward_op(
    qkv: Tensor | None, q: Tensor | None, k: Tensor | None, v: Tensor | None, beta: Tensor, decay: Tensor,
    q_norm_weight: Tensor | None, k_norm_weight: Tensor | None, rope_cos: Tensor | None, rope_sin: Tensor | None,
    frame_valid: Tensor | None, forward_kv: Tensor | None, forward_z: Tensor | None, reverse_kv: Tensor | None,
    reverse_z: Tensor | None, features: bool, has_z: bool, divide: bool, direction: str, resets: Sequence[int],
    k_scale: float, norm_eps: float, eps: float, precision: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
           Tensor]:  # fmt: skip
    from gdn_kernels.frame_gdn import triton_stages

    inputs = FrameInputs(qkv, q, k, v, beta, decay, q_norm_weight, k_norm_weight, rope_cos, rope_sin, frame_valid)
    options = _options((features, has_z, divide, direction, resets, k_scale, norm_eps, eps, precision))
    entry = FrameBoundary(forward_kv, forward_z, reverse_kv, reverse_z)
    prepared = triton_stages.prepare(inputs, options)
    result, denominator, exits, saved = triton_stages.forward(prepared, options, entry)
    return tuple(_present(x, prepared.decay) for x in (result, denominator, *exits, *saved))  # type: ignore[return-value]


@_forward_op.register_fake
def _(
    qkv, q, k, v, beta, decay, q_norm_weight, k_norm_weight, rope_cos, rope_sin, frame_valid, forward_kv, forward_z,
    reverse_kv, reverse_z, features, has_z, divide, direction, resets, k_scale, norm_eps, eps, precision,
):  # type: ignore[no-untyped-def]  # fmt: skip
    operand = qkv if qkv is not None else q
    batch, heads, frames, _ = beta.shape
    tokens, width = operand.shape[1], operand.shape[-1]
    way = Direction(direction)
    norm = features and (q_norm_weight is not None or k_norm_weight is not None)
    kept = torch.bfloat16 if precision == Precision.BF16.value else torch.float32

    def fresh(here, *shape, dtype=torch.float32):  # type: ignore[no-untyped-def]
        return operand.new_empty(shape if here else (0,), dtype=dtype)

    def states(*lead):  # type: ignore[no-untyped-def]
        past, future = way.reads_past, way.reads_future
        return (
            fresh(past, *lead, width, width), fresh(past and has_z, *lead, width),
            fresh(future, *lead, width, width), fresh(future and has_z, *lead, width),
        )  # fmt: skip

    return (
        fresh(True, batch, tokens, heads, width, dtype=operand.dtype if divide else torch.float32),
        fresh(has_z, batch, heads, tokens), *states(batch, heads),
        fresh(norm, batch, tokens), fresh(norm, batch, tokens),
        fresh(True, batch, heads, frames, width, width, dtype=kept),
        fresh(has_z, batch, heads, frames, width, width, dtype=kept),
        *states(batch, heads, frames + 1),
    )  # fmt: skip


@torch.library.custom_op("gdn_kernels::frame_gdn_bwd", mutates_args=())
def _backward_op(
    qkv: Tensor | None, q: Tensor | None, k: Tensor | None, v: Tensor | None, beta: Tensor, decay: Tensor,
    q_norm_weight: Tensor | None, k_norm_weight: Tensor | None, rope_cos: Tensor | None, rope_sin: Tensor | None,
    frame_valid: Tensor | None, result: Tensor, denominator: Tensor, saved: Sequence[Tensor],
    dresult: Tensor | None, ddenominator: Tensor | None, dexit_forward_kv: Tensor | None,
    dexit_forward_z: Tensor | None, dexit_reverse_kv: Tensor | None, dexit_reverse_z: Tensor | None,
    features: bool, has_z: bool, divide: bool, direction: str, resets: Sequence[int], k_scale: float, norm_eps: float,
    eps: float, precision: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from gdn_kernels.frame_gdn import triton_stages

    inputs = FrameInputs(qkv, q, k, v, beta, decay, q_norm_weight, k_norm_weight, rope_cos, rope_sin, frame_valid)
    options = _options((features, has_z, divide, direction, resets, k_scale, norm_eps, eps, precision))
    kept = triton_stages.Saved(*(x if x.ndim > 1 else None for x in saved))  # type: ignore[arg-type]
    prepared = triton_stages.prepare(inputs, options)
    buffers = triton_stages.gradient_buffers(inputs)
    den = denominator if has_z else None
    read_out = triton_stages.read_out_backward(prepared, kept, result, den, dresult, ddenominator, buffers)
    exits = FrameBoundary(dexit_forward_kv, dexit_forward_z, dexit_reverse_kv, dexit_reverse_z)
    scans = triton_stages.sweep_backward(prepared, options, kept, read_out, exits)
    gradients = triton_stages.write_backward(inputs, prepared, kept, read_out, scans, buffers)
    return tuple(_present(x, prepared.decay) for x in (*gradients[:-3], *scans.entry))  # type: ignore[return-value]


@_backward_op.register_fake
def _(
    qkv, q, k, v, beta, decay, q_norm_weight, k_norm_weight, rope_cos, rope_sin, frame_valid, result, denominator,
    saved, dresult, ddenominator, dexit_forward_kv, dexit_forward_z, dexit_reverse_kv, dexit_reverse_z,
    features, has_z, divide, direction, resets, k_scale, norm_eps, eps, precision,
):  # type: ignore[no-untyped-def]  # fmt: skip
    operand = qkv if qkv is not None else q
    batch, heads, width = beta.shape[0], beta.shape[1], operand.shape[-1]
    way = Direction(direction)
    norm = features and (q_norm_weight is not None or k_norm_weight is not None)

    def like(x, here=True):  # type: ignore[no-untyped-def]
        empty = operand.new_empty((0,), dtype=torch.float32)
        return x.new_empty(x.shape) if x is not None and here else empty

    def state(here, *tail):  # type: ignore[no-untyped-def]
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


def _backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    inputs, result, denominator, saved = tensors[:_INPUTS], *tensors[_INPUTS : _INPUTS + 2], tensors[_INPUTS + 2 :]
    found = torch.ops.gdn_kernels.frame_gdn_bwd(
        *inputs, result, denominator, saved, *gradients[:_RESULTS], *ctx.scalars
    )
    floats = inputs[: _INPUTS - 3]  # rotary tables and mask have no gradient
    dinputs = [None if x is None or g.shape != x.shape else g for x, g in zip(floats, found, strict=False)]
    dentry = [g if given else None for g, given in zip(found[_INPUTS - 3 :], ctx.entry_given, strict=True)]
    return (*dinputs, None, None, None, *dentry, *(None for _ in ctx.scalars))


_forward_op.register_autograd(_backward, setup_context=_setup_context)
