"""What the model needs to know of a link and of what is done at its ends, measured between the ranks of a group."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from gdn_cp import collectives
from gdn_cp.affine import AffineMap
from gdn_cp.cost_model.model import Link
from gdn_kernels.types import Direction, FrameOptions, Impl, Precision

if TYPE_CHECKING:
    from gdn_cp.context import CPContext

_SMALL, _LARGE = 256, 1 << 23  # bytes of the two messages that a link is measured with
_IN_A_ROW = 4  # calls between two waits for the device


class MapTimes(NamedTuple):
    """What is done with maps at a rank, in microseconds, as in `Link`."""

    fold: float
    compose: float
    advance: float


def measure_link(
    context: CPContext,
    device: torch.device | str = "cpu",
    *,
    width: int = 112,
    heads: int = 20,
    batch: int = 1,
    repeats: int = 20,
) -> Link:
    """Measure a group's link, between neighbours, and folds and compositions; all ranks return what rank 0 found.

    Args:
        context: at least two ranks.
        device: where messages lie; one that the group can send from.
        width: head dim D of the maps that are folded and composed.
        heads: their heads H.
        batch: their batch B.
        repeats: swaps with each message size, and calls; the median counts.

    Raises:
        ValueError: The context has one rank.

    Communication: ``2 * repeats`` swaps between neighbours, of up to 8 MiB, and one gather.
    Every rank must call this: yes. Waits on the host.
    """
    if context.is_trivial:
        raise ValueError("measure_link needs a context of at least two ranks, got one")
    neighbours = [rank for rank in (context.rank - 1, context.rank + 1) if 0 <= rank < context.size]
    small, large = (_swap_microseconds(context, neighbours, size, device, repeats) for size in (_SMALL, _LARGE))
    # the bytes of the small message count too, and noise must not make a bandwidth of nothing
    bandwidth = 1e-3 * (_LARGE - _SMALL) / max(large - small, 1e-3 * large)
    maps = measure_maps(context.size, device, width=width, heads=heads, batch=batch, repeats=repeats)
    own = torch.tensor([small, bandwidth, *maps], dtype=torch.float64)
    measured = collectives.all_gather(own.to(device), context, "measure_link")[0].tolist()
    return Link(f"measured over {context.size} ranks", *measured)


def measure_maps(
    size: int,
    device: torch.device | str = "cpu",
    *,
    width: int = 112,
    heads: int = 20,
    batch: int = 1,
    streams: int = 2,
    directions: int = 2,
    impl: Impl | str = Impl.AUTO,
    repeats: int = 20,
) -> MapTimes:
    """Measure what a rank of ``size`` does with maps of fp32: fold a gather, compose, advance. Waits on the host.

    Args:
        size: ranks P whose maps a gather brings, at least 2; ``fold`` is the time of all of them, over P - 1.
        device: where maps lie.
        width: head dim D.
        heads: H.
        batch: B.
        streams: 2, or 1 for the kv stream alone.
        directions: 1 or 2.
        impl: Triton kernels, or torch; auto is Triton on CUDA.
        repeats: calls; the median counts.

    Communication: none.
    """
    from gdn_cp.passes import RankPlan  # these ask this package which schedule to take
    from gdn_cp.schedules import all_gather
    from gdn_cp.schedules.lines import Route, advance, compose

    device, impl = torch.device(device), Impl(impl)
    if impl is Impl.AUTO:
        impl = Impl.TRITON if device.type == "cuda" else Impl.TORCH
    direction = Direction.BIDIRECTIONAL if directions == 2 else Direction.FORWARD
    options = FrameOptions(True, streams == 2, False, direction, (), 1.0, 0.0, 0.0, Precision.IEEE, impl)
    plan = RankPlan(
        options, size, size - 1, (False,) * size, False, False, batch, heads, width, torch.float32, device
    )  # fmt: skip
    gathered = torch.zeros(size, plan.forward_layout().offsets[-1], device=device)
    square = torch.zeros(batch, heads, width, width, device=device)
    maps = [AffineMap(square, square if i < directions else square[..., :1]) for i in range(streams * directions)]
    route = Route(size, size - 1, impl=impl)

    def fold() -> None:
        steps = all_gather.enter(plan, gathered[-1], (None, None))
        next(steps)
        try:
            steps.send(gathered)
        except StopIteration:
            return
        raise AssertionError("an all-gather is one round")

    calls: list[Callable[[], object]] = [
        fold,
        lambda: [compose(route, m, m) for m in maps],
        lambda: [advance(route, m, m.increment) for m in maps],
    ]
    folding, composing, advancing = (_microseconds(call, device, repeats) for call in calls)
    return MapTimes(folding / (size - 1), composing, advancing)


def _microseconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    times = []
    for turn in range(repeats + 1):  # the first compiles
        begin = time.perf_counter()
        for _ in range(_IN_A_ROW):
            call()
        _wait_for(device)
        if turn:
            times.append(1e6 * (time.perf_counter() - begin) / _IN_A_ROW)
    return statistics.median(times)


def _swap_microseconds(
    context: CPContext, neighbours: Sequence[int], size: int, device: torch.device | str, repeats: int
) -> float:
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    times = []
    for turn in range(repeats + 3):
        begin = time.perf_counter()
        collectives.swap(
            [(rank, message) for rank in neighbours], [(rank, size) for rank in neighbours], message, context,
            "measure_link", continued=turn > 0,
        )  # fmt: skip
        _wait_for(message.device)
        times.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(times[3:])


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
