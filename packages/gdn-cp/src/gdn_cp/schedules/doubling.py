"""Recursive doubling: composed maps travel 1, 2, 4, ... ranks; the number of rounds grows as the logarithm of P.

I  the map of the last d ranks of the line up to and with this one,  Q  that of the d - 1 ranks before it
round d    Q <- I of the rank d before, then Q after it;    I <- I after it
"""

from __future__ import annotations

import torch
from torch import Tensor

from gdn_cp.affine import AffineMap
from gdn_cp.schedules.lines import Line, Route, compose
from gdn_cp.schedules.rounds import Steps, Swap


def travel(route: Route, lines: list[Line]) -> Steps[list[dict[str, Tensor]]]:
    """Return the states that enter this rank on each line, after ceil(log2 P) rounds.

    Communication: per round and line one message of 3 D^2 + D numbers per batch element and head (2 D^2 without z):
        a window's map. Windows of the two directions cover different ranks, so each sends its own transitions.
    """
    last = route.size - 1
    inclusive = [dict(line.maps) for line in lines]
    exclusive: list[dict[str, AffineMap]] = [{} for _ in lines]
    distance = 1
    while distance <= last:
        sends, receives, takers = [], [], []
        for i, line in enumerate(lines):
            if line.place + distance <= last:
                sends.append((route.rank + distance * line.step, _message(inclusive[i])))
            if line.place >= distance:
                size = sum(x.numel() for m in line.maps.values() for x in m)
                receives.append((route.rank - distance * line.step, size))
                takers.append(i)
        received = yield Swap(tuple(sends), tuple(receives), next(iter(lines[0].maps.values())).increment)
        distance *= 2
        for i, message in zip(takers, received, strict=True):
            for stream, earlier in _maps(message, lines[i].maps).items():
                before = exclusive[i].get(stream)
                exclusive[i][stream] = earlier if before is None else compose(route, before, earlier)
                if distance <= last:  # the last window is not sent
                    inclusive[i][stream] = compose(route, inclusive[i][stream], earlier)
    return [
        {
            stream: torch.zeros_like(m.increment) if stream not in window else window[stream].increment
            for stream, m in line.maps.items()
        }
        for line, window in zip(lines, exclusive, strict=True)
    ]


def _message(maps: dict[str, AffineMap]) -> Tensor:
    return torch.cat([x.reshape(-1) for m in maps.values() for x in m])


def _maps(message: Tensor, like: dict[str, AffineMap]) -> dict[str, AffineMap]:
    parts = iter(torch.split(message, [x.numel() for m in like.values() for x in m]))
    return {stream: AffineMap(*(next(parts).view_as(x) for x in m)) for stream, m in like.items()}
