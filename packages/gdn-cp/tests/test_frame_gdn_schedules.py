"""Schedules on gloo ranks against one device: per rank, every gradient, groups, exchanges, and how auto decides."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from clips import B, Clip, D, H, compare, gradients, results_of, shard_arguments, shard_leaves, shard_loss
from ranks import RankError, run_ranks

from gdn_cp import (
    CPContext,
    FramePartition,
    collectives,
    count_exchanges,
    cp_frame_gdn,
    cp_frame_gdn_numerator,
    cp_frame_gdn_raw,
)
from gdn_cp.cost_model import Link

pytestmark = pytest.mark.ranks
OPS = {"output": cp_frame_gdn, "raw": cp_frame_gdn_raw, "numerator": cp_frame_gdn_numerator}
CUTS = {
    2: [(4, 3), (7, 0), (0, 7)],
    3: [(3, 1, 3), (0, 3, 4), (3, 0, 4), (3, 4, 0)],
    4: [(2, 2, 2, 1), (1, 0, 0, 6), (0, 3, 4, 0)],
}
SLOW = Link("no latency, no bandwidth", 1e-3, 1e-3)  # chains go in 8 blocks, one per row of B * H
SCHEDULES = {"all_gather": {}, "chain": {}, "chain in blocks": {"schedule": "chain", "link": SLOW}, "doubling": {}}


def context_of(name: str, group: Any = None, **options: Any) -> CPContext:
    return CPContext(group or dist.group.WORLD, **{"schedule": name, **SCHEDULES.get(name, {}), **options})


def on_rank(clip: Clip, partition: FramePartition, context: CPContext):
    leaves = shard_leaves(clip, partition, context.rank)
    arguments = shard_arguments(clip, partition, context.rank, leaves)
    result = OPS[clip.kind](context=context, partition=partition, chunk_starts=clip.starts, **arguments)
    results = results_of(result)
    grads = gradients(shard_loss(clip, partition, context.rank, results), leaves)
    return {name: x.detach() for name, x in results.items()}, grads


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_ranks_equal_one_device_in_fp64(size, name):
    """FC-D01, FC-D04, FC-D09, FC-D12, FC-D13: uneven and empty ranks, both streams, chunks and masks; 1e-10."""
    cases = [
        (Clip(kind=kind, direction=direction, starts=starts, masked=masked, final=False), counts)
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

    def worker(rank: int):
        context = context_of(name)
        return [on_rank(clip, FramePartition(counts), context) for clip, counts in cases]

    for (clip, counts), ranks in zip(cases, zip(*run_ranks(size, worker), strict=True), strict=True):
        compare(clip, FramePartition(counts), ranks, 1e-10)


@pytest.mark.parametrize("name", ["chain in blocks", "doubling"])
def test_loss_on_one_rank_and_groups_that_are_not_world(name):
    """FC-D02, FC-D03: {1, 3} and {0, 2} of four at once; the first thing a group does is a message."""
    partition = FramePartition((3, 4))
    clips = [
        Clip(final=False, loss_ranks=(rank,), direction=d) for rank in (0, 1) for d in ("forward", "bidirectional")
    ]

    def worker(rank: int):
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        context = context_of(name, groups[rank % 2], validate="never")
        return [on_rank(clip, partition, context) for clip in clips]

    ranks = run_ranks(4, worker)
    for pair in ((0, 2), (1, 3)):
        for i, clip in enumerate(clips):
            compare(clip, partition, [ranks[rank][i] for rank in pair], 1e-10)


def test_one_exchange_per_pass_with_the_bytes_promised():
    """Chain: D^2 + D numbers to each neighbour that follows. Doubling: 3 D^2 + D per direction and round."""
    clip, partition, number = Clip(final=False), FramePartition((3, 0, 4)), 8 * B * H
    state, window = number * (D * D + D), number * (3 * D * D + D)
    # (bytes, messages) of ranks 0, 1, 2: forward lines and reverse lines, in mirror image in the other pass
    promised = {
        "chain": [(state, 1), (2 * state, 2), (state, 1)],
        "chain in blocks": [(state, 8), (2 * state, 16), (state, 8)],
        "doubling": [(2 * window, 2), (2 * window, 2), (2 * window, 2)],
    }

    def worker(rank: int):
        counts = {}
        for name in promised:
            with count_exchanges() as seen:
                on_rank(clip, partition, context_of(name))
            counts[name] = (seen.labels, list(zip(seen.sent, seen.messages, strict=True)))
        return counts

    for rank, counts in enumerate(run_ranks(3, worker)):
        for name, of_ranks in promised.items():
            labels, found = counts[name]
            assert labels == ["cp_frame_gdn forward", "cp_frame_gdn backward"]
            assert found == [of_ranks[rank]] * 2


def test_auto_follows_the_model_and_takes_all_gather_for_a_final_state():
    def worker(rank: int):
        context, partition, seen = CPContext(dist.group.WORLD, link=SLOW), FramePartition((3, 4)), []
        for final in (False, True):
            with count_exchanges() as exchanges:
                results, grads = on_rank(Clip(final=final), partition, context)
            seen.append((results, grads, exchanges.sent[0]))
        return seen

    ranks = run_ranks(2, worker)
    for i, final in enumerate((False, True)):
        compare(Clip(final=final), FramePartition((3, 4)), [rank[i][:2] for rank in ranks], 1e-10)
    assert [sent for _, _, sent in ranks[0]] == [8 * B * H * (D * D + D), 8 * B * H * (4 * D * D + 2 * D)]


def test_auto_gathers_where_messages_would_go_over_the_host(monkeypatch):
    """Ranks on GPUs over gloo: the backend and the device decide, which all ranks know."""

    def worker(rank: int):
        context = CPContext(dist.group.WORLD, link=SLOW)
        found = [collectives.sends_over_host(context, torch.device(kind)) for kind in ("cpu", "cuda")]
        monkeypatch.setattr(collectives, "sends_over_host", lambda context, device: True)
        with count_exchanges() as exchanges:
            on_rank(Clip(final=False), FramePartition((3, 4)), context)
        return found, exchanges.sent[0]

    gathered = 8 * B * H * (4 * D * D + 2 * D)
    assert run_ranks(2, worker) == [([False, True], gathered)] * 2


@pytest.mark.parametrize(
    ("before", "other", "text"),
    [
        ("all_gather", {"schedule": "doubling"}, "schedule: rank 0 has chain, rank 1 has doubling"),
        (None, {"schedule": "auto"}, "schedule: rank 0 has chain, rank 1 has all_gather"),
        ("doubling", {"link": SLOW}, "blocks of the chain: rank 0 has 1, rank 1 has 8"),
    ],
)
def test_ranks_that_disagree_on_the_schedule_are_told(before, other, text):
    """FC-D05: a schedule is part of what a group compares before it first sends in that way."""
    clip, partition = Clip(final=False), FramePartition((3, 0, 4))

    def worker(rank: int) -> str:
        if before:
            on_rank(clip, partition, context_of(before))
        context = CPContext(dist.group.WORLD, **{"schedule": "chain", **(other if rank == 1 else {})})
        with pytest.raises(RuntimeError, match="cp_frame_gdn: ranks disagree on") as caught:
            on_rank(clip, partition, context)
        return str(caught.value)

    assert run_ranks(3, worker) == [f"cp_frame_gdn: ranks disagree on {text}"] * 3


def test_a_final_state_needs_all_gather_on_every_rank():
    def worker(rank: int) -> str:
        with pytest.raises(NotImplementedError) as caught:
            on_rank(Clip(), FramePartition((3, 4)), context_of("chain" if rank == 1 else "all_gather"))
        return str(caught.value)

    first, second = run_ranks(2, worker)
    assert second == "schedule='chain' does not bring the final state to every rank; use 'all_gather' or 'auto'"
    assert first == f"cp_frame_gdn: rank 1: {second}"


@pytest.mark.parametrize("schedule", ["chain", "doubling"])
def test_a_neighbour_that_never_comes_is_an_error_at_the_timeout(schedule):
    def worker(rank: int) -> str:
        context = CPContext(dist.group.WORLD, schedule=schedule, tag="blocks.3")
        partition, clip = FramePartition((3, 4)), Clip(final=False, direction="forward")
        on_rank(clip, partition, context)
        if rank == 0:
            return ""
        with pytest.raises(RuntimeError, match="did not complete") as caught:
            on_rank(clip, partition, context.replace(validate="never"))
        assert caught.value.__cause__ is not None
        return str(caught.value)

    found = run_ranks(2, worker, timeout=1.0)
    assert found[1] == "gdn_cp: exchange of cp_frame_gdn forward (tag blocks.3) did not complete on rank 1 of 2"


def test_the_comparison_over_ranks_can_fail():
    def worker(rank: int):
        results, grads = on_rank(Clip(final=False), FramePartition((3, 4)), context_of("chain"))
        return {name: x + 1e-6 * rank for name, x in results.items()}, grads

    with pytest.raises(AssertionError, match="output of rank 1") as caught:
        compare(Clip(final=False), FramePartition((3, 4)), run_ranks(2, worker), 1e-10)
    assert not isinstance(caught.value, RankError)
