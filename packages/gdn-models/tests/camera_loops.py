"""Cameras and the camera branch as their equations read, token by token: shares no code with the package."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
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
