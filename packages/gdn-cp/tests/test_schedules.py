"""How a plan's schedule is settled: from the bytes of its wire, blocks no smaller than a head."""

import dataclasses

import pytest
from schedule_cases import B, Case, D, H

from gdn_cp import schedules
from gdn_cp.cost_model import INFINIBAND, NVLINK, Link, choose_schedule, message_bytes

SLOW = Link("no latency, no bandwidth", 1e-3, 1e-3)


@pytest.mark.parametrize("has_z", [True, False])
def test_bytes_of_a_plan_are_those_of_its_wire(has_z):
    plan = Case(4, "all_gather", has_z=has_z).plan(0)
    transition, state = plan.message_bytes
    assert (transition, state) == message_bytes(D, H, batch=B, streams=1 + has_z, itemsize=8)
    assert transition == 8 * sum(plan.transition_layout().sizes)
    assert transition + 2 * state == 8 * sum(plan.forward_layout().sizes)


def test_auto_asks_the_model_with_the_bytes_and_directions_of_the_plan():
    for direction in ("forward", "reverse", "bidirectional"):
        for size in (2, 4, 8, 16):
            plan = dataclasses.replace(
                Case(size, "all_gather", direction=direction).plan(1), batch=1, heads=20, width=112
            )
            for link in (NVLINK, INFINIBAND, SLOW):
                expected = choose_schedule(size, *plan.message_bytes, link, directions=len(plan.directions))
                assert schedules.scheduled(plan, "auto", link).schedule == expected
    final = dataclasses.replace(Case(4, "all_gather").plan(0), has_final=True)
    assert schedules.scheduled(final, "auto", SLOW).schedule == "all_gather"
    with pytest.raises(NotImplementedError, match="schedule='doubling' does not bring the final state to every rank"):
        schedules.scheduled(final, "doubling", SLOW)


@pytest.mark.parametrize(("batch", "heads", "blocks"), [(2, 5, 8), (1, 3, 3), (1, 0, 1)])
def test_a_block_holds_at_least_one_head(batch, heads, blocks):
    plan = dataclasses.replace(Case(4, "all_gather").plan(0), batch=batch, heads=heads)
    assert schedules.scheduled(plan, "chain", SLOW).blocks == blocks
