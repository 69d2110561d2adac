"""What the model needs to know of a link, measured between the ranks of a group."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from gdn_cp import collectives
from gdn_cp.cost_model.model import Link

if TYPE_CHECKING:
    from gdn_cp.context import CPContext

_SMALL, _LARGE = 256, 1 << 23  # bytes of the two messages that a link is measured with


def measure_link(context: CPContext, device: torch.device | str = "cpu", *, repeats: int = 20) -> Link:
    """Measure latency and bandwidth between neighbours of a group; all ranks return what rank 0 found.

    Args:
        context: at least two ranks.
        device: where messages lie; one that the group can send from.
        repeats: swaps with each message size; the median counts.

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
    own = torch.tensor([small, 1e-3 * (_LARGE - _SMALL) / max(large - small, 1e-3 * large)], dtype=torch.float64)
    latency, bandwidth = collectives.all_gather(own.to(device), context, "measure_link")[0].tolist()
    return Link(f"measured over {context.size} ranks", latency, bandwidth)


def _swap_microseconds(
    context: CPContext, neighbours: Sequence[int], size: int, device: torch.device | str, repeats: int
) -> float:
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    on_gpu = message.device.type == "cuda"
    times = []
    for turn in range(repeats + 3):
        begin = time.perf_counter()
        collectives.swap(
            [(rank, message) for rank in neighbours], [(rank, size) for rank in neighbours], message, context,
            "measure_link", continued=turn > 0,
        )  # fmt: skip
        if on_gpu:
            torch.cuda.synchronize(message.device)
        times.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(times[3:])
