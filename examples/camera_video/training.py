"""Train the predictor in one process or on ranks; the two share every line but the context."""

from __future__ import annotations

from typing import NamedTuple

import torch
from predictor import make_predictor
from proof import Run, Settings, fit
from scene import Views, look, random_windows
from torch import Tensor

from gdn_cp import CPContext, FramePartition
from gdn_models import apply_context_parallel

FRAMES = 6  # of a clip; with a question for each but the first
BATCH, EVALUATION_BATCH = 2, 16
EVALUATION_SEED = 10_000_019  # paths that no training step sees
LR = 3e-3


class Lesson(NamedTuple):
    """Frames and questions, alternating: ``shown`` and ``wanted [B, L, S, CHANNELS]``, ``camera [B, L, 20]``.

    ``asked [L]`` is True at questions, whose tokens are 0 in ``shown``; L = 2 FRAMES - 2.
    """

    shown: Tensor
    wanted: Tensor
    camera: Tensor
    asked: Tensor


def lay_out(views: Views) -> Lesson:
    """Put before every frame but the first a question with its camera; the last frame is asked for, not shown."""
    wanted, camera = (x.repeat_interleave(2, 1)[:, 1:-1] for x in views)
    asked = torch.arange(wanted.shape[1]) % 2 == 1
    return Lesson(wanted * ~asked[:, None, None], wanted, camera, asked)


def random_views(stills: Tensor, batch: int, seed: int) -> Views:
    """Return what cameras on random paths see of random stills, the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    windows = random_windows(batch, FRAMES, generator)
    return look(stills[torch.randint(len(stills), (batch,), generator=generator)], windows)


def seen_stills(stills: Tensor) -> Tensor:
    """Return those of the training: five in six."""
    return stills[torch.arange(len(stills)) % 6 < 5]


def unseen_stills(stills: Tensor) -> Tensor:
    """Return those of the evaluation: one in six, of the same shots."""
    return stills[torch.arange(len(stills)) % 6 == 5]


def train(stills: Tensor, settings: Settings, device: torch.device, context: CPContext | None, name: str) -> Run:
    """Train on the frames of this rank (all, without a context) and return what the run leaves."""
    length = 2 * FRAMES - 2
    partition = FramePartition.even(length, context.size) if context is not None else None
    model = make_predictor(settings.seed).to(device)
    if context is not None:
        apply_context_parallel(model, context, partition)

    def own(x: Tensor, dim: int) -> Tensor:
        if partition is not None and context is not None:
            x = partition.split(x, context.rank, dim)
        return x.to(device)

    def answer(views: Views) -> tuple[Tensor, Tensor]:
        """Return the output at this rank's frames and questions, and its part of the mean error of the questions."""
        lesson = lay_out(views)
        asked = own(lesson.asked, 0)
        output = model(own(lesson.shown, 1), own(lesson.camera, 1), asked)
        errors = (output - own(lesson.wanted, 1)) * asked[:, None, None]
        return output.flatten(1, 2), errors.square().sum() / (lesson.wanted.numel() / 2)

    def step_of(step: int) -> tuple[Tensor, Tensor]:
        views = random_views(seen_stills(stills), BATCH, settings.seed * 1_000_003 + step)
        return answer(views._replace(tokens=views.tokens * settings.nudge))

    return fit(model, settings, LR, context, name, step_of, lambda: answer(evaluation_views(stills))[0])


def evaluation_views(stills: Tensor) -> Views:
    """Return stills and paths that the training does not see."""
    return random_views(unseen_stills(stills), EVALUATION_BATCH, EVALUATION_SEED)
