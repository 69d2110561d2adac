"""With ``validate="always"`` what a rank must not read of an exchange holds NaN: whoever reads it shows in the result.

A fold reads the ranks that come before this one in the order of the states, and only those.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gdn_cp.passes import RankPlan
from gdn_cp.wire import WireLayout


def hide_forward(plan: RankPlan, gathered: Tensor) -> Tensor:
    """Return the forward exchange ``[P, length]`` with NaN in what nobody may read; a checkpoint may hold the original.

    The backward reads some of the transitions that the forward does not, where it finds them saved.
    """
    before, after, everyone = set(range(plan.rank)), set(range(plan.rank + 1, plan.size)), set(range(plan.size))
    entry = everyone if plan.has_final else before
    used = entry if "forward" in plan.directions else set()
    used = used | after if "reverse" in plan.directions else used
    if plan.save_transitions:
        used = used | _transitions_backward(plan)
    return _hide(gathered, plan.forward_layout(), {"forward": entry, "reverse": after, "transition": used})


def hide_backward(plan: RankPlan, gathered: Tensor) -> Tensor:
    """Return the backward exchange ``[P, length]`` with NaN in what nobody may read."""
    before, everyone = set(range(plan.rank)), set(range(plan.size))
    read = {"forward": _later(plan), "reverse": before, "transition": _transitions_backward(plan), "final": everyone}
    return _hide(gathered, plan.backward_layout(), read)


def _later(plan: RankPlan) -> set[int]:
    """Ranks whose forward scan comes after this one's; that of rank 0 itself leads on to the initial state."""
    return set(range(plan.rank if plan.rank == 0 and plan.has_initial else plan.rank + 1, plan.size))


def _transitions_backward(plan: RankPlan) -> set[int]:
    forward = _later(plan) if "forward" in plan.directions else set()
    return forward | (set(range(plan.rank)) if "reverse" in plan.directions else set())


def _hide(gathered: Tensor, layout: WireLayout, read: dict[str, set[int]]) -> Tensor:
    kept = torch.full_like(gathered, torch.nan)  # also between the blocks
    for name, size, start in zip(layout.names, layout.sizes, layout.offsets, strict=False):
        for rank in read[name.rsplit("_", 1)[0]]:
            kept[rank, start : start + size] = gathered[rank, start : start + size]
    return kept
