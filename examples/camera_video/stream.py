"""What the trained model is asked: in one call or as a stream, with the right camera or another, left or right."""

from __future__ import annotations

from typing import NamedTuple

import torch
from predictor import Predictor
from proof import DRIFT_FACTOR, DRIFT_FLOOR, Line, relative
from scene import HEIGHT, LEAST, MOST, SOURCE_HEIGHT, SOURCE_WIDTH, WIDTH, Views, look
from torch import Tensor
from training import FRAMES, lay_out

GIVEN = 3  # frames of a fork that the model is shown; the others it answers from its own answers
PAN = 6.0  # source pixels per frame


class Fork(NamedTuple):
    """The same GIVEN frames, after which the camera goes left or right; ``streamed_* [B, FRAMES, S, CHANNELS]``."""

    left: Views
    right: Views
    streamed_left: Tensor
    streamed_right: Tensor


class Errors(NamedTuple):
    """Mean squared errors of the next frame: the last frame shown again, the right camera, that of another clip."""

    repeated: float
    right: float
    other: float


@torch.no_grad()
def single_call(model: Predictor, views: Views) -> Tensor:
    """Return the answers ``[B, FRAMES - 1, S, CHANNELS]`` to the questions of whole clips."""
    lesson = lay_out(views)
    return model(lesson.shown, lesson.camera, lesson.asked)[:, 1::2]


@torch.no_grad()
def stream(model: Predictor, views: Views, given: int) -> Tensor:
    """Return frames ``[B, FRAMES, S, CHANNELS]``: those given, then answers, each read back before the next question.

    A call reads one frame and the question after it; what the blocks remember goes in and comes out.
    """
    states = model.init_states(len(views.tokens))
    asked = torch.tensor([False, True])
    frames = [views.tokens[:, 0]]
    for i in range(1, FRAMES):
        shown = torch.stack((frames[-1], torch.zeros_like(frames[-1])), 1)
        answers, states = model.stream(shown, views.camera[:, i - 1 : i + 1], asked, states)
        frames.append(views.tokens[:, i] if i < given else answers[:, 1])
    return torch.stack(frames, 1)


@torch.no_grad()
def compare_stream(model: Predictor, views: Views) -> Line:
    """Hold the last answer of a stream, which read every frame before, to that of a single call."""
    whole = single_call(model, views)[:, -1]
    streamed = stream(model, views, FRAMES - 1)[:, -1]
    moved = single_call(model, views._replace(tokens=views.tokens * (1 + 2.0**-52)))[:, -1]
    tolerance = DRIFT_FACTOR * max(DRIFT_FLOOR, relative(moved, whole))
    return Line("stream against a single call", relative(streamed, whole), tolerance)


@torch.no_grad()
def errors(model: Predictor, views: Views) -> Errors:
    """Return how well the next frame is predicted; another camera is that of the next clip of the batch."""
    wanted, lesson = views.tokens[:, 1:], lay_out(views)
    mixed = torch.where(lesson.asked[:, None], lesson.camera.roll(1, 0), lesson.camera)
    other = model(lesson.shown, mixed, lesson.asked)[:, 1::2]
    answers = (views.tokens[:, :-1], single_call(model, views), other)
    return Errors(*(float((answer - wanted).square().mean()) for answer in answers))


def fork(model: Predictor, stills: Tensor) -> Fork:
    """Show the model the middle of stills, let the camera go both ways, and stream what it would see."""
    width = (LEAST + MOST) / 2
    middle = torch.tensor([(SOURCE_WIDTH - width) / 2, (SOURCE_HEIGHT - width * HEIGHT / WIDTH) / 2, width])
    steps = (torch.arange(FRAMES) - (GIVEN - 1)).float()
    views, streamed = [], []
    for sign in (-1, 1):
        turned = torch.where(steps < 0, steps.abs(), sign * steps)  # comes from the right
        windows = middle + PAN * turned[:, None] * torch.tensor([1.0, 0.0, 0.0])
        views.append(look(stills, windows.expand(len(stills), -1, -1)))
        streamed.append(stream(model, views[-1], GIVEN))
    return Fork(*views, *streamed)


def fork_errors(both: Fork) -> list[list[float]]:
    """Return the errors of frames streamed to the left and right (rows) against those truly there (columns)."""
    wanted = [views.tokens[:, GIVEN:] for views in (both.left, both.right)]
    found = [frames[:, GIVEN:] for frames in (both.streamed_left, both.streamed_right)]
    return [[float((x - y).square().mean()) for y in wanted] for x in found]
