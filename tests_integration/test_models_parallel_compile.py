"""Blocks over gloo ranks under torch.compile: one graph, the exchanges, the numbers and the gradients of eager."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_cases import Case, clip_of, error, make
from ranks import run_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gdn_cp import CPContext, FramePartition, count_exchanges, keep_exchanges
from gdn_models import BidirectionalGDN, apply_context_parallel

pytestmark = pytest.mark.ranks
PARTITION = FramePartition((2, 1))
CASE = Case(BidirectionalGDN, PARTITION.counts, options={"conv_qv": True})
EXCHANGES = {f"{op} {way}": 1 for op in ("cp_frame_gdn", "halo_exchange") for way in ("forward", "backward")}


def shard(rank: int) -> tuple[tuple[int, int, int], Tensor, Tensor]:
    span = PARTITION.span(rank)
    x, upstream = (y[:, span.start : span.stop].reshape(2, -1, 12) for y in clip_of(CASE))
    return (len(span), *CASE.spatial), x.detach(), upstream


def step(block: Any, call: Any, rank: int, *, frozen: bool = False) -> tuple[dict[str, int], list[Tensor]]:
    """Return the exchanges of a training step, its output and its gradients."""
    grid, x, upstream = shard(rank)
    for parameter in block.parameters():
        parameter.grad = None
        parameter.requires_grad_(not frozen)
    x = x.clone().requires_grad_(not frozen)
    with count_exchanges() as seen:
        y = call(x, grid)
        y.backward(upstream)
    grads = [x.grad, *(p.grad for p in block.parameters())]
    return dict(Counter(seen.labels)), [y.detach(), *(g for g in grads if g is not None)]


# tracing makes an instance of every autograd.Function it meets, which torch itself warns about
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning")
def test_a_block_over_ranks_compiles_into_one_graph() -> None:
    """FC-I08, FC-D14: full graph; eager's numbers; 1 + 1 exchanges, also checkpointed; a frozen rank takes part."""

    def worker(rank: int) -> dict[str, tuple[dict[str, int], list[Tensor]]]:
        context = CPContext(dist.group.WORLD, validate="always", force_backward=True)
        block = apply_context_parallel(make(CASE), context, PARTITION)

        def checkpointed(x: Tensor, grid: tuple[int, int, int]) -> Tensor:
            y: Tensor = checkpoint(block, x, grid, use_reentrant=False, context_fn=keep_exchanges)
            return y

        found = {"eager": step(block, block, rank)}
        for name, call in (("compiled", block), ("checkpointed", checkpointed)):
            found[name] = step(block, torch.compile(call, fullgraph=True, backend="aot_eager"), rank)
        found["frozen, eager"] = step(block, block, rank, frozen=rank == 0)
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
        found["frozen"] = step(block, compiled, rank, frozen=rank == 0)
        return found

    for rank, found in enumerate(run_ranks(2, worker, limit=120.0)):
        for name, (counts, values) in found.items():
            assert counts == EXCHANGES, (name, rank)
            expected = found["frozen, eager" if name == "frozen" else "eager"][1] if name != "frozen, eager" else values
            assert len(values) == len(expected)
            for x, y in zip(values, expected, strict=True):
                assert error(x, y) < 1e-12, (name, rank)
