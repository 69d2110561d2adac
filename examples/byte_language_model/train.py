"""Train the language model in one process or on ranks; the two share every line but the context."""

from __future__ import annotations

import math

import torch
from model import make_model
from proof import Run, Settings, fit
from text import Text, batch_of
from torch import Tensor, nn

from gdn_cp import CPContext, TokenPartition
from gdn_models import apply_context_parallel

TOKENS = 384
LR = 3e-3
EVALUATION_STEP = 10_000_019  # a batch that no training step sees


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

    def logits_and_loss(step: int) -> tuple[Tensor, Tensor]:
        """Return the logits of this rank's tokens, and its part of the mean loss over all tokens."""
        batch = batch_of(text, step, TOKENS, settings.seed)
        parts = (batch.inputs, batch.targets)
        inputs, targets = (x if partition is None else partition.split(x, rank, 1) for x in parts)
        logits = model(inputs.to(device), batch.bounds)
        return logits, nn.functional.cross_entropy(logits[0], targets[0].to(device), reduction="sum") / TOKENS

    return fit(model, settings, LR, context, name, logits_and_loss, lambda: logits_and_loss(EVALUATION_STEP)[0])


def bits_per_byte(run: Run, text: Text, seed: int = 0) -> float:
    """Return how well the trained model predicts text, in bits."""
    targets = batch_of(text, EVALUATION_STEP, TOKENS, seed).targets
    return float(nn.functional.cross_entropy(run.final[0], targets[0])) / math.log(2)
