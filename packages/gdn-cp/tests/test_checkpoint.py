"""Exchanges of checkpointed calls, counted, and their gradients."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from clips import Clip, gradients, results_of, shard_arguments, shard_leaves, shard_loss
from ranks import run_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gdn_cp import CPContext, FramePartition, count_exchanges, cp_frame_gdn, halo_exchange, keep_exchanges

pytestmark = pytest.mark.ranks
CLIP, PARTITION = Clip(), FramePartition((3, 0, 4))
WAYS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "reentrant": {"use_reentrant": True},
    "plain": {"use_reentrant": False},
    "kept": {"use_reentrant": False, "context_fn": keep_exchanges},
}


def step(rank: int, context: CPContext, keywords: dict[str, Any] | None) -> dict[str, Tensor]:
    """Return the gradients of a halo exchange and the recurrence under a checkpoint."""
    leaves = shard_leaves(CLIP, PARTITION, rank)
    arguments = shard_arguments(CLIP, PARTITION, rank, leaves)
    state = arguments.pop("initial_state")

    def block(qkv: Tensor, kv: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        wide = halo_exchange(qkv.unflatten(1, (-1, 3)), 1, 1, 1, context, PARTITION)
        near = wide[:, :-2] - wide[:, 2:] if PARTITION.counts[rank] else wide  # of an empty rank: empty, and reached
        mixed = qkv + near.flatten(1, 2)
        given = {**arguments, "qkv": mixed, "initial_state": type(state)(kv, z)}
        result = results_of(cp_frame_gdn(context=context, partition=PARTITION, **given))
        return result["output"], result["final_kv"], result["final_z"]

    given = (leaves["qkv"], leaves["kv"], leaves["z"])
    found = block(*given) if keywords is None else checkpoint(block, *given, **keywords)
    loss = shard_loss(CLIP, PARTITION, rank, dict(zip(("output", "final_kv", "final_z"), found, strict=True)))
    if keywords is not None and keywords["use_reentrant"]:
        loss.backward()
        return {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}
    return gradients(loss, leaves)


@pytest.mark.parametrize("validate", ["first", "always"])
def test_a_checkpoint_repeats_exchanges_unless_they_are_kept(validate: str) -> None:
    """FC-D14: 1 + 1; 2 + 1 under a plain checkpoint of either kind; 1 + 1 where they are kept. Same gradients."""

    def worker(rank: int) -> dict[str, tuple[dict[str, int], dict[str, Tensor]]]:
        context, found = CPContext(dist.group.WORLD, validate=validate), {}
        for name, keywords in WAYS.items():
            with count_exchanges() as seen:
                grads = step(rank, context, keywords)
            found[name] = (dict(Counter(seen.labels)), grads)
        return found

    for found in run_ranks(3, worker):
        for name, (counts, grads) in found.items():
            again = 2 if name in ("reentrant", "plain") else 1
            assert counts == {
                f"{op} {way}": again if way == "forward" else 1
                for op in ("cp_frame_gdn", "halo_exchange")
                for way in ("forward", "backward")
            }
            for leaf, expected in found["none"][1].items():
                assert torch.equal(grads[leaf], expected), (name, leaf)
