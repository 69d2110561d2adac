"""The camera branch token by token, head by head and group by group: shares no code with the package."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gdn_kernels import RayTransforms, RotaryTables

B, F, S, H, D = 2, 3, 5, 2, 16
N = F * S


def camera_by_loops(
    q: Tensor, k: Tensor, v: Tensor, rays: Sequence[Tensor], frames: int, tables: Sequence[Tensor] | None,
    q_weight: Tensor | None, k_weight: Tensor | None, k_scale: float, norm_eps: float,
) -> dict[str, Tensor]:  # fmt: skip
    """Return ``q, k, v [B, N, H, D]`` and ``inflation [B, H, F]``, everything in the dtype of q."""
    batch, tokens, heads, _ = q.shape
    rows: dict[str, list[Tensor]] = {"q": [], "k": [], "v": []}
    ratios = []
    for b in range(batch):
        for n in range(tokens):
            features = {}
            for name, x, weight, scale in (("q", q, q_weight, 1.0), ("k", k, k_weight, k_scale)):
                y = x[b, n]
                if q_weight is not None or k_weight is not None:
                    y = y / ((y**2).sum() / y.numel() + norm_eps) ** 0.5
                    y = y if weight is None else y * weight.reshape(y.shape)
                features[name] = scale * torch.where(y > 0, y, torch.zeros_like(y))
            to_ray, to_world = (transform[b, n].to(q.dtype) for transform in rays)
            for name, x, matrix in (
                ("q", features["q"], to_ray.T), ("k", features["k"], to_world), ("v", v[b, n], to_world),
            ):  # fmt: skip
                rows[name].append(torch.stack([one_head(x[h], matrix, tables, n, 1) for h in range(heads)]))
            for h in range(heads):
                after, before = (y @ y for y in (rows["k"][-1][h], features["k"][h]))
                ratios.append(larger(after, 1e-12) / larger(before, 1e-12))
    operands = {name: torch.stack(x).reshape(q.shape) for name, x in rows.items()}
    ratio = torch.stack(ratios).reshape(batch, frames, tokens // frames, heads)
    return {**operands, "inflation": ratio.mean(2).permute(0, 2, 1)}


def output_by_loops(x: Tensor, rays: Sequence[Tensor], tables: Sequence[Tensor] | None) -> Tensor:
    """Return ``x [B, N, H, D]`` in the frames of the rays."""
    rows = [
        one_head(x[b, n, h], rays[0][b, n].to(x.dtype), tables, n, -1)
        for b in range(x.shape[0]) for n in range(x.shape[1]) for h in range(x.shape[2])
    ]  # fmt: skip
    return torch.stack(rows).reshape(x.shape)


def one_head(x: Tensor, matrix: Tensor, tables: Sequence[Tensor] | None, n: int, sign: int) -> Tensor:
    """Map the groups of four of one head's first half and turn the pairs of its second half."""
    half = x.numel() // 2
    parts = [matrix @ x[i : i + 4] for i in range(0, half, 4)]
    for pair in range(half // 2):
        one, other = x[half + 2 * pair], x[half + 2 * pair + 1]
        if tables is None:
            parts.append(torch.stack((one, other)))
            continue
        turn = torch.complex(tables[0][n, pair].to(x.dtype), sign * tables[1][n, pair].to(x.dtype))
        turned = torch.complex(one, other) * turn
        parts.append(torch.stack((turned.real, turned.imag)))
    return torch.cat(parts)


def larger(x: Tensor, least: float) -> Tensor:
    """Return x, or a constant if x does not exceed it."""
    return x if x.item() > least else torch.full_like(x, least)


def rigid_rays(batch: int, tokens: int, distance: float, seed: int = 0) -> RayTransforms:
    """Return random rotations with random translations of about the given length, in fp64."""
    generator = torch.Generator().manual_seed(seed)
    rotation, _ = torch.linalg.qr(torch.randn(batch, tokens, 3, 3, generator=generator, dtype=torch.float64))
    center = distance * torch.randn(batch, tokens, 3, 1, generator=generator, dtype=torch.float64)
    last = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64).expand(batch, tokens, 1, 4)
    to_ray = torch.cat((torch.cat((rotation, -rotation @ center), -1), last), -2)
    return RayTransforms(to_ray, torch.cat((torch.cat((rotation.mT, center), -1), last), -2))


def angles(tokens: int, width: int, seed: int = 1) -> RotaryTables:
    """Return tables of random angles for the second half of a head."""
    generator = torch.Generator().manual_seed(seed)
    angle = torch.randn(tokens, width // 4, generator=generator, dtype=torch.float64)
    return RotaryTables(angle.cos(), angle.sin())


def operands(dtype: torch.dtype = torch.float64, heads: int = H, width: int = D) -> tuple[Tensor, Tensor, Tensor]:
    """Return random q, k, v that require gradients."""
    q, k, v = (torch.randn(B, N, heads, width, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(3))
    return q, k, v
