"""Composed maps over 1, 2, 4, ... ranks: as the recursions say, for any number of ranks, in ceil(log2 P) rounds."""

import pytest
from schedule_cases import Case, check

from gdn_cp.schedules import doubling, lines


@pytest.mark.parametrize("size", range(1, 18))
def test_states_between_ranks(size):
    check(Case(size, "doubling", 1, "bidirectional", True, (1, 4)))
    check(Case(size, "doubling", 1, "bidirectional", False, (), False))


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_one_direction(direction):
    for size in (2, 5):
        check(Case(size, "doubling", 1, direction, True, (0,)))


@pytest.mark.parametrize(("size", "rounds"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4), (17, 5)])
def test_rounds(size, rounds):
    case = Case(size, "doubling")
    plan, own = case.plan(0), case.maps()[0]
    blocks = {f"transition_{s}": own[f"E_{s}"] for s in ("kv", "z")}
    blocks |= {f"{d}_{s}": own[f"h_{d}_{s}"] for s in ("kv", "z") for d in ("forward", "reverse")}
    steps = doubling.travel(lines.route_of(plan), lines.lines(plan, blocks, blocks, backward=False))
    seen, answer = 0, None
    while True:
        try:
            swap = steps.send(answer)
        except StopIteration:
            break
        seen += 1
        answer = [swap.like.new_zeros(n) for _, n in swap.receives]
        assert all(x.numel() == 2 * 5 * (3 * 9 + 3) for _, x in swap.sends)
    assert seen == rounds
