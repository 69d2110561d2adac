"""Which way a line runs, through which map, and what is kept."""

import torch
from schedule_cases import Case, exchange

from gdn_cp.schedules import lines


def test_lines_of_both_passes():
    case = Case(4, "chain", resets=(1,))
    plan, own = case.plan(1), case.maps()[1]
    blocks = {f"transition_{s}": own[f"E_{s}"] for s in ("kv", "z")}
    blocks |= {f"{d}_{s}": own[f"h_{d}_{s}"] for s in ("kv", "z") for d in ("forward", "reverse")}
    forward, reverse = lines.lines(plan, blocks, blocks, backward=False)
    assert (forward.step, forward.place, reverse.step, reverse.place) == (1, 1, -1, 2)
    assert torch.equal(forward.maps["kv"].transition, own["E_kv"])
    assert not reverse.maps["kv"].transition.any()  # a chunk starts here
    assert forward.maps["z"].increment.shape[-1] == 1
    forward, reverse = lines.lines(plan, blocks, blocks, backward=True)
    assert (forward.step, forward.place, reverse.step, reverse.place) == (-1, 2, 1, 1)
    assert torch.equal(forward.maps["z"].transition, own["E_z"].mT)
    assert not reverse.maps["z"].transition.any()


def test_only_own_transitions_are_kept():
    for schedule in ("chain", "doubling"):
        case = Case(3, schedule)
        for rank, (_, final, kept) in enumerate(exchange(case)[0]):
            assert final == (None, None)
            assert kept.shape[0] == 1
            own = case.plan(rank).transition_layout().unpack(kept[0])
            assert torch.equal(own["transition_kv"], case.maps()[rank]["E_kv"])
