"""Train the denoiser in one process or on ranks; the two share every line but the context."""

from __future__ import annotations

import dataclasses
import time

import torch
import torch.distributed as dist
from clip import GRID
from model import make_denoiser
from proof import Run, on_ranks
from torch import Tensor
from tqdm import tqdm

from gdn_cp import CPContext, FramePartition, count_exchanges
from gdn_models import all_reduce_gradients, apply_context_parallel

EVALUATION_SIGMA = 0.5


@dataclasses.dataclass(frozen=True)
class Settings:
    """``nudge`` scales the clip: 1 + 2^-23 moves it by one rounding. ``sum_gradients`` off is a fault for tests."""

    steps: int
    seed: int = 0
    lr: float = 2e-3
    nudge: float = 1.0
    sum_gradients: bool = True


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
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.0)
    whole = clip * settings.nudge
    clean = whole[:, cut].to(device)
    losses: list[float] = []
    begin = time.monotonic()
    for step in tqdm(range(settings.steps), desc=name, disable=rank > 0, leave=True):
        noise, sigma = noise_of(step, settings.seed, clip)
        noisy = (whole + sigma * noise)[:, cut].to(device)
        with count_exchanges() as exchanges:
            output = model(noisy, sigma.to(device), grid)
            loss = (output - clean).square().sum() / whole.numel()  # this rank's part of the mean over the clip
            optimizer.zero_grad()
            loss.backward()
            if context is not None and settings.sum_gradients:
                all_reduce_gradients(model, context)
        if step == 0:
            first = output.detach().cpu(), {n: p.grad.detach().cpu().clone() for n, p in model.named_parameters()}
            labels, sent = list(exchanges.labels), list(exchanges.sent)
        for group in optimizer.param_groups:  # warm up, then down to nothing
            done = (step + 1) / settings.steps
            group["lr"] = settings.lr * min(1.0, 10 * done) * (1 - 0.95 * done)
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        noisy = (clip + evaluation_noise(clip))[:, cut].to(device)
        denoised = model(noisy, torch.tensor(EVALUATION_SIGMA, device=device), grid).cpu()
    weights = {n: p.detach().cpu() for n, p in model.named_parameters()}
    seconds, threads = time.monotonic() - begin, torch.get_num_threads()
    return Run(losses, *first, weights, denoised, seconds, threads, labels, sent)


def train_on_ranks(clip: Tensor, settings: Settings, size: int, on_cuda: bool) -> Run:
    """Train on ``size`` processes and put their parts together: frames in order, losses summed."""
    runs = on_ranks(size, on_cuda, _train_rank, clip, settings)
    whole = runs[0]
    whole.losses = [sum(parts) for parts in zip(*(run.losses for run in runs), strict=True)]
    whole.output = torch.cat([run.output for run in runs], 1)
    whole.final = torch.cat([run.final for run in runs], 1)
    return whole


def _train_rank(rank: int, device: torch.device, clip: Tensor, settings: Settings) -> Run:
    context = CPContext(dist.group.WORLD, tag="denoiser")
    return train(clip, settings, device, context, f"{context.size} ranks")
