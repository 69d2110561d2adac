"""The predictor: residual blocks of CameraFrameGDN and a small MLP. Cameras enter through the camera branch alone.

A clip is laid out as frame 0, question 1, frame 1, question 2, ...: a question is a frame of blank tokens with the
camera of the frame to come, and what the model returns there is that frame. The blocks are causal, so a question reads
the frames before it and no other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from scene import CHANNELS, PATCH, SPATIAL, TOKENS
from torch import Tensor, nn

from gdn_kernels import RayTransforms
from gdn_models import CameraFrameGDN, GDNState, ray_transforms

Grid = tuple[int, int, int]


class Block(nn.Module):
    """Mix over frames and the rays of their tokens, then over channels; both residual."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mixer = CameraFrameGDN(dim=dim, heads=heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim))

    def forward(self, x: Tensor, grid: Grid, rays: RayTransforms) -> Tensor:
        x = x + self.mixer(self.norm1(x), grid, rays)
        return x + self.mlp(self.norm2(x))

    def stream(self, x: Tensor, grid: Grid, rays: RayTransforms, state: GDNState) -> tuple[Tensor, GDNState]:
        y, state = self.mixer(self.norm1(x), grid, rays, state=state)
        x = x + y
        return x + self.mlp(self.norm2(x)), state


class Predictor(nn.Module):
    """Answer questions, ``[B, F, S, CHANNELS]`` with the cameras ``[B, F, 20]`` of frames and questions alike."""

    def __init__(self, dim: int = 64, heads: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(CHANNELS, dim), nn.Linear(dim, CHANNELS)
        self.place = nn.Parameter(0.2 * torch.randn(TOKENS, dim))
        self.question = nn.Parameter(0.2 * torch.randn(dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)

    def forward(self, frames: Tensor, camera: Tensor, asked: Tensor) -> Tensor:
        """Answer in one call; ``asked [F]`` says which frames are questions."""
        x, grid, rays = self._begin(frames, camera, asked)
        for block in self.blocks:
            x = block(x, grid, rays)
        return self._end(x, frames)

    def stream(
        self, frames: Tensor, camera: Tensor, asked: Tensor, states: Sequence[GDNState]
    ) -> tuple[Tensor, list[GDNState]]:
        """Go on from the states of the blocks, and return the next ones: nothing is kept in the model."""
        x, grid, rays = self._begin(frames, camera, asked)
        after = []
        for block, state in zip(self.blocks, states, strict=True):
            x, state = block.stream(x, grid, rays, state)
            after.append(state)
        return self._end(x, frames), after

    def init_states(self, batch: int) -> list[GDNState]:
        """Return the states of a stream that has read nothing."""
        return [block.mixer.init_state(batch, (0, *SPATIAL)) for block in self.blocks]

    def _begin(self, frames: Tensor, camera: Tensor, asked: Tensor) -> tuple[Tensor, Grid, RayTransforms]:
        """Return tokens ``[B, N, C]``, and what all blocks share: the grid, and the rays, which are made once."""
        x = torch.where(asked[:, None, None], self.question, self.enter(frames)) + self.place
        grid = (frames.shape[1], *SPATIAL)
        return x.flatten(1, 2), grid, ray_transforms(camera, grid, (1, PATCH, PATCH))

    def _end(self, x: Tensor, frames: Tensor) -> Tensor:
        return self.leave(self.norm(x)).reshape(frames.shape)


def make_predictor(seed: int) -> Predictor:
    """Return the model with the weights that a seed gives, the same in every process; fp64.

    Some gradients of a camera branch are nearly 0, and Adam makes steps of full size of them. In fp32 they would be
    rounding and little else, and two hundred steps of those would be all that a comparison of weights could see.
    """
    torch.manual_seed(seed)
    return Predictor().double()
