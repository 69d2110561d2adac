"""Chain: states travel from neighbour to neighbour, in blocks of heads, one behind the other; transitions stay.

round t    rank at place p of the line sends block t - p, state after its map, and receives block t - p + 1
"""

from __future__ import annotations

import torch
from torch import Tensor

from gdn_cp.affine import AffineMap
from gdn_cp.schedules.lines import Line, Route, advance
from gdn_cp.schedules.rounds import Steps, Swap


def travel(route: Route, lines: list[Line]) -> Steps[list[dict[str, Tensor]]]:
    """Return the states that enter this rank on each line, after ``P - 2 + blocks`` rounds.

    Communication: one message of D^2 + D numbers per batch element and head to the next rank of each line, in
        ``route.blocks`` parts.
    """
    rows = next(iter(lines[0].maps.values())).increment.shape[:-2].numel()
    cuts = [rows * j // route.blocks for j in range(route.blocks + 1)]
    parts = [slice(start, stop) for start, stop in zip(cuts, cuts[1:], strict=False)]
    flat = [{stream: _as_rows(m, rows) for stream, m in line.maps.items()} for line in lines]
    entered = [{stream: torch.zeros_like(m.increment) for stream, m in maps.items()} for maps in flat]
    last = route.size - 1
    for t in range(last - 1 + route.blocks):
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, int]] = []
        arriving: list[tuple[dict[str, Tensor], slice]] = []
        for line, maps, states in zip(lines, flat, entered, strict=True):
            out, into = t - line.place, t - line.place + 1
            if line.place < last and 0 <= out < route.blocks:
                sends.append((route.rank + line.step, _after(route, line, maps, states, parts[out])))
            if line.place > 0 and 0 <= into < route.blocks:
                size = sum(x[:, parts[into]].numel() for x in states.values())
                receives.append((route.rank - line.step, size))
                arriving.append((states, parts[into]))
        received = yield Swap(tuple(sends), tuple(receives), next(iter(entered[0].values())))
        for message, (states, part) in zip(received, arriving, strict=True):
            sizes = [x[:, part].numel() for x in states.values()]
            for x, piece in zip(states.values(), message.split(sizes), strict=True):
                x[:, part] = piece.view_as(x[:, part])
    return [
        {stream: x.view_as(line.maps[stream].increment) for stream, x in states.items()}
        for line, states in zip(lines, entered, strict=True)
    ]


def _as_rows(m: AffineMap, rows: int) -> AffineMap:
    """Return the map with batch and heads in one dim, behind a batch of one."""
    return AffineMap(*(x.reshape(1, rows, *x.shape[-2:]) for x in m))


def _after(route: Route, line: Line, maps: dict[str, AffineMap], states: dict[str, Tensor], part: slice) -> Tensor:
    """Return the message of one block of heads: the states after this rank's maps."""
    leaving = []
    for stream, m in maps.items():
        block = AffineMap(m.transition[:, part], m.increment[:, part])
        is_new = line.place == 0 or not line.carries
        leaving.append(block.increment if is_new else advance(route, block, states[stream][:, part]))
    return torch.cat([x.reshape(-1) for x in leaving])
