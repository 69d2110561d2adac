"""Cameras to rays: the rigid transform of every token's viewing ray, from pose and intrinsics of its frame.

Letters: B batch, F frames, N = F*h*w tokens, frame-major.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gdn_kernels import RayTransforms, checks
from gdn_models.clip import check_grid
from gdn_models.config import check_patch_size
from gdn_models.gates import Grid, wide_dtype

CAMERA_NUMBERS = 20  # of a frame: 16 of the pose, then fx, fy, cx, cy
LEAST_SINE = 1e-6  # between a ray and the vertical axis of its camera


def ray_transforms(
    camera: Tensor, grid: Grid, patch_size: Sequence[int] = (1, 1, 1), *, xi: float = 0.0
) -> RayTransforms:  # fmt: skip
    """Return the transforms between world coordinates and those of every token's viewing ray.

    The token in row v and column u looks, in its camera's axes, along ``(a, b, 1)`` with ``a = (u - cx / p_w) / (fx /
    p_w)`` and ``b = (v - cy / p_h) / (fy / p_h)``: pixel u of a patch is its left edge, there is no half-pixel offset.
    With R the rotation and c the centre of the camera, c_x and c_y the first two columns of R, n(.) division by the
    length:

        z = n(R (a, b, 1))      x = n(c_y cross z)      y = n(z cross x)      Q = rows x, y, z
        world_to_ray = [Q, -Q c; 0 1]                   ray_to_world = [Q', c; 0 1]

    Q is a rotation even where a ray runs along its camera's vertical axis (x is then the limit within the vertical
    plane). The token at the principal point has the camera's own world-to-camera matrix. A token whose transform would
    hold an infinity or NaN gets the identity, and does not touch the others.

    Args:
        camera: ``[B, F, 20]``, any floating dtype: a 4 x 4 camera-to-world matrix by rows, whose rotation must be one,
            then fx, fy > 0, cx, cy in pixels of an image of ``h * p_h`` by ``w * p_w``.
        grid: (F, h, w).
        patch_size: ``(p_t, p_h, p_w)`` pixels of a token; cameras are given per token frame, so p_t has no effect.
        xi: 0, a pinhole; the unified camera model with another xi is not supported.

    Returns:
        RayTransforms: ``[B, N, 4, 4]`` each, fp32 (fp64 for an fp64 camera), outside autocast and without gradient.

    Raises:
        ValueError: A shape, dtype or value is wrong.
        TypeError: An argument is of the wrong Python type.
        NotImplementedError: A camera that requires a gradient, or xi that is not 0.

    Cost: 32 numbers per token; compute them once and pass them to all blocks as ``camera``.

    Example:
        >>> camera = torch.cat((torch.eye(4).flatten(), torch.tensor([2.0, 2.0, 1.0, 1.0])))
        >>> rays = ray_transforms(camera.expand(1, 1, 20), (1, 2, 2))
        >>> rays.world_to_ray.shape, torch.equal(rays.world_to_ray[0, 3], torch.eye(4))
        (torch.Size([1, 4, 4, 4]), True)
    """
    frames, rows, columns = check_grid(grid)
    check_camera(camera, None, frames)
    _, patch_rows, patch_columns = check_patch_size(patch_size)
    if isinstance(xi, bool) or not isinstance(xi, int | float):
        raise TypeError(f"xi must be a number, got {type(xi).__name__}")
    if xi != 0:
        raise NotImplementedError(f"xi must be 0, a pinhole camera, got {xi}")
    with torch.no_grad(), torch.autocast(camera.device.type, enabled=False):
        camera = camera.to(wide_dtype(camera))
        batch, dtype, device = camera.shape[0], camera.dtype, camera.device
        pose = camera[..., :16].reshape(*camera.shape[:2], 1, 1, 4, 4)[..., :3, :]  # [B, F, 1, 1, 3, 4]
        rotation, center = pose[..., :3], pose[..., 3]
        fx, fy, cx, cy = camera[..., None, None, 16:].unbind(-1)  # [B, F, 1, 1]
        u = torch.arange(columns, dtype=dtype, device=device)
        v = torch.arange(rows, dtype=dtype, device=device)[:, None]
        a = ((u - cx / patch_columns) / (fx / patch_columns)).expand(batch, frames, rows, columns)
        b = ((v - cy / patch_rows) / (fy / patch_rows)).expand(batch, frames, rows, columns)
        direction = torch.stack((a, b, torch.ones_like(a)), -1)
        axes = _ray_axes(rotation, direction)  # rows x, y, z
        center = center.expand(batch, frames, rows, columns, 3)[..., None]
        identity = torch.eye(4, dtype=dtype, device=device)
        last = identity[3:].expand(*a.shape, 1, 4)
        to_ray = torch.cat((torch.cat((axes, -(axes * center.mT).sum(-1, keepdim=True)), -1), last), -2)
        to_world = torch.cat((torch.cat((axes.mT, center), -1), last), -2)
        sound = to_ray.isfinite().flatten(-2).all(-1) & to_world.isfinite().flatten(-2).all(-1)
        return RayTransforms(
            *(torch.where(sound[..., None, None], x, identity).flatten(1, 3) for x in (to_ray, to_world))
        )


def check_camera(camera: object, x: Tensor | None, frames: int) -> None:
    """Raise unless ``camera`` is ``[B, F, 20]``, of x's batch and device if x is given."""
    checks.require_tensor("camera", camera)
    assert isinstance(camera, Tensor)
    batch = camera.shape[0] if camera.ndim else 0
    if x is not None:
        batch = x.shape[0]
    checks.require_shape("camera", camera, "B, F, 20", (batch, frames, CAMERA_NUMBERS))
    checks.require_dtype("camera", camera, checks.FLOATING)
    if x is not None:
        checks.require_device("camera", camera, x.device, "x")
    if camera.requires_grad:
        raise NotImplementedError("camera must not require a gradient: cameras are not differentiated")


def _ray_axes(rotation: Tensor, direction: Tensor) -> Tensor:
    """Return the axes as rows ``[B, F, h, w, 3, 3]``; rotation ``[B, F, 1, 1, 3, 3]``, direction ``[..., 3]``."""
    direction = _unit(direction)
    z = _unit((rotation * direction[..., None, :]).sum(-1))
    side, down = (rotation[..., i].expand_as(z) for i in (0, 1))
    across = torch.linalg.cross(down, z)
    within = side - (side * z).sum(-1, keepdim=True) * z
    x = _unit(torch.where(_length(across) < LEAST_SINE, within, across))
    x = _unit(x - (x * z).sum(-1, keepdim=True) * z)  # near the vertical, cancellation in across tilts x towards z
    y = _unit(torch.linalg.cross(z, x))
    return torch.stack((x, y, z), -2)


def _unit(x: Tensor) -> Tensor:
    return x / _length(x)


def _length(x: Tensor) -> Tensor:
    x, y, z = x.unbind(-1)
    return torch.hypot(torch.hypot(x, y), z)[..., None]
