"""The denoiser: residual blocks of BidirectionalGDN and a small MLP, told how much noise there is."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gdn_cp import FramePartition
from gdn_models import BidirectionalGDN


class Block(nn.Module):
    """Mix over frames, then over channels; both residual, both told the noise level."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mixer = BidirectionalGDN(dim=dim, heads=heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.level = nn.Linear(1, 2 * dim)

    def forward(self, x: Tensor, sigma: Tensor, grid: tuple[int, int, int], partition: FramePartition | None) -> Tensor:
        shift1, shift2 = self.level(sigma).chunk(2, -1)
        x = x + self.mixer(self.norm1(x) + shift1, grid, partition=partition)
        return x + self.mlp(self.norm2(x) + shift2)


class Denoiser(nn.Module):
    """Predict the clean tokens ``[B, N, patch]`` from noisy ones."""

    def __init__(self, patch: int, dim: int = 96, heads: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(patch, dim), nn.Linear(dim, patch)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)

    def forward(
        self, x: Tensor, sigma: Tensor, grid: tuple[int, int, int], partition: FramePartition | None = None
    ) -> Tensor:
        h = self.enter(x)
        for block in self.blocks:
            h = block(h, sigma.reshape(1, 1, 1), grid, partition)
        return self.leave(self.norm(h))


def make_denoiser(patch: int, seed: int) -> Denoiser:
    """Return the model with the weights that a seed gives, the same in every process."""
    torch.manual_seed(seed)
    return Denoiser(patch)
