"""What a rank must not read holds NaN under validate="always", and is not read."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from clips import Clip, compare, gradients, results_of, shard_arguments, shard_leaves, shard_loss
from ranks import run_ranks

from gdn_cp import CPContext, FramePartition, cp_frame_gdn
from gdn_cp.frame_gdn import make_plan
from gdn_cp.unread import hide_backward, hide_forward
from gdn_kernels.frame_gdn.op import frame_gdn_arguments

CLIPS = [
    Clip(direction=direction, initial=state, final=state, starts=starts)
    for direction, state, starts in itertools.product(
        ("forward", "reverse", "bidirectional"), (True, False), (None, (0, 2, 5))
    )
]


@pytest.mark.ranks
@pytest.mark.parametrize("save", [True, False])
def test_nothing_hidden_is_read(save: bool) -> None:
    """FC-D06: NaN in every slot that nobody may read leaves results and gradients those of one device."""
    partition = FramePartition((3, 0, 4))

    def worker(rank: int) -> list[tuple[dict, dict]]:
        context, found = CPContext(dist.group.WORLD, validate="always", save_transitions=save), []
        for clip in CLIPS:
            leaves = shard_leaves(clip, partition, rank)
            arguments = shard_arguments(clip, partition, rank, leaves)
            result = cp_frame_gdn(context=context, partition=partition, chunk_starts=clip.starts, **arguments)
            results = results_of(result)
            grads = gradients(shard_loss(clip, partition, rank, results), leaves)
            found.append(({name: x.detach() for name, x in results.items()}, grads))
        return found

    for clip, ranks in zip(CLIPS, zip(*run_ranks(3, worker), strict=True), strict=True):
        compare(clip, partition, ranks, 1e-10)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_what_is_hidden(rank: int) -> None:
    """A causal call without states reads ranks before it forward and ranks after it backward, its own slot never."""
    clip = Clip(direction="forward", initial=False, final=False)
    given = clip.arguments(clip.tensors(), range(7))
    defaults = dict(chunk_starts=None, frame_valid=None, initial_state=None, norm_eps=1e-5, precision=None, impl="auto")
    checked = frame_gdn_arguments(**{**defaults, **given}, divide=True)
    plan = make_plan(*checked, rank, 3, None, None, has_final=False, save_transitions=True)
    layout = plan.forward_layout()
    forward = layout.unpack(hide_forward(plan, torch.zeros(3, layout.offsets[-1])))
    backward = plan.backward_layout().unpack(hide_backward(plan, torch.zeros(3, plan.backward_layout().offsets[-1])))
    for peer in range(3):
        for stream in ("kv", "z"):
            assert bool(forward[f"forward_{stream}"][peer].isnan().all()) == (peer >= rank)
            assert bool(forward[f"transition_{stream}"][peer].isnan().all()) == (peer == rank)
            assert bool(backward[f"forward_{stream}"][peer].isnan().all()) == (peer <= rank)
