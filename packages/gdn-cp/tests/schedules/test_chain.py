"""States from neighbour to neighbour, in 1 to 8 blocks of heads: as the recursions say, in as many rounds as said."""

import pytest
from schedule_cases import Case, check

from gdn_cp.passes import publish
from gdn_cp.schedules import chain, lines
from gdn_kernels.types import FrameBoundary, FrameSummary


@pytest.mark.parametrize("blocks", range(1, 9))
def test_states_between_ranks(blocks):
    """Ten rows of heads do not divide by most block counts."""
    for size in (1, 2, 3, 5):
        check(Case(size, "chain", blocks, "bidirectional", True, (1, 3)))
        check(Case(size, "chain", blocks, "bidirectional", False))


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("initial", [True, False])
def test_one_direction(direction, initial):
    for size in (2, 4):
        check(Case(size, "chain", 3, direction, True, (0,), initial))


@pytest.mark.parametrize(("size", "blocks"), [(2, 1), (4, 1), (4, 3), (3, 8)])
def test_rounds_and_messages(size, blocks):
    """P - 2 + blocks rounds; states of one direction to each neighbour that follows, transitions to nobody."""
    case = Case(size, "chain", blocks)
    for rank in range(size):
        plan, own = case.plan(rank), case.maps()[rank]
        increment = FrameBoundary(*(own[f"h_{d}_{s}"] for d in ("forward", "reverse") for s in ("kv", "z")))
        blocks_by_name = plan.forward_layout().unpack(
            publish(plan, FrameSummary(own["E_kv"], own["E_z"], increment), case.state())
        )
        steps = chain.travel(lines.route_of(plan), lines.lines(plan, blocks_by_name, blocks_by_name, backward=False))
        rounds, sent = 0, {}
        answer = None
        while True:
            try:
                swap = steps.send(answer)
            except StopIteration:
                break
            rounds += 1
            for peer, x in swap.sends:
                sent[peer] = sent.get(peer, 0) + x.numel()
            answer = [swap.like.new_zeros(size) for _, size in swap.receives]
        assert rounds == size - 2 + blocks
        neighbours = [peer for peer in (rank - 1, rank + 1) if 0 <= peer < size]
        assert sent == dict.fromkeys(neighbours, 2 * 5 * (3 * 3 + 3))
