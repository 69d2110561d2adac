"""Every cut of a clip into ranks, in one process, against one device: results and all gradients."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from clips import Clip, compare, gradients, results_of, shard_arguments, shard_leaves, shard_loss, whole

from gdn_cp import FramePartition, simulate
from gdn_cp.cost_model import Link

CUTS_CHAINS = Link("no latency, no bandwidth", 1e-3, 1e-3)  # chains go in 8 blocks
SIMULATED = {"output": simulate.frame_gdn, "raw": simulate.frame_gdn_raw, "numerator": simulate.frame_gdn_numerator}


def compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    return [counts for counts in itertools.product(range(total + 1), repeat=parts) if sum(counts) == total]


def run(clip: Clip, partition: FramePartition, **options: Any):
    leaves = [shard_leaves(clip, partition, rank) for rank in range(partition.size)]
    shards = [shard_arguments(clip, partition, rank, own) for rank, own in enumerate(leaves)]
    for shard in shards:
        shard["chunk_starts"] = clip.starts
    eps = {"eps": shards[0].pop("eps")} if clip.kind == "output" else {}
    for shard in shards[1:]:
        shard.pop("eps", None)
    results = [results_of(result) for result in SIMULATED[clip.kind](shards, partition, **eps, **options)]
    loss = sum(shard_loss(clip, partition, rank, found) for rank, found in enumerate(results))
    flat = {f"{rank}.{name}": x for rank, own in enumerate(leaves) for name, x in own.items()}
    grads = gradients(loss, flat)
    return [
        (found, {name: grads[f"{rank}.{name}"] for name in own})
        for rank, (found, own) in enumerate(zip(results, leaves, strict=True))
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_every_partition_of_seven_frames_equals_one_device(size):
    """FC-D01, FC-D09, FC-D12: uneven, empty and single-frame shards; all gradients, states in and out; 1e-10."""
    cuts = compositions(7, size)
    for counts in cuts:
        partition = FramePartition(counts)
        compare(Clip(), partition, run(Clip(), partition), 1e-10)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("schedule", ["chain", "doubling"])
def test_every_partition_of_seven_frames_equals_one_device_on_other_schedules(size, schedule):
    """FC-D01, FC-D09, FC-D12, without a final state; the chain in blocks."""
    clip = Clip(final=False)
    for counts in compositions(7, size):
        partition = FramePartition(counts)
        compare(clip, partition, run(clip, partition, schedule=schedule, link=CUTS_CHAINS), 1e-10)


@pytest.mark.parametrize("kind", ["output", "raw", "numerator"])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("schedule", ["chain", "doubling"])
def test_kinds_and_directions_equal_one_device_on_other_schedules(kind, direction, schedule):
    """More ranks than frames, masks, chunk starts, no initial state; kept transitions or not makes no difference."""
    clip = Clip(kind=kind, direction=direction, masked=True, starts=(0, 2, 5), final=False)
    for counts in [(7,), (3, 4), (2, 0, 5), (0, 1, 6, 0), (1,) * 7 + (0, 0)]:
        partition = FramePartition(counts)
        found = run(clip, partition, schedule=schedule)
        compare(clip, partition, found, 1e-10)
        again = run(clip, partition, schedule=schedule, save_transitions=False)
        assert all(torch.equal(x[name], y[name]) for (x, _), (y, _) in zip(found, again, strict=True) for name in x)
    bare = dataclasses.replace(clip, initial=False)
    compare(bare, FramePartition((3, 4)), run(bare, FramePartition((3, 4)), schedule=schedule), 1e-10)


def test_schedules_settle_before_anything_runs():
    clip, partition = Clip(), FramePartition((3, 4))
    compare(clip, partition, run(clip, partition, schedule="auto", link=CUTS_CHAINS), 1e-10)
    with pytest.raises(NotImplementedError, match="schedule='chain' does not bring the final state to every rank"):
        run(clip, partition, schedule="chain")
    with pytest.raises(ValueError, match="schedule must be one of 'auto', 'all_gather', 'chain', 'doubling', got 'st"):
        run(clip, partition, schedule="star")


@pytest.mark.parametrize("kind", ["output", "raw", "numerator"])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("masked", [False, True])
def test_kinds_and_directions_equal_one_device(kind, direction, masked):
    clip = Clip(kind=kind, direction=direction, masked=masked)
    for counts in [(7,), (3, 4), (2, 0, 5), (0, 1, 6, 0), (1,) * 7 + (0, 0)]:
        partition = FramePartition(counts)
        compare(clip, partition, run(clip, partition), 1e-10)


@pytest.mark.parametrize("starts", [(0, 3), (1, 2, 3, 5), (2, 4), (5,), (0, 1, 2, 3, 4, 5, 6)])
@pytest.mark.parametrize("masked", [False, True])
def test_chunk_starts_are_global(starts, masked):
    """Chunks that straddle ranks, start on a boundary, hold one frame, start inside an invalid frame."""
    clip = Clip(starts=starts, masked=masked)
    for counts in [(3, 4), (2, 2, 3), (0, 5, 2), (1, 1, 1, 4), (4, 0, 3)]:
        partition = FramePartition(counts)
        compare(clip, partition, run(clip, partition), 1e-10)


@pytest.mark.parametrize("ranks", [(0,), (1,), (2,)])
def test_loss_on_one_rank_reaches_the_others(ranks):
    """FC-D03: in the forward direction a loss on the first rank leaves exact zeros elsewhere."""
    partition = FramePartition((3, 2, 2))
    for direction in ("forward", "bidirectional"):
        clip = Clip(direction=direction, loss_ranks=ranks, final_loss_ranks=())
        found = run(clip, partition)
        compare(clip, partition, found, 1e-10)
        reached = [bool(grads["qkv"].any()) for _, grads in found]
        assert reached == ([rank <= ranks[0] for rank in range(3)] if direction == "forward" else [True] * 3)


@pytest.mark.parametrize("final_loss_ranks", [(0,), (2,), None])
def test_final_state_gradients_are_summed_over_ranks(final_loss_ranks):
    clip = Clip(loss_ranks=(), final_loss_ranks=final_loss_ranks, direction="forward")
    partition = FramePartition((3, 0, 4))
    found = run(clip, partition)
    compare(clip, partition, found, 1e-10)
    assert torch.equal(found[0][0]["final_kv"], found[2][0]["final_kv"])


def test_states_are_optional():
    partition = FramePartition((2, 5))
    for initial, final in itertools.product([False, True], repeat=2):
        clip = Clip(initial=initial, final=final)
        compare(clip, partition, run(clip, partition), 1e-10)


def test_transitions_may_be_sent_again():
    partition = FramePartition((2, 1, 4))
    clip = Clip(starts=(0, 3))
    kept, sent = run(clip, partition), run(clip, partition, save_transitions=False)
    for (_, one), (_, other) in zip(kept, sent, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_fp32_is_as_accurate_over_ranks_as_on_one_device():
    """FC-N09, FC-D15: maps and messages are fp32; no trend with the number of ranks."""
    exact = whole(Clip(initial=False, final=False), FramePartition((7,)))[0]["output"]
    clip = Clip(initial=False, final=False, dtype=torch.float32)
    errors = []
    for counts in [(7,), (3, 4), (1,) * 7]:
        output = torch.cat([found["output"].detach() for found, _ in run(clip, FramePartition(counts))], 1)
        errors.append(float((output.double() - exact).norm() / exact.norm()))
    assert max(errors) <= 2 * errors[0] + 1e-7


def test_the_comparison_can_fail():
    clip, partition = Clip(), FramePartition((3, 4))
    found = run(clip, partition)
    found[1][1]["decay"][0, 0, 0] += 1e-6
    with pytest.raises(AssertionError, match="gradient of decay on rank 1"):
        compare(clip, partition, found, 1e-10)


def test_halo_is_the_adjoint_of_its_gradient():
    """<Hx, y> = <x, H'y> for every halo of at most 4 frames over shards of 0, 1 and more frames."""
    for counts in [(3, 1, 0, 2), (1, 1, 1, 1), (0, 5), (2, 4)]:
        partition = FramePartition(counts)
        for left, right in itertools.product(range(5), repeat=2):
            xs = [torch.randn(2, n, 3, dtype=torch.float64, requires_grad=True) for n in counts]
            ys = simulate.halo(xs, left, right, 1, partition)
            clip = torch.nn.functional.pad(torch.cat(xs, 1), (0, 0, left, right))
            for rank, y in enumerate(ys):
                start = partition.starts[rank]
                length = left + counts[rank] + right if counts[rank] else 0
                assert torch.equal(y, clip[:, start : start + length])
            ups = [torch.randn_like(y) for y in ys]
            grads = torch.autograd.grad(
                sum((y * up).sum() for y, up in zip(ys, ups, strict=True)), xs, allow_unused=True
            )
            there = sum((y * up).sum() for y, up in zip(ys, ups, strict=True))
            back = sum((x * g).sum() for x, g in zip(xs, grads, strict=True) if g is not None)
            assert abs(float(there.detach()) - float(back.detach())) <= 1e-12 * (1 + abs(float(there.detach())))


def test_shards_must_match_the_partition():
    clip, partition = Clip(), FramePartition((3, 4))
    with pytest.raises(ValueError, match="one entry per rank, 2, got 0"):
        simulate.frame_gdn([], partition)
    leaves = [shard_leaves(clip, partition, rank) for rank in range(2)]
    shards = [shard_arguments(clip, partition, rank, own) for rank, own in enumerate(leaves)]
    for shard in shards:
        shard.pop("eps")
    with pytest.raises(ValueError, match="rank 0 must have F = 4, got 3"):
        simulate.frame_gdn(shards, FramePartition((4, 3)))
