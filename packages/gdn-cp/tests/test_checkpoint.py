"""Activation checkpoints that keep exchanges: counted, and the same gradients, however the block is recomputed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gdn_cp import CPContext, FramePartition, count_exchanges, cp_frame_gdn, halo_exchange, keep_exchanges
from gdn_cp.checkpoint import ExchangeLog, current_log

H, S, D = 2, 3, 4
PARTITION = FramePartition((3, 2))


def block(qkv: Tensor, beta: Tensor, decay: Tensor, context: CPContext) -> Tensor:
    """Exchange halos, then summaries."""
    frames = beta.shape[2]
    wide = halo_exchange(qkv.unflatten(1, (frames, S)), 1, 1, 1, context, PARTITION)
    mixed = (wide[:, :-2] + 0.5 * wide[:, 1:-1] + wide[:, 2:]).flatten(1, 2)
    return cp_frame_gdn(
        mixed, beta, decay, context=context, partition=PARTITION, direction="bidirectional", k_scale=0.3, eps=0.5
    ).output


def leaves_of(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    frames, generator = PARTITION.counts[rank], torch.Generator().manual_seed(rank)
    shapes = ((1, frames * S, 3, H, D), (1, H, frames, S), (1, H, frames))
    qkv, beta, decay = (torch.rand(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return qkv.requires_grad_(), beta.requires_grad_(), decay.requires_grad_()


def step(rank: int, context: CPContext, how: str, backwards: int = 1) -> tuple[list[Tensor], list[str]]:
    leaves = leaves_of(rank)
    with count_exchanges() as exchanges:
        if how == "none":
            output = block(*leaves, context)
        elif how == "reentrant":
            output = checkpoint(block, *leaves, context, use_reentrant=True)
        elif how == "plain":
            output = checkpoint(block, *leaves, context, use_reentrant=False)
        else:
            output = checkpoint(block, *leaves, context, use_reentrant=False, context_fn=keep_exchanges)
        for i in range(backwards):
            output.square().sum().backward(retain_graph=i + 1 < backwards)
    return [x.grad for x in leaves], exchanges.labels


@pytest.mark.ranks
@pytest.mark.parametrize("schedule", ["all_gather", "chain", "doubling"])
def test_kept_exchanges_are_not_repeated(schedule: str) -> None:
    """One exchange per operation and pass; a plain checkpoint makes one more forward. Same gradients bit for bit."""

    def worker(rank: int) -> dict[str, tuple[list[Tensor], list[str]]]:
        context = CPContext(dist.group.WORLD, schedule=schedule)
        return {how: step(rank, context, how) for how in ("none", "keep", "plain", "reentrant")}

    forward = ["halo_exchange forward", "cp_frame_gdn forward"]
    backward = ["cp_frame_gdn backward", "halo_exchange backward"]
    for found in run_ranks(2, worker):
        expected, labels = found["none"]
        assert labels == forward + backward
        assert found["keep"][1] == forward + backward
        assert found["plain"][1] == found["reentrant"][1] == forward + forward + backward
        for how in ("keep", "plain", "reentrant"):
            assert all(torch.equal(x, y) for x, y in zip(found[how][0], expected, strict=True)), how


@pytest.mark.ranks
def test_every_backward_of_a_retained_graph_finds_what_was_kept() -> None:
    def worker(rank: int) -> tuple[list[Tensor], list[str], list[Tensor]]:
        context = CPContext(dist.group.WORLD)
        found, labels = step(rank, context, "keep", backwards=2)
        return found, labels, step(rank, context, "none")[0]

    for found, labels, once in run_ranks(2, worker):
        assert labels.count("cp_frame_gdn forward") == 1
        assert labels.count("cp_frame_gdn backward") == 2
        for x, y in zip(found, once, strict=True):
            torch.testing.assert_close(x, 2 * y, rtol=1e-14, atol=1e-14)


def test_a_log_belongs_to_its_block_and_ends_with_it() -> None:
    outer, inner = ExchangeLog(), ExchangeLog()
    with outer.recording():
        with inner.recording():
            assert current_log() is inner
        assert current_log() is outer
    assert current_log() is None


def test_a_recomputation_that_exchanges_more_is_an_error() -> None:
    log = ExchangeLog()
    with log.recording():
        log.put(1)
    with log.replaying():
        assert log.replays
        assert log.take() == 1
        with pytest.raises(RuntimeError, match="the recomputation makes an exchange that the forward did not make"):
            log.take()
    assert not log.replays


@pytest.mark.ranks
@pytest.mark.parametrize("keep", [False, True])
def test_a_block_that_needs_no_gradient_before_one_that_does(keep: bool) -> None:
    """Its operation stays without a backward, at the first step and later; a checkpoint recomputes what it ran."""

    def worker(rank: int) -> list[list[str]]:
        context, found = CPContext(dist.group.WORLD), []
        qkv, beta, decay = (x.detach() for x in leaves_of(rank))
        weight = torch.ones(D, dtype=torch.float64, requires_grad=True)

        def mix(x: Tensor) -> Tensor:
            output = cp_frame_gdn(x, beta, decay, context=context, partition=PARTITION).output * weight
            return torch.stack([output] * 3, 2)

        options = {"context_fn": keep_exchanges} if keep else {}
        for _ in range(2):
            with count_exchanges() as exchanges:
                y = checkpoint(mix, qkv, use_reentrant=False, **options)
                checkpoint(mix, y, use_reentrant=False, **options).sum().backward()
            found.append([label.split()[-1] for label in exchanges.labels])
        return found

    again = [] if keep else ["forward"]
    for found in run_ranks(2, worker):
        assert found == [["forward", "forward", *again, "backward", *again]] * 2
