"""Cameras and the camera branch as their equations read, token by token: shares no code with the package."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from block_loops import conv_by_loops, gates_by_loops, linear_by_einsum, read_by_loops
from torch import Tensor


def poses(batch: int, frames: int, *, distance: float = 1.0, seed: int = 0) -> Tensor:
    """Return random cameras ``[B, F, 20]`` in fp64: proper rotations, centres about ``distance`` away, intrinsics."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(batch * frames):
        rotation, _ = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64))
        rotation = rotation * torch.linalg.det(rotation).sign()
        pose = torch.eye(4, dtype=torch.float64)
        pose[:3, :3] = rotation
        pose[:3, 3] = distance * torch.randn(3, generator=generator, dtype=torch.float64)
        lens = 1 + torch.rand(4, generator=generator, dtype=torch.float64)
        rows.append(torch.cat((pose.flatten(), lens)))
    return torch.stack(rows).reshape(batch, frames, 20)


def ray_by_loops(camera: Sequence[float], row: int, column: int, patch: Sequence[int]) -> Tensor:
    """Return the world-to-ray matrix of one token by solving for it: the axes from cross products of lists."""
    pose, (fx, fy, cx, cy) = [camera[4 * i : 4 * i + 4] for i in range(3)], camera[16:]
    a, b = (column * patch[2] - cx) / fx, (row * patch[1] - cy) / fy
    z = unit([pose[i][0] * a + pose[i][1] * b + pose[i][2] for i in range(3)])
    down = [pose[i][1] for i in range(3)]
    x = unit(cross(down, z))
    y = unit(cross(z, x))
    inverse = torch.eye(4, dtype=torch.float64)
    for i in range(3):
        inverse[i] = torch.tensor([x[i], y[i], z[i], pose[i][3]], dtype=torch.float64)
    return torch.linalg.inv(inverse)


def rays_by_loops(camera: Tensor, grid: tuple[int, int, int], patch: Sequence[int] = (1, 1, 1)) -> Tensor:
    """Return ``[B, N, 4, 4]`` world-to-ray matrices, fp64."""
    found = [
        ray_by_loops(camera[b, f].tolist(), row, column, patch)
        for b in range(camera.shape[0]) for f in range(grid[0]) for row in range(grid[1]) for column in range(grid[2])
    ]  # fmt: skip
    return torch.stack(found).reshape(camera.shape[0], math.prod(grid), 4, 4)


def cross(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """Return the cross product of two lists."""
    return [a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]]


def unit(a: Sequence[float]) -> list[float]:
    """Return a list over its length."""
    return [x / math.dist(a, [0, 0, 0]) for x in a]


def turned_by_loops(x: Tensor, grid: tuple[int, int, int], theta: float | None, first: int, sign: int) -> Tensor:
    """Rotate ``x [B, N, H, D/2]``, the second half of heads of D channels, by the leading pairs of every axis."""
    if theta is None:
        return x
    half = x.shape[-1]
    width, pairs = 2 * half, half // 2
    space, owned = width // 12, 2 * (width // 6)
    axes = ((0, pairs - 2 * space, width - 2 * owned), (1, space, owned), (2, space, owned))
    rows = []
    for f in range(grid[0]):
        for r in range(grid[1]):
            for c in range(grid[2]):
                position = (first + f, r, c)
                rows.append([position[a] * theta ** (-2 * i / channels) for a, n, channels in axes for i in range(n)])
    angle = torch.tensor(rows, dtype=torch.float64).reshape(len(rows), 1, pairs)
    table = torch.complex(angle.cos().float(), sign * angle.sin().float()).to(torch.complex128)  # stored in fp32
    return torch.view_as_real(torch.view_as_complex(x.double().reshape(*x.shape[:-1], pairs, 2)) * table).flatten(-2)


def transformed_by_loops(x: Tensor, matrices: Tensor, *turn: object) -> Tensor:
    """Map the first half of ``x [B, N, H, D]`` group by group with ``matrices [B, N, 4, 4]``, rotate the second.

    In the dtype of x: matrices are rounded to it, and so is what turns in fp64.
    """
    half, matrices = x.shape[-1] // 2, matrices.to(x.dtype)
    groups = [
        torch.stack([(matrices[:, :, i, None, :] * x[..., g : g + 4]).sum(-1) for i in range(4)], -1)
        for g in range(0, half, 4)
    ]
    return torch.cat((*groups, turned_by_loops(x[..., half:], *turn).to(x.dtype)), -1)


def camera_by_loops(
    p: Mapping[str, Tensor],
    x: Tensor,
    grid: tuple[int, int, int],
    camera: Tensor,
    *,
    heads: int,
    ends: Sequence[int],
    valid: Tensor | None = None,
    key_scale: float,
    norm_eps: float = 1e-5,
    theta: float | None = 1e4,
    first: int = 0,
    patch: Sequence[int] = (1, 1, 1),
) -> Tensor:
    """Return what the camera branch adds before the output gate, ``[B, F, S, C]``."""
    batch, _, channels = x.shape
    frames, spatial, width = grid[0], grid[1] * grid[2], channels // heads
    valid = torch.ones(batch, frames, dtype=torch.bool) if valid is None else valid.bool()
    mask = valid.to(x.dtype)[:, :, None, None]
    x4 = x.reshape(batch, frames, spatial, channels) * mask
    to_ray = rays_by_loops(torch.where(valid[..., None], camera, poses(batch, frames)), grid, patch)
    beta, decay = gates_by_loops(p, x4)
    parts = {}
    for name, scale in (("q", 1.0), ("k", key_scale), ("v", None)):
        part = linear_by_einsum(p, f"{name}_proj_cam", x4) * mask
        if f"conv_{name}_cam.weight" in p:
            part = conv_by_loops(part, p[f"conv_{name}_cam.weight"], ends)
        if scale is not None:
            if f"{name}_norm_cam.weight" in p:
                part = part / ((part**2).mean(-1, keepdim=True) + norm_eps).sqrt() * p[f"{name}_norm_cam.weight"]
            part = scale * part.clamp(min=0)
        parts[name] = part.reshape(batch, frames * spatial, heads, width)
    turn = (grid, theta, first)
    q = transformed_by_loops(parts["q"], to_ray.mT, *turn, 1)
    k = transformed_by_loops(parts["k"], torch.linalg.inv(to_ray), *turn, 1)
    v = transformed_by_loops(parts["v"], torch.linalg.inv(to_ray), *turn, 1)
    ratio = (k**2).sum(-1).clamp(min=1e-12) / (parts["k"] ** 2).sum(-1).clamp(min=1e-12)
    inflation = ratio.reshape(batch, frames, spatial, heads).mean(2).permute(0, 2, 1)
    beta = beta / torch.maximum(inflation, torch.ones_like(inflation))[..., None]
    shape = (batch, frames, spatial, heads, width)
    q, k, v = (y.reshape(shape) for y in (q, k, v))
    numerator, _ = read_by_loops(q, k, q, k, v, beta, decay, ends, valid)
    numerator = (numerator * mask[..., None]).reshape(batch, frames * spatial, heads, width)
    seen = transformed_by_loops(numerator, to_ray, *turn, -1)
    return linear_by_einsum(p, "out_proj_cam", seen.reshape(x4.shape))
