"""Operands and output of the camera branch in plain torch, written as the equations read.

Letters: B batch, N = F*S tokens, H heads, D head width. The first D/2 channels of a head are D/8 columns of homogeneous
coordinates, which a token's 4 x 4 ray transform maps; the others are rotated as in `gdn_kernels.rope`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gdn_kernels.reference.frame_gdn import rms_norm
from gdn_kernels.rope import RotaryTables, rotate
from gdn_kernels.types import CameraOperands, RayTransforms

LEAST_SQUARED_LENGTH = 1e-12  # of a key, in the ratio of lengths


def camera_operands_reference(
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
    """Prepare ``q, k, v [B, N, H, D]``; norm weights ``[H, D]``, rotary tables ``[N, D/4]``.

    Differentiable in everything but rays and tables; rounds to the dtype of the inputs once, at the end.
    """
    dtype = q.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = (x.to(wide) for x in (q, k, v))
        to_ray, to_world = (transform.to(wide) for transform in rays)
        if q_norm_weight is not None or k_norm_weight is not None:
            q, k = rms_norm(q, q_norm_weight, norm_eps), rms_norm(k, k_norm_weight, norm_eps)
        q, k = torch.relu(q), torch.relu(k) * k_scale
        length = k.square().sum(-1)  # [B, N, H]
        q, k, v = _transform(q, to_ray.mT, rope), _transform(k, to_world, rope), _transform(v, to_world, rope)
        ratio = _at_least(k.square().sum(-1), LEAST_SQUARED_LENGTH) / _at_least(length, LEAST_SQUARED_LENGTH)
        spatial = q.shape[1] // max(frames, 1)
        ratio = ratio.reshape(q.shape[0], frames, spatial, q.shape[2])
        inflation = ratio.sum(2).transpose(1, 2) / max(spatial, 1)
        return CameraOperands(q.to(dtype), k.to(dtype), v.to(dtype), inflation)


def camera_output_reference(
    x: Tensor, rays: RayTransforms, rope: RotaryTables | None, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """Bring ``x [B, N, H, D]``, what the scan read, into the frame of each token's ray; differentiable in x."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    with torch.autocast(x.device.type, enabled=False):
        return _transform(x.to(wide), rays.world_to_ray.to(wide), rope, inverse=True).to(dtype)


def _transform(x: Tensor, matrices: Tensor, rope: RotaryTables | None, *, inverse: bool = False) -> Tensor:
    """Map columns of the first half by ``matrices [B, N, 4, 4]`` and rotate the second half, back with ``inverse``."""
    batch, tokens, heads, width = x.shape
    half = width // 2
    columns = x[..., :half].reshape(batch, tokens, heads * (half // 4), 4)
    mapped = (columns @ matrices.mT).reshape(batch, tokens, heads, half)
    turned = x[..., half:] if rope is None else rotate(x[..., half:], rope, inverse=inverse)
    return torch.cat((mapped, turned), -1)


def _at_least(x: Tensor, least: float) -> Tensor:
    """Return max(x, least); unlike `torch.clamp` without a gradient at equality."""
    return torch.where(x > least, x, least)
