"""Rounds on a group and in lock-step: who gets what, and what is counted."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from gdn_cp import CPContext, count_exchanges
from gdn_cp.schedules.rounds import Gather, Swap, in_lockstep, over_ranks


def steps(rank: int, size: int):
    """Gather, then pass to the right twice; the last rank sends nothing."""
    rows = yield Gather(torch.full((2,), float(rank)))
    seen = [rows.tolist()]
    for turn in range(2):
        sends = ((rank + 1, torch.full((3,), float(10 * rank + turn))),) if rank + 1 < size else ()
        received = yield Swap(sends, ((rank - 1, 3),) if rank else (), rows)
        seen.append([x.tolist() for x in received])
    return seen


def expected(rank: int, size: int):
    rows = [[float(r)] * 2 for r in range(size)]
    return [rows, *([[10.0 * (rank - 1) + turn] * 3] if rank else [] for turn in range(2))]


def test_lockstep_delivers():
    for size in (1, 2, 4):
        found = in_lockstep([steps(rank, size) for rank in range(size)])
        assert found == [expected(rank, size) for rank in range(size)]


def test_lockstep_finds_what_does_not_match():
    def sends_to_nobody(rank: int):
        yield Swap(((1, torch.ones(3)),) if rank == 0 else (), (), torch.ones(1))

    def of_another_size(rank: int):
        yield Swap(((1, torch.ones(3)),) if rank == 0 else (), () if rank == 0 else ((0, 4),), torch.ones(1))

    def one_more(rank: int):
        for _ in range(rank + 1):
            yield Swap((), (), torch.ones(1))

    for schedule, text in [
        (sends_to_nobody, "messages that no rank takes"),
        (of_another_size, "both sides know a message's size"),
        (one_more, "the same number of rounds"),
    ]:
        with pytest.raises(AssertionError, match=text):
            in_lockstep([schedule(rank) for rank in range(2)])


@pytest.mark.ranks
def test_ranks_deliver_and_count_rounds_of_swaps_once():
    def worker(rank: int):
        with count_exchanges() as seen:
            found = over_ranks(steps(rank, 3), CPContext(dist.group.WORLD), "pass on")
        return found, seen.labels, seen.sent, seen.messages

    for rank, (found, labels, sent, messages) in enumerate(run_ranks(3, worker)):
        assert found == expected(rank, 3)
        assert labels == ["pass on", "pass on"]  # the gather, and the swaps
        assert sent == [8, 24 if rank < 2 else 0]
        assert messages == [1, 2 if rank < 2 else 0]
