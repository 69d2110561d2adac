"""Public functions of the camera branch: checks, and the choice of an implementation."""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from gdn_kernels import checks
from gdn_kernels.camera import triton_op
from gdn_kernels.reference.camera import camera_operands_reference, camera_output_reference
from gdn_kernels.rope import RotaryTables
from gdn_kernels.types import CameraOperands, Impl, RayTransforms

WIDEST_TRITON_HEAD = 256
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def camera_operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rays: RayTransforms,
    *,
    frames: int,
    rope: RotaryTables | None = None,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    k_scale: float = 1.0,
    norm_eps: float = 1e-5,
    impl: Impl | str = Impl.AUTO,
) -> CameraOperands:
    """Prepare q, k and v of the camera branch for `frame_gdn_numerator`.

        q <- relu(rms_norm(q))            k <- k_scale relu(rms_norm(k))
        first half of a head, each group of four channels:  q <- P' q    k <- P^-1 k    v <- P^-1 v
        second half, pairs of channels:                     each rotated by the token's angles
        inflation = mean over a frame's tokens of  max(|k after|^2, 1e-12) / max(|k before|^2, 1e-12)

    with P the token's ``world_to_ray``. A query meets a key as ``q_i' P_i P_j^-1 k_j``, whatever the world's frame is.
    Translations lengthen keys; writing with ``beta / max(inflation, 1)`` keeps the recurrence from expanding.

    Args:
        q: ``[B, N, H, D]``, fp16, bf16, fp32 or fp64, any strides. N = F*S, frame-major; D a multiple of 8.
        k: the same, in the dtype of q.
        v: the same, in the dtype of q.
        rays: ``world_to_ray`` and ``ray_to_world``, ``[B, N, 4, 4]`` each, fp32 or fp64; that they are inverse to one
            another is not checked.
        frames: F.
        rope: tables ``[N, D/4]`` of `camera_rotary_tables`; None rotates nothing.
        q_norm_weight: ``[H*D]`` or ``[H, D]``; the norm runs over all H*D channels of a token. Without both weights
            nothing is normalised, without one that weight is 1.
        k_norm_weight: the same, of k.
        k_scale: factor of k, > 0.
        norm_eps: added to the mean square, >= 0.
        impl: ``"auto"`` takes Triton for CUDA tensors of at most 32 bits and torch for all others;
            ``"torch"``, ``"triton"``. Triton that cannot run raises; nothing falls back.

    Returns:
        CameraOperands: ``q``, ``k``, ``v`` in the dtype of q, rounded once from fp32 (fp64), and ``inflation``
            ``[B, H, F]`` in fp32 (fp64).

    Raises:
        ValueError: A shape, dtype, device or value is wrong.
        TypeError: An argument is of the wrong Python type.
        NotImplementedError: Triton with D above 256, fp64 or tensors that are not on a GPU (use ``impl="torch"``); rays
            that require a gradient.

    Cost: Triton reads q, k, v once and writes three tensors of their size, keeps two numbers per token for its backward
        and copies rays and tables that are not contiguous fp32. Torch makes a few passes in fp32, and autograd keeps
        several tensors of their size.
    Determinism: Triton repeats bit by bit; torch as the products it calls.
    Gradient: of q, k, v and the norm weights, also through ``inflation``, except where a floor of 1e-12 holds.

    Example:
        >>> q, k, v = torch.rand(3, 1, 6, 2, 8).unbind(0)
        >>> still = torch.eye(4).expand(1, 6, 4, 4)
        >>> operands = camera_operands(q, k, v, RayTransforms(still, still), frames=3)
        >>> torch.equal(operands.k, k), operands.inflation.shape
        (True, torch.Size([1, 2, 3]))
    """
    _check_operand("q", q)
    for name, operand in (("k", k), ("v", v)):
        checks.require_shape(name, operand, "B, N, H, D", q.shape)
        checks.require_dtype(name, operand, (q.dtype,))
        checks.require_device(name, operand, q.device, "q")
    _check_rays(rays, q, "q")
    _check_rope(rope, q, "q")
    weights = [
        _check_weight(name, weight, q)
        for name, weight in (("q_norm_weight", q_norm_weight), ("k_norm_weight", k_norm_weight))
    ]
    if isinstance(frames, bool) or not isinstance(frames, int):
        raise TypeError(f"frames must be an int, got {type(frames).__name__}")
    if frames < 0 or (q.shape[1] % frames if frames else q.shape[1]):
        raise ValueError(f"frames must be >= 0 and divide N = {q.shape[1]}, got {frames}")
    k_scale, norm_eps = checks.require_positive("k_scale", k_scale), checks.require_non_negative("norm_eps", norm_eps)
    on_torch = choose_impl(impl, q.dtype, q.device, q.shape[3]) is Impl.TORCH
    apply = camera_operands_reference if on_torch else triton_op.camera_operands_triton
    return apply(q, k, v, rays, frames, rope, weights[0], weights[1], k_scale, norm_eps)


def camera_output(
    x: Tensor,
    rays: RayTransforms,
    *,
    rope: RotaryTables | None = None,
    dtype: torch.dtype | None = None,
    impl: Impl | str = Impl.AUTO,
) -> Tensor:
    """Bring what the camera branch read into the frame of each token's ray.

        first half of a head, each group of four channels:  x <- P x
        second half, pairs of channels:                     rotated back by the token's angles

    With `camera_operands`, values arrive as ``P_i P_j^-1 v_j``: independent of the world's frame and, in the second
    half, of where the clip begins.

    Args:
        x: ``[B, N, H, D]``, the numerator of `frame_gdn_numerator`; fp16, bf16, fp32 or fp64, any strides.
        rays: as in `camera_operands`.
        rope: as in `camera_operands`.
        dtype: of the result; that of x if None.
        impl: as in `camera_operands`.

    Returns:
        Tensor: ``[B, N, H, D]``, rounded once from fp32 (fp64).

    Raises:
        ValueError: A shape, dtype or device is wrong.
        TypeError: An argument is of the wrong Python type.
        NotImplementedError: Triton with D above 256, fp64 or tensors that are not on a GPU (use ``impl="torch"``); rays
            that require a gradient.

    Gradient: of x.

    Example:
        >>> x, still = torch.rand(1, 6, 2, 8), torch.eye(4).expand(1, 6, 4, 4)
        >>> torch.equal(camera_output(x, RayTransforms(still, still)), x)
        True
    """
    _check_operand("x", x)
    _check_rays(rays, x, "x")
    _check_rope(rope, x, "x")
    if dtype is not None and dtype not in checks.FLOATING:
        raise ValueError(f"dtype must be float16, bfloat16, float32 or float64, got {dtype}")
    on_torch = choose_impl(impl, x.dtype, x.device, x.shape[3]) is Impl.TORCH
    apply = camera_output_reference if on_torch else triton_op.camera_output_triton
    return apply(x, rays, rope, x.dtype if dtype is None else dtype)


def choose_impl(impl: Impl | str, dtype: torch.dtype, device: torch.device, width: int) -> Impl:
    """Return ``Impl.TORCH`` or ``Impl.TRITON`` for operands of a dtype and width D on a device.

    Raises:
        NotImplementedError: Triton was asked for and cannot run.
    """
    wanted, on_gpu = checks.as_impl(impl), device.type == "cuda"
    if wanted is Impl.AUTO:
        wanted = Impl.TRITON if on_gpu and dtype != torch.float64 else Impl.TORCH
    if wanted is Impl.TRITON:
        reason = None
        if dtype == torch.float64:
            reason = "supports fp16, bf16 and fp32, got float64"
        elif width > WIDEST_TRITON_HEAD:
            reason = f"supports D up to {WIDEST_TRITON_HEAD}, got D = {width}"
        elif not on_gpu and not os.environ.get("TRITON_INTERPRET"):
            reason = f"needs tensors on a GPU, got {device}"
        elif not _HAS_TRITON:
            reason = "needs the package triton, which is not installed"
        if reason is not None:
            raise NotImplementedError(f'impl="triton" {reason}; use impl="torch"')
    return wanted


def _check_operand(name: str, x: Tensor) -> None:
    checks.require_rank(name, x, "B, N, H, D")
    checks.require_dtype(name, x, checks.FLOATING)
    heads, width = x.shape[2:]
    if heads < 1 or width < 8 or width % 8:
        raise ValueError(
            f"{name} must have shape [B, N, H, D] with H >= 1 and D a multiple of 8, got {list(x.shape)}"
        )  # fmt: skip


def _check_rays(rays: RayTransforms, x: Tensor, owner: str) -> None:
    if not isinstance(rays, RayTransforms):
        raise TypeError(f"rays must be RayTransforms(world_to_ray, ray_to_world), got {type(rays).__name__}")
    for field, transform in rays._asdict().items():
        name = f"rays.{field}"
        checks.require_shape(name, transform, "B, N, 4, 4", (*x.shape[:2], 4, 4))
        checks.require_dtype(name, transform, (torch.float32, torch.float64))
        checks.require_device(name, transform, x.device, owner)
        if transform.requires_grad:
            raise NotImplementedError(f"{name} must not require a gradient: cameras are not differentiated")


def _check_rope(rope: RotaryTables | None, x: Tensor, owner: str) -> None:
    if rope is None:
        return
    if not isinstance(rope, tuple) or len(rope) != 2:
        raise TypeError(f"rope must be RotaryTables(cos, sin), got {type(rope).__name__}")
    for name, table in zip(("rope.cos", "rope.sin"), rope, strict=True):
        checks.require_shape(name, table, "N, D/4", (x.shape[1], x.shape[3] // 4))
        checks.require_dtype(name, table, (torch.float32, torch.float64))
        checks.require_device(name, table, x.device, owner)
        if table.requires_grad:
            raise ValueError(f"{name} must not require a gradient")


def _check_weight(name: str, weight: Tensor | None, q: Tensor) -> Tensor | None:
    if weight is None:
        return None
    checks.require_tensor(name, weight)
    heads, width = q.shape[2:]
    if tuple(weight.shape) not in ((heads * width,), (heads, width)):
        raise ValueError(f"{name} must have shape [H*D] = [{heads * width}], got {list(weight.shape)}")
    checks.require_dtype(name, weight, checks.FLOATING)
    checks.require_device(name, weight, q.device, "q")
    return weight.reshape(heads, width)
