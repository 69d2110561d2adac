"""A language model over bytes: residual blocks of GatedDeltaProduct and a small MLP."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gdn_models import GatedDeltaProduct


class Block(nn.Module):
    """Mix over tokens, then over channels; both residual."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.mixer = GatedDeltaProduct(dim=dim, heads=heads, head_dim=dim // heads, expand_v=1.0, num_householder=2)
        self.mlp = nn.Sequential(nn.Linear(dim, 3 * dim), nn.SiLU(), nn.Linear(3 * dim, dim))

    def forward(self, x: Tensor, bounds: Sequence[int]) -> Tensor:
        x = x + self.mixer(self.norm1(x), cu_seqlens=bounds)
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    """Predict the next byte, ``[1, T]`` to logits ``[1, T, 256]``."""

    def __init__(self, dim: int = 64, heads: int = 2, depth: int = 2) -> None:
        super().__init__()
        self.enter = nn.Embedding(256, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm, self.leave = nn.RMSNorm(dim), nn.Linear(dim, 256)

    def forward(self, tokens: Tensor, bounds: Sequence[int]) -> Tensor:
        x = self.enter(tokens)
        for block in self.blocks:
            x = block(x, bounds)
        return self.leave(self.norm(x))


def make_model(seed: int) -> LanguageModel:
    """Return the model with the weights that a seed gives, the same in every process."""
    torch.manual_seed(seed)
    return LanguageModel()
