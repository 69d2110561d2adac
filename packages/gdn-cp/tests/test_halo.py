"""Frames of neighbours on gloo ranks against a padded clip."""

import itertools

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from gdn_cp import CPContext, FramePartition, TokenPartition, count_exchanges, cp_halo_exchange, halo_exchange
from gdn_cp.halo import halo_plan

CUTS = [(3, 1, 2), (0, 1, 5), (1, 0, 5), (5, 1, 0)]
SIZES = [(0, 3), (3, 0), (2, 1), (4, 4)]


def clip() -> torch.Tensor:
    return torch.randn(2, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.ranks
def test_ranks_get_the_frames_around_their_own_and_give_gradients_back():
    """FC-D06: the first message of a fresh group; halos that span short and empty ranks; one exchange per pass."""

    def worker(rank: int):
        found = []
        for counts, (left, right) in itertools.product(CUTS, SIZES):
            context, partition = CPContext(dist.group.WORLD), FramePartition(counts)
            x = partition.split(clip(), rank, 1).clone().requires_grad_()
            with count_exchanges() as seen:
                y = halo_exchange(x, left, right, 1, context, partition, fill=-1.0)
                y.backward(torch.arange(1.0, 1 + y.numel(), dtype=torch.float64).view_as(y) * (rank + 1))
            assert [label.split()[-1] for label in seen.labels] == ["forward", "backward"]
            found.append((y.detach(), x.grad))
        return found

    ranks = run_ranks(3, worker)
    for i, (counts, (left, right)) in enumerate(itertools.product(CUTS, SIZES)):
        partition = FramePartition(counts)
        x = clip().requires_grad_()
        padded = torch.nn.functional.pad(x, (0, 0, left, right), value=-1.0)
        loss = torch.zeros((), dtype=torch.float64)
        for rank in range(3):
            length = left + counts[rank] + right if counts[rank] else 0
            expected = padded[:, partition.starts[rank] : partition.starts[rank] + length]
            assert torch.equal(ranks[rank][i][0], expected)
            up = torch.arange(1.0, 1 + expected.numel(), dtype=torch.float64).view_as(expected) * (rank + 1)
            loss = loss + (expected * up).sum()
        loss.backward()
        assert torch.equal(torch.cat([ranks[rank][i][1] for rank in range(3)], 1), x.grad)


@pytest.mark.ranks
def test_strided_input_and_expanded_gradient():
    """FC-A01, FC-S12."""
    partition = FramePartition((2, 4))

    def worker(rank: int):
        x = partition.split(clip().transpose(0, 2).contiguous().transpose(0, 2), rank, 1).requires_grad_()
        y = halo_exchange(x, 1, 1, -2, CPContext(dist.group.WORLD), partition)
        return y.detach(), torch.autograd.grad(y.sum(), x)[0]

    for rank, (y, grad) in enumerate(run_ranks(2, worker)):
        padded = torch.nn.functional.pad(clip(), (0, 0, 1, 1))
        assert torch.equal(y, padded[:, partition.starts[rank] : partition.starts[rank] + partition.counts[rank] + 2])
        times = torch.ones(6)
        times[1:3] = 2  # frames 1 and 2 are read by both ranks
        assert torch.equal(grad, partition.split(times[None, :, None].expand(2, 6, 3).double(), rank, 1))


def test_one_rank_pads_and_sends_nothing():
    x = torch.randn(2, 3, 4)
    context, partition = CPContext.single(), FramePartition((4,))
    with count_exchanges() as seen:
        assert torch.equal(halo_exchange(x, 1, 2, 2, context, partition), torch.nn.functional.pad(x, (1, 2)))
        assert halo_exchange(x, 0, 0, 2, context, partition) is x
    assert seen.total == 0


def test_a_plan_is_made_once():
    plan = halo_plan(FramePartition((3, 1, 2)), 1, 2, 2)
    assert halo_plan(FramePartition((3, 1, 2)), 1, 2, 2) is plan
    for partition, *rest in ((FramePartition((3, 2, 1)), 1, 2, 2), (TokenPartition((3, 1, 2)), 1, 2, 2)):
        assert halo_plan(partition, *rest) is not plan
    assert halo_plan(FramePartition((3, 1, 2)), 0, 2, 2) is not plan


def test_same_replaces_frames_of_another_sequence():
    x, same = torch.ones(1, 2, 1), torch.tensor([False, True, True, True])
    found = halo_exchange(x, 2, 0, 1, CPContext.single(), FramePartition((2,)), fill=5.0, same=same)
    assert found.flatten().tolist() == [5.0, 5.0, 1.0, 1.0]
    with pytest.raises(ValueError, match=r"same must have shape \[left \+ F \+ right\] = \[4\], got \[3\]"):
        halo_exchange(x, 2, 0, 1, CPContext.single(), FramePartition((2,)), same=same[1:])


def test_errors():
    x, context, partition = torch.ones(1, 2, 1), CPContext.single(), FramePartition((2,))
    with pytest.raises(ValueError, match="left and right must be >= 0, got -1 and 0"):
        halo_exchange(x, -1, 0, 1, context, partition)
    with pytest.raises(ValueError, match="dim must be a dim of x, which has 3, got 3"):
        halo_exchange(x, 1, 0, 3, context, partition)
    with pytest.raises(RuntimeError, match=r"partition of 1 ranks with 2 frames on rank 0, got \(3,\)"):
        halo_exchange(x, 1, 0, 1, context, FramePartition((3,)))
    with pytest.raises(TypeError, match="partition must be a FramePartition or TokenPartition, got int"):
        halo_exchange(x, 1, 0, 1, context, 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="context must be a CPContext, got NoneType"):
        halo_exchange(x, 1, 0, 1, None, partition)  # type: ignore[arg-type]


@pytest.mark.ranks
def test_published_exchange_pads_equal_shards_with_zeros():
    """A group or a context; halos longer than a shard; one exchange per pass; unequal shards fail on all ranks."""

    def worker(rank: int):
        found = []
        for left, right in SIZES:
            x = clip()[:, 2 * rank : 2 * rank + 2].clone().requires_grad_()
            with count_exchanges() as seen:
                y = cp_halo_exchange(x, left, right, -2, dist.group.WORLD)
                y.backward(torch.arange(1.0, 1 + y.numel(), dtype=torch.float64).view_as(y) * (rank + 1))
            assert seen.total == 2
            assert torch.equal(y, cp_halo_exchange(x, left, right, 1, CPContext(dist.group.WORLD)))
            found.append((y.detach(), x.grad))
        with pytest.raises(RuntimeError, match="ranks disagree on partition"):
            cp_halo_exchange(clip()[:, : 2 + (rank == 1)].float(), 1, 0, 1, dist.group.WORLD)
        return found

    ranks = run_ranks(3, worker)
    for i, (left, right) in enumerate(SIZES):
        x = clip().requires_grad_()
        padded = torch.nn.functional.pad(x, (0, 0, left, right))
        loss = torch.zeros((), dtype=torch.float64)
        for rank in range(3):
            expected = padded[:, 2 * rank : 2 * rank + left + 2 + right]
            assert torch.equal(ranks[rank][i][0], expected)
            up = torch.arange(1.0, 1 + expected.numel(), dtype=torch.float64).view_as(expected) * (rank + 1)
            loss = loss + (expected * up).sum()
        loss.backward()
        assert torch.equal(torch.cat([ranks[rank][i][1] for rank in range(3)], 1), x.grad)


def test_published_exchange_errors():
    x, one = torch.ones(1, 2, 1), CPContext.single()
    assert cp_halo_exchange(x, 0, 0, 1, one) is x
    with pytest.raises(ValueError, match="left and right must be >= 0, got 0 and -2"):
        cp_halo_exchange(x, 0, -2, 1, one)
    with pytest.raises(ValueError, match="dim must be a dim of x, which has 3, got 3"):
        cp_halo_exchange(x, 1, 0, 3, one)
    with pytest.raises(TypeError, match="x must be a torch.Tensor, got int"):
        cp_halo_exchange(3, 1, 0, 0, one)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="group must be a torch.distributed.ProcessGroup or a CPContext, got NoneType"):
        cp_halo_exchange(x, 1, 0, 1, None)  # type: ignore[arg-type]
