"""The operations on gloo ranks against one device: per rank, every gradient, groups, empty shards, exchanges."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from clips import CP_OPS, B, Clip, D, H, compare, on_rank, results_of, shard_arguments, shard_leaves
from ranks import run_ranks

import gdn_kernels
from gdn_cp import (
    CPContext,
    FramePartition,
    count_exchanges,
    cp_frame_gdn,
    join_backward,
)


def compare_cases(size: int, cases: Sequence[tuple[Clip, tuple[int, ...]]], tolerance: float, gradient: float) -> None:
    def worker(rank: int):
        context = CPContext(dist.group.WORLD)
        return [on_rank(clip, FramePartition(counts), context) for clip, counts in cases]

    for i, ranks in enumerate(zip(*run_ranks(size, worker), strict=True)):
        clip, counts = cases[i]
        compare(clip, FramePartition(counts), ranks, tolerance, gradient)


CUTS = {2: [(4, 3), (7, 0), (0, 7)], 3: [(3, 1, 3), (0, 3, 4), (3, 0, 4), (3, 4, 0)], 4: [(2, 2, 2, 1), (1, 0, 0, 6)]}


@pytest.mark.ranks
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_equal_one_device_in_fp64(size):
    """FC-D01, FC-D04, FC-D09, FC-D12, FC-D13: first, middle and last rank empty; states; chunks; masks; 1e-10."""
    cases = [
        (Clip(kind=kind, direction=direction, starts=starts, masked=masked), counts)
        for counts, (kind, direction, starts, masked) in itertools.product(
            CUTS[size],
            [
                ("output", "bidirectional", (0, 2, 5), True),
                ("output", "forward", None, False),
                ("raw", "reverse", (3,), False),
                ("numerator", "bidirectional", None, True),
            ],
        )
    ]
    compare_cases(size, cases, 1e-10, 1e-10)


@pytest.mark.ranks
def test_ranks_equal_one_device_in_fp32():
    """Values 1e-5, gradients 3e-4: the rounding of fp32 over seven frames of states."""
    clip = Clip(dtype=torch.float32)
    compare_cases(3, [(clip, counts) for counts in CUTS[3]], 1e-5, 3e-4)


@pytest.mark.ranks
def test_loss_on_one_rank_only():
    """FC-D03: the gradient crosses ranks; a causal loss on the first rank leaves exact zeros on the others."""
    cases = [
        (Clip(direction=direction, loss_ranks=(rank,), final_loss_ranks=()), (3, 2, 2))
        for direction in ("forward", "bidirectional")
        for rank in (0, 2)
    ]
    compare_cases(3, cases, 1e-10, 1e-10)


@pytest.mark.ranks
def test_groups_that_are_not_world():
    """FC-D02: {1, 3} and {0, 2} of four at once, without global rank 0 in one of them, and a 2 x 2 mesh."""
    clip, partition = Clip(starts=(0, 3)), FramePartition((3, 4))

    def worker(rank: int):
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        found = [on_rank(clip, partition, CPContext(groups[rank % 2]))]
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "frames"))
        context = CPContext(mesh=mesh, mesh_axis="frames")
        assert context.global_rank(context.rank) == rank
        found.append(on_rank(clip, partition, context))
        world = CPContext(dist.group.WORLD)
        wide = FramePartition((1, 2, 0, 4))
        return found, on_rank(clip, wide, world)

    ranks = run_ranks(4, worker)
    for pair in ((0, 2), (1, 3)):
        compare(clip, partition, [ranks[rank][0][0] for rank in pair], 1e-10)
    for pair in ((0, 1), (2, 3)):
        compare(clip, partition, [ranks[rank][0][1] for rank in pair], 1e-10)
    compare(clip, FramePartition((1, 2, 0, 4)), [wide for _, wide in ranks], 1e-10)


@pytest.mark.ranks
def test_one_exchange_per_pass_with_the_bytes_promised():
    """4 D^2 + 2 D numbers forward for both directions, 2 D^2 + 2 D backward, and D^2 + D more with a final state."""
    cases = {
        "both": (Clip(final=False), 4 * D * D + 2 * D, 2 * D * D + 2 * D),
        "final": (Clip(), 4 * D * D + 2 * D, 3 * D * D + 3 * D),
        "one": (Clip(direction="forward", final=False), 3 * D * D + D, D * D + D),
        "numerator": (Clip(kind="numerator", final=False), 3 * D * D, 2 * D * D),
    }

    def worker(rank: int):
        context, partition = CPContext(dist.group.WORLD), FramePartition((3, 0, 4))
        counts = {}
        for name, (clip, _, _) in cases.items():
            with count_exchanges() as seen:
                on_rank(clip, partition, context)
            counts[name] = (seen.labels, seen.sent)
        with count_exchanges() as seen:
            on_rank(Clip(final=False), partition, context.replace(save_transitions=False))
        counts["sent again"] = (seen.labels, seen.sent)
        return counts

    for counts in run_ranks(3, worker):
        for name, (_, forward, backward) in cases.items():
            labels, sent = counts[name]
            assert [label.split()[-1] for label in labels] == ["forward", "backward"]
            for found, promised in zip(sent, (forward, backward), strict=True):
                assert 0 <= found - 8 * B * H * promised < 16 * 8  # blocks start on 16 bytes
        assert counts["sent again"][1][1] - counts["both"][1][1] == 8 * B * H * 2 * D * D


@pytest.mark.ranks
def test_frozen_rank_no_grad_and_unused_output():
    """FC-D07: a rank without gradients takes part; no_grad everywhere works; join_backward ties an unused output."""
    clip, partition = Clip(initial=False, final=False), FramePartition((3, 4))

    def worker(rank: int):
        context = CPContext(dist.group.WORLD)
        leaves = shard_leaves(clip, partition, rank)
        arguments = shard_arguments(clip, partition, rank, leaves)
        if rank == 0:
            arguments = {k: x.detach() if isinstance(x, torch.Tensor) else x for k, x in arguments.items()}
        output = cp_frame_gdn(context=context, partition=partition, **arguments).output
        assert output.requires_grad
        loss = output.square().sum() if rank == 1 else join_backward(torch.zeros((), dtype=output.dtype), output)
        loss.backward()
        with torch.no_grad(), count_exchanges() as seen:
            quiet = cp_frame_gdn(context=context, partition=partition, **arguments).output
        assert not quiet.requires_grad
        assert seen.total == 1
        return output.detach(), leaves["qkv"].grad

    (_, frozen), (_, trained) = run_ranks(2, worker)
    assert frozen is None
    leaves = {name: x.requires_grad_() for name, x in clip.tensors().items()}
    whole = gdn_kernels.frame_gdn(**clip.arguments(leaves, range(7)))
    whole.output[:, 9:].square().sum().backward()
    assert torch.allclose(
        trained, leaves["qkv"].grad[:, 9:], rtol=0, atol=1e-10 * float(leaves["qkv"].grad.abs().max())
    )


@pytest.mark.ranks
def test_samples_do_not_mix():
    """Perturbing one sample leaves the other's bits alone, on every rank."""
    clip, partition = Clip(), FramePartition((3, 4))

    def worker(rank: int):
        context = CPContext(dist.group.WORLD)
        arguments = shard_arguments(clip, partition, rank, shard_leaves(clip, partition, rank))
        one = cp_frame_gdn(context=context, partition=partition, **arguments).output
        arguments["qkv"] = arguments["qkv"].detach().clone()
        arguments["qkv"][0] += 1
        return torch.equal(one[1], cp_frame_gdn(context=context, partition=partition, **arguments).output[1])

    assert run_ranks(2, worker) == [True, True]


@pytest.mark.parametrize("kind", ["output", "raw", "numerator"])
def test_one_rank_is_the_local_operation_to_the_last_bit(kind):
    clip, partition = Clip(kind=kind, starts=(0, 3)), FramePartition((7,))
    local = {"output": "frame_gdn", "raw": "frame_gdn_raw", "numerator": "frame_gdn_numerator"}[kind]
    arguments = clip.arguments(clip.tensors(), range(7))
    here = results_of(getattr(gdn_kernels, local)(chunk_starts=clip.starts, **arguments))
    with count_exchanges() as seen:
        there = results_of(
            CP_OPS[kind](context=CPContext.single(), partition=partition, chunk_starts=clip.starts, **arguments)
        )
    assert all(torch.equal(here[name], there[name]) for name in here)
    assert seen.total == 0


def test_types_are_checked_before_anything_else():
    arguments = Clip().arguments(Clip().tensors(), range(7))
    with pytest.raises(TypeError, match="context must be a CPContext, got str"):
        cp_frame_gdn(context="world", **arguments)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="partition must be a FramePartition or None, got tuple"):
        cp_frame_gdn(context=CPContext.single(), partition=(7,), **arguments)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="as many ranks as the context, 1, got 2"):
        cp_frame_gdn(context=CPContext.single(), partition=FramePartition((3, 4)), **arguments)
    with pytest.raises(RuntimeError, match=r"beta must have F = 6 frames.*got 7"):
        cp_frame_gdn(context=CPContext.single(), partition=FramePartition((6,)), **arguments)


@pytest.mark.ranks
def test_a_rank_reads_no_slot_that_it_must_not():
    """Under ``validate="always"`` those slots hold NaN; results are what they are without."""
    clip, partition = Clip(starts=(0, 4), masked=True), FramePartition((3, 0, 4))

    def worker(rank: int):
        return on_rank(clip, partition, CPContext(dist.group.WORLD, validate="always"))

    compare(clip, partition, run_ranks(3, worker), 1e-10, 1e-10)
