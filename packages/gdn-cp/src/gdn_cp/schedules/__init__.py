"""How summaries travel in one pass: what this rank publishes becomes its entry states, or its gradient seeds.

A schedule is a generator of rounds (`gdn_cp.schedules.rounds`), the same on a process group and inside one process.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from gdn_cp import collectives
from gdn_cp.context import CPContext
from gdn_cp.cost_model import Link, resolve_schedule
from gdn_cp.passes import RankPlan
from gdn_cp.schedules import all_gather, chain, doubling, lines
from gdn_cp.schedules.lines import Entered, Left, Travel
from gdn_cp.schedules.rounds import Steps, in_lockstep, over_ranks

__all__ = ["TRAVELS", "Entered", "Left", "enter", "in_lockstep", "leave", "over_ranks", "scheduled", "wanted"]

TRAVELS: dict[str, Travel] = {"chain": chain.travel, "doubling": doubling.travel}


def wanted(context: CPContext, device: torch.device) -> str:
    """Return the schedule of a context. Auto stays with the gather where messages would go over the host."""
    over_host = context.schedule == "auto" and not context.is_trivial and collectives.sends_over_host(context, device)
    return "all_gather" if over_host else context.schedule


def scheduled(plan: RankPlan, schedule: str, link: Link) -> RankPlan:
    """Return the plan with its schedule settled, the same on all ranks.

    Raises:
        NotImplementedError: A schedule without a final state was asked for one.
    """
    transition, state = plan.message_bytes
    choice = resolve_schedule(
        schedule, plan.size, transition, state, link, directions=len(plan.directions), has_final=plan.has_final
    )
    return dataclasses.replace(
        plan, schedule=choice.schedule, blocks=min(choice.blocks, max(plan.batch * plan.heads, 1))
    )


def enter(plan: RankPlan, own: Tensor, initial: tuple[Tensor | None, Tensor | None]) -> Steps[Entered]:
    """Turn what ranks publish forward into entry states; see `Entered`."""
    if plan.schedule in TRAVELS:
        return lines.enter(plan, own, initial, TRAVELS[plan.schedule])
    return all_gather.enter(plan, own, initial)


def leave(plan: RankPlan, own: Tensor, kept: Tensor) -> Steps[Left]:
    """Turn what ranks publish backward into gradients of exit states; ``kept`` is that of the forward; see `Left`."""
    if plan.schedule in TRAVELS:
        return lines.leave(plan, own, kept, TRAVELS[plan.schedule])
    return all_gather.leave(plan, own, kept)
