"""The operator of a compiled graph: its fake and its gradient, and ranks whose graph has no backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from clips import Clip, compare, gradients, results_of, shard_arguments, shard_leaves, shard_loss
from ranks import run_ranks
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from gdn_cp import CPContext, FramePartition, cp_frame_gdn
from gdn_cp.frame_op import arguments_of
from gdn_kernels.frame_gdn.op import frame_gdn_arguments, numerator_arguments

pytestmark = pytest.mark.ranks
CLIPS = {
    "output": Clip(starts=(0, 2, 5), masked=True),
    "raw, reverse": Clip(kind="raw", direction="reverse"),
    "numerator": Clip(kind="numerator", initial=False),
}


def operator_arguments(clip: Clip, context: CPContext) -> tuple[Any, ...]:
    partition = FramePartition((clip.frames,))
    given = shard_arguments(clip, partition, 0, shard_leaves(clip, partition, 0))
    defaults: dict[str, Any] = {"precision": None, "impl": "auto", "frame_valid": None, "initial_state": None}
    if clip.kind == "numerator":
        op, checked = "cp_frame_gdn_numerator", numerator_arguments(**{**defaults, "chunk_starts": None, **given})
    else:
        given = {"norm_eps": 1e-5, "eps": 0.0, "divide": clip.kind == "output", "chunk_starts": None, **given}
        op, checked = "cp_frame_gdn", frame_gdn_arguments(**{**defaults, **given})
    arguments = arguments_of(op, context, partition, clip.starts, clip.final and clip.has_state, *checked)
    return tuple(x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in arguments)


@pytest.mark.parametrize("name", CLIPS)
def test_operator_keeps_the_rules_of_operators(name: str) -> None:
    """FC-I08: schema, fake implementation and autograd, on a group of one rank."""

    def worker(rank: int) -> dict[str, str]:
        context = CPContext(dist.group.WORLD)
        tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
        arguments = operator_arguments(CLIPS[name], context)
        return torch.library.opcheck(torch.ops.gdn_cp.frame_gdn.default, arguments, test_utils=tests)

    (found,) = run_ranks(1, worker)
    assert set(found.values()) == {"SUCCESS"}


def test_a_graph_without_a_backward_is_an_error_on_all_ranks() -> None:
    """FC-D07: a frozen rank compiles no backward unless its context has force_backward."""
    clip, partition = Clip(), FramePartition((3, 4))

    def worker(rank: int) -> str:
        context = CPContext(dist.group.WORLD)
        arguments = shard_arguments(clip, partition, rank, shard_leaves(clip, partition, rank))
        state = [x.detach().requires_grad_(rank == 1) for x in arguments["initial_state"]]
        arguments = {k: x.detach() if isinstance(x, Tensor) else x for k, x in arguments.items()}
        arguments["initial_state"] = type(arguments["initial_state"])(*state)

        @torch.compile(fullgraph=True, backend="aot_eager")
        def call() -> Tensor:
            return cp_frame_gdn(context=context, partition=partition, **arguments).output

        with pytest.raises(RuntimeError) as caught:
            call()
        first = str(caught.value)
        with pytest.raises(RuntimeError, match="has no backward"):
            call()  # no way to get past it the second time
        return first

    for message in run_ranks(2, worker):
        assert message.startswith("cp_frame_gdn: some rank needs a gradient, and the compiled graph of rank 0 has no ")
        assert message.endswith("give every rank a context with force_backward=True")


@pytest.mark.parametrize("schedule", ["chain", "doubling"])
def test_one_graph_serves_clips_of_several_lengths_on_other_schedules(schedule: str) -> None:
    """FC-I08: full graph, traced once for a dynamic number of frames, unlike any other size; one device's numbers."""
    cases = [(Clip(frames=sum(counts), final=False), FramePartition(counts)) for counts in ((5, 7), (7, 5), (10, 11))]

    def worker(rank: int) -> tuple[list[int], list[tuple[dict[str, Tensor], dict[str, Tensor]]]]:
        context = CPContext(dist.group.WORLD, schedule=schedule, validate="always")
        counter = CompileCounterWithBackend("aot_eager")

        @torch.compile(fullgraph=True, dynamic=True, backend=counter)
        def call(arguments: dict[str, Any]) -> Any:
            return cp_frame_gdn(context=context, **arguments)

        found, traced = [], []
        for clip, partition in cases:
            leaves = shard_leaves(clip, partition, rank)
            results = results_of(call(shard_arguments(clip, partition, rank, leaves)))
            loss = shard_loss(clip, partition, rank, results)
            found.append(({name: x.detach() for name, x in results.items()}, gradients(loss, leaves)))
            traced.append(counter.frame_count)
        return traced, found

    ranks = run_ranks(2, worker, limit=120.0)
    for traced, _ in ranks:
        assert traced[0] > 0
        assert traced == traced[:1] * len(cases), "a clip of another length is no new graph"
    for i, (clip, partition) in enumerate(cases):
        compare(clip, partition, [found[i] for _, found in ranks], 1e-10)
