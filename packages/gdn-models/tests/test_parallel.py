"""Attaching a context, the local part of a clip, and the reductions on one rank; several ranks are tested together."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gdn_cp import CPContext, FramePartition
from gdn_models import (
    BidirectionalGDN,
    ChunkCausalGDN,
    FrameGDN,
    all_reduce_gradients,
    apply_context_parallel,
    reduce_loss,
)
from gdn_models.clip import Clip
from gdn_models.parallel import ContextParallelModule, Shard, _buckets

SECOND_OF_THREE = SimpleNamespace(rank=1, size=3, is_trivial=False)


def attached(context: object, partition: FramePartition | None = None) -> ContextParallelModule:
    """Return a module with a context that communicates with nobody."""
    module = ContextParallelModule()
    module.attach_context(context, partition)  # type: ignore[arg-type]
    return module


def test_apply_reaches_nested_modules_and_may_be_repeated() -> None:
    model = nn.ModuleDict(
        {"a": nn.Sequential(nn.Linear(2, 2), FrameGDN(dim=8, heads=2)), "b": BidirectionalGDN(dim=8, heads=2)}
    )
    first, second = CPContext.single(), CPContext.single()
    for context in (first, first, second, None):
        assert apply_context_parallel(model, context) is model
        assert model["a"][1].context is context
        assert model["b"].context is context
    assert not model.state_dict().keys() & {"context", "_attached"}


def test_a_one_rank_context_gives_the_same_bits() -> None:
    block, x = BidirectionalGDN(dim=8, heads=2), torch.randn(1, 6, 8)
    expected = block(x, (3, 2, 1))
    apply_context_parallel(block, CPContext.single())
    assert torch.equal(block(x, (3, 2, 1)), expected)
    assert torch.equal(block(x, (3, 2, 1), partition=FramePartition((3,))), expected)
    assert block(x[:, :0], (0, 2, 1)).shape == (1, 0, 8)
    apply_context_parallel(block, CPContext.single(), FramePartition((3,)))
    assert torch.equal(block(x, (3, 2, 1)), expected)
    with pytest.raises(ValueError, match=r"grid must have F = 3 frames"):
        block(x[:, :4], (2, 2, 1))


def test_copies_keep_the_context_and_pickles_drop_it() -> None:
    context = CPContext.single()
    block = apply_context_parallel(FrameGDN(dim=8, heads=2), context)
    assert copy.deepcopy(block).context is context
    assert pickle.loads(pickle.dumps(block)).context is None
    assert block.extra_repr() == "dim=8, heads=2, context_parallel=rank 0 of 1"


def test_apply_errors() -> None:
    block = FrameGDN(dim=8, heads=2)
    for arguments, error, message in [
        ((nn.Linear(2, 2), CPContext.single()), ValueError, r"model must contain a module of gdn_models, got Linear"),
        ((block, "world"), TypeError, r"context must be a CPContext or None, got str"),
        ((block, CPContext.single(), (3,)), TypeError, r"partition must be a FramePartition, a TokenPartition or None"),
        ((block, None, FramePartition((3,))), RuntimeError, r"partition needs a context"),
        (
            (block, CPContext.single(), FramePartition((3, 4))),
            RuntimeError,
            r"partition must have as many ranks as the context, 1, got 2",
        ),
    ]:
        with pytest.raises(error, match=message):
            apply_context_parallel(*arguments)
    assert block.context is None


def test_shard_is_the_ranks_part_of_the_clip() -> None:
    partition = FramePartition((4, 0, 3))
    for rank, first in enumerate((0, 4, 4)):
        context = SimpleNamespace(rank=rank, size=3, is_trivial=False)
        shard = attached(context).shard(partition.counts[rank], partition)
        assert (shard.first, shard.frames, shard.total) == (first, partition.counts[rank], 7)
        assert shard.context is context
        assert shard.partition == partition


def test_the_partition_of_the_call_wins() -> None:
    module = attached(SECOND_OF_THREE, FramePartition((1, 2, 3)))
    assert module.shard(2, None).partition == FramePartition((1, 2, 3))
    assert module.shard(3, FramePartition((1, 3, 2))).partition == FramePartition((1, 3, 2))


@pytest.mark.parametrize(
    ("context", "default", "frames", "partition", "error", "message"),
    [
        (None, None, 3, FramePartition((3,)), RuntimeError, r"partition needs a context: call apply_context_parallel"),
        (None, None, 3, (3,), TypeError, r"partition must be a FramePartition or None, got tuple"),
        (SECOND_OF_THREE, None, 3, None, RuntimeError, r"a context of 3 ranks needs a partition"),
        (
            SECOND_OF_THREE, None, 3, FramePartition((3, 3)), RuntimeError,
            r"partition must have as many ranks as the context, 3, got 2",
        ),
        (
            SECOND_OF_THREE, FramePartition((3, 2, 1)), 3, None, ValueError,
            r"grid must have F = 2 frames, this rank's part of the partition \(3, 2, 1\) \(rank 1\), got 3",
        ),
    ],
)  # fmt: skip
def test_shard_errors(
    context: object,
    default: FramePartition | None,
    frames: int,
    partition: object,
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        attached(context, default).shard(frames, partition)  # type: ignore[arg-type]


def test_rotary_positions_are_those_of_the_whole_clip() -> None:
    """Frames count from the start of the clip, rows and columns from zero on every rank."""
    block, partition = BidirectionalGDN(dim=16, heads=1), FramePartition((2, 0, 3))
    whole = block._rotation(Clip((5, 2, 3), None, (), Shard(0, 5, 5, None, None)), torch.device("cpu"))
    for rank, frames in enumerate(partition.counts):
        shard = attached(SimpleNamespace(rank=rank, size=3, is_trivial=False)).shard(frames, partition)
        part = block._rotation(Clip((frames, 2, 3), None, (), shard), torch.device("cpu"))
        span = slice(6 * partition.starts[rank], 6 * partition.starts[rank + 1])
        assert torch.equal(part.cos, whole.cos[span])
        assert torch.equal(part.sin, whole.sin[span])


def test_chunk_starts_are_checked_against_the_whole_clip() -> None:
    block = ChunkCausalGDN(dim=8, heads=2)
    block.attach_context(SECOND_OF_THREE, FramePartition((2, 2, 3)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"chunk_starts must lie in 0 ... F - 1 = 6, got \(0, 7\)"):
        block._checked(torch.zeros(1, 4, 8), (2, 2, 1), (0, 7), None, None, None)


@pytest.mark.parametrize("n_local", [12, torch.tensor(12)])
def test_reduce_loss_of_one_rank_is_the_loss(n_local: int | torch.Tensor) -> None:
    loss = torch.tensor(2.5, requires_grad=True)
    reduced = reduce_loss(loss * 1, CPContext.single(), n_local)
    assert reduced.item() == 2.5
    reduced.backward()
    assert loss.grad == 1


@pytest.mark.parametrize(
    ("loss", "n_local", "error", "message"),
    [
        (2.0, 3, TypeError, r"loss must be a torch.Tensor, got float"),
        (torch.ones(2), 3, ValueError, r"loss must be a scalar, got shape \[2\]"),
        (torch.ones(()), 3.0, TypeError, r"n_local must be an int or a tensor, got float"),
        (torch.ones(()), -1, ValueError, r"n_local must be >= 0, got -1"),
        (torch.ones(()), torch.ones(1), ValueError, r"n_local must be a scalar, got shape \[1\]"),
    ],
)
def test_reduce_loss_errors(loss: object, n_local: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        reduce_loss(loss, CPContext.single(), n_local)  # type: ignore[arg-type]


def test_all_reduce_gradients_of_one_rank_changes_nothing() -> None:
    layer = nn.Linear(3, 2)
    layer(torch.ones(1, 3)).sum().backward()
    expected, layer.bias.grad = layer.weight.grad.clone(), None
    for parameters in (layer, layer.parameters(), [layer.bias, layer.weight]):
        all_reduce_gradients(parameters, CPContext.single())
        assert torch.equal(layer.weight.grad, expected)
        assert layer.bias.grad is None


def test_all_reduce_gradients_errors() -> None:
    with pytest.raises(TypeError, match=r"parameters must be a torch.Tensor, got str"):
        all_reduce_gradients(["weight"], CPContext.single())  # type: ignore[list-item]
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(NotImplementedError, match=r"dense gradients only, got a sparse one"):
        all_reduce_gradients(table, CPContext.single())


def test_buckets_keep_order_separate_dtypes_and_respect_the_limit() -> None:
    sizes = [3, 4, 5, 20, 1, 2]
    narrow = [torch.zeros(n, dtype=torch.bfloat16 if n % 2 else torch.float32) for n in sizes]
    wide = [torch.zeros(n, dtype=torch.float64) for n in (6, 6)]
    found = [[x.numel() for x in bucket] for bucket in _buckets([narrow[0], wide[0], *narrow[1:], wide[1]], 12)]
    assert sorted(found) == sorted([[3, 4, 5], [20], [1, 2], [6, 6]])
    assert _buckets([], 12) == []
