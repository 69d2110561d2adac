"""The Triton implementation as ``torch.library`` operators, under ``torch.compile`` and in eager mode alike.

Absent weights, tables and gradients are None going in and empty tensors coming out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gdn_kernels.once import once_differentiable
from gdn_kernels.rope import RotaryTables
from gdn_kernels.types import CameraOperands, RayTransforms


def camera_operands_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rays: RayTransforms,
    frames: int,
    rope: RotaryTables | None,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    k_scale: float,
    norm_eps: float,
) -> CameraOperands:
    """Prepare q, k and v on Triton; arguments and results of the reference, differentiable once."""
    cos, sin = (None, None) if rope is None else rope
    found = torch.ops.gdn_kernels.camera_operands(
        q, k, v, q_norm_weight, k_norm_weight, *rays, cos, sin, frames, k_scale, norm_eps
    )
    return CameraOperands(*found[:4])


def camera_output_triton(
    x: Tensor, rays: RayTransforms, rope: RotaryTables | None, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """Transform what the scan read on Triton; arguments and result of the reference. Linear in x, its backward too."""
    cos, sin = (None, None) if rope is None else rope
    found: Tensor = torch.ops.gdn_kernels.camera_output(x, rays.world_to_ray, cos, sin, dtype, False)
    return found


def _fp32(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float().contiguous()


def _call(
    q_norm_weight: Tensor | None, k_norm_weight: Tensor | None, to_ray: Tensor, to_world: Tensor, cos: Tensor | None,
    sin: Tensor | None, frames: int, k_scale: float, norm_eps: float,
) -> Any:  # fmt: skip
    from gdn_kernels.camera.prepare import CameraCall

    q_weight, k_weight = (None if w is None else w.contiguous() for w in (q_norm_weight, k_norm_weight))
    rays = RayTransforms(*(x.float().contiguous() for x in (to_ray, to_world)))
    return CameraCall(q_weight, k_weight, *rays, _fp32(cos), _fp32(sin), frames, k_scale, norm_eps)


@torch.library.custom_op("gdn_kernels::camera_operands", mutates_args=())
def _operands_op(
    q: Tensor, k: Tensor, v: Tensor, q_norm_weight: Tensor | None, k_norm_weight: Tensor | None, to_ray: Tensor,
    to_world: Tensor, cos: Tensor | None, sin: Tensor | None, frames: int, k_scale: float, norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from gdn_kernels.camera.prepare import prepare

    call = _call(q_norm_weight, k_norm_weight, to_ray, to_world, cos, sin, frames, k_scale, norm_eps)
    found = prepare(q, k, v, call)
    empty = q.new_empty(0, dtype=torch.float32)
    rho = (empty if found.rho_q is None else found.rho_q, empty.clone() if found.rho_k is None else found.rho_k)
    return (*found[:4], *rho)


@_operands_op.register_fake
def _operands_fake(
    q: Tensor, k: Tensor, v: Tensor, q_norm_weight: Tensor | None, k_norm_weight: Tensor | None, to_ray: Tensor,
    to_world: Tensor, cos: Tensor | None, sin: Tensor | None, frames: int, k_scale: float, norm_eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    batch, tokens, heads, _ = q.shape
    has_norm = q_norm_weight is not None or k_norm_weight is not None
    outs = [q.new_empty(q.shape) for _ in range(3)]
    rho = [q.new_empty((batch, tokens) if has_norm else (0,), dtype=torch.float32) for _ in range(2)]
    return (*outs, q.new_empty((batch, heads, frames), dtype=torch.float32), *rho)


@torch.library.custom_op("gdn_kernels::camera_operands_bwd", mutates_args=())
def _operands_bwd_op(
    q: Tensor, k: Tensor, q_norm_weight: Tensor | None, k_norm_weight: Tensor | None, to_ray: Tensor, to_world: Tensor,
    cos: Tensor | None, sin: Tensor | None, rho_q: Tensor, rho_k: Tensor, dout_q: Tensor | None, dout_k: Tensor | None,
    dout_v: Tensor | None, dinflation: Tensor | None, frames: int, k_scale: float, norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from gdn_kernels.camera.prepare_bwd import prepare_bwd

    call = _call(q_norm_weight, k_norm_weight, to_ray, to_world, cos, sin, frames, k_scale, norm_eps)
    found = prepare_bwd(q, k, rho_q, rho_k, (dout_q, dout_k, dout_v, dinflation), call)
    weights = [
        q.new_empty(0, dtype=torch.float32) if weight is None or gradient is None else gradient.to(weight.dtype)
        for weight, gradient in zip((q_norm_weight, k_norm_weight), found[3:], strict=True)
    ]
    return (*found[:3], *weights)  # type: ignore[return-value]


@_operands_bwd_op.register_fake
def _operands_bwd_fake(
    q: Tensor, k: Tensor, q_norm_weight: Tensor | None, k_norm_weight: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    weights = [
        q.new_empty(0, dtype=torch.float32) if w is None else w.new_empty(w.shape)
        for w in (q_norm_weight, k_norm_weight)
    ]
    return (*(q.new_empty(q.shape) for _ in range(3)), *weights)


def _operands_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, _, *tensors = inputs[:9]
    ctx.set_materialize_grads(False)
    ctx.scalars = inputs[9:]
    ctx.save_for_backward(q, k, *tensors, *output[4:])


@once_differentiable("camera_operands")
def _operands_backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # once: a checkpoint unpacks them a single time
    found: Sequence[Tensor] = torch.ops.gdn_kernels.camera_operands_bwd(*saved, *gradients[:4], *ctx.scalars)
    weights = [None if w is None else g for w, g in zip(saved[2:4], found[3:], strict=True)]
    return (*found[:3], *weights, *(None for _ in range(7)))


_operands_op.register_autograd(_operands_backward, setup_context=_operands_context)


@torch.library.custom_op("gdn_kernels::camera_output", mutates_args=())
def _output_op(
    x: Tensor, to_ray: Tensor, cos: Tensor | None, sin: Tensor | None, dtype: torch.dtype, adjoint: bool
) -> Tensor:
    from gdn_kernels.camera.output import transform_output

    return transform_output(x, to_ray.float().contiguous(), _fp32(cos), _fp32(sin), dtype, adjoint=adjoint)


@_output_op.register_fake
def _output_fake(
    x: Tensor, to_ray: Tensor, cos: Tensor | None, sin: Tensor | None, dtype: torch.dtype, adjoint: bool
) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _output_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, to_ray, cos, sin, _, ctx.adjoint = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(to_ray, cos, sin)


def _output_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    dx = torch.ops.gdn_kernels.camera_output(gradient, *ctx.saved_tensors, ctx.dtype, not ctx.adjoint)
    return (dx, None, None, None, None, None)


_output_op.register_autograd(_output_backward, setup_context=_output_context)
