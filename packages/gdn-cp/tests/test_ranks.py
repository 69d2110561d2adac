"""The harness fails when a rank does."""

import functools
import operator
import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, RankPool, run_ranks

pytestmark = pytest.mark.ranks


def test_results_come_back_in_rank_order():
    def worker(rank: int) -> torch.Tensor:
        x = torch.tensor([rank + 1.0])
        dist.all_reduce(x)
        return torch.cat([x, torch.tensor([float(rank)])])

    assert [x.tolist() for x in run_ranks(3, worker)] == [[6.0, 0.0], [6.0, 1.0], [6.0, 2.0]]


def test_a_failing_rank_fails_the_launch_with_its_traceback():
    def worker(rank: int) -> None:
        assert rank != 1, "this is the reason"

    with pytest.raises(RankError, match=r"(?s)rank 1 raised.*this is the reason"):
        run_ranks(2, worker)


def test_a_silent_rank_ends_at_the_limit():
    begin = time.monotonic()
    with pytest.raises(RankError, match=r"ranks \[1\] did not finish within 1.0 s"):
        run_ranks(2, lambda rank: time.sleep(30 * rank), limit=1.0)
    assert time.monotonic() - begin < 10


def test_a_dying_rank_is_noticed():
    with pytest.raises(RankError, match="rank 0 died"):
        run_ranks(2, lambda rank: os._exit(3) if rank == 0 else time.sleep(5))


def test_a_pool_keeps_its_ranks_and_starts_anew_after_a_failure():
    """Workers are sent, so that each is a builtin here: 1 % rank fails on rank 0 alone."""
    with RankPool(2) as pool:
        first = pool.run(functools.partial(pow, 2))
        processes = list(pool._processes)
        assert pool.run(functools.partial(pow, 3)) == [1, 3]
        assert pool._processes == processes
        with pytest.raises(RankError, match=r"(?s)rank 0 raised.*ZeroDivisionError"):
            pool.run(functools.partial(operator.mod, 1))
        assert not any(process.is_alive() for process in processes)
        assert pool.run(functools.partial(pow, 2)) == first == [1, 2]
        with pytest.raises(RankError, match=r"ranks \[1\] did not finish within 0.5 s"):
            pool.run(time.sleep, limit=0.5)
        pool.run(functools.partial(pow, 2))
        processes = list(pool._processes)
    assert [process.exitcode for process in processes] == [0, 0]
