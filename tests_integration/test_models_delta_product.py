"""GatedDeltaProduct on ranks against one process: outputs, gradients of inputs and of every parameter."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from gdn_cp import CPContext, FramePartition, TokenPartition, count_exchanges
from gdn_models import GatedDeltaProduct, all_reduce_gradients, apply_context_parallel

C = 10
CROSSING, APART = (0, 4, 4, 9, 10, 16), (0, 5, 8, 16)
CUTS = {2: [(9, 7), (16, 0), (5, 11)], 3: [(5, 3, 8), (0, 6, 10), (6, 0, 10)], 4: [(1, 7, 0, 8)]}
VARIANTS = [{}, {"num_householder": 3, "value_heads": 4, "forget_gate": False}, {"conv_size": 0, "num_householder": 1}]


def make(options: dict[str, object]) -> GatedDeltaProduct:
    torch.manual_seed(4)
    layer = GatedDeltaProduct(**{"dim": C, "heads": 2, "head_dim": 4, **options}).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=torch.float64), alpha=0.3)
    return layer


def stream(batch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch)
    x, upstream = (torch.randn(batch, 16, C, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, upstream


def one_process(options: dict[str, object], bounds: tuple[int, ...] | None, batch: int) -> dict[str, Tensor]:
    layer, (x, upstream) = make(options), stream(batch)
    x.requires_grad_()
    y = layer(x, cu_seqlens=bounds)
    y.backward(upstream)
    return {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


def assert_close(found: Tensor, expected: Tensor, name: str) -> None:
    error = float((found - expected).abs().max() / expected.abs().max())
    assert error < 1e-10, f"{name}: {error:.1e}"


@pytest.mark.ranks
@pytest.mark.parametrize("bounds, batch", [(CROSSING, 1), (None, 2)], ids=["packed", "rows"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_equal_one_process(size: int, bounds: tuple[int, ...] | None, batch: int) -> None:
    """Sequences that cross one cut and two, uneven and empty shards; convolutions and states stay inside a sequence."""

    def worker(rank: int) -> list[dict[str, Tensor]]:
        context, found = CPContext(dist.group.WORLD), []
        for counts in CUTS[size]:
            for options in VARIANTS:
                layer = apply_context_parallel(make(options), context, TokenPartition(counts))
                x, upstream = (TokenPartition(counts).split(part, rank, 1) for part in stream(batch))
                x = x.clone().requires_grad_()
                y = layer(x, cu_seqlens=bounds)
                y.backward(upstream)
                all_reduce_gradients(layer, context)
                found.append({"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}})
        return found

    cases = [options for _ in CUTS[size] for options in VARIANTS]
    for options, *ranks in zip(cases, *run_ranks(size, worker), strict=True):
        expected = one_process(options, bounds, batch)
        for name in ("y", "x"):
            assert_close(torch.cat([found[name] for found in ranks], 1), expected[name], name)
        for name in expected.keys() - {"y", "x"}:
            for found in ranks:
                assert_close(found[name], expected[name], name)


@pytest.mark.ranks
def test_exchanges_are_counted_and_left_out_where_nothing_crosses() -> None:
    def worker(rank: int) -> list[list[str]]:
        context, partition, found = CPContext(dist.group.WORLD), TokenPartition((8, 8)), []
        layer = apply_context_parallel(make({}), context, partition)
        for bounds in (CROSSING, APART):
            with count_exchanges() as exchanges:
                layer(partition.split(stream(1)[0], rank, 1), cu_seqlens=bounds).sum().backward()
            found.append(exchanges.labels)
        return found

    for crossing, apart in run_ranks(2, worker):
        halos = [label for label in crossing if label.startswith("halo")]
        assert len(halos) == 2
        assert len(crossing) == 4
        assert apart == halos


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile asks inputs of a later graph for theirs
def test_compiled_ranks_equal_eager_ones() -> None:
    """The operation runs outside the graphs; they are compiled around it."""

    def worker(rank: int) -> tuple[int, float]:
        graphs = 0

        def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
            nonlocal graphs
            graphs += 1
            return graph

        context, partition = CPContext(dist.group.WORLD), TokenPartition((9, 7))
        layer = apply_context_parallel(make({"num_householder": 1}), context, partition)
        x = partition.split(stream(1)[0], rank, 1)
        found, grads = [], []
        for call in (layer, torch.compile(layer, backend=keep)):
            layer.zero_grad()
            y = call(x, cu_seqlens=CROSSING)
            y.square().sum().backward()
            found.append(y.detach())
            grads.append(torch.cat([p.grad.flatten() for p in layer.parameters()]))
        return graphs, max(float((a - b).abs().max()) for a, b in (found, grads))

    for graphs, difference in run_ranks(2, worker):
        assert graphs > 0
        assert difference < 1e-12


@pytest.mark.ranks
def test_what_ranks_do_not_support_says_so() -> None:
    def worker(rank: int) -> None:
        context, partition = CPContext(dist.group.WORLD), TokenPartition((8, 8))
        layer = apply_context_parallel(make({}), context, partition)
        x = torch.zeros(1, 8, C, dtype=torch.float64)
        with pytest.raises(NotImplementedError, match="state under context parallelism"):
            layer(x, state=layer.init_state(1))
        with pytest.raises(ValueError, match="x must have T = 8 tokens"):
            layer(x[:, :7])
        with pytest.raises(ValueError, match="cu_seqlens must start at 0, not decrease and end at T = 16"):
            layer(x, cu_seqlens=(0, 8))

    run_ranks(2, worker)


MISTAKES = {  # of one rank: what it passes otherwise, and what all ranks raise
    "x": ({"x": torch.zeros(1, 8, C + 1).double()}, "ValueError", "x must have shape [B, T, C = dim] = [1, 8, 10]"),
    "dtype": ({"x": torch.zeros(1, 8, C)}, "ValueError", "x must have dtype float64, got float32"),
    "type": ({"x": "tokens"}, "TypeError", "x must be a torch.Tensor, got str"),
    "tokens": ({"x": torch.zeros(1, 7, C).double()}, "ValueError", "x must have T = 8 tokens"),
    "cu_seqlens": ({"cu_seqlens": (0, 8)}, "ValueError", "end at T = 16, got (0, 8)"),
    "partition": ({"partition": FramePartition((8, 8))}, "TypeError", "partition must be a TokenPartition or None"),
    "backend": ({"backend": "unknown"}, "ValueError", "backend must be one of 'auto', 'torch', 'fla', got 'unknown'"),
}


@pytest.mark.ranks
@pytest.mark.parametrize("conv_size", [0, 4])
def test_a_mistake_of_one_rank_is_an_error_on_all(conv_size: int) -> None:
    """FC-D05: within seconds, of the same class, and named; nobody is left waiting, with a halo exchange or without."""

    def worker(rank: int) -> dict[str, tuple[str, str]]:
        partition, found = TokenPartition((8, 8)), {}
        for name, (changes, _, _) in MISTAKES.items():
            layer = make({"conv_size": conv_size})
            apply_context_parallel(layer, CPContext(dist.new_group([0, 1])), partition)
            given = {"x": torch.zeros(1, 8, C).double(), **(changes if rank == 1 else {})}
            backend = given.pop("backend", None)
            if backend is not None:
                object.__setattr__(layer.config, "backend", backend)
            with pytest.raises((ValueError, TypeError)) as caught:
                layer(**given)
            found[name] = type(caught.value).__name__, str(caught.value)
        return found

    for rank, found in enumerate(run_ranks(2, worker, timeout=5.0)):
        for name, (_, kind, text) in MISTAKES.items():
            assert found[name][0] == kind, name
            assert text in found[name][1], name
            assert ("rank 1: " in found[name][1]) == (rank == 0), name
