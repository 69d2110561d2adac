"""One exchange without the operation around it: random maps of P ranks, and the states between them by recursion."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from gdn_cp import passes, schedules
from gdn_cp.passes import RankPlan
from gdn_kernels import Direction, Impl, Precision
from gdn_kernels.types import FrameBoundary, FrameOptions, FrameSummary

B, H, D = 2, 5, 3
State = tuple[Tensor, Tensor]
Ranks = list[dict[str, Tensor]]


@dataclasses.dataclass(frozen=True)
class Case:
    """The maps of ``size`` ranks; ``resets`` are the ranks with a chunk start in their frames."""

    size: int
    schedule: str
    blocks: int = 1
    direction: str = "bidirectional"
    has_z: bool = True
    resets: tuple[int, ...] = ()
    initial: bool = True
    save_transitions: bool = True

    @property
    def streams(self) -> tuple[str, ...]:
        return ("kv", "z") if self.has_z else ("kv",)

    @property
    def has_initial(self) -> bool:
        return self.initial and self.direction != "reverse"

    def plan(self, rank: int) -> RankPlan:
        options = FrameOptions(
            True, self.has_z, False, Direction(self.direction), (), 1.0, 1e-5, 0.0, Precision("ieee"), Impl("torch")
        )
        has_reset = tuple(r in self.resets for r in range(self.size))
        return RankPlan(
            options, self.size, rank, has_reset, self.has_initial, False, B, H, D, torch.float64, torch.device("cpu"),
            self.save_transitions, self.schedule, self.blocks,
        )  # fmt: skip

    def maps(self) -> Ranks:
        """Return for each rank transitions that neither contract nor commute, increments and entry gradients."""
        generator = torch.Generator().manual_seed(self.size)

        def normal(*shape: int) -> Tensor:
            return torch.randn(B, H, *shape, generator=generator, dtype=torch.float64)

        names = {"E_kv": (D, D), "E_z": (D, D)}
        for kind in ("h_forward", "h_reverse", "gamma_forward", "gamma_reverse"):
            names |= {f"{kind}_kv": (D, D), f"{kind}_z": (D,)}
        return [{name: normal(*shape) for name, shape in names.items()} for _ in range(self.size)]

    def state(self) -> State:
        generator = torch.Generator().manual_seed(99)
        shapes = ((B, H, D, D), (B, H, D))
        kv, z = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        return kv, z


def boundary(case: Case, of: dict[str, Tensor], kind: str) -> FrameBoundary:
    """Return the blocks of one kind that the case uses."""
    directions = {"forward": ("forward",), "reverse": ("reverse",), "bidirectional": ("forward", "reverse")}
    used = {(d, s) for d in directions[case.direction] for s in case.streams}
    return FrameBoundary(
        *(of[f"{kind}_{d}_{s}"] if (d, s) in used else None for d in ("forward", "reverse") for s in ("kv", "z"))
    )


def exchange(case: Case) -> tuple[list[schedules.Entered], list[schedules.Left]]:
    """Run both passes of a schedule on all ranks."""
    plans, maps = [case.plan(rank) for rank in range(case.size)], case.maps()
    kv, z = case.state()
    initial = (kv if case.has_initial else None, z if case.has_initial and case.has_z else None)
    entering = []
    for plan, own in zip(plans, maps, strict=True):
        summary = FrameSummary(own["E_kv"], own["E_z"] if case.has_z else None, boundary(case, own, "h"))
        entering.append(schedules.enter(plan, passes.publish(plan, summary, initial), initial))
    entered = schedules.in_lockstep(entering)
    leaving = []
    for plan, own, (_, _, kept) in zip(plans, maps, entered, strict=True):
        buffer = passes.publish_backward(plan, boundary(case, own, "gamma"), (None, None), kept)
        leaving.append(schedules.leave(plan, buffer, kept))
    return entered, schedules.in_lockstep(leaving)


def expected(case: Case) -> dict[str, list[Tensor]]:
    """Return X, Y, G, J of every rank and stream, and the gradient of the initial state, from their recursions."""
    maps, last = case.maps(), case.size - 1
    initial = dict(zip(("kv", "z"), case.state(), strict=True))
    found: dict[str, list[Tensor]] = {}
    for s in case.streams:

        def product(transition: Tensor, x: Tensor, s: str = s) -> Tensor:
            return torch.einsum("bhij,bhj...->bhi..." if s == "kv" else "bhij,bhj->bhi", transition, x)

        zero = torch.zeros_like(initial[s])
        keep = [0.0 if r in case.resets else 1.0 for r in range(case.size)]
        xs, ys = [initial[s] if case.has_initial else zero], [zero]
        gs, js = [zero], [zero]
        for r in range(last):
            xs.append(product(maps[r][f"E_{s}"], xs[-1]) + maps[r][f"h_forward_{s}"])
            js.append(keep[r] * product(maps[r][f"E_{s}"], js[-1]) + maps[r][f"gamma_reverse_{s}"])
        for r in range(last, 0, -1):
            ys.append(keep[r] * product(maps[r][f"E_{s}"].mT, ys[-1]) + maps[r][f"h_reverse_{s}"])
            gs.append(product(maps[r][f"E_{s}"].mT, gs[-1]) + maps[r][f"gamma_forward_{s}"])
        found |= {f"X_{s}": xs, f"Y_{s}": ys[::-1], f"G_{s}": gs[::-1], f"J_{s}": js}
        found[f"initial_{s}"] = [product(maps[0][f"E_{s}"].mT, gs[-1]) + maps[0][f"gamma_forward_{s}"]]
        found[f"initial_{s}"] += [zero] * last
    return found


def check(case: Case) -> None:
    """Hold a schedule to the recursions, on every rank; a sum of 3 products per rank, in fp64: 1e-12 of the largest."""
    entered, left = exchange(case)
    results: dict[str, list[Any]] = {}
    for i, (direction, s) in enumerate([("forward", "kv"), ("forward", "z"), ("reverse", "kv"), ("reverse", "z")]):
        results[f"{'X' if direction == 'forward' else 'Y'}_{s}"] = [x.entry[i] for x in entered]
        results[f"{'G' if direction == 'forward' else 'J'}_{s}"] = [x.exits[i] for x in left]
    for i, s in enumerate(("kv", "z")):
        results[f"initial_{s}"] = [x.initial[i] for x in left]
    used = {"X": "reverse", "G": "reverse", "Y": "forward", "J": "forward", "initial": "reverse"}
    for name, wanted in expected(case).items():
        kind = name.split("_")[0]
        absent = case.direction == used[kind] or (kind == "initial" and not case.has_initial)
        for rank, (x, y) in enumerate(zip(results[name], wanted, strict=True)):
            if absent:
                assert x is None, f"{name} of rank {rank} must be None"
                continue
            assert x.shape == y.shape
            error = float((x - y).abs().max() / max(1e-300, max(float(v.abs().max()) for v in wanted)))
            assert error <= 1e-12, f"{case}: {name} of rank {rank}: {error:.1e}"
