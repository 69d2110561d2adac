"""Train the denoiser in one process or on ranks; the two share every line but the context."""

from __future__ import annotations

import torch
from clip import GRID
from model import make_denoiser
from proof import Run, Settings, fit
from torch import Tensor

from gdn_cp import CPContext, FramePartition
from gdn_models import apply_context_parallel

EVALUATION_SIGMA = 0.5
LR = 2e-3


def noise_of(step: int, seed: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return noise for the whole clip and its level, the same in every process."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    noise = torch.randn(like.shape, generator=generator)
    return noise, 0.2 + 0.6 * torch.rand((), generator=generator)


def evaluation_noise(like: Tensor) -> Tensor:
    """Return the noise of the picture."""
    return EVALUATION_SIGMA * torch.randn(like.shape, generator=torch.Generator().manual_seed(99))


def train(clip: Tensor, settings: Settings, device: torch.device, context: CPContext | None, name: str) -> Run:
    """Train on the frames of this rank (all, without a context) and return what the run leaves."""
    frames, rows, columns = GRID
    partition = FramePartition.even(frames, context.size) if context is not None else None
    rank = context.rank if context is not None else 0
    span = partition.span(rank) if partition is not None else range(frames)
    cut = slice(span.start * rows * columns, span.stop * rows * columns)
    grid = (len(span), rows, columns)
    model = make_denoiser(clip.shape[-1], settings.seed).to(device)
    if context is not None:
        apply_context_parallel(model, context, partition)
    whole = clip * settings.nudge
    clean = whole[:, cut].to(device)

    def denoise(source: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
        return model((source + noise)[:, cut].to(device), sigma.to(device), grid)

    def step_of(step: int) -> tuple[Tensor, Tensor]:
        noise, sigma = noise_of(step, settings.seed, clip)
        output = denoise(whole, sigma * noise, sigma)
        return output, (output - clean).square().sum() / whole.numel()  # this rank's part of the mean over the clip

    def picture() -> Tensor:
        return denoise(clip, evaluation_noise(clip), torch.tensor(EVALUATION_SIGMA))

    return fit(model, settings, LR, context, name, step_of, picture)
