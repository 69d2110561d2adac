"""Train the language model in one process or on ranks; the two share every line but the context."""

from __future__ import annotations

import dataclasses
import math
import time

import torch
import torch.distributed as dist
from model import make_model
from proof import Run, on_ranks
from text import Batch, Text, batch_of
from torch import Tensor, nn
from tqdm import tqdm

from gdn_cp import CPContext, TokenPartition, count_exchanges
from gdn_models import all_reduce_gradients, apply_context_parallel

TOKENS = 384
EVALUATION_STEP = 10_000_019  # a batch that no training step sees


@dataclasses.dataclass(frozen=True)
class Settings:
    """``nudge`` scales the embedding: 1 + 2^-23 moves it by one rounding. ``sum_gradients`` off is a fault."""

    steps: int
    seed: int = 0
    lr: float = 3e-3
    nudge: float = 1.0
    sum_gradients: bool = True


def share_of(size: int) -> TokenPartition:
    """Return uneven shards that cut sequences: later ranks hold more."""
    weights = [2 + rank for rank in range(size)]
    counts = [TOKENS * weight // sum(weights) for weight in weights]
    return TokenPartition((*counts[:-1], TOKENS - sum(counts[:-1])))


def train(text: Text, settings: Settings, device: torch.device, context: CPContext | None, name: str) -> Run:
    """Train on the tokens of this rank (all, without a context) and return what the run leaves."""
    partition = share_of(context.size) if context is not None else None
    rank = context.rank if context is not None else 0
    model = make_model(settings.seed).to(device)
    with torch.no_grad():
        model.enter.weight *= settings.nudge
    if context is not None:
        apply_context_parallel(model, context, partition)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.0)

    def logits_and_loss(batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the logits of this rank's tokens, and its part of the mean loss over all tokens."""
        parts = (batch.inputs, batch.targets)
        inputs, targets = (x if partition is None else partition.split(x, rank, 1) for x in parts)
        logits = model(inputs.to(device), batch.bounds)
        return logits, nn.functional.cross_entropy(logits[0], targets[0].to(device), reduction="sum") / TOKENS

    losses: list[float] = []
    begin = time.monotonic()
    for step in tqdm(range(settings.steps), desc=name, disable=rank > 0, leave=True):
        with count_exchanges() as exchanges:
            output, loss = logits_and_loss(batch_of(text, step, TOKENS, settings.seed))
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
        final = logits_and_loss(batch_of(text, EVALUATION_STEP, TOKENS, settings.seed))[0].cpu()
    weights = {n: p.detach().cpu() for n, p in model.named_parameters()}
    seconds, threads = time.monotonic() - begin, torch.get_num_threads()
    return Run(losses, *first, weights, final, seconds, threads, labels, sent)


def train_on_ranks(text: Text, settings: Settings, size: int, on_cuda: bool) -> Run:
    """Train on ``size`` processes and put their parts together: tokens in order, losses summed."""
    runs = on_ranks(size, on_cuda, _train_rank, text, settings)
    whole = runs[0]
    whole.losses = [sum(parts) for parts in zip(*(run.losses for run in runs), strict=True)]
    whole.output = torch.cat([run.output for run in runs], 1)
    whole.final = torch.cat([run.final for run in runs], 1)
    return whole


def _train_rank(rank: int, device: torch.device, text: Text, settings: Settings) -> Run:
    context = CPContext(dist.group.WORLD, tag="language model")
    return train(text, settings, device, context, f"{context.size} ranks")


def bits_per_byte(run: Run, text: Text, seed: int = 0) -> float:
    """Return how well the trained model predicts text, in bits."""
    targets = batch_of(text, EVALUATION_STEP, TOKENS, seed).targets
    return float(nn.functional.cross_entropy(run.final[0], targets[0])) / math.log(2)
